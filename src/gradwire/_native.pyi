"""What native/module.cpp and native/module_kernels.cpp define."""

from collections.abc import Sequence
from typing import Any

class Program:
    def __init__(
        self,
        rounds: list[tuple[tuple[Any, ...], ...]],
        lengths: Sequence[int],
        in_home: Sequence[int],
        out_home: Sequence[int],
        scratch_index: Sequence[int],
        tile: int,
        tiles: int,
        stride: int,
        in_flight: int,
        homeless: int,
        dtype: int,
        op: int,
        divisor: int,
        folds_last: bool,
        item: int,
        /,
    ) -> None: ...

class Links:
    def __init__(self, size: int, spin: float, /) -> None: ...
    def socket(self, peer: int, descriptor: int, /) -> None: ...
    def alarm(self, descriptor: int, /) -> None: ...
    def write_log(self, memory: int, nbytes: int, readers: int, /) -> None: ...
    def read_log(self, peer: int, memory: int, nbytes: int, reader: int, /) -> None: ...
    def drained(self) -> bool: ...

class Sheet:
    sequence: int
    fingerprint: int
    def __init__(self, job: int, generation: int, group: int, rank: int, /) -> None: ...

class Run:
    def __init__(self, program: Program, links: Links, sheet: Sheet, x: int, out: int, /) -> None: ...
    def advance(self, seconds: float, /) -> int: ...
    @property
    def culprit(self) -> int: ...
    @property
    def heard(self) -> bytes: ...

_Buffer = Any  # contiguous bytes
_Terms = Sequence[tuple[_Buffer, bool]]  # and whether they are partial results

class _Kernels:
    FLUSHES: int
    UPWARDS: int
    def builds(self) -> list[str]: ...
    def fold(self, build: str, dtype: int, op: int, result: _Buffer, terms: _Terms, /) -> None: ...
    def finish(self, build: str, dtype: int, op: int, result: _Buffer, partial: _Buffer, divisor: int, /) -> None: ...
    def reduce(self, build: str, dtype: int, op: int, result: _Buffer, terms: _Terms, divisor: int, /) -> None: ...
    def float_state(self) -> int: ...
    def set_float_state(self, state: int, /) -> None: ...

kernels: _Kernels  # a submodule
