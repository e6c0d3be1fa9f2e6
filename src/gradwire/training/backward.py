"""One backward: which gradients are ready, the reductions of full buckets beside it, and the vote at its end."""

from __future__ import annotations

import threading
from collections.abc import Set
from typing import NamedTuple

import numpy as np

from gradwire.arrays import Array
from gradwire.errors import ConfigError, NotFinite
from gradwire.group.internals import GroupInternals
from gradwire.group.work import Work
from gradwire.operations.types import Operation
from gradwire.training import finite
from gradwire.training.bucket_reduction import BucketReduction
from gradwire.training.buckets import Bucket


class Outcome(NamedTuple):
    """What the vote at the end of a backward found; the same on all ranks."""

    used: frozenset[str]  # gradients that at least one rank had
    all_finite: bool


class Backward:
    """The reductions of one backward. It begins with the weights of the ranks, if they have any."""

    def __init__(self, reduction: BucketReduction, internals: GroupInternals, *, beside: bool) -> None:
        self._reduction = reduction
        self._bucket_set = reduction.bucket_set
        self._buckets = reduction.bucket_set.buckets
        self._internals = internals
        self._overlaps = reduction.bucket_set.group.size > 1
        self._lock = threading.Lock()
        self._started = 0  # buckets; they are reduced in order
        self._works: list[Work] = []
        self._missing = [set(bucket.views) for bucket in self._buckets]  # gradients that are not complete yet
        self._unchanged: dict[str, Array] = {}  # what was there from an earlier backward, and not added to in this one
        if reduction.weights is not None:
            self._issue(reduction.weights.operation(), beside)

    @property
    def has_started(self) -> bool:
        """Whether other ranks may have heard of it."""
        return bool(self._started or self._works)

    def ready(self, name: str, used: bool, beside: bool) -> None:
        """A gradient is complete; buckets that are full now are reduced, the last one only if not `beside`."""
        buckets, bucket = self._buckets, self._bucket_set.home[name]
        if not used:
            self._unchanged[name] = bucket.views[name].copy()
        with self._lock:
            if bucket.index < self._started:
                raise ConfigError(f"the gradient {name!r} was made ready before, and is on its way already")
            self._missing[bucket.index].discard(name)
            most = len(buckets) - beside
            while self._started < most and not self._missing[self._started]:
                self._start(buckets[self._started], beside)

    def finish(self, added: Set[str]) -> None:
        """Wait for what was started, and reduce the rest here. What is neither ready nor was added before is zeros."""
        for work in self._works:  # whoever waits does what nobody has begun
            work.wait()
        for bucket in self._buckets[self._started :]:
            missing = self._missing[bucket.index]
            missing -= added
            for name in missing:
                bucket.views[name].fill(0)
            self._start(bucket, beside=False)

    def _start(self, bucket: Bucket, beside: bool) -> None:
        self._started = bucket.index + 1
        self._issue(self._reduction.operation(bucket), beside)

    def _issue(self, operation: Operation, beside: bool) -> None:
        """Run an operation in the group's order: on the progress thread, or here where nothing is left to overlap."""
        if beside and self._overlaps:
            self._works.append(self._internals.queue(operation))
        else:
            self._internals.run(operation)

    def vote(self) -> Outcome:
        """Of every tensor, whether any rank used it; and whether all is well. All ranks call it after `finish`."""
        names = list(self._bucket_set.gradients)
        absent = set(names) if self._reduction.has_no_data else set(self._unchanged).union(*self._missing)
        ballot = np.ones(len(names) + 1, np.uint8)
        ballot[[self._bucket_set.numbers[name] for name in absent]] = 0
        ballot[-1] = bool(self._reduction.not_finite)
        self._bucket_set.group.all_reduce(ballot, op="max")
        nowhere = np.flatnonzero(ballot[:-1] == 0).tolist()
        everything = self._bucket_set.names
        used = everything if not nowhere else everything.difference(names[number] for number in nowhere)
        return Outcome(used, not ballot[-1])

    def put_back_unused(self, used: Set[str]) -> None:
        """Gradients that no rank had are what they were: nobody looks at what came out of their reduction."""
        for name in self._bucket_set.names - used:
            self._reduction.put_back(name, self._unchanged.get(name, np.zeros(())))

    def not_finite(self) -> NotFinite:
        """The error of a vote that was not all finite; all ranks call it."""
        found = self._reduction.not_finite
        return finite.not_finite(
            self._bucket_set.group, [[name, found[name]] for name in self._bucket_set.gradients if name in found]
        )

    @property
    def total_weight(self) -> float:
        """The sum of all ranks' weights; known after `finish`."""
        return self._reduction.total_weight

    def abandon(self) -> None:
        """Nobody waits for it any more: errors of its works are known, or follow from one that is."""
        for work in self._works:
            work.acknowledge_error()
