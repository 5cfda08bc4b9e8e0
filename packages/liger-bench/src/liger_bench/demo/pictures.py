# SPDX-License-Identifier: Apache-2.0
"""The two pictures of the demo: the losses and the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

# Before pyplot, which would look for a display.
matplotlib.use("Agg")
import matplotlib.pyplot as plt

PLAIN, LIGER, OTHER = "#6b7280", "#d97706", "#9ca3af"


def draw(result: dict[str, Any], folder: Path) -> None:
    """Write loss.png and memory.png."""
    _loss(result, folder / "loss.png")
    _memory(result, folder / "memory.png")


def _loss(result: dict[str, Any], path: Path) -> None:
    plain, liger = result["losses_hf"], result["losses_liger"]
    steps = range(1, len(plain) + 1)
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, height_ratios=(3, 2), layout="constrained")
    figure.suptitle(f"The same training, plain and with Liger\n{_setting(result)}", fontsize=10)
    top.plot(steps, plain, color=PLAIN, linewidth=5, alpha=0.5, label="Transformers")
    top.plot(steps, liger, color=LIGER, linewidth=1.6, marker="o", markersize=3, label="with Liger")
    top.set_ylabel("loss (nats per token)")
    top.legend()
    bottom.plot(steps, _differences(plain, liger), color=LIGER, marker="o", markersize=3, label="with Liger")
    if result["losses_reordered"]:
        bottom.plot(
            steps, _differences(plain, result["losses_reordered"]), color=OTHER, marker="s", markersize=3, label="plain, sums reordered"
        )
    bottom.axhline(result["loss_difference_bound"], color="black", linestyle="--", linewidth=1, label="allowed")
    bottom.set_yscale("log")
    bottom.set_ylabel("|loss − plain loss|")
    bottom.set_xlabel("step")
    bottom.xaxis.get_major_locator().set_params(integer=True)
    bottom.legend()
    _finish(figure, (top, bottom), path)


def _differences(one: list[float], other: list[float]) -> list[float]:
    """What a logarithmic axis can show: equal losses are one float32 rounding apart."""
    return [max(abs(a - b), 1e-7) for a, b in zip(one, other, strict=True)]


def _memory(result: dict[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axes.set_title(f"Peak memory, plain and with Liger\n{_setting(result)}", fontsize=10)
    groups = {"head and loss alone": "peak_loss_memory", "whole training step": "peak_memory"}
    for offset, key, color, label in ((-0.19, "hf", PLAIN, "Transformers"), (0.19, "liger", LIGER, "with Liger")):
        values = [result[f"{name}_{key}_bytes"] / 2**20 for name in groups.values()]
        bars = axes.bar([place + offset for place in range(len(groups))], values, 0.36, color=color, label=label)
        axes.bar_label(bars, fmt="{:,.0f} MiB", padding=2, fontsize=9)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylabel("peak memory (MiB)")
    axes.margins(y=0.12)
    axes.legend()
    _finish(figure, (axes,), path)


def _setting(result: dict[str, Any]) -> str:
    size = f"{result['parameters'] / 1e6:,.0f} M parameters"
    return f"Llama of {size}, {result['batch']} × {result['sequence']} tokens a step, {result['dtype']}, {result['device']}"


def _finish(figure: Any, axes: tuple[Any, ...], path: Path) -> None:
    for each in axes:
        each.grid(axis="y", alpha=0.3)
        each.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
