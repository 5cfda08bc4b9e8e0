# SPDX-License-Identifier: Apache-2.0
"""`liger bench report`."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from liger_bench.records import Records, distinct, read
from liger_bench.writable import check_file, check_folder

HEADING = "Benchmarks"


def report(
    results: Annotated[
        Path,
        typer.Argument(
            metavar="RESULTS",
            help="Folder with the results.json, model.json, sharded.json or step.json of liger bench --out.",
        ),
    ],
    heading: Annotated[str, typer.Option(help="Title of the page.")] = HEADING,
    docs: Annotated[
        Path | None, typer.Option(help="The page to write. Default: report.md in the folder of the results.")
    ] = None,
    images: Annotated[
        Path | None, typer.Option(help="Folder of the pictures. Default: images beside the page.")
    ] = None,
) -> None:
    """Draw pictures and write one page from results; every figure in them comes from the results."""
    # These bring matplotlib, which the other commands do without.
    from liger_bench.report.page import page

    records = read(results)
    command = _command(results, heading, docs, images)
    docs = docs or results / "report.md"
    images = images or docs.parent / "images"
    check_file("bench report: --docs", docs)
    check_folder("bench report: --images", images)
    drawn = _drawn(records, images)
    links = {key: Path(os.path.relpath(path, docs.parent)) for key, path in drawn.items()}
    docs.write_text(page(records, links, command, heading), encoding="utf-8")
    Console(highlight=False).print(f"{docs}, {len(drawn)} pictures in {images}", soft_wrap=True)


def _command(results: Path, heading: str, docs: Path | None, images: Path | None) -> str:
    """Return the command that writes this page again."""
    words = ["liger", "bench", "report", results.as_posix()]
    words += ["--heading", heading] if heading != HEADING else []
    words += ["--docs", docs.as_posix()] if docs else []
    words += ["--images", images.as_posix()] if images else []
    return shlex.join(words)


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
