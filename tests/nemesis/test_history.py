"""The history checker of the nemesis test, applied to handmade histories with and without faults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gradwire.identity import next_run
from nemesis.history import NOT_YET, Record, broken_promises, read, summary

PERIOD = 1.0  # seconds between two steps
MEMBERS = ("a", "b", "c")


def state(run: str, step: int) -> str:
    return f"{run}.{step}"


def one_step(run: str, step: int, generation: int = 1, members: tuple[str, ...] = MEMBERS) -> list[Record]:
    """Each member begins a step, and records that it is committed."""
    start = step * PERIOD
    records = []
    for number, member in enumerate(members):
        began, ended = start + 0.1 * number, start + 0.5 + 0.1 * number
        begin = Record("begin", run, generation, step, NOT_YET, state(run, step - 1), f"{run}-{member}", began, began)
        records += [begin, replace(begin, kind="commit", digest=state(run, step), time=ended)]
    return records


def good(run: str = "first", steps: int = 10, change: int = 6) -> list[Record]:
    """A history of one run, whose second generation goes on at step `change` without member a."""
    records = []
    for step in range(steps):
        newer = step >= change
        records += one_step(run, step, 2 if newer else 1, MEMBERS[1:] if newer else MEMBERS)
    return records


def changed(records: list[Record], step: int, member: str, **fields: object) -> list[Record]:
    """The same records, but for one commit."""
    found = [one for one in records if (one.kind, one.step, one.member) == ("commit", step, f"first-{member}")]
    assert found
    return [replace(one, **fields) if one is found[0] else one for one in records]  # type: ignore[arg-type]


def without(records: list[Record], *steps: int) -> list[Record]:
    """The same records without any trace of these steps, nor of what the next ones began with."""
    gone = {*steps, *(step + 1 for step in steps)}
    return [one for one in records if one.step not in gone]


def test_checker_one_history_for_each_run_finds_nothing() -> None:
    assert broken_promises(good("first") + good("second")) == []


def test_checker_no_records_finds_nothing() -> None:
    assert broken_promises([]) == []


def test_checker_unrecorded_commit_is_inferred_from_the_next_step() -> None:
    records = [one for one in good() if (one.kind, one.step) != ("commit", 4)]
    assert broken_promises(records) == []


def test_checker_late_line_of_a_stopped_worker_finds_nothing() -> None:
    assert broken_promises(changed(good(), 5, "a", time=100.0)) == []


def test_checker_two_digests_for_one_step_are_found() -> None:
    (found,) = broken_promises(changed(good(), 9, "c", digest="other"))
    assert "step 9 was committed with 2 different states" in found
    assert "first-b" in found
    assert "other on first-c" in found


def test_checker_step_that_the_next_step_does_not_build_on_is_found() -> None:
    records = [replace(one, parent="first.old") if one.step == 7 else one for one in good()]
    (found,) = broken_promises(records)
    assert "step 6 was committed with 2 different states" in found


def test_checker_step_missing_from_all_records_is_found() -> None:
    (found,) = broken_promises(without(good(), 2, 3))
    assert "2 steps before step 9 are not part of its history: 2, 3" in found


def test_checker_run_that_begins_in_the_middle_is_found() -> None:
    (found,) = broken_promises([one for one in good() if one.step > 5])
    assert "it begins with step 6, and with state first.5, which no run that it replaces had after 5" in found


def replacing(replacements: int, base: int = 4) -> list[Record]:
    """A run, and the one that was begun in its place by member c, which had the state of an earlier step only."""
    first = second = bytes(16)
    for _ in range(replacements):
        second = next_run(second)
    before = good(first.hex())
    after = [one for one in good(second.hex()) if one.step > base]
    after = [replace(one, parent=state(first.hex(), base)) if one.step == base + 1 else one for one in after]
    return before + [replace(one, member=f"{first.hex()}-c") if one.member.endswith("-c") else one for one in after]


@pytest.mark.parametrize("replacements", [1, 3])
def test_checker_replacing_run_that_begins_with_the_old_state_finds_nothing(replacements: int) -> None:
    assert broken_promises(replacing(replacements)) == []


def test_checker_replacing_run_that_begins_with_an_unknown_state_is_found() -> None:
    records = [replace(one, parent="unknown") if one.parent.endswith("0.4") else one for one in replacing(1)]
    found = broken_promises([*good(bytes(16).hex()), *records[len(good()) :]])
    assert len(found) == 1
    assert "it begins with step 5, and with state unknown, which no run that it replaces had after 4" in found[0]


def test_checker_state_of_a_replaced_run_that_comes_back_later_is_found() -> None:
    records = replacing(1)
    stray = replace(records[-1], digest=state(bytes(16).hex(), 9))
    assert any("the state that run" in text for text in broken_promises([*records[:-1], stray]))


def test_checker_commit_dropped_and_repeated_differently_is_found() -> None:
    """Member a committed step 6 in generation 1; generation 2 goes on from step 5, and does step 6 in another way."""
    lost = Record("commit", "first", 1, 6, "lost", state("first", 5), "first-a", 5.9, 5.95)
    found = broken_promises([*good(), lost])
    assert any("step 6 was committed with 2 different states" in text for text in found)
    assert any("generations 1, 2 have each committed step 6" in text for text in found)


def test_checker_older_generation_that_commits_a_later_step_is_found() -> None:
    stale = Record("commit", "first", 1, 10, state("first", 10), state("first", 9), "first-a", 9.8, 9.9)
    found = broken_promises([*good(), stale])
    assert any(
        "generation 1 committed step 10, and the newer generation 2 had committed step 6" in one for one in found
    )


def test_checker_older_generation_that_begins_behind_the_newer_one_is_found() -> None:
    """The state is the same, so only the order of events shows that two generations were at work."""
    (found,) = broken_promises(changed(good(), 5, "a", began=9.0, time=9.1))
    assert "first-a began step 5 in generation 1" in found
    assert "after first-b had committed step 5 in generation 1" in found


def test_checker_two_generations_that_commit_the_same_step_are_found() -> None:
    found = broken_promises(good() + one_step("first", 7, 1, ("a",)))
    assert found == ["run first: generations 1, 2 have each committed step 7", *found[1:]]
    assert "generation 1 committed step 7, and the newer generation 2 had committed step 6" in found[1]


def test_checker_steps_of_one_member_that_go_backwards_are_found() -> None:
    again = [replace(one, began=one.began + 20, time=one.time + 20) for one in one_step("first", 3, 1, ("a",))]
    found = broken_promises(good() + again)
    assert any("first-a committed step 3 after step 5" in text for text in found)
    assert any("first-a began step 3 in generation 1" in text for text in found)


def test_checker_member_that_moves_to_another_run_is_found() -> None:
    moved = [replace(one, member="first-a") if one.member == "second-a" else one for one in good("second")]
    (found,) = broken_promises(good("first") + moved)
    assert found == "first-a has committed steps of 2 runs: first, second"


def test_checker_run_that_continues_with_the_state_of_another_is_found() -> None:
    """What a coordinator without its journal must not let happen: the old run's steps become the new run's."""
    new = [one for one in good("second") if one.step < 3]
    taken = [replace(one, run="second", member=f"new-{one.member}") for one in good("first") if one.step >= 8]
    found = broken_promises(good("first") + new + taken)
    assert "run second: 4 steps before step 9 are not part of its history: 3, 4, 5, 6" in found
    assert any("run second holds at step 7 the state that run first had at step 7" in one for one in found)


def test_checker_many_faults_of_one_kind_are_counted() -> None:
    records = [replace(one, digest=f"{one.digest} {one.member}") if one.kind == "commit" else one for one in good()]
    found = broken_promises(records)
    assert found[5] == "… and 5 more like that"


def test_record_line_round_trip_is_lossless() -> None:
    for record in good():
        assert Record.from_line(record.line()) == record


def test_record_of_unknown_kind_raises_value_error() -> None:
    with pytest.raises(ValueError, match="not a record"):
        Record.from_line(good()[0].line().replace("begin", "end"))


def test_read_incomplete_last_line_is_left_out(tmp_path: Path) -> None:
    records = good()
    text = "".join(record.line() for record in records)
    (tmp_path / "worker.txt").write_text(text + records[0].line()[:20])
    assert read(tmp_path) == records


def test_summary_counts_steps_runs_generations_and_workers() -> None:
    assert summary(good()) == "10 committed steps of 1 runs in 2 generations by 3 workers"
