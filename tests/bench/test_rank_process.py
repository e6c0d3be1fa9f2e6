"""A rank of the benchmark measures and checks, also in environments without gradwire."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gradwire as gw
import gradwire.bench.start_rank
from gradwire.bench import rank_process
from gradwire.bench.cases import Case
from gradwire.bench.engines.base import Array, Call, Unsupported
from gradwire.bench.engines.gradwire import Gradwire
from gradwire.bench.rank_process import WARM_UP, BlockMeasurer
from gradwire.bench.start_barrier import StartBarrier

LONG = 30.0


class SingleRank:
    """An engine of one rank. Its broadcast calls `spoil`, which does nothing by default."""

    rank, size = 0, 1

    def __init__(self, spoil: Callable[[Array, int], None] = lambda x, call: None) -> None:
        self.about: dict[str, Any] = {"version": "1"}
        self.calls = 0
        self.made: list[int] = []
        self._spoil = spoil

    def check(self, case: Case) -> None:
        if case.collective != "broadcast":
            raise Unsupported(f"no {case.collective} here")

    def array(self, count: int, dtype: np.dtype[Any]) -> Array:
        self.made.append(count)
        return np.empty(count, dtype)

    def prepare(self, case: Case, x: Array, out: Array) -> Call:
        def run() -> None:
            self.calls += 1
            self._spoil(x, self.calls)

        return Call(run, x)

    def close(self) -> None:
        pass


def request(collective: str = "broadcast", count: int = 10, iterations: int = 5) -> dict[str, Any]:
    return {"case": Case(collective, "float32", "none", count, 1).as_dict(), "iterations": iterations}


@pytest.fixture
def barrier(tmp_path: Path) -> StartBarrier:
    StartBarrier.create(tmp_path / "barrier", 1)
    return StartBarrier(str(tmp_path / "barrier"), 0, 1)


def test_block_measurer_runs_the_iterations_after_a_warm_up(barrier: StartBarrier) -> None:
    engine = SingleRank()
    answer = BlockMeasurer(engine, barrier).answer(request())
    assert (len(answer["begins"]), len(answer["ends"]), answer["wrong"]) == (5, 5, 0)
    assert answer["begins"] == sorted(answer["begins"])
    assert all(begin <= end for begin, end in zip(answer["begins"], answer["ends"], strict=True))
    assert engine.calls == 5 + WARM_UP


def test_block_measurer_with_the_same_case_again_reuses_its_arrays(barrier: StartBarrier) -> None:
    engine = SingleRank()
    one = BlockMeasurer(engine, barrier)
    for count in (10, 10, 20):
        one.answer(request(count=count))
    assert engine.made == [10, 0, 20, 0]


def test_block_measurer_counts_wrong_elements_in_the_last_result_and_at_the_ends_of_the_others(
    barrier: StartBarrier,
) -> None:
    def spoil(x: Array, call: int) -> None:
        if call == 3:
            x[0] += 1
        if call == 5 + WARM_UP:
            x[3:7] += 1

    assert BlockMeasurer(SingleRank(spoil), barrier).answer(request())["wrong"] == 5


def test_block_measurer_with_an_unsupported_case_answers_with_the_reason(barrier: StartBarrier) -> None:
    assert BlockMeasurer(SingleRank(), barrier).answer(request("scatter")) == {"unsupported": "no scatter here"}


def test_gradwire_engine_of_a_version_without_a_collective_reports_it_as_unsupported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    able = SimpleNamespace(transport="shm", native=False)
    monkeypatch.setattr(gw, "init", lambda: SimpleNamespace(rank=0, size=1, capabilities=able, barrier=None))
    engine = Gradwire({"transport": None, "algorithm": "auto", "registered": False})
    engine.check(Case("barrier", "float32", "none", 0, 1))
    with pytest.raises(Unsupported, match="this version of gradwire has no sendrecv"):
        engine.check(Case("sendrecv", "float32", "none", 1, 1))


def test_start_barrier_releases_no_rank_before_all_have_called_it(tmp_path: Path) -> None:
    StartBarrier.create(tmp_path / "barrier", 3)
    passed: list[int] = []

    def cross(rank: int) -> None:
        own = StartBarrier(str(tmp_path / "barrier"), rank, 3)
        for number in range(100):
            own.wait()
            passed.append(number)
            own.wait()

    threads = [threading.Thread(target=cross, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert passed == [number for number in range(100) for _ in range(3)]


def test_segments_lists_mapped_files_until_they_are_removed() -> None:
    path = Path("/dev/shm") / f"gradwire-test-{threading.get_native_id()}"
    path.write_bytes(bytes(4096))
    try:
        mapped = np.memmap(path, np.uint8, "r+")
        assert str(path) in rank_process.segments()
        rank_process.remove([str(path), str(path)])
        assert str(path) not in rank_process.segments()
        assert len(mapped) == 4096
    finally:
        path.unlink(missing_ok=True)


def test_rank_process_of_another_engine_imports_only_gradwire_bench() -> None:
    script = f"""
import json, runpy, sys
start_rank = runpy.run_path({gradwire.bench.start_rank.__file__!r})
start_rank["prepare_imports"]("openmpi")
import gradwire.bench.rank_process, gradwire.bench.engines.mpi, gradwire.bench.engines.gloo
print(json.dumps([name for name in sys.modules if name.split(".")[0] in ("gradwire", "rich", "click", "grpc")]))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], capture_output=True, text=True, timeout=LONG, check=True
    )
    modules = json.loads(done.stdout)
    assert "gradwire.bench.rank_process" in modules
    assert [name for name in modules if name != "gradwire" and not name.startswith("gradwire.bench")] == []


@pytest.mark.parametrize("state", ["the engine hangs", "the engine fails"])
def test_rank_process_ends_when_the_benchmark_closes_its_socket(tmp_path: Path, state: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "meet"))
        listener.listen()
        # A fake mpi4py that hangs, or that cannot be imported.
        (tmp_path / "mpi4py.py").write_text(
            "import time\ntime.sleep(1000)\n" if state == "the engine hangs" else "1 / 0\n"
        )
        command = [sys.executable, gradwire.bench.start_rank.__file__, "mpich", str(tmp_path / "meet"), "{}"]
        environ = {"PYTHONPATH": str(tmp_path)}
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as process:
            channel, _ = listener.accept()
            if state != "the engine hangs":
                message = json.loads(channel.makefile().readline())
                assert "ZeroDivisionError" in message["error"]
            channel.close()
            assert process.wait(LONG) == 1
