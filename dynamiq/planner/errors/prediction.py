"""Predicts errors: the vNMSE of a format on a topology, from a gradient's spectrum."""

import math
from dataclasses import replace
from functools import lru_cache

import torch

from dynamiq.compressors.dynamiq.compressor import DynamiQCompressor
from dynamiq.compressors.dynamiq.forecast import Supply, forecast_vnmse
from dynamiq.compressors.dynamiq.memory import bands_of
from dynamiq.compressors.mx import MXCompressor
from dynamiq.compressors.omnireduce.compressor import OmniReduceCompressor
from dynamiq.compressors.thc.compressor import THCCompressor
from dynamiq.compressors.uncompressed import Uncompressed
from dynamiq.core.compressor import Compressor
from dynamiq.core.errors import InputError
from dynamiq.core.topology import Schedule, Topology
from dynamiq.planner.errors.integers import summed_integers_vnmse
from dynamiq.planner.errors.rounding import Loss, Ranks, mx_loss, rounded_vnmse
from dynamiq.planner.profiles.spectrum import BANDS, GradientSpectrum, Shape
from dynamiq.topologies import Hierarchical, Ring

_FLOATS = {"bf16": 8, "fp16": 11}
"""Bits of the significand, the hidden one included."""

_LADDER = (*range(2, 9), *(round(2 ** (i / 2)) for i in range(7, 42)))
"""World sizes whose widths are worked out for rings; between them errors are interpolated. Widths
are whole numbers, so that one rank more can seem to gain a hundredth; a rung more never does."""


def predicted_vnmse(
    compressor: Compressor, topology: Topology, world_size: int, spectrum: GradientSpectrum
) -> float | None:
    """Return the vNMSE that an all-reduce should have: mean over random numbers, ranks and orders.

    Formats that learn from call to call have done so. Gradients are one bucket.

    Args:
        compressor: The format.
        topology: Who sends what to whom.
        world_size: Ranks, of which the spectrum's were a sample.
        spectrum: Of the gradients.

    Returns:
        At most 1, which is what sending nothing would have; None if this format's error cannot be
        said: that of error feedback depends on the steps before, that of shared MX scales on the
        largest entries of all ranks, and other packages' formats are not known here.

    Raises:
        InputError: No such world size.
        ConfigurationError: The topology, or the format, does not fit the world size.
    """
    if world_size < 1:
        raise InputError(f"an error is predicted for at least one rank, got {world_size}")
    schedule = topology.schedule(world_size)
    compressor.check_world_size(schedule.compressed_ranks)
    return _predicted(compressor, topology, world_size, spectrum)


@lru_cache(maxsize=4096)
def _predicted(
    compressor: Compressor, topology: Topology, world_size: int, spectrum: GradientSpectrum
) -> float | None:
    if isinstance(topology, Hierarchical):
        return _on_two_levels(compressor, topology, world_size, spectrum)
    if world_size == 1:
        return 0.0
    return _on_one_level(compressor, topology.schedule(world_size), spectrum)


def _on_one_level(
    compressor: Compressor, schedule: Schedule, spectrum: GradientSpectrum, gather: bool = True
) -> float | None:
    if isinstance(compressor, DynamiQCompressor):
        return _dynamiq(compressor, schedule, spectrum)
    if isinstance(compressor, THCCompressor) and not compressor.error_feedback:
        return summed_integers_vnmse(compressor, schedule.world_size, spectrum)
    ranks = Ranks(schedule, spectrum.correlation, spectrum.evenness, gather=gather)
    if isinstance(compressor, Uncompressed):
        return _floats(compressor.format, ranks, spectrum)
    if isinstance(compressor, OmniReduceCompressor):
        rounding = _floats(compressor.payload, ranks, spectrum)
        return rounding + _not_sent(compressor.target, spectrum)
    if isinstance(compressor, MXCompressor) and compressor.scale_scope == "per_hop":
        return rounded_vnmse(mx_loss(compressor, spectrum.peaks), ranks)
    return None


def _floats(name: str, ranks: Ranks, spectrum: GradientSpectrum) -> float:
    if name not in _FLOATS:
        return 0.0
    bits = _FLOATS[name]
    exact = spectrum.dtype == {"bf16": "bfloat16", "fp16": "float16"}[name]
    # Of mantissas that are evenly spread over the octave on a logarithmic scale.
    squared = 2.0 ** (2 - 2 * bits) / 12 * 3 / (8 * math.log(2))
    if name == "fp16":
        squared += _subnormal(ranks.schedule.world_size, spectrum)
    return rounded_vnmse(Loss(squared, nearest=bits - 1), replace(ranks, exact=exact))


def _subnormal(world_size: int, spectrum: GradientSpectrum) -> float:
    """Return what steps of 2^-24 cost entries of a mean, which are divided by n beforehand."""
    divisor = 1 << (world_size - 1).bit_length()
    energies = torch.tensor(spectrum.energies, dtype=torch.float64)
    total = energies.sum().item()
    noise = torch.full_like(energies, 2.0**-48 / 12 * divisor**2 * 256 * spectrum.world_size)
    return torch.minimum(noise, energies).sum().item() / total if total else 0.0


def _not_sent(target: float, spectrum: GradientSpectrum) -> float:
    """Return the share of the energy outside of the blocks that all ranks ask for."""
    if target >= 1.0:
        return 0.0
    energies = _sum_energies(spectrum, spectrum.world_size)
    kept = target * len(energies)
    whole = int(kept)
    left = energies[whole:].sum() - energies[whole] * (kept - whole)
    return (left / energies.sum()).item() if energies.any() else 0.0


def _dynamiq(
    compressor: DynamiQCompressor, schedule: Schedule, spectrum: GradientSpectrum
) -> float | None:
    if compressor.drop_energy:
        return None
    # Shapes are known of the recipes' own pairs, one scale or one for each group.
    has_groups = compressor.group_scales is not None
    shapes: tuple[Shape, ...] = ((0.0, 0.0, 0.0),) * BANDS
    if spectrum.bands and has_groups == (compressor.rotation is None):
        shapes = tuple(band.grouped if has_groups else band.rotated for band in spectrum.bands)
    supply = Supply(spectrum.energies, spectrum.correlations, shapes)

    def of_ranks(n: int) -> float:
        return min(1.0, forecast_vnmse(compressor, schedule.topology.schedule(n), supply))

    n = schedule.world_size
    if not isinstance(schedule.topology, Ring) or n in _LADDER or n > _LADDER[-1]:
        return of_ranks(n)
    above = next(index for index, rung in enumerate(_LADDER) if rung > n)
    low, high = _LADDER[above - 1], _LADDER[above]
    share = math.log(n / low) / math.log(high / low)
    return float(of_ranks(low) ** (1 - share) * of_ranks(high) ** share)


def _on_two_levels(
    compressor: Compressor, topology: Hierarchical, world_size: int, spectrum: GradientSpectrum
) -> float | None:
    """Nodes are ranks that are more alike; what is lost inside of them they add up."""
    g = topology.ranks_per_node
    nodes = world_size // g
    between = _predicted(compressor, topology.inter, nodes, _of_nodes(spectrum, g))
    if between is None or g == 1:
        return between
    inside = _on_one_level(topology.local, topology.intra.schedule(g), spectrum, gather=False)
    if inside is None:
        return None
    rho = spectrum.correlation
    return between + inside * (1 + (g - 1) * rho) / (1 + (world_size - 1) * rho)


def _of_nodes(spectrum: GradientSpectrum, ranks: int) -> GradientSpectrum:
    """Return the spectrum of sums of so many ranks."""

    def alike(rho: float) -> float:
        return min(1.0, ranks * rho / (1 + (ranks - 1) * rho))

    return spectrum.model_copy(
        update={
            "energies": tuple(_sum_energies(spectrum, ranks).tolist()),
            "correlation": alike(spectrum.correlation),
            "bands": tuple(
                band.model_copy(update={"correlation": alike(band.correlation)})
                for band in spectrum.bands
            ),
            "dtype": "float32",
        }
    )


def _sum_energies(spectrum: GradientSpectrum, ranks: int) -> torch.Tensor:
    """Return float64[u], the energies of sums of so many ranks."""
    energies = torch.tensor(spectrum.energies, dtype=torch.float64)
    rho = torch.tensor(spectrum.correlations, dtype=torch.float64)
    return energies * (1 + (ranks - 1) * rho[bands_of(len(energies), energies.device)])
