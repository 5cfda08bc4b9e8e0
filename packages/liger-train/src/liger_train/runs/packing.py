# SPDX-License-Identifier: Apache-2.0
"""Documents as sequences: one in each, or with --packing as many as fit, which must not affect each other."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from liger_train.errors import SetupError
from liger_train.runs.labels import MASKED, quiet_trl
from liger_train.setup import Setup

# The number of tokens whose loss is measured: a document has the most effect on the first tokens of the next.
FIRST = 8
# The share of that effect that rounding may cause, because experts and float8 scales mix the tokens of all documents.
ROUNDING = 0.05


def in_sequences(documents: list[Tensor], tokenizer: Any, setup: Setup) -> Tensor:
    """Return padded tokens and labels (number, 2, sequence); with --packing also positions (number, 3, sequence).

    A position is that of a token in its document. TRL packs the longest documents first, each into the sequence where
    it leaves the least space. Padding counts as a document.
    """
    if not documents:
        return torch.empty(0, 2 + setup.packing, setup.sequence, dtype=torch.long)
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    filling = torch.tensor([[padding], [MASKED]]).expand(2, setup.sequence)
    if not setup.packing:
        return torch.stack([torch.cat([document, filling], 1)[:, : setup.sequence] for document in documents])
    from datasets import Dataset
    from trl import pack_dataset

    columns = {name: [document[i].tolist() for document in documents] for i, name in enumerate(("input_ids", "labels"))}
    sequences: list[Tensor] = []
    with quiet_trl():
        for row in pack_dataset(Dataset.from_dict(columns), setup.sequence):
            lengths = (*row["seq_lengths"], setup.sequence - len(row["input_ids"]))
            positions = torch.cat([torch.arange(length) for length in lengths])
            whole = torch.cat([torch.tensor([row["input_ids"], row["labels"]]), filling], 1)[:, : setup.sequence]
            # The previous document must not predict the first token of a document.
            whole[1, positions == 0] = MASKED
            sequences.append(torch.cat([whole, positions[None]]))
    return torch.stack(sequences)


def check_documents_are_apart(
    model: nn.Module, loss: Callable[[dict[str, Tensor]], Any], inputs: dict[str, Tensor], name: str
) -> None:
    """Raise OptionError if a packed document changes the loss of the next one.

    For most models, Transformers makes a mask from positions. Some models make their own masks, and flash attention
    reads positions of a single sequence only, so this measures the effect. It rejects recurrent layers and convolutions
    without measuring, because their effect may be small before training. All ranks use the same tokens, so they agree.
    """
    recurrent = any(isinstance(layer, nn.Conv1d) or getattr(layer, "_is_stateful", False) for layer in model.modules())
    batch, length = inputs["input_ids"].shape
    index = torch.arange(length, device=inputs["input_ids"].device)
    half = length // 2
    tokens = index % 2
    labels = tokens.masked_fill((index <= half) | (index > half + FIRST), MASKED)

    def change(positions: Tensor) -> Tensor:
        rows = [
            {"input_ids": ids, "labels": labels, "position_ids": positions}
            for ids in (tokens, tokens.masked_fill(index < half, 0))
        ]
        loss_with, loss_without = (loss({name: value.repeat(batch, 1) for name, value in row.items()}) for row in rows)
        return torch.as_tensor(loss_with - loss_without).abs()

    if recurrent or "position_ids" not in inputs or change(index % half) > ROUNDING * change(index):
        raise SetupError(
            "--packing needs a model whose layers keep the documents of a sequence apart by their positions, "
            f"got {name}, in which one document changes the loss of the next; leave out --packing"
        )
