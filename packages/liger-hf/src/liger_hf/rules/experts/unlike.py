# SPDX-License-Identifier: Apache-2.0
"""Report why experts that a model runs by its own code are not replaced."""

from itertools import permutations

from torch import Tensor, nn

ITSELF = "its experts are run by its own code, and not through Transformers' experts interface"
IN_A_LOOP = "each of its experts is a module, and a loop runs them one after the other"


def unlike(module: nn.Module) -> str | None:
    """Return why these experts are not replaced; None if the module has none, or if the rule sees them in a child."""
    if _has_stacked_weights(module):
        return ITSELF
    children = ((name, child) for name, child in module.named_children() if not name.startswith("shared"))
    child = next((child for name, child in children if name.endswith("experts")), None)
    # PEFT, DistributedDataParallel and others wrap the module that the rule knows, and do not have its attributes.
    if child is None or any(
        _has_stacked_weights(inner) or isinstance(getattr(inner, "has_gate", None), bool) for inner in child.modules()
    ):
        return None
    return IN_A_LOOP if isinstance(child, (nn.ModuleList, nn.ModuleDict)) else ITSELF


def _has_stacked_weights(module: nn.Module) -> bool:
    """Whether the module or its children have two matching weights that each stack the matrices of all experts."""
    owners = [owner for owner in (module, *module.children()) if not type(owner).__module__.startswith("torch.")]
    if not any("expert" in type(owner).__name__.lower() for owner in owners):
        return False
    weights = _stacked(module) or [w for owner in owners[1:] if len(stacked := _stacked(owner)) == 1 for w in stacked]
    return any(_fit(first, second) for first, second in permutations(weights, 2))


def _stacked(module: nn.Module) -> list[Tensor]:
    return [p for p in module.parameters(recurse=False) if p.dim() == 3 and p.shape[0] > 1]


def _fit(up: Tensor, down: Tensor) -> bool:
    """Whether the shapes are (experts, inner or 2 · inner, hidden) and (experts, hidden, inner), or both transposed."""
    (a, b), (c, d) = up.shape[1:], down.shape[1:]
    return (b == c and a in (d, 2 * d)) or (a == d and b in (c, 2 * c))
