"""All processes that a worker has started, and how they are ended.

Each worker leads a session of its own, so whatever it starts (data loaders, shells) can be found and ended with it. A
process that moves to a session of its own has left on purpose and is left alone.

Run as a program this file is the guard: a small process beside the supervisor that ends the sessions it was told of
when the supervisor is gone, however it went. It is started by path and uses the standard library only, so it is up in
milliseconds and holds little memory.
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

_REAP_SECONDS = 5.0  # seconds to wait for processes that were killed; one that hangs in the kernel may take for ever
_GOODBYE = b"."


def processes(session: int) -> Iterator[tuple[int, int]]:
    """(process id, process group) of each living process in the session; zombies do not count."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            state, _, group, its_session, *_ = _stat(int(name))
        except OSError:  # it ended meanwhile
            continue
        if int(its_session) == session and state not in (b"Z", b"X"):
            yield int(name), int(group)


def is_paused(pid: int) -> bool:
    """Whether a signal (SIGSTOP, Ctrl-Z) has stopped the process, and none made it go on."""
    try:
        return _stat(pid)[0] == b"T"
    except OSError:
        return False


def _stat(pid: int) -> list[bytes]:
    with open(f"/proc/{pid}/stat", "rb") as file:
        stat = file.read()
    # The command name stands in parentheses and may hold anything, parentheses too.
    return stat[stat.rindex(b")") + 2 :].split()


def is_empty(session: int) -> bool:
    return next(processes(session), None) is None


def kill(session: int) -> None:
    """SIGKILL to all processes of the session: by groups, so that none can slip away by forking."""
    for group in {group for _, group in processes(session)}:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


class Guard:
    """The supervisor's end of the guard. What it was told reaches the guard even if the supervisor dies right after."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # the terminal's Ctrl-C is not for it
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, session: int) -> None:
        self._tell(b"+%d\n" % session)

    def forget(self, session: int) -> None:
        """To be called while the session's leader is not reaped yet: afterwards its number can be somebody else's."""
        self._tell(b"-%d\n" % session)

    def close(self) -> None:
        self._tell(_GOODBYE)
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:  # somebody has stopped it
            self._process.kill()
            self._process.wait()

    def _tell(self, text: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # somebody killed the guard; the job can do without
            os.write(self._process.stdin.fileno(), text)  # type: ignore[union-attr]


class _GuardOrders:
    """What the guard has heard from its supervisor."""

    def __init__(self) -> None:
        self.sessions: set[int] = set()
        self._rest = b""

    @property
    def goodbye(self) -> bool:
        return self._rest == _GOODBYE

    def hear(self) -> bool:
        """False when nothing more will be said."""
        try:
            chunk = os.read(0, 65536)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            (self.sessions.add if line[:1] == b"+" else self.sessions.discard)(int(line[1:]))
        return bool(chunk)


def _guard(supervisor: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ears = _GuardOrders()
    _listen(ears, supervisor)
    if ears.goodbye:
        return
    deadline = time.monotonic() + _REAP_SECONDS
    while ears.sessions and time.monotonic() < deadline:
        for session in list(ears.sessions):
            kill(session)
            if is_empty(session):
                ears.sessions.discard(session)
        time.sleep(0.01)


def _listen(ears: _GuardOrders, supervisor: int) -> None:
    """Until the supervisor is gone. The pipe alone would not tell: processes that it forked hold its other end too."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    with contextlib.suppress(OSError, AttributeError):
        poll.register(os.pidfd_open(supervisor), select.POLLIN)
    while os.getppid() == supervisor and not ears.goodbye:
        if any(fd == 0 for fd, _ in poll.poll()) and not ears.hear():
            return
    os.set_blocking(0, False)
    while ears.hear():
        pass


if __name__ == "__main__":
    _guard(int(sys.argv[1]))
