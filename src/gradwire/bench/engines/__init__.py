"""The engines, as their users call them: one small file each, which loads its library only when it is opened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gradwire.bench.cases import Case

Array = npt.NDArray[Any]


class Unsupported(Exception):
    """The engine has no such thing; the text says what."""


@dataclass(frozen=True)
class Call:
    """A collective made ready: calling `run` is what is timed. The result is in `result`, or what `run` returns."""

    run: Callable[[], Any]
    result: Array | None = None


class Engine(Protocol):
    about: dict[str, Any]  # "version", and what else is worth a place in the report
    rank: int
    size: int

    def check(self, case: Case) -> None:
        """Raise `Unsupported` for what the engine does not offer."""

    def array(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Memory for inputs and results."""

    def ready(self, case: Case, x: Array, out: Array) -> Call:
        """What can be made ready once is made ready here. Results go to x where that is the engine's way, else out."""

    def close(self) -> None: ...


def open_engine(name: str, options: dict[str, Any]) -> Engine:
    """Join the other ranks of this engine."""
    if name == "gradwire":
        from gradwire.bench.engines.gradwire import Gradwire

        return Gradwire(options)
    if name == "gloo":
        from gradwire.bench.engines.gloo import Gloo

        return Gloo(options)
    from gradwire.bench.engines.mpi import Mpi

    return Mpi(options)
