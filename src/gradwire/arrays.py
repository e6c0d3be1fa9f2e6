"""What users hand in — NumPy, DLPack, buffers, numbers — as typed views; the table of dtypes.

A `View` is a flat, contiguous NumPy array over the user's memory where that is possible, and over a private copy
that `View.store()` writes back where it is not (strided arrays). Nothing here communicates.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gradwire.errors import ArrayError, UnsupportedOp

Array = npt.NDArray[Any]
REDUCE_OPS = ("sum", "mean", "min", "max", "prod")


@runtime_checkable
class SupportsDLPack(Protocol):
    """An array of another library: CPU tensors of torch, JAX, CuPy's host arrays …"""

    def __dlpack__(self, *, stream: Any = None) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


@dataclass(frozen=True, slots=True)
class DType:
    """A row of the table: how elements of a kind are stored (T), accumulated (A), and which reductions they know."""

    name: str
    code: int
    storage: np.dtype[Any]
    accumulator: np.dtype[Any]
    ops: frozenset[str]

    @property
    def itemsize(self) -> int:
        return self.storage.itemsize

    @property
    def widens(self) -> bool:
        """Whether partial results are of another type than elements: half types accumulate in float32."""
        return self.storage != self.accumulator


_FLOAT = frozenset(REDUCE_OPS)
_INTEGER = frozenset({"sum", "min", "max", "prod"})  # the mean of integers is not an integer
_COMPLEX = frozenset({"sum", "mean", "prod"})  # complex numbers have no order


def _rows() -> dict[np.dtype[Any], DType]:
    single = np.dtype(np.float32)
    kinds: list[tuple[Any, Any, frozenset[str]]] = [
        (np.float16, single, _FLOAT),
        (ml_dtypes.bfloat16, single, _FLOAT),
        (np.float32, None, _FLOAT),
        (np.float64, None, _FLOAT),
        *((kind, None, _INTEGER) for kind in (np.int8, np.int16, np.int32, np.int64)),
        *((kind, None, _INTEGER) for kind in (np.uint8, np.uint16, np.uint32, np.uint64)),
        (np.bool_, None, _INTEGER),  # sum is "or", prod is "and", as NumPy's + and * on booleans
        (np.complex64, None, _COMPLEX),
        (np.complex128, None, _COMPLEX),
    ]
    rows = {}
    for code, (kind, accumulator, ops) in enumerate(kinds, start=1):
        storage = np.dtype(kind)
        rows[storage] = DType(storage.name, code, storage, accumulator or storage, ops)
    return rows


_TABLE = _rows()


def dtype_of(array: Array) -> DType:
    """The table's row for an array, or `ArrayError` for what cannot travel (objects, strings, big-endian)."""
    row = _TABLE.get(array.dtype)
    if row is not None and array.dtype.isnative:
        return row
    if not array.dtype.isnative and array.dtype.newbyteorder("=") in _TABLE:
        raise ArrayError(
            f"{array.dtype} is of foreign byte order: pass x.astype({array.dtype.newbyteorder('=').name!r})"
        )
    names = ", ".join(row.name for row in _TABLE.values())
    raise ArrayError(f"arrays of dtype {array.dtype} cannot be exchanged; these can: {names}")


def parse_dtype(dtype: Any) -> DType:
    """A dtype by name or NumPy type, "bfloat16" included."""
    if dtype == "bfloat16":
        dtype = ml_dtypes.bfloat16
    try:
        return dtype_of(np.empty(0, dtype))
    except TypeError as error:
        if isinstance(error, ArrayError):
            raise
        raise ArrayError(f"{dtype!r} is not a dtype") from error


def check_reduction(op: str, dtype: DType) -> None:
    """Refuse what has no meaning (the mean of integers, the maximum of complex numbers) before anything is sent."""
    if op not in REDUCE_OPS:
        raise UnsupportedOp(f"unknown reduce op {op!r}; there are {', '.join(REDUCE_OPS)}", operation=op)
    if op in dtype.ops:
        return
    hint = "; convert to a float type first" if op == "mean" else ""
    raise UnsupportedOp(f"op {op!r} has no meaning for {dtype.name}{hint}", operation=op)


def as_array(x: Any) -> Array:
    """A NumPy array over the memory of x: an ndarray itself, a DLPack tensor on the CPU, or any buffer."""
    if isinstance(x, np.ndarray):
        return x
    if isinstance(x, SupportsDLPack):
        return _from_dlpack(x)
    if isinstance(x, (str, numbers.Number)) or x is None:
        raise ArrayError(f"expected an array, got {type(x).__name__}")
    try:
        return np.asarray(memoryview(x))
    except TypeError as error:
        raise ArrayError(
            f"{type(x).__name__} is neither a NumPy array nor a DLPack tensor nor a buffer; pass numpy.asarray(x)"
        ) from error


def _from_dlpack(x: SupportsDLPack) -> Array:
    device, _ = x.__dlpack_device__()
    if device != 1:  # kDLCPU
        raise ArrayError(f"{type(x).__name__} is not in CPU memory (DLPack device type {device}); move it there first")
    try:
        return np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError) as error:
        raise ArrayError(f"{type(x).__name__} cannot be viewed through DLPack: {error}") from error


@dataclass(slots=True)
class View:
    """Flat contiguous elements of a user's array; `store()` writes them back if they are a private copy."""

    flat: Array
    array: Array
    dtype: DType

    def store(self) -> None:
        """Bring the result into the user's memory; nothing to do where `flat` already is that memory."""
        if not np.may_share_memory(self.flat, self.array):
            np.copyto(self.array, self.flat.reshape(self.array.shape))


def view(x: Any, *, writable: bool) -> View:
    """The typed view of x. A read-only x is refused where it would be written."""
    array = as_array(x)
    dtype = dtype_of(array)
    if writable and not array.flags.writeable:
        raise ArrayError("the array is read-only: pass out= for the result, or a copy")
    if array.flags.c_contiguous and array.flags.aligned:
        return View(array.reshape(-1), array, dtype)
    return View(np.ascontiguousarray(array).reshape(-1).copy(), array, dtype)


def raw(flat: Array) -> memoryview:
    """The bytes of a flat array, whatever its dtype."""
    return memoryview(flat.view(np.uint8))  # type: ignore[arg-type]


def number_as_array(x: numbers.Number) -> Array:
    """A Python number as an array of one element."""
    if isinstance(x, (bool, float, complex, np.generic)):
        return np.array([x])
    try:
        return np.array([x], dtype=np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise ArrayError(f"{x!r} does not fit into a 64-bit integer") from error


def describe(array: Array) -> str:
    """An array as error messages show it: float32[3, 4]."""
    return f"{array.dtype.name}[{', '.join(map(str, array.shape))}]"
