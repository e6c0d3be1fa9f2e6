"""`Sampler`: assigns samples to ranks, without overlap, as a function of seed, epoch, step, rank and size only.

Each epoch has one order of all samples. The sample at position p belongs to rank p mod size. Batch k of an epoch is
positions k·B … (k+1)·B - 1. This has three consequences. The shares of two ranks differ by at most one sample, in each
batch and in the whole epoch. A run with another number of ranks uses the same global batches. A process that joins at
step 4711 computes its batch directly, without iterating over earlier ones.

The order must not depend on the NumPy version: ranks with different versions would train on overlapping shares, and no
error would show it. NumPy may change the algorithm of `Generator.permutation`, but the random words of Philox are fixed
by its publication. So a shuffle is: one Philox word per sample, with the key (seed, epoch), in sorted order; equal
words keep their order.
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
    """Selects the samples of one rank, epoch by epoch or batch by batch.

    The shares of the ranks do not overlap, and together they are the whole data set. A sampler holds no position: the
    same arguments always give the same samples, on every machine.

    >>> ranks = [Sampler(10, rank=rank, size=3, seed=7) for rank in range(3)]
    >>> for sampler in ranks:
    ...     print(sampler.epoch(0))
    [8 6 7 0]
    [4 3 5]
    [1 2 9]

    `steps`, `batch` and `batches` take the size of the *global* batch. Here a step has four samples, and each rank gets
    one or two of them.

    >>> ranks[0].steps(4)
    3
    >>> [sampler.batch(1, 4) for sampler in ranks]
    [array([7]), array([3, 5]), array([2])]

    The same global batch with a single rank:

    >>> Sampler(10, rank=0, size=1, seed=7).batch(1, 4)
    array([3, 2, 7, 5])

    Steps are counted across epochs: here, step 3 is the first step of epoch 1. The last batch of an epoch can have
    fewer samples than there are ranks. Then some ranks get an empty batch, but must still call the collectives of the
    step. Weight each rank by its number of samples (`gw.weighted_mean`, `GradientSync.begin(weight)`): that is correct
    for empty and for uneven batches.

    Args:
        length: The number of samples in the data set, at least `size`.
        rank: The rank whose samples are selected.
        size: The number of ranks.
        seed: The seed of the shuffle, 0 to 2^64 - 1. It must be the same on all ranks.
        shuffle: Shuffle the samples anew in each epoch. False uses the order of the data set.

    Raises:
        InvalidSize: `size` is less than 1, or there are fewer samples than ranks.
        InvalidRank: `rank` is not in 0 … size - 1.
        ConfigError: An argument is not a whole number, or the seed is out of range.
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
            raise InvalidSize(f"size is {self.size}: it must be at least 1")
        if not 0 <= self.rank < self.size:
            message = f"rank {self.rank} is not one of the {self.size} ranks 0 … {self.size - 1}"
            raise InvalidRank(message, rank=self.rank, size=self.size)
        if self.length < self.size:
            raise InvalidSize(f"{self.length} samples are too few for {self.size} ranks: some would have none")
        self._latest: tuple[int, Indices] | None = None

    def __len__(self) -> int:
        """Return the number of this rank's samples per epoch. Two ranks differ by at most one."""
        return len(range(self.rank, self.length, self.size))

    def __repr__(self) -> str:
        return f"Sampler({self.length}, rank={self.rank}, size={self.size}, seed={self.seed}, shuffle={self.shuffle})"

    def epoch(self, epoch: SupportsIndex) -> Indices:
        """Return the indices of this rank's samples in an epoch, in the order in which its batches use them.

        Args:
            epoch: The number of the epoch, from 0.

        >>> Sampler(5, rank=1, size=2, shuffle=False).epoch(0)
        array([1, 3])
        """
        return self._order(_word("epoch", epoch))[self.rank :: self.size].copy()

    def steps(self, global_batch: SupportsIndex) -> int:
        """Return the number of batches per epoch. The last batch of an epoch can be smaller than the others.

        Args:
            global_batch: The number of samples per step on all ranks together, at least `size`.

        Raises:
            InvalidSize: The batch has fewer samples than there are ranks.

        >>> Sampler(5, rank=0, size=1).steps(2)
        3
        """
        return -(-self.length // self._batch_size(global_batch))

    def batch(self, step: SupportsIndex, global_batch: SupportsIndex) -> Indices:
        """Return the indices of this rank's samples in the global batch of a step.

        Args:
            step: The number of the step, from 0, counted from the start of training.
            global_batch: The number of samples per step on all ranks together.

        >>> Sampler(6, rank=1, size=2, shuffle=False).batch(1, 4)
        array([5])
        """
        batch = self._batch_size(global_batch)
        epoch, k = divmod(_word("step", step), self.steps(batch))
        return self._share(self._order(epoch), k * batch, batch)

    def batches(self, epoch: SupportsIndex, global_batch: SupportsIndex) -> Iterator[Indices]:
        """Iterate over this rank's parts of the global batches of an epoch. Joined, they are `epoch(epoch)`.

        Args:
            epoch: The number of the epoch, from 0.
            global_batch: The number of samples per step on all ranks together.

        >>> list(Sampler(6, rank=0, size=2, shuffle=False).batches(0, 4))
        [array([0, 2]), array([4])]
        """
        batch = self._batch_size(global_batch)
        order = self._order(_word("epoch", epoch))
        return (self._share(order, start, batch) for start in range(0, self.length, batch))

    def _share(self, order: Indices, start: int, batch: int) -> Indices:
        first = start + (self.rank - start) % self.size  # the first position of this rank in the batch
        return order[first : start + batch : self.size].copy()

    def _order(self, epoch: int) -> Indices:
        latest = self._latest  # read once, because another thread may replace it
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
                f"a global batch of {batch} is too small for {self.size} ranks: some would have no sample"
            )
        return batch


def whole(name: str, value: SupportsIndex) -> int:
    """Return the value as an int; raise `ConfigError` if it is not a whole number."""
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} is {value!r}: it must be a whole number") from None


def _word(name: str, value: SupportsIndex) -> int:
    """Return the value as a 64-bit word of the generator's key.

    Larger numbers are refused: reducing them to 64 bits would give two seeds the same order.
    """
    number = whole(name, value)
    if not 0 <= number < 2**64:
        raise ConfigError(f"{name} is {number}: it must be at least 0 and less than 2^64")
    return number
