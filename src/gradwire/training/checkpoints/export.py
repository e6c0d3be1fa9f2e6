"""Writes a checkpoint as one plain file that other programs read: `.npz` of NumPy, or safetensors.

The file has all arrays by name, and as JSON the step, the run and the values that are not arrays.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradwire.arrays import Array
from gradwire.errors import CheckpointError, ConfigError
from gradwire.training.checkpoints import tensor_file
from gradwire.training.checkpoints.checkpoint import Checkpoint, PartFiles, Stored, ignore_bytes
from gradwire.training.checkpoints.compare import values_of
from gradwire.training.checkpoints.files import replacing, system_errors

FORMATS = (".npz", ".safetensors")
ABOUT = tensor_file.METADATA  # the name of the JSON text in an .npz file


def export(
    checkpoint: Checkpoint, target: Path, *, force: bool = False, on_bytes: Callable[[int], object] = ignore_bytes
) -> None:
    """Write a complete checkpoint to a file. All digests are checked. `on_bytes` gets the size of each array.

    Raises:
        ConfigError: The name of the file has another suffix than those in `FORMATS`.
        CheckpointError: The checkpoint is torn or damaged, the file cannot be written, or it exists without `force`.
    """
    write = {".npz": _write_npz, ".safetensors": _write_safetensors}.get(target.suffix)
    if write is None:
        raise ConfigError(
            f"{target} has the suffix {target.suffix!r}: the name of the file ends with .npz or .safetensors"
        )
    stored = [*checkpoint.replicated, *checkpoint.sharded]
    with contextlib.closing(checkpoint.open()) as files, system_errors("write", target):
        if os.path.lexists(target) and not force:
            raise CheckpointError(f"{target} exists already: --force replaces it")
        try:
            with replacing(target) as draft:
                write(draft, stored, _reader(files, on_bytes), _about(checkpoint))
        except ValueError as error:  # a name that the format does not allow
            raise CheckpointError(f"cannot write {target}: {error}") from error


def _reader(files: PartFiles, on_bytes: Callable[[int], object]) -> Callable[[Stored], Array]:
    def load(one: Stored) -> Array:
        array = files.load(one)
        on_bytes(one.array.nbytes)
        return array

    return load


def _about(checkpoint: Checkpoint) -> dict[str, Any]:
    head = checkpoint.manifest.head
    values = {name: json_safe(value) for name, value in values_of(checkpoint).items()}
    return {
        "step": head.step,
        "run": head.fence.run.hex(),
        "generation": head.fence.generation,
        "gradwire": checkpoint.manifest.version,
        "dtypes": {one.name: one.array.dtype for one in (*checkpoint.replicated, *checkpoint.sharded)},
        "values": values,
    }


def json_safe(value: Any) -> Any:
    """Return a value, or for NaN and infinities, which JSON does not have, their text."""
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _write_npz(draft: Path, stored: Sequence[Stored], load: Callable[[Stored], Array], about: dict[str, Any]) -> None:
    """Write the file without compression. NumPy has no bfloat16, so these arrays become float32, which is exact."""
    with draft.open("xb") as opened:
        with zipfile.ZipFile(opened, "w") as archive:
            _add(archive, ABOUT, np.array(json.dumps(about)))
            for one in stored:
                array = load(one)
                _add(archive, one.name, array.astype(np.float32) if one.array.dtype == "bfloat16" else array)
        opened.flush()
        os.fsync(opened.fileno())


def _add(archive: zipfile.ZipFile, name: str, array: Array) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
        np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)


def _write_safetensors(
    draft: Path, stored: Sequence[Stored], load: Callable[[Stored], Array], about: dict[str, Any]
) -> None:
    described = [(one.name, one.array.dtype, one.array.shape) for one in stored]
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in about.items()}
    tensor_file.write(draft, described, lambda at: load(stored[at]), texts)
