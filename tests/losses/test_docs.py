# SPDX-License-Identifier: Apache-2.0
"""The page about losses: its examples run, and it mentions everything."""

import re
from pathlib import Path
from typing import Any

from liger_core import losses
from liger_core.losses import pairs, surrogates

PAGE = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()


def test_the_page_names_everything_public() -> None:
    assert [name for name in losses.__all__ if name not in PAGE and not name.endswith("Metrics")] == []


def test_the_table_of_options_has_every_loss_and_only_options_that_exist(generators: Any) -> None:
    listed = generators.loss_options
    callables = {name for name in losses.__all__ if not name.endswith("Metrics")} - {"Head", "top_classes"}
    assert callables <= listed.TRL.keys()
    for loss, (_, named) in listed.TRL.items():
        assert named.keys() <= listed.options(loss).keys(), loss


def test_the_page_names_every_variant() -> None:
    assert [
        name for name in (*pairs.VARIANTS, *surrogates.VARIANTS) if f'"{name}"' not in PAGE and name != "sigmoid"
    ] == []


def test_the_page_has_the_constants_of_every_variant() -> None:
    """Clip(0.2, 0.28) and the like, as the tables write them."""
    written = re.sub(r"\s", "", PAGE)
    for surrogate, _ in surrogates.VARIANTS.values():
        constants = [value for value in vars(surrogate).values() if isinstance(value, (float, tuple))]
        start = f"{type(surrogate).__name__}({','.join(in_table(value) for value in constants)}"
        assert start in written, start


def in_table(value: float | tuple[float, ...]) -> str:
    if isinstance(value, tuple):
        return f"({','.join(map(in_table, value))})"
    mantissa, exponent = f"{value:e}".split("e")
    return f"{value:g}" if int(exponent) > -3 else f"{float(mantissa):g}e{int(exponent)}"


def test_every_paper_of_the_code_is_on_the_page() -> None:
    sources = "".join(path.read_text() for path in Path(losses.__file__).parent.glob("*.py"))
    cited = set(re.findall(r"arXiv:(\d{4}\.\d{5})", sources))
    assert cited - set(re.findall(r"\d{4}\.\d{5}", PAGE)) == {"2305.10425", "2510.13786"}
