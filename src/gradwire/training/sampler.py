"""`Sampler`: assigns samples to ranks, without overlap, as a function of seed, epoch, step, rank and size.

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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import SupportsIndex, TypeVar

import numpy as np

from gradwire.errors import ConfigError, InvalidRank, InvalidSize
from gradwire.training.sampling_progress import Indices, Ranks, Run, SamplingProgress, check_not_empty

Batch = TypeVar("Batch")


class Sampler:
    """Selects the samples of one rank, epoch by epoch or batch by batch.

    The shares of the ranks do not overlap, and together they are the whole data set. The same arguments always give the
    same samples, on every machine.

    >>> ranks = [Sampler(10, rank=rank, size=3, seed=7) for rank in range(3)]
    >>> for sampler in ranks:
    ...     print(sampler.epoch(0))
    [8 6 7 0]
    [4 3 5]
    [1 2 9]

    A sampler is an argument for torch's DataLoader, in place of torch's `DistributedSampler`: `DataLoader(dataset,
    batch_size=32, sampler=sampler)`. It then iterates over this rank's share of the epoch that `set_epoch` has chosen.

    >>> ranks[1].set_epoch(2)
    >>> list(ranks[1]), len(ranks[1])
    ([7, 0, 3], 3)

    **With `run`**, a sampler holds the position of the run in the data, as a part of the run's state: joining ranks
    receive it and checkpoints store it. An iterator begins at this position, with the rank and size of the current
    generation. The position advances at the end of each committed step, by the batches that the loader has yielded. If
    an epoch is used up, the next iterator begins the next epoch. All ranks get the same number of samples: if fewer
    samples than ranks are left at the end of an epoch, no rank uses them.

    `steps`, `batch` and `batches` take the size of the *global* batch and use no position. Here a step has four
    samples, and each rank gets one or two of them.

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
        rank: The rank whose samples are selected. By default that of this process in the group of `gw.init()`, when the
            sampler is created.
        size: The number of ranks. Pass both `rank` and `size`, or neither.
        run: A run of `gw.elastic`. Rank and size are always those of `run.group`. Create the sampler once, before the
            first step: it stays part of the run's state.
        seed: The seed of the shuffle, 0 to 2^64 - 1. It must be the same on all ranks.
        shuffle: Shuffle the samples anew in each epoch. False uses the order of the data set.

    Raises:
        InvalidSize: `size` is less than 1, or there are fewer samples than ranks.
        InvalidRank: `rank` is not in 0 … size - 1.
        ConfigError: An argument is not a whole number, the seed is out of range, `rank` and `size` are given together
            with `run`, or nothing gives a rank because `gw.init()` was not called.
    """

    def __init__(
        self,
        length: SupportsIndex,
        *,
        rank: SupportsIndex | None = None,
        size: SupportsIndex | None = None,
        run: Run | None = None,
        seed: SupportsIndex = 0,
        shuffle: bool = True,
    ) -> None:
        self.length = whole("length", length)
        self.seed = _word("seed", seed)
        self.shuffle = bool(shuffle)
        self._latest: tuple[int, Indices] | None = None
        self._epoch = 0  # of a sampler without a run
        self._ranks = _fixed_ranks(rank, size) if run is None else run.group
        if self.length < self._ranks.size:
            raise InvalidSize(f"{self.length} samples are too few for {self._ranks.size} ranks: some would have none")
        self._progress: SamplingProgress | None = None
        if run is not None:
            if rank is not None or size is not None:
                raise ConfigError("a sampler with run= always has the rank and size of the run: pass no others")
            settings = {"seed": self.seed, "shuffle": self.shuffle}
            self._ranks = self._progress = SamplingProgress(run, self.length, settings, self._order)

    @property
    def rank(self) -> int:
        """The rank whose samples are selected."""
        return self._ranks.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._ranks.size

    @property
    def current_epoch(self) -> int:
        """The epoch of the next iterator. With `run`, reading it loads the checkpoint that the run continues from."""
        return self._epoch if self._progress is None else self._progress.place.epoch

    def __len__(self) -> int:
        """Return the number of this rank's samples per epoch.

        Two ranks differ by at most one; with `run`, all ranks have the same number.
        """
        return len(range(self.rank, self.length, self.size)) if self._progress is None else self.length // self.size

    def __repr__(self) -> str:
        return f"Sampler({self.length}, rank={self.rank}, size={self.size}, seed={self.seed}, shuffle={self.shuffle})"

    def __iter__(self) -> Iterator[int]:
        """Iterate over this rank's samples of the current epoch; with `run`, of those that are left in it.

        Without `run`, each iterator begins at the start of the epoch that `set_epoch` has chosen. With `run`, it begins
        at the position after the last committed step. When the epoch is used up, the next iterator begins the next one.
        """
        if self._progress is None:
            return iter(self.epoch(self._epoch).tolist())
        return self._progress.iterate()

    def set_epoch(self, epoch: SupportsIndex) -> None:
        """Choose the epoch of the next iterator, as with torch's `DistributedSampler`.

        With `run`, this never goes back: if the committed steps have used samples of this epoch or of a later one, the
        position stays where it is. So a loop over all epochs continues correctly after a checkpoint was loaded.

        Args:
            epoch: The number of the epoch, from 0.
        """
        number = _word("epoch", epoch)
        if self._progress is None:
            self._epoch = number
        else:
            self._progress.set_epoch(number)

    def follow(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Iterate over the batches of a loader without end, epoch after epoch.

        With `run`, the loader begins anew after a step has failed and when the number of ranks has changed. The batches
        that it has prefetched for the old ranks are dropped, and the failed step's samples come again.

        Args:
            loader: A DataLoader with this sampler. Take its batches inside `with step`.

        >>> sampler = Sampler(3, rank=0, size=1)
        >>> batches = sampler.follow(sampler)  # any iterable over the sampler can take the loader's place
        >>> [next(batches) for _ in range(6)]
        [0, 2, 1, 2, 1, 0]
        """
        if self._progress is not None:
            yield from self._progress.follow(loader)
        while True:
            empty = True
            for batch in loader:
                empty = False
                yield batch
            check_not_empty(empty)
            self._epoch += 1

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


@dataclass(frozen=True)
class _FixedRanks:
    rank: int
    size: int


def _fixed_ranks(rank: SupportsIndex | None, size: SupportsIndex | None) -> Ranks:
    """Return the rank and size of the arguments, or those of the process's group if both are None."""
    if rank is None and size is None:
        from gradwire.job import process_hooks  # imported late: other samplers need no group

        group = process_hooks.current()
        if group is None:
            raise ConfigError("this process has no open group: call gw.init() before gw.Sampler, or pass rank and size")
        return _FixedRanks(group.rank, group.size)
    if rank is None or size is None:
        raise ConfigError("pass both rank and size, or neither")
    ranks = _FixedRanks(whole("rank", rank), whole("size", size))
    if ranks.size < 1:
        raise InvalidSize(f"size is {ranks.size}: it must be at least 1")
    if not 0 <= ranks.rank < ranks.size:
        message = f"rank {ranks.rank} is not one of the {ranks.size} ranks 0 … {ranks.size - 1}"
        raise InvalidRank(message, rank=ranks.rank, size=ranks.size)
    return ranks


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
