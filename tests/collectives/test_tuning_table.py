"""Tests the tuning table: its file with valid and invalid content, and its use by the ranks of a job."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from gradwire.collectives import DEFAULTS, Table, tuning_table
from gradwire.group.internals import parts_of
from support.processes import Here, StartJob
from support.processes import job_fixture as job_fixture
from support.processes import zygote_fixture as zygote_fixture

SLOW = replace(DEFAULTS, tcp=replace(DEFAULTS.tcp, round=0.5), shm=replace(DEFAULTS.shm, round=0.25))
GOOD = tuning_table.encode(SLOW)
NOT_SECONDS = (-1e-9, 1.5, 10**400, float("nan"), float("inf"), True, None, "1", [1])


def changed(change: Callable[[dict[str, Any]], None]) -> str:
    value = json.loads(json.dumps(GOOD))
    change(value)
    return json.dumps(value)


def with_seconds(bad: object) -> str:
    return changed(lambda value: value["seconds"]["shm"].update(sent=bad))


def test_table_stored_is_loaded_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "not" / "yet" / "there.json"
    tuning_table.store(DEFAULTS, file)
    tuning_table.store(SLOW, file)
    assert tuning_table.load({tuning_table.FILE: str(file)}) == SLOW
    assert [entry.name for entry in file.parent.iterdir()] == ["there.json"]
    assert caplog.records == []


def test_path_follows_the_variables_of_the_user(tmp_path: Path) -> None:
    home, config = tmp_path / "home", tmp_path / "config"
    assert tuning_table.path({"HOME": str(home)}) == home / ".config" / "gradwire" / "tuning.json"
    assert (
        tuning_table.path({"HOME": str(home), "XDG_CONFIG_HOME": "relative"}) == home / ".config/gradwire/tuning.json"
    )
    assert tuning_table.path({"HOME": str(home), "XDG_CONFIG_HOME": str(config)}) == config / "gradwire" / "tuning.json"
    assert tuning_table.path({tuning_table.FILE: "here", "XDG_CONFIG_HOME": str(config)}) == Path("here")
    tuning_table.store(SLOW, config / "gradwire" / "tuning.json")
    assert tuning_table.load({tuning_table.FILE: "", "XDG_CONFIG_HOME": str(config)}) == SLOW


def test_load_missing_file_warns_only_if_it_was_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert tuning_table.load({"XDG_CONFIG_HOME": str(tmp_path)}) == DEFAULTS
    assert caplog.records == []
    assert tuning_table.load({tuning_table.FILE: str(tmp_path / "nothing")}) == DEFAULTS
    (record,) = caplog.records
    assert str(tmp_path / "nothing") in record.getMessage()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("\0\xff", "not JSON"),
        ("[" * 60_000, "not JSON"),
        (" " * (tuning_table.MAX_BYTES + 1), "larger than 65536 bytes"),
        ("[]", "not an object"),
        ("{}", "version is 'None', not 1"),
        (changed(lambda value: value.update(version=2)), "version is '2', not 1"),
        (changed(lambda value: value.update(version="1" * 9999)), "version is '1111"),
        (changed(lambda value: value.update(more=1)), "nothing else"),
        (changed(lambda value: value.pop("seconds")), "needs 'version' and 'seconds'"),
        (changed(lambda value: value.update(seconds=[])), "needs 'version' and 'seconds'"),
        (changed(lambda value: value["seconds"].update(ib={})), "other than net, shm, tcp"),
        (changed(lambda value: value["seconds"].update(tcp=None)), "'tcp' needs exactly"),
        (changed(lambda value: value["seconds"]["tcp"].pop("round")), "'tcp' needs exactly"),
        (changed(lambda value: value["seconds"]["tcp"].update(more=0)), "'tcp' needs exactly"),
        *((with_seconds(bad), "'sent' of 'shm' is not a number of seconds") for bad in NOT_SECONDS),
    ],
)
def test_load_broken_file_gives_defaults_and_one_warning(
    content: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tuning.json"
    file.write_text(content, encoding="latin-1")
    with caplog.at_level(logging.WARNING, "gradwire"):
        assert tuning_table.load({tuning_table.FILE: str(file)}) == DEFAULTS
    (record,) = caplog.records
    assert str(file) in record.getMessage()
    assert reason in record.getMessage()
    assert len(record.getMessage()) < 500 + len(str(file))


def test_load_special_file_does_not_block(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in (str(tmp_path / "pipe"), str(tmp_path), "/dev/zero", "no\0name", str(tmp_path / ("x" * 300))):
        caplog.clear()
        assert tuning_table.load({tuning_table.FILE: name}) == DEFAULTS
        assert len(caplog.records) == 1


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["tcp", "round"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*asdict(DEFAULTS), "round"]), inner),
    max_leaves=10,
)


@given(json_like, st.booleans())
def test_decode_of_any_value_returns_a_table_or_raises_value_error(value: object, wrapped: bool) -> None:
    try:
        found = tuning_table.decode({"version": 1, "seconds": value} if wrapped else value)
    except ValueError:
        return
    assert isinstance(found, Table)
    assert all(0 <= seconds <= 1 for constants in asdict(found).values() for seconds in constants.values())


def test_store_that_cannot_be_written_raises_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("untouched")
    with pytest.raises(gw.TransportError, match="cannot write"):
        tuning_table.store(SLOW, tmp_path / "a file" / "tuning.json")
    (tmp_path / "a folder").mkdir()
    with pytest.raises(gw.TransportError, match="cannot write"):
        tuning_table.store(SLOW, tmp_path / "a folder")
    assert {entry.name for entry in tmp_path.iterdir()} == {"a file", "a folder"}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
def test_store_on_a_full_disk_keeps_the_old_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tuning.json"
    tuning_table.store(SLOW, file)

    def full(descriptor: int) -> None:
        with open("/dev/full", "wb", buffering=0) as device:
            device.write(b"x")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(gw.TransportError, match="No space left"):
        tuning_table.store(DEFAULTS, file)
    assert tuning_table.read(file) == SLOW
    assert [entry.name for entry in tmp_path.iterdir()] == ["tuning.json"]


def test_store_file_is_readable_by_other_users(tmp_path: Path) -> None:
    tuning_table.store(SLOW, tmp_path / "tuning.json")
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "tuning.json").stat().st_mode) == 0o666 & ~mask


# -- in a job ---------------------------------------------------------------------------------------------------------


def chooses(here: Here, files: list[str]) -> None:
    os.environ[tuning_table.FILE] = files[int(os.environ["GRADWIRE_RANK"])]
    with gw.init() as group:
        group.barrier()
        parts = parts_of(group)
        here.send(table=tuning_table.encode(parts.generation.table), sequence=parts.runner.calls.sequence)


@pytest.mark.parametrize("size", [2, 5])
def test_init_ranks_with_different_tables_use_that_of_rank_0(size: int, job: StartJob, tmp_path: Path) -> None:
    files = [tmp_path / f"{rank}.json" for rank in range(size)]
    tuning_table.store(SLOW, files[0])
    for file in files[1:-1]:
        tuning_table.store(DEFAULTS, file)
    files[-1].write_text("broken")
    with job(chooses, size, [str(file) for file in files]) as ranks:
        for rank in ranks:
            assert rank.receive() == {"table": GOOD, "sequence": 1}  # agreeing on the table takes no number
            assert rank.ended() == 0
            assert rank.output() == ""  # only rank 0 has read its file


def test_init_broken_table_of_rank_0_gives_defaults_to_all(job: StartJob, tmp_path: Path) -> None:
    (tmp_path / "broken").write_text("{")
    tuning_table.store(SLOW, tmp_path / "good")
    with job(chooses, 2, [str(tmp_path / "broken"), str(tmp_path / "good")]) as ranks:
        for rank in ranks:
            assert rank.receive()["table"] == tuning_table.encode(DEFAULTS)
            assert rank.ended() == 0
        assert ranks[0].output().count(str(tmp_path / "broken")) == 1


def disagrees(here: Here) -> None:
    if os.environ["GRADWIRE_RANK"] == "0":
        tuning_table.VERSION = 2  # a later gradwire
    try:
        gw.init()
    except gw.GradwireError as error:
        here.send_error(error)


def test_init_table_of_an_unknown_version_raises(job: StartJob) -> None:
    with job(disagrees, 2) as ranks:
        heard = ranks[1].receive()
    assert heard["error"] == "ConfigError"
    assert "the tuning table of rank 0 cannot be used here (its version is '2', not 1)" in heard["text"]


def test_local_group_ranks_use_the_table_of_their_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning_table.store(SLOW, tmp_path / "tuning.json")
    monkeypatch.setenv(tuning_table.FILE, str(tmp_path / "tuning.json"))
    groups = gw.local_group(3)
    assert [parts_of(group).generation.table for group in groups] == [SLOW] * 3
    for group in groups:
        group.close()
