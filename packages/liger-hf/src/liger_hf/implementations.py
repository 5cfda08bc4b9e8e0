# SPDX-License-Identifier: Apache-2.0
"""Report which of Transformers' implementations a model uses, and which would be faster."""

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from types import ModuleType

from torch import nn

from liger_hf.private_transformers import attention_implementation, experts_implementation

# Transformers' decorator for functions that a package has a fast kernel for; it takes (name of the kernel, package).
FALLBACK = "use_kernel_func_from_hub_with_fallback"
DISTRIBUTIONS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}


def sentences(model: nn.Module) -> list[str]:
    """Return a sentence for each part with several implementations, with advice if a faster one is not used."""
    return [*_attention(model), *_experts(model), *_fallbacks(model)]


def _chosen(
    model: nn.Module, belongs: Callable[[nn.Module], bool], implementation: Callable[[nn.Module], str | None]
) -> str | None:
    """Return the implementation that the config of the first matching module names; None if no module matches."""
    module = next((module for module in model.modules() if belongs(module)), None)
    return None if module is None else implementation(module if hasattr(module, "config") else model)


def _attention(model: nn.Module) -> Iterator[str]:
    name = _chosen(model, lambda module: type(module).__name__.endswith("Attention"), attention_implementation)
    if name == "eager":
        yield (
            "Attention runs by eager PyTorch, which holds all scores; load the model with attn_implementation='sdpa' "
            "if its type supports it."
        )
    elif name:
        yield f"Attention runs by {name}."


def _experts(model: nn.Module) -> Iterator[str]:
    name = _chosen(model, lambda module: hasattr(module, "is_concatenated"), experts_implementation)
    if name == "eager":
        yield "Experts run one after the other in a loop; load the model with experts_implementation='grouped_mm'."
    elif name:
        yield f"Experts run by {name} where Liger does not replace them."


def _fallbacks(model: nn.Module) -> Iterator[str]:
    """Yield a sentence for each package whose kernels are missing."""
    files = dict.fromkeys(
        sys.modules[type(module).__module__] for module in model.modules() if type(module).__module__ in sys.modules
    )
    missing: dict[str, list[str]] = {}
    for file in files:
        for function, package in _kernels(file):
            if find_spec(package) is None and function not in missing.setdefault(package, []):
                missing[package].append(function)
    for package, functions in missing.items():
        if functions:
            yield (
                f"{', '.join(functions)}: a slow fallback in PyTorch, since {package} is not installed; "
                f"pip install {DISTRIBUTIONS.get(package, package)} (CUDA only)."
            )


@cache
def _kernels(file: ModuleType) -> tuple[tuple[str, str], ...]:
    """Return (kernel, package) for each function in a file that Transformers replaces by a kernel of a package."""
    if not file.__name__.startswith("transformers."):
        return ()
    try:
        tree = ast.parse(inspect.getsource(file))
    except (OSError, TypeError, SyntaxError):
        return ()
    kernels = []
    for decorator in (d for node in tree.body if isinstance(node, ast.FunctionDef) for d in node.decorator_list):
        match decorator:
            case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=kernel), ast.Constant(value=package), *_]):
                kernels += [(str(kernel), str(package))] if name == FALLBACK else []
    return tuple(kernels)
