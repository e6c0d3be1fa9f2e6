"""Tests of the proofs on messages: which are accepted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.membership.sealing import CoordinatorSeal, Stale, Unproven, WorkerSeal
from gradwire.membership.v1 import gradwire_pb2 as pb

SECRET = b"a secret of sixteen"


def authenticated_pair() -> tuple[WorkerSeal, CoordinatorSeal]:
    worker, coordinator = WorkerSeal(SECRET), CoordinatorSeal(SECRET)
    worker.accept_hello(coordinator.answer_hello(worker.hello()))
    return worker, coordinator


@given(bodies=st.lists(st.binary(max_size=100), min_size=1, max_size=5))
def test_seal_and_open_with_the_same_secret_return_the_body(bodies: list[bytes]) -> None:
    worker, coordinator = authenticated_pair()
    for body in bodies:
        request = worker.seal("Method", body)
        assert coordinator.open("Method", request) == body
        assert worker.open("Method", request, coordinator.seal("Method", request, body[::-1])) == body[::-1]


def test_hello_with_a_wrong_secret_raises() -> None:
    outsider, coordinator = WorkerSeal(b"another secret!!"), CoordinatorSeal(SECRET)
    with pytest.raises(Unproven):
        coordinator.answer_hello(outsider.hello())
    honest, impostor = WorkerSeal(SECRET), CoordinatorSeal(b"another secret!!")
    with pytest.raises(Unproven):
        impostor.answer_hello(honest.hello())
    hello = honest.hello()
    with pytest.raises(Unproven):
        honest.accept_hello(pb.HelloReply(coordinator_nonce=bytes(32), proof=hello.proof))


@pytest.mark.parametrize("nonce", [b"", b"short", bytes(33)])
def test_nonce_of_another_length_raises(nonce: bytes) -> None:
    worker, coordinator = authenticated_pair()
    with pytest.raises(Unproven):
        coordinator.answer_hello(pb.HelloRequest(worker_nonce=nonce))
    with pytest.raises(Unproven):
        coordinator.open("Method", pb.Sealed(worker_nonce=nonce))
    with pytest.raises(Unproven):
        worker.accept_hello(pb.HelloReply(coordinator_nonce=nonce))


def test_open_accepts_each_request_once() -> None:
    worker, coordinator = authenticated_pair()
    first, second = worker.seal("Method", b"1"), worker.seal("Method", b"2")
    coordinator.open("Method", second)
    for replayed in (first, second):
        with pytest.raises(Unproven):
            coordinator.open("Method", replayed)


def test_open_request_to_an_earlier_coordinator_raises_stale() -> None:
    worker, _ = authenticated_pair()
    with pytest.raises(Stale):
        CoordinatorSeal(SECRET).open("Method", worker.seal("Method", b""))


@given(field=st.sampled_from(["worker_nonce", "coordinator_nonce", "sequence", "body", "proof", "method"]))
def test_open_message_with_any_part_changed_raises(field: str) -> None:
    worker, coordinator = authenticated_pair()
    request = worker.seal("Method", b"body")
    reply = coordinator.seal("Method", request, b"answer")
    for message in (forged := pb.Sealed.FromString(request.SerializeToString()), reply):
        if field == "sequence":
            message.sequence += 1
        elif field != "method":
            setattr(message, field, bytes([getattr(message, field)[0] ^ 1]) + getattr(message, field)[1:])
    method = "Other" if field == "method" else "Method"
    with pytest.raises(Unproven):
        coordinator.open(method, forged)
    with pytest.raises(Unproven):
        worker.open(method, request, reply)


def test_open_request_as_its_own_reply_raises() -> None:
    worker, _ = authenticated_pair()
    request = worker.seal("Method", b"body")
    with pytest.raises(Unproven):
        worker.open("Method", request, request)


def test_open_without_proof_remembers_nothing() -> None:
    worker, coordinator = authenticated_pair()
    for number in range(100):
        with pytest.raises(Unproven):
            coordinator.open("Method", pb.Sealed(worker_nonce=bytes([number]) * 32, sequence=1))
    assert coordinator.remembered == 0
    coordinator.open("Method", worker.seal("Method", b""))
    assert coordinator.remembered == 1
