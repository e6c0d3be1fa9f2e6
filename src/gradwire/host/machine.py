"""Reports the machine's identity, the CPUs and memory that this process may use, and the states of other processes."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import socket
from pathlib import Path
from typing import NamedTuple


def identity() -> str:
    """Return the identity of this machine. It is equal in two processes if and only if they run on one machine."""
    return f"{socket.gethostname()}/{boot()}"


@functools.cache
def boot() -> str:
    """Return the id of the machine's current boot; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


class ProcessStatus(NamedTuple):
    """The kernel's status of a process or thread."""

    state: str  # one letter: R running or runnable, S sleeping, D uninterruptible sleep, T stopped, Z zombie
    started: int  # in clock ticks since boot; with the pid it identifies the process, even if the pid is used again


def process_status(pid: int | str) -> ProcessStatus | None:
    """Return the status of a process by its pid, or of a thread by "PID/task/TID"; None if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name in parentheses may contain spaces and ")"
        return ProcessStatus(fields[0].decode(), int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None


def process_started(pid: int | str = "self") -> int:
    """Return when a process started, in clock ticks since boot; 0 if it cannot be read."""
    status = process_status(pid)
    return 0 if status is None else status.started


def memory() -> int:
    """Return the machine's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def usable_cores() -> float:
    """Return the number of cores that this process may use: its CPU affinity, or its cgroup quota if that is less."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    return min(cores, core_quota())


@functools.cache  # because this reads files; a limit that is changed later is used by new processes only
def core_quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """Return the smallest limit of this process's control groups, in cores; infinity if there is none."""
    quota = math.inf
    with contextlib.suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "":
                quota = min(quota, *(_limit_v2(path) for path in _with_parents(root, group)))
            elif "cpu" in controllers.split(","):
                quota = min(quota, *(_limit_v1(path) for path in _with_parents(root / "cpu", group)))
    return quota


def _with_parents(root: Path, group: str) -> list[Path]:
    inner = root / group.lstrip("/")
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
