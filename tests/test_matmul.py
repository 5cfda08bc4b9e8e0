# SPDX-License-Identifier: Apache-2.0
"""Processors without instructions for a 16-bit dtype multiply in float32, without float32 copies of whole weights."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from conformance.cases import arguments_of, copy_of, differentiable, form_names, samples
from conformance.running import run
from liger_core import Op, experts, kernels, linear_cross_entropy, linear_divergence, linear_log_prob, lora_linear
from liger_core.builtin import CATALOGUE
from liger_core.kernels import KERNELS
from liger_core.losses import top_classes

HALF = torch.bfloat16, torch.float16
MATMULS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "addbmm", "mv", "addmv", "dot", "matmul", "linear"}
MATMULS.add("_grouped_mm")
CPU = torch.device("cpu")
# Elements that a pass of a reference over logits or gradients holds in float32.
BLOCK = 1 << 21


@pytest.fixture(autouse=True)
def _no_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor has none for 16 bits."""
    monkeypatch.setattr(kernels, "EMULATED", frozenset(HALF))


class Watched(TorchDispatchMode):
    """Every operation with its operands and its result, also those within kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.halved: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in KERNELS:
            kernel = KERNELS[function]
            with self:
                outputs = kernel.execute(args, kernel.allocate)
            return outputs[0] if kernel.single else outputs
        result = function(*args, **(kwargs or {}))
        halves = any(isinstance(t, Tensor) and t.dtype in HALF for t in tree_iter(args))
        if halves and function.overloadpacket.__name__ in MATMULS:
            self.halved.append(str(function))
        wide = [t.numel() for t in tree_iter(result) if isinstance(t, Tensor) and t.dtype == torch.float32]
        self.largest = max(self.largest, *wide, 0)
        return result


def multiplied(function: Callable[[], Any]) -> list[str]:
    """The matmuls with an operand in 16 bits."""
    with Watched() as watched:
        function()
    return watched.halved


@pytest.mark.slow
@pytest.mark.parametrize("op", CATALOGUE, ids=lambda op: op.name)
def test_no_reference_multiplies_in_16_bits(op: Op[..., Any]) -> None:
    for sample in (copy_of(one) for one in samples(op, CPU, torch.bfloat16) if one.name in form_names(op, CPU)):
        arguments = arguments_of(op, sample)
        names = differentiable(arguments, sample)
        found = multiplied(lambda given=arguments, names=names: run(lambda g: op.reference(**g), given, names))
        assert found == [], sample.name


@pytest.mark.parametrize("bias", [None, torch.randn(20).bfloat16()], ids=["plain", "bias"])
def test_the_most_likely_classes_are_not_found_in_16_bits(bias: Tensor | None) -> None:
    hidden, weight = torch.randn(4, 8).bfloat16(), torch.randn(20, 8).bfloat16()
    assert multiplied(lambda: top_classes(hidden, weight, 3, bias=bias)) == []


def test_the_watch_sees_matmuls_within_kernels() -> None:
    hidden, weight = torch.randn(4, 8).bfloat16().requires_grad_(), torch.randn(20, 8).bfloat16()
    with kernels.plain_matmuls():
        assert multiplied(lambda: linear_cross_entropy.reference(hidden, weight, torch.arange(4)).backward())


def large_calls() -> Iterator[tuple[Op[..., Any], tuple[Any, ...]]]:
    """Calls with a weight that is larger than a block, and with little else."""

    def some(*shape: int) -> Tensor:
        return torch.randn(shape).bfloat16().requires_grad_()

    rows, target = some(4, 64), torch.arange(4)
    yield linear_cross_entropy, (rows, some(40_000, 64), target)
    yield linear_log_prob, (rows, some(40_000, 64), target)
    yield linear_divergence, (rows, some(40_000, 64), some(4, 64), some(40_000, 64))
    matrices, index = (some(2, 2000, 1100), some(2, 1100, 1000)), torch.tensor([[0], [1], [1], [0]])
    yield experts, (some(4, 1100), *matrices, index, some(4, 1))
    yield lora_linear, (some(4, 1100), some(2000, 1100), some(2, 1100), some(2000, 2))


@pytest.mark.parametrize(("op", "args"), list(large_calls()), ids=lambda value: getattr(value, "name", ""))
def test_no_more_than_a_block_of_a_weight_is_held_in_float32(op: Op[..., Any], args: tuple[Any, ...]) -> None:
    assert max(t.shape[-2:].numel() for t in args) > BLOCK
    with Watched() as watched:
        made = op.reference(*args)
        (made[0] if isinstance(made, tuple) else made).sum().backward()
    assert watched.largest <= BLOCK


def base_of(kind: str, out: Tensor) -> Tensor | None:
    shapes = {"row": out.shape[1:], "matrix": out.shape}
    return out if kind == "out" else torch.randn(shapes[kind]).to(out.dtype) if kind in shapes else None


@pytest.mark.parametrize("kind", ["nothing", "row", "matrix", "out"])
@pytest.mark.parametrize("inner", [0, 7, 50])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_tiles_make_the_whole_product(
    out_dtype: torch.dtype, inner: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "TILE", 16)
    a, b = torch.randn(inner, 33).bfloat16().t(), torch.randn(inner, 40).bfloat16()
    out = torch.randn(33, 40).to(out_dtype)
    base = base_of(kind, out)
    exact = a.double() @ b.double() + (0.0 if base is None else base.double())
    kernels.multiply(out, a, b, base)
    tolerance = {torch.bfloat16: 2.0**-8, torch.float32: 1e-5, torch.float64: 1e-12}[out_dtype]
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance / 10)


def test_a_yardstick_multiplies_as_plain_pytorch_does() -> None:
    a, b = torch.randn(5, 8).bfloat16(), torch.randn(8, 3).bfloat16()
    out = a.new_empty(5, 3)
    with contextlib.suppress(ValueError), kernels.plain_matmuls():
        assert multiplied(lambda: kernels.multiply(out, a, b)) == ["aten.mm.out"]
        raise ValueError
    assert multiplied(lambda: kernels.multiply(out, a, b)) == []


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_matmuls_are_traced_without_a_break(device: str) -> None:
    a, b = torch.randn(5, 8, device=device).bfloat16(), torch.randn(8, 3, device=device).bfloat16()

    def product(a: Tensor, b: Tensor) -> Tensor:
        out = a.new_empty(5, 3)
        kernels.multiply(out, a, b)
        return out

    made = torch.compile(product, backend="aot_eager", fullgraph=True)(a, b)
    assert made.shape == (5, 3)
    if device == "cpu":
        assert torch.equal(made, product(a, b))


def test_tensors_on_other_devices_stay_in_their_dtype() -> None:
    a, b = (torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in ((5, 8), (8, 3)))
    assert multiplied(lambda: kernels.multiply(a.new_empty(5, 3), a, b)) == ["aten.mm.out"]


# What PyTorch and the processor say, and what is then multiplied in float32.
PROCESSORS = {
    "avx2": (False, False, {"avx2": True, "avx512_f": False, "avx512_bf16": False}, HALF),
    "avx512": (True, False, {"avx512_f": True, "avx512_bf16": False}, HALF),
    "avx512_bf16": (True, False, {"avx512_f": True, "avx512_bf16": True}, (torch.float16,)),
    "amx": (True, True, {"avx512_f": True, "avx512_bf16": True, "amx_bf16": True}, ()),
    "arm_with_bf16": (True, True, {"neon": True, "bf16": True}, ()),
    "arm": (False, False, {"neon": True, "bf16": False}, HALF),
}


@pytest.mark.parametrize(("bf16", "fp16", "processor", "expected"), PROCESSORS.values(), ids=PROCESSORS)
def test_the_processor_decides(
    bf16: bool, fp16: bool, processor: dict[str, bool], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "multiplies_bfloat16", lambda: bf16)
    monkeypatch.setattr(kernels, "multiplies_float16", lambda: fp16)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor)
    assert kernels._emulated() == set(expected)


def test_without_onednn_nothing_multiplies_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert kernels._emulated() == set(HALF)
