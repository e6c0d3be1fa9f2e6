"""`GradientSync`: averages gradients over all ranks, bucket by bucket, while backward still runs."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from gradwire.arrays import Array
from gradwire.errors import ConfigError
from gradwire.operations.types import check_algorithm
from gradwire.training import agreement_check, norms
from gradwire.training.backward import Backward
from gradwire.training.bucket_reduction import BucketReduction, Compressing, Compression
from gradwire.training.buckets import BucketSet, check_bytes, checked_gradients, tensors_like
from gradwire.training.communicator import Communicator, HasGroup, current_communicator
from gradwire.training.contract import Contract
from gradwire.training.engine_group import check_algorithm_of, group_for
from gradwire.training.weights import Weights, checked

BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20


class GradientSync:
    """Averages gradients over all ranks, in buckets, while backward still runs.

    If all gradients are available at once, call `sync`:

    >>> import gradwire as gw, numpy as np
    >>> weights = {"w": np.ones((2, 3)), "b": np.zeros(3)}
    >>> with gw.init() as group:
    ...     sync = gw.GradientSync(group, weights)
    ...     sync.sync({"w": np.ones((2, 3)), "b": np.arange(3.0)})["b"]
    array([0., 1., 2.])

    To overlap communication with computation, write each gradient into its place in `gradients`, call `ready` as soon
    as it is complete, and call `finish` at the end:

    >>> with gw.init() as group:
    ...     sync = gw.GradientSync(group, weights)
    ...     sync.begin()
    ...     for name in ("b", "w"):
    ...         sync.gradients[name][:] = 1
    ...         sync.ready(name)
    ...     sync.finish()
    ...     sync.clip(1.0)
    3.0

    `sync`, `agree`, `begin`, `finish`, `clip` and `reorder` are collective: call them on all ranks. Ranks may call
    `ready` in different orders and for different gradients.

    Args:
        group: The group whose ranks train together, another `Communicator`, or an elastic run. With an elastic run,
            this object moves to the next generation's group when the run does.
        like: A dict of arrays with the names, shapes and dtypes of the gradients, in the order of the forward pass.
        bucket_bytes: The size of a bucket.
        first_bucket_bytes: The size of the first bucket. A small one lets communication start early.
        compression: "f16", "bf16", "int8", "topk", or an object of `gradwire.training.compression`. None sends the
            gradients as they are.
        check_finite: Raise `NotFinite` on all ranks if a gradient of any rank has a NaN or an infinite value.
        contract_every: The interval of `contract`, an attribute of type `gw.Contract`. Its `check` is called by
            `gw.torch.DistributedDataParallel`; other programs call it themselves. 0 turns the check off.
        algorithm: The algorithm of the all-reduce; "auto" chooses by size, ranks and topology.

    Raises:
        ArrayError: `like` is not a dict of arrays, or an array cannot be compressed.
        UnsupportedOp: A dtype in `like` has no mean.
        ConfigError: Another argument is invalid.
    """

    def __init__(
        self,
        group: Communicator | HasGroup,
        like: Mapping[str, Any],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        compression: Compression | str | None = None,
        check_finite: bool = True,
        contract_every: int = 0,
        algorithm: str = "auto",
    ) -> None:
        self._owner: Any = group
        self._tensors = tensors_like(like)
        self._sizes = check_bytes("bucket_bytes", bucket_bytes), check_bytes("first_bucket_bytes", first_bucket_bytes)
        self._compressing = Compressing.of(compression)
        self.check_finite = check_finite
        check_algorithm("all_reduce", algorithm)
        self._algorithm = algorithm
        self.ordered = False
        """Whether the buckets follow the order in which backward completes gradients (see `reorder`)."""
        self._lock = threading.Lock()
        self._backward: Backward | None = None  # the current backward pass: from its first gradient to `finish`
        self._added: set[str] = set()
        self._agreed = False
        self.group: Communicator = current_communicator(group)
        self._follows = self.group is not group
        self._calls = group_for(self.group)
        check_algorithm_of(self._calls, algorithm)
        self.contract = Contract(self.group, contract_every)
        self.used: frozenset[str] = frozenset()
        """The names of the gradients that at least one rank had in the last backward pass."""
        self.total_weight = float(self._calls.size)
        """The sum of all ranks' weights in the last backward pass."""
        self._bind(BucketSet(self._calls, self._tensors, list(reversed(self._tensors)), self._sizes))
        self._compressing.check(self._bucket_set)

    def __repr__(self) -> str:
        tensors, flats = len(self._tensors), self._bucket_set.flats
        nbytes = sum(flat.nbytes for flat in flats)
        return f"<gradwire.GradientSync of {tensors} tensors, {nbytes} bytes in {len(flats)} buckets>"

    # -- the buckets --------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> list[list[str]]:
        """The names of the gradients in each bucket. Buckets are listed in the order of their reduction."""
        return [list(bucket.views) for bucket in self._bucket_set.buckets]

    def _bind(self, bucket_set: BucketSet) -> None:
        """Use these buckets from now on. This does not communicate."""
        self._bucket_set = bucket_set
        self.gradients = bucket_set.gradients
        """Each gradient's place in its bucket, by name, as a writable array.

        `agree`, `reorder` and `rebind` can move gradients: afterwards, read this attribute again.
        """
        self.writer = bucket_set.writer
        self._compressing.reset()
        self._backward = None

    def rebind(self, group: Communicator) -> None:
        """Continue with the group of the next generation. The gradients keep their values, in new memory.

        With an elastic run this happens automatically.

        Args:
            group: The new group.
        """
        if group is self.group:
            return
        calls = group_for(group)
        check_algorithm_of(calls, self._algorithm)
        self._forget_backward()
        self.group, self._calls = group, calls
        self._agreed, self._added = False, set()
        self.contract.rebind(group)
        self.used, self.total_weight = frozenset(), float(calls.size)
        self._bind(BucketSet(calls, self._tensors, self._bucket_set.order, self._sizes, self._bucket_set))

    def _follow(self) -> None:
        if self._follows:
            self.rebind(self._owner.group)

    def agree(self) -> bool:
        """Check once per group that all ranks have the same tensors and settings, and agree on the order of buckets.

        `begin`, `ready`, `finish` and `sync` call it when needed. Call it yourself only if you keep views of
        `gradients`: it can move the gradients to other places.

        Returns:
            Whether the gradients have moved.

        Raises:
            ConfigError: On every rank, if the ranks differ. It names the rank and the tensor or setting.
        """
        if self._agreed:
            return False
        compression = self._compressing.describe()
        items = [f"{self._sizes} bytes with {compression} compression", *map(str, self._tensors.values())]
        names, numbers = list(self._tensors), self._bucket_set.numbers
        mine = [numbers[name] for name in self._bucket_set.order] if self.ordered else None
        orders = agreement_check.check_and_gather(self._calls, "GradientSync", items, mine)
        self._agreed = True
        learned = next((one for one in orders if one is not None), None)
        if learned is None or sorted(learned) != list(range(len(names))):
            return False
        self.ordered = True
        return self._adopt([names[number] for number in learned])

    def _adopt(self, order: list[str]) -> bool:
        if tuple(order) == self._bucket_set.order:
            return False
        self._bind(BucketSet(self._calls, self._tensors, order, self._sizes, self._bucket_set))
        return True

    def reorder(self, names: Iterable[str]) -> None:
        """Fill the buckets in the order that rank 0 passes. All ranks must call it, between two backward passes.

        Args:
            names: The names of the gradients in the order in which backward completes them. Only rank 0's are used.
                Gradients that are not named come last.

        Raises:
            ConfigError: Rank 0 passed a name without a gradient.
        """
        self.agree()
        order = list(dict.fromkeys(self._calls.broadcast_value(list(names))))
        if unknown := [name for name in order if name not in self._tensors]:
            raise ConfigError(f"rank 0 passed the name {unknown[0]!r} to reorder(), but there is no such gradient")
        named = set(order)
        self.ordered = True
        self._adopt([*order, *(name for name in self._bucket_set.order if name not in named)])

    # -- one backward pass --------------------------------------------------------------------------------------------

    def begin(self, weight: float | None = None) -> None:
        """Begin a backward pass. This call is only needed to pass a weight.

        Args:
            weight: The weight of this rank in the mean, for example its number of samples. Either all ranks pass a
                weight or none does. With weight 0, the gradients of this rank are ignored.

        Raises:
            ConfigError: The last backward pass was not finished, or the weight is not a finite number of at least 0.
        """
        self._begin(weight, beside=True)

    def _begin(self, weight: float | None, beside: bool) -> None:
        self._follow()
        if self.under_way:
            raise ConfigError("the last backward pass was begun but not finished: call finish()")
        self.agree()
        self._forget_backward()
        if weight is not None:
            self._backward = self._new_backward(Weights(checked(weight), self._calls.size), beside)

    def _new_backward(self, weights: Weights | None, beside: bool) -> Backward:
        reduction = BucketReduction(self._bucket_set, self._algorithm, self.check_finite, self._compressing, weights)
        return Backward(reduction, beside=beside)

    def _running_backward(self) -> Backward:
        with self._lock:
            if self._backward is None:
                self._backward = self._new_backward(None, beside=False)
            return self._backward

    def ready(self, name: str, *, used: bool = True, beside: bool = True) -> None:
        """Mark a gradient as complete, and start the reduction of each bucket that is complete now.

        Do not write to the gradient again before `finish` has returned.

        Args:
            name: The name of the gradient.
            used: False for a gradient that holds values of an earlier backward pass and was not changed in this one.
                It takes part in the mean if another rank has changed it; otherwise it keeps its values.
            beside: Reduce on the group's progress thread, beside the program. The last bucket is then reduced in
                `finish`, because no computation is left to overlap with. False reduces in this call.

        Raises:
            ConfigError: There is no gradient of this name, or its reduction has already started.
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
        """Whether this rank has started a reduction that is not finished, so that other ranks may wait for it."""
        return self._backward is not None and self._backward.has_started

    def finish(self) -> None:
        """Reduce the remaining buckets, and wait until all gradients hold the mean over all ranks.

        A gradient for which neither `ready` nor `add` was called on this rank counts as zeros. Afterwards, `used` holds
        the names of the gradients that at least one rank had.

        Raises:
            NotFinite: On every rank, if a gradient of any rank has a NaN or an infinite value. It names the rank and
                the tensor. The group stays usable.
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
        """End the current backward pass. Errors of its works follow from an error that was already raised."""
        if self._backward is not None:
            self._backward.abandon()
            self._backward = None
        self.writer.finite.clear()

    # -- all at once --------------------------------------------------------------------------------------------------

    def sync(self, gradients: Mapping[str, Any], weight: float | None = None) -> dict[str, Array]:
        """Average gradients over all ranks in one call. All ranks must call it.

        Args:
            gradients: A dict of arrays by name. A gradient that is None or missing counts as zeros.
            weight: The weight of this rank in the mean; see `begin`.

        Returns:
            The means by name, without the gradients that no rank passed. The arrays are views of the buckets: the next
            backward pass overwrites them.

        Raises:
            ConfigError: A name is unknown, or the ranks have different tensors or settings.
            ArrayError: A gradient has the wrong shape or dtype.
            NotFinite: On every rank, if a gradient has a NaN or an infinite value.
        """
        given = checked_gradients(self._tensors, gradients)  # before anything is sent
        self._begin(weight, beside=False)
        for name in self._bucket_set.order:
            if name in given:
                self.write(name, given[name])
            if name in given or name in self._added:
                self.ready(name, beside=False)
        self.finish()
        return {name: view for name, view in self.gradients.items() if name in self.used}

    def add(self, gradients: Mapping[str, Any]) -> None:
        """Accumulate gradients without communication. The next `sync` adds them to its own.

        Args:
            gradients: A dict of arrays by name.

        >>> import gradwire as gw, numpy as np
        >>> with gw.init() as group:
        ...     sync = gw.GradientSync(group, {"w": np.zeros(2)})
        ...     sync.add({"w": np.ones(2)})
        ...     sync.sync({"w": np.ones(2)})
        {'w': array([2., 2.])}
        """
        self._follow()
        for name, gradient in checked_gradients(self._tensors, gradients).items():
            self.write(name, gradient)
            self._added.add(name)

    def write(self, name: str, gradient: Array) -> None:
        """Copy a gradient into its place, or add it to the values that `add` has accumulated there.

        The copy also checks whether the values are finite, so that `finish` need not read them again. Therefore do not
        change the place by other means afterwards.

        Args:
            name: The name of the gradient.
            gradient: An array of the gradient's shape.
        """
        if name in self._added:
            self.writer.add(name, gradient)
        else:
            self.writer.write(name, gradient)

    # -- after the reduce ---------------------------------------------------------------------------------------------

    def clip(self, max_norm: float) -> float:
        """Scale all gradients so that their global 2-norm is at most `max_norm`. All ranks call it, after `finish`.

        Args:
            max_norm: The largest norm allowed, at least 0.

        Returns:
            The norm before clipping. It has the same bits on all ranks, and so have the scaled gradients.

        Raises:
            ConfigError: `max_norm` is NaN or negative.
        """
        return norms.clip(self._calls, self._bucket_set.flats, max_norm)
