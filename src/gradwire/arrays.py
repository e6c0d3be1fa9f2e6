"""Provides typed views of user arrays (NumPy, DLPack, buffers, numbers), and the table of dtypes.

A `View` is a flat, contiguous NumPy array over the user's memory. If the user's array is strided, the view is over a
private copy instead: `load()` fills the copy and `store()` writes it back.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import numbers
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from gradwire.errors import ArrayError, UnsupportedOp

Array = npt.NDArray[Any]
Counts = Sequence[int] | npt.NDArray[np.integer[Any]]
REDUCE_OPS = ("sum", "mean", "min", "max", "prod")
# What other libraries call these ops, for the hint of an error.
_OTHER_NAMES = {"avg": "mean", "average": "mean", "add": "sum", "product": "prod", "mul": "prod"}
_HOST_MEMORY = (1, 3, 11)  # DLPack's kDLCPU, kDLCUDAHost and kDLROCMHost; the last two are pinned host memory
_OVERLAP_STEPS = 1000  # that the exact test for overlapping memory may take; after that it assumes an overlap


@runtime_checkable
class SupportsDLPack(Protocol):
    """An array of another library that supports DLPack: a torch or JAX array, for example."""

    def __dlpack__(self, *, stream: Any = None) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


@dataclass(frozen=True, slots=True, eq=False)  # compared and hashed by identity, as a key of the plan cache
class DType:
    """A row of the table: the storage type of an element (T), its accumulator type (A), and its reduce ops."""

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
        """Whether partial results have another type than elements: 16-bit floats accumulate in float32."""
        return self.storage != self.accumulator


_BFLOAT16 = "bfloat16"
_FLOAT = frozenset(REDUCE_OPS)
_INTEGER = frozenset({"sum", "min", "max", "prod"})  # the mean of integers is not an integer
_COMPLEX = frozenset({"sum", "mean", "prod"})  # complex numbers have no order


_OPS = {  # by dtype name; the order defines the codes on the wire
    **dict.fromkeys(("float16", _BFLOAT16, "float32", "float64"), _FLOAT),
    **dict.fromkeys(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"), _INTEGER),
    "bool": _INTEGER,  # sum is "or" and prod is "and", as NumPy's + and * on booleans
    **dict.fromkeys(("complex64", "complex128"), _COMPLEX),
}
DTYPES = tuple(_OPS)
_CODES = {name: code for code, name in enumerate(DTYPES, start=1)}


@functools.cache
def bfloat16() -> np.dtype[Any]:
    """Return NumPy's bfloat16. It needs ml_dtypes, which takes a megabyte, so that is imported on first use only."""
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def _new_row(storage: np.dtype[Any]) -> DType:
    name = storage.name
    accumulator = np.dtype(np.float32) if name in ("float16", _BFLOAT16) else storage
    return DType(name, _CODES[name], storage, accumulator, _OPS[name])


_TABLE = {np.dtype(name): _new_row(np.dtype(name)) for name in _OPS if name != _BFLOAT16}  # `_row` adds bfloat16 later


def dtype_of(array: Array) -> DType:
    """Return the table's row for an array. Raise `ArrayError` for other dtypes (objects, strings, big-endian)."""
    return _row(array.dtype)


def _row(dtype: np.dtype[Any]) -> DType:
    row = _TABLE.get(dtype)
    if row is not None and dtype.isnative:
        return row
    if dtype.name == _BFLOAT16 and dtype == bfloat16():
        return _TABLE.setdefault(dtype, _new_row(dtype))
    native = dtype if dtype.isnative else dtype.newbyteorder("=")
    if native is not dtype and native in _TABLE:
        raise ArrayError(f"dtype {dtype} does not have the native byte order: pass x.astype({native.name!r})")
    raise ArrayError(f"arrays of dtype {dtype} cannot be exchanged; supported dtypes: {', '.join(_OPS)}")


def dtype_name(code: int) -> str:
    """Return the name of the dtype with this code, for messages. Peers send the codes, so unknown ones are accepted."""
    return next((name for name, known in _CODES.items() if known == code), f"dtype {code}")


def dtype_by_name(name: str) -> DType:
    """Return the dtype with exactly this name; raise ValueError if there is none.

    For names that peers sent: NumPy would accept many other strings.
    """
    if name in _OPS:
        return parse_dtype(name)
    raise ValueError(f"there is no dtype {name[:50]!r}")


def parse_dtype(dtype: Any) -> DType:
    """Return the row for a dtype given by name or as a NumPy type, "bfloat16" included.

    >>> parse_dtype("bfloat16").accumulator
    dtype('float32')
    """
    if isinstance(dtype, str) and dtype == _BFLOAT16:
        return _row(bfloat16())
    if dtype is None:  # np.dtype(None) is float64
        raise ArrayError("None is not a dtype")
    try:
        parsed = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError) as error:
        raise ArrayError(f"{dtype!r} is not a dtype") from error
    return _row(parsed)


def check_reduction(op: Any, dtype: DType, operation: str) -> None:
    """Raise `UnsupportedOp` if the dtype does not support `op`, such as the mean of integers.

    `operation` is the name of the call that reduces.
    """
    if isinstance(op, str) and op in dtype.ops:
        return
    if not isinstance(op, str) or op not in REDUCE_OPS:
        name = str(op).lower().rpartition(".")[2]  # of an enumeration too: ReduceOp.AVG
        meant = difflib.get_close_matches(_OTHER_NAMES.get(name, name), REDUCE_OPS, 1, cutoff=0.85)
        hint = f"did you mean {meant[0]!r}? There are" if meant else "there are"
        raise UnsupportedOp(f"unknown reduce op {op!r}: {hint} {', '.join(REDUCE_OPS)}", operation=operation)
    hint = "; convert to a float type first" if op == "mean" else ""
    raise UnsupportedOp(f"op {op!r} has no meaning for {dtype.name}{hint}", operation=operation)


def as_array(x: Any) -> Array:
    """Return a NumPy array over the memory of x: an ndarray, a DLPack tensor in CPU memory, or any buffer."""
    if type(x) is np.ndarray:
        return x
    if isinstance(x, np.ma.MaskedArray):
        raise ArrayError("a masked array cannot be exchanged, its mask would be lost: pass x.data or x.filled()")
    if isinstance(x, np.ndarray):
        return x.view(np.ndarray)  # subclasses such as np.matrix change indexing and shapes
    if x is None or isinstance(x, (str, numbers.Number, np.generic)):
        raise ArrayError(
            f"expected an array, got {type(x).__name__}; broadcast_value and all_gather_values take plain values"
        )
    if isinstance(x, SupportsDLPack):
        return _from_dlpack(x)
    try:
        return np.asarray(memoryview(x))
    except (TypeError, ValueError, BufferError) as error:
        raise ArrayError(
            f"{type(x).__name__} is neither a NumPy array nor a DLPack tensor nor a buffer; pass numpy.asarray(x)"
        ) from error


def torch_objection(tensor: Any) -> str | None:
    """Return why a torch tensor's memory does not hold its values; None if it does.

    The check is needed because torch exports such tensors through DLPack without an error.
    """
    if type(tensor).__torch_dispatch__ is not sys.modules["torch"].Tensor.__torch_dispatch__:
        return "is a wrapper without memory: pass the wrapped tensors (of a DTensor, x.to_local() or x.full_tensor())"
    if tensor.is_conj() or tensor.is_neg():
        return "is a lazily conjugated or negated view: pass x.resolve_conj().resolve_neg()"
    if tensor._is_zerotensor():
        return "is a tensor of zeros without memory: pass torch.zeros_like(x)"
    in_memory = tensor.layout is sys.modules["torch"].strided and not tensor.is_meta
    if in_memory and tensor.numel() and tensor.data_ptr() == tensor.storage_offset() * tensor.element_size():
        return "has no memory: its storage was freed"
    return None


def _from_dlpack(x: SupportsDLPack) -> Array:
    torch = sys.modules.get("torch")
    try:
        objection = torch_objection(x) if torch is not None and isinstance(x, torch.Tensor) else None
        device, _ = x.__dlpack_device__() if objection is None else (0, 0)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ArrayError(f"{type(x).__name__} is not in memory that DLPack supports: {error}") from error
    if objection is not None:
        raise ArrayError(f"{type(x).__name__} {objection}")
    if device not in _HOST_MEMORY:
        raise ArrayError(f"{type(x).__name__} is not in CPU memory (DLPack device type {device}); move it there first")
    try:
        if str(getattr(x, "dtype", "")) == "torch.bfloat16":  # NumPy cannot import bfloat16 through DLPack
            if x.requires_grad:  # type: ignore[attr-defined]  # the int16 view below would not raise this error
                raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
            return np.from_dlpack(x.view(sys.modules["torch"].int16)).view(bfloat16())  # type: ignore[attr-defined]
        return np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # bfloat16 of JAX: np.asarray works
            array = np.asarray(x).view()
            array.flags.writeable = False  # it may be a copy, and writes to it would be lost
            if array.dtype.name in _OPS:
                return array
        raise ArrayError(f"{type(x).__name__} cannot be viewed through DLPack: {error}") from error


@dataclass(slots=True)
class View:
    """The elements of a user's array, flat and contiguous: in the user's memory, or in a private copy if it is strided.

    The copy is made by `load()` and not earlier: a queued operation must use the values at the time when it runs.
    """

    flat: Array
    array: Array
    dtype: DType
    private: bool

    def load(self) -> Array:
        """Return `flat` with the current elements."""
        if self.private:
            np.copyto(self.flat.reshape(self.array.shape), self.array)
        return self.flat

    def store(self) -> None:
        """Write the result to the user's memory, if `flat` is a private copy."""
        if self.private:
            np.copyto(self.array, self.flat.reshape(self.array.shape))


def view(x: Any, *, writable: bool, instead: str = "pass a copy") -> View:
    """Return the typed view of x. Raise `ArrayError` if x is read-only but must be `writable`.

    The error says what to do `instead`.
    """
    array = as_array(x)
    dtype = dtype_of(array)
    flags = array.flags
    if writable and not flags.writeable:
        raise ArrayError(f"the array is read-only{_read_only_note(x)}: {instead}")
    if flags.c_contiguous and flags.aligned:
        return View(array.reshape(-1), array, dtype, False)
    return View(np.empty(array.size, dtype.storage), array, dtype, True)


def _read_only_note(x: Any) -> str:
    """Explain why x may be read-only: old libraries, and old versions of NumPy, have read-only DLPack arrays only."""
    if isinstance(x, np.ndarray) or not isinstance(x, SupportsDLPack):
        return ""
    return " through DLPack (a NumPy view of it, such as x.numpy(), may be writable)"


def overlap(a: View, b: View) -> bool:
    """Return whether the arrays of two views share memory. The result is also True if the exact test takes too long."""
    return np.may_share_memory(
        a.array,
        b.array,
        max_work=_OVERLAP_STEPS,  # type: ignore[arg-type]  # NumPy's stubs allow -1 and 0 only
    )


def same_place(a: View, b: View) -> bool:
    """Return whether two views of equal length have the same elements in the same order, in the same memory."""
    one, other = a.array.__array_interface__, b.array.__array_interface__
    flat = not a.private and not b.private
    same_layout = flat or (one["shape"], one["strides"]) == (other["shape"], other["strides"])
    return bool(one["data"][0] == other["data"][0] and same_layout)


def raw(flat: Array) -> memoryview:
    """Return the bytes of a flat array of any dtype, without a copy."""
    return memoryview(flat.view(np.uint8))  # type: ignore[arg-type]


def number_as_array(x: Any) -> Array:
    """Return a number as an array of one element.

    Python's numbers have 64 bits (complex numbers 128). NumPy's numbers keep their type.
    """
    if isinstance(x, (bool, float, complex, np.generic)):
        return np.array([x])
    if not isinstance(x, int):
        raise ArrayError(f"{x!r} is a {type(x).__name__}, which has no dtype: pass float(x)")
    try:
        return np.array([x], dtype=np.int64)
    except OverflowError as error:
        raise ArrayError(f"{x!r} does not fit into a 64-bit integer") from error


def describe(array: Array) -> str:
    """Return an array's dtype and shape in the form of error messages: float32[3, 4]."""
    return shape_text(array.dtype.name, array.shape)


def shape_text(dtype: str, shape: Iterable[object]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"
