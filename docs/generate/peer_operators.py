# SPDX-License-Identifier: Apache-2.0
"""Which op of Liger does what a function of liger-kernel does, from peer_operators.toml; docs/benchmarks/ops.md has it as a table."""

import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from liger_bench import markdown
from liger_core.builtin import CATALOGUE

DESCRIPTION = Path(__file__).with_suffix(".toml")
ABOUT = """
Each function of tensors in liger-kernel {version}, and what Liger has for it. Ops of Liger that the table does not name have no function in liger-kernel.
""".strip()


def described(path: Path = DESCRIPTION) -> dict[str, Any]:
    """Raises ValueError if operators and ops of the description are not those that there are."""
    found = tomllib.loads(path.read_text())
    wrong = mistakes(found, [op.name for op in CATALOGUE])
    if wrong:
        raise ValueError(f"{path.name}: {'; '.join(wrong)}")
    return found


def mistakes(found: dict[str, Any], ops: Sequence[str]) -> list[str]:
    """What is wrong with a description, given the names of all ops."""
    named = [(operator, op) for operator, names in found["compared"].items() for op in names]
    named += [(operator, op) for operator, entry in found["covered"].items() for op in entry["ops"]]
    wrong = [f"{operator} names the op {op}, which does not exist" for operator, op in named if op not in ops]
    operators = [operator for name in ("compared", "covered", "none") for operator in found[name]]
    return wrong + [
        f"{operator} is in two tables" for operator in sorted({o for o in operators if operators.count(o) > 1})
    ]


def section() -> str:
    """Return the table of all functions."""
    found = described()
    rows = [(operator, links(ops)) for operator, ops in found["compared"].items()]
    rows += [(operator, f"{links(entry['ops'])}: {entry['how']}") for operator, entry in found["covered"].items()]
    rows += [(operator, f"none: {reason}") for operator, reason in found["none"].items()]
    table = markdown.table(("liger-kernel", "Liger"), [(f"`{operator}`", words) for operator, words in rows])
    return f"{ABOUT.format(version=found['version'])}\n\n{table}"


def links(ops: Iterable[str]) -> str:
    return ", ".join(f"[{op}](../../packages/liger-core/src/liger_core/ops/{op}.py)" for op in ops)
