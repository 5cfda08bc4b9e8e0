# SPDX-License-Identifier: Apache-2.0
"""The errors of the options that several commands share."""

from __future__ import annotations

from liger_core.errors import DeviceError, OptionError


class SetupError(OptionError):
    """A setup has a value outside its range, or two that exclude each other.

    command  the one whose options are wrong, which begins the message; set by takes_options
    """

    command = "train"

    def __str__(self) -> str:
        return f"{self.command}: {super().__str__()}"


class SetupDeviceError(SetupError, DeviceError):
    """A setup needs another device."""
