# SPDX-License-Identifier: Apache-2.0
"""Adapters train to the losses of one process with every way of sharding, and resume with other numbers of ranks."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import forks
from liger_train import zero
from liger_train.errors import SetupError
from liger_train.runs.run import run
from liger_train.setup import Setup
from train.training import needs_distributed, saved_model

pytest.importorskip("peft")

pytestmark = [pytest.mark.slow, pytest.mark.cpu, needs_distributed]
LORA, QLORA = {"adapter": "lora"}, {"adapter": "qlora"}
FSDP2 = LORA | {"shard": "fsdp2"}
# Ranks → model and way → options, beside the llama with FSDP2 that is resumed. Each step has four sequences, and
# DeepSpeed comes last, since accelerate cannot shard by FSDP2 after it.
WAYS: dict[int, dict[tuple[str, str], dict[str, Any]]] = {
    2: {
        ("experts", "ddp-qlora"): QLORA,
        ("experts", "fsdp2"): FSDP2 | {"checkpoint": "full"},
        ("llama", "zero2"): LORA | {"shard": "zero2"},
        ("experts", "zero3"): LORA | {"shard": "zero3"},
    },
    4: {
        ("experts", "replicate"): FSDP2 | {"replicate": 2, "liger": "none"},
        ("llama", "cp"): FSDP2 | {"cp": 2, "batch": 2, "checkpoint": "full"},
    },
}
PACKAGES = {"qlora": "bitsandbytes", "zero2": "deepspeed", "zero3": "deepspeed"}


def problem(options: dict[str, Any]) -> str:
    """Return why this machine cannot train by a way, or an empty string."""
    needed = [PACKAGES[value] for value in (options["adapter"], options.get("shard")) if value in PACKAGES]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    return f"{missing[0]} is not installed" if missing else ""


def work(rank: int, setup: Setup, folder: Path, chosen: list[tuple[int, str, str]]) -> None:
    """One rank: trains models in the chosen ways, and continues a run with FSDP2; writes losses and notes."""
    # It would compile for most of a minute.
    zero.adam_problem = lambda: "not compiled in this test"  # type: ignore[assignment]
    whole = replace(setup, batch=4 // setup.ranks)
    resumed = replace(whole, model=str(folder / "llama"), steps=setup.ranks, **FSDP2)
    rows = {"resumed": run(resumed, folder=folder / "saved", resume=setup.ranks > 2)}
    for (name, way), options in WAYS[setup.ranks].items():
        if (setup.ranks, name, way) in chosen and not problem(options):
            rows[f"{name} {way}"] = row = run(replace(whole, model=str(folder / name), **options))
            assert not row.failed, (name, way, row.reason)
    if setup.ranks > 3:
        # The checkpoint stores three experts separately.
        with pytest.raises(SetupError, match="got 4 ranks and 3 experts; use --replicate 2"):
            run(replace(whole, model=str(folder / "experts"), **FSDP2))
    if rank == 0:
        columns = {name: (row.losses, row.trainable_parameters, row.notes) for name, row in rows.items()}
        (folder / f"{setup.ranks}.json").write_text(json.dumps(columns))


@pytest.fixture(scope="module")
def adapted(small: Setup) -> Setup:
    return replace(small, batch=4, steps=3, learning_rate=3e-2)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, adapted: Setup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the models, of a run that two ranks began and four continued, and of the results of the ways."""
    folder = tmp_path_factory.mktemp("adapters")
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    for name, kind, fields in (("llama", "llama", {}), ("experts", "qwen3_moe", experts)):
        saved_model(folder / name, kind, vocab_size=400, **fields)
        AutoTokenizer.from_pretrained(adapted.model).save_pretrained(folder / name)
    for ranks in WAYS:
        chosen = forks.cases(request, "ranks", "name", "way")
        forks.on_ranks(ranks, work, replace(adapted, ranks=ranks), folder, chosen)
    return folder


@pytest.fixture(scope="module")
def alone(adapted: Setup, folder: Path) -> Any:
    """Returns the row of one process that trains a model with an adapter."""
    rows: dict[tuple[str, str], Any] = {}

    def train(name: str, adapter: str) -> Any:
        if (name, adapter) not in rows:
            rows[name, adapter] = run(replace(adapted, model=str(folder / name), adapter=adapter, steps=6))
        return rows[name, adapter]

    return train


@pytest.mark.parametrize(
    ("ranks", "name", "way"), [(ranks, *way) for ranks, ways in WAYS.items() for way in ways], ids=str
)
def test_adapters_train_to_the_losses_of_one_process(ranks: int, name: str, way: str, folder: Path, alone: Any) -> None:
    options = WAYS[ranks][name, way]
    if problem(options):
        pytest.skip(problem(options))
    losses, trainable, notes = json.loads((folder / f"{ranks}.json").read_text())[f"{name} {way}"]
    expected = alone(name, options["adapter"])
    assert losses == pytest.approx(expected.losses[:3], rel=1e-5)
    assert trainable == expected.trainable_parameters
    of_ranks, of_one = (
        [note for note in each if note.startswith("Training adapters") or "no gradient" in note]
        for each in (notes, expected.notes)
    )
    assert of_ranks == of_one


def test_adapters_resume_with_other_numbers_of_ranks(adapted: Setup, folder: Path, alone: Any) -> None:
    expected = alone("llama", "lora").losses
    assert expected[-1] < expected[0] - 0.05
    losses, _, notes = json.loads((folder / "4.json").read_text())["resumed"]
    assert losses == pytest.approx(expected[:4], rel=1e-5)
    assert any(note.startswith("Resumed from step 2") for note in notes)
    assert (folder / "saved" / "checkpoint-4" / "adapter_model.safetensors").is_file()
    setup = replace(adapted, model=str(folder / "llama"), adapter="lora", steps=6)
    row = run(setup, folder=folder / "saved", resume=True)
    # Six steps at this learning rate amplify how a processor sums: 2e-5 with AVX-512.
    assert row.losses == pytest.approx(expected, rel=1e-4), row.reason
