# SPDX-License-Identifier: Apache-2.0
"""`liger report`."""

import os
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from liger_bench import markdown
from liger_bench import records as ops
from liger_bench.progress import progress_bar
from liger_bench.records import Record, Records
from liger_bench.writable import check_file, check_folder
from liger_core.errors import OptionError
from liger_train.report.sweeps import FUSED, PLAIN, Sweep, read, sweeps

HEADING = "Results"

Draw = Callable[[Path], None]


def report(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="Folders written by liger train --out or liger bench --out."),
    ],
    html: Annotated[
        Path | None,
        typer.Option(
            help="Where to write the report as one HTML file with inline images. Default: report.html in the first "
            "folder, unless there is --docs."
        ),
    ] = None,
    docs: Annotated[Path | None, typer.Option(help="Where to write the report as Markdown, with its images.")] = None,
    images: Annotated[Path | None, typer.Option(help="Folder for images of --docs. Default: images beside it.")] = None,
    heading: Annotated[str, typer.Option(help="Title of the page.")] = HEADING,
) -> None:
    """Write charts and tables of the results of training runs and ops to one page."""
    rows, measured = read(results), [records for folder in results if (records := ops.read(folder)) is not None]
    if not rows and not measured:
        raise OptionError(
            "report: a folder must hold train.json, results.json or sharded.json, which liger train --out FOLDER and "
            f"liger bench --out FOLDER write; found none in {', '.join(map(str, results))}"
        )
    if html is None and docs is None:
        html = results[0] / "report.html"
    for option, path in (("--html", html), ("--docs", docs)):
        if path is not None:
            check_file(f"report: {option}", path)
    if images is not None:
        check_folder("report: --images", images)
    command = _command(results, heading, docs, images)
    with progress_bar() as bar, tempfile.TemporaryDirectory(prefix="liger-report-") as folder:
        task = bar.add_task("loading matplotlib", total=None)
        # Imported here, because other commands do not need matplotlib.
        from liger_train.report.page import as_html
        from liger_train.report.timelines import read_timelines

        timelines = read_timelines(results)
        # The HTML file embeds the same pictures that the Markdown page links to.
        base = Path(folder) if docs is None else docs.parent
        output = PageOutput(
            base, images or base / "images", lambda name: bar.update(task, description=f"drawing {name}")
        )
        sections = [f"# {heading}", markdown.generated(command)]
        if rows:
            sections += runs_sections(rows, timelines, output, command)
        for each in measured:
            sections += ops_sections(each, output, command)
        text = "\n\n".join(sections) + "\n"
        if html is not None:
            html.write_text(as_html(text, base), encoding="utf-8")
    if docs is not None:
        docs.write_text(text, encoding="utf-8")
    written = " and ".join(str(path) for path in (html, docs) if path)
    counts = (
        (len(rows), "training run"),
        (sum(len(each.all) for each in measured), "row"),
        (text.count("\n!["), "picture"),
    )
    words = ", ".join(f"{count} {word}{'s' * (count != 1)}" for count, word in counts if count)
    Console(highlight=False).print(f"{written}: {words}", soft_wrap=True)


def _command(results: Sequence[Path], heading: str, docs: Path | None, images: Path | None) -> str:
    words = ["liger", "report", *(folder.as_posix() for folder in results)]
    words += ["--heading", heading] if heading != HEADING else []
    for option, path in (("--docs", docs), ("--images", images)):
        words += [option, path.as_posix()] if path else []
    return shlex.join(words)


@dataclass(frozen=True)
class PageOutput:
    """The folders of a page and of its pictures; `show` gets the name of each picture before it is drawn."""

    folder: Path
    images: Path
    show: Callable[[str], object]

    def draw(self, name: str, drawing: Draw) -> Path:
        """Draw a picture; return its path relative to the page."""
        self.show(name)
        drawing(self.images / f"{name}.png")
        return self.link(self.images / f"{name}.png")

    def link(self, picture: Path) -> Path:
        return Path(os.path.relpath(picture, self.folder))


def ops_sections(records: Records, output: PageOutput, command: str) -> list[str]:
    """Return the sections of the page on ops."""
    from liger_bench.op_page import page
    from liger_bench.op_pictures import draw

    output.show("ops")
    return page(records, {key: output.link(path) for key, path in draw(records, output.images).items()}, command)


def runs_sections(rows: list[Record], timelines: list[Record], output: PageOutput, command: str) -> list[str]:
    """Return the sections of the page on training runs."""
    from liger_train.report.page import page
    from liger_train.report.timelines import pictured_runs, timeline_picture

    names: list[str] = []
    pictured = []
    for sweep in sweeps(rows):
        names.append(sweep.name)
        # Sweeps that differ only in machine or text get numbers.
        name = sweep.name if names.count(sweep.name) == 1 else f"{sweep.name}-no-{names.count(sweep.name)}"
        drawings = _pictures_of(sweep)
        pictures = [(caption, output.draw(f"{name}{end}", drawing)) for caption, end, drawing in drawings]
        pictured.append((sweep, pictures))
    timeline_pictures = [
        (f"Memory over time: {name}", output.draw(f"timeline-{name}", partial(timeline_picture, group)))
        for name, group in pictured_runs(timelines).items()
    ]
    return page(rows, pictured, timelines, timeline_pictures, command)


def _pictures_of(sweep: Sweep) -> list[tuple[str, str, Draw]]:
    """Return (caption, file name suffix, drawing) of each picture: Transformers and Liger, and every strategy."""
    from liger_train.report.pictures import sweep_picture

    strategies = sweep.strategies
    two = [strategy for strategy in (sweep.strategy(PLAIN), sweep.strategy(FUSED)) if strategy is not None]
    drawings: list[tuple[str, str, Draw]] = [
        (f"{sweep.title}: every strategy", "", partial(sweep_picture, sweep, strategies))
    ]
    if len(two) == 2 and len(strategies) > 2:
        drawings.insert(0, (f"{sweep.title}: Transformers and Liger", "-two", partial(sweep_picture, sweep, two)))
    return drawings
