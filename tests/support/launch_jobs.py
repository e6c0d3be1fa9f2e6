"""Helpers for tests of launching: jobs without a rendezvous, and ways to wait for processes without sleeping."""

from __future__ import annotations

import contextlib
import io
import os
import select
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gradwire.launch.fault_injection import Chaos
from gradwire.launch.output import Output
from gradwire.launch.rendezvous import Rendezvous
from gradwire.launch.supervisor import Outcome, Supervisor
from gradwire.launch.worker_process import Task
from gradwire.launch.worker_setup import StaticSetup

LONG = 60.0  # seconds: a bound for something that takes milliseconds, on a busy machine
WAIT = "import signal\nwhile True: signal.pause()\n"


class NoCoordinator:
    """Replaces the coordinator for scripts that do not need one."""

    address = "127.0.0.1:9"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")


def nowhere() -> Rendezvous:
    return Rendezvous(NoCoordinator(), job="a-job", token="a token of this job")


@dataclass(frozen=True)
class Ended:
    outcome: Outcome
    out: str
    err: str


class Job:
    """A supervisor with captured output."""

    def __init__(
        self,
        task: Task,
        size: int,
        *,
        grace: float = 0.0,
        kill_after: float = LONG,
        stop_timeout: float = LONG,
        environ: Mapping[str, str] | None = None,
        log_dir: Path | None = None,
        chaos: Chaos | None = None,
    ) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        self.rendezvous = nowhere()
        self.supervisor = Supervisor(
            task,
            size,
            StaticSetup(size, self.rendezvous, environ),
            chaos=chaos,
            output=Output(out=self.out, err=self.err, log_dir=log_dir),
            grace=grace,
            kill_after=kill_after,
            stop_timeout=stop_timeout,
        )

    def ended(self) -> Ended:
        assert self.supervisor.wait(LONG), f"the job did not end\n{self.out.getvalue()}\n{self.err.getvalue()}"
        assert self.supervisor.outcome is not None
        return Ended(self.supervisor.outcome, self.out.getvalue(), self.err.getvalue())


def run(task: Task, size: int, **options: object) -> Ended:
    job = Job(task, size, **options)  # type: ignore[arg-type]
    with job.supervisor:
        return job.ended()


def written(folder: Path, code: str, name: str = "script.py") -> str:
    path = folder / name
    path.write_text(textwrap.dedent(code))
    return str(path)


def start_command(
    ends: contextlib.ExitStack, folder: Path, environ: Mapping[str, str], *arguments: str
) -> subprocess.Popen[str]:
    """Start `gradwire` in a folder, with its own temporary files and secret. It is killed when `ends` closes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gradwire", *arguments],
        cwd=folder,
        env={**environ, "TMPDIR": str(folder / "tmp"), "XDG_RUNTIME_DIR": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    ends.enter_context(process)
    ends.callback(process.kill)
    return process


class Watched:
    """A process that is not a child of the test, watched by a pidfd: unlike its pid, a pidfd is never reused."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def ends(self, timeout: float = LONG) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)


class Ready:
    """A socket on which scripts report their progress. A script begins with `code` and then calls `say`."""

    CODE = "import socket\nready = socket.create_connection(('127.0.0.1', {port}))\nsay = ready.sendall\n"

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(LONG)
        self.code = self.CODE.format(port=self._listener.getsockname()[1])

    @contextlib.contextmanager
    def told(self, count: int) -> Iterator[list[str]]:
        """Return the first line that each of `count` scripts sends. The connections close when the block ends."""
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(self._listener.accept()[0]) for _ in range(count)]
            files = [stack.enter_context(connection.makefile()) for connection in connections]
            yield [file.readline().strip() for file in files]

    def close(self) -> None:
        self._listener.close()
