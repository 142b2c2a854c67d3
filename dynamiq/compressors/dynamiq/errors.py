"""How large the error of each width is: the relative squared error e of one quantisation.

Shipped for supergroups of independent entries. Dithered codes have a closed form for entries of
any distribution, from three numbers, the *shape*: means over supergroups of Σ (s z^k)² over their
energy, where s is an entry's scale and z its companded share of the scale, for k = 0, 1 and 2.
"""

from functools import cache

import torch
from torch import Tensor

from dynamiq.kernels.supergroups.dither import companded, expansion
from dynamiq.kernels.supergroups.quantization import decoded_group_scale, round_up_to_bfloat16
from dynamiq.kernels.supergroups.wire import GROUP, GROUPS, GroupScales, Quantizer

# Measured: python -m evaluation.relative_errors
GAUSSIAN_SHAPES = {False: (9.48, 1.712, 0.677), True: (4.58, 1.388, 0.833)}
"""Of supergroups of Gaussian entries, without and with group scales."""
ASSUMED_SHAPES = {False: GAUSSIAN_SHAPES[False], True: (8.2, 1.32, 0.85)}
"""Before anything is measured: rotated entries are Gaussian; others are like those of a language
model's gradients (the same command, --gradients tests/data/smollm2_gradients.safetensors)."""
GAUSSIAN_ERRORS = {
    ("stochastic", False): (
        *(8.48, 1.44, 0.175, 0.0236, 7.00e-3),
        *(1.64e-3, 3.98e-4, 7.50e-5, 2.43e-5, 6.05e-6),
    ),
    ("stochastic", True): (
        *(3.55, 0.699, 0.0791, 0.0133, 3.17e-3),
        *(7.46e-4, 1.85e-4, 5.10e-5, 1.67e-5, 8.48e-6),
    ),
    ("nearest", False): (
        *(5.60, 0.654, 0.0874, 0.0117, 3.50e-3),
        *(8.19e-4, 1.99e-4, 3.72e-5, 1.21e-5, 3.02e-6),
    ),
    ("nearest", True): (
        *(2.15, 0.343, 0.0396, 6.63e-3, 1.59e-3),
        *(3.76e-4, 9.54e-5, 2.84e-5, 1.12e-5, 7.13e-6),
    ),
}
"""e at 1 to 10 bits, by rounding and whether there are group scales, at the default levels."""
_TYPICAL_BITS = 4
"""The width at which the errors of shapes are compared."""
BFLOAT16_ERROR = 5.53e-6
"""e of 16 bits."""


@cache
def shipped_errors(quantizer: Quantizer) -> tuple[float, ...]:
    """Return e of each of the quantiser's widths, before anything is known of the entries."""
    has_groups = quantizer.group_scales is not None
    if quantizer.rounding == "dithered":
        shape = torch.tensor(ASSUMED_SHAPES[has_groups], dtype=torch.float64)
        return tuple(_dithered_error(w, shape).item() for w in quantizer.widths)
    rounding = "nearest" if quantizer.rounding == "nearest" else "stochastic"
    table = GAUSSIAN_ERRORS[rounding, has_groups]
    return tuple(BFLOAT16_ERROR if w == 16 else table[w - 1] for w in quantizer.widths)


PEAKS = {False: 1.9, True: 1.3}
"""π of dithered codes of all widths, without and with group scales: along rings of 8 ranks of
Gaussian entries."""


def roughness(quantizer: Quantizer, shapes: Tensor) -> Tensor:
    """Return float64[k]: how much greater errors are than shipped ones.

    Args:
        quantizer: Only dithered codes have shapes; for others it is 1.
        shapes: float64[k, 3]; zeros where nothing is known.
    """
    if quantizer.rounding != "dithered":
        return torch.ones(len(shapes), dtype=torch.float64)
    typical = min(quantizer.widths, key=lambda width: abs(width - _TYPICAL_BITS))
    assumed = shipped_errors(quantizer)[quantizer.widths.index(typical)]
    errors = _dithered_error(typical, shapes) / assumed
    return torch.where(shapes[:, 0] > 0, errors, 1.0)


def noise_peaks(quantizer: Quantizer, shapes: Tensor) -> Tensor:
    """Return float64[k], π: how much more noise counts than entries when it is quantised again.

    Args:
        quantizer: Only for dithered codes this is known; for others it is 1.
        shapes: float64[k, 3] of the entries; the more peaked these are, the less noise counts.
    """
    if quantizer.rounding != "dithered":
        return torch.ones(len(shapes), dtype=torch.float64)
    has_groups = quantizer.group_scales is not None
    gaussian = GAUSSIAN_SHAPES[has_groups][0]
    zeroth = torch.where(shapes[:, 0] > 0, shapes[:, 0], ASSUMED_SHAPES[has_groups][0])
    return PEAKS[has_groups] * gaussian / zeroth


def band_errors(quantizer: Quantizer, shapes: Tensor) -> Tensor:
    """Return e for each shape and width, float64[k, widths].

    Args:
        quantizer: Its widths, and its rounding: only dithered codes have shapes.
        shapes: float64[k, 3]; zeros where nothing is known.
    """
    shipped = torch.tensor(shipped_errors(quantizer), dtype=torch.float64)
    if quantizer.rounding != "dithered":
        return shipped.expand(len(shapes), -1)
    errors = torch.stack([_dithered_error(w, shapes) for w in quantizer.widths], dim=1)
    return torch.where(shapes[:, :1] > 0, errors, shipped)


def _dithered_error(width: int, shape: Tensor) -> Tensor:
    """Return e[...] of shapes float64[..., 3].

    With u = y + ε, ε uniform on (-1/2, 1/2), the error α u + κ u³ - (α y + κ (y³ + y / 4)) has the
    variance α²/12 + α κ/40 + κ²/448 + (α κ/2 + κ²/8) y² + 3/4 κ² y⁴.
    """
    if width == 16:
        return torch.full_like(shape[..., 0], BFLOAT16_ERROR)
    e = expansion(width)
    a, k, y2 = e.alpha, e.kappa, e.half * e.half
    return (
        shape[..., 0] * (a * a / 12 + a * k / 40 + k * k / 448)
        + shape[..., 1] * ((a * k / 2 + k * k / 8) * y2)
        + shape[..., 2] * (0.75 * k * k * y2 * y2)
    )


def shape_of(x: Tensor, group_scales: GroupScales | None) -> Tensor:
    """Return the shapes float64[k, 3] of supergroups float32[k, 256]; NaN of those of zeros."""
    largest = x.abs().view(-1, GROUPS, GROUP).amax(2)
    scale = round_up_to_bfloat16(largest.amax(1))
    if group_scales is None:
        scales = scale[:, None, None]
    else:
        codes = (255.0 * largest / scale[:, None]).ceil().clamp(min=1.0)
        scales = decoded_group_scale(codes, scale)[:, :, None]
    z = companded((x.view(-1, GROUPS, GROUP) / scales).clamp(-1.0, 1.0)).double()
    squares, z2 = scales.double().square().expand_as(z), z.square()
    energy = x.double().square().sum(1)
    moments = [squares, squares * z2, squares * z2 * z2]
    return torch.stack([moment.sum((1, 2)) / energy for moment in moments], 1)
