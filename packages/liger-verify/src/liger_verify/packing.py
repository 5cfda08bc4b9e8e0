# SPDX-License-Identifier: Apache-2.0
"""Compare documents packed into one batch with the same documents alone: losses, hidden states and gradients."""

import contextlib
import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from liger_core.errors import OptionError
from liger_hf.isolation import DoublePrecision
from liger_verify.batches import IGNORED
from liger_verify.comparison import measure, report_of
from liger_verify.report import Report
from liger_verify.tiny import one_line

# A module and the number of its call.
Call = tuple[str, int]
# Call → its first input and its first output, in the order in which calls end.
Calls = dict[Call, tuple[Tensor | None, Tensor | None]]
# Documents as dictionaries with input_ids and labels → arguments of the model, with input_ids and labels.
Collator = Callable[[list[dict[str, Any]]], Mapping[str, Any]]


class Location(NamedTuple):
    """The tokens of a document in a batch of (rows, length)."""

    row: int
    start: int
    stop: int

    def of(self, whole: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
        """Return the tokens of the document as (tokens, …), or None if the tensor of the batch has none."""
        rows, length = shape
        if whole is None:
            return None
        if whole.shape[:2] == shape:
            return whole[self.row, self.start : self.stop]
        if whole.ndim and whole.shape[0] == rows * length:
            return whole[self.row * length + self.start : self.row * length + self.stop]
        if whole.ndim == 3 and (whole.shape[0], whole.shape[2]) == shape:
            return whole[self.row, :, self.start : self.stop].T
        return None


@dataclass(frozen=True)
class PackingReport:
    """The result of `compare_packing`: `right` if nothing differs, and `str(report)` has the cause in sentences.

    alone      the loss of each document by itself
    packed     the loss of each document in the packed batch
    layers     layer → relative error of its hidden states, in the order of the forward pass
    gradients  the comparison of each parameter's gradient, summed over documents
    causes     sentences on the first module that differs and on the arguments of the model
    """

    alone: list[float]
    packed: list[float]
    layers: dict[str, float]
    gradients: Report
    tolerance: float
    causes: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return (
            not (self.wrong_losses or self.gradients.wrong) and max(self.layers.values(), default=0) <= self.tolerance
        )

    @property
    def wrong_losses(self) -> list[int]:
        """The documents whose loss differs."""
        pairs = enumerate(zip(self.alone, self.packed, strict=True))
        return [i for i, (alone, packed) in pairs if not abs(packed - alone) <= self.tolerance * max(abs(alone), 1e-3)]

    @property
    def largest_error(self) -> float:
        """The largest relative error of a hidden state or gradient."""
        return max(self.gradients.largest_error, *self.layers.values(), 0.0)

    def sentences(self) -> list[str]:
        """Return sentences on the differences and their cause."""
        losses = [
            f"the loss of document {i} is {self.packed[i]:.6f}, alone {self.alone[i]:.6f}" for i in self.wrong_losses
        ]
        return self.causes + losses or self.gradients.sentences()

    def __str__(self) -> str:
        right = (
            f"{len(self.alone)} documents have the losses, the hidden states of {len(self.layers)} layers and the "
            f"gradients that they have alone (largest relative error {self.largest_error:.1e})"
        )
        return ("right: " if self.right else "wrong: ") + "\n       ".join([right] if self.right else self.sentences())

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary, for --json."""
        return {
            "right": self.right,
            "tolerance": self.tolerance,
            "sentences": self.sentences(),
            "losses": [{"alone": a, "packed": p} for a, p in zip(self.alone, self.packed, strict=True)],
            "layers": self.layers,
            "gradients": {d.name: d.error for d in self.gradients.differences},
        }


def compare_packing(
    model: Any,
    collator: Collator | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    *,
    tolerance: float = 1e-7,
) -> PackingReport:
    """Run documents alone and as a collator packs them, in float64 on the CPU, and report where they differ.

    model      a causal model whose forward takes what the collator returns, and returns a loss; a copy of it runs
    collator   list of documents → arguments of the model; by default DataCollatorWithFlattening of Transformers. Every
               document must be whole in its input_ids
    documents  dictionaries with input_ids, and labels where they differ from input_ids; by default three random ones
    tolerance  relative error that passes; in float64 round-off is about 1e-12
    returns    `PackingReport`; `report.right` if nothing differs, and `print(report)` names the layer and the cause

    Raises OptionError for a loss that fails or is random, and for a document that the collator cuts.
    """
    model = copy.deepcopy(model).to("cpu", torch.float64)
    if hasattr(model, "config"):
        # With a cache, Transformers makes no mask from position_ids; its Trainer turns the cache off, too.
        model.config.get_text_config().use_cache = False
    lists = [
        {name: torch.as_tensor(each.get(name, each["input_ids"])).tolist() for name in ("input_ids", "labels")}
        for each in documents or random_documents(model)
    ]
    with DoublePrecision():
        return _Comparison(model, lists, collator or flattened()).report(tolerance)


def random_documents(model: Any, longest: int = 16, seed: int = 0) -> list[dict[str, list[int]]]:
    """Return three documents of random tokens, of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    lengths = (longest - 3, longest, longest - 5)
    return [{"input_ids": torch.randint(3, vocabulary, (n,), generator=generator).tolist()} for n in lengths]


def flattened(**options: Any) -> Collator:
    """Return the collator of Transformers that packs documents into one row."""
    from transformers import DataCollatorWithFlattening

    return DataCollatorWithFlattening(**options)


class _Comparison:
    """The runs of a model on documents alone, and on the batch of a collator."""

    def __init__(self, model: nn.Module, documents: list[dict[str, list[int]]], collator: Collator) -> None:
        self.model = model
        self.documents = documents
        self.batch = dict(collator(copy.deepcopy(documents)))
        self.locations = self._locations()

    def report(self, tolerance: float) -> PackingReport:
        self.tolerance = tolerance
        packed = []
        self.alone: list[Calls] = []
        alone = [self._run_alone(document) for document in self.documents]
        gradients_alone = self._gradients()
        for location in self.locations:
            loss, self.packed = self._run(self._with_labels_of(location), self.locations)
            packed.append(loss)
        sums = {name: measure(gradient, gradients_alone[name]) for name, gradient in self._gradients().items()}
        # The sum over one rank.
        measured = {
            name: {**each, **{f"sum {key}": value for key, value in each.items()}} for name, each in sums.items()
        }
        truth = {"loss": math.fsum(alone), "gradients": gradients_alone}
        gradients = report_of(truth, [{"loss": math.fsum(packed), "gradients": measured}], {"ranks": 1}, tolerance)
        names = _layers(self.model)
        layers = {call: self._error(call) for call in self.packed[0] if call[0] in names}
        errors = {name + f" (call {number + 1})" * bool(number): error for (name, number), error in layers.items()}
        report = PackingReport(alone, packed, errors, gradients, tolerance)
        return report if report.right else dataclasses.replace(report, causes=self._causes(layers))

    def _locations(self) -> list[Location]:
        ids = self.batch["input_ids"]
        locations: list[Location] = []
        for number, document in enumerate(self.documents):
            tokens = torch.tensor(document["input_ids"])
            count = len(tokens)
            matches = (ids.unfold(1, count, 1) == tokens).all(-1).nonzero().tolist() if count <= ids.shape[1] else []
            free = [
                Location(row, start, start + count)
                for row, start in matches
                if all(row != other.row or start >= other.stop or other.start >= start + count for other in locations)
            ]
            if not free:
                raise OptionError(
                    "compare_packing: input_ids of the collator must have every document whole in one row, document "
                    f"{number} of {count} tokens is not in {tuple(ids.shape)}; raise the length of the rows"
                )
            locations.append(free[0])
        return locations

    def _run_alone(self, document: dict[str, list[int]]) -> float:
        """Run a document and return its loss; raise OptionError if it fails, is not finite or is random."""
        single = {name: torch.tensor([values]) for name, values in document.items()}
        try:
            with torch.no_grad():
                loss_before = float(self.model(**single).loss)
        except Exception as error:
            raise OptionError(
                f"compare_packing: the model must compute a loss from input_ids and labels, it raised {one_line(error)}"
            ) from error
        loss, calls = self._run(single, [Location(0, 0, len(document["input_ids"]))])
        if not math.isclose(loss, loss_before, rel_tol=1e-9):
            raise OptionError(
                "compare_packing: the loss of a document must be finite and not random, two runs gave "
                f"{loss_before:.6f} and {loss:.6f}; label two tokens of every document, and turn dropout off"
            )
        self.alone += calls
        return loss

    def _run(self, batch: Mapping[str, Any], locations: list[Location]) -> tuple[float, list[Calls]]:
        """Return the loss of a batch and the calls of each document; gradients add up over runs."""
        calls: Calls = {}
        counts = Counter[str]()

        def record(name: str, _: nn.Module, args: Any, options: Any, output: Any) -> None:
            calls[name, counts[name]] = _first((args, options)), _first(output)
            counts[name] += 1

        with contextlib.ExitStack() as stack:
            for name, module in self.model.named_modules():
                stack.enter_context(module.register_forward_hook(partial(record, name), with_kwargs=True))
            loss = self.model(**batch).loss
        loss.backward()
        shape = tuple(batch["input_ids"].shape)
        return loss.item(), [
            {call: (at.of(before, shape), at.of(after, shape)) for call, (before, after) in calls.items()}
            for at in locations
        ]

    def _gradients(self) -> dict[str, Tensor | None]:
        """Return the gradients since the last call."""
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.requires_grad}
        self.model.zero_grad(set_to_none=True)
        return gradients

    def _with_labels_of(self, location: Location) -> dict[str, Any]:
        """Return the batch with the labels of one document."""
        batch, (row, start, stop) = dict(self.batch), location
        for name in {"labels", "shift_labels"} & batch.keys():
            batch[name] = torch.full_like(self.batch[name], IGNORED)
            batch[name][row, start:stop] = self.batch[name][row, start:stop]
        return batch

    def _error(self, call: Call, side: int = 1) -> float:
        """Return the largest error of a token in the first input (0) or output (1) of a call."""
        return max(float(_apart(*pair, call, side).max()) for pair in zip(self.packed, self.alone, strict=True))

    def _causes(self, layers: dict[Call, float]) -> list[str]:
        wrong = next((call for call, error in layers.items() if not error <= self.tolerance), None)
        if wrong is None:
            return self._label_causes()
        calls = list(self.packed[0])
        if self._error(wrong, 0) <= self.tolerance:
            calls = [call for call in calls if f"{call[0]}.".startswith(f"{wrong[0]}.")]
        else:
            calls = calls[: calls.index(wrong)]
        # The first module that turns a right input into a wrong output.
        causes = (c for c in calls if not self._error(c) <= self.tolerance and self._error(c, 0) <= self.tolerance)
        return [self._module_cause(next(causes, wrong)), *self._boundary_causes()]

    def _module_cause(self, call: Call) -> str:
        """Return a sentence on a module: it depends on other documents, or computes a document differently."""
        from liger_hf.recurrent import keeps_a_state

        module = self.model.get_submodule(call[0])
        apart = [_apart(*pair, call, 1) for pair in zip(self.packed, self.alone, strict=True)]
        i = next(i for i, errors in enumerate(apart) if not errors.max() <= self.tolerance)
        row, start, stop = self.locations[i]
        # Every token outside the document becomes the next token of the batch's vocabulary.
        vocabulary, number = self.batch["input_ids"].unique(return_inverse=True)
        ids = vocabulary[(number + 1) % len(vocabulary)]
        ids[row, start:stop] = self.batch["input_ids"][row, start:stop]
        _, changed = self._run(self._with_labels_of(self.locations[i]) | {"input_ids": ids}, self.locations)
        reached = ~(_apart(changed[i], self.packed[i], call, 1) <= self.tolerance)
        who = f"{call[0]} ({type(module).__name__})"
        if not reached.any():
            first = int((~(apart[i] <= self.tolerance)).nonzero()[0])
            return (
                f"{who} computes document {i} differently from its token {first} on, and no other document changes it: "
                "its positions are wrong, or it is cut"
            )
        last = int(reached.nonzero()[-1]) + 1
        kernel = max((conv.kernel_size[0] for conv in module.modules() if isinstance(conv, nn.Conv1d)), default=0)
        if last < min(kernel, len(reached)):
            return (
                f"{who} convolves over a document boundary: other documents change the first {last} tokens of "
                f"document {i}"
            )
        attends = "attention" in type(module).__name__.lower() and not keeps_a_state(type(module))
        return f"{who} {'attends' if attends else 'carries state'} over a document boundary, to document {i}"

    def _boundary_causes(self) -> list[str]:
        """Return sentences on arguments whose boundaries are not those of the documents."""
        starts: dict[str, Tensor] = {}
        rows, length = self.batch["input_ids"].shape
        if "position_ids" in self.batch:
            # M-RoPE has several rows of positions; the first one is time.
            positions = self.batch["position_ids"].reshape(-1, length)[:rows].flatten()
            starts["position_ids"] = 1 + (positions.diff() != 1).nonzero().flatten()
        if "seq_idx" in self.batch:
            starts["seq_idx"] = 1 + self.batch["seq_idx"].flatten().diff().nonzero().flatten()
        if "cu_seq_lens_q" in self.batch:
            starts["cu_seq_lens_q"] = self.batch["cu_seq_lens_q"].long()
        causes = []
        for name, values in starts.items():
            for i, (row, start, stop) in enumerate(self.locations):
                begin = row * length + start
                inside = [int(value) - begin for value in values if begin < value < begin + stop - start]
                if inside:
                    causes.append(f"{name} begins a document at token {inside[0]} of document {i}")
                elif start and begin not in values:
                    causes.append(f"{name} does not begin a document at the first token of document {i}")
        return causes

    def _label_causes(self) -> list[str]:
        """Return a sentence on labels of the first token of a document, which only another document could predict."""
        if "shift_labels" in self.batch:
            return []
        labels = [int(self.batch["labels"][row, start]) if start else IGNORED for row, start, _ in self.locations]
        return [
            f"labels must be {IGNORED} at the first token of document {i}, which the last token of another document "
            f"predicts, got {label}"
            for i, label in enumerate(labels)
            if label != IGNORED
        ][:1]


def _apart(calls: Calls, others: Calls, call: Call, side: int) -> Tensor:
    """Return the error of each token relative to the largest value.

    If the tensors cannot be compared, an input (0) counts as wrong and an output (1) as right: no module is blamed.
    """
    value, other = (each.get(call, (None, None))[side] for each in (calls, others))
    if value is None or other is None or value.shape != other.shape:
        return torch.tensor([0.0 if side else math.inf])
    errors = (value.double() - other.double()).abs().flatten(1).amax(1) if value.ndim > 1 else (value - other).abs()
    return (errors / other.abs().max().clamp(min=1e-30)).nan_to_num(math.inf)


def _first(values: Any) -> Tensor | None:
    """Return a copy of the first tensor of a module's inputs or outputs; deferred logits have none."""
    return next((leaf.detach().clone() for leaf in tree_leaves(values) if type(leaf) in (Tensor, nn.Parameter)), None)


def _layers(model: nn.Module) -> set[str]:
    """Return the names of the modules in the outermost lists of modules, or of all children if there are none."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    names = {f"{name}.{number}" for name in outer for number, _ in model.get_submodule(name).named_children()}
    return names or {name for name, _ in model.named_children()}
