"""What ends with a generation on this rank: its groups, and the transport, memory and threads that it uses."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

from gradwire.errors import Broken, Closed
from gradwire.generation.failure_path import FailurePath
from gradwire.generation.service_thread import ServiceThread
from gradwire.liveness.verdict import Finding
from gradwire.transports.base import Resource

log = logging.getLogger("gradwire")


class Closable(Protocol):
    """A group, as far as it ends with its generation."""

    def close(self) -> None: ...


class Lifetime:
    """Closes, or in a forked child abandons, everything that belongs to a generation."""

    def __init__(self, service: ServiceThread, resources: Iterable[Resource]) -> None:
        self._service = service
        self._failure: FailurePath = service.failure
        self._groups: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._resources = list(resources)
        self._observers: list[Callable[[Lifetime], None]] = []

    def add_group(self, group: Closable) -> None:
        """This group ends with the generation, if it lives as long."""
        self._groups.add(group)

    def add_resource(self, resource: Resource) -> None:
        """This ends with the generation, before the resources that were there earlier."""
        self._resources.append(resource)

    def on_close(self, observer: Callable[[Lifetime], None]) -> None:
        """Call this when the generation has been closed."""
        self._observers.append(observer)

    def close(self, finding: Finding | None = None) -> None:
        """Say goodbye (or, with a finding, why not) and close everything; idempotent."""
        failure = self._failure
        if failure.inherited or not failure.close():
            return
        if (unseen := failure.take_unseen_mismatch()) is not None:
            log.error("the group is closed, and nobody has been told: %s", unseen)
        failure.halt()
        if finding is not None:
            failure.control.report(finding, time.monotonic())
        self._service.close()
        for group in list(self._groups):
            group.close()
        for resource in reversed(self._resources):
            resource.close()
        for observer in self._observers:
            observer(self)

    def give_up(self, error: BaseException) -> None:
        """Close everything because of an error, and tell the other ranks, unless they know why."""
        known = isinstance(error, (Broken, Closed)) or not self._failure.control.intact
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self.close(None if known else Finding("aborted", reason[:2000], self._failure.identity.rank))

    def abandon(self) -> None:
        """In a forked child: this process is not the rank, and lets go of its links without a word to the peers."""
        self._failure.abandon()
        for resource in self._resources:
            resource.abandon()
