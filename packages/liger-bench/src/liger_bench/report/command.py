# SPDX-License-Identifier: Apache-2.0
"""`liger bench report`."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from liger_bench.records import Records, distinct, read
from liger_bench.targets import REASONS, TARGETS, Verdict, judged, read_reasons, read_targets
from liger_bench.writable import check_file
from liger_core.errors import OptionError

IMAGES = Path("images", "bench")
HEADING = "Benchmarks"


def report(
    results: Annotated[
        Path,
        typer.Argument(metavar="RESULTS", help="Folder with the results.json, model.json, sharded.json or step.json of liger bench --out."),
    ],
    heading: Annotated[str, typer.Option(help="Title of the page.")] = HEADING,
    docs: Annotated[Path, typer.Option(help="The page to write; the pictures go to images/bench beside it.")] = Path("docs/benchmarks.md"),
    targets: Annotated[Path | None, typer.Option(help=f"Targets for the figures. Default: {TARGETS}, if it exists.")] = None,
    reasons: Annotated[
        Path | None, typer.Option(help=f"Why targets are missed. Default: {REASONS.name} beside the targets, if it exists.")
    ] = None,
) -> None:
    """Draw pictures and write one page from results; every figure in them comes from the results."""
    # These bring matplotlib, which the other commands do without.
    from liger_bench.report.page import page

    records = read(results)
    check_file("bench report: --docs", docs)
    verdicts = _verdicts(records, targets, reasons)
    drawn = _drawn(records, docs.parent / IMAGES)
    named = {key: Path(os.path.relpath(path, docs.parent)) for key, path in drawn.items()}
    docs.write_text(page(records, verdicts, named, _repeated(results, heading, targets), heading), encoding="utf-8")
    counts = Counter(verdict.word for verdict in verdicts)
    judgement = f"; targets: {', '.join(f'{count} {word}' for word, count in counts.items())}" if verdicts else ""
    Console(highlight=False).print(f"{docs}, {len(drawn)} pictures in {docs.parent / IMAGES}{judgement}", soft_wrap=True)


def _repeated(results: Path, heading: str, targets: Path | None) -> str:
    """The command that writes this page again."""
    words = ["liger", "bench", "report", results.as_posix()]
    words += ["--heading", heading] if heading != HEADING else []
    words += ["--targets", targets.as_posix()] if targets is not None else []
    return shlex.join(words)


def _verdicts(records: Records, targets: Path | None, reasons: Path | None) -> list[Verdict]:
    targets = targets or (TARGETS if TARGETS.exists() else None)
    if targets is None:
        return []
    beside = targets.with_name(targets.stem.replace(TARGETS.stem, REASONS.stem) + REASONS.suffix)
    reasons = reasons or (beside if beside.exists() else None)
    wanted, known = read_targets(targets), read_reasons(reasons) if reasons else {}
    unknown = sorted(known.keys() - {target.id for target in wanted})
    if unknown:
        raise OptionError(f"bench report: {reasons} must name targets of {targets}, got {', '.join(unknown)}")
    return judged(wanted, records.all, known)


def _drawn(records: Records, folder: Path) -> dict[str, Path]:
    """Key of a picture → where it was written, for those that there is something to draw for."""
    from liger_bench.report.pictures import model_picture, scaling_picture, share_picture, step_picture, styles
    from liger_bench.report.steps import PICTURE

    look = styles(distinct([*records.ops, *records.scaling], "implementation"))
    drawn: dict[str, Path] = {}
    for op in distinct([*records.ops, *records.scaling], "op"):
        own, path = [row for row in records.ops if row["op"] == op], folder / f"{op}.png"
        if share_picture(op, own, path, look):
            drawn[op] = path
        own, path = [row for row in records.scaling if row["op"] == op], folder / f"{op}-scaling.png"
        if scaling_picture(op, own, path, look):
            drawn[f"{op} scaling"] = path
    if model_picture(records.models, folder / "models.png", styles(distinct(records.models, "implementation"))):
        drawn["models"] = folder / "models.png"
    if step_picture(records.steps, folder / "steps.png", styles(distinct(records.steps, "implementation"))):
        drawn[PICTURE] = folder / "steps.png"
    return drawn
