# SPDX-License-Identifier: Apache-2.0
"""Two ranks of --precision fp8 --shard fsdp2 train as one process does, gather weights in float8, and save plain ones."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import forks
from hf.two_ranks import on_two_ranks
from liger_train import techniques
from liger_train.model import build
from liger_train.runs.run import run
from liger_train.setup import Setup
from liger_train.sharded_loading import SHARD
from train.training import STEPS, saved_model, setup_of, trained

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cpu,
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed"),
]
CPU = torch.device("cpu")
# Precision → how far losses may be from those of one process. Sequences are alike, so scales are the same, and the
# first loss, too. Later ones differ by the rounding of gradients, which ranks sum in another order: in bfloat16, or to
# float8. In fp8, one process keeps float32 between matmuls on the CPU, and FSDP2 bfloat16, as in test_shards.py.
TOLERANCES = {"fp8-pure": 1e-3, "fp8-rowwise-pure": 1e-3, "fp8": 2e-2}


def sharded(folder: Path, **options: Any) -> Setup:
    return setup_of(folder / "model", ranks=2, shard="fsdp2", **options)


def work(rank: int, folder: Path) -> None:
    """One of two ranks: writes the losses of every precision, and checks the weights before and after."""
    start(rank)
    losses = {}
    for precision in TOLERANCES:
        done = trained(sharded(folder, precision=precision, liger="all", checkpoint="full"))
        losses[precision] = done.losses
        for name, weight in done.built.model.named_parameters():
            is_cast = name.endswith("_proj.weight") and "rowwise" not in precision
            assert (type(weight.to_local()) is not torch.Tensor) == is_cast, (precision, name)
            if is_cast:
                check_scale(weight)
    check_loaded(rank, sharded(folder, precision="fp8"))
    (folder / f"{rank}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


def start(rank: int) -> None:
    torch.set_num_threads(1)
    gc.freeze()
    # No GPU is needed to multiply as one does.
    techniques.check = lambda setup: None  # type: ignore[assignment]


def check_scale(weight: Any) -> None:
    """Raises unless the scale for the next step is the one of the whole weight."""
    shard = weight.to_local()
    most = shard._tensor.abs().max()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    assert weight._local_tensor._precomputed_scale == (torch.finfo(torch.float8_e4m3fn).max / most.double()).float()


def check_loaded(rank: int, setup: Setup) -> None:
    """Raises unless each weight before training is the one of the files."""
    whole = dict(AutoModelForCausalLM.from_pretrained(setup.model).named_parameters())
    for name, weight in build(setup, CPU).model.named_parameters():
        shard = getattr(weight, SHARD)
        assert torch.equal(getattr(shard, "_tensor", shard), whole.pop(name).chunk(2)[rank]), name
    assert not whole


def odd(rank: int, folder: Path) -> None:
    """One of three ranks, over which rows are not divisible."""
    start(rank)
    done = trained(replace(sharded(folder, precision="fp8-pure"), ranks=3))
    weights = dict(done.built.model.model.layers[0].named_parameters())
    kinds = {name.split(".")[1]: type(weight.to_local()) is not torch.Tensor for name, weight in weights.items()}
    assert [name for name, is_cast in kinds.items() if is_cast] == ["gate_proj", "up_proj"]
    (folder / f"odd{rank}.json").write_text(json.dumps(done.losses))
    dist.destroy_process_group()


def saving(rank: int, folder: Path, small: Setup) -> None:
    """One of two ranks: a run, and another one that is continued."""
    start(rank)
    setup = replace(small, ranks=2, shard="fsdp2", precision="fp8", steps=4)
    for name, setups in {"whole": [setup], "parts": [replace(setup, steps=2), setup]}.items():
        for each in setups:
            export = folder / f"exported-{name}-{each.steps}"
            row = run(each, folder=folder / name, resume=len(setups) > 1, export=export)
            assert not row.failed, row.reason
        if rank == 0:
            (folder / f"{name}.json").write_text(json.dumps(row.columns()))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torchao")
    folder = tmp_path_factory.mktemp("float8")
    saved_model(folder / "model")
    return folder


@pytest.fixture
def one_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the losses of one process with as many sequences."""
    monkeypatch.setattr(techniques, "check", lambda setup: None)
    return lambda ranks=2, **options: trained(replace(setup_of(folder / "model", **options), batch=2 * ranks)).losses


def test_two_ranks_have_the_losses_of_one_process(folder: Path, one_process: Any) -> None:
    on_two_ranks(work, folder)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    for precision, tolerance in TOLERANCES.items():
        expected = one_process(precision=precision, liger="all")
        assert len(expected) == STEPS
        for losses in ranks:
            assert losses[precision] == pytest.approx(expected, rel=tolerance), precision
            assert losses[precision][0] == expected[0] or precision == "fp8"


def test_a_weight_whose_rows_are_not_divisible_is_gathered_in_bfloat16(folder: Path, one_process: Any) -> None:
    forks.on_ranks(3, odd, folder)
    # All have the gradients of these two sequences. Of six, each would be a third, with other roundings.
    expected = one_process(ranks=1, precision="fp8-pure")
    for rank in range(3):
        losses = json.loads((folder / f"odd{rank}.json").read_text())
        assert losses == pytest.approx(expected, rel=TOLERANCES["fp8-pure"])


def test_a_run_resumes_exactly_and_saves_plain_weights(
    folder: Path, small: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_two_ranks(saving, folder, small)
    whole, parts = (json.loads((folder / f"{name}.json").read_text()) for name in ("whole", "parts"))
    assert parts["losses"] == whole["losses"]
    assert whole["losses"][-1] < whole["losses"][0]
    assert any(note.startswith("Resumed from step 2") for note in parts["notes"])
    before, *after = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (small.model, *(folder / name / "checkpoint-4" for name in ("whole", "parts")))
    )
    after.append(AutoModelForCausalLM.from_pretrained(folder / "exported-parts-4").state_dict())
    for name, weight in before.items():
        assert not torch.equal(weight, after[0][name])
        assert all(torch.equal(each[name], after[0][name]) for each in after)
    monkeypatch.setattr(techniques, "check", lambda setup: None)
    alone = run(replace(small, batch=4, steps=5, precision="fp8"), folder=folder / "parts", resume=True)
    assert alone.losses is not None, alone.reason
    assert alone.losses[:4] == whole["losses"]
    assert alone.losses[4] < whole["losses"][-1]
