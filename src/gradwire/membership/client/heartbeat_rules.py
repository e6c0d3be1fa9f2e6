"""What a launcher's heartbeats say, and what it learns from the answers. No I/O, no clock, no locks.

A launcher speaks for the members of its host, in the run that each is known to be a member of: nothing is said about
members of another run than the one that the coordinator serves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from gradwire.identity import replaces
from gradwire.membership.types import News


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """These members of `run` live, and those in `gone` have ended; `settled` are gone too, and nobody need be told."""

    ids: tuple[str, ...]
    gone: tuple[str, ...]
    run: bytes
    settled: tuple[str, ...] = ()


class HeartbeatRules:
    """The members of one host, with the runs that they are known to be members of."""

    def __init__(self, ids: Iterable[str] = ()) -> None:
        self._ids: dict[str, bytes] = dict.fromkeys(ids, b"")  # empty: of whichever run the coordinator serves
        self._gone: dict[str, bytes] = {}  # ended, and the coordinator has not confirmed it
        self._run = b""  # of the last news

    @property
    def unconfirmed(self) -> bool:
        """Whether the coordinator has yet to confirm that a member is gone."""
        return bool(self._gone)

    def watch(self, ids: Iterable[str]) -> None:
        """Speak for these members too."""
        self._ids.update(dict.fromkeys(ids, b""))

    def end(self, ids: Iterable[str]) -> None:
        """The processes of these members have ended."""
        for name in ids:
            self._gone[name] = self._ids.pop(name, b"")

    def next(self, frozen: Collection[str] = ()) -> Heartbeat:
        """What to send now. Nothing is said of `frozen` members, so that their leases run out if that lasts."""
        gone = tuple(name for name, run in self._gone.items() if run in (b"", self._run))
        living = (name for name, run in self._ids.items() if run in (b"", self._run))
        ids = tuple(name for name in living if name not in frozen)
        return Heartbeat(ids, gone, self._run, tuple(name for name in self._gone if name not in gone))

    def answered(self, sent: Heartbeat, news: News) -> str | None:
        """Learn from the answer to a heartbeat. Returns a member that the coordinator's run no longer has, if the
        coordinator was started anew without its journal."""
        again = sent.gone if replaces(news.run, sent.run) else ()  # it was said of the run before, and ignored
        for name in (*sent.gone, *sent.settled):
            self._gone.pop(name, None)
        self._gone.update(dict.fromkeys(again, b""))
        for name in set(sent.ids).difference(news.unknown):
            if name in self._ids:
                self._ids[name] = news.run
        before, self._run = self._run, news.run
        members = [name for name, run in self._ids.items() if run == before]
        if replaces(news.run, before):  # members that wait or come back may be in the new run: ask of all of them
            self._ids.update(dict.fromkeys(members, b""))
        elif before and news.run != before and members:
            return members[0]
        return None
