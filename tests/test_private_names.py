# SPDX-License-Identifier: Apache-2.0
"""Private names of other libraries: in two modules only, each with a fallback, and on the page that lists them."""

import ast
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from liger_core.private_names import PrivateNames
from without_private_names import remove

ROOT = Path(__file__).parents[1]


def generator() -> ModuleType:
    """Import the generator of the page; its folder, which has modules with the names of tests, does not stay on sys.path."""
    folder = ROOT / "docs" / "generate"
    spec = importlib.util.spec_from_file_location("private_names", folder / "private_names.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


generated = generator()
SOURCES = {path.as_posix().partition("/src/")[2]: path for path in sorted(ROOT.glob("packages/*/src/**/*.py"))}
HOMES = ("liger_core/private_names.py", "liger_core/private_torch.py", "liger_hf/private_transformers.py")
# Triton's interpreter has a file of its own; peers are libraries that are measured, and a fault in one is reported
# there.
OTHERS = ("liger_triton/interpreter.py", "liger_bench/peers/", "liger_train/implementations.py")
LIBRARIES = ("torch", "transformers", "accelerate", "peft", "trl")
ALLOWED = {name for names in generated.ANYWHERE.values() for name in names}
# The public interface of named tuples, and names of the standard library.
STANDARD = {"_replace", "_make", "_fields", "_asdict", "os._exit", "sys._getframe"}
# The names that the packages define.
OWN = set(re.findall(r"\b(?:def |class |self\.|cls\.)(\w+)", "\n".join(path.read_text() for path in SOURCES.values())))
# A word or the last part of a path.
KNOWN = {re.split(r"[:.]", path)[-1] for path in generated.NAMES} - {"default"}

pytestmark = pytest.mark.cpu


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in ALLOWED


def private_names_in(tree: ast.Module) -> Iterator[str]:
    """The private names of other libraries that code uses: imported, as attributes, or as strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in LIBRARIES:
            for path in (f"{node.module}.{alias.name}" for alias in node.names):
                listed = ":".join(path.rsplit(".", 1)) in generated.NAMES
                private = any(map(is_private, path.split("."))) and not path.startswith(tuple(ALLOWED))
                if listed or private:
                    yield path
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            path, root = ast.unparse(node), ast.unparse(node.value).partition(".")[0]
            mine = root in ("self", "cls", "super()") or (node.attr in OWN and root not in LIBRARIES)
            allowed = STANDARD | {allowed for allowed in ALLOWED if "." in allowed}
            if not mine and node.attr not in STANDARD and not any(name.startswith(path) for name in allowed):
                yield path
        elif isinstance(node, ast.Constant) and str(node.value) in KNOWN and is_private(str(node.value)):
            yield repr(node.value)


@pytest.mark.parametrize("name", [name for name in SOURCES if name not in HOMES and not name.startswith(OTHERS)])
def test_a_file_uses_no_private_name(name: str) -> None:
    assert list(private_names_in(ast.parse(SOURCES[name].read_text()))) == []


@pytest.mark.parametrize(
    "code",
    [
        "import torch; torch._C._cuda_getDevice()",
        "from torch._subclasses.fake_tensor import FakeTensor",
        "from transformers.loss.loss_utils import ForCausalLMLoss",
        "tensor._use_count()",
        "getattr(config, '_attn_implementation', None)",
        "'_hf_hook' in vars(module)",
    ],
)
def test_a_private_name_is_found(code: str) -> None:
    assert list(private_names_in(ast.parse(code)))


@pytest.mark.parametrize("path", generated.NAMES)
def test_the_module_of_a_private_name_can_be_imported_without_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remove(PrivateNames, lambda other: other == path, monkeypatch.setattr)
    module = next(module for module, names in generated.MODULES if path in names)

    runpy.run_path(str(module.__file__))


@pytest.mark.slow
def test_a_model_trains_without_any_private_name() -> None:
    command = [sys.executable, "-W", "ignore", str(Path(remove.__code__.co_filename)), "reference", "triton"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert done.stdout.split() == ["reference", "right", "triton", "right"], done.stdout + done.stderr


def test_the_use_of_a_function_that_is_missing_is_an_error() -> None:
    missing = PrivateNames().require("torch:_no_such_function", "Does something.")

    assert not missing
    sentence = r"Does something: torch must have torch\._no_such_function, got torch .* without it; use a version"
    with pytest.raises(RuntimeError, match=sentence):
        missing(1)


def test_the_page_is_current() -> None:
    assert generated.PAGE.read_text() == generated.page(), "python docs/generate/private_names.py writes the page"


@pytest.mark.slow
def test_the_installed_versions_are_recorded() -> None:
    """Also where they have lost or gained a name since."""
    paths = [name.path for name in generated.NAMES.values() if generated.libraries(name) is not None]
    recorded = {path: generated.recorded()[path] for path in paths}
    installed = {path: generated.probed()[path] for path in recorded}
    known = {version for entry in recorded.values() for version in entry["has"]}
    new = {path for path, entry in installed.items() if {*entry["has"], *entry["lacks"]} - known}
    if new:
        pytest.skip(f"versions that are not recorded, for {len(new)} names")
    assert installed == recorded


def test_every_private_name_is_used() -> None:
    assert [path for path, files in generated.uses().items() if not files] == []
