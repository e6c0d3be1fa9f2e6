"""The processes of a job under the nemesis: a coordinator, a launcher on each machine, and their workers."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from nemesis import trainer
from nemesis.machines import COORDINATOR, Machines
from nemesis.plan import MACHINES, WORKERS
from support.leftovers import children_of

NAME = "nemesis"
START, LEAST, MOST = 3, 2, MACHINES * WORKERS + 2  # members
AGAIN = 0.5  # seconds before what has ended is started again
MARK = "NEMESIS_MARK"  # in the environment of all processes of one job
TESTS = Path(__file__).parents[1]
_PR_SET_PDEATHSIG = 1


class Job:
    """All processes; `look_after` starts those again that have ended without being told to."""

    def __init__(self, folder: Path, machines: Machines, chaos: str = "") -> None:
        """`chaos`: for the launchers."""
        self.folder, self.machines = folder, machines
        self.records, self.temporary = folder / "records", folder / "tmp"
        self.records.mkdir()
        self.temporary.mkdir()
        self.mark = secrets.token_hex(8)
        self.held = False  # whether the coordinator is to stay away
        self.restarted = {"coordinator": 0, "launcher": 0}  # that had ended by themselves
        self._chaos = ["--chaos", chaos] if chaos else []
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith("GRADWIRE_")} | {
            "GRADWIRE_TOKEN": secrets.token_urlsafe(32),
            "GRADWIRE_INSECURE": "1",
            "GRADWIRE_JOB": NAME,
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "TMPDIR": str(self.temporary),
            "XDG_RUNTIME_DIR": str(self.temporary),
            MARK: self.mark,
        }
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._launchers: dict[tuple[int, bool], subprocess.Popen[bytes]] = {}  # by machine, and whether it is a guest
        self._away: dict[int, float] = {}  # machines without a launcher of their own, and until when
        self._coordinator_due = 0.0
        self._started = 0  # launchers

    # -- the coordinator ----------------------------------------------------------------------------------------------

    def start_coordinator(self) -> None:
        sizes = ["--size", str(START), "--min", str(LEAST), "--max", str(MOST)]
        where = ["--listen", self.machines.address, "--journal", str(self.machines.disk / "journal")]
        self._coordinator = self._start(COORDINATOR, "coordinator", "coordinator", *sizes, *where)

    @property
    def coordinator(self) -> int:
        """Its process id; 0 if it does not run."""
        process = self._coordinator
        return process.pid if process is not None and process.poll() is None else 0

    def kill_coordinator(self) -> None:
        if self._coordinator is not None:
            self._coordinator.kill()
            self._coordinator.wait()
            self._coordinator = None

    def signal_coordinator(self, number: int) -> None:
        if self._coordinator is not None:
            self._coordinator.send_signal(number)

    def forget_journal(self) -> None:
        for path in self.machines.seen_disk.glob("journal*"):
            path.unlink()

    # -- launchers and workers ----------------------------------------------------------------------------------------

    def start_launcher(self, machine: int) -> None:
        """The launcher of a machine replaces workers that are lost."""
        self._away.pop(machine, None)
        self._launchers[machine, False] = self._launch(machine, WORKERS, 1_000_000)

    def start_guests(self, machine: int) -> bool:
        """As many workers as a run begins with come to a machine, once; False if there are guests already."""
        guests = [launcher for (_, guest), launcher in self._launchers.items() if guest]
        if any(launcher.poll() is None for launcher in guests):
            return False
        self._launchers[machine, True] = self._launch(machine, START, 0)
        return True

    def _launch(self, machine: int, workers: int, restarts: int) -> subprocess.Popen[bytes]:
        self._started += 1
        logs = (
            self.folder / f"logs-{self._started}"
        )  # in its place a launcher that is killed would leave temporary ones
        options = ["-n", str(workers), "--restarts", str(restarts), "--log-dir", str(logs), *self._chaos]
        command = ["join", *options, self.machines.address, trainer.__file__, str(self.records), f"m{machine}"]
        return self._start(machine, f"machine-{machine}", *command)

    def workers(self, machine: int) -> list[tuple[str, int]]:
        """The members on a machine that have begun to record, and their process ids."""
        launchers = [launcher for (number, _), launcher in self._launchers.items() if number == machine]
        children = {pid for launcher in launchers for pid in children_of(launcher.pid)}
        names = [path.stem for path in sorted(self.records.glob(f"m{machine}-*.txt"))]
        return [(name, pid) for name in names if (pid := int(name.split("-")[1])) in children]

    def signal_launchers(self, machine: int, number: int) -> None:
        for (where, _), launcher in self._launchers.items():
            if where == machine:
                launcher.send_signal(number)

    def kill_machine(self, machine: int, seconds: float) -> None:
        """All processes of a machine die at once; it is started again later."""
        for _, pid in self.workers(machine):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.signal_launchers(machine, signal.SIGKILL)
        for guest in (False, True):
            if (machine, guest) in self._launchers:
                self._launchers.pop((machine, guest)).wait()
        self._away[machine] = time.monotonic() + seconds

    # -- all of them --------------------------------------------------------------------------------------------------

    def look_after(self) -> None:
        """Start again what has ended, a short time later."""
        now = time.monotonic()
        if not self.held and not self.coordinator:
            if not self._coordinator_due:
                self.restarted["coordinator"] += self._coordinator is not None
                self._coordinator_due = now + AGAIN
            elif now >= self._coordinator_due:
                self._coordinator_due = 0.0
                self.start_coordinator()
        for (machine, guest), launcher in list(self._launchers.items()):
            if launcher.poll() is not None:
                del self._launchers[machine, guest]
                if not guest:
                    self.restarted["launcher"] += 1
                    self._away[machine] = now + AGAIN
        for machine in [machine for machine, until in self._away.items() if now >= until]:
            self.start_launcher(machine)

    def finish(self, seconds: float) -> int:
        """Let the workers come to an end; returns the coordinator's exit code.

        A launcher whose workers were all refused, because they came when all was done, says that it has failed.
        """
        (self.records / "stop").touch()
        deadline = time.monotonic() + seconds
        for launcher in self._launchers.values():
            launcher.wait(max(0.1, deadline - time.monotonic()))
        assert self._coordinator is not None
        self._coordinator.terminate()
        return self._coordinator.wait(seconds)

    def close(self) -> None:
        """Whatever still runs is ended: a launcher ends its workers."""
        running = [one for one in (*self._launchers.values(), self._coordinator) if one is not None]
        for process in running:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in running:
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def left(self) -> list[str]:
        """Processes of this job that run, and files that should have been removed."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self.mark}".encode() in (path / "environ").read_bytes():
                    command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found.append(f"process {path.name}: {command[:200]}")
        found += [f"file {path}" for path in self.temporary.rglob("*")]
        found += [f"shared memory {path}" for path in Path("/dev/shm").glob("*gradwire*")]
        return found + [f"socket {path}" for path in self.folder.rglob("*") if path.is_socket()]

    def _start(self, machine: int, label: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [*self.machines.command(machine), sys.executable, "-m", "gradwire", *arguments]
        environ = self._environ | {"GRADWIRE_HOST": label}
        with self._log(label) as output:
            return subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 — a test process has one thread
            )

    def _log(self, label: str) -> IO[bytes]:
        return (self.folder / f"{label}.log").open("ab")


def _end_with_parent() -> None:
    """The kernel sends SIGTERM to this process when the one that started it ends, in whatever way."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
