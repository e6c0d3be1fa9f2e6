"""gradwire for JAX: trees of arrays, in plain Python and in compiled programs. Loaded when `gw.jax` is first used.

failures     errors on their way out of a compiled program
trees        trees as named arrays, and back
reduction    the exchange itself
tree_state   trees as the state of an elastic run
traced       the all-reduce as JAX sees it: lowered, differentiated, batched
api          what users call
"""

from __future__ import annotations

try:
    import jax as _jax  # noqa: F401 — is it there at all?
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
