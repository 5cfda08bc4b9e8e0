# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding: a module whose forward calls functions `apply_rotary…` of its modeling file, or such a method.

Each instance gets a forward with a private namespace in which they are replaced (`liger_hf.rebinding`). A global that
is rebound in the modeling file after `apply` is therefore not seen by a patched instance.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn

from liger_core import Unsupported, rope
from liger_core.accuracy import error
from liger_hf.isolation import undisturbed
from liger_hf.patch import forward_of, replacing
from liger_hf.rebinding import Functions, called, innermost, names_in, rebound
from liger_hf.rule import Candidate, Dtypes, Found, Rule
from liger_hf.rules.rotary.forms import Coverage, Form, Signature, forms, signature, with_rope
from liger_hf.rules.rotary.method import of_a_method
from liger_hf.stand_in import LENGTHS, Case, Draw, Run, device_of, trial, weight_kind

NOTHING = "no module calls a function or a method apply_rotary…"
PREFIX = "apply_rotary"
# Calls with tables of (tokens, columns): the dimensions of the rotated tensors, and the axis of the heads if they had a
# batch dimension. First packed sequences and images, then those that share their tables.
FLAT = ((3, 2), (4, 2), (4, 1))


def look(module: nn.Module) -> Found | None:
    original = forward_of(module)
    if isinstance(original, str):
        inside = getattr(type(module), "forward", None)
        return Found("rope", refusal=original) if inside is not None and rotary_functions(inside) else None
    functions = rotary_functions(original)
    if not functions:
        method = rotary_method(module, original)
        return None if method is None else of_a_method(module, method)
    readable = {name: known for name, function in functions.items() if (known := signature(function)) is not None}
    if not readable:
        words = f"it calls {', '.join(functions)}, whose arguments are not queries, keys and their angles"
        return Found("rope", refusal=words)
    width = getattr(module, "head_dim", None)
    width = width if isinstance(width, int) and width % 8 == 0 else 64
    dtype, device = weight_kind(module)
    functions = {name: functions[name] for name in readable}
    return Found(
        "rope",
        kind=(type(module), tuple(functions.values()), width, dtype, device),
        original=lambda name, *args, **options: functions[name](*args, **options),
        candidates=lambda: _candidates(original, functions, readable, width),
        cases=lambda device, dtypes: _cases(functions, readable, width, device, dtypes),
        device=lambda: device_of(module),
        dtype=dtype,
    )


def rotary_functions(function: Any) -> Functions:
    """Return the rotary functions that a forward calls."""
    return called(function, lambda name, _: _rotates(name))


def rotary_method(module: nn.Module, function: Any) -> str | None:
    """Return the name of the method that applies the rotary embedding, in models without such a function."""
    code = getattr(innermost(function), "__code__", None)
    names = names_in(code) if code is not None else ()
    return next(
        (name for name in names if _rotates(name) and inspect.isroutine(getattr(type(module), name, None))), None
    )


def _rotates(name: str) -> bool:
    return PREFIX in name or (name.startswith("apply_") and name.endswith("_rope"))


def _candidates(
    original: Callable[..., Any], functions: Functions, readable: Mapping[str, Signature], width: int
) -> Iterator[Candidate]:
    fitting = {name: fitting_forms(functions[name], readable[name], width) for name in functions}
    fitting = {name: forms_of_it for name, forms_of_it in fitting.items() if forms_of_it}
    for chosen in product(*fitting.values()) if fitting else ():
        yield _candidate(original, functions, readable, dict(zip(fitting, chosen, strict=True)))


def fitting_forms(function: Callable[..., Any], signature: Signature, width: int) -> list[tuple[Form, Coverage]]:
    """Return the forms that roughly agree with the function, in float32 on the CPU."""
    device, fitting = torch.device("cpu"), []
    with undisturbed(device), torch.no_grad():
        trials = [(kwargs, function(**kwargs)) for kwargs in calls(function, signature, width, device)]
        flat = [(layout, call, function(**call)) for layout, call in flat_calls(function, signature, width, device)]
        accepted = [kwargs for kwargs, _ in trials] or [kwargs for _, kwargs, _ in flat]
        if not accepted:
            return []
        fractions = frozenset(kwargs[signature.tables[0]].shape[-1] / width for kwargs in accepted)
        coverage = Coverage(fractions, keeps_dtype(function, accepted[0]), frozenset(FLAT))
        for form in forms(signature):
            # Without the original as a fallback, with which a form that takes no call would agree on all of them.
            alone = with_rope(signature, form, _declined, coverage)
            if all(_same(alone, kwargs, result) for kwargs, result in trials):
                agreed = [(layout, _same(alone, kwargs, result)) for layout, kwargs, result in flat]
                taken = {layout for layout, _ in agreed} - {layout for layout, same in agreed if not same}
                if trials or taken:
                    fitting.append((form, replace(coverage, flat=frozenset(taken))))
    return fitting


def _declined(*args: Any, **options: Any) -> Any:
    raise Unsupported("the form does not take the call")


def keeps_dtype(function: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Return whether the result has the dtype of the rotated tensors although the tables are wider."""
    low = {
        name: value.bfloat16() if name not in ("cos", "sin", "freqs_cis") and isinstance(value, Tensor) else value
        for name, value in kwargs.items()
    }
    return all(r.dtype == torch.bfloat16 for r in results_of(function(**low)))


def _same(candidate: Callable[..., Any], kwargs: dict[str, Any], result: Any) -> bool:
    try:
        got = candidate(**kwargs)
    except Exception:
        return False
    pairs = list(zip(results_of(got), results_of(result), strict=False))
    return all(a.shape == b.shape and error(a, b).frobenius < 0.1 for a, b in pairs)


def _candidate(
    original: Callable[..., Any],
    functions: Functions,
    readable: Mapping[str, Signature],
    chosen: Mapping[str, tuple[Form, Coverage]],
) -> Candidate:
    replaced = {
        name: with_rope(readable[name], form, functions[name], coverage) for name, (form, coverage) in chosen.items()
    }

    def function(name: str, *args: Any, **options: Any) -> Any:
        return replaced.get(name, functions[name])(*args, **options)

    details = dict.fromkeys(form.name for form, _ in chosen.values() if form.name)
    unchanged = [name for name in functions if name not in chosen]
    words = ", ".join([*details, *(f"{name} stays" for name in unchanged)])
    return Candidate(rope, words, function, replacing(original, lambda: rebound(original, replaced)))


def calls(
    function: Callable[..., Any], signature: Signature, width: int, device: torch.device, length: int = 5
) -> Iterator[dict[str, Any]]:
    """Yield random arguments that the function takes.

    The tables are as wide as the heads or narrower, and shared by the batch or not; the heads are on either axis.
    """
    draw = Draw(device)
    for batch, rotary, axis in product((2, 1), (width, width // 2, width // 4), (1, 2)):
        states, tables = _states(draw, signature, length, width, axis), _tables(draw, signature, batch, length, rotary)
        kwargs = states | tables | _axis(signature, axis)
        if _runs(function, kwargs):
            yield kwargs


def flat_calls(
    function: Callable[..., Any], signature: Signature, width: int, device: torch.device
) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
    """Yield random arguments with tables of (tokens, columns) that the function takes, and the layout of each."""
    draw, length = Draw(device), 5
    for (dimensions, axis), rotary in product(FLAT, (width, width // 2, width // 4)):
        states = _states(draw, signature, length, width, axis)
        kwargs = {name: s[0] for name, s in states.items()} if dimensions == 3 else states
        kwargs |= _tables(draw, signature, length, rotary) | _axis(signature, axis - 1)
        if _runs(function, kwargs):
            yield (dimensions, axis), kwargs


def _tables(draw: Draw, signature: Signature, *shape: int) -> dict[str, Any]:
    # Independent entries, because cos² + sin² = 1 and equal halves must not matter.
    tables = [draw.normal(*shape) for _ in signature.tables]
    if signature.tables == ("freqs_cis",):
        tables = [torch.complex(tables[0], draw.normal(*shape))]
    return dict(zip(signature.tables, tables, strict=True))


def _states(draw: Draw, signature: Signature, length: int, width: int, axis: int) -> dict[str, Any]:
    states = [draw.normal(2, length, heads, width) for heads in (4, 2)[: len(signature.rotated)]]
    return dict(zip(signature.rotated, (s.transpose(1, 2) if axis == 1 else s for s in states), strict=True))


def _axis(signature: Signature, axis: int) -> dict[str, Any]:
    return {} if signature.heads is None else {"unsqueeze_dim": axis}


def _runs(function: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    try:
        results = results_of(function(**kwargs))
    except Exception:
        return False
    # Tables that were broadcast against another axis do not hold one row per position.
    states = [value for value in kwargs.values() if isinstance(value, Tensor)][: len(results)]
    return [r.shape for r in results] == [s.shape for s in states]


def results_of(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _cases(
    functions: Functions, readable: Mapping[str, Signature], width: int, device: torch.device, dtypes: Dtypes
) -> Iterator[Case]:
    for name, function in functions.items():
        for words, dtype, kwargs in cast_calls(function, readable[name], width, device, dtypes):
            yield Case(f"{words}, {name}", dtype, _run(name, kwargs, readable[name]))
        for number, (_, kwargs) in enumerate(flat_calls(function, readable[name], width, device)):
            for dtype in dtypes:
                label = f"{str(dtype).removeprefix('torch.')}, {name}, tables without a batch, call {number + 1}"
                yield Case(label, dtype, _run(name, cast_call(kwargs, readable[name], dtype, dtype), readable[name]))
        for length in LENGTHS:
            for kwargs in islice(calls(function, readable[name], width, device, length), 1):
                yield Case(f"float32, {name}, length {length}", torch.float32, _run(name, kwargs, readable[name]))


def cast_calls(
    function: Callable[..., Any], signature: Signature, width: int, device: torch.device, dtypes: Dtypes
) -> Iterator[tuple[str, torch.dtype, dict[str, Any]]]:
    """Yield `calls` in each dtype, also with float32 tables if they do not change the result's, each with a name."""
    for number, kwargs in enumerate(calls(function, signature, width, device), 1):
        batch, _, columns = kwargs[signature.tables[0]].shape
        for dtype in dtypes:
            for table_dtype in dict.fromkeys((dtype, torch.float32)):
                chosen = cast_call(kwargs, signature, dtype, table_dtype)
                if table_dtype == dtype or keeps_dtype(function, chosen):
                    words = f"{columns} table columns for {width}, tables of batch {batch}"
                    words += ", float32 tables" if table_dtype != dtype else ""
                    yield f"{str(dtype).removeprefix('torch.')}, call {number}, {words}", dtype, chosen


def cast_call(kwargs: dict[str, Any], signature: Signature, dtype: torch.dtype, tables: torch.dtype) -> dict[str, Any]:
    """Cast the arguments of a call, except complex tables."""
    states = {name: kwargs[name].to(dtype) for name in signature.rotated}
    return (
        kwargs | states | {name: kwargs[name].to(tables) for name in signature.tables if not kwargs[name].is_complex()}
    )


def _run(name: str, kwargs: dict[str, Any], signature: Signature) -> Run:
    # Drawn here, because a float64 run would draw different numbers.
    draw = Draw(kwargs[signature.rotated[0]].device, seed=1)
    upstream = {f"rotated {key}": draw.normal(*kwargs[key].shape).to(kwargs[key].dtype) for key in signature.rotated}

    def call(function: Callable[..., Any], inputs: Any, weights: Any, cast: Any) -> dict[str, Tensor]:
        tables = {table: cast(kwargs[table]) for table in signature.tables}
        return dict(zip(upstream, results_of(function(name, **{**kwargs, **tables, **inputs})), strict=True))

    return trial(call, {key: kwargs[key] for key in signature.rotated}, upstream)


RULE = Rule("rotary", look, ("rope",), NOTHING)
