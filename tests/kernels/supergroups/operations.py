"""Any call of any operation: the laws of the builds and the benchmarks draw from here."""

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from dynamiq.compressors.dynamiq.quantizers import exponential_levels
from dynamiq.core.layout import Layout
from dynamiq.kernels.supergroups import ops
from dynamiq.kernels.supergroups.operands import Bucket, Result, Values
from dynamiq.kernels.supergroups.wire import (
    SUPERGROUP,
    Address,
    GroupScales,
    Quantizer,
    Rounding,
    Tiles,
    supergroup_bytes,
)
from tests.kernels.supergroups.oracle import EPSILON


def quantizer(
    widths: tuple[int, ...],
    rounding: Rounding = "stochastic",
    group_scales: GroupScales | None = "stochastic",
    epsilon: dict[int, float] = EPSILON,
) -> Quantizer:
    """Return a quantiser for some widths, with levels that are uniform but where ε says."""
    if rounding == "dithered":
        return Quantizer(widths, ((),) * len(widths), rounding, group_scales)
    levels = tuple(exponential_levels(w, epsilon.get(w, 0.0)) if w < 16 else () for w in widths)
    return Quantizer(widths, levels, rounding, group_scales)


def bucket_of(rows: Tensor) -> Bucket:
    """Return rows[s, 256] as a bucket of one chunk, which shares their memory."""
    return Bucket(rows.view(-1), torch.tensor([0, rows.numel()]), len(rows))


def values_of(sums: Tensor) -> Values:
    """Return float32[t, s, 256] as partial sums in the order of tiles."""
    rows = sums.view(-1, SUPERGROUP)
    return Values(bucket_of(rows), torch.ones(len(rows)), torch.zeros(len(rows)), sums)


def result_of(rows: Tensor) -> Result:
    """Return rows[s, 256] as the place for sums that are written as they are."""
    ones = torch.ones(len(rows))
    return Result(bucket_of(rows), ones, torch.zeros(len(rows)), divisor=1.0, limit=torch.inf)


def fresh(result: Result) -> Result:
    """Return a result that is written elsewhere."""
    entries = torch.full_like(result.bucket.entries, -7.0)
    return replace(result, bucket=replace(result.bucket, entries=entries))


def decompressed(payload: Tensor, tiles: Tiles, quantizer: Quantizer) -> Tensor:
    """Return what a payload holds: float32[t, s, 256], zeros where there is no supergroup.

    A supergroup that the operation forgets is NaN.
    """
    rows = torch.full((int(tiles.units.max()) + 1, SUPERGROUP), torch.nan)
    ops.decompress(payload, result_of(rows), tiles, quantizer)
    return torch.where((tiles.units >= 0)[:, :, None], rows[tiles.units], 0.0)


@dataclass(repr=False)
class Call:
    """One chunk of a bucket, with everything that an operation on it may need."""

    layout: Layout
    values: Values
    result: Result
    tiles: Tiles
    quantizer: Quantizer

    @classmethod
    def of(
        cls,
        x: Tensor,
        layout: Layout,
        quantizer: Quantizer,
        address: Address,
        *,
        chunk: int = 0,
        tile_count: int = 1,
        seed: int = 0,
        divisor: int = 1,
        spare: int = 0,
        signs: int | None = None,
        mixed: bool = True,
    ) -> "Call":
        """Return a call on chunk ``chunk`` of x[d] with supergroups in a random order.

        Args:
            x: The entries.
            layout: In supergroups.
            quantizer: Its widths are given out at random, none at all included if ``mixed``.
            address: Of the message.
            chunk: Which chunk.
            tile_count: Into how many tiles its supergroups are dealt.
            seed: Of order, widths, factors and shifts.
            divisor: Of the result.
            spare: Bytes left over in each tile.
            signs: Of the rotation, if any.
            mixed: Whether there are also supergroups without bits, and contaminated ones.
        """
        generator = torch.Generator().manual_seed(seed)
        p, n = layout.positions, layout.world_size
        size = -(-p // tile_count)
        counts = layout.true_entries()
        units = torch.randperm(p, generator=generator) + chunk * p
        units = units[counts[units] > 0]
        units = torch.nn.functional.pad(units, (0, tile_count * size - len(units)), value=-1)
        units = units.view(tile_count, size)
        # Places without a supergroup are the last ones of a tile.
        units = units.gather(1, (units < 0).int().argsort(dim=1, stable=True))
        held = (units >= 0).sum(1, keepdim=True)
        shares = torch.rand(tile_count, len(quantizer.widths), generator=generator)
        if not mixed:
            shares[:, 0] = 1.0
        cuts = (shares.cummin(1).values * (held + 0.999)).long().minimum(held)
        nbytes = [
            sum(
                (row[i] - (row[i + 1] if i + 1 < len(row) else 0))
                * supergroup_bytes(w, quantizer.group_scales)
                for i, w in enumerate(quantizer.widths)
            )
            + spare
            for row in cuts.tolist()
        ]
        offsets = torch.tensor([*accumulate(nbytes, initial=1000)])
        factor = torch.ones(n * p)
        shift = 0.1 * torch.randn(n * p, generator=generator)
        offset = shift * divisor
        if mixed:
            factor[::5], factor[1::7] = 2.0**-80, 2.0**80
            offset[3::11] = torch.nan
        slices = layout.slice_offsets()
        limit = torch.finfo(x.dtype).max if divisor > 1 else float("inf")
        return cls(
            layout,
            Values(Bucket(x, slices, p), factor, shift, signs=signs),
            Result(Bucket(x.clone(), slices, p), factor, offset, float(divisor), limit, signs),
            Tiles(units, cuts, offsets, sum(nbytes), address),
            quantizer,
        )

    def payload(self) -> Tensor:
        """Return memory for a payload, full of ones."""
        return torch.full((self.tiles.nbytes,), 255, dtype=torch.uint8)

    def sums(self) -> Tensor:
        """Return memory for sums."""
        return torch.full((*self.tiles.units.shape, SUPERGROUP), -7.0)
