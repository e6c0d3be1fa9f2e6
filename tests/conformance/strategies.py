"""Hypothesis strategies that draw calls: dtypes, ops, counts, roots, algorithms, layouts."""

from __future__ import annotations

from hypothesis import strategies as st

from conformance.cases import DTYPES, LAYOUTS, RAGGED, SPLIT, Case
from gradwire.arrays import REDUCE_OPS, parse_dtype
from gradwire.collectives import COLLECTIVES, REDUCING, ROOTED, algorithms

SMALL = st.integers(0, 40)
LENGTHS = st.one_of(SMALL, st.integers(0, 3000))


@st.composite
def cases(draw: st.DrawFn, size: int, collectives: tuple[str, ...] = COLLECTIVES) -> Case:
    """Draw a call that `size` ranks can make."""
    collective = draw(st.sampled_from(collectives))
    dtype = draw(st.sampled_from(DTYPES))
    op = draw(st.sampled_from([op for op in REDUCE_OPS if op in parse_dtype(dtype).ops]))
    pass_counts = draw(st.booleans())
    layout = draw(st.sampled_from(LAYOUTS))
    return Case(
        collective,
        dtype,
        draw(rows(collective, size, pass_counts)),
        op if collective in REDUCING else "sum",
        draw(st.integers(0, size - 1)) if collective in ROOTED else 0,
        draw(st.sampled_from(("auto", *algorithms(collective)))),
        draw(st.sampled_from([(), (), (1,), (3,), (0,), (2, 5)])),
        layout,
        draw(st.sampled_from(("exact", "mixed", "special"))),
        out=draw(st.booleans()),
        pass_counts=pass_counts,
    )


def rows(collective: str, size: int, pass_counts: bool) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw counts: different ones if the call passes them, otherwise equal ones."""
    if collective in ("all_reduce", "reduce", "broadcast"):
        return st.tuples(LENGTHS)
    parts = size * size if collective == "all_to_all" else size
    if collective in RAGGED or pass_counts:
        return st.lists(SMALL, min_size=parts, max_size=parts).map(tuple)
    assert collective in (*SPLIT, "all_to_all")
    return SMALL.map(lambda n: (n,) * parts)


def subsets(size: int) -> list[tuple[int, ...]]:
    """Return sets of ranks for subgroups: all, the first, the last, every other, all but the first, first and last."""
    found = {tuple(range(size)), (0,), (size - 1,), tuple(range(0, size, 2)), tuple(range(1, size)), (0, size - 1)}
    return sorted({tuple(sorted(set(ranks))) for ranks in found if ranks})
