"""Runs the fuzz targets with atheris, which searches for inputs that reach new branches. From the project's root:

    PYTHONPATH=tests python -m fuzz.atheris                       all targets, 10 seconds each
    PYTHONPATH=tests python -m fuzz.atheris --seconds 600 header  some targets, for longer
    PYTHONPATH=tests python -m fuzz.atheris header --input FILE   one input again

The inputs that were found stay in build/fuzz/TARGET/corpus, and the next run begins with them. Inputs that break a
target are written to build/fuzz/TARGET.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOUND = Path("build", "fuzz")
LONGEST_INPUT = 4096
MOST_MEMORY = 2048  # MiB of resident memory
LONGEST_RUN = 30  # seconds for one input, on a busy machine


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.atheris")
    parser.add_argument("names", nargs="*", metavar="TARGET")
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--input", type=Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        print("skipped: atheris is not installed here (pip install atheris; it needs Linux and CPython 3.11 to 3.13)")
        return 0
    if options.here:
        return fuzz(options.names[0], options.seconds)
    from fuzz.catalogue import TARGETS

    names = options.names or list(TARGETS)
    if unknown := set(names) - set(TARGETS):
        parser.error(f"no such target: {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    if options.input is not None:
        print("accepted" if TARGETS[names[0]].run(options.input.read_bytes()) else "refused")
        return 0
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return int(not all(list(pool.map(lambda name: attempt(name, options.seconds), names))))


def attempt(name: str, seconds: int) -> bool:
    """Fuzz a target in its own process, which may crash. Print the result, and return whether it succeeded."""
    command = [sys.executable, "-m", "fuzz.atheris", name, "--here", "--seconds", str(seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    runs = re.findall(r"number_of_executed_units: (\d+)", done.stdout)
    edges = re.findall(r" cov: (\d+)", done.stdout)
    if done.returncode == 0 and runs:
        print(f"{name:24} {int(runs[-1]):>9,} inputs {int(edges[-1] if edges else 0):>6,} branches", flush=True)
        return True
    output = [line for line in done.stdout.splitlines() if not line.startswith(("INFO: ", "#"))]  # without progress
    print(f"{name}: FAILED", *output, sep="\n", flush=True)
    return False


def fuzz(name: str, seconds: int) -> int:
    import atheris

    with atheris.instrument_imports(include=["gradwire"]):
        from fuzz.catalogue import TARGETS
    logging.disable()
    target = TARGETS[name]
    corpus = FOUND / name.replace(" ", "-") / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds):
        (corpus / f"seed-{number}").write_bytes(seed)

    def feed(data: bytes) -> None:
        target.run(data)

    bounds = f"-max_total_time={seconds} -max_len={LONGEST_INPUT} -timeout={LONGEST_RUN} -rss_limit_mb={MOST_MEMORY}"
    places = ["-print_final_stats=1", f"-artifact_prefix={corpus.parent}/", str(corpus)]
    atheris.Setup([sys.argv[0], *bounds.split(), *places], feed)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
