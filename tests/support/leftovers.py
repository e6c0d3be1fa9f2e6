"""Finds what tests must not leave behind: threads, child processes and listening sockets of this process."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from pathlib import Path

PROC = Path("/proc/self")
# Helpers that the standard library starts once per process and never ends.
PERMANENT = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
LISTEN = "0A"  # TCP_LISTEN in the kernel's tables
ACCEPTS = 0x10000  # SO_ACCEPTCON in the flags of /proc/net/unix


def threads() -> dict[object, str]:
    """Return the threads that keep the interpreter from exiting."""
    return {
        thread: f"thread {thread.name!r}"
        for thread in threading.enumerate()
        if not thread.daemon and thread is not threading.main_thread()
    }


def children() -> dict[object, str]:
    """Return the child processes by pid, including zombies."""
    found: dict[object, str] = {}
    for pid in children_of("self"):
        command = _command(pid)
        if not any(name in command for name in PERMANENT):
            found[pid] = f"process {pid} ({command or 'ended, but not waited for'})"
    return found


def children_of(pid: int | str) -> list[int]:
    """Return the child processes of a process. Its threads may end during the call."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, file.read_text().split())
    return found


def listeners() -> dict[object, str]:
    """Return the listening TCP and Unix sockets by inode."""
    own = {inode for file in PROC.glob("fd/*") if (inode := _socket(file))}
    if not own:
        return {}
    found: dict[object, str] = {}
    for table in ("tcp", "tcp6"):
        for row in _rows(table):
            if row[3] == LISTEN and row[9] in own:
                found[row[9]] = f"socket listening on {table} port {int(row[1].rpartition(':')[2], 16)}"
    for row in _rows("unix"):
        if int(row[3], 16) & ACCEPTS and row[6] in own:
            found[row[6]] = f"socket listening on unix {' '.join(row[7:])}"
    return found


def everything() -> dict[object, str]:
    return threads() | children() | listeners()


def end(pids: list[int]) -> None:
    """Kill and reap children that a test has left, so that they do not fail the next test."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.waitpid(pid, 0)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def _socket(file: Path) -> str | None:
    with contextlib.suppress(OSError):
        match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(file))
        return match[1] if match else None
    return None


def _rows(table: str) -> list[list[str]]:
    with contextlib.suppress(OSError):
        return [line.split() for line in (PROC / "net" / table).read_text().splitlines()[1:]]
    return []
