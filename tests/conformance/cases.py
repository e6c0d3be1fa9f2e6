"""Describes one call of a collective, which can be drawn at random, made on any rank and compared with the oracle."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from conformance import oracle
from gradwire.arrays import Array, DType, parse_dtype
from gradwire.collectives import REDUCING
from gradwire.executors.plan import ragged_bounds
from gradwire.group import Group
from gradwire.group.stream import Stream
from gradwire.topology import Topology
from support.array_bits import assert_same

HALVES = ("float16", "bfloat16")
FLOATS = (*HALVES, "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
COMPLEX = ("complex64", "complex128")
DTYPES = (*FLOATS, *INTEGERS, "bool", *COMPLEX)
LAYOUTS = ("flat", "strided", "reversed", "fortran", "unaligned")
RAGGED = ("all_gather", "gather")
SPLIT = ("reduce_scatter", "scatter")


@dataclass(frozen=True)
class Case:
    """A call. `rows` are lengths of the first axis, by rank: of the input for a gather, of the result for a scatter.

    If all ranks have the same length, `rows` is one number. For all_to_all it has n² numbers, by sender and receiver.
    """

    collective: str
    dtype: str
    rows: tuple[int, ...]
    op: str = "sum"
    root: int = 0
    algorithm: str = "auto"
    tail: tuple[int, ...] = ()
    layout: str = "flat"
    fill: str = "mixed"
    out: bool = False
    pass_counts: bool = field(default=True)  # whether the call has counts=, if it may be without

    @property
    def kind(self) -> DType:
        return parse_dtype(self.dtype)

    def length(self, rank: int, size: int) -> int:
        """Return the length of the first axis of a rank's x."""
        if self.collective == "all_to_all":
            return sum(self.rows[rank * size : (rank + 1) * size])
        if self.collective in RAGGED:
            return self.rows[rank]
        return sum(self.rows)

    def inputs(self, size: int) -> list[Array]:
        """Return the x of each rank. The values are the same on every machine."""
        return [self.input(rank, size) for rank in range(size)]

    def input(self, rank: int, size: int) -> Array:
        generator = np.random.default_rng([zlib.crc32(repr(self).encode()), rank])
        with np.errstate(all="ignore"):
            values = filled(generator, self.kind, self.fill, (self.length(rank, size), *self.tail))
        return laid_out(values, self.layout)

    def call(self, on: Group | Stream, x: Array | None, rank: int, size: int) -> Any:
        """Make the call. A stream returns its work."""
        named: dict[str, Any] = {"algorithm": self.algorithm}
        if self.collective in REDUCING:
            named["op"] = self.op
        if self.collective in ("broadcast", "reduce", "gather", "scatter"):
            named["root"] = self.root
        if self.collective in SPLIT and self.pass_counts:
            named["counts"] = self.rows
        if self.collective == "all_to_all" and self.pass_counts:
            named["send_counts"] = self.rows[rank * size : (rank + 1) * size]
            named["recv_counts"] = self.rows[rank::size]
        if self.out and self.collective != "broadcast":
            rows = self._result_rows(rank, size)
            named["out"] = laid_out(np.zeros((rows, *self.tail), self.kind.storage), self.layout)
        return getattr(on, self.collective)(x, **named)

    def _result_rows(self, rank: int, size: int) -> int:
        """Return the length of the first axis of a rank's result."""
        if self.collective == "all_to_all":
            return sum(self.rows[rank::size])
        return self.rows[rank] if self.collective in SPLIT else sum(self.rows)

    def expected(self, inputs: Sequence[Array], topology: Topology, inside: str) -> list[Array | None]:
        """Return the expected result on each rank."""
        size = topology.size
        flats = [np.ascontiguousarray(x).reshape(-1) for x in inputs]
        width = int(np.prod(self.tail, dtype=int))
        match self.collective:
            case "all_reduce" | "reduce":
                total = oracle.reduced(
                    self.collective, flats, self.op, self.algorithm, topology, root=self.root, inside=inside
                )
                shaped = total.reshape(inputs[0].shape)
                return [shaped if self.collective == "all_reduce" or r == self.root else None for r in range(size)]
            case "broadcast":
                return [np.ascontiguousarray(inputs[self.root])] * size
            case "all_gather" | "gather":
                joined = np.concatenate(inputs)
                return [joined if self.collective == "all_gather" or r == self.root else None for r in range(size)]
            case "reduce_scatter":
                counts = [rows * width for rows in self.rows]
                total = oracle.reduced(
                    self.collective, flats, self.op, self.algorithm, topology, counts=counts, inside=inside
                )
                return list(self._parts(total.reshape(inputs[0].shape)))
            case "scatter":
                return list(self._parts(inputs[self.root]))
        bounds = [ragged_bounds(self.rows[r * size : (r + 1) * size]) for r in range(size)]
        return [
            np.concatenate([x[bounds[r][to] : bounds[r][to + 1]] for r, x in enumerate(inputs)]) for to in range(size)
        ]

    def _parts(self, whole: Array) -> list[Array]:
        return [np.ascontiguousarray(whole[a:b]) for a, b in pairwise(ragged_bounds(self.rows))]

    def check(self, inputs: Sequence[Array], results: Sequence[Any], topology: Topology, inside: str) -> None:
        """Compare the results of all ranks with the expected ones. `inside` is the transport inside a host."""
        for rank, (result, expected) in enumerate(zip(results, self.expected(inputs, topology, inside), strict=True)):
            assert_same(result, expected, f"rank {rank} of {topology.hosts}, {self}")


def filled(generator: np.random.Generator, dtype: DType, fill: str, shape: tuple[int, ...]) -> Array:
    """Return random elements: small whole numbers with exact sums, mixed numbers, or mixed with special values."""
    storage = dtype.storage
    if dtype.name == "bool":
        return generator.random(shape) < 0.5
    if storage.kind in "iu":
        info = np.iinfo(storage)
        low, high = (info.min, info.max) if fill != "exact" else (0, 3)
        return generator.integers(low, high, shape, storage, endpoint=True)
    if fill == "exact":
        return generator.integers(-4, 4, shape, endpoint=True).astype(storage)
    values = generator.normal(size=shape) * 2.0 ** generator.integers(-3, 3, shape)
    if fill == "special":
        special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, *_extremes(dtype)])
        values = np.where(generator.random(shape) < 0.6, generator.choice(special, shape), values)
    if storage.kind == "c":
        return np.asarray(values + 1j * generator.normal(size=shape)).astype(storage)
    return values.astype(storage)


def _extremes(dtype: DType) -> list[float]:
    single = np.finfo(np.float32)  # bfloat16 has the same exponents; in float16 these values become infinite
    return [float(single.max), -float(single.max), float(single.smallest_subnormal), 6e-8, -6e-8]


def laid_out(values: Array, layout: str) -> Array:
    """Return the same elements in memory with another layout."""
    if layout == "strided":
        result = np.zeros((*values.shape[:-1], values.shape[-1] * 2), values.dtype)[..., ::2]
    elif layout == "reversed":
        result = np.zeros_like(values)[::-1]
    elif layout == "fortran":
        result = np.zeros_like(values, order="F")
    elif layout == "unaligned":
        memory = np.zeros(values.nbytes + 1, np.uint8)
        result = memory[1:].view(values.dtype).reshape(values.shape)
    else:
        return values
    result[...] = values
    return result
