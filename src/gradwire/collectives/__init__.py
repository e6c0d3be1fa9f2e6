"""Collectives as data.

    schedule       slices, operations, rounds: the terms in which every collective is written
    expressions    ordered expressions over ranks' inputs
    pricing        what a schedule costs, given the price of rounds, messages and bytes
    tuning_table   the table of prices in a file, and its encoding
    claims         properties that a schedule may state, and the rules that prove them
    cost           counts the rounds and bytes of a schedule
    combine        larger phases made of smaller ones
    verify         proves a schedule right
    star           everything through one rank
    tree           a binomial tree
    ring           each rank sends to the next
    halving        halving and doubling
    picture        schedules as text
    direct         every rank with every other
    hierarchical   inside hosts, then between them
    choose         picks an algorithm and builds its schedule

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
