# SPDX-License-Identifier: Apache-2.0
"""Gates within the forwards of other modules than a gated MLP, and experts that no op takes the place of."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import liger_hf
from hf.sweep import build
from hf.tiny_models import outcome, pair_of, rows_of, twin
from liger_hf.patch import INSTALLED
from liger_hf.rebinding import innermost
from liger_hf.rules.gated_mlp.gate import activations_of

pytestmark = pytest.mark.cpu


class Block(nn.Module):
    """Packed gate and up of an expert, which a batched matmul multiplies by all of its rows."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.gate_up, self.down = (nn.Parameter(torch.randn(*shape) * 0.2) for shape in ((3, 8, 32), (3, 16, 8)))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.bmm(x, self.gate_up).chunk(2, dim=-1)
        return torch.bmm(up * self.act(gate), self.down)


class Functional(Block):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.bmm(x, self.gate_up).chunk(2, dim=-1)
        return torch.bmm(nn.functional.silu(gate) * up, self.down)


class Held(Block):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.bmm(x, self.gate_up).chunk(2, dim=-1)
        gate = self.act(gate)
        up = up + 1
        gate = gate * up
        return torch.bmm(gate, self.down)


class Shown(Block):
    """The activation is seen by more than the product."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.bmm(x, self.gate_up).chunk(2, dim=-1)
        held = self.act(gate)
        product = held * up
        return torch.bmm(product + held, self.down)


BLOCKS = {
    "a module": (Block(nn.SiLU()), "swiglu"),
    "another activation": (Block(nn.GELU()), "geglu"),
    "in two statements": (Held(nn.SiLU()), "swiglu"),
    "a function": (Functional(nn.Identity()), "swiglu"),
}


@pytest.mark.parametrize(("block", "op"), BLOCKS.values(), ids=BLOCKS)
def test_a_gate_is_replaced_wherever_a_forward_has_it(block: Block, op: str) -> None:
    patched, x = twin(block), torch.randn(3, 5, 8)
    report = liger_hf.apply(patched)
    assert report.replaced == {op: 1}
    torch.testing.assert_close(outcome(patched, x), outcome(block, x))
    report.undo()
    assert torch.equal(patched(x), block(x))


def test_a_hook_on_the_activation_runs() -> None:
    block = Block(nn.SiLU())
    liger_hf.apply(block)
    seen: list[int] = []
    block.act.register_forward_hook(lambda child, given, y: seen.append(1))
    block(torch.randn(3, 5, 8))
    assert seen == [1]


def test_an_activation_that_is_watched_when_apply_runs_is_the_reason() -> None:
    block = Block(nn.SiLU())
    block.act.register_forward_hook(lambda child, given, y: None)
    (row,) = rows_of(liger_hf.apply(block), "swiglu")
    why = "the fused op would skip self.act, which has a hook or its own forward; remove it before `apply`"
    assert (row.verdict, row.reason) == ("left", why)


def test_another_activation_that_takes_its_place_runs() -> None:
    block = Block(nn.SiLU())
    liger_hf.apply(block)
    block.act = nn.Identity()
    gate, up = (x := torch.randn(3, 5, 8)).bmm(block.gate_up).chunk(2, dim=-1)
    torch.testing.assert_close(block(x), (gate * up).bmm(block.down))


def test_a_product_that_is_broadcast_is_computed_by_the_forward_itself() -> None:
    class Broadcast(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.act(x) * x[:, :1]

    block = Broadcast(nn.SiLU())
    expected = block(x := torch.randn(3, 5, 8))
    assert liger_hf.apply(block).replaced == {"swiglu": 1}
    assert torch.equal(block(x), expected)


def test_other_activations_masks_and_numbers_do_not_concern_the_rule() -> None:
    class Masked(Block):
        def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
            return nn.functional.gelu(x) * padding_mask + 2 * self.act(x)

    assert activations_of(Masked.forward) == ()
    assert activations_of(Shown.forward) == ()
    assert rows_of(liger_hf.apply(Block(nn.Sigmoid())), "swiglu") == []


def test_a_forward_that_another_rule_has_rebuilt_gets_its_gate_too() -> None:
    patched, plain = pair_of(build("gemma4_text").eval())
    rows = {row.op: row for row in patched.liger_report.rows if row.module == "Gemma4TextDecoderLayer"}
    assert {op: row.verdict for op, row in rows.items()} == {"add_rms_norm": "replaced", "geglu": "replaced"}
    # Layers share one forward, which torch.compile then compiles once.
    layers = [module for module in patched.modules() if type(module).__name__ == "Gemma4TextDecoderLayer"]
    assert len({layer.forward.__func__ for layer in layers}) == 1
    assert len(innermost(layers[0].forward.__func__.__dict__[INSTALLED]).__code__.co_freevars) == 2
    inputs = {"input_ids": torch.arange(12)[None]}
    torch.testing.assert_close(patched(**inputs).logits, plain(**inputs).logits)
    patched.liger_report.undo()
    assert torch.equal(patched(**inputs).logits, plain(**inputs).logits)


# Model type → what holds the experts, and why they are left.
LEFT = {
    "llama4_text": ("Llama4TextExperts", "by its own code"),
    "dbrx": ("DbrxFFN", "by its own code"),
    "jetmoe": ("JetMoeMoE", "by its own code"),
    "longcat_flash": ("LongcatFlashExperts", "by its own code"),
    "seq2seq:switch_transformers": ("SwitchTransformersSparseMLP", "a loop runs them one after the other"),
    "seq2seq:nllb-moe": ("NllbMoeSparseMLP", "a loop runs them one after the other"),
}


@pytest.mark.parametrize("model_type", LEFT)
def test_experts_that_no_op_takes_the_place_of_are_left_with_a_reason(model_type: str) -> None:
    name, reason = LEFT[model_type]
    report = liger_hf.inspect(build(model_type), only=["experts"], verify=False)
    assert "experts" not in report.absent
    rows = [row for row in rows_of(report, "experts") if (row.module, row.verdict) == (name, "left")]
    assert {reason in row.reason for row in rows} == {True}


@pytest.mark.parametrize("model_type", ["moshi", "deepseek_v3"])
def test_what_has_no_experts_of_its_own_code_is_not_said_to_have_them(model_type: str) -> None:
    report = liger_hf.inspect(build(model_type), only=["experts", "rope"], verify=False)
    assert [row for row in rows_of(report, "experts") if row.verdict == "left"] == []
