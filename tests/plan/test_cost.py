# SPDX-License-Identifier: Apache-2.0
"""What a long run will cost is said before it starts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from liger_train.plan.cost import sentence
from liger_train.runs import command
from liger_train.setup import Setup

SETUP = Setup("tiny", 1, command.LONG, checkpoint="offload", mlp="tiled")
GIB = 1 << 30


def test_it_names_the_peak_and_of_a_known_gpu_the_time_of_a_step() -> None:
    found = sentence(SETUP, "NVIDIA H200", 141 * GIB)
    assert found.startswith("Predicted: a peak of ")
    assert " of 141 GiB, and about " in found
    assert found.endswith(" tokens/s).")
    assert sentence(SETUP, "NVIDIA A100", 80 * GIB).endswith(" of 80 GiB.")


def test_a_run_that_does_not_fit_is_sent_to_the_plan() -> None:
    found = sentence(replace(SETUP, memory_limit=32 << 20), "NVIDIA A100", 80 * GIB)
    assert found.endswith(
        "of 32 MiB, which does not fit; `liger plan` with the same options and --memory-limit 32MiB finds a "
        "setup that does."
    )


def test_a_model_without_a_plan_gets_no_sentence() -> None:
    assert sentence(replace(SETUP, model="/not/there"), "NVIDIA H200", 141 * GIB) is None


def test_only_a_long_run_on_one_gpu_prints_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: SimpleNamespace(total_memory=141 * GIB))
    (found,) = command._cost(SETUP, torch.device("cuda"))
    assert found.startswith("Predicted: ")
    assert command._cost(SETUP, torch.device("cpu")) == []
    assert command._cost(replace(SETUP, sequence=command.LONG // 2), torch.device("cuda")) == []
    assert command._cost(replace(SETUP, ranks=2), torch.device("cuda")) == []
