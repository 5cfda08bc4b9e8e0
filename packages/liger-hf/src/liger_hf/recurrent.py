# SPDX-License-Identifier: Apache-2.0
"""Warn that layers which mix tokens in other ways than attention do not separate packed documents.

Where `position_ids` start again, attention masks earlier tokens, but a recurrent state or a short convolution
continues. Transformers ends them only by `seq_idx` and `cu_seq_lens_q`, and only in kernels of other packages; its own
PyTorch code ignores both.
"""

import inspect
from types import FunctionType

from torch import nn

from liger_hf.rebinding import innermost, names_in, unwrapped

NOTE = (
    "In {count} module{s} ({classes}), a state or a convolution passes from token to token whatever position_ids say: "
    "where documents are "
    "packed into one row, each sees those before it. Train such a model on one document per row."
)
# Names in a forward that keeps a state in the cache or the module; RWKV and xLSTM get an argument named `state`.
KEEPS = {"update_conv_state", "update_recurrent_state", "set_linear_cache", "conv1d_state"}


def note(model: nn.Module) -> str | None:
    """Return a warning about packed documents for this model; None if attention alone mixes its tokens."""
    kinds = {kind for kind in {type(module) for module in model.modules()} if keeps_a_state(kind)}
    modules = [module for module in model.modules() if type(module) in kinds]
    # Models and blocks only pass the state to their layers.
    layers = [module for module in modules if sum(type(inner) in kinds for inner in module.modules()) == 1]
    classes = ", ".join(dict.fromkeys(type(layer).__name__ for layer in layers))
    return NOTE.format(count=len(layers), s="s" * (len(layers) > 1), classes=classes) if layers else None


def keeps_a_state(kind: type[nn.Module]) -> bool:
    """Return whether the forward of a module class of Transformers passes a state from token to token."""
    forward = innermost(unwrapped(kind.forward))
    if not isinstance(forward, FunctionType):
        return False
    state = inspect.signature(forward).parameters.get("state")
    return (state is not None and state.default is None) or not KEEPS.isdisjoint(names_in(forward.__code__))
