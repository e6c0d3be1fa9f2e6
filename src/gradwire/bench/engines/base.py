"""The interface between the measurement and an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gradwire.bench.cases import Case

Array = npt.NDArray[Any]


class Unsupported(Exception):
    """The engine cannot run a case; the text says why."""


@dataclass(frozen=True)
class Call:
    """A collective with its arguments: only `run` is timed. The result is in `result`, or `run` returns it."""

    run: Callable[[], Any]
    result: Array | None = None


class Engine(Protocol):
    about: dict[str, Any]  # "version", and more facts for the report
    rank: int
    size: int

    def check(self, case: Case) -> None:
        """Raise `Unsupported` if the engine cannot run this case."""

    def array(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Memory for inputs and results."""

    def prepare(self, case: Case, x: Array, out: Array) -> Call:
        """The call for these arrays. The result goes to x where the engine works in place, else to out."""

    def close(self) -> None: ...
