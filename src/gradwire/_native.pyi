"""What native/module.cpp and native/module_kernels.cpp define."""

from collections.abc import Callable, Sequence
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
        out_count: int,
        one_shot: bool,
        mirrored: bool,
        /,
    ) -> None: ...

class Turns:
    issued: int
    serving: int
    def take(self) -> int: ...
    def pass_on(self) -> int: ...

class CallRing:
    sequence: int
    chain: int
    finished: int
    def __init__(self, kept: int, /) -> None: ...
    def record(self, meaning: object, fingerprint: int, code: object, instruction: int, /) -> int: ...
    def call(self, sequence: int, /) -> tuple[int, Any, Any, int] | None: ...

class Desk:
    def __init__(
        self,
        engine: Engine,
        turns: Turns,
        ring: CallRing,
        size: int,
        resume: Callable[[int, str, int], None],
        complete: Callable[[Any, list[int], int], Any],
        wake: Callable[[], None],
        events: dict[str, Any],
        package: str,
        spins: bool,
        /,
    ) -> None: ...
    def learn(
        self,
        operation: int,
        dtype: object,
        how: object,
        count: int | tuple[int, ...],
        row: tuple[int, ...],
        plan: object,
        meaning: object,
        program: Program,
        fingerprint: int,
        /,
    ) -> None: ...
    def halt(self) -> None: ...
    def all_reduce(self, x: Any, op: Any, out: Any, algorithm: Any, timeout: Any, /) -> Any: ...
    def broadcast(self, x: Any, root: Any, algorithm: Any, timeout: Any, /) -> Any: ...
    def reduce_scatter(self, x: Any, op: Any, counts: Any, algorithm: Any, timeout: Any, /) -> Any: ...
    def barrier(self, algorithm: Any, timeout: Any, /) -> Any: ...
    def all_gather(self, x: Any, algorithm: Any, timeout: Any, /) -> Any: ...

class Engine:
    def __init__(self, job: int, generation: int, group: int, rank: int, size: int, alarm: int, /) -> None: ...
    def connect(self, peer: int, socket: int, /) -> None: ...
    def open(self, arena: int, nbytes: int, region: int, staging: int, /) -> bool: ...
    def withdraw(self) -> bool: ...
    def map(self, peer: int, arena: int, nbytes: int, /) -> None: ...
    def run(
        self, program: Program, x: Any, out: Any, sequence: int, fingerprint: int, spins: bool, seconds: float, /
    ) -> int: ...
    def advance(self, seconds: float, /) -> int: ...
    @property
    def culprit(self) -> int: ...
    @property
    def heard(self) -> bytes: ...
    @staticmethod
    def region_bytes(size: int, staging: int, /) -> int: ...

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
