# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections with a doubly stochastic matrix are replaced; other modules with such weights are left."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import liger_hf
from hf.tiny_configs import tiny_config
from hf.tiny_models import assert_same_step, module_disagreements, twin
from liger_hf.isolation import DoublePrecision
from ops.test_streams import CONFIG, MODELS


def of(file: str) -> nn.Module:
    module: nn.Module = getattr(pytest.importorskip(f"transformers.models.{file}"), MODELS[file])(CONFIG)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.1 if parameter.dim() == 2 else 1.0))
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("file", MODELS)
def test_hyper_connections_have_the_outputs_and_gradients_of_the_module_of_transformers(
    file: str, dtype: torch.dtype
) -> None:
    x = torch.randn(2, 9, 4, 24, generator=torch.Generator().manual_seed(5)).to(dtype)
    plain, patched = of(file).to(dtype), of(file).to(dtype)
    assert liger_hf.apply(patched).replaced["sinkhorn"] == 1
    assert module_disagreements(patched, plain, x) == {}


class Changed(nn.Module):
    """Hyper-connections like those of DeepSeek V4, but for what `change` does to the logits of the matrix or to the
    matrix."""

    def __init__(self, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.plain, self.before, self.after = [of("deepseek_v4.modeling_deepseek_v4")], before, after
        self.hc_sinkhorn_iters, self.hc_eps, self.input_norm = 20, 1e-6, self.plain[0].input_norm
        self.fn, self.base, self.scale = self.plain[0].fn, self.plain[0].base, self.plain[0].scale

    def forward(self, x: Tensor) -> Any:
        weights = {"fn": self.before(self.fn), "base": self.base, "scale": self.scale}
        post, comb, mixed = torch.func.functional_call(self.plain[0], weights, (x,))
        return post, self.after(comb), mixed


CHANGES: dict[str, tuple[Any, Any, int]] = {
    "as_it_is": (lambda fn: fn, lambda comb: comb, 1),
    "constant_projection": (lambda fn: fn.detach(), lambda comb: comb, 0),
    "transposed": (lambda fn: fn, lambda comb: comb.mT, 0),
    "squared": (lambda fn: fn, lambda comb: comb.square(), 0),
}


@pytest.mark.parametrize(("before", "after", "count"), CHANGES.values(), ids=CHANGES)
def test_what_computes_something_else_is_left(before: Any, after: Any, count: int) -> None:
    assert liger_hf.apply(nn.Sequential(Changed(before, after))).replaced.get("sinkhorn", 0) == count


def test_a_norm_that_is_watched_runs() -> None:
    plain, patched, seen = of("deepseek_v4.modeling_deepseek_v4"), of("deepseek_v4.modeling_deepseek_v4"), []
    liger_hf.apply(patched)
    x = torch.randn(1, 3, 4, 24)
    patched.input_norm.register_forward_hook(lambda *call: seen.append(call))
    torch.testing.assert_close(patched(x), plain(x))
    assert len(seen) == 1


@pytest.mark.slow
def test_every_layer_of_deepseek_v4_gets_both_of_its_connections_replaced() -> None:
    torch.manual_seed(0)
    config = tiny_config("deepseek_v4")
    plain = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    patched, given = twin(plain), {"input_ids": torch.arange(22).view(2, 11), "labels": torch.arange(22).view(2, 11)}
    assert liger_hf.apply(patched).replaced["sinkhorn"] == 2 * config.num_hidden_layers
    # In float64: of some weights, such as those of the router, nearly nothing but round-off is left in float32.
    with DoublePrecision():
        assert_same_step(patched.double(), plain.double(), rtol=1e-9, atol=1e-12, **given)
