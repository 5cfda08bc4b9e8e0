# SPDX-License-Identifier: Apache-2.0
"""The private names of other libraries: `python docs/generate/private_names.py` writes docs/private-names.md.

It first records in private_names.toml which names the installed versions have. Run it with every supported set of versions.
"""

import ast
import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import torch
from docstrings import code

from liger_bench import markdown
from liger_core import private_torch
from liger_core.private_names import PrivateName, PrivateNames
from liger_hf import private_transformers

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "private-names.md"
DATA = Path(__file__).with_suffix(".toml")
MODULES: tuple[tuple[ModuleType, PrivateNames], ...] = (
    (private_torch, private_torch.TORCH),
    (private_transformers, private_transformers.TRANSFORMERS),
)
NAMES: dict[str, PrivateName] = {path: name for _, names in MODULES for path, name in names.items()}
# Only builds with CUDA have these.
OF_CUDA = ("torch._C:_cuda_getDevice", "torch._C:_cuda_getCurrentRawStream")
# Private names that any file may use, by the reason.
ANYWHERE: dict[str, tuple[str, ...]] = {
    "The state of nn.Module, which is in every pickled model and which thousands of code bases read": (
        "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks",
        "_backward_pre_hooks", "_compiled_call_impl", "_replicate_for_data_parallel", "_apply", "_orig_mod",
    ),
    "Attributes of Tensor that the type stubs of PyTorch declare": (
        "_version", "_base", "_is_view", "_post_accumulate_grad_hooks",
    ),
    "PyTorch's documentation asks users to call them": (
        "torch.utils._pytree", "torch.utils._python_dispatch", "_make_wrapper_subclass", "torch._dynamo.config",
        "_record_memory_history", "_snapshot",
    ),
}  # fmt: skip
INTRODUCTION = """# Private names

This page lists the names that Liger uses and that PyTorch, Transformers and related libraries do not document. Their releases may drop such a
name. Liger therefore looks each name up once, in `liger_core/private_torch.py` or `liger_hf/private_transformers.py`, with a fallback. Without the
name, the packages still import, and a model still trains with correct results. `tests/test_private_names.py` removes all names to check this. It also
checks that no other file uses a private name.

* A private name begins with an underscore, or belongs to a module whose name does.
* A word is a name in the source of a module, such as an attribute that it sets on other objects.

`python docs/generate/private_names.py` writes this page, and records which names the installed versions have.
"""


def libraries(name: PrivateName) -> tuple[str, str] | None:
    """The library of a name and its installed version; None if it is not installed, or if this build cannot have the name."""
    library = name.path.partition(":")[0].partition(".")[0]
    try:
        installed = version(library).partition("+")[0]
    except PackageNotFoundError:
        return None
    return None if name.path in OF_CUDA and torch.version.cuda is None else (library, installed)


def recorded() -> dict[str, dict[str, list[str]]]:
    """Path → the versions that have it, and those that lack it."""
    return tomllib.loads(DATA.read_text()) if DATA.exists() else {}


def probed() -> dict[str, dict[str, list[str]]]:
    """The record with the installed versions; names that are no longer used are left out."""
    record = {path: entry for path, entry in recorded().items() if path in NAMES}
    for path, name in NAMES.items():
        entry = record.setdefault(path, {"has": [], "lacks": []})
        if (library := libraries(name)) is None:
            continue
        others = {key: set(versions) - {library[1]} for key, versions in entry.items()}
        others["has" if name.exists() else "lacks"].add(library[1])
        record[path] = {key: sorted(versions, key=_number) for key, versions in others.items()}
    return record


def _number(text: str) -> list[int]:
    return [int(part) for part in text.split(".") if part.isdecimal()]


def toml(record: dict[str, dict[str, list[str]]]) -> str:
    lines = ["# Which versions have the private names; written by private_names.py."]
    for path in NAMES:
        lines += ["", f'["{path}"]', *(f"{key} = {json.dumps(record[path][key])}" for key in ("has", "lacks"))]
    return "\n".join([*lines, ""])


def bindings(module: ModuleType, names: Iterable[str]) -> dict[str, set[str]]:
    """Name in a private module → the paths of the private names behind it."""
    paths, found, reads = {*names}, dict[str, set[str]](), dict[str, set[str]]()
    for statement in ast.parse(Path(str(module.__file__)).read_text()).body:
        patterns = {_pattern(node) for node in ast.walk(statement) if isinstance(node, ast.Constant | ast.JoinedStr)}
        own = {path for path in paths if any(re.fullmatch(pattern, path) for pattern in patterns)}
        for target in _bound(statement):
            found[target] = own
            reads[target] = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)} - {target}
    for _ in found:
        found = {
            target: own.union(*(found[read] for read in reads[target] if read in found))
            for target, own in found.items()
        }
    return found


def _pattern(node: ast.Constant | ast.JoinedStr) -> str:
    """What matches a string; a value may be anything."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".*" for part in parts)


def _bound(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Assign):
        return [node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)]
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return [statement.target.id]
    return [statement.name] if isinstance(statement, ast.FunctionDef) else []


def uses() -> dict[str, list[str]]:
    """Path → the files that use it."""
    found: dict[str, list[str]] = {path: [] for path in NAMES}
    every = [(module, bindings(module, names)) for module, names in MODULES]
    for file in sorted(ROOT.glob("packages/*/src/**/*.py")):
        tree = ast.parse(file.read_text())
        used = {path for module, bound in every for name in _used(tree, module) for path in bound.get(name, ())}
        for path in used:
            found[path].append(file.as_posix().partition("/src/")[2])
    return found


def _used(tree: ast.Module, module: ModuleType) -> Iterator[str]:
    """The names of a private module that a file imports, or reads as its attributes."""
    alias = module.__name__.rpartition(".")[2]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == module.__name__:
            yield from (imported.name for imported in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == alias:
            yield node.attr


def page() -> str:
    record, users = recorded(), uses()
    parts = [INTRODUCTION.rstrip()]
    for title, (_, names) in zip(("PyTorch", "Transformers and the libraries around it"), MODULES, strict=True):
        rows = [_row(name, users[path], record[path]) for path, name in names.items()]
        parts += [f"## {title}", markdown.table(("name", "used for", "where", "without it", "versions"), rows)]
    anywhere = [(code(*group), reason) for reason, group in ANYWHERE.items()]
    parts += ["## Names that any file may use", markdown.table(("names", "why"), anywhere)]
    return "\n\n".join(parts) + "\n"


def _row(name: PrivateName, files: list[str], entry: dict[str, list[str]]) -> tuple[str, ...]:
    module, _, word = name.path.partition(":")
    title = f"`{word}`, a word in `{module}`" if name.is_word else f"`{name.title}`"
    versions = ", ".join(entry["has"]) + (f"; not {', '.join(entry['lacks'])}" if entry["lacks"] else "")
    return title, name.purpose, code(*files), name.fallback, versions


if __name__ == "__main__":
    DATA.write_text(toml(probed()))
    PAGE.write_text(page())
