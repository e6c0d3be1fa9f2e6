"""Closes everything that ends with a generation on this rank: groups, transport, memory and threads."""

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
    """An object that closes with its generation, such as a group."""

    def close(self) -> None: ...


class Lifetime:
    """Closes everything that belongs to a generation, or abandons it in a forked child."""

    def __init__(self, service: ServiceThread, resources: Iterable[Resource]) -> None:
        self._service = service
        self._failure: FailurePath = service.failure
        self._groups: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._resources = list(resources)
        self._observers: list[Callable[[Lifetime], None]] = []

    def add_group(self, group: Closable) -> None:
        """Close this group with the generation. It is held by a weak reference."""
        self._groups.add(group)

    def add_resource(self, resource: Resource) -> None:
        """Close this resource with the generation, before the resources that were added earlier."""
        self._resources.append(resource)

    def on_close(self, observer: Callable[[Lifetime], None]) -> None:
        """Call `observer` when the generation was closed."""
        self._observers.append(observer)

    def close(self, finding: Finding | None = None) -> None:
        """Close everything. Calling it again has no effect.

        The other ranks get a goodbye or, with a finding, the reason why this rank breaks the generation.
        """
        failure = self._failure
        if failure.inherited or not failure.close():
            return
        if (unseen := failure.take_unseen_mismatch()) is not None:
            log.error("the group was closed after an error that no call has raised: %s", unseen)
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
        """Close everything because of an error, and report the error to the other ranks unless they know it."""
        known = isinstance(error, (Broken, Closed)) or not self._failure.control.intact
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self.close(None if known else Finding("aborted", reason[:2000], self._failure.identity.rank))

    def abandon(self) -> None:
        """Close this process's copies of all descriptors, in a forked child, without sending anything."""
        self._failure.abandon()
        for resource in self._resources:
            resource.abandon()
