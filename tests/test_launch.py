# SPDX-License-Identifier: Apache-2.0
"""The launcher that keeps compiled kernels: an equal call starts one directly, another call never gets the wrong one."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton

import liger_core
import liger_triton
import sanitize
from liger_triton.launch import KNOWN_RELEASES, Launcher, gradients_of
from liger_triton.table import TABLE

X, Y = torch.zeros(8), torch.zeros(8)


class Kernel:
    """Stands in for a Triton kernel; `log` records how each call reached the device."""

    arg_names = ("x", "y", "width", "eps", "FLAG", "BLOCK")

    def __init__(self, scratch: int = 0, release: str = "3.6") -> None:
        self.log: list[tuple[Any, ...]] = []
        self.options: dict[str, Any] = {}
        self.scratch = scratch
        self.release = release

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.log.append(("triton", grid, *args))
            self.options = options
            run = SimpleNamespace(launch=lambda *given: self.log.append(("directly", *given)))
            run.global_scratch_size, run.profile_scratch_size = self.scratch, 0
            run.launch_cooperative_grid = run.launch_pdl = False
            if self.release != "3.6":
                run.arg_annotations, run.kernel_signature = "annotations", "signature"
            return SimpleNamespace(run=run, function="function", packed_metadata="metadata")

        return call


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr("liger_triton.launch.current_device", lambda: 0)
    monkeypatch.setattr("liger_triton.launch.raw_stream", lambda device: f"stream of {device}")
    return Kernel()


@pytest.fixture
def launch(kernel: Kernel) -> Launcher:
    made = Launcher(kernel)
    made.direct = True
    return made


def call(launch: Launcher, x: Any = X, y: Any = Y, width: int = 8, eps: float = 1e-6, flag: bool = True) -> None:
    launch((3, 2), x, y, width, eps, FLAG=flag, BLOCK=16, num_warps=4)


def ways(kernel: Kernel) -> list[str]:
    return [entry[0] for entry in kernel.log]


def test_an_equal_call_starts_the_kernel_with_the_addresses(kernel: Kernel, launch: Launcher) -> None:
    call(launch)
    call(launch, y=X.clone(), eps=0.5)
    assert ways(kernel) == ["triton", "directly"]
    given = kernel.log[1]
    assert given[1:6] == (3, 2, 1, "stream of 0", "function")
    assert "metadata" in given
    address, _, width, eps, flag, block = given[-6:]
    assert (address, width, eps, flag, block) == (X.data_ptr(), 8, 0.5, True, 16)


def test_from_triton_3_7_on_the_arguments_go_down_in_a_tuple(kernel: Kernel, launch: Launcher) -> None:
    kernel.release = "3.7"
    call(launch)
    call(launch, eps=0.5)
    given = kernel.log[1]
    assert given[:6] == ("directly", 3, 2, 1, "stream of 0", "function")
    assert given[6:] == (
        *(False, False, "metadata", None, None, None, None, None, "annotations", "signature"),
        (X.data_ptr(), Y.data_ptr(), 8, 0.5, True, 16),
    )


def test_every_kernel_says_whether_products_may_be_fused(kernel: Kernel, launch: Launcher) -> None:
    """The default changes with Triton 3.10."""
    call(launch)
    assert kernel.options["enable_fp_fusion"] is True
    launch((1,), X, Y, 8, 1e-6, FLAG=True, BLOCK=16, enable_fp_fusion=False)
    assert kernel.options["enable_fp_fusion"] is False


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_installed_triton_starts_known_kernels_directly() -> None:
    from liger_core import rms_norm, use
    from liger_triton._norm import forward_launch

    if not triton.__version__.startswith(KNOWN_RELEASES):
        pytest.skip(f"Triton {triton.__version__} gets its own call")
    x, weight = torch.randn(8, 64, device="cuda"), torch.ones(64, device="cuda")
    with use("triton"):
        rms_norm(x, weight)
        assert forward_launch.direct
        assert forward_launch.compiled
        forward_launch.kernel, kernel = None, forward_launch.kernel
        try:
            # Without the kernel there is only the direct way.
            y = rms_norm(x, weight)
        finally:
            forward_launch.kernel = kernel
    torch.testing.assert_close(y, rms_norm.reference(x, weight))


@pytest.mark.parametrize(
    "change",
    [{"x": X.double()}, {"y": None}, {"width": 16}, {"flag": False}],
    ids=["dtype", "absent_tensor", "integer", "flag"],
)
def test_a_call_for_another_kernel_does_not_get_this_one(
    kernel: Kernel, launch: Launcher, change: dict[str, Any]
) -> None:
    call(launch)
    call(launch, **change)
    call(launch, **change)
    call(launch)
    assert ways(kernel) == ["triton", "triton", "directly", "directly"]


def test_another_device_has_kernels_of_its_own(
    kernel: Kernel, launch: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(launch)
    monkeypatch.setattr("liger_triton.launch.current_device", lambda: 1)
    call(launch)
    assert ways(kernel) == ["triton", "triton"]


@pytest.mark.parametrize(("scratch", "x"), [(0, X[1:]), (64, X)], ids=["not_aligned", "scratch_memory"])
def test_what_only_triton_starts_is_left_to_it(scratch: int, x: Tensor, kernel: Kernel, launch: Launcher) -> None:
    kernel.scratch = scratch
    for given in (X, x, x):
        call(launch, x=given)
    assert ways(kernel) == ["triton", "triton", "triton"]


def test_the_store_of_kernels_does_not_grow_for_ever(launch: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launcher, "LIMIT", 4)
    for width in range(16):
        call(launch, width=width)
    assert len(launch.compiled) <= 4


def test_the_sanitizer_checks_every_kernel() -> None:
    sources = "\n".join(path.read_text() for path in Path(liger_triton.__file__).parent.glob("*.py"))
    assert sanitize.kernels() == sorted(set(re.findall(r"@triton\.jit\ndef (\w+_kernel)\(", sources)))


MANY = 140_000
OF_ONE = ("softmax", "sparsemax", "relu_squared", "swiglu", "geglu", "rms_norm", "layer_norm")
MANY_ROWS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(OF_ONE, ((MANY, 2),)),
    **dict.fromkeys(("add_rms_norm", "add_layer_norm", "gated_rms_norm"), ((MANY, 2), (MANY, 2))),
    "dyt": ((MANY, 2), (1,), (2,), (2,)),
    "poly_norm": ((MANY, 2), (3,), (1,)),
    "group_norm": ((MANY, 2), 1, (2,), (2,)),
    "modulated_rms_norm": ((MANY, 1, 2), (MANY, 2), (MANY, 2), (2,)),
    "modulated_layer_norm": ((MANY, 1, 2), (MANY, 2), (MANY, 2)),
    "rope": ((MANY, 1, 1, 2), (MANY, 1, 1, 2), (1, 2), (1, 2)),
    "qk_norm_rope": ((MANY, 1, 1, 2), (MANY, 1, 1, 2), (2,), (2,), (1, 2), (1, 2)),
    "sinkhorn": ((MANY, 2, 2),),
    "mix_streams": ((MANY, 2, 2), (MANY, 2)),
    "merge_streams": ((MANY, 2, 2), (MANY, 2), (MANY, 2), (MANY, 2, 2)),
    "project_streams": ((MANY, 2, 2), (8, 4)),
    "attention_residual": ((2, MANY, 2), (2,), (2,)),
}


@pytest.mark.parametrize("name", MANY_ROWS)
def test_the_second_dimension_of_a_grid_does_not_grow_with_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA ends it at 65535, and the first one at 2³¹ - 1."""
    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(Launcher, "__call__", lambda self, grid, *args, **options: grids.append(grid))
    # A build of torch for CUDA would look for a GPU.
    monkeypatch.setattr("liger_triton.launch.overlaps", lambda: False)
    # The tables of angles, (1, 2), have no gradient.
    args = [torch.zeros(n, requires_grad=n != (1, 2)) if isinstance(n, tuple) else n for n in MANY_ROWS[name]]
    outputs = TABLE[getattr(liger_core, name)].function(*args)
    outputs = [o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if o.requires_grad]
    torch.autograd.backward(outputs, [torch.zeros_like(o) for o in outputs])
    assert grids
    assert [grid for grid in grids if max(grid[1:], default=1) > 65535] == []


def test_a_gradient_of_no_argument_of_the_backward_launch_needs_memory_of_its_own() -> None:
    def backward(grad_z: Tensor, /, grad_y: Tensor, x: Tensor, needs: list[bool]) -> None: ...

    with pytest.raises(TypeError, match=r"must be grad_<one of its arguments> \(grad_y, x, needs\), got grad_z; pass"):
        gradients_of(backward)
