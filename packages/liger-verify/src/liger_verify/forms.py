# SPDX-License-Identifier: Apache-2.0
"""The forms in which `liger verify --packing` packs documents of a tiny model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from liger_verify.batches import IGNORED
from liger_verify.packing import Collator, PackingReport, compare_packing, flattened, random_documents
from liger_verify.training import Training
from liger_verify.world import World


def _masked(config: Any, documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Pack documents into one row with a block mask for each kind of attention."""
    batch = dict(flattened()(documents))
    document = (batch["position_ids"][0] == 0).cumsum(0)
    index = torch.arange(len(document))
    distance = index[:, None] - index

    def mask(window: int) -> Tensor:
        hidden = (document[:, None] != document) | (distance < 0) | (distance >= window)
        return torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.get_default_dtype()).min)[None, None]

    windows = {"full_attention": len(index), "sliding_attention": getattr(config, "sliding_window", None) or len(index)}
    kinds = {*(getattr(config, "layer_types", None) or ()), "full_attention"}
    masks = {kind: mask(windows[kind]) if kind in windows else None for kind in {*kinds, "linear_attention"}}
    return batch | {"attention_mask": masks if len(kinds) > 1 else masks["full_attention"]}


def _in_rows(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a padded row for each document."""
    longest = max(len(each["input_ids"]) for each in documents)

    def padded(name: str, filling: int) -> Tensor:
        return torch.tensor([each[name] + [filling] * (longest - len(each[name])) for each in documents])

    labels = padded("labels", IGNORED)
    return {"input_ids": padded("input_ids", 0), "labels": labels, "attention_mask": (labels != IGNORED).long()}


# Name → the collator for a model of this config. The name is that of the argument that separates documents.
FORMS: dict[str, Callable[[Any], Collator]] = {
    "position_ids": lambda config: flattened(),
    "cu_seq_lens": lambda config: flattened(return_flash_attn_kwargs=True, return_seq_idx=True),
    "mask": lambda config: partial(_masked, config),
    "rows": lambda config: _in_rows,
}


@dataclass(frozen=True)
class Packing:
    """A comparison of a tiny model, or of the checkpoint in a folder, with random documents.

    form  a key of FORMS
    """

    model: str = "llama"
    liger: bool = True
    form: str = "position_ids"
    sequence: int = 16
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.model}{' with Liger' if self.liger else ''} packed by {self.form}"

    def build(self) -> Any:
        """Return the model, which the forms share."""
        import liger_hf

        torch.manual_seed(self.seed)
        with TemporaryDirectory(prefix="liger-verify-") as folder:
            training = Training(self.model, seed=self.seed, options=self.options)
            model = training.build(World(0, 1, torch.float32, Path(folder)))
        if self.liger:
            liger_hf.apply(model)
        return model

    def report(self, model: Any, tolerance: float = 1e-7) -> PackingReport:
        """Compare a model's packed documents with the same documents alone."""
        collator = FORMS[self.form](model.config.get_text_config())
        return compare_packing(model, collator, random_documents(model, self.sequence, self.seed), tolerance=tolerance)


def packings(models: Sequence[str], liger: bool | None, sequence: int, seed: int) -> list[Packing]:
    """Return the comparisons of all models in all forms; None is with and without Liger."""
    cases = product(models, [False, True] if liger is None else [liger], FORMS)
    return [Packing(model, with_liger, form, sequence, seed) for model, with_liger, form in cases]
