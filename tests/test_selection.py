# SPDX-License-Identifier: Apache-2.0
"""Which implementation a call gets: the environment variable, `use` as a call and as a context, and the automatic
choice."""

import asyncio
import logging
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from liger_core import (
    Backend,
    BackendError,
    Op,
    OptionError,
    Unsupported,
    explain,
    layer_norm,
    linear_log_prob,
    rms_norm,
    selection,
    swiglu,
    use,
)
from liger_core.builtin import CATALOGUE
from liger_core.plugins import registry

pytestmark = pytest.mark.usefixtures("fresh_selection")

Install = Callable[..., Path]

# Two ops, each one more than the reference's result; rows wider than 64 are declined.
THIRD = """
    import liger_core
    from liger_core import Backend, Unsupported, hookimpl

    def rms_norm(x, weight=None, eps=1e-6, *, weight_offset=0.0, cast="input"):
        if x.shape[-1] > 64:
            raise Unsupported(f"rows of {x.shape[-1]}, more than 64")
        return liger_core.rms_norm.reference(x, weight, eps, weight_offset=weight_offset, cast=cast) + 1

    def swiglu(gate, up=None, *, limit=None, alpha=1.0, shift=0.0, gate_scale=1.0, scale=1.0, overwrite=False):
        return liger_core.swiglu.reference(gate, up) + 1

    @hookimpl
    def liger_backends():
        table = {liger_core.rms_norm: rms_norm, liger_core.swiglu: swiglu}
        return [Backend("third", DEVICES, PRIORITY, table, supports_fake_tensors=True)]
"""


@pytest.fixture
def third(install: Install) -> None:
    """A backend of two ops on CPU tensors that `auto` does not take."""
    install("third", THIRD.replace("DEVICES", "('cpu',)").replace("PRIORITY, table", "50, table, automatic=False"))


@pytest.fixture
def preferred_third(install: Install) -> None:
    """The same, taken by `auto`."""
    install("third", THIRD.replace("DEVICES", "('cpu',)").replace("PRIORITY", "50"))


X = torch.arange(16.0).reshape(2, 8)


def runs(op: Op[..., Any] = rms_norm, x: Tensor = X) -> str:
    """The backend that answers a call, inferred from its result, and the same from `explain`."""
    result, expected = op(x), op.reference(x)
    answered = next(name for name, shift in (("reference", 0), ("third", 1)) if torch.equal(result, expected + shift))
    assert explain(op, x).backend == answered
    return answered


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_auto_serves_cpu_and_cuda_tensors_in_one_process() -> None:
    assert (explain(rms_norm, X).backend, explain(rms_norm, X.cuda()).backend) == ("reference", "triton")
    torch.testing.assert_close(rms_norm(X.cuda()).cpu(), rms_norm(X))


@pytest.mark.parametrize(
    ("variable", "rms", "gated"),
    [
        pytest.param("reference", "reference", "reference", id="one_name"),
        pytest.param("third", "third", "third", id="another_name"),
        pytest.param("third,swiglu=reference", "third", "reference", id="exception"),
        pytest.param("swiglu=reference", "third", "reference", id="exception_to_auto"),
        pytest.param(" reference , rms_norm = third ", "third", "reference", id="blanks"),
        pytest.param("reference,swiglu=auto", "reference", "third", id="auto_for_one_op"),
        pytest.param("auto", "third", "third", id="auto"),
        pytest.param("", "third", "third", id="empty"),
    ],
)
def test_the_environment_selects(
    preferred_third: None, monkeypatch: pytest.MonkeyPatch, variable: str, rms: str, gated: str
) -> None:
    monkeypatch.setenv("LIGER_BACKEND", variable)
    assert (runs(rms_norm), runs(swiglu)) == (rms, gated)


def test_an_op_that_the_selected_backend_lacks_keeps_the_automatic_choice(third: None) -> None:
    use("third")
    chosen = explain(layer_norm, torch.ones(2, 8))
    because = "auto (use('third'), but 'third' does not implement layer_norm): highest priority on cpu tensors"
    assert (chosen.backend, chosen.reason) == ("reference", because)


def test_a_context_ends_when_its_block_fails(third: None) -> None:
    with pytest.raises(ZeroDivisionError), use("third"):
        raise ZeroDivisionError
    assert runs() == "reference"


def test_the_innermost_of_nested_contexts_wins(third: None) -> None:
    with use("third"):
        with use("reference", only=[swiglu]):
            assert (runs(rms_norm), runs(swiglu)) == ("third", "reference")
            with use("auto"):
                assert (runs(rms_norm), runs(swiglu)) == ("reference", "reference")
            assert (runs(rms_norm), runs(swiglu)) == ("third", "reference")
        assert (runs(rms_norm), runs(swiglu)) == ("third", "third")


def test_selections_may_be_undone_in_any_order(third: None) -> None:
    first, second = use("third"), use("reference")
    first.undo()
    assert runs() == "reference"
    second.undo()
    assert runs() == "reference"


def test_a_call_amid_a_reselection_gets_the_old_selection_or_the_new_one(
    third: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in another thread, which may call the op at any point of the reselection."""
    selected, fall_back, results = use("third"), selection._fall_back, []

    def meanwhile(*args: Any) -> Any:
        results.append(rms_norm(X))
        return fall_back(*args)

    monkeypatch.setattr(selection, "_fall_back", meanwhile)
    selected.undo()
    # Ops are reselected one after the other, and this one is somewhere among them.
    expected = rms_norm.reference(X)
    shifts = [next(shift for shift in (1, 0) if torch.equal(result, expected + shift)) for result in results]
    assert shifts[0] == 1
    assert shifts == sorted(shifts, reverse=True)


def in_another_thread(function: Callable[[], Any]) -> Any:
    """The result of a call in another thread, or the error that it raised."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def in_a_block(backend: str) -> str:
    with use(backend):
        return runs()


def test_a_selection_holds_in_every_thread(third: None) -> None:
    with use("third"):
        assert in_another_thread(runs) == "third"
    use("third")
    assert in_another_thread(runs) == "third"


def test_another_thread_must_not_select_while_a_block_is_open(third: None) -> None:
    selected = use("third", only=[swiglu])
    sentence = (
        "the selection of the process must not change while another thread or task is inside `with use('third')`; "
        "select one backend for all of them, or run the blocks one after the other"
    )
    with use("third"):
        for select in (lambda: in_a_block("reference"), lambda: use("auto", only=[swiglu]), selected.undo):
            with pytest.raises(BackendError, match=re.escape(sentence)):
                in_another_thread(select)
            assert (runs(rms_norm), runs(swiglu)) == ("third", "third")
    assert (runs(rms_norm), runs(swiglu)) == ("reference", "third")


def test_tasks_within_a_block_must_not_overlap_either(third: None) -> None:
    async def task(backend: str) -> str:
        with use(backend):
            await asyncio.sleep(0)
            return runs()

    async def main() -> list[Any]:
        with use("auto"):
            return await asyncio.gather(*map(task, ("third", "reference")), return_exceptions=True)

    first, second = asyncio.run(main())
    assert first == "third"
    assert type(second) is BackendError


def test_a_thread_that_belongs_to_a_block_may_open_one_inside(third: None) -> None:
    async def main() -> list[str]:
        with use("third"):
            return [await asyncio.to_thread(in_a_block, "reference"), runs()]

    assert asyncio.run(main()) == ["reference", "third"]


def test_a_block_that_ends_before_one_inside_it_is_an_error(third: None) -> None:
    def generator() -> Iterator[None]:
        with use("third"):
            yield

    suspended = generator()
    next(suspended)
    with use("reference"):
        with pytest.raises(BackendError) as caught:
            next(suspended)
        assert runs() == "reference"
    assert runs() == "reference"
    assert str(caught.value) == (
        "use('third'): blocks must end in the reverse of the order in which they began, but `with use('reference')`, "
        "which began inside this one, is still open"
    )


def test_an_error_inside_a_block_is_not_replaced_by_one_about_blocks(third: None) -> None:
    outer = use("third").__enter__()
    use("reference").__enter__()
    outer.__exit__(ZeroDivisionError)
    assert runs() == "reference"


def test_a_block_may_be_entered_again_but_not_twice_at_once(third: None) -> None:
    selected, sentence = use("third"), r"^use\('third'\): a block must be entered once at a time, it is open already$"
    for _ in range(2):
        with selected:
            assert runs() == "third"
            with pytest.raises(BackendError, match=sentence):
                selected.__enter__()
            assert runs() == "third"
        assert runs() == "reference"


@pytest.mark.parametrize("first", [runs, lambda: in_a_block("third")], ids=["call", "block"])
def test_two_threads_may_be_the_first_to_call(
    third: None, monkeypatch: pytest.MonkeyPatch, first: Callable[[], str]
) -> None:
    """The second one calls the op that is settled last, while the first one settles them."""
    choose, settling, called = selection._choose, threading.Event(), threading.Event()

    def slowly(found: Any, op: Op[..., Any]) -> tuple[str, str]:
        if op is linear_log_prob:
            # A call that does not wait for this thread to end comes back in time to be seen.
            called.wait(0.3)
        settling.set()
        return choose(found, op)

    def settles() -> str:
        try:
            return first()
        finally:
            # Also after a failure, since the second thread waits.
            settling.set()

    def second() -> Any:
        settling.wait()
        try:
            return linear_log_prob(X, torch.ones(4, 8), torch.tensor([0, 1])), selection.selected(linear_log_prob)
        finally:
            called.set()

    monkeypatch.setattr(selection, "_choose", slowly)
    with ThreadPoolExecutor(2) as pool:
        waited, other = pool.submit(settles), pool.submit(second)
        waited.result()
        log_prob, chosen = other.result()
    torch.testing.assert_close(log_prob, torch.full((2,), -math.log(4)))
    assert chosen[0] == "auto"


def test_an_op_that_no_plugin_offers_runs_its_reference() -> None:
    def twice(x: Tensor) -> Tensor:
        return 2 * x

    alone = Op(twice, check=lambda x: None, samples=None, misuses=None, workloads=tuple, work=None)  # type: ignore[arg-type]
    assert torch.equal(alone(X), 2 * X)
    assert torch.equal(torch.compile(lambda x: alone(x), backend="eager", fullgraph=True)(X), 2 * X)
    assert str(explain(alone, X)) == "twice: reference (no plugin that is loaded offers this op)"


def test_only_takes_ops_and_their_names(third: None) -> None:
    with use("third", only=[rms_norm]):
        assert (runs(rms_norm), runs(swiglu)) == ("third", "reference")
    with use("third", only=["swiglu"]):
        assert (runs(rms_norm), runs(swiglu)) == ("reference", "third")


def test_what_is_explained_must_be_an_op() -> None:
    sentence = "explain: op must be an op such as liger_core.rms_norm, got 'rms_norm'"
    with pytest.raises(OptionError, match=sentence):
        explain("rms_norm", X)  # type: ignore[arg-type]


@pytest.mark.parametrize("only", ["swiglu", swiglu], ids=["name", "op"])
def test_only_must_be_a_list(only: Any, third: None) -> None:
    sentence = "use('third'): only must be a list of ops, got swiglu; write only=['swiglu']"
    with pytest.raises(BackendError, match=re.escape(sentence)):
        use("third", only=only)
    assert runs(swiglu) == "reference"


def test_use_is_stronger_than_the_environment(third: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGER_BACKEND", "third")
    with use("reference"):
        assert runs() == "reference"
    assert runs() == "third"


@pytest.mark.parametrize(
    ("specification", "message"),
    [
        pytest.param("thrid", "SOURCE: no backend named 'thrid'; installed: INSTALLED. Did you mean 'third'?", id="misspelled"),
        pytest.param("numpy", "SOURCE: no backend named 'numpy'; installed: INSTALLED.", id="unknown"),
        pytest.param("rms_norm=tritn", "SOURCE: no backend named 'tritn'; installed: INSTALLED. Did you mean 'triton'?", id="misspelled_for_an_op"),
        pytest.param("third,rms_nrm=third", f"SOURCE: no op named 'rms_nrm'; known: {', '.join(sorted(op.name for op in CATALOGUE))}. Did you mean 'rms_norm'?", id="unknown_op"),
        pytest.param("layer_norm=third", "SOURCE: backend 'third' must implement layer_norm, it does not; layer_norm is implemented by: IMPLEMENTED", id="op_that_it_lacks"),
        pytest.param("third,reference", "SOURCE: one backend for all ops must be given, got 'third' and 'reference'; write op=backend for one op", id="two_names"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("by", ["use", "environment"])
def test_a_wrong_selection_is_an_error_that_names_what_there_is(
    third: None, monkeypatch: pytest.MonkeyPatch, by: str, specification: str, message: str
) -> None:
    able = ", ".join(b for b, table in registry().implementations.items() if "layer_norm" in table)
    installed = ", ".join(sorted(registry().backends))
    source = f"use({specification!r})" if by == "use" else f"LIGER_BACKEND={specification}"
    if by == "environment":
        monkeypatch.setenv("LIGER_BACKEND", specification)
    with pytest.raises(BackendError) as caught:
        use(specification) if by == "use" else rms_norm(X)
    # The selection is as it was.
    assert by == "environment" or runs() == "reference"
    for word, meant in {"SOURCE": source, "IMPLEMENTED": able, "INSTALLED": installed}.items():
        message = message.replace(word, meant)
    assert str(caught.value) == message


def test_a_wrong_environment_fails_at_every_use_until_it_is_right(third: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGER_BACKEND", "thrid")
    for _ in range(2):
        with pytest.raises(BackendError, match="Did you mean 'third'"):
            rms_norm(X)
    monkeypatch.setenv("LIGER_BACKEND", "third")
    assert runs() == "third"


@pytest.mark.skipif(
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1", reason="the backend is available here"
)
def test_a_backend_that_cannot_run_here_says_why() -> None:
    with pytest.raises(BackendError) as caught:
        use("triton")
    assert str(caught.value) == (
        "use('triton'): backend 'triton' must be available, it is not: no CUDA GPU; set TRITON_INTERPRET=1 before the "
        "start to run the kernels in Triton's slow CPU interpreter"
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_the_environment_selects_the_kernels_in_a_fresh_process() -> None:
    code = """if True:
        import torch
        from liger_core import explain, rms_norm, rope, use
        x, q, t = torch.randn(2, 8), torch.randn(1, 2, 3, 8), torch.randn(3, 8)
        torch.testing.assert_close(rms_norm(x), rms_norm.reference(x))
        torch.testing.assert_close(rope(q, q, t, t), rope.reference(q, q, t, t))
        print(explain(rms_norm, x).backend, explain(rope, q, q, t, t).backend)
        with use("auto"):
            print(explain(rms_norm, x).backend)
    """
    variables = {**os.environ, "TRITON_INTERPRET": "1", "LIGER_BACKEND": "triton,rope=reference"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["triton", "reference", "reference"]


# Two backends of different priority: the narrow one adds 1 and declines rows wider than 32, the broad one adds 2 and
# those wider than 64.
NARROW_AND_BROAD = """
    import liger_core
    from liger_core import Backend, Implementation, Unsupported, hookimpl

    def of(widest, shift, handed_over=0):
        def rms_norm(x, weight=None, eps=1e-6, *, weight_offset=0.0, cast="input"):
            if x.shape[-1] > widest:
                raise Unsupported(f"rows of {x.shape[-1]}, more than {widest}")
            return liger_core.rms_norm.reference(x, weight, eps, weight_offset=weight_offset, cast=cast) + shift
        return {liger_core.rms_norm: Implementation(rms_norm, handed_over)}

    @hookimpl
    def liger_backends():
        return [
            Backend("broad", ("cpu",), 100, of(64, 2, HANDED_OVER), supports_fake_tensors=True),
            Backend("narrow", ("cpu",), 150, of(32, 1), supports_fake_tensors=True),
        ]
"""


@pytest.fixture
def narrow_and_broad(install: Install) -> None:
    install("two", NARROW_AND_BROAD.replace("HANDED_OVER", "0"))


def test_a_declined_call_is_handed_over_where_the_next_backend_does(install: Install) -> None:
    torch._dynamo.reset()
    install("two", NARROW_AND_BROAD.replace("HANDED_OVER", "128"))
    compiled = torch.compile(lambda x: rms_norm(x), backend="eager", fullgraph=True, dynamic=False)
    for rows, shift in ((2, 0), (3, 2)):
        x = torch.randn(rows, 64)
        assert torch.equal(compiled(x), rms_norm.reference(x) + shift)


def test_every_backend_that_declines_is_logged_once(narrow_and_broad: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="liger"):
        for _ in range(2):
            rms_norm(torch.randn(2, 128))
    assert caplog.messages == [
        "rms_norm: backend 'narrow' declined a call (rows of 128, more than 32); falling back to backend 'broad'",
        "rms_norm: backend 'broad' declined a call (rows of 128, more than 64); falling back to the reference",
    ]


def test_explain_lists_the_backends_that_decline(narrow_and_broad: None) -> None:
    wide, widest = (explain(rms_norm, torch.randn(2, width)).reason for width in (64, 128))
    assert wide == "auto (the default): 'narrow' declines: rows of 64, more than 32"
    both = "'narrow' declines: rows of 128, more than 32; 'broad' declines: rows of 128, more than 64"
    assert widest == f"auto (the default): {both}"


def test_explain_predicts_the_error_of_a_named_backend_that_declines(narrow_and_broad: None) -> None:
    with use("narrow"):
        reason = explain(rms_norm, torch.randn(2, 64)).reason
    assert reason == "selected by use('narrow'); declines: rows of 64, more than 32, so the call raises BackendError"


@dataclass(frozen=True)
class Drawn:
    """A backend drawn at random: rows wider than `widest` are declined."""

    name: str
    devices: list[str]
    priority: int
    widest: int
    implements: bool
    available: bool
    automatic: bool

    def takes(self, device: str, width: int) -> bool:
        return self.automatic and device in self.devices and width <= self.widest and self.implements and self.available


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("drawn", range(15))
def test_explain_names_the_backend_that_runs(drawn: int, compiled: bool) -> None:
    random, ran, backends = Random(drawn), list[str](), list[Drawn]()

    def implementation(one: Drawn) -> Callable[..., Any]:
        def rms_norm(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if x.shape[-1] > one.widest:
                raise Unsupported(f"rows wider than {one.widest}")
            ran.append(one.name)
            return x + 1

        return rms_norm

    found = registry()
    for index in range(random.randint(3, 8)):
        devices = random.choice([["cpu"], ["meta"], ["cpu", "meta"], ["cpu", "meta"]])
        widest, often = random.choice([8, 16, 64]), [True, True, True, True, False]
        one = Drawn(f"backend{index}", devices, random.randint(1, 5), widest, *(random.choice(often) for _ in range(3)))
        backends.append(one)
        table = {rms_norm: implementation(one)} if one.implements else {}
        options = {"automatic": one.automatic, "supports_fake_tensors": True}
        found.backends[one.name] = Backend(one.name, tuple(devices), one.priority, table, **options)
        if one.available:
            found.implementations[one.name] = {op.name: function for op, function in table.items()}
        else:
            found.unavailable[one.name] = "it is not there"
    device, width = random.choice(["cpu", "meta"]), random.choice([12, 32])
    able = [(-one.priority, one.name) for one in backends if one.takes(device, width)]
    expected = min(able)[1] if able else "reference"

    torch._dynamo.reset()
    x = torch.ones(2, width, device=device)
    (torch.compile(rms_norm, backend="eager", fullgraph=True) if compiled else rms_norm)(x)
    assert (ran[-1] if ran else "reference") == expected
    assert explain(rms_norm, x).backend == expected


def test_a_declined_call_is_an_error_under_a_named_backend(third: None) -> None:
    use("third")
    with pytest.raises(BackendError) as caught:
        rms_norm(torch.randn(2, 65))
    assert str(caught.value) == (
        "rms_norm: backend 'third' must be able to take this call, it declined: rows of 65, more than 64; it was "
        "selected by use('third'), select 'auto' or rms_norm=reference to run the reference instead"
    )


def test_a_tensor_on_a_device_that_the_named_backend_lacks_is_an_error(third: None) -> None:
    use("third", only=[rms_norm])
    with pytest.raises(BackendError) as caught:
        rms_norm(X.to("meta"))
    assert str(caught.value) == (
        "rms_norm: backend 'third' runs on cpu tensors, got a meta tensor; it was selected by use('third'), "
        "select 'auto' or rms_norm=reference to run the reference instead"
    )


def test_explain_lists_every_backend_with_its_verdict(third: None) -> None:
    use("third", only=[rms_norm])
    lines = str(explain(rms_norm, X)).splitlines()
    assert lines[0] == "rms_norm: third (selected by use('third'); can run)"
    assert "  third: can run" in lines
    assert "  reference: can run" in lines
    assert explain(rms_norm, torch.randn(2, 65)).candidates["third"] == "declines: rows of 65, more than 64"
    assert explain(rms_norm, X.to("meta")).candidates["third"] == "runs on cpu tensors, got a meta tensor"
    assert explain(layer_norm, X).candidates["third"] == "does not implement layer_norm"


def test_no_fake_tensor_reaches_a_backend_that_does_not_support_them(install: Install) -> None:
    source = THIRD.replace("DEVICES", "('cpu', 'cuda')").replace("PRIORITY", "50")
    source = source.replace("if x.shape", "assert type(x).__name__ != 'FakeTensor'\n        if x.shape")
    install("third", source.replace(", supports_fake_tensors=True", ""))
    assert explain(rms_norm, torch.randn(2, 65)).backend == "third"
    assert explain(rms_norm, X).candidates["third"] == "can run unless it declines, which only the call itself shows"


def test_explain_raises_what_the_call_would_raise() -> None:
    sentence = r"rms_norm: weight must have shape \(8,\) to match x \(2, 8\), got \(7,\)"
    for call in (rms_norm, lambda *args: explain(rms_norm, *args)):
        with pytest.raises(ValueError, match=sentence):
            call(X, torch.ones(7))


def test_reselecting_recompiles_and_going_back_does_not(third: None) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(lambda x: rms_norm(x), backend=counter, fullgraph=True)
    frames = []
    for name, shift in (("reference", 0), ("third", 1), ("reference", 0), ("third", 1)):
        with use(name):
            assert torch.equal(compiled(X), rms_norm.reference(X) + shift)
        frames.append(counter.frame_count)
    assert frames == [1, 2, 2, 2]


def test_the_first_call_may_be_a_compiled_one(preferred_third: None) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: rms_norm(x), backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), rms_norm.reference(X) + 1)


@pytest.fixture
def handing_over(install: Install) -> None:
    """The backend that `auto` takes, which leaves rms_norm in compiled regions to the compiler."""
    table = f"{{**table, liger_core.rms_norm: liger_core.Implementation(rms_norm, {X.numel()})}}"
    install("third", THIRD.replace("DEVICES", "('cpu',)").replace("PRIORITY, table", f"50, {table}"))


@pytest.mark.parametrize("named", [False, True], ids=["auto", "named"])
def test_a_compiled_region_gets_the_reference_of_an_op_that_is_handed_over(handing_over: None, named: bool) -> None:
    compiled = torch.compile(lambda x: (rms_norm(x), swiglu(x, x)), backend="eager", fullgraph=True)
    with use("third" if named else "auto"):
        normed, gated = compiled(X)
        assert torch.equal(rms_norm(X), rms_norm.reference(X) + 1)
        # A large call runs the backend when compiled, too.
        large = torch.cat((X, X))
        assert torch.equal(compiled(large)[0], rms_norm.reference(large) + 1)
    assert torch.equal(normed, rms_norm.reference(X))
    assert torch.equal(gated, swiglu.reference(X, X) + 1)


def test_explain_shows_what_is_handed_over(handing_over: None) -> None:
    suffix = f"; a compiled region gets the reference up to {X.numel():,} elements"
    assert explain(rms_norm, X).reason.endswith(suffix)
    assert not explain(rms_norm, torch.cat((X, X))).reason.endswith(suffix)
    assert not explain(swiglu, X, X).reason.endswith(suffix)
