# SPDX-License-Identifier: Apache-2.0
"""The memory meter against allocations whose size is known."""

from collections.abc import Iterator

import pytest
import torch

from liger_bench.memory import bytes_of, held_bytes, peak_bytes
from liger_core import OptionError

MiB = 1 << 20


def block(mebibytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(mebibytes * MiB, dtype=torch.uint8, device=device)


def test_blocks_that_live_together_add_up(device: torch.device) -> None:
    assert peak_bytes(lambda: (block(8, device), block(16, device)), device) == 24 * MiB


def test_a_block_that_was_released_makes_room_for_the_next(device: torch.device) -> None:
    def one_after_the_other() -> None:
        first = block(16, device)
        del first
        block(8, device)

    assert peak_bytes(one_after_the_other, device) == 16 * MiB


def test_what_was_held_before_does_not_count(device: torch.device) -> None:
    before = block(32, device)
    assert peak_bytes(lambda: block(4, device), device) == 4 * MiB
    del before


def test_a_block_released_between_two_measurements_is_not_missed_in_the_second(device: torch.device) -> None:
    kept = []
    peak_bytes(lambda: kept.append(block(16, device)), device)
    kept.clear()
    assert peak_bytes(lambda: block(16, device), device) == 16 * MiB


@pytest.fixture
def custom_op() -> Iterator[torch._ops.OpOverload]:
    """An op whose implementation holds 32 MiB for a moment and returns its argument plus one."""
    library = torch.library.Library("liger_bench_test", "FRAGMENT")
    library.define("holds(Tensor x) -> Tensor")

    def holds(x: torch.Tensor) -> torch.Tensor:
        scratch = block(32, x.device)
        scratch.fill_(1)
        return x + 1

    library.impl("holds", holds, "CompositeExplicitAutograd")
    yield torch.ops.liger_bench_test.holds.default
    library._destroy()


def test_a_temporary_inside_a_custom_op_counts(device: torch.device, custom_op: torch._ops.OpOverload) -> None:
    x = torch.zeros(MiB, device=device)
    # The scalar that is added takes a few bytes for a moment.
    assert 36 * MiB <= peak_bytes(lambda: custom_op(x), device) < 36 * MiB + 1024


def test_a_temporary_of_the_backward_pass_counts(device: torch.device) -> None:
    x = torch.zeros(MiB, device=device, requires_grad=True)

    class Holds(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            block(64, device)
            return grad

    y = Holds.apply(x)
    grad = torch.ones_like(x)
    assert peak_bytes(lambda: torch.autograd.grad(y, x, grad), device) == 64 * MiB


def test_tensors_that_share_memory_are_held_once(device: torch.device) -> None:
    x = block(4, device)
    assert held_bytes([x, x[1:], x.view(2, -1)]) == 4 * MiB


@pytest.mark.parametrize(
    ("size", "count"), [("24GiB", 24 << 30), ("1.5 kb", 1500), ("1e9b", 10**9), ("7 B", 7), ("2g", 2 * 10**9)]
)
def test_a_size_is_read(size: str, count: int) -> None:
    assert bytes_of("op: --size", size) == count


def test_a_size_without_a_unit_is_an_error_that_suggests_one() -> None:
    sentence = r"op: --size must be a size like 24GiB or 512MB, got '24', which needs a unit: 24GiB\?"
    with pytest.raises(OptionError, match=sentence):
        bytes_of("op: --size", "24")


@pytest.mark.parametrize(
    "size", ["", "0", "0 GiB", "GiB", "-1", "-1GiB", "1 PiB", "1..5GiB", "nan", "infGiB", "1e99GiB", "9e18B"]
)
def test_no_size_is_refused(size: str) -> None:
    with pytest.raises(OptionError, match="op: --size must be a size like"):
        bytes_of("op: --size", size)
