"""Tests that the rounds and bytes in the docstring of each algorithm are those of its schedules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import ModuleType

import pytest

from gradwire.collectives import Send, algorithms, build, direct, halving, hierarchical, ring, star, tree
from gradwire.collectives.cost import Cost, cost
from gradwire.topology import Topology

HEADING = ["collective", "rounds", "most sent by a rank", "most received by a rank"]
FLAT = {"star": star, "ring": ring, "tree": tree, "halving": halving, "direct": direct}


@dataclass(frozen=True)
class Statement:
    """A row of the table in a docstring. The cells are Python expressions; a bound starts with `<=`."""

    algorithm: str
    collective: str
    rounds: str
    sent: str
    received: str

    def check(self, counted: Cost, names: Mapping[str, int], *, exactly: bool) -> None:
        for stated, actual in (
            (self.rounds, Fraction(counted.rounds)),
            (self.sent, counted.most_sent),
            (self.received, counted.most_received),
        ):
            value = _evaluate(stated.removeprefix("<="), names)
            if stated.startswith("<=") and not exactly:
                assert actual <= value, (self, names)
            else:
                assert actual == value, (self, names)


def _evaluate(expression: str, names: Mapping[str, int]) -> Fraction:
    exact = {name: Fraction(value) for name, value in names.items()}
    return Fraction(eval(expression.strip(), {"__builtins__": {}}, exact))


def statements(algorithm: str, module: ModuleType) -> list[Statement]:
    rows = [line.strip("| ").split("|") for line in (module.__doc__ or "").splitlines() if line.startswith("|")]
    heading, rule, *body = [[cell.strip() for cell in row] for row in rows]
    assert heading == HEADING
    assert set("".join(rule)) == {"-"}
    # The table of `direct` has a row with the name `oneshot`, for the one-shot all-reduce.
    return [
        Statement("oneshot", "all_reduce", *cells) if name == "oneshot" else Statement(algorithm, name, *cells)
        for name, *cells in body
    ]


STATEMENTS = [statement for name, module in FLAT.items() for statement in statements(name, module)]


def test_docstring_tables_have_a_row_for_every_collective_and_algorithm() -> None:
    stated = {(s.collective, s.algorithm) for s in STATEMENTS}
    stated |= {(s.collective, "hierarchical") for s in statements("hierarchical", hierarchical)}
    cells = {(c, a) for c in {s.collective for s in STATEMENTS} for a in algorithms(c)}
    assert stated == cells | {("all_reduce", "oneshot")}


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda s: f"{s.algorithm}-{s.collective}")
def test_docstring_statement_equals_the_counted_cost(statement: Statement) -> None:
    for n in (*range(1, 20), 23, 24, 31, 32, 33, 48):
        power = n & (n - 1) == 0
        k = math.floor(math.log2(n)) if statement.algorithm == "halving" else (n - 1).bit_length()
        names = {"n": n, "k": k, "x": 0 if power else 1}
        for root in {0, n // 2}:
            counted = cost(build(statement.collective, statement.algorithm, n, root=root))
            statement.check(counted, names, exactly=power)


@pytest.mark.parametrize("statement", statements("hierarchical", hierarchical), ids=lambda s: s.collective)
def test_docstring_statement_of_hierarchical_equals_the_counted_cost(statement: Statement) -> None:
    for hosts in range(1, 6):
        for local in range(1, 6):
            topology = Topology.of([str(rank % hosts) for rank in range(hosts * local)])
            for root in {0, hosts * local - 1}:
                schedule = build(statement.collective, "hierarchical", topology.size, topology=topology, root=root)
                statement.check(cost(schedule), {"h": hosts, "l": local}, exactly=True)


def test_docstring_check_of_a_wrong_statement_fails() -> None:
    counted = cost(build("all_reduce", "ring", 4))
    with pytest.raises(AssertionError):
        Statement("ring", "all_reduce", "2 * n", "2 * (n - 1) / n", "2 * (n - 1) / n").check(
            counted, {"n": 4}, exactly=True
        )


def test_hierarchical_hosts_exchange_as_much_as_a_ring_of_hosts() -> None:
    topology = Topology.of(list("aaabbcaab"))
    schedule = build("all_reduce", "hierarchical", topology.size, topology=topology)
    between = [Fraction(0)] * len(topology.hosts)
    for rank in range(schedule.size):
        for op in (op for ops in schedule.program(rank) for op in ops if isinstance(op, Send)):
            remote = sum(topology.host_of(to) != topology.host_of(rank) for to in op.to)
            between[topology.host_of(rank)] += Fraction(remote * op.slice.count, schedule.segments)
    assert between == [Fraction(4, 3)] * 3
