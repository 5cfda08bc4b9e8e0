# SPDX-License-Identifier: Apache-2.0
"""What one of several ranks does for tests/hf/test_tensor_parallel.py: a model under the tensor-parallel plan of
Transformers.

Every run is compared in float64 with the unpatched model on one process: the loss, and the gradient of every parameter.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import liger_hf
from hf.tiny_models import LargestResult, make, no_logits, tokens, twin
from hf.two_ranks import one_of_ranks, whole
from liger_hf.isolation import DoublePrecision
from liger_hf.rules.head.causal_loss import causal_lm_loss

# Of the largest element; float64 has sixteen digits.
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Setup:
    """A model, and what is given to it in each of the micro-batches of a step."""

    architecture: str = "llama"
    options: dict[str, Any] = field(default_factory=dict)
    batches: tuple[dict[str, Tensor], ...] = (tokens(),)
    plan: dict[str, str] = field(default_factory=dict)


def shifted(**options: Any) -> dict[str, Any]:
    """Labels that somebody has shifted already."""
    batch = tokens()
    return {**batch, "shift_labels": batch["labels"].roll(-1, -1), **options}


def ignored(rows: int) -> dict[str, Any]:
    batch = tokens()
    batch["labels"][:rows] = -100
    return batch


# Micro-batches whose mean is that of all their tokens.
ACCUMULATED = tuple({**batch, "num_items_in_batch": torch.tensor(29)} for batch in (tokens(), ignored(1)))
SETUPS = {
    "shift_labels": Setup(batches=(shifted(),), plan={"model.embed_tokens": "embedding_rowwise"}),
    "all_ignored": Setup(batches=({**ignored(2), "num_items_in_batch": 5}, {**tokens(), "num_items_in_batch": 5})),
    "softcap": Setup("gemma2", {"tie_word_embeddings": False}),
    "scaled": Setup("granite"),
    "bias": Setup("phi"),
    "norms_of_heads": Setup("qwen3"),
    "accumulated_norms_of_heads": Setup("qwen3", batches=ACCUMULATED * 2),
    "mixture": Setup("mixtral", {"num_local_experts": 4, "experts_implementation": "eager"}),
}


def distributed(model: Any, mesh: Any, plan: dict[str, str] | None = None) -> Any:
    """The model after Transformers has applied its plan, with the signature of this release."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model._tp_plan = {**model._tp_plan, **(plan or {})}
    if "tp_plan" in inspect.signature(apply_tensor_parallelism).parameters:
        return apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(model._tp_plan))
    return apply_tensor_parallelism(model, mesh)


def exact(model: Any, batches: Any) -> dict[str, Tensor]:
    """Loss and gradients of a step in float64."""
    with DoublePrecision():
        losses = []
        for batch in batches:
            losses.append(model(**batch).loss)
            losses[-1].backward()
    return {"loss": sum(losses).detach(), **_gradients(model)}


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def compare(title: str, got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    one = sorted(got.keys() ^ expected.keys())
    assert not one, f"{title}: {one} have a gradient in one of the two only"
    for name, value in expected.items():
        largest = float((got[name] - value).abs().max() / value.abs().max().clamp(min=1e-30))
        assert largest <= TOLERANCE, f"{title}: {name} is off by {largest:.3g} of its largest element"


def in_turn(rank: int, works: tuple[Callable[[Any], None], ...]) -> None:
    """Do what two ranks do, one work after the other."""
    with one_of_ranks(rank):
        mesh = init_device_mesh("cpu", (2,))
        for work in works:
            work(mesh)


def steps(mesh: Any) -> None:
    """Raises if a model does not have the loss and the gradients of one process, or gathers its logits."""
    for name, setup in SETUPS.items():
        base = make(setup.architecture, torch.float64, **setup.options).train()
        expected = exact(twin(base), setup.batches)
        model = distributed(base, mesh, setup.plan)
        report = liger_hf.apply(model)
        assert report.replaced.get("linear_cross_entropy", 0) == 1, f"{name}: {report}"
        with no_logits():
            got = exact(model, setup.batches)
        compare(f"{name}, rank {dist.get_rank()}", got, expected)


def report_of_a_rank(mesh: Any) -> None:
    """It says what a rank holds."""
    report = liger_hf.apply(distributed(make().train(), mesh))
    (row,) = (row for row in report.rows if row.op == "linear_cross_entropy")
    assert row.verdict == "replaced"
    assert "this rank holds 150 of 300 classes (2 ranks, tensor parallelism)" in row.reason
    assert "logits are gathered only when they are read, which must happen on all of these ranks" in row.reason


def logits_that_are_read(mesh: Any) -> None:
    """They are those of all classes on every rank, and so are their gradients."""
    base = make(dtype=torch.float64).train()
    plain, model = twin(base), distributed(base, mesh)
    liger_hf.apply(model)
    batch = tokens()
    with DoublePrecision():
        outputs, expected = model(**batch), plain(**batch)
        assert isinstance(outputs.logits, liger_hf.LazyLogits)
        torch.testing.assert_close(outputs.logits.materialize(), expected.logits)
        for logits in (outputs.logits, expected.logits):
            (logits[..., 7] ** 2).sum().backward()
        compare("gradients of logits", _gradients(model), _gradients(plain))
        model.eval(), plain.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(**batch).logits, plain(**batch).logits)
            evaluated = model(**batch, num_items_in_batch=13)
            assert type(evaluated.logits).__name__ == "DeferredLogits"
            torch.testing.assert_close(evaluated.logits + 0, plain(**batch).logits)
    ids = batch["input_ids"][:, :3]
    generated = [one.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0) for one in (model, plain)]
    assert torch.equal(*generated)


def log_probabilities(mesh: Any) -> None:
    """Of a head as a module, whether its model is patched or not: no logits are gathered, and gradients are those of
    one process."""
    with pytest.MonkeyPatch.context() as patch:
        hidden = torch.randn(2, 7, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        target = tokens()["labels"][:, 2:9]
        cotangent = torch.linspace(-1, 1, target.numel(), dtype=torch.float64).reshape(target.shape)

        def run(model: Any) -> dict[str, Tensor]:
            x = hidden.clone().requires_grad_()
            log_prob, entropy = liger_hf.head_log_prob(model.lm_head, x, target, return_entropy=True)
            (log_prob * cotangent + 0.3 * entropy).sum().backward()
            gradients = {"hidden": x.grad, "weight": whole(model.lm_head.weight.grad)}
            return {"log_prob": log_prob.detach(), "entropy": entropy.detach(), **gradients}

        base = make(dtype=torch.float64).train()
        expected = run(twin(base))
        for patched in (False, True):
            model = distributed(twin(base), mesh)
            if patched:
                liger_hf.apply(model)
            chunks = "liger_hf.rules.head.log_prob._in_chunks"
            patch.setattr(chunks, lambda *args: pytest.fail("the head made its logits"))
            compare(f"patched={patched}", run(model), expected)


def memory_of_a_step(mesh: Any) -> None:
    """No result of any operation in a step is as large as the logits, or as the whole weight."""
    # The local logits and the local weight are the largest; a chunk of rows holds all of them here.
    batch = {name: value.repeat(8, 1) for name, value in tokens().items()}
    rows, width = batch["input_ids"].numel(), 64
    for patched in (False, True):
        model = distributed(make(vocab_size=3000).train(), mesh)
        if patched:
            liger_hf.apply(model)
        for measured in (False, True):
            largest = LargestResult()
            with largest if measured else nullcontext():
                model(**batch).loss.backward()
        if patched:
            assert largest.elements <= max(rows, width) * 1500, f"{largest.elements} elements, {rows}×3000 logits"
        else:
            assert largest.elements >= rows * 3000, "the unpatched model gathers its logits, or nothing is seen"


def applied_before_the_plan(mesh: Any) -> None:
    """Right, and it says that the logits are gathered."""
    base = make(dtype=torch.float64).train()
    expected = exact(twin(base), (tokens(),))
    liger_hf.apply(base)
    model = distributed(base, mesh)
    with pytest.warns(UserWarning, match="call liger_hf.apply after that"):
        got = exact(model, (tokens(),))
    compare("applied before", got, expected)


def undone(mesh: Any) -> None:
    """The head is given back to the plan. Norms whose gradients the ranks add up get one hook on the module and one on
    the weight, which `undo` takes away."""
    model = distributed(make("qwen3").train(), mesh)
    norms = [norm for layer in model.model.layers for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm)]

    def hooks() -> list[tuple[int, int]]:
        return [(len(norm._forward_pre_hooks), len(norm.weight._backward_hooks or ())) for norm in norms]

    before, head = hooks(), dict(model.lm_head.__dict__)
    report = liger_hf.apply(model)
    assert model.lm_head.__dict__ != head
    liger_hf.apply(model)
    model(**tokens())
    note = f"Gradients of {len(norms)} norms over the heads of a rank stay right when they are accumulated"
    assert note in str(report)
    assert hooks() == [(module + 1, weight + 1) for module, weight in before]
    report.undo()
    assert (hooks(), model.lm_head.__dict__) == (before, head)
    assert type(model(**tokens()).logits) is Tensor


def loaded(rank: int, folders: list[str]) -> None:
    """As a user does it. Embeddings that are tied to the head are sharded like it."""
    from transformers.distributed import DistributedConfig

    with one_of_ranks(rank):
        for folder in folders:
            _compare_loaded(folder, DistributedConfig(tp_size=2))


def _compare_loaded(folder: str, config: Any) -> tuple[nn.Module, nn.Module]:
    """Compare a step of a loaded model on the ranks with one of a whole model, and return both models."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).train()
    options = {"distributed_config": config, "dtype": torch.float64}
    model = liger_hf.AutoLigerModelForCausalLM.from_pretrained(folder, **options).train()
    assert model.liger_report.replaced["linear_cross_entropy"] == 1
    with no_logits():
        got = exact(model, (tokens(),))
    compare(folder, got, exact(plain, (tokens(),)))
    return model, plain


def experts_of_ranks(rank: int, folders: list[str]) -> None:
    """Each rank holds half of the experts. Tied embeddings are whole on each rank; from Transformers 5.19, which has
    tensor parallelism beside sharded experts, each holds half of the classes."""
    from transformers.distributed import DistributedConfig

    beside = "ep_size" in inspect.signature(DistributedConfig).parameters
    config = DistributedConfig(tp_size=2, **({"ep_size": 2} if beside else {"enable_expert_parallel": True}))
    with one_of_ranks(rank), pytest.MonkeyPatch.context() as patch:
        # The grouped matmul of torch does not support float64; the loop that Transformers has for other cases does.
        patch.setattr("transformers.integrations.moe._can_use_grouped_mm", lambda *_: False)
        for folder in folders:
            model, plain = _compare_loaded(folder, config)
            compare(folder, _logits(model), _logits(plain))


def _logits(model: Any) -> dict[str, Tensor]:
    with torch.no_grad(), DoublePrecision():
        return {"logits": model.eval()(tokens()["input_ids"]).logits + 0}


def sharded_twice(rank: int) -> None:
    """Four ranks: two shards of the vocabulary, and over them FSDP2, one of whose ranks has no token that counts."""
    with one_of_ranks(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for patch_last, alone in ((True, False), (False, True)):
            base = make(dtype=torch.float64).train()
            batches = [{**batch, "num_items_in_batch": 11} for batch in (tokens(), ignored(2))]
            expected = exact(twin(base), batches)
            model = distributed(base, mesh["tp"])
            if not patch_last:
                liger_hf.apply(model)
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh["dp"])
            options = {} if alone else {"reshard_after_forward": False}
            fully_shard(model.lm_head if alone else [model.model.norm, model.lm_head], mesh=mesh["dp"], **options)
            fully_shard(model, mesh=mesh["dp"])
            if patch_last:
                liger_hf.apply(model)
            assert model.liger_report.replaced["linear_cross_entropy"] == 1, model.liger_report
            with no_logits():
                got = exact(model, batches[rank // 2 : rank // 2 + 1])
            dist.all_reduce(got["loss"])
            # Both ranks of tp have the loss; FSDP takes the mean of gradients.
            got = {name: value / 2 if name == "loss" else value * 2 for name, value in got.items()}
            compare(f"patch_last={patch_last}, head alone={alone}, rank {rank}", got, expected)


def sequence_parallel(mesh: Any) -> None:
    """By torch's own plan, with hooks on modules: norms on a shard of the sequence, whose weights are DTensors."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    on_all, tokens_here = Replicate(), Shard(1)
    layer = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": tokens_here}, desired_input_kwarg_layouts={"hidden_states": on_all}
        ),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(output_layouts=tokens_here),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=tokens_here, desired_input_layouts=on_all),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=tokens_here),
    }
    plan = {f"model.layers.*.{name}": style for name, style in layer.items()} | {
        "model.embed_tokens": RowwiseParallel(input_layouts=on_all, output_layouts=tokens_here),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=tokens_here, output_layouts=on_all),
    }
    batch = {**tokens(length=12), "position_ids": torch.arange(12)[None]}
    for patch_last in (True, False):
        base = make(dtype=torch.float64).train()
        expected = exact(twin(base), (batch,))
        if not patch_last:
            liger_hf.apply(base)
        model = parallelize_module(base, mesh, plan)
        if patch_last:
            liger_hf.apply(model)
        counts = model.liger_report.replaced
        assert (counts["rms_norm"], counts["rope"], counts["swiglu"]) == (5, 2, 2), model.liger_report
        with pytest.warns(UserWarning, match="so all ranks gather all the logits"):
            got = exact(model, (batch,))
        compare(f"patch_last={patch_last}", got, expected)


def shifts_in_a_shard(mesh: Any) -> None:
    """Under torch's context_parallel, with labels that are sharded before they are shifted: the last token of each shard
    would lose its label (verl #6068)."""
    from torch.distributed.tensor.experimental import context_parallel

    # Attention of its own, since that of context_parallel runs on GPUs only; the refusal comes from the loss.
    model = make().train()
    model.set_attn_implementation("eager")
    liger_hf.apply(model)
    batch = tokens(length=12)
    given = {**batch, "shift_labels": nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()}
    local = {name: value.clone() for name, value in given.items()}
    with context_parallel(mesh, buffers=list(local.values()), buffer_seq_dims=[1] * len(local)):
        assert local["labels"].shape[1] == 6
        assert model(**local).loss.isfinite()
        with pytest.raises(liger_hf.LogitsError, match=r"context_parallel is active\), got labels"):
            model(input_ids=local["input_ids"], labels=local["labels"])
    assert model(**batch).loss.isfinite()
    logits = distribute_tensor(torch.randn(2, 12, 300), mesh, [Shard(1)])
    with pytest.raises(liger_hf.LogitsError, match=r"hidden states are sharded: \(Shard\(dim=1\),\)\), got labels"):
        causal_lm_loss(logits, batch["labels"][:, :6], 300)
