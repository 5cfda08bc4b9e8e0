# SPDX-License-Identifier: Apache-2.0
"""The training step that `liger verify` checks: a Hugging Face model under tensor, context and data parallelism, plain
or with Liger."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
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
# Where one process leaves how many micro-batches depend on each parameter that not all of them do.
UNUSED = "unused.json"
# Grouped matmuls do not support float64.
EXPERTS = {"experts_implementation": "eager"}
# Standard deviation of what is added to each initial weight, so that every part of the model matters.
NOISE = 0.1


@dataclass(frozen=True)
class Training:
    """A step over `accumulation` micro-batches on each data-parallel rank.

    model         model type of Transformers, made tiny, or a folder with a config and a checkpoint
    tp, cp        ranks that share the weights of a layer, and the tokens of a sequence; the others are data-parallel
    shard         what the ranks that are not of tp do: "none" adds up gradients, "ddp" is DistributedDataParallel,
                  "fsdp2" shards parameters
    liger         patch the model
    options       of the config, instead of those that make it tiny
    """

    model: str = "llama"
    tp: int = 1
    cp: int = 1
    shard: str = "fsdp2"
    accumulation: int = 1
    ranks: int = 2
    liger: bool = True
    rows: int = 2
    length: int = 16
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raise OptionError for a setup that cannot be."""
        if self.ranks % (self.tp * self.cp):
            raise OptionError(f"verify: ranks must be a multiple of tp × cp = {self.tp} × {self.cp}, got {self.ranks}")
        if self.shard not in SHARDS:
            raise OptionError(f"verify: shard must be one of {', '.join(SHARDS)}, got {self.shard!r}")
        if self.shard != "fsdp2" and self.ranks > self.tp > 1:
            raise OptionError(
                "verify: shard must be 'fsdp2' where Transformers shards layers (tp) over a part of the ranks, got "
                f"{self.shard!r}"
            )
        if self.length % self.cp:
            raise OptionError(f"verify: length must be a multiple of cp = {self.cp}, got {self.length}")
        # Raises OptionError for a model that there is not.
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
        """For the report."""
        return {
            "tp": self.tp,
            "cp": self.cp,
            "dp": self.dp,
            "dp × cp": self.dp * self.cp,
            "accumulation": self.accumulation,
        }

    @property
    def title(self) -> str:
        """The training step in one line."""
        sizes = f"tp {self.tp}, cp {self.cp}, dp {self.dp}, {self.shard}, {self.accumulation} micro-batches"
        return f"{self.model}{' with Liger' if self.liger else ''} on {self.ranks} ranks: {sizes}"

    @property
    def truth(self) -> Training:
        """The setup that stands for all that one process computes the same for: of the same model and the same
        micro-batches."""
        return dataclasses.replace(
            self, tp=1, cp=1, shard="none", accumulation=1, ranks=self.dp * self.accumulation, liger=False
        )

    # -- the step

    def __call__(self, world: World) -> tuple[Tensor, dict[str, Tensor | None]]:
        torch.manual_seed(self.seed)
        if world.alone:
            return self._alone(world)
        mesh = dist.init_device_mesh("cpu", (self.dp, self.cp, self.tp), mesh_dim_names=("dp", "cp", "tp"))
        model = self.parallel(world, mesh)
        every = self.data(model)
        total = torch.tensor(sum(batch.valid() for batch in every), dtype=torch.get_default_dtype())
        ours = every[mesh["dp"].get_local_rank() :: self.dp]
        loss = torch.zeros(())
        for i, batch in enumerate(ours):
            self.last_of(model, i == len(ours) - 1)
            part = self.loss(model, batch, mesh["cp"], total)
            self.scaled(part).backward()
            loss = loss + part.detach()
        self.reduce(model, mesh)
        return self.summed(loss, mesh), {
            _plain_name(name): p.grad for name, p in model.named_parameters() if p.requires_grad
        }

    def _alone(self, world: World) -> tuple[Tensor, dict[str, Tensor | None]]:
        model = self.made(world)
        every = self.data(model)
        total = torch.tensor(float(sum(batch.valid() for batch in every)))
        losses, used = [], Counter[str]()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: used.update([name]))
        # A model casts to float32 here and there.
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
        """Raise OptionError for a loss that fails, is not finite or depends on the random state: nothing can be
        compared with it."""
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

    # -- its parts, each of which a setup of one's own may do in another way

    def data(self, model: Any) -> list[Batch]:
        """The micro-batches of all data-parallel ranks; number i is of rank i % dp."""
        config = getattr(model, "module", model).config
        vocabulary = config.get_text_config().vocab_size
        return batches(self.dp * self.accumulation, self.rows, self.length, vocabulary, self.seed)

    def loss(self, model: Any, batch: Batch, mesh: Any, total: Tensor) -> Tensor:
        """This rank's part of the loss: the sum over its tokens, divided by the number of all tokens that count."""
        group = None if mesh is None or mesh.size() == 1 else mesh.get_group()
        width = self.length // (1 if group is None else group.size())
        first = 0 if group is None else group.rank() * width
        columns = slice(first, first + width)
        part = self.labeled(batch, columns)
        with attention.of_batch(batch, columns, group):
            return model(
                input_ids=part.ids, position_ids=part.positions, labels=part.labels, shift_labels=part.labels,
                num_items_in_batch=total, use_cache=False,
            ).loss  # fmt: skip

    def labeled(self, batch: Batch, columns: slice) -> Batch:
        """The tokens of a rank, whose labels were shifted before the sequence was cut."""
        return batch.part(columns)

    def scaled(self, loss: Tensor) -> Tensor:
        """FSDP and DDP average over the ranks, where parts are to be summed."""
        return loss if self.shard == "none" else loss * (self.dp * self.cp)

    def last_of(self, model: Any, last: bool) -> None:
        """Gradients are exchanged once, after the last micro-batch."""
        if self.shard == "fsdp2":
            model.set_requires_gradient_sync(last)
        elif self.shard == "ddp":
            model.require_backward_grad_sync = last

    def reduce(self, model: Any, mesh: Any) -> None:
        """Add up the gradients of the ranks that have other tokens, if nothing wraps the model."""
        if self.shard != "none":
            return
        for parameter in model.parameters():
            gradient = parameter.grad
            if gradient is not None:
                local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                for name in ("dp", "cp"):
                    dist.all_reduce(local, group=mesh[name].get_group())

    def summed(self, loss: Tensor, mesh: Any) -> Tensor:
        """The loss of the whole batch."""
        for name in ("dp", "cp"):
            dist.all_reduce(loss, group=mesh[name].get_group())
        return loss

    # -- the model

    def config(self) -> Any:
        """Return the config in the folder, or a tiny one of the model type, without dropout."""
        from transformers import AutoConfig

        config = (
            AutoConfig.from_pretrained(self.model) if _is_folder(self.model) else tiny_config(self.model, self.options)
        )
        without_chance(config)
        return config

    def made(self, world: World) -> Any:
        """Make the model, save it in float32 for all runs, and return it in the dtype of this one."""
        from transformers import AutoModelForCausalLM

        _quiet()
        options: dict[str, Any] = {"attn_implementation": "eager", **EXPERTS}
        if _is_folder(self.model):
            model = AutoModelForCausalLM.from_pretrained(
                self.model, config=self.config(), dtype=torch.float64, **options
            )
        else:
            check_size(self.model, self.config(), **options)
            model = AutoModelForCausalLM.from_config(self.config(), **options)
            generator = torch.Generator().manual_seed(self.seed)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * NOISE)
        nn.Module.to(model, torch.float32).save_pretrained(world.folder / "model")
        return nn.Module.to(self.loaded(world, options), world.dtype).train()

    def loaded(self, world: World, options: Mapping[str, Any]) -> Any:
        """The saved model in float32, which all runs start from; Transformers makes frozen parameters trainable as it
        loads them."""
        from transformers import AutoModelForCausalLM

        # The text config that is saved for a model of several parts may be no config of a causal model.
        return AutoModelForCausalLM.from_pretrained(
            world.folder / "model", config=self.config(), dtype=torch.float32, **options
        )

    def parallel(self, world: World, mesh: Any) -> Any:
        """The same model on every rank of a mesh, patched and wrapped."""
        from torch.distributed.fsdp import fully_shard
        from torch.nn.parallel import DistributedDataParallel
        from transformers.distributed import DistributedConfig

        import liger_hf

        _quiet()
        options: dict[str, Any] = {"attn_implementation": "eager", **EXPERTS}
        if self.tp > 1 and self._places_all_ranks():
            options["distributed_config"] = DistributedConfig(
                tp_size=self.tp, tp_plan="auto", fsdp_size=self.dp * self.cp
            )
        elif self.tp > 1:
            options |= {"tp_plan": "auto", "device_mesh": mesh["tp"]}
        model = self.loaded(world, options).train()
        if self.cp > 1:
            self._gather_keys(model)
        if self.liger:
            liger_hf.apply(model)
        if self.dp * self.cp == 1 and self.shard != "ddp":
            return _unwrapped(model)
        if self.shard == "ddp":
            unused = json.loads((world.folder / UNUSED).read_text())
            for name, parameter in model.named_parameters():
                if unused.get(name) == 0:
                    # DDP would wait for its gradient. It finds unused parameters only in models without a backward pass
                    # of their own.
                    parameter.requires_grad_(False)
            return DistributedDataParallel(model, find_unused_parameters=any(unused.values()))
        if self.shard == "fsdp2" and "distributed_config" not in options:
            inner = flatten_mesh(mesh["dp", "cp"], "dp_cp")
            for layer in _layers(model):
                fully_shard(layer, mesh=inner)
            fully_shard(model, mesh=inner)
        return model

    def _gather_keys(self, model: Any) -> None:
        """Give a model the attention that gathers the keys of all parts; raise OptionError where that is not the
        model's own."""
        batch = self.data(model)[0]
        own = self._loss_with(model, batch, "eager")
        # Positions that start at 0 again separate documents in some models, not in others.
        same = any(
            math.isclose(own, self._loss_with(model, batch, attention.register(separate)), rel_tol=1e-5)
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
            return float(Training.loss(self, model, batch, None, torch.tensor(float(batch.valid()))))

    def _places_all_ranks(self) -> bool:
        """Whether Transformers shards layers and parameters in one call; before 5.18 that fails, and it takes a mesh
        instead."""
        from transformers.distributed import DistributedConfig

        return "dp_replicate_size" in {f.name for f in dataclasses.fields(DistributedConfig)}


def _quiet() -> None:
    """No progress bars and warnings of many processes."""
    import logging as of_python
    import warnings

    from transformers.utils import logging

    # About how `parallel` calls Transformers.
    warnings.filterwarnings("ignore", "Passing `tp_plan` directly", FutureWarning)
    # About how many collectives make a gradient whole that is sharded twice, which only this comparison does.
    of_python.getLogger("torch.distributed.tensor._redistribute").setLevel(of_python.ERROR)
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _is_folder(model: str) -> bool:
    return Path(model, "config.json").is_file()


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            yield from module
            return


def _unwrapped(model: Any) -> Any:
    """A model that no wrapper averages."""
    model.set_requires_gradient_sync = lambda last: None
    return model


def _plain_name(name: str) -> str:
    return name.removeprefix("module.")
