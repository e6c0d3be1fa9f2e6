"""Decides which connections to the coordinator stay open, and for how long. Pure.

A connection is *waiting* until the server is given its bytes, then *unproven*, and *proven* from the first request on
it that proves the job's secret. Few connections are unproven at a time, so that strangers cannot use up the server,
however many calls each of them begins. Connections beyond that number wait: honest callers prove the secret within
milliseconds, so a burst of them is soon through. Connections that prove nothing are closed after some seconds. While
others wait they lose their place at the server sooner, and are *parked* until they are closed: an attacker who was
closed at once would be back at once.
"""

from __future__ import annotations

import ipaddress
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """Numbers of connections, and seconds."""

    proven: int = 1 << 16
    unproven: int = 64
    strangers: int = 4096  # waiting, unproven or parked
    strangers_per_source: int = 1024
    seconds_to_prove: float = 5.0  # and to be parked
    seconds_to_prove_in_a_crowd: float = 1.0  # while other connections wait, one unproven connection gives way …
    seconds_between_replacements: float = 0.02  # … at a time: to begin the calls of a connection costs milliseconds
    seconds_to_wait: float = 30.0
    seconds_between_proofs: float = 30.0  # members prove themselves with each request, at least every 4 s
    seconds_between_heartbeats: float = 10.0  # of one stream; a launcher sends one each second


class Reason(Enum):
    """Why a connection is closed."""

    TOO_SLOW = "did not prove the job's secret in time"
    CROWDED = "had proved nothing yet when others needed the room"
    IDLE = "were idle"


@dataclass(slots=True)
class Decisions:
    """Connections to pass on to the server, to take away from it again, and to close."""

    opened: list[int] = field(default_factory=list)
    parked: list[int] = field(default_factory=list)
    closed: list[tuple[int, Reason]] = field(default_factory=list)


@dataclass(slots=True)
class _Stranger:
    source: str
    since: float  # when it came, was passed on, or was parked


@dataclass(slots=True)
class _Source:
    """The connections of one source that have proved nothing, in order of arrival: all of them, and those that wait;
    and how many of them the server has."""

    strangers: OrderedDict[int, None] = field(default_factory=OrderedDict)
    waiting: OrderedDict[int, None] = field(default_factory=OrderedDict)
    unproven: int = 0


class ConnectionLimits:
    """Connections are numbers. Report what happens to them, ask `decide` what to do, and again at `due`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        # In each of these the longest there comes first; an OrderedDict finds it at once, also after many removals.
        self._waiting: OrderedDict[int, _Stranger] = OrderedDict()
        self._unproven: OrderedDict[int, _Stranger] = OrderedDict()
        self._parked: OrderedDict[int, _Stranger] = OrderedDict()
        self._proven: OrderedDict[int, float] = OrderedDict()  # time of the last proof
        self._sources: dict[str, _Source] = {}
        self._replaced = -math.inf  # when an unproven connection last gave way to one that waited
        self._surplus: list[tuple[int, Reason]] = []  # connections that later ones have replaced

    def arrived(self, connection: int, source: str, now: float) -> None:
        """A connection was accepted; strangers are counted by `source`. One too many replaces the oldest."""
        self._waiting[connection] = _Stranger(source, now)
        crowd = self._sources.setdefault(source, _Source())
        crowd.strangers[connection] = crowd.waiting[connection] = None
        too_many = len(crowd.strangers) > self._limits.strangers_per_source
        if len(self._waiting) + len(self._unproven) + len(self._parked) > self._limits.strangers:
            too_many, crowd = True, max(self._sources.values(), key=lambda source: len(source.strangers))
        if too_many:
            oldest = next(iter(crowd.strangers))
            self._forget_stranger(oldest)
            self._surplus.append((oldest, Reason.CROWDED))

    def proved(self, connection: int, now: float) -> None:
        """A request on this connection proved the secret. One too many replaces the one that did so longest ago."""
        if connection in self._unproven or self._proven.pop(connection, None) is not None:
            self._forget_stranger(connection)
            self._proven[connection] = now
        if len(self._proven) > self._limits.proven:
            longest_ago = next(iter(self._proven))
            del self._proven[longest_ago]
            self._surplus.append((longest_ago, Reason.IDLE))

    def ended(self, connection: int) -> None:
        """The connection is no more."""
        self._forget_stranger(connection)
        self._proven.pop(connection, None)

    def decide(self, now: float) -> Decisions:
        decisions = Decisions()
        for connection, reason in [*self._expired(now)]:
            self._close(connection, reason, decisions)
        decisions.closed += self._surplus
        self._surplus.clear()
        while self._waiting and self._make_room(now, decisions):
            self._open(self._next(), now, decisions)
        return decisions

    def due(self) -> float | None:
        """When to decide again if nothing happens until then."""
        limits = self._limits
        times = [stranger.since + limits.seconds_to_wait for stranger in _first(self._waiting)]
        times += [stranger.since + limits.seconds_to_prove for stranger in _first(self._parked)]
        times += [proof + limits.seconds_between_proofs for proof in _first(self._proven)]
        for oldest in _first(self._unproven):
            times.append(oldest.since + limits.seconds_to_prove)
            if self._waiting:
                next_replacement = self._replaced + limits.seconds_between_replacements
                times.append(max(next_replacement, oldest.since + limits.seconds_to_prove_in_a_crowd))
        return min(times, default=None)

    def _expired(self, now: float) -> Iterator[tuple[int, Reason]]:
        limits = self._limits
        for table, seconds, reason in (
            (self._unproven, limits.seconds_to_prove, Reason.TOO_SLOW),
            (self._waiting, limits.seconds_to_wait, Reason.CROWDED),
            (self._parked, limits.seconds_to_prove, Reason.CROWDED),
        ):
            for connection, stranger in table.items():
                if stranger.since + seconds > now:
                    break
                yield connection, reason
        for connection, proof in self._proven.items():
            if proof + limits.seconds_between_proofs > now:
                break
            yield connection, Reason.IDLE

    def _make_room(self, now: float, decisions: Decisions) -> bool:
        """Whether one more can be passed on, after parking another one if need be."""
        if len(self._unproven) >= self._limits.unproven:
            slow = self._slow(now) if now >= self._replaced + self._limits.seconds_between_replacements else None
            if slow is None:
                return False
            self._park(slow, now, decisions)
        return True

    def _slow(self, now: float) -> int | None:
        """An unproven connection that has had its time: of the source that has the most, the oldest."""
        patience = self._limits.seconds_to_prove_in_a_crowd
        slow = [key for key, stranger in self._unproven.items() if stranger.since + patience <= now]
        return max(slow, key=lambda key: self._sources[self._unproven[key].source].unproven, default=None)

    def _next(self) -> int:
        """The newest that waits, of the source that has the fewest unproven connections. Under an attack the oldest
        ones are the attacker's; in a burst of honest callers nobody waits long."""
        waiting = (source for source in self._sources.values() if source.waiting)
        return next(reversed(min(waiting, key=lambda source: source.unproven).waiting))

    def _open(self, connection: int, now: float, decisions: Decisions) -> None:
        source = self._waiting.pop(connection).source
        del self._sources[source].waiting[connection]
        self._sources[source].unproven += 1
        self._unproven[connection] = _Stranger(source, now)
        decisions.opened.append(connection)

    def _park(self, connection: int, now: float, decisions: Decisions) -> None:
        source = self._unproven.pop(connection).source
        self._sources[source].unproven -= 1
        self._parked[connection] = _Stranger(source, now)
        self._replaced = now
        decisions.parked.append(connection)

    def _close(self, connection: int, reason: Reason, decisions: Decisions) -> None:
        self.ended(connection)
        decisions.closed.append((connection, reason))

    def _forget_stranger(self, connection: int) -> None:
        unproven = self._unproven.pop(connection, None)
        stranger = unproven or self._waiting.pop(connection, None) or self._parked.pop(connection, None)
        if stranger is None:
            return
        source = self._sources[stranger.source]
        source.unproven -= unproven is not None
        del source.strangers[connection]
        source.waiting.pop(connection, None)
        if not source.strangers:
            del self._sources[stranger.source]


def source_of(ip: str) -> str:
    """What counts as one source: an IPv4 address, or the network of an IPv6 address, of which anybody has all.

    >>> source_of("10.0.0.1"), source_of("2001:db8::7"), source_of("::ffff:10.0.0.1"), source_of("fe80::1%eth0")
    ('10.0.0.1', '2001:db8::/64', '10.0.0.1', 'fe80::/64')
    """
    address = ipaddress.ip_address(ip.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


def _first(ordered: Mapping[int, T]) -> list[T]:
    return [next(iter(ordered.values()))] if ordered else []
