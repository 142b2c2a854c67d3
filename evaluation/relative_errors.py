"""The relative squared error of one quantisation, by width: what the allocation is told.

python -m evaluation.relative_errors

Supergroups of independent Gaussian entries go through the kernels once; the error is divided by
the energy, supergroup by supergroup, and averaged. ``dynamiq/compressors/dynamiq/errors.py`` holds
what this prints.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor

from dynamiq import DynamiQCompressor
from dynamiq.compressors.dynamiq.compressor import WIDTHS
from dynamiq.compressors.dynamiq.errors import shape_of
from dynamiq.kernels.supergroups import ops
from dynamiq.kernels.supergroups.operands import Bucket, Result, Values
from dynamiq.kernels.supergroups.rotation import rotate
from dynamiq.kernels.supergroups.wire import (
    SUPERGROUP,
    Address,
    GroupScales,
    Quantizer,
    Rounding,
    Tiles,
)

RECIPES: tuple[tuple[Rounding, GroupScales | None], ...] = (
    ("stochastic", None),
    ("stochastic", "stochastic"),
    ("nearest", None),
    ("nearest", "stochastic"),
    ("dithered", None),
    ("dithered", "up"),
)


def quantizer_of(rounding: Rounding, group_scales: GroupScales | None) -> Quantizer:
    """Return a quantiser with all widths and the default levels."""
    compressor = DynamiQCompressor(
        bit_budget=17.0, widths=WIDTHS, rounding=rounding, group_scales=group_scales
    )
    return compressor.quantizer


def relative_error(x: Tensor, quantizer: Quantizer, width: int, seed: int = 0) -> float:
    """Return the mean over supergroups of float32[s, 256] of error over energy."""
    arrived = quantised(x, quantizer, width, seed)
    error = (arrived - x).double().square().sum(1) / x.double().square().sum(1)
    return error.mean().item()


def quantised(x: Tensor, quantizer: Quantizer, width: int, seed: int) -> Tensor:
    """Return float32[s, 256] as it arrives after one message with codes of ``width`` bits."""
    count = len(x)
    slices = torch.tensor([0, x.numel()])
    ones, zeros = torch.ones(count), torch.zeros(count)
    has_bits = [width >= w for w in quantizer.widths]
    cuts = torch.tensor([[count if has else 0 for has in has_bits]])
    nbytes = count * (SUPERGROUP * width // 8 + 18)
    tiles = Tiles(
        torch.arange(count)[None],
        cuts,
        torch.tensor([0, nbytes]),
        nbytes,
        Address(seed=seed, call=0, hop=0, sender=0, world_size=1),
    )
    payload = torch.empty(nbytes, dtype=torch.uint8)
    values = Values(Bucket(x.reshape(-1), slices, count), ones, zeros)
    ops.compress(values, tiles, quantizer, payload)
    out = torch.empty(x.numel())
    result = Result(Bucket(out, slices, count), ones, zeros, 1.0, float("inf"))
    ops.decompress(payload, result, tiles, quantizer)
    return out.view(-1, SUPERGROUP)


def measure(count: int, seed: int) -> Iterator[tuple[str, list[float]]]:
    """Yield each recipe's name with its errors, and the shapes of the entries."""
    x = torch.randn(count, SUPERGROUP, generator=torch.Generator().manual_seed(seed))
    for rounding, group_scales in RECIPES:
        quantizer = quantizer_of(rounding, group_scales)
        errors = [relative_error(x, quantizer, width) for width in WIDTHS]
        yield f"{rounding}, group scales {group_scales}", errors
    for group_scales in (None, "up"):
        yield f"shape, group scales {group_scales}", shape_of(x, group_scales).mean(0).tolist()


def shapes_of_file(path: Path) -> Iterator[tuple[str, list[float]]]:
    """Yield the mean shapes of the first rank's supergroups that are not zero."""
    entries = load_file(path)["gradients"][0].float()
    x = entries[: len(entries) // SUPERGROUP * SUPERGROUP].view(-1, SUPERGROUP)
    largest = x.abs().amax(1, keepdim=True)
    x = (x / largest)[largest[:, 0] > 0]
    rotated = rotate(x, torch.arange(len(x)), 0)
    yield "shape, rotated", shape_of(rotated, None).mean(0).tolist()
    yield "shape, group scales up", shape_of(x, "up").mean(0).tolist()


def main(
    count: Annotated[int, typer.Option(min=1, help="Supergroups")] = 20_000,
    seed: Annotated[int, typer.Option(help="Of the entries")] = 0,
    gradients: Annotated[
        Path | None, typer.Option(help="safetensors file: also print the shapes of gradients[0]")
    ] = None,
) -> None:
    """Print the errors of all widths, and the shapes from which dithered ones follow."""
    table = Table("", *(f"{width} bits" for width in WIDTHS))
    for name, numbers in measure(count, seed):
        table.add_row(name, *(f"{number:.4g}" for number in numbers))
    if gradients is not None:
        for name, numbers in shapes_of_file(gradients):
            table.add_row(name, *(f"{number:.4g}" for number in numbers))
    Console(width=200).print(table)


if __name__ == "__main__":
    typer.run(main)
