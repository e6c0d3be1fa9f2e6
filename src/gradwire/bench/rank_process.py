"""Run one rank of one engine: connect to the benchmark and to the other ranks, and measure blocks on request.

Between blocks the rank blocks in a read of its socket and uses no CPU time. Each message is one line of JSON:

    →  {"segments": ["/dev/shm/…"], "version": "5.0.11", …}              the engine has started
    ←  {"case": {…}, "iterations": 200}                                  request for a block
    →  {"begins": [ns …], "ends": [ns …], "wrong": 0}                    its times on the machine's monotonic clock
    →  {"unsupported": "…"}                                              or: the engine cannot run the case
    →  {"error": "Traceback …"}                                          an error; then the process ends
    ←  {}                                                                end the process
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import threading
import traceback
from time import monotonic_ns
from typing import Any

from gradwire.bench.cases import Case
from gradwire.bench.engines import open_engine
from gradwire.bench.engines.base import Call, Engine, Unsupported
from gradwire.bench.expected_values import Array, Values
from gradwire.bench.start_barrier import StartBarrier

_SHARED = "/dev/shm/"
WARM_UP = 2  # iterations before each block, because the caches hold the data of another engine


class PreparedCase:
    """A case with its arrays and values, created once for all its blocks."""

    def __init__(self, engine: Engine, case: Case) -> None:
        self.case = case
        self.values = Values(case, engine.rank)
        count = case.gets(engine.rank) if case.kind.in_place else case.puts(engine.rank)
        self.x = engine.array(count, self.values.dtype)
        self.out = engine.array(0 if case.kind.in_place else case.gets(engine.rank), self.values.dtype)
        self.call: Call = engine.prepare(case, self.x, self.out)

    def result(self, returned: Any) -> Array | None:
        found: Array | None = self.call.result if self.call.result is not None else returned
        return found


def measure(prepared: PreparedCase, barrier: StartBarrier, iterations: int) -> dict[str, Any]:
    """Return when each call began and ended on this rank. Inputs are written and results are checked in between."""
    begins, ends, wrong = [], [], 0
    values, x, run = prepared.values, prepared.x, prepared.call.run
    last = WARM_UP + iterations - 1
    for i in range(last + 1):
        values.write(x, i)
        barrier.wait()
        begin = monotonic_ns()
        returned = run()
        end = monotonic_ns()
        begins.append(begin)
        ends.append(end)
        count_wrong = values.wrong if i == last else values.wrong_at_ends
        wrong += count_wrong(prepared.result(returned), i)
    return {"begins": begins[WARM_UP:], "ends": ends[WARM_UP:], "wrong": wrong}


class BlockMeasurer:
    """Answers requests for blocks."""

    def __init__(self, engine: Engine, barrier: StartBarrier) -> None:
        self._engine, self._barrier = engine, barrier
        self._prepared: PreparedCase | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        case = Case(**request["case"])
        try:
            self._engine.check(case)
        except Unsupported as reason:
            return {"unsupported": str(reason)}
        if self._prepared is None or self._prepared.case != case:
            self._prepared = None  # frees the arrays of the previous case
            self._prepared = PreparedCase(self._engine, case)
        return measure(self._prepared, self._barrier, request["iterations"])


def main(name: str, socket_path: str, options: dict[str, Any]) -> None:
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(socket_path)
        threading.Thread(target=_exit_when_closed, args=(channel.fileno(),), daemon=True).start()
        with channel.makefile("r") as lines:  # not "rw": writing to such a file discards its read-ahead buffer

            def send(**message: Any) -> None:
                channel.sendall(json.dumps(message).encode() + b"\n")

            try:
                engine = open_engine(name, options)
                measurer = BlockMeasurer(engine, StartBarrier(options["barrier"], engine.rank, engine.size))
                send(segments=segments(), **engine.about)
                while request := json.loads(lines.readline() or "{}"):
                    send(**measurer.answer(request))
                engine.close()
            except Exception:
                with contextlib.suppress(OSError):
                    send(error=traceback.format_exc())
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)  # a normal exit could wait for other ranks that never finish


def _exit_when_closed(channel: int) -> None:
    """End the process when the benchmark has ended: a rank inside a collective would not notice it otherwise.

    This runs in a thread of its own, which the kernel wakes only at the end of the connection, not for data.
    """
    poll = select.poll()
    poll.register(channel, 0)  # POLLHUP and POLLERR are always reported
    poll.poll()
    remove(segments())
    os._exit(1)


def segments() -> list[str]:
    """Return the shared-memory files that this process has mapped. A killed MPI does not remove its files."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].rstrip("\n") for line in maps if _SHARED in line}
    return sorted(path for path in paths if path.startswith(_SHARED) and not path.endswith(" (deleted)"))


def remove(paths: list[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)
