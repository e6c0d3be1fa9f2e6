"""Define the cases that `gradwire bench` measures.

Sizes and bandwidths are defined as in nccl-tests, so that figures can be compared. The size of a case is the size of
the largest buffer of a rank: the whole result of all_gather, the whole input of reduce_scatter, everything that a rank
sends in all_to_all. `count` is the number of elements in one part: in these three collectives the buffer has one part
per rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

ROOT = 0
UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
ITEMSIZE = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}


@dataclass(frozen=True)
class Collective:
    """The input and the result of a rank, in parts of `count` elements. "n" means one part per rank."""

    puts: str  # the input: "1", "n", or "" for nothing
    gets: str  # the result
    only_root_puts: bool = False
    only_root_gets: bool = False
    reduces: bool = False
    in_place: bool = False

    @property
    def parts(self) -> str:
        return "n" if "n" in (self.puts, self.gets) else self.puts


COLLECTIVES = {
    "all_reduce": Collective("1", "1", reduces=True, in_place=True),
    "broadcast": Collective("1", "1", only_root_puts=True, in_place=True),
    "reduce": Collective("1", "1", only_root_gets=True, reduces=True),
    "all_gather": Collective("1", "n"),
    "reduce_scatter": Collective("n", "1", reduces=True),
    "gather": Collective("1", "n", only_root_gets=True),
    "scatter": Collective("n", "1", only_root_puts=True),
    "all_to_all": Collective("n", "n"),
    "sendrecv": Collective("1", "1"),  # sends to the next rank and receives from the previous one
    "barrier": Collective("", ""),
}


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    collective: str
    dtype: str
    op: str
    count: int
    size: int  # ranks

    @property
    def kind(self) -> Collective:
        return COLLECTIVES[self.collective]

    @property
    def nbytes(self) -> int:
        return self._elements(self.kind.parts) * ITEMSIZE[self.dtype]

    def puts(self, rank: int) -> int:
        """Return the number of elements in this rank's input."""
        return 0 if self.kind.only_root_puts and rank != ROOT else self._elements(self.kind.puts)

    def gets(self, rank: int) -> int:
        """Return the number of elements in this rank's result."""
        return 0 if self.kind.only_root_gets and rank != ROOT else self._elements(self.kind.gets)

    def _elements(self, parts: str) -> int:
        return self.count * {"": 0, "1": 1, "n": self.size}[parts]

    @property
    def bus_factor(self) -> float:
        """Return the factor from the algorithm bandwidth to the bandwidth of the busiest link, as in nccl-tests."""
        n = self.size
        if self.collective == "all_reduce":
            return 2 * (n - 1) / n
        return (n - 1) / n if self.kind.parts == "n" else 1.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def case(collective: str, dtype: str, op: str, nbytes: int, size: int) -> Case:
    """Return the largest case of at most `nbytes` bytes, but with at least one element in each part."""
    kind = COLLECTIVES[collective]
    parts = {"": 0, "1": 1, "n": size}[kind.parts]
    count = max(1, nbytes // (ITEMSIZE[dtype] * parts)) if parts else 0
    return Case(collective, dtype, op if kind.reduces else "none", count, size)


def cases(collectives: list[str], dtype: str, op: str, sizes: list[int], ranks: int) -> Iterator[Case]:
    """Yield all cases in order, each once: a barrier has no size, and small sizes may round to the same case."""
    for collective in collectives:
        yield from dict.fromkeys(case(collective, dtype, op, nbytes, ranks) for nbytes in sizes)


def parse_size(text: str) -> int:
    """Return the number of bytes that a text names.

    >>> parse_size("64Ki"), parse_size("8"), parse_size("1 MiB")
    (65536, 8, 1048576)
    """
    found = re.fullmatch(r"(\d+)\s*(?:(Ki|Mi|Gi|)B?)", text.strip())
    if not found or not int(found[1]):
        raise ValueError(f"{text.strip()!r} is not a size like 8, 64Ki, 1Mi or 1Gi")
    return int(found[1]) * UNITS[found[2]]


def parse_sizes(text: str) -> list[int]:
    """Parse sizes separated by commas.

    >>> parse_sizes("8,4Ki")
    [8, 4096]
    """
    return [parse_size(word) for word in text.split(",")]


def steps(least: int, most: int, factor: int) -> list[int]:
    """Return the sizes from `least` to `most` that grow by `factor`.

    >>> steps(8, 1024, 4)
    [8, 32, 128, 512]
    """
    sizes = []
    while least <= most:
        sizes.append(least)
        least *= factor
    return sizes


def human(nbytes: int) -> str:
    """Format a number of bytes for people.

    >>> human(65536), human(12)
    ('64 Ki', '12')
    """
    for unit in ("Gi", "Mi", "Ki"):
        if nbytes and nbytes % UNITS[unit] == 0:
            return f"{nbytes // UNITS[unit]} {unit}"
    return str(nbytes)
