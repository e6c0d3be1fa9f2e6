"""Start all ranks of one engine, request blocks of iterations from them, and end them in every case."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from gradwire.bench.cases import Case
from gradwire.bench.commands import Command, EngineSpec
from gradwire.bench.engines.base import Unsupported
from gradwire.bench.rank_process import remove
from gradwire.bench.start_barrier import StartBarrier
from gradwire.errors import TransportError, WorkerFailed
from gradwire.launch import process_tree

_ANSWER_TIMEOUT = 300.0  # seconds for a start or a block
_END_TIMEOUT = 5.0  # seconds to end after the last block
_TERM_TIMEOUT = 3.0  # seconds after SIGTERM, in which mpiexec removes its files
_LAST_LINES = 20  # lines of the ranks' output in an error
_LONGEST_PATH = 107  # bytes in the path of a Unix socket


@dataclass(frozen=True)
class Block:
    """The measurement of one block, in microseconds."""

    us: float  # median time from the last rank's call to the last rank's return
    longest_us: float  # median time of the longest call of any rank, including its wait for the other ranks
    wrong: int
    iterations: int
    pace: float  # seconds per iteration, including writing and checking the arrays


class EngineProcesses:
    """The processes of an engine. As a context manager it ends them."""

    def __init__(self, spec: EngineSpec, size: int, folder: Path) -> None:
        self.name, self.size = spec.name, size
        self.about: dict[str, Any] = {}  # facts for the report, set by `start`
        self._spec, self._folder = spec, folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[_Channel] = []
        self._segments: list[str] = []
        self._request: dict[str, Any] | None = None  # the last request

    # ── start ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start the ranks, and return when they have connected to each other."""
        self._folder.mkdir(mode=0o700)
        socket_path, barrier = self._folder / "socket", self._folder / "barrier"
        if len(os.fsencode(socket_path)) > _LONGEST_PATH:
            raise TransportError(f"the path {socket_path} is too long for a socket: set TMPDIR to a shorter path")
        StartBarrier.create(barrier, self.size)
        options = {"size": self.size, "barrier": str(barrier), "store": str(self._folder / "store")}
        try:
            self._start_ranks(socket_path, options)
            hellos = self._answers("start")
        except WorkerFailed as error:
            raise WorkerFailed("\n".join(filter(None, [str(error), self._spec.advice]))) from error
        self._segments = [path for hello in hellos for path in hello.pop("segments")]
        self.about = {**hellos[0], **self._spec.facts}

    def _start_ranks(self, socket_path: Path, options: dict[str, Any]) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(socket_path))
            listener.listen(self.size)
            with open(self._log, "wb") as log:
                for command in self._spec.commands(socket_path, options):
                    self._processes.append(self._started(command, log.fileno()))
            self._accept(listener)

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
                start_new_session=True,  # Ctrl-C reaches only the benchmark, which then ends the ranks
            )
        except OSError as error:
            raise WorkerFailed(f"{self.name}: cannot start {command.arguments[0]}: {error.strerror}") from error

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(0.1)
        deadline = time.monotonic() + _ANSWER_TIMEOUT
        while len(self._channels) < self.size:
            try:
                self._channels.append(_Channel(listener.accept()[0]))
            except TimeoutError:
                self._check_alive()
                if time.monotonic() > deadline:
                    raise self._failure(f"only {len(self._channels)} of {self.size} ranks have started") from None

    # ── blocks ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def block(self, case: Case, iterations: int) -> Block:
        """Measure a block. Raise `Unsupported` if the engine cannot run the case."""
        self._request = {"case": case.as_dict(), "iterations": iterations}
        for channel in self._channels:
            channel.send(self._request)
        answers = self._answers(f"{case.collective} of {case.nbytes} bytes")
        for answer in answers:
            if "unsupported" in answer:
                raise Unsupported(answer["unsupported"])
        return block_of(answers, case)

    def _answers(self, doing: str) -> list[dict[str, Any]]:
        """Return one message of every rank. Raise `WorkerFailed` if a rank reports an error, ends or times out."""
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + _ANSWER_TIMEOUT
        with selectors.DefaultSelector() as selector:
            for number, channel in enumerate(self._channels):
                selector.register(channel.socket, selectors.EVENT_READ, number)
            while len(answers) < self.size:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise self._failure(f"no answer within {_ANSWER_TIMEOUT:.0f} s ({doing})")
                for key, _ in ready:
                    message = self._channels[key.data].receive()
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
                raise self._failure(f"ended with exit code {process.returncode} during its start")

    def _failure(self, problem: str) -> WorkerFailed:
        with contextlib.suppress(OSError):
            printed = self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
            problem = "\n".join([problem, *printed])
        return WorkerFailed(f"{self.name}: {problem}")

    # ── end ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def __enter__(self) -> EngineProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels:
            # Ranks finish the current block first, so that the engine can close. After an interrupt some ranks may not
            # have received the request yet. They receive it now, because the others wait for them inside the block.
            if channel.sent is not self._request:
                channel.send(self._request)
            channel.send({})
        try:
            self._wait(_END_TIMEOUT)
            self._signal(signal.SIGTERM)
            self._wait(_TERM_TIMEOUT)
        finally:  # also after a second Ctrl-C
            for channel in self._channels:
                channel.socket.close()  # also ends ranks in other sessions, such as MPICH's
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
        self.sent: dict[str, Any] | None = None  # the last message
        self._buffer = bytearray()

    def send(self, message: dict[str, Any] | None) -> None:
        self.sent = message
        with contextlib.suppress(OSError):  # the rank has ended; receive() reports it
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Return the next message, {} if the rank has closed the connection, or None if the message is incomplete."""
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
    """Compute a block from the measurements of all ranks. The ranks share one clock."""
    import numpy as np

    begins, ends = (np.array([answer[key] for answer in answers]) for key in ("begins", "ends"))
    wrong = sum(answer["wrong"] for answer in answers)
    if case.collective == "barrier":
        wrong += int(np.count_nonzero(ends.min(axis=0) < begins.max(axis=0)))  # a rank left before all had entered
    iterations = begins.shape[1]
    return Block(
        us=float(np.median(ends.max(axis=0) - begins.max(axis=0))) / 1000,
        longest_us=float(np.median((ends - begins).max(axis=0))) / 1000,
        wrong=wrong,
        iterations=iterations,
        pace=float(ends[0, -1] - begins[0, 0]) / iterations / 1e9,
    )
