# SPDX-License-Identifier: Apache-2.0
"""The host memory that is left for this process and those beside it."""

import sys
from pathlib import Path

MEMORY, CGROUP, CGROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Return the bytes that can be allocated without swapping, within the limits of containers and jobs.

    Return 0 where it is unknown, as on other systems than Linux.
    """
    try:
        machine = int(_fields(MEMORY)["MemAvailable:"]) * 1024
        group = CGROUPS / CGROUP.read_text().rpartition("::/")[2].strip()
        limits = [_left(each) for each in (group, *group.parents) if (each / "memory.max").is_file()]
    except (OSError, KeyError, ValueError):
        return 0
    return max(0, min([machine, *limits]))


def _left(group: Path) -> int:
    """Return the bytes that a control group (cgroup v2) leaves, without cached files, which can be dropped."""
    limit = (group / "memory.max").read_text().strip()
    if limit == "max":
        return sys.maxsize
    cached = int(_fields(group / "memory.stat")["inactive_file"])
    return int(limit) - int((group / "memory.current").read_text()) + cached


def _fields(file: Path) -> dict[str, str]:
    """Return name → value of the lines of a file."""
    return {words[0]: words[1] for line in file.read_text().splitlines() if len(words := line.split()) > 1}
