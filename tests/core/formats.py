"""Every wire format and what it promises beyond the laws that all must keep."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pytest

from dynamiq.compressors.dynamiq import DynamiQCompressor
from dynamiq.compressors.feedback import ErrorFeedback
from dynamiq.compressors.mx import MXCompressor
from dynamiq.compressors.omnireduce import OmniReduceCompressor
from dynamiq.compressors.thc import THCCompressor
from dynamiq.compressors.uncompressed import Uncompressed
from dynamiq.core.compressor import Compressor
from dynamiq.core.topology import Hop, Schedule, Step, Topology
from dynamiq.topologies import Butterfly, Direct, Hierarchical, Ring
from tests.probes import (
    AdaptiveFixedPoint,
    FloatPerHop,
    NonZeroBlocks,
    RotatedIntegers,
)


@dataclass(frozen=True)
class Format:
    """A compressor and its promises.

    Attributes:
        name: Id of the tests.
        compressor: The wire format.
        error: Largest vNMSE of a sum of four ranks.
        unit: How many entries a NaN or infinity spoils; None is the whole bucket.
        random: Whether seed and call number change the bytes.
        unbiased: Whether errors vanish in the mean.
        data_free: Whether sizes do not depend on the data.
        soak: Whether its tests are soak tests, because others like it are in the default run.
    """

    name: str
    compressor: Compressor
    error: float
    unit: int | None = 1
    random: bool = False
    unbiased: bool = False
    data_free: bool = True
    soak: bool = False


FORMATS = (
    Format("fp64", Uncompressed("fp64"), 1e-14),
    Format("fp32", Uncompressed("fp32"), 1e-13),
    Format("bf16", Uncompressed("bf16"), 3e-5),
    Format("fp16", Uncompressed("fp16"), 1e-6),
    Format("feedback-bf16", ErrorFeedback(Uncompressed("bf16")), 3e-5),
    Format("omnireduce-fp32", OmniReduceCompressor(payload="fp32"), 1e-13, data_free=False),
    Format("omnireduce-bf16", OmniReduceCompressor(), 3e-5, data_free=False, soak=True),
    Format(
        "omnireduce-topk", OmniReduceCompressor(mode="topk", bit_budget=5), 0.3, data_free=False
    ),
    Format(
        "omnireduce-feedback",
        ErrorFeedback(OmniReduceCompressor(mode="topk", bit_budget=5)),
        0.3,
        data_free=False,
        soak=True,
    ),
    Format("mxfp8-e4m3", MXCompressor(), 3e-3, 32),
    Format(
        "mxfp8-e5m2-stochastic",
        MXCompressor("mxfp8_e5m2", scale_rule="ceil", rounding="stochastic"),
        2e-2,
        32,
        random=True,
        unbiased=True,
    ),
    Format(
        "mxfp6-e3m2-prescaled",
        MXCompressor("mxfp6_e3m2", rounding="prescaled"),
        2e-2,
        32,
        random=True,
        unbiased=True,
        soak=True,
    ),
    Format(
        "mxfp6-e2m3-shared",
        MXCompressor("mxfp6_e2m3", scale_rule="ceil", scale_scope="shared"),
        2e-2,
        32,
    ),
    Format(
        "mxfp4-prescaled",
        MXCompressor("mxfp4_e2m1", rounding="prescaled"),
        1e-1,
        32,
        random=True,
        unbiased=True,
    ),
    Format("probe-integers", RotatedIntegers(), 1e-3, None, random=True),
    Format("probe-blocks", NonZeroBlocks(), 1e-13, data_free=False),
    Format("probe-hops", FloatPerHop(), 1e-2),
    Format("probe-adaptive", AdaptiveFixedPoint(), 1e-6, None, random=True, unbiased=True),
    Format(
        "feedback-adaptive",
        ErrorFeedback(AdaptiveFixedPoint()),
        1e-6,
        None,
        random=True,
    ),
    Format(
        "feedback-integers",
        ErrorFeedback(RotatedIntegers()),
        1e-3,
        None,
        random=True,
        soak=True,
    ),
    *(
        Format(
            f"dynamiq-paper-{rounding}",
            DynamiQCompressor.paper(bit_budget=5, rounding=rounding),
            1e-2,
            256,
            random=True,
            unbiased=rounding == "stochastic",
            soak=rounding == "nearest",
        )
        for rounding in ("correlated", "stochastic", "nearest")
    ),
    *(
        Format(
            f"dynamiq-{name}",
            recipe(bit_budget=5.0),
            3e-2,
            256,
            random=True,
            unbiased=True,
        )
        for name, recipe in (
            ("local", DynamiQCompressor.local),
            ("default", DynamiQCompressor),
        )
    ),
    Format(
        "dynamiq-16-bits",
        DynamiQCompressor.local(10, widths=(1, 4, 16), rounding="stochastic"),
        1e-4,
        256,
        random=True,
        unbiased=True,
    ),
    Format(
        "thc-uniform",
        THCCompressor.uniform(8, clamp=5.0),
        1e-3,
        None,
        random=True,
        unbiased=True,
    ),
    Format("thc-table", THCCompressor.table(), 0.05, None, random=True),
    Format(
        "thc-feedback",
        THCCompressor.uniform(8, clamp=4.0, error_feedback=True),
        1e-3,
        None,
        random=True,
        soak=True,
    ),
    Format(
        "feedback-dynamiq",
        ErrorFeedback(DynamiQCompressor.paper(bit_budget=6, rounding="nearest")),
        1e-2,
        256,
        random=True,
    ),
)


class Nodes(Topology):
    """Several nodes of two or three ranks if there can be such, or else of one: for any number."""

    kind: Literal["nodes"] = "nodes"

    def schedule(self, world_size: int) -> Schedule:
        return self._levels(world_size).schedule(world_size)

    def hops(self, world_size: int) -> tuple[Hop, ...]:
        return self._levels(world_size).hops(world_size)

    def steps(self, world_size: int, rank: int) -> tuple[Step, ...]:
        return self._levels(world_size).steps(world_size, rank)

    def _levels(self, world_size: int) -> Hierarchical:
        fits = (g for g in (2, 3) if world_size % g == 0 and world_size > g)
        return Hierarchical(ranks_per_node=next(fits, 1))


FLAT = (Ring(), Butterfly(), pytest.param(Direct(), marks=pytest.mark.soak))
"""Direct exchange is the simplest schedule: by default it runs with IN_FEW only."""
every_topology = pytest.mark.parametrize("topology", FLAT, ids=lambda topology: topology.kind)
"""Those of one level."""
every_schedule = pytest.mark.parametrize(
    "topology",
    (*FLAT, pytest.param(Nodes(), marks=pytest.mark.soak)),
    ids=lambda topology: topology.kind,
)
"""Two levels, too: a column runs one of the others, so by default with IN_FEW only."""
few_schedules = pytest.mark.parametrize(
    "topology", (Direct(), Nodes()), ids=lambda topology: topology.kind
)
"""What runs with IN_FEW only."""
IN_FEW = ("bf16", "dynamiq-paper-correlated", "dynamiq-local", "omnireduce-topk")
"""Names of the formats that run over all schedules by default."""


def formats(choose: Callable[[Format], bool] = lambda format: True) -> pytest.MarkDecorator:
    """Parametrise a test with the formats chosen."""
    parameters = [
        pytest.param(f, id=f.name, marks=[pytest.mark.soak] if f.soak else [])
        for f in FORMATS
        if choose(f)
    ]
    return pytest.mark.parametrize("format", parameters)
