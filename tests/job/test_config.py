"""config.py: the precedence of sources, refused settings, and errors that name the source of a bad value."""

from __future__ import annotations

import inspect
import socket
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import ConfigError, GradwireError, InvalidRank, InvalidSize, UnsupportedOp
from gradwire.job.address import Address
from gradwire.job.config import DEFAULT_TIMEOUT, TRANSPORTS, JobConfig, resolve

TORCH = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
OURS = {"GRADWIRE_RANK": "2", "GRADWIRE_SIZE": "3", "GRADWIRE_LOCAL_RANK": "0", "GRADWIRE_ADDRESS": "[::1]:7000"}


class TestAddress:
    @pytest.mark.parametrize(
        ("text", "host", "port"),
        [
            ("127.0.0.1:29500", "127.0.0.1", 29500),
            ("[::1]:29500", "::1", 29500),
            ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
            ("name:65535", "name", 65535),
            ("my_node-1.example.org:80", "my_node-1.example.org", 80),
            ("  localhost:0 ", "localhost", 0),
        ],
    )
    def test_parse_reads_ipv4_ipv6_and_names(self, text: str, host: str, port: int) -> None:
        address = Address.parse(text)
        assert (address.host, address.port) == (host, port)
        assert Address.parse(str(address)) == address

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "port is missing"),
            ("localhost", "port is missing"),
            (":29500", "host is missing"),
            ("localhost:", "not a number"),
            ("localhost:http", "not a number"),
            ("localhost:-1", "not a number"),
            ("localhost:65536", "between 0 and 65535"),
            ("localhost:٣", "not a number"),
            ("::1:29500", "brackets"),
            ("[::1]29500", r"\[host\]:port"),
            ("[::1:29500", r"\[host\]:port"),
            ("[localhost]:29500", "not an IPv6"),
            ("300.1.1.1:80", "not an IPv4"),
            ("10.0.0:80", "not an IPv4"),
            ("tcp://host:80", "scheme"),
            ("a b:80", "neither"),
            ("user@host:80", "neither"),
            ("x" * 300 + ":80", "neither"),
        ],
    )
    def test_parse_malformed_address_raises_with_reason_and_source(self, text: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            Address.parse(text, "GRADWIRE_ADDRESS")
        assert caught.value.message.startswith("GRADWIRE_ADDRESS: ")

    @given(st.text(max_size=40))
    def test_parse_any_text_raises_only_config_errors(self, text: str) -> None:
        try:
            address = Address.parse(text)
        except ConfigError:
            return
        assert Address.parse(str(address)) == address

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1"])
    def test_loopback_address_is_loopback(self, host: str) -> None:
        assert Address(host, 1).is_loopback()

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1"])
    def test_other_address_is_not_loopback(self, host: str) -> None:
        assert not Address(host, 1).is_loopback()

    def test_name_is_loopback_only_if_all_its_addresses_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def answer(*ips: str) -> None:
            found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 1)) for ip in ips]
            monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: found)

        answer("127.0.0.1", "127.0.0.1")
        assert Address("name", 1).resolve() == ("127.0.0.1",)
        assert Address("name", 1).is_loopback()
        answer("127.0.0.1", "10.0.0.1")
        assert not Address("name", 1).is_loopback()

    @pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70 + ".invalid"])
    def test_unresolvable_host_is_named(self, host: str) -> None:
        with pytest.raises(ConfigError, match=f"{host}:29500 cannot be resolved"):
            Address(host, 29500).is_loopback()


class TestPrecedence:
    def test_resolve_without_variables_gives_a_job_of_one_rank(self) -> None:
        config = resolve(environ={})
        assert config == JobConfig(size=1, rank=0, local_rank=0)
        assert (config.address, config.role, config.transport, config.timeout) == (None, "coordinator", "auto", 300.0)

    def test_resolve_uses_the_process_environment_by_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in OURS.items():
            monkeypatch.setenv(name, value)
        assert resolve().rank == 2

    def test_resolve_arguments_alone_suffice(self) -> None:
        config = resolve(0, 2, "127.0.0.1:29500", transport="tcp", timeout=5, insecure=True, environ={})
        assert config == JobConfig(
            size=2, rank=0, address=Address("127.0.0.1", 29500), transport="tcp", timeout=5.0, insecure=True
        )
        assert resolve(1, 2, Address("::1", 1), environ={}).address == Address("::1", 1)

    def test_resolve_gradwire_variables_win_over_the_launchers(self) -> None:
        config = resolve(environ=TORCH | OURS)
        assert config == JobConfig(size=3, rank=2, local_rank=0, address=Address("::1", 7000))

    def test_resolve_arguments_win_over_everything(self) -> None:
        others = {"GRADWIRE_TRANSPORT": "grpc", "GRADWIRE_TIMEOUT": "7", "GRADWIRE_COORDINATOR": "127.0.0.1:1"}
        config = resolve(1, 2, "h:9", transport="tcp", timeout=300.0, environ=TORCH | OURS | others)
        assert config == JobConfig(size=2, rank=1, address=Address("h", 9), transport="tcp", timeout=300.0)
        assert not config.served

    def test_resolve_unused_bad_variable_is_ignored(self) -> None:
        junk = {"GRADWIRE_RANK": "x", "GRADWIRE_SIZE": "y", "GRADWIRE_ADDRESS": "z", "GRADWIRE_TIMEOUT": "w"}
        assert resolve(0, 1, "h:9", timeout=1.0, environ=junk).rank == 0

    def test_resolve_variables_win_over_defaults(self) -> None:
        config = resolve(environ={"GRADWIRE_TRANSPORT": "TCP", "GRADWIRE_TIMEOUT": "2.5", "GRADWIRE_INSECURE": "yes"})
        assert (config.transport, config.timeout, config.insecure) == ("tcp", 2.5, True)
        assert type(resolve(environ={}).timeout) is float

    def test_resolve_default_timeout_is_300_seconds(self) -> None:
        assert str(inspect.signature(resolve).parameters["timeout"]) == "timeout: 'float' = 300.0"
        assert DEFAULT_TIMEOUT == 300.0

    def test_resolve_empty_variable_counts_as_unset(self) -> None:
        assert resolve(environ=dict.fromkeys((*OURS, *TORCH, "GRADWIRE_JOB", "GRADWIRE_INSECURE"), " ")).size == 1

    def test_resolve_running_coordinator_wins_over_an_address(self) -> None:
        config = resolve(environ=OURS | {"GRADWIRE_COORDINATOR": "127.0.0.1:4000", "GRADWIRE_JOB": "j1"})
        assert (config.address, config.served, config.job) == (Address("127.0.0.1", 4000), True, "j1")

    def test_resolve_local_rank_of_another_rank_is_ignored(self) -> None:
        assert resolve(0, 3, environ=OURS).local_rank is None
        assert resolve(0, 4, environ=TORCH).local_rank is None
        assert resolve(1, 4, environ=TORCH).local_rank == 1
        assert resolve(1, 4, "h:9", environ={"GRADWIRE_LOCAL_RANK": "3"}).local_rank == 3

    def test_resolve_accepts_any_integer_type(self) -> None:
        numpy = pytest.importorskip("numpy")
        config = resolve(numpy.int64(1), numpy.int32(2), "h:9", environ={})
        assert (type(config.rank), type(config.size)) == (int, int)


class TestRole:
    def test_role_rank_0_coordinates_a_static_job(self) -> None:
        assert [resolve(rank, 2, "h:9", environ={}).role for rank in (0, 1)] == ["coordinator", "worker"]

    def test_role_no_rank_coordinates_a_served_job(self) -> None:
        environ = {"GRADWIRE_COORDINATOR": "127.0.0.1:4000"}
        assert [resolve(rank, 2, environ=environ).role for rank in (0, 1)] == ["worker", "worker"]


def refused(error: type[GradwireError], message: str, environ: dict[str, str] | None = None, **arguments: Any) -> None:
    with pytest.raises(error, match=message) as caught:
        resolve(**arguments, environ=environ or {})
    assert type(caught.value) is error


class TestRefusals:
    def test_resolve_impossible_size_raises(self) -> None:
        refused(InvalidSize, r"size 0 \(from the argument size\)", rank=0, size=0)
        refused(InvalidSize, r"size -1 \(from GRADWIRE_SIZE\)", {"GRADWIRE_SIZE": "-1", "GRADWIRE_RANK": "0"})
        refused(InvalidSize, r"size 0 \(from WORLD_SIZE\)", {"WORLD_SIZE": "0", "RANK": "0"})

    def test_resolve_impossible_rank_raises(self) -> None:
        refused(
            InvalidRank,
            r"rank 2 \(from the argument rank\) .* size 2 \(from WORLD_SIZE\)",
            TORCH | {"WORLD_SIZE": "2"},
            rank=2,
        )
        refused(InvalidRank, r"rank -1 \(from GRADWIRE_RANK\)", OURS | {"GRADWIRE_RANK": "-1"})
        refused(InvalidRank, r"local_rank 3 \(from GRADWIRE_LOCAL_RANK\)", OURS | {"GRADWIRE_LOCAL_RANK": "3"})
        refused(
            InvalidRank, r"rank 3 \(from RANK\) .* size 1 \(from the argument size\)", TORCH | {"RANK": "3"}, size=1
        )

    @pytest.mark.parametrize("text", ["one", "1.0", "0x1", "1_0", "٣", "9" * 30])
    def test_resolve_variable_that_is_no_number_raises(self, text: str) -> None:
        refused(ConfigError, f"GRADWIRE_RANK is '{text}'", OURS | {"GRADWIRE_RANK": text})

    @pytest.mark.parametrize("value", ["1", 1.0, True, object()])
    def test_resolve_argument_that_is_no_number_raises(self, value: object) -> None:
        refused(ConfigError, "the argument rank is .* not a whole number", rank=value, size=2)

    def test_resolve_rank_or_size_alone_raises(self) -> None:
        refused(ConfigError, "rank 1 is given .by the argument rank. but no size", rank=1)
        refused(ConfigError, "rank 1 is given .by RANK. but no size.*WORLD_SIZE", {"RANK": "1"})
        refused(
            ConfigError, "size 4 is given .by GRADWIRE_SIZE. but no rank.*gradwire run -n 4", {"GRADWIRE_SIZE": "4"}
        )
        assert resolve(size=1, environ={}).rank == 0

    def test_resolve_without_an_address_raises(self) -> None:
        refused(
            ConfigError, "size 2 .* needs an address .*GRADWIRE_ADDRESS.*MASTER_ADDR.*gradwire run -n 2", rank=0, size=2
        )
        half = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}
        refused(ConfigError, "MASTER_ADDR is set, but MASTER_PORT is not", half)

    def test_resolve_malformed_address_raises(self) -> None:
        refused(ConfigError, "the argument address: 'h' is not an address", rank=0, size=2, address="h")
        refused(ConfigError, "the argument address is 29500", rank=0, size=2, address=29500)
        refused(ConfigError, "GRADWIRE_COORDINATOR: 'h:x'", OURS | {"GRADWIRE_COORDINATOR": "h:x"})
        refused(ConfigError, "MASTER_ADDR and MASTER_PORT: '10.0.0.1:x'", TORCH | {"MASTER_PORT": "x"})
        refused(ConfigError, r"h:0 \(from GRADWIRE_ADDRESS\): with port 0", OURS | {"GRADWIRE_ADDRESS": "h:0"})

    def test_resolve_unknown_transport_raises(self) -> None:
        refused(ConfigError, r"transport 'udp' \(from the argument transport\) is unknown.*shm", transport="udp")
        refused(ConfigError, r"transport 'udp' \(from GRADWIRE_TRANSPORT\)", {"GRADWIRE_TRANSPORT": "udp"})
        for name in TRANSPORTS:
            assert resolve(transport=name, environ={}).transport == name

    @pytest.mark.parametrize("name", ["mpi", "MPI"])
    def test_resolve_unbuilt_transport_raises_from_any_source(self, name: str) -> None:
        message = r"is not available yet: use 'auto', 'shm', 'tcp', 'grpc'"
        refused(UnsupportedOp, rf"'{name.lower()}' \(from GRADWIRE_TRANSPORT\) {message}", {"GRADWIRE_TRANSPORT": name})
        if name.islower():
            refused(UnsupportedOp, rf"'{name}' \(from the argument transport\) {message}", transport=name)
            with pytest.raises(UnsupportedOp, match=message):
                JobConfig(transport=name)

    @pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e300"])
    def test_resolve_impossible_timeout_raises(self, text: str) -> None:
        refused(ConfigError, r"timeout .* \(from GRADWIRE_TIMEOUT\) is not a positive", {"GRADWIRE_TIMEOUT": text})
        refused(ConfigError, r"timeout .* \(from the argument timeout\) is not a positive", timeout=float(text))

    @pytest.mark.parametrize("value", [None, "5", True])
    def test_resolve_timeout_that_is_no_number_raises(self, value: object) -> None:
        refused(ConfigError, "the argument timeout is", timeout=value)
        refused(ConfigError, "GRADWIRE_TIMEOUT is 'soon'", {"GRADWIRE_TIMEOUT": "soon"})

    def test_peer_timeout_from_the_environment_is_checked(self) -> None:
        assert resolve(environ={}).peer_timeout == 3.0
        assert resolve(environ={"GRADWIRE_PEER_TIMEOUT": ""}).peer_timeout == 3.0
        assert resolve(environ={"GRADWIRE_PEER_TIMEOUT": "12.5"}).peer_timeout == 12.5
        refused(ConfigError, "GRADWIRE_PEER_TIMEOUT is 'soon'", {"GRADWIRE_PEER_TIMEOUT": "soon"})
        for text in ("0", "-1", "0.4", "601", "nan", "inf"):
            match = r"peer_timeout .* \(from GRADWIRE_PEER_TIMEOUT\) is out of range: .* 0.5 to 600 seconds"
            refused(ConfigError, match, {"GRADWIRE_PEER_TIMEOUT": text})

    def test_resolve_malformed_flag_raises(self) -> None:
        refused(ConfigError, "GRADWIRE_INSECURE is 'maybe'", {"GRADWIRE_INSECURE": "maybe"})
        assert not resolve(environ={"GRADWIRE_INSECURE": "Off"}).insecure
        assert resolve(insecure=True, environ={"GRADWIRE_INSECURE": "0"}).insecure

    @pytest.mark.parametrize("name", ["two words", "x" * 129, "naïve"])
    def test_resolve_impossible_job_name_raises(self, name: str) -> None:
        refused(ConfigError, r"\(from GRADWIRE_JOB\) is not 1 to 128", {"GRADWIRE_JOB": name})


class TestJobConfig:
    """The constructor checks the fields too."""

    @pytest.mark.parametrize(
        "wrong",
        [
            {"size": 0},
            {"rank": 1, "size": 1},
            {"rank": -1},
            {"local_rank": -1},
            {"local_rank": 1, "size": 1},
            {"transport": "x"},
            {"timeout": 0.0},
            {"timeout": threading.TIMEOUT_MAX * 2},
            {"served": True},
            {"job": ""},
            {"address": Address("h", 0)},
        ],
    )
    def test_job_config_with_wrong_fields_raises(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigError):
            JobConfig(**wrong)

    def test_job_config_equality_ignores_sources(self) -> None:
        by_variable = resolve(environ={"GRADWIRE_RANK": "0", "GRADWIRE_SIZE": "1"})
        assert by_variable == resolve(0, 1, environ={})
        assert hash(by_variable) == hash(JobConfig(local_rank=0))
        assert by_variable.origin("rank") == "GRADWIRE_RANK"


@given(
    st.dictionaries(
        st.sampled_from(
            [*OURS, *TORCH, "GRADWIRE_COORDINATOR", "GRADWIRE_TIMEOUT", "GRADWIRE_JOB", "PMI_RANK", "PMI_SIZE"]
        ),
        st.one_of(st.sampled_from(["0", "1", "2", "4", "h:9", "127.0.0.1"]), st.text(max_size=6)),
    )
)
def test_any_environment_gives_a_valid_config_or_a_config_error(environ: dict[str, str]) -> None:
    try:
        config = resolve(environ=environ)
    except ConfigError:
        return
    assert config.rank is not None
    assert config.size is not None
    assert 0 <= config.rank < config.size
    assert config.size == 1 or config.address is not None
