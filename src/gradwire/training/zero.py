"""ZeRO-1: each tensor has one rank that holds its optimizer state, updates it, and sends it to the other ranks."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from gradwire import arrays
from gradwire.arrays import Array
from gradwire.errors import ArrayError, Closed, ConfigError, PeerLost
from gradwire.training import agreement_check
from gradwire.training.communicator import Communicator
from gradwire.training.engine_group import group_for, internals_of
from gradwire.training.state import Stateful

ROUND_BYTES = 16 << 20  # bytes of weights per all-gather, of all ranks together


class Optimizer(Protocol):
    """An object that updates its named arrays in place from their gradients."""

    def step(self, gradients: dict[str, Array], /) -> Any: ...


O = TypeVar("O", bound=Optimizer)  # noqa: E741


def assign(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return the owner of each tensor: the largest tensor first, each to the rank with the smallest load so far.

    Args:
        sizes: The size of each tensor by name.
        ranks: The number of ranks.

    >>> assign({"a": 3, "b": 10, "c": 7}, 2)
    {'a': 1, 'b': 0, 'c': 1}
    """
    loads = [(0, rank) for rank in range(ranks)]
    owners = dict.fromkeys(sizes, 0)
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, rank = heapq.heappop(loads)
        owners[name] = rank
        heapq.heappush(loads, (load + sizes[name], rank))
    return owners


class ShardedOptimizer(Generic[O]):
    """An optimizer whose state is spread over the ranks (ZeRO-1): each of n ranks holds about 1/n of it.

    All ranks hold all weights. They start with the same weights, and call `step` with the same (averaged) gradients.
    Each tensor belongs to one rank as a whole, so the largest tensor limits how even the shares can be.

    If a rank is lost, its part of the optimizer state is lost too. Therefore `gw.elastic` accepts this optimizer only
    in a job of fixed size. There each rank writes its own part to the checkpoints, if the optimizer of `make` has
    `state_dict` and `load_state_dict`.

    Args:
        group: The group whose ranks share the optimizer state, or another `Communicator`.
        weights: A dict of writable arrays by name. Names, shapes and dtypes must be the same on all ranks.
        make: A function that receives this rank's share of `weights` and returns its optimizer: an object with a method
            `step(gradients)` that updates these arrays in place.

    Raises:
        ConfigError: On every rank, if the ranks have different weights.
        ArrayError: A weight is not an array that can be updated in place.

    >>> import gradwire as gw, numpy as np
    >>> class Momentum:
    ...     def __init__(self, weights):
    ...         self.weights = weights
    ...         self.velocity = {name: np.zeros_like(weight) for name, weight in weights.items()}
    ...     def step(self, gradients):
    ...         for name, gradient in gradients.items():
    ...             self.velocity[name] = 0.9 * self.velocity[name] + gradient
    ...             self.weights[name] -= 0.1 * self.velocity[name]
    >>> weights = {"w": np.ones(2), "b": np.zeros(1)}
    >>> with gw.init() as group:
    ...     optimizer = ShardedOptimizer(group, weights, Momentum)
    ...     optimizer.step({"w": np.ones(2), "b": np.ones(1)})
    >>> weights
    {'w': array([0.9, 0.9]), 'b': array([-0.1])}
    """

    def __init__(self, group: Communicator, weights: Mapping[str, Any], make: Callable[[dict[str, Any]], O]) -> None:
        self.group = group
        self._calls = group_for(group)
        self._weights = {name: _array(name, weight) for name, weight in weights.items()}
        described = [f"{name!r}: {arrays.describe(weight)}" for name, weight in self._weights.items()]
        agreement_check.check_and_gather(self._calls, "ShardedOptimizer", described)
        self.owners = assign({name: weight.nbytes for name, weight in self._weights.items()}, group.size)
        """The rank that owns each tensor, by name."""
        self.share = {name: weights[name] for name, rank in self.owners.items() if rank == group.rank}
        """The tensors of this rank, by name."""
        self._owned = dict(self.share)
        self.optimizer = make(self.share)
        """The optimizer that `make` returned for `share`."""
        self._rounds = list(self._plan())

    def __repr__(self) -> str:
        nbytes = sum(self._weights[name].nbytes for name in self.share)
        return f"<gradwire ShardedOptimizer, rank {self.group.rank} keeps {len(self.share)} tensors of {nbytes} bytes>"

    def step(self, gradients: Mapping[str, Any]) -> None:
        """Update the weights of this rank's share, and receive the others from their owners. All ranks must call it.

        Args:
            gradients: The averaged gradients by name, for example from `GradientSync`. A tensor whose gradient is None
                or missing is not updated.

        Raises:
            ConfigError: A gradient has no weights of this name, or the optimizer replaced an array instead of updating
                it in place.

        >>> import gradwire as gw, numpy as np
        >>> weights = {"w": np.ones(2)}
        >>> class Descent:
        ...     def __init__(self, weights): self.weights = weights
        ...     def step(self, gradients): self.weights["w"] -= gradients["w"]
        >>> with gw.init() as group: ShardedOptimizer(group, weights, Descent).step({"w": np.ones(2)})
        >>> weights["w"]
        array([0., 0.])
        """
        if unknown := [name for name in gradients if name not in self._weights]:
            raise ConfigError(f"there is a gradient {unknown[0]!r}, but there are no weights of this name")
        try:
            internals_of(self._calls).check("ShardedOptimizer.step")
            self.optimizer.step({name: gradients[name] for name in self._owned if gradients.get(name) is not None})
            self._check_owned()
            for names in self._rounds:
                self._exchange(names)
        except (Closed, PeerLost) as error:
            error.add_note("the optimizer's state was spread over the ranks: the part of a lost rank is gone")
            raise

    def _check_owned(self) -> None:
        for name, weight in self._owned.items():
            if self.share.get(name) is not weight:
                raise ConfigError(
                    f"the optimizer replaced the array {name!r}, so the other ranks would not receive the update. "
                    "Update the given array in place (`weights[name] -= …`, `weights[name][...] = …`)"
                )

    def shard_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state: the names of its tensors, and `optimizer.state_dict()`.

        Raises:
            ConfigError: The optimizer has no `state_dict`.
        """
        return {"tensors": list(self.share), "state": self._stateful().state_dict()}

    def load_shard_state_dicts(self, parts: Sequence[Any]) -> None:
        """Load this rank's part of a checkpoint.

        If the checkpoint was written with another number of ranks, the parts are divided anew. This is possible if
        the dicts in `optimizer.state_dict()` have the names of tensors as keys, and all other values are equal.

        Args:
            parts: What `shard_state_dict` returned on every rank that wrote the checkpoint.

        Raises:
            ConfigError: The parts have other tensors than this optimizer, or cannot be divided anew.
        """
        tensors = [name for part in parts for name in part["tensors"]]
        if sorted(tensors) != sorted(self._weights):
            different = min(set(tensors) ^ set(self._weights), default="a tensor of several ranks")
            raise ConfigError(f"the checkpoint has the state of other tensors than this optimizer: {different!r}")
        rank = self.group.rank
        if len(parts) == self.group.size and parts[rank]["tensors"] == list(self.share):
            state = parts[rank]["state"]
        else:
            state = _share_of(_merged([part["state"] for part in parts], "state"), set(self.share), set(self._weights))
        self._stateful().load_state_dict(state)

    def state_dict(self) -> Any:
        """Raise `ConfigError`: this rank holds only the state of its own share.

        >>> import gradwire as gw
        >>> with gw.init() as group:
        ...     try: ShardedOptimizer(group, {}, lambda share: None).state_dict()
        ...     except gw.ConfigError: print("refused")
        refused
        """
        raise ConfigError(
            f"the state of this optimizer is spread over {self.group.size} ranks, without copies, and cannot be sent "
            "to another rank. For checkpoints, pass the optimizer in a dict to gw.elastic(checkpoint=), or let each "
            "rank save its own `.optimizer`"
        )

    def load_state_dict(self, state: Any) -> None:
        """Raise `ConfigError`, like `state_dict`.

        >>> import gradwire as gw
        >>> with gw.init() as group:
        ...     try: ShardedOptimizer(group, {}, lambda share: None).load_state_dict({})
        ...     except gw.ConfigError: print("refused")
        refused
        """
        self.state_dict()

    def _stateful(self) -> Any:
        if not isinstance(self.optimizer, Stateful):
            raise ConfigError(
                f"a checkpoint needs the state of the optimizer, but {type(self.optimizer).__name__} has no state_dict "
                "and load_state_dict"
            )
        return self.optimizer

    def _plan(self) -> Iterator[list[tuple[str, ...]]]:
        """Yield the rounds of the exchange: the names that each rank sends, all of one dtype."""
        max_bytes = max(1, ROUND_BYTES // self.group.size)
        for dtype in dict.fromkeys(weight.dtype for weight in self._weights.values()):
            batches: list[list[tuple[str, ...]]] = []
            for rank in range(self.group.size):
                names = [n for n, w in self._weights.items() if self.owners[n] == rank and w.dtype == dtype]
                batches.append(list(self._batches(names, max_bytes)))
            yield from map(list, itertools.zip_longest(*batches, fillvalue=()))

    def _batches(self, names: Sequence[str], max_bytes: int) -> Iterator[tuple[str, ...]]:
        batch: list[str] = []
        nbytes = 0
        for name in names:
            if batch and nbytes + self._weights[name].nbytes > max_bytes:
                yield tuple(batch)
                batch, nbytes = [], 0
            batch.append(name)
            nbytes += self._weights[name].nbytes
        if batch:
            yield tuple(batch)

    def _exchange(self, names: Sequence[Sequence[str]]) -> None:
        """Exchange the weights of one round. `names` are the tensors that each rank sends."""
        rank = self.group.rank
        dtype = next(self._weights[name].dtype for batch in names for name in batch)
        mine = [self._weights[name].reshape(-1) for name in names[rank]]
        gathered = self._calls.all_gather(np.concatenate(mine) if mine else np.empty(0, dtype))
        at = 0
        for source, batch in enumerate(names):
            for name in batch:
                weight = self._weights[name]
                count = math.prod(weight.shape)
                if source != rank:
                    np.copyto(weight, gathered[at : at + count].reshape(weight.shape))
                at += count


def _merged(values: Sequence[Any], path: str) -> Any:
    """Merge the states of all ranks: dicts by their keys. All other values must be equal."""
    if all(isinstance(value, Mapping) for value in values):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _merged([value[key] for value in values if key in value], f"{path}[{key!r}]") for key in keys}
    if any(not np.array_equal(value, values[0]) for value in values[1:]):
        raise ConfigError(
            f"the optimizer's state cannot be divided among another number of ranks: {path} differs between ranks. Use "
            "the names of tensors as keys for all values that belong to one tensor"
        )
    return values[0]


def _share_of(merged: Any, share: set[str], names: set[str]) -> Any:
    """Return a merged state without the tensors of other ranks. A dict whose keys all name tensors is divided."""
    if not isinstance(merged, Mapping):
        return merged
    divided = names.issuperset(merged)
    return {key: _share_of(value, share, names) for key, value in merged.items() if not divided or key in share}


def _array(name: str, weight: Any) -> Array:
    """Return the memory of a tensor that is updated in place."""
    try:
        return arrays.view(weight, writable=True, instead="weights are updated in place").array
    except ArrayError as error:
        raise ArrayError(f"weights {name!r}: {error}") from error
