"""What all ranks of a generation tell each other outside of any group: who they are, and where they stand.

Everybody's value goes to everybody over the control links, which are there before anything else is; so this needs no
links of its own, no memory and no schedule. Rounds are numbered, and one is over when all have told. They are on record
like calls: a rank that does not come is named, and so are ranks that speak of different things.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from gradwire.errors import Broken, Closed, InvalidSize
from gradwire.generation.waiting import LAST_WORDS_SECONDS, OperationWait
from gradwire.liveness.call_log import CallDescription, CallLog, call_site
from gradwire.liveness.control import disagreement
from gradwire.wire import MAX_CONTROL, fingerprint

if TYPE_CHECKING:
    from gradwire.generation.generation import Generation

PARLEY = 2  # as a group; the first one is the world
ENVELOPE_BYTES = 256  # of a control message, around a value

Word = tuple[str, Any]  # of what, and the value


class ControlGather:
    """This rank's part in the rounds; one at a time."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._size = generation.identity.size
        self._calls = CallLog(PARLEY, range(self._size))
        self._told: dict[int, dict[int, Word]] = {}  # by round and rank
        self._changed = threading.Condition()
        generation.control.watch(self._calls, announced=False)
        generation.control.told = self._hear

    @property
    def rounds(self) -> int:
        """How many have begun; the same on all ranks that have come as far."""
        return self._calls.sequence

    def tell_all(self, value: Any, operation: str, timeout: float) -> list[Any]:
        """Everybody's value, by rank; all call it together. `operation` is what errors call it."""
        return self.tell(value, operation, timeout)()

    def tell(self, value: Any, operation: str, timeout: float) -> Callable[[], list[Any]]:
        """The same, for one who has something to do meanwhile: what this returns waits for the others."""
        generation = self._generation
        rank, control = generation.identity.rank, generation.control
        if generation.closed:  # before any lock: in a forked child nobody may be there to release it
            generation.check(operation)
        if len(json.dumps(value)) > MAX_CONTROL - ENVELOPE_BYTES:
            raise InvalidSize(f"{operation} cannot tell all ranks so much: more than {MAX_CONTROL} bytes")
        meaning = CallDescription(operation, f"{operation}()", fingerprint("parley", operation))
        with self._changed:
            number = self._calls.record(meaning, call_site())
            told = self._told.setdefault(number, {})
            told[rank] = operation, value
        with self._or_break(operation):
            if not control.sound:
                control.called(time.monotonic())
                generation.check(operation)
            control.tell_all({"t": "tell", "n": number, "o": operation, "v": value})
        return partial(self._heard, number, told, OperationWait(generation, self._calls, operation, number, timeout))

    @contextlib.contextmanager
    def _or_break(self, operation: str) -> Iterator[None]:
        """Whatever goes wrong in a round, others wait for this rank: then nobody can go on."""
        try:
            yield
        except (Broken, Closed):
            raise
        except BaseException as error:
            self._generation.interrupt(operation, error)
            raise

    def _heard(self, number: int, told: dict[int, Word], watch: OperationWait) -> list[Any]:
        with self._or_break(watch.operation):
            self._await(told, watch)
        self._calls.finished = number
        with self._changed:
            del self._told[number]
        if len({operation for operation, _ in told.values()}) > 1:
            self._generation.control.report(disagreement(self._calls, number), time.monotonic())
            raise watch.broken()
        return [told[peer][1] for peer in range(self._size)]

    def _await(self, told: dict[int, Word], watch: OperationWait) -> None:
        generation = self._generation
        gone: set[int] = set()
        while True:
            left = {peer for peer in range(self._size) if generation.control.has_left(peer)} | gone
            missing = [peer for peer in range(self._size) if peer not in told]
            if not missing:
                return
            if lost := left.intersection(missing):
                raise watch.lost(min(lost))
            pause = watch.look()
            gone = {peer for peer in missing if generation.transport.gone(peer)}
            with self._changed:
                self._changed.wait_for(
                    lambda: len(told) == self._size or generation.closed or not generation.control.sound,
                    LAST_WORDS_SECONDS if gone else pause,
                )

    def _hear(self, peer: int, number: int, operation: str, value: Any) -> None:
        """A rank has told something: of this round, or, having heard everybody, of the next."""
        with self._changed:
            rounds = self._calls.sequence
            if not max(rounds, self._calls.finished + 1) <= number <= rounds + 1 or peer in self._told.get(number, {}):
                raise ValueError(f"it tells of round {number} out of turn, this is round {rounds}")
            told = self._told.setdefault(number, {})
            told[peer] = operation, value
            if len(told) == self._size:  # nobody waits for less
                self._changed.notify_all()

    def wake(self) -> None:
        """Let who waits look around: the generation has broken or ended."""
        with self._changed:
            self._changed.notify_all()
