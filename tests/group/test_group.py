"""Group: its properties, capabilities, empty arrays, close and abort, refused arguments, and examples in its docs."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradwire as gw
from gradwire.collectives import COLLECTIVES
from gradwire.host import native_core
from support.ranks import closing, run_ranks


@pytest.fixture
def single() -> Iterator[gw.Group]:
    with gw.init() as group:
        yield group


@pytest.fixture
def pair() -> Iterator[tuple[gw.Group, gw.Group]]:
    with closing(gw.loopback_pair()) as groups:
        yield groups


# -- properties --------------------------------------------------------------------------------------------------------


def test_group_of_two_has_rank_size_generation_and_topology(pair: tuple[gw.Group, gw.Group]) -> None:
    assert [(group.rank, group.size, group.generation) for group in pair] == [(0, 2, 1), (1, 2, 1)]
    assert {group.topology for group in pair} == {gw.Topology.single(2)}


@pytest.mark.parametrize("name", ["rank", "size", "generation", "topology", "capabilities"])
def test_group_properties_are_read_only(single: gw.Group, name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(single, name, 1)


def test_group_repr_shows_open_broken_and_closed(pair: tuple[gw.Group, gw.Group]) -> None:
    one, two = pair
    assert repr(two) == "<gradwire.Group rank 1 of 2, generation 1, open>"
    one.abort("enough")
    assert repr(one) == "<gradwire.Group rank 0 of 2, generation 1, broken>"
    one.close()
    assert repr(one) == "<gradwire.Group rank 0 of 2, generation 1, closed>"


# -- capabilities ------------------------------------------------------------------------------------------------------


def test_capabilities_report_transport_ops_and_algorithms(single: gw.Group, pair: tuple[gw.Group, gw.Group]) -> None:
    assert single.capabilities.transport == "local"
    able = pair[0].capabilities
    assert able.transport == "tcp"
    assert able.native == native_core.available()
    assert not able.registered
    assert not able.recovers
    assert able.reduce_ops == ("sum", "mean", "min", "max", "prod")
    assert able.algorithms["all_reduce"] == ("star", "ring", "tree", "halving", "direct", "hierarchical")
    assert set(able.algorithms) == set(COLLECTIVES)


SUPPORTED: list[tuple[str, dict[str, Any]]] = [
    ("all_reduce", {}),
    ("all_reduce", {"dtype": "bfloat16", "op": "mean", "algorithm": "ring"}),
    ("all_reduce", {"dtype": np.complex64, "op": "prod"}),
    ("reduce", {"dtype": "bool", "op": "max", "algorithm": "tree"}),
    ("reduce_scatter", {"dtype": np.dtype("int8"), "op": "min"}),
    ("all_gather", {"dtype": ml_dtypes.bfloat16}),
    ("all_reduce_named", {"op": "mean", "algorithm": "star"}),
    ("barrier", {"algorithm": "tree"}),
    *((name, {}) for name in ("send", "recv", "sendrecv", "copy", "empty", "subgroup", "stream", "abort")),
    *((name, {}) for name in ("broadcast_value", "all_gather_values", "close")),
]
UNSUPPORTED: list[tuple[str, dict[str, Any]]] = [
    ("all_reduce", {"dtype": "int32", "op": "mean"}),
    ("all_reduce", {"dtype": "complex64", "op": "max"}),
    ("all_reduce", {"op": "median"}),
    ("all_reduce", {"algorithm": "magic"}),
    ("all_reduce", {"dtype": "object"}),
    ("all_reduce", {"dtype": ">f4"}),
    ("all_reduce", {"dtype": "nonsense"}),
    ("all_reduce_named", {"dtype": "int8", "op": "mean"}),
    ("all_gather", {"algorithm": "tree"}),
    ("broadcast", {"op": "sum"}),
    ("barrier", {"op": "sum"}),
    ("send", {"dtype": "object"}),
    ("send", {"algorithm": "ring"}),
    ("send", {"op": "sum"}),
    ("broadcast_value", {"algorithm": "ring"}),
    ("recover", {}),
    ("scan", {}),
    ("__init__", {}),
]


@pytest.mark.parametrize(("operation", "arguments"), SUPPORTED)
def test_supports_an_available_operation_returns_true(
    single: gw.Group, operation: str, arguments: dict[str, Any]
) -> None:
    assert single.capabilities.supports(operation, **arguments)
    assert hasattr(single, operation)


@pytest.mark.parametrize(("operation", "arguments"), UNSUPPORTED)
def test_supports_an_unavailable_operation_returns_false(
    single: gw.Group, operation: str, arguments: dict[str, Any]
) -> None:
    assert not single.capabilities.supports(operation, **arguments)


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "prod"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "uint64", "bool", "complex64"])
def test_supports_agrees_with_what_all_reduce_accepts(single: gw.Group, dtype: str, op: str) -> None:
    x = single.empty(3, dtype)
    x[...] = 1
    if single.capabilities.supports("all_reduce", dtype=dtype, op=op):
        assert single.all_reduce(x, op) is x
    else:
        with pytest.raises(gw.UnsupportedOp):
            single.all_reduce(x, op)


def test_recover_in_a_static_group_raises_unsupported_op(single: gw.Group) -> None:
    with pytest.raises(gw.UnsupportedOp, match="a fixed membership") as caught:
        single.recover()
    assert caught.value.operation == "recover"


# -- empty -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(3, "float32"), ((2, 0, 3), "bool"), ((), "complex128"), (np.int8(4), "bfloat16"), ([2, 3], "i2")],
)
def test_empty_returns_contiguous_writable_arrays_that_can_be_reduced(single: gw.Group, shape: Any, dtype: str) -> None:
    x = single.empty(shape, dtype)
    assert isinstance(x, np.ndarray)
    assert x.shape == np.empty(shape).shape
    assert x.flags.c_contiguous
    assert x.flags.writeable
    x[...] = 1
    assert single.all_reduce(x) is x


def test_empty_without_a_dtype_is_float32(single: gw.Group) -> None:
    assert single.empty(3).dtype == np.float32


@pytest.mark.parametrize("shape", [-1, (2, -1), 1.5, "3", 2**62, 10**30, (2**40, 2**40), None])
def test_empty_of_an_impossible_shape_raises_invalid_size(single: gw.Group, shape: Any) -> None:
    with pytest.raises(gw.InvalidSize, match="no array of shape"):
        single.empty(shape)


@pytest.mark.parametrize("dtype", [object, "U5", ">f4", "f4,f4", "3f4", "nonsense", None, 7, np.longdouble])
def test_empty_of_an_unsupported_dtype_raises_array_error(single: gw.Group, dtype: Any) -> None:
    with pytest.raises(gw.ArrayError):
        single.empty(3, dtype)


# -- beginning and end -------------------------------------------------------------------------------------------------


def test_collectives_after_close_raise_closed(single: gw.Group) -> None:
    single.close()
    x = np.ones(2)
    calls: list[tuple[Any, ...]] = [
        (single.all_reduce, x),
        (single.broadcast, x),
        (single.reduce, x),
        (single.all_gather, x),
        (single.gather, x),
        (single.reduce_scatter, x),
        (single.scatter, x),
        (single.all_to_all, x),
        (single.all_reduce_named, {}),
        (single.barrier,),
        (single.broadcast_value, 1),
        (single.all_gather_values, 1),
        (single.subgroup, [0]),
        (single.stream().barrier,),
    ]
    for call, *arguments in calls:
        with pytest.raises(gw.Closed, match="closed"):
            call(*arguments)
    single.abort("too late")
    single.close()


def test_point_to_point_after_close_raises_closed(pair: tuple[gw.Group, gw.Group]) -> None:
    one, _ = pair
    one.close()
    x = np.ones(2)
    for call in (lambda: one.send(x, 1), lambda: one.recv(x, 1), lambda: one.sendrecv(x, x.copy(), 1, 1)):
        with pytest.raises(gw.Closed, match="closed"):
            call()


def test_with_block_left_by_an_exception_aborts_the_group(pair: tuple[gw.Group, gw.Group]) -> None:
    def program(group: gw.Group) -> str:
        if group.rank == 0:
            with pytest.raises(KeyError), group:
                raise KeyError("lost")
            return "left"
        with pytest.raises(gw.Aborted) as caught, group:
            group.barrier()
        assert caught.value.culprit == 0
        return str(caught.value)

    left, text = run_ranks(pair, program)
    assert left == "left"
    assert "KeyError: 'lost'" in text


def test_abort_repeated_keeps_the_first_reason(pair: tuple[gw.Group, gw.Group]) -> None:
    one, two = pair
    one.abort("first")
    one.abort("second")
    for group in pair:
        with pytest.raises(gw.Aborted, match="first"):
            group.barrier()
    two.abort("third")
    with pytest.raises(gw.Aborted, match="first"):
        two.all_reduce(1)


@pytest.mark.parametrize("n", [0, -1, 1.0, True, "2", None])
def test_local_group_of_fewer_than_one_rank_raises_invalid_size(n: Any) -> None:
    with pytest.raises(gw.InvalidSize, match="needs at least 1 rank"):
        gw.local_group(n)


# -- point to point: what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [2, -1, 0.0, "1", None, True])
def test_point_to_point_with_an_invalid_rank_raises_invalid_rank(pair: tuple[gw.Group, gw.Group], rank: Any) -> None:
    one, x = pair[0], np.zeros(1)
    with pytest.raises(gw.InvalidRank):
        one.send(x, dst=rank)
    with pytest.raises(gw.InvalidRank):
        one.sendrecv(x, x.copy(), dst=rank, src=1)
    with pytest.raises(gw.InvalidRank):
        one.copy(x, x, src=0, dst=rank)
    if rank is not None:
        with pytest.raises(gw.InvalidRank):
            one.recv(x, src=rank)


def test_point_to_point_with_its_own_rank_raises_invalid_rank(pair: tuple[gw.Group, gw.Group]) -> None:
    one, x = pair[0], np.zeros(1)
    for call in (lambda: one.send(x, 0), lambda: one.recv(x, 0), lambda: one.sendrecv(x, x.copy(), 1, 0)):
        with pytest.raises(gw.InvalidRank, match="this rank itself") as caught:
            call()
        assert (caught.value.peer, caught.value.rank, caught.value.size) == (0, 0, 2)


def test_recv_without_a_message_raises_a_timeout_that_is_not_broken(pair: tuple[gw.Group, gw.Group]) -> None:
    with pytest.raises(gw.Timeout) as caught:
        pair[0].recv(np.zeros(1), src=1, timeout=0.01)
    assert not isinstance(caught.value, gw.Broken)
    assert caught.value.culprit is None


@pytest.mark.parametrize("tag", [-1, 2**62, 1.5, "a", True])
def test_send_with_an_invalid_tag_raises_invalid_size(pair: tuple[gw.Group, gw.Group], tag: Any) -> None:
    with pytest.raises(gw.InvalidSize, match="tag"):
        pair[0].send(np.zeros(1), 1, tag=tag)


def test_sendrecv_with_overlapping_buffers_raises_array_error(pair: tuple[gw.Group, gw.Group]) -> None:
    x = np.zeros(4)
    with pytest.raises(gw.ArrayError, match="overlaps"):
        pair[0].sendrecv(x, x[2:], 1, 1)


def test_copy_within_a_rank_handles_strides_and_overlap_and_refuses_other_sizes(single: gw.Group) -> None:
    y = np.zeros((3, 2))
    single.copy(np.arange(6.0).reshape(2, 3).T, y, src=0, dst=0)
    assert y.tolist() == [[0, 3], [1, 4], [2, 5]]
    z = np.arange(5.0)
    single.copy(z[:-1], z[1:], src=0, dst=0)  # as correct as through a message
    assert z.tolist() == [0, 0, 1, 2, 3]
    with pytest.raises(gw.ArrayError, match=r"float64\[2\] does not fit float64\[3\]"):
        single.copy(np.zeros(2), np.zeros(3), src=0, dst=0)


# -- documentation -----------------------------------------------------------------------------------------------------


INSIDE = {"Work.run", "Work.call_back", "Work.acknowledge_error", "Work.expedite"}  # for gradwire itself, not for users


def public_members() -> Iterator[tuple[str, Any]]:
    for kind in (gw.Group, gw.Stream, gw.Work, gw.Capabilities):
        yield kind.__name__, kind
        for name, member in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_") and f"{kind.__name__}.{name}" not in INSIDE:
                yield f"{kind.__name__}.{name}", member
    for name in ("init", "local_group", "loopback_pair"):
        yield name, getattr(gw, name)


@pytest.mark.parametrize("member", [pytest.param(member, id=name) for name, member in public_members()])
def test_public_member_has_an_example_in_its_docstring(member: Any) -> None:
    assert doctest.DocTestParser().get_examples(inspect.getdoc(member) or "")
