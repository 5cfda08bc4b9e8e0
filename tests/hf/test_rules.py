# SPDX-License-Identifier: Apache-2.0
"""Rules: each speaks only about modules that could be its own, and those of plugins reach a model like our own."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import liger_hf
from hf.tiny_models import make, pair, rows_of, step_disagreements
from liger_core.plugins import registry
from liger_hf.discovery import replaceable_ops, rules

pytestmark = pytest.mark.cpu

Install = Callable[[str, str], Path]
# A rule of another package: every nn.SiLU becomes swiglu with a gate of ones.
SILU = """
    import torch
    from liger_core import hookimpl, swiglu
    from liger_hf import Candidate, Found, Rule
    from liger_hf.patch import forward_of, replacement
    from liger_hf.stand_in import Case, Draw, trial

    def forward(self, x):
        return swiglu(x, torch.ones_like(x))

    def look(module):
        if not isinstance(module, torch.nn.SiLU):
            return None
        LOOK
        original = forward_of(module)

        def cases(device, dtypes):
            draw = Draw(device)
            x, upstream = draw.normal(3, 8), draw.normal(3, 8)
            for dtype in dtypes:
                call = lambda function, inputs, weights, cast: {"output": function(module, inputs["x"])}
                yield Case(str(dtype), dtype, trial(call, {"x": x.to(dtype)}, {"output": upstream.to(dtype)}))

        install = lambda module: [replacement(module, forward, original)]
        return Found("swiglu", kind=(), original=original, candidates=lambda: [Candidate(swiglu, "", forward, install)], cases=cases)

    @hookimpl
    def liger_rules():
        return [Rule("NAME", look, ("OP",), "no module is a SiLU")]
"""


def source(name: str = "silu", op: str = "swiglu", look: str = "") -> str:
    return SILU.replace("NAME", name).replace("OP", op).replace("LOOK", look)


def test_a_rule_of_a_plugin_reaches_a_model(install: Install) -> None:
    install("silu", source())
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU())
    x = torch.randn(2, 4)
    before = model(x)

    report = liger_hf.apply(model)

    assert report.replaced == {"swiglu": 1}
    assert report.rows[0].reason == "outputs and gradients agree"
    assert type(model(x).grad_fn).__name__ != type(before.grad_fn).__name__
    torch.testing.assert_close(model(x), before)
    report.undo()
    assert torch.equal(model(x), before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": "swiglo"}, r"rule 'silu': each of its ops must be a known op, got 'swiglo'; .* Did you mean 'swiglu'\?"),
        ({"name": "norm"}, r"rule 'norm' must be offered once, got it from plugin 'hf' of liger-hf and plugin 'silu' of liger-silu"),
    ],
    ids=["unknown op", "name of another rule"],
)  # fmt: skip
def test_a_rule_with_a_fault_is_left_out_with_a_warning(
    install: Install, changes: dict[str, str], message: str
) -> None:
    install("silu", source(**changes))
    with pytest.warns(RuntimeWarning, match=message):
        assert [rule.nothing for rule in rules()].count("no module is a SiLU") == 0
    assert len(registry().failed["silu"]) == 1


def test_a_rule_of_a_plugin_that_fails_leaves_the_others_alone(install: Install) -> None:
    install("silu", source(look="1 / 0"))
    model = make()
    model.unused = nn.SiLU()
    with pytest.warns(RuntimeWarning, match=r"rule 'silu': looking at SiLU failed: ZeroDivisionError"):
        report = liger_hf.apply(model)
    assert report.replaced == {"rms_norm": 5, "add_rms_norm": 2, "rope": 2, "swiglu": 2, "linear_cross_entropy": 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_neox", "opt", "phi"])
def test_an_mlp_without_a_gate_does_not_concern_the_rule_of_gated_mlps(name: str) -> None:
    report = liger_hf.apply(make(name))
    assert rows_of(report, "swiglu") == rows_of(report, "geglu") == []


def test_squared_relus_become_relu_squared() -> None:
    patched, plain = pair("nemotron", hidden_act="relu2")
    assert patched.liger_report.replaced["relu_squared"] == plain.config.num_hidden_layers
    assert step_disagreements(patched, plain) == {}
    patched.liger_report.undo()
    assert "forward" not in patched.model.layers[0].mlp.act_fn.__dict__


def test_an_activation_of_another_kind_does_not_concern_the_rule_of_squared_relus() -> None:
    assert rows_of(liger_hf.apply(make("gpt_neox")), "relu_squared") == []


def test_the_readme_says_which_ops_the_rules_put_into_models() -> None:
    page = (Path(__file__).parents[2] / "packages" / "liger-hf" / "README.md").read_text()
    table = page.partition("| rule | which modules | op |")[2].partition("\n\n")[0]
    assert {*re.findall(r"`(\w+)`", table)} >= {*replaceable_ops()}
