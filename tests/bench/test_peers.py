# SPDX-License-Identifier: Apache-2.0
"""The peers that need no package compute what the ops define, and one that writes to its inputs disturbs nobody."""

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.commands import LIMITS, InProcess, assert_refused
from liger_bench import peers
from liger_bench.bench.case import Case, CaseRun, make_case
from liger_bench.bench.implementations import Implementation, backend, peer
from liger_bench.bench.measure import Bench
from liger_bench.bench.rows import OpRow
from liger_bench.peers import Peer, eager, liger_kernel, torch_compile
from liger_core import (
    Op,
    cross_entropy,
    geglu,
    jsd,
    kl_div,
    linear_divergence,
    linear_log_prob,
    relu_squared,
    rms_norm,
    swiglu,
    total_variation,
)
from liger_core.builtin import CATALOGUE
from liger_core.ops.head.head import head_workload

CPU = torch.device("cpu")
WHERE = {"machine": "m", "versions": "v", "commit": "c", "date": "d"}
PLAIN = [
    (variant, op)
    for name in ("eager", "separate", "torch")
    for variant in peers.peers(name)
    for op in CATALOGUE
    if op.name in variant.calls
]


def quick_case(op: Op[..., Any], **options: Any) -> Case:
    """The quick workload of an op, with these options."""
    case = make_case(op, next(w for w in op.workloads() if w.quick), CPU, torch.float32)
    case.arguments.update(options)
    case.set_exact()
    return case


def log_prob_case(mode: str, **options: Any) -> Case:
    """Log-probabilities of a small head, of some ignored tokens if `mode` is "options"."""
    case = make_case(linear_log_prob, head_workload(16, 8, 64, mode=mode, **options), CPU, torch.float32)
    if mode == "options":
        case.arguments["target"][:4] = options.get("ignore_index", -100)
    case.set_exact()
    return case


def measured(case: Case, implementations: list[Implementation]) -> list[OpRow]:
    return Bench(CPU, torch.float32, LIMITS, 0.0, WHERE, rounds=2).rows(case, implementations)


def assert_agrees(case: Case, implementation: Implementation, most: float) -> None:
    errors = case.errors(CaseRun(case, implementation).full())
    assert max(*errors.outputs, *errors.gradients) < most


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "op"), PLAIN, ids=[f"{variant.name}-{op.name}" for variant, op in PLAIN])
def test_a_peer_agrees_with_float64(variant: Peer, op: Op[..., Any]) -> None:
    assert_agrees(quick_case(op), peer(op, variant), 1e-6)


OPTIONS: dict[str, dict[str, Any]] = {
    "lean": {"budget": 4 * 64 * 4},
    "64_targets": {"targets": 64},
    "return_entropy": {"return_entropy": True},
    "statistics": {"return_statistics": True},
}


@pytest.mark.parametrize("mode", OPTIONS)
def test_eager_computes_the_log_probabilities_of_every_mode(mode: str) -> None:
    assert mode in {w.name.rpartition("-")[2] for w in linear_log_prob.workloads()}
    case = log_prob_case(mode, **OPTIONS[mode])
    for implementation in (peer(linear_log_prob, peers.peers("eager")[0]), backend(linear_log_prob, "reference")):
        assert_agrees(case, implementation, 1e-6)


def stand_in_for_liger_kernel() -> SimpleNamespace:
    """Its functions as its documentation describes them: log-probabilities or probabilities in, the mean over rows out."""

    def jsd(log_q: Tensor, log_p: Tensor, shift_labels: None = None, beta: float = 0.5) -> Tensor:
        kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
        assert float(log_q.detach().exp().sum(-1)[0]) == pytest.approx(1.0)
        return eager._divergence(kind, log_q, log_p, beta, 1.0, "mean", None)

    def fused_linear_jsd(
        x: Tensor, w: Tensor, t: Tensor, u: Tensor, shift_labels: None, jsd_beta: float, temperature: float
    ) -> Tensor:
        return jsd(*((a @ b.t() / temperature).log_softmax(-1) for a, b in ((x, w), (t, u))), beta=jsd_beta)

    def fused_linear_kl_div(x: Tensor, w: Tensor, p: Tensor, reduction: str, temperature: float) -> Tensor:
        assert not p.requires_grad
        return torch.nn.functional.kl_div((x @ w.t() / temperature).log_softmax(-1), p, reduction=reduction)

    def kl_div(log_q: Tensor, log_p: Tensor, reduction: str, log_target: bool) -> Tensor:
        return torch.nn.functional.kl_div(log_q, log_p, reduction=reduction, log_target=log_target)

    def tvd(q: Tensor, p: Tensor, shift_labels: None, reduction: str) -> Tensor:
        assert reduction == "batchmean"
        return 0.5 * (q - p).abs().sum() / q.shape[0]

    found = SimpleNamespace(liger_jsd=jsd, liger_fused_linear_jsd=fused_linear_jsd, liger_kl_div=kl_div, liger_tvd=tvd)
    found.liger_fused_linear_kl_div = fused_linear_kl_div
    return found


class ScaledCrossEntropy:
    """Its per-token loss as its documentation describes it: the negative log-probability at a temperature, 0 where
    ignored."""

    @staticmethod
    def apply(
        x: Tensor, w: Tensor, target: Tensor, temperature: float = 1.0, ignore_index: int = -100, tiles: int = 1,
        return_entropy: bool = False,
    ) -> Any:  # fmt: skip
        logits = (x @ w.t()).float() / temperature
        loss = torch.nn.functional.cross_entropy(logits, target, ignore_index=ignore_index, reduction="none")
        log_p = logits.log_softmax(-1)
        return (loss, -(log_p.exp() * log_p).sum(-1) * (target != ignore_index)) if return_entropy else loss


DIVERGENCES = [(op, {}) for op in (kl_div, jsd, total_variation)]
DIVERGENCES.append((jsd, {"beta": 0.3, "temperature": 2.0}))
DIVERGENCES.append((linear_divergence, {"kind": "jsd", "beta": 0.3, "temperature": 2.0}))
DIVERGENCES += [(linear_divergence, {"kind": kind}) for kind in ("forward_kl", "reverse_kl", "jsd")]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "options"), DIVERGENCES, ids=[f"{op.name} {options}" for op, options in DIVERGENCES])
def test_liger_kernel_is_asked_for_the_divergence_of_the_op(op: Op[..., Any], options: dict[str, Any]) -> None:
    variant = Peer("liger-kernel", liger_kernel._divergences(stand_in_for_liger_kernel()))
    assert_agrees(quick_case(op, **options), peer(op, variant), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_liger_kernel_is_asked_for_the_divergence_from_the_probabilities_of_the_teacher(temperature: float) -> None:
    case = quick_case(linear_divergence, kind="forward_kl", temperature=temperature)
    variant = Peer("soft", liger_kernel._soft_labels(stand_in_for_liger_kernel()))
    assert_agrees(case, peer(linear_divergence, variant), 1e-5)


def log_prob_of_liger_kernel(function: Any, monkeypatch: pytest.MonkeyPatch) -> Peer:
    module = SimpleNamespace(LigerFusedLinearScaledCrossEntropyFunction=function)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", module)
    return Peer("liger-kernel", liger_kernel._calls(SimpleNamespace(), print))


class ScaledCrossEntropyInChunks:
    """The same without a number of tiles."""

    @staticmethod
    def apply(x: Tensor, w: Tensor, target: Tensor, temperature: float, ignore_index: int, return_entropy: bool) -> Any:
        return ScaledCrossEntropy.apply(x, w, target, temperature, ignore_index, return_entropy=return_entropy)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [False, True], ids=["whole", "in chunks"])
@pytest.mark.parametrize("options", [{}, {"return_entropy": True, "ignore_index": 3, "temperature": 2.0}], ids=str)
def test_liger_kernel_is_asked_for_the_log_probabilities_of_the_op(
    options: dict[str, Any], chunks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = log_prob_of_liger_kernel(ScaledCrossEntropy, monkeypatch)
    if chunks:
        module = SimpleNamespace(_FusedLinearPPOFallbackFunction=ScaledCrossEntropyInChunks)
        monkeypatch.setitem(sys.modules, "liger_kernel.ops.fused_linear_scaled_cross_entropy", module)
        variant = Peer("chunks", liger_kernel._chunks())
    assert_agrees(log_prob_case("options", **options), peer(linear_log_prob, variant), 1e-5)


@pytest.mark.parametrize(("value", "name"), [("0", "liger-kernel untuned"), ("1", "liger-kernel")])
def test_experts_without_their_autotuner_are_a_variant(value: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGER_FUSED_MOE_AUTOTUNE", value)
    module = SimpleNamespace(liger_fused_linear_cross_entropy=print)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", module)
    assert [variant.name for variant in liger_kernel.peers() if "experts" in variant.calls] == [name]


class Missing:
    @staticmethod
    def apply(*arguments: object, **options: object) -> Tensor:
        raise ImportError("no module named cutlass")


MISSING = "its kernel for this device cannot be imported: no module named cutlass"


@pytest.mark.parametrize(
    ("function", "targets", "reason"),
    [(Missing, None, MISSING), (ScaledCrossEntropy, 64, "it has one target per token only")],
    ids=["no kernel", "several targets"],
)
def test_log_probabilities_that_liger_kernel_lacks_do_not_fail(
    function: Any, targets: int | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = log_prob_case("64_targets", targets=targets) if targets else quick_case(linear_log_prob)
    (row,) = measured(case, [peer(linear_log_prob, log_prob_of_liger_kernel(function, monkeypatch))])
    assert (row.reason, row.failed) == (reason, False)


OF_TRL: list[tuple[Op[..., Any], dict[str, Any]]] = [(linear_log_prob, {}), (linear_log_prob, {"temperature": 0.5})]
OF_TRL += [(linear_divergence, {"kind": kind, "temperature": 2.0}) for kind in ("forward_kl", "reverse_kl", "jsd")]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "options"), OF_TRL, ids=[f"{op.name} {options}" for op, options in OF_TRL])
def test_trl_is_asked_for_what_the_op_computes(op: Op[..., Any], options: dict[str, Any]) -> None:
    pytest.importorskip("trl")
    (variant,) = peers.peers("trl")
    assert_agrees(quick_case(op, **options), peer(op, variant), 1e-5)


LACKING: list[tuple[Op[..., Any], dict[str, Any], Any, str]] = [
    (kl_div, {"reverse": True}, liger_kernel._divergences, "its first argument"),
    (linear_divergence, {"kind": "total_variation"}, liger_kernel._divergences, "it has the forward"),
    (linear_divergence, {"kind": "jsd"}, liger_kernel._soft_labels, "it has the forward KL only"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "options", "calls", "reason"), LACKING, ids=[reason for *_, reason in LACKING])
def test_liger_kernel_lacks_some_divergences(
    op: Op[..., Any], options: dict[str, Any], calls: Any, reason: str
) -> None:
    variant = Peer("liger-kernel", calls(stand_in_for_liger_kernel()))
    (row,) = measured(quick_case(op, **options), [peer(op, variant)])
    assert row.reason.startswith(reason)
    assert not row.failed


def test_every_op_has_an_eager_peer_to_which_its_error_is_compared() -> None:
    assert eager.calls().keys() >= {op.name for op in CATALOGUE}
    assert eager.calls()["relu_squared"] is relu_squared.reference


@pytest.mark.parametrize("op", [op for op in CATALOGUE if op.name in eager.CALLS], ids=lambda op: str(op.name))
def test_eager_has_no_option_that_the_op_has_not(op: Op[..., Any]) -> None:
    assert set(inspect.signature(eager.CALLS[op.name]).parameters) - set(op.signature.parameters) == set()


def test_the_compiled_peer_agrees_with_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    # The compiler behind it takes seconds; what is ours is the same with the one that generates nothing.
    monkeypatch.setattr(torch_compile, "BACKEND", "aot_eager")
    rows = measured(quick_case(geglu), [peer(geglu, torch_compile.peers()[0])])
    assert [(row.pass_, row.reason) for row in rows] == [("forward", ""), ("backward", ""), ("full", "")]
    assert all(row.error_gradients is not None and row.error_gradients < 1e-6 for row in rows)


def overwriting(declared: tuple[str, ...]) -> Implementation:
    """A cross entropy whose forward pass writes zeros over its logits, as autograd does not see it."""

    def careless(logits: Tensor, target: Tensor) -> Tensor:
        loss = torch.nn.functional.cross_entropy(logits.clone(), target)
        logits.data.zero_()
        return loss

    return peer(cross_entropy, Peer("careless", {"cross_entropy": careless}, {"cross_entropy": declared}))


def test_a_peer_that_declares_what_it_overwrites_gets_copies_of_its_own() -> None:
    case = quick_case(cross_entropy)
    before = case.fingerprints()
    rows = measured(case, [overwriting(("logits",)), backend(cross_entropy, "reference")])
    assert case.fingerprints() == before
    found = {(row.implementation, row.overwrites, row.reason) for row in rows}
    assert found == {("careless", "logits", ""), ("reference", "", "")}
    assert all(row.error_gradients is not None and row.error_gradients < 1e-6 for row in rows)


def test_every_call_of_an_overwriting_peer_sees_the_first_values() -> None:
    losses: list[float] = []
    run = CaseRun(quick_case(cross_entropy), overwriting(("logits",)))
    call, before = run.passes["forward"]()
    for _ in range(3):
        before()
        losses.append(call().outputs[0].item())
    assert losses[0] == losses[1] == losses[2]
    assert call().outputs[0].item() != pytest.approx(losses[0])


def test_an_implementation_that_overwrites_what_nothing_declares_fails_and_the_next_one_sees_the_first_values() -> None:
    case = quick_case(cross_entropy)
    before = case.fingerprints()
    rows = measured(case, [overwriting(()), backend(cross_entropy, "reference")])
    assert rows[0].reason == "ValueError: it overwrote logits, which nothing declares"
    assert rows[0].failed
    assert case.fingerprints() == before
    assert all(row.error_gradients is not None and row.error_gradients < 1e-6 for row in rows[1:])


def test_an_option_that_a_peer_lacks_is_the_reason_unless_it_is_at_its_default() -> None:
    first, second = (
        measured(quick_case(cross_entropy, softcap=cap), [peer(cross_entropy, peers.peers("torch")[0])])[0]
        for cap in (3.0, None)
    )
    assert (first.reason, first.failed, first.pass_) == ("it has no option 'softcap'", False, "")
    assert second.reason == ""


def test_a_result_of_another_shape_is_a_failure() -> None:
    wrong = Peer("wrong", {"swiglu": lambda gate, up: eager.swiglu(gate, up)[:1]})
    (row,) = measured(quick_case(swiglu), [peer(swiglu, wrong)])
    assert row.failed


def test_implementations_are_interleaved() -> None:
    order: list[str] = []

    def noting(name: str) -> Implementation:
        def call(x: Tensor, weight: Tensor) -> Tensor:
            order.append(name)
            return eager.rms_norm(x, weight)

        return peer(rms_norm, Peer(name, {"rms_norm": call}))

    bench = Bench(CPU, torch.float32, LIMITS, 0.0, WHERE, passes=("forward",), rounds=3)
    bench.rows(quick_case(rms_norm), [noting("a"), noting("b")])
    # Accuracy of each, memory and length of each, then three rounds.
    assert "".join(order) == "ab" + "aabb" + "ab" * 3


def test_running_out_of_memory_in_one_pass_leaves_the_others() -> None:
    def greedy(logits: Tensor, target: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            raise torch.OutOfMemoryError("no 3 PiB left")
        return eager.cross_entropy(logits, target)

    rows = measured(quick_case(cross_entropy), [peer(cross_entropy, Peer("greedy", {"cross_entropy": greedy}))])
    assert [row.pass_ for row in rows if not row.reason] == ["forward", "backward", "full"]
    (lost,) = (row for row in rows if row.reason)
    assert (lost.pass_, lost.reason, lost.failed) == ("evaluation", "out of memory: no 3 PiB left", False)


def test_frozen_arguments_of_a_workload_get_no_gradient() -> None:
    workload = next(w for w in swiglu.workloads() if w.quick)
    frozen = type(workload)(workload.name, workload.make, frozen=("up",))
    assert make_case(swiglu, frozen, CPU, torch.float32).trained == ("gate",)


@pytest.mark.skipif(peers.unavailable("cut-cross-entropy", CPU) is None, reason="the peer runs here")
def test_a_peer_that_is_named_must_be_installed(liger: InProcess) -> None:
    sentence = "bench: --peer must name libraries that can run here, got cut-cross-entropy: it is not installed"
    assert_refused(liger, sentence, *["bench", "swiglu", "--quick", "--device", "cpu", "--peer", "cut-cross-entropy"])


@pytest.mark.parametrize("op", CATALOGUE, ids=lambda op: op.name)
def test_an_op_gets_the_arguments_of_each_workload(op: Op[..., Any]) -> None:
    for workload in op.workloads():
        args, kwargs = workload.make(torch.device("meta"), torch.bfloat16)
        arguments = op.signature.bind(*args, **kwargs).arguments
        by_position, by_name = backend(op, "reference").order(arguments)
        named = {name: arguments[name] for name in by_name}
        call = op.signature.bind(*(arguments[name] for name in by_position), **named)
        assert all(call.arguments[name] is value for name, value in arguments.items()), workload.name
