"""Define the training of simulated members, which is small and exact.

A gradient is a function of (seed, step, rank, size) with whole numbers. So the sum of the gradients is the same in any
order, and the checks can compute the correct state after each step.
"""

from __future__ import annotations

import numpy as np
import xxhash

from gradwire.arrays import Array

ELEMENTS = 16
MODULUS = 65_521
_PLACES = np.arange(1, ELEMENTS + 1)


def beginning(number: int) -> Array:
    """Return an initial state."""
    return (_PLACES * number).astype(np.float32)


def gradient(seed: int, step: int, rank: int, size: int) -> Array:
    """Return the gradient of one rank in a step."""
    return (_PLACES * (seed % 1009 + 31 * step + 7 * rank + 3 * size + 1) % 97).astype(np.float32)


def applied(state: Array, total: Array) -> Array:
    """Return the state after a step whose gradients add up to `total`."""
    return (state * 3 + total) % MODULUS


def digest(state: Array) -> str:
    return xxhash.xxh3_64_hexdigest(state.tobytes())
