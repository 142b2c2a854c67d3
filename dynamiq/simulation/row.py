"""One line of the report: a compressor on a topology, and what its seeds had in common."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class HopRow:
    """All messages that sum the same number of ranks.

    Attributes:
        summed: Ranks in the partial sum.
        transfers: How often one chunk crosses a link at this hop.
        reduce: True in the reduce-scatter, False in the all-gather.
        mean_width: Mean code width of a supergroup in bits, where the format has widths.
        payload_bits: Payload bits per entry, scales included, statistics not.
        added: Squared error that messages of this hop add, over the energy of the final sum.
    """

    summed: int
    transfers: int
    reduce: bool
    mean_width: float | None
    payload_bits: float
    added: float


@dataclass(frozen=True)
class Row:
    """What was simulated and what came out.

    Attributes:
        compressor: Its name in the table of formats, or the step of an ablation.
        description: All its fields.
        topology: Its kind.
        world_size: Ranks.
        entries: Of one rank; with ``one_chunk`` those of the one chunk.
        one_chunk: Whether one chunk stands for all.
        bit_budget: What was asked for; None for formats that have no budget.
        seeds: Of the rounding; the gradients are the same in all.
        vnmse: Squared error of the sum over the squared sum, mean over seeds and orders.
        vnmse_spread: Standard deviation over seeds; None for one seed.
        bias: Share of the squared error that is the same for all seeds: the mean of ⟨e_s, e_t⟩
            over pairs of seeds, over the mean of ‖e_s‖². 0 for unbiased rounding, 1 if all seeds
            err alike. The squared norm of the mean error over S seeds is (1 + (S - 1) bias) times
            what unbiased noise would leave of it. None for one seed.
        bias_error: Standard error of ``bias``, from the spread over pairs; None below three seeds.
        weighted_error: Σ e_i² / v_i over Σ x_i² / v_i, x the sum and v the mean square over ranks,
            mean over seeds: every entry's error relative to its size. Entries with v_i = 0 are left
            out; those that are tiny on all ranks may dominate it. It did not predict training loss.
        bits_per_entry: Sent per padded entry and pass, everything counted but headers.
        bytes_per_rank: Sent by the mean rank in one call, headers included (with ``one_chunk``
            without them).
        predicted_vnmse: What the format expects of its own allocation, if it does, in the first
            seed's call (with ``one_chunk`` its first piece's).
        hops: By ranks summed, of the first seed's call; empty if not asked for.
        orders: Of the ranks, each with all seeds. All figures but ``vnmse`` are the first one's.
        order_spread: Standard deviation over orders of the mean over seeds; None for one order.
    """

    compressor: str
    description: dict[str, Any]
    topology: str
    world_size: int
    entries: int
    one_chunk: bool
    bit_budget: float | None
    seeds: int
    vnmse: float
    vnmse_spread: float | None
    bias: float | None
    bias_error: float | None
    weighted_error: float
    bits_per_entry: float
    bytes_per_rank: float
    predicted_vnmse: float | None
    hops: tuple[HopRow, ...]
    orders: int = 1
    order_spread: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)
