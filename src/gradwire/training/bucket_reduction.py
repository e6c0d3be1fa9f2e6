"""Averages one bucket over all ranks: checks that it is finite, applies weights, compresses and exchanges it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from gradwire.arrays import Array
from gradwire.operations.types import Exchange, Operation, Shape
from gradwire.training import finite
from gradwire.training.buckets import Bucket, BucketSet
from gradwire.training.weights import Weights

if TYPE_CHECKING:
    from gradwire.training.compression import Compression as ErrorFeedback


class Compression(Protocol):
    """Reduces a bucket with fewer bytes: a class of `gradwire.training.compression`, or a user's own class."""

    def describe(self) -> str:
        """Return the name and every setting that must be the same on all ranks."""

    def operation(self, bucket: Array, scale: Callable[[], float]) -> Operation:
        """Return an operation that replaces the bucket by the sum over all ranks of `scale() · bucket`, in place.

        Call `scale` only when the operation runs: weights are not known before.
        """

    def reset(self) -> None:
        """Discard the residuals of all buckets."""


@dataclass(frozen=True, slots=True)
class Compressing:
    """The compression of a `GradientSync`; both fields are None without compression.

    `feedback` is the same object as `compression` if that is a built-in one, which keeps a residual per bucket.
    """

    compression: Compression | None
    feedback: ErrorFeedback | None

    @classmethod
    def of(cls, wanted: Any) -> Compressing:
        """Convert the user's argument `compression`."""
        if wanted is None:
            return cls(None, None)
        from gradwire.training.compression import Compression as ErrorFeedback
        from gradwire.training.compression import compression_for

        made = compression_for(wanted)
        return cls(made, made if isinstance(made, ErrorFeedback) else None)

    def describe(self) -> str:
        """Return the settings that must be the same on all ranks."""
        return "no" if self.compression is None else self.compression.describe()

    def check(self, bucket_set: BucketSet) -> None:
        """Raise if a bucket cannot be compressed."""
        if self.feedback is not None:
            for flat in bucket_set.flats:
                self.feedback.operation(flat, 1.0)

    def reset(self) -> None:
        """Discard the residuals: they belong to buckets that no longer exist."""
        if self.compression is not None:
            self.compression.reset()


@dataclass(slots=True)
class BucketReduction:
    """Reduces the buckets of one backward pass, and records which gradients of this rank are not finite."""

    bucket_set: BucketSet
    algorithm: str
    check_finite: bool
    compressing: Compressing
    weights: Weights | None  # None: all ranks have the same weight
    not_finite: dict[str, str] = field(default_factory=dict)  # tensor name → number of NaN and infinite elements

    def operation(self, bucket: Bucket) -> Operation:
        """Return the operation that averages a bucket over all ranks, in place."""
        call = f"GradientSync(bucket {bucket.index + 1} of {len(self.bucket_set.buckets)}: {bucket.contents})"
        shape = Shape("all_reduce", bucket.dtype, bucket.flat.size, "mean", None, self.algorithm, call)
        compression, weights = self.compressing.compression, self.weights
        compressed = None if compression is None else compression.operation(bucket.flat, self.share)

        def body(exchange: Exchange) -> None:
            self._prepare(bucket)
            if compressed is not None:
                compressed.body(exchange)
                bucket.clear_gaps()
                return
            if weights is not None and weights.mine:
                weights.scale_input(bucket.flat)
            if exchange.size > 1:
                exchange(shape, bucket.flat, bucket.flat)
            if weights is not None:
                weights.scale_result(bucket.flat)

        return Operation("GradientSync", body)

    def share(self) -> float:
        """Return this rank's factor in the mean. It is known once the weights have been exchanged."""
        return 1 / self.bucket_set.group.size if self.weights is None else self.weights.share

    @property
    def has_no_data(self) -> bool:
        """Whether this rank has weight 0, so that its gradients are ignored."""
        return self.weights is not None and not self.weights.mine

    @property
    def total_weight(self) -> float:
        """The sum of all ranks' weights."""
        return float(self.bucket_set.group.size) if self.weights is None else self.weights.total

    def _prepare(self, bucket: Bucket) -> None:
        """Clear the bucket if this rank has no data, else record which of its gradients are not finite."""
        if self.has_no_data:
            bucket.flat.fill(0)
            return
        if not self.check_finite or self.bucket_set.writer.finite.issuperset(bucket.views):
            return
        if finite.all_finite(bucket.flat):
            return
        faulty = {name: view for name, view in bucket.views.items() if not finite.all_finite(view)}
        self.not_finite.update({name: finite.faults(view) for name, view in faulty.items()})

    def put_back(self, name: str, before: Array) -> None:
        """Restore a gradient that no rank used to its values `before`.

        With error feedback, the values sent for it were not applied, so they are added to the residual again.
        """
        bucket = self.bucket_set.bucket_of[name]
        feedback = self.compressing.feedback
        if feedback is not None:
            unsent = bucket.views[name].astype(float) / self.bucket_set.group.size - before.astype(float) * self.share()
            feedback.add_to_residual(bucket.flat, bucket.places[name], unsent.reshape(-1))
        bucket.views[name][...] = before
