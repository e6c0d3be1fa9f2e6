"""GradientSync: gradients live in buckets, and the buckets are reduced while backward still runs."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from gradwire.arrays import Array
from gradwire.errors import ConfigError
from gradwire.group import Group
from gradwire.group.internals import GroupInternals
from gradwire.operations.types import check_algorithm
from gradwire.training import agreement_check, norms
from gradwire.training.backward import Backward
from gradwire.training.bucket_reduction import BucketReduction, Compressing, Compression
from gradwire.training.buckets import BucketSet, check_bytes, fitting, tensors_like
from gradwire.training.contract import Contract
from gradwire.training.weights import Weights

BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20


class HasGroup(Protocol):
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
        group: Group | HasGroup,
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
        self._follows = not isinstance(group, Group)
        self._tensors = tensors_like(like)
        self._sizes = check_bytes("bucket_bytes", bucket_bytes), check_bytes("first_bucket_bytes", first_bucket_bytes)
        self._compressing = Compressing.of(compression)
        self.check_finite = check_finite
        check_algorithm("all_reduce", algorithm)
        self._algorithm = algorithm
        self.ordered = False
        """Whether the order of readiness was learned, here or by a rank that was there before."""
        self._lock = threading.Lock()
        self._backward: Backward | None = None  # from its first gradient to `finish`
        self._added: set[str] = set()
        self._agreed = False
        self.group = group if isinstance(group, Group) else group.group
        self._internals = GroupInternals(self.group)
        self.contract = Contract(self.group, contract_every)
        self.used: frozenset[str] = frozenset()
        """Those that some rank had a gradient of, in the last backward; the others have none anywhere."""
        self.total_weight = float(self.group.size)
        """The sum of all ranks' weights in the last backward."""
        self._bind(BucketSet(self.group, self._tensors, list(reversed(self._tensors)), self._sizes))
        self._compressing.check(self._bucket_set)

    def __repr__(self) -> str:
        tensors, flats = len(self._tensors), self._bucket_set.flats
        nbytes = sum(flat.nbytes for flat in flats)
        return f"<gradwire.GradientSync of {tensors} tensors, {nbytes} bytes in {len(flats)} buckets>"

    # -- where gradients live -----------------------------------------------------------------------------------------

    @property
    def layout(self) -> list[list[str]]:
        """The names of the gradients in each bucket, in the order in which buckets are reduced."""
        return [list(bucket.views) for bucket in self._bucket_set.buckets]

    def _bind(self, bucket_set: BucketSet) -> None:
        """Use these buckets from now on; nothing is said to other ranks yet."""
        self._bucket_set = bucket_set
        self.gradients = bucket_set.gradients
        """Each gradient's place in its bucket: write it there. After `agree`, `reorder` and `rebind`, look again."""
        self.places = bucket_set.writer
        self._compressing.reset()
        self._backward = None

    def rebind(self, group: Group) -> None:
        """Go on with another group, of the next generation: the gradients move to its memory, with their contents."""
        if group is self.group:
            return
        self._forget_backward()
        self.group, self._internals = group, GroupInternals(group)
        self._agreed, self._added = False, set()
        self.contract.rebind(group)
        self.used, self.total_weight = frozenset(), float(group.size)
        self._bind(BucketSet(group, self._tensors, self._bucket_set.order, self._sizes, self._bucket_set))

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
        compression = self._compressing.describe()
        items = [f"{self._sizes} bytes with {compression} compression", *map(str, self._tensors.values())]
        names, numbers = list(self._tensors), self._bucket_set.numbers
        mine = [numbers[name] for name in self._bucket_set.order] if self.ordered else None
        orders = agreement_check.check_and_gather(self.group, "GradientSync", items, mine)
        self._agreed = True
        learned = next((one for one in orders if one is not None), None)
        if learned is None or sorted(learned) != list(range(len(names))):
            return False
        self.ordered = True
        return self._adopt([names[number] for number in learned])

    def _adopt(self, order: list[str]) -> bool:
        if tuple(order) == self._bucket_set.order:
            return False
        self._bind(BucketSet(self.group, self._tensors, order, self._sizes, self._bucket_set))
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
        self._adopt([*told, *(name for name in self._bucket_set.order if name not in seen)])

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
        self._forget_backward()
        if weight is not None:
            self._backward = self._new_backward(Weights(weight, self.group.size), beside)

    def _new_backward(self, weights: Weights | None, beside: bool) -> Backward:
        reduction = BucketReduction(self._bucket_set, self._algorithm, self.check_finite, self._compressing, weights)
        return Backward(reduction, self._internals, beside=beside)

    def _running_backward(self) -> Backward:
        with self._lock:
            if self._backward is None:
                self._backward = self._new_backward(None, beside=False)
            return self._backward

    def ready(self, name: str, *, used: bool = True, beside: bool = True) -> None:
        """This gradient is complete, and not written until `finish`. Full buckets are reduced beside the program; but
        the last one in `finish`, where there is nothing left to overlap and another thread would only have to be woken.

        What is there from an earlier backward, and was not added to in this one, takes part too, but is not `used`: if
        no rank adds to it, it stays. With `beside=False` they are reduced in this call: there is nothing to overlap.
        """
        if self._follows:
            self._follow()
        if name not in self._tensors:
            raise ConfigError(f"there is no gradient {name!r}")
        if not self._agreed:
            self.agree()
        backward = self._backward
        if backward is None:
            backward = self._running_backward()
        backward.ready(name, used, beside)

    @property
    def under_way(self) -> bool:
        """Whether other ranks may have heard of a backward that is not finished."""
        return self._backward is not None and self._backward.has_started

    def finish(self) -> None:
        """Reduce what is left, wait for everything, and find out who used what. A gradient never ready is zeros.

        If a gradient is not finite, every rank raises `NotFinite`, which names rank and tensor. The group goes on.
        """
        self._follow()
        try:
            self.agree()
            backward = self._running_backward()
            backward.finish(self._added)
            self.used, all_finite = backward.vote()
            self.total_weight = backward.total_weight
            if not all_finite:
                raise backward.not_finite()
            backward.put_back_unused(self.used)
        finally:
            self._added = set()
            self._forget_backward()

    def _forget_backward(self) -> None:
        """Errors of its works are known by now: whoever raises one has seen those that follow from it."""
        if self._backward is not None:
            self._backward.abandon()
            self._backward = None
        self.places.finite.clear()

    # -- all at once --------------------------------------------------------------------------------------------------

    def sync(self, gradients: Mapping[str, Any], weight: float | None = None) -> dict[str, Array]:
        """The mean over all ranks of gradients that are all there, by name; views of the buckets, good until the next.

        A gradient that is not given, or None, counts as zeros; one that no rank gives is not in the result.
        """
        given = fitting(self._tensors, gradients)  # before anything is sent
        self._begin(weight, beside=False)
        for name in self._bucket_set.order:
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
        return norms.clip(self.group, self._bucket_set.flats, max_norm)
