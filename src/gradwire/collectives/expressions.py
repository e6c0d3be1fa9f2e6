"""Numbers ordered expressions over the inputs of ranks. Equal numbers mean equal expressions, and so equal bits."""

from __future__ import annotations

from typing import Literal

Expression = int | tuple["Expression", "Expression"]
"""A rank, for the input of that rank, or the sum of two expressions: ((1, 2), 0) is (input 1 + input 2) + input 0."""

_Key = tuple[Literal["leaf", "sum", "finished"], int, int]


class Expressions:
    """A table of expressions. Equal expressions have the same number."""

    def __init__(self) -> None:
        self._numbers: dict[_Key, int] = {}
        self._keys: list[_Key] = []
        self._ranks: list[int] = []
        self._shown: list[Expression] = []

    def leaf(self, rank: int, segment: int) -> int:
        """Return the number of a segment of a rank's input."""
        return self._number(("leaf", rank, segment), 1 << rank, rank)

    def sum(self, left: int, right: int) -> int:
        shown = (self._shown[left], self._shown[right])
        return self._number(("sum", left, right), self._ranks[left] | self._ranks[right], shown)

    def finished(self, number: int) -> int:
        return self._number(("finished", number, number), self._ranks[number], self._shown[number])

    def is_finished(self, number: int) -> bool:
        return self._keys[number][0] == "finished"

    def ranks(self, number: int) -> int:
        """Return which inputs an expression contains, as bits: bit r is rank r."""
        return self._ranks[number]

    def show(self, number: int) -> Expression:
        return self._shown[number]

    def _number(self, key: _Key, ranks: int, shown: Expression) -> int:
        known = self._numbers.get(key)
        if known is None:
            known = self._numbers[key] = len(self._keys)
            self._keys.append(key)
            self._ranks.append(ranks)
            self._shown.append(shown)
        return known
