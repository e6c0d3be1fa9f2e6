"""GradientSync: gradients live in buckets, and the buckets are reduced while backward still runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gradwire.arrays import Array
from gradwire.errors import ConfigError
from gradwire.group import Group
from gradwire.group.work import Work
from gradwire.operations.types import Exchange, Operation, Shape, check_algorithm
from gradwire.training import agreement_check, finite, norms
from gradwire.training.bucket_writer import Places
from gradwire.training.buckets import Bucket, check_bytes, fitting, make, tensors_like
from gradwire.training.contract import Contract
from gradwire.training.weights import Weights

if TYPE_CHECKING:
    from gradwire.training.compression import Compression as Keeping

BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20


class Compression(Protocol):
    """A way to reduce a bucket by moving fewer bytes: those of `gradwire.training.compression`, or one's own."""

    def describe(self) -> str:
        """The name and every setting that ranks must share."""

    def operation(self, bucket: Array, scale: Callable[[], float]) -> Operation:
        """Make the bucket the sum over all ranks of scale() · bucket, in place; asked when its turn has come."""

    def reset(self) -> None:
        """Forget what was not sent of earlier buckets."""


class Follows(Protocol):
    """Something whose group changes: `gw.Elastic`."""

    group: Group


class GradientSync:
    """Keeps the gradients of all ranks in step: they are averaged in buckets, while backward still runs.

    `like` tells names, shapes and dtypes, in the order of the forward pass. `group` may be an elastic run: then the
    sync goes on in its next generation by itself.

    The short way, when all gradients are there:

    >>> import gradwire as gw, numpy as np
    >>> weights = {"w": np.ones((2, 3)), "b": np.zeros(3)}
    >>> with gw.init() as group:
    ...     sync = gw.GradientSync(group, weights)
    ...     sync.sync({"w": np.ones((2, 3)), "b": np.arange(3.0)})["b"]
    array([0., 1., 2.])

    The long way: write each gradient where it is reduced, and say when it is complete.

    >>> with gw.init() as group:
    ...     sync = gw.GradientSync(group, weights)
    ...     sync.begin()
    ...     for name in ("b", "w"):
    ...         sync.gradients[name][:] = 1
    ...         sync.ready(name)
    ...     sync.finish()
    ...     sync.clip(1.0)
    3.0

    No call here but `rebind` may be left out on one rank: `begin` with a weight, `finish`, `clip` and `reorder` are
    collective.
    """

    def __init__(
        self,
        group: Group | Follows,
        like: Mapping[str, Any],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        compression: Compression | str | None = None,
        check_finite: bool = True,
        contract_every: int = 0,
        algorithm: str = "auto",
    ) -> None:
        self._owner = group
        self._tensors = tensors_like(like)
        self._names = frozenset(self._tensors)
        self._numbers = {name: number for number, name in enumerate(self._tensors)}
        self._sizes = check_bytes("bucket_bytes", bucket_bytes), check_bytes("first_bucket_bytes", first_bucket_bytes)
        self._compression, self._keeping = _compressing(compression)
        self.check_finite = check_finite
        check_algorithm("all_reduce", algorithm)
        self._algorithm = algorithm
        self.ordered = False
        """Whether the order of readiness was learned, here or by a rank that was there before."""
        self._order = list(reversed(self._tensors))
        self._lock = threading.Lock()
        self.group = _group_of(group)
        self.contract = Contract(self.group, contract_every)
        self._bind(self.group)
        if self._keeping is not None:
            for bucket in self._buckets:
                self._keeping.operation(bucket.flat, self._share)  # complains now of what cannot be compressed

    def __repr__(self) -> str:
        tensors, buckets = len(self._tensors), len(self._buckets)
        nbytes = sum(bucket.flat.nbytes for bucket in self._buckets)
        return f"<gradwire.GradientSync of {tensors} tensors, {nbytes} bytes in {buckets} buckets>"

    # -- where gradients live -----------------------------------------------------------------------------------------

    def _bind(self, group: Group) -> None:
        """Buckets in the memory of a group; nothing is said to other ranks yet."""
        self.group = group
        self._stream = group.stream()
        self._agreed = False
        self._added: set[str] = set()
        self._build()
        self.contract.rebind(group)
        self.used: frozenset[str] = frozenset()
        """Those that some rank had a gradient of, in the last backward; the others have none anywhere."""
        self.total_weight = float(group.size)
        """The sum of all ranks' weights in the last backward."""

    def _build(self) -> None:
        old = getattr(self, "gradients", {})
        self._buckets = make(self.group, [self._tensors[name] for name in self._order], *self._sizes)
        self._home = {tensor.name: bucket for bucket in self._buckets for tensor in bucket.tensors}
        self.gradients: dict[str, Array] = {name: self._home[name].views[name] for name in self._tensors}
        """Each gradient's place in its bucket: write it there. After `agree`, `reorder` and `rebind`, look again."""
        self.places = Places(self.gradients)
        for name, view in old.items():
            self.gradients[name][...] = view
        if self._compression is not None:
            self._compression.reset()  # what it kept belongs to the old places
        self._reset()

    def _reset(self) -> None:
        self._started = 0
        self._works: list[Work] = []
        self._weights: Weights | None = None
        self._not_finite: dict[str, str] = {}
        self._unchanged: dict[str, Array] = {}  # what was there from an earlier backward, and not added to in this one
        self.places.finite.clear()
        for bucket in self._buckets:
            bucket.missing = set(bucket.views)

    def rebind(self, group: Group) -> None:
        """Go on with another group, of the next generation: the gradients move to its memory, with their contents."""
        if group is not self.group:
            self._heed_works()
            self._bind(group)

    def _follow(self) -> None:
        if not isinstance(self._owner, Group):
            self.rebind(self._owner.group)

    def agree(self) -> bool:
        """Make sure that all ranks sync the same tensors in the same order; True if the gradients have moved.

        The first `begin` or `finish` with a group does that, so that it need not be called; but whoever holds views
        of `gradients` should call it first.
        """
        if self._agreed:
            return False
        compression = self._compression.describe() if self._compression else "no"
        items = [f"{self._sizes} bytes with {compression} compression", *map(str, self._tensors.values())]
        names = list(self._tensors)
        mine = [self._numbers[name] for name in self._order] if self.ordered else None
        orders = agreement_check.tell(self.group, "GradientSync", items, mine)
        self._agreed = True
        learned = next((one for one in orders if one is not None), None)
        if learned is None or sorted(learned) != list(range(len(names))):
            return False
        self.ordered = True
        return self._adopt([names[number] for number in learned])

    def _adopt(self, order: list[str]) -> bool:
        if order == self._order:
            return False
        self._order = order
        self._build()
        return True

    def reorder(self, names: Iterable[str]) -> None:
        """Fill buckets in the order in which rank 0 saw gradients become ready; all ranks call it, between backwards.

        Names that it does not know of come last.
        """
        self.agree()
        told = list(dict.fromkeys(self.group.broadcast_value(list(names))))
        if unknown := [name for name in told if name not in self._tensors]:
            raise ConfigError(f"rank 0's order names {unknown[0]!r}, of which there is no gradient")
        seen = set(told)
        self.ordered = True
        self._adopt([*told, *(name for name in self._order if name not in seen)])

    # -- one backward -------------------------------------------------------------------------------------------------

    def begin(self, weight: float | None = None) -> None:
        """Begin a backward. Needed only for a weight: that of this rank in the mean, say its number of samples.

        Either all ranks give one or none does. Weight 0 means "I have no data": this rank's gradients do not count,
        whatever they are.
        """
        self._begin(weight, beside=True)

    def _begin(self, weight: float | None, beside: bool) -> None:
        self._follow()
        if self.under_way:
            raise ConfigError("the last backward was begun and not finished: call finish()")
        self.agree()
        self._reset()
        if weight is not None:
            self._weights = Weights(weight, self.group.size)
            self._issue(self._weights.operation(), beside)

    def ready(self, name: str, *, used: bool = True, beside: bool = True) -> None:
        """This gradient is complete, and not written until `finish`. Full buckets are reduced beside the program; but
        the last one in `finish`, where there is nothing left to overlap and another thread would only have to be woken.

        What is there from an earlier backward, and was not added to in this one, takes part too, but is not `used`: if
        no rank adds to it, it stays. With `beside=False` they are reduced in this call: there is nothing to overlap.
        """
        self._follow()
        bucket = self._home.get(name)
        if bucket is None:
            raise ConfigError(f"there is no gradient {name!r}")
        if not self._agreed and self.agree():
            bucket = self._home[name]
        if not used:
            self._unchanged[name] = bucket.views[name].copy()
        with self._lock:
            if bucket.index < self._started:
                raise ConfigError(f"the gradient {name!r} was made ready before, and is on its way already")
            bucket.missing.discard(name)
            most = len(self._buckets) - beside
            while self._started < most and not self._buckets[self._started].missing:
                self._start(self._buckets[self._started], beside)

    @property
    def under_way(self) -> bool:
        """Whether other ranks may have heard of a backward that is not finished."""
        return bool(self._started or self._works)

    def finish(self) -> None:
        """Reduce what is left, wait for everything, and find out who used what. A gradient never ready is zeros.

        If a gradient is not finite, every rank raises `NotFinite`, which names rank and tensor. The group goes on.
        """
        self._follow()
        try:
            self.agree()
            for work in self._works:  # whoever waits does what nobody has begun
                work.wait()
            for bucket in self._buckets[self._started :]:
                bucket.missing -= self._added
                for name in bucket.missing:
                    bucket.views[name].fill(0)
                self._start(bucket, beside=False)
            self._vote()
        finally:
            self._heed_works()
            self._added = set()
            self._reset()

    def _heed_works(self) -> None:
        """Whoever raises one error has seen those that follow from it."""
        for work in self._works:
            work.heed()

    # -- one bucket ---------------------------------------------------------------------------------------------------

    def _start(self, bucket: Bucket, beside: bool) -> None:
        self._started = bucket.index + 1
        self._issue(self._reduction(bucket), beside)

    def _issue(self, operation: Operation, beside: bool) -> None:
        """Run an operation in the group's order: on the progress thread, or here where nothing is left to overlap."""
        if beside and self.group.size > 1:
            self._works.append(self._stream._later(operation, None))
        else:
            self.group._now(operation, None)

    def _reduction(self, bucket: Bucket) -> Operation:
        call = f"GradientSync(bucket {bucket.index + 1} of {len(self._buckets)}: {bucket.contents})"
        shape = Shape("all_reduce", bucket.dtype, bucket.flat.size, "mean", None, self._algorithm, call)
        compressed = None if self._compression is None else self._compression.operation(bucket.flat, self._share)

        def body(exchange: Exchange) -> None:
            self._prepare(bucket)
            if compressed is not None:
                compressed.body(exchange)
                bucket.clear_gaps()
                return
            if self._weights is not None and self._weights.mine:
                self._weights.apply(bucket.flat)
            if exchange.size > 1:
                exchange(shape, bucket.flat, bucket.flat)
            if self._weights is not None:
                self._weights.settle(bucket.flat)

        return Operation("GradientSync", body)

    def _share(self) -> float:
        """This rank's part of the mean; known when the first bucket's turn has come."""
        return 1 / self.group.size if self._weights is None else self._weights.share

    def _prepare(self, bucket: Bucket) -> None:
        """Look at a bucket before it leaves this rank."""
        if self._weights is not None and not self._weights.mine:
            bucket.flat.fill(0)
            return
        if not self.check_finite or self.places.finite.issuperset(bucket.views) or finite.all_finite(bucket.flat):
            return
        spoiled = {name: view for name, view in bucket.views.items() if not finite.all_finite(view)}
        self._not_finite.update({name: finite.faults(view) for name, view in spoiled.items()})

    def _vote(self) -> None:
        """Of every tensor, whether any rank used it; and whether all is well. On each rank the same comes out."""
        ballot = np.ones(len(self._tensors) + 1, np.uint8)
        absent = set(self._unchanged).union(*(bucket.missing for bucket in self._buckets))
        if self._weights is not None and not self._weights.mine:
            absent = set(self._tensors)
        ballot[[self._numbers[name] for name in absent]] = 0
        ballot[-1] = bool(self._not_finite)
        self.group.all_reduce(ballot, op="max")
        nowhere = np.flatnonzero(ballot[:-1] == 0).tolist()
        self.used = self._names if not nowhere else self._names.difference(list(self._tensors)[i] for i in nowhere)
        self.total_weight = float(self.group.size) if self._weights is None else self._weights.total
        if ballot[-1]:
            found = [name for name in self._tensors if name in self._not_finite]
            raise finite.not_finite(self.group, [[name, self._not_finite[name]] for name in found])
        for name in self._names - self.used:  # nobody looks at what came out: these are what they were
            bucket, before = self._home[name], self._unchanged.get(name, np.zeros(()))
            if self._keeping is not None:
                late = bucket.views[name].astype(float) / self.group.size - before.astype(float) * self._share()
                self._keeping.take_back(bucket.flat, bucket.places[name], late.reshape(-1))
            bucket.views[name][...] = before

    # -- all at once --------------------------------------------------------------------------------------------------

    def sync(self, gradients: Mapping[str, Any], weight: float | None = None) -> dict[str, Array]:
        """The mean over all ranks of gradients that are all there, by name; views of the buckets, good until the next.

        A gradient that is not given, or None, counts as zeros; one that no rank gives is not in the result.
        """
        given = fitting(self._tensors, gradients)  # before anything is sent
        self._begin(weight, beside=False)
        for name in self._order:
            if name in given:
                self.write(name, given[name])
            if name in given or name in self._added:
                self.ready(name, beside=False)
        self.finish()
        return {name: view for name, view in self.gradients.items() if name in self.used}

    def add(self, gradients: Mapping[str, Any]) -> None:
        """Keep gradients without a sync: the next `sync` takes in all that were added since the last one, summed.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group:
        ...     sync = gw.GradientSync(group, {"w": np.zeros(2)})
        ...     sync.add({"w": np.ones(2)})
        ...     sync.sync({"w": np.ones(2)})
        {'w': array([2., 2.])}
        """
        self._follow()
        for name, gradient in fitting(self._tensors, gradients).items():
            self.write(name, gradient)
            self._added.add(name)

    def write(self, name: str, gradient: Array) -> None:
        """Copy a gradient into its place, on top of what was added before, and look on the way whether it is finite:
        then its bucket need not be read once more. What is written there later, in another way, would not be looked at.
        """
        if name in self._added:
            self.places.add(name, gradient)
        else:
            self.places.write(name, gradient)

    # -- after the reduce ---------------------------------------------------------------------------------------------

    def clip(self, max_norm: float) -> float:
        """Scale all gradients so that their global norm is at most max_norm; returns what it was. After `finish`.

        The same on all ranks, bit for bit.
        """
        max_norm = norms.check_norm(max_norm)
        flats = [bucket.flat for bucket in self._buckets]
        norm = norms.global_norm(self.group, flats)
        factor = norms.clip_factor(norm, max_norm)
        if factor < 1.0:
            norms.scale(flats, factor)
        return norm


def _compressing(wanted: Any) -> tuple[Compression | None, Keeping | None]:
    """The compression that is wanted; and again, if it is one of ours, which keep what they have not sent."""
    if wanted is None:
        return None, None
    from gradwire.training.compression import Compression as Keeping
    from gradwire.training.compression import compression_for

    made = compression_for(wanted)
    return made, made if isinstance(made, Keeping) else None


def _group_of(owner: Group | Follows) -> Group:
    return owner if isinstance(owner, Group) else owner.group
