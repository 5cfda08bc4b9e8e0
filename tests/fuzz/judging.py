# SPDX-License-Identifier: Apache-2.0
"""Runs a drawn call and judges it by the project's criterion, with the formula in float64 as the truth.

The yardstick is the formula in the dtype of the call, which is plain PyTorch; its error counts LEEWAY times. Whatever fails by it meets
TRIES more, each with other roundings (see rounding.py), and fails if it is worse than all of them. A truth that is infinite must be met.
Where plain PyTorch overflows although the truth is finite, anything goes; where it is off by more than LOST, any finite value does,
and in float16, whose range such a round-off leaves, infinity. linear_cross_entropy sums gradients before they meet the upstream gradient
and the normalizer, and linear_log_prob and linear_divergence do so in float16, as their docstrings say: gradients whose sums are out of range are not judged. Neither are those
of the total variation where probabilities nearly tie.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.cases import in_float64, leaves, with_gradients
from conformance.guarding import GuardedMemory
from conformance.running import different_bits
from fuzz import formulas
from fuzz.drawing import Example, arranged
from fuzz.rounding import Rounding
from liger_core import BackendError, Op, Unsupported, use
from liger_core.accuracy import error, judge

LEEWAY, TRIES = 3.0, 8
# In float64 the truth has the same round-off as what it judges, which no random rounding shows where all terms are rounded alike.
LEEWAY_IN_FLOAT64 = 100.0
LOST = 0.3
Tensors = dict[str, Tensor]
Gradients = dict[str, Tensor | None]


class Declined(Exception):
    """The backend declines this call."""


def complaints(op: Op[..., Any], backend: str, example: Example, device: torch.device) -> list[str]:
    """The faults of this call on `device`, judged on the CPU: many processes may share a GPU, and each formula is many small calls.

    Raises Declined if the backend declines it.
    """
    arguments = example.build(torch.device("cpu"))
    asked = [n for n in example.asked if isinstance(arguments.get(n), Tensor)]
    first = next(v for v in arguments.values() if isinstance(v, Tensor)).dtype
    formula = getattr(formulas, op.name)

    def answers(given: Mapping[str, Any], cotangents: Tensors | None) -> tuple[Tensors, Gradients, Tensors]:
        given = with_gradients(given, asked)
        outputs = leaves(formula(**given))
        drawn = _cotangents(example, outputs) if cotangents is None else {n: c.to(outputs[n].dtype) for n, c in cotangents.items()}
        return _detached(outputs), _gradients(outputs, {n: given[n] for n in asked}, drawn), drawn

    plain = answers(arguments, None)
    cotangents = plain[2]
    exact, exact_gradients, _ = answers(in_float64(arguments), cotangents)
    with GuardedMemory().installed() as memory:
        outputs, gradients, found = _call(op, backend, example, example.build(device), asked, cotangents)
        memory.check("the call")
    outputs = {n: v.cpu() for n, v in outputs.items()}
    gradients = {n: None if g is None else g.cpu() for n, g in gradients.items()}
    if list(outputs) != list(exact):
        return [f"outputs {list(exact)} expected, got {list(outputs)}"]
    found += _odd_predictions(op, arguments, outputs, exact)

    summed = None
    if op.name == "linear_cross_entropy" or (op.name in ("linear_log_prob", "linear_divergence") and first == torch.float16):
        # What is summed before the upstream gradient is known: that of an upstream gradient whose largest element is 1.
        largest = max((float(c.abs().max()) for c in cotangents.values() if c.numel()), default=0.0)
        units = {n: c / largest if largest and math.isfinite(largest) else torch.ones_like(c) for n, c in cotangents.items()}
        summed = answers(in_float64(arguments), units)[1]

    ties = _has_near_ties(op, arguments)

    def judged(yardstick: tuple[Tensors, Gradients, Tensors]) -> dict[str, str]:
        verdicts = {n: _verdict(v, yardstick[0][n], exact[n], first) for n, v in outputs.items()}
        for name in asked if not ties else ():
            if summed is not None and _leaves_range(op, arguments, summed[name], arguments[name].dtype):
                continue
            trio = (gradients[name], yardstick[1][name], exact_gradients[name])
            verdicts[f"gradient of {name}"] = _gradient_verdict(*trio, first)
        return {name: verdict for name, verdict in verdicts.items() if verdict}

    wrong = judged(plain)
    for number in range(TRIES):
        if not wrong:
            break
        with Rounding(number):
            yardstick = answers(arguments, cotangents)
        worse = judged(yardstick)
        wrong = {name: verdict for name, verdict in wrong.items() if name in worse}
    return found + [f"{name}: {verdict}" for name, verdict in wrong.items()]


def _has_near_ties(op: Op[..., Any], arguments: dict[str, Any]) -> bool:
    """Whether the gradient hangs on which of two probabilities is larger, of some that only float64 can distinguish."""
    given = in_float64(arguments)
    if op.name == "total_variation":
        return _differ_by_round_off(given["student"], given["teacher"], given["temperature"], 1.0)
    if op.name != "linear_divergence":
        return False
    theirs = {"hidden": given["teacher_hidden"], "weight": given["teacher_weight"], "bias": given.get("teacher_bias")}
    theirs |= {"logit_scale": given["teacher_logit_scale"], "softcap": given["teacher_softcap"]}
    student, teacher = formulas.rows(op.name, given), formulas.rows(op.name, theirs)
    if not student.numel():
        return False
    magnitude = 1.0 + float(student.abs().max() + teacher.abs().max())
    if given["kind"] == "total_variation" and _differ_by_round_off(student, teacher, given["temperature"], magnitude):
        return True
    return any(_leads_by_round_off(t, arguments[n].dtype) for t, n in ((student, "hidden"), (teacher, "teacher_hidden")))


def _differ_by_round_off(student: Tensor, teacher: Tensor, temperature: float, magnitude: float) -> bool:
    apart = ((student / temperature).log_softmax(-1) - (teacher / temperature).log_softmax(-1)).abs()
    return bool(((apart > 0) & (apart < 16 * torch.finfo(torch.float32).eps * magnitude)).any())


def _leads_by_round_off(logits: Tensor, dtype: torch.dtype) -> bool:
    """Whether the largest logit of a row leads by less than its round-off, and by that it has all of the probability."""
    if logits.shape[-1] < 2:
        return False
    first, second = logits.topk(2).values.unbind(-1)
    round_off = 16 * torch.finfo(dtype).eps * first.abs()
    return bool(((first > second) & (first - second < round_off) & (round_off > 16)).any())


def _leaves_range(op: Op[..., Any], arguments: Mapping[str, Any], exact: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether this sum of gradients is out of the normal range of its dtype, with a margin of 2⁴."""
    if exact is None or not exact.any():
        return False
    normalizer = arguments.get("normalizer")
    counted = arguments["hidden"][..., 0] if arguments.get("target") is None else arguments["target"]
    tokens = counted.numel() if normalizer is None else float(normalizer)
    largest = float(exact[exact.isfinite()].abs().max()) if exact.isfinite().any() else math.inf
    largest *= tokens if arguments.get("reduction") == "mean" else 1
    limits = torch.finfo(dtype)
    # The gradient of a logit is in the same dtype.
    weight = arguments.get("token_weight")
    if weight is not None and weight.numel():
        largest = max(largest, float(weight.abs().max()) * abs(arguments["logit_scale"]))
    return not (16 * limits.smallest_normal if dtype == torch.float16 else 0.0) < largest < limits.max / 16


def _call(
    op: Op[..., Any], backend: str, example: Example, arguments: dict[str, Any], asked: list[str], cotangents: Tensors
) -> tuple[Tensors, Gradients, list[str]]:
    """Outputs and gradients of the backend, and what is wrong besides their values."""
    leaf = with_gradients(arguments, asked)
    given, inplace = dict(leaf), bool(arguments.get("inplace"))
    if inplace:
        # What is overwritten must not be a leaf, but may be a view.
        for name in ("q", "k"):
            leaf[name] = leaf[name].detach().contiguous().requires_grad_(name in asked)
            given[name] = arranged(leaf[name].clone(), example.arguments[name].layout)
    before = {n: v.detach().clone() for n, v in given.items() if isinstance(v, Tensor)}
    try:
        with use(backend, only=[op]):
            returned = leaves(op(**given))
    except BackendError as error:
        if isinstance(error.__cause__, Unsupported):
            raise Declined from error
        raise
    outputs = _detached(returned)
    laid = {n: arranged(c.to(returned[n]), _layouts(example, returned)[n]) for n, c in cotangents.items()}
    inputs = {n: leaf[n] for n in asked}
    gradients = _gradients(returned, inputs, laid, keep=example.twice)
    found = []
    if example.twice:
        changed = different_bits(gradients, _gradients(returned, inputs, laid, keep=True))
        found += [f"gradient of {name}: other bits in a second backward pass" for name in changed]
        # The last one, which frees the graph, may work in what was saved; it is judged like any other.
        gradients = _gradients(returned, inputs, laid)
    written = {"q", "k"} if inplace else {"gate", "up"} if arguments.get("overwrite") else set()
    unwritten = {n: v for n, v in before.items() if n not in written | {"main_grad"}}
    found += [f"{name} was overwritten" for name in different_bits(unwritten, {n: given[n].detach() for n in unwritten})]
    if inplace:
        results = dict(zip(("q", "k"), outputs.values(), strict=True))
        found += [f"{name} must hold the result" for name in different_bits(results, {n: given[n].detach() for n in results})]
    if arguments.get("main_grad") is not None and "weight" in asked:
        found += ["gradient of weight: None expected beside main_grad"] if gradients["weight"] is not None else []
        gradients["weight"] = given["main_grad"] / (3 if example.twice else 1)
    return outputs, gradients, found


def _layouts(example: Example, outputs: Tensors) -> dict[str, str]:
    """The layout of each output's upstream gradient."""
    return {name: example.upstream[i % len(example.upstream)] for i, name in enumerate(outputs)}


def _cotangents(example: Example, outputs: Tensors) -> Tensors:
    """A dense upstream gradient for every output that gets one, with the values that its layout allows."""
    # Another seed than that of any argument: an upstream gradient parallel to its input would leave nothing but round-off.
    generator = torch.Generator().manual_seed(10_000 + example.seed)
    drawn = {}
    for name, layout in _layouts(example, outputs).items():
        output = outputs[name]
        values = torch.randn(output.shape, generator=generator) * example.factor
        if output.requires_grad and layout != "none":
            drawn[name] = arranged(values.to(output.dtype), layout).contiguous()
    return drawn


def _gradients(outputs: Tensors, inputs: Tensors, cotangents: Tensors, *, keep: bool = False) -> Gradients:
    used = [n for n in cotangents if outputs[n].requires_grad]
    if not used or not inputs:
        return dict.fromkeys(inputs)
    weights = [cotangents[n] for n in used]
    found = torch.autograd.grad([outputs[n] for n in used], list(inputs.values()), weights, allow_unused=True, retain_graph=keep)
    return dict(zip(inputs, found, strict=True))


def _detached(tensors: Tensors) -> Tensors:
    return {n: t.detach() for n, t in tensors.items()}


def _odd_predictions(op: Op[..., Any], arguments: dict[str, Any], outputs: Tensors, exact: Tensors) -> list[str]:
    """What is wrong with arg-max classes and the accuracy. One of several equal logits, to within their rounding, is as good as another;
    the accuracy must be that of the classes that were chosen."""
    if "output.1.prediction" not in outputs:
        return []
    got, target = outputs["output.1.prediction"], arguments["target"]
    counted = target != arguments["ignore_index"]
    if target.dim() > got.dim():
        counted = counted.any(-1)
    rows = formulas.rows(op.name, in_float64(arguments))
    chosen = rows.gather(-1, got.reshape(-1, 1).clamp(0, rows.shape[1] - 1))[:, 0]
    largest = rows.amax(-1)
    spread = torch.where(rows.isfinite(), rows.abs(), 0.0).amax(-1)
    finest = next(v for v in arguments.values() if isinstance(v, Tensor)).dtype
    limits = torch.finfo(finest)
    ulp = limits.eps * (spread + limits.smallest_normal * abs(arguments.get("logit_scale", 1.0)))
    # Logits beyond the range of the dtype are all infinite.
    coldest = float(torch.as_tensor(arguments.get("temperature", 1.0)).min()) if got.numel() else 1.0
    infinite = largest.abs() > min(limits.max * abs(arguments.get("logit_scale", 1.0)), torch.finfo(torch.float32).max * min(1.0, coldest))
    near = infinite | (chosen >= largest - 8 * ulp * rows.shape[1] ** 0.5)
    wrong = int((torch.where(counted.reshape(-1), ~near, got.reshape(-1) != -1)).sum())
    exact["output.1.prediction"] = got
    if "output.1.accuracy" not in outputs:
        return [f"prediction: {wrong} of {got.numel()} are not the largest logit"] if wrong else []
    hit = (counted & (got == target)).double()
    exact["output.1.accuracy"] = hit if arguments["reduction"] == "none" else hit.sum() / counted.sum().clamp(min=1)
    return [f"prediction: {wrong} of {got.numel()} are not the largest logit"] if wrong else []


def _verdict(value: Tensor, plain: Tensor, exact: Tensor, first: torch.dtype) -> str | None:
    """The faults of one output or gradient, given the results of plain PyTorch and float64; `first` is the dtype of the first input."""
    if value.shape == exact.shape and value.is_floating_point():
        finite = exact.isfinite()
        differs = (value.double() != exact) & ~(value.isnan() & exact.isnan())
        if wrong := int((~finite & differs).sum()):
            return f"{wrong} elements must be {exact[~finite].unique().tolist()}, got {value[~finite].tolist()[:4]}"
        # A truth beyond the largest number of the dtype is infinite once it is rounded, and the largest number may be either.
        judged = finite & plain.isfinite() & (exact.abs() < torch.finfo(value.dtype).max)
        value, plain, exact = (torch.where(judged, t, 0.0) for t in (value, plain, exact))
        sound = ~value.isnan() if value.dtype == torch.float16 else value.isfinite()
        if error(plain, exact).frobenius > LOST and bool(sound.all()):
            return None
    # The coarser of the two dtypes: float32 statistics of bfloat16 logits, or a bfloat16 weight of a float32 input.
    dtype = max((t for t in (first, value.dtype) if t.is_floating_point), key=lambda t: torch.finfo(t).eps)
    leeway = LEEWAY_IN_FLOAT64 if dtype == torch.float64 else LEEWAY
    return judge(value, plain.to(value.dtype), exact, dtype, leeway=leeway)


def _gradient_verdict(value: Tensor | None, plain: Tensor | None, exact: Tensor | None, first: torch.dtype) -> str | None:
    """The same for a gradient, which may be None where nothing but zeros arrives."""
    if value is not None and plain is not None and exact is not None:
        return _verdict(value, plain, exact, first)
    if all(t is None or not bool(t.any()) for t in (value, exact)):
        return None
    return f"{'None' if exact is None else 'a tensor'} expected"
