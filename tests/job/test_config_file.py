"""Settings in a TOML file: `JobConfig.from_file` and `GRADWIRE_CONFIG`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from gradwire.job.config import resolve
from support import tls_files


def written(folder: Path, text: str) -> Path:
    file = folder / "job.toml"
    file.write_text(text, "utf-8")
    return file


def test_from_file_reads_every_setting(tmp_path: Path) -> None:
    where = tls_files.folder()
    (tmp_path / "certs").symlink_to(where)
    text = """
        rank = 1
        size = 4
        local_rank = 1
        role = "worker"
        address = "[::1]:29500"
        served = true
        transport = "tcp"
        timeout = 60
        peer_timeout = 5.5
        insecure = true
        job = "digits"
        token_file = "secrets/token"
        elastic = true
        member = "m1/0"
        tls = { ca = "certs/ca.pem", cert = "certs/m1.pem", key = "certs/m1.key" }
    """
    config = gw.JobConfig.from_file(written(tmp_path, text))
    certs = tmp_path / "certs"
    assert config == gw.JobConfig(
        rank=1,
        size=4,
        local_rank=1,
        role="worker",
        address="[::1]:29500",
        served=True,
        transport="tcp",
        timeout=60.0,
        peer_timeout=5.5,
        insecure=True,
        job="digits",
        token_file=tmp_path / "secrets" / "token",
        elastic=True,
        member="m1/0",
        tls=gw.Credentials(certs / "ca.pem", certs / "m1.pem", certs / "m1.key"),
    )
    assert config.origin("rank") == config.origin("tls") == f"file {tmp_path}/job.toml"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ranks = 0", "'ranks' in file .*job.toml is not a setting: do you mean 'rank'?"),
        ("address_taken = true", "'address_taken' in file .*job.toml is not a setting"),
        ("origins = {}", "'origins' in file .*job.toml is not a setting"),
        ("[job]\nname = 'x'", "'job' in file .*job.toml is {'name': 'x'}, which is not a string"),
        ("rank = '0'", "'rank' in file .*job.toml is '0', which is not a whole number"),
        ("rank = true", "'rank' in file .*job.toml is True, which is not a whole number"),
        ("timeout = 2026-01-01", "'timeout' in file .*job.toml is datetime.*, which is not a number of seconds"),
        ("timeout = -1", r"timeout -1.0 \(from file .*job.toml\) is not a positive number"),
        ("insecure = 1", "'insecure' in file .*job.toml is 1, which is neither True nor False"),
        ("address = 'nowhere'", "'address' in file .*job.toml: 'nowhere' is not an address"),
        ("rank = 2\nsize = 2", r"rank 2 \(from file .*job.toml\) does not exist in a job of size 2 \(from file .*\)"),
        ("rank = 1\nrole = 'coordinator'", r"role 'coordinator' \(from file .*job.toml\) does not fit rank 1"),
        ("tls = 'ca.pem'", r"'tls' in file .*job.toml is 'ca.pem': write a table \[tls\]"),
        ("[tls]\nca = 'a'\ncert = 'b'", "'tls' in file .*job.toml needs three files: key must be set too"),
        ("[tls]\nca = 3\ncert = 'b'\nkey = 'c'", r"'tls.ca' in file .*job.toml is 3, which is not the path"),
        ("[tls]\nauthority = 'a'", "'tls.authority' in file .*job.toml is not a setting: the keys are ca, cert, key"),
        ("[tls]\nca = 'no.pem'\ncert = 'b'\nkey = 'c'", r"cannot read .*no.pem \('tls.ca' in file .*\): No such file"),
        ("token_file = ''", "'token_file' in file .*job.toml is '', which is not the path of a file"),
        ("rank = ", "the configuration file .*job.toml is not valid TOML: "),
        ("rank = 1\nrank = 1", "the configuration file .*job.toml is not valid TOML: "),
        ("x = " + "[" * 5000, "the configuration file .*job.toml is not valid TOML: "),
        ("#" * (2 << 20), "the configuration file .*job.toml is too large"),
    ],
)
def test_from_file_wrong_content_raises_with_the_file_and_the_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(gw.ConfigError, match=message):
        gw.JobConfig.from_file(written(tmp_path, text))


def test_from_file_that_cannot_be_read_raises(tmp_path: Path) -> None:
    with pytest.raises(gw.ConfigError, match=r"cannot read the configuration file .*no.toml: No such file"):
        gw.JobConfig.from_file(tmp_path / "no.toml")
    with pytest.raises(gw.ConfigError, match=r"cannot read the configuration file .*: Is a directory"):
        gw.JobConfig.from_file(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"job = '\xff'")
    with pytest.raises(gw.ConfigError, match=r"bytes.toml is not valid TOML"):
        gw.JobConfig.from_file(tmp_path / "bytes.toml")


@given(st.one_of(st.binary(max_size=60), st.from_regex(r"[a-z_]{3,12} = [-0-9a-z'\"\[\]{}.]{1,10}").map(str.encode)))
def test_from_file_any_content_raises_only_gradwire_errors(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_bytes(content)
    try:
        gw.JobConfig.from_file(file)
    except gw.GradwireError:
        return


def test_resolve_file_has_the_lowest_precedence(tmp_path: Path) -> None:
    file = written(tmp_path, "rank = 0\nsize = 8\nlocal_rank = 0\naddress = 'h:1'\ntimeout = 9\ntransport = 'shm'")
    environ = {"GRADWIRE_CONFIG": str(file)}
    assert resolve(environ=environ) == gw.JobConfig.from_file(file)
    launched = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "2", "GRADWIRE_TIMEOUT": "7"}
    found = resolve(config=gw.JobConfig(transport="tcp"), environ=environ | launched)
    assert (found.rank, found.size, found.address, found.timeout, found.transport) == (1, 2, "h:2", 7.0, "tcp")
    assert found.local_rank is None, "the file's local rank is that of another rank"
    assert found.origin("timeout") == "GRADWIRE_TIMEOUT"


def test_init_file_that_does_not_exist_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_CONFIG", "no.toml")
    with pytest.raises(gw.ConfigError, match=r"cannot read the configuration file no.toml: No such file"):
        gw.init(0, 1)


def test_resolve_member_that_a_launcher_named_takes_no_rank_from_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "rank = 0\nsize = 2\nmember = 'x'\ntimeout = 9")
    environ = {"GRADWIRE_CONFIG": str(file), "GRADWIRE_MEMBER": "host/7", "GRADWIRE_ELASTIC": "1"}
    found = resolve(environ=environ | {"GRADWIRE_COORDINATOR": "127.0.0.1:1"})
    assert (found.rank, found.size, found.member, found.timeout) == (None, None, "host/7", 9.0)


def test_resolve_file_does_not_say_whether_the_job_of_a_launcher_is_elastic(tmp_path: Path) -> None:
    file = written(tmp_path, "elastic = true\nserved = true\naddress = '127.0.0.1:1'")
    environ = {"GRADWIRE_CONFIG": str(file)}
    assert resolve(environ=environ).elastic
    launched = {"GRADWIRE_COORDINATOR": "127.0.0.1:2", "GRADWIRE_RANK": "0", "GRADWIRE_SIZE": "2"}
    assert not resolve(environ=environ | launched).elastic


def test_resolve_token_variable_wins_over_the_token_file_of_the_file(tmp_path: Path) -> None:
    environ = {"GRADWIRE_CONFIG": str(written(tmp_path, "token_file = 'token'"))}
    assert resolve(environ=environ).token_file == tmp_path / "token"
    assert resolve(environ=environ | {"GRADWIRE_TOKEN": "x" * 20}).token_file is None
    by_config = gw.JobConfig(token_file="other")
    assert resolve(config=by_config, environ=environ | {"GRADWIRE_TOKEN": "x" * 20}).token_file == Path("other")
