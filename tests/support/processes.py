"""Ranks as processes: started in milliseconds, spoken to, killed, and in the end always gone.

A job of fresh interpreters spends a second on imports. Here one process (the zygote) has imported everything and forks
a child for each rank; the child then runs a function of the test's own module and ends as any Python program does,
with its exit handlers. Each rank leads a process group, so that what it forks ends with the test too. Waiting for a
rank has no limit of its own: pytest's timeout ends a test that hangs, and `start_job` then adds the stacks of all
threads of all ranks that still run to the error.

    def reduces(here: Here) -> None:                      # runs in the rank
        group = gw.init()
        here.tell(sum=group.all_reduce(group.rank))

    def test_sum(job: StartJob) -> None:
        with job(reduces, 3) as ranks:
            assert [rank.hear()["sum"] for rank in ranks] == [3, 3, 3]
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib.util
import inspect
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import pytest

LARGEST = 1 << 20
MAIN = "import sys; sys.path.insert(0, sys.argv[1]); from support import processes; processes.breed(int(sys.argv[2]))()"


class Here:
    """What a rank's function gets: the line to its test."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    def tell(self, **facts: Any) -> None:
        self._line.send(json.dumps(facts).encode())

    def hear(self) -> Any:
        """Wait for what the test says."""
        data = self._line.recv(LARGEST)
        if not data:  # the test is over
            os._exit(1)
        return json.loads(data)

    def tell_error(self, error: BaseException, **facts: Any) -> None:
        known = {name: getattr(error, name, None) for name in ("culprit", "operation", "generation", "seconds", "peer")}
        self.tell(error=type(error).__name__, text=str(error), at=time.monotonic(), **known, **facts)

    def tell_when_waiting(self) -> None:
        """From another thread, tell `waiting=True` as soon as this one stands still inside gradwire."""
        watched = threading.get_ident()

        def look() -> tuple[object, ...]:
            frame = sys._current_frames().get(watched)
            spots = []
            while frame is not None:
                spots.append((frame.f_code.co_filename, frame.f_lasti))
                frame = frame.f_back
            return tuple(spots)

        def watch() -> None:
            seen: list[tuple[object, ...]] = [()]
            while len(seen) < 5:
                time.sleep(0.01)
                now = look()
                seen = [*seen, now] if now == seen[0] and "/gradwire/" in str(now) else [now]
            self.tell(waiting=True)

        threading.Thread(target=watch, daemon=True).start()


class Rank:
    """A process as its test sees it."""

    def __init__(self, number: int, zygote: Zygote, line: socket.socket, output: IO[bytes]) -> None:
        self.number = number
        self.pid = 0
        self._zygote = zygote
        self._line = line
        self._output = output

    def hear(self) -> dict[str, Any]:
        """The next thing it tells."""
        data = self._line.recv(LARGEST)
        if not data:
            raise AssertionError(f"rank {self.number} ended without a word:\n{self.output()}")
        facts: dict[str, Any] = json.loads(data)
        return facts

    def silent(self) -> bool:
        """Whether it has told nothing more so far."""
        return not select.select([self._line], [], [], 0)[0]

    def tell(self, word: Any = None) -> None:
        self._line.send(json.dumps(word).encode())

    def signal(self, number: int = signal.SIGKILL) -> float:
        """Send a signal; returns when."""
        now = time.monotonic()
        os.kill(self.pid, number)
        return now

    def ended(self) -> int:
        """Wait for its end: the exit code, or minus the signal."""
        return self._zygote.status(self.pid)

    def running(self) -> bool:
        return self._zygote.running(self.pid)

    def output(self) -> str:
        """What it has printed."""
        file = self._output.fileno()  # which it writes to: where it does so must not be moved
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

    def end(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._zygote.status(self.pid)
        self._line.close()
        self._output.close()


class StartJob(Protocol):
    def __call__(
        self,
        body: Callable[..., None],
        size: int,
        *args: Any,
        environ: Mapping[str, str] | Callable[[int], Mapping[str, str]] | None = None,
    ) -> contextlib.AbstractContextManager[list[Rank]]: ...


@contextlib.contextmanager
def start_job(
    zygote: Zygote,
    body: Callable[..., None],
    size: int,
    *args: Any,
    environ: Mapping[str, str] | Callable[[int], Mapping[str, str]] | None = None,
) -> Iterator[list[Rank]]:
    """Run body(here, *args) in `size` processes. Without an environment, `gw.init()` finds the job at a coordinator."""
    from gradwire.launch import rendezvous

    meeting = rendezvous.on_this_machine(size)
    with contextlib.ExitStack() as ends:
        if environ is None:
            meeting.coordinator.start()
            ends.callback(meeting.coordinator.stop)
        ranks: list[Rank] = []
        ends.callback(_end_all, ranks)
        for number in range(size):
            if environ is None:
                mine: Mapping[str, str] = {
                    "GRADWIRE_RANK": str(number),
                    "GRADWIRE_SIZE": str(size),
                    "GRADWIRE_COORDINATOR": meeting.coordinator.address,
                    "GRADWIRE_JOB": meeting.job,
                    "GRADWIRE_TOKEN": meeting.token,
                }
            else:
                mine = environ(number) if callable(environ) else environ
            ranks.append(zygote.start(number, body, args, mine))
        try:
            yield ranks
        except BaseException as error:
            _end_with_stacks(ranks)
            for rank in ranks:
                if text := rank.output().strip():
                    error.add_note(f"rank {rank.number} printed:\n{text}")
            raise


def _end_with_stacks(ranks: list[Rank]) -> None:
    """End those that still run, with the stacks of all their threads in their output.

    faulthandler writes them on SIGABRT, whatever the interpreter is doing. It is off late in the interpreter's
    finalization: a rank that still ran and shows no stack was past its last exit handler.
    """
    running = [rank for rank in ranks if rank.running()]
    for number in (signal.SIGABRT, signal.SIGCONT):  # a stopped process handles no signal before it continues
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                rank.signal(number)
    for rank in running:
        rank.ended()


def _end_all(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.end()


class Zygote:
    """The process that forks the ranks."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ended: dict[int, int] = {}
        environ = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", MAIN, str(Path(__file__).parents[1]), str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env=environ,
                start_new_session=True,
            )

    def start(self, number: int, body: Callable[..., None], args: tuple[Any, ...], environ: Mapping[str, str]) -> Rank:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output = tempfile.TemporaryFile()  # noqa: SIM115 — the rank's to close
        rank = Rank(number, self, mine, output)
        file = sys.modules[body.__module__].__file__
        request = {"file": file, "body": body.__qualname__, "args": args, "environ": dict(environ)}
        with theirs:
            descriptors = array.array("i", [theirs.fileno(), output.fileno()])
            self._line.sendmsg(
                [json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors.tobytes())]
            )
        while not rank.pid:
            rank.pid = self._news(None).get("started", 0)
        return rank

    def status(self, pid: int) -> int:
        """Wait for the end of a rank: its exit code, or minus the signal."""
        while pid not in self._ended:
            self._news(None)
        return self._ended[pid]

    def running(self, pid: int) -> bool:
        while self._news(0.0):
            pass
        return pid not in self._ended

    def _news(self, seconds: float | None) -> dict[str, int]:
        """What the zygote reports next; nothing if there is no report after these seconds."""
        if not select.select([self._line], [], [], seconds)[0]:
            return {}
        news: dict[str, int] = json.loads(self._line.recv(LARGEST) or b"{}")
        assert news, "the zygote has died"
        if "ended" in news:
            self._ended[news["ended"]] = news["status"]
        return news

    def stop(self) -> None:
        self._line.close()
        self._process.wait()


@pytest.fixture(scope="session", name="zygote")
def zygote_fixture() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.stop()


@pytest.fixture(name="job")
def job_fixture(zygote: Zygote) -> StartJob:
    """job(body, size, *args): a context manager that runs body(here, *args) in processes and yields the `Rank`s."""

    def start(body: Callable[..., None], size: int, *args: Any, **options: Any) -> Any:
        return start_job(zygote, body, size, *args, **options)

    return start


def place(function: Callable[..., object], mark: str) -> str:
    """file:line of the line of a function that has this in it."""
    lines, first = inspect.getsourcelines(function)
    file = inspect.getsourcefile(function)
    assert file is not None
    return f"{Path(file).name}:{first + next(n for n, line in enumerate(lines) if mark in line)}"


# -- in the zygote ----------------------------------------------------------------------------------------------------


def breed(descriptor: int) -> Callable[[], object]:
    """Fork a rank for each request; returns, in the rank, what it has to do, and ends the process otherwise."""
    import gradwire.membership.client.requests
    import gradwire.membership.coordinator.service  # noqa: F401 — all that a rank would spend its first second on

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a rank that is ended by SIGABRT leaves no core file
    line = socket.socket(fileno=descriptor)
    children: dict[int, int] = {}
    while True:
        poll = select.poll()
        poll.register(line, select.POLLIN)
        for watched in children:
            poll.register(watched, select.POLLIN)
        for ready, _ in poll.poll():
            if ready != descriptor:
                pid = children.pop(ready)
                os.close(ready)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                _suppressed_send(line, {"ended": pid, "status": status})
                continue
            data, descriptors, _, _ = socket.recv_fds(line, LARGEST, 2)
            if not data:
                _end(children)
            request = json.loads(data)
            body = _find(request["file"], request["body"])  # before the fork: an import counts once
            pid = os.fork()
            if pid == 0:
                line.close()
                for watched in children:
                    os.close(watched)
                return _task(body, request, descriptors)
            os.setpgid(pid, pid)
            for one in descriptors:
                os.close(one)
            children[os.pidfd_open(pid)] = pid
            _suppressed_send(line, {"started": pid})


def _suppressed_send(line: socket.socket, news: dict[str, int]) -> None:
    with contextlib.suppress(OSError):
        line.send(json.dumps(news).encode())


def _end(children: Mapping[int, int]) -> None:
    for pid in children.values():
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)


def _task(body: Callable[..., object], request: dict[str, Any], descriptors: list[int]) -> Callable[[], object]:
    os.setpgid(0, 0)
    line, output = descriptors
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.set_inheritable(line, False)
    os.environ.update(request["environ"])
    here = Here(socket.socket(fileno=line))
    return lambda: body(here, *request["args"])


def _find(file: str, name: str) -> Callable[..., object]:
    """A function of a test module, which is imported by its path as pytest does."""
    module = sys.modules.get(file)
    if module is None:
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[file] = module
        spec.loader.exec_module(module)
        # Otherwise a rank with torch collects all that it was forked with at its end, which takes a second of a core.
        gc.freeze()
    found: Callable[..., object] = getattr(module, name)
    return found
