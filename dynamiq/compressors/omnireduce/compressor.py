"""OmniReduce as a description: which blocks a rank asks for, and how many."""

import math
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from dynamiq.compressors.omnireduce.encoding import OmniReduceEncoding
from dynamiq.compressors.omnireduce.union import BLOCK, Union
from dynamiq.compressors.supergroups import Supergroups
from dynamiq.core.compressor import Compressor, Sizes, State, Statistics
from dynamiq.core.errors import ConfigurationError
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call
from dynamiq.core.registry import compressor_registry
from dynamiq.core.topology import Schedule
from dynamiq.kernels.supergroups import ops
from dynamiq.kernels.supergroups.operands import Bucket, entries_of

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_GAMMA = 0.8
"""How much of the votes' share stays from call to call."""
_GREATEST_CHANGE = 1 / 0.6
"""What the union may call for at once, either way."""
_SHARE = "share"
"""Name of the votes' share of all blocks, in the shared state: float64[] on the CPU."""


@compressor_registry.register
class OmniReduceCompressor(Compressor):
    """Blocks of 256 entries that some rank asks for, in BF16 or FP32; all others are zero.

    "lossless": a rank asks for the blocks in which it has a non-zero; none is lost, but entries are
    rounded to the payload (gradients in FP32 keep their bits with ``payload="fp32"`` only). "topk":
    a rank asks for the k blocks with its greatest ℓ2 norms, and loses the others: biased. Votes,
    one bit for each block, are reduced first; the union is then summed as :class:`Uncompressed`
    sums: rounded to nearest once per hop, accumulated in FP32, FP32 sums of integers exact, means
    divided by a power of two first.

    Sizes depend on the data: every call waits once for the device, to learn the union. In "topk"
    it is to be ``bit_budget`` / (bits of the payload) of all blocks; the votes, 1/256 bit per
    entry and pass, are not counted. How many votes k make such a union depends on how alike ranks
    are, so k follows from earlier calls with the same key: k ← 0.8 k + 0.2 k · wanted / union, the
    ratio within [0.6, 1 / 0.6]. The first call takes the wanted union / √n, between ranks that all
    want the same blocks and ranks of which no two do; until k has settled, in about 20 calls, the
    budget is missed either way. At least one block is asked for: small buckets exceed it.

    Contamination unit: the entry. In "topk" a block with a NaN or an infinity is asked for beside
    the k others, so that all ranks see it and no other block gives way; k stays as it is.

    Source: Fei et al., Efficient Sparse Collective Communication and its Application to Accelerate
    Distributed Deep Learning, SIGCOMM 2021; k and the union's share as in DynamiQ's evaluation.

    Attributes:
        mode: "lossless" or "topk".
        payload: What an entry is on the wire.
        bit_budget: Mean bits per entry and pass that "topk" aims at; None in "lossless".

    Raises:
        ConfigurationError: "topk" without a budget or with more than the payload's bits, "lossless"
            with one.
    """

    kind: Literal["omnireduce"] = "omnireduce"
    mode: Literal["lossless", "topk"] = "lossless"
    payload: Literal["bf16", "fp32"] = "bf16"
    bit_budget: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        bits = 8 * self.payload_dtype.itemsize
        if self.mode == "lossless" and self.bit_budget is not None:
            raise ConfigurationError(
                f"a lossless format sends what is not zero, whatever a budget of {self.bit_budget} "
                f'bits says; leave bit_budget out, or use mode="topk"'
            )
        if self.mode == "topk" and (self.bit_budget is None or self.bit_budget > bits):
            raise ConfigurationError(
                f'mode="topk" needs a bit_budget of at most the {bits} bits of {self.payload}, got '
                f"{self.bit_budget}"
            )
        return self

    @property
    def payload_dtype(self) -> torch.dtype:
        """The dtype of entries on the wire."""
        return _DTYPES[self.payload]

    @property
    def target(self) -> float:
        """The share of blocks that the union should have; 1 in "lossless"."""
        if self.bit_budget is None:
            return 1.0
        return self.bit_budget / (8 * self.payload_dtype.itemsize)

    def sizes(self, layout: Layout, schedule: Schedule, call: Call, state: State) -> Sizes:
        """Refuse: they depend on the data."""
        raise ConfigurationError(
            "what omnireduce sends depends on the blocks that hold entries, so nobody knows it "
            "before the data; measure it, for example with dynamiq simulate"
        )

    @property
    def stateful(self) -> bool:
        """Whether the number of votes follows from earlier calls."""
        return self.mode == "topk"

    def unit(self, numel: int, world_size: int) -> int:
        """The block."""
        return BLOCK

    def statistics(self, x: Tensor, layout: Layout, call: Call, state: State) -> Statistics:
        """Return this rank's votes, a bit for each block that holds entries.

        In "topk" one more bit says whether this rank has a NaN or an infinity.
        """
        blocks = Supergroups.of(layout, x.device)
        # Zero if and only if all entries are, and finite if and only if all are.
        energy = ops.statistics(Bucket(entries_of(x), blocks.slices, layout.positions), 1)[0]
        energy = energy[blocks.real]
        if self.mode == "lossless":
            votes = energy != 0
        else:
            count = max(1, round(self._share(layout, state) * layout.units))
            spoilt = ~energy.isfinite()
            votes = _greatest(energy.masked_fill(spoilt, 0.0), count) | spoilt
            votes = torch.cat([votes, spoilt.any()[None]])
        return Statistics(votes.float(), "max", "bit")

    def encode(
        self,
        statistics: Tensor | None,
        layout: Layout,
        schedule: Schedule,
        call: Call,
        state: State,
    ) -> OmniReduceEncoding:
        """Wait for the union, and lay it out over the chunks."""
        assert statistics is not None
        flags = statistics.cpu() > 0
        union = Union.of(flags[: layout.units], layout, statistics.device)
        if self.mode == "topk" and not flags[-1]:
            state = self._adapted(union, layout, state)
        return OmniReduceEncoding(union, layout, call, self.payload_dtype, state)

    def next_state(self, encoding: OmniReduceEncoding, work: Any) -> State:
        """Return what :meth:`encode` has decided: it knew the union."""
        return encoding.next_state

    def _share(self, layout: Layout, state: State) -> float:
        """Return k as a share of all blocks."""
        if not state.shared:
            return self.target / math.sqrt(layout.world_size)
        return state.shared[_SHARE].item()

    def _adapted(self, union: Union, layout: Layout, state: State) -> State:
        """Return the state after a finite call; a call without any entries teaches nothing."""
        if not union.count:
            return state
        ratio = self.target * layout.units / union.count
        ratio = min(max(ratio, 1 / _GREATEST_CHANGE), _GREATEST_CHANGE)
        share = self._share(layout, state) * (_GAMMA + (1 - _GAMMA) * ratio)
        # As many votes as the union should have are enough even if all ranks vote alike.
        share = max(min(share, self.target), 1 / layout.units)
        return State({_SHARE: torch.tensor(share, dtype=torch.float64)})


def _greatest(energy: Tensor, count: int) -> Tensor:
    """Return bool[u]: the ``count`` greatest of float32[u], the first ones of equals, no zeros."""
    if count >= len(energy):
        return energy > 0
    least = energy.topk(count).values[-1]
    above, equal = energy > least, energy == least
    return (above | (equal & (equal.cumsum(0) <= count - above.sum()))) & (energy > 0)
