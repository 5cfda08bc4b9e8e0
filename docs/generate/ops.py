# SPDX-License-Identifier: Apache-2.0
"""One reference page per op, from the op's own description: docstring, signature, samples, misuses, backends."""

import inspect
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from docstrings import cell, code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from liger_bench import markdown
from liger_bench.machine import dtype_name
from liger_core import Op, Unsupported
from liger_core.docstrings import Entry, parts
from liger_core.plugins import REFERENCE, registry

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CPU = torch.device("cpu")
YES, NO = ":material-check:", "–"


def ops() -> list[Op[..., Any]]:
    """The ops of this project, in the order of `liger ops`."""
    return [op for op in registry().ops.values() if op.reference.__module__.startswith("liger_core.")]


def pages() -> dict[str, str]:
    """Name of the page → its text."""
    return {"index": index(), **{op.name: page(op) for op in ops()}}


def index() -> str:
    """The list of ops, and which backend supports which."""
    tables = _tables()
    rows = [
        (f"[`{op.name}`]({op.name}.md)", summary(op), *(YES if op.name in table else NO for table in tables.values()))
        for op in ops()
    ]
    head = ("op", "what it computes", *tables)
    return f"""# Ops

An op is a function of tensors and plain numbers. Its pure-PyTorch reference defines it and runs on any device; a backend such as
`triton` implements the same function for some devices. Import any of them from `liger_core`.

{markdown.table(head, rows, center=range(2, len(head)))}

`liger ops` prints this table for your environment. The pages of this section are generated from the descriptions in `liger_core.ops`,
which also generate the tests and the benchmark.
"""


def page(op: Op[..., Any]) -> str:
    """Everything that the description of an op says."""
    described = [*parts(op.__doc__ or "", op.signature.parameters)]
    sections = [
        f"# {op.name}",
        _body(op, described),
        f"## Support\n\n{_support(op)}",
        f"## Errors\n\n{_errors(op)}",
        f"## Tested cases\n\n{_samples(op)}",
    ]
    return "\n\n".join(sections) + "\n"


def summary(op: Op[..., Any]) -> str:
    """The first sentence of the docstring, on one line."""
    return cell(" ".join(inspect.cleandoc(op.__doc__ or "").split("\n\n")[0].split()))


def _body(op: Op[..., Any], described: list[str | list[Entry]]) -> str:
    """Docstring and signature: summary, call, formula, arguments, then what else there is to know."""
    shown: list[str] = []
    called = False
    for part in described:
        if isinstance(part, list):
            shown.append(f"## Arguments\n\n{_arguments(op, part)}\n\n## Notes")
        elif part.startswith("    "):
            # The formula; the signature stands before it.
            shown.append(("" if called else _call(op)) + f"```{{ .text .formula }}\n{inspect.cleandoc(part)}\n```")
            called = True
        else:
            shown.append(links(part))
    return "\n\n".join(shown)


def _call(op: Op[..., Any]) -> str:
    """How it is called."""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty) for parameter in op.signature.parameters.values()
    ]
    arguments = [str(parameter) for parameter in parameters]
    keywords = next((i for i, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY), None)
    if keywords is not None:
        arguments.insert(keywords, "*")
    path = f"liger_core.{op.name}"
    call = f"{path}({', '.join(arguments)})"
    if len(call) > 100:
        call = f"{path}(\n    " + ",\n    ".join(arguments) + ",\n)"
    return f'```{{ .python .no-run title="signature" }}\n{call}\n```\n\n'


def _arguments(op: Op[..., Any], entries: list[Entry]) -> str:
    rows = []
    named = {name for entry in entries for name in entry.names}
    missing = [Entry((name,), (_elsewhere(name),)) for name in op.signature.parameters if name not in named]
    result = [entry for entry in entries if entry.names == ("returns",)]
    for entry in [*(entry for entry in entries if entry not in result), *missing, *result]:
        names = code(*entry.names) if entry not in result else "*returns*"
        defaults = dict.fromkeys(_default(op, name) for name in entry.names)
        rows.append((names, ", ".join(defaults), cell(entry.text)))
    return markdown.table(("argument", "default", "meaning"), rows)


@cache
def _elsewhere(name: str) -> str:
    """What the first op that describes an argument of this name says about it: options that ops share are described once."""
    entries = (
        entry
        for op in ops()
        for part in parts(op.__doc__ or "", op.signature.parameters)
        if isinstance(part, list)
        for entry in part
    )
    return next((entry.text for entry in entries if name in entry.names), "")


def _default(op: Op[..., Any], name: str) -> str:
    parameter = op.signature.parameters.get(name)
    if parameter is None:
        return ""
    return "required" if parameter.default is parameter.empty else f"`{parameter.default!r}`"


def links(text: str) -> str:
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def _tables() -> dict[str, dict[str, Callable[..., Any]]]:
    """Backend → op → implementation, also of a backend that is installed and cannot run here."""
    found = registry()
    tables = {}
    for name, backend in found.backends.items():
        with suppress(ImportError):
            tables[name] = backend.table(found.ops)
    return tables


def _support(op: Op[..., Any]) -> str:
    rows, declined = [], dict[str, None]()
    for name, table in _tables().items():
        if (call := table.get(op.name)) is None:
            continue
        devices = "any" if name == REFERENCE else ", ".join(registry().backends[name].device_types)
        taken = [_declines(call, next(iter(op.samples(CPU, dtype)))) is None for dtype in DTYPES]
        rows.append((name, devices, *(YES if yes else NO for yes in taken)))
        # That a dtype is not supported shows in the table.
        reasons = [_declines(call, sample) for sample in op.samples(CPU, torch.float32)]
        declined |= dict.fromkeys(f"* `{name}`: {reason}" for reason in reasons if reason is not None)
    head = ("backend", "devices", *(f"`{dtype_name(dtype)}`" for dtype in DTYPES))
    lines = ["A call that a backend does not support goes to the next one, and in the end to the reference.", *declined]
    return markdown.table(head, rows, center=range(2, len(head))) + "\n\n" + "\n".join(lines)


def _declines(implementation: Callable[..., Any], sample: Any) -> str | None:
    """The implementation on fake tensors: it declines before any work."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (tuple(sample.args), dict(sample.kwargs)))
        with suppress(Exception):
            try:
                implementation(*args, **kwargs)
            except Unsupported as reason:
                return str(reason)
    return None


def _errors(op: Op[..., Any]) -> str:
    lines = [
        "Wrong arguments raise before any work, on every backend, without reading values from the device. For example:\n"
    ]
    for misuse in op.misuses(CPU):
        message = re.sub(r"([*_<>|\[\]])", r"\\\1", misuse.message)
        lines.append(f"* `{misuse.error.__name__}`: {message}")
    return "\n".join(lines)


def _samples(op: Op[..., Any]) -> str:
    found = list(op.samples(CPU, torch.float32))
    rows = "\n".join(f"    | `{sample.name}` | {cell(sample.why)} |" for sample in found)
    return f"""Every backend is compared with the definition in float64 on {len(found)} calls in each dtype: outputs, gradients, compiled and eager.

??? note "The {len(found)} calls"

    | sample | why |
    | --- | --- |
{rows}"""
