"""Decides which members a launcher's heartbeat names, and evaluates the replies. No I/O, no clock, no locks.

A launcher sends heartbeats for the members of its host. It knows the run of each member, and names only members of the
run that the coordinator serves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from gradwire.identity import replaces
from gradwire.membership.types import News


def interval(lease: float, longest: float) -> float:
    """Return the seconds between two heartbeats, at most `longest`, so that a lease outlasts three lost ones.

    >>> interval(10.0, 1.0), interval(2.0, 1.0), interval(0.0, 1.0)
    (1.0, 0.5, 1.0)
    """
    return min(longest, lease / 4) if lease > 0 else longest


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A heartbeat: the members `ids` of `run` are alive, and the processes of those in `gone` have ended.

    `unreported` are members of another run whose processes have ended. The coordinator does not need to know.
    """

    ids: tuple[str, ...]
    gone: tuple[str, ...]
    run: bytes
    unreported: tuple[str, ...] = ()


class HeartbeatRules:
    """The members of one host and the run of each, as far as it is known."""

    def __init__(self, ids: Iterable[str] = ()) -> None:
        self._ids: dict[str, bytes] = dict.fromkeys(ids, b"")  # run by id; empty: not known yet
        self._gone: dict[str, bytes] = {}  # members whose process has ended, until the coordinator has confirmed that
        self._run = b""  # the run in the last news

    @property
    def unconfirmed(self) -> bool:
        """Whether the coordinator has not yet confirmed that a member is gone."""
        return bool(self._gone)

    def watch(self, ids: Iterable[str]) -> None:
        """Send heartbeats for these members too."""
        self._ids.update(dict.fromkeys(ids, b""))

    def end(self, ids: Iterable[str]) -> None:
        """Record that the processes of these members have ended."""
        for name in ids:
            self._gone[name] = self._ids.pop(name, b"")

    def next(self, frozen: Collection[str] = ()) -> Heartbeat:
        """Return the next heartbeat. It omits `frozen` members, so that their leases expire if they stay frozen."""
        gone = tuple(name for name, run in self._gone.items() if run in (b"", self._run))
        alive = (name for name, run in self._ids.items() if run in (b"", self._run))
        ids = tuple(name for name in alive if name not in frozen)
        return Heartbeat(ids, gone, self._run, tuple(name for name in self._gone if name not in gone))

    def answered(self, sent: Heartbeat, news: News) -> str | None:
        """Process the reply to a heartbeat.

        If the coordinator was restarted without its journal, return one of the members that its new run does not have.
        """
        # A coordinator that has begun a replacement run ignored what the heartbeat reported of the previous run.
        again = sent.gone if replaces(news.run, sent.run) else ()
        for name in (*sent.gone, *sent.unreported):
            self._gone.pop(name, None)
        self._gone.update(dict.fromkeys(again, b""))
        for name in set(sent.ids).difference(news.unknown):
            if name in self._ids:
                self._ids[name] = news.run
        before, self._run = self._run, news.run
        members = [name for name, run in self._ids.items() if run == before]
        if replaces(news.run, before):  # members that wait or return may be in the new run: send heartbeats for all
            self._ids.update(dict.fromkeys(members, b""))
        elif before and news.run != before and members:
            return members[0]
        return None
