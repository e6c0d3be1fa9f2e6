"""Gradients in fewer bytes: "f16", "bf16", "int8", "topk", each with error feedback. See docs/compression.md.

base       what they have in common: the call, and the residual of each bucket
topk       TopK: the largest values only
rounding   every element in fewer bits, and how those travel
casts      F16, BF16
int8       Int8: whole numbers and a scale for each block
"""

from __future__ import annotations

from typing import Any

from gradwire.errors import ConfigError
from gradwire.training.compression.base import Compression
from gradwire.training.compression.casts import BF16, F16
from gradwire.training.compression.int8 import Int8
from gradwire.training.compression.topk import TopK

__all__ = ["BF16", "F16", "Compression", "Int8", "TopK", "compression_for"]

_NAMED: dict[str, type[Compression]] = {kind.name: kind for kind in (F16, BF16, Int8, TopK)}


def compression_for(wanted: Any) -> Any:
    """The compression of this name, or one like the given one that has kept nothing yet. None, and others' kinds, stay.

    >>> compression_for("topk").ratio
    0.01
    >>> compression_for(Int8(block=64)).block
    64
    """
    if wanted is None or all(hasattr(wanted, method) for method in ("operation", "describe", "reset")):
        return wanted.fresh() if isinstance(wanted, Compression) else wanted
    if isinstance(wanted, str) and wanted in _NAMED:
        return _NAMED[wanted]()
    raise ConfigError(
        f"there is no compression {wanted!r}; there are {', '.join(map(repr, _NAMED))}, or an object such as TopK(0.05)"
    )
