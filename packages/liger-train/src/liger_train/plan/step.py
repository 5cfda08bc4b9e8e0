# SPDX-License-Identifier: Apache-2.0
"""Predict memory by one training step of the Transformers Trainer on fake tensors."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformers.trainer_pt_utils import LabelSmoother

from liger_core.errors import LigerError, OptionError
from liger_core.private_torch import DataDependentOutput, DynamicOutputShape, FakeTensorMode
from liger_hf.private_transformers import CHECKPOINT
from liger_train.checkpointing import layers
from liger_train.compiling import or_eagerly
from liger_train.configs import config_of
from liger_train.errors import release_frames
from liger_train.implementations import PEER
from liger_train.model import LOSS, LOW, adapter_note, build, on_meta
from liger_train.offloading import Offloading
from liger_train.plan import compiled, devices, parallel
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
from liger_train.plan.sharding import Sharding, optimizer_memory, quantized_weights, record_four_bits, sharding_of
from liger_train.row import FREE
from liger_train.setup import Setup
from liger_train.smoothing import factor_of, is_smoothed
from liger_train.techniques import chosen

CPU = torch.device("cpu")
# Options that do not affect memory, with the values of every prediction, so that predictions can be cached.
NEUTRAL: dict[str, Any] = {
    name: getattr(Setup, name) for name in (*FREE, "memory_limit", "data", "validation") if name != "trust_remote_code"
}
GRAPHS = "--compile graphs reserves more than its peak, since a CUDA graph has a memory pool of its own."
EAGER = "--compile: layers are planned in eager mode, since the compiler failed: {}"
AUTO = "This is the start of --checkpoint auto, which uses the free memory; with --memory-limit, plans show its end."
FORWARD, BACKWARD, UPDATE = "forward pass", "backward pass", "weight update"


@dataclass(frozen=True)
class Prediction:
    """The memory that one rank needs for a setup.

    peak_bytes    peak memory, as torch.cuda.max_memory_allocated reports it
    held          the peak by category
    doing         the phase of the step with the peak
    static_bytes  allocated between steps: weights, optimizer state, and remaining gradients
    notes         decisions made while building the model, one sentence each

    The numbers of parameters are those of the whole model.
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
    """The memory of a rank in a step, without the optimizer.

    peak, end   the memory at the peak, and when the weights are updated
    static      bytes allocated between steps
    weights     the trained weights
    parameters  the numbers of all parameters and of trained parameters of the whole model
    """

    peak: Moment
    end: Moment
    static: int
    weights: tuple[Weight, ...]
    parameters: tuple[int, int]
    notes: tuple[str, ...]


def predict(setup: Setup) -> Prediction:
    """Predict the memory of a run by a step of its actual model on fake tensors.

    Raises OptionError for unknown values, and for a model that reads the values of tensors.
    """
    chosen(setup)
    if setup.liger == PEER:
        raise OptionError(f"plan: --liger must be Liger's, got {PEER}, whose kernels cannot run on fake tensors")
    kind = OPTIMIZERS[setup.optimizer]
    # Every optimizer shares this step; the memory of the optimizer itself is added below.
    step = _step(replace(setup, optimizer="galore-layerwise" if kind.drops_gradients else "adamw", **NEUTRAL))
    return prediction_of(setup, step)


def prediction_of(setup: Setup, step: Step) -> Prediction:
    """Return the prediction of a step with the optimizer of the setup."""
    kind = OPTIMIZERS[setup.optimizer]
    state, workspace = optimizer_memory(setup, kind, step.weights)
    peak = max(step.peak, replace(step.end, held=_add_optimizer(step.end.held, workspace)), key=lambda each: each.total)
    return Prediction(
        setup,
        peak.total + state,
        {name: _add_optimizer(peak.held, state).get(name, 0) for name in CATEGORIES},
        peak.doing,
        step.static + state,
        *step.parameters,
        (*step.notes, GRAPHS) if setup.compile == "graphs" else step.notes,
    )


def forward_and_backward(setup: Setup) -> int:
    """Return the peak bytes of a step without optimizer state, which an earlier version measured (model.json)."""
    return _step(replace(setup, **NEUTRAL)).peak.total


def _add_optimizer(held: Mapping[str, int], size: int) -> dict[str, int]:
    return {**held, OPTIMIZER: held.get(OPTIMIZER, 0) + size}


@lru_cache(maxsize=256)
def _step(setup: Setup) -> Step:
    with as_option_error(setup):
        model, mode, notes = fake_model(setup)
        sharding = sharding_of(setup, model)
        ledger = ledger_of_a_step(setup, model, sharding, mode)
        if setup.shard == "zero3":
            # DeepSpeed prefetches from the second step on.
            ledger = ledger_of_a_step(setup, model, sharding, mode)
    return step_of(setup, model, ledger, tuple(notes))


def step_of(setup: Setup, model: Any, ledger: Ledger, notes: tuple[str, ...]) -> Step:
    """Return the memory that a ledger has of a step."""
    weights, counts = tuple(weights_of(model)), _counts(setup, model)
    return Step(ledger.peak(), ledger.end(), ledger.static, weights, counts, (*notes, *ledger.notes))


def _counts(setup: Setup, model: Any) -> tuple[int, int]:
    """Return the numbers of weights and of trained weights of the whole model."""
    if setup.tp > 1:
        model, *_ = fake_model(replace(setup, tp=1, liger="none"))
    weights = list(model.parameters())
    return sum(w.numel() for w in weights), sum(w.numel() for w in weights if w.requires_grad)


@contextmanager
def as_option_error(setup: Setup) -> Iterator[None]:
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
        release_frames(problem)
        # From None: tensors in a traceback that outlives the mode crash the interpreter at its end.
        raise OptionError(
            f"plan: the model must be able to take a step on fake tensors, but {setup.model} is not: {reason}; "
            "to measure its memory, run `liger train`"
        ) from None


def ledger_of_a_step(
    setup: Setup, model: Any, sharding: Sharding, mode: Any, kind: type[Ledger] = Ledger, **fields: Any
) -> Ledger:
    """Return a ledger of this kind after a step; `fields` are set on it before the step."""
    reasons: list[str] = []
    step = partial(_ledger_of_a_step, setup, model, sharding, mode, kind, fields)
    ledger = or_eagerly(step, model, reasons.append)
    ledger.notes.extend(EAGER.format(reason.rstrip(".")) for reason in reasons)
    return ledger


def _ledger_of_a_step(
    setup: Setup, model: Any, sharding: Sharding, mode: Any, kind: type[Ledger], fields: Mapping[str, Any]
) -> Ledger:
    # Logits are recognized by their last dimension: the vocabulary size, or its shard.
    sizes = {config_of(setup).get_text_config().vocab_size, model.get_output_embeddings().weight.shape[0]}
    ledger = kind(
        partial(devices.replace, setup.device),
        partial(devices.workspace, setup.device),
        lambda tensor: LOGITS if tensor.dim() > 1 and tensor.shape[-1] in sizes else None,
    )
    vars(ledger).update(fields)
    written_out = devices.attention_is_written_out(
        setup.device, LOW.get(setup.precision, torch.float32), model.config.get_text_config()
    )
    with (
        mode,
        devices.emulating(setup.device, written_out=written_out, packed=setup.packing) as notes,
        nullcontext() if setup.compile == "none" else compiled.session(setup.packing),
        parallel.attention_of_ranks(setup),
        ledger,
    ):
        take_step(setup, model, ledger, sharding)
    ledger.notes.extend(notes if setup.liger != "none" else [])
    return ledger


def fake_model(setup: Setup) -> tuple[Any, Any, list[str]]:
    """Build the model of a setup on fake tensors; return it, the mode of the tensors, and notes."""
    # Fake tensors cannot be quantized to 4 bits, offloaded or merged, so the first two are modeled separately.
    simple = replace(setup, device="cpu")
    if setup.compile == "graphs":
        simple = replace(simple, compile="default")
    if setup.shard == "fsdp2" and setup.precision in LOW:
        # Weights are gathered in the dtype of activations, which is the one of weights in pure precision.
        pure = f"{setup.precision.removesuffix('-pure')}-pure"
        simple = replace(simple, precision=pure if pure in LOW else "bf16-pure")
    whole, mode = on_meta(simple), FakeTensorMode(allow_non_fake_inputs=True)
    # Building a model seeds the generators.
    with torch.random.fork_rng(devices=[]), mode:
        built = build(
            simple,
            CPU,
            load=lambda setup, device, _: _shard_of(whole, setup, device),
            adapters=_adapted,
            to_float8=lambda model, _, notes: in_float8(model, setup, notes),
            compile_layers=lambda model, within: compiled.compile_layers(model, within and setup.compile == "default"),
        )
        if setup.tp > 1:
            classes = config_of(setup).get_text_config().vocab_size
            parallel.share_vocabulary(built.model, setup, classes, LOSS in built.replaced)
    return built.model, mode, built.notes + ([AUTO] if setup.checkpoint == "auto" else [])


def _shard_of(model: Any, setup: Setup, device: torch.device) -> Any:
    model.to_empty(device=device)
    model.tie_weights()
    if setup.tp > 1:
        parallel.shard(model, setup)
    return model


def _adapted(model: Any, setup: Setup, notes: list[str]) -> Any:
    model = adapted(model, setup, notes)
    if setup.adapter == "qlora":
        notes[-1] = adapter_note(model, setup, set(map(id, quantized_weights(model))))
    return model


def take_step(setup: Setup, model: Any, ledger: Ledger, sharding: Sharding) -> None:
    """Take a step after the first one, when the optimizer has its state."""
    for weight in [*model.parameters(), *model.buffers()]:
        ledger.record(weight, WEIGHTS)
    if setup.adapter == "qlora":
        ledger.dequantized = record_four_bits(model, ledger)
    sharding.enter(model, ledger)
    ledger.begin()
    # A graph is recorded on a stream of its own, with its own workspaces.
    ledger.allocate(devices.WORKSPACES[setup.device] * (2 if setup.compile == "graphs" else 1), OTHER)
    with _labels(model, ledger, sharding):
        for _ in range(min(2, setup.accumulation)):
            tokens = torch.zeros(setup.batch, setup.sequence // setup.cp, dtype=torch.long)
            ledger.doing = FORWARD
            loss = _loss(setup, model, tokens)
            for number in ledger.allocated() - ledger.labels.keys():
                ledger.labels[number] = ACTIVATIONS
            ledger.doing = BACKWARD
            loss.backward()
            del loss
            sharding.completed()
        ledger.doing = UPDATE


def _loss(setup: Setup, model: Any, tokens: Tensor) -> Tensor:
    """Compute the loss like Trainer.compute_loss with accelerate's forward; other outputs are freed on return."""
    inputs = {"input_ids": tokens, "labels": tokens, "num_items_in_batch": torch.zeros((), dtype=torch.long)}
    if setup.cp > 1:
        inputs |= {"shift_labels": torch.zeros_like(tokens)}
    if setup.cp > 1 or setup.packing:
        inputs |= {"position_ids": torch.zeros_like(tokens)}
    factor = factor_of(setup)
    smoother = LabelSmoother(factor) if factor and not is_smoothed(model) else None
    labels = inputs.pop("labels") if smoother else tokens

    def loss_of(outputs: Any) -> Tensor:
        return smoother(outputs, labels, shift_labels=True, num_items_in_batch=1) if smoother else outputs.loss

    if not setup.mixed or setup.shard != "none":
        return loss_of(model(**inputs))

    def forward(**arguments: Any) -> Any:
        with torch.autocast("cpu", dtype=LOW[setup.precision]):
            return model(**arguments)

    return loss_of(convert_outputs_to_fp32(forward)(**inputs))


@contextmanager
def _labels(model: Any, ledger: Ledger, sharding: Sharding) -> Iterator[None]:
    """Label gradients and activation checkpoints within this context, and record offloaded checkpoints."""

    def accumulated(weight: Any) -> None:
        if weight.grad is not None:  # None: its backward node returned no gradient.
            ledger.record(weight.grad, GRADIENTS)
            sharding.accumulated(weight)

    with ExitStack() as stack:
        for weight in model.parameters():
            if weight.requires_grad:
                stack.callback(weight.register_post_accumulate_grad_hook(accumulated).remove)
        for layer in layers(model):
            if layer.gradient_checkpointing:
                stack.enter_context(_recorded_checkpoint(layer, ledger))
        yield


@contextmanager
def _recorded_checkpoint(layer: Any, ledger: Ledger) -> Iterator[None]:
    """Record the input of a layer, which is its activation checkpoint.

    An offloaded input leaves the device after the layer's forward pass, and is fetched when the backward pass reaches
    the next layer (liger_train/offloading.py).
    """
    before = getattr(layer, CHECKPOINT)
    offloaded = isinstance(before, Offloading)
    # Fake tensors cannot be copied to the host.
    checkpoint = partial(torch_checkpoint, use_reentrant=False) if offloaded else before

    def layer_starts(hidden: Tensor) -> None:
        number = ledger.record(hidden, CHECKPOINTS)
        if ledger.doing == BACKWARD:
            ledger.fetch(number)
            if ledger.offloaded:
                ledger.fetch(next(reversed(ledger.offloaded)))

    def recorded(function: Any, *args: Any) -> Any:
        """Checkpoint a layer and record its input, without hooks, since Transformers 5.23 recomputes without hooks."""

        def run(*inputs: Any) -> Any:
            layer_starts(inputs[0] if inputs else function.keywords["hidden_states"])
            return function(*inputs)

        output = checkpoint(run, *args)
        if offloaded and ledger.doing == FORWARD:
            ledger.offload(args[0] if args else function.keywords["hidden_states"])
        return output

    setattr(layer, CHECKPOINT, recorded)
    yield
    setattr(layer, CHECKPOINT, before)
