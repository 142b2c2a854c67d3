"""Buckets are DDP's own, and few of them stand for many."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dynamiq.planner.cost.buckets import Bucket, fill, thinned
from tests.planner.clusters import training

MIB = 1 << 20
SIZES = st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=30)


@given(SIZES, st.sampled_from([None, 1, 3, 400]))
def test_buckets_are_those_that_ddp_makes(numels, cap):
    caps = [MIB, 25 * MIB] if cap is None else [cap * MIB, cap * MIB]
    tensors = [torch.empty(numel, device="meta") for numel in numels]
    indices, _ = dist._compute_bucket_assignment_by_size(tensors, caps)
    expected = [sum(numels[i] for i in bucket) for bucket in indices]

    work = training(*((numel, 0.01 * i) for i, numel in enumerate(numels)))
    found = fill(work, cap)
    assert [bucket.numel for bucket in found] == expected
    assert [bucket.ready_s for bucket in found] == pytest.approx(
        [0.01 * max(bucket) for bucket in indices]
    )


def test_entries_of_two_bytes_fill_buckets_half_as_fast():
    gradients = [(MIB, 0.0)] * 8
    half = fill(training(*gradients, dtype="bfloat16"), 4)
    whole = fill(training(*gradients), 4)
    assert [bucket.numel for bucket in whole] == [MIB] * 8
    assert [bucket.numel for bucket in half] == [2 * MIB] * 4


@given(st.lists(st.integers(1, 1 << 24), min_size=1, max_size=400))
def test_few_buckets_have_the_entries_of_many_to_a_few_percent(numels):
    buckets = [Bucket(numel, float(i)) for i, numel in enumerate(numels)]
    few = thinned(buckets)
    assert few[-4:] == buckets[-4:], "the last ones decide when a step ends"
    assert sum(b.times for b in few) == len(buckets)
    assert len(few) <= 4 + 4 * len(buckets).bit_length()
    assert sum(b.times * b.numel for b in few) == pytest.approx(sum(numels), rel=0.04)
    assert [b.ready_s for b in few] == sorted(b.ready_s for b in few)


def test_a_bucket_that_stands_for_several_is_ready_with_the_last_of_them():
    buckets = [Bucket(100, float(i)) for i in range(6)]
    assert thinned(buckets)[0] == Bucket(100, 1.0, 2)
