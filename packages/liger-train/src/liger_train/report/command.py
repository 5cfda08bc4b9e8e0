# SPDX-License-Identifier: Apache-2.0
"""`liger report`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from liger_bench.progress import progress_bar
from liger_bench.records import Record
from liger_bench.writable import check_file
from liger_train.report.sweeps import FUSED, PLAIN, Sweep, others, read, sweeps

IMAGES = Path("images", "training-results")

Draw = Callable[[Path], None]


def report(
    results: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Folders written by liger train --out.")],
    html: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Where to write the report as one HTML file with inline images. Default: report.html in the first "
                "folder."
            )
        ),
    ] = None,
    docs: Annotated[
        Path | None,
        typer.Option(help="Also write the report as Markdown, with its images in images/training-results beside it."),
    ] = None,
) -> None:
    """Report the throughput and peak memory of training runs: charts and tables on one page, from the results of liger
    train."""
    rows, html = read(results), html or results[0] / "report.html"
    for option, path in (("--html", html), ("--docs", docs)):
        if path is not None:
            check_file(f"report: {option}", path)
    command = " ".join(["liger report", *(folder.as_posix() for folder in results)])
    with progress_bar() as bar, tempfile.TemporaryDirectory(prefix="liger-report-") as folder:
        task = bar.add_task("loading matplotlib", total=None)
        # The other commands do without it.
        from liger_train.report.page import as_html
        from liger_train.report.timelines import read_timelines

        timelines = read_timelines(results)
        # The HTML file embeds the pictures that the Markdown page links to.
        base = Path(folder) if docs is None else docs.parent
        place = _Place(base, lambda name: bar.update(task, description=f"drawing {name}"))
        text, count = _written(rows, timelines, place, command)
        html.write_text(as_html(text, base), encoding="utf-8")
    if docs is not None:
        docs.write_text(text, encoding="utf-8")
    written = " and ".join(str(path) for path in (html, docs) if path)
    found = ", ".join(
        f"{number} {word}{'s' * (number != 1)}" for number, word in ((len(rows), "training run"), (count, "picture"))
    )
    Console(highlight=False).print(f"{written}: {found}", soft_wrap=True)


@dataclass(frozen=True)
class _Place:
    """The folder of a page, with its pictures in IMAGES below it; `show` gets the name of each picture before it is
    drawn."""

    folder: Path
    show: Callable[[str], object]

    def draw(self, name: str, drawing: Draw) -> Path:
        """The path of a picture, as the page links to it."""
        self.show(name)
        path = IMAGES / f"{name}.png"
        drawing(self.folder / path)
        return path


def _written(rows: list[Record], timelines: list[Record], place: _Place, command: str) -> tuple[str, int]:
    """The page in Markdown, and its number of pictures."""
    from liger_train.report.page import Pictures, page
    from liger_train.report.timelines import pairs, timeline_picture

    found, pictures, names = sweeps(rows), Pictures(), list[str]()
    for sweep in found:
        names.append(sweep.name)
        # Sweeps that differ only in their machine or text get numbers.
        name = sweep.name if names.count(sweep.name) == 1 else f"{sweep.name}-no-{names.count(sweep.name)}"
        pictures.sweeps.append(
            [(caption, place.draw(f"{name}{end}", drawing)) for caption, end, drawing in _pictures_of(sweep)]
        )
    for name, group in pairs(timelines).items():
        pictures.timelines.append(
            (f"Memory over time: {name}", place.draw(f"timeline-{name}", partial(timeline_picture, group)))
        )
    count = sum(len(drawn) for drawn in pictures.sweeps) + len(pictures.timelines)
    return page(rows, found, others(rows, found), timelines, pictures, command), count


def _pictures_of(sweep: Sweep) -> list[tuple[str, str, Draw]]:
    """Return caption, file name suffix and drawing of each picture: two strategies, and all of them."""
    from liger_train.report.pictures import sweep_picture

    every, two = (
        sweep.strategies,
        [strategy for strategy in (sweep.strategy(PLAIN), sweep.strategy(FUSED)) if strategy is not None],
    )
    drawn: list[tuple[str, str, Draw]] = []
    if len(two) == 2 and len(every) > 2:
        drawn.append((f"{sweep.title}: Transformers and Liger", "-two", partial(sweep_picture, sweep, two)))
    drawn.append((f"{sweep.title}: every strategy", "", partial(sweep_picture, sweep, every)))
    return drawn
