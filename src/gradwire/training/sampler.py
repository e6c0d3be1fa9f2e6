"""`Sampler`: which samples a rank sees. Disjoint, complete, and a function of numbers alone.

An epoch has one order of all samples, and the sample at position p of it belongs to rank p mod size. Batch k of an
epoch is positions k·B … (k+1)·B - 1, whoever computes them. So the shares of two ranks differ by at most one sample, in
each batch as in the whole epoch; a run with another number of ranks sees the same global batches; and a process that
joins at step 4711 needs no iterator to wind forward.

The order must not change with an upgrade, or ranks with different NumPy versions would train on overlapping shares and
nobody would notice. NumPy reserves the right to change what `Generator.permutation` does with its random words; the
words themselves are those of Philox, which is fixed by its publication. So a shuffle here is: one word of Philox for
each sample, with the key (seed, epoch), sorted; equal words keep their order.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from gradwire.errors import ConfigError, InvalidRank, InvalidSize

Indices = NDArray[np.int64]


class Sampler:
    """The share of one rank in `length` samples, epoch by epoch or batch by batch.

    >>> ranks = [Sampler(10, rank=rank, size=3, seed=7) for rank in range(3)]
    >>> for sampler in ranks:
    ...     print(sampler.epoch(0))
    [8 6 7 0]
    [4 3 5]
    [1 2 9]

    A batch is global: here four samples in each step, of which a rank gets one or two.

    >>> ranks[0].steps(4)
    3
    >>> [sampler.batch(1, 4) for sampler in ranks]
    [array([7]), array([3, 5]), array([2])]

    The same global batch in one process, in the order of the epoch:

    >>> Sampler(10, rank=0, size=1, seed=7).batch(1, 4)
    array([3, 2, 7, 5])

    Steps go on counting over the epochs: step 3 is the first one of epoch 1. When an epoch ends with fewer samples than
    there are ranks, some ranks get an empty batch; they must still take part in the step's collectives, and a mean that
    weights each rank by its samples is right for them as for all uneven batches.
    """

    def __init__(
        self,
        length: SupportsIndex,
        *,
        rank: SupportsIndex,
        size: SupportsIndex,
        seed: SupportsIndex = 0,
        shuffle: bool = True,
    ) -> None:
        self.length = whole("length", length)
        self.rank = whole("rank", rank)
        self.size = whole("size", size)
        self.seed = _word("seed", seed)
        self.shuffle = shuffle
        if self.size < 1:
            raise InvalidSize(f"size is {self.size}: samples are shared among at least one rank")
        if not 0 <= self.rank < self.size:
            raise InvalidRank(f"rank {self.rank} is not one of the {self.size} ranks 0 … {self.size - 1}")
        if self.length < self.size:
            raise InvalidSize(f"{self.length} samples cannot be shared among {self.size} ranks: some would have none")
        self._latest: tuple[int, Indices] | None = None

    def __len__(self) -> int:
        """How many samples this rank sees in an epoch; ranks differ by at most one."""
        return len(range(self.rank, self.length, self.size))

    def __repr__(self) -> str:
        return f"Sampler({self.length}, rank={self.rank}, size={self.size}, seed={self.seed}, shuffle={self.shuffle})"

    def epoch(self, epoch: SupportsIndex) -> Indices:
        """The indices of this rank's samples in that epoch, in the order in which its batches use them.

        >>> Sampler(5, rank=1, size=2, shuffle=False).epoch(0)
        array([1, 3])
        """
        return self._order(_word("epoch", epoch))[self.rank :: self.size].copy()

    def steps(self, global_batch: SupportsIndex) -> int:
        """How many batches make an epoch; the last one holds what is left.

        >>> Sampler(5, rank=0, size=1).steps(2)
        3
        """
        return -(-self.length // self._batch_size(global_batch))

    def batch(self, step: SupportsIndex, global_batch: SupportsIndex) -> Indices:
        """This rank's part of the global batch of that step, counted from the start of training.

        >>> Sampler(6, rank=1, size=2, shuffle=False).batch(1, 4)
        array([5])
        """
        batch = self._batch_size(global_batch)
        epoch, k = divmod(_word("step", step), self.steps(batch))
        return self._share(self._order(epoch), k * batch, batch)

    def batches(self, epoch: SupportsIndex, global_batch: SupportsIndex) -> Iterator[Indices]:
        """This rank's parts of that epoch's global batches, in order; joined, they are `epoch(epoch)`.

        >>> list(Sampler(6, rank=0, size=2, shuffle=False).batches(0, 4))
        [array([0, 2]), array([4])]
        """
        batch = self._batch_size(global_batch)
        order = self._order(_word("epoch", epoch))
        return (self._share(order, start, batch) for start in range(0, self.length, batch))

    def _share(self, order: Indices, start: int, batch: int) -> Indices:
        first = start + (self.rank - start) % self.size  # the first position from start on that is this rank's
        return order[first : start + batch : self.size].copy()

    def _order(self, epoch: int) -> Indices:
        latest = self._latest  # read once: another thread may replace it
        if latest is None or latest[0] != epoch:
            latest = self._latest = (
                epoch,
                self._shuffled(epoch) if self.shuffle else np.arange(self.length, dtype=np.int64),
            )
        return latest[1]

    def _shuffled(self, epoch: int) -> Indices:
        key = np.array([self.seed, epoch], dtype=np.uint64)
        words = np.random.Philox(key=key).random_raw(self.length)
        return np.argsort(words, kind="stable").astype(np.int64, copy=False)

    def _batch_size(self, global_batch: SupportsIndex) -> int:
        batch = whole("global_batch", global_batch)
        if batch < self.size:
            raise InvalidSize(
                f"a global batch of {batch} cannot be shared among {self.size} ranks: some would have none"
            )
        return batch


def whole(name: str, value: SupportsIndex) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} is {value!r}: a whole number is wanted") from None


def _word(name: str, value: SupportsIndex) -> int:
    """A number that can be half of the generator's key; more are not needed, and folding them would make twins."""
    number = whole(name, value)
    if not 0 <= number < 2**64:
        raise ConfigError(f"{name} is {number}: wanted 0 ≤ {name} < 2^64")
    return number
