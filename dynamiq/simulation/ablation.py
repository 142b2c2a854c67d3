"""What every idea brings: the paper's ablation (DynamiQ, Table 6), then our own, one by one."""

from typing import Any

from dynamiq.compressors import DynamiQCompressor

BITS = 4.0
"""The paper's."""
_PAPER_WIDTHS = (2, 4, 8)


def steps(bit_budget: float = BITS) -> dict[str, DynamiQCompressor]:
    """Return compressors by what each has that the one before has not.

    The first two have one width for all supergroups, the widest of 2, 4 and 8 within the budget,
    and take the bits that it takes; all others keep to the budget.

    Raises:
        ConfigurationError: The budget is too small.
    """
    paper = DynamiQCompressor.paper
    flat = max((w for w in _PAPER_WIDTHS if w <= bit_budget), default=_PAPER_WIDTHS[0])
    plain: dict[str, Any] = {"rounding": "stochastic", "group_scales": None}
    one_width = {**plain, "widths": (flat,)}
    one_width["bit_budget"] = paper(flat + 1.0, **one_width).minimum_bit_budget
    ours: dict[str, dict[str, Any]] = {
        "dithered rounding": {"rounding": "dithered"},
        "widths from 2 to 10": {"widths": tuple(range(2, 11))},
        "exact allocation": {"allocation": "exact"},
        "hop-aware widths": {"hop_aware": True},
        "one bit, where it pays": {"widths": tuple(range(1, 11))},
    }
    found = {
        "uniform levels, one scale, one width": paper(**one_width, epsilon_4=0.0, epsilon_8=0.0),
        "non-uniform levels": paper(**one_width),
        "variable widths": paper(bit_budget, **plain),
        "hierarchical scales": paper(bit_budget, rounding="stochastic"),
        "correlated rounding: paper": paper(bit_budget),
    }
    changes: dict[str, Any] = {}
    for name, change in ours.items():
        changes.update(change)
        found[name] = paper(bit_budget, **changes)
    found["no means, scales rounded up: local"] = DynamiQCompressor.local(bit_budget)
    found["rotation, one scale: rotated"] = DynamiQCompressor.rotated(bit_budget)
    return found
