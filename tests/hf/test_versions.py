# SPDX-License-Identifier: Apache-2.0
"""Outside the tested versions of Transformers one warning says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from importlib import metadata

import pytest

import liger_hf
from hf.tiny_models import make
from liger_core.versions import warn_if_untested

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def not_yet_said() -> Iterator[None]:
    warn_if_untested.cache_clear()
    yield
    warn_if_untested.cache_clear()


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        metadata, "requires", lambda name: ["liger-core==0.1.0", "transformers<5.24,>=5.17", 'torchao; extra == "x"']
    )


@pytest.fixture
def installed(tested: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """installed(version): this is the version of Transformers."""
    real = metadata.version
    return lambda version: monkeypatch.setattr(
        metadata, "version", lambda name: version if name == "transformers" else real(name)
    )


@pytest.mark.parametrize("version", ["5.16.9", "5.24.0", "6.0.0.dev0"])
def test_a_version_outside_the_metadata_is_named_once(version: str, installed: Callable[[str], None]) -> None:
    installed(version)
    model = make(num_hidden_layers=1)
    with pytest.warns(UserWarning, match=f"Liger is tested with transformers<5.24,>=5.17, got {version}") as said:
        liger_hf.inspect(model)
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        liger_hf.apply(model)
