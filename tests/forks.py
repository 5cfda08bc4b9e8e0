# SPDX-License-Identifier: Apache-2.0
"""Fresh processes without the startup time: forks of one process that has imported the libraries, but nothing of Liger.

A new interpreter takes seconds of processor time to import PyTorch and Transformers. Tests of what is imported, or of
what a library prints meanwhile, start one all the same, by `subprocess`.

A fork ends without taking down its interpreter, which aborts now and then while a thread of gloo is busy.
"""

import gc
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

SERVER = multiprocessing.get_context("forkserver")
# One that is not installed is passed over. DeepSpeed reads the environment when it is imported.
SERVER.set_forkserver_preload(
    ["torch.distributed.fsdp", "pytest", "transformers.trainer", "transformers.models.llama.modeling_llama", "peft"]
)
LIMIT = 300.0
CONTEXTS = multiprocessing.get_context


def _ensure_server() -> None:
    """Start the server, if it does not run yet. It sees no GPU: libraries use one when they are imported, and then no fork can."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CUDA_VISIBLE_DEVICES", "")
        forkserver.ensure_running()


def cases(request: pytest.FixtureRequest, *names: str) -> list[Any]:
    """The values of these parameters in the tests of a module that run: what its fixture has to compute."""
    of_module = [item for item in request.session.items if item.path == request.path]
    parameters = [item.callspec.params for item in of_module if hasattr(item, "callspec")]
    values = [tuple(map(each.get, names)) for each in parameters if each.keys() >= {*names}]
    return list(dict.fromkeys(value if len(names) > 1 else value[0] for value in values))


def run(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `python -c code arguments` with these environment variables; returns the completed process."""
    with TemporaryDirectory() as folder:
        process = Context().Process(_run, (code, arguments, variables, folder))
        process.start()
        process.join(LIMIT)
        if process.is_alive():
            process.kill()
            raise TimeoutError(f"{arguments}: it ran for longer than {LIMIT:.0f} s")
        out, errors = (Path(folder, name).read_text() for name in ("out", "errors"))
    return subprocess.CompletedProcess(arguments, process.exitcode or 0, out, errors)


def on_ranks(count: int, work: Callable[..., None], *args: Any) -> None:
    """work(rank, *args) in so many processes of one thread at once, with the environment that torchrun gives to ranks;
    raises what one of them raises. A process group that a work leaves is destroyed."""
    # This process keeps the port, so that no other one takes it meanwhile.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    variables = {**os.environ, **{name: str(value) for name, value in shared.items()}}
    _ensure_server()
    torch.multiprocessing.start_processes(_rank, (variables, work, args), nprocs=count, start_method="forkserver")


class Context:
    """Like `multiprocessing.get_context("spawn")`, but a process is a fork.

    It has the environment of the one that starts it.
    """

    Pipe = staticmethod(SERVER.Pipe)

    def Process(self, target: Callable[..., None], args: tuple[Any, ...]) -> BaseProcess:
        _ensure_server()
        return SERVER.Process(target=_start, args=(dict(os.environ), target, args))


def get_context(method: str | None = None) -> Any:
    """Stands in for the function of multiprocessing."""
    return Context() if method == "spawn" else CONTEXTS(method)


def _start(variables: dict[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    # Whatever this process starts is a fork, too.
    multiprocessing.get_context = get_context  # type: ignore[assignment]
    target(*args)


def _rank(rank: int, variables: dict[str, str], work: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    # As in conftest.py.
    gc.freeze()
    _start({**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}, work, (rank, *args))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _run(code: str, arguments: tuple[str, ...], variables: dict[str, str], folder: str) -> None:
    for name, number in (("out", 1), ("errors", 2)):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(variables)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
