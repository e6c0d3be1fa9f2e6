"""Draws schedules as text, with a row for each round and a column for each rank."""

from __future__ import annotations

from collections.abc import Iterator

from gradwire.collectives.cost import cost
from gradwire.collectives.expressions import Expression
from gradwire.collectives.schedule import REDUCING, ROOTED, Recv, Round, Schedule, Send
from gradwire.collectives.verify import verify

_MARGIN = 10
_SHOWN_RESULTS = 8
_LEGEND = (
    "in, out, acc   input, output and partial results, by segment",
    "x → r          sent to rank r",
    "x ← r          received from rank r; ←r in a sum is a term received from rank r",
    "x ⇐ y          finished: divided for a mean, and rounded",
)


def draw(schedule: Schedule, width: int = 120) -> str:
    """Verify a schedule and return its picture; raise InvalidSchedule if it is wrong."""
    results = verify(schedule)
    lines = [_title(schedule), ""]
    for ranks in _blocks(schedule, width):
        lines += [*_grid(schedule, ranks), ""]
    lines += [*_LEGEND, ""]
    if schedule.collective in REDUCING:
        lines += [*_results(results), ""]
    lines.append(_summary(schedule))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _title(schedule: Schedule) -> str:
    parts = [schedule.collective, schedule.algorithm, _plural(schedule.size, "rank")]
    if schedule.collective in ROOTED:
        parts.append(f"root {schedule.root}")
    return " · ".join([*parts, _plural(schedule.segments, "segment")])


def _blocks(schedule: Schedule, width: int) -> Iterator[range]:
    """Yield blocks of ranks that fit side by side."""
    first, used = 0, _MARGIN
    for rank in range(schedule.size):
        needed = _column(schedule, rank) + 3
        if rank > first and used + needed > width:
            yield range(first, rank)
            first, used = rank, _MARGIN
        used += needed
    yield range(first, schedule.size)


def _column(schedule: Schedule, rank: int) -> int:
    texts = [str(op) for ops in schedule.program(rank) for op in ops]
    return max(map(len, [_heading(rank), *texts]))


def _grid(schedule: Schedule, ranks: range) -> Iterator[str]:
    widths = [_column(schedule, rank) for rank in ranks]
    rule = "─" * (_MARGIN - 1) + "".join("┼" + "─" * (width + 2) for width in widths)
    yield _row("", [_heading(rank) for rank in ranks], widths)
    for number in range(schedule.rounds):
        cells = [_cell(schedule.program(rank)[number]) for rank in ranks]
        if not any(schedule.program(rank)[number] for rank in range(schedule.size)):
            continue
        yield rule
        for i in range(max(1, *map(len, cells))):
            label = f"round {number}" if i == 0 else ""
            yield _row(label, [cell[i] if i < len(cell) else "" for cell in cells], widths)


def _row(label: str, cells: list[str], widths: list[int]) -> str:
    columns = "".join(f"│ {cell:<{width}} " for cell, width in zip(cells, widths, strict=True))
    return f"{label:<{_MARGIN - 1}}{columns}"


def _cell(ops: Round) -> list[str]:
    """Return the operations as text: first the sends, then the receives, then the others."""
    return [
        str(op) for op in sorted(ops, key=lambda op: 0 if isinstance(op, Send) else 1 if isinstance(op, Recv) else 2)
    ]


def _heading(rank: int) -> str:
    return f"rank {rank}"


def _results(results: dict[int, Expression]) -> Iterator[str]:
    for segment, expression in list(results.items())[:_SHOWN_RESULTS]:
        yield f"out[{segment}] = finish({_sum(expression)})"
    if len(results) > _SHOWN_RESULTS:
        yield f"… and {len(results) - _SHOWN_RESULTS} more"


def _sum(expression: Expression) -> str:
    """Return a sum as text. Sums associate to the left, so only sums on the right of a + are in brackets."""
    terms: list[str] = []
    while isinstance(expression, tuple):
        expression, right = expression
        terms.append(f"({_sum(right)})" if isinstance(right, tuple) else f"x{right}")
    return " + ".join([f"x{expression}", *reversed(terms)])


def _summary(schedule: Schedule) -> str:
    counted = cost(schedule)
    return (
        f"verified ✓ · {_plural(counted.rounds, 'round')} with messages · "
        f"a rank sends at most {counted.most_sent} S and receives at most {counted.most_received} S "
        f"(S: {'one input' if schedule.collective == 'all_to_all' else 'the whole array'})"
    )


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
