# SPDX-License-Identifier: Apache-2.0
"""The two pictures of the demo: the losses and the memory."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from liger_bench.op_pictures import finish
from liger_bench.printing import amount, change, size
from liger_hf.presets import preset_name

PLAIN, LIGER, OTHER = "#6b7280", "#d97706", "#9ca3af"
GIB = 1 << 30


def draw(result: dict[str, Any], folder: Path) -> None:
    """Write loss.png and memory.png."""
    _loss(result, folder / "loss.png")
    _memory(result, folder / "memory.png")


def _loss(result: dict[str, Any], path: Path) -> None:
    plain, liger = result["losses_hf"], result["losses_liger"]
    steps = range(1, len(plain) + 1)
    figure = Figure(figsize=(7, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    figure.suptitle(f"Loss with and without Liger, same data and seed\n{_setting(result)}", fontsize=10)
    top.plot(steps, plain, color=PLAIN, linewidth=5, alpha=0.5, label="Transformers")
    top.plot(steps, liger, color=LIGER, linewidth=1.6, marker="o", markersize=3, label="with Liger")
    top.set_ylabel("loss (nats per token)")
    top.legend()
    for losses, color, marker, label in (
        (liger, LIGER, "o", "with Liger"),
        (result["losses_reordered"], OTHER, "s", "Transformers, sums reordered"),
    ):
        if losses:
            # 1e-7 stands for 0, which a logarithmic axis cannot show.
            differences = [max(abs(a - b), 1e-7) for a, b in zip(plain, losses, strict=True)]
            bottom.plot(steps, differences, color=color, marker=marker, markersize=3, label=label)
    bottom.axhline(result["loss_difference_bound"], color="black", linestyle="--", linewidth=1, label="allowed")
    bottom.set_yscale("log")
    bottom.set_ylabel("|difference from Transformers|\n(0 is drawn as 1e-7)")
    bottom.set_xlabel("step")
    bottom.xaxis.get_major_locator().set_params(integer=True)
    bottom.legend()
    finish(figure, (top, bottom), path)


def _memory(result: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    figure.suptitle(f"Peak memory with and without Liger\n{_setting(result)}", fontsize=10)
    groups = {"LM head and loss only": "peak_loss_memory", "whole training step": "peak_memory"}
    hf, liger = ([result[f"{name}_{key}_bytes"] / GIB for name in groups.values()] for key in ("hf", "liger"))
    saved = [f"{size(value * GIB)}\n{change(value, baseline)}" for baseline, value in zip(hf, liger, strict=True)]
    for offset, values, color, label, words in (
        (-0.19, hf, PLAIN, "Transformers", [size(value * GIB) for value in hf]),
        (0.19, liger, LIGER, "with Liger", saved),
    ):
        bars = axes.bar([index + offset for index in range(len(groups))], values, 0.36, color=color, label=label)
        axes.bar_label(bars, words, padding=2, fontsize=10, fontweight="bold")
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylabel("peak memory (GiB)")
    axes.margins(y=0.15)
    # Outside the axes, so that it covers no bar.
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    finish(figure, (axes,), path)


def _setting(result: dict[str, Any]) -> str:
    model = f"{preset_name(result['model'])} ({amount(result['parameters'])} parameters)"
    where = result["machine"].split(";")[0].split(",")[0]
    return f"{model}, {result['batch']} × {result['sequence']} tokens per step, {result['dtype']}, {where}"
