"""Fuzzes the pipe from a worker to its supervisor. It is no network, but a script may write to any open descriptor."""

from __future__ import annotations

import contextlib
import socket

from fuzz.target import Target, encoded
from gradwire.launch.root_cause import Report
from gradwire.launch.worker_main import EXCEPTION, REPORT, RESULT
from gradwire.launch.worker_process import MessageReader

MOST = 64 << 10


def read_reports(data: bytes) -> bool:
    """Return True if a report was received."""
    worker, mine = socket.socketpair()
    with worker, mine:
        worker.setblocking(False)
        mine.setblocking(False)
        worker.send(data[:MOST] or b"E")
        worker.shutdown(socket.SHUT_WR)
        messages = MessageReader(mine)
        reports: list[Report] = []
        for kind, body in messages.receive():
            assert kind in (EXCEPTION, REPORT, RESULT)
            assert len(body) <= len(data)
            if kind == REPORT:
                with contextlib.suppress(ValueError):
                    reports.append(Report.parse(body))
        assert messages.ended
    return any(report.summary() for report in reports)


_REPORT = {
    "time": 1.5,
    "type": "KeyError",
    "message": "'w'",
    "traceback": "",
    "place": "train.py:3",
    "broken": False,
    "lost": False,
    "culprit": None,
}


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + len(body).to_bytes(8, "big") + body


_SENT = _message(REPORT, encoded(_REPORT))
TARGETS = (Target("report of a worker", read_reports, (_SENT, _message(RESULT, b"") + _SENT), memory=3 << 20),)
