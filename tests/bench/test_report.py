"""Reports: figures, ratios, tables and JSON from measured blocks."""

from __future__ import annotations

import json

import pytest

from gradwire.bench.cases import Case
from gradwire.bench.engine_processes import Block
from gradwire.bench.interleave import Result
from gradwire.bench.report import (
    FASTEST_MPI,
    as_json,
    figures,
    heading,
    lines,
    ratios,
    summary,
    summary_lines,
    wrong,
)

HEADING = "#       size       count       type  redop        time    algbw    busbw  #wrong"
CASE = Case("all_reduce", "float32", "sum", 262144, 4)


def blocks(*times: float, wrong: int = 0) -> list[Block]:
    return [Block(us, us + 1, wrong, 10, us / 1e6) for us in times]


def result(**engines: list[Block]) -> Result:
    return Result(CASE, {name.replace("_", "-"): measured for name, measured in engines.items()})


def test_figures_of_blocks_are_those_of_nccl_tests() -> None:
    one = figures(result(gradwire=blocks(900, 1000, 5000, wrong=2)))["gradwire"]
    assert (one.us, one.longest_us, one.wrong) == (1000, 1001, 6)
    assert one.algbw == pytest.approx(1.048576)
    assert one.busbw == pytest.approx(1.048576 * 1.5)


def test_ratios_compare_blocks_of_the_same_round() -> None:
    found = ratios(result(gradwire=blocks(10, 100, 20), gloo=blocks(20, 500, 30)))
    assert (found["gloo"].median, found["gloo"].least, found["gloo"].most) == (2.0, 1.5, 5.0)
    assert FASTEST_MPI not in found


def test_ratios_with_several_mpis_add_the_fastest_without_the_one_over_tcp() -> None:
    found = ratios(
        result(gradwire=blocks(10), openmpi=blocks(30), mpich=blocks(20), openmpi_tcp=blocks(5), gloo=blocks(1))
    )
    assert found[FASTEST_MPI] == found["mpich"]


def test_ratios_without_gradwire_are_empty() -> None:
    assert ratios(result(gloo=blocks(1))) == {}


def test_lines_have_their_columns_below_the_heading() -> None:
    measured = result(gradwire=blocks(100, 200, 300), gloo=blocks(200, 800, 600))
    measured.unsupported["mpich"] = "MPI does not support mean"
    engines = ["gradwire", "gloo", "mpich"]
    rival = "     1048576      262144    float32    sum      600.00    1.748    2.621       0  gloo        "
    assert [*heading(engines), *lines(measured, engines)] == [
        f"{HEADING}  engine      rival ÷ gradwire (least … most)",
        "#        (B)  (elements)                          (us)   (GB/s)   (GB/s)",
        "     1048576      262144    float32    sum      200.00    5.243    7.864       0  gradwire",
        f"{rival}    2.00  (2.00 … 4.00)",
        "#  mpich: MPI does not support mean",
    ]
    assert heading(["gradwire"])[0] == HEADING
    single = list(lines(result(gradwire=blocks(100)), ["gradwire"]))
    assert single == ["     1048576      262144    float32    sum      100.00   10.486   15.729       0"]


def test_summary_has_a_row_for_each_rival() -> None:
    small = Result(Case("all_reduce", "float32", "sum", 2, 4), {"gradwire": blocks(1), "gloo": blocks(200)})
    large = result(gradwire=blocks(100), gloo=blocks(200), mpich=blocks(50))
    assert summary([small, large]) == {"all_reduce": {"gloo": {8: 200.0, 1048576: 2.0}, "mpich": {1048576: 0.5}}}
    assert list(summary_lines([small, large]))[1:] == [
        "# all_reduce, times as fast as            8     1 Mi  geo. mean",
        "#   gloo                                200     2.00      20.00",
        "#   mpich                                 —    0.500      0.500",
    ]


def test_lines_with_a_long_engine_name_keep_their_columns() -> None:
    name = "gradwire 0.1.0 (…/old/.venv)"
    measured = result(gradwire=blocks(100), gloo=blocks(300))
    measured.blocks[name] = blocks(200)
    printed = [*heading(list(measured.blocks)), *lines(measured, list(measured.blocks))]
    assert printed[0].index("rival ÷") == printed[-1].index(name) + len(name) + 1
    assert {line.index("  (") for line in printed[-2:]} == {printed[-1].index("2.00") + 4}
    _, header, first, second = summary_lines([measured])
    assert {len(header), len(first)} == {len(second)}


def test_as_json_has_every_block_and_ratio() -> None:
    measured = result(gradwire=blocks(100, 300, wrong=1), gloo=blocks(200, 600))
    found = json.loads(json.dumps(as_json([measured], {"cores": 2})))
    (row,) = found["results"]
    assert (found["cores"], row["bytes"], row["collective"], row["size"]) == (2, 1048576, "all_reduce", 4)
    assert [block["us"] for block in row["engines"]["gloo"]["blocks"]] == [200, 600]
    assert row["ratios"] == {"gloo": {"median": 2.0, "least": 2.0, "most": 2.0}}
    assert found["summary"]["all_reduce"]["gloo"] == {"1048576": 2.0}
    assert wrong([measured]) == 2
