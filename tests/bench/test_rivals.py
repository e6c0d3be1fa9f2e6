"""Finding, installing and starting the other engines. These tests install nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import gradwire as gw
from gradwire.bench import commands, rivals
from gradwire.bench.rivals import INSTALLABLE, RIVALS


def made(place: Path, rival: rivals.Rival) -> None:
    """Create an environment that looks like an installed one."""
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "python").touch()
    (place / "installed.json").write_text(json.dumps(rivals.recipe(rival)))


def test_parse_with_names_returns_each_once_and_refuses_others() -> None:
    assert rivals.parse("gloo, mpich,gloo", list(RIVALS)) == ["gloo", "mpich"]
    assert INSTALLABLE == ["gloo", "impi", "mpich", "openmpi"]
    with pytest.raises(gw.ConfigError, match="'nccl' is not one of gloo, openmpi, openmpi-tcp, mpich, impi"):
        rivals.parse("gloo,nccl", list(RIVALS))
    with pytest.raises(gw.ConfigError, match="no name given"):
        rivals.parse(" , ", list(RIVALS))


def test_folder_is_below_the_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rivals.folder({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere/gradwire/rivals")
    monkeypatch.setenv("HOME", "/home/someone")
    for ignored in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert rivals.folder(ignored) == Path("/home/someone/.cache/gradwire/rivals")


def test_find_of_a_missing_rival_names_the_command_that_installs_it(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    with pytest.raises(gw.ConfigError, match=r"Open MPI over TCP is not installed: gradwire bench --install openmpi$"):
        rivals.find(RIVALS["openmpi-tcp"], environ)
    made(tmp_path / "gradwire" / "rivals" / "openmpi", RIVALS["openmpi"])
    python = tmp_path / "gradwire" / "rivals" / "openmpi" / "bin" / "python"
    assert rivals.find(RIVALS["openmpi"], environ) == rivals.find(RIVALS["openmpi-tcp"], environ) == python


def test_find_of_gloo_with_torch_beside_gradwire_returns_this_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert rivals.find(RIVALS["gloo"], environ) == Path(sys.executable)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(gw.ConfigError, match="Gloo is not installed"):
        rivals.find(RIVALS["gloo"], environ)


def test_install_over_an_incomplete_or_stale_environment_creates_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(rivals, "run_reporting", lambda command, problem, progress: ran.append(command))
    environ, place = {"XDG_CACHE_HOME": str(tmp_path)}, tmp_path / "gradwire" / "rivals" / "mpich"
    made(place, RIVALS["impi"])  # another recipe
    (place / "old").touch()

    def progress(line: str) -> None:
        if line.startswith("creating"):
            (place / "bin").mkdir(parents=True)
            (place / "bin" / "python").touch()

    assert rivals.install("mpich", environ, progress) == place
    assert not (place / "old").exists()
    assert [command[1:3] for command in ran] == [["-m", "venv"], ["-m", "pip"], ["-I", "-c"]]
    assert ran[1][-4:] == ["mpich", "mpi4py>=4.1", "numpy", "ml_dtypes"]
    rivals.install("mpich", environ, progress)
    assert len(ran) == 3, "a complete environment must be kept"


def test_run_reporting_of_a_failing_command_raises_with_its_output() -> None:
    script = "print('no such package'); raise SystemExit(3)"
    lines: list[str] = []
    with pytest.raises(gw.TransportError, match=r"cannot install it \(exit code 3\):\nno such package"):
        rivals.run_reporting([sys.executable, "-c", script], "cannot install it", lines.append)
    assert lines == ["no such package"]


def test_install_into_an_unwritable_cache_directory_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(gw.TransportError, match=r"cannot write to .*file/gradwire/rivals: .*set XDG_CACHE_HOME"):
        rivals.install("mpich", {"XDG_CACHE_HOME": str(tmp_path / "file")}, print)


@pytest.mark.parametrize(
    ("name", "cores", "expected"),
    [
        ("gloo", 4, "GLOO_SOCKET_IFNAME=lo"),
        ("openmpi", 4, "--allow-run-as-root --bind-to none"),
        ("openmpi", 2, "--allow-run-as-root --bind-to none --oversubscribe --mca mpi_yield_when_idle 1"),
        ("openmpi-tcp", 4, "--allow-run-as-root --bind-to none --mca pml ob1 --mca btl tcp,self"),
        ("mpich", 2, ""),
        ("impi", 4, "I_MPI_FABRICS=shm"),
        ("impi", 2, "I_MPI_FABRICS=shm I_MPI_THREAD_YIELD=2"),
    ],
)
def test_settings_of_a_rival_lists_all_that_differ_from_its_defaults(name: str, cores: int, expected: str) -> None:
    assert commands.settings_of(RIVALS[name], 4, cores) == expected


def test_of_rival_with_mpi_uses_its_own_mpiexec_and_drops_variables_of_other_jobs() -> None:
    environ = {"PATH": "/bin", "SLURM_JOB_ID": "1", "PMI_RANK": "3", "I_MPI_ROOT": "/opt", "OMPI_MCA_btl": "sm,self"}
    rival, place = RIVALS["impi"], Path("/run/meet")
    (command,) = commands.of_rival(rival, Path("/env/bin/python"), 4, place, {"size": 4}, environ, cores=2)
    assert command.arguments[:5] == ["/env/bin/mpiexec", "-n", "4", "/env/bin/python", "-I"]
    assert command.arguments[6:] == ["impi", "/run/meet", '{"size": 4}']
    assert {"PATH", "OMPI_MCA_btl", "I_MPI_FABRICS", "I_MPI_THREAD_YIELD"} <= command.environ.keys()
    assert not {"SLURM_JOB_ID", "PMI_RANK", "I_MPI_ROOT"} & command.environ.keys()


def test_of_rival_with_gloo_returns_a_command_for_each_rank() -> None:
    made = commands.of_rival(RIVALS["gloo"], Path("/env/bin/python"), 3, Path("/run/meet"), {"size": 3}, {}, cores=2)
    assert [one.arguments[-1] for one in made] == [f'{{"size": 3, "rank": {rank}}}' for rank in range(3)]
