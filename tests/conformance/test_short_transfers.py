"""Tests links that transfer only a few bytes at a time: headers and payloads arrive in pieces of any size."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from conformance.cases import Case
from conformance.test_table import rows_of, run
from gradwire.collectives import COLLECTIVES, algorithms
from gradwire.topology import Topology
from gradwire.transports.local import LocalLink
from support.crews import Crew, crew_of


def limited(transfer: Callable[[LocalLink, Any], int], numbers: random.Random) -> Callable[[LocalLink, Any], int]:
    """Return a method of a link that transfers at most a few bytes, and sometimes none."""

    def transfer_few(link: LocalLink, buffers: Sequence[Any]) -> int:
        allowed = numbers.choice((0, 1, 3, 17, 63, 64, 65, 200))
        views = []
        for buffer in buffers:
            view = memoryview(buffer).cast("B")[:allowed]
            allowed -= len(view)
            views.append(view)
        return transfer(link, [view for view in views if len(view)]) if any(len(view) for view in views) else 0

    return transfer_few


@pytest.fixture(scope="module")
def limited_crew() -> Iterator[Crew]:
    numbers = random.Random(1)
    with pytest.MonkeyPatch.context() as patch, crew_of("local", Topology.of(["a", "b", "a"])) as crew:
        patch.setattr(LocalLink, "send", limited(LocalLink.send, numbers))
        patch.setattr(LocalLink, "receive", limited(LocalLink.receive, numbers))
        yield crew


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_algorithms_over_links_that_move_few_bytes_agree_with_the_oracle(limited_crew: Crew, collective: str) -> None:
    cases = [
        Case(collective, dtype, rows, root=turn % 3, algorithm=algorithm)
        for algorithm in ("auto", *algorithms(collective))
        for dtype in ("float16", "int32")
        for turn, rows in enumerate(rows_of(collective, 3))
    ]
    run(limited_crew, cases)
