"""Fuzzes control messages, which are JSON from peers."""

from __future__ import annotations

import json
import time

from fuzz.target import Target, altered, encoded
from fuzz.targets.frames import CALLS, GROUP, Bystander

_LOST = {"kind": "lost", "reason": "died", "culprit": 2, "seconds": None, "operation": None, "group": 0, "sequence": 0}
_MISMATCH = {"kind": "mismatch", "reason": "ranks called different things", "group": GROUP, "sequence": 1}
_CALL = {"sequence": 1, "fingerprint": 0xEF, "what": "barrier()", "site": "train.py:3", "items": ["w: float32[4]"]}
SAMPLES = [
    {"t": "finding", "finding": _LOST},
    {"t": "finding", "finding": _MISMATCH},
    {"t": "finding", "finding": {"kind": "aborted", "reason": "Ctrl-C", "culprit": 1}},
    {"t": "verdict", "finding": _LOST},
    {"t": "verdict", "finding": {"kind": "timeout", "reason": "did not finish", "culprit": None, "seconds": 0.5}},
    {"t": "verdict", "finding": _LOST | {"culprit": 0}},
    {"t": "calls", "g": GROUP, "among": [0, 1, 2], "calls": [_CALL, _CALL | {"sequence": 2}]},
    {"t": "bye"},
    {"t": "at", "g": GROUP, "s": 1, "c": 0},
    {"t": "at", "g": GROUP, "s": len(CALLS) + 1, "c": 0},
    {"t": "where", "g": GROUP},
    {"t": "here", "g": GROUP, "s": 2, "f": 1, "last": "barrier() #2 at train.py:3"},
    {"t": "of a later version"},
]


def receive(data: bytes) -> bool:
    """Receive one message per line, from rank 1, then 2, then 1 again, and so on."""
    bystander = Bystander()
    valid = True
    for number, message in enumerate(data.split(b"\n")):
        try:
            bystander.control.receive(1 + number % 2, message, time.monotonic())
        except ValueError:
            valid = False
    bystander.settle(len(data))
    return valid


_SEQUENCE = b"\n".join(encoded(SAMPLES[number]) for number in (1, 6, 6, 8))
TARGETS = (
    Target(
        "control message",
        receive,
        (*map(encoded, SAMPLES), _SEQUENCE),
        inputs=altered([*SAMPLES, json.loads(encoded(SAMPLES[1]))]).map(encoded),
    ),
)
