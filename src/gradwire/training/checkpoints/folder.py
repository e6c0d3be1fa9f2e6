"""A folder of checkpoints: claiming it, writing checkpoints, listing them, and removing old ones.

    claims                                  one fence per line, in the order in which runs claimed the folder
    step-000000000099.<fence>/              the checkpoint of step 99, which is the last completed step
        rank-0.safetensors  rank-0.json     the part of a rank, and its description, which is written after it
        manifest.json                       written last: the checkpoint is complete

A process can be killed at any moment. A checkpoint without a valid manifest is torn and is ignored.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import gradwire
from gradwire.arrays import Array, dtype_of
from gradwire.errors import CheckpointError, ConfigError
from gradwire.training.checkpoints import tensor_file
from gradwire.training.checkpoints.checkpoint import (
    MANIFEST,
    Checkpoint,
    folder_name,
    inspect,
    parse_folder_name,
    part_problem,
)
from gradwire.training.checkpoints.claims import Claims, locked_claims, read_claims
from gradwire.training.checkpoints.files import make_folder, read_small, replace_file, system_errors
from gradwire.training.checkpoints.manifest import (
    Head,
    Manifest,
    Part,
    Shard,
    StoredArray,
    description_file,
    part_file,
    replicated_key,
    shard_key,
)
from gradwire.training.checkpoints.tensor_file import never_cancelled
from gradwire.training.fence import Fence, sync_folder

log = logging.getLogger("gradwire.training")

_REMOVING = ".removing-"
Named = Sequence[tuple[str, Array]]


class CheckpointFolder:
    """The folder in which a job writes its checkpoints. All ranks must see the same files in it.

    Args:
        path: The folder. `claim` creates it.
        keep: The number of complete checkpoints that remain after a new one.
    """

    def __init__(self, path: str | os.PathLike[str], keep: int = 3) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ConfigError(f"keep={keep!r}: at least 1 checkpoint must be kept")
        if not os.fspath(path):
            raise ConfigError("the path of the folder for checkpoints is empty")
        self.path = Path(path).absolute()  # the program may change its working directory
        self.keep = keep

    def claim(self, fence: Fence) -> None:
        """Create the folder and record the fence, so that earlier runs and generations cannot write there any more.

        Their torn checkpoints are removed: nobody can complete them, and the next one needs their space. Raise `Fenced`
        if a later run or generation has claimed the folder.
        """
        with system_errors("claim", self.path):
            make_folder(self.path)
            with locked_claims(self.path) as claims:
                claims.add(fence, is_new=True)
                self._remove_old(claims.read(), keep=math.inf)
            sync_folder(self.path)

    def draft(self, step: int, fence: Fence) -> Draft:
        """Return the checkpoint of a step, to be written. It has no files yet."""
        return Draft(self, step, fence)

    def find(self) -> list[Checkpoint]:
        """Return all checkpoints, complete and torn, the newest first. A folder that does not exist has none."""
        with system_errors("read", self.path):
            found = self._inspect()
            return _newest_first(found, read_claims(self.path))  # read afterwards, so that it has all fences of `found`

    def complete(self) -> list[Checkpoint]:
        """Return the complete checkpoints, the newest first."""
        return [checkpoint for checkpoint in self.find() if checkpoint.is_complete]

    def prune(self, claims: Claims, published: Path) -> None:
        """Remove old checkpoints, but never `published`. The caller holds the lock. Errors are logged, not raised."""
        try:
            self._remove_old(claims, self.keep, published)
        except OSError as error:
            log.warning("cannot remove old checkpoints in %s: %s", self.path, error)

    def _remove_old(self, claims: Claims, keep: float, published: Path | None = None) -> None:
        """Remove complete checkpoints beyond the newest `keep`, and torn ones that nobody will complete."""
        for name in os.listdir(self.path):
            if name.startswith(_REMOVING) and parse_folder_name(name.removeprefix(_REMOVING)):
                _delete(self.path / name)  # left by a process that was killed
        seen, outdated = 0, []
        for one in _newest_first(self._inspect(), claims):
            old = seen >= keep if one.is_complete else seen >= 1 or claims.later(one.fence) is not None
            seen += one.is_complete
            if old and one.is_removable and one.path != published and not one.path.is_symlink():
                outdated.append(one.path)
        for path in reversed(outdated):  # the oldest first
            _remove(path)

    def _inspect(self) -> list[Checkpoint]:
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        ours = [(self.path / name, *parsed) for name in names if (parsed := parse_folder_name(name))]
        found = [inspect(path, step, fence) for path, step, fence in ours if path.is_dir()]
        # Another process may remove a checkpoint at the same time. Its folder is renamed first, so it is not torn.
        return [checkpoint for checkpoint in found if checkpoint.is_complete or checkpoint.path.is_dir()]


class Draft:
    """A checkpoint that is being written. Each rank writes a part, and then one rank publishes the checkpoint."""

    def __init__(self, folder: CheckpointFolder, step: int, fence: Fence) -> None:
        if step < 0:
            raise ConfigError(f"step={step}: a step is not negative")
        self._folder, self._step, self._fence = folder, step, fence
        self.path = folder.path / folder_name(step, fence)

    def write_part(
        self,
        rank: int,
        arrays: Named,
        *,
        shard: tuple[bytes, Named] | None = None,
        cancelled: Callable[[], bool] = never_cancelled,
    ) -> Part:
        """Write the part file of a rank and its description, and flush both to the disk.

        Args:
            rank: The rank of this process.
            arrays: Names and arrays of the replicated state that this rank writes.
            shard: The skeleton, names and arrays of this rank's own state.
            cancelled: Called between chunks. If it returns True, the part is removed and `Cancelled` is raised.

        Raises:
            CheckpointError: The part cannot be written: no space is left, the folder is read-only …
        """
        structure, own = shard if shard is not None else (b"", ())
        path = self.path / part_file(rank)
        with system_errors("write", path), _malformed(path):
            with contextlib.suppress(FileNotFoundError):
                self.path.mkdir(exist_ok=True)
            if not self.path.is_dir():
                raise CheckpointError(
                    f"{self._folder.path} does not exist on this host: do all hosts share this folder?"
                )
            if (self.path / MANIFEST).exists():
                raise CheckpointError(f"{self.path} is already complete", step=self._step)
            description = self.path / description_file(rank)
            description.unlink(missing_ok=True)
            described = [(name, dtype_of(array).name, array.shape) for name, array in [*arrays, *own]]
            keys = [replicated_key(name) for name, _ in arrays] + [shard_key(name) for name, _ in own]
            forms = [(key, dtype, shape) for key, (_, dtype, shape) in zip(keys, described, strict=True)]
            values = [array for _, array in (*arrays, *own)]
            nbytes, digests = tensor_file.write(path, forms, values.__getitem__, cancelled=cancelled)
            stored = tuple(StoredArray(*one, digest) for one, digest in zip(described, digests, strict=True))
            shard_part = Shard(structure, stored[len(arrays) :]) if shard is not None else None
            part = Part(rank, part_file(rank), nbytes, stored[: len(arrays)], shard_part)
            replace_file(description, part.to_json())
        return part

    def publish(self, head: Head) -> Checkpoint:
        """Write the manifest, which makes the checkpoint complete, and remove old checkpoints.

        Raises:
            CheckpointError: A part is missing, the parts do not fit the head, or the manifest cannot be written.
            Fenced: A later run or generation has claimed the folder.
        """
        path = self.path / MANIFEST
        if (head.step, head.fence) != (self._step, self._fence):
            raise CheckpointError(f"the head of step {head.step} does not belong to {self.path}", step=self._step)
        with system_errors("write", path), _malformed(path):
            manifest = Manifest(head, self._read_parts(head.size), time.time(), gradwire.__version__)
            data = manifest.to_json()
            Manifest.from_json(data)  # a checkpoint that cannot be read must not become complete
            with locked_claims(self._folder.path) as claims:
                claims.add(self._fence, is_new=False)
                sync_folder(self._folder.path)  # the name of this checkpoint's folder
                replace_file(path, data)
                self._folder.prune(claims.read(), self.path)
        return Checkpoint(self.path, self._step, self._fence, "", manifest.nbytes, found=manifest)

    def discard(self, rank: int) -> None:
        """Remove the part of a rank, and on rank 0 the whole draft, unless it is complete. Log errors.

        Each rank removes its own part, because the folder may not be shared between hosts, by mistake.
        """
        try:
            if (self.path / MANIFEST).exists():
                return
            if rank == 0:
                _remove(self.path)
                return
            for name in (part_file(rank), description_file(rank)):
                (self.path / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty
                self.path.rmdir()
        except OSError as error:
            log.warning("cannot remove %s: %s", self.path, error)

    def _read_parts(self, size: int) -> tuple[Part, ...]:
        parts, missing = [], []
        for rank in range(size):
            path = self.path / description_file(rank)
            try:
                part = Part.from_json(read_small(path))
            except FileNotFoundError:
                missing.append(rank)
                continue
            except ValueError as error:
                raise CheckpointError(f"{path} is damaged: {error}", step=self._step) from error
            problem = part_problem(self.path, part) if part.rank == rank else f"it describes rank {part.rank}"
            if problem:
                raise CheckpointError(f"{path} does not describe this part: {problem}", step=self._step)
            parts.append(part)
        if missing:
            ranks = ", ".join(map(str, missing[:10])) + (" …" if len(missing) > 10 else "")
            raise CheckpointError(f"{self.path} has no part of ranks {ranks}: do all hosts share this folder?")
        return tuple(parts)


def _newest_first(found: list[Checkpoint], claims: Claims) -> list[Checkpoint]:
    return sorted(found, key=lambda one: claims.age_key(one.step, one.fence), reverse=True)


@contextlib.contextmanager
def _malformed(path: Path) -> Iterator[None]:
    """Map a ValueError about names or parts to a `CheckpointError`."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error


def _remove(path: Path) -> None:
    """Delete the folder of a checkpoint under a hidden name, so that it is never listed half-deleted. Log errors."""
    hidden = path.with_name(_REMOVING + path.name)
    try:
        _delete(hidden)
        path.rename(hidden)
    except FileNotFoundError:  # another process has removed it
        return
    except OSError as error:
        log.warning("cannot remove the old checkpoint %s: %s", path, error)
        return
    _delete(hidden)


def _delete(hidden: Path) -> None:
    try:
        shutil.rmtree(hidden)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("cannot remove the old checkpoint %s: %s", hidden, error)
