# SPDX-License-Identifier: Apache-2.0
"""The runs of a sweep: every combination of values, with every strategy."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, get_type_hints

from liger_bench.memory import bytes_of
from liger_core.errors import nearest
from liger_train.errors import SetupError
from liger_train.implementations import IMPLEMENTATIONS
from liger_train.row import NOT_RUN, Row
from liger_train.setup import Setup

STRATEGIES = ("none", "all-but-loss", "all")
# The option that sets --liger and --compile together.
IMPLEMENTATION = "implementation"
# Option → type, for the options that a sweep can vary.
SWEPT = {
    name: kind
    for name, kind in get_type_hints(Setup).items()
    if name not in ("liger", "device", "set") and kind is not bool
}


def swept_values(options: Sequence[str]) -> dict[str, list[Any]]:
    """Parse words like "batch=1,4,8" to option → values.

    Raises OptionError for an unknown option or an invalid value.
    """
    values_by_option: dict[str, list[Any]] = {}
    for option in options:
        name, _, values = option.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if name == "liger":
            raise SetupError("--sweep cannot vary liger; give --strategies none,all-but-loss,all")
        if name not in (*SWEPT, IMPLEMENTATION) or not values.strip():
            raise SetupError(
                "--sweep must be an option and its values, for instance batch=1,4,8, got "
                f"{option!r}.{nearest(name, (*SWEPT, IMPLEMENTATION))}"
            )
        if name in values_by_option:
            raise SetupError(f"--sweep must name each option once, got {name} twice; give all its values in one")
        values_by_option[name] = list(dict.fromkeys(_parsed(name, word.strip()) for word in values.split(",")))
    return values_by_option


def strategies_of(words: str | None, varied: Collection[str] = ()) -> list[str]:
    """Parse words like "none,all-but-loss,rope+rms_norm" to values of --liger.

    Raises OptionError if there are none, or if `varied` has implementations, which also set --liger.
    """
    if words is None:
        return list(STRATEGIES)
    if IMPLEMENTATION in varied:
        raise SetupError("--strategies cannot be combined with --sweep implementation; both set --liger")
    strategies = list(dict.fromkeys(word.strip().replace("+", ",") for word in words.split(",") if word.strip()))
    if not strategies:
        raise SetupError(f"--strategies must name values of --liger, for instance none,all, got {words!r}")
    return strategies


def setups_of(base: Setup, values: Mapping[str, Sequence[Any]], strategies: Sequence[str]) -> list[Setup]:
    """Return a setup for every combination, smallest first, with each implementation or strategy.

    Unless the sweep varies ranks, every setup has at least as many as tp × cp needs.
    """
    compared: list[dict[str, Any]] = [{"liger": liger} for liger in strategies]
    if IMPLEMENTATION in values:
        compared = [IMPLEMENTATIONS[name] for name in values[IMPLEMENTATION]]
    values = {name: choices for name, choices in values.items() if name != IMPLEMENTATION}
    setups = [replace(base, **dict(zip(values, choice, strict=True))) for choice in product(*values.values())]
    if "ranks" not in values:
        setups = [replace(setup, ranks=max(setup.ranks, setup.tp * setup.cp)) for setup in setups]
    # The sort is stable: combinations with equally many tokens keep their order.
    setups.sort(key=lambda setup: setup.batch * setup.sequence)
    return [replace(setup, **options) for setup in setups for options in compared]


def reason_to_skip(setup: Setup, rows: Sequence[Row]) -> str:
    """Return the reason to skip a run if the same run with fewer tokens ran out of memory, or an empty string."""
    same = {*SWEPT, "liger", "device"} - {"batch", "sequence", "steps", "seed", "learning_rate"}
    for row in rows:
        smaller = row.batch <= setup.batch and row.sequence <= setup.sequence
        if row.out_of_memory and smaller and all(getattr(row, name) == getattr(setup, name) for name in same):
            return f"{NOT_RUN}, since {row.batch} × {row.sequence} ran out of memory"
    return ""


def _parsed(name: str, word: str) -> Any:
    if name == "memory_limit":
        return bytes_of("--sweep memory_limit", word, SetupError)
    if name == IMPLEMENTATION:
        if word not in IMPLEMENTATIONS:
            known = ", ".join(IMPLEMENTATIONS)
            raise SetupError(f"--sweep implementation must name {known}, got {word!r}.{nearest(word, IMPLEMENTATIONS)}")
        return word
    kind = SWEPT[name]
    if kind not in (int, float):
        return word
    try:
        value = kind(word)
    except ValueError:
        value = -1
    if value < 0 or (value == 0 and name != "seed"):
        raise SetupError(f"--sweep {name} must have positive numbers, got {word!r}")
    return value
