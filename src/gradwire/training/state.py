"""Converts replicated state into a skeleton (a JSON description with all plain values) and a list of arrays, and back.

A state is a dict of arrays and plain values, an object with `state_dict` and `load_state_dict` (models, optimizers), or
a dict of such objects. Arrays are those of NumPy or of any library that supports DLPack. The skeleton is JSON, so that
nothing received from another rank is ever unpickled. JSON has no tuples, no integer keys and no exact floats, so these
are encoded. The values of companions (see `companions`) are in the skeleton too, beside the user's state.
"""

from __future__ import annotations

import json
import math
import mmap
import sys
from collections.abc import Container, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import xxhash

from gradwire import arrays
from gradwire.arrays import Array, SupportsDLPack
from gradwire.errors import ArrayError, ConfigError, GradwireError
from gradwire.host.machine import memory
from gradwire.training.companions import Companions, Plain, parse_values
from gradwire.wire import parse_json

MAX_SKELETON = 64 << 20
MAX_ARRAYS = 1 << 20
_DEPTH = 64
_MAKERS = {"jaxlib": ("jax.numpy", "asarray")}  # module and function, for libraries without their own from_dlpack
_LONGEST = 1 << 48  # elements of one axis
_SCALAR = "numpy scalar"
STRUCTURE = "the structure of the state"  # the name of the digest over keys, types and shapes


@runtime_checkable
class Stateful(Protocol):
    """An object such as a model or an optimizer."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


@runtime_checkable
class Sharded(Protocol):
    """An object whose state is spread over the ranks without copies, such as `ShardedOptimizer`.

    Such an entry is not part of the replicated state: votes do not compare it, and ranks do not exchange it. Only
    checkpoints save it, each rank its own part.
    """

    def shard_state_dict(self) -> Any:
        """Return this rank's part."""

    def load_shard_state_dicts(self, parts: Sequence[Any]) -> None:
        """Load this rank's part. `parts` are those of all ranks that wrote the checkpoint."""


class State:
    """A user's state, in the form in which ranks exchange it."""

    def __init__(self, state: Any) -> None:
        if not isinstance(state, (MutableMapping, Stateful)):
            raise ArrayError(
                f"a state is a dict of arrays, or an object with state_dict and load_state_dict; got "
                f"{type(state).__name__}"
            )
        self._state = state
        self.companions = Companions()
        self.take_apart()  # raises now, not in the middle of a recovery, if a value cannot be sent

    def take_apart(self) -> tuple[bytes, list[Array]]:
        """Return the skeleton, and the arrays in its order. Contiguous arrays are views of the state's own memory."""
        return _taken_apart(_opened(self._state, "state"), self.companions.values())

    @property
    def is_sharded(self) -> bool:
        """Whether entries of the state are spread over the ranks."""
        return bool(_shards(self._state))

    def take_shard_apart(self) -> tuple[bytes, list[Array]] | None:
        """Return the skeleton and the arrays of this rank's own part of the sharded entries; None without them."""
        shards = _shards(self._state)
        if not shards:
            return None
        return _taken_apart({key: shard.shard_state_dict() for key, shard in shards.items()})

    def put_shards_together(self, parts: Sequence[tuple[bytes, list[Array]]]) -> None:
        """Load the sharded entries from the parts of all ranks that wrote a checkpoint."""
        found = [_unpack(parse_json(skeleton), iter(leaves)) for skeleton, leaves in parts]
        for key, shard in _shards(self._state).items():
            missing = [number for number, part in enumerate(found) if key not in part]
            if missing or not found:
                raise ConfigError(f"the checkpoint has no sharded state of {key!r}")
            shard.load_shard_state_dicts([part[key] for part in found])

    def check_fits(self, skeleton: bytes) -> None:
        """Raise `ConfigError` if this state has other entries than the skeleton, or arrays of other shapes."""
        own, theirs = (_split(parse_json(one))[0] for one in (self.take_apart()[0], skeleton))
        missing = sorted(map(str, _top_level(own) ^ _top_level(theirs)))
        if missing:
            raise ConfigError(f"only one of them has the entry {missing[0]!r}")
        expected = dict(_described(own, ""))
        for name, described in _described(theirs, ""):
            if expected.get(name, described) != described:
                raise ConfigError(f"{name} is {described} there and {expected[name]} in this program")

    def digest(self) -> str:
        """Return the digest of all values and bits, 32 hexadecimal digits. It must be the same on all replicas."""
        skeleton, leaves = self.take_apart()
        digest = digest_of(skeleton)
        for leaf in leaves:
            digest.update(arrays.raw(leaf.reshape(-1)))
        return digest.hexdigest()

    def digests(self) -> dict[str, str]:
        """Return the digest of each array and plain value by its name, such as `model.fc.weight`."""
        leaves: list[Array] = []
        packed = _pack(_opened(self._state, "state"), leaves, "state")
        found = dict(_digests(packed, iter(leaves), ""))
        for index, values in enumerate(self.companions.values()):
            found |= {f"attached[{index}].{name}": _digest(value) for name, value in values.items()}
        return found | {STRUCTURE: _digest(packed)}

    def touch(self) -> None:
        """Write to each page of all arrays, so that the system maps their memory now.

        In a new process this takes longer than receiving the data, and other ranks would wait for it.
        """
        for leaf in self.take_apart()[1]:
            if leaf.flags.writeable and leaf.flags.c_contiguous:
                pages = leaf.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE]
                pages[...] = pages.copy()

    def own_memory(self, skeleton: bytes) -> list[Array] | None:
        """Return the state's own arrays, to be overwritten, if they are writable and match the skeleton; else None."""
        try:
            own, leaves = self.take_apart()
        except GradwireError:  # unreadable arrays: for example JAX arrays that a step has donated
            return None
        fits = _have_equal_states(own, skeleton) and all(leaf.flags.writeable for leaf in leaves)
        return leaves if fits else None

    def lies_in(self, leaves: Sequence[Array]) -> bool:
        """Return whether these arrays are the state's own memory, not copies."""
        own = self.take_apart()[1]
        return [leaf.ctypes.data for leaf in own] == [leaf.ctypes.data for leaf in leaves]

    def put_together(self, skeleton: bytes, leaves: list[Array]) -> None:
        """Load the state that another rank took apart. `memory_for` or `own_memory` must have accepted the skeleton."""
        packed, values = _split(parse_json(skeleton))
        found = _unpack(packed, iter(leaves))
        if isinstance(self._state, MutableMapping) and not isinstance(found, dict):
            raise ValueError(f"malformed state: {type(found).__name__} instead of a dict")
        _restore(self._state, found)
        self.companions.load(values)


def digest_of(skeleton: bytes) -> xxhash.xxh3_128:
    """Start the digest of a state. The caller adds the bytes of its arrays."""
    return xxhash.xxh3_128(skeleton)


def _digest(packed: Any) -> str:
    return digest_of(json.dumps(packed).encode()).hexdigest()


def _joined(packed: Any, values: Sequence[Mapping[str, Plain]]) -> Any:
    """Return the skeleton of a packed state with the values of its companions, if it has any."""
    return {"s": packed, "c": [dict(value) for value in values]} if values else packed


def _split(skeleton: Any) -> tuple[Any, list[Mapping[str, Plain]]]:
    """Return the packed state and the companions' values of a skeleton; raise ValueError if these are malformed."""
    match skeleton:
        case {"s": packed, "c": values}:
            return packed, parse_values(values)
    return skeleton, []


def _have_equal_states(one: bytes, other: bytes) -> bool:
    """Return whether two skeletons are equal, apart from the values of companions, which hold no arrays."""
    try:
        return one == other or _split(parse_json(one))[0] == _split(parse_json(other))[0]
    except ValueError:
        return False


def _digests(packed: Any, leaves: Iterator[Array], path: str) -> Iterator[tuple[str, str]]:
    """Yield the name and digest of every array and plain value in a skeleton."""
    match packed:
        case {"d": entries}:
            pass
        case {"t": parts} | list(parts):
            entries = list(enumerate(parts))
        case _:
            digest = digest_of(json.dumps(packed).encode())
            if isinstance(packed, dict) and "a" in packed:
                digest.update(arrays.raw(next(leaves).reshape(-1)))
            yield path, digest.hexdigest()
            return
    for key, entry in entries:
        yield from _digests(entry, leaves, f"{path}.{key}" if path else str(key))


def names_in(skeleton: bytes) -> list[str]:
    """Return the names of all arrays of a skeleton in its order, such as `model.fc.weight`. Each name is unique.

    >>> names_in(State({"model": {"w": np.zeros(2), "b": np.zeros(1)}}).take_apart()[0])
    ['model.w', 'model.b']
    """
    names: dict[str, None] = {}
    for path, _ in _described(_split(parse_json(skeleton))[0], ""):
        names[_free_name(path, names)] = None
    return list(names)


def plain_values(skeleton: bytes) -> dict[str, float | str | None]:
    """Return all values of a skeleton that are not arrays, and the values of its companions, by name.

    Raise ValueError if it is malformed.

    >>> plain_values(State({"w": np.zeros(2), "optimizer": {"lr": 0.1, "betas": (0.9, None)}}).take_apart()[0])
    {'optimizer.lr': 0.1, 'optimizer.betas.0': 0.9, 'optimizer.betas.1': None}
    """
    packed, companions = _split(parse_json(skeleton))
    _collect(packed, [], 0)
    found = list(_plain(packed, ""))
    found += [(f"attached[{at}].{key}", value) for at, values in enumerate(companions) for key, value in values.items()]
    named: dict[str, float | str | None] = {}
    for path, value in found:
        named[_free_name(path, named)] = value
    return named


def _plain(packed: Any, path: str) -> Iterator[tuple[str, float | str | None]]:
    match packed:
        case {"a": _}:
            return
        case {"f": str(number)}:
            yield path, _number(number)
        case {"d": entries}:
            for key, entry in entries:
                yield from _plain(entry, f"{path}.{key}" if path else str(key))
        case {"t": parts} | list(parts):
            for place, entry in enumerate(parts):
                yield from _plain(entry, f"{path}.{place}" if path else str(place))
        case _:
            yield path, packed


def _free_name(path: str, used: Container[str]) -> str:
    """Return a name for a path that is not used yet: a key that contains a dot can look like a nested one."""
    name, number = path, 1
    while name in used:
        number += 1
        name = f"{path}#{number}"
    return name


def _described(packed: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the name of every array in a skeleton, with its dtype and shape."""
    match packed:
        case {"a": leaf}:
            dtype, shape, _ = _shape(leaf)
            yield path, f"{dtype.name}{list(shape)}"
        case {"d": entries}:
            for key, entry in entries:
                yield from _described(entry, f"{path}.{key}" if path else str(key))
        case {"t": parts} | list(parts):
            for number, entry in enumerate(parts):
                yield from _described(entry, f"{path}.{number}" if path else str(number))


def _top_level(packed: Any) -> set[Any]:
    return {key for key, _ in packed["d"]} if isinstance(packed, dict) and "d" in packed else set()


def _taken_apart(opened: Any, companions: Sequence[Mapping[str, Plain]] = ()) -> tuple[bytes, list[Array]]:
    leaves: list[Array] = []
    packed = _pack(opened, leaves, "state")
    return json.dumps(_joined(packed, companions), separators=(",", ":")).encode(), leaves


def _shards(state: Any, path: str = "") -> dict[str, Sharded]:
    """Return the sharded entries of a state by name."""
    if isinstance(state, Sharded):
        return {path: state}
    if not isinstance(state, Mapping):
        return {}
    found: dict[str, Sharded] = {}
    for key, value in state.items():
        found |= _shards(value, f"{path}.{key}" if path else str(key))
    return found


def memory_for(skeleton: bytes) -> list[Array]:
    """Allocate the arrays that a skeleton describes; raise ValueError if it is malformed or memory is too small."""
    shapes: list[tuple[arrays.DType, tuple[int, ...]]] = []
    _collect(_split(parse_json(skeleton))[0], shapes, 0)
    nbytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in shapes)
    if nbytes > memory():
        raise ValueError(f"the state has {nbytes} bytes, more than the memory of this machine")
    try:
        return [np.empty(shape, dtype.storage) for dtype, shape in shapes]
    except (MemoryError, OverflowError) as error:
        raise ValueError(f"no memory for a state of {nbytes} bytes: {error}") from error


def _opened(state: Any, path: str) -> Any:
    """Return the state with each stateful object replaced by its `state_dict`, and without sharded objects."""
    if isinstance(state, Mapping):
        replicated = ((key, value) for key, value in state.items() if not isinstance(value, Sharded))
        return {key: _opened(value, f"{path}[{key!r}]") for key, value in replicated}
    if not _is_stateful(state):
        return state
    try:
        return state.state_dict()
    except GradwireError:
        raise
    except Exception as error:  # for example from torch's ZeroRedundancyOptimizer
        raise ConfigError(f"{path}.state_dict() failed: this rank does not hold the whole state: {error}") from error


def _is_stateful(value: Any) -> bool:
    return isinstance(value, Stateful) and not isinstance(value, (SupportsDLPack, Mapping))


def _pack(value: Any, leaves: list[Array], path: str) -> Any:
    if value is None or (isinstance(value, (bool, int, float, str)) and type(value).__module__ == "builtins"):
        return value if not isinstance(value, float) else {"f": value.hex()}
    if isinstance(value, Mapping):
        entries = [[_key(key, path), _pack(entry, leaves, f"{path}[{key!r}]")] for key, entry in value.items()]
        return {"d": entries}
    if isinstance(value, (list, tuple)):
        packed = [_pack(entry, leaves, f"{path}[{i}]") for i, entry in enumerate(value)]
        return packed if isinstance(value, list) else {"t": packed}
    if isinstance(value, (bytes, bytearray, memoryview)):
        raise ArrayError(f"{path} is {type(value).__name__}: use np.frombuffer(x, np.uint8) instead")
    try:
        array = arrays.as_array(value) if not isinstance(value, np.generic) else np.asarray(value)
        row = arrays.dtype_of(array)
    except ArrayError as error:
        raise ArrayError(f"{path} cannot be sent to another rank: {error}") from error
    leaves.append(np.ascontiguousarray(array).reshape(array.shape))  # ascontiguousarray adds an axis to a 0-d array
    return {"a": [row.name, list(array.shape), _library(value)]}


def _library(value: Any) -> str:
    """Return the name from which `_in_library` makes an array of the same library on the receiving rank."""
    if isinstance(value, (np.generic, np.ndarray)):
        return _SCALAR if isinstance(value, np.generic) else "numpy"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return "torch"
    name = type(value).__module__.partition(".")[0]
    return name if name in _MAKERS or hasattr(sys.modules.get(name), "from_dlpack") else "numpy"


def _key(key: Any, path: str) -> Any:
    if isinstance(key, (str, int)) and not isinstance(key, bool):
        return key
    raise ArrayError(f"{path} has the key {key!r}: keys are strings or whole numbers")


def _shape(leaf: Any) -> tuple[arrays.DType, tuple[int, ...], str]:
    match leaf:
        case [str(dtype), list(shape), str(library)] if all(type(n) is int and 0 <= n < _LONGEST for n in shape):
            return arrays.dtype_by_name(dtype), tuple(shape), library
    raise ValueError(f"malformed array {str(leaf)[:200]}")


def _collect(packed: Any, found: list[tuple[arrays.DType, tuple[int, ...]]], depth: int) -> None:
    """Append the dtypes and shapes of all arrays of a skeleton to `found`; raise ValueError if it is malformed."""
    if depth > _DEPTH or len(found) > MAX_ARRAYS:
        raise ValueError("the state is nested too deeply, or has too many arrays")
    match packed:
        case {"a": leaf}:
            found.append(_shape(leaf)[:2])
        case {"f": str(number)}:
            _number(number)
        case {"d": list(entries)}:
            for entry in entries:
                match entry:
                    case [key, value] if type(key) in (str, int):
                        _collect(value, found, depth + 1)
                    case _:
                        raise ValueError(f"malformed entry {str(entry)[:200]}")
        case {"t": list(entries)} | list(entries):
            for entry in entries:
                _collect(entry, found, depth + 1)
        case dict() | float():
            raise ValueError(f"malformed value {str(packed)[:200]}")


def _unpack(packed: Any, leaves: Iterator[Array]) -> Any:
    match packed:
        case {"a": leaf}:
            return _in_library(next(leaves), _shape(leaf)[2])
        case {"f": number}:
            return _number(number)
        case {"d": entries}:
            return {key: _unpack(entry, leaves) for key, entry in entries}
        case {"t": entries}:
            return tuple(_unpack(entry, leaves) for entry in entries)
        case list(entries):
            return [_unpack(entry, leaves) for entry in entries]
    return packed


def _number(text: str) -> float:
    try:
        return float.fromhex(text)
    except OverflowError as error:
        raise ValueError(f"malformed number {text[:200]}") from error


def _in_library(array: Array, library: str) -> Any:
    """Convert an array to the library that it came from, if this process has imported that library too."""
    name, maker = _MAKERS.get(library, (library, "from_dlpack"))
    module = sys.modules.get(name)
    make = getattr(module, maker, None)
    if library == _SCALAR:
        return array[()]
    if library == "numpy" or make is None:
        return array
    if maker == "from_dlpack" and array.dtype.name == "bfloat16":  # NumPy cannot export bfloat16 through DLPack
        return make(array.view(np.int16)).view(vars(module)["bfloat16"])
    return make(array)


def _restore(state: Any, found: Any) -> None:
    if _is_stateful(state):
        state.load_state_dict(found)
        _keep_types(state, found)
        return
    placed = {key: _placed(state.get(key), value) for key, value in found.items()}
    sharded = {key: value for key, value in state.items() if isinstance(value, Sharded)}
    if [key for key in state if key not in sharded] != list(placed):  # the order of the keys is part of the digest
        state.clear()
        state.update(sharded)
    for key, value in placed.items():
        if key not in state or state[key] is not value:
            state[key] = value


def _placed(known: Any, value: Any) -> Any:
    """Copy the value into the existing object `known` if possible, and return `known`; else return the value."""
    if _is_stateful(known) or (isinstance(known, MutableMapping) and isinstance(value, dict)):
        _restore(known, value)
        return known
    if type(known) in (list, tuple) and type(value) is type(known) and len(known) == len(value):
        entries = [_placed(own, entry) for own, entry in zip(known, value, strict=True)]
        if isinstance(known, tuple):
            return known if all(own is entry for own, entry in zip(known, entries, strict=True)) else tuple(entries)
        known[:] = entries
        return known
    return known if _write_in_place(known, value) else value


def _keep_types(state: Any, found: Any) -> None:
    """Restore the dtypes of optimizer state: torch's optimizers cast loaded tensors to their parameters' dtypes."""
    groups = getattr(state, "param_groups", None)
    if not isinstance(groups, list) or not isinstance(found, dict) or not {"state", "param_groups"} <= set(found):
        return
    for own, received in zip(groups, found["param_groups"], strict=True):
        for parameter, number in zip(own["params"], received["params"], strict=True):
            entries = state.state.get(parameter, {})
            for name, value in found["state"].get(number, {}).items():
                if getattr(entries.get(name), "dtype", None) != getattr(value, "dtype", None):
                    entries[name] = value


def _write_in_place(known: Any, value: Any) -> bool:
    """Copy an array into the user's own array, to which the program may hold references. Return False if it cannot."""
    if known is None or not isinstance(known, (np.ndarray, SupportsDLPack)):
        return False
    try:
        target, source = arrays.as_array(known), arrays.as_array(value)
    except ArrayError:
        return False
    if target.shape != source.shape or target.dtype != source.dtype or not target.flags.writeable:
        return False
    if target.ctypes.data != source.ctypes.data:
        np.copyto(target, source)
    return True
