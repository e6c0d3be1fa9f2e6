"""`python -m gradwire.simulate --seeds 1000`: simulate jobs, seed by seed, until one breaks an invariant."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from gradwire.simulate import faults
from gradwire.simulate.faults import KINDS
from gradwire.simulate.invariants import Violation
from gradwire.simulate.world import Outcome, World


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gradwire.simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=None, help="how many (1000, or as many as --minutes allow)")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--members", type=int, default=None, help="members at the start (drawn from the seed)")
    parser.add_argument("--faults", type=_kinds, default="usual", help=f"usual, rare, all, or of {', '.join(KINDS)}")
    parser.add_argument("--minutes", type=float, default=None, help="stop after so many")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first broken invariant")
    chosen = parser.parse_args(arguments)
    seeds = chosen.seeds if chosen.seeds is not None else 1000 if chosen.minutes is None else sys.maxsize
    began = told = time.monotonic()
    outcomes: list[Outcome] = []
    broken: list[Violation] = []
    for seed in range(chosen.first, chosen.first + seeds):
        try:
            outcomes.append(World(seed, members=chosen.members, kinds=chosen.faults).run())
        except Violation as violation:
            broken.append(violation)
            print(violation, flush=True)
            if not chosen.keep_going:
                break
        now = time.monotonic()
        if now - told >= 10:
            told = now
            done = len(outcomes) + len(broken)
            print(f"{done} seeds in {now - began:.0f} s, {len(broken)} broken", flush=True)
        if chosen.minutes is not None and now - began >= chosen.minutes * 60:
            break
    print(summary(outcomes, broken, time.monotonic() - began))
    return 1 if broken else 0


def _kinds(text: str) -> frozenset[str]:
    try:
        return faults.chosen(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def summary(outcomes: list[Outcome], broken: list[Violation], seconds: float) -> str:
    """What came of it, for people to read."""
    done = len(outcomes) + len(broken)
    lines = [f"{done} seeds in {seconds:.1f} s, {60 * done / max(seconds, 1e-9):.0f} each minute; {len(broken)} broken"]
    if outcomes:
        endings = Counter(outcome.ending for outcome in outcomes)
        recoveries = sorted(outcome.recovery for outcome in outcomes if outcome.ending == "went on") or [0.0]
        totals = (
            f"{sum(outcome.steps for outcome in outcomes)} steps",
            f"{sum(outcome.generations for outcome in outcomes)} generations",
            f"{sum(outcome.events for outcome in outcomes)} events",
            f"{sum(outcome.seconds for outcome in outcomes) / 3600:.1f} hours simulated",
        )
        median, worst = recoveries[len(recoveries) // 2], recoveries[-1]
        lines.append(", ".join(f"{ending}: {number}" for ending, number in endings.most_common()))
        lines.append(", ".join(totals))
        kinds = Counter(kind for outcome in outcomes for kind in outcome.faults)
        lines.append("faults: " + (", ".join(f"{kind} {number}" for kind, number in kinds.most_common()) or "none"))
        lines.append(f"from the last fault to the next step: median {median:.2f} s, worst {worst:.2f} s")
    if broken:
        lines.append("broken: " + ", ".join(f"{violation.seed}" for violation in broken[:50]))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
