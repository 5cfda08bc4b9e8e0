# SPDX-License-Identifier: Apache-2.0
"""One training step of the Transformers Trainer on fake tensors, and the memory that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor
from transformers.trainer_pt_utils import LabelSmoother

from liger_core.errors import LigerError, OptionError
from liger_core.private_torch import DataDependentOutput, DynamicOutputShape, FakeTensorMode
from liger_hf.private_transformers import CHECKPOINT
from liger_train.checkpointing import layers
from liger_train.configs import auto_class, config_of
from liger_train.implementations import PEER
from liger_train.model import LOSS, LOW, build, weights_dtype
from liger_train.plan import devices, parallel
from liger_train.plan.adapters import adapted
from liger_train.plan.float8 import in_float8
from liger_train.plan.ledger import (
    ACTIVATIONS,
    CATEGORIES,
    CHECKPOINTS,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    OTHER,
    WEIGHTS,
    Ledger,
    Moment,
)
from liger_train.plan.optimizers import OPTIMIZERS, Weight, weights_of
from liger_train.plan.sharding import Sharding, held_in_four_bits, in_four_bits, optimizer_memory, sharding_of
from liger_train.setup import LIBRARY, Setup
from liger_train.smoothing import factor_of, is_smoothed
from liger_train.techniques import chosen

CPU = torch.device("cpu")
# Options that do not affect memory, with fixed values.
NEUTRAL: dict[str, Any] = {
    "memory_limit": None,
    "steps": 20,
    "learning_rate": 1e-5,
    "seed": 0,
    "data": LIBRARY,
    "nvme_folder": None,
    "compile": "none",
    "validation": 0.0,
    "random_weights": False,
}
COMPILED = (
    "This is the memory of the eager model. Compiled layers take as much with Liger, and less without; --compile "
    "graphs reserves more."
)
AUTO = (
    "This is the start of --checkpoint auto, which then uses the memory that is left; where inputs of layers take over "
    "an eighth of it, they are offloaded."
)
FORWARD, BACKWARD, UPDATE = "forward pass", "backward pass", "weight update"


@dataclass(frozen=True)
class Prediction:
    """The memory that one rank needs for a setup.

    peak_bytes    peak memory, as torch.cuda.max_memory_allocated reports it
    held          the peak by category
    doing         the phase of the step with the peak
    static_bytes  allocated between steps: weights, optimizer state, and remaining gradients
    parameters, trainable_parameters  of the whole model
    notes         decisions made while building the model, one sentence each
    """

    setup: Setup
    peak_bytes: int
    held: dict[str, int]
    doing: str
    static_bytes: int
    parameters: int
    trainable_parameters: int
    notes: tuple[str, ...] = ()

    def fits(self, limit: int) -> bool:
        return self.peak_bytes <= limit


@dataclass(frozen=True)
class Step:
    """The memory of a rank in a step without the optimizer.

    peak, end   at the peak, and when the weights are updated
    weights     the trained weights
    parameters  the number of all parameters of the whole model, and of the trained ones
    """

    peak: Moment
    end: Moment
    static: int
    weights: tuple[Weight, ...]
    parameters: tuple[int, int]
    notes: tuple[str, ...]


def predict(setup: Setup) -> Prediction:
    """Predict the memory of a run: the actual model of the setup takes a step on fake tensors.

    Raises OptionError for unknown values, and for a model that cannot take a step without the values of tensors.
    """
    chosen(setup)
    if setup.liger == PEER:
        raise OptionError(f"plan: --liger must be Liger's, got {PEER}, whose kernels cannot run on fake tensors")
    kind = OPTIMIZERS[setup.optimizer]
    # The optimizer's own memory is added below; the rest depends on the other options.
    taken = _step(replace(setup, optimizer="galore-layerwise" if kind.drops_gradients else "adamw", **NEUTRAL))
    state, inside = optimizer_memory(setup, kind, taken.weights)
    peak = max(taken.peak, replace(taken.end, held=_with(taken.end.held, inside)), key=lambda moment: moment.total)
    return Prediction(
        setup,
        peak.total + state,
        {name: _with(peak.held, state).get(name, 0) for name in CATEGORIES},
        peak.doing,
        taken.static + state,
        *taken.parameters,
        taken.notes if setup.compile == "none" else (*taken.notes, COMPILED),
    )


def forward_and_backward(setup: Setup) -> int:
    """The peak in bytes of a step without an optimizer, as an earlier version measured them (model.json)."""
    return _step(replace(setup, **NEUTRAL)).peak.total


def _with(held: Mapping[str, int], optimizer: int) -> dict[str, int]:
    return {**held, OPTIMIZER: held.get(OPTIMIZER, 0) + optimizer}


@lru_cache(maxsize=256)
def _step(setup: Setup) -> Step:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _in_a_sentence(setup):
        # Building a model seeds the generators.
        with torch.random.fork_rng(devices=[]):
            model, notes = fake_model(setup, mode)
        sharding = sharding_of(setup, model)
        ledger = ledger_of_a_step(setup, model, sharding, mode)
        if sharding.learns:
            # DeepSpeed prefetches after it has traced a step.
            ledger = ledger_of_a_step(setup, model, sharding.after_a_step(), mode)
    return Step(
        ledger.peak(),
        ledger.end(),
        ledger.static,
        tuple(weights_of(model)),
        _counts(setup, model),
        (*notes, *ledger.notes),
    )


def _counts(setup: Setup, model: Any) -> tuple[int, int]:
    """The number of weights of the whole model, and of those that are trained."""
    if setup.tp > 1:
        model, _ = fake_model(replace(setup, tp=1, liger="none"), FakeTensorMode(allow_non_fake_inputs=True))
    weights = list(model.parameters())
    return sum(w.numel() for w in weights), sum(w.numel() for w in weights if w.requires_grad)


@contextmanager
def _in_a_sentence(setup: Setup) -> Iterator[None]:
    """Convert any error that a model's code raises on fake tensors to an OptionError of one sentence."""
    try:
        yield
    except (LigerError, MemoryError):
        raise
    except Exception as problem:
        if isinstance(problem, DataDependentOutput | DynamicOutputShape):
            reason = f"it reads values of tensors ({problem.func})"
        else:
            first = next((line for line in str(problem).splitlines() if line.strip()), "").strip()
            reason = f"{type(problem).__name__}: {first}" if first else type(problem).__name__
        # None: the tensors in a traceback that outlives the mode crash the interpreter when it ends.
        raise OptionError(
            f"plan: the model must be able to take a step on fake tensors, but {setup.model} is not: {reason}; "
            "to measure its memory, run `liger train`"
        ) from None


def ledger_of_a_step(
    setup: Setup, model: Any, sharding: Sharding, mode: Any, kind: type[Ledger] = Ledger, **fields: Any
) -> Ledger:
    """Return a ledger of this kind after a step; `fields` are set on it before the step."""
    classes = config_of(setup).get_text_config().vocab_size
    ledger = kind(
        partial(devices.replace, setup.device), partial(devices.scratch, setup.device), _logits_of(model, classes)
    )
    vars(ledger).update(fields)
    written_out = devices.attention_is_written_out(
        setup.device, LOW.get(setup.precision, torch.float32), model.config.get_text_config()
    )
    with (
        mode,
        devices.as_on(setup.device, written_out=written_out, packed=setup.packing) as notes,
        parallel.attention_of_ranks(setup),
        ledger,
    ):
        step(setup, model, ledger, sharding)
    ledger.notes.extend(notes if setup.liger != "none" else [])
    return ledger


def fake_model(setup: Setup, mode: Any) -> tuple[Any, list[str]]:
    """The model of a setup, on fake tensors."""
    # These are modeled separately: fake tensors can be neither quantized to 4 bits nor offloaded.
    simple = replace(setup, device="cpu", adapter="lora" if setup.adapter == "qlora" else setup.adapter)
    if setup.shard == "fsdp2" and setup.precision in LOW:
        # Gathered weights are in the precision of the matmuls.
        simple = replace(simple, precision="bf16-pure")
    simple = replace(simple, checkpoint="full" if setup.checkpoint in ("offload", "auto") else setup.checkpoint)
    whole = _on_meta(simple)
    with mode:
        built = build(
            simple,
            CPU,
            load=lambda setup, device, _: _part(whole, setup, device),
            adapters=adapted,
            to_float8=in_float8,
        )
        if setup.adapter == "qlora":
            _prepare_for_four_bits(built.model)
        if setup.tp > 1:
            classes = config_of(setup).get_text_config().vocab_size
            parallel.share_vocabulary(built.model, setup, classes, LOSS in built.replaced)
    return built.model, built.notes + ([AUTO] if setup.checkpoint == "auto" else [])


def _on_meta(setup: Setup) -> Any:
    """Return the model on the meta device, since models convert modules in their constructors, which fake tensors
    refuse."""
    with torch.device("meta"):
        config = config_of(setup)
        return auto_class(config).from_config(
            config, dtype=weights_dtype(setup), trust_remote_code=setup.trust_remote_code
        )


def _part(model: Any, setup: Setup, device: torch.device) -> Any:
    """Return a rank's part of the model on the device, with weights that have no values."""
    model.to_empty(device=device)
    model.tie_weights()
    if setup.tp > 1:
        parallel.shard(model, setup)
    return model


def _prepare_for_four_bits(model: Any) -> None:
    """Convert frozen weights that are not in 4 bits to float32, such as an untied LM head.

    This is what peft.prepare_model_for_kbit_training does.
    """
    quantized = {id(weight) for weight in held_in_four_bits(model)}
    for weight in model.parameters():
        if not weight.requires_grad and id(weight) not in quantized:
            weight.data = weight.data.float()


def _logits_of(model: Any, classes: int) -> Callable[[Tensor], str | None]:
    """Recognize logits: their last dimension is the vocabulary size, or the part of a rank."""
    sizes = {classes, model.get_output_embeddings().weight.shape[0]}

    def known_as(tensor: Tensor) -> str | None:
        return LOGITS if tensor.dim() > 1 and tensor.shape[-1] in sizes else None

    return known_as


def step(setup: Setup, model: Any, ledger: Ledger, sharding: Sharding) -> None:
    """A step after the first, when the optimizer has its state."""
    for weight in [*model.parameters(), *model.buffers()]:
        ledger.note(weight, WEIGHTS)
    if setup.adapter == "qlora":
        ledger.expanded = in_four_bits(model, ledger)
    sharding.enter(model, ledger)
    ledger.begin()
    ledger.hold(devices.WORKSPACES[setup.device], OTHER)
    ledger.hold(sharding.first_buckets, GRADIENTS)
    with _watched(setup, model, ledger, sharding):
        for _ in range(min(2, setup.accumulation)):
            tokens = torch.zeros(setup.batch, setup.sequence // setup.cp, dtype=torch.long)
            ledger.doing = FORWARD
            loss = _loss(setup, model, tokens)
            for number in ledger.alive() - ledger.labels.keys():
                ledger.labels[number] = ACTIVATIONS
            ledger.doing = BACKWARD
            loss.backward()
            del loss
            sharding.completed()
        ledger.doing = UPDATE


def _loss(setup: Setup, model: Any, tokens: Tensor) -> Tensor:
    """Compute the loss as Trainer.compute_loss does with accelerate's forward; other outputs are freed on return."""
    inputs = {"input_ids": tokens, "labels": tokens, "num_items_in_batch": torch.zeros((), dtype=torch.long)}
    if setup.cp > 1:
        inputs |= {"shift_labels": torch.zeros_like(tokens)}
    if setup.cp > 1 or setup.packing:
        inputs |= {"position_ids": torch.zeros_like(tokens)}
    factor = factor_of(setup)
    smoother = LabelSmoother(factor) if factor and not is_smoothed(model) else None
    labels = inputs.pop("labels") if smoother else tokens

    def loss_of(outputs: Any) -> Tensor:
        loss: Tensor = smoother(outputs, labels, shift_labels=True, num_items_in_batch=1) if smoother else outputs.loss
        return loss

    if not setup.mixed or setup.shard != "none":
        return loss_of(model(**inputs))

    def forward(**arguments: Any) -> Any:
        with torch.autocast("cpu", dtype=LOW[setup.precision]):
            return model(**arguments)

    return loss_of(convert_outputs_to_fp32(forward)(**inputs))


@contextmanager
def _watched(setup: Setup, model: Any, ledger: Ledger, sharding: Sharding) -> Iterator[None]:
    """Label gradients and activation checkpoints; offloaded checkpoints do not count."""
    handles: list[Any] = []

    def accumulated(weight: Any) -> None:
        if weight.grad is not None:  # None: the node before it returned no gradient.
            ledger.note(weight.grad, GRADIENTS)
            sharding.accumulated(weight)

    for weight in model.parameters():
        if weight.requires_grad:
            handles.append(weight.register_post_accumulate_grad_hook(accumulated))
    with ExitStack() as stack:
        for layer in layers(model):
            if layer.gradient_checkpointing:
                stack.enter_context(_checkpointed(layer, ledger, setup.checkpoint == "offload"))
        yield
    for handle in handles:
        handle.remove()


@contextmanager
def _checkpointed(layer: Any, ledger: Ledger, offloaded: bool) -> Iterator[None]:
    """Record the input of a layer, which is its checkpoint.

    An offloaded input leaves the device after the layer's forward pass, and returns when the backward pass reaches the
    next layer (liger_train/offloading.py).
    """
    checkpoint = getattr(layer, CHECKPOINT)

    def started(hidden: Tensor) -> None:
        number = ledger.note(hidden, CHECKPOINTS)
        if ledger.doing == BACKWARD:
            ledger.fetch(number)
            if ledger.away:
                ledger.fetch(next(reversed(ledger.away)))

    def watched(function: Any, *args: Any) -> Any:
        """Checkpoint a layer and record its input, without hooks: Transformers 5.23 recomputes a layer without them."""

        def run(*inputs: Any) -> Any:
            started(inputs[0] if inputs else function.keywords["hidden_states"])
            return function(*inputs)

        output = checkpoint(run, *args)
        if offloaded and ledger.doing == FORWARD:
            ledger.leave(args[0] if args else function.keywords["hidden_states"])
        return output

    setattr(layer, CHECKPOINT, watched)
    yield
    setattr(layer, CHECKPOINT, checkpoint)
