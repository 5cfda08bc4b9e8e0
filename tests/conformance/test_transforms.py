# SPDX-License-Identifier: Apache-2.0
"""torch.func and forward-mode AD: every op gives the right derivative or says that it has none; nothing is dropped in
silence."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from conformance.cases import Case, leaves, with_gradients
from conformance.running import Trial
from liger_core import BackendError, GradientError, Unsupported

pytestmark = pytest.mark.slow


def _derivative(trial: Trial, call: Callable[..., Any]) -> list[Tensor | None]:
    """The tangents of all outputs along one random direction."""
    torch.manual_seed(1)
    with forward_ad.dual_level():
        given = {
            n: forward_ad.make_dual(v.detach(), torch.randn_like(v)) if n in trial.names else v
            for n, v in trial.arguments.items()
        }
        return [forward_ad.unpack_dual(t).tangent for t in leaves(call(given)).values()]


def _or_refused(run: Callable[[], Any]) -> Any:
    """What a run returns; None where the op refuses it with a sentence of its own, or its backend declines."""
    try:
        return run()
    except (GradientError, pytest.skip.Exception):
        return None
    except BackendError as error:
        if isinstance(error.__cause__, Unsupported):
            return None
        raise


def test_forward_mode_ad_is_right_or_refused(form_case: Case) -> None:
    trial = Trial(form_case)
    got = _or_refused(lambda: _derivative(trial, form_case.call))
    if got is None or not trial.names:
        return
    want = _derivative(trial, trial.define)
    dropped = [i for i, (one, other) in enumerate(zip(got, want, strict=True)) if one is None and other is not None]
    advice = "leave calls in a level of forward-mode AD to the reference, or raise"
    assert not dropped, f"outputs {dropped} lost their tangents: {advice}"
    assert [t is None for t in got] == [t is None for t in want]
    for one, other in zip(got, want, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other)


def test_a_level_of_forward_mode_ad_changes_nothing_for_tensors_without_tangent(pattern_case: Case) -> None:
    trial = Trial(pattern_case)
    with forward_ad.dual_level():
        got = trial.run()
    assert trial.complaints(got) == []


def test_torch_func_grad_is_right_or_refused(form_case: Case) -> None:
    trial = Trial(form_case)
    if not trial.names:
        return

    rest = with_gradients(trial.arguments, [])

    def total(values: dict[str, Tensor], call: Callable[..., Any]) -> Tensor:
        outputs = leaves(call({**rest, **values}))
        return sum((t.square().sum() for t in outputs.values() if t.is_floating_point()), torch.zeros(()))

    values = {n: trial.arguments[n].detach() for n in trial.names}
    got = _or_refused(lambda: torch.func.grad(lambda v: total(v, form_case.call))(values))
    if got is None:
        return
    for name, gradient in torch.func.grad(lambda v: total(v, trial.define))(values).items():
        torch.testing.assert_close(got[name], gradient)


def test_vmap_is_right_or_refused(form_case: Case) -> None:
    trial = Trial(form_case)
    values = {n: torch.stack([v.detach(), v.detach() * 0.5]) for n, v in trial.arguments.items() if n in trial.names}
    rest = with_gradients({n: v for n, v in trial.arguments.items() if n not in values}, [])
    if not values:
        return

    def mapped(call: Callable[..., Any]) -> Any:
        return torch.vmap(lambda batch: tuple(leaves(call({**batch, **rest})).values()))(values)

    got = _or_refused(lambda: mapped(form_case.call))
    if got is not None:
        torch.testing.assert_close(got, mapped(trial.define))


def test_a_batch_of_upstream_gradients_is_right_or_refused(form_case: Case) -> None:
    trial = Trial(form_case)
    given = with_gradients(trial.arguments, trial.names)
    outputs = {n: t for n, t in leaves(form_case.call(given)).items() if t.requires_grad}
    if not trial.names or not outputs:
        return
    inputs, results = [given[n] for n in trial.names], [*outputs.values()]
    upstream = [torch.stack([torch.randn_like(t) for _ in range(2)]) for t in results]

    def gradients(grads: list[Tensor], batched: bool) -> Any:
        options = {"retain_graph": True, "allow_unused": True, "is_grads_batched": batched}
        found = torch.autograd.grad(results, inputs, grads, **options)
        return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]

    try:
        got = gradients(upstream, True)
    except GradientError:
        return
    except RuntimeError as error:
        # torch lacks some operations of references, and a function that torch.compile returns reads data pointers.
        if re.search("Batching rule not implemented|Cannot access data pointer", str(error)):
            return
        raise
    for index in range(2):
        one = [g[index] if g.dim() > x.dim() else g for g, x in zip(got, inputs, strict=True)]
        torch.testing.assert_close(one, gradients([u[index] for u in upstream], False))
