# SPDX-License-Identifier: Apache-2.0
"""Runs a drawn call and judges it by the project's criterion, with the formula in float64 as the truth.

The yardstick is the formula in the dtype of the call, which is plain PyTorch; its error counts LEEWAY times. Whatever
fails by it meets TRIES more, each with other roundings (see rounding.py), and fails if it is worse than all of them. A
truth that is infinite must be met. Where plain PyTorch overflows although the truth is finite, anything goes; where it
is off by more than LOST, any finite value does, and in float16, whose range such a round-off leaves, infinity.
linear_cross_entropy sums gradients before they meet the upstream gradient and the normalizer, and linear_log_prob and
linear_divergence do so in float16, as their docstrings say: gradients whose sums are out of range are not judged. Where
round-off decides the result, because logits tie but for it, only the loss is judged. Where plain PyTorch comes within a
factor of 2 of overflow, another order of its sums and products may overflow.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.cases import in_float64, leaves, with_gradients
from conformance.guarding import GuardedMemory
from conformance.running import different_bits
from fuzz import formulas
from fuzz.drawing import Example, Floats, arranged
from fuzz.rounding import Reach, Rounding
from liger_core import BackendError, Op, Unsupported, use
from liger_core.accuracy import error, judge
from liger_core.kernels import plain_matmuls

LEEWAY, TRIES = 3.0, 8
# In float64 the truth has the same round-off as what it judges, which no random rounding shows where all terms are
# rounded alike.
LEEWAY_IN_FLOAT64 = 100.0
LOST = 0.3
# Logits, or elements of other inputs, from which a call is judged where it ran: a CPU takes seconds for its matmuls in
# half precision.
LARGE = 2**17
Tensors = dict[str, Tensor]
Gradients = dict[str, Tensor | None]


class Declined(Exception):
    """The backend declines this call."""


def complaints(op: Op[..., Any], backend: str, example: Example, device: torch.device) -> list[str]:
    """The faults of this call on `device`, where large ones are judged too; the others on the CPU, since many processes
    may share a GPU and each formula is many small calls.

    Raises Declined if the backend declines it.
    """
    bench = torch.device("cpu") if _size(example) < LARGE else device
    arguments = example.build(bench)
    asked = [n for n in example.asked if isinstance(arguments.get(n), Tensor)]
    first = next(v for v in arguments.values() if isinstance(v, Tensor)).dtype
    formula = getattr(formulas, op.name, op.reference)

    def answers(given: Mapping[str, Any], cotangents: Tensors | None) -> tuple[Tensors, Gradients, Tensors]:
        given = with_gradients(given, asked)
        with plain_matmuls():
            outputs = leaves(formula(**given))
            known = {n: c.to(outputs[n].dtype) for n, c in (cotangents or {}).items()}
            drawn = _cotangents(example, outputs) if cotangents is None else known
            return _detached(outputs), _gradients(outputs, {n: given[n] for n in asked}, drawn), drawn

    plain = answers(arguments, None)
    cotangents = plain[2]
    exact, exact_gradients, _ = answers(in_float64(arguments), cotangents)
    with GuardedMemory().installed() as memory:
        outputs, gradients, found = _call(op, backend, example, example.build(device), asked, cotangents)
        memory.check("the call")
    outputs = {n: v.to(bench) for n, v in outputs.items()}
    gradients = {n: None if g is None else g.to(bench) for n, g in gradients.items()}
    if list(outputs) != list(exact):
        return [f"outputs {list(exact)} expected, got {list(outputs)}"]
    found += _odd_predictions(op, arguments, outputs, exact)

    summed = None
    in_float16 = op.name in ("linear_log_prob", "linear_divergence") and first == torch.float16
    if op.name == "linear_cross_entropy" or in_float16:
        # What is summed before the upstream gradient is known: that of an upstream gradient whose largest element is 1.
        largest = max((float(c.abs().max()) for c in cotangents.values() if c.numel()), default=0.0)
        usual = 0.0 < largest < math.inf
        units = {n: c / largest if usual else torch.ones_like(c) for n, c in cotangents.items()}
        summed = answers(in_float64(arguments), units)[1]

    def judged(yardstick: tuple[Tensors, Gradients, Tensors], near_overflow: bool) -> dict[str, str]:
        verdicts = {n: _verdict(v, yardstick[0][n], exact[n], first, near_overflow) for n, v in outputs.items()}
        for name in asked:
            if summed is not None and _leaves_range(op, arguments, summed[name], arguments[name].dtype):
                continue
            trio = (gradients[name], yardstick[1][name], exact_gradients[name])
            verdicts[f"gradient of {name}"] = _gradient_verdict(*trio, first, near_overflow)
        return {name: verdict for name, verdict in verdicts.items() if verdict}

    wrong = judged(plain, near_overflow=False)
    if wrong and _has_near_ties(op, arguments):
        wrong = {name: verdict for name, verdict in wrong.items() if name == next(iter(outputs))}
    near_overflow = False
    if wrong:
        with Reach() as reach:
            answers(arguments, cotangents)
        near_overflow = reach.near_overflow
        wrong = judged(plain, near_overflow)
    for number in range(TRIES):
        if not wrong:
            break
        with Rounding(number):
            yardstick = answers(arguments, cotangents)
        worse = judged(yardstick, near_overflow)
        wrong = {name: verdict for name, verdict in wrong.items() if name in worse}
    return found + [f"{name}: {verdict}" for name, verdict in wrong.items()]


def _size(example: Example) -> int:
    shapes = {n: v.shape for n, v in example.arguments.items() if isinstance(v, Floats)}
    rows = math.prod(shapes.get("hidden", (0, 0))[:-1])
    return max(rows * shapes.get("weight", (0,))[0], *(math.prod(shape) for shape in shapes.values()))


def _has_near_ties(op: Op[..., Any], arguments: dict[str, Any]) -> bool:
    """Whether round-off decides the result: which of two logits, or of two probabilities, is larger, or whether a
    softcap is saturated."""
    given = in_float64(arguments)
    if op.name == "total_variation":
        return _differ_by_round_off(given["student"], given["teacher"], given["temperature"], 1.0)
    if not {"hidden", "weight"} <= given.keys() or not given["weight"].numel() or not given["hidden"].numel():
        return False
    heads = [(given, arguments["hidden"].dtype)]
    if op.name == "linear_divergence":
        theirs = {n: given[f"teacher_{n}"] for n in ("hidden", "weight", "logit_scale", "softcap")}
        heads.append((theirs | {"bias": given.get("teacher_bias")}, arguments["teacher_hidden"].dtype))
        student, teacher = (formulas.rows(op.name, head) for head, _ in heads)
        magnitude = 1.0 + float(student.abs().max() + teacher.abs().max())
        near = _differ_by_round_off(student, teacher, given["temperature"], magnitude)
        if given["kind"] == "total_variation" and near:
            return True
    return any(_hangs_on_round_off(op, head, dtype) for head, dtype in heads)


def _differ_by_round_off(student: Tensor, teacher: Tensor, temperature: float, magnitude: float) -> bool:
    apart = ((student / temperature).log_softmax(-1) - (teacher / temperature).log_softmax(-1)).abs()
    return bool(((apart > 0) & (apart < 16 * torch.finfo(torch.float32).eps * magnitude)).any())


def _hangs_on_round_off(op: Op[..., Any], head: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Whether two neighboring logits of a row differ by less than their round-off, by which one has all of the
    probability; and whether a logit is 0 but for its round-off, by which its softcap is saturated."""
    softcap, coldest = head["softcap"], float(torch.as_tensor(head.get("temperature", 1.0)).min())
    uncapped = formulas.rows(op.name, {**head, "softcap": None}) / (coldest if softcap is None else 1.0)
    terms = head["hidden"].reshape(-1, head["hidden"].shape[-1]).abs() @ head["weight"].abs().t()
    terms *= abs(head["logit_scale"]) / (coldest if softcap is None else 1.0)
    # Logits are rounded to the dtype of hidden, and their sums in float32.
    round_off = 4 * torch.finfo(dtype).eps * uncapped.abs() + 16 * torch.finfo(torch.float32).eps * terms
    if softcap is not None:
        return bool(((uncapped.abs() < round_off) & (round_off > softcap / 16)).any())
    logits, order = uncapped.sort(-1)
    round_off = round_off.gather(-1, order)[..., 1:]
    # The target may be any class, and the allowed ones may be any: all neighbors count.
    return bool(((logits.diff(dim=-1) < round_off) & (round_off > 16)).any())


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
    after = {n: given[n].detach() for n in before}
    found += [f"{name} was overwritten" for name in different_bits(unwritten, after)]
    if inplace:
        results = dict(zip(("q", "k"), outputs.values(), strict=True))
        found += [f"{name} must hold the result" for name in different_bits(results, after)]
    if arguments.get("main_grad") is not None and "weight" in asked:
        found += ["gradient of weight: None expected beside main_grad"] if gradients["weight"] is not None else []
        gradients["weight"] = given["main_grad"] / (3 if example.twice else 1)
    return outputs, gradients, found


def _layouts(example: Example, outputs: Tensors) -> dict[str, str]:
    """The layout of each output's upstream gradient."""
    return {name: example.upstream[i % len(example.upstream)] for i, name in enumerate(outputs)}


def _cotangents(example: Example, outputs: Tensors) -> Tensors:
    """A dense upstream gradient for every output that gets one, with the values that its layout allows."""
    # Another seed than that of any argument: an upstream gradient parallel to its input would leave nothing but
    # round-off.
    generator = torch.Generator().manual_seed(10_000 + example.seed)
    drawn = {}
    for name, layout in _layouts(example, outputs).items():
        output = outputs[name]
        values = torch.randn(output.shape, generator=generator) * example.factor
        if output.requires_grad and layout != "none":
            drawn[name] = arranged(values.to(output), layout).contiguous()
    return drawn


def _gradients(outputs: Tensors, inputs: Tensors, cotangents: Tensors, *, keep: bool = False) -> Gradients:
    used = [n for n in cotangents if outputs[n].requires_grad]
    if not used or not inputs:
        return dict.fromkeys(inputs)
    weights = [cotangents[n] for n in used]
    results = [outputs[n] for n in used]
    found = torch.autograd.grad(results, list(inputs.values()), weights, allow_unused=True, retain_graph=keep)
    return dict(zip(inputs, found, strict=True))


def _detached(tensors: Tensors) -> Tensors:
    return {n: t.detach() for n, t in tensors.items()}


def _odd_predictions(op: Op[..., Any], arguments: dict[str, Any], outputs: Tensors, exact: Tensors) -> list[str]:
    """What is wrong with arg-max classes and the accuracy.

    One of several equal logits, to within their rounding, is as good as another; the accuracy must be that of the
    classes that were chosen.
    """
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
    limits = torch.finfo(next(v for v in arguments.values() if isinstance(v, Tensor)).dtype)
    scale = abs(arguments.get("logit_scale", 1.0))
    ulp = limits.eps * (spread + limits.smallest_normal * scale)
    # Logits beyond the range of the dtype are all infinite.
    coldest = float(torch.as_tensor(arguments.get("temperature", 1.0)).min()) if got.numel() else 1.0
    infinite = largest.abs() > min(limits.max * scale, torch.finfo(torch.float32).max * min(1.0, coldest))
    near = infinite | (chosen >= largest - 8 * ulp * rows.shape[1] ** 0.5)
    wrong = int((torch.where(counted.reshape(-1), ~near, got.reshape(-1) != -1)).sum())
    exact["output.1.prediction"] = got
    if "output.1.accuracy" in outputs:
        hit = (counted & (got == target)).double()
        mean = hit.sum() / counted.sum().clamp(min=1)
        exact["output.1.accuracy"] = hit if arguments["reduction"] == "none" else mean
    return [f"prediction: {wrong} of {got.numel()} are not the largest logit"] if wrong else []


def _verdict(value: Tensor, plain: Tensor, exact: Tensor, first: torch.dtype, near_overflow: bool) -> str | None:
    """The faults of one output or gradient, given the results of plain PyTorch and float64; `first` is the dtype of the
    first input.

    near_overflow  what is not finite is not judged
    """
    if value.shape == exact.shape and value.is_floating_point():
        finite = exact.isfinite()
        differs = (value.double() != exact) & ~(value.isnan() & exact.isnan())
        if wrong := int((~finite & differs).sum()):
            return f"{wrong} elements must be {exact[~finite].unique().tolist()}, got {value[~finite].tolist()[:4]}"
        # A truth beyond the largest number of the dtype is infinite once it is rounded, and the largest number may be
        # either.
        judged = finite & plain.isfinite() & (exact.abs() < torch.finfo(value.dtype).max)
        judged &= value.isfinite() | (not near_overflow)
        value, plain, exact = (torch.where(judged, t, 0.0) for t in (value, plain, exact))
        sound = ~value.isnan() if value.dtype == torch.float16 else value.isfinite()
        if error(plain, exact).frobenius > LOST and bool(sound.all()):
            return None
        # Where float32 has fewer digits the smaller a number is, the order of factors decides.
        if all(t.numel() and float(t.abs().max()) < torch.finfo(torch.float32).smallest_normal for t in (value, exact)):
            return None
    # The coarser of the two dtypes: float32 statistics of bfloat16 logits, or a bfloat16 weight of a float32 input.
    dtype = max((t for t in (first, value.dtype) if t.is_floating_point), key=lambda t: torch.finfo(t).eps)
    leeway = LEEWAY_IN_FLOAT64 if dtype == torch.float64 else LEEWAY
    return judge(value, plain.to(value.dtype), exact, dtype, leeway=leeway)


def _gradient_verdict(
    value: Tensor | None, plain: Tensor | None, exact: Tensor | None, first: torch.dtype, near_overflow: bool
) -> str | None:
    """The same for a gradient, which may be None where nothing but zeros arrives."""
    if value is not None and plain is not None and exact is not None:
        return _verdict(value, plain, exact, first, near_overflow)
    if all(t is None or not bool(t.any()) for t in (value, exact)):
        return None
    return f"{'None' if exact is None else 'a tensor'} expected"
