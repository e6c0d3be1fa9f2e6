"""The training that simulated members do: small, and exact.

Gradients follow from (seed, step, rank, size) and are whole numbers, so their sum is the same in any order and what a
step must lead to can be computed by anybody.
"""

from __future__ import annotations

import numpy as np
import xxhash

from gradwire.arrays import Array

ELEMENTS = 16
MODULUS = 65_521
_PLACES = np.arange(1, ELEMENTS + 1)


def beginning(number: int) -> Array:
    """A state to begin with."""
    return (_PLACES * number).astype(np.float32)


def gradient(seed: int, step: int, rank: int, size: int) -> Array:
    """What one rank contributes to a step."""
    return (_PLACES * (seed % 1009 + 31 * step + 7 * rank + 3 * size + 1) % 97).astype(np.float32)


def applied(state: Array, total: Array) -> Array:
    """The state after a step whose gradients add up to `total`."""
    return (state * 3 + total) % MODULUS


def digest(state: Array) -> str:
    return xxhash.xxh3_64_hexdigest(state.tobytes())
