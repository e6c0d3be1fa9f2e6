"""Cases have the sizes, counts and bandwidths of nccl-tests."""

from __future__ import annotations

import pytest

from gradwire.bench.cases import COLLECTIVES, Case, case, cases, human, parse_size, parse_sizes, steps


@pytest.mark.parametrize(
    ("collective", "count", "puts", "gets", "nbytes", "factor"),
    [
        ("all_reduce", 1024, [1024] * 4, [1024] * 4, 4096, 1.5),
        ("broadcast", 1024, [1024, 0, 0, 0], [1024] * 4, 4096, 1),
        ("reduce", 1024, [1024] * 4, [1024, 0, 0, 0], 4096, 1),
        ("all_gather", 256, [256] * 4, [1024] * 4, 4096, 0.75),
        ("reduce_scatter", 256, [1024] * 4, [256] * 4, 4096, 0.75),
        ("gather", 256, [256] * 4, [1024, 0, 0, 0], 4096, 0.75),
        ("scatter", 256, [1024, 0, 0, 0], [256] * 4, 4096, 0.75),
        ("all_to_all", 256, [1024] * 4, [1024] * 4, 4096, 0.75),
        ("sendrecv", 1024, [1024] * 4, [1024] * 4, 4096, 1),
        ("barrier", 0, [0] * 4, [0] * 4, 0, 1),
    ],
)
def test_case_of_each_collective_has_the_counts_of_nccl_tests(
    collective: str, count: int, puts: list[int], gets: list[int], nbytes: int, factor: float
) -> None:
    made = case(collective, "float32", "sum", 4096, 4)
    assert made.count == count
    assert [made.puts(rank) for rank in range(4)] == puts
    assert [made.gets(rank) for rank in range(4)] == gets
    assert (made.nbytes, made.bus_factor) == (nbytes, factor)


def test_case_table_above_covers_every_collective() -> None:
    assert len(COLLECTIVES) == 10


def test_case_with_a_size_that_does_not_divide_rounds_down_to_at_least_one_element() -> None:
    assert case("all_gather", "float32", "sum", 1000, 3).nbytes == 996
    assert case("all_gather", "float32", "sum", 8, 4) == Case("all_gather", "float32", "none", 1, 4)
    assert case("all_reduce", "complex128", "sum", 8, 2).nbytes == 16


def test_cases_that_round_to_the_same_size_come_once() -> None:
    made = list(cases(["barrier", "all_gather"], "float32", "sum", [8, 12, 64], 4))
    assert [(one.collective, one.nbytes) for one in made] == [("barrier", 0), ("all_gather", 16), ("all_gather", 64)]


def test_parse_sizes_reads_units_and_human_writes_them() -> None:
    assert parse_sizes("8, 4Ki,1MiB ,2Gi,3 B") == [8, 4096, 1 << 20, 2 << 30, 3]
    assert [human(size) for size in (8, 4096, 4092, 3 << 20, 1 << 30, 0)] == ["8", "4 Ki", "4092", "3 Mi", "1 Gi", "0"]
    assert steps(8, 64, 2) == [8, 16, 32, 64]


@pytest.mark.parametrize("text", ["", "0", "-8", "64K", "1.5Mi", "eight", "Ki"])
def test_parse_size_of_other_text_raises_and_names_it(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size like 8, 64Ki"):
        parse_size(text)
