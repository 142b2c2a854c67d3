"""Where every byte of a payload is: for every choice of widths, read by an independent reader."""

from itertools import chain, combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiq.kernels.supergroups import ops, wire
from tests.kernels.supergroups import oracle
from tests.kernels.supergroups.operations import decompressed, values_of
from tests.kernels.supergroups.oracle import WIDTHS

PAPER = (1, 2, 4, 8, 16)
SUBSETS = sorted(
    {c for k in (1, 2) for c in combinations(WIDTHS, k)}
    | {c for k in range(3, 6) for c in combinations(PAPER, k)}
    | {WIDTHS}
)


def compressed(values, tiles, quantizer, fill=0xA5):
    """Return the payload of values: float32[t, s, 256], written over ``fill``."""
    out = torch.full((tiles.nbytes,), fill, dtype=torch.uint8)
    ops.compress(values_of(values), tiles, quantizer, out)
    return out


def mixed(widths, generator):
    """Return widths of 3 tiles, descending in each, 0 among them, of different lengths."""
    choices = (0, *widths)
    picks = [generator.integers(len(choices), size=size) for size in (9, 8, 1)]
    return [sorted((choices[i] for i in tile), reverse=True) for tile in picks]


def sample(assigned, generator):
    shape = (len(assigned), max(map(len, assigned)), 256)
    scale = np.exp(generator.normal(size=(*shape[:2], 16))).repeat(16, axis=-1)
    return torch.from_numpy((generator.normal(size=shape) * scale).astype(np.float32))


def test_sizes_of_a_supergroup():
    """Codes, 16 UINT8 group scales and a BF16 scale; 16 bits are plain BF16."""
    sizes = {w: wire.supergroup_bytes(w, "up") for w in (0, *WIDTHS)}
    scaled = {1: 50, 2: 82, 3: 114, 4: 146, 5: 178, 6: 210, 7: 242, 8: 274, 9: 306, 10: 338}
    assert sizes == {0: 0, **scaled, 16: 512}


@pytest.mark.parametrize("widths", SUBSETS, ids=str)
def test_round_trip(widths):
    """An independent reader of the documented layout finds what our own decoder finds."""
    generator = np.random.default_rng(sum(widths))
    assigned = mixed(widths, generator)
    tiles = oracle.tiles(assigned, widths, first_unit=7, spare=6, begin=1000)
    values = sample(assigned, generator)
    quantizer = oracle.quantizer(widths)

    payload = compressed(values, tiles, quantizer)
    decoded = decompressed(payload, tiles, quantizer)

    for t, tile in enumerate(assigned):
        begin, end = tiles.offsets[t : t + 2] - 1000
        coded, rest = oracle.read_tile(payload[begin:end], tile)
        assert rest == bytes(len(rest)), "what is left of a tile is zero"
        expected = np.zeros((decoded.shape[1], 256))
        for row, c in zip(expected, coded, strict=False):
            row[:] = c.decoded()
        np.testing.assert_allclose(decoded[t].numpy(), expected, rtol=3e-7, atol=0)


@pytest.mark.parametrize("widths", [(2, 4, 8), (1, 4, 16), PAPER, WIDTHS], ids=str)
def test_runs_cover_every_supergroup_once_and_no_byte_twice(widths):
    generator = np.random.default_rng(3)
    assigned = mixed(widths, generator)
    tiles = oracle.tiles(assigned, widths, spare=10, begin=1000)
    offsets = (tiles.offsets - 1000).tolist()

    runs = wire.runs(tiles, oracle.quantizer(widths))

    taken = np.zeros(tiles.nbytes, dtype=int)
    seen = {}
    for run in chain.from_iterable(runs.values()):
        assert runs[run.width].count(run) == 1
        pieces = [(run.codes, wire.code_bytes(run.width))]
        if run.width < 16:
            pieces += [(run.group_scales, 16), (run.scales, 2)]
        count = run.stop - run.start
        for begin, size in pieces:
            assert offsets[run.tile] <= begin
            assert begin + size * count <= offsets[run.tile + 1] - 10
            taken[begin : begin + size * count] += 1
        seen.update({(run.tile, p): run.width for p in range(run.start, run.stop)})
    assert taken.max() == 1
    assert taken.sum() == tiles.nbytes - 10 * len(assigned)
    expected = {(t, p): w for t, tile in enumerate(assigned) for p, w in enumerate(tile) if w}
    assert seen == expected


def test_a_part_of_a_run_is_where_it_was_in_the_whole():
    run = wire.Run(4, 1, 10, 20, codes=1000, group_scales=5000, scales=7000)
    part = wire.part(run, 13, 15, "up")
    assert part == wire.Run(4, 1, 13, 15, 1000 + 3 * 128, 5000 + 3 * 16, 7000 + 3 * 2)


@settings(max_examples=30)
@given(
    width=st.sampled_from(WIDTHS[1:-1]),
    codes=st.lists(st.integers(0, 1022), min_size=256, max_size=256),
    exponent=st.integers(-40, 40),
)
def test_codes_are_packed_as_written(width, codes, exponent):
    """Values that are levels come back exactly, with the codes the layout promises."""
    table = oracle.values_of_codes(width, oracle.EPSILON.get(width, 0.0))
    codes = np.array(codes) % len(table)
    codes[::16] = len(table) - 1  # every group has its maximum, 1
    values = torch.from_numpy((table[codes] * 2.0**exponent).astype(np.float32)).view(1, 1, 256)
    tiles = oracle.tiles([[width]], (width,))
    # Up: a group scale of 255/255 without a random number; nearest: levels are fixed points.
    quantizer = oracle.quantizer((width,), "nearest", "up")

    payload = compressed(values, tiles, quantizer)

    (coded,), _ = oracle.read_tile(payload, [width])
    assert coded.codes.tolist() == codes.tolist()
    assert coded.scale == 2.0**exponent
    assert torch.equal(decompressed(payload, tiles, quantizer), values)


@pytest.mark.parametrize("widths", [(2, 4, 8), PAPER, WIDTHS], ids=str)
def test_accumulating_adds_what_decompressing_gives(widths):
    generator = np.random.default_rng(11)
    assigned = mixed(widths, generator)
    tiles, quantizer = oracle.tiles(assigned, widths), oracle.quantizer(widths)
    values, own = sample(assigned, generator), sample(assigned, generator)
    payload = compressed(values, tiles, quantizer)

    total = torch.empty_like(own)
    ops.decompress_accumulate(payload, values_of(own), total, tiles, quantizer)

    here = (tiles.units >= 0)[:, :, None]
    assert torch.equal(total, torch.where(here, own + decompressed(payload, tiles, quantizer), own))


def test_a_tile_does_not_depend_on_the_others():
    """So segments, which are ranges of tiles, do not change a byte."""
    widths = (2, 4, 8)
    generator = np.random.default_rng(2)
    assigned = [sorted(generator.choice(widths, 700), reverse=True) for _ in range(3)]
    tiles, quantizer = oracle.tiles(assigned, widths), oracle.quantizer(widths)
    values = sample(assigned, generator)
    whole = compressed(values, tiles, quantizer)

    for t, tile in enumerate(assigned):
        alone = oracle.tiles([tile], widths, first_unit=700 * t)
        begin, end = tiles.offsets[t : t + 2].tolist()
        assert torch.equal(compressed(values[t : t + 1], alone, quantizer), whole[begin:end])


def test_a_payload_may_be_any_part_of_memory():
    """Nothing is assumed of its address but that it is even."""
    widths = (1, 2)
    tiles, quantizer = oracle.tiles([[2, 2, 1]], widths), oracle.quantizer(widths)
    values = sample([[2, 2, 1]], np.random.default_rng(4))
    expected = compressed(values, tiles, quantizer)
    memory = torch.zeros(expected.numel() + 4, dtype=torch.uint8)
    part = memory[2:-2]
    ops.compress(values_of(values), tiles, quantizer, part)
    assert torch.equal(part, expected)
    assert not memory[:2].any()
    assert not memory[-2:].any()
    assert torch.equal(
        decompressed(part, tiles, quantizer), decompressed(expected, tiles, quantizer)
    )
