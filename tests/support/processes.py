"""Starts ranks as processes for tests: in milliseconds, with messages in both directions, and always ended.

A job of fresh interpreters needs a second for imports. Here one process (the zygote) has imported everything, and forks
a child for each rank. The child runs a function of the test's own module and ends like any Python program, with its
exit handlers. Each rank leads a process group, so that processes that it forks end with the test too. Waiting for a
rank has no timeout of its own: pytest's timeout ends a test that hangs, and `start_job` then adds the stacks of all
threads of all running ranks to the error.

    def reduces(here: Here) -> None:                      # runs in the rank
        group = gw.init()
        here.send(sum=group.all_reduce(group.rank))

    def test_sum(job: StartJob) -> None:
        with job(reduces, 3) as ranks:
            assert [rank.receive()["sum"] for rank in ranks] == [3, 3, 3]
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
MAIN = "import sys; sys.path.insert(0, sys.argv[1]); from support import processes; processes.serve(int(sys.argv[2]))()"


class Here:
    """The connection of a rank to its test. The rank's function gets it as first argument."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    def send(self, **facts: Any) -> None:
        """Send facts to the test."""
        self._line.send(json.dumps(facts).encode())

    def receive(self) -> Any:
        """Wait for the next message of the test."""
        data = self._line.recv(LARGEST)
        if not data:  # the test is over
            os._exit(1)
        return json.loads(data)

    def send_error(self, error: BaseException, **facts: Any) -> None:
        """Send an error to the test: its type, text, attributes and the time."""
        known = {name: getattr(error, name, None) for name in ("culprit", "operation", "generation", "seconds", "peer")}
        self.send(error=type(error).__name__, text=str(error), at=time.monotonic(), **known, **facts)

    def send_when_waiting(self) -> None:
        """Send `waiting=True`, from another thread, as soon as this thread waits inside gradwire."""
        watched = threading.get_ident()

        def stack() -> tuple[object, ...]:
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
                now = stack()
                seen = [*seen, now] if now == seen[0] and "/gradwire/" in str(now) else [now]
            self.send(waiting=True)

        threading.Thread(target=watch, daemon=True).start()


class Rank:
    """A rank's process, for its test."""

    def __init__(self, number: int, zygote: Zygote, line: socket.socket, output: IO[bytes]) -> None:
        self.number = number
        self.pid = 0
        self._zygote = zygote
        self._line = line
        self._output = output

    def receive(self) -> dict[str, Any]:
        """Wait for the next message of the rank."""
        data = self._line.recv(LARGEST)
        if not data:
            raise AssertionError(f"rank {self.number} ended without sending a message:\n{self.output()}")
        facts: dict[str, Any] = json.loads(data)
        return facts

    def silent(self) -> bool:
        """Whether no message of the rank is waiting to be read."""
        return not select.select([self._line], [], [], 0)[0]

    def send(self, word: Any = None) -> None:
        """Send a message to the rank."""
        self._line.send(json.dumps(word).encode())

    def signal(self, number: int = signal.SIGKILL) -> float:
        """Send a signal to the process, and return the time."""
        now = time.monotonic()
        os.kill(self.pid, number)
        return now

    def ended(self) -> int:
        """Wait for the end of the process. Return its exit code, or minus the signal that ended it."""
        return self._zygote.status(self.pid)

    def running(self) -> bool:
        return self._zygote.running(self.pid)

    def output(self) -> str:
        """Return what the rank has printed."""
        file = self._output.fileno()  # the rank writes to it: reading must not move the file position
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

    job = rendezvous.on_this_machine(size)
    with contextlib.ExitStack() as ends:
        if environ is None:
            job.coordinator.start()
            ends.callback(job.coordinator.stop)
        ranks: list[Rank] = []
        ends.callback(_end_all, ranks)
        for number in range(size):
            if environ is None:
                mine: Mapping[str, str] = {
                    "GRADWIRE_RANK": str(number),
                    "GRADWIRE_SIZE": str(size),
                    "GRADWIRE_COORDINATOR": job.coordinator.address,
                    "GRADWIRE_JOB": job.job,
                    "GRADWIRE_TOKEN": job.token or "",
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
    """End the running ranks, and have them print the stacks of all their threads.

    faulthandler prints the stacks on SIGABRT, whatever the interpreter is doing. It is off late in the interpreter's
    finalization: a running rank that prints no stack was past its last exit handler.
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
        output = tempfile.TemporaryFile()  # noqa: SIM115 — the rank closes it
        rank = Rank(number, self, mine, output)
        file = sys.modules[body.__module__].__file__
        request = {"file": file, "body": body.__qualname__, "args": args, "environ": dict(environ)}
        with theirs:
            descriptors = array.array("i", [theirs.fileno(), output.fileno()])
            self._line.sendmsg(
                [json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors.tobytes())]
            )
        while not rank.pid:
            rank.pid = self._report(None).get("started", 0)
        return rank

    def status(self, pid: int) -> int:
        """Wait for the end of a rank. Return its exit code, or minus the signal that ended it."""
        while pid not in self._ended:
            self._report(None)
        return self._ended[pid]

    def running(self, pid: int) -> bool:
        while self._report(0.0):
            pass
        return pid not in self._ended

    def _report(self, seconds: float | None) -> dict[str, int]:
        """Return the next report of the zygote, or nothing if there is none after these seconds."""
        if not select.select([self._line], [], [], seconds)[0]:
            return {}
        report: dict[str, int] = json.loads(self._line.recv(LARGEST) or b"{}")
        assert report, "the zygote has died"
        if "ended" in report:
            self._ended[report["ended"]] = report["status"]
        return report

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
    """Return job(body, size, *args), a context manager that runs body(here, *args) in processes and yields `Rank`s."""

    def start(body: Callable[..., None], size: int, *args: Any, **options: Any) -> Any:
        return start_job(zygote, body, size, *args, **options)

    return start


def place(function: Callable[..., object], mark: str) -> str:
    """Return the file:line of the first line of a function that contains `mark`."""
    lines, first = inspect.getsourcelines(function)
    file = inspect.getsourcefile(function)
    assert file is not None
    return f"{Path(file).name}:{first + next(n for n, line in enumerate(lines) if mark in line)}"


# -- in the zygote ----------------------------------------------------------------------------------------------------


def serve(descriptor: int) -> Callable[[], object]:
    """Fork a rank for each request. In the rank, return the function to run; the zygote itself never returns."""
    import gradwire.membership.client.requests
    import gradwire.membership.coordinator.service  # noqa: F401 — slow imports, which ranks then need not do

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
            body = _find(request["file"], request["body"])  # before the fork, so that the module is imported once
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


def _suppressed_send(line: socket.socket, report: dict[str, int]) -> None:
    with contextlib.suppress(OSError):
        line.send(json.dumps(report).encode())


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
    """Return a function of a test module, which is imported by its path, as pytest does."""
    module = sys.modules.get(file)
    if module is None:
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[file] = module
        spec.loader.exec_module(module)
        # Otherwise the garbage collector of a rank with torch visits all inherited objects at exit, for a second.
        gc.freeze()
    found: Callable[..., object] = getattr(module, name)
    return found
