"""The progress of a run through the epochs of a sampler: which samples the committed steps have used.

The position is the number of samples at the start of an epoch's order that all ranks together have used. It does not
depend on the number of ranks, so a run can continue at it with another number of ranks. It changes at the end of a
step, by what the DataLoader has yielded until then (see `loader_iterator`), not by what it has taken ahead.

All ranks of a run take their steps together, so all use the same number of samples. If fewer samples than ranks are
left in an epoch, no rank uses them: the position is then the start of the next epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradwire.errors import ConfigError, InvalidSize
from gradwire.training.companions import Companion, Plain
from gradwire.training.loader_iterator import UNORDERED, LoaderIterator, find_calling_loader

Indices = NDArray[np.int64]
Batch = TypeVar("Batch")


class Ranks(Protocol):
    """A group, of which a sampler needs these properties."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


class Run(Protocol):
    """A run of `gw.elastic`."""

    @property
    def group(self) -> Ranks:
        """The group of the current generation."""

    def begin(self) -> None:
        """Agree with all ranks on the state to continue from, unless that is done."""

    def attach(self, companion: Companion) -> None:
        """Make the values of an object part of the run's state."""


@dataclass(frozen=True, order=True)
class Place:
    """The next sample to use: an epoch, and a position in its order."""

    epoch: int = 0
    position: int = 0


class SamplingProgress:
    """A sampler's part of a run's state, and the iterator that advances it.

    Args:
        run: The run. This object becomes a companion of it.
        length: The number of samples.
        settings: The other settings of the sampler. They must be the same on all ranks and when a run continues.
        order: Returns the order of all samples in an epoch.
    """

    def __init__(self, run: Run, length: int, settings: Mapping[str, Plain], order: Callable[[int], Indices]) -> None:
        self._run = run
        self._length = length
        self._settings: dict[str, Plain] = {"length": length, **settings}
        self.order = order
        self._committed = Place()  # part of the state
        self._chosen: Place | None = None  # where the next iterator begins instead; part of the state after the step
        self._active: EpochIterator | None = None  # whose samples count at the end of the step
        self._version = 0  # changes when the position changes, except by the active iterator's own samples
        self._crossed = False  # this step has used samples of an iterator that is no longer the active one
        run.attach(self)

    # -- companion of the run -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Plain]:
        return {"epoch": self._committed.epoch, "position": self._committed.position, **self._settings}

    def load_state_dict(self, state: Mapping[str, Plain]) -> None:
        settings = {name: value for name, value in state.items() if name not in ("epoch", "position")}
        if settings != self._settings:
            raise ConfigError(
                f"the run continues with another gw.Sampler than before: this one has {_described(self._settings)}, "
                f"and the state to continue from has {_described(settings)}"
            )
        place = Place(int(state["epoch"]), int(state["position"]))
        if place.epoch < 0 or not 0 <= place.position <= self._length:
            raise ConfigError(f"malformed position of a sampler: {place}")
        if place != self._committed:
            self._committed = place
            self._version += 1
            if self._chosen is not None and self._chosen <= place:
                self._chosen = None

    def step_ended(self) -> None:
        """Advance by the samples that the program has received since the last step."""
        active = self._active
        if active is not None and active.has_uncounted:
            if not self.is_current(active):
                raise ConfigError(active.outdated())
            place = Place(active.epoch, active.start + active.used * self.size)
            self._committed, self._chosen = self._normal(place, active.least), None
            self._version += 1
            active.counted, active.version = active.used, self._version
        elif self._chosen is not None:
            self._committed, self._chosen = self._chosen, None
        self._crossed = False

    def step_failed(self) -> None:
        """Return to the position before the step."""
        self._version += 1
        if self._active is not None:
            self._active.counted = self._active.used
        if self._crossed:
            self._chosen, self._crossed = None, False

    # -- for the sampler ----------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._run.group.rank

    @property
    def size(self) -> int:
        return self._run.group.size

    @property
    def place(self) -> Place:
        """Where the next iterator begins. The first call agrees with all ranks on it, and loads a checkpoint."""
        self._run.begin()
        return self._normal(self._chosen or self._committed, 1)

    def iterate(self) -> EpochIterator:
        """Return an iterator over this rank's samples, from the current place to the end of the epoch."""
        return EpochIterator(self)

    def follow(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Iterate over the batches of a loader without end. Begin it anew when its next batch is not the next one."""
        while True:
            before, empty = self._active, True
            for batch in loader:
                empty = False
                active = self._active
                if active is None or active is before:
                    raise ConfigError("this loader does not take its samples from this sampler: pass sampler=sampler")
                yield batch
                if not self.is_current(active):
                    break
            else:
                check_not_empty(empty and self.place.position == 0)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless its samples, or samples of a later one, have been used."""
        place = self._committed if epoch <= self._committed.epoch else Place(epoch)
        if place == (self._chosen or self._committed):
            if self._active is not None and not self._active.counted:
                self._detach()  # it was only read: the same epoch begins again
            return
        self._detach()
        self._chosen = None if place == self._committed else place
        self._version += 1

    # -- for iterators ------------------------------------------------------------------------------------------------

    def begin_iterator(self, iterator: EpochIterator) -> tuple[Place, int]:
        """Make an iterator the active one; return where it begins, and the version of this place."""
        place, active = self.place, self._active
        if active is not None and self.is_current(active) and active.ended and active.epoch >= place.epoch:
            self._chosen = Place(active.epoch + 1)
        self.activate(iterator)
        return self.place, self._version

    def activate(self, iterator: EpochIterator) -> None:
        """Count the samples of this iterator from now on."""
        if self._active is not iterator:
            self._detach()
            self._active = iterator

    def is_current(self, iterator: EpochIterator) -> bool:
        """Return whether the iterator's next sample is the one to use: no step has failed, no rank is lost or new."""
        return (iterator.version, iterator.rank, iterator.size) == (self._version, self.rank, self.size)

    def share(self, place: Place, rank: int, size: int) -> Indices:
        """Return the samples of a rank from a place to the end of the epoch: equally many for every rank."""
        if self._length < size:
            raise InvalidSize(f"{self._length} samples are too few for {size} ranks: some would have none")
        first = place.position + (rank - place.position) % size
        return self.order(place.epoch)[first::size][: (self._length - place.position) // size]

    def _detach(self) -> None:
        self._crossed |= self._active is not None and self._active.has_uncounted
        self._active = None

    def _normal(self, place: Place, least: int) -> Place:
        """Return the start of the next epoch if fewer than `least` samples per rank are left in this one."""
        left = (self._length - place.position) // self.size
        return place if left >= least else Place(place.epoch + 1)


class EpochIterator:
    """Iterates over one rank's samples of an epoch, from the position of the run to the epoch's end.

    It adapts to a failed step and to another number of ranks, unless a DataLoader has taken indices ahead.

    Attributes:
        epoch: The epoch.
        start: The position in the epoch at which this iterator has begun.
        rank: The rank and the number of ranks at its beginning.
        size: See `rank`.
        counted: How many of its samples are in the committed position, or belong to a failed step.
        version: The version of the progress that it continues.
    """

    def __init__(self, progress: SamplingProgress) -> None:
        self._progress = progress
        self._share: Indices | None = None  # None before the first index is taken
        self._loader: LoaderIterator | None = None
        self.epoch = self.start = self.rank = self.size = self.counted = self.version = 0

    def __iter__(self) -> EpochIterator:
        return self

    def __next__(self) -> int:
        if self._share is None:
            self._loader = find_calling_loader()
            share = self._begin(*self._progress.begin_iterator(self))
        else:
            share = self._share if self._progress.is_current(self) else self._adapt()
            self._progress.activate(self)
        if self._taken == len(share):
            self._exhausted = True
            raise StopIteration
        self._note_batch()
        index: int = share.item(self._taken)
        self._taken += 1
        return index

    @property
    def used(self) -> int:
        """How many of its samples the program has received."""
        if self._loader is None or self._share is None:
            return self._taken if self._share is not None else 0
        yielded = self._loader.yielded - self._first_batch
        if yielded > len(self._batches):
            raise ConfigError(UNORDERED)
        return self._batches[yielded] if yielded < len(self._batches) else self._taken

    @property
    def has_uncounted(self) -> bool:
        """Whether the program has received samples that are not counted yet."""
        return self.used != self.counted

    @property
    def ended(self) -> bool:
        """Whether the program has received all its samples."""
        if self._share is None or not self._exhausted:
            return False
        loader = self._loader
        return loader is None or not loader.prefetches or loader.yielded >= loader.begun

    @property
    def least(self) -> int:
        """The fewest samples that this iterator's loader yields at once."""
        return 1 if self._loader is None else self._loader.least

    def outdated(self) -> str:
        """Return the message of an error: this iterator's next samples are not the ones to use."""
        return (
            "this iterator of the DataLoader has prefetched batches that are not the next ones any more: a step has "
            f"failed, set_epoch was called, or the number of ranks has changed (now rank {self._progress.rank} of "
            f"{self._progress.size}, before {self.rank} of {self.size}). Call iter(loader) again, or take the batches "
            "from sampler.follow(loader), which does it"
        )

    def _begin(self, place: Place, version: int) -> Indices:
        progress, loader = self._progress, self._loader
        self.epoch, self.start, self.version = place.epoch, place.position, version
        self.rank, self.size = progress.rank, progress.size
        self.counted = self._taken = 0
        self._exhausted = False
        self._first_batch = 0 if loader is None else loader.begun
        self._batches: list[int] = []  # how many indices were taken before each batch
        self._share = progress.share(place, self.rank, self.size)
        return self._share

    def _adapt(self) -> Indices:
        """Continue from the current position of the run; return this rank's samples."""
        if self._loader is not None and self._loader.prefetches:
            raise ConfigError(self.outdated())
        place = self._progress.place
        if place.epoch > self.epoch:  # another rank has completed the last step of this epoch
            self._exhausted = True
            raise StopIteration
        if place.epoch < self.epoch:
            raise ConfigError(
                f"a step that failed had used samples of epochs {place.epoch} and {self.epoch}. To repeat it, take "
                "the batches from sampler.follow(loader)"
            )
        return self._begin(*self._progress.begin_iterator(self))

    def _note_batch(self) -> None:
        """Record where each batch of the loader begins."""
        if self._loader is None:
            return
        batch = self._loader.begun - self._first_batch
        if batch == len(self._batches):
            self._batches.append(self._taken)


def check_not_empty(empty: bool) -> None:
    """Raise `ConfigError` if a loader has yielded no batch of a whole epoch."""
    if empty:
        raise ConfigError(
            "the loader yields no batch: with drop_last=True, each rank needs at least one whole batch per epoch"
        )


def _described(settings: Mapping[str, Plain]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
