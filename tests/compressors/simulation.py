"""DynamiQ's all-reduce once more, in float64, written from the paper: what its error should be.

Statistics are exact here, a chunk is one tile, all chunks are done at once, and the random numbers
are NumPy's. So results agree in distribution only: compare errors, not bits.
"""

from dataclasses import dataclass

import numpy as np

from tests.kernels.supergroups import oracle

OVERHEAD_BITS = 8 / 16 + 16 / 256 + 32 / 256
"""Group scale, supergroup scale and two BF16 statistics, per entry."""


@dataclass(frozen=True)
class Recipe:
    """What the simulation is told.

    Attributes:
        bit_budget: All metadata included.
        widths: A subset of {1, 2, 4, 8}.
        rounding: "stochastic" or "correlated".
        topology: "ring" or "butterfly".
    """

    bit_budget: float = 5.0
    widths: tuple[int, ...] = (2, 4, 8)
    rounding: str = "stochastic"
    topology: str = "ring"


def all_reduce(x: np.ndarray, recipe: Recipe, seed: int) -> np.ndarray:
    """Return the sum of float64[n, s, 256] over ranks, float64[s, 256]."""
    n, s, _ = x.shape
    mean = x.mean((0, 2))
    energy = np.square(x).sum((0, 2)) - n * 256 * np.square(mean)
    owner = np.empty(s, int)
    owner[np.argsort(-energy, kind="stable")] = np.arange(s) % n
    widths = np.empty(s, int)
    for chunk in range(n):
        here = owner == chunk
        widths[here] = widths_of(energy[here], recipe.widths, recipe.bit_budget - OVERHEAD_BITS)
    centred = x - mean[:, None]
    # Position p of a chunk's path: the rank p places before (butterfly) or after (ring) its owner.
    sign = -1 if recipe.topology == "butterfly" else 1
    ranks = (owner + sign * np.arange(n)[:, None]) % n
    sums = list(centred[ranks, np.arange(s)])
    rounding = Rounding(recipe, n, s, np.random.default_rng(seed))

    def sent(position: int) -> np.ndarray:
        return quantise(sums[position], widths, rounding.uniform(ranks[position]), rounding.draw)

    if recipe.topology == "ring":
        for position in range(1, n):
            sums[(position + 1) % n] = sums[(position + 1) % n] + sent(position)
    else:
        size = n
        while size > 1:
            half = (size + 1) // 2
            for position in range(half, size):
                sums[position - half] = sums[position - half] + sent(position)
            size = half
    return sent(0) + n * mean[:, None]


def widths_of(energy: np.ndarray, widths: tuple[int, ...], code_bits: float) -> np.ndarray:
    """Choose the one free scalar such that the mean width is the largest one within the budget.

    What is left then widens the most energetic supergroups for which it is enough.
    """
    ratios = {(1, 2): 5 / 32, (2, 4): 17 / 512}
    thresholds = [1.0]
    for pair in zip(widths[-3::-1], widths[-2::-1], strict=False):
        thresholds.insert(0, thresholds[0] * ratios[pair])

    def assigned(log_scale: float) -> np.ndarray:
        above = [energy >= t * np.exp(log_scale) for t in thresholds]
        return np.array(widths)[np.sum(above, axis=0)]

    low, high = -400.0, 400.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if assigned(middle).mean() <= code_bits else (middle, high)
    result = assigned(high)
    for narrow, wide in zip(widths[-2::-1], widths[:0:-1], strict=True):
        left = int((code_bits * len(energy) - result.sum()) / (wide - narrow))
        candidates = np.flatnonzero(result == narrow)
        result[candidates[np.argsort(-energy[candidates])[:left]]] = wide
    return result


class Rounding:
    """Random numbers: private ones, or one stratum per rank from a permutation at every entry."""

    def __init__(self, recipe: Recipe, n: int, s: int, generator: np.random.Generator) -> None:
        self.draw = generator.random
        self._n, self._s = n, s
        self._strata = None
        if recipe.rounding == "correlated":
            self._strata = generator.random((n, s, 256)).argsort(axis=0)

    def uniform(self, ranks: np.ndarray) -> np.ndarray:
        """Return float64[s, 256] for the rank that compresses each supergroup."""
        u = self.draw((self._s, 256))
        if self._strata is None:
            return u
        return (self._strata[ranks, np.arange(self._s)] + u) / self._n


def quantise(x: np.ndarray, widths: np.ndarray, u: np.ndarray, draw) -> np.ndarray:
    """Return float64[s, 256] as it arrives, with the paper's group scales (DynamiQ §3.3)."""
    magnitude = np.abs(x).reshape(-1, 16, 16)
    group_max = magnitude.max(2)
    scale = np.array([oracle.bfloat16_at_least(m) if m else 1.0 for m in group_max.max(1)])
    ratio = 255 * group_max / scale[:, None]
    group_codes = np.floor(ratio) + (draw(ratio.shape) < ratio % 1)
    a = (magnitude / np.where(group_max > 0, group_max, 1.0)[:, :, None]).reshape(x.shape)
    out = np.zeros_like(x)
    for width in set(widths.tolist()):
        rows = widths == width
        signed = np.sign(x[rows]) * a[rows]
        values = oracle.values_of_codes(width, oracle.EPSILON.get(width, 0.0))
        low = np.clip(np.searchsorted(values, signed, side="right") - 1, 0, len(values) - 2)
        fraction = (signed - values[low]) / (values[low + 1] - values[low])
        out[rows] = values[low + (u[rows] < fraction)]
    return out * np.repeat(scale[:, None] * group_codes / 255, 16, axis=1)
