"""Represents collectives as data: schedules that can be built, verified, priced and drawn.

    schedule       slices, operations and rounds, of which every schedule consists
    expressions    ordered expressions over the inputs of ranks
    pricing        predicts the time of a schedule from the costs of rounds, messages and bytes
    tuning_table   the costs in a file, and their encoding
    claims         properties that a schedule may claim, and the rules that prove them
    cost           counts the rounds and bytes of a schedule
    combine        combines phases into larger ones
    verify         proves that a schedule is correct
    star           all data goes through one rank
    tree           a binomial tree
    ring           each rank sends to the next
    halving        recursive halving and doubling
    picture        draws schedules as text
    direct         every rank exchanges with every other
    hierarchical   first inside hosts, then between them
    choose         chooses an algorithm and builds its schedule

`python -m gradwire.collectives ring 5` draws a schedule.
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
