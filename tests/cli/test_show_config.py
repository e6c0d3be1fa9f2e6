"""`gradwire run` with a configuration file, and `gradwire run --show-config`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gradwire.cli import main
from support import tls_files

TRAIN = """
import gradwire as gw
with gw.init() as group:
    config = gw.JobConfig.from_environ()
    print("sum", group.all_reduce(1), group.capabilities.transport, config.origin("timeout"), config.timeout)
"""


FILES = {"ca": "ca.pem", "cert": "m0.pem", "key": "m0.key"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory, with a script and a configuration file."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "job.toml").write_text("size = 2\ntransport = 'tcp'\ntimeout = 60\nrank = 1\nelastic = true\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRADWIRE_CONFIG", "job.toml")
    return tmp_path


def run_job(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "gradwire", "run", *arguments, "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["run", *arguments, "train.py"])


def rows(*arguments: str) -> dict[str, tuple[str, str]]:
    """Return the table that --show-config prints: values and origins by setting."""
    result = invoke(*arguments, "--show-config")
    assert result.exit_code == 0, result.output
    headline, *lines = result.output.splitlines()
    value, origin = headline.index("value"), headline.index("origin")
    return {line[:value].strip(): (line[value:origin].strip(), line[origin:]) for line in lines}


def test_run_takes_size_and_settings_from_the_file(folder: Path) -> None:
    assert run_job() == [f"[{rank}] sum 2 tcp file job.toml 60.0" for rank in (0, 1)]


@pytest.mark.parametrize("options", [("-n", "2"), ("-n", "2", "--max", "3")], ids=["fixed", "elastic"])
def test_run_job_uses_the_certificates_of_the_file(folder: Path, options: tuple[str, ...]) -> None:
    with (folder / "job.toml").open("a") as file:
        file.write("[tls]\n" + "".join(f"{key} = '{tls_files.folder()}/{name}'\n" for key, name in FILES.items()))
    assert run_job(*options) == [f"[{rank}] sum 2 tcp file job.toml 60.0" for rank in (0, 1)]


def test_show_config_prints_origins_and_starts_nothing(folder: Path) -> None:
    (folder / "train.py").write_text("raise SystemExit(3)")
    found = rows()
    assert found["size"] == ("2", "file job.toml")
    assert found["rank"] == ("0, 1", "gradwire run")
    assert found["transport"] == ("tcp", "file job.toml")
    assert found["peer_timeout"] == ("3.0", "default")
    assert found["elastic"] == ("false", "gradwire run")
    assert found["role"] == ("worker", "derived")


def test_show_config_respects_the_options_and_variables(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_PEER_TIMEOUT", "5")
    found = rows("-n", "4", "--min", "2", "--max", "8", "--listen", "127.0.0.1:4444")
    assert found["size"] == ("4", "-n")
    assert found["rank"] == ("0-3", "gradwire run")
    assert found["address"] == ("127.0.0.1:4444", "--listen")
    assert found["elastic"] == ("true", "gradwire run")
    assert found["timeout"] == ("60.0", "file job.toml")
    assert found["peer_timeout"] == ("5.0", "GRADWIRE_PEER_TIMEOUT")


def test_show_config_shows_no_secret(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_TOKEN", "never shown, and long enough")
    assert "never shown" not in invoke("--show-config").output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("size = 0", "Error: a job has at least one rank, but size 0 (from file job.toml)"),
        ("size = 2\ntransport = 'udp'", "Error: transport 'udp' (from file job.toml) is unknown"),
        ("sizes = 2", "Error: 'sizes' in file job.toml is not a setting: do you mean 'size'?"),
    ],
)
def test_run_wrong_file_is_reported_before_anything_starts(folder: Path, text: str, message: str) -> None:
    (folder / "job.toml").write_text(text)
    for option in ("--show-config", "--grace=1"):
        result = invoke("-n", "2", option)
        assert result.exit_code == 1
        assert result.output.startswith(message)


def test_run_file_without_a_size_needs_the_option(folder: Path) -> None:
    (folder / "job.toml").write_text("timeout = 60")
    assert "Missing option '-n'" in invoke().output


def test_show_config_invalid_variable_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_TIMEOUT", "soon")
    result = invoke("--show-config")
    assert (result.exit_code, result.output) == (
        1,
        "Error: GRADWIRE_TIMEOUT is 'soon', which is not a number of seconds\n",
    )
