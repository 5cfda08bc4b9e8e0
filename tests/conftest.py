# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: options, seeds and the count of conformance cases."""

import gc
import importlib
import os
import signal
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Two workers with their own thread pools would compete for the same cores: threads wait in loops for one that does not
# run. The environment also reaches the processes that tests start. NumPy and PyTorch read it when they are imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("liger")
    group.addoption("--device", default=None, help="device of the tests; cuda if there is one, else cpu")
    group.addoption("--backend", default=None, help="test only this backend, and select it for the tests of single ops")
    group.addoption("--seed", type=int, default=0, help="seed of every test")
    group.addoption(
        "--share",
        default="1/1",
        help="i/n: every n-th slow test, beginning with the i-th, at least one of a file without others, and the rest",
    )
    group.addoption("--examples", type=int, default=None, help="random calls of each op and backend in tests/fuzz")


def pytest_configure(config: pytest.Config) -> None:
    # Workers inherit the width of the terminal, which tables would take.
    os.environ.pop("COLUMNS", None)


def pytest_sessionstart(session: pytest.Session) -> None:
    """A backend that cannot be tested is an error, once, before anything is collected."""
    name = session.config.getoption("--backend")
    if name is None:
        return
    from liger_core import BackendError, use
    from liger_core.plugins import registry

    found, device = registry().backends, device_of(session.config)
    try:
        use(name).undo()
    except BackendError as error:
        reason = str(error).removeprefix(f"use({name!r}): ")
        raise pytest.UsageError(f"--backend {name}: {reason}\nThis was the environment of {sys.executable}") from None
    if name not in found:
        raise pytest.UsageError(
            f"--backend {name}: it must be the name of one backend; installed: {', '.join(sorted(found))}"
        )
    if device.type not in found[name].device_types:
        kinds = " and ".join(found[name].device_types)
        raise pytest.UsageError(f"--backend {name}: it runs on {kinds} tensors, got --device {device}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the requested share of the slow tests that -k left, and all others.

    A share has at least one test of each file: of a file without quick tests, its share; of the slow tests of all other
    files, a share together. Different shares keep different tests.
    """
    number, of = map(int, config.getoption("--share").split("/"))
    slow = [item.nodeid for item in items if item.get_closest_marker("slow")]
    chosen = {item.nodeid for item in items}.difference(slow)
    covered = {name.partition("::")[0] for name in chosen}
    groups: dict[str, list[str]] = {}
    for name in slow:
        file = name.partition("::")[0]
        groups.setdefault("" if file in covered else file, []).append(name)
    for file, group in groups.items():
        parts = min(of, len(group)) if file else of
        chosen.update(group[(number - 1) % parts :: parts])
    left = [item for item in items if item.nodeid not in chosen]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item.nodeid in chosen]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Collect the tests, which stay, without looking for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Exclude the objects of libraries and of the tests themselves from garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def device_of(config: pytest.Config) -> torch.device:
    name = config.getoption("--device") or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    return device_of(pytestconfig)


@pytest.fixture(autouse=True)
def seed(pytestconfig: pytest.Config) -> int:
    """The same random numbers for every test, whichever ran before it."""
    value = int(pytestconfig.getoption("--seed"))
    torch.manual_seed(value)
    return value


@pytest.fixture(autouse=True)
def no_profiler_is_left_running() -> Iterator[None]:
    """A profiler that a test leaves running records every later op of the process, until memory is full."""
    yield
    assert not torch.autograd._profiler_enabled(), "a profiler is still running"


@pytest.fixture
def fresh_selection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No selection, no loaded plugin and no LIGER variable, before and after."""
    from liger_core import selection

    for name in ("LIGER_BACKEND", "LIGER_DISABLE_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    selection.reset()
    yield
    monkeypatch.undo()
    selection.reset()


class Generators:
    """The modules of docs/generate by their names."""

    def __getattr__(self, name: str) -> Any:
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def generators() -> Iterator[Generators]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "docs" / "generate")
        yield Generators()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """install(name, source): put a plugin package where entry points are looked for, as pip would, and forget what was
    loaded."""
    from liger_core import selection

    modules: list[str] = []

    def put(name: str, source: str, *, distribution: str | None = None) -> Path:
        module, distribution = f"{name}_plugin", distribution or f"liger-{name}"
        site = tmp_path / name
        metadata = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[liger]\n{name} = {module}\n")
        (site / f"{module}.py").write_text(textwrap.dedent(source))
        monkeypatch.syspath_prepend(site)
        modules.append(module)
        selection.reset()
        return site

    yield put
    # The next test in this process must not see these plugins, so their folders leave sys.path before anything is
    # looked up again.
    monkeypatch.undo()
    for module in modules:
        sys.modules.pop(module, None)
    selection.reset()


@pytest.fixture
def liger_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run the `liger` command in this process: its exit code, its output, and what it wrote to standard error as one
    line."""

    from liger_core.commands import main

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["liger", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        # Borders of a message box are not part of the sentence.
        return int(ended.value.code or 0), out, " ".join(err.replace("│", " ").split())

    return run


@pytest.fixture
def liger(liger_output: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str]]:
    """The same without the output."""
    return lambda *arguments: liger_output(*arguments)[::2]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report how many cases the conformance suite compared, and where an implementation declined one."""
    seen: dict[str, set[tuple[str, ...]]] = {"compared": set(), "declined": set()}
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            for key, value in getattr(report, "user_properties", []):
                if key in seen:
                    seen[key].add(tuple(value))
    cases = seen["compared"] - seen["declined"]
    if not cases:
        return
    ops, backends, dtypes = (len({case[i] for case in cases}) for i in range(3))
    by_backend = ", ".join(f"{name} {count}" for name, count in sorted(Counter(case[1] for case in cases).items()))
    samples = len({(case[0], case[3]) for case in cases})
    terminalreporter.write_sep("-", "conformance")
    terminalreporter.write_line(
        f"conformance: {len(cases)} cases = ops × backends × dtypes × samples "
        f"({ops} ops, {backends} backends, {dtypes} dtypes, {samples} samples; {by_backend}; {len(seen['declined'])} "
        "declined)"
    )


@pytest.fixture
def kernels_when_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small calls too run the kernels in a compiled region; a backend would hand them over to the compiler."""
    from liger_core import selection
    from liger_core.plugins import registry

    selection.settle()
    with monkeypatch.context() as patch:
        patch.setattr(selection, "_traced", lambda op, implementation, most: implementation)
        selection._apply(registry())
        yield
    selection._apply(registry())


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 300 bytes, as if the disk were full."""
    import resource

    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, ignored)
