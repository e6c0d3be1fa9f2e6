"""Replicated state taken apart: a skeleton of plain values, and the arrays in it.

A state is a dict of arrays, or anything with `state_dict` and `load_state_dict` (models, optimizers), or a
dict of such. Arrays may be NumPy's or those of any library that knows DLPack. The skeleton is JSON: nothing that comes
from another rank is ever unpickled. Tuples and keys that are numbers, which JSON does not have, are marked.
"""

from __future__ import annotations

import json
import math
import mmap
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import xxhash

from gradwire import arrays
from gradwire.arrays import Array, SupportsDLPack
from gradwire.errors import ArrayError, ConfigError, GradwireError
from gradwire.host.machine import memory
from gradwire.wire import parse_json

MAX_SKELETON = 64 << 20
MAX_ARRAYS = 1 << 20
_DEPTH = 64
_MAKERS = {"jaxlib": ("jax.numpy", "asarray")}  # of libraries whose arrays are not made by their own from_dlpack
_LONGEST = 1 << 48  # of an axis
_SCALAR = "numpy scalar"
STRUCTURE = "the structure of the state"  # its name among the digests: keys, types and shapes


@runtime_checkable
class Stateful(Protocol):
    """Models and optimizers."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


class State:
    """A user's state as replicas exchange it."""

    def __init__(self, state: Any) -> None:
        if not isinstance(state, (MutableMapping, Stateful)):
            raise ArrayError(
                f"a state is a dict of arrays, or has state_dict and load_state_dict; {type(state).__name__} is neither"
            )
        self._state = state
        self.take_apart()  # what cannot travel is found now, not in the middle of a recovery

    def take_apart(self) -> tuple[bytes, list[Array]]:
        """The skeleton, and the arrays in its order: views of the state's own memory where that is contiguous."""
        leaves: list[Array] = []
        skeleton = json.dumps(_pack(_opened(self._state, "state"), leaves, "state"), separators=(",", ":"))
        return skeleton.encode(), leaves

    def digest(self) -> str:
        """What all replicas must agree on: 32 hexadecimal digits over every value and bit."""
        skeleton, leaves = self.take_apart()
        digest = digest_of(skeleton)
        for leaf in leaves:
            digest.update(arrays.raw(leaf.reshape(-1)))
        return digest.hexdigest()

    def digests(self) -> dict[str, str]:
        """The digest of each array and plain value by its name, such as `model.fc.weight`: to find one that differs."""
        leaves: list[Array] = []
        packed = _pack(_opened(self._state, "state"), leaves, "state")
        found = dict(_digests(packed, iter(leaves), ""))
        return found | {STRUCTURE: digest_of(json.dumps(packed).encode()).hexdigest()}

    def touch(self) -> None:
        """Have the system provide the memory of all arrays: of a new process that takes longer than to fill it."""
        for leaf in self.take_apart()[1]:
            if leaf.flags.writeable and leaf.flags.c_contiguous:
                pages = leaf.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE]
                pages[...] = pages.copy()

    def own_memory(self, skeleton: bytes) -> list[Array] | None:
        """The arrays that the state gives of itself, to be overwritten, if they are such as the skeleton speaks of."""
        try:
            own, leaves = self.take_apart()
        except GradwireError:  # arrays that a step has given away
            return None
        fits = own == skeleton and all(leaf.flags.writeable for leaf in leaves)
        return leaves if fits else None

    def lies_in(self, leaves: Sequence[Array]) -> bool:
        """Whether these arrays are the state's own memory, and no copies of it."""
        own = self.take_apart()[1]
        return [leaf.ctypes.data for leaf in own] == [leaf.ctypes.data for leaf in leaves]

    def put_together(self, skeleton: bytes, leaves: list[Array]) -> None:
        """Become the state that was taken apart on another rank; `memory_for` has found nothing wrong with it."""
        found = _unpack(parse_json(skeleton), iter(leaves))
        if isinstance(self._state, MutableMapping) and not isinstance(found, dict):
            raise ValueError(f"malformed state: {type(found).__name__} where a dict is kept")
        _restore(self._state, found)


def digest_of(skeleton: bytes) -> xxhash.xxh3_128:
    """The beginning of a state's digest, which goes on with the bytes of its arrays."""
    return xxhash.xxh3_128(skeleton)


def _digests(packed: Any, leaves: Iterator[Array], path: str) -> Iterator[tuple[str, str]]:
    """The name and digest of every array and plain value in a skeleton."""
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


def memory_for(skeleton: bytes) -> list[Array]:
    """Fresh arrays for all those that a skeleton speaks of; ValueError if it makes no sense, or there is no memory."""
    shapes: list[tuple[arrays.DType, tuple[int, ...]]] = []
    _collect(parse_json(skeleton), shapes, 0)
    nbytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in shapes)
    if nbytes > memory():
        raise ValueError(f"a state of {nbytes} bytes, which is more than this machine has memory")
    try:
        return [np.empty(shape, dtype.storage) for dtype, shape in shapes]
    except (MemoryError, OverflowError) as error:
        raise ValueError(f"no memory for a state of {nbytes} bytes: {error}") from error


def _opened(state: Any, path: str) -> Any:
    """The state with everything stateful replaced by what it says of itself."""
    if isinstance(state, Mapping):
        return {key: _opened(value, f"{path}[{key!r}]") for key, value in state.items()}
    if not _is_stateful(state):
        return state
    try:
        return state.state_dict()
    except GradwireError:
        raise
    except Exception as error:  # of torch's ZeroRedundancyOptimizer, for one
        raise ConfigError(f"{path} cannot tell its state, all of it, on this rank: {error}") from error


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
        raise ArrayError(f"{path} is {type(value).__name__}: keep np.frombuffer(x, np.uint8) in its place")
    try:
        array = arrays.as_array(value) if not isinstance(value, np.generic) else np.asarray(value)
        row = arrays.dtype_of(array)
    except ArrayError as error:
        raise ArrayError(f"{path} cannot be sent to another rank: {error}") from error
    leaves.append(np.ascontiguousarray(array).reshape(array.shape))  # it gives a number an axis
    return {"a": [row.name, list(array.shape), _library(value)]}


def _library(value: Any) -> str:
    """How `_in_library` is to make it again, so that it is of this kind there too."""
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
            return arrays.dtype_called(dtype), tuple(shape), library
    raise ValueError(f"malformed array {str(leaf)[:200]}")


def _collect(packed: Any, found: list[tuple[arrays.DType, tuple[int, ...]]], depth: int) -> None:
    """All arrays of a skeleton, in its order; ValueError for what `_unpack` would not understand."""
    if depth > _DEPTH or len(found) > MAX_ARRAYS:
        raise ValueError("a state that is too deep, or of too many arrays")
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
    """An array as the library has it that it came from, if this process uses that library too."""
    name, maker = _MAKERS.get(library, (library, "from_dlpack"))
    module = sys.modules.get(name)
    make = getattr(module, maker, None)
    if library == _SCALAR:
        return array[()]
    if library == "numpy" or make is None:
        return array
    if maker == "from_dlpack" and array.dtype.name == "bfloat16":  # which NumPy does not know in DLPack
        return make(array.view(np.int16)).view(vars(module)["bfloat16"])
    return make(array)


def _restore(state: Any, found: Any) -> None:
    if _is_stateful(state):
        state.load_state_dict(found)
        _keep_types(state, found)
        return
    placed = {key: _placed(state.get(key), value) for key, value in found.items()}
    if list(state) != list(placed):  # their order counts too
        state.clear()
    for key, value in placed.items():
        if key not in state or state[key] is not value:
            state[key] = value


def _placed(known: Any, value: Any) -> Any:
    """What is to stand where `known` stands: that itself, if the value can be put into it."""
    if _is_stateful(known) or (isinstance(known, MutableMapping) and isinstance(value, dict)):
        _restore(known, value)
        return known
    if type(known) in (list, tuple) and type(value) is type(known) and len(known) == len(value):
        entries = [_placed(own, entry) for own, entry in zip(known, value, strict=True)]
        if isinstance(known, tuple):
            return known if all(own is entry for own, entry in zip(known, entries, strict=True)) else tuple(entries)
        known[:] = entries
        return known
    return known if _written(known, value) else value


def _keep_types(state: Any, found: Any) -> None:
    """torch's optimizers cast what they load to the types of their parameters, but had some of it in others."""
    groups = getattr(state, "param_groups", None)
    if not isinstance(groups, list) or not isinstance(found, dict) or not {"state", "param_groups"} <= set(found):
        return
    for own, came in zip(groups, found["param_groups"], strict=True):
        for parameter, number in zip(own["params"], came["params"], strict=True):
            entries = state.state.get(parameter, {})
            for name, value in found["state"].get(number, {}).items():
                if getattr(entries.get(name), "dtype", None) != getattr(value, "dtype", None):
                    entries[name] = value


def _written(known: Any, value: Any) -> bool:
    """Write an array where the user's own lies: others may hold references to it. False if it does not fit there."""
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
