"""Errors and bytes of the compressors on given gradients: one table, mean over seeds.

python -m evaluation.vnmse tests/data/smollm2_gradients.safetensors --bits 5 --seeds 5
"""

import json
import statistics
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import load_file

from dynamiq import (
    Butterfly,
    Compressor,
    DynamiQCompressor,
    Ring,
    Topology,
    Uncompressed,
    measure_error,
)


def compressors(bits: float) -> dict[str, Compressor]:
    """Return what is compared, by name."""
    return {
        "BF16": Uncompressed("bf16"),
        "DynamiQ paper, stochastic": DynamiQCompressor.paper(bits, rounding="stochastic"),
        "DynamiQ paper, correlated": DynamiQCompressor.paper(bits, rounding="correlated"),
        "DynamiQ paper, nearest": DynamiQCompressor.paper(bits, rounding="nearest"),
    }


def measure(
    path: Path, compressor: Compressor, topology: Topology, seeds: int
) -> dict[str, float | str]:
    """Return mean and spread of the vNMSE over seeds, and the bits per entry."""
    gradients = load_file(path)["gradients"]
    reports = [measure_error(gradients, compressor, topology, seed=s) for s in range(seeds)]
    errors = [report.vnmse for report in reports]
    return {
        "topology": topology.kind,
        "vnmse": statistics.fmean(errors),
        "spread": statistics.pstdev(errors),
        "bits_per_entry": reports[0].bits_per_entry,
    }


def main(
    gradients: Annotated[Path, typer.Argument(help="safetensors file with gradients[ranks, d]")],
    bits: Annotated[float, typer.Option(help="Bit budget per entry")] = 5.0,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds to average over")] = 5,
    output: Annotated[Path | None, typer.Option(help="Also write the rows as JSON")] = None,
) -> None:
    """Print vNMSE and bits per entry of each compressor on a ring and a butterfly."""
    table = Table("compressor", "topology", "vNMSE", "± over seeds", "bits per entry")
    rows = []
    for name, compressor in track(compressors(bits).items(), "measuring", transient=True):
        for topology in (Ring(), Butterfly()):
            row = measure(gradients, compressor, topology, seeds)
            rows.append({"compressor": name, **row})
            figures = (
                f"{row['vnmse']:.3e}",
                f"{row['spread']:.1e}",
                f"{row['bits_per_entry']:.4f}",
            )
            table.add_row(name, topology.kind, *figures)
    Console().print(table)
    if output is not None:
        output.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
