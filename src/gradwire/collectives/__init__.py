"""Collectives as data.

    schedule      the words: slices, operations, rounds, programs
    combine       larger phases made of smaller ones
    star, ring, tree, halving, direct, hierarchical
                  one algorithm each, with a statement of its rounds and bytes
    cost          counts the rounds and bytes of a schedule
    claims        what a schedule may say about itself, and the rules that prove it
    verify        proves a schedule right, in terms of expressions
    pricing       what a schedule should take, given what rounds, messages and bytes cost
    choose        which algorithm runs, and its schedule

`python -m gradwire.collectives ring 5` draws one.
"""

from __future__ import annotations

from gradwire.collectives.choose import algorithms, build, choose
from gradwire.collectives.pricing import DEFAULTS, Constants, Table
from gradwire.collectives.schedule import (
    COLLECTIVES,
    REDUCING,
    ROOTED,
    Buffer,
    Copy,
    Finish,
    Fold,
    From,
    Operation,
    Program,
    Recv,
    Round,
    Schedule,
    Send,
    Slice,
    Term,
    placement,
)
from gradwire.collectives.verify import InvalidSchedule, prove_once, verify

__all__ = [
    "COLLECTIVES",
    "DEFAULTS",
    "REDUCING",
    "ROOTED",
    "Buffer",
    "Constants",
    "Copy",
    "Finish",
    "Fold",
    "From",
    "InvalidSchedule",
    "Operation",
    "Program",
    "Recv",
    "Round",
    "Schedule",
    "Send",
    "Slice",
    "Table",
    "Term",
    "algorithms",
    "build",
    "choose",
    "placement",
    "prove_once",
    "verify",
]
