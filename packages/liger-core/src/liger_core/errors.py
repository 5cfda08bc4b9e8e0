# SPDX-License-Identifier: Apache-2.0
"""Every error that Liger raises: a sentence of the form *op: what must hold, what came[, what to do]*."""

import difflib
from collections.abc import Iterable, Sequence


class LigerError(Exception):
    """The base class of every error that Liger raises."""


class ShapeError(LigerError, ValueError):
    """A tensor has a shape that the op does not support."""


class DtypeError(LigerError, TypeError):
    """A tensor has a dtype that the op does not support."""


class DeviceError(LigerError, ValueError):
    """Tensors of one call are on different devices."""


class OptionError(LigerError, ValueError):
    """An option has a value outside its range, or two options exclude each other."""


class TargetError(LigerError, IndexError):
    """A class index lies outside the vocabulary."""


class GradientError(LigerError, RuntimeError):
    """A gradient was requested that the op does not define."""


class BackendError(LigerError, RuntimeError):
    """The selected backend is unknown, unavailable, or does not support this call."""


class PluginError(LigerError, RuntimeError):
    """A plugin violates the contract of the hooks."""


class Unsupported(Exception):
    """The exception with which an implementation declines a call, before any work."""


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Return " Did you mean 'x'?" for the known name that is most like this one, or "" if none is similar enough."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)
    return f" Did you mean {close[0]!r}?" if close else ""


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first names separated by commas, and the number of those left out."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
