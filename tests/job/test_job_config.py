"""`gw.JobConfig`: construction, copies, origins and the printed table, and `config` as a source of `resolve`."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest

import gradwire as gw
from gradwire.job.config import resolve
from support import tls_files

TORCH = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
ADDRESS = "127.0.0.1:29500"


class TestConstruction:
    def test_job_config_without_arguments_is_a_job_of_one_rank_by_default(self) -> None:
        config = gw.JobConfig()
        assert (config.rank, config.size, config.local_rank, config.role) == (0, 1, 0, "coordinator")
        assert (config.transport, config.timeout, config.peer_timeout) == ("auto", 300.0, 3.0)
        assert (config.address, config.tls, config.job, config.token_file) == (None,) * 4
        assert {config.origin(name) for name in ("rank", "size", "timeout")} == {"default"}

    def test_job_config_address_is_a_string_with_host_and_port(self) -> None:
        address = gw.JobConfig(rank=0, size=2, address=" [::1]:29500 ").address
        assert address is not None
        assert (address, address.host, address.port) == ("[::1]:29500", "::1", 29500)
        assert isinstance(address, str)

    def test_job_config_unknown_rank_or_size_is_none(self) -> None:
        assert (gw.JobConfig(size=4).rank, gw.JobConfig(size=4).role) == (None, None)
        assert gw.JobConfig(rank=3).size is None
        assert gw.JobConfig(elastic=True, served=True, address=ADDRESS).rank is None

    def test_job_config_cannot_be_changed(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            gw.JobConfig().rank = 1  # type: ignore[misc]

    def test_job_config_takes_keywords_only(self) -> None:
        with pytest.raises(TypeError):
            gw.JobConfig(0, 2)  # type: ignore[call-arg]

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"rank": "0"}, "the argument rank is '0', which is not a whole number"),
            ({"size": 2.0}, "the argument size is 2.0, which is not a whole number"),
            ({"local_rank": True}, "the argument local_rank is True"),
            ({"rank": 2, "size": 2}, r"rank 2 \(from the argument rank\) does not exist in a job of size 2"),
            ({"local_rank": 2, "size": 2}, r"local_rank 2 \(from the argument local_rank\) does not exist"),
            ({"address": 29500}, "the argument address is 29500: write a string"),
            ({"address": "10.0.0:80"}, "the argument address: '10.0.0:80' is not an address"),
            ({"address": "h:0"}, "with port 0"),
            ({"timeout": "5"}, "the argument timeout is '5', which is not a number of seconds"),
            ({"timeout": 10**400}, "the argument timeout is 1000+, which is not a number of seconds"),
            ({"timeout": float("nan")}, "is not a positive number"),
            ({"peer_timeout": 0.1}, r"peer_timeout 0.1 \(from the argument peer_timeout\) is out of range"),
            ({"insecure": 1}, "the argument insecure is 1, which is neither True nor False"),
            ({"transport": 3}, "the argument transport is 3, which is not a string"),
            ({"transport": "udp"}, "transport 'udp' .* is unknown"),
            ({"job": "two words"}, "job 'two words' .* is not 1 to 128"),
            ({"tls": "ca.pem"}, r"the argument tls is 'ca.pem': pass gw.Credentials\(ca, cert, key\)"),
            ({"token_file": 3}, "the argument token_file is 3"),
            ({"served": True}, "needs the coordinator's address"),
            ({"role": "boss"}, "role 'boss' .* is unknown"),
        ],
    )
    def test_job_config_wrong_argument_raises_and_is_named(self, wrong: dict[str, Any], message: str) -> None:
        with pytest.raises(gw.ConfigError, match=message):
            gw.JobConfig(**wrong)

    def test_job_config_role_that_does_not_fit_the_rank_raises(self) -> None:
        assert gw.JobConfig(rank=0, size=2, role="coordinator").role == "coordinator"
        assert gw.JobConfig(rank=0, size=2, role="worker", address=ADDRESS, served=True).role == "worker"
        wrong: list[dict[str, Any]] = [
            {"rank": 0, "role": "worker"},
            {"rank": 1, "role": "coordinator"},
            {"rank": 0, "role": "coordinator", "served": True},
        ]
        for arguments in wrong:
            with pytest.raises(gw.ConfigError, match=r"role '\w+' \(from the argument role\) does not fit rank [01]"):
                gw.JobConfig(size=2, address=ADDRESS, **arguments)


class TestCopies:
    def test_replace_changes_values_and_keeps_the_other_origins(self) -> None:
        config = gw.JobConfig.from_environ(TORCH)
        copy = config.replace(rank=0, timeout=5)
        assert (copy.rank, copy.size, copy.timeout, copy.role) == (0, 4, 5.0, "coordinator")
        assert (copy.origin("rank"), copy.origin("size")) == ("argument", "WORLD_SIZE (torchrun)")
        assert (config.rank, config.role) == (1, "worker")

    def test_replace_with_none_removes_a_value(self) -> None:
        copy = gw.JobConfig(timeout=5, job="a").replace(timeout=None, job=None)
        assert (copy.timeout, copy.job, copy.origin("timeout")) == (300.0, None, "default")

    def test_replace_address_forgets_how_the_old_one_was_served(self) -> None:
        served = gw.JobConfig(rank=0, size=2, address=ADDRESS, served=True)
        assert served.replace(address="h:1").role == "coordinator"
        assert served.replace(timeout=1).served
        torchrun = gw.JobConfig.from_environ(TORCH | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
        assert (torchrun.address_taken, torchrun.replace(address="h:1").address_taken) == (True, False)

    def test_replace_is_validated(self) -> None:
        with pytest.raises(gw.InvalidRank):
            gw.JobConfig(rank=0, size=2).replace(rank=2)

    def test_dataclasses_replace_derives_the_role_again_and_keeps_origins(self) -> None:
        config = gw.JobConfig.from_environ(TORCH)
        copy = dataclasses.replace(config, rank=0)
        assert (copy.role, copy.origin("rank"), copy.origin("role")) == ("coordinator", "argument", "derived")
        assert (copy.origin("size"), copy.origin("timeout")) == ("WORLD_SIZE (torchrun)", "default")

    def test_job_config_survives_pickling(self) -> None:
        config = gw.JobConfig(rank=1, size=2, address=ADDRESS, tls=tls_files.credentials("m1"), token_file="t")
        copy = pickle.loads(pickle.dumps(config))
        assert (copy, copy.address.port, copy.origin("rank")) == (config, 29500, "argument")
        assert hash(copy) == hash(config)


class TestOrigins:
    def test_from_environ_names_each_variable(self) -> None:
        config = gw.JobConfig.from_environ(TORCH | {"GRADWIRE_RANK": "2", "GRADWIRE_TIMEOUT": "7"})
        origins = {name: config.origin(name) for name in ("rank", "size", "address", "timeout", "transport", "role")}
        assert origins == {
            "rank": "GRADWIRE_RANK",
            "size": "WORLD_SIZE (torchrun)",
            "address": "MASTER_ADDR and MASTER_PORT (torchrun)",
            "timeout": "GRADWIRE_TIMEOUT",
            "transport": "default",
            "role": "derived",
        }

    def test_from_environ_incomplete_description_can_be_completed(self) -> None:
        config = gw.JobConfig.from_environ({"PMI_RANK": "1", "PMI_SIZE": "2"})
        assert (config.rank, config.size, config.address) == (1, 2, None)
        assert config.replace(address="h:9").address == "h:9"

    def test_from_environ_uses_the_process_environment_by_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GRADWIRE_TIMEOUT", "11")
        assert gw.JobConfig.from_environ().timeout == 11.0

    def test_origin_of_an_unknown_setting_raises(self) -> None:
        with pytest.raises(gw.ConfigError, match="'ranks' is not a setting: the settings are rank, size"):
            gw.JobConfig().origin("ranks")

    def test_describe_has_one_line_for_each_setting_with_its_origin(self, tmp_path: Path) -> None:
        secret = tmp_path / "token"
        secret.write_text("never shown, and long enough")
        config = gw.JobConfig(rank=1, size=2, address=ADDRESS, token_file=secret, insecure=True)
        lines = [line.split() for line in str(config).splitlines()]
        assert lines[0] == ["setting", "value", "origin"]
        for expected in (
            ["rank", "1", "argument"],
            ["role", "worker", "derived"],
            ["address", ADDRESS, "argument"],
            ["insecure", "true", "argument"],
            ["token_file", str(secret), "argument"],
            ["job", "-", "default"],
        ):
            assert expected in lines
        assert "never shown" not in config.describe() + repr(config)

    def test_repr_shows_what_was_given(self) -> None:
        config = gw.JobConfig(rank=1, size=2, address=ADDRESS)
        assert repr(config) == "JobConfig(rank=1, size=2, address='127.0.0.1:29500')"
        assert eval(repr(config), {"JobConfig": gw.JobConfig}) == config


class TestPrecedence:
    def test_resolve_arguments_win_over_the_config(self) -> None:
        config = gw.JobConfig(rank=1, size=4, address="h:1", timeout=5, transport="tcp", local_rank=1)
        found = resolve(0, 2, "h:2", timeout=300.0, transport="shm", config=config, environ={})
        assert (found.rank, found.size, found.address, found.timeout, found.transport) == (0, 2, "h:2", 300.0, "shm")
        assert found.local_rank is None, "the config's local rank is that of another rank"

    def test_resolve_config_wins_over_variables_even_with_default_values(self) -> None:
        config = gw.JobConfig(rank=0, size=2, address=ADDRESS, transport="auto", timeout=300.0, insecure=False)
        variables = {"GRADWIRE_TRANSPORT": "tcp", "GRADWIRE_TIMEOUT": "7", "GRADWIRE_INSECURE": "1"}
        others = {"GRADWIRE_COORDINATOR": "h:9", "GRADWIRE_RANK": "1", "GRADWIRE_SIZE": "3"}
        found = resolve(config=config, environ=TORCH | variables | others)
        assert found == config
        assert (found.origin("rank"), found.origin("transport")) == ("config", "config")

    def test_resolve_variables_fill_what_the_config_does_not_set(self) -> None:
        found = resolve(config=gw.JobConfig(timeout=5), environ=TORCH)
        assert (found.rank, found.size, found.timeout) == (1, 4, 5.0)
        assert (found.origin("rank"), found.origin("timeout")) == ("RANK (torchrun)", "config")

    def test_resolve_config_of_the_environment_keeps_its_origins_and_its_address(self) -> None:
        environ = TORCH | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        found = resolve(config=gw.JobConfig.from_environ(environ), environ={})
        assert (found.origin("rank"), found.address_taken) == ("RANK (torchrun)", True)

    def test_resolve_config_error_names_the_config(self) -> None:
        with pytest.raises(gw.InvalidRank, match=r"rank 3 \(from config.rank\) .* size 2 \(from the argument size\)"):
            resolve(size=2, config=gw.JobConfig(rank=3), environ={})

    def test_resolve_incomplete_config_raises(self) -> None:
        with pytest.raises(gw.ConfigError, match=r"rank 1 is given .by config.rank. but no size"):
            resolve(config=gw.JobConfig(rank=1), environ={})
        with pytest.raises(gw.ConfigError, match="needs an address where its ranks meet"):
            resolve(config=gw.JobConfig(rank=1, size=2), environ={})
        with pytest.raises(gw.ConfigError, match="an elastic job needs a coordinator"):
            resolve(config=gw.JobConfig(elastic=True), environ={})
        with pytest.raises(gw.ConfigError, match=r"role 'worker' .from config.role. does not fit rank 0"):
            resolve(config=gw.JobConfig(role="worker"), environ={})
        with pytest.raises(gw.InvalidRank, match=r"local_rank 1 .* does not exist in a job of size 1"):
            resolve(config=gw.JobConfig(local_rank=1), environ={})

    def test_resolve_config_of_another_type_raises(self) -> None:
        with pytest.raises(gw.ConfigError, match=r"the argument config is {'rank': 0}: pass a gw.JobConfig"):
            gw.init(config={"rank": 0})  # type: ignore[arg-type]

    def test_resolve_tls_comes_from_the_config_before_the_variables(self) -> None:
        where = tls_files.folder()
        names = {"CA": "ca.pem", "CERT": "m2.pem", "KEY": "m2.key"}
        environ = {f"GRADWIRE_TLS_{name}": f"{where}/{file}" for name, file in names.items()}
        by_variable = resolve(environ=environ)
        assert by_variable.tls is not None
        assert (by_variable.tls.member, by_variable.origin("tls")) == ("m2", "GRADWIRE_TLS_CA, _CERT and _KEY")
        by_config = resolve(config=gw.JobConfig(tls=tls_files.credentials("m1")), environ=environ)
        assert by_config.tls is not None
        assert (by_config.tls.member, by_config.origin("tls")) == ("m1", "config")
