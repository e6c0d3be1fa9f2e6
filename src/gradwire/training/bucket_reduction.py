"""The mean of one bucket over all ranks: checked for values that are not finite, weighted, compressed, exchanged."""

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
    """A way to reduce a bucket by moving fewer bytes: those of `gradwire.training.compression`, or one's own."""

    def describe(self) -> str:
        """The name and every setting that ranks must share."""

    def operation(self, bucket: Array, scale: Callable[[], float]) -> Operation:
        """Make the bucket the sum over all ranks of scale() · bucket, in place; asked when its turn has come."""

    def reset(self) -> None:
        """Forget what was not sent of earlier buckets."""


@dataclass(frozen=True, slots=True)
class Compressing:
    """The compression of a `GradientSync`; `feedback` is the same object if it is one that keeps what it did not send.

    Both are None without compression.
    """

    compression: Compression | None
    feedback: ErrorFeedback | None

    @classmethod
    def of(cls, wanted: Any) -> Compressing:
        """What the user's argument `compression` asks for."""
        if wanted is None:
            return cls(None, None)
        from gradwire.training.compression import Compression as ErrorFeedback
        from gradwire.training.compression import compression_for

        made = compression_for(wanted)
        return cls(made, made if isinstance(made, ErrorFeedback) else None)

    def describe(self) -> str:
        """What all ranks must have in common."""
        return "no" if self.compression is None else self.compression.describe()

    def check(self, bucket_set: BucketSet) -> None:
        """Raise if a bucket cannot be compressed."""
        if self.feedback is not None:
            for flat in bucket_set.flats:
                self.feedback.operation(flat, 1.0)

    def reset(self) -> None:
        """Forget what was not sent: it belongs to buckets that are no longer there."""
        if self.compression is not None:
            self.compression.reset()


@dataclass(slots=True)
class BucketReduction:
    """How the buckets of one backward are reduced, and what was not finite in them on this rank."""

    bucket_set: BucketSet
    algorithm: str
    check_finite: bool
    compressing: Compressing
    weights: Weights | None  # None: all ranks count alike
    not_finite: dict[str, str] = field(default_factory=dict)  # by tensor, in words

    def operation(self, bucket: Bucket) -> Operation:
        """The mean of a bucket over all ranks, in place."""
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
                weights.apply(bucket.flat)
            if exchange.size > 1:
                exchange(shape, bucket.flat, bucket.flat)
            if weights is not None:
                weights.settle(bucket.flat)

        return Operation("GradientSync", body)

    def share(self) -> float:
        """This rank's part of the mean; known when the first bucket's turn has come."""
        return 1 / self.bucket_set.group.size if self.weights is None else self.weights.share

    @property
    def has_no_data(self) -> bool:
        """Whether this rank does not count in this backward, whatever its gradients are."""
        return self.weights is not None and not self.weights.mine

    @property
    def total_weight(self) -> float:
        """The sum of all ranks' weights."""
        return float(self.bucket_set.group.size) if self.weights is None else self.weights.total

    def _prepare(self, bucket: Bucket) -> None:
        """Look at a bucket before it leaves this rank."""
        if self.has_no_data:
            bucket.flat.fill(0)
            return
        if not self.check_finite or self.bucket_set.places.finite.issuperset(bucket.views):
            return
        if finite.all_finite(bucket.flat):
            return
        spoiled = {name: view for name, view in bucket.views.items() if not finite.all_finite(view)}
        self.not_finite.update({name: finite.faults(view) for name, view in spoiled.items()})

    def put_back(self, name: str, before: Array) -> None:
        """No rank has used this gradient: let it be what it was. What was sent of it in vain is sent with the next."""
        bucket = self.bucket_set.home[name]
        feedback = self.compressing.feedback
        if feedback is not None:
            late = bucket.views[name].astype(float) / self.bucket_set.group.size - before.astype(float) * self.share()
            feedback.take_back(bucket.flat, bucket.places[name], late.reshape(-1))
        bucket.views[name][...] = before
