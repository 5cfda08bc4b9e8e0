# SPDX-License-Identifier: Apache-2.0
"""Plugins: what they add, and the sentence for each way to get one wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import liger_core
from liger_core import BackendError, PluginError, explain, rms_norm, selection, use
from liger_core.ops import CATALOGUE
from liger_core.plugins import registry

pytestmark = pytest.mark.usefixtures("fresh_selection")

Install = Callable[..., Path]

# A backend of one op, one more than the reference's result so that it can be told from it.
THIRD = """
    import liger_core
    from liger_core import Backend, hookimpl

    def rms_norm(x, weight=None, eps=1e-6, *, weight_offset=0.0, cast="input"):
        return liger_core.rms_norm.reference(x, weight, eps, weight_offset=weight_offset, cast=cast) + 1

    @hookimpl
    def liger_backends():
        return [Backend({name!r}, {devices!r}, {priority}, {{liger_core.rms_norm: rms_norm}})]
"""
HOOKS = "liger_backends, liger_commands, liger_ops"
OPS = ", ".join(sorted(op.name for op in CATALOGUE))


def third(name: str = "third", devices: tuple[str, ...] = ("cpu",), priority: int = 50) -> str:
    return THIRD.format(name=name, devices=devices, priority=priority)


def test_a_plugin_adds_a_backend_for_one_op(install: Install) -> None:
    install("third", third())
    x = torch.randn(2, 8)
    assert torch.equal(rms_norm(x), rms_norm.reference(x) + 1)
    assert explain(rms_norm, x).backend == "third"
    assert explain(liger_core.layer_norm, x).backend == "reference"
    assert registry().backends["third"].distribution == "'third' of liger-third"


def test_a_plugin_adds_an_op_with_its_reference(install: Install) -> None:
    install(
        "doubling",
        """
        from liger_core import Work, hookimpl, op

        def check(x): pass

        @op(check=check, samples=lambda device, dtype: [], misuses=lambda device: [], workloads=lambda: [], work=lambda x: Work(0, 0))
        def doubled(x):
            return 2 * x

        @hookimpl
        def liger_ops():
            return [doubled]
        """,
    )
    doubled = registry().ops["doubled"]
    with use("reference", only=["doubled"]):
        assert doubled(torch.ones(2)).tolist() == [2.0, 2.0]
        assert explain(doubled, torch.ones(2)).backend == "reference"


def test_a_plugin_that_fails_to_import_is_reported_and_the_others_work(install: Install) -> None:
    install("third", third())
    install("broken", "import no_such_module")
    cause = "'broken' of liger-broken: importing broken_plugin failed: ModuleNotFoundError: No module named 'no_such_module'"
    with pytest.warns(
        RuntimeWarning, match=f"^{re.escape(f'plugin {cause}. It is left out; LIGER_DISABLE_PLUGINS=broken leaves the plugin out')}$"
    ):
        found = registry()
    assert found.failed == {"broken": cause}
    assert explain(rms_norm, torch.ones(2, 8)).backend == "third"
    with pytest.raises(BackendError) as caught:
        use("broken")
    assert str(caught.value) == f"no backend named 'broken'; installed: {', '.join(sorted(found.backends))}. Plugin {cause}."


def test_a_hook_that_fails_is_reported_and_the_others_work(install: Install) -> None:
    install("third", third())
    install("failing", "from liger_core import hookimpl\n@hookimpl\ndef liger_backends():\n    raise OSError('no driver')\n")
    with pytest.warns(RuntimeWarning, match="'failing' of liger-failing: its hook liger_backends failed: OSError: no driver"):
        assert "third" in registry().backends


def test_an_availability_check_that_fails_makes_the_backend_unavailable(install: Install) -> None:
    install("third", third().replace("rms_norm})", "rms_norm}, lambda: 1 / 0)"))
    assert registry().unavailable["third"] == "its availability check failed: ZeroDivisionError: division by zero"


def test_a_table_that_fails_to_load_makes_the_backend_unavailable(install: Install) -> None:
    install("third", third().replace("{liger_core.rms_norm: rms_norm}", "lambda: __import__('no_such_compiler')"))
    reason = "loading it failed: ModuleNotFoundError: No module named 'no_such_compiler'"
    assert registry().unavailable["third"] == reason
    assert explain(rms_norm, torch.ones(2, 8)).backend == "reference"
    with pytest.raises(BackendError) as caught:
        use("third")
    assert str(caught.value) == f"use('third'): backend 'third' must be available, it is not: {reason}"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param(
            third().replace("def liger_backends", "def liger_backend"),
            f"plugin 'wrong' of liger-wrong: every hook must be one of {HOOKS}, got 'liger_backend'. Did you mean 'liger_backends'? "
            "LIGER_DISABLE_PLUGINS=wrong leaves the plugin out",
            id="misspelt_hook",
        ),
        pytest.param(
            third().replace("@hookimpl", ""),
            "plugin 'wrong' of liger-wrong: the hook liger_backends must be marked with @liger_core.hookimpl, it is not; "
            "LIGER_DISABLE_PLUGINS=wrong leaves the plugin out",
            id="unmarked_hook",
        ),
        pytest.param(
            "import liger_core",
            f"plugin 'wrong' of liger-wrong: it must have one of the hooks {HOOKS}, it has none; "
            "LIGER_DISABLE_PLUGINS=wrong leaves the plugin out",
            id="no_hook",
        ),
        pytest.param(
            third(name="reference"),
            "backend 'reference': one plugin must bring it, got 'core' of liger-core and 'wrong' of liger-wrong; "
            "LIGER_DISABLE_PLUGINS=wrong leaves the plugin out",
            id="name_of_another_backend",
        ),
        pytest.param(
            third(name="auto"),
            "plugin 'wrong' of liger-wrong: a backend must not be named 'auto', which is the word for the automatic choice; "
            "LIGER_DISABLE_PLUGINS=wrong leaves the plugin out",
            id="named_auto",
        ),
        pytest.param(
            "from liger_core import hookimpl\n@hookimpl\ndef liger_backends():\n    return ['third']\n",
            "plugin 'wrong' of liger-wrong: liger_backends must return backends, got str; LIGER_DISABLE_PLUGINS=wrong leaves the plugin out",
            id="no_backend_object",
        ),
        pytest.param(
            third().replace("liger_core.rms_norm: rms_norm", "'rms_nrm': rms_norm"),
            f"backend 'third' of 'wrong' of liger-wrong: every op it implements must be a known op, got 'rms_nrm'; known: {OPS}. "
            "Did you mean 'rms_norm'? LIGER_DISABLE_PLUGINS=wrong leaves the plugin out",
            id="unknown_op",
        ),
        pytest.param(
            third().replace("rms_norm})]", "rms_norm}, handed_over={liger_core.rope: 9})]"),
            "backend 'third' of 'wrong' of liger-wrong: every op it hands over must be one that it implements, got 'rope'; "
            "implemented: rms_norm; LIGER_DISABLE_PLUGINS=wrong leaves the plugin out",
            id="hands_over_what_it_lacks",
        ),
        pytest.param(
            third().replace("eps=1e-6", "eps=1e-5"),
            "backend 'third' of 'wrong' of liger-wrong: rms_norm must have the signature of its reference; "
            "the default of eps must be 1e-06, got 1e-05; LIGER_DISABLE_PLUGINS=wrong leaves the plugin out",
            id="drifted_default",
        ),
        pytest.param(
            third().replace(', cast="input"', ""),
            "backend 'third' of 'wrong' of liger-wrong: rms_norm must have the signature of its reference; "
            "cast is missing; LIGER_DISABLE_PLUGINS=wrong leaves the plugin out",
            id="missing_parameter",
        ),
        pytest.param(
            third().replace("eps=1e-6, *,", "eps=1e-6,"),
            "backend 'third' of 'wrong' of liger-wrong: rms_norm must have the signature of its reference; "
            "weight_offset must be keyword-only, got positional or keyword; LIGER_DISABLE_PLUGINS=wrong leaves the plugin out",
            id="not_keyword_only",
        ),
        pytest.param(
            third().replace(', cast="input"', ', cast="input", fast=True'),
            "backend 'third' of 'wrong' of liger-wrong: rms_norm must have the signature of its reference; "
            "fast must not be there; LIGER_DISABLE_PLUGINS=wrong leaves the plugin out",
            id="extra_parameter",
        ),
        pytest.param(
            third().replace("weight=None, eps=1e-6", "eps=1e-6, weight=None"),
            "backend 'third' of 'wrong' of liger-wrong: rms_norm must have the signature of its reference; "
            "the order must be x, weight, eps, weight_offset, cast, got x, eps, weight, weight_offset, cast; "
            "LIGER_DISABLE_PLUGINS=wrong leaves the plugin out",
            id="other_order",
        ),
    ],
)
def test_a_wrong_plugin_is_an_error_that_names_it(install: Install, source: str, message: str) -> None:
    install("wrong", source)
    with pytest.raises(PluginError) as caught:
        registry()
    assert str(caught.value) == message


def test_two_plugins_with_a_backend_of_one_name_are_both_named(install: Install) -> None:
    install("one", third(name="twin"))
    install("two", third(name="twin"))
    with pytest.raises(PluginError) as caught:
        registry()
    names = r"'(one' of liger-one and 'two' of liger-two|two' of liger-two and 'one' of liger-one)"
    message = rf"backend 'twin': one plugin must bring it, got {names}; LIGER_DISABLE_PLUGINS=(one|two) leaves the plugin out"
    assert re.fullmatch(message, str(caught.value))


def test_two_plugins_with_an_op_of_one_name_are_an_error(install: Install) -> None:
    install("again", "import liger_core\n@liger_core.hookimpl\ndef liger_ops():\n    return [liger_core.rope]\n")
    with pytest.raises(PluginError) as caught:
        registry()
    assert str(caught.value) == (
        "op 'rope': one plugin must define it, got 'core' of liger-core and 'again' of liger-again; "
        "LIGER_DISABLE_PLUGINS=again leaves the plugin out"
    )


def test_a_blocked_plugin_is_not_even_imported(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("broken", "raise SystemExit('imported')")
    install("third", third())
    monkeypatch.setenv("LIGER_DISABLE_PLUGINS", "broken, third")
    selection.reset()
    assert "third" not in registry().backends
    assert registry().blocked == ("broken", "third")


def test_an_installed_backend_serves_a_fresh_process(install: Install) -> None:
    site = install("third", third())
    code = "import torch; from liger_core import explain, rms_norm; print(explain(rms_norm, torch.ones(2, 8)).backend)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(site), "PATH": ""}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "third"
