"""This machine: its identity, the CPUs and memory that this process may use, and the states of other processes."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import socket
from pathlib import Path
from typing import NamedTuple


def identity() -> str:
    """What two processes have in common exactly if they run on one machine."""
    return f"{socket.gethostname()}/{boot()}"


@functools.cache
def boot() -> str:
    """The id of this start of the machine; empty if that cannot be known."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


class ProcessStatus(NamedTuple):
    """What the kernel tells of a process or thread."""

    state: str  # one letter: R runs or could, S sleeps, D sleeps uninterruptibly, T is stopped, Z has ended
    started: int  # in clock ticks since the machine started; with the pid, this names one process and no later one


def process_status(pid: int | str) -> ProcessStatus | None:
    """The status of a process by its pid, or of a thread by "PID/task/TID"; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before may hold anything
        return ProcessStatus(fields[0].decode(), int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None


def process_started(pid: int | str = "self") -> int:
    """When a process started, in clock ticks since the machine started; 0 if that cannot be known."""
    status = process_status(pid)
    return 0 if status is None else status.started


def memory() -> int:
    """The bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def usable_cores() -> float:
    """Cores that this process may use: those it may run on, or the share of them that its container is given."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    return min(cores, core_quota())


@functools.cache  # files are read; a container's limit that is changed counts for processes that start later
def core_quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
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
