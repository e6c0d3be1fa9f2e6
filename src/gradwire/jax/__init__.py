"""gradwire for JAX: collectives on trees of arrays, in plain Python and in compiled programs.

This package is imported when `gw.jax` is first used.

failures     raises the errors of a group from compiled programs with their original types
trees        converts trees to named NumPy arrays, and back
reduction    the all-reduce of named arrays
tree_state   `State`: trees as the state of an elastic run
traced       the all-reduce as a JAX primitive: lowering, differentiation, batching
api          the functions that users call
"""

from __future__ import annotations

try:
    import jax as _jax  # noqa: F401 — only to find out whether JAX is installed
except ModuleNotFoundError as missing:
    if missing.name != "jax":
        raise
    raise ModuleNotFoundError(
        "gw.jax needs JAX, which is not installed: pip install 'gradwire[jax]'", name="jax"
    ) from None

from gradwire.jax.api import all_reduce, broadcast, check_replicas, jit
from gradwire.jax.failures import typed_errors
from gradwire.jax.tree_state import State

__all__ = ["State", "all_reduce", "broadcast", "check_replicas", "jit", "typed_errors"]
