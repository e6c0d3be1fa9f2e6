"""Companions of a replicated state: objects of gradwire that hold a few plain values beside the user's state.

A sampler's position is one. The values of the companions are transferred, compared and saved together with the user's
state, in the order in which the companions were attached. All ranks attach the same companions in the same order.

A state can arrive before its companions exist: a program may create a sampler after its first step, or after it has
loaded a checkpoint. The values without a companion then stay part of the state, and the next companion that is attached
receives the first of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

Plain = int | str | bool


class Companion(Protocol):
    """An object whose values belong to the replicated state of a run."""

    def state_dict(self) -> Mapping[str, Plain]:
        """Return the values. They must be equal on all ranks when a step has ended."""

    def load_state_dict(self, state: Mapping[str, Plain]) -> object:
        """Load values that another rank or an earlier run has returned."""

    def step_ended(self) -> None:
        """Include the effects of the step: its body has ended on this rank. The digest is computed after this call."""

    def step_failed(self) -> None:
        """Drop the effects of the step: its body was cut short, and the step is repeated."""


class Companions:
    """The companions of one state, and the values that have no companion yet."""

    def __init__(self) -> None:
        self._attached: list[Companion] = []
        self._included = 0  # the number of attached companions, from the first, that are part of the state
        self._unclaimed: list[Mapping[str, Plain]] = []  # received values, for companions that are attached later

    def attach(self, companion: Companion, *, begun: bool) -> None:
        """Add a companion. It loads its values now if they have been received.

        `begun` means that the ranks have agreed on the state. Then a companion without received values becomes part of
        the state at the end of the step, because the state must not change between two steps.
        """
        if self._unclaimed:
            companion.load_state_dict(self._unclaimed[0])
            del self._unclaimed[0]
            self._included += 1
        elif not begun:
            self._included += 1
        self._attached.append(companion)

    def values(self) -> list[Mapping[str, Plain]]:
        """Return the values of all companions that are part of the state."""
        return [one.state_dict() for one in self._attached[: self._included]] + self._unclaimed

    def load(self, values: list[Mapping[str, Plain]]) -> None:
        """Load the values that another rank's or an earlier run's `values` has returned."""
        for companion, value in zip(self._attached, values, strict=False):
            companion.load_state_dict(value)
        self._included = min(len(self._attached), len(values))
        self._unclaimed = values[self._included :]

    def step_ended(self) -> None:
        """Notify all companions that the body of a step has ended."""
        for companion in self._attached:
            companion.step_ended()
        self._included = len(self._attached)

    def step_failed(self) -> None:
        """Notify all companions that the body of a step was cut short."""
        for companion in self._attached:
            companion.step_failed()


def parse_values(values: object) -> list[Mapping[str, Plain]]:
    """Check the received values of companions; raise ValueError if they are malformed."""
    if isinstance(values, list) and all(_is_plain(value) for value in values):
        return values
    raise ValueError(f"malformed companions {str(values)[:200]}")


def _is_plain(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(entry, Plain) for entry in value.values())
