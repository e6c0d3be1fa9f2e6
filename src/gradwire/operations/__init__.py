"""What each collective does, said once: its arguments checked, its exchanges named, its result assembled.

A function here checks everything that can be checked without a peer and returns an `Operation`. A group runs it at once
on the caller's thread; a stream runs it in its turn. Both use the same `Exchange`, which carries out one schedule.

    call            the words: Shape, Exchange, Operation; checks that all of them need
    whole           collectives on whole arrays: all_reduce, broadcast, reduce, barrier
    named           all_reduce_named
    values          JSON-like values
    rows            collectives that split or join the first axis
    into            the same into memory that the caller has
    capabilities    what can be asked before
"""

from __future__ import annotations

from gradwire.operations.call import Declined, Exchange, Form, Operation, Shape
from gradwire.operations.capabilities import Capabilities
from gradwire.operations.named import all_reduce_named
from gradwire.operations.rows import all_gather, all_gather_rows, all_to_all, gather, reduce_scatter, scatter
from gradwire.operations.values import all_gather_values, broadcast_value
from gradwire.operations.whole import all_reduce, barrier, broadcast, reduce

__all__ = [
    "Capabilities",
    "Declined",
    "Exchange",
    "Form",
    "Operation",
    "Shape",
    "all_gather",
    "all_gather_rows",
    "all_gather_values",
    "all_reduce",
    "all_reduce_named",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_value",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]
