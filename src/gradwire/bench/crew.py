"""All ranks of one engine: started, asked for blocks, ended whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from gradwire.bench.cases import Case
from gradwire.bench.commands import Command
from gradwire.bench.line import StartingLine
from gradwire.bench.worker import remove
from gradwire.errors import TransportError, WorkerFailed
from gradwire.launch import process_tree

PATIENCE = 300.0  # seconds for a start or a block before it counts as hung
_END = 5.0  # seconds to end after the last block
_GRACE = 3.0  # seconds more after SIGTERM: mpiexec has files to remove
_LAST_LINES = 20  # of what the ranks printed, when something went wrong
_LONGEST_PATH = 107  # of a Unix socket

# What to start, given the place where the ranks shall connect and their options.
Maker = Callable[[Path, dict[str, Any]], list[Command]]


class Unsupported(Exception):
    """The engine has no such case."""


@dataclass(frozen=True)
class Block:
    """What one block came to, in microseconds."""

    us: float  # from the last rank's call to the last rank's return, median
    longest_us: float  # of the longest call, waiting for others included, median
    wrong: int
    iterations: int
    pace: float  # seconds for an iteration with everything around it


class Crew:
    """Starts what `commands` says, watches it, and ends it as a context manager."""

    def __init__(self, name: str, size: int, folder: Path, commands: Maker) -> None:
        self.name, self.size = name, size
        self.about: dict[str, Any] = {}  # what the engine says of itself
        self._folder = folder / name
        self._commands = commands
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[_Channel] = []
        self._segments: list[str] = []
        self._request: dict[str, Any] | None = None  # the last one

    # ── beginning ────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Return when all ranks have joined each other."""
        self._folder.mkdir(mode=0o700)
        meeting_place, line = self._folder / "meet", self._folder / "line"
        if len(os.fsencode(meeting_place)) > _LONGEST_PATH:
            raise TransportError(f"{meeting_place} is too long a path for a socket: let TMPDIR name a shorter one")
        StartingLine.draw(line, self.size)
        options = {"size": self.size, "line": str(line), "store": str(self._folder / "store")}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(meeting_place))
            listener.listen(self.size)
            with open(self._log, "wb") as log:
                for command in self._commands(meeting_place, options):
                    self._processes.append(self._started(command, log.fileno()))
            self._accept(listener)
        hellos = self._answers("start")
        self._segments = [path for hello in hellos for path in hello.pop("segments")]
        self.about = hellos[0]

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    def _started(self, command: Command, log: int) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                command.arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=command.environ,
                cwd=self._folder,
                start_new_session=True,  # the terminal's Ctrl-C is for us, who end them
            )
        except OSError as error:
            raise WorkerFailed(f"{self.name}: cannot start {command.arguments[0]}: {error.strerror}") from error

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(0.1)
        deadline = time.monotonic() + PATIENCE
        while len(self._channels) < self.size:
            try:
                self._channels.append(_Channel(listener.accept()[0]))
            except TimeoutError:
                self._check_alive()
                if time.monotonic() > deadline:
                    raise self._failure(f"only {len(self._channels)} of {self.size} ranks have started") from None

    # ── blocks ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def block(self, case: Case, iterations: int) -> Block:
        """Measure; `Unsupported` if the engine has no such case."""
        self._request = {"case": case.as_dict(), "iterations": iterations}
        for channel in self._channels:
            channel.say(self._request)
        answers = self._answers(f"{case.collective} of {case.nbytes} bytes")
        for answer in answers:
            if "unsupported" in answer:
                raise Unsupported(answer["unsupported"])
        return block_of(answers, case)

    def _answers(self, doing: str) -> list[dict[str, Any]]:
        """One message of every rank; the first that complains or ends instead, or a silence, is an error."""
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + PATIENCE
        with selectors.DefaultSelector() as selector:
            for number, channel in enumerate(self._channels):
                selector.register(channel.socket, selectors.EVENT_READ, number)
            while len(answers) < self.size:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise self._failure(f"no answer within {PATIENCE:.0f} s ({doing})")
                for key, _ in ready:
                    message = self._channels[key.data].hear()
                    if message is not None:
                        selector.unregister(key.fileobj)
                        answers[key.data] = self._checked(message, doing)
        return [answers[number] for number in range(self.size)]

    def _checked(self, message: dict[str, Any], doing: str) -> dict[str, Any]:
        if "error" in message:
            raise WorkerFailed(f"{self.name} failed ({doing}):\n{message['error'].rstrip()}")
        if not message:
            raise self._failure(f"a rank ended ({doing})")
        return message

    def _check_alive(self) -> None:
        for process in self._processes:
            if process.poll() is not None:
                raise self._failure(f"ended with exit code {process.returncode} while it was started")

    def _failure(self, problem: str) -> WorkerFailed:
        with contextlib.suppress(OSError):
            printed = self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
            problem = "\n".join([problem, *printed])
        return WorkerFailed(f"{self.name}: {problem}")

    # ── end ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels:
            # A block under way is finished first, so that every engine can end as it should; and if an interrupt kept
            # it from some ranks, the others would wait for them.
            if channel.said is not self._request:
                channel.say(self._request)
            channel.say({})
        try:
            self._wait(_END)
            self._signal(signal.SIGTERM)
            self._wait(_GRACE)
        finally:  # a second Ctrl-C comes here too
            for channel in self._channels:
                channel.socket.close()  # which also ends ranks that are in no session of ours
            for process in self._processes:
                process_tree.kill(process.pid)
                process.wait()
            remove(self._segments)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)


class _Channel:
    """Lines of JSON to and from one rank."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.said: dict[str, Any] | None = None  # last
        self._buffer = bytearray()

    def say(self, message: dict[str, Any] | None) -> None:
        self.said = message
        with contextlib.suppress(OSError):  # it has ended, which reading will tell
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> dict[str, Any] | None:
        """The next message if it has come, {} if none ever will, None if some of it is still missing."""
        try:
            chunk = self.socket.recv(1 << 20)
        except ConnectionResetError:
            chunk = b""
        self._buffer += chunk
        line, end, rest = self._buffer.partition(b"\n")
        if not end:
            return None if chunk else {}
        self._buffer = rest
        message: dict[str, Any] = json.loads(line)
        return message


def block_of(answers: list[dict[str, Any]], case: Case) -> Block:
    """What the ranks measured, put together; all their clocks are one."""
    import numpy as np

    begins, ends = (np.array([answer[key] for answer in answers]) for key in ("begins", "ends"))
    wrong = sum(answer["wrong"] for answer in answers)
    if case.collective == "barrier":
        wrong += int(np.count_nonzero(ends.min(axis=0) < begins.max(axis=0)))  # somebody did not wait for all
    iterations = begins.shape[1]
    return Block(
        us=float(np.median(ends.max(axis=0) - begins.max(axis=0))) / 1000,
        longest_us=float(np.median((ends - begins).max(axis=0))) / 1000,
        wrong=wrong,
        iterations=iterations,
        pace=float(ends[0, -1] - begins[0, 0]) / iterations / 1e9,
    )
