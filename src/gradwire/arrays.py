"""Typed views of user arrays (NumPy, DLPack, buffers, numbers), and the table of dtypes.

A `View` is a flat, contiguous NumPy array over the user's memory where that is possible, and over a private copy
where it is not (strided arrays): `load()` fills it, `store()` writes it back. Nothing here communicates.
"""

from __future__ import annotations

import contextlib
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
_HOST_MEMORY = (1, 3, 11)  # DLPack's kDLCPU, kDLCUDAHost and kDLROCMHost: pinned memory is memory
_WORK = 1000  # steps that the exact test for overlapping memory may take before it assumes the worst


@runtime_checkable
class SupportsDLPack(Protocol):
    """An array of another library: CPU tensors of torch, JAX, CuPy's host arrays …"""

    def __dlpack__(self, *, stream: Any = None) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


@dataclass(frozen=True, slots=True, eq=False)  # each is one object, told apart by identity: plans are looked up by it
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


_BFLOAT16 = "bfloat16"
_FLOAT = frozenset(REDUCE_OPS)
_INTEGER = frozenset({"sum", "min", "max", "prod"})  # the mean of integers is not an integer
_COMPLEX = frozenset({"sum", "mean", "prod"})  # complex numbers have no order


_OPS = {  # by name, in the order of their codes
    **dict.fromkeys(("float16", _BFLOAT16, "float32", "float64"), _FLOAT),
    **dict.fromkeys(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"), _INTEGER),
    "bool": _INTEGER,  # sum is "or", prod is "and", as NumPy's + and * on booleans
    **dict.fromkeys(("complex64", "complex128"), _COMPLEX),
}
DTYPES = tuple(_OPS)
_CODES = {name: code for code, name in enumerate(DTYPES, start=1)}  # on the wire


@functools.cache
def bfloat16() -> np.dtype[Any]:
    """NumPy knows it from ml_dtypes, which is loaded when somebody has such elements: it takes a megabyte."""
    import ml_dtypes

    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found


def _made(storage: np.dtype[Any]) -> DType:
    name = storage.name
    accumulator = np.dtype(np.float32) if name in ("float16", _BFLOAT16) else storage
    return DType(name, _CODES[name], storage, accumulator, _OPS[name])


_TABLE = {np.dtype(name): _made(np.dtype(name)) for name in _OPS if name != _BFLOAT16}  # which comes when it is met


def dtype_of(array: Array) -> DType:
    """The table's row for an array, or `ArrayError` for what cannot travel (objects, strings, big-endian)."""
    return _row(array.dtype)


def _row(dtype: np.dtype[Any]) -> DType:
    row = _TABLE.get(dtype)
    if row is not None and dtype.isnative:
        return row
    if dtype.name == _BFLOAT16 and dtype == bfloat16():
        return _TABLE.setdefault(dtype, _made(dtype))
    native = dtype if dtype.isnative else dtype.newbyteorder("=")
    if native is not dtype and native in _TABLE:
        raise ArrayError(f"{dtype} is of foreign byte order: pass x.astype({native.name!r})")
    raise ArrayError(f"arrays of dtype {dtype} cannot be exchanged; these can: {', '.join(_OPS)}")


def dtype_named(code: int) -> str:
    """The name of the dtype with this code, for messages; codes come from peers, so any number will do."""
    return next((name for name, one in _CODES.items() if one == code), f"dtype {code}")


def dtype_called(name: str) -> DType:
    """The dtype of exactly this name; ValueError if there is none. For names from peers: NumPy reads much into them."""
    if name in _OPS:
        return parse_dtype(name)
    raise ValueError(f"there is no dtype {name[:50]!r}")


def parse_dtype(dtype: Any) -> DType:
    """A dtype by name or NumPy type, "bfloat16" included.

    >>> parse_dtype("bfloat16").accumulator
    dtype('float32')
    """
    if isinstance(dtype, str) and dtype == _BFLOAT16:
        return _row(bfloat16())
    if dtype is None:  # which NumPy takes for float64
        raise ArrayError("None is not a dtype")
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError) as error:
        raise ArrayError(f"{dtype!r} is not a dtype") from error
    return _row(found)


def check_reduction(op: Any, dtype: DType) -> None:
    """Refuse what has no meaning (the mean of integers, the maximum of complex numbers) before anything is sent."""
    if isinstance(op, str) and op in dtype.ops:
        return
    if not isinstance(op, str) or op not in REDUCE_OPS:
        raise UnsupportedOp(f"unknown reduce op {op!r}; there are {', '.join(REDUCE_OPS)}", operation=str(op))
    hint = "; convert to a float type first" if op == "mean" else ""
    raise UnsupportedOp(f"op {op!r} has no meaning for {dtype.name}{hint}", operation=op)


def as_array(x: Any) -> Array:
    """A NumPy array over the memory of x: an ndarray itself, a DLPack tensor on the CPU, or any buffer."""
    if type(x) is np.ndarray:
        return x
    if isinstance(x, np.ma.MaskedArray):
        raise ArrayError("a masked array cannot be exchanged, its mask would be lost: pass x.data or x.filled()")
    if isinstance(x, np.ndarray):
        return x.view(np.ndarray)  # np.matrix and others bend indexing and shapes
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
    """Why a torch tensor's memory does not hold its values; None if it does. Through DLPack torch shows it anyway."""
    if type(tensor).__torch_dispatch__ is not sys.modules["torch"].Tensor.__torch_dispatch__:
        return "only stands for others and has no memory: pass those (of a DTensor, x.to_local() or x.full_tensor())"
    if tensor.is_conj() or tensor.is_neg():
        return "is a view that negates on reading: pass x.resolve_conj().resolve_neg()"
    if tensor._is_zerotensor():
        return "stands for zeros that are not in memory: pass torch.zeros_like(x)"
    in_memory = tensor.layout is sys.modules["torch"].strided and not tensor.is_meta
    if in_memory and tensor.numel() and tensor.data_ptr() == tensor.storage_offset() * tensor.element_size():
        return "has no memory at the moment: its storage was freed"
    return None


def _from_dlpack(x: SupportsDLPack) -> Array:
    torch = sys.modules.get("torch")
    try:
        objection = torch_objection(x) if torch is not None and isinstance(x, torch.Tensor) else None
        device, _ = x.__dlpack_device__() if objection is None else (0, 0)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ArrayError(f"{type(x).__name__} is in no memory that DLPack knows: {error}") from error
    if objection is not None:
        raise ArrayError(f"{type(x).__name__} {objection}")
    if device not in _HOST_MEMORY:
        raise ArrayError(f"{type(x).__name__} is not in CPU memory (DLPack device type {device}); move it there first")
    try:
        if str(getattr(x, "dtype", "")) == "torch.bfloat16":  # which NumPy does not know in DLPack
            if x.requires_grad:  # type: ignore[attr-defined]  # its view would not say so
                raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
            return np.from_dlpack(x.view(sys.modules["torch"].int16)).view(bfloat16())  # type: ignore[attr-defined]
        return np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # JAX shows NumPy its bfloat16 in another way
            array = np.asarray(x).view()
            array.flags.writeable = False  # it may be a copy
            if array.dtype.name in _OPS:
                return array
        raise ArrayError(f"{type(x).__name__} cannot be viewed through DLPack: {error}") from error


@dataclass(slots=True)
class View:
    """Flat contiguous elements of a user's array: its own memory, or a private copy where that is not flat.

    What waits in a queue must see the array as it is when its turn comes, so the copy is made by `load()`.
    """

    flat: Array
    array: Array
    dtype: DType
    private: bool

    def load(self) -> Array:
        """`flat`, with the elements as they are now."""
        if self.private:
            np.copyto(self.flat.reshape(self.array.shape), self.array)
        return self.flat

    def store(self) -> None:
        """Bring the result into the user's memory; nothing to do where `flat` already is that memory."""
        if self.private:
            np.copyto(self.array, self.flat.reshape(self.array.shape))


def view(x: Any, *, writable: bool, instead: str = "pass a copy") -> View:
    """The typed view of x. A read-only x is refused where it would be written, saying what to do instead."""
    array = as_array(x)
    dtype = dtype_of(array)
    flags = array.flags
    if writable and not flags.writeable:
        raise ArrayError(f"the array is read-only{_through(x)}: {instead}")
    if flags.c_contiguous and flags.aligned:
        return View(array.reshape(-1), array, dtype, False)
    return View(np.empty(array.size, dtype.storage), array, dtype, True)


def _through(x: Any) -> str:
    """Old tensors, and old versions of NumPy, know no DLPack that can be written to."""
    if isinstance(x, np.ndarray) or not isinstance(x, SupportsDLPack):
        return ""
    return " as NumPy sees it through DLPack (a NumPy view of it, say x.numpy(), may not be)"


def overlap(a: View, b: View) -> bool:
    """Whether two views' arrays have memory in common (or it is too hard to tell)."""
    return np.may_share_memory(a.array, b.array, max_work=_WORK)  # type: ignore[arg-type]  # its stubs know -1 and 0


def same_place(a: View, b: View) -> bool:
    """Whether two views are of the same elements in the same order; both have equally many."""
    one, other = a.array.__array_interface__, b.array.__array_interface__
    flat = not a.private and not b.private
    same_layout = flat or (one["shape"], one["strides"]) == (other["shape"], other["strides"])
    return bool(one["data"][0] == other["data"][0] and same_layout)


def raw(flat: Array) -> memoryview:
    """The bytes of a flat array, whatever its dtype."""
    return memoryview(flat.view(np.uint8))  # type: ignore[arg-type]


def number_as_array(x: Any) -> Array:
    """A number as an array of one element: Python's own of 64 bits (complex: 128), NumPy's of their type."""
    if isinstance(x, (bool, float, complex, np.generic)):
        return np.array([x])
    if not isinstance(x, int):
        raise ArrayError(f"{x!r} is a {type(x).__name__}, which has no dtype: pass float(x)")
    try:
        return np.array([x], dtype=np.int64)
    except OverflowError as error:
        raise ArrayError(f"{x!r} does not fit into a 64-bit integer") from error


def describe(array: Array) -> str:
    """An array as error messages show it: float32[3, 4]."""
    return shape_text(array.dtype.name, array.shape)


def shape_text(dtype: str, shape: Iterable[object]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"
