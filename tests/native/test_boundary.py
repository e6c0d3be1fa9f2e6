"""Tests that names and numbers that Python and the core share are the same on both sides."""

from __future__ import annotations

import socket
from typing import get_args

import numpy as np
import pytest

from gradwire import arrays
from gradwire.collectives import COLLECTIVES, REDUCING, algorithms, build
from gradwire.executors.fast_path import ResultLayout
from gradwire.executors.plan import Plan, ragged_bounds
from gradwire.executors.python import CallHeader
from gradwire.liveness.call_log import CallDescription
from gradwire.topology import Topology
from gradwire.transports.shm import arena
from gradwire.wire import Header, Kind

native = pytest.importorskip("gradwire._native", reason="the native core is not built")
from gradwire.executors.native import NativeExecutor, lower  # noqa: E402

JOB, GENERATION, GROUP, SEQUENCE, FINGERPRINT = 0x1122334455667788, 3, 0x99AABBCCDDEEFF00, 5, 0x0123456789ABCDEF


def plan_of(collective: str, algorithm: str, op: str | None, rank: int = 0) -> Plan:
    schedule = build(collective, algorithm, 2, topology=Topology.single(2), root=0)
    bounds = ragged_bounds([1] * schedule.segments)
    return Plan(schedule, rank, arrays.parse_dtype("int64"), op, bounds, CallDescription(collective, "", FINGERPRINT))


def test_dtypes_of_the_core_are_those_of_the_table() -> None:
    assert tuple(native.DType.__members__) == arrays.DTYPES


def test_reduce_ops_of_the_core_are_those_of_the_table_except_mean() -> None:
    assert set(native.ReduceOp.__members__) == {*arrays.REDUCE_OPS} - {"mean"}


@pytest.mark.parametrize(("dtype", "ops"), [(name, arrays.parse_dtype(name).ops) for name in arrays.DTYPES])
def test_reduction_of_the_core_is_defined_exactly_for_the_ops_of_the_dtype(dtype: str, ops: frozenset[str]) -> None:
    term = np.zeros(arrays.parse_dtype(dtype).itemsize, np.uint8)
    result = np.zeros(arrays.parse_dtype(dtype).accumulator.itemsize, np.uint8)
    for name, op in native.ReduceOp.__members__.items():
        if name in ops:
            native.kernels.fold("base", native.DType[dtype], op, result, [(term, False)])
        else:
            with pytest.raises(ValueError, match="not defined"):
                native.kernels.fold("base", native.DType[dtype], op, result, [(term, False)])


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_lower_accepts_every_schedule(collective: str) -> None:
    for algorithm in algorithms(collective):
        assert isinstance(
            lower(plan_of(collective, algorithm, "sum" if collective in REDUCING else None)), native.Program
        )


def test_result_layouts_of_the_fast_path_are_members_of_the_core() -> None:
    assert set(get_args(ResultLayout)) == set(native.ResultLayout.__members__)


def test_arena_reserves_the_bytes_that_the_core_uses() -> None:
    assert native.RESERVED_BYTES == arena.RESERVED


def test_header_of_the_core_is_that_of_the_wire_format() -> None:
    call = CallHeader(JOB, GENERATION, GROUP, 0)
    call.sequence, call.fingerprint = SEQUENCE, FINGERPRINT
    mine, theirs = socket.socketpair()
    alarm, alarm_sender = socket.socketpair()
    with mine, theirs, alarm, alarm_sender:
        executor = NativeExecutor(call, 2, alarm)
        executor.connect(1, 1, mine)
        x = np.array([7], np.int64)
        program = lower(plan_of("broadcast", "star", None))
        assert executor.engine.run(program, x, x, SEQUENCE, FINGERPRINT, 0.0, 1.0) is native.Status.DONE
        expected = Header(Kind.COLLECTIVE, JOB, GENERATION, 0, GROUP, SEQUENCE, FINGERPRINT, 0, 0, x.nbytes)
        assert theirs.recv(1000) == expected.pack() + x.tobytes()


def test_program_without_a_field_is_refused() -> None:
    with pytest.raises(TypeError):
        native.Tiling(tile=1, tiles=1, stride=1)
    with pytest.raises(TypeError):
        native.Tiling(1, 1, 1, 1)


def test_add_plan_of_an_object_that_is_not_a_program_raises() -> None:
    engine = native.Engine(message_kind=1, job=1, generation=1, group=1, rank=0, size=2, alarm=0)
    path = native.FastPath(
        engine=engine,
        turns=native.Turns(),
        calls=native.CallRing(8),
        size=2,
        resume=print,
        complete_gather=print,
        wake=print,
        subscribers=[],
        library_paths=(),
        spin_seconds=0.0,
    )
    collective = native.FastCollective(path=path, name="all_reduce", result=native.ResultLayout.ELEMENTWISE)
    with pytest.raises((TypeError, RuntimeError)):
        collective.add_plan(
            dtype=None,
            op=None,
            root=None,
            count=1,
            row_shape=(),
            rows=None,
            program=object(),
            fingerprint=1,
            description=None,
        )
