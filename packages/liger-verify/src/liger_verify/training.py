# SPDX-License-Identifier: Apache-2.0
"""The training step of `liger verify`: a Hugging Face model under tensor, context and data parallelism."""

import contextlib
import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from liger_core.errors import OptionError
from liger_core.private_torch import flatten_mesh
from liger_hf.isolation import DoublePrecision
from liger_verify import attention
from liger_verify.batches import Batch, batches
from liger_verify.tiny import check_size, one_line, tiny_config, without_chance
from liger_verify.world import World

SHARDS = ("none", "ddp", "fsdp2")
# The file with the number of micro-batches that use each parameter, if not all of them do.
UNUSED = "unused.json"
# Grouped matmuls do not support float64.
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
# The standard deviation of the noise on initial weights, which makes every part of the model matter.
NOISE = 0.1


@dataclass(frozen=True)
class Training:
    """A step over `accumulation` micro-batches on each data-parallel rank.

    model         model type of Transformers, made tiny, or a folder with a config and a checkpoint
    tp, cp        ranks that share the weights of a layer, and the tokens of a sequence; the others are data-parallel
    shard         how the ranks outside tp share the model: "none" sums gradients, "ddp" is DistributedDataParallel,
                  "fsdp2" shards parameters
    liger         whether to patch the model
    options       config fields, instead of the tiny ones
    """

    model: str = "llama"
    tp: int = 1
    cp: int = 1
    shard: str = "fsdp2"
    accumulation: int = 1
    ranks: int = 2
    liger: bool = True
    rows: int = 2
    sequence: int = 16
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raise OptionError for an impossible setup."""
        if self.ranks % (self.tp * self.cp):
            raise OptionError(f"verify: ranks must be a multiple of tp × cp = {self.tp} × {self.cp}, got {self.ranks}")
        if self.shard not in SHARDS:
            raise OptionError(f"verify: shard must be one of {', '.join(SHARDS)}, got {self.shard!r}")
        if self.shard != "fsdp2" and self.ranks > self.tp > 1:
            raise OptionError(
                "verify: shard must be 'fsdp2' where Transformers shards layers (tp) over a part of the ranks, got "
                f"{self.shard!r}"
            )
        if self.sequence % self.cp:
            raise OptionError(f"verify: sequence must be a multiple of cp = {self.cp}, got {self.sequence}")
        # Raises OptionError for an unknown model.
        config = self.config()
        try:
            text = config.get_text_config()
        except ValueError as error:
            raise OptionError(
                f"verify: {self.model} must have one text config, Transformers raised {one_line(error)}"
            ) from error
        if self.tp > 1:
            heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
            if heads % self.tp:
                raise OptionError(
                    f"verify: tp must divide the {heads} key heads of {self.model}, since a head is never split, got "
                    f"{self.tp}"
                )

    @property
    def dp(self) -> int:
        return self.ranks // (self.tp * self.cp)

    @property
    def sizes(self) -> dict[str, int]:
        """The number of ranks or micro-batches of each dimension, for the report."""
        sizes = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "dp × cp": self.dp * self.cp}
        return sizes | {"accumulation": self.accumulation}

    @property
    def title(self) -> str:
        """The training step in one line."""
        sizes = f"tp {self.tp}, cp {self.cp}, dp {self.dp}, {self.shard}, {self.accumulation} micro-batches"
        return f"{self.model}{' with Liger' if self.liger else ''} on {self.ranks} ranks: {sizes}"

    @property
    def truth(self) -> "Training":
        """The setup of one process with the same model and micro-batches, whose result several setups share."""
        return dataclasses.replace(
            self, tp=1, cp=1, shard="none", accumulation=1, ranks=self.dp * self.accumulation, liger=False
        )

    def __call__(self, world: World) -> tuple[Tensor, dict[str, Tensor | None]]:
        torch.manual_seed(self.seed)
        if world.alone:
            return self._alone(world)
        mesh = dist.init_device_mesh(world.device.type, (self.dp, self.cp, self.tp), mesh_dim_names=("dp", "cp", "tp"))
        model = self.parallel(world, mesh)
        every = self.data(model)
        total = torch.tensor(float(sum(batch.valid() for batch in every)), device=world.device)
        ours = every[mesh["dp"].get_local_rank() :: self.dp]
        loss = torch.zeros((), device=world.device)
        for i, batch in enumerate(ours):
            self.last_of(model, i == len(ours) - 1)
            rank_loss = self.loss(model, batch, mesh["cp"], total)
            self.scaled(rank_loss).backward()
            loss = loss + rank_loss.detach()
        self.reduce(model, mesh)
        parameters = {name.removeprefix("module."): p for name, p in model.named_parameters() if p.requires_grad}
        return self.summed(loss, mesh), {name: parameter.grad for name, parameter in parameters.items()}

    def _alone(self, world: World) -> tuple[Tensor, dict[str, Tensor | None]]:
        model = self.build(world)
        every = self.data(model)
        total = torch.tensor(float(sum(batch.valid() for batch in every)))
        losses, used = [], Counter[str]()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: used.update([name]))
        # Some models cast to float32 inside their forward.
        with DoublePrecision() if world.dtype == torch.float64 else contextlib.nullcontext():
            self._check_loss(model, every[0], total)
            for batch in every:
                loss = Training.loss(self, model, batch, None, total)
                loss.backward()
                losses.append(loss.detach())
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        unused = {name: used[name] for name in gradients if used[name] < len(every)}
        (world.folder / UNUSED).write_text(json.dumps(unused))
        return torch.stack(losses).sum(), gradients

    def _check_loss(self, model: Any, batch: Batch, total: Tensor) -> None:
        """Raise OptionError for a loss that fails, is not finite or depends on the random state."""
        losses = []
        try:
            for seed in (self.seed, self.seed + 1):
                torch.manual_seed(seed)
                with torch.no_grad():
                    losses.append(float(Training.loss(self, model, batch, None, total)))
        except Exception as error:
            raise OptionError(
                f"verify: {self.model} must compute a loss from input_ids, position_ids and labels, on one process it "
                f"raised {one_line(error)}"
            ) from error
        if not math.isfinite(losses[0]):
            raise OptionError(f"verify: the loss of {self.model} must be finite on one process, got {losses[0]}")
        if not math.isclose(*losses, rel_tol=1e-6):
            raise OptionError(
                f"verify: the loss of {self.model} must not be random, got {losses[0]:.6f} and {losses[1]:.6f} for the "
                "same tokens"
            )

    # Subclasses may override the parts of the step from here to `summed`.

    def data(self, model: Any) -> list[Batch]:
        """Return the micro-batches of all data-parallel ranks; number i belongs to rank i % dp."""
        model = getattr(model, "module", model)
        vocabulary = model.config.get_text_config().vocab_size
        drawn = batches(self.dp * self.accumulation, self.rows, self.sequence, vocabulary, self.seed)
        return [batch.to(model.device) for batch in drawn]

    def loss(self, model: Any, batch: Batch, mesh: Any, total: Tensor) -> Tensor:
        """Return this rank's part of the loss: the sum over its tokens, divided by the number of all counted tokens."""
        several = mesh is not None and mesh.size() > 1
        width = self.sequence // (mesh.size() if several else 1)
        first = mesh.get_local_rank() * width if several else 0
        columns = slice(first, first + width)
        tokens = self.labeled(batch, columns)
        attention.set_batch(batch, columns, mesh if several else None)
        return model(
            input_ids=tokens.ids, position_ids=tokens.positions, labels=tokens.labels, shift_labels=tokens.labels,
            num_items_in_batch=total, use_cache=False,
        ).loss  # fmt: skip

    def labeled(self, batch: Batch, columns: slice) -> Batch:
        """Return the tokens of a rank; labels were shifted before the sequence was cut."""
        return batch.take(columns)

    def scaled(self, loss: Tensor) -> Tensor:
        """Scale the loss, because FSDP and DDP average gradients that should be summed."""
        return loss if self.shard == "none" else loss * (self.dp * self.cp)

    def last_of(self, model: Any, last: bool) -> None:
        """Exchange gradients only after the last micro-batch."""
        if self.shard == "fsdp2":
            model.set_requires_gradient_sync(last)
        elif self.shard == "ddp":
            model.require_backward_grad_sync = last

    def reduce(self, model: Any, mesh: Any) -> None:
        """Sum the gradients of ranks with different tokens, if nothing wraps the model."""
        if self.shard != "none":
            return
        for parameter in model.parameters():
            gradient = parameter.grad
            if gradient is not None:
                local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                for name in ("dp", "cp"):
                    dist.all_reduce(local, group=mesh[name].get_group())

    def summed(self, loss: Tensor, mesh: Any) -> Tensor:
        """Return the loss of the whole batch."""
        for name in ("dp", "cp"):
            dist.all_reduce(loss, group=mesh[name].get_group())
        return loss

    def config(self) -> Any:
        """Return the config in the folder, or a tiny one of the model type, without dropout."""
        from transformers import AutoConfig

        is_folder = _is_folder(self.model)
        config = AutoConfig.from_pretrained(self.model) if is_folder else tiny_config(self.model, self.options)
        without_chance(config)
        return config

    def build(self, world: World) -> Any:
        """Make the model, save it in float32 for all runs, and return it in the dtype of this run."""
        from transformers import AutoModelForCausalLM

        _quiet()
        if _is_folder(self.model):
            model = AutoModelForCausalLM.from_pretrained(self.model, config=self.config(), dtype=torch.float64, **EAGER)
        else:
            check_size(self.model, self.config(), **EAGER)
            model = AutoModelForCausalLM.from_config(self.config(), **EAGER)
            generator = torch.Generator().manual_seed(self.seed)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * NOISE)
        nn.Module.to(model, torch.float32).save_pretrained(world.folder / "model")
        return nn.Module.to(self.loaded(world, EAGER), world.dtype).train()

    def loaded(self, world: World, options: Mapping[str, Any]) -> Any:
        """Return the saved model in float32, from which all runs start, with frozen parameters made trainable."""
        from transformers import AutoModelForCausalLM

        # The saved config of a multimodal model may not be that of a causal model.
        return AutoModelForCausalLM.from_pretrained(
            world.folder / "model", config=self.config(), dtype=torch.float32, **options
        )

    def parallel(self, world: World, mesh: Any) -> Any:
        """Return the same model on every rank of a mesh, patched and wrapped."""
        from torch.distributed.fsdp import fully_shard
        from torch.nn.parallel import DistributedDataParallel
        from transformers.distributed import DistributedConfig

        import liger_hf

        _quiet()
        options: dict[str, Any] = dict(EAGER)
        # From 5.18 on, Transformers shards layers and parameters in one call; before, it takes a mesh.
        if self.tp > 1 and "dp_replicate_size" in {f.name for f in dataclasses.fields(DistributedConfig)}:
            options["distributed_config"] = DistributedConfig(
                tp_size=self.tp, tp_plan="auto", fsdp_size=self.dp * self.cp
            )
        elif self.tp > 1:
            options |= {"tp_plan": "auto", "device_mesh": mesh["tp"]}
        model = nn.Module.to(self.loaded(world, options), world.device).train()
        if self.cp > 1:
            self._gather_keys(model)
        if self.liger:
            liger_hf.apply(model)
        if self.dp * self.cp == 1 and self.shard != "ddp":
            # No wrapper averages its gradients.
            model.set_requires_gradient_sync = lambda last: None
            return model
        if self.shard == "ddp":
            unused = json.loads((world.folder / UNUSED).read_text())
            for name, parameter in model.named_parameters():
                if unused.get(name) == 0:
                    # DDP would wait for its gradient: it finds no unused parameters behind a custom backward pass.
                    parameter.requires_grad_(False)
            return DistributedDataParallel(model, find_unused_parameters=any(unused.values()))
        if self.shard == "fsdp2" and "distributed_config" not in options:
            inner = flatten_mesh(mesh["dp", "cp"], "dp_cp")
            for layer in next((module for module in model.modules() if isinstance(module, nn.ModuleList)), ()):
                fully_shard(layer, mesh=inner)
            fully_shard(model, mesh=inner)
        return model

    def _gather_keys(self, model: Any) -> None:
        """Give a model the attention that gathers the keys of all ranks.

        Raises OptionError if the model's own attention is another one.
        """
        batch = self.data(model)[0]
        eager_loss = self._loss_with(model, batch, "eager")
        # Only some models separate documents where positions start at 0 again.
        same = any(
            math.isclose(eager_loss, self._loss_with(model, batch, attention.register(separate)), rel_tol=1e-5)
            for separate in (True, False)
        )
        layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
        if attention.calls() < layers:
            raise OptionError(
                f"verify: with cp, all {layers} layers of {self.model} must have attention of Transformers' interface, "
                f"{attention.calls()} have; the others would not see the other ranks' tokens"
            )
        if not same:
            raise OptionError(
                "verify: with cp, attention must be to all tokens before each in its document, sequence or window, "
                f"that of {self.model} is not"
            )

    def _loss_with(self, model: Any, batch: Batch, name: str) -> float:
        """Return the loss of a batch with this attention."""
        model.set_attn_implementation(name)
        with torch.no_grad():
            total = torch.tensor(float(batch.valid()), device=model.device)
            return float(Training.loss(self, model, batch, None, total))


def _quiet() -> None:
    """Turn off the progress bars and warnings of many processes."""
    import logging as of_python
    import warnings

    from transformers.utils import logging

    # `parallel` passes `tp_plan` directly.
    warnings.filterwarnings("ignore", "Passing `tp_plan` directly", FutureWarning)
    # torch warns of the collectives that gather doubly sharded gradients, which only this comparison does.
    of_python.getLogger("torch.distributed.tensor._redistribute").setLevel(of_python.ERROR)
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _is_folder(model: str) -> bool:
    return Path(model, "config.json").is_file()
