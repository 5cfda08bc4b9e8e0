# SPDX-License-Identifier: Apache-2.0
"""Training on two processes, compared with the mean of the gradients of one process, and with what one process trains
to."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import forks
import liger_hf
import liger_hf.rules.head.causal_loss
import liger_hf.trainers
from hf import tiny_models
from hf.tiny_models import adapted, gradients_of, make, no_logits, step, tokens, twin
from liger_core import losses, use

# On a busy machine a rank may wait for minutes; after a failure there is no wait, since the exception ends the other
# ranks.
PATIENCE = timedelta(minutes=10)


def on_two_ranks(work: Callable[..., None], *args: Any) -> None:
    """work(rank, *args) in two processes at once; raises what one of them raises."""
    forks.on_ranks(2, work, *args)


def batch(rank: int) -> dict[str, Tensor]:
    ids = (tokens()["input_ids"] + 7 * rank) % 290 + 3
    return {"input_ids": ids, "labels": ids}


def sharded(
    model: Any, head: dict[str, Any] | None = None, together: bool = False, inside: Any = None, **options: Any
) -> Any:
    mesh, inner = init_device_mesh(tiny_models.DEVICE.type, (2,)), inside_peft(inside or model)
    for layer in inner.model.layers:
        fully_shard(layer, mesh=mesh)
    if head is not None:
        fully_shard(inner.lm_head, mesh=mesh, **head)
    if together:
        fully_shard([inner.model.norm, inner.lm_head], mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh, **options)


def inside_peft(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "peft_config") else model


WAYS: dict[str, Callable[[Any], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "ddp_unused": lambda model: DistributedDataParallel(model, find_unused_parameters=True),
    "ddp_static": lambda model: DistributedDataParallel(model, static_graph=True),
    "fsdp2": sharded,
    "fsdp2_root_resharded": lambda model: sharded(model, reshard_after_forward=True),
    "fsdp2_head_alone": lambda model: sharded(model, head={}),
    # As the plans of Transformers shard a model.
    "fsdp2_norm_with_head": lambda model: sharded(model, together=True),
    "fsdp2_head_kept": lambda model: sharded(model, head={"reshard_after_forward": False}),
}


@contextmanager
def one_of_ranks(rank: int, device: str = "cpu") -> Iterator[None]:
    """This process is one of several: on the CPU with the reference, or each on a GPU of its own with what a user gets
    there."""
    torch.set_num_threads(1)
    on_gpu = device == "cuda"
    if on_gpu:
        tiny_models.DEVICE = torch.device("cuda", rank)
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=PATIENCE)
    with nullcontext() if on_gpu else use("reference"):
        yield
    # Nobody leaves while another one waits for it.
    dist.barrier()
    dist.destroy_process_group()


def tolerance(on_cpu: float) -> float:
    """On a GPU Liger runs kernels of its own, whose sums have another order than those of the unpatched model."""
    return on_cpu if tiny_models.DEVICE.type == "cpu" else 10 * on_cpu


def work(rank: int, ways: tuple[str, ...], patch_last: bool, device: str) -> None:
    """One process; raises if a gradient is wrong or if all the logits were made."""
    with one_of_ranks(rank, device):
        base = trained("everything")
        for way in ways:
            model = twin(base)
            wrapped = patched_and_wrapped(model, WAYS[way], patch_last)
            with no_logits():
                wrapped(**batch(rank)).loss.backward()
            Expected.of(base).compare(way, model)


STEPS = 4
# What is trained: everything, or adapters, on the head too or with the head saved beside them.
TRAINED: dict[str, dict[str, Any] | None] = {
    "everything": None,
    "adapted_head": {"target_modules": ["q_proj", "lm_head"]},
    "saved_head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


def trained(kind: str) -> Any:
    """A model with these trained weights; none is zero at the start, so that all of them get a gradient."""
    model, options = make("llama", tie_word_embeddings=False), TRAINED[kind]
    return model.train() if options is None else adapted(model, **options)


def whole_gradient(parameter: Any, zero: bool) -> Any:
    if zero:
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(parameter)
    return whole(parameter.grad)


def whole(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


class Expected:
    """The mean of the gradients of two ranks in one process: by name, of what is trained."""

    def __init__(self, ranks: list[dict[str, Tensor]]) -> None:
        self.gradients = {name: (ranks[0][name] + ranks[1][name]) / 2 for name in ranks[0] if name != "loss"}

    @classmethod
    def of(cls, base: Any) -> Self:
        return cls([step(twin(base), **batch(rank)) for rank in range(2)])

    def compare(self, way: str, model: Any, zero: bool = False) -> None:
        """Raises if not exactly these parameters of a model, which DeepSpeed may shard, have these gradients."""
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if trained.keys() != self.gradients.keys():
            raise AssertionError(f"{way}: {sorted(trained)} are trained, they must be {sorted(self.gradients)}")
        for name, parameter in trained.items():
            expected = self.gradients[name]
            largest = float((whole_gradient(parameter, zero) - expected).abs().max() / expected.abs().max())
            if not largest <= tolerance(1e-5):
                raise AssertionError(f"{way}: the gradient of {name} is off by {largest:.3g} of its largest element")


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(rank: int, runs: list[tuple[str, str, bool]], device: str) -> None:
    """One process; raises if a patched model has other gradients or losses than the unpatched one in one process.

    runs  what is trained, how, and whether it is wrapped before it is patched
    """
    with one_of_ranks(rank, device):
        for kind, way, patch_last in runs:
            base = trained(kind)
            expected = _losses_of_one_process(twin(base))[rank]
            losses = _losses_of_a_rank(way, twin(base), Expected.of(base), rank, patch_last)
            if max(abs(got / want - 1) for got, want in zip(losses, expected, strict=True)) > tolerance(1e-4):
                raise AssertionError(f"{kind}, {way}, rank {rank}: the losses are {losses}, they must be {expected}")


def _losses_of_one_process(model: Any) -> list[list[float]]:
    """By rank and step."""
    optimizer, losses = optimizer_of(model), []
    for _ in range(STEPS):
        both = [model(**batch(rank)).loss for rank in range(2)]
        (sum(both) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([float(loss.detach()) for loss in both])
    return [list(of_rank) for of_rank in zip(*losses, strict=True)]


def _losses_of_a_rank(way: str, model: Any, gradients: Expected, rank: int, patch_last: bool) -> list[float]:
    """By step; raises if the gradients of the first step are wrong."""
    losses: list[float] = []
    wrapped = patched_and_wrapped(model, wrap(way), patch_last)
    for name, weight in inside_peft(model).lm_head.named_parameters() if is_zero(way) else ():
        if (weight.numel() == 0) != (way == "zero3"):
            raise AssertionError(f"{way}: {name} of the head has {weight.numel()} elements between steps")
    optimizer = wrapped if is_zero(way) else optimizer_of(model)
    for _ in range(STEPS):
        with no_logits():
            loss = wrapped(**batch(rank)).loss
            backward(wrapped, loss)
        if not losses:
            gradients.compare(way, model, is_zero(way))
        optimizer.step()
        if not is_zero(way):
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def is_zero(way: str) -> bool:
    return way.startswith("zero")


def wrap(way: str) -> Callable[[Any], Any]:
    return _engine(int(way[-1])) if is_zero(way) else WAYS[way]


def backward(wrapped: Any, loss: Tensor) -> None:
    """By the engine of DeepSpeed, which reduces gradients, or by autograd."""
    (wrapped.backward if hasattr(wrapped, "backward") else Tensor.backward)(loss)


def _engine(stage: int) -> Callable[[Any], Any]:
    def engine_of(model: Any) -> Any:
        # DeepSpeed reads it when it is imported.
        os.environ["DS_ACCELERATOR"] = tiny_models.DEVICE.type
        import deepspeed

        # Otherwise it compiles its own collective, which takes most of a minute.
        deepspeed.ops.__compatible_ops__.clear()
        # Threshold 0: otherwise small weights, so all of these, stay whole on every rank.
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_optimization": zero}
        optimizer = optimizer_of(model)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    return engine_of


def chunks_by_rank(rank: int, runs: list[tuple[str, str]], device: str) -> None:
    """One process; raises if ranks with different numbers of chunks get other gradients, or wait for each other
    forever."""
    with one_of_ranks(rank, device), pytest.MonkeyPatch.context() as patch:
        for kind, way in runs:
            base = trained(kind)
            expected = _mean_gradients(twin(base), lambda model, **inputs: model(**inputs).loss)
            in_several_chunks(patch)
            model = twin(base)
            wrapped = patched_and_wrapped(model, wrap(way), patch_last=False)
            with no_logits():
                backward(wrapped, wrapped(**uneven(rank)).loss)
            expected.compare(f"{kind}, {way}", model, is_zero(way))


def in_several_chunks(patch: pytest.MonkeyPatch) -> None:
    """Of the head, on each rank, and not as many on one as on the other."""
    patch.setitem(liger_hf.rules.head.causal_loss.CHUNK_ELEMENTS, tiny_models.DEVICE.type, 7 * tiny_models.VOCABULARY)


class PerToken(nn.Module):
    """A model whose forward pass returns a policy loss and its entropies, from the head as it is there."""

    def __init__(self, model: Any, path: str) -> None:
        super().__init__()
        self.model, self.path = model, path

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        model = inside_peft(self.model)
        hidden, target = model.model(input_ids=input_ids).last_hidden_state[:, :-1], labels[:, 1:]
        head = model.get_output_embeddings()
        if self.path == "module":
            log_prob, entropy = liger_hf.head_log_prob(head, hidden, target, temperature=0.7, return_entropy=True)
        elif self.path == "losses":
            log_prob, entropy = losses.Head(hidden, head.weight, target, temperature=0.7).log_prob(entropy=True)  # type: ignore[assignment]
        elif self.path == "layer":
            log_prob, entropy = head(hidden, target, torch.full(target.shape, 0.7, device=hidden.device)).values()
        else:
            log = (head(hidden) / 0.7).log_softmax(-1)
            log_prob, entropy = log.gather(-1, target[..., None])[..., 0], -(log.exp() * log).sum(-1)
        advantages = torch.linspace(-1, 1, target.shape[1], device=hidden.device)
        return (log_prob * advantages).sum() - 0.1 * entropy.sum()


def uneven(rank: int) -> dict[str, Tensor]:
    """Rank 1 has two thirds of the tokens that rank 0 has."""
    return {name: value[:, : 9 - 3 * rank] for name, value in batch(rank).items()}


def log_probs(rank: int, runs: list[tuple[str, str, str]], device: str) -> None:
    """One process; raises if a loss of log-probabilities has other gradients than plain PyTorch in one process.

    runs  what is trained, how it is sharded, and by what the log-probabilities are computed
    """
    with one_of_ranks(rank, device), pytest.MonkeyPatch.context() as patch:
        in_several_chunks(patch)
        for kind, way, path in runs:
            base = trained(kind)
            expected = _mean_gradients(PerToken(twin(base), "plain"))
            model = twin(base)
            if path == "layer":
                layer = liger_hf.trainers.FusedOutputLinear(model.lm_head.in_features, model.lm_head.out_features)
                layer.weight = model.lm_head.weight
                model.lm_head = layer
            policy, head = PerToken(model, path), {} if way == "fsdp2_head_alone" else None
            wrapped = wrap(way)(policy) if is_zero(way) else sharded(policy, head, inside=model)
            backward(wrapped, wrapped(**uneven(rank)))
            expected.compare(f"{kind}, {way}, {path}", policy, is_zero(way))


def _mean_gradients(
    model: nn.Module, loss: Callable[..., Tensor] = lambda model, **inputs: model(**inputs)
) -> Expected:
    """Of one process that has the batches of both ranks."""
    found = []
    for rank in range(2):
        model.zero_grad()
        loss(model, **uneven(rank)).backward()
        found.append(gradients_of(model))
    return Expected(found)


def trl_head(rank: int, device: str) -> None:
    """One process; raises if TRL's forward pass on our head has other gradients, sharded, than plain PyTorch in one
    process."""
    with one_of_ranks(rank, device):
        # Here: only this test needs it.
        from trl.trainer.utils import add_fused_lm_head

        base = trained("everything")
        expected = _mean_gradients(PerToken(twin(base), "plain"))
        expected.gradients = {name.removeprefix("model."): value for name, value in expected.gradients.items()}
        model = twin(base)
        add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
        sharded(model)
        with liger_hf.use_in_trl():
            outputs = model(**uneven(rank), fused_lm_head=True)
            advantages = torch.linspace(-1, 1, outputs.log_probs.shape[1], device=outputs.log_probs.device)
            ((outputs.log_probs * advantages).sum() - 0.1 * outputs.entropy.sum()).backward()
        expected.compare("TRL", model)


def trl_divergence(rank: int, device: str) -> None:
    """One process; raises if GKD and DistillationTrainer have other gradients on sharded models than on whole ones."""
    with one_of_ranks(rank, device):
        # Here: only this test needs it.
        from trl.experimental.gkd import GKDTrainer
        from trl.models.utils import _ForwardRedirection
        from trl.trainer import distillation_trainer, utils

        base = trained("everything")
        teacher = make("llama", hidden_size=96, tie_word_embeddings=False).eval().requires_grad_(False)
        accelerator = SimpleNamespace(unwrap_model=lambda model: model, autocast=nullcontext)
        trainer = SimpleNamespace(accelerator=accelerator, teacher_model=teacher, beta=0.3)

        def logits(model: Any, input_ids: Tensor, labels: Tensor) -> Tensor:
            sides = [side(input_ids=input_ids).logits[:, :-1] for side in (model, teacher)]
            return GKDTrainer.generalized_jsd_loss(sides[0], sides[1].detach(), labels[:, 1:], beta=0.3)

        def gkd(model: Any, **inputs: Tensor) -> Tensor:
            ones = torch.ones_like(inputs["input_ids"])
            return GKDTrainer.compute_loss(trainer, model, {**inputs, "attention_mask": ones})

        def distillation(model: Any, input_ids: Tensor, labels: Tensor) -> Tensor:
            def loss() -> Tensor:
                hidden, theirs = (side.base_model(input_ids).last_hidden_state[:, :-1] for side in (model, teacher))
                heads = (model.lm_head.weight, teacher.lm_head.weight)
                return distillation_trainer._chunked_divergence_loss(hidden, theirs, *heads, labels[:, 1:] != -100, 0.3)

            return _ForwardRedirection()(model, model, loss)[0]

        expected = _mean_gradients(twin(base), logits)
        for name, loss in {"GKD": gkd, "distillation": distillation}.items():
            model = twin(base)
            utils.add_fused_lm_head(model)
            sharded(model)
            with liger_hf.use_in_trl():
                loss(model, **uneven(rank)).backward()
            expected.compare(name, model)


def patched_and_wrapped(model: Any, wrap: Callable[[Any], Any], patch_last: bool) -> Any:
    if not patch_last:
        liger_hf.apply(model)
    wrapped = wrap(model)
    if patch_last:
        liger_hf.apply(model)
    # ZeRO-3 gathers the weight of a norm by hooks on it.
    norms = [module for name, module in model.named_modules() if name.endswith("post_attention_layernorm")]
    hooked = patch_last and any(norm._forward_pre_hooks for norm in norms)
    residuals = {} if hooked else {"add_rms_norm": 2}
    sharded = any(hasattr(parameter, "ds_id") for name, parameter in model.named_parameters() if "lora_A" in name)
    layers = 0 if patch_last and sharded else sum(name.endswith("q_proj.lora_A") for name, _ in model.named_modules())
    adapted = {"lora_linear": layers} if layers else {}
    others = {"rms_norm": 5, "rope": 2, "swiglu": 2, "linear_cross_entropy": 1}
    if model.liger_report.replaced != {**others, **residuals, **adapted}:
        raise AssertionError(f"not everything was replaced: {model.liger_report}")
    return wrapped
