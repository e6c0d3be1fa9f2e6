"""What the ranks of a job settle before its first call: the table that algorithms are chosen by, who shares memory, and
how each shows that it lives."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from gradwire import core, tuning
from gradwire.collectives import Table
from gradwire.errors import ConfigError, UnsupportedOp
from gradwire.generation import Generation
from gradwire.liveness.lifeline import Nature
from gradwire.transports.shm import Sharing


class Entry(NamedTuple):
    """What a rank tells first: its wish of a transport, its table if it is rank 0, its nature, and an offer to share
    memory."""

    wish: str
    table: Any
    nature: Any
    offer: Any

    @classmethod
    def of(cls, rank: int, told: object) -> Entry:
        if not isinstance(told, list) or len(told) != len(cls._fields) or not isinstance(told[0], str):
            raise ConfigError(f"rank {rank} settles things in another way: is it the same gradwire?", peer=rank)
        return cls(*told)


def agree(
    generation: Generation, transport: str, deadline: float, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Settle everything; all ranks of the job call it together, before they use the generation.

    `meanwhile` is something to do while the others' first words are on their way.
    """
    identity = generation.identity
    table = tuning.load(os.environ) if identity.rank == 0 else None
    if identity.size == 1:
        generation.table = table or generation.table
        meanwhile()
        return

    def tell(value: Any) -> Callable[[], list[Any]]:
        return generation.parley.tell(value, "init", max(0.1, deadline - time.monotonic()))

    own = Nature.own()
    hosts = [identity.topology.host_of(rank) for rank in range(identity.size)]
    with Sharing(identity.rank, hosts, transport != "tcp" and core.available()) as sharing:
        hear = tell([transport, table and tuning.encode(table), own.to_wire(), sharing.offer()])
        meanwhile()
        entries = [Entry.of(rank, told) for rank, told in enumerate(hear())]
        generation.table = _table(entries[0].table)
        hear = tell(sharing.dial([entry.offer for entry in entries], deadline))
        generation.begin_to_beat(own, sharing.arena)
        complete = sharing.answer(hear())
        generation.share_memory(*sharing.keep(tell(complete)()))
    _check_wishes(generation, [entry.wish for entry in entries])
    generation.connect_lifeline(deadline)
    if len(identity.topology.hosts) > 1 or not all(generation.sharing):  # then somebody has links to make
        tell(None)()
    generation.lifeline.expect([Nature.from_wire(entry.nature) for entry in entries])  # all beat
    generation.switchboard.wake()


def _table(value: Any) -> Table:
    """Rank 0's table is everybody's: ranks that choose by different ones would not understand each other."""
    try:
        return tuning.decode(value)
    except ValueError as error:
        raise ConfigError(f"rank 0's tuning cannot be used here, {error}: is it the same gradwire?") from error


def _check_wishes(generation: Generation, wishes: list[str]) -> None:
    """Ranks that cannot or will not share memory go on with sockets, unless somebody insists."""
    missing = [rank for rank, shares in enumerate(generation.sharing) if not shares]
    if "shm" in wishes and missing:  # an error on every rank, so that none has to guess why others left
        raise UnsupportedOp(
            f"rank {wishes.index('shm')} asks for transport 'shm', and ranks {missing} cannot share memory: they need "
            "the native core, and others on the same host; 'auto' shares memory where it can and uses TCP elsewhere",
            operation="init",
        )
