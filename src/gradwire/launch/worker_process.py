"""One worker as the supervisor sees it: its process, the channel to it, and its result."""

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

from gradwire.job.stop_notices import NOTICES, STOP_SIGNALS, NoticeKind, NoticeReader, StopNotice
from gradwire.launch import process_tree, worker_main
from gradwire.launch.output import Pipes
from gradwire.launch.restart_policy import EndKind
from gradwire.launch.root_cause import EXIT_BY_SIGNAL, Ending, Report

_LAST_STEPS = 2.0  # seconds between an uncaught exception and the exit, after which the process counts as hanging
_CHUNK = 1 << 20  # bytes allocated for a message at first; the buffer doubles as the bytes arrive
_UNKNOWN = 255  # the exit code of a process that other code has reaped


@dataclass(frozen=True)
class Task:
    """What every worker of a job runs: the arguments of `worker_main.py` after the channel."""

    arguments: tuple[str, ...]
    inherited: tuple[int, ...] = ()  # file descriptors that the arguments name
    returns: bool = False  # a worker that exits without a result has failed

    @classmethod
    def script(cls, path: str, *args: str) -> Task:
        return cls(("script", path, *args))

    @classmethod
    def module(cls, name: str, *args: str) -> Task:
        return cls(("module", name, *args))


class Worker:
    """A worker's process: `number` (the rank, in jobs of fixed size), `pid`, and `ending` once it has ended.

    The process is reaped only when its whole session is gone, so its pid is not reused before that.
    """

    def __init__(
        self,
        number: int,
        task: Task,
        environ: Mapping[str, str],
        pipes: Pipes,
        noun: str = "rank",
        *,
        stdin: int | None = None,
        leftover_seconds: float = 1.0,
        unkillable_seconds: float = 5.0,
    ) -> None:
        """Start the process; it waits for `release`. Its standard input is `stdin`; None: it is empty.

        Processes that it leaves behind (multiprocessing's resource tracker) are killed after `leftover_seconds`. A
        process that still hangs in the kernel `unkillable_seconds` after SIGKILL is abandoned.
        """
        self.number = number
        self.noun = noun
        self.began = time.monotonic()
        self.kill_reason = ""  # why the supervisor killed it, for the report of how it ended
        self.report: Report | None = None
        self.result: bytearray | None = None
        self.exception: bytearray | None = None  # the exception of the report, if it could be pickled
        self.ending: Ending | None = None
        self.gone = False  # the process and all that it started have ended
        self.watches = False  # after SIGTERM or SIGUSR2, the worker leaves after a whole step
        self.stop_signal = 0  # because of which it leaves so, as it has reported; 0: none
        self._leftover_seconds = leftover_seconds
        self._unkillable_seconds = unkillable_seconds
        self._returns = task.returns
        self._stop_sent: float | None = None
        self._sent: set[int] = set()  # the signals that the supervisor has sent
        self._reported: list[StopNotice] = []
        self._killed_at: float | None = None
        self._channel, theirs = socket.socketpair()
        self._messages = MessageReader(self._channel)
        self._notices = NoticeReader()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, worker_main.__file__, str(theirs.fileno()), str(pipes.tracebacks)),
                        *task.arguments,
                    ],
                    stdin=subprocess.DEVNULL if stdin is None else stdin,
                    stdout=pipes.out,
                    stderr=pipes.err,
                    env={**environ, NOTICES: self._notices.variable},
                    pass_fds=(theirs.fileno(), pipes.tracebacks, self._notices.write_end, *task.inherited),
                    start_new_session=True,
                )
        except BaseException:
            self._channel.close()
            self._notices.close()
            raise
        self._notices.close_write_end()
        self.pid = self._process.pid
        self._exit_fd = _exit_fd(self.pid)

    def release(self) -> None:
        """Let the process run."""
        # If the process is already dead, its exit status will show why.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._channel.send(b".")
        self._channel.setblocking(False)

    def descriptors(self) -> Iterator[int]:
        """Yield the descriptors that become readable when something has happened."""
        if self.ending is None and not self._messages.ended:
            yield self._channel.fileno()
        if self.ending is None and not self._notices.ended:
            yield self._notices.fileno()
        if self.ending is None and self._exit_fd is not None:
            yield self._exit_fd

    @property
    def needs_polling(self) -> bool:
        """Whether changes are possible that no descriptor shows: in its session, by timeouts, or without pidfd."""
        return not self.gone and bool(self.ending or self.report or self._killed_at or self._exit_fd is None)

    def has_failed(self, now: float) -> bool:
        """Whether the process ended badly, or reported an exception and then did not exit (a thread keeps it alive)."""
        if self.ending is not None:
            return self.ending.failed
        hangs = self.report is not None and self.report.fatal and now >= self.report.time + _LAST_STEPS
        return hangs and not self._is_leaving

    @property
    def was_signalled(self) -> bool:
        """Whether the supervisor has signalled this worker."""
        return bool(self._sent)

    @property
    def _is_leaving(self) -> bool:
        """Whether the script has ended because of a signal, after a whole step: the process may take its time to exit.

        Its threads may have work to do, for example to upload a file.
        """
        code = str(EXIT_BY_SIGNAL + self.stop_signal)
        return self.stop_signal != 0 and self.report is not None and self.report.message == code

    def take_notices(self) -> list[StopNotice]:
        """Return the notices about stop signals that have arrived since the last call."""
        notices, self._reported = self._reported, []
        return notices

    @property
    def end_kind(self) -> EndKind:
        """How a worker that has ended or failed did so, for `restart_policy`."""
        if self.ending is not None and not self.ending.failed:
            return EndKind.WELL
        if self.report is not None and self.report.fatal:
            return EndKind.REFUSED if self.report.refused else EndKind.ERROR
        return EndKind.LOST if self.ending is not None and self.ending.status < 0 else EndKind.ERROR

    @property
    def was_killed(self) -> bool:
        """Whether a signal from outside ended the process, and not an error of its own."""
        return self.ending is not None and self.ending.status in (-signal.SIGKILL, -signal.SIGTERM)

    def failure_time(self, now: float) -> float:
        return self.report.time if self.report is not None else now

    def signal(self, number: int, now: float) -> None:
        """Send a signal that stops the worker; SIGKILL goes to its whole session.

        A worker that leaves gracefully is not asked again: a second SIGTERM would end it at once.
        """
        if self.gone:
            return
        if self.ending is None and self._stop_sent is None:
            self._stop_sent = now
        if number in STOP_SIGNALS and self.stop_signal:
            return
        self._sent.add(number)
        if number == signal.SIGKILL:
            self._killed_at = now
            process_tree.kill(self.pid)
        elif self.ending is None:
            os.kill(self.pid, number)

    def update(self, now: float) -> None:
        """Read new messages, and check for the exit of the process and of all that it started."""
        if self.gone:
            return
        if self.ending is None:
            status = self._status()
            if self._killed_at is not None and now >= self._killed_at + self._unkillable_seconds:
                status = status or -signal.SIGKILL  # it hangs in the kernel (a driver, a file server): abandoned
            self._read_messages()
            self._read_notices()
            if status is not None:
                missing = status == 0 and self._returns and self.result is None
                stop_sent = None if self._failed_alone(status) else self._stop_sent
                facts = (self.number, self.pid, status, now, stop_sent, self.report, missing)
                self.ending = Ending(*facts, noun=self.noun, kill_reason=self.kill_reason, stop_signal=self.stop_signal)
        if self.ending is not None:
            self._end_session(now - self.ending.time)

    def _read_messages(self) -> None:
        for kind, body in self._messages.receive():
            if kind == worker_main.REPORT:
                with contextlib.suppress(ValueError):
                    self.report = Report.parse(body)
            elif kind == worker_main.EXCEPTION:
                self.exception = body
            elif kind == worker_main.RESULT:
                self.result = body

    def _read_notices(self) -> None:
        for notice in self._notices.receive():
            self._reported.append(notice)
            match notice.kind:
                case NoticeKind.WATCHING:
                    self.watches = True
                case NoticeKind.NOT_WATCHING:
                    self.watches, self.stop_signal = False, 0
                case NoticeKind.RECEIVED | NoticeKind.AGREED:
                    self.stop_signal = notice.number

    def _failed_alone(self, status: int) -> bool:
        """Whether a worker that was leaving gracefully has failed for another reason than the supervisor's signals."""
        if not self.stop_signal or signal.SIGINT in self._sent:
            return False
        return (self.report is not None and self.report.explains_itself) or (status < 0 and -status not in self._sent)

    def _status(self) -> int | None:
        """Return the exit code or minus the signal; the process stays a zombie, so its pid is not reused."""
        try:
            info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            return _UNKNOWN
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def _end_session(self, since_exit: float) -> None:
        """Kill what the ended process has left behind, after `leftover_seconds`."""
        if not process_tree.is_empty(self.pid) and since_exit < self._leftover_seconds + self._unkillable_seconds:
            if since_exit >= self._leftover_seconds:
                process_tree.kill(self.pid)
            return
        self.gone = True

    def kill(self, kill_reason: str = "") -> None:
        """Kill the process with all that it started; `kill_reason` describes this in reports."""
        self.kill_reason = kill_reason
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
        """Reap the process and close all descriptors; call this when it is gone."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that cannot be killed
            self._process.wait(self._leftover_seconds)
        self._channel.close()
        self._notices.close()
        if self._exit_fd is not None:
            os.close(self._exit_fd)
            self._exit_fd = None


class MessageReader:
    """Splits the bytes of a channel into messages.

    A program may write to descriptors that it does not know, so the bytes are not trusted: memory grows with the bytes
    that have arrived, not with a claimed length, and after a malformed header the rest is ignored.
    """

    def __init__(self, channel: socket.socket) -> None:
        self.ended = False
        self._channel = channel
        self._begin(b"", worker_main.HEADER_SIZE)

    def _begin(self, kind: bytes, due: int) -> None:
        self._kind = kind  # of the message whose body is being read; empty while a header is
        self._due = due
        self._buffer = bytearray(min(due, _CHUNK))
        self._filled = 0

    def receive(self) -> Iterator[tuple[bytes, bytearray]]:
        """Yield the messages that are complete."""
        while not self.ended:
            try:
                count = self._channel.recv_into(memoryview(self._buffer)[self._filled :])
            except BlockingIOError:
                return
            except ConnectionResetError:  # the process died with unread bytes
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
