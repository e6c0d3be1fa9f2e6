"""Mailbox: messages are matched by sender and tag, in order, also when requests or offers are withdrawn halfway."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gradwire.arrays import DTYPES, parse_dtype
from gradwire.generation import mailbox
from gradwire.generation.mailbox import Mailbox
from gradwire.generation.message_format import MAX_DESCRIPTION, Description, parse_description
from gradwire.generation.messages import IncomingMessage, Request, UnmatchedMessages
from gradwire.wire import MAX_EAGER, Header, Kind, WireError
from support.messages import described

GROUP = 1


def header(kind: Kind, source: int, tag: int, nbytes: int = 0, *, sequence: int = 0, offered: int = 0) -> Header:
    return Header(kind, 1, 1, source, GROUP, sequence, tag, offered & 0xFFFFFFFF, offered >> 32, nbytes)


class MailboxHarness:
    """A mailbox, with the acceptances that it sent."""

    def __init__(self) -> None:
        self.accepted: list[tuple[int, int]] = []
        self.room_reports = 0
        self.redirected: list[tuple[int, memoryview, memoryview]] = []
        self.box = Mailbox(lambda world, message: self.accepted.append((world, message.identity)), self._count_room)

    def _count_room(self) -> None:
        self.room_reports += 1

    def eager(self, source: int, tag: int, payload: bytes) -> None:
        content = described(len(payload)) + payload
        self._arrive(source, header(Kind.EAGER, source, tag, len(content)), content)

    def _arrive(self, source: int, head: Header, content: bytes) -> None:
        memory = self.box.begin(source, head)
        memory[:] = content
        self.box.finish(source, head, memory)

    def offer(self, source: int, tag: int, nbytes: int, identity: int, *, waits: bool = False) -> None:
        content = described(nbytes, waits=waits)
        self._arrive(source, header(Kind.OFFER, source, tag, len(content), sequence=identity, offered=nbytes), content)

    def payload(self, source: int, identity: int, payload: bytes) -> None:
        self._arrive(source, header(Kind.PAYLOAD, source, 0, len(payload), sequence=identity), payload)

    def withdraw(self, source: int, identity: int) -> None:
        head = header(Kind.WITHDRAW, source, 0, sequence=identity)
        self.box.finish(source, head, self.box.begin(source, head))

    def recv(self, nbytes: int | None, source: int | None, tag: int) -> Request:
        request = Request(GROUP, source, tag, None if nbytes is None else memoryview(bytearray(nbytes)))
        self.box.post_request(request)
        return request

    def cancel(self, request: Request) -> bool:
        return self.box.cancel_request(request, lambda *what: self.redirected.append(what))


def data(request: Request) -> bytes:
    assert request.target is not None
    return bytes(request.target)


def test_mailbox_message_completes_the_recv_that_waits_for_it() -> None:
    harness = MailboxHarness()
    waiting = harness.recv(3, source=2, tag=5)
    harness.eager(1, 5, b"abc")
    harness.eager(2, 4, b"abc")
    assert not waiting.done
    harness.eager(2, 5, b"xyz")
    assert (waiting.sender, data(waiting)) == (2, b"xyz")


def test_mailbox_recv_gets_the_message_that_arrived_first() -> None:
    harness = MailboxHarness()
    for payload in (b"1", b"2"):
        harness.eager(2, 5, payload)
    assert data(harness.recv(1, None, 5)) == b"1"
    assert data(harness.recv(1, 2, 5)) == b"2"
    assert not harness.recv(1, 2, 5).done


def test_mailbox_long_message_is_accepted_by_a_recv_and_written_into_its_buffer() -> None:
    harness = MailboxHarness()
    harness.offer(2, 5, nbytes=4, identity=77)
    assert not harness.accepted
    request = harness.recv(4, 2, 5)
    assert harness.accepted == [(2, 77)]
    assert not request.done
    head = header(Kind.PAYLOAD, 2, 5, 4, sequence=77)
    memory = harness.box.begin(2, head)
    assert memory is request.target
    memory[:] = b"long"
    harness.box.finish(2, head, memory)
    assert (request.sender, data(request)) == (2, b"long")


def test_mailbox_payload_that_is_repeated_or_withdrawn_halfway_is_refused() -> None:
    harness = MailboxHarness()
    harness.offer(2, 5, nbytes=4, identity=77)
    request = harness.recv(4, 2, 5)
    head = header(Kind.PAYLOAD, 2, 5, 4, sequence=77)
    memory = harness.box.begin(2, head)
    with pytest.raises(WireError, match="two links"):
        harness.box.begin(2, head)
    with pytest.raises(WireError, match="withdrawn while it arrives"):
        harness.withdraw(2, 77)
    with pytest.raises(WireError, match="identity 77"):
        harness.offer(2, 5, nbytes=4, identity=77)
    memory[:] = b"long"
    harness.box.finish(2, head, memory)
    assert (request.sender, data(request)) == (2, b"long")
    harness.offer(2, 5, nbytes=4, identity=77)  # the first message has ended, so the identity may be used again


def test_mailbox_offer_with_identity_0_is_refused() -> None:
    with pytest.raises(WireError, match="identity 0"):
        MailboxHarness().offer(2, 5, nbytes=1 << 40, identity=0)


def test_mailbox_payload_that_was_not_accepted_is_refused() -> None:
    harness = MailboxHarness()
    harness.offer(2, 5, nbytes=4, identity=77)
    for source, identity, nbytes in ((2, 77, 4), (2, 78, 4), (1, 77, 4)):
        with pytest.raises(WireError, match="was not accepted"):
            harness.box.begin(source, header(Kind.PAYLOAD, source, 5, nbytes, sequence=identity))
    harness.recv(4, 2, 5)
    with pytest.raises(WireError):
        harness.box.begin(2, header(Kind.PAYLOAD, 2, 5, 5, sequence=77))


@pytest.mark.parametrize("kind", [Kind.ACCEPT, Kind.WITHDRAW])
def test_mailbox_accept_or_withdraw_with_a_payload_is_refused(kind: Kind) -> None:
    with pytest.raises(WireError):
        MailboxHarness().box.begin(1, header(kind, 1, 0, 1))


@pytest.mark.parametrize("kind", [Kind.COLLECTIVE, Kind.CONTROL])
def test_mailbox_message_of_another_kind_is_refused(kind: Kind) -> None:
    with pytest.raises(WireError):
        MailboxHarness().box.begin(1, header(kind, 1, 0))


def test_mailbox_eager_message_above_the_limit_is_refused() -> None:
    harness = MailboxHarness()
    harness.eager(1, 0, bytes(MAX_EAGER))
    with pytest.raises(WireError, match=f"a message of {MAX_EAGER + 1} bytes"):
        harness.eager(1, 0, bytes(MAX_EAGER + 1))
    with pytest.raises(WireError):
        harness.box.begin(1, header(Kind.EAGER, 1, 0, MAX_EAGER + MAX_DESCRIPTION + 1))
    with pytest.raises(WireError):
        harness.box.begin(1, header(Kind.OFFER, 1, 0, MAX_DESCRIPTION + 1))


def test_mailbox_recv_after_a_withdrawn_offer_gets_the_next_message() -> None:
    harness = MailboxHarness()
    harness.offer(2, 5, nbytes=4, identity=1)
    harness.withdraw(2, 1)
    harness.withdraw(2, 1)  # a second withdrawal is ignored
    request = harness.recv(4, 2, 5)
    assert not harness.accepted
    harness.offer(2, 5, nbytes=4, identity=2)
    assert harness.accepted == [(2, 2)]
    harness.withdraw(2, 2)  # the withdrawal and the acceptance cross
    assert not request.done
    harness.eager(2, 5, b"next")
    assert data(request) == b"next"


def test_mailbox_own_offer_is_either_accepted_or_withdrawn() -> None:
    harness = MailboxHarness()
    one, two = harness.box.offer(), harness.box.offer()
    assert one.identity != two.identity
    accept = header(Kind.ACCEPT, 2, 0, sequence=one.identity)
    harness.box.finish(2, accept, harness.box.begin(2, accept))
    assert one.accepted
    assert not harness.box.withdraw(one)
    assert harness.box.withdraw(two)
    accept = header(Kind.ACCEPT, 2, 0, sequence=two.identity)
    harness.box.finish(2, accept, harness.box.begin(2, accept))
    assert not two.accepted


def test_mailbox_recv_cancelled_halfway_leaves_its_message_first_in_the_queue() -> None:
    harness = MailboxHarness()
    for identity in (1, 2):
        harness.offer(2, 5, nbytes=4, identity=identity)
    first, second = harness.recv(4, 2, 5), harness.recv(4, 2, 5)
    harness.offer(2, 5, nbytes=4, identity=3)
    assert harness.cancel(first)
    assert harness.cancel(second)
    private = [new for _, _, new in harness.redirected]
    assert [old for _, old, _ in harness.redirected] == [first.target, second.target]
    harness.payload(2, 1, b"one.")
    assert bytes(private[0]) == b"one."
    assert data(first) == bytes(4)
    got = [harness.recv(4, 2, 5) for _ in range(3)]
    harness.payload(2, 2, b"two.")
    harness.payload(2, 3, b"tri.")
    assert [data(request) for request in got] == [b"one.", b"two.", b"tri."]


def test_mailbox_recv_that_is_done_cannot_be_cancelled() -> None:
    harness = MailboxHarness()
    request = harness.recv(1, 2, 5)
    harness.eager(2, 5, b"x")
    assert not harness.cancel(request)
    waiting = harness.recv(1, 2, 5)
    assert harness.cancel(waiting)
    harness.eager(2, 5, b"y")
    assert not waiting.done


def test_mailbox_unmatched_messages_are_counted_and_new_room_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "MAX_UNMATCHED_BYTES", 1000)
    harness = MailboxHarness()
    count = 0
    while not harness.box.overfull(2):
        harness.eager(2, 5, bytes(100))
        count += 1
    assert count < 10
    assert not harness.box.overfull(1)
    while harness.box.overfull(2):
        assert not harness.room_reports
        harness.recv(100, 2, 5)
    assert harness.room_reports == 1
    for _ in range(10):
        harness.offer(2, 6, nbytes=1 << 40, identity=count)
        count += 1
    assert harness.box.overfull(2), "an offer must count as an offer, not as the size that it claims"


def test_mailbox_recv_without_a_buffer_gets_an_array_of_the_described_shape() -> None:
    harness = MailboxHarness()
    request = harness.recv(None, 2, 5)
    assert request.array is None
    harness.eager(2, 5, b"abc")
    assert request.array is not None
    assert (request.array.tobytes(), request.array.dtype, request.array.shape) == (b"abc", np.uint8, (3,))
    harness.offer(2, 5, nbytes=4, identity=7)
    long = harness.recv(None, None, 5)
    assert harness.accepted == [(2, 7)]
    harness.payload(2, 7, b"long")
    assert (long.sender, data(long)) == (2, b"long")


def test_mailbox_recv_without_a_buffer_after_a_withdrawal_gets_a_message_of_another_size() -> None:
    harness = MailboxHarness()
    request = harness.recv(None, 2, 5)
    harness.offer(2, 5, nbytes=4, identity=1)
    harness.withdraw(2, 1)  # the withdrawal and the acceptance cross
    harness.eager(2, 5, b"shorter or longer")
    assert data(request) == b"shorter or longer"


def test_mailbox_recv_without_a_buffer_cancelled_halfway_leaves_its_message() -> None:
    harness = MailboxHarness()
    harness.offer(2, 5, nbytes=4, identity=1)
    assert harness.cancel(harness.recv(None, 2, 5))
    assert not harness.redirected, "the memory is private, so the payload may continue to arrive there"
    second = harness.recv(4, 2, 5)
    harness.payload(2, 1, b"long")
    assert (second.sender, data(second)) == (2, b"long")


def test_mailbox_peek_leaves_the_message_for_the_recv() -> None:
    harness = MailboxHarness()
    wanted = Request(GROUP, None, 5, None)
    assert harness.box.peek(wanted) is None
    harness.offer(2, 5, nbytes=4, identity=1)
    for _ in range(2):
        found = harness.box.peek(wanted)
        assert found is not None
        assert (found.source, found.nbytes, found.description.shape) == (2, 4, (4,))
    assert not harness.accepted
    harness.recv(4, 2, 5)
    assert harness.box.peek(wanted) is None


def test_mailbox_blocked_sender_is_one_that_waits_for_a_recv() -> None:
    harness = MailboxHarness()
    harness.eager(2, 5, b"x")
    harness.offer(2, 5, nbytes=4, identity=1)
    assert not harness.box.blocked_sender(2)
    harness.offer(2, 6, nbytes=4, identity=2, waits=True)
    assert harness.box.blocked_sender(2)
    assert not harness.box.blocked_sender(1)
    harness.recv(4, 2, 6)
    assert not harness.box.blocked_sender(2)


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 2**63 - 1), max_size=64), st.booleans())
def test_description_is_parsed_as_it_was_packed(dtype: str, shape: list[int], waits: bool) -> None:
    description = Description(parse_dtype(dtype), tuple(shape), waits)
    packed = description.pack()
    assert len(packed) <= MAX_DESCRIPTION
    assert parse_description(packed + b"data") == description
    for cut in range(len(packed)):
        with pytest.raises(WireError):
            parse_description(packed[:cut])


def test_mailbox_tag_without_messages_uses_no_memory() -> None:
    harness = MailboxHarness()
    for tag in range(100):
        harness.eager(2, tag, b"x")
        harness.recv(1, None, tag)
    assert harness.box.unmatched.queues == 0
    assert harness.box.unmatched_bytes(2) == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=30))
def test_unmatched_messages_are_found_in_the_order_of_arrival(arrivals: list[tuple[int, int]]) -> None:
    unmatched = UnmatchedMessages()
    messages = [IncomingMessage(source, GROUP, source, tag, 1) for source, tag in arrivals]
    for message in messages:
        unmatched.add(message)
    for tag in (0, 1):
        anyone = Request(GROUP, None, tag, memoryview(b""))
        taken = []
        while (found := unmatched.find(anyone)) is not None:
            unmatched.remove(found)
            taken.append(found)
        assert taken == [message for message in messages if message.tag == tag]
        for message in sorted(taken, key=id):  # added again in any order
            unmatched.add(message)
        for source in range(3):
            request = Request(GROUP, source, tag, memoryview(b""))
            expected = [message for message in messages if (message.source, message.tag) == (source, tag)]
            assert unmatched.find(request) is (expected[0] if expected else None)


class MailboxMachine(RuleBasedStateMachine):
    """Compares the mailbox with a list: each tag's messages are received once and in the order they were sent."""

    def __init__(self) -> None:
        super().__init__()
        self.harness = MailboxHarness()
        self.sent: dict[tuple[int, int], list[bytes]] = {}  # by source and tag, not yet received
        self.waiting: list[Request] = []
        self.offers: dict[tuple[int, int], tuple[int, bytes]] = {}  # by source and identity: not yet accepted
        self.count = 0

    def _payload(self) -> bytes:
        self.count += 1
        return self.count.to_bytes(4, "big")

    def _deliver(self) -> None:
        """Deliver the accepted payloads, and compare what was received."""
        while self.harness.accepted:
            source, identity = self.harness.accepted.pop(0)
            _, payload = self.offers.pop((source, identity))
            self.harness.payload(source, identity, payload)
        for request in [request for request in self.waiting if request.done]:
            self.waiting.remove(request)
            assert request.sender is not None
            assert data(request) == self.sent[request.sender, request.tag].pop(0)

    @rule(source=st.integers(0, 1), tag=st.integers(0, 1))
    def eager(self, source: int, tag: int) -> None:
        payload = self._payload()
        self.sent.setdefault((source, tag), []).append(payload)
        self.harness.eager(source, tag, payload)
        self._deliver()

    @rule(source=st.integers(0, 1), tag=st.integers(0, 1))
    def offer(self, source: int, tag: int) -> None:
        payload = self._payload()
        self.sent.setdefault((source, tag), []).append(payload)
        self.offers[source, self.count] = tag, payload
        self.harness.offer(source, tag, 4, self.count)
        self._deliver()

    @rule(source=st.none() | st.integers(0, 1), tag=st.integers(0, 1))
    def recv(self, source: int | None, tag: int) -> None:
        before = {key: list(queue) for key, queue in self.sent.items()}
        request = self.harness.recv(4, source, tag)
        self.waiting.append(request)
        self._deliver()
        heads = [queue[0] for key, queue in before.items() if queue and key[1] == tag and source in (None, key[0])]
        if heads:
            expected = min(heads)  # payloads are numbered in the order of their arrival
            assert data(request) == expected

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 5))
    def cancel(self, which: int) -> None:
        request = self.waiting.pop(which % len(self.waiting))
        assert self.harness.cancel(request)

    @precondition(lambda self: self.offers)
    @rule(which=st.integers(0, 5))
    def withdraw(self, which: int) -> None:
        source, identity = list(self.offers)[which % len(self.offers)]
        tag, payload = self.offers.pop((source, identity))
        self.sent[source, tag].remove(payload)
        self.harness.withdraw(source, identity)
        self._deliver()

    @invariant()
    def waiting_requests_have_no_matching_message(self) -> None:
        for request in self.waiting:
            assert not any(
                queue and key[1] == request.tag and request.source in (None, key[0]) for key, queue in self.sent.items()
            )


TestMailbox = MailboxMachine.TestCase
TestMailbox.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
