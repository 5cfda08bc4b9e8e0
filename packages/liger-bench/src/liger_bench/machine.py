# SPDX-License-Identifier: Apache-2.0
"""The device to measure on, and the description of a measurement: machine, versions, commit and date."""

import datetime
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from contextlib import suppress
from pathlib import Path

import torch

from liger_core.errors import DeviceError, DtypeError
from liger_core.plugins import PROJECT

PACKAGES = (*PROJECT, "torch", "triton", "transformers")
PEERS = ("liger-kernel", "cut-cross-entropy", "quack-kernels", "nvidia-cutlass-dsl")
# The columns that must be equal for a run to resume an earlier one.
ENVIRONMENT = ("machine", "versions", "commit")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def measurable_device(command: str, name: str) -> torch.device:
    """Return the device to measure on; "auto" is the GPU if there is one.

    Raises DeviceError for a device that is missing or whose memory cannot be measured.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise DeviceError(
            f"{command}: --device must be auto, cpu or cuda, got {name!r}; select one of several GPUs with "
            "CUDA_VISIBLE_DEVICES"
        )
    if name == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            f"{command}: --device cuda needs a GPU that PyTorch can use, none was found; use --device cpu"
        )
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def named_dtype(command: str, name: str | None, device: torch.device) -> torch.dtype:
    """Return the dtype of that name, by default float32 on the CPU and bfloat16 elsewhere."""
    if name is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise DtypeError(f"{command}: --dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(device: torch.device) -> dict[str, str]:
    """Return the machine, versions, commit and date that every result records."""
    return {
        "machine": _machine(device),
        "versions": ", ".join(f"{name} {version}" for name, version in _versions().items()),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _machine(device: torch.device) -> str:
    processor = f"{_processor()}, {torch.get_num_threads()} threads"
    return processor if device.type == "cpu" else f"{torch.cuda.get_device_name(device)}; {processor}"


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES + PEERS:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions


def _commit() -> str:
    """Return the commit of these sources, with a digest of uncommitted changes in the packages.

    Outside a checkout, it is LIGER_COMMIT or "installed".
    """
    source = Path(__file__).resolve()

    def git(*arguments: str) -> bytes:
        command = ["git", "-C", str(source.parent), *arguments]
        return subprocess.run(command, capture_output=True, check=True, timeout=10).stdout.strip()

    try:
        # An environment inside the checkout of another project must not report that project's commit.
        git("ls-files", "--error-unmatch", source.name)
        commit = git("rev-parse", "--short=12", "HEAD").decode()
        packages = str(source.parents[3])
        changes = git("diff", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", "HEAD", "--", packages)
        return f"{commit}+changes-{hashlib.sha256(changes).hexdigest()[:8]}" if changes else commit
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("LIGER_COMMIT", "installed")
