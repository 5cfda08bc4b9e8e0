# SPDX-License-Identifier: Apache-2.0
"""No version of torch or Transformers loses a replacement: every model type has as many replaced modules as
docs/models.md shows."""

import pytest

import liger_hf
from hf.sweep import COLUMNS, COMPOSITES, FAMILIES, PAGE, TYPES, UNBUILT, Result, build, count, read
from liger_core import use

pytestmark = pytest.mark.slow

SHOWN = {result.model_type: result for result in read(PAGE.read_text()) if result.verdict != UNBUILT}
KNOWN = [model_type for types in FAMILIES.values() for model_type in types]
OTHERS = [model_type for model_type in (*TYPES, *COMPOSITES) if model_type in SHOWN and model_type not in KNOWN]
# What differs between the oldest and the newest version: its experts use Transformers' experts interface since 5.24.
CHANGED = {(model_type, column) for model_type in ("aria_text", "vision:aria") for column in ("MLP", "experts")}


@pytest.mark.parametrize("model_type", [*KNOWN, *OTHERS])
def test_a_model_type_has_as_many_replaced_modules_as_the_page_shows(model_type: str) -> None:
    try:
        model = build(model_type)
    except ImportError as problem:
        pytest.skip(str(problem).strip().split("\n")[0])
    with use("reference"):
        report = liger_hf.apply(model)
    result = Result(model_type, "")
    count(result, report)
    columns = [column for column in COLUMNS if (model_type, column) not in CHANGED]
    replaced, shown = ({c: each.columns.get(c, (0, 0))[0] for c in columns} for each in (result, SHOWN[model_type]))
    assert replaced == shown
