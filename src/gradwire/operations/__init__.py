"""Defines each collective in one place: the checks of its arguments, its exchanges and its result.

A function with `@collective` makes all checks that need no peer, and returns an `Operation`. A group runs the operation
immediately on the caller's thread; a stream queues it for the group's progress thread. Both use the same `Exchange`,
which runs one schedule. A new collective needs such a function here, a method in group/collective_calls and a line in
group/stream.

    types          Position, Shape, Exchange, Operation, and common checks
    registry       `@collective` and the table of all collectives
    capabilities   what a group supports, for programs that check before a call
    named          all_reduce_named
    values         collectives on JSON-like values
    elementwise    all_reduce, broadcast, reduce, barrier
    split_join     collectives that split or join arrays along the first axis
    preallocated   the same with results in the caller's memory, as torch calls them
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
