"""Mailbox: messages are matched by sender and tag, in order, also when requests or offers are withdrawn halfway."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gradwire.generation import mailbox
from gradwire.generation.mailbox import IncomingMessage, Mailbox, Request, UnmatchedMessages
from gradwire.wire import MAX_EAGER, Header, Kind, WireError

GROUP = 1


def header(kind: Kind, source: int, tag: int, nbytes: int = 0, *, sequence: int = 0, offered: int = 0) -> Header:
    return Header(kind, 1, 1, source, GROUP, sequence, tag, offered & 0xFFFFFFFF, offered >> 32, nbytes)


class PointToPoint:
    """A mailbox, and what it has told the senders."""

    def __init__(self) -> None:
        self.accepted: list[tuple[int, int]] = []
        self.relieved = 0
        self.redirected: list[tuple[int, memoryview, memoryview]] = []
        self.box = Mailbox(lambda world, letter: self.accepted.append((world, letter.identity)), self._relieve)

    def _relieve(self) -> None:
        self.relieved += 1

    def eager(self, source: int, tag: int, payload: bytes) -> None:
        head = header(Kind.EAGER, source, tag, len(payload))
        memory = self.box.begin(source, head)
        memory[:] = payload
        self.box.finish(source, head, memory)

    def offer(self, source: int, tag: int, nbytes: int, identity: int) -> None:
        head = header(Kind.OFFER, source, tag, sequence=identity, offered=nbytes)
        self.box.finish(source, head, self.box.begin(source, head))

    def payload(self, source: int, identity: int, payload: bytes) -> None:
        head = header(Kind.PAYLOAD, source, 0, len(payload), sequence=identity)
        memory = self.box.begin(source, head)
        memory[:] = payload
        self.box.finish(source, head, memory)

    def withdraw(self, source: int, identity: int) -> None:
        head = header(Kind.WITHDRAW, source, 0, sequence=identity)
        self.box.finish(source, head, self.box.begin(source, head))

    def ask(self, nbytes: int, source: int | None, tag: int) -> Request:
        request = Request(GROUP, source, tag, memoryview(bytearray(nbytes)))
        self.box.post_request(request)
        return request

    def give_up(self, request: Request) -> bool:
        return self.box.cancel_request(request, lambda *what: self.redirected.append(what))


def test_mailbox_message_completes_the_recv_that_waits_for_it() -> None:
    post = PointToPoint()
    waiting = post.ask(3, source=2, tag=5)
    post.eager(1, 5, b"abc")
    post.eager(2, 4, b"abc")
    assert not waiting.done
    post.eager(2, 5, b"xyz")
    assert (waiting.sender, bytes(waiting.target)) == (2, b"xyz")


def test_mailbox_recv_gets_the_message_that_arrived_first() -> None:
    post = PointToPoint()
    for payload in (b"1", b"2"):
        post.eager(2, 5, payload)
    assert bytes(post.ask(1, None, 5).target) == b"1"
    assert bytes(post.ask(1, 2, 5).target) == b"2"
    assert not post.ask(1, 2, 5).done


def test_mailbox_long_message_is_accepted_by_a_recv_and_written_into_its_buffer() -> None:
    post = PointToPoint()
    post.offer(2, 5, nbytes=4, identity=77)
    assert not post.accepted
    request = post.ask(4, 2, 5)
    assert post.accepted == [(2, 77)]
    assert not request.done
    head = header(Kind.PAYLOAD, 2, 5, 4, sequence=77)
    memory = post.box.begin(2, head)
    assert memory is request.target
    memory[:] = b"long"
    post.box.finish(2, head, memory)
    assert (request.sender, bytes(request.target)) == (2, b"long")


def test_mailbox_payload_that_is_repeated_or_withdrawn_halfway_is_refused() -> None:
    post = PointToPoint()
    post.offer(2, 5, nbytes=4, identity=77)
    request = post.ask(4, 2, 5)
    head = header(Kind.PAYLOAD, 2, 5, 4, sequence=77)
    memory = post.box.begin(2, head)
    with pytest.raises(WireError, match="two links"):
        post.box.begin(2, head)
    with pytest.raises(WireError, match="withdrawn while it arrives"):
        post.withdraw(2, 77)
    with pytest.raises(WireError, match="identity 77"):
        post.offer(2, 5, nbytes=4, identity=77)
    memory[:] = b"long"
    post.box.finish(2, head, memory)
    assert (request.sender, bytes(request.target)) == (2, b"long")
    post.offer(2, 5, nbytes=4, identity=77)  # done with, the number may come again


def test_mailbox_offer_with_identity_0_is_refused() -> None:
    with pytest.raises(WireError, match="identity 0"):
        PointToPoint().offer(2, 5, nbytes=1 << 40, identity=0)


def test_mailbox_payload_that_was_not_accepted_is_refused() -> None:
    post = PointToPoint()
    post.offer(2, 5, nbytes=4, identity=77)
    for source, identity, nbytes in ((2, 77, 4), (2, 78, 4), (1, 77, 4)):
        with pytest.raises(WireError, match="was not accepted"):
            post.box.begin(source, header(Kind.PAYLOAD, source, 5, nbytes, sequence=identity))
    post.ask(4, 2, 5)
    with pytest.raises(WireError):
        post.box.begin(2, header(Kind.PAYLOAD, 2, 5, 5, sequence=77))


@pytest.mark.parametrize("kind", [Kind.OFFER, Kind.ACCEPT, Kind.WITHDRAW])
def test_mailbox_offer_accept_or_withdraw_with_a_payload_is_refused(kind: Kind) -> None:
    with pytest.raises(WireError):
        PointToPoint().box.begin(1, header(kind, 1, 0, 1))


@pytest.mark.parametrize("kind", [Kind.COLLECTIVE, Kind.CONTROL])
def test_mailbox_message_of_another_kind_is_refused(kind: Kind) -> None:
    with pytest.raises(WireError):
        PointToPoint().box.begin(1, header(kind, 1, 0))


def test_mailbox_eager_message_above_the_limit_is_refused() -> None:
    assert len(PointToPoint().box.begin(1, header(Kind.EAGER, 1, 0, MAX_EAGER))) == MAX_EAGER
    with pytest.raises(WireError):
        PointToPoint().box.begin(1, header(Kind.EAGER, 1, 0, MAX_EAGER + 1))


def test_mailbox_recv_after_a_withdrawn_offer_gets_the_next_message() -> None:
    post = PointToPoint()
    post.offer(2, 5, nbytes=4, identity=1)
    post.withdraw(2, 1)
    post.withdraw(2, 1)  # once more does no harm
    request = post.ask(4, 2, 5)
    assert not post.accepted
    post.offer(2, 5, nbytes=4, identity=2)
    assert post.accepted == [(2, 2)]
    post.withdraw(2, 2)  # it crossed with the acceptance
    assert not request.done
    post.eager(2, 5, b"next")
    assert bytes(request.target) == b"next"


def test_mailbox_own_offer_is_either_accepted_or_withdrawn() -> None:
    post = PointToPoint()
    one, two = post.box.offer(), post.box.offer()
    assert one.identity != two.identity
    accept = header(Kind.ACCEPT, 2, 0, sequence=one.identity)
    post.box.finish(2, accept, post.box.begin(2, accept))
    assert one.accepted
    assert not post.box.withdraw(one)
    assert post.box.withdraw(two)
    accept = header(Kind.ACCEPT, 2, 0, sequence=two.identity)
    post.box.finish(2, accept, post.box.begin(2, accept))
    assert not two.accepted


def test_mailbox_recv_given_up_halfway_leaves_its_message_first_in_the_queue() -> None:
    post = PointToPoint()
    for identity in (1, 2):
        post.offer(2, 5, nbytes=4, identity=identity)
    first, second = post.ask(4, 2, 5), post.ask(4, 2, 5)
    post.offer(2, 5, nbytes=4, identity=3)
    assert post.give_up(first)
    assert post.give_up(second)
    private = [new for _, _, new in post.redirected]
    assert [old for _, old, _ in post.redirected] == [first.target, second.target]
    post.payload(2, 1, b"one.")
    assert bytes(private[0]) == b"one."
    assert bytes(first.target) == bytes(4)
    got = [post.ask(4, 2, 5) for _ in range(3)]
    post.payload(2, 2, b"two.")
    post.payload(2, 3, b"tri.")
    assert [bytes(request.target) for request in got] == [b"one.", b"two.", b"tri."]


def test_mailbox_recv_that_is_done_cannot_be_given_up() -> None:
    post = PointToPoint()
    request = post.ask(1, 2, 5)
    post.eager(2, 5, b"x")
    assert not post.give_up(request)
    waiting = post.ask(1, 2, 5)
    assert post.give_up(waiting)
    post.eager(2, 5, b"y")
    assert not waiting.done


def test_mailbox_unmatched_messages_are_counted_and_relief_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "MAX_UNMATCHED_BYTES", 1000)
    post = PointToPoint()
    count = 0
    while not post.box.overfull(2):
        post.eager(2, 5, bytes(100))
        count += 1
    assert count < 10
    assert not post.box.overfull(1)
    while post.box.overfull(2):
        assert not post.relieved
        post.ask(100, 2, 5)
    assert post.relieved == 1
    for _ in range(10):
        post.offer(2, 6, nbytes=1 << 40, identity=count)
        count += 1
    assert post.box.overfull(2), "offers count by themselves, not by what they claim"


def test_mailbox_keeps_nothing_of_tags_that_are_used_once() -> None:
    post = PointToPoint()
    for tag in range(100):
        post.eager(2, tag, b"x")
        post.ask(1, None, tag)
    assert post.box.unmatched.queues == 0
    assert post.box.unmatched_bytes(2) == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=30))
def test_unmatched_messages_are_found_in_the_order_of_arrival(arrivals: list[tuple[int, int]]) -> None:
    unmatched = UnmatchedMessages()
    letters = [IncomingMessage(source, GROUP, source, tag, 1) for source, tag in arrivals]
    for letter in letters:
        unmatched.add(letter)
    for tag in (0, 1):
        anyone = Request(GROUP, None, tag, memoryview(b""))
        taken = []
        while (found := unmatched.find(anyone)) is not None:
            unmatched.remove(found)
            taken.append(found)
        assert taken == [letter for letter in letters if letter.tag == tag]
        for letter in sorted(taken, key=id):  # put back in any order
            unmatched.add(letter)
        for source in range(3):
            request = Request(GROUP, source, tag, memoryview(b""))
            expected = [letter for letter in letters if (letter.source, letter.tag) == (source, tag)]
            assert unmatched.find(request) is (expected[0] if expected else None)


class Correspondence(RuleBasedStateMachine):
    """Against a list: whatever happens, each tag's messages are received once each and in the order they were sent."""

    def __init__(self) -> None:
        super().__init__()
        self.post = PointToPoint()
        self.sent: dict[tuple[int, int], list[bytes]] = {}  # by source and tag, not yet received
        self.waiting: list[Request] = []
        self.offers: dict[tuple[int, int], tuple[int, bytes]] = {}  # by source and identity: not yet accepted
        self.count = 0

    def _payload(self) -> bytes:
        self.count += 1
        return self.count.to_bytes(4, "big")

    def _settle(self) -> None:
        """Deliver what was accepted, and compare what was received."""
        while self.post.accepted:
            source, identity = self.post.accepted.pop(0)
            _, payload = self.offers.pop((source, identity))
            self.post.payload(source, identity, payload)
        for request in [request for request in self.waiting if request.done]:
            self.waiting.remove(request)
            assert request.sender is not None
            assert bytes(request.target) == self.sent[request.sender, request.tag].pop(0)

    @rule(source=st.integers(0, 1), tag=st.integers(0, 1))
    def eager(self, source: int, tag: int) -> None:
        payload = self._payload()
        self.sent.setdefault((source, tag), []).append(payload)
        self.post.eager(source, tag, payload)
        self._settle()

    @rule(source=st.integers(0, 1), tag=st.integers(0, 1))
    def offer(self, source: int, tag: int) -> None:
        payload = self._payload()
        self.sent.setdefault((source, tag), []).append(payload)
        self.offers[source, self.count] = tag, payload
        self.post.offer(source, tag, 4, self.count)
        self._settle()

    @rule(source=st.none() | st.integers(0, 1), tag=st.integers(0, 1))
    def ask(self, source: int | None, tag: int) -> None:
        before = {key: list(queue) for key, queue in self.sent.items()}
        request = self.post.ask(4, source, tag)
        self.waiting.append(request)
        self._settle()
        heads = [queue[0] for key, queue in before.items() if queue and key[1] == tag and source in (None, key[0])]
        if heads:
            expected = min(heads)  # payloads are numbered in the order of their arrival
            assert bytes(request.target) == expected

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 5))
    def give_up(self, which: int) -> None:
        request = self.waiting.pop(which % len(self.waiting))
        assert self.post.give_up(request)

    @precondition(lambda self: self.offers)
    @rule(which=st.integers(0, 5))
    def withdraw(self, which: int) -> None:
        source, identity = list(self.offers)[which % len(self.offers)]
        tag, payload = self.offers.pop((source, identity))
        self.sent[source, tag].remove(payload)
        self.post.withdraw(source, identity)
        self._settle()

    @invariant()
    def what_waits_has_nothing_to_take(self) -> None:
        for request in self.waiting:
            assert not any(
                queue and key[1] == request.tag and request.source in (None, key[0]) for key, queue in self.sent.items()
            )


TestCorrespondence = Correspondence.TestCase
TestCorrespondence.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
