"""The `gradwire bench` command."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import gradwire as gw
from gradwire.bench import rivals
from gradwire.bench.cases import COLLECTIVES
from gradwire.cli import main
from support.launch_jobs import LONG
from support.leftovers import children_of
from support.versions import copied, fake_package, interpreter

QUICK = ("--blocks", "2", "--iterations", "2")


def bench(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradwire", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=4 * LONG, env=os.environ | more)


def measured(*arguments: str, **environ: str) -> dict[str, Any]:
    done = bench(*arguments, *QUICK, "--json", "-", **environ)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_bench_of_all_collectives_measures_each_without_wrong_results() -> None:
    found = measured("all", "-n", "3", "--sizes", "8,4Ki")
    assert {row["collective"] for row in found["results"]} == set(COLLECTIVES)
    for row in found["results"]:
        (ours,) = row["engines"].values()
        assert (ours["wrong"], len(ours["blocks"]), row["unsupported"]) == (0, 2, {})
        assert ours["us"] > 0
    assert found["about"]["gradwire"]["version"] == gw.__version__


def test_bench_prints_the_table_of_nccl_tests(tmp_path: Path) -> None:
    arguments = (
        "--min",
        "4",
        "--max",
        "16",
        "--dtype",
        "float16",
        "--op",
        "max",
        "--algorithm",
        "tree",
        "--registered",
    )
    done = bench(*arguments, *QUICK, "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    assert [row[:4] + row[7:] for row in rows] == [
        ["4", "2", "float16", "max", "0"],
        ["8", "4", "float16", "max", "0"],
        ["16", "8", "float16", "max", "0"],
    ]
    plan = json.loads((tmp_path / "out.json").read_text())["plan"]
    assert (plan["algorithm"], plan["registered"], plan["ranks"]) == ("tree", True, 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["all_reduc"], "is not one of"),
        (["-n", "1"], "1 is not in the range"),
        (["--sizes", "8,64K"], "'64K' is not a size like 8, 64Ki"),
        (["--min", "8"], "give --sizes, or --min and --max"),
        (["--min", "8", "--max", "64", "--sizes", "8"], "give --sizes, or --min and --max"),
        (["--min", "64", "--max", "8"], "--min is more than --max"),
        (["--dtype", "float8"], "is not one of"),
        (["--dtype", "int32", "--op", "mean"], "op 'mean' has no meaning for int32"),
        (["--algorithm", "magic"], "there is no algorithm 'magic', only auto, star, ring"),
        (["--transport", "pigeon"], "is not one of"),
        (["--transport", "mpi"], "is not one of 'auto', 'shm', 'tcp', 'grpc'"),
        (["--against", "nccl"], "'nccl' is not one of gloo, openmpi"),
        (["--install", "openmpi-tcp"], "'openmpi-tcp' is not one of gloo, impi, mpich, openmpi"),
        (["--against", "./nothing/bin/python"], "/nothing/bin/python does not exist; give the path of a Python that"),
        (["--against", "mpich"], "MPICH is not installed: gradwire bench --install mpich"),
        (["--against", "mpich", "--against", "nccl"], "'nccl' is not one of gloo, openmpi"),
        (["--sizes", "8", "--json", "/dev/null/file"], "cannot write /dev/null/file"),
    ],
)
def test_bench_with_invalid_arguments_prints_the_reason(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = CliRunner(env={"XDG_CACHE_HOME": str(tmp_path)}).invoke(main, ["bench", *arguments])
    assert done.exit_code in (1, 2)
    assert isinstance(done.exception, SystemExit), done.exception
    assert said in done.output


def other_install(folder: Path, version: str) -> Path:
    """The interpreter of a copy that has another version, and a benchmark that cannot be imported."""
    copy = copied(folder / "src")
    copy.change("__init__.py", f'__version__ = "{gw.__version__}"', f'__version__ = "{version}"')
    shutil.rmtree(folder / "src" / "gradwire" / "bench")
    (folder / "src" / "gradwire" / "bench.py").write_text("1 / 0")
    return interpreter(folder / ".venv", folder / "src")


def test_bench_against_other_installs_runs_each_in_its_own_interpreter(tmp_path: Path) -> None:
    old, older = (other_install(tmp_path / version, version) for version in ("0.0.2", "0.0.1"))
    against = ("--against", f"{old},{old.parents[1]}", "--against", str(older.parents[1]))
    found = measured("all", "--sizes", "8,4Ki", *against, PYTHONPATH=str(Path(gw.__file__).parents[1]))
    names = ["gradwire 0.0.2 (…/0.0.2/.venv)", "gradwire 0.0.1 (…/0.0.1/.venv)"]
    assert list(found["about"]) == ["gradwire", *names]
    assert [one["version"] for one in found["about"].values()] == [gw.__version__, "0.0.2", "0.0.1"]
    assert [found["about"][name]["python"] for name in names] == [str(old), str(older)]
    for row in found["results"]:
        assert row["unsupported"] == {}
        assert {engine: one["wrong"] for engine, one in row["engines"].items()} == dict.fromkeys(
            ["gradwire", *names], 0
        )
        assert list(row["ratios"]) == names
    assert found["summary"]["all_reduce"][names[0]].keys() == {"8", "4096"}


def test_bench_against_an_install_that_cannot_start_prints_its_error_and_advice(tmp_path: Path) -> None:
    code = "__version__ = '0.0.1'\ndef init(**options): raise OSError('no shared memory')"
    python = interpreter(tmp_path / ".venv", fake_package(tmp_path / "src", code))
    done = bench("--sizes", "8", "--against", str(python), *QUICK)
    assert (done.returncode, done.stdout) == (1, "")
    # The first rank may end with the error before the second one has connected.
    failed = r"( failed \(start\)|: ended with exit code 1 during its start)"
    assert re.match(rf"Error: gradwire 0\.0\.1 \(.*\){failed}:?\nTraceback", done.stderr)
    assert "OSError: no shared memory\n" in done.stderr
    assert done.stderr.endswith(f"works without this one: {python} -m gradwire bench --sizes 8\n")


def test_bench_against_an_install_as_documented_prints_a_ratio_for_each_size(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "benchmarks" / "README.md").read_text("utf-8")
    (documented,) = re.findall(r"^\$ gradwire (bench .* --against \S*/python)", page, re.MULTILINE)
    assert f"gradwire {documented}\n" in CliRunner().invoke(main, ["bench", "--help"]).output
    (path,) = re.findall(r"\S*/python$", documented)
    (tmp_path / "new").mkdir()
    assert tmp_path / "new" / path == other_install(tmp_path / "new" / ".." / "old", "0.0.1")
    command = [sys.executable, "-m", "gradwire", *shlex.split(documented), "--blocks", "1", "--iterations", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * LONG, cwd=tmp_path / "new")
    assert done.returncode == 0, done.stderr
    columns, rival = done.stdout.splitlines()[-2:]
    assert re.fullmatch(r"# all_reduce, times as fast as +8 +64 Ki +1 Mi +64 Mi +geo\. mean", columns)
    assert re.fullmatch(r"#   gradwire 0\.0\.1 \(…/old/\.venv\)( +\d+(\.\d+)?){5}", rival)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_bench_interrupted_leaves_no_process_and_no_file(number: int) -> None:
    command = [sys.executable, "-m", "gradwire", "bench", "--sizes", "8", "--blocks", "100000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with tempfile.TemporaryDirectory() as folder:  # a short path, as sockets need it
        environ = os.environ | {"TMPDIR": folder}
        with subprocess.Popen(command, text=True, env=environ, **pipes) as process:  # type: ignore[call-overload]
            for line in process.stdout:
                if line.startswith("# all_reduce"):
                    break
            workers = children_of(process.pid)
            assert len(workers) >= 2
            process.send_signal(number)
            _, err = process.communicate(timeout=LONG)
        assert (process.returncode, err) == (128 + number, "")
        assert os.listdir(folder) == []
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", rivals.RIVALS)
def test_bench_against_a_rival_measures_both_without_wrong_results(name: str, ranks: int) -> None:
    try:
        rivals.find(rivals.RIVALS[name], os.environ)
    except gw.ConfigError as error:
        pytest.skip(str(error))
    found = measured("all", "-n", str(ranks), "--sizes", "8,1Mi", "--against", name)
    for row in found["results"]:
        assert row["unsupported"] == {}
        assert {engine: one["wrong"] for engine, one in row["engines"].items()} == {"gradwire": 0, name: 0}
        assert row["ratios"][name]["least"] <= row["ratios"][name]["median"] <= row["ratios"][name]["most"]
