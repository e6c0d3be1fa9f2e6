"""The base class of compressions that send every element in fewer bits, and their exchange.

The bucket is divided into one part per rank.

    1  Each rank adds its residual to its values, rounds the sum, and keeps the rounding error as the new residual.
    2  all_to_all: each rank receives all ranks' values of its own part.
    3  It adds them in rank order without rounding, adds the rounding error of its earlier sums, rounds the result, and
       keeps the new rounding error.
    4  all_gather: every rank receives and decodes the same bytes.

Each rank sends 2·(n−1)/n of the encoded bucket, as in a bandwidth-optimal all-reduce. A bucket is processed in chunks
that fit into the CPU caches; each chunk is encoded on its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from gradwire.arrays import Array
from gradwire.operations import Exchange, Shape
from gradwire.training.compression.base import BYTE, Compression, Task

CHUNK = 1 << 15  # elements


class Chunk(NamedTuple):
    """Some elements of a part."""

    first: int  # elements first … last - 1 of the bucket
    last: int
    begin: int  # bytes begin … end - 1 of the encoded part
    end: int


class Part(NamedTuple):
    """The elements that one rank sums."""

    first: int  # elements first … first + size - 1 of the bucket
    size: int
    begin: int  # bytes begin … begin + nbytes - 1 of the encoded bucket
    nbytes: int
    chunks: tuple[Chunk, ...]


class Rounding(Compression):
    """Sends every element in fewer bits. Subclasses define the encoding of a chunk."""

    grain = 1  # elements that must stay in one chunk

    def _nbytes(self, count: int) -> int:
        """Return the number of bytes of `count` elements that are encoded together."""
        raise NotImplementedError

    def _encode(self, x: Array, wire: Array, spare: Array) -> None:
        """Encode x into `wire`, and leave the rounding error in x. `spare` is scratch memory of x's size and dtype."""
        raise NotImplementedError

    def _decode(self, wire: Array, out: Array) -> None:
        """Decode `wire` into `out`, with the same bits on every machine."""
        raise NotImplementedError

    def _reduce(self, exchange: Exchange, task: Task) -> None:
        parts = self._parts(task, exchange.size)
        mine = parts[exchange.rank]
        total = parts[-1].begin + parts[-1].nbytes
        wire = self._scratch_array("wire", total, np.uint8)
        received = self._scratch_array("received", exchange.size * mine.nbytes, np.uint8)
        sums = self._scratch_array("sums", mine.nbytes, np.uint8)
        sizes = tuple(part.nbytes for part in parts)

        self._encode_all(task, parts, wire)
        exchange(Shape("all_to_all", BYTE, sizes * exchange.size, call=task.call), wire, received)
        self._fold(task, exchange, mine, received.reshape(exchange.size, mine.nbytes), sums)
        exchange(Shape("all_gather", BYTE, sizes, call=task.call), sums, wire)
        self._decode_all(task, parts, wire)

    def _parts(self, task: Task, size: int) -> tuple[Part, ...]:
        known: tuple[Part, ...] = task.saved.get("parts", ())
        if len(known) != size:
            known = task.saved["parts"] = tuple(self._split(task.flat.size, size))
        return known

    def _split(self, count: int, size: int) -> Iterator[Part]:
        share = -(-count // (size * self.grain)) * self.grain
        longest = max(1, CHUNK // self.grain) * self.grain
        begin = 0
        for rank in range(size):
            first, last = min(rank * share, count), min((rank + 1) * share, count)
            chunks, at = [], 0
            for start in range(first, last, longest):
                stop = min(start + longest, last)
                chunks.append(Chunk(start, stop, at, at + self._nbytes(stop - start)))
                at = chunks[-1].end
            yield Part(first, last - first, begin, at, tuple(chunks))
            begin += at

    def _encode_all(self, task: Task, parts: tuple[Part, ...], wire: Array) -> None:
        flat, scale = task.flat, task.work.type(task.scale)
        kept = self._saved_array(task, "residual", flat.size)
        spare = self._scratch_array("spare", CHUNK + self.grain, task.work)
        for part in parts:
            for first, last, begin, end in part.chunks:
                x, other = kept[first:last], spare[: last - first]
                np.multiply(flat[first:last].astype(task.work, copy=False), scale, out=other)
                np.add(x, other, out=x)
                self._encode(x, wire[part.begin + begin : part.begin + end], other)

    def _fold(self, task: Task, exchange: Exchange, mine: Part, received: Array, sums: Array) -> None:
        kept = self._saved_array(task, "owed", mine.size)
        spare = self._scratch_array("spare", CHUNK + self.grain, task.work)
        for first, last, begin, end in mine.chunks:
            x, other = kept[first - mine.first : last - mine.first], spare[: last - first]
            total = self._scratch_array("total", last - first, task.work)
            self._decode(received[0, begin:end], total)
            for source in range(1, exchange.size):
                self._decode(received[source, begin:end], other)
                np.add(total, other, out=total)
            np.add(x, total, out=x)
            self._encode(x, sums[begin:end], other)

    def _decode_all(self, task: Task, parts: tuple[Part, ...], wire: Array) -> None:
        flat = task.flat
        spare = self._scratch_array("spare", CHUNK + self.grain, task.work)
        for part in parts:
            for first, last, begin, end in part.chunks:
                out = flat[first:last] if flat.dtype == task.work else spare[: last - first]
                self._decode(wire[part.begin + begin : part.begin + end], out)
                if flat.dtype != task.work:
                    np.copyto(flat[first:last], out, casting="same_kind")
