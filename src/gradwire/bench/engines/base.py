"""Define the interface between the measurement and an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gradwire.bench.cases import Case

Array = npt.NDArray[Any]


class Unsupported(Exception):
    """The engine cannot run a case. The text is the reason."""


@dataclass(frozen=True)
class Call:
    """A collective with its arguments. Only `run` is timed. If `result` is None, `run` returns the result."""

    run: Callable[[], Any]
    result: Array | None = None


class Engine(Protocol):
    about: dict[str, Any]  # "version", and more facts for the report
    rank: int
    size: int

    def check(self, case: Case) -> None:
        """Raise `Unsupported` if the engine cannot run this case."""

    def array(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Allocate an array for inputs or results."""

    def prepare(self, case: Case, x: Array, out: Array) -> Call:
        """Return the call for these arrays. The result goes to x if the engine works in place, otherwise to out."""

    def close(self) -> None: ...
