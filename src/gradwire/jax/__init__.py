"""gradwire for JAX: trees of arrays, in plain Python and inside of compiled programs.

`all_reduce` and `broadcast` take any tree; `jit` is `jax.jit` for functions that call them; `State` makes trees the
state of an elastic run.
"""

from __future__ import annotations

try:
    import jax
except ImportError as error:
    raise ImportError("gw.jax needs JAX, which is not installed: pip install 'gradwire[jax]'") from error

from gradwire.jax.calls import all_reduce, broadcast, jit
from gradwire.jax.failures import typed_errors
from gradwire.jax.state import State

__all__ = ["State", "all_reduce", "broadcast", "jit", "typed_errors"]

del jax
