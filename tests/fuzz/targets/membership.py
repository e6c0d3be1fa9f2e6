"""Fuzzes the coordinator's protocol: bodies from holders of the secret, and seals from callers without it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from hypothesis import strategies as st

from fuzz.target import MIB, Target, damaged
from gradwire.identity import PROTOCOL
from gradwire.membership import codec
from gradwire.membership.codec import Malformed, parse
from gradwire.membership.coordinator import servicer
from gradwire.membership.coordinator.servicer import CoordinatorServicer
from gradwire.membership.coordinator.state_machine import Membership
from gradwire.membership.grpc_import import grpc
from gradwire.membership.sealing import CoordinatorSeal, Stale, Unproven, WorkerSeal
from gradwire.membership.v1 import gradwire_pb2 as pb
from gradwire.security import tokens

SECRET = bytes(32)
RUN = bytes(16)
KINDS: list[Any] = [getattr(pb, name) for name in sorted(pb.DESCRIPTOR.message_types_by_name)]
READERS: dict[str, Callable[[Any], object]] = {
    "Member": codec.member_from_wire,
    "RegisterWorkerRequest": lambda message: codec.claim_from_wire(message, 1),
    "Assembly": lambda message: codec.assembly_from_wire(message, None),
    "News": codec.news_from_wire,
    "Checkpoint": codec.checkpoint_from_wire,
}
CALLS = {  # methods of the coordinator and their bodies
    "RegisterWorker": pb.RegisterWorkerRequest,
    "UnregisterWorker": pb.UnregisterWorkerRequest,
    "Heartbeat": pb.HeartbeatRequest,
    "StartCheckpoint": pb.CheckpointRequest,
    "EndCheckpoint": pb.CheckpointRequest,
}
METHODS = list(CALLS)
_PART = struct.Struct("<BH")  # a method, and the length of the body that follows


def read_message(data: bytes) -> bool:
    """Parse a message. The first byte selects its type."""
    kind = KINDS[data[0] % len(KINDS)] if data else KINDS[0]
    try:
        message = parse(kind, data[1:])
        READERS.get(kind.__name__, bool)(message)
    except Malformed:
        return False
    return True


def open_seal(data: bytes) -> bool:
    """Change one byte of a sealed request and of its reply for each three bytes of the input.

    A message that is accepted must have its original body.
    """
    worker, coordinator = WorkerSeal(SECRET), CoordinatorSeal(SECRET)
    worker.accept_hello(coordinator.answer_hello(worker.hello()))
    request = worker.seal("Heartbeat", b"the request")
    try:
        received = parse(pb.Sealed, _changed(request.SerializeToString(), data))
        if coordinator.open("Heartbeat", received) != b"the request":
            raise AssertionError("a forged request was accepted")
        reply = coordinator.seal("Heartbeat", received, b"the answer")
        answer = worker.open("Heartbeat", request, parse(pb.Sealed, _changed(reply.SerializeToString(), data)))
        assert answer == b"the answer", "a forged reply was accepted"
    except (Malformed, Unproven, Stale):
        return False
    return True


def _changed(message: bytes, data: bytes) -> bytes:
    changed = bytearray(message)
    for at in range(0, len(data) - 2, 3):
        changed[int.from_bytes(data[at : at + 2], "big") % len(message)] ^= data[at + 2]
    return bytes(changed)


class Aborted(Exception):
    """A call was ended with a status."""


class Context:
    """Stands in for gRPC's context of a call."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def abort(self, code: grpc.StatusCode, reason: str) -> None:
        assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED), reason
        assert len(reason) < 1000
        raise Aborted

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return True


def call(data: bytes) -> bool:
    """Make calls to an elastic job, with the secret or, if the first byte is odd, with a join token for two members."""
    membership = Membership("job", RUN, start=1, minimum=1, maximum=3)
    coordinator = CoordinatorSeal(SECRET)
    token = tokens.read(tokens.make(SECRET, job="job", expires_in=1000.0, uses=2))
    worker = WorkerSeal(token if data[:1] and data[0] & 1 else SECRET)
    server = CoordinatorServicer(membership, coordinator)
    worker.accept_hello(coordinator.answer_hello(worker.hello()))
    accepted = True
    with patch.object(servicer, "_LONGEST_DELAY", 0.0):
        for method, body in _calls(data[1:]):
            request = worker.seal(method, body)
            try:
                reply = getattr(server, method)(request, Context())
            except Aborted:
                accepted = False
            else:
                worker.open(method, request, reply)
    assert 0 <= len(membership.members) <= 3
    names = [member.id for member in membership.members]
    assert len(set(names)) == len(names)
    snapshot = json.loads(json.dumps(membership.snapshot()))
    assert Membership.restore(snapshot, 0.0).members == membership.members
    return accepted


def _calls(data: bytes) -> Iterator[tuple[str, bytes]]:
    while len(data) >= _PART.size:
        number, length = _PART.unpack_from(data)
        yield METHODS[number % len(METHODS)], data[_PART.size : _PART.size + length]
        data = data[_PART.size + length :]


def _member(name: str) -> pb.Member:
    return pb.Member(id=name, host="machine", hostname="host", pid=7, address="127.0.0.1:5000")


def _claim(name: str, generation: int = 0, lost: tuple[str, ...] = ()) -> pb.RegisterWorkerRequest:
    session = (name * 16).encode()[:16]
    return pb.RegisterWorkerRequest(
        member=_member(name),
        generation=generation,
        lost=lost,
        session=session,
        run=RUN if generation else b"",
        protocol=PROTOCOL,
        transport="auto",
    )


REQUESTS: list[tuple[str, Any]] = [
    ("RegisterWorker", _claim("a")),
    ("RegisterWorker", _claim("b")),
    ("Heartbeat", pb.HeartbeatRequest(ids=["a", "b"], run=RUN)),
    ("RegisterWorker", _claim("a", 1, ("b",))),
    ("RegisterWorker", _claim("b", 1)),
    ("StartCheckpoint", pb.CheckpointRequest(id="a", epoch=1)),
    ("EndCheckpoint", pb.CheckpointRequest(id="a", epoch=1)),
    ("Heartbeat", pb.HeartbeatRequest(ids=["b"], gone=["a"])),
    ("UnregisterWorker", pb.UnregisterWorkerRequest(member=_member("b"))),
]
BODIES = [(METHODS.index(method), body.SerializeToString()) for method, body in REQUESTS]


def _encoded(calls: list[tuple[int, bytes]]) -> bytes:
    return b"".join(_PART.pack(number, len(body)) + body for number, body in calls)


_ASSEMBLY = pb.Assembly(job="job", run=RUN, generation=1, rank=0, members=[pb.Member(id="a", rank=0)])
_EXAMPLES = [*(body for _, body in REQUESTS), _ASSEMBLY, pb.News(generation=1, joiners=1, evicted=["a"], checkpoint=3)]
_READABLE = tuple(bytes([KINDS.index(type(one))]) + one.SerializeToString() for one in _EXAMPLES)
_ANY_BODY = st.sampled_from(BODIES) | st.tuples(
    st.integers(0, len(METHODS) - 1), damaged([body for _, body in BODIES]) | st.binary(max_size=60)
)
TARGETS = (
    Target("protobuf", read_message, _READABLE),
    Target("seal", open_seal, (b"", b"\x00\x05\x00")),
    Target(
        "coordinator",
        call,
        (b"\0" + _encoded(BODIES), b"\1" + _encoded(BODIES), b"\0" + _encoded(BODIES[:4])),
        inputs=st.tuples(st.sampled_from((b"\0", b"\1")), st.lists(_ANY_BODY, max_size=10).map(_encoded)).map(b"".join),
        memory=2 * MIB,
    ),
)
