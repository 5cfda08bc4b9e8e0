# SPDX-License-Identifier: Apache-2.0
"""No version of torch or Transformers loses a replacement: every model type has as many replaced modules as
docs/models.md shows."""

from __future__ import annotations

import pytest

import liger_hf
from hf.sweep import COLUMNS, COMPOSITES, FAMILIES, PAGE, TYPES, UNBUILT, Result, build, count, read
from liger_core import use

pytestmark = pytest.mark.slow

SHOWN = {result.model_type: result for result in read(PAGE.read_text()) if result.verdict != UNBUILT}
KNOWN = [model_type for types in FAMILIES.values() for model_type in types]
OTHERS = [model_type for model_type in (*TYPES, *COMPOSITES) if model_type in SHOWN and model_type not in KNOWN]
# (model type, column) → how the model itself differs between the oldest and the newest version.
CHANGED = {
    **{
        (model, column): "its experts use Transformers' experts interface since 5.24"
        for model in ("aria_text", "vision:aria")
        for column in ("MLP", "experts")
    },
}


def replaced(model_type: str) -> dict[str, int]:
    try:
        model = build(model_type)
    except ImportError as problem:
        pytest.skip(str(problem).strip().split("\n")[0])
    with use("reference"):
        report = liger_hf.apply(model)
    result = Result(model_type, "")
    count(result, report)
    return {column: result.columns.get(column, (0, 0))[0] for column in COLUMNS if (model_type, column) not in CHANGED}


def expect(model_type: str) -> None:
    shown = {
        column: SHOWN[model_type].columns.get(column, (0, 0))[0]
        for column in COLUMNS
        if (model_type, column) not in CHANGED
    }
    assert replaced(model_type) == shown


@pytest.mark.parametrize("model_type", KNOWN)
def test_a_well_known_model_type_has_as_many_replaced_modules_as_the_page_shows(model_type: str) -> None:
    expect(model_type)


@pytest.mark.matrix
@pytest.mark.parametrize("model_type", OTHERS)
def test_a_model_type_has_as_many_replaced_modules_as_the_page_shows(model_type: str) -> None:
    expect(model_type)
