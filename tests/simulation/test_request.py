"""From what is asked to gradients, and what is refused."""

import pytest
import torch

from dynamiq.core.errors import InputError
from dynamiq.simulation import request
from dynamiq.simulation.one_chunk import OneChunk
from dynamiq.simulation.request import Request
from dynamiq.simulation.sources import mixture, resampled
from dynamiq.simulation.worlds import AllChunks


@pytest.fixture
def file(tmp_path):
    torch.save(torch.randn(3, 600, generator=torch.Generator().manual_seed(0)), tmp_path / "g.pt")
    return str(tmp_path / "g.pt")


def test_a_file_has_its_ranks_or_the_first_ones(file):
    x = torch.load(file)
    assert torch.equal(Request(file).world().gradients, x)
    few = Request(file, world_size=2, entries=500).world()
    assert torch.equal(few.gradients, x[:2, :500])
    assert (few.world_size, few.numel, few.one_chunk) == (2, 500, False)


def test_more_ranks_are_drawn_from_its_spectrum(file):
    world = Request(file, world_size=5, resample=True, seed=7).world()
    assert isinstance(world, AllChunks)
    assert torch.equal(world.gradients, resampled(torch.load(file), None, 7).matrix(5))
    assert Request(file, resample=True).world().world_size == 3


def test_the_mixture_is_drawn():
    world = Request("synthetic:mixture", entries=1000, seed=3).world()
    assert torch.equal(world.gradients, mixture(1000, 3).matrix(8))


def test_one_chunk_of_many_ranks_is_not_drawn_yet(file):
    world = Request("synthetic:mixture", world_size=8192, entries=1 << 20, one_chunk=True).world()
    assert isinstance(world, OneChunk)
    assert (world.world_size, world.numel, world.one_chunk) == (8192, 1 << 20, True)
    resampled_one = Request(file, world_size=99, resample=True, one_chunk=True).world()
    assert (resampled_one.world_size, resampled_one.numel) == (99, 768)


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"world_size": 4}, r"holds the gradients of 3 ranks, not of 4; --resample draws any"),
        ({"one_chunk": True}, r"is a file: add --resample"),
        ({"world_size": 1}, "an all-reduce needs two ranks, got 1"),
    ],
)
def test_a_file_cannot_give_what_it_has_not(file, asked, complaint):
    with pytest.raises(InputError, match=complaint):
        Request(file, **asked).world()


def test_one_rank_has_nobody_to_reduce_with(tmp_path):
    torch.save(torch.ones(1, 5), tmp_path / "g.pt")
    with pytest.raises(InputError, match=r"holds 1 rank\(s\), and an all-reduce needs two"):
        Request(str(tmp_path / "g.pt")).world()


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"gradients": "synthetic:noise"}, "no spectrum is named 'synthetic:noise'; there is synt"),
        ({"resample": True}, "--resample and --tensor are for files"),
        ({"tensor": "x"}, "--resample and --tensor are for files"),
        ({"world_size": 8192}, r"8192 ranks of 1048576 entries are more .* or --one-chunk"),
    ],
)
def test_spectra_are_refused_what_makes_no_sense(asked, complaint):
    with pytest.raises(InputError, match=complaint):
        Request(**{"gradients": "synthetic:mixture", **asked}).world()


def test_the_most_that_is_drawn_at_once_is_drawn(monkeypatch):
    monkeypatch.setattr(request, "MOST_ENTRIES", 8 * 512)
    assert Request("synthetic:mixture", entries=512).world().numel == 512
    with pytest.raises(InputError, match="more than the 4096"):
        Request("synthetic:mixture", entries=513).world()
