"""Runs torch's own tests of a backend, `torch.testing._internal.distributed.distributed_test`, on gradwire or Gloo.

    python tests/support/torch_own_suite.py --backend gradwire --ranks 2  # as torch ships it
    python tests/support/torch_own_suite.py --backend gradwire --ranks 2 --open  # with Gloo's and MPI's tests

Many tests are restricted to named backends. `--open` adds gradwire beside Gloo, and beside MPI, in each such condition
of the module's text; nothing else is changed. (Tests of all-to-all on the CPU are restricted to MPI.) Processes are
forked, which is faster than starting fresh ones. Prints a line of JSON for each test, and one with the counts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import types
import unittest
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch

MODULE = "torch.testing._internal.distributed.distributed_test"
REPLACEMENTS = {
    'BACKEND != "gloo"': 'BACKEND not in ("gloo", "gradwire")',
    'BACKEND != "mpi"': 'BACKEND not in ("mpi", "gradwire")',
    'BACKEND == "mpi" or BACKEND == "gloo"': 'BACKEND in ("mpi", "gloo", "gradwire")',
    'require_backend_is_available({"gloo"})': 'require_backend_is_available({"gloo", "gradwire"})',
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="gradwire")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--open", action="store_true", help="also run the tests restricted to Gloo and MPI")
    parser.add_argument("--spawn", action="store_true", help="start fresh processes, as torch does, instead of forking")
    parser.add_argument("--only", nargs="*", default=[], help="names of tests to run  [default: all]")
    parser.add_argument("--part", default="1/1", help="k/n: every n-th test, from the k-th on")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        os.environ |= {"BACKEND": arguments.backend, "WORLD_SIZE": str(arguments.ranks), "TEMP_DIR": place}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        os.environ.setdefault("INIT_METHOD", f"file://{place}/shared_init_file")
        os.mkdir(f"{place}/init_dir")
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        return run(arguments)


def load(opened: bool) -> types.ModuleType:
    """Return torch's module, unchanged or with gradwire in its conditions."""
    if not opened:
        return __import__(MODULE, fromlist=["TestDistBackend"])
    from torch.testing._internal import common_distributed

    for feature in ("ddp", "subgroup", "gpu", "plugin"):
        common_distributed.DistTestCases.backend_feature[feature].add("gradwire")
    open_monitored_barrier()
    spec = find_spec(MODULE)
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text("utf-8")
    for condition, wider in REPLACEMENTS.items():
        assert condition in text, f"torch's module no longer contains {condition}"
        text = text.replace(condition, wider)
    module = types.ModuleType(MODULE)
    module.__file__ = spec.origin
    sys.modules[MODULE] = module
    exec(compile(text, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


def open_monitored_barrier() -> None:
    """Allow monitored_barrier, which torch refuses for every backend except Gloo."""
    from torch.distributed import distributed_c10d

    call = distributed_c10d.monitored_barrier

    def monitored_barrier(*args: Any, **options: Any) -> Any:
        with mock.patch.object(distributed_c10d, "get_backend", return_value="gloo"):
            return call(*args, **options)

    torch.distributed.monitored_barrier = monitored_barrier


def run(arguments: argparse.Namespace) -> int:
    import gradwire.membership.client.requests
    import gradwire.membership.coordinator.service
    import gradwire.torch  # noqa: F401 — imported once, before processes are forked

    module = load(arguments.open)

    class Suite(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            if arguments.spawn:
                self._spawn_processes()
            else:
                self._start_processes(torch.multiprocessing.get_context("fork").Process)

    Suite.__module__, Suite.__qualname__ = "__main__", "Suite"
    globals()["Suite"] = Suite
    names = arguments.only or unittest.TestLoader().getTestCaseNames(Suite)
    first, step = map(int, arguments.part.split("/"))
    result = Result()
    unittest.TestSuite(Suite(name) for name in names[first - 1 :: step]).run(result)
    print(json.dumps({"passed": result.passed, "skipped": len(result.skipped), "failed": result.bad}), flush=True)
    return 1 if result.bad else 0


class Result(unittest.TestResult):
    def __init__(self) -> None:
        super().__init__()
        self.passed = 0
        self.bad: list[str] = []
        self._began = 0.0

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().startTest(test)
        self._began = time.monotonic()

    def _print(self, test: unittest.TestCase, outcome: str, text: str = "") -> None:
        taken = round(time.monotonic() - self._began, 1)
        name = test.id().rpartition(".")[2]
        print(json.dumps({"test": name, "outcome": outcome, "seconds": taken, "text": text[-3000:]}), flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self.passed += 1
        self._print(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        super().addSkip(test, reason)
        self._print(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        super().addFailure(test, err)
        self.bad.append(test.id().rpartition(".")[2])
        self._print(test, "failed", self.failures[-1][1])

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        super().addError(test, err)
        self.bad.append(test.id().rpartition(".")[2])
        self._print(test, "failed", self.errors[-1][1])


if __name__ == "__main__":
    sys.exit(main())
