"""One rank of one engine: connects to whoever started it, joins its peers, and measures a block whenever asked.

Between blocks it is blocked in reading its socket and burns nothing. One line of JSON each way:

    →  {"segments": ["/dev/shm/…"], "version": "5.0.11", …}              when the engine is ready
    ←  {"case": {…}, "iterations": 200}                                  a block, please
    →  {"begins": [ns …], "ends": [ns …], "wrong": 0}                    on the machine's one monotonic clock
    →  {"unsupported": "…"}                                              not by this engine, and the next block may come
    →  {"error": "Traceback …"}                                          the last word
    ←  {}                                                                the end
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
from gradwire.bench.engines import Call, Engine, Unsupported, open_engine
from gradwire.bench.line import StartingLine
from gradwire.bench.values import Array, Values

_SHARED = "/dev/shm/"
WARMING_UP = 2  # iterations before each block: the caches still hold what another engine did


class Stage:
    """A case with its arrays and values, set up once for all its blocks."""

    def __init__(self, engine: Engine, case: Case) -> None:
        self.case = case
        self.values = Values(case, engine.rank)
        count = case.gets(engine.rank) if case.kind.in_place else case.puts(engine.rank)
        self.x = engine.array(count, self.values.dtype)
        self.out = engine.array(0 if case.kind.in_place else case.gets(engine.rank), self.values.dtype)
        self.call: Call = engine.ready(case, self.x, self.out)

    def result(self, returned: Any) -> Array | None:
        found: Array | None = self.call.result if self.call.result is not None else returned
        return found


def measure(stage: Stage, line: StartingLine, iterations: int) -> dict[str, Any]:
    """When each call began and ended on this rank; inputs are rewritten and results looked at in between."""
    begins, ends, wrong = [], [], 0
    values, x, run = stage.values, stage.x, stage.call.run
    last = WARMING_UP + iterations - 1
    for i in range(last + 1):
        values.write(x, i)
        line.wait()
        begin = monotonic_ns()
        returned = run()
        end = monotonic_ns()
        begins.append(begin)
        ends.append(end)
        look = values.wrong if i == last else values.wrong_at_ends
        wrong += look(stage.result(returned), i)
    return {"begins": begins[WARMING_UP:], "ends": ends[WARMING_UP:], "wrong": wrong}


class Worker:
    def __init__(self, engine: Engine, line: StartingLine) -> None:
        self.engine, self.line = engine, line
        self.stage: Stage | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        case = Case(**request["case"])
        try:
            self.engine.check(case)
        except Unsupported as reason:
            return {"unsupported": str(reason)}
        if self.stage is None or self.stage.case != case:
            self.stage = None  # frees the arrays of the case before
            self.stage = Stage(self.engine, case)
        return measure(self.stage, self.line, request["iterations"])


def main(name: str, meeting_place: str, options: dict[str, Any]) -> None:
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(meeting_place)
        threading.Thread(target=_end_with, args=(channel.fileno(),), daemon=True).start()
        with channel.makefile("r") as lines:  # not "rw": writing to such a file drops what it has read ahead

            def say(**message: Any) -> None:
                channel.sendall(json.dumps(message).encode() + b"\n")

            try:
                engine = open_engine(name, options)
                worker = Worker(engine, StartingLine(options["line"], engine.rank, engine.size))
                say(segments=segments(), **engine.about)
                while request := json.loads(lines.readline() or "{}"):
                    say(**worker.answer(request))
                engine.close()
            except Exception:
                with contextlib.suppress(OSError):
                    say(error=traceback.format_exc())
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)  # whatever the engine would wait for at the end of the process will not come


def _end_with(channel: int) -> None:
    """End when the other side is gone: in the middle of a collective nobody else would notice.

    A thread that sleeps in the kernel until then. Nothing else is told of: data is the main thread's.
    """
    poll = select.poll()
    poll.register(channel, 0)  # POLLHUP and POLLERR are always told
    poll.poll()
    remove(segments())
    os._exit(1)


def segments() -> list[str]:
    """Files of shared memory that this process has mapped; an MPI that is killed leaves its own behind."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].rstrip("\n") for line in maps if _SHARED in line}
    return sorted(path for path in paths if path.startswith(_SHARED) and not path.endswith(" (deleted)"))


def remove(paths: list[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)
