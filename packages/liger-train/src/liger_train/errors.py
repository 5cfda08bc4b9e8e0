# SPDX-License-Identifier: Apache-2.0
"""The errors of options that several commands share, and what an error leaves behind."""

import traceback

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


def release_frames(error: BaseException | None) -> None:
    """Release what the frames of a caught error hold, before anything else runs.

    Before torch 2.13, a checkpointed layer that fails leaves its hooks of saved tensors to all later passes until then.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
