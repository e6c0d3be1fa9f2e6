"""Fuzzes the JSON inside collectives, the set-up handshake and transferred states."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from fuzz.target import MIB, Target, altered, encoded
from gradwire.arrays import Array
from gradwire.collectives import DEFAULTS, tuning_table
from gradwire.errors import ConfigError, GradwireError, PeerLost
from gradwire.generation import handshake
from gradwire.host import machine
from gradwire.identity import PROTOCOL, Identity
from gradwire.liveness.lifeline import HeartbeatProfile
from gradwire.operations import split_join, values
from gradwire.operations.types import CallKey, Declined, Operation, Position, Shape
from gradwire.topology import Topology
from gradwire.training.commit_rules import Standing
from gradwire.training.state import State, memory_for
from gradwire.wire import parse_json

SIZE = struct.Struct("<q")
HERE = Position(rank=0, size=2)


class Partner:
    """The other of two ranks. All that this rank receives comes from the input, until its end."""

    rank, size = 0, 2

    def __init__(self, data: bytes) -> None:
        self._rest = data

    def __call__(self, shape: Shape, x: Array, out: Array, key: CallKey | None = None) -> None:
        flat = out.reshape(-1).view(np.uint8)
        skip = x.nbytes if shape.collective == "all_gather" else 0
        flat[:skip] = x.reshape(-1).view(np.uint8)
        part, self._rest = self._rest[: flat.size - skip], self._rest[flat.size - skip :]
        if len(part) < flat.size - skip:
            raise PeerLost("the input has ended")
        flat[skip:] = np.frombuffer(part, np.uint8)

    def disagree(self, reason: str) -> GradwireError:
        return GradwireError(reason[:1000])


def run(operation: Operation, data: bytes) -> bool:
    try:
        outcome = operation.body(Partner(data))
    except GradwireError:
        return False
    return type(outcome) is not Declined


def broadcast_value(data: bytes) -> bool:
    return run(values.broadcast_value(HERE, root=1), data)


def all_gather_values(data: bytes) -> bool:
    return run(values.all_gather_values(HERE, [1]), data)


def scatter(data: bytes) -> bool:
    return run(split_join.scatter(HERE, root=1), data)


def read_handshake(data: bytes) -> bool:
    """The other rank's entry in the set-up handshake."""
    received = values.decode(data)
    try:
        entry = handshake.Entry.of(1, received, _IDENTITY)
        HeartbeatProfile.from_wire(entry.profile)
        tuning_table.decode(entry.table)
    except (ConfigError, ValueError):
        return False
    return True


def read_standing(data: bytes) -> bool:
    try:
        standing = Standing.from_wire(values.decode(data))
    except ValueError:
        return False
    assert -1 <= standing.committed <= standing.completed
    return True


def take_state(data: bytes) -> bool:
    """The skeleton of a state without the arrays' bytes. Its memory is bounded, and the state must stay valid."""
    kept = np.zeros(3)
    mine: dict[str, Any] = {"w": kept, "inner": {"b": np.zeros(1, np.float32)}, "lr": 0.1}
    state = State(mine)
    try:
        state.put_together(data, memory_for(data))
    except ValueError:
        return False
    State(mine)  # the state can still be transferred
    return True


def _framed(*texts: bytes) -> tuple[bytes, ...]:
    return tuple(SIZE.pack(len(text)) + text for text in texts)


def _json_target(name: str, target: Callable[[bytes], bool], samples: list[Any], **options: Any) -> Target:
    return Target(name, target, tuple(map(encoded, samples)), inputs=altered(samples).map(encoded), **options)


_ANNOUNCED = ["float32", [2, 2], [1, 1]]
_SCATTERED = _framed(encoded(_ANNOUNCED))[0] + bytes(16)
_SKELETON = parse_json(
    State({"w": np.ones(2), "n": 3, "lr": 0.5, 7: (None, [True, "x"]), "e": np.ones((0, 2))}).take_apart()[0]
)
_IDENTITY = Identity(bytes(16), 1, 0, ("rank 0", "rank 1"), Topology.single(2))
_ENTRY = json.loads(
    encoded([PROTOCOL, bytes(16).hex(), "auto", tuning_table.encode(DEFAULTS), [True, 7, "4026531836"], None])
)
_CLAIMED = values.MAX_VALUE_BYTES + MIB  # the largest claim that is allowed; memory that is not written costs nothing
TARGETS = (
    Target("broadcast_value", broadcast_value, _framed(b"[1,2]", b'{"a":null}'), memory=_CLAIMED),
    Target("all_gather_values", all_gather_values, _framed(b"[1,2]"), memory=_CLAIMED),
    Target("scatter", scatter, (_SCATTERED,), memory=_CLAIMED),
    _json_target("handshake", read_handshake, [_ENTRY]),
    _json_target(
        "standing", read_standing, [[3, 1, 2, "ab", True, 1, 0, "every 3"], [-1, 0, -1, "", False, 2, 15, ""]]
    ),
    _json_target("state", take_state, [_SKELETON], memory=machine.memory() + MIB),
)
