"""Decides which connections to the coordinator stay open, and for how long. Pure.

A connection is *waiting* until its bytes are forwarded to the server, then *unproven*, and *proven* after the first
request on it that proves the job's secret.

- Only a few connections are unproven at a time, so that callers without the secret cannot exhaust the server, however
  many calls they begin. Further connections wait. Honest callers prove the secret within milliseconds, so even a burst
  of them is served soon.
- Connections that prove nothing are closed after some seconds.
- While others wait, an unproven connection loses its place at the server sooner. It is then *parked* for some seconds
  before it is closed, because an attacker whose connection was closed at once would reconnect at once.

All connections that are not proven are called *unauthenticated*.
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
    unauthenticated: int = 4096  # waiting, unproven or parked
    unauthenticated_per_source: int = 1024
    seconds_to_prove: float = 5.0  # also how long a connection stays parked
    seconds_to_prove_when_full: float = 1.0  # after which an unproven connection is parked if others wait
    seconds_between_replacements: float = 0.02  # at the server, where a new connection's calls cost milliseconds
    seconds_to_wait: float = 30.0
    seconds_between_proofs: float = 30.0  # members prove the secret with each request, at least every 4 s
    seconds_between_heartbeats: float = 10.0  # on one stream; a launcher sends one each second


class Reason(Enum):
    """Why a connection is closed."""

    TOO_SLOW = "did not prove the job's secret in time"
    CROWDED = "had not proved the secret when other connections needed the place"
    IDLE = "were idle"


@dataclass(slots=True)
class Decisions:
    """Connections to connect to the server, to disconnect from it, and to close."""

    opened: list[int] = field(default_factory=list)
    parked: list[int] = field(default_factory=list)
    closed: list[tuple[int, Reason]] = field(default_factory=list)


@dataclass(slots=True)
class _Unauthenticated:
    source: str
    since: float  # when its current state (waiting, unproven or parked) began


@dataclass(slots=True)
class _Source:
    """The unauthenticated connections of one source in order of arrival, those of them that wait, and how many are
    unproven."""

    unauthenticated: OrderedDict[int, None] = field(default_factory=OrderedDict)
    waiting: OrderedDict[int, None] = field(default_factory=OrderedDict)
    unproven: int = 0


class ConnectionLimits:
    """Identifies connections by number. Report events, then call `decide`, and call it again at `due`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        # The oldest entry of each is first. An OrderedDict finds it in constant time, even after many removals.
        self._waiting: OrderedDict[int, _Unauthenticated] = OrderedDict()
        self._unproven: OrderedDict[int, _Unauthenticated] = OrderedDict()
        self._parked: OrderedDict[int, _Unauthenticated] = OrderedDict()
        self._proven: OrderedDict[int, float] = OrderedDict()  # time of the last proof
        self._sources: dict[str, _Source] = {}
        self._replaced = -math.inf  # when an unproven connection was last parked in favour of a waiting one
        self._surplus: list[tuple[int, Reason]] = []  # connections to close because newer ones took their place

    def arrived(self, connection: int, source: str, now: float) -> None:
        """Record an accepted connection. If there are too many, in total or from `source`, the oldest is closed."""
        self._waiting[connection] = _Unauthenticated(source, now)
        group = self._sources.setdefault(source, _Source())
        group.unauthenticated[connection] = group.waiting[connection] = None
        too_many = len(group.unauthenticated) > self._limits.unauthenticated_per_source
        if len(self._waiting) + len(self._unproven) + len(self._parked) > self._limits.unauthenticated:
            too_many, group = True, max(self._sources.values(), key=lambda source: len(source.unauthenticated))
        if too_many:
            oldest = next(iter(group.unauthenticated))
            self._forget_unauthenticated(oldest)
            self._surplus.append((oldest, Reason.CROWDED))

    def proved(self, connection: int, now: float) -> None:
        """Record that a request on this connection proved the secret.

        If there are too many proven connections, the one with the oldest proof is closed.
        """
        if connection in self._unproven or self._proven.pop(connection, None) is not None:
            self._forget_unauthenticated(connection)
            self._proven[connection] = now
        if len(self._proven) > self._limits.proven:
            longest_ago = next(iter(self._proven))
            del self._proven[longest_ago]
            self._surplus.append((longest_ago, Reason.IDLE))

    def ended(self, connection: int) -> None:
        """Record that the connection has ended."""
        self._forget_unauthenticated(connection)
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
        """Return when to call `decide` again if nothing happens before."""
        limits = self._limits
        times = [entry.since + limits.seconds_to_wait for entry in _first(self._waiting)]
        times += [entry.since + limits.seconds_to_prove for entry in _first(self._parked)]
        times += [proof + limits.seconds_between_proofs for proof in _first(self._proven)]
        for oldest in _first(self._unproven):
            times.append(oldest.since + limits.seconds_to_prove)
            if self._waiting:
                next_replacement = self._replaced + limits.seconds_between_replacements
                times.append(max(next_replacement, oldest.since + limits.seconds_to_prove_when_full))
        return min(times, default=None)

    def _expired(self, now: float) -> Iterator[tuple[int, Reason]]:
        limits = self._limits
        for table, seconds, reason in (
            (self._unproven, limits.seconds_to_prove, Reason.TOO_SLOW),
            (self._waiting, limits.seconds_to_wait, Reason.CROWDED),
            (self._parked, limits.seconds_to_prove, Reason.CROWDED),
        ):
            for connection, entry in table.items():
                if entry.since + seconds > now:
                    break
                yield connection, reason
        for connection, proof in self._proven.items():
            if proof + limits.seconds_between_proofs > now:
                break
            yield connection, Reason.IDLE

    def _make_room(self, now: float, decisions: Decisions) -> bool:
        """Return whether the server can take one more connection, after parking another one if necessary."""
        if len(self._unproven) >= self._limits.unproven:
            slow = self._slow(now) if now >= self._replaced + self._limits.seconds_between_replacements else None
            if slow is None:
                return False
            self._park(slow, now, decisions)
        return True

    def _slow(self, now: float) -> int | None:
        """Return an unproven connection whose time is over: the oldest of the source with the most unproven ones."""
        seconds = self._limits.seconds_to_prove_when_full
        slow = [key for key, entry in self._unproven.items() if entry.since + seconds <= now]
        return max(slow, key=lambda key: self._sources[self._unproven[key].source].unproven, default=None)

    def _next(self) -> int:
        """Return the newest waiting connection of the source with the fewest unproven ones.

        In an attack the oldest waiting connections are the attacker's. In a burst of honest callers none waits long.
        """
        waiting = (source for source in self._sources.values() if source.waiting)
        return next(reversed(min(waiting, key=lambda source: source.unproven).waiting))

    def _open(self, connection: int, now: float, decisions: Decisions) -> None:
        source = self._waiting.pop(connection).source
        del self._sources[source].waiting[connection]
        self._sources[source].unproven += 1
        self._unproven[connection] = _Unauthenticated(source, now)
        decisions.opened.append(connection)

    def _park(self, connection: int, now: float, decisions: Decisions) -> None:
        source = self._unproven.pop(connection).source
        self._sources[source].unproven -= 1
        self._parked[connection] = _Unauthenticated(source, now)
        self._replaced = now
        decisions.parked.append(connection)

    def _close(self, connection: int, reason: Reason, decisions: Decisions) -> None:
        self.ended(connection)
        decisions.closed.append((connection, reason))

    def _forget_unauthenticated(self, connection: int) -> None:
        unproven = self._unproven.pop(connection, None)
        entry = unproven or self._waiting.pop(connection, None) or self._parked.pop(connection, None)
        if entry is None:
            return
        source = self._sources[entry.source]
        source.unproven -= unproven is not None
        del source.unauthenticated[connection]
        source.waiting.pop(connection, None)
        if not source.unauthenticated:
            del self._sources[entry.source]


def source_of(ip: str) -> str:
    """Return the source of an address: an IPv4 address, or the /64 network of an IPv6 address.

    One IPv6 caller usually has a whole /64 network.

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
