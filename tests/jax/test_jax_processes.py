"""Compiled JAX programs with asynchronous dispatch in processes of which one is killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradwire

TRAIN = """
import os, signal, sys
import jax, jax.numpy as jnp
import gradwire as gw

with gw.init() as group:
    state = gw.jax.State(w=jnp.zeros((400, 400)))
    run = gw.elastic(state)
    heavy = jax.jit(lambda w: jnp.tanh(w @ w.T) * 0)
    update = gw.jax.jit(lambda w, x: w + gw.jax.all_reduce(run, x + 1.0))
    for step in run.steps(20):
        with step:
            if step.index == 10 and group.rank == 1 and run.group.generation == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                state.w = update(state.w, heavy(state.w))  # the operand is still being computed
            except gw.PeerLost as lost:
                print("lost", lost.culprit, flush=True)
                raise
    print("ended", float(state.w.min()), float(state.w.max()), run.group.size, run.identical, flush=True)
"""


def run(tmp_path: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(source)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GRADWIRE_")}
    environ |= {"PYTHONPATH": str(Path(gradwire.__file__).parents[1]), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "gradwire", "run", *options, str(script)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.slow
def test_jax_jit_killed_rank_raises_peer_lost_and_the_elastic_run_continues(tmp_path: Path) -> None:
    outcome = run(tmp_path, TRAIN, "-n", "3", "--min", "2")
    output = f"exit code {outcome.returncode}\n{outcome.stdout}\n{outcome.stderr}"
    assert outcome.returncode == 0, output
    assert outcome.stdout.count("lost 1\n") == 2, output
    assert re.findall(r"ended (.*)\n", outcome.stdout) == ["20.0 20.0 2 True"] * 2, output


@pytest.mark.slow
def test_jax_jit_killed_rank_in_a_job_of_fixed_size_raises_peer_lost(tmp_path: Path) -> None:
    outcome = run(tmp_path, TRAIN, "-n", "2")
    assert outcome.returncode != 0
    assert "lost 1\n" in outcome.stdout, f"{outcome.stdout}\n{outcome.stderr}"
