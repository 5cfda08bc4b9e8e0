# SPDX-License-Identifier: Apache-2.0
"""`liger train --snapshot` and `--profile`: memory over time by category, and a trace."""

import gzip
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from matplotlib import image

from liger_core.errors import OptionError
from liger_train.options import RunOptions
from liger_train.report.timelines import COLORS, _last_step, pictured_runs, read_timelines
from liger_train.runs.launch import observers
from liger_train.runs.profile import kernel_times
from liger_train.setup import Setup
from liger_train.timeline import (
    CATEGORIES,
    CHECKPOINTS,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    OTHER,
    WEIGHTS,
    Event,
    Tag,
    logits_sizes,
    timeline,
)

# A text that is always here and quickly read.
TEXT = __file__
# More words than any other size of the model: tokens, hidden, intermediate, of all heads.
BATCH, SEQUENCE, VOCABULARY, HIDDEN, LAYERS = 4, 64, 32_000, 64, 2
LOGITS_BYTES = BATCH * SEQUENCE * VOCABULARY * 4


def trained(setup: Setup, folder: Path, **recorded: bool) -> None:
    """A run that is recorded."""
    from liger_train.runs.run import run

    with ExitStack() as stack:
        row = run(setup, observers=observers(setup, RunOptions(out=folder, **recorded), stack))
    assert not row.failed, row.reason
    if setup.device == "cpu":
        assert row.peak_bytes is None
        assert "Peak memory was not measured: --snapshot and --profile need the same profiler." in (row.notes or [])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("snapshots")


@pytest.fixture(scope="module")
def snapshots(folder: Path) -> dict[str, dict[str, Any]]:
    """By strategy, the timeline of a tiny run with checkpointing."""
    for liger in ("none", "all"):
        setup = Setup("tiny", BATCH, SEQUENCE, TEXT, device="cpu", precision="fp32", steps=3, liger=liger)
        trained(setup, folder, snapshot=True)
    return {record["setup"]["liger"]: record for record in read_timelines([folder])}


@pytest.mark.slow
def test_the_baseline_loss_has_three_copies_of_the_logits_and_the_fused_loss_has_less(
    snapshots: dict[str, dict[str, Any]],
) -> None:
    assert snapshots["none"]["peak"][LOGITS] == pytest.approx(3 * LOGITS_BYTES, rel=0.01)
    assert 0 < max(snapshots["all"]["bytes"][LOGITS]) < 2.9 * LOGITS_BYTES


@pytest.mark.parametrize("liger", ["none", "all"])
def test_the_rest_is_as_large_as_the_parameters_and_the_inputs_of_layers(
    snapshots: dict[str, dict[str, Any]], liger: str
) -> None:
    found, parameters = snapshots[liger]["bytes"], 2_121_920
    # Rotary tables are weights that are not trained.
    assert found[WEIGHTS][0] == pytest.approx(4 * parameters, rel=0.01)
    # Words and head are one matrix, with a gradient each until these are added.
    assert 4 * parameters <= max(found[GRADIENTS]) <= 4.1 * (parameters + 2 * VOCABULARY * HIDDEN)
    assert found[OPTIMIZER][-1] == pytest.approx(8 * parameters, rel=0.01)
    assert max(found[CHECKPOINTS]) == BATCH * SEQUENCE * HIDDEN * 4 * LAYERS


def test_a_timeline_has_the_second_and_third_step(snapshots: dict[str, dict[str, Any]]) -> None:
    for record in snapshots.values():
        assert record["steps"][0] == 0.0
        assert len(record["steps"]) == 2
        assert record["milliseconds"] == sorted(record["milliseconds"])
        assert {len(values) for values in record["bytes"].values()} == {len(record["milliseconds"])}


def test_a_snapshot_has_a_picture_with_its_categories(snapshots: dict[str, dict[str, Any]], folder: Path) -> None:
    picture = image.imread(folder / "snapshots" / "tiny-4x64-none-fp32.png")
    for category in (LOGITS, OPTIMIZER, WEIGHTS):
        wanted = [int(COLORS[category][place : place + 2], 16) / 255 for place in (1, 3, 5)]
        assert abs(picture[..., :3] - wanted).sum(-1).min() < 0.02


def test_the_strategies_of_a_run_are_side_by_side_with_the_baseline_first(snapshots: dict[str, dict[str, Any]]) -> None:
    found = pictured_runs(list(snapshots.values()))
    assert [[record["setup"]["liger"] for record in group] for group in found.values()] == [["none", "all"]]


def test_a_profile_is_a_trace_of_two_steps(tmp_path: Path) -> None:
    setup = Setup("tiny", 1, 16, TEXT, device="cpu", precision="fp32", checkpoint="none", steps=4)
    trained(setup, tmp_path, profile=True)
    (path,) = (tmp_path / "profiles" / "tiny-1x16-all-fp32-checkpoint-none").glob("*.pt.trace.json.gz")
    names = [event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
    assert sum(name.startswith("Optimizer.step#") for name in names) == 2


def test_the_kind_of_a_kernel_follows_from_its_name() -> None:
    names = {
        "attention": [
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0",
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, cutlass::bfloat16_t>>(Flash_fwd_params)",
        ],
        "matmuls": [
            "nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT",
            "_ZN7cutlass13device_kernelIN2at4cuda6detail25enable_3x_kernel_for_sm9xINS_4gemm6kernel13GemmUniversalE",
        ],
        "communication": ["ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"],
        "4 bits": ["void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>(float*, unsigned char*, float*, int, int)"],
        "Inductor": ["triton_poi_fused__to_copy_view_0"],
        "fused ops": ["forward_kernel", "_layer_norm_forward_kernel"],
        "PyTorch": [
            "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>(int)",
            "Memset (Device)",
        ],
    }
    for kind, kernels in names.items():
        assert kernel_times((name, 0.5) for name in kernels) == {kind: 0.5 * len(kernels)}, kind


def test_a_broken_timeline_is_named(tmp_path: Path) -> None:
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "cut.json").write_text('{"setup": {')
    with pytest.raises(OptionError, match=r"cut\.json must be a timeline"):
        read_timelines([tmp_path])


def test_a_tag_counts_for_the_block_that_lives_at_its_time() -> None:
    # Memory at address 1 is taken twice, first for a checkpoint, then for something else.
    events = [Event(10, 1, 100), Event(20, 1, -100), Event(30, 1, 7), Event(40, 1, -7)]
    tags = [Tag(11, 1, CHECKPOINTS), Tag(5, 2, WEIGHTS)]
    found = timeline({2: 1000}, events, tags)
    assert max(found.bytes[CHECKPOINTS]) == 100
    assert max(found.bytes[OTHER]) == 7
    assert set(found.bytes[WEIGHTS]) == {1000}
    assert found.peak == dict.fromkeys(CATEGORIES, 0) | {WEIGHTS: 1000, CHECKPOINTS: 100}
    # It may begin later, with what was held then.
    found = timeline({2: 1000}, events, tags, steps=[0, 15, 35], start=15)
    assert found.totals[0] == 1100
    assert found.steps == [0.0, 0.02]


def test_thinning_points_loses_no_peak() -> None:
    events = [Event(time, time % 50, 10 if time % 100 < 50 else -10) for time in range(20_000)]
    events += [Event(7_777.5, 99, 12_345), Event(7_777.6, 99, -12_345)]
    found = timeline({}, events, [])
    assert max(found.totals) == 12_345 + 10 * 22
    assert len(found.totals) <= 1001


# As many tokens as the head is wide are logits unless the loss is fused.
@pytest.mark.parametrize(
    ("tokens", "size", "category"),
    [
        (256, 4 * VOCABULARY * 256, LOGITS), (256, 2 * VOCABULARY * 7, LOGITS), (256, 4 * 256 * HIDDEN, None),
        (256, 2 * VOCABULARY * HIDDEN, GRADIENTS), (256, 4 * VOCABULARY * 256 + 600, None),
        (HIDDEN, 4 * VOCABULARY * HIDDEN, LOGITS), (None, 4 * VOCABULARY * HIDDEN, GRADIENTS),
    ],
)  # fmt: skip
def test_logits_are_recognized_by_their_size(tokens: int | None, size: int, category: str | None) -> None:
    assert logits_sizes(VOCABULARY, HIDDEN, tokens)(size, 0.0) == category


def test_the_events_of_a_gpu_show_the_memory_before_them_and_the_failed_allocation() -> None:
    from liger_train.runs.snapshot import from_snapshot

    def entry(action: str, address: int, size: int, time: int) -> dict[str, Any]:
        return {"action": action, "addr": address, "size": size, "time_us": time}

    trace = [
        entry("segment_alloc", 0, 4096, 1), entry("alloc", 512, 100, 2), entry("free_requested", 1024, 300, 3),
        entry("free_completed", 1024, 300, 3), entry("oom", 2048, 9000, 4), entry("free_requested", 512, 100, 5),
    ]  # fmt: skip
    blocks = [
        {"size": 512, "requested_size": 500, "address": 0, "state": "active_allocated"},
        {"size": 512, "address": 512, "state": "inactive"},
    ]
    found = from_snapshot({"device_traces": [trace], "segments": [{"device": 0, "address": 0, "blocks": blocks}]}, 0)
    assert found.initial == {0: 500, 1024: 300}
    assert [(event.address, event.bytes) for event in found.events] == [(512, 100), (1024, -300)]
    assert found.requested == 9000


def test_a_picture_shows_the_last_step_without_the_time_after_its_update() -> None:
    totals = {0.0: 10, 5.0: 90, 6.0: 10, 100.0: 10, 105.0: 95, 106.0: 60, 120.0: 10, 900.0: 10}
    layers = dict.fromkeys(CATEGORIES, [0] * len(totals)) | {OTHER: list(totals.values())}
    step = _last_step({"milliseconds": list(totals), "bytes": layers, "steps": [0.0, 100.0]})
    assert step.times == [0.0, 5.0, 6.0, 20.0]
    assert step.layers[CATEGORIES.index(OTHER)] == [10, 95, 60, 10]
    assert step.requested == 0


def test_a_picture_of_a_run_out_of_memory_ends_with_the_request_that_failed() -> None:
    layers = {key: [0, 0] for key in CATEGORIES} | {OTHER: [10, 70]}
    step = _last_step({"milliseconds": [0.0, 8.0], "bytes": layers, "steps": [0.0], "asked": 50})
    assert (step.times, step.requested) == ([0.0, 8.0], 120)
