# SPDX-License-Identifier: Apache-2.0
"""The errors of options that several commands share."""

from liger_core.errors import DeviceError, OptionError


class SetupError(OptionError):
    """A setup has a value out of range, or two values that exclude each other.

    command  name of the command, which begins the message; takes_options sets it
    """

    command = "train"

    def __str__(self) -> str:
        return f"{self.command}: {super().__str__()}"


class SetupDeviceError(SetupError, DeviceError):
    """A setup needs another device."""
