"""Tests of the job's secret: its sources, its file's permissions, and the errors."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import ConfigError
from gradwire.security import secret as secret_module
from gradwire.security.secret import derive, job_secret, new_token, secret_path


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path)}


def test_secret_is_the_token_of_the_environment(home: dict[str, str]) -> None:
    for loopback in (True, False):
        assert job_secret({**home, "GRADWIRE_TOKEN": "sixteen letters!"}, loopback) == b"sixteen letters!"
    assert not secret_path(home).exists()


@pytest.mark.parametrize("token", ["", "fifteen letters"])
def test_short_token_is_refused(token: str, home: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"GRADWIRE_TOKEN has {len(token)} characters and needs at least 16"):
        job_secret({**home, "GRADWIRE_TOKEN": token}, loopback=True)


def test_secret_for_several_machines_requires_a_token(home: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="set GRADWIRE_TOKEN to the same value"):
        job_secret(home, loopback=False)


def test_secret_on_loopback_is_a_private_file_that_is_kept(home: dict[str, str]) -> None:
    first = job_secret(home, loopback=True)
    path = secret_path(home)
    assert len(first) >= 32
    assert job_secret(home, loopback=True) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_secret_file_prefers_the_private_directory_of_the_session(home: dict[str, str], tmp_path: Path) -> None:
    runtime = tmp_path / "runtime"
    environ = {**home, "XDG_RUNTIME_DIR": str(runtime)}
    assert secret_path(environ) == tmp_path / ".config" / "gradwire" / "secret"
    runtime.mkdir(mode=0o700)
    assert secret_path(environ) == runtime / "gradwire" / "secret"


def test_concurrent_creators_agree_on_one_secret(home: dict[str, str]) -> None:
    together = Barrier(8)

    def create(_: int) -> bytes:
        together.wait()
        return job_secret(home, loopback=True)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(create, range(8)))) == 1
    assert os.listdir(secret_path(home).parent) == ["secret"]


def written(environ: dict[str, str], content: str, mode: int = 0o600) -> Path:
    path = secret_path(environ)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_secret_file_open_to_others_is_refused(mode: int, home: dict[str, str]) -> None:
    written(home, new_token(), mode)
    with pytest.raises(ConfigError, match="other users can access"):
        job_secret(home, loopback=True)


def test_secret_file_of_another_user_is_refused(home: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    written(home, new_token())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to user id"):
        job_secret(home, loopback=True)


@pytest.mark.parametrize("content", ["", "short\n", "x" * 5000])
def test_secret_file_with_unusable_content_is_refused(content: str, home: dict[str, str]) -> None:
    written(home, content)
    with pytest.raises(ConfigError, match="bytes, not 16 to 4096; remove it"):
        job_secret(home, loopback=True)


def test_secret_file_that_is_a_symlink_or_pipe_is_refused(home: dict[str, str], tmp_path: Path) -> None:
    path = written(home, new_token())
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="set GRADWIRE_TOKEN instead"):
        job_secret(home, loopback=True)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        job_secret(home, loopback=True)


def test_secret_directory_that_cannot_be_made_names_the_alternative(tmp_path: Path) -> None:
    (tmp_path / ".config").write_text("a file where a directory should be")
    with pytest.raises(ConfigError, match="set GRADWIRE_TOKEN instead"):
        job_secret({"HOME": str(tmp_path)}, loopback=True)


parts = st.tuples(st.text(max_size=3), st.lists(st.binary(max_size=3), max_size=3))


@given(one=parts, other=parts)
def test_derive_is_equal_only_for_equal_parts(one: tuple[str, list[bytes]], other: tuple[str, list[bytes]]) -> None:
    keys = [derive(b"secret", purpose, *context) for purpose, context in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)
    assert keys[0] != derive(b"another", one[0], *one[1])
    assert len(keys[0]) == 32


def test_new_tokens_are_unique_and_long_enough() -> None:
    assert len({new_token() for _ in range(10)}) == 10
    assert len(new_token()) >= secret_module.SHORTEST_TOKEN
