"""One backward pass: tracks completed gradients, starts the reduction of full buckets, and takes the final vote."""

from __future__ import annotations

import threading
from collections.abc import Set
from typing import NamedTuple

import numpy as np

from gradwire.arrays import Array
from gradwire.errors import ConfigError, NotFinite
from gradwire.group.work import Work
from gradwire.operations.types import Operation
from gradwire.training import finite
from gradwire.training.bucket_reduction import BucketReduction
from gradwire.training.buckets import Bucket


class Outcome(NamedTuple):
    """The result of the vote at the end of a backward pass, the same on all ranks."""

    used: frozenset[str]  # gradients that at least one rank had
    all_finite: bool


class Backward:
    """The reductions of one backward pass.

    `beside=True` runs a reduction on the group's progress thread, beside the program. `beside=False` runs it on the
    calling thread. If the ranks have weights, the constructor starts the exchange of these weights.
    """

    def __init__(self, reduction: BucketReduction, *, beside: bool) -> None:
        self._reduction = reduction
        self._bucket_set = reduction.bucket_set
        self._buckets = reduction.bucket_set.buckets
        self._internals = reduction.bucket_set.internals
        self._overlaps = reduction.bucket_set.group.size > 1
        self._lock = threading.Lock()
        self._started = 0  # number of buckets whose reduction has started; buckets are reduced in order
        self._works: list[Work] = []
        self._missing = [set(bucket.views) for bucket in self._buckets]  # per bucket: gradients not complete yet
        self._unchanged: dict[str, Array] = {}  # gradients of an earlier backward that this backward did not change
        if reduction.weights is not None:
            self._issue(reduction.weights.operation(), beside)

    @property
    def has_started(self) -> bool:
        """Whether a reduction has started, so that other ranks may already wait for this rank."""
        return bool(self._started or self._works)

    def ready(self, name: str, used: bool, beside: bool) -> None:
        """Mark a gradient as complete, and start the reduction of all buckets that are complete now.

        With `beside`, the last bucket is left to `finish`: at that point no computation is left to overlap with.
        """
        buckets, bucket = self._buckets, self._bucket_set.bucket_of[name]
        if not used:
            self._unchanged[name] = bucket.views[name].copy()
        with self._lock:
            if bucket.index < self._started:
                raise ConfigError(f"ready({name!r}) was called again after the reduction of this gradient had started")
            self._missing[bucket.index].discard(name)
            end = len(buckets) - beside
            while self._started < end and not self._missing[self._started]:
                self._start(buckets[self._started], beside)

    def finish(self, added: Set[str]) -> None:
        """Wait for the started reductions, and run the others on this thread.

        A gradient counts as zeros if it is neither ready nor in `added` (the names of gradients accumulated before).
        """
        for work in self._works:  # `wait` runs an operation on this thread if the progress thread has not begun it
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
        """Run an operation in the group's order: on the progress thread if `beside`, else on this thread."""
        if beside and self._overlaps:
            self._works.append(self._internals.queue(operation))
        else:
            self._internals.run(operation)

    def vote(self) -> Outcome:
        """Find out which gradients any rank used, and whether all are finite. All ranks call it after `finish`."""
        names = list(self._bucket_set.gradients)
        absent = set(names) if self._reduction.has_no_data else set(self._unchanged).union(*self._missing)
        ballot = np.ones(len(names) + 1, np.uint8)
        ballot[[self._bucket_set.numbers[name] for name in absent]] = 0
        ballot[-1] = bool(self._reduction.not_finite)
        self._bucket_set.group.all_reduce(ballot, op="max")
        unused = np.flatnonzero(ballot[:-1] == 0).tolist()
        everything = self._bucket_set.names
        used = everything if not unused else everything.difference(names[number] for number in unused)
        return Outcome(used, not ballot[-1])

    def put_back_unused(self, used: Set[str]) -> None:
        """Restore the gradients that no rank used, and discard the results of their reduction."""
        for name in self._bucket_set.names - used:
            self._reduction.put_back(name, self._unchanged.get(name, np.zeros(())))

    def not_finite(self) -> NotFinite:
        """Return the error to raise when the vote found a value that is not finite. All ranks call it."""
        found = self._reduction.not_finite
        return finite.not_finite(
            self._bucket_set.group, [[name, found[name]] for name in self._bucket_set.gradients if name in found]
        )

    @property
    def total_weight(self) -> float:
        """The sum of all ranks' weights; known after `finish`."""
        return self._reduction.total_weight

    def abandon(self) -> None:
        """Mark the errors of all works as seen: the caller already has an error, and these follow from it."""
        for work in self._works:
            work.acknowledge_error()
