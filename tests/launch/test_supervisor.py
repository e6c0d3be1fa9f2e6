from __future__ import annotations

import functools
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradwire.errors import InvalidSize, TransportError
from gradwire.launch import process_tree, supervisor, worker_process
from gradwire.launch.root_cause import describe
from gradwire.launch.supervisor import Supervisor
from gradwire.launch.worker_process import Task
from gradwire.launch.worker_setup import StaticSetup
from support.launch_jobs import LONG, WAIT, Job, NoCoordinator, Ready, Watched, nowhere, run, written
from support.ranks import eventually

RANK = "import os\nrank = int(os.environ['RANK'])\n"


@pytest.fixture
def ready() -> Iterator[Ready]:
    found = Ready()
    yield found
    found.close()


def test_supervisor_job_that_ends_well_has_exit_code_0(tmp_path: Path) -> None:
    job = Job(Task.script(written(tmp_path, RANK + "print('I am', rank)")), 3)
    with job.supervisor:
        assert [one.number for one in job.supervisor.workers] == [0, 1, 2]
        ended = job.ended()
    assert sorted(ended.out.splitlines()) == ["[0] I am 0", "[1] I am 1", "[2] I am 2"]
    assert ended.err == ""
    assert (ended.outcome.exit_code, ended.outcome.root, ended.outcome.stopped_by) == (0, None, None)
    assert [one.status for one in ended.outcome.endings] == [0, 0, 0]
    coordinator = job.rendezvous.coordinator
    assert isinstance(coordinator, NoCoordinator)
    assert coordinator.calls == ["start", "stop"]


def test_supervisor_with_size_zero_raises() -> None:
    with pytest.raises(InvalidSize, match="at least 1 worker, not 0"):
        Supervisor(Task.script("x.py"), 0, StaticSetup(0, nowhere()))


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("raise SystemExit(3)", 3, "left by sys.exit(3) at script.py:4"),
        ("os._exit(4)", 4, "exited with code 4"),
        ("raise ValueError('boom')", 1, "raised ValueError: boom"),
        ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL (signal 9)"),
        ("os.abort()", 134, "was killed by SIGABRT (signal 6)"),
        ("os.kill(os.getpid(), 15)", 143, "was killed by SIGTERM (signal 15)"),
    ],
)
def test_supervisor_stops_the_others_after_a_failure_and_returns_its_exit_code(
    code: str, exit_code: int, said: str, tmp_path: Path
) -> None:
    ended = run(Task.script(written(tmp_path, f"{RANK}if rank == 1:\n    {code}\n{WAIT}")), 3)
    root = ended.outcome.root
    assert root is not None
    assert (root.number, ended.outcome.exit_code) == (1, exit_code)
    assert said in describe(root)
    assert [one.stopped for one in ended.outcome.endings] == [True, False, True]
    assert [one.status for one in ended.outcome.endings if one.stopped] == [-15, -15]


def test_supervisor_gives_the_others_a_grace_period(tmp_path: Path, ready: Ready) -> None:
    """An error of a broken group in that period is a consequence, even if it is reported first."""
    code = f"""
from gradwire.errors import Aborted
{RANK}
{ready.code}
if rank == 1:
    say(b"waiting\\n")
    ready.recv(1)  # until the other rank is gone
    raise ValueError("the reason")
say(b"failing\\n")
raise Aborted("rank 1 gave up", culprit=1)
"""
    job = Job(Task.script(written(tmp_path, code)), 2, grace=LONG)
    with job.supervisor:
        with ready.told(2):
            assert eventually(lambda: job.supervisor.workers[0].gone)
        ended = job.ended()
    assert ended.outcome.root is not None
    assert (ended.outcome.root.number, ended.outcome.exit_code) == (1, 1)
    assert [one.failed for one in ended.outcome.endings] == [True, True]


def test_supervisor_ends_a_rank_that_raised_but_hangs(tmp_path: Path) -> None:
    code = "import threading\nthreading.Thread(target=threading.Event().wait).start()\nraise ValueError('stuck')\n"
    ended = run(Task.script(written(tmp_path, code)), 1)
    assert ended.outcome.root is not None
    assert ended.outcome.root.report is not None
    assert (ended.outcome.root.report.message, ended.outcome.exit_code) == ("stuck", 1)


def test_supervisor_kills_a_worker_that_ignores_sigterm(tmp_path: Path, ready: Ready) -> None:
    code = f"{ready.code}import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay(b'ready\\n')\n{WAIT}"
    job = Job(Task.script(written(tmp_path, code)), 2, kill_after=0.1)
    with job.supervisor:
        with ready.told(2):
            job.supervisor.stop()
        ended = job.ended()
    assert [one.status for one in ended.outcome.endings] == [-9, -9]
    assert (ended.outcome.root, ended.outcome.exit_code) == (None, 143)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, 137)])
def test_supervisor_stop_is_no_failure(number: int, exit_code: int, tmp_path: Path, ready: Ready) -> None:
    job = Job(Task.script(written(tmp_path, f"{ready.code}say(b'ready\\n')\n{WAIT}")), 2)
    with job.supervisor:
        with ready.told(2):
            assert not job.supervisor.wait(0)
            job.supervisor.stop(number)
        ended = job.ended()
    assert (ended.outcome.root, ended.outcome.exit_code) == (None, exit_code)
    assert ended.err == ""
    job.supervisor.stop()  # has no effect after the end


def test_supervisor_ends_processes_that_a_worker_started(tmp_path: Path, ready: Ready) -> None:
    """In the same process group or another one, even if they ignore signals; after a failure and after a good end."""
    code = f"""
{RANK}
{ready.code}
import signal, subprocess, sys
wait = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"
children = [subprocess.Popen([sys.executable, "-c", wait], stdout=subprocess.PIPE, process_group=group)
            for group in (None, 0)]
if (pid := os.fork()) == 0:
    signal.pause()
for child in children:
    child.stdout.readline()
say(" ".join(map(str, [pid, *(child.pid for child in children)])).encode() + b"\\n")
ready.recv(1)
os._exit(rank)
"""
    job = Job(Task.script(written(tmp_path, code)), 2, grace=LONG)
    with job.supervisor:
        with ready.told(2) as told:
            watched = [Watched(int(pid)) for line in told for pid in line.split()]
            assert len(watched) == 6
        ended = job.ended()
    assert [one.status for one in ended.outcome.endings] == [0, 1]
    assert all(one.ends(0) for one in watched)


def test_supervisor_leaves_a_process_in_its_own_session_alone(tmp_path: Path, ready: Ready) -> None:
    code = f"""
{ready.code}
import subprocess, sys
wait = "import signal; signal.pause()"
say(str(subprocess.Popen([sys.executable, "-c", wait], start_new_session=True).pid).encode() + b"\\n")
"""
    job = Job(Task.script(written(tmp_path, code)), 1)
    with job.supervisor:
        with ready.told(1) as (pid,):
            daemon = Watched(int(pid))
        ended = job.ended()
    assert ended.outcome.exit_code == 0
    assert not daemon.ends(0)
    os.kill(daemon.pid, signal.SIGKILL)
    assert daemon.ends()


def test_supervisor_passes_much_output_of_all_ranks(tmp_path: Path) -> None:
    code = RANK + "import sys\nfor i in range(4000): print(f'{i:0500}'); print(f'{i:0500}', file=sys.stderr)\n"
    ended = run(Task.script(written(tmp_path, code)), 3, environ=os.environ | {"PYTHONUNBUFFERED": ""})
    for text in (ended.out, ended.err):
        lines = [re.fullmatch(r"\[(\d)\] (\d{500})", line) for line in text.splitlines()]
        for rank in range(3):
            assert [int(line[2]) for line in lines if line and int(line[1]) == rank] == list(range(4000))


def test_supervisor_writes_a_log_for_each_rank(tmp_path: Path) -> None:
    code = RANK + "import sys\nprint('out', rank)\nprint('err', rank, file=sys.stderr)\n"
    run(Task.script(written(tmp_path, code)), 2, log_dir=tmp_path / "logs")
    logs = {path.name: sorted(path.read_text().splitlines()) for path in (tmp_path / "logs").iterdir()}
    assert logs == {"rank-0.log": ["err 0", "out 0"], "rank-1.log": ["err 1", "out 1"]}


def test_supervisor_keeps_the_last_lines_of_a_rank_without_a_traceback(tmp_path: Path) -> None:
    code = "import os, sys\nprint('CUDA error: out of luck', file=sys.stderr)\nos._exit(5)\n"
    ended = run(Task.script(written(tmp_path, code)), 1)
    assert ended.outcome.last_lines == ("CUDA error: out of luck",)


def test_supervisor_that_cannot_start_a_worker_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third worker fails to start; the other two, which already run, are ended."""
    started: list[worker_process.Worker] = []

    class Scarce(worker_process.Worker):
        def __init__(self, rank: int, *rest: object, **options: object) -> None:
            if rank == 2:
                raise OSError(11, "Resource temporarily unavailable")
            super().__init__(rank, *rest, **options)  # type: ignore[arg-type]
            started.append(self)

    monkeypatch.setattr(supervisor, "Worker", Scarce)
    job = Job(Task.script(written(tmp_path, WAIT)), 3)
    with pytest.raises(TransportError, match=r"cannot start worker 2 of 3: .*temporarily unavailable"):
        job.supervisor.start()
    assert [process_tree.is_empty(one.pid) for one in started] == [True, True]
    coordinator = job.rendezvous.coordinator
    assert isinstance(coordinator, NoCoordinator)
    assert coordinator.calls == ["start", "stop"]


def test_supervisor_exception_in_the_block_stops_the_job(tmp_path: Path) -> None:
    job = Job(Task.script(written(tmp_path, WAIT)), 2)
    with pytest.raises(KeyError), job.supervisor:
        raise KeyError
    assert job.supervisor.outcome is not None
    assert all(one.stopped for one in job.supervisor.outcome.endings)


def test_supervisor_leaves_a_process_that_cannot_be_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hasty = functools.partial(worker_process.Worker, leftover_seconds=0.1, unkillable_seconds=0.1)
    monkeypatch.setattr(supervisor, "Worker", hasty)
    job = Job(Task.script(written(tmp_path, WAIT)), 1)
    with monkeypatch.context() as without:
        without.setattr(process_tree, "kill", lambda session: None)
        with job.supervisor:
            job.supervisor.stop(signal.SIGKILL)
            ended = job.ended()
    hanging = job.supervisor.workers[0]
    assert not process_tree.is_empty(hanging.pid)
    assert (ended.outcome.endings[0].status, ended.outcome.exit_code) == (-9, 137)
    process_tree.kill(hanging.pid)
    hanging.close()


def test_supervisor_without_pidfd_polls_for_exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    ended = run(Task.script(written(tmp_path, f"{RANK}if rank == 0: raise SystemExit(6)\n{WAIT}")), 2)
    assert ended.outcome.exit_code == 6


def test_supervisor_started_in_a_thread_that_ends_keeps_its_workers(tmp_path: Path, ready: Ready) -> None:
    """The workers belong to the process, not to the thread (as they would with PR_SET_PDEATHSIG)."""
    job = Job(Task.script(written(tmp_path, f"{ready.code}say(b'ready\\n')\nready.recv(1)\nprint('well')")), 1)
    starter = threading.Thread(target=job.supervisor.start)
    starter.start()
    starter.join(LONG)
    with ready.told(1):
        pass
    assert job.ended().out == "[0] well\n"


def test_supervisor_with_a_long_grace_ends_without_waiting_for_it(tmp_path: Path) -> None:
    """A job that ends well does not wait for the grace period."""
    run(Task.script(written(tmp_path, "")), 1, grace=10_000.0)
