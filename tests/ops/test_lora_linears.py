# SPDX-License-Identifier: Apache-2.0
"""Facts about lora_linears that its samples do not say."""

from typing import Any

import torch
from torch import Tensor

from conformance.cases import in_float64, with_gradients
from fuzz import formulas
from liger_core import lora_linear, lora_linears, use
from liger_core.accuracy import error
from ops.agreement import leaf, products, saved

ROWS, INNER = 200, 64
# Outputs and rank of each layer.
LAYERS = (96, 8), (40, 4), (24, 4)
SUFFIXES = ("", "_2", "_3")


def call(device: torch.device, dtype: torch.dtype, adapter: torch.dtype, layers: int = 3) -> dict[str, Any]:
    given: dict[str, Any] = {"x": leaf(2, ROWS // 2, INNER, device=device, dtype=dtype), "scale": 2.0}
    for suffix, (outer, rank) in zip(SUFFIXES[:layers], LAYERS, strict=False):
        given[f"weight{suffix}"] = leaf(outer, INNER, device=device, dtype=dtype, scale=INNER**-0.5).detach()
        given[f"a{suffix}"] = leaf(rank, INNER, device=device, dtype=adapter, scale=INNER**-0.5)
        given[f"b{suffix}"] = leaf(outer, rank, device=device, dtype=adapter, scale=0.3)
    return given


def separately(x: Tensor, scale: float, **given: Any) -> tuple[Tensor, ...]:
    return tuple(
        lora_linear(x, *(given[f"{name}{suffix}"] for name in ("weight", "a", "b")), scale)
        for suffix in SUFFIXES
        if f"a{suffix}" in given
    )


def test_gradients_of_float32_adapters_are_as_close_to_float64_as_those_of_one_layer_at_a_time(
    device: torch.device,
) -> None:
    given = call(device, torch.bfloat16, torch.float32)
    names = [name for name in given if name[0] in "ab"]
    upstream = [torch.randn(2, ROWS // 2, outer, device=device).bfloat16() for outer, _ in LAYERS]

    def gradients(function: Any, values: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, ...]:
        inputs = [values[name] for name in names]
        return torch.autograd.grad(function(**values), inputs, [grad.to(dtype) for grad in upstream])

    exact = gradients(formulas.lora_linears, with_gradients(in_float64(given), names), torch.float64)
    ours, theirs = (gradients(function, given, torch.bfloat16) for function in (lora_linears, separately))
    assert all(value.dtype == torch.float32 for value in ours)
    for got, one, truth in zip(ours, theirs, exact, strict=True):
        assert error(got, truth).frobenius <= 1.5 * error(one, truth).frobenius + 2.0**-22


def test_all_adapters_meet_x_in_one_matmul() -> None:
    given = call(torch.device("cpu"), torch.float32, torch.float32)
    outputs = {outer for outer, _ in LAYERS}
    for function, expected in ((lora_linears.reference, [16]), (separately, [8, 4, 4])):
        with use("reference"):
            _, shapes = products(lambda function=function: function(**given)[0], INNER)
        assert [b[1] for a, b in shapes if a[0] == ROWS and b[1] not in outputs] == expected


def test_only_x_and_the_small_projections_are_kept(device: torch.device) -> None:
    given = call(device, torch.bfloat16, torch.float32)
    kept = saved(lambda: lora_linears(**given), *given.values())
    assert [tuple(t.shape) for t in kept] == [(ROWS, 4 * rank) for _, rank in LAYERS]


def test_the_gradients_of_bases_are_the_upstream_gradients_themselves(device: torch.device) -> None:
    given = call(device, torch.float32, torch.float32, 2)
    x, factors = given["x"], [given[name] for name in ("a", "b", "a_2", "b_2")]
    bases = [leaf(2, ROWS // 2, outer, device=device) for outer, _ in LAYERS[:2]]
    found: list[Tensor] = []
    for base in bases:
        base.register_hook(found.append)
    made = lora_linears(x, None, *factors[:2], None, *factors[2:], base=bases[0], base_2=bases[1])
    upstream = [torch.randn_like(y) for y in made]
    torch.autograd.backward(made, upstream)
    assert {grad.data_ptr() for grad in found} == {grad.data_ptr() for grad in upstream}
