"""Makes claims of workers whose processes do not exist, and reads the answers of a membership."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.membership.coordinator.state_machine import TICK, Membership
from gradwire.membership.types import Assembly, Claim, Member, Refusal, Waiting

RUN = b"r" * 16
SECRET = b"a secret of this test"


def worker(name: str, generation: int = 0, lost: Sequence[str] = (), *, session: str = "", pid: int = 7) -> Claim:
    """Return a claim in an elastic job. Each generation that a worker asks for has a session of its own."""
    member = Member(name, None, "machine", "host", pid, f"127.0.0.1:{5000 + generation}")
    name_of_session = (session or f"{name} {generation}").encode()
    run = RUN if generation else b""
    return Claim(member, None, None, name_of_session, 0, generation, tuple(lost), run=run)


def reason(outcome: object) -> str:
    assert isinstance(outcome, Refusal)
    return outcome.reason


def missing(outcome: object) -> tuple[int, ...]:
    assert isinstance(outcome, Waiting)
    return outcome.missing


def waits(outcome: object) -> str:
    """Return the reason why a claim waits."""
    assert isinstance(outcome, Waiting)
    return outcome.reason


def order(outcome: object) -> list[str]:
    """The members of a new generation, which hang together."""
    assert isinstance(outcome, Assembly)
    assert [member.rank for member in outcome.members] == list(range(len(outcome.members)))
    return [member.id for member in outcome.members]


def pass_time(state: Membership, since: float, until: float) -> float:
    """Tick regularly, like a coordinator, and return the final time."""
    now = since
    while now < until:
        now = min(until, now + TICK)
        state.tick(now)
    return now
