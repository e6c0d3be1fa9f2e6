"""Scripts of faults: how their text is parsed, and which actions are due when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import ConfigError
from gradwire.launch.fault_injection import LASTING, TARGETS, Chaos, Fault, FaultAction, Script, parse

seconds = st.integers(0, 10**9).map(lambda milliseconds: milliseconds / 1000)
numbers = st.integers(0, 999)


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    action = draw(st.sampled_from(sorted(TARGETS)))
    count = TARGETS[action]
    targets = draw(st.lists(numbers, min_size=count, max_size=count, unique=True).map(tuple))
    chosen = None if count and draw(st.booleans()) else targets
    every = draw(st.none() | seconds.filter(lambda value: value > 0))
    duration = draw(st.none() | seconds) if action in LASTING else None
    return Fault(action, chosen, draw(seconds), every, duration)


@given(st.lists(faults(), min_size=1, max_size=5), st.none() | numbers)
def test_parse_reads_the_text_of_a_plan_again(written: list[Fault], seed: int | None) -> None:
    text = "; ".join([*map(str, written), *([f"seed {seed}"] if seed is not None else [])])
    assert parse(text) == Script(tuple(written), seed)


@given(st.text(alphabet=" ;@-0123456789.\nskilfreezcutarndomvyhj", max_size=60))
def test_parse_any_text_is_read_or_refused(text: str) -> None:
    try:
        script = parse(text)
    except ConfigError:
        return
    assert parse("; ".join(map(str, script.faults))).faults == script.faults


def test_parse_ignores_spaces_and_the_order_of_times() -> None:
    (one,) = parse("  freeze 1 for 3s every 1min @ 8s ;; ").faults
    assert one == Fault("freeze", (1,), 8.0, 60.0, 3.0)
    assert parse("cut 0-3 @12s\nrestart coordinator every 500ms").faults == (
        Fault("cut", (0, 3), 12.0),
        Fault("restart coordinator", (), 0.5, 0.5),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is no statement"),
        ("seed 3", "there is no statement"),
        ("kil 2 @5s", "'kil 2 @5s': there is no 'kil'; there are kill, freeze, cut, restart coordinator, join"),
        ("kill 2 @5s; kill @5s", "'kill @5s': 'kill' needs a worker"),
        ("kill", "'kill' needs a worker: write for example 'kill 2 @5s' or 'kill random @5s'"),
        ("kill two @5s", "'two' does not name a worker"),
        ("cut 3 @5s", "'3' does not name two workers: write for example 'cut 0-3 @5s'"),
        ("cut 3-3 @5s", "names one worker twice"),
        ("kill 2", "the time is missing"),
        ("kill 2 @5", "'5' is not a time; write 5s, 0.5s, 500ms or 2min"),
        ("kill 2 @-5s", "'-5s' is not a time"),
        ("kill 2 @", "after '@' a time is missing"),
        ("kill 2 @1s @2s", "'@' is given twice"),
        ("kill 2 soon", "'soon' is not understood"),
        ("kill 2 every 0s", "would never end"),
        ("kill 2 @1s for 2s", "'kill' does not last"),
        ("restart @1s", "there is no 'restart'"),
        ("seed x; kill 1 @1s", "a seed is one whole number"),
    ],
)
def test_parse_mistake_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert said in str(caught.value)


def chaos(text: str, seed: int = 0) -> Chaos:
    return Chaos(parse(text), seed)


def test_due_returns_actions_at_their_times() -> None:
    plan = chaos("kill 2 @5s; freeze 1 @8s for 3s; cut 0-3 @12s; restart coordinator @15s")
    done = [(time, event) for time in range(17) for event in plan.due(time, range(4))]
    assert done == [
        (5, FaultAction("kill", (2,))),
        (8, FaultAction("freeze", (1,), 3.0)),
        (11, FaultAction("resume", (1,))),
        (12, FaultAction("cut", (0, 3))),
        (15, FaultAction("restart coordinator", ())),
    ]
    assert plan.next_due is None  # the cut lasts
    assert plan.stop(range(4)) == [FaultAction("heal", (0, 3))]


def test_due_repeated_action_keeps_its_interval_without_catching_up() -> None:
    plan = chaos("kill 0 @1s every 2s")
    assert plan.next_due == 1.0
    assert [len(plan.due(now, [0])) for now in (0.9, 1.0, 1.5, 3.1, 20.0, 20.5, 21.0)] == [0, 1, 0, 1, 1, 0, 1]


def test_due_action_for_a_dead_worker_is_marked_missing() -> None:
    plan = chaos("kill 2 @1s; freeze 1 @1s for 1s; cut 1-2 @1s; kill random @1s")
    assert plan.due(1, [1]) == [
        FaultAction("kill", (2,), missing=True),
        FaultAction("freeze", (1,), 1.0),
        FaultAction("cut", (1, 2), missing=True),
        FaultAction("kill", (1,)),
    ]
    assert plan.due(3, []) == []  # it died before it was to resume
    assert chaos("kill random @1s").due(1, []) == [FaultAction("kill", (), missing=True)]


@given(st.integers(0, 2**32), st.sets(numbers, min_size=2, max_size=8))
def test_due_random_choice_depends_on_the_seed(seed: int, living: set[int]) -> None:
    text = "kill random every 1s; cut random every 1s"
    one, two = chaos(text, seed), chaos(f"seed {seed % 1000}; {text}", 5)
    for now in range(1, 6):
        events = one.due(now, living)
        assert [len(event.targets) for event in events] == [1, 2]
        assert all(set(event.targets) <= living for event in events)
    assert two.seed == seed % 1000
    again = chaos(text, seed)
    assert again.due(1, sorted(living)) == chaos(text, seed).due(1, living)


def test_due_frozen_worker_is_not_frozen_again() -> None:
    plan = chaos("freeze random every 1s for 10s", seed=3)
    frozen = [event.targets for now in (1, 2, 3) for event in plan.due(now, range(3))]
    assert sorted(frozen) == [(0,), (1,), (2,)]
    assert plan.due(4, range(3)) == [FaultAction("freeze", (), 10.0, missing=True)]
