"""Gradient compression: "f16", "bf16", "int8" and "topk", each with error feedback. See docs/compression.md.

base       `Compression`: the base class, with the residual of each bucket
topk       `TopK`: sends only the largest values
rounding   base class of compressions that send every element in fewer bits
casts      `F16`, `BF16`
int8       `Int8`: 8-bit integers, with one scale per block
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
    """Return the compression for a user's argument: a name, a compression object, or None.

    A built-in object is copied without its residuals, so that two models never share them. None and objects of a user's
    own class are returned as they are. Any other argument raises `ConfigError`.

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
        f"unknown compression {wanted!r}: use {', '.join(map(repr, _NAMED))}, or an object such as TopK(0.05)"
    )
