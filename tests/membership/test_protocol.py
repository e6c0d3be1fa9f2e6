"""Tests of the published protocol, its generated code, and what is imported with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

import gradwire.membership
from gradwire.membership.v1 import gradwire_pb2

PROTO = Path(gradwire.membership.__file__).parent / "v1" / "gradwire.proto"


def python(code: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60, check=True
    )


def test_generated_code_matches_the_published_protocol(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    target = tmp_path / "set"
    root = PROTO.parents[3]
    assert protoc.main(["protoc", f"-I{root}", f"--descriptor_set_out={target}", str(PROTO)]) == 0
    published = FileDescriptorSet.FromString(target.read_bytes()).file[0]
    generated = FileDescriptorProto.FromString(gradwire_pb2.DESCRIPTOR.serialized_pb)
    for file in (published, generated):
        for message in file.message_type:
            for field in message.field:
                field.ClearField("json_name")
    assert generated == published


def test_membership_package_imports_without_grpc() -> None:
    code = (
        "import sys, gradwire.membership.coordinator.state_machine\n"
        "print({'grpc', 'google.protobuf'} & set(sys.modules))"
    )
    assert python(code).stdout == "set()\n"


def test_client_import_leaves_the_environment_unchanged() -> None:
    code = (
        "import os; before = dict(os.environ); import gradwire.membership.client.requests\n"
        "print(before == dict(os.environ))"
    )
    assert python(code).stdout == "True\n"


FORK = """
import os, sys
from gradwire.membership import Member
from gradwire.membership.client.requests import register
from gradwire.membership.coordinator.service import Coordinator

with Coordinator("127.0.0.1", 0, size=1, secret=b"a secret of this test") as coordinator:
    for child in range(3):
        pid = os.fork()
        if pid == 0:
            coordinator.stop()  # not the child's to stop
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    me = Member("me", 0, "machine", "host", 1, "127.0.0.1:1")
    register(coordinator.address, me, size=1, secret=b"a secret of this test", job=None, timeout=10)
pid = os.fork()
if pid == 0:
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""


def test_fork_in_a_coordinators_process_prints_nothing() -> None:
    done = python(FORK)
    assert (done.stdout, done.stderr) == ("", "")
