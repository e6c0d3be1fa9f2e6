"""Messages between all pairs of ranks, on every transport: each arrives once, whole, in order and with its shape."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.cases import DTYPES, LAYOUTS, filled, laid_out
from gradwire.arrays import parse_dtype
from gradwire.group import Group
from gradwire.group.receiving import Message
from gradwire.wire import MAX_EAGER
from support.array_bits import assert_same
from support.crews import Crew

FEW = settings.default.max_examples // 10 if settings.default else 10
LENGTHS = st.sampled_from((0, 1, 7, 500, MAX_EAGER // 16, MAX_EAGER // 8 + 1, 50_000))
HOW_SENT = ("send", "isend")
HOW_RECEIVED = ("buffer", "new", "irecv", "probe")
# sender, receiver, tag, dtype, rows, layout, how it is sent and received
MESSAGES = st.lists(
    st.tuples(
        st.integers(0, 7),
        st.integers(0, 7),
        st.integers(0, 2),
        st.sampled_from(DTYPES),
        LENGTHS,
        st.sampled_from(LAYOUTS),
        st.sampled_from(HOW_SENT),
        st.sampled_from(HOW_RECEIVED),
    ),
    max_size=10,
)


def content(number: int, dtype: str, rows: int, layout: str) -> Any:
    generator = np.random.default_rng(number)
    return laid_out(filled(generator, parse_dtype(dtype), "mixed", (rows, 2)), layout)


def received(group: Group, how: str, src: int, tag: int, like: Any) -> tuple[Any, Any]:
    """Receive a message. Return the array, and the work of a receive that may not be done."""
    x = np.empty(like.shape, like.dtype)
    match how:
        case "new":
            x, sender = group.recv(src=src, tag=tag)
            assert sender == src
        case "buffer":
            assert group.recv(x, src, tag) == src
        case "probe":
            message = group.probe(src, tag)
            assert message == Message(src, tag, like.nbytes, like.dtype, like.shape)
            assert group.recv(x, message.source, message.tag) == src
        case "irecv":
            return x, group.irecv(x, src, tag)
    return x, None


@settings(max_examples=FEW)
@given(messages=MESSAGES)
def test_random_messages_between_all_ranks_arrive_in_order(crew: Crew, messages: list[tuple[Any, ...]]) -> None:
    """Each rank first sends everything, long messages with isend, and then receives what was sent to it."""

    def program(group: Group) -> None:
        works, arrays = [], []
        for number, (src, dst, tag, dtype, rows, layout, sent, _) in enumerate(messages):
            src, dst = src % group.size, dst % group.size
            if group.rank == src != dst:
                x = content(number, dtype, rows, layout)
                if sent == "send" and x.nbytes <= MAX_EAGER:
                    group.send(x, dst, tag)
                else:
                    works.append(group.isend(x, dst, tag))
        for number, (src, dst, tag, dtype, rows, layout, _, how) in enumerate(messages):
            src, dst = src % group.size, dst % group.size
            if group.rank == dst != src:
                expected = content(number, dtype, rows, layout)
                array, work = received(group, how, src, tag, expected)
                arrays.append((array, expected))
                works += [work] if work is not None else []
        for work in works:
            work.wait()
        for array, expected in arrays:
            assert_same(array, expected, f"rank {group.rank}")

    crew.run(program)


def test_ring_of_every_call_delivers_each_array(crew: Crew) -> None:
    def program(group: Group) -> None:
        size, rank = group.size, group.rank
        if size == 1:
            return
        after, before = (rank + 1) % size, (rank - 1) % size
        stream = group.stream()
        for count in (3, MAX_EAGER):
            x, expected = np.full(count, rank), np.full(count, before)
            y = np.zeros_like(x)
            group.sendrecv(x, y, after, before)
            assert_same(y, expected, "sendrecv")
            receiving, sending = group.irecv(y := np.zeros_like(x), before, 5), group.isend(x, after, 5)
            assert (sending.wait(), receiving.wait()) == (None, before)
            assert_same(y, expected, "irecv")
            copied = np.zeros((count, 2), int)
            for src in range(size):  # all ranks queue the copies in the same order, so that there is no cycle
                stream.copy(x, copied[:, 1], src, (src + 1) % size)
            stream.synchronize()
            assert_same(np.ascontiguousarray(copied[:, 1]), expected, "copy")
        group.barrier()

    crew.run(program)
