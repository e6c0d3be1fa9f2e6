"""ZeRO-1: every tensor has one rank that keeps the optimizer's state for it, updates it, and gives it to the others."""

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
from gradwire.group import Group
from gradwire.group.internals import GroupInternals
from gradwire.training import agreement_check

ROUND_BYTES = 16 << 20  # of weights that are shared at once, by all ranks together


class Optimizer(Protocol):
    """Anything that moves the named arrays it was made for, in place, by their gradients."""

    def step(self, gradients: dict[str, Array], /) -> Any: ...


O = TypeVar("O", bound=Optimizer)  # noqa: E741


def assign(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Which rank keeps which tensor, by their sizes: the largest first, each for the rank that has least so far.

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
    """An optimizer whose state is spread over the ranks, tensor by tensor: each keeps about 1/n of it.

    `make` gets this rank's share of the weights and returns what updates it: an object with `step(gradients)`. All
    ranks hold all weights, begin with the same ones, and call `step` with the same (reduced) gradients. A tensor is not
    cut, so the largest one sets how even the shares can be. What a rank keeps is lost with it: `gw.elastic` refuses it.

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

    def __init__(self, group: Group, weights: Mapping[str, Any], make: Callable[[dict[str, Any]], O]) -> None:
        self.group = group
        self._weights = {name: _array(name, weight) for name, weight in weights.items()}
        described = [f"{name!r}: {arrays.describe(weight)}" for name, weight in self._weights.items()]
        agreement_check.check_and_gather(group, "ShardedOptimizer", described)
        self.owners = assign({name: weight.nbytes for name, weight in self._weights.items()}, group.size)
        """Which rank keeps which tensor."""
        self.share = {name: weights[name] for name, rank in self.owners.items() if rank == group.rank}
        """This rank's tensors."""
        self._kept = dict(self.share)
        self.optimizer = make(self.share)
        """What was made for them, with their state."""
        self._rounds = list(self._plan())

    def __repr__(self) -> str:
        nbytes = sum(self._weights[name].nbytes for name in self.share)
        return f"<gradwire ShardedOptimizer, rank {self.group.rank} keeps {len(self.share)} tensors of {nbytes} bytes>"

    def step(self, gradients: Mapping[str, Any]) -> None:
        """Update this rank's share, and get the other new weights from those who keep them; all ranks call it.

        `gradients` are those of all ranks together, as `GradientSync` leaves them. Tensors without one stay.

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
            raise ConfigError(f"a gradient of {unknown[0]!r}, of which there are no weights")
        try:
            GroupInternals(self.group).check("ShardedOptimizer.step")
            self.optimizer.step({name: gradients[name] for name in self._kept if gradients.get(name) is not None})
            self._check_kept()
            for names in self._rounds:
                self._exchange(names)
        except (Closed, PeerLost) as error:
            error.add_note("the optimizer's state was spread over the ranks: what a lost one kept is gone")
            raise

    def _check_kept(self) -> None:
        for name, weight in self._kept.items():
            if self.share.get(name) is not weight:
                raise ConfigError(
                    f"the optimizer has put another tensor in the place of {name!r}, which nobody else would see: "
                    "change the one that it was given (`weights[name] -= …`, `weights[name][...] = …`)"
                )

    def state_dict(self) -> Any:
        """Refused: this rank has the state of its share only. `optimizer` has it, for a checkpoint of each rank.

        >>> import gradwire as gw
        >>> with gw.init() as group:
        ...     try: gw.elastic({"optimizer": ShardedOptimizer(group, {}, lambda share: None)})
        ...     except gw.ConfigError: print("refused")
        refused
        """
        raise ConfigError(
            f"the state of this optimizer is spread over {self.group.size} ranks, and each part is kept by one alone: "
            "if that rank is lost, nobody has it. An elastic run needs an optimizer whose whole state is on every "
            "rank; for checkpoints, let each rank store its own `.optimizer`"
        )

    def load_state_dict(self, state: Any) -> None:
        """Refused, as `state_dict` is.

        >>> import gradwire as gw
        >>> with gw.init() as group:
        ...     try: ShardedOptimizer(group, {}, lambda share: None).load_state_dict({})
        ...     except gw.ConfigError: print("refused")
        refused
        """
        self.state_dict()

    def _plan(self) -> Iterator[list[tuple[str, ...]]]:
        """What each rank gives in each round: tensors of one dtype, and not too many bytes of them."""
        most = max(1, ROUND_BYTES // self.group.size)
        for dtype in dict.fromkeys(weight.dtype for weight in self._weights.values()):
            batches: list[list[tuple[str, ...]]] = []
            for rank in range(self.group.size):
                names = [n for n, w in self._weights.items() if self.owners[n] == rank and w.dtype == dtype]
                batches.append(list(self._batches(names, most)))
            yield from map(list, itertools.zip_longest(*batches, fillvalue=()))

    def _batches(self, names: Sequence[str], most: int) -> Iterator[tuple[str, ...]]:
        batch: list[str] = []
        nbytes = 0
        for name in names:
            if batch and nbytes + self._weights[name].nbytes > most:
                yield tuple(batch)
                batch, nbytes = [], 0
            batch.append(name)
            nbytes += self._weights[name].nbytes
        if batch:
            yield tuple(batch)

    def _exchange(self, names: Sequence[Sequence[str]]) -> None:
        """One round: `names` are what each rank gives."""
        rank = self.group.rank
        dtype = next(self._weights[name].dtype for batch in names for name in batch)
        mine = [self._weights[name].reshape(-1) for name in names[rank]]
        everyones = self.group.all_gather(np.concatenate(mine) if mine else np.empty(0, dtype))
        at = 0
        for source, batch in enumerate(names):
            for name in batch:
                weight = self._weights[name]
                count = math.prod(weight.shape)
                if source != rank:
                    np.copyto(weight, everyones[at : at + count].reshape(weight.shape))
                at += count


def _array(name: str, weight: Any) -> Array:
    """The memory of a tensor that is updated in place."""
    try:
        return arrays.view(weight, writable=True, instead="weights are updated in place").array
    except ArrayError as error:
        raise ArrayError(f"the weights {name!r}: {error}") from error
