"""Padding, chunks and segments: index arithmetic, checked against lists."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamiq.core.errors import InputError
from dynamiq.core.layout import Layout
from dynamiq.core.segments import segments

SIZES = (0, 1, 15, 16, 17, 255, 256, 257, 4097)


@st.composite
def layouts(draw):
    """All kinds of layouts, with and without bounds."""
    numel = draw(st.integers(0, 700))
    world_size = draw(st.integers(1, 9))
    unit = draw(st.sampled_from([1, 2, 7, 16, 32, 256]))
    bounds = None
    if draw(st.booleans()):
        cuts = st.lists(st.integers(0, numel), min_size=world_size - 1, max_size=world_size - 1)
        bounds = (0, *sorted(draw(cuts)), numel)
    return Layout(numel, world_size, unit, bounds)


class TestCutting:
    @given(layouts())
    def test_slices_cover_the_tensor_in_order(self, layout):
        slices = [layout.slice_bounds(c) for c in range(layout.world_size)]

        assert slices[0][0] == 0
        assert slices[-1][1] == layout.numel
        assert all(before[1] == after[0] for before, after in pairwise(slices))
        assert [stop - start for start, stop in slices] == [
            layout.slice_numel(c) for c in range(layout.world_size)
        ]

    @given(layouts())
    def test_every_slice_fits_into_its_chunk_and_the_largest_fills_it(self, layout):
        units = [-(-layout.slice_numel(c) // layout.unit) for c in range(layout.world_size)]

        assert layout.positions == max(units)
        assert layout.units == sum(units)
        assert layout.chunk_numel == layout.positions * layout.unit
        assert layout.padded_numel == layout.world_size * layout.chunk_numel

    @pytest.mark.parametrize(
        ("numel", "world_size", "unit", "positions"),
        [(0, 4, 16, 0), (1, 4, 16, 1), (64, 4, 16, 1), (65, 4, 16, 2), (100, 3, 1, 34)],
    )
    def test_without_bounds_the_padded_bucket_is_cut_evenly(
        self, numel, world_size, unit, positions
    ):
        assert Layout(numel, world_size, unit).positions == positions

    def test_more_ranks_than_units_leave_chunks_empty(self):
        layout = Layout(33, 4, 16)

        assert [layout.slice_bounds(c) for c in range(4)] == [(0, 16), (16, 32), (32, 33), (33, 33)]

    def test_with_bounds_the_largest_slice_decides(self):
        layout = Layout(10, 3, 4, (0, 1, 1, 10))

        assert (layout.positions, layout.units, layout.padded_numel) == (3, 4, 36)
        assert [layout.slice_bounds(c) for c in range(3)] == [(0, 1), (1, 1), (1, 10)]

    @pytest.mark.parametrize(
        "bounds",
        [(0, 5), (0, 5, 5, 10), (1, 5, 10), (0, 5, 9), (0, 11, 10), (0, -1, 10), ()],
        ids=str,
    )
    def test_bounds_that_do_not_split_the_tensor_are_refused(self, bounds):
        with pytest.raises(InputError, match=r"do not split 10 entries into 2 slices.* 3 non-decr"):
            Layout(10, 2, 1, bounds)


class TestPadding:
    @given(layouts(), st.sampled_from([torch.float32, torch.float64]))
    def test_padding_and_back_is_the_identity(self, layout, dtype):
        x = torch.arange(1.0, layout.numel + 1)
        padded = layout.pad(x, dtype)
        out = torch.full((layout.numel,), -1.0)
        layout.unpad(padded, out)

        assert padded.dtype == dtype
        assert padded.shape == (layout.world_size, layout.chunk_numel)
        assert torch.equal(out, x)
        assert (padded != 0).sum() == layout.numel, "padding is zeros"

    @given(layouts())
    def test_a_chunk_holds_its_slice_first(self, layout):
        x = torch.arange(1.0, layout.numel + 1)
        padded = layout.pad(x, torch.float32)
        for c in range(layout.world_size):
            start, stop = layout.slice_bounds(c)
            assert torch.equal(padded[c, : stop - start], x[start:stop])
            assert (padded[c, stop - start :] == 0).all()

    @pytest.mark.parametrize("bounds", [None, (0, 3, 8)])
    def test_padding_copies(self, bounds):
        x = torch.ones(8)
        padded = Layout(8, 2, 1, bounds).pad(x, torch.float32)
        padded.zero_()

        assert (x == 1).all()

    @pytest.mark.parametrize("numel", SIZES)
    def test_strided_and_narrow_tensors_are_padded_by_value(self, numel):
        x = torch.arange(2 * numel, dtype=torch.float16)[::2]

        assert torch.equal(
            Layout(numel, 3, 16).pad(x, torch.float32),
            Layout(numel, 3, 16).pad(x.float().contiguous(), torch.float32),
        )


class TestTails:
    @given(layouts())
    def test_true_entries_count_what_padding_left(self, layout):
        ones = layout.pad(torch.ones(layout.numel), torch.float32)
        counted = ones.view(layout.world_size * layout.positions, layout.unit).sum(1)

        assert torch.equal(layout.true_entries(), counted.long())


class TestSegments:
    @given(st.integers(1, 300), st.integers(1, 400))
    def test_segments_are_nearly_equal_and_contiguous(self, positions, count):
        parts = segments(positions, count)

        assert [p for part in parts for p in part] == list(range(positions))
        assert len(parts) == min(positions, count)
        sizes = {len(part) for part in parts}
        assert max(sizes) - min(sizes) <= 1

    def test_nothing_has_no_segments(self):
        assert segments(0, 5) == ()
