# SPDX-License-Identifier: Apache-2.0
"""Facts about sinkhorn, mix_streams and merge_streams that their samples do not say: hyper-connections are those of
Transformers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_core import merge_streams, mix_streams, nn
from ops.agreement import disagreements, leaf

CONFIG = SimpleNamespace(hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-5, hidden_size=24)
MODELS = {
    "deepseek_v4.modeling_deepseek_v4": "DeepseekV4HyperConnection",
    "glm5_next.modeling_glm5_next": "Glm5NextTextHyperConnection",
}


@pytest.mark.parametrize("file", MODELS)
def test_hyper_connections_are_those_of_transformers(file: str, device: torch.device) -> None:
    theirs: Any = getattr(pytest.importorskip(f"transformers.models.{file}"), MODELS[file])(CONFIG)
    ours = nn.HyperConnection(24, norm_eps=1e-5, device=device)
    torch.nn.init.normal_(ours.base)
    assert ours.state_dict().keys() == theirs.state_dict().keys()

    # As their decoder layers call it.
    def formula(x: Tensor, y: Tensor, **weights: Tensor) -> tuple[Tensor, ...]:
        post, comb, mixed = torch.func.functional_call(theirs, weights, (x,))
        merged = post.to(x.dtype).unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(comb.to(x.dtype).transpose(-1, -2), x)
        return mixed, merged

    def call(x: Tensor, y: Tensor, **weights: Tensor) -> tuple[Tensor, ...]:
        mixed, post, res = torch.func.functional_call(ours, weights, (x,))
        return mixed, merge_streams(x, y, post, res)

    weights = {name: value.detach().to(device).requires_grad_() for name, value in ours.named_parameters()}
    given = {"x": leaf(2, 5, 4, 24, device=device), "y": leaf(2, 5, 24, device=device), **weights}
    assert disagreements(call, formula, **given) == []


def test_streams_may_lie_further_apart_than_32_bits_count(device: torch.device) -> None:
    """As slices of one tensor (streams, tokens, width), of which a CPU takes only the pages that are written."""
    streams, width = 8, 4
    stride = 2**31 // (streams - 1) + 16
    try:
        memory = torch.empty((streams - 1) * stride + width, dtype=torch.bfloat16, device=device)
    except RuntimeError as problem:
        pytest.skip(str(problem).splitlines()[0])
    x = memory.as_strided((1, streams, width), (width, stride, 1))
    value = torch.randn(streams, width, device=device).bfloat16()
    for stream in range(streams):
        x[0, stream] = value[stream]
    ones = torch.ones(1, streams, device=device)
    torch.testing.assert_close(mix_streams(x, ones)[0], value.float().sum(0).bfloat16(), rtol=1e-2, atol=1e-2)
    update = torch.zeros(1, width, dtype=torch.bfloat16, device=device)
    assert torch.equal(merge_streams(x, update, ones)[0], value)
    assert torch.equal(merge_streams(x, update, ones, torch.eye(streams, device=device)[None])[0], value)
