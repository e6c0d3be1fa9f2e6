"""Finds and kills all processes that a worker has started.

Each worker leads its own session, so the processes that it starts (data loaders, shells) can be found and killed with
it. A process that moves to another session has left on purpose and is not touched.

Run as a program, this file is the guard: a small process beside the supervisor that kills the registered sessions when
the supervisor's process ends for any reason. It is started by its path and uses the standard library only, so it starts
in milliseconds and needs little memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

_REAP_SECONDS = 5.0  # seconds to wait for killed processes; a process that hangs in the kernel may never end
_CLOSE = b"."


def processes(session: int) -> Iterator[tuple[int, int]]:
    """Yield (process id, process group) of each living process in the session; zombies do not count."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            state, _, group, its_session, *_ = _stat(int(name))
        except OSError:  # the process has ended meanwhile
            continue
        if int(its_session) == session and state not in (b"Z", b"X"):
            yield int(name), int(group)


def is_paused(pid: int) -> bool:
    """Return whether a signal (SIGSTOP, Ctrl-Z) has stopped the process and SIGCONT has not resumed it."""
    try:
        return _stat(pid)[0] == b"T"
    except OSError:
        return False


def _stat(pid: int) -> list[bytes]:
    with open(f"/proc/{pid}/stat", "rb") as file:
        stat = file.read()
    # The command name is in parentheses and may contain any character, parentheses too.
    return stat[stat.rindex(b")") + 2 :].split()


def is_empty(session: int) -> bool:
    return next(processes(session), None) is None


def kill(session: int) -> None:
    """Send SIGKILL to all processes of the session, by process groups, so that none escapes by forking."""
    for group in {group for _, group in processes(session)}:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


class Guard:
    """The supervisor's end of the guard. Its orders arrive even if the supervisor dies right after sending them."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # the terminal's Ctrl-C must not reach it
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, session: int) -> None:
        self._send(b"+%d\n" % session)

    def forget(self, session: int) -> None:
        """Stop watching a session. Call this before the session's leader is reaped: then its number can be reused."""
        self._send(b"-%d\n" % session)

    def close(self) -> None:
        self._send(_CLOSE)
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:  # a signal has stopped it
            self._process.kill()
            self._process.wait()

    def _send(self, text: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # the guard was killed; the job continues without it
            os.write(self._process.stdin.fileno(), text)  # type: ignore[union-attr]


class _GuardOrders:
    """The orders that the guard has received from its supervisor."""

    def __init__(self) -> None:
        self.sessions: set[int] = set()
        self._rest = b""

    @property
    def closed(self) -> bool:
        return self._rest == _CLOSE

    def receive(self) -> bool:
        """Read the next orders; False if there are none any more."""
        try:
            chunk = os.read(0, 65536)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            (self.sessions.add if line[:1] == b"+" else self.sessions.discard)(int(line[1:]))
        return bool(chunk)


def _guard(supervisor: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    orders = _GuardOrders()
    _listen(orders, supervisor)
    if orders.closed:
        return
    deadline = time.monotonic() + _REAP_SECONDS
    while orders.sessions and time.monotonic() < deadline:
        for session in list(orders.sessions):
            kill(session)
            if is_empty(session):
                orders.sessions.discard(session)
        time.sleep(0.01)


def _listen(orders: _GuardOrders, supervisor: int) -> None:
    """Receive orders until the supervisor is gone. The end of the pipe does not show that: forked processes hold it."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    with contextlib.suppress(OSError, AttributeError):
        poll.register(os.pidfd_open(supervisor), select.POLLIN)
    while os.getppid() == supervisor and not orders.closed:
        if any(fd == 0 for fd, _ in poll.poll()) and not orders.receive():
            return
    os.set_blocking(0, False)
    while orders.receive():
        pass


if __name__ == "__main__":
    _guard(int(sys.argv[1]))
