"""What the ranks of a job settle before its first call: the table that algorithms are chosen by, who shares memory, and
how each shows that it lives.

They speak through a group of their own, which leaves no trace among the user's calls.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gradwire import core, tuning
from gradwire.collectives import Table
from gradwire.errors import ConfigError, UnsupportedOp
from gradwire.generation import Generation
from gradwire.group import SETTING_UP, Group
from gradwire.liveness.calls import call_site
from gradwire.liveness.lifeline import Nature
from gradwire.operations import all_gather_values
from gradwire.operations.call import settled
from gradwire.transports import shm

TellAll = Callable[[Any], list[Any]]


def agree(generation: Generation, transport: str, deadline: float) -> None:
    """Settle everything; all ranks of the job call it together, before they use the generation."""
    size, rank = generation.identity.size, generation.identity.rank
    own = tuning.load(os.environ) if rank == 0 else None
    if size == 1:
        generation.table = own or generation.table
        return
    with _private_group(generation, deadline) as tell_all:
        told = _entries(tell_all([transport, own and tuning.encode(own), Nature.own().to_wire()]))
        generation.table = _table(told[0][1])
        _share_memory(generation, [wish for wish, _, _ in told], tell_all, deadline)
        _begin_lifeline(generation, [Nature.from_wire(nature) for _, _, nature in told], tell_all, deadline)


@contextmanager
def _private_group(generation: Generation, deadline: float) -> Iterator[TellAll]:
    group = Group(generation, range(generation.identity.size), SETTING_UP, max(0.1, deadline - time.monotonic()))

    def tell_all(value: Any) -> list[Any]:
        left = max(0.1, deadline - time.monotonic())
        operation = all_gather_values(value)._replace(name="init")
        told: list[Any] = settled(group._runner.now(operation, left, call_site()))
        return told

    try:
        group._runner.dial(deadline)
        yield tell_all
    finally:
        group.close()


def _entries(told: list[Any]) -> list[tuple[str, Any, Any]]:
    """What each rank has told: its wish of a transport, its table, its nature."""
    for rank, entry in enumerate(told):
        if not isinstance(entry, list) or len(entry) != 3 or not isinstance(entry[0], str):
            raise ConfigError(f"rank {rank} settles things in another way: is it the same gradwire?", peer=rank)
    return [(wish, table, nature) for wish, table, nature in told]


def _table(value: Any) -> Table:
    """Rank 0's table is everybody's: ranks that choose by different ones would not understand each other."""
    try:
        return tuning.decode(value)
    except ValueError as error:
        raise ConfigError(f"rank 0's tuning cannot be used here, {error}: is it the same gradwire?") from error


def _share_memory(generation: Generation, wishes: list[str], tell_all: TellAll, deadline: float) -> None:
    """Find out which ranks can share memory; those that cannot or will not go on with sockets."""
    identity = generation.identity
    hosts = [identity.topology.host_of(rank) for rank in range(identity.size)]
    wanted = wishes[identity.rank] != "tcp" and core.available()
    generation.share_memory(*shm.share(identity.rank, hosts, wanted, tell_all, deadline))
    missing = [rank for rank, shares in enumerate(generation.sharing) if not shares]
    if "shm" in wishes and missing:  # an error on every rank, so that none has to guess why others left
        raise UnsupportedOp(
            f"rank {wishes.index('shm')} asks for transport 'shm', and ranks {missing} cannot share memory: they need "
            "the native core, and others on the same host; 'auto' shares memory where it can and uses TCP elsewhere",
            operation="init",
        )


def _begin_lifeline(generation: Generation, natures: list[Nature], tell_all: TellAll, deadline: float) -> None:
    """Beat; and when all do, expect them to go on."""
    identity = generation.identity
    generation.begin_lifeline(natures[identity.rank], deadline)
    tell_all(None)
    generation.lifeline.expect(natures)
    generation.wake()
