"""What each collective does, once: its arguments checked, its exchanges named, its result assembled.

A function with `@collective` checks everything that can be checked without a peer and returns an `Operation`. A group
runs it at once on the caller's thread; a stream runs it in its turn. Both use the same `Exchange`, which carries out
one schedule. A new collective needs such a function here, a method in group/collective_calls and a line in
group/stream.

    types          Position, Shape, Exchange, Operation; checks that all of them need
    registry       `@collective` and the table of all collectives
    capabilities   what can be asked before a call
    named          all_reduce_named
    values         JSON-like values
    elementwise    all_reduce, broadcast, reduce, barrier
    split_join     collectives that split or join the first axis
    preallocated   the same, into the caller's memory: torch's way to call them
"""

from __future__ import annotations

from gradwire.operations import elementwise, named, split_join, values
from gradwire.operations.capabilities import Capabilities
from gradwire.operations.registry import COLLECTIVES
from gradwire.operations.types import CallKey, Declined, Exchange, Operation, Position, Shape

__all__ = [
    "COLLECTIVES",
    "CallKey",
    "Capabilities",
    "Declined",
    "Exchange",
    "Operation",
    "Position",
    "Shape",
    "elementwise",
    "named",
    "split_join",
    "values",
]
