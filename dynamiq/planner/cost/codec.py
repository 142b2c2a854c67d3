"""What a format's operations cost on a profile's processor."""

from dynamiq.compressors import Uncompressed
from dynamiq.core.compressor import Compressor
from dynamiq.core.errors import ConfigurationError
from dynamiq.planner.cost.traffic import estimate
from dynamiq.planner.profiles.hardware import CodecCost, OperationCost, Processor

_BUDGET = "bit_budget"


def codec_of(processor: Processor, compressor: Compressor | None) -> CodecCost:
    """Return a format's costs: measured, between those of measured bit budgets, or estimated.

    Args:
        processor: Whose.
        compressor: The format; None for bytes that are only copied, which cost what FP32 does.

    Raises:
        ConfigurationError: Nothing like it was measured, and there is no memory bandwidth to
            estimate it by.
    """
    wanted = compressor or Uncompressed("fp32")
    for cost in processor.codecs:
        if cost.compressor == wanted:
            return cost
    family = _family(wanted)
    alike = [cost for cost in processor.codecs if _family(cost.compressor) == family]
    if alike and _BUDGET in type(wanted).model_fields:
        return _between(sorted(alike, key=_budget), wanted)
    if processor.device == "cuda" and processor.memory_bytes_per_s is not None:
        estimated = estimate(wanted, processor.memory_bytes_per_s)
        if estimated is not None:
            return estimated
    raise ConfigurationError(
        f"this profile has no costs of {wanted.kind} on {processor.name or processor.device}; "
        f"measure them with dynamiq probe"
    )


def _family(compressor: Compressor) -> dict[str, object]:
    """Return what formats have in common that differ in their budgets only."""
    return {name: value for name, value in compressor.to_dict().items() if name != _BUDGET}


def _budget(cost: CodecCost) -> float:
    return float(getattr(cost.compressor, _BUDGET))


def _between(known: list[CodecCost], wanted: Compressor) -> CodecCost:
    """Return costs on straight lines between measured budgets; beyond them the nearest one's."""
    budget = float(getattr(wanted, _BUDGET))
    below = [cost for cost in known if _budget(cost) <= budget]
    above = [cost for cost in known if _budget(cost) > budget]
    if not below or not above:
        nearest = above[0] if above else below[-1]
        return nearest.model_copy(update={"compressor": wanted})
    low, high = below[-1], above[0]
    share = (budget - _budget(low)) / (_budget(high) - _budget(low))

    def mixed(name: str) -> OperationCost:
        a, b = getattr(low, name), getattr(high, name)
        return OperationCost(
            fixed_s=a.fixed_s + share * (b.fixed_s - a.fixed_s),
            entry_s=a.entry_s + share * (b.entry_s - a.entry_s),
        )

    operations = [name for name in CodecCost.model_fields if name != "compressor"]
    return CodecCost(compressor=wanted, **{name: mixed(name) for name in operations})
