# SPDX-License-Identifier: Apache-2.0
"""Only the instances of the given model change, and undo makes them what they were."""

import copy
import itertools
import sys
from contextlib import nullcontext
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

import liger_hf
from hf.tiny_models import ARCHITECTURES, make, step, tokens

pytestmark = [pytest.mark.slow, pytest.mark.cpu]


def shared_state(model: nn.Module) -> dict[tuple[str, str], int]:
    """The identity of everything that models of the process share: members of classes, globals of modeling files, the
    loss table."""
    classes = {base for module in model.modules() for base in type(module).__mro__ if base is not object}
    spaces = {f"class {c.__qualname__}": vars(c) for c in classes}
    spaces |= {f"module {c.__module__}": vars(sys.modules[c.__module__]) for c in classes}
    spaces["LOSS_MAPPING"] = LOSS_MAPPING
    members = ((space, name, value) for space, values in spaces.items() for name, value in values.items())
    return {(space, name): id(value) for space, name, value in members if not name.startswith("__")}


def instance_state(model: nn.Module) -> dict[str, Any]:
    """What every instance has in its own dictionary."""
    return {name: {key: id(value) for key, value in vars(module).items()} for name, module in model.named_modules()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_changes_but_the_instances_of_the_model_and_nothing_after_undo(architecture: str) -> None:
    bystander, model = make(architecture).train(), make(architecture).train()
    shared, own, others = shared_state(model), instance_state(model), instance_state(bystander)
    expected = step(bystander, **tokens())
    report = liger_hf.apply(model)
    step(model, **tokens())
    assert shared_state(model) == shared
    assert instance_state(bystander) == others
    after = step(bystander, **tokens())
    assert [name for name in expected if not torch.equal(expected[name], after[name])] == []
    for _ in range(2):
        report.undo()
        assert instance_state(model) == own
    # A default device changes nothing.
    with torch.device("meta"):
        assert liger_hf.apply(model).replaced == report.replaced


def test_a_block_undoes_what_it_applied_also_after_an_error() -> None:
    model = make()
    before = instance_state(model)
    with pytest.raises(ZeroDivisionError), liger_hf.apply(model):
        raise ZeroDivisionError
    assert instance_state(model) == before


def test_undo_restores_a_loss_function_that_was_set_on_the_instance() -> None:
    model = make()
    model.loss_function = ForCausalLMLoss
    liger_hf.apply(model).undo()
    assert model.__dict__["_loss_function"] is ForCausalLMLoss


def test_applying_twice_changes_nothing_and_says_so() -> None:
    model = make()
    first = liger_hf.apply(model)
    before = instance_state(model)
    second = liger_hf.apply(model)
    assert instance_state(model) == before
    assert second.replaced == {}
    assert second.notes == ["Nothing was changed: an earlier apply has replaced these modules already."]
    assert liger_hf.apply(model, only=[]).notes == []
    second.undo()
    assert instance_state(model) == before
    first.undo()


@pytest.mark.parametrize("order", itertools.permutations(range(3)), ids=str)
def test_reports_of_one_model_can_be_undone_in_any_order(order: tuple[int, ...]) -> None:
    model = make()
    before = instance_state(model)
    reports = [liger_hf.apply(model, only=[op], verify=False) for op in ("rms_norm", "swiglu", "linear_cross_entropy")]
    left = list(reports)
    for index in order:
        reports[index].undo()
        left.remove(reports[index])
        assert getattr(model, "liger_report", None) is (left[-1] if left else None)
        # Also while one report is left.
        with pytest.raises(liger_hf.ModelError) if left else nullcontext():
            model._replicate_for_data_parallel()
    assert instance_state(model) == before


def test_reports_of_a_copied_model_can_be_undone_in_any_order() -> None:
    model = make()
    before = {name: set(state) for name, state in instance_state(model).items()}
    for op in ("rms_norm", "swiglu"):
        liger_hf.apply(model, only=[op], verify=False)
    copied = copy.deepcopy(model)
    copied.liger_report.earlier.undo()
    copied.liger_report.undo()
    assert {name: set(state) for name, state in instance_state(copied).items()} == before
    assert model.liger_report.earlier.patches


def test_a_deep_copy_of_a_patched_model_is_independent() -> None:
    model = make().train()
    liger_hf.apply(model)
    inputs = tokens()
    before = step(model, **inputs)["loss"]
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert float(step(copied, **inputs)["loss"]) == pytest.approx(float(torch.log(torch.tensor(300.0))))
    assert torch.equal(step(model, **inputs)["loss"], before)


def test_random_state_weights_and_gradients_are_untouched_by_the_check() -> None:
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    liger_hf.apply(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])] == []
    assert [name for name, parameter in model.named_parameters() if parameter.grad is not None] == []


def test_a_forward_wrapped_again_after_apply_passes_calls_through_after_undo() -> None:
    model = make().train()
    inputs = tokens()
    before = step(model, **inputs)
    report = liger_hf.apply(model)
    ours = model.forward.__func__
    model.forward = MethodType(lambda self, *args, **options: ours(self, *args, **options), model)
    report.undo()
    after = step(model, **inputs)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_undo_names_the_module_whose_forward_was_replaced_again() -> None:
    model = make()
    report = liger_hf.apply(model)
    model.model.norm.forward = lambda x: x
    with pytest.raises(liger_hf.ModelError, match=r"LlamaRMSNorm\.forward was replaced again; undo that first"):
        report.undo()
