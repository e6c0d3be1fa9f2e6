"""One checkpoint on the disk: whether it is complete, and its arrays."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path

import numpy as np
import xxhash

from gradwire import arrays
from gradwire.arrays import Array
from gradwire.errors import CheckpointError, ConfigError
from gradwire.host.machine import memory
from gradwire.training.checkpoints.files import read_small, system_errors
from gradwire.training.checkpoints.manifest import (
    Manifest,
    OtherFormat,
    Part,
    StoredArray,
    replicated_key,
    shard_key,
)
from gradwire.training.checkpoints.tensor_file import Digest, Header, digest_array, read_array, read_header
from gradwire.training.fence import Fence
from gradwire.training.state import digest_of, memory_for

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{12,})\.([0-9a-f]{32}-\d{12,})")


def folder_name(step: int, fence: Fence) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:012d}.{fence}"


def parse_folder_name(name: str) -> tuple[int, Fence] | None:
    """Return the step and the fence of a folder's name, or None if it is not the name of a checkpoint."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    with contextlib.suppress(ConfigError, ValueError):  # ValueError: too many digits
        step, fence = int(found[1]), Fence.parse(found[2])
        if folder_name(step, fence) == name:
            return step, fence
    return None


def ignore_bytes(count: int) -> None:
    """Ignore the progress of a long read."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as it was when `find` listed it.

    Attributes:
        path: Its folder.
        step: The index of the last completed step.
        fence: The run and the generation that wrote it.
        problem: Why it is torn; empty if it is complete.
        nbytes: The size of its part files.
        is_removable: Whether a torn one is known to be useless. It is not if its manifest could not be read, or has
            the format of another version of gradwire.
    """

    path: Path
    step: int
    fence: Fence
    problem: str
    nbytes: int
    is_removable: bool = True
    found: Manifest | None = field(default=None, repr=False)

    @property
    def is_complete(self) -> bool:
        return not self.problem

    @property
    def manifest(self) -> Manifest:
        """The manifest. Raise `CheckpointError` if the checkpoint is torn."""
        if self.found is None or self.problem:
            raise CheckpointError(f"{self.path} is torn: {self.problem}", step=self.step)
        return self.found

    @property
    def replicated(self) -> list[Stored]:
        """The arrays of the replicated state, in the order of its skeleton."""
        places = {array.name: Stored(part, array) for part in self.manifest.parts for array in part.arrays}
        return [places[name] for name in self.manifest.head.names]

    @property
    def sharded(self) -> list[Stored]:
        """The arrays of all ranks' shards, in the order of ranks."""
        shards = [(part, part.shard.arrays) for part in self.manifest.parts if part.shard is not None]
        return [Stored(part, array, in_shard=True) for part, stored in shards for array in stored]

    def open(self) -> PartFiles:
        """Return a reader of single arrays. The caller closes it."""
        return PartFiles(self.path)

    def load(self) -> tuple[bytes, list[Array]]:
        """Return the skeleton of the replicated state, and its arrays in the order of the skeleton.

        Raise `CheckpointError`, with the file and the array, if a digest is wrong or a file cannot be read.
        """
        head, stored = self.manifest.head, self.replicated
        leaves = self._memory(head.structure, [one.array for one in stored])
        total = digest_of(head.structure)
        with contextlib.closing(self.open()) as files:
            for one, leaf in zip(stored, leaves, strict=True):
                files.read(one, leaf, total)
        self._check_total(total)
        return head.structure, leaves

    def load_shards(self) -> list[tuple[bytes, list[Array]]]:
        """Return the skeleton and the arrays of every rank's shard, in the order of ranks."""
        shards = []
        with contextlib.closing(self.open()) as files:
            for part in self.manifest.parts:
                if part.shard is None:
                    continue
                leaves = self._memory(part.shard.structure, part.shard.arrays)
                for array, leaf in zip(part.shard.arrays, leaves, strict=True):
                    files.read(Stored(part, array, in_shard=True), leaf)
                shards.append((part.shard.structure, leaves))
        return shards

    def verify(self, on_bytes: Callable[[int], object] = ignore_bytes) -> list[str]:
        """Read all bytes, without keeping them, and return the problems. `on_bytes` gets the number of bytes read."""
        if self.problem:
            return [self.problem]
        problems = dict[str, None]()  # a damaged header is reported once, not for each array
        total, progress = digest_of(self.manifest.head.structure), _Progress(on_bytes)
        with contextlib.closing(self.open()) as files:
            for one in [*self.replicated, *self.sharded]:
                try:
                    files.check(one, progress, *([] if one.in_shard else [total]))
                except CheckpointError as error:
                    problems[str(error)] = None
        if not problems:
            try:
                self._check_total(total)
            except CheckpointError as error:
                problems[str(error)] = None
        return list(problems)

    def _check_total(self, total: xxhash.xxh3_128) -> None:
        expected = self.manifest.head.digest
        if total.hexdigest() != expected:
            raise CheckpointError(
                f"{self.path} was written with wrong values: every array is intact, but the digest of the whole state "
                f"is {total.hexdigest()}, expected {expected}",
                step=self.step,
            )

    def _memory(self, structure: bytes, stored: Iterable[StoredArray]) -> list[Array]:
        """Allocate the arrays of a skeleton; raise `CheckpointError` if they are not those of the part files."""
        try:
            leaves = memory_for(structure)
        except ValueError as error:
            raise CheckpointError(f"{self.path / MANIFEST} cannot be loaded: {error}", step=self.step) from error
        described = [(arrays.dtype_of(leaf).name, leaf.shape) for leaf in leaves]
        if described != [(array.dtype, array.shape) for array in stored]:
            raise CheckpointError(f"{self.path / MANIFEST} describes other arrays than its state has", step=self.step)
        return leaves


@dataclass(frozen=True, slots=True)
class Stored:
    """An array of a checkpoint and the part that has it."""

    part: Part
    array: StoredArray
    in_shard: bool = False

    @property
    def key(self) -> str:
        """Its name in the part file."""
        return shard_key(self.array.name) if self.in_shard else replicated_key(self.array.name)

    @property
    def name(self) -> str:
        """Its name among all arrays of the checkpoint."""
        return shard_key(f"{self.part.rank}:{self.array.name}") if self.in_shard else self.key


@dataclass(frozen=True, slots=True)
class _Progress:
    on_bytes: Callable[[int], object]

    def update(self, data: memoryview, /) -> None:
        self.on_bytes(len(data))


class PartFiles:
    """Reads arrays from the part files of a checkpoint. One file is open at a time: there may be many ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._headers: dict[int, Header] = {}
        self._opened: tuple[int, BufferedReader] | None = None

    def load(self, stored: Stored) -> Array:
        """Return an array, after a check of its digest."""
        array = stored.array
        with self._damage(stored.part):
            if array.nbytes > memory():
                raise ValueError(f"array {array.name!r} has {array.nbytes} bytes, more than this machine's memory")
            out = np.empty(array.shape, arrays.dtype_by_name(array.dtype).storage)
        self.read(stored, out)
        return out

    def read(self, stored: Stored, out: Array, *totals: Digest) -> None:
        """Read an array into `out` and check its digest."""
        with self._damage(stored.part):
            opened, header = self._open(stored.part)
            _compare(stored.array, read_array(opened, header, stored.key, out, *totals))

    def check(self, stored: Stored, *totals: Digest) -> None:
        """Check the digest of an array."""
        array = stored.array
        with self._damage(stored.part):
            opened, header = self._open(stored.part)
            _compare(array, digest_array(opened, header, stored.key, array.dtype, array.shape, *totals))

    def close(self) -> None:
        if self._opened is not None:
            self._opened[1].close()
            self._opened = None

    def _open(self, part: Part) -> tuple[BufferedReader, Header]:
        if self._opened is None or self._opened[0] != part.rank:
            self.close()
            self._opened = part.rank, (self._folder / part.file).open("rb")
        opened = self._opened[1]
        if part.rank not in self._headers:
            self._headers[part.rank] = read_header(opened)
        return opened, self._headers[part.rank]

    @contextlib.contextmanager
    def _damage(self, part: Part) -> Iterator[None]:
        path = self._folder / part.file
        with system_errors("read", path):
            try:
                yield
            except ValueError as error:
                raise CheckpointError(f"{path} is damaged: {error}") from error


def _compare(array: StoredArray, digest: str) -> None:
    if digest != array.digest:
        raise ValueError(f"array {array.name!r} has digest {digest}, expected {array.digest}")


def inspect(path: Path, step: int, fence: Fence) -> Checkpoint:
    """Read the manifest of a checkpoint and compare the sizes of its part files."""
    nbytes = sum(_size(file) or 0 for file in path.glob("rank-*.safetensors"))
    try:
        found = Manifest.from_json(read_small(path / MANIFEST))
    except FileNotFoundError:
        return Checkpoint(
            path, step, fence, "it has no manifest: it is still being written, or the job ended before", nbytes
        )
    except OSError as error:
        return Checkpoint(path, step, fence, f"its manifest cannot be read: {error.strerror}", nbytes, False)
    except OtherFormat as error:
        return Checkpoint(path, step, fence, f"its manifest cannot be read: {error}", nbytes, False)
    except ValueError as error:
        return Checkpoint(path, step, fence, f"its manifest is invalid: {error}", nbytes)
    problem = next(filter(None, (part_problem(path, part) for part in found.parts)), "")
    if (found.head.step, found.head.fence) != (step, fence):
        problem = "its manifest belongs to another checkpoint"
    return Checkpoint(path, step, fence, problem, nbytes, found=found)


def part_problem(folder: Path, part: Part) -> str:
    """Return why a part file cannot be the one that was described; empty if its size is right."""
    size = _size(folder / part.file)
    if size is None:
        return f"{part.file} is missing"
    return "" if size == part.nbytes else f"{part.file} has {size} bytes instead of {part.nbytes}"


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
