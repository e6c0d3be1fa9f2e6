"""Compressions that write every element in fewer bits, and how their results are exchanged.

    1  a rank adds what it kept to its values, rounds them, and keeps the difference
    2  all_to_all: each rank gets everybody's part of the bucket that is its own
    3  it folds them in rank order, unrounded; adds what it kept of earlier sums, rounds, and keeps the difference
    4  all_gather: every rank decodes the same bytes

Per rank that is 2·(n−1)/n of the encoded bucket, as with the best all-reduce. Buckets are gone through in chunks that
stay in the cache; a chunk is encoded by itself.
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
    """Some elements of a part of the bucket, and where their bytes lie in the encoded part."""

    first: int
    last: int
    begin: int
    end: int


class Part(NamedTuple):
    """What one rank folds: elements from `first` on, and their bytes in the encoded bucket."""

    first: int
    size: int
    begin: int
    nbytes: int
    chunks: tuple[Chunk, ...]


class Rounding(Compression):
    """Every element, in fewer bits. Subclasses say how a chunk is written."""

    grain = 1  # elements that stay together

    def _nbytes(self, count: int) -> int:
        """Of so many elements, encoded together."""
        raise NotImplementedError

    def _encode(self, x: Array, wire: Array, spare: Array) -> None:
        """Write x into these bytes, and leave in x what was not written; `spare` is of x's kind."""
        raise NotImplementedError

    def _decode(self, wire: Array, out: Array) -> None:
        """What these bytes say: the same on every machine."""
        raise NotImplementedError

    def _reduce(self, exchange: Exchange, task: Task) -> None:
        parts = self._parts(task, exchange.size)
        mine = parts[exchange.rank]
        total = parts[-1].begin + parts[-1].nbytes
        wire = self._room("wire", total, np.uint8)
        received = self._room("received", exchange.size * mine.nbytes, np.uint8)
        sums = self._room("sums", mine.nbytes, np.uint8)
        sizes = tuple(part.nbytes for part in parts)

        self._encode_all(task, parts, wire)
        exchange(Shape("all_to_all", BYTE, sizes * exchange.size, call=task.call), wire, received)
        self._fold(task, exchange, mine, received.reshape(exchange.size, mine.nbytes), sums)
        exchange(Shape("all_gather", BYTE, sizes, call=task.call), sums, wire)
        self._decode_all(task, parts, wire)

    def _parts(self, task: Task, size: int) -> tuple[Part, ...]:
        known: tuple[Part, ...] = task.kept.get("parts", ())
        if len(known) != size:
            known = task.kept["parts"] = tuple(self._split(task.flat.size, size))
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
        kept = self._remembered(task, "residual", flat.size)
        spare = self._room("spare", CHUNK + self.grain, task.work)
        for part in parts:
            for first, last, begin, end in part.chunks:
                x, other = kept[first:last], spare[: last - first]
                np.multiply(flat[first:last].astype(task.work, copy=False), scale, out=other)
                np.add(x, other, out=x)
                self._encode(x, wire[part.begin + begin : part.begin + end], other)

    def _fold(self, task: Task, exchange: Exchange, mine: Part, received: Array, sums: Array) -> None:
        kept = self._remembered(task, "owed", mine.size)
        spare = self._room("spare", CHUNK + self.grain, task.work)
        for first, last, begin, end in mine.chunks:
            x, other = kept[first - mine.first : last - mine.first], spare[: last - first]
            total = self._room("total", last - first, task.work)
            self._decode(received[0, begin:end], total)
            for source in range(1, exchange.size):
                self._decode(received[source, begin:end], other)
                np.add(total, other, out=total)
            np.add(x, total, out=x)
            self._encode(x, sums[begin:end], other)

    def _decode_all(self, task: Task, parts: tuple[Part, ...], wire: Array) -> None:
        flat = task.flat
        spare = self._room("spare", CHUNK + self.grain, task.work)
        for part in parts:
            for first, last, begin, end in part.chunks:
                out = flat[first:last] if flat.dtype == task.work else spare[: last - first]
                self._decode(wire[part.begin + begin : part.begin + end], out)
                if flat.dtype != task.work:
                    np.copyto(flat[first:last], out, casting="same_kind")
