"""The examples that write checkpoints: stopped by a signal and started again, they end with the weights of one run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import gradwire

EXAMPLES = Path(__file__).parents[2] / "examples"
DIGITS = ("-m", "gradwire", "run", "-n", "2", str(EXAMPLES / "digits.py"))
GPT = (str(EXAMPLES / "gpt_torchrun.py"), "--steps", "120")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", *GPT)


def run(*command: str, stop: tuple[str, int] | None = None, rank: bool = False) -> tuple[int, str]:
    """Run Python with these arguments. Return its exit code and its output.

    `stop` is a text and a signal: when a line contains the text, the process gets the signal, or rank 1 that
    printed its pid if `rank` is set.
    """
    source = str(Path(gradwire.__file__).parents[1])
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("GRADWIRE_", "FORCE_COLOR"))}
    environ |= {"PYTHONPATH": source, "PYTHONUTF8": "1", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
    started = subprocess.Popen(
        [sys.executable, *command], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines: list[str] = []
    with started:
        assert started.stdout is not None
        for line in started.stdout:
            lines.append(line)
            if stop is not None and stop[0] in line:
                os.kill(pid_of_rank_1(lines) if rank else started.pid, stop[1])
                stop = None
    assert stop is None, "".join(lines)
    return started.returncode, "".join(lines)


def pid_of_rank_1(lines: list[str]) -> int:
    found = re.search(r"rank 1 of 2, pid (\d+)", "".join(lines))
    assert found is not None, lines
    return int(found[1])


def digests(output: str) -> set[str]:
    return set(re.findall(r"(?:ends with|on all ranks,) (\w{8})$", output, re.MULTILINE))


def step_after(words: str, output: str) -> int:
    """Return the step that follows these words, the same on all ranks that print it."""
    (step,) = set(re.findall(rf"{words} after step (\d+)", output))
    return int(step)


@pytest.mark.slow
def test_digits_example_stopped_by_a_signal_continues_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    first = (*DIGITS, "--checkpoint", str(tmp_path / "a"))
    code, output = run(*first, stop=("epoch   8", signal.SIGUSR2), rank=True)
    assert code == 128 + signal.SIGUSR2, output
    stopped = step_after("stops", output)
    assert stopped >= 8 * 15 - 1
    assert f"step-{stopped:012}" in output

    code, output = run(*first)
    assert code == 0, output
    assert step_after("continues", output) == stopped
    resumed = digests(output)

    code, output = run(*DIGITS, "--checkpoint", str(tmp_path / "b"))
    assert code == 0, output
    assert "continues" not in output
    assert len(resumed) == 1
    assert digests(output) == resumed


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [TORCHRUN, ("-m", "gradwire", "run", "-n", "2", *GPT)], ids=["torchrun", "gradwire"]
)
def test_gpt_example_stopped_by_sigterm_continues_and_ends_with_the_same_weights(
    launcher: tuple[str, ...], tmp_path: Path
) -> None:
    first = (*launcher, "--checkpoint", str(tmp_path / "a"))
    code, output = run(*first, stop=("step 50", signal.SIGTERM))
    assert code == (1 if launcher is TORCHRUN else 128 + signal.SIGTERM), output
    assert "step 100" not in output

    code, output = run(*first)
    assert code == 0, output
    assert 50 <= step_after("continues", output) < 100
    resumed = digests(output)

    code, output = run(*launcher)
    assert code == 0, output
    assert "continues" not in output
    assert len(resumed) == 1
    assert digests(output) == resumed
