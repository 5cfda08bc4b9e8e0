# SPDX-License-Identifier: Apache-2.0
"""Plugins: what they add, and the sentence for each way to get one wrong."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import liger_core
from conftest import pytest_sessionstart
from liger_core import BackendError, explain, rms_norm, selection, use
from liger_core.builtin import CATALOGUE
from liger_core.plugins import PROJECT, Registry, registry

pytestmark = pytest.mark.usefixtures("fresh_selection")

Install = Callable[..., Path]

# A backend of one op, one more than the reference's result, to be distinguishable from it.
THIRD = """
    import liger_core
    from liger_core import Backend, hookimpl

    def rms_norm(x, weight=None, eps=1e-6, *, weight_offset=0.0, cast="input"):
        return liger_core.rms_norm.reference(x, weight, eps, weight_offset=weight_offset, cast=cast) + 1

    @hookimpl
    def liger_backends():
        return [Backend({name!r}, {devices!r}, {priority!r}, {{liger_core.rms_norm: rms_norm}})]
"""
DISABLE = "set LIGER_DISABLE_PLUGINS"
HOOKS = "liger_backends, liger_commands, liger_ops, liger_rules"
OPS = ", ".join(sorted(op.name for op in CATALOGUE))


def third(name: str = "third", devices: object = ("cpu",), priority: object = 50) -> str:
    return THIRD.format(name=name, devices=devices, priority=priority)


def registry_and_warnings() -> tuple[Registry, list[str]]:
    """Load the plugins; what there is, and what warnings say."""
    with pytest.warns(RuntimeWarning) as warned:
        found = registry()
    return found, [str(each.message) for each in warned]


def ended(sentence: str) -> str:
    return sentence if sentence[-1] in ".?" else f"{sentence}."


def test_a_plugin_that_fails_to_import_is_reported_and_the_others_work(install: Install) -> None:
    install("third", third())
    install("broken", "import no_such_module")
    failure = "ModuleNotFoundError: No module named 'no_such_module'"
    fault = f"plugin 'broken' of liger-broken: importing broken_plugin failed: {failure}"
    found, warned = registry_and_warnings()
    assert warned == [f"{fault}. Ignoring the plugin; {DISABLE}=broken to disable the plugin"]
    assert found.failed == {"broken": [fault]}
    assert explain(rms_norm, torch.ones(2, 8)).backend == "third"
    with pytest.raises(BackendError) as caught:
        use("broken")
    installed = ", ".join(sorted(found.backends))
    assert str(caught.value) == f"use('broken'): no backend named 'broken'; installed: {installed}. P{fault[1:]}."


# Source of a plugin, what is wrong with it, and what of it is ignored.
FAULTS = [
    pytest.param("raise SystemExit(3)", "importing wrong_plugin failed: SystemExit: 3", "the plugin", id="exits"),
    pytest.param("1 +", "importing wrong_plugin failed: SyntaxError: invalid syntax (wrong_plugin.py, line 1)", "the plugin", id="syntax_error"),
    pytest.param("import torch, liger_core\nliger_core.rms_norm(torch.ones(2, 8))", "a plugin must not call an op or select a backend while the plugins are loaded", "the plugin", id="calls_an_op"),
    pytest.param(third().replace("def liger_backends", "def liger_backend"), f"every hook must be one of {HOOKS}, got 'liger_backend'. Did you mean 'liger_backends'?", "the plugin", id="misspelled_hook"),
    pytest.param(third().replace("@hookimpl", ""), "the hook liger_backends must be marked with @liger_core.hookimpl, it is not", "the plugin", id="unmarked_hook"),
    pytest.param("import liger_core", f"it must have one of the hooks {HOOKS}, it has none", "the plugin", id="no_hook"),
    pytest.param(third().replace("liger_backends()", "liger_backends(names)"), "registering its hooks failed: PluginValidationError: Plugin 'wrong' for hook 'liger_backends'\nhookimpl definition: liger_backends(names)\nArgument(s) {'names'} are declared in the hookimpl but can not be found in the hookspec", "the plugin", id="argument_of_a_hook"),
    pytest.param(third().replace("return [", "raise OSError('no driver')\n        return ["), "its hook liger_backends failed: OSError: no driver", "what liger_backends returns", id="hook_fails"),
    pytest.param("from liger_core import hookimpl\n@hookimpl\ndef liger_backends():\n    return ['third']\n", "liger_backends must return a list of Backends, got a str in it", "what liger_backends returns", id="no_backend_object"),
    pytest.param("from liger_core import hookimpl\n@hookimpl\ndef liger_ops():\n    pass\n", "its hook liger_ops failed: TypeError: 'NoneType' object is not iterable", "what liger_ops returns", id="returns_nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "fault", "ignored"), FAULTS)
def test_a_fault_of_a_plugin_is_a_warning_that_names_it(
    install: Install, source: str, fault: str, ignored: str
) -> None:
    install("third", third())
    install("wrong", source)
    found, warned = registry_and_warnings()
    fault = f"plugin 'wrong' of liger-wrong: {fault}"
    assert warned == [f"{ended(fault)} Ignoring {ignored}; {DISABLE}=wrong to disable the plugin"]
    assert found.failed == {"wrong": [fault]}
    assert explain(rms_norm, torch.ones(2, 8)).backend == "third"


MATCH = "rms_norm must have the signature of its reference; "
NAMES = "its name must be letters, digits, '_', '-' and '.', and not 'auto', which means the automatic choice"
DEVICES = "each of its device_types must be one of PyTorch's, such as 'cpu' or 'cuda', got "
# Source of a plugin with a backend, and what is wrong with the backend.
BACKEND_FAULTS = [
    pytest.param(third(name="auto"), NAMES, id="named_auto"),
    pytest.param(third(name="a=b"), NAMES, id="name_that_cannot_be_selected"),
    pytest.param(third(devices="cpu"), "device_types must be a tuple such as ('cpu',), got 'cpu'", id="a_string_of_device_types"),
    pytest.param(third(devices=()), "device_types must be a tuple such as ('cpu',), got ()", id="no_device_types"),
    pytest.param(third(devices=("cpu", "gpu")), f"{DEVICES}'gpu'. Did you mean 'cuda'?", id="gpu"),
    pytest.param(third(priority="high"), "its priority must be an integer above 0, which the reference has, got 'high'", id="priority"),
    pytest.param(third().replace("rms_norm})", "rms_norm}, lambda: 1 / 0)"), "its availability check failed: ZeroDivisionError: division by zero", id="availability_check"),
    pytest.param(third().replace("{liger_core.rms_norm: rms_norm}", "lambda: __import__('no_such_compiler')"), "loading it failed: ModuleNotFoundError: No module named 'no_such_compiler'", id="table_that_fails"),
    pytest.param(third().replace("liger_core.rms_norm: rms_norm", "'rms_nrm': rms_norm"), f"every op it implements must be a known op, got 'rms_nrm'; known: {OPS}. Did you mean 'rms_norm'?", id="unknown_op"),
    pytest.param(third().replace("eps=1e-6", "eps=1e-5"), f"{MATCH}the default of eps must be 1e-06, got 1e-05", id="drifted_default"),
    pytest.param(third().replace(', cast="input"', ""), f"{MATCH}cast is missing", id="missing_parameter"),
    pytest.param(third().replace("eps=1e-6, *,", "eps=1e-6,"), f"{MATCH}weight_offset must be keyword-only, got positional or keyword", id="not_keyword_only"),
    pytest.param(third().replace(', cast="input"', ', cast="input", fast=True'), f"{MATCH}fast is not one of its parameters", id="extra_parameter"),
    pytest.param(third().replace("weight=None, eps=1e-6", "eps=1e-6, weight=None"), f"{MATCH}the order must be x, weight, eps, weight_offset, cast, got x, eps, weight, weight_offset, cast", id="other_order"),
]  # fmt: skip
GOOD = (
    ", Backend('good', ('cpu',), 50, {liger_core.rms_norm: lambda x, weight=None, eps=1e-6, *, weight_offset=0.0, "
    "cast='input': x})]"
)


@pytest.mark.parametrize(("source", "fault"), BACKEND_FAULTS)
def test_a_fault_of_a_backend_leaves_out_this_backend_alone(install: Install, source: str, fault: str) -> None:
    install("wrong", source.rstrip().removesuffix("]") + GOOD)
    found, warned = registry_and_warnings()
    (name,) = found.left_out
    fault = f"plugin 'wrong' of liger-wrong: backend {name!r}: {fault}"
    assert warned == [f"{ended(fault)} Ignoring backend {name!r}; {DISABLE}=wrong to disable the plugin"]
    assert found.failed == {"wrong": [fault]}
    chosen = explain(rms_norm, torch.ones(2, 8))
    assert chosen.backend == "good"
    assert chosen.candidates[name] == f"not loaded: {fault}"


def test_naming_a_backend_that_was_left_out_is_an_error_with_the_cause(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("wrong", third().replace("eps=1e-6", "eps=1e-5"))
    error = (
        "backend 'third' must be loaded, it is not: plugin 'wrong' of liger-wrong: backend 'third': "
        f"{MATCH}the default of eps must be 1e-06, got 1e-05"
    )
    with pytest.warns(RuntimeWarning), pytest.raises(BackendError, match=re.escape(f"use('third'): {error}")):
        use("third")
    monkeypatch.setenv("LIGER_BACKEND", "third")
    with pytest.raises(BackendError, match=re.escape(f"LIGER_BACKEND=third: {error}")):
        rms_norm(torch.ones(2, 8))


def test_a_plugin_with_damaged_metadata_is_loaded(install: Install) -> None:
    install("third", third())
    site = install("damaged", third(name="fourth"))
    (site / "liger_damaged-1.0.dist-info" / "METADATA").write_text("")
    selection.reset()
    assert registry().backends["fourth"].distribution == "an unknown distribution"


def test_ctrl_c_during_an_import_stays_what_it_is(install: Install) -> None:
    install("slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        registry()


@pytest.mark.parametrize("order", [("one", "two"), ("two", "one")], ids=["as_named", "reversed"])
def test_of_two_backends_of_one_name_neither_is_loaded_and_both_are_blamed(
    install: Install, order: tuple[str, str]
) -> None:
    for name in order:
        install(name, third(name="twin"))
    fault = "backend 'twin' must be offered once, got it from plugin 'one' of liger-one and plugin 'two' of liger-two"
    found, warned = registry_and_warnings()
    assert warned == [
        f"{fault}. Ignoring the backend of plugin 'one' of liger-one and plugin 'two' of liger-two; "
        f"{DISABLE}=one or LIGER_DISABLE_PLUGINS=two to disable one of them"
    ]
    assert found.failed == {"one": [fault], "two": [fault]}
    assert explain(rms_norm, torch.ones(2, 8)).backend == "reference"
    sentence = f"use('twin'): backend 'twin' must be loaded, it is not: {fault}"
    with pytest.raises(BackendError, match=re.escape(sentence)):
        use("twin")


def test_disabling_one_of_two_plugins_brings_the_backend_of_the_other_back(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        install(name, third(name="twin"))
    monkeypatch.setenv("LIGER_DISABLE_PLUGINS", "one")
    assert registry().backends["twin"].distribution == "liger-two"


@pytest.mark.parametrize("plugin", ["early", "zealous"])
def test_this_project_keeps_a_name_that_another_plugin_uses(install: Install, plugin: str) -> None:
    pytest.importorskip("liger_triton")
    install(plugin, third(name="triton"))
    first, second = sorted(["triton", plugin])
    found, warned = registry_and_warnings()
    assert warned == [
        f"backend 'triton' must be offered once, got it from plugin {first!r} of liger-{first} and plugin {second!r} "
        f"of liger-{second}. Ignoring the backend of plugin {plugin!r} of liger-{plugin}; "
        f"{DISABLE}={first} or LIGER_DISABLE_PLUGINS={second} to disable one of them"
    ]
    assert found.backends["triton"].distribution == "liger-triton"
    assert found.left_out == {}


@pytest.mark.parametrize(
    ("kind", "name", "source"),
    [
        pytest.param("backend", "reference", third(name="reference"), id="backend"),
        pytest.param("op", "rope", "import liger_core\n@liger_core.hookimpl\ndef liger_ops():\n    return [liger_core.rope]\n", id="op"),
    ],
)  # fmt: skip
def test_core_keeps_a_name_that_a_plugin_uses(install: Install, kind: str, name: str, source: str) -> None:
    install("again", source)
    again = "plugin 'again' of liger-again"
    fault = f"{kind} {name!r} must be offered once, got it from plugin 'core' of liger-core and {again}"
    found, warned = registry_and_warnings()
    assert warned == [f"{fault}. Ignoring the {kind} of {again}; {DISABLE}=again to disable the plugin"]
    assert found.failed == {"again": [fault]}
    assert found.ops["rope"] is liger_core.rope
    assert found.backends["reference"].distribution == "liger-core"


@pytest.mark.parametrize(
    ("name", "other", "lost"),
    [
        ("triton", "liger-triton", "plugin 'triton' of liger-zzz"),
        ("core", "liger-core", "plugin 'core' of liger-zzz"),
        ("mine", "liger-other", "plugin 'mine' of liger-other and plugin 'mine' of liger-zzz"),
    ],
    ids=["one_of_this_project", "core", "two_others"],
)
def test_two_plugins_of_one_name_are_both_blamed(install: Install, name: str, other: str, lost: str) -> None:
    pytest.importorskip("liger_triton")
    install(name, third(name="third"), distribution="liger-zzz")
    if name == "mine":
        site = install("other", third(name="other"))
        (site / "liger_other-1.0.dist-info" / "entry_points.txt").write_text("[liger]\nmine = other_plugin\n")
        selection.reset()
    fault = (
        f"plugin {name!r} must be offered once, got it from plugin {name!r} of {other} and plugin {name!r} of liger-zzz"
    )
    found, warned = registry_and_warnings()
    assert warned == [f"{fault}. Ignoring {lost}; {DISABLE}={name} to disable the plugin"]
    assert found.failed == {name: [fault]}
    assert {backend.distribution for backend in found.backends.values()} <= set(PROJECT)


def test_a_disabled_plugin_is_not_even_imported(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("broken", "raise SystemExit('imported')")
    install("third", third())
    monkeypatch.setenv("LIGER_DISABLE_PLUGINS", "broken, third")
    selection.reset()
    assert "third" not in registry().backends
    assert registry().disabled == ("broken", "third")


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        pytest.param("mien", "cpu", "no backend named 'mien'; installed: {installed}. Did you mean 'mine'?\nThis was the environment of {python}"),
        pytest.param("mine", "meta", "it runs on cpu tensors, got --device meta"),
        pytest.param("auto", "cpu", "it must be the name of one backend; installed: {installed}"),
    ],
    ids=["unknown", "other_device", "no_backend"],
)  # fmt: skip
def test_a_backend_that_cannot_be_tested_is_one_error(install: Install, name: str, device: str, message: str) -> None:
    install("mine", third(name="mine"))
    installed = ", ".join(sorted(registry().backends))
    options = {"--backend": name, "--device": device}
    session = SimpleNamespace(config=SimpleNamespace(getoption=options.__getitem__))
    with pytest.raises(pytest.UsageError) as caught:
        pytest_sessionstart(session)
    assert str(caught.value) == f"--backend {name}: {message.format(installed=installed, python=sys.executable)}"
