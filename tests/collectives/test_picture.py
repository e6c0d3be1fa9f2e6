"""Tests the pictures of schedules, and the command that draws them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gradwire.collectives import InvalidSchedule, build
from gradwire.collectives.__main__ import main
from gradwire.collectives.picture import draw
from support.schedule_mutations import with_program
from support.schedule_table import CELLS, schedules

RING_OF_THREE = """\
all_reduce · ring · 3 ranks · 3 segments

         │ rank 0              │ rank 1              │ rank 2
─────────┼─────────────────────┼─────────────────────┼─────────────────────
round 0  │ in[2] → 1           │ in[0] → 2           │ in[1] → 0
         │ acc[1] = ←2 + in[1] │ acc[2] = ←0 + in[2] │ acc[0] = ←1 + in[0]
─────────┼─────────────────────┼─────────────────────┼─────────────────────
round 1  │ acc[1] → 1          │ acc[2] → 2          │ acc[0] → 0
         │ acc[0] = ←2 + in[0] │ acc[1] = ←0 + in[1] │ acc[2] = ←1 + in[2]
─────────┼─────────────────────┼─────────────────────┼─────────────────────
round 2  │ out[0] ⇐ acc[0]     │ out[1] ⇐ acc[1]     │ out[2] ⇐ acc[2]
─────────┼─────────────────────┼─────────────────────┼─────────────────────
round 3  │ out[0] → 1          │ out[1] → 2          │ out[2] → 0
         │ out[2] ← 2          │ out[0] ← 0          │ out[1] ← 1
─────────┼─────────────────────┼─────────────────────┼─────────────────────
round 4  │ out[2] → 1          │ out[0] → 2          │ out[1] → 0
         │ out[1] ← 2          │ out[2] ← 0          │ out[0] ← 1

in, out, acc   input, output and partial results, by segment
x → r          sent to rank r
x ← r          received from rank r; ←r in a sum is a term received from rank r
x ⇐ y          finished: divided for a mean, and rounded

out[0] = finish(x1 + x2 + x0)
out[1] = finish(x2 + x0 + x1)
out[2] = finish(x0 + x1 + x2)

verified ✓ · 4 rounds with messages · a rank sends at most 4/3 S and receives at most 4/3 S (S: the whole array)
"""


def test_picture_of_a_ring_shows_rounds_legend_and_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ring", "3", "--width", "120"]) == 0
    assert capsys.readouterr().out == RING_OF_THREE


def test_picture_runs_as_a_module() -> None:
    command = [sys.executable, "-X", "utf8", "-m", "gradwire.collectives", "ring", "5"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.startswith("all_reduce · ring · 5 ranks · 5 segments\n")
    assert "verified ✓ · 8 rounds with messages" in done.stdout
    assert done.stderr == ""


def test_picture_of_many_ranks_is_split_into_rows() -> None:
    narrow = draw(build("all_reduce", "ring", 5), width=60)
    assert max(map(len, narrow.split("in, out, acc")[0].splitlines())) <= 60
    headings = [line for line in narrow.splitlines() if "│ rank" in line]
    assert [heading.count("rank") for heading in headings] == [2, 2, 1]


def test_picture_puts_right_operands_in_brackets() -> None:
    assert "out[0] = finish(x0 + x1 + (x2 + x3) + x4)\n" in draw(build("all_reduce", "tree", 5))


def test_picture_shows_hosts_and_roots(capsys: pytest.CaptureFixture[str]) -> None:
    main(["hierarchical", "5", "--hosts", "2,3", "--collective", "broadcast", "--root", "1"])
    assert capsys.readouterr().out.startswith("broadcast · hierarchical · 5 ranks · root 1 · 6 segments\n")


@pytest.mark.parametrize(("collective", "algorithm"), CELLS)
def test_picture_of_every_cell_can_be_drawn(collective: str, algorithm: str) -> None:
    for size in (1, 2, 11):
        for schedule in schedules(collective, algorithm, size, roots=1):
            assert "verified ✓" in draw(schedule)


def test_picture_of_a_wrong_schedule_is_refused() -> None:
    schedule = build("broadcast", "star", 2)
    with pytest.raises(InvalidSchedule):
        draw(with_program(schedule, 1, ((),)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("ring 4 --collective gather", "gather has no algorithm 'ring'; it has: star, direct"),
        ("ring 0", "a collective needs at least 1 rank, got 0"),
        ("ring 4 --collective all_gather --root 9", "root 9 is not one of the ranks 0 … 3"),
        ("hierarchical 4 --hosts 2,3", "the topology has 5 ranks, the collective 4"),
        ("hierarchical 4 --hosts two", "'two' is not a list of counts, such as 2,3"),
    ],
)
def test_picture_command_mistakes_are_reported(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
