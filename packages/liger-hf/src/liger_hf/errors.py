# SPDX-License-Identifier: Apache-2.0
"""The errors of adapting a model."""

from liger_core import LigerError


class ModelError(LigerError, TypeError):
    """The object is not a model that Liger can adapt in this way."""


class LogitsError(LigerError, RuntimeError):
    """Lazy logits were used in a way that cannot give the values that plain logits would."""
