"""The setup of elastic jobs, with real worker processes; the test stands in for the coordinator and its heartbeats."""

from __future__ import annotations

import io
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from gradwire.errors import WorkerFailed
from gradwire.launch import elastic_setup, process_tree
from gradwire.launch.coordinator_process import CoordinatorProcess
from gradwire.launch.elastic_setup import ElasticRendezvous, ElasticSetup
from gradwire.launch.fault_injection import Chaos, parse
from gradwire.launch.output import Output
from gradwire.launch.restart_policy import FIRST_DELAY, Restarts
from gradwire.launch.root_cause import explain
from gradwire.launch.supervisor import Supervisor
from gradwire.launch.worker_process import Task
from gradwire.membership.types import News
from support.launch_jobs import LONG, WAIT, Ended, Job, Ready, Watched, run, written
from support.ranks import eventually

NUMBER = "import os\nnumber = int(os.environ['GRADWIRE_MEMBER'].removeprefix('box/'))\n"


class FakeHeartbeats:
    """Records what a setup reports, and sends it the news of a coordinator."""

    def __init__(self, on_news: Callable[[News], None]) -> None:
        self.send = on_news
        self.watched: list[str] = []
        self.ended: list[str] = []
        self.stopped: list[str] = []

    def start(self) -> None:
        pass

    def watch(self, ids: Iterable[str]) -> None:
        self.watched += ids

    def frozen(self, ids: Iterable[str]) -> None:
        self.stopped = list(ids)

    def gone(self, ids: Iterable[str]) -> None:
        self.ended += ids

    def close(self) -> None:
        pass


class Elastic:
    """An elastic job whose output can be read."""

    def __init__(
        self,
        script: str,
        size: int,
        *,
        minimum: int = 1,
        restarts: int = 0,
        first_delay: float = FIRST_DELAY,
        chaos: str | None = None,
        coordinator: str | None = None,
        log_dir: Path | None = None,
    ) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        self._heartbeats: list[FakeHeartbeats] = []
        rendezvous = ElasticRendezvous(
            "127.0.0.1:9", "a token of this job", "box", "a-job", size, heartbeats=self._new_heartbeats
        )
        coordinator_process = (
            CoordinatorProcess(Task.script(coordinator), os.environ) if coordinator is not None else None
        )
        self.supervisor = Supervisor(
            Task.script(script),
            size,
            ElasticSetup(size, rendezvous, coordinator_process),
            restarts=Restarts(minimum=minimum, restarts=restarts, first_delay=first_delay),
            chaos=Chaos(parse(chaos), 0) if chaos is not None else None,
            output=Output(out=self.out, err=self.err, log_dir=log_dir),
            grace=0.0,
            kill_after=LONG,
        )

    @property
    def heartbeats(self) -> FakeHeartbeats:
        return self._heartbeats[0]

    def _new_heartbeats(self, on_news: Callable[[News], None]) -> FakeHeartbeats:
        self._heartbeats.append(FakeHeartbeats(on_news))
        return self._heartbeats[-1]

    def ended(self) -> Ended:
        assert self.supervisor.wait(LONG), f"the job did not end\n{self.out.getvalue()}\n{self.err.getvalue()}"
        assert self.supervisor.outcome is not None
        return Ended(self.supervisor.outcome, self.out.getvalue(), self.err.getvalue())

    def pids(self) -> list[int]:
        return [worker.pid for worker in self.supervisor.workers]


@pytest.fixture
def ready() -> Iterator[Ready]:
    found = Ready()
    yield found
    found.close()


def test_lost_worker_is_replaced_under_a_new_number(tmp_path: Path, ready: Ready) -> None:
    code = f"{NUMBER}{ready.code}say(str(number).encode() + b'\\n')\nready.recv(1)\nprint('done')\n"
    job = Elastic(written(tmp_path, code), 2, restarts=1, log_dir=tmp_path / "logs")
    with job.supervisor:
        with ready.told(2) as told:
            assert sorted(told) == ["0", "1"]
            os.kill(job.pids()[1], signal.SIGKILL)
            with ready.told(1) as (successor,):
                assert successor == "2"
        ended = job.ended()
    _, lost, successor_pid = job.pids()
    assert ended.err == (
        f"gradwire: worker 1 (pid {lost}) was killed by SIGKILL (signal 9), which the kernel also sends when "
        f"memory runs out; worker 2 (pid {successor_pid}) takes its place (restart 1 of 1)\n"
    )
    assert sorted(ended.out.splitlines()) == ["[0] done", "[2] done"]
    assert (ended.outcome.root, ended.outcome.exit_code) == (None, 0)
    assert [one.status for one in ended.outcome.endings] == [0, -9, 0]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [f"worker-{n}.log" for n in range(3)]
    assert job.heartbeats.watched == ["box/0", "box/1", "box/2"]
    assert sorted(job.heartbeats.ended) == ["box/0", "box/1", "box/2"]


def test_worker_environment_describes_the_elastic_job(tmp_path: Path) -> None:
    code = """
    import os
    names = ["GRADWIRE_MEMBER", "GRADWIRE_ELASTIC", "GRADWIRE_COORDINATOR", "GRADWIRE_JOB", "GRADWIRE_TOKEN"]
    names += ["GRADWIRE_RANK", "GRADWIRE_SIZE", "GRADWIRE_LOCAL_RANK", "RANK", "WORLD_SIZE"]
    print(*(os.environ.get(name) for name in names), sep=",")
    if os.environ["GRADWIRE_MEMBER"] == "box/1":
        os.kill(os.getpid(), 9)
    """
    job = Elastic(written(tmp_path, code), 2, minimum=2, restarts=1)
    with job.supervisor:
        ended = job.ended()
    shared = "1,127.0.0.1:9,a-job,a token of this job"
    assert f"[0] box/0,{shared},0,2,0,None,None\n" in ended.out
    assert f"[1] box/1,{shared},1,2,1,None,None\n" in ended.out
    if len(job.supervisor.workers) == 3:  # unless the first worker finished before the second died
        assert f"[2] box/2,{shared},None,None,1,None,None\n" in ended.out


def test_worker_that_leaves_with_code_0_is_no_loss(tmp_path: Path, ready: Ready) -> None:
    code = f"{NUMBER}{ready.code}say(b'ready\\n')\nif number: ready.recv(1)\n"
    job = Elastic(written(tmp_path, code), 2, minimum=2, restarts=3)
    with job.supervisor:
        with ready.told(2):
            assert eventually(lambda: job.supervisor.workers[0].gone)
            assert not job.supervisor.wait(0)
        ended = job.ended()
    assert (ended.outcome.exit_code, ended.err, len(ended.outcome.endings)) == (0, "", 2)


def test_job_below_its_minimum_without_restarts_fails(tmp_path: Path, ready: Ready) -> None:
    code = f"{NUMBER}{ready.code}say(b'ready\\n')\nif number == 1: ready.recv(1), os._exit(3)\n{WAIT}"
    job = Elastic(written(tmp_path, code), 2, minimum=2)
    with job.supervisor:
        with ready.told(2):
            pass
        ended = job.ended()
    pid = job.pids()[1]
    assert ended.err == f"gradwire: worker 1 (pid {pid}) exited with code 3; 1 of at least 2 are left\n"
    assert ended.outcome.exit_code == 3
    assert ended.outcome.root is not None
    assert ended.outcome.root.name == "worker 1"
    assert ended.outcome.endings[0].stopped


def test_job_continues_down_to_its_minimum(tmp_path: Path, ready: Ready) -> None:
    code = f"{NUMBER}{ready.code}say(b'ready\\n')\nready.recv(1)\n"
    job = Elastic(written(tmp_path, code), 3, minimum=2)
    with job.supervisor:
        with ready.told(3):
            os.kill(job.pids()[0], signal.SIGKILL)
            assert eventually(lambda: "2 workers continue" in job.err.getvalue())
        ended = job.ended()
    assert ended.outcome.exit_code == 0


def test_error_without_a_recovery_fails_the_job(tmp_path: Path, ready: Ready) -> None:
    code = f"{NUMBER}{ready.code}say(b'ready\\n')\nif number: ready.recv(1)\nelse: raise OSError('disk full')\n"
    for regrouped in (False, True):
        job = Elastic(written(tmp_path, code), 2)
        with job.supervisor:
            job.heartbeats.send(News(1, 0, (), None))
            with ready.told(2):
                assert eventually(lambda job=job: "1 worker continues" in job.err.getvalue())  # type: ignore[misc]
                job.heartbeats.send(News(1 + regrouped, 0, (), None))
            ended = job.ended()
        assert ended.outcome.exit_code == (0 if regrouped else 1)
        assert ended.err.endswith("OSError: disk full\n"), "a worker's own error is shown when it ends"
        assert ended.err.count("Traceback") == 1


FINISHED = "from gradwire.errors import Finished\nraise Finished('there is nothing left to join')\n"


@pytest.mark.parametrize("news", [None, News(0, 0, (), None)])
def test_job_whose_workers_are_all_refused_as_too_late_without_any_work_has_failed(
    tmp_path: Path, news: News | None
) -> None:
    """No worker has done anything, here or elsewhere: the job has failed, and the refusal is the root cause."""
    job = Elastic(written(tmp_path, FINISHED), 2, restarts=2)
    with job.supervisor:
        if news is not None:
            job.heartbeats.send(news)
        ended = job.ended()
    assert len(ended.outcome.endings) == 2
    assert ended.outcome.exit_code == 1
    assert ended.outcome.root is not None
    assert "Finished: there is nothing left to join" in explain(ended.outcome.root, ())


def test_workers_that_join_a_finished_job_have_not_failed(tmp_path: Path) -> None:
    job = Elastic(written(tmp_path, FINISHED), 2)
    with job.supervisor:
        job.heartbeats.send(News(3, 0, (), None, finished=True))
        ended = job.ended()
    assert (ended.outcome.exit_code, ended.outcome.root) == (0, None)


def test_worker_that_crashes_in_its_set_up_is_replaced_later_each_time(
    tmp_path: Path,
) -> None:
    code = f"{NUMBER}import sys\nsys.exit(3 if number < 4 else 0)\n"
    job = Elastic(written(tmp_path, code), 1, restarts=9, first_delay=0.01)
    with job.supervisor:
        ended = job.ended()
    said = re.findall(r"it is replaced in ([0-9.]+) s, because .* \(restart (\d) of 9\)", ended.err)
    assert said == [("0.01", "2"), ("0.02", "3"), ("0.04", "4")]
    assert ended.err.count("takes its place (restart ") == 4
    assert len(ended.outcome.endings) == 5


def test_worker_that_fails_like_another_before_the_first_generation_is_not_replaced(tmp_path: Path) -> None:
    job = Elastic(written(tmp_path, "import a_module_that_does_not_exist\n"), 1, restarts=9, first_delay=LONG)
    with job.supervisor:
        ended = job.ended()
    assert len(ended.outcome.endings) == 2
    assert ended.outcome.root is not None
    assert "No module named 'a_module_that_does_not_exist'" in explain(ended.outcome.root, [])
    assert "another worker failed in the same way before the first step, so a restart would not help" in ended.err


def test_workers_that_fail_differently_before_the_first_generation_are_replaced(tmp_path: Path) -> None:
    code = f"{NUMBER}if number < 3: raise OSError(f'try {{number}}')\n"
    job = Elastic(written(tmp_path, code), 1, restarts=3, first_delay=0.01)
    with job.supervisor:
        ended = job.ended()
    assert [one.status for one in ended.outcome.endings] == [1, 1, 1, 0]


def test_joins_are_printed_in_one_line_each(tmp_path: Path, ready: Ready) -> None:
    job = Elastic(written(tmp_path, f"{ready.code}say(b'up\\n')\nready.recv(1)\n"), 1)
    with job.supervisor:
        with ready.told(1):
            for generation, size in ((1, 1), (2, 17), (2, 16), (3, 17), (4, 17)):
                job.heartbeats.send(News(generation, 0, (), None, size=size))
            assert eventually(lambda: "generation 3" in job.err.getvalue())
        ended = job.ended()
    assert [line for line in ended.err.splitlines() if "joined" in line] == [
        "gradwire: 16 workers have joined; generation 2 has 17 workers",
        "gradwire: 1 worker has joined; generation 3 has 17 workers",
    ]


def test_join_before_the_first_news_of_a_generation_is_printed(tmp_path: Path, ready: Ready) -> None:
    job = Elastic(written(tmp_path, f"{ready.code}say(b'up\\n')\nready.recv(1)\n"), 1)
    with job.supervisor:
        with ready.told(1):
            for generation, size in ((0, 0), (2, 3)):
                job.heartbeats.send(News(generation, 0, (), None, size=size))
            assert eventually(lambda: "2 workers have joined; generation 2 has 3 workers" in job.err.getvalue())
        job.ended()


def test_worker_with_a_delayed_replacement_is_not_replaced_when_the_job_stops(
    tmp_path: Path,
) -> None:
    job = Elastic(written(tmp_path, "raise SystemExit(3)\n"), 1, restarts=9, first_delay=LONG)
    with job.supervisor:
        assert eventually(lambda: "it is replaced in 30 s" in job.err.getvalue())
        assert not job.supervisor.wait(0)
        job.supervisor.stop(signal.SIGTERM)
        ended = job.ended()
    assert len(ended.outcome.endings) == 2
    assert ended.outcome.exit_code == 143


def test_workers_receive_news_and_cuts(tmp_path: Path, ready: Ready) -> None:
    code = f"""
    {NUMBER}
    {ready.code}
    import time
    from gradwire.membership.client.news_pipe import NewsReader
    reader = NewsReader.from_environ()
    say(b"ready\\n")
    ready.recv(1)
    while (news := reader.latest()) is None:
        time.sleep(0.01)
    print(news.generation, news.joiners, news.evicted, *reader.cuts())
    """.replace("\n    ", "\n")
    job = Elastic(written(tmp_path, code), 2, chaos="cut 0-1 @0s")
    with job.supervisor:
        with ready.told(2):
            assert eventually(lambda: "cut the links between worker 0 and worker 1" in job.err.getvalue())
            job.heartbeats.send(News(4, 1, ("box/1",), None))
        ended = job.ended()
    assert sorted(ended.out.splitlines()) == ["[0] 4 1 () box/1", "[1] 4 1 ('box/1',) box/0"]


def test_frozen_worker_is_replaced_after_a_generation_without_it(
    tmp_path: Path, ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic_setup, "RESUME_SECONDS", 0.1)
    code = f"{NUMBER}{ready.code}say(b'ready\\n')\nready.recv(1)\n"
    job = Elastic(written(tmp_path, code), 2, restarts=1)
    with job.supervisor:
        job.heartbeats.send(News(1, 0, (), None))
        with ready.told(2):
            os.kill(job.pids()[0], signal.SIGSTOP)
            assert eventually(lambda: job.heartbeats.stopped == ["box/0"])  # its heartbeats stop
            job.heartbeats.send(News(2, 0, (), None))
            with ready.told(1):
                pass
        ended = job.ended()
    assert "was frozen" in ended.err
    assert "takes its place (restart 1 of 1)" in ended.err
    assert (ended.outcome.exit_code, ended.outcome.endings[0].status) == (0, -9)


def test_coordinator_that_was_killed_is_restarted(tmp_path: Path, ready: Ready) -> None:
    code = f"{NUMBER}{ready.code}say(b'worker\\n')\nready.recv(1)\n"
    serve = written(tmp_path, f"{ready.code}import os\nsay(str(os.getpid()).encode() + b'\\n')\n{WAIT}", "serve.py")
    job = Elastic(written(tmp_path, code), 1, coordinator=serve)
    with job.supervisor:
        with ready.told(2) as told:
            told.remove("worker")
            first = Watched(int(told[0]))
            assert job.supervisor.inject("restart coordinator", []) == f"killed the coordinator (pid {first.pid})"
            with ready.told(1) as (pid,):
                assert first.ends(0)
                second = Watched(int(pid))
        ended = job.ended()
        assert second.ends(0)
    assert ended.err == f"gradwire: the coordinator (pid {first.pid}) was killed by chaos; it is restarted\n"
    assert ended.outcome.exit_code == 0


def test_coordinator_that_cannot_start_fails_the_job(tmp_path: Path) -> None:
    serve = written(tmp_path, "raise SystemExit('the journal is damaged')", "serve.py")
    job = Elastic(written(tmp_path, WAIT), 1, coordinator=serve)
    said = r"the coordinator \(pid \d+\) gave up at serve.py:1: .* before the job began\nthe journal is damaged$"
    with pytest.raises(WorkerFailed, match=said), job.supervisor:
        job.supervisor.wait(LONG)
    assert all(process_tree.is_empty(worker.pid) for worker in job.supervisor.workers)


def test_chaos_kill_is_recovered_by_the_job(tmp_path: Path, ready: Ready) -> None:
    code = f"{NUMBER}\nif number:\n    {ready.code.replace(chr(10), chr(10) + '    ')}\n"
    code += f"    say(b'ready\\n')\n    ready.recv(1)\nelse:\n    {WAIT.replace(chr(10), chr(10) + '    ')}\n"
    job = Elastic(written(tmp_path, code), 2, restarts=1, chaos="kill 0 @0s; kill 9 @0s; join @0s")
    with job.supervisor:
        with ready.told(3):
            pass
        ended = job.ended()
    assert f"chaos: killed worker 0 (pid {job.pids()[0]}) at " in ended.err
    assert "chaos: found no worker 9 to kill at " in ended.err
    assert "chaos: started worker 2 (pid " in ended.err
    assert f"worker 0 (pid {job.pids()[0]}) was killed by chaos; worker 3 (pid " in ended.err
    assert ended.outcome.exit_code == 0


def test_chaos_kill_in_a_job_of_fixed_size_fails_it(tmp_path: Path) -> None:
    ended = run(Task.script(written(tmp_path, WAIT)), 2, chaos=Chaos(parse("kill 1 @0s"), 0))
    assert ended.outcome.exit_code == 137
    assert ended.outcome.root is not None
    assert ended.outcome.root.kill_reason == "was killed by chaos"


def test_chaos_freeze_resumes_the_worker_after_its_duration(tmp_path: Path, ready: Ready) -> None:
    script = written(tmp_path, f"{ready.code}say(b'ready\\n')\nready.recv(1)\n")
    job = Job(Task.script(script), 1, chaos=Chaos(parse("freeze 0 @0s for 100ms"), 0))
    with job.supervisor:
        with ready.told(1):
            assert eventually(lambda: "chaos: resumed" in job.err.getvalue())
        ended = job.ended()
    assert ended.outcome.exit_code == 0
    froze, resumed = ended.err.splitlines()
    pid = job.supervisor.workers[0].pid
    assert re.fullmatch(rf"chaos: froze rank 0 \(pid {pid}\) at \d+\.\d s, for 0\.1 s", froze)
    assert re.fullmatch(rf"chaos: resumed rank 0 \(pid {pid}\) at \d+\.\d s", resumed)


def test_chaos_frozen_worker_ends_when_the_job_stops(tmp_path: Path) -> None:
    job = Job(Task.script(written(tmp_path, WAIT)), 1, chaos=Chaos(parse("freeze 0 @100ms"), 0))
    with job.supervisor:
        assert eventually(lambda: "chaos: froze" in job.err.getvalue())
        job.supervisor.stop(signal.SIGTERM)
        ended = job.ended()
    assert ended.outcome.exit_code == 143
