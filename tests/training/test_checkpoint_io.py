"""The thread of the training loop does no file I/O for checkpoints, also if the disk is slow."""

from __future__ import annotations

import os
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import gradwire as gw


def train(folder: str, steps: int) -> tuple[list[str], list[str], int]:
    """Return what the loop's thread and other threads did with files while the second and later ones were written."""
    import numpy as np

    from gradwire.training.checkpoints import tensor_file
    from gradwire.training.checkpoints.files import write_all

    calls: list[tuple[bool, str]] = []
    loop = threading.get_ident()
    recording = False

    def record(event: str, args: Any) -> None:
        if not recording or not (event == "open" or event.startswith(("os.", "shutil.", "fcntl."))):
            return
        target = args[0] if args else ""
        if isinstance(target, int) and not stat.S_ISREG(os.fstat(target).st_mode):
            return  # a pipe that wakes another thread, or a folder
        calls.append((threading.get_ident() == loop, f"{event} {target}"))

    def slowly(descriptor: int, data: Any) -> None:
        time.sleep(0.02)  # a slow disk; nothing waits for this
        write_all(descriptor, data)

    setattr(tensor_file, "write_all", slowly)  # noqa: B010
    for name in ("write", "fsync", "read"):  # without audit events
        original = getattr(os, name)

        def audited(*args: Any, name: str = name, original: Any = original, **options: Any) -> Any:
            record(f"os.{name}", args)
            return original(*args, **options)

        setattr(os, name, audited)
    sys.addaudithook(record)
    state = {"w": np.zeros(1 << 18), "b": np.zeros(1 << 10)}
    run = gw.elastic(state, checkpoint=folder, checkpoint_every=3)
    seen = set()
    for step in run.steps(steps):
        with step:
            state["w"] += run.group.all_reduce(np.ones(1 << 18))
            time.sleep(0.005)
        seen.add(run.last_checkpoint)
        recording = len(seen) > 1  # the first one is complete
    recording = False
    run.close()
    by_loop = sorted({call for of_loop, call in calls if of_loop})
    others = sorted({call.split()[0] for of_loop, call in calls if not of_loop})
    return by_loop, others, len(seen - {None})


@pytest.mark.parametrize("ranks", [1, 2])
def test_loop_does_no_file_io_from_the_second_checkpoint_on(ranks: int, tmp_path: Path) -> None:
    results = gw.launch(train, ranks, args=(str(tmp_path / "c"), 60))
    for by_loop, others, complete in results:
        assert by_loop == []
        assert {"open", "os.write", "os.fsync"} <= set(others)  # the recorder works
        assert complete > 2
    assert {"os.rename", "os.listdir"} <= set(results[0][1])
