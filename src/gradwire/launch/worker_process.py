"""One worker as the supervisor sees it: its process, the channel to it, and the result that came back."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gradwire.launch import process_tree, worker_main
from gradwire.launch.output import Pipes
from gradwire.launch.restart_policy import EndKind
from gradwire.launch.root_cause import Ending, Report

_LAST_STEPS = 2.0  # seconds from an uncaught exception to the exit, before it counts as hanging
_CHUNK = 1 << 20  # bytes taken for a message at first; as many again whenever they have come
_UNKNOWN = 255  # the exit code of a process that somebody else has reaped


@dataclass(frozen=True)
class Task:
    """What every worker of a job runs: the arguments of `worker_main.py` after the channel."""

    arguments: tuple[str, ...]
    inherited: tuple[int, ...] = ()  # file descriptors that the arguments name
    returns: bool = False  # a worker that ends without having sent a result has failed

    @classmethod
    def script(cls, path: str, *args: str) -> Task:
        return cls(("script", path, *args))

    @classmethod
    def module(cls, name: str, *args: str) -> Task:
        return cls(("module", name, *args))


class Worker:
    """A handle: `number` (the rank, where ranks stay), `pid`, and `ending` once the process has ended.

    It is reaped only when its whole session is gone, so until then its number cannot mean anybody else.
    """

    def __init__(
        self,
        number: int,
        task: Task,
        environ: Mapping[str, str],
        pipes: Pipes,
        noun: str = "rank",
        *,
        leftover_seconds: float = 1.0,
        unkillable_seconds: float = 5.0,
    ) -> None:
        """What the process leaves behind (multiprocessing's resource tracker) has `leftover_seconds` to end, and is
        killed then. What hangs in the kernel `unkillable_seconds` after it was killed is left there."""
        self.number = number
        self.noun = noun
        self.began = time.monotonic()
        self.doom = ""  # what was done to it on purpose, for those who read how it ended
        self.report: Report | None = None
        self.result: bytearray | None = None
        self.exception: bytearray | None = None  # pickled, where the report's exception could be
        self.ending: Ending | None = None
        self.gone = False  # it and all that it started
        self._leftover_seconds = leftover_seconds
        self._unkillable_seconds = unkillable_seconds
        self._returns = task.returns
        self._told: float | None = None
        self._killed: float | None = None
        self._channel, theirs = socket.socketpair()
        self._messages = MessageReader(self._channel)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, worker_main.__file__, str(theirs.fileno()), str(pipes.tracebacks)),
                        *task.arguments,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=pipes.out,
                    stderr=pipes.err,
                    env=dict(environ),
                    pass_fds=(theirs.fileno(), pipes.tracebacks, *task.inherited),
                    start_new_session=True,
                )
        except BaseException:
            self._channel.close()
            raise
        self.pid = self._process.pid
        self._exit_fd = _exit_fd(self.pid)

    def release(self) -> None:
        """Let it run: it waits for this."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead already, which its exit will tell
            self._channel.send(b".")
        self._channel.setblocking(False)

    def descriptors(self) -> Iterator[int]:
        """What becomes readable when there is news."""
        if self.ending is None and not self._messages.ended:
            yield self._channel.fileno()
        if self.ending is None and self._exit_fd is not None:
            yield self._exit_fd

    @property
    def must_be_asked(self) -> bool:
        """Whether there can be news that no descriptor tells: of its session, of time, on systems without pidfd."""
        told_by_none = self.ending or self.report or self._killed or self._exit_fd is None
        return not self.gone and bool(told_by_none)

    def has_failed(self, now: float) -> bool:
        """By how it ended; or by an exception that it has reported, if it does not end after it (a thread holds it)."""
        if self.ending is not None:
            return self.ending.failed
        return self.report is not None and self.report.fatal and now >= self.report.time + _LAST_STEPS

    @property
    def fate(self) -> EndKind:
        """Of one that has ended, or has failed."""
        if self.ending is not None and not self.ending.failed:
            return EndKind.WELL
        if self.report is not None and self.report.fatal:
            return EndKind.TURNED_AWAY if self.report.turned_away else EndKind.ERROR
        return EndKind.LOST if self.ending is not None and self.ending.status < 0 else EndKind.ERROR

    @property
    def was_killed(self) -> bool:
        """By somebody else, and not by an error of its own."""
        return self.ending is not None and self.ending.status in (-signal.SIGKILL, -signal.SIGTERM)

    def failure_time(self, now: float) -> float:
        return self.report.time if self.report is not None else now

    def signal(self, number: int, now: float) -> None:
        """Tell the worker to stop; SIGKILL is for its whole session."""
        if self.gone:
            return
        if self.ending is None and self._told is None:
            self._told = now
        if number == signal.SIGKILL:
            self._killed = now
            process_tree.kill(self.pid)
        elif self.ending is None:
            os.kill(self.pid, number)

    def update(self, now: float) -> None:
        """Take in what is new: messages, its exit, the end of all that it started."""
        if self.gone:
            return
        if self.ending is None:
            status = self._status()
            if self._killed is not None and now >= self._killed + self._unkillable_seconds:
                status = status or -signal.SIGKILL  # it hangs in the kernel (a driver, a file server): left to it
            self._listen()
            if status is not None:
                missing = status == 0 and self._returns and self.result is None
                facts = (self.number, self.pid, status, now, self._told, self.report, missing)
                self.ending = Ending(*facts, noun=self.noun, doom=self.doom)
        if self.ending is not None:
            self._sweep(now - self.ending.time)

    def _listen(self) -> None:
        for kind, body in self._messages.receive():
            if kind == worker_main.REPORT:
                with contextlib.suppress(ValueError):
                    self.report = Report.parse(body)
            elif kind == worker_main.EXCEPTION:
                self.exception = body
            elif kind == worker_main.RESULT:
                self.result = body

    def _status(self) -> int | None:
        """Exit code or minus the signal; the process stays a zombie, which keeps its number."""
        try:
            info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            return _UNKNOWN
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def _sweep(self, since_exit: float) -> None:
        if not process_tree.is_empty(self.pid) and since_exit < self._leftover_seconds + self._unkillable_seconds:
            if since_exit >= self._leftover_seconds:
                process_tree.kill(self.pid)
            return
        self.gone = True

    def kill(self, doom: str = "") -> None:
        """At once, with all that it started; `doom` is what will be said of it."""
        self.doom = doom
        if not self.gone:
            process_tree.kill(self.pid)

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    @property
    def name(self) -> str:
        return f"{self.noun} {self.number}"

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    def close(self) -> None:
        """Reap it and close all descriptors; when it is gone."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that cannot even be killed
            self._process.wait(self._leftover_seconds)
        self._channel.close()
        if self._exit_fd is not None:
            os.close(self._exit_fd)
            self._exit_fd = None


class MessageReader:
    """Cuts what arrives on a channel into messages. Programs that write into descriptors they do not know may write
    there too: no length is believed before the bytes have come, and after nonsense nothing more is heard."""

    def __init__(self, channel: socket.socket) -> None:
        self.ended = False
        self._channel = channel
        self._begin(b"", worker_main.HEADER_SIZE)

    def _begin(self, kind: bytes, due: int) -> None:
        self._kind = kind  # of the message whose body is due; empty while a header is
        self._due = due
        self._buffer = bytearray(min(due, _CHUNK))
        self._filled = 0

    def receive(self) -> Iterator[tuple[bytes, bytearray]]:
        """The messages that are complete by now."""
        while not self.ended:
            try:
                count = self._channel.recv_into(memoryview(self._buffer)[self._filled :])
            except BlockingIOError:
                return
            except ConnectionResetError:  # it died with something unread
                count = 0
            self.ended = count == 0
            self._filled += count
            while self._filled == len(self._buffer) and not self.ended:
                if self._filled < self._due:
                    self._buffer += bytes(min(self._filled, self._due - self._filled))
                elif self._kind:
                    yield self._kind, self._buffer
                    self._begin(b"", worker_main.HEADER_SIZE)
                else:
                    kind, due = bytes(self._buffer[:1]), int.from_bytes(self._buffer[1:], "big")
                    self.ended = kind not in (worker_main.REPORT, worker_main.EXCEPTION, worker_main.RESULT)
                    self._begin(kind, due)


def _exit_fd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, an old kernel, or a sandbox
        return None
