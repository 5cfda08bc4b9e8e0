# SPDX-License-Identifier: Apache-2.0
"""The layers, the public names and the layout of the packages."""

import ast
import functools
import graphlib
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from liger_core import Op
from liger_core.builtin import CATALOGUE
from liger_core.ops._composed import ComposedOp

ROOT = Path(__file__).parent.parent
PACKAGES = ("liger_core", "liger_triton", "liger_inductor", "liger_hf", "liger_bench", "liger_train", "liger_verify")

# Package → top-level modules that its import must not load, and that its sources must not name.
FORBIDDEN = {
    "liger_core": ["triton", "transformers", "liger_triton", "liger_inductor", "liger_hf", "liger_bench", "liger_train", "liger_verify"],
    "liger_triton": ["transformers", "liger_inductor", "liger_hf", "liger_bench", "liger_train", "liger_verify"],
    "liger_inductor": ["triton", "transformers", "liger_triton", "liger_hf", "liger_bench", "liger_train", "liger_verify"],
    "liger_hf": ["liger_triton", "liger_inductor", "liger_bench", "liger_train", "liger_verify"],
    "liger_bench": ["liger_triton", "liger_inductor", "liger_train", "liger_verify"],
    "liger_train": ["liger_triton", "liger_inductor", "liger_verify"],
    "liger_verify": ["liger_triton", "liger_inductor", "liger_bench", "liger_train"],
}  # fmt: skip
# Names that say nothing about what is in a file.
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "misc", "common", "manager", "tools"}


def folder(package: str) -> Path:
    return ROOT / "packages" / package.replace("_", "-") / "src" / package


def sources(package: str) -> list[Path]:
    return sorted(folder(package).rglob("*.py"))


def metadata(package: str) -> dict[str, object]:
    path = ROOT / "packages" / package.replace("_", "-") / "pyproject.toml"
    return tomllib.loads(path.read_text())["project"]  # type: ignore[no-any-return]


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> set[str]:
    """The top-level packages that a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def modules(package: str) -> dict[str, Path]:
    """Name → file of every module of a package; the package itself has the name of its folder."""
    root = folder(package).parent
    named = {".".join(path.relative_to(root).with_suffix("").parts): path for path in sources(package)}
    return {name.removesuffix(".__init__"): path for name, path in named.items()}


def imported_modules(path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of its own package that a file imports, wherever in the file; what only a type checker reads does not
    count."""
    tree = parsed(path)
    guards = (node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    typing_only = {id(node) for guard in guards for node in ast.walk(guard)}
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= submodules if submodules <= known.keys() else {node.module, *submodules}
    return names & known.keys()


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_through_others(package: str) -> None:
    """`prepare` of the graph of imports fails at the first cycle, and names it."""
    known = modules(package)
    graph = graphlib.TopologicalSorter({name: imported_modules(path, known) - {name} for name, path in known.items()})
    graph.prepare()


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_imports_itself_through_others(package: str) -> None:
    """The same of the first level: each folder, and each file beside the folders, is one node."""
    known, graph = modules(package), dict[str, set[str]]()
    for name, path in known.items():
        imported = {first_level(other) for other in imported_modules(path, known)}
        graph.setdefault(first_level(name), set()).update(imported - {first_level(name)})
    graphlib.TopologicalSorter(graph).prepare()


def first_level(module: str) -> str:
    return ".".join(module.split(".")[:2])


def test_training_imports_only_what_the_commands_of_the_benchmark_share() -> None:
    """Those are the files at the top of liger_bench; its folders are commands of their own."""
    shared = {f"liger_bench.{path.stem}" for path in folder("liger_bench").glob("*.py")}
    found = {name for path in sources("liger_train") for name in imported_modules(path, modules("liger_bench"))}
    assert found <= shared | {"liger_bench"}, found - shared


def test_no_package_holds_more_than_a_third_of_the_source() -> None:
    lines = {package: sum(len(path.read_text().splitlines()) for path in sources(package)) for package in PACKAGES}
    assert max(lines.values()) * 3 <= sum(lines.values()), lines


# Where a backend is available its implementations are loaded with it, to compare their signatures.
PLUGINS = "os.environ['CUDA_VISIBLE_DEVICES'] = ''; from liger_core.plugins import registry; registry()"
LOADING = """
import os, sys, torch
before = set(sys.modules)
for code in sys.argv[1:]:
    if os.fork() == 0:
        exec(code)
        print(*(set(sys.modules) - before), flush=True)
        os._exit(0)
    if os.wait()[1]:
        print(flush=True)
"""


@functools.cache
def loaded() -> dict[str, set[str]]:
    """Return what importing each package and what loading the plugins adds to PyTorch's modules, in forks of one
    process."""
    codes = [*(f"import {package}" for package in PACKAGES), PLUGINS]
    command = [sys.executable, "-W", "ignore", "-c", LOADING, *codes]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [set(line.split()) for line in done.stdout.splitlines()]
    return dict(zip((*PACKAGES, PLUGINS), lines, strict=True))


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_loads_no_layer_above_it(package: str) -> None:
    assert package in loaded()[package]
    assert {name.split(".")[0] for name in loaded()[package]} & set(FORBIDDEN[package]) == set()


def test_loading_the_plugins_loads_no_compiler_and_no_transformers() -> None:
    assert loaded()[PLUGINS] >= {"liger_core.plugins", "liger_hf"}
    libraries = {"triton.language", "matplotlib", "transformers", "torch._inductor", "torch._dynamo"}
    assert loaded()[PLUGINS] & (libraries | {"liger_core.losses"}) == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_no_source_imports_a_layer_above_it(package: str) -> None:
    wrong = {str(path.relative_to(ROOT)): sorted(imports(path) & set(FORBIDDEN[package])) for path in sources(package)}
    assert {path: names for path, names in wrong.items() if names} == {}


def test_no_package_replaces_others_with_the_tools_of_tests() -> None:
    assert [str(path) for package in PACKAGES for path in sources(package) if "unittest" in imports(path)] == []


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function's body after its docstring."""
    first = function.body[1 if ast.get_docstring(function) and len(function.body) > 1 else 0]
    return (function.end_lineno or 0) - first.lineno + 1


@pytest.mark.parametrize("package", PACKAGES)
def test_files_and_functions_are_short(package: str) -> None:
    """At most 400 and 60 lines; a kernel is as long as its formula. Columns are ruff's."""
    long = []
    for path in sources(package):
        text = path.read_text()
        long += [f"{path.name}: {text.count(chr(10))} lines"] if text.count("\n") > 400 else []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines_of(node) > 60:
                kernel = any("jit" in ast.unparse(each) for each in node.decorator_list)
                long += [] if kernel else [f"{path.name}: {node.name} has {lines_of(node)} lines"]
    assert long == []


def test_only_a_backend_imports_triton() -> None:
    users = {package for package in PACKAGES for path in sources(package) if "triton" in imports(path)}
    assert users == {"liger_triton"}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_exists(package: str) -> None:
    module = importlib.import_module(package)
    assert [name for name in getattr(module, "__all__", []) if not hasattr(module, name)] == []


def test_all_packages_have_one_version_and_require_it_of_each_other() -> None:
    versions = {package: metadata(package)["version"] for package in PACKAGES}
    assert len(set(versions.values())) == 1
    version = versions["liger_core"]
    assert {importlib.import_module(package).__version__ for package in PACKAGES} == {version}
    names = {package.replace("_", "-") for package in PACKAGES}
    for package in PACKAGES:
        extras = metadata(package).get("optional-dependencies", {}).values()  # type: ignore[attr-defined]
        required = [str(d) for group in (metadata(package)["dependencies"], *extras) for d in group]  # type: ignore[attr-defined]
        assert [d for d in required if d.split("=")[0] in names and not d.endswith(f"=={version}")] == []


def test_every_op_has_a_file_of_its_name_in_core_and_in_every_backend_unless_it_is_composed() -> None:
    names = {op.name for op in CATALOGUE}
    assert {path.stem for path in (folder("liger_core") / "ops").glob("[!_]*.py")} == names
    composed = {op.name for op in CATALOGUE if isinstance(op, ComposedOp)}
    assert names - {path.stem for path in folder("liger_triton").glob("*.py")} <= composed


@pytest.mark.parametrize("op", CATALOGUE, ids=lambda op: str(op.name))
def test_an_op_is_found_under_its_name(op: Op[..., object]) -> None:
    assert op.reference.__module__ == f"liger_core.ops.{op.name}"
    assert getattr(importlib.import_module("liger_core"), op.name) is op


@pytest.mark.parametrize("package", PACKAGES)
def test_every_file_has_a_license_line_a_docstring_and_a_descriptive_name(package: str) -> None:
    wrong = []
    for path in sources(package):
        licensed = path.read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n")
        if not licensed or not ast.get_docstring(parsed(path)) or path.stem in EMPTY_NAMES:
            wrong.append(str(path.relative_to(ROOT)))
    assert wrong == []


def test_the_tested_set_of_versions_is_within_what_the_packages_require() -> None:
    from packaging.requirements import Requirement

    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    required = [Requirement(str(d)) for package in PACKAGES for d in metadata(package)["dependencies"]]  # type: ignore[attr-defined]
    outside = [str(r) for r in required if r.name in pins and not r.specifier.contains(pins[r.name])]
    assert outside == []
    unpinned = {r.name for r in required} - set(pins) - {package.replace("_", "-") for package in PACKAGES}
    assert unpinned == set()


PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md")


def page(name: str) -> str:
    return (ROOT / name).read_text()


@pytest.mark.parametrize("name", PAGES)
def test_every_file_that_a_page_names_exists(name: str) -> None:
    # Blocks of code are held to by tests/test_extend.py.
    prose = re.sub(r"^```.*?^```", "", page(name), flags=re.MULTILINE | re.DOTALL)
    named = [text for text in re.findall(r"`([\w./-]+/[\w./-]*)`", prose) if "/" in text]
    sources = list((ROOT / "packages").glob("*/src"))
    places = (ROOT, *sources, *(p / "liger_core" for p in sources))
    assert named
    assert [text for text in named if not any((place / text).exists() for place in places)] == []


# Autograd functions of measurements and plans, whose gradients nothing differentiates, and one that gives none.
UNCHECKED = {
    "liger_core/autograd.py Kept",
    "liger_train/plan/float8.py _Matmul",
    "liger_train/plan/parallel.py _Gathered",
}


def test_every_autograd_function_checks_its_backward_pass() -> None:
    """Its gradients are made by kernels or in tiles: differentiated again, they would count as constants."""
    found = {}
    for path in (path for package in PACKAGES for path in sources(package)):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef) and "torch.autograd.Function" in map(ast.unparse, node.bases):
                found[f"{path.as_posix().split('/src/')[1]} {node.name}"] = ast.unparse(node)
    assert {name for name, code in found.items() if "check_backward(" not in code} == UNCHECKED


def test_the_page_names_what_each_package_is_built_on() -> None:
    layers = page("ARCHITECTURE.md").partition("## Layers")[2].partition("```")[2].partition("```")[0]
    for line in filter(None, layers.splitlines()):
        name, *named = re.findall(r"liger-\w+", line)
        required = {re.split(r"[^\w-]", str(d))[0] for d in metadata(name.replace("-", "_"))["dependencies"]}  # type: ignore[attr-defined]
        assert {r for r in required if r.startswith("liger-")} - {"liger-core"} <= {*named}
        assert {*named} <= required


# A function of so many parameters is hard to call: so many by position, and so many by name alone.
MOST_PARAMETERS = 8
# Whose parameters are those of an op or a kernel, which torch and Triton pass one by one.
FLAT = ("liger_core/ops/", "liger_triton/", "liger_bench/peers/", "liger_train/merging.py")
# It stands in for a function of TRL, with that one's parameters.
OF_TRL = "liger_hf/trl.py: apply"


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[list[str], list[str]]:
    """The names of a function's parameters by position, and by name alone."""
    given = function.args
    by_position = [arg.arg for arg in (*given.posonlyargs, *given.args) if arg.arg not in ("self", "cls")]
    return by_position, [arg.arg for arg in given.kwonlyargs]


def is_command(function: ast.FunctionDef | ast.AsyncFunctionDef, module: ast.Module) -> bool:
    """Whether its parameters are options of a command: annotated for typer, in place or by an alias in the module."""
    assigned = [node for node in module.body if isinstance(node, ast.Assign)]
    aliases = {ast.unparse(node.targets[0]) for node in assigned if "Annotated[" in ast.unparse(node.value)}
    parameters = (*function.args.args, *function.args.kwonlyargs)
    annotations = [ast.unparse(arg.annotation) for arg in parameters if arg.annotation is not None]
    return any("Annotated[" in annotation or annotation in aliases for annotation in annotations)


def test_no_function_has_many_parameters() -> None:
    found = []
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        place, module = path.relative_to(ROOT).as_posix().split("/src/")[1], parsed(path)
        for node in ast.walk(module):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or place.startswith(FLAT):
                continue
            if max(map(len, parameters_of(node))) > MOST_PARAMETERS and not is_command(node, module):
                found.append(f"{place}: {node.name}")
    assert found == [OF_TRL], "\n".join(found)
