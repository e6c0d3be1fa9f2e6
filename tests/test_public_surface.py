"""Tests the public surface: the exported names, their signatures and defaults, and that each has a docstring."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest

import gradwire as gw
from gradwire import errors
from gradwire.job import config

# Adding a name is a promise to users. Removing one breaks their programs.
EXPECTED = {
    # starting
    "elastic",
    "init",
    "launch",
    "local_group",
    "loopback_pair",
    "Credentials",
    "JobConfig",
    "WorkerNode",
    # communicating
    "Capabilities",
    "Group",
    "Message",
    "Stream",
    "Topology",
    "Work",
    # training
    "Communicator",
    "Contract",
    "GradientSync",
    "Sampler",
    "broadcast_named",
    "check_replicas",
    "weighted_mean",
    # errors
    "Aborted",
    "ArrayError",
    "Broken",
    "CheckpointError",
    "Closed",
    "CollectiveMismatch",
    "ConfigError",
    "Elastic",
    "Fence",
    "Fenced",
    "Finished",
    "GradwireError",
    "GroupTimeout",
    "InvalidRank",
    "InvalidSize",
    "JournalError",
    "NoConnection",
    "NotFinite",
    "OtherRun",
    "PeerLost",
    "Refused",
    "ReplicasDiverged",
    "SizeMismatch",
    "StateLost",
    "Step",
    "Timeout",
    "TransportError",
    "UnsupportedOp",
    "WorkerFailed",
    "__version__",
}

COLLECTIVES = {
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "gather",
    "reduce_scatter",
    "scatter",
    "all_to_all",
    "all_reduce_named",
    "barrier",
}
ON_GROUP = COLLECTIVES | {
    "rank",
    "size",
    "local_rank",
    "local_size",
    "node_rank",
    "generation",
    "topology",
    "capabilities",
    "bytes_sent",
    "close",
    "abort",
    "recover",
    "send",
    "recv",
    "isend",
    "irecv",
    "probe",
    "sendrecv",
    "copy",
    "broadcast_value",
    "all_gather_values",
    "stream",
    "subgroup",
    "empty",
}


def test_package_exports_exactly_the_expected_names() -> None:
    assert len(gw.__all__) == len(set(gw.__all__))
    assert set(gw.__all__) == EXPECTED
    assert set(gw.__all__) <= set(dir(gw))


def test_launch_is_callable_after_its_package_is_imported() -> None:
    importlib.import_module("gradwire.launch")  # this import binds gradwire.launch to the package
    assert callable(gw.launch)


def test_error_classes_are_all_public() -> None:
    kinds = (kind for kind in vars(errors).values() if isinstance(kind, type))
    assert {kind.__name__ for kind in kinds if issubclass(kind, errors.GradwireError)} <= EXPECTED


def test_version_is_that_of_the_installed_package() -> None:
    assert metadata.version("gradwire") == gw.__version__


@pytest.mark.parametrize(
    ("kind", "expected"), [(gw.Group, ON_GROUP), (gw.Stream, COLLECTIVES | {"copy", "synchronize"})]
)
def test_group_and_stream_have_the_expected_methods(kind: type, expected: set[str]) -> None:
    assert expected <= {name for name in dir(kind) if not name.startswith("_")} | set(inspect.get_annotations(kind))


@pytest.mark.parametrize("name", sorted(COLLECTIVES))
def test_collective_has_the_same_signature_on_group_and_stream(name: str) -> None:
    on_group, on_stream = (
        [(parameter.name, parameter.kind, parameter.default) for parameter in signature.parameters.values()]
        for signature in (inspect.signature(getattr(kind, name)) for kind in (gw.Group, gw.Stream))
    )
    assert on_group == on_stream


@pytest.mark.parametrize("name", sorted(COLLECTIVES))
def test_collective_takes_an_algorithm_and_a_timeout(name: str) -> None:
    parameters = inspect.signature(getattr(gw.Group, name)).parameters
    assert (parameters["algorithm"].default, parameters["timeout"].default) == ("auto", None)
    assert parameters["algorithm"].kind is parameters["timeout"].kind is inspect.Parameter.KEYWORD_ONLY


POINT_TO_POINT = {
    "send": {"tag": 0, "timeout": None},
    "recv": {"x": None, "src": None, "tag": 0, "timeout": None},
    "isend": {"tag": 0},
    "irecv": {"src": None, "tag": 0},
    "probe": {"src": None, "tag": 0, "timeout": None},
    "sendrecv": {"tag": 0, "timeout": None},
    "copy": {"timeout": None},
}


@pytest.mark.parametrize("name", POINT_TO_POINT)
def test_point_to_point_call_has_the_expected_defaults(name: str) -> None:
    parameters = inspect.signature(getattr(gw.Group, name)).parameters.values()
    assert all(parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
    defaults = {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}
    assert defaults == POINT_TO_POINT[name]


def test_message_has_the_expected_fields() -> None:
    assert tuple(inspect.get_annotations(gw.Message)) == ("source", "tag", "nbytes", "dtype", "shape")


def test_init_has_the_expected_defaults() -> None:
    parameters = inspect.signature(gw.init).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    assert defaults == {
        "rank": None,
        "size": None,
        "address": None,
        "transport": "auto",
        "timeout": 300.0,
        "insecure": False,
        "config": None,
    }
    # The same object, not only an equal one: this is how `init` knows whether the caller passed a timeout.
    # GRADWIRE_TIMEOUT replaces the default and never the caller's value.
    assert parameters["timeout"].default is config.DEFAULT_TIMEOUT


DESCRIPTORS = (property, classmethod, staticmethod)


def public_objects() -> Iterator[tuple[str, Any]]:
    for name in sorted(EXPECTED - {"__version__"}):
        found = getattr(gw, name)
        yield name, found
        if isinstance(found, type):
            for member, value in vars(found).items():
                if not member.startswith("_") and (callable(value) or isinstance(value, DESCRIPTORS)):
                    yield f"{name}.{member}", value


@pytest.mark.parametrize("public", [pytest.param(public, id=name) for name, public in public_objects()])
def test_public_name_has_a_docstring_of_its_own(public: Any) -> None:
    # Not inspect.getdoc, which would accept the docstring of a base class.
    assert (getattr(public, "__doc__", None) or "").strip()
