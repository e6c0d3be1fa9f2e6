"""SessionProtocol alone: its requests and its reactions to results, without a coordinator and without other members."""

from __future__ import annotations

import pytest

from gradwire.errors import ConfigError, GradwireError, NoConnection, PeerLost, Refused
from gradwire.job.session_protocol import (
    SET_UP_SECONDS,
    Failure,
    Past,
    Register,
    Repeat,
    SessionProtocol,
    SetUp,
)
from gradwire.membership import Assembly, Member
from gradwire.membership.types import News

RUN, OTHER_RUN = bytes(16), bytes([1] * 16)


def assembly(generation: int, run: bytes = RUN) -> Assembly:
    members = tuple(Member(f"m{rank}", rank, "host", "host", rank, f"127.0.0.1:{rank + 1}") for rank in range(3))
    return Assembly("job", generation, 0, members, run)


def entered(generation: int = 1) -> SessionProtocol:
    session = SessionProtocol(elastic=True)
    steps = session.next_generation()
    next(steps)
    steps.send(assembly(generation))
    with pytest.raises(StopIteration):
        steps.send(None)
    return session


def test_session_registers_then_sets_up_within_a_limit() -> None:
    steps = SessionProtocol(elastic=True).next_generation()
    assert next(steps) == Register(Past())
    assert steps.send(assembly(1)) == SetUp(assembly(1), joined=False, within=SET_UP_SECONDS)


def test_session_of_a_fixed_size_job_sets_up_without_a_limit_and_raises_a_failure() -> None:
    steps = SessionProtocol(elastic=False).next_generation()
    next(steps)
    assert steps.send(assembly(1)) == SetUp(assembly(1), joined=False, within=None)
    with pytest.raises(PeerLost):
        steps.send(Failure(PeerLost("gone")))


def test_session_that_skipped_generations_lacks_state_until_it_leaves_with_the_state() -> None:
    session = entered(generation=3)
    assert session.past() == Past(3, RUN, lacks_state=True)
    session.leave([2], lacks_state=False, stood_still=True)
    assert session.past() == Past(3, RUN, ("m2",), stood_still=True)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (NoConnection("silent", peer=2), ("m1", "m2")),
        (PeerLost("gone"), ("m1",)),
        (ConfigError("another protocol", peer=2), ("m1", "m2")),
    ],
    ids=["silent", "lost", "unfit"],
)
def test_session_set_up_that_another_member_made_fail_is_repeated_and_reports_that_member(
    error: GradwireError, lost: tuple[str, ...]
) -> None:
    steps = SessionProtocol(elastic=True).next_generation()
    next(steps)
    steps.send(assembly(1))
    assert steps.send(Failure(error, frozenset({1}))) == Repeat(1, error)
    assert steps.send(None) == Register(Past(1, RUN, lost))


@pytest.mark.parametrize(
    "error", [Refused("no"), ConfigError("own", peer=0), ConfigError("no peer")], ids=["refused", "own", "unnamed"]
)
def test_session_set_up_failure_without_another_member_at_fault_is_raised(error: GradwireError) -> None:
    steps = SessionProtocol(elastic=True).next_generation()
    next(steps)
    steps.send(assembly(1))
    with pytest.raises(type(error)):
        steps.send(Failure(error))


def test_session_ignores_news_of_another_run() -> None:
    session = entered()
    assert session.concerns(News(1, 1, (), None, run=RUN))
    assert not session.concerns(News(1, 1, (), None, run=OTHER_RUN))
    assert not session.concerns(None)
