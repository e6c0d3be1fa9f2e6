"""Carries out what `chaos.py` has planned, and says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gradwire.launch.chaos import Chaos, Deed
from gradwire.launch.worker import Worker

BY_CHAOS = "was killed by chaos"


class Victim(Protocol):
    """The job, as far as trouble is made for it."""

    @property
    def workers(self) -> Sequence[Worker]: ...

    def say(self, line: str) -> None: ...

    def add_worker(self) -> Worker | None: ...

    def disturb(self, action: str, workers: Sequence[Worker]) -> str:
        """Do what only the job itself can, and say what was done."""


class Trouble:
    def __init__(self, chaos: Chaos, victim: Victim, began: float) -> None:
        self._chaos = chaos
        self._victim = victim
        self._began = began
        if any(fault.targets is None for fault in chaos.faults):
            victim.say(f"chaos: the workers are chosen with seed {chaos.seed}")

    @property
    def next_due(self) -> float | None:
        due = self._chaos.next_due
        return None if due is None else self._began + due

    def make(self, now: float) -> None:
        for deed in self._chaos.due(now - self._began, self._living()):
            self._victim.say(f"chaos: {self._do(deed)} at {now - self._began:.1f} s{_lasting(deed)}")

    def stop(self) -> None:
        """Quietly end what lasts."""
        for deed in self._chaos.stop(self._living()):
            self._do(deed)

    def _living(self) -> list[int]:
        return [worker.number for worker in self._victim.workers if worker.ending is None]

    def _do(self, deed: Deed) -> str:
        if deed.missing:
            return (
                f"found no {' and '.join(f'worker {number}' for number in deed.targets) or 'worker'} to {deed.action}"
            )
        workers = [self._victim.workers[number] for number in deed.targets]
        match deed.action, workers:
            case "kill", [worker]:
                worker.kill(BY_CHAOS)
                return f"killed {worker}"
            case "freeze", [worker]:
                worker.pause()
                return f"froze {worker}"
            case "thaw", [worker]:
                worker.resume()
                return f"thawed {worker}"
            case "join", []:
                added = self._victim.add_worker()
                return f"started {added}" if added is not None else "started nobody, because all work is done"
        return self._victim.disturb(deed.action, workers)


def _lasting(deed: Deed) -> str:
    return f", for {deed.duration:g} s" if deed.duration is not None and not deed.missing else ""
