# SPDX-License-Identifier: Apache-2.0
"""Every kernel that a sample launches compiles for an H100 or H200, without one: the interpreter accepts more than the
compiler does."""

import inspect
import os
import re
import sys
from collections import defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from conformance.cases import arguments_of, differentiable, leaves
from liger_core import Op, Sample, Unsupported, add_rms_norm, layer_norm
from liger_core.builtin import CATALOGUE

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the kernels are interpreted", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from liger_triton import launch
from liger_triton.table import TABLE

pytestmark = pytest.mark.slow

TARGET = GPUTarget("cuda", 90, 32)
PROCESSORS, SHARED = 132, 232_448
OPS = [op for op in CATALOGUE if op in TABLE]
# Kernels that no sample launches here, and options that samples never set or always set → why.
ONE_WAY = {
    "_softmax.split_forward_kernel": "its programs wait for others, which only a GPU runs at once",
    "_softmax.split_backward_kernel": "its programs wait for others, which only a GPU runs at once",
    "_divergence.sums_kernel": "a vocabulary over several ranks",
    "_divergence.divergence_kernel PARTIAL": "a vocabulary over several ranks",
    "_divergence.gradient_kernel PARTIAL": "a vocabulary over several ranks",
    "_softmax_loss.scale_kernel ADD": "no sample has a weight with main_grad",
}
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
POINTERS |= {torch.int64: "*i64", torch.int32: "*i32", torch.bool: "*i1"}


class Launched(NamedTuple):
    """A kernel and what Triton specializes it on: types, constants, integers divisible by 16, options."""

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    divisible: list[str]
    options: dict[str, Any]


Kernels = dict[str, Launched]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Launches put the kernel that they would start here; nothing runs."""
    found: Kernels = {}

    def record(self: launch.Launcher, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        if 0 not in grid:
            launched = _describe(self.kernel, args, options)
            found.setdefault(f"{_name(self.kernel)} {launched[1:]}", launched)

    monkeypatch.setattr(launch.Launcher, "__call__", record)
    monkeypatch.setattr(launch, "overlaps", lambda: True)
    for module in [m for name, m in sys.modules.items() if name.startswith("liger_triton.")]:
        for name, value in (("processors", PROCESSORS), ("shared_memory", SHARED)):
            if inspect.isfunction(inspect.unwrap(getattr(module, name, None))):
                monkeypatch.setattr(module, name, lambda device, value=value: value)
    return found


def _name(kernel: Any) -> str:
    return f"{kernel.fn.__module__.removeprefix('liger_triton.')}.{kernel.__name__}"


def _describe(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Launched:
    names = kernel.arg_names
    types: dict[str, str] = {}
    constants = {name: value for name, value in options.items() if name in names}
    divisible = []
    for name, arg, parameter in zip(names, args, kernel.params, strict=False):
        if parameter.is_constexpr or arg is None or (type(arg) is int and arg == 1):
            constants[name] = arg
        elif isinstance(arg, Tensor):
            types[name] = POINTERS[arg.dtype]
        elif isinstance(arg, float):
            types[name] = "fp32"
        else:
            types[name] = "i32" if arg < 2**31 else "i64"
            if arg % 16 == 0:
                divisible.append(name)
    others = {name: value for name, value in options.items() if name not in names}
    return Launched(kernel, types, constants, divisible, others)


def _compile(launched: Launched) -> Any:
    kernel, types, constants, divisible, options = launched
    names = kernel.arg_names
    aligned = [name for name in names if name in divisible or types.get(name, "").startswith("*")]
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=TARGET, options=options)


def _launch(op: Op[..., Any], sample: Sample) -> None:
    arguments = arguments_of(op, sample)
    trained = differentiable(arguments, sample)
    given = {n: v.detach().requires_grad_(n in trained) if isinstance(v, Tensor) else v for n, v in arguments.items()}
    try:
        outputs = [o for o in leaves(TABLE[op].function(**given)).values() if o.requires_grad]
    except Unsupported:
        return
    if outputs:
        inputs, upstream = [given[n] for n in trained], [torch.randn_like(o) for o in outputs]
        torch.autograd.grad(outputs, inputs, upstream, allow_unused=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("op", OPS, ids=lambda op: str(op.name))
def test_every_kernel_that_a_sample_launches_compiles(op: Op[..., Any], dtype: torch.dtype, kernels: Kernels) -> None:
    for sample in op.samples(torch.device("cpu"), dtype):
        _launch(op, sample)
    # Several adapters of float32 are products of PyTorch.
    assert kernels or (op.name, dtype) == ("lora_linears", torch.float32)
    compiled = {name: _compile(launched) for name, launched in kernels.items()}
    assert {name: kernel.metadata.shared for name, kernel in compiled.items() if kernel.metadata.shared > SHARED} == {}
    early = {name: kernel.asm["ptx"] for name, kernel in compiled.items() if kernel.metadata.launch_pdl}
    assert [name for name, ptx in early.items() if not _waits(ptx)] == []


def _waits(ptx: str) -> bool:
    """Whether a kernel waits for the one before it before it reads or writes memory."""
    first = re.search(r"griddepcontrol\.wait|\b(?:ld|st|atom|red|cp\.async)\S*\.global", ptx)
    return first is not None and first[0] == "griddepcontrol.wait"


def test_samples_launch_every_kernel_with_and_without_each_option(kernels: Kernels) -> None:
    for op in OPS:
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            for sample in op.samples(torch.device("cpu"), dtype):
                _launch(op, sample)
    ways: dict[str, set[bool]] = defaultdict(set)
    given: set[str] = set()
    for launched in kernels.values():
        name = _name(launched.kernel)
        given |= {name} | {f"{name} {parameter}" for parameter in launched.types}
        for parameter, value in launched.constants.items():
            # Whether kernels overlap depends on the device.
            if parameter != "EARLY" and (value is None or isinstance(value, bool)):
                ways[f"{name} {parameter}"].add(bool(value))
    modules = [vars(module) for name, module in sys.modules.items() if name.startswith("liger_triton.")]
    launchers = {
        _name(value.kernel) for names in modules for value in names.values() if isinstance(value, launch.Launcher)
    }
    one_way = {name for name, values in ways.items() if len(values) == 1 and name not in given}
    assert one_way | launchers - given == set(ONE_WAY)


@pytest.mark.parametrize("width", [300, 512, 1024, 4096])
def test_norms_fit_where_programs_have_less_shared_memory(
    width: int, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    # That of GPUs of compute capability 7.5; three tensors of float32 need the most.
    small = 65_536
    monkeypatch.setattr(launch, "shared_memory", lambda device: small)
    x, residual, weight = (torch.zeros(*shape, requires_grad=True) for shape in ((600, width), (600, width), (width,)))
    outputs = TABLE[add_rms_norm].function(x, residual, weight)
    torch.autograd.grad(outputs, [x, residual, weight], [torch.ones_like(o) for o in outputs])
    needed = {name: _compile(launched).metadata.shared for name, launched in kernels.items()}
    assert {name: shared for name, shared in needed.items() if shared > small} == {}


@pytest.mark.parametrize(("width", "warps"), [(16384, 8), (14336, 8), (8192, 8), (4096, 4)])
def test_long_rows_of_layer_norm_get_the_warps_that_were_measured(width: int, warps: int, kernels: Kernels) -> None:
    shapes = ((1, width), (width,), (width,))
    x, weight, bias = (torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    y = TABLE[layer_norm].function(x, weight, bias)
    torch.autograd.grad(y, [x, weight, bias], torch.ones_like(y))
    (name,) = (name for name in kernels if name.startswith("_norm_chunks.backward_kernel"))
    assert f"'num_warps': {warps}" in name
