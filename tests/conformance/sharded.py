# SPDX-License-Identifier: Apache-2.0
"""What one of several ranks does for tests/conformance/test_shards.py: the samples of an op, on its shard of the
vocabulary."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.cases import Case, implementations, sample_names
from conformance.running import Result, Trial, run
from liger_core import VocabShard
from liger_core.kernels import plain_matmuls

# Rows past the classes, where a sharding has some.
PADDING = 2
DRAWS = 3


def sizes_of(sharding: str, classes: int, ranks: int) -> list[int]:
    """Rows of weight on each rank; those past the classes are padding."""
    if sharding == "even":
        # The last rank is filled up, as by those who pad a vocabulary to a multiple of the ranks.
        return [-(-classes // ranks)] * ranks
    few = classes // 3
    return [few, *[0] * (ranks - 2), classes - few + PADDING]


class Sharded:
    """Calls an op with the rows of weight and bias that are this rank's, and adds up their gradients."""

    def __init__(self, case: Case, sharding: str) -> None:
        self.case, self.sharding = case, sharding

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        given = dict(arguments)
        classes = given["weight"].shape[0]
        sizes = sizes_of(self.sharding, classes, dist.get_world_size())
        rank = dist.get_rank()
        start = sum(sizes[:rank])
        for name in ("weight", "bias", "teacher_weight", "teacher_bias"):
            if given.get(name) is not None:
                given[name] = _rows(given[name], start, sizes[rank])
        return self.case.call({**given, "vocab": VocabShard(dist.group.WORLD, start, classes)})


def _rows(whole: Tensor, start: int, count: int) -> Tensor:
    part = whole[min(start, whole.shape[0]) : start + count]
    # Nobody may read what is padding.
    padding = part.new_full((count - part.shape[0], *whole.shape[1:]), torch.nan)
    return torch.cat((part, padding)) if len(padding) else part


def summed(result: Result) -> Result:
    """With the gradients of weight and bias that the ranks have between them."""
    for name in ("weight", "bias"):
        gradient = result.gradients.get(name)
        if gradient is not None:
            # The others have zeros there.
            exact = gradient.double()
            dist.all_reduce(exact)
            result.gradients[name] = exact.to(gradient.dtype)
    return result


def cases_of(op: str, backend: str, device: torch.device, dtypes: list[torch.dtype]) -> Iterator[Case]:
    for found, name, _ in implementations(device, backend):
        if found.name == op and name == backend:
            for dtype in dtypes:
                cases = (Case(found, backend, dtype, sample, device) for sample in sample_names(found, device, dtype))
                # A batch-invariant head refuses shards; a misuse of the op shows that.
                yield from (case for case in cases if not case.sample().kwargs.get("batch_invariant"))


def judge_samples(rank: int, device: str, check: Callable[..., list[str]], *args: Any) -> None:
    """check(device, *args) on a rank; raises what it complains about."""
    torch.set_num_threads(1)
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    complaints = check(place, *args)
    # Nobody leaves while another one waits for it.
    dist.barrier()
    if complaints:
        raise AssertionError("\n".join(complaints))
    dist.destroy_process_group()


def accuracy(device: torch.device, op: str, backend: str, dtypes: list[torch.dtype], sharding: str) -> list[str]:
    """What is further from float64, in each of several draws, than the op on one process may be."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    return [
        f"{case.id} on {sharding} shards: {complaint}"
        for case in cases_of(op, backend, device, dtypes)
        for complaint in complaints_in_all_draws(case, sharding, alone)
    ]


def complaints_in_all_draws(case: Case, sharding: str, alone: dist.ProcessGroup) -> list[str]:
    """Complaints about the last draw; none if a draw before it had none on any rank.

    Matmuls of fewer classes may round a logit otherwise, so that one draw in many fails where nothing is wrong.
    """

    def whole(arguments: Mapping[str, Any]) -> Any:
        # The same formula on the whole vocabulary: a summed loss on one rank adds up its gradients in another order.
        return case.op.reference(**arguments, vocab=VocabShard(alone, 0, arguments["weight"].shape[0]))

    for seed in range(DRAWS):
        torch.manual_seed(seed)
        trial = Trial(case)
        with plain_matmuls():
            trial.reference = run(whole, trial.arguments, trial.names, trial.cotangents)
        got = summed(run(Sharded(case, sharding), trial.arguments, trial.names, trial.cotangents))
        complaints = trial.complaints(got)
        count = torch.tensor(len(complaints), device=case.device)
        dist.all_reduce(count)
        if not count:
            return []
    return [f"{complaint} – this sample is for: {trial.why}" for complaint in complaints]
