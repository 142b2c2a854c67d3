"""Where a simulation's entries come from: a file, a spectrum, or a file's spectrum drawn anew.

A spectrum is one standard deviation per supergroup of 256 entries; entries are Gaussian, and two
ranks' have a given correlation. Every rank's entries are a function of (seed, rank) alone, so they
can be drawn when they are needed, in any order.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynamiq.core import randomness
from dynamiq.core.errors import InputError

SUPERGROUP = 256
"""Entries that share one energy in a spectrum, and in the rate-distortion limit."""
SYNTHETIC = "synthetic:"
MIXTURE = "synthetic:mixture"

_WEIGHTS = (0.79, 0.21)
_MEANS = (-3.99, -16.41)
_DEVIATIONS = (1.22, 4.63)
_COMMON = -1
"""Stands for a rank in the address of what all ranks have in common."""


@dataclass(frozen=True)
class Drawn:
    """Entries drawn from a spectrum: x_i = σ (√ρ common + √(1 - ρ) own_i), both N(0, 1).

    Attributes:
        deviations: float32[s], σ of every supergroup.
        correlation: ρ of any two ranks.
        seed: With a rank it fixes that rank's entries.
    """

    deviations: Tensor
    correlation: float = 0.0
    seed: int = 0

    @property
    def numel(self) -> int:
        """Entries of one rank."""
        return self.deviations.numel() * SUPERGROUP

    def entries(self, rank: int) -> Tensor:
        """Return float32[numel], one rank's entries."""
        own = self._normal(rank)
        if self.correlation:
            common = self._normal(_COMMON).mul_(self.correlation**0.5)
            own.mul_((1.0 - self.correlation) ** 0.5).add_(common)
        return own.mul_(self.deviations[:, None]).view(-1)

    def matrix(self, world_size: int) -> Tensor:
        """Return float32[n, numel], all ranks' entries."""
        return torch.stack([self.entries(rank) for rank in range(world_size)])

    def dealt(self, hands: int) -> "list[Drawn]":
        """Deal the supergroups, sorted by energy, like cards: spectra as alike as can be."""
        order = self.deviations.argsort(descending=True, stable=True)
        return [
            replace(self, deviations=self.deviations[order[i::hands]], seed=self._key(i))
            for i in range(hands)
        ]

    def _normal(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(self._key(rank))
        return torch.empty(self.deviations.numel(), SUPERGROUP).normal_(generator=generator)

    def _key(self, part: int) -> int:
        return randomness.key(self.seed, part)


def mixture(entries: int, seed: int) -> Drawn:
    """Return the log-normal mixture that stands for gradients at scale, ranks independent.

    The ℓ2 norm of a supergroup is exp(N(-3.99, 1.22²)) with probability 0.79, else
    exp(N(-16.41, 4.63²)); its entries are N(0, norm²/256).

    Args:
        entries: Of one rank, rounded up to whole supergroups.
        seed: Fixes norms and entries.
    """
    count = _supergroups(entries)
    generator = torch.Generator().manual_seed(randomness.key(seed))
    second = torch.rand(count, generator=generator, dtype=torch.float64) < _WEIGHTS[1]
    normal = torch.randn(count, generator=generator, dtype=torch.float64)
    which = second.long()
    logarithm = torch.tensor(_MEANS)[which] + torch.tensor(_DEVIATIONS)[which] * normal
    return Drawn((logarithm.exp() / SUPERGROUP**0.5).float(), seed=seed)


def resampled(gradients: Tensor, entries: int | None, seed: int) -> Drawn:
    """Return the spectrum and the correlation of float[n, d], to be drawn for any number of ranks.

    σ² of a supergroup is its mean square over ranks and entries; ρ is the mean correlation of two
    ranks over all entries, (‖Σ x_i‖² / Σ ‖x_i‖² - 1) / (n - 1), held within [0, 1].

    Args:
        gradients: At least two ranks.
        entries: How many to draw, rounded up to whole supergroups, which are then taken from all
            over the gradients, several times if there are fewer; None for as many as there are.
        seed: Fixes the entries.

    Raises:
        InputError: One rank has no correlation.
    """
    n, d = gradients.shape
    if n < 2:
        raise InputError(f"a correlation needs two ranks, got {n}; give gradients of more")
    x = gradients.double()
    squares = supergroup_sums(x.square().sum(0))
    counts = supergroup_sums(torch.ones(d, dtype=torch.float64))
    total = squares.sum().item()
    ratio = x.sum(0).square().sum().item() / total if total else 1.0
    deviations = (squares / (n * counts)).sqrt().float()
    count = len(deviations) if entries is None else _supergroups(entries)
    picked = torch.arange(count) * len(deviations) // count
    return Drawn(deviations[picked], min(max((ratio - 1.0) / (n - 1), 0.0), 1.0), seed)


def supergroup_sums(values: Tensor) -> Tensor:
    """Return float[s], the sums of float[d] over supergroups, the last of which may be shorter."""
    padding = -len(values) % SUPERGROUP
    return torch.nn.functional.pad(values, (0, padding)).view(-1, SUPERGROUP).sum(1)


def read(path: Path, name: str | None = None) -> Tensor:
    """Return the gradients of a file, float32[ranks, d].

    Args:
        path: ``.safetensors``, or ``.pt`` and ``.pth`` with a tensor or a mapping of tensors; the
            first axis of the tensor is the rank.
        name: Of the tensor, where there are several.

    Raises:
        InputError: The file cannot be read, or holds no such tensor.
    """
    tensors = _tensors(path)
    if name is None and len(tensors) != 1:
        raise InputError(f"{path} holds {', '.join(tensors) or 'nothing'}; name one by --tensor")
    if name is not None and name not in tensors:
        raise InputError(f"{path} holds no {name!r}; there are {', '.join(tensors) or 'none'}")
    found = tensors[name] if name is not None else next(iter(tensors.values()))
    has_numbers = found.layout == torch.strided and not found.is_meta
    if found.dim() < 2 or not found.is_floating_point() or not has_numbers:
        kind = "" if has_numbers else f"{found.layout} on {found.device}, "
        raise InputError(
            f"{path} holds {kind}{found.dtype}{list(found.shape)}; a simulation takes "
            f"floating-point gradients [ranks, ...]: stack those of all ranks"
        )
    gradients = found.detach().float().flatten(1)
    if not gradients.isfinite().all():
        raise InputError(f"{path} holds NaN or infinities, whose error cannot be measured")
    return gradients


def _tensors(path: Path) -> dict[str, Tensor]:
    if path.suffix not in {".safetensors", ".pt", ".pth"}:
        raise InputError(
            f"{path} is neither .safetensors nor .pt; a spectrum by name is {MIXTURE!r}"
        )
    try:
        loaded = _load(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except ImportError as error:
        raise InputError(
            f"reading {path} needs safetensors: pip install 'dynamiq-allreduce[simulate]'"
        ) from error
    except Exception as error:  # what damaged files raise has no common class
        raise InputError(f"{path} cannot be read: {error}") from error
    if isinstance(loaded, Tensor):
        return {"tensor": loaded}
    if not isinstance(loaded, dict):
        raise InputError(f"{path} holds a {type(loaded).__name__}, no tensor and no dict of them")
    return {str(name): value for name, value in loaded.items() if isinstance(value, Tensor)}


def _load(path: Path) -> Any:
    if path.suffix != ".safetensors":
        return torch.load(path, map_location="cpu", weights_only=True)
    from safetensors.torch import load_file

    return load_file(path)


def _supergroups(entries: int) -> int:
    return max(1, -(-entries // SUPERGROUP))
