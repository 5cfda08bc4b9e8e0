# SPDX-License-Identifier: Apache-2.0
"""Ways into a Trainer: the callback, and `use_liger_kernel=True` with Liger standing in for liger-kernel."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer
from transformers.utils import is_liger_kernel_available

import forks
import liger_hf
from hf.test_isolation import instance_state
from hf.test_training import Rows, arguments_for
from hf.tiny_models import VOCABULARY, LargestResult, losses_of, make, no_logits, twin
from liger_core import OptionError

pytestmark = [pytest.mark.slow, pytest.mark.cpu]

ALL = {"rms_norm": 5, "add_rms_norm": 2, "rope": 2, "swiglu": 2, "linear_cross_entropy": 1}


@pytest.fixture
def stand_in() -> Iterator[list[liger_hf.Report]]:
    """`use_liger_kernel=True` means Liger; the reports that were shown."""
    if importlib.util.find_spec("liger_kernel") is not None:
        pytest.skip("liger-kernel is installed")
    reports: list[liger_hf.Report] = []
    with liger_hf.compat.install(show=reports.append):
        yield reports


def trainer(model: Any, folder: Path, callbacks: Any = None, **options: Any) -> Trainer:
    """model: one, or what makes one for each run."""
    arguments = arguments_for(folder, **({"max_steps": 1} | options))
    given = {"model": model} if isinstance(model, nn.Module) else {"model_init": model}
    return Trainer(**given, args=arguments, train_dataset=Rows(8), eval_dataset=Rows(8), callbacks=callbacks)


PRECISIONS = pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["float32", "bf16"])


def test_the_callback_applies_the_requested_ops_before_training_and_shows_one_report(tmp_path: Path) -> None:
    model, shown = make().train(), []
    made = trainer(model, tmp_path, [liger_hf.LigerCallback(only=["swiglu"], show=shown.append)])
    made.train()
    made.train()
    assert [report.replaced for report in shown] == [{"swiglu": 2}]
    assert shown == [model.liger_report]


@PRECISIONS
def test_the_callback_undoes_everything_at_the_end_if_asked(precision: dict[str, Any], tmp_path: Path) -> None:
    model = make().train()
    callback = liger_hf.LigerCallback(undo=True, show=None)
    made = trainer(model, tmp_path, [callback], **precision)
    before = {name for name, state in instance_state(model.model).items() if "forward" in state}
    made.train()
    assert callback.report.replaced == ALL
    assert before != set()
    assert [name for name, state in instance_state(model.model).items() if "forward" in state] == []
    assert not hasattr(model, "liger_head")
    assert torch.isfinite(model(input_ids=Rows(1).ids, labels=Rows(1).labels).loss)


@PRECISIONS
def test_a_callback_that_is_added_later_applies_when_training_begins(precision: dict[str, Any], tmp_path: Path) -> None:
    losses = []
    for callback in (liger_hf.LigerCallback(undo=True, show=None), None):
        made = trainer(make().train(), tmp_path, max_steps=2, logging_steps=1, learning_rate=1e-2, **precision)
        if callback is not None:
            made.add_callback(callback)
        made.train()
        losses.append(losses_of(made))
        if callback is not None:
            assert callback.report.replaced == ALL
            assert "liger_head" not in vars(made.model)
    assert losses[0] == pytest.approx(losses[1], abs=2e-2 if precision else 2e-4)


@PRECISIONS
def test_a_model_that_is_created_for_each_training_run_is_patched_each_time(
    precision: dict[str, Any], tmp_path: Path
) -> None:
    shown: list[liger_hf.Report] = []
    made = trainer(lambda: make().train(), tmp_path, [liger_hf.LigerCallback(show=shown.append)], **precision)
    models = [made.model]
    for _ in range(2):
        made.train()
        models.append(made.model)
    assert len({id(model) for model in models}) == 3
    assert [report.replaced for report in shown] == [ALL] * 3
    assert [model.liger_report for model in models] == shown
    largest_of_an_evaluation(made)


def test_nothing_stands_in_unless_it_is_installed() -> None:
    code = "import sys, liger_hf, liger_hf.compat; from transformers.utils import is_liger_kernel_available as found; "
    done = forks.run(code + "print(found(), 'liger_kernel' in sys.modules)")
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("options", [{}, {"prediction_loss_only": True}], ids=["no_metrics", "loss_only"])
def test_an_evaluation_without_metrics_makes_no_logits(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make().train()
    patched = twin(plain)
    expected = trainer(plain, tmp_path, **options).evaluate()["eval_loss"]
    made = trainer(patched, tmp_path, [liger_hf.LigerCallback(show=None)], **options)
    assert made.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    monkeypatch.setattr("liger_core.ops.head.loop.CPU_BYTES", 4 * VOCABULARY * 4)
    assert largest_of_an_evaluation(made) < Rows(8).ids.numel() * VOCABULARY


def largest_of_an_evaluation(made: Trainer) -> int:
    """Elements of the largest tensor; fails if the logits are read."""
    with no_logits(), LargestResult() as largest:
        assert made.evaluate()["eval_loss"] > 0
    return largest.elements


def test_predictions_of_a_trainer_are_the_logits_of_the_unpatched_model(tmp_path: Path) -> None:
    plain = make().train()
    patched = twin(plain)
    expected = trainer(plain, tmp_path).predict(Rows(4))
    got = trainer(patched, tmp_path, [liger_hf.LigerCallback(show=None)]).predict(Rows(4))
    assert type(got.predictions) is type(expected.predictions)
    assert got.predictions == pytest.approx(expected.predictions, abs=1e-5)
    assert got.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-5)


LEFT_OUT = {"rope": False, "fused_linear_cross_entropy": False}
LEFT_OUT |= dict.fromkeys(("cross_entropy", "rms_norm", "tiled_mlp"), True)
NOTES = [
    "liger_kernel_config: tiled_mlp names no op of Liger and was ignored.",
    "liger_kernel_config: cross_entropy comes with fused_linear_cross_entropy, alone it was ignored.",
]
WITHOUT_NORMS = {"rope": 2, "swiglu": 2, "linear_cross_entropy": 1}
# Without norms, a sum is normed as before unless it is asked for.
CONFIGS: dict[str, tuple[Any, dict[str, int], list[str]]] = {
    "none": (None, ALL, []),
    "left_out": (LEFT_OUT, {"rms_norm": 5, "add_rms_norm": 2, "swiglu": 2}, NOTES),
    "norms_left_out": ({"rms_norm": False}, WITHOUT_NORMS, []),
    "sums_asked_for": ({"rms_norm": False, "add_rms_norm": True}, {**WITHOUT_NORMS, "add_rms_norm": 2}, []),
}


@pytest.mark.parametrize(("config", "replaced", "notes"), CONFIGS.values(), ids=CONFIGS)
def test_use_liger_kernel_puts_in_what_its_config_says(
    config: Any, replaced: dict[str, int], notes: list[str], stand_in: list[liger_hf.Report], tmp_path: Path
) -> None:
    trainer(make(), tmp_path, use_liger_kernel=True, liger_kernel_config=config).train()
    (report,) = stand_in
    assert report.replaced == replaced
    assert [note for note in report.notes if note.startswith("liger_kernel_config")] == notes


def test_undo_takes_the_stand_in_out() -> None:
    before = set(sys.modules)
    stand_in = liger_hf.compat.install()
    assert is_liger_kernel_available()
    assert liger_hf.compat.install() is stand_in
    stand_in.undo()
    assert not is_liger_kernel_available()
    assert {name for name in set(sys.modules) - before if "liger_kernel" in name} == set()
    stand_in.undo()


def test_what_the_stand_in_lacks_cannot_be_imported(stand_in: list[liger_hf.Report]) -> None:
    with pytest.raises(ImportError, match="cannot import name 'apply_liger_kernel_to_llama'"):
        from liger_kernel.transformers import apply_liger_kernel_to_llama  # noqa: F401


def test_the_real_package_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModuleType("liger_kernel")
    monkeypatch.setitem(sys.modules, "liger_kernel", real)
    with pytest.raises(OptionError, match=r"liger-kernel must not be installed.*use Trainer"):
        liger_hf.compat.install()
    assert sys.modules["liger_kernel"] is real


def test_a_real_package_that_is_not_yet_imported_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "liger_kernel.py").write_text("__version__ = '0.8.5'")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OptionError, match=f"liger-kernel must not be installed.* got {tmp_path}/liger_kernel.py; "):
        liger_hf.compat.install()
