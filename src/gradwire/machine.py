"""What this machine is, and what of it this process may use."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import socket
from pathlib import Path


def identity() -> str:
    """What two processes have in common exactly if they run on one machine."""
    return f"{socket.gethostname()}/{_boot()}"


@functools.cache
def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def process_started(pid: int | str = "self") -> int:
    """When a process started, in ticks since this machine booted; 0 if that cannot be known.

    A pid and this number together name one process: the pid alone may be given to another one later.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        # The command's name stands in parentheses and may hold anything, parentheses too; the time is field 22.
        return int(stat[stat.rindex(b")") + 2 :].split()[19])
    return 0


def memory() -> int:
    """The bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def usable_cores() -> float:
    """Cores that this process may use: those it may run on, or the share of them that its container is given."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    return min(cores, _quota())


@functools.cache  # files are read; a container's limit that is changed counts for processes that start later
def _quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """The smallest limit of this process's control groups, in cores; infinite where there is none."""
    quota = math.inf
    with contextlib.suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            if controllers == "":
                quota = min(quota, *(_limit_v2(path) for path in _and_above(root, place)))
            elif "cpu" in controllers.split(","):
                quota = min(quota, *(_limit_v1(path) for path in _and_above(root / "cpu", place)))
    return quota


def _and_above(root: Path, place: str) -> list[Path]:
    inner = root / place.lstrip("/")
    return [inner, *(path for path in inner.parents if path.is_relative_to(root))]


def _limit_v2(group: Path) -> float:
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (group / "cpu.max").read_text().split()
        if quota != "max":
            return int(quota) / int(period)
    return math.inf


def _limit_v1(group: Path) -> float:
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota = int((group / "cpu.cfs_quota_us").read_text())
        if quota > 0:
            return quota / int((group / "cpu.cfs_period_us").read_text())
    return math.inf
