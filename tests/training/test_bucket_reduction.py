"""Bucket reduction: ranks whose buckets hold the tensors in different orders get an error."""

from __future__ import annotations

import numpy as np
import pytest

import gradwire as gw
from gradwire.group.internals import GroupInternals
from gradwire.training.bucket_reduction import BucketReduction, Compressing
from gradwire.training.buckets import BucketSet, tensors_like
from support.gradients import pair_fixture as pair_fixture
from support.ranks import run_ranks


def test_bucket_reduction_different_tensor_order_raises_mismatch(pair: list[gw.Group]) -> None:
    tensors = tensors_like({"a": np.zeros(3), "b": np.zeros(3)})

    def body(group: gw.Group) -> None:
        buckets = BucketSet(group, tensors, "ba" if group.rank == 0 else "ab", (1 << 20, 1 << 20))
        reduction = BucketReduction(buckets, "auto", True, Compressing.of(None), None)
        with pytest.raises(gw.CollectiveMismatch, match="2 tensors from 'b' to 'a'"):
            GroupInternals(group).run(reduction.operation(buckets.buckets[0]))

    run_ranks(pair, body)
