"""A worker: measures and checks, and lives in environments that have no gradwire."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire.bench.start
from gradwire.bench import worker
from gradwire.bench.cases import Case
from gradwire.bench.engines import Array, Call, Unsupported
from gradwire.bench.line import StartingLine
from gradwire.bench.worker import WARMING_UP, Worker

LONG = 30.0


class Alone:
    """An engine of one rank, whose broadcast does nothing, rightly or wrongly."""

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

    def ready(self, case: Case, x: Array, out: Array) -> Call:
        def run() -> None:
            self.calls += 1
            self._spoil(x, self.calls)

        return Call(run, x)

    def close(self) -> None:
        pass


def request(collective: str = "broadcast", count: int = 10, iterations: int = 5) -> dict[str, Any]:
    return {"case": Case(collective, "float32", "none", count, 1).as_dict(), "iterations": iterations}


@pytest.fixture
def line(tmp_path: Path) -> StartingLine:
    StartingLine.draw(tmp_path / "line", 1)
    return StartingLine(str(tmp_path / "line"), 0, 1)


def test_a_block_has_its_iterations_and_a_few_to_warm_up(line: StartingLine) -> None:
    engine = Alone()
    answer = Worker(engine, line).answer(request())
    assert (len(answer["begins"]), len(answer["ends"]), answer["wrong"]) == (5, 5, 0)
    assert answer["begins"] == sorted(answer["begins"])
    assert all(begin <= end for begin, end in zip(answer["begins"], answer["ends"], strict=True))
    assert engine.calls == 5 + WARMING_UP


def test_arrays_are_kept_for_the_blocks_of_a_case(line: StartingLine) -> None:
    engine = Alone()
    one = Worker(engine, line)
    for count in (10, 10, 20):
        one.answer(request(count=count))
    assert engine.made == [10, 0, 20, 0]


def test_wrong_elements_are_counted_in_all_of_the_last_result_and_at_the_ends_of_the_others(
    line: StartingLine,
) -> None:
    def spoil(x: Array, call: int) -> None:
        if call == 3:
            x[0] += 1
        if call == 5 + WARMING_UP:
            x[3:7] += 1

    assert Worker(Alone(spoil), line).answer(request())["wrong"] == 5


def test_what_an_engine_cannot_do_is_an_answer(line: StartingLine) -> None:
    assert Worker(Alone(), line).answer(request("scatter")) == {"unsupported": "no scatter here"}


def test_nobody_passes_the_line_before_all_are_there(tmp_path: Path) -> None:
    StartingLine.draw(tmp_path / "line", 3)
    passed: list[int] = []

    def walk(rank: int) -> None:
        mine = StartingLine(str(tmp_path / "line"), rank, 3)
        for number in range(100):
            mine.wait()
            passed.append(number)
            mine.wait()

    threads = [threading.Thread(target=walk, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert passed == [number for number in range(100) for _ in range(3)]


def test_segments_are_the_shared_files_that_are_still_there() -> None:
    path = Path("/dev/shm") / f"gradwire-test-{threading.get_native_id()}"
    path.write_bytes(bytes(4096))
    try:
        mapped = np.memmap(path, np.uint8, "r+")
        assert str(path) in worker.segments()
        worker.remove([str(path), str(path)])
        assert str(path) not in worker.segments()
        assert len(mapped) == 4096
    finally:
        path.unlink(missing_ok=True)


def test_it_needs_nothing_of_gradwire_but_itself() -> None:
    script = f"""
import json, runpy, sys
side_door = runpy.run_path({gradwire.bench.start.__file__!r})
side_door["enter"]("openmpi")
import gradwire.bench.worker, gradwire.bench.engines.mpi, gradwire.bench.engines.gloo
print(json.dumps([name for name in sys.modules if name.split(".")[0] in ("gradwire", "rich", "click", "grpc")]))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], capture_output=True, text=True, timeout=LONG, check=True
    )
    modules = json.loads(done.stdout)
    assert "gradwire.bench.worker" in modules
    assert [name for name in modules if name != "gradwire" and not name.startswith("gradwire.bench")] == []


@pytest.mark.parametrize("way", ["nothing was said", "an engine that is not here"])
def test_it_ends_with_whoever_started_it(tmp_path: Path, way: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "meet"))
        listener.listen()
        # Python's own stand-in for an engine that hangs while it starts, or that is not there at all.
        (tmp_path / "mpi4py.py").write_text(
            "import time\ntime.sleep(1000)\n" if way.startswith("nothing") else "1 / 0\n"
        )
        command = [sys.executable, gradwire.bench.start.__file__, "mpich", str(tmp_path / "meet"), "{}"]
        environ = {"PYTHONPATH": str(tmp_path)}
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as process:
            channel, _ = listener.accept()
            if not way.startswith("nothing"):
                message = json.loads(channel.makefile().readline())
                assert "ZeroDivisionError" in message["error"]
            channel.close()
            assert process.wait(LONG) == 1
