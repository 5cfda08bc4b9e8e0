# SPDX-License-Identifier: Apache-2.0
"""The wheels are ready to be published: what their metadata says, and what they hold."""

import shutil
import subprocess
import sys
from email.message import Message
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

import pytest

from test_architecture import PACKAGES

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(int(metadata.version("setuptools").split(".")[0]) < 77, reason="needs setuptools 77 or newer, as the packages do"),
]  # fmt: skip


def wheel(package: str) -> tuple[Message, set[str]]:
    """The metadata and the names of the files in it; built from a copy, where nothing is left of earlier builds."""
    with TemporaryDirectory() as folder:
        source, built = Path(folder, "source"), Path(folder, "built")
        ignored = shutil.ignore_patterns("*.egg-info", "build", "__pycache__")
        shutil.copytree(ROOT / "packages" / package.replace("_", "-"), source, ignore=ignored)
        subprocess.run([sys.executable, "-c", BUILD, str(built)], cwd=source, check=True, capture_output=True)
        (path,) = built.glob("*.whl")
        with ZipFile(path) as archive:
            names = archive.namelist()
            (described,) = [name for name in names if name.endswith(".dist-info/METADATA")]
            return Parser().parsestr(archive.read(described).decode()), set(names)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_holds_every_source_and_the_metadata_that_an_index_shows(package: str) -> None:
    sources = ROOT / "packages" / package.replace("_", "-") / "src"
    described, names = wheel(package)
    assert {str(path.relative_to(sources)) for path in sources.rglob("*.py")} | {f"{package}/py.typed"} <= names
    assert any(name.endswith("LICENSE") for name in names)

    assert described["License-Expression"] == "Apache-2.0"
    assert described["Requires-Python"] == ">=3.11"
    assert described["Summary"]
    assert described["Keywords"]
    assert described.get_payload().startswith(f"# {package.replace('_', '-')}")

    found = described.get_all("Classifier", [])
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(found)
    assert "Typing :: Typed" in found
    assert "Operating System :: " + ("POSIX :: Linux" if package == "liger_triton" else "OS Independent") in found
    # An index refuses both the expression and the classifier.
    assert [name for name in found if name.startswith("License ::")] == []

    if package not in ("liger_triton", "liger_inductor"):
        extra = f'liger-triton=={described["Version"]}; extra == "triton"'
        assert extra in described.get_all("Requires-Dist", [])
        assert "triton" in described.get_all("Provides-Extra", [])
