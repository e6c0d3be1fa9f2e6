"""Simulate one job per seed, with faults, until a job breaks an invariant."""

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
    parser.add_argument("--seeds", type=int, help="number of seeds (default: 1000; with --minutes: no limit)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--members", type=int, help="members at the start (default: drawn from the seed)")
    parser.add_argument(
        "--faults",
        type=_kinds,
        default="usual",
        help=f"usual (default), rare, all, or a comma-separated list of {', '.join(KINDS)}",
    )
    parser.add_argument("--minutes", type=float, help="stop after this many minutes")
    parser.add_argument("--keep-going", action="store_true", help="continue after a broken invariant")
    chosen = parser.parse_args(arguments)
    seeds = chosen.seeds if chosen.seeds is not None else 1000 if chosen.minutes is None else sys.maxsize
    began = last_report = time.monotonic()
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
        if now - last_report >= 10:
            last_report = now
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
    """Return the summary that is printed after the last seed."""
    done = len(outcomes) + len(broken)
    lines = [f"{done} seeds in {seconds:.1f} s, {60 * done / max(seconds, 1e-9):.0f} per minute; {len(broken)} broken"]
    if outcomes:
        endings = Counter(outcome.ending for outcome in outcomes)
        recoveries = sorted(outcome.recovery for outcome in outcomes if outcome.ending == "continued") or [0.0]
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
        lines.append(f"from the last fault to the next committed step: median {median:.2f} s, worst {worst:.2f} s")
    if broken:
        lines.append("broken: " + ", ".join(f"{violation.seed}" for violation in broken[:50]))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
