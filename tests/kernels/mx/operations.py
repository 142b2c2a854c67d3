"""Any call of any operation: the laws of the builds draw from here."""

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from dynamiq.kernels.mx.wire import ELEMENTS, Quantizer, Segment, payload_bytes

SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-130), 3.4e38, -3.4e38, 448.0, 480.0]
BROKEN = [torch.inf, -torch.inf, torch.nan]


@dataclass(repr=False)
class Call:
    """Some blocks, and what an operation on them may need.

    Attributes:
        values: float32[s, 256].
        incoming: Address of the payload that is read.
        outgoing: Of the one that is written.
        quantizer: Element, rule, rounding.
        foreign: A payload of random bytes: any code, any scale.
    """

    values: Tensor
    incoming: Segment
    outgoing: Segment
    quantizer: Quantizer
    foreign: Tensor

    def memory(self) -> Tensor:
        """Return memory for a payload and 16 bytes that nobody may write to, full of ones."""
        return torch.full((self.foreign.numel() + 16,), 255, dtype=torch.uint8)


def call_of(
    x: Tensor,
    quantizer: Quantizer,
    *,
    first: int = 0,
    keys: tuple[int, int] = (1, 2),
    scaled: bool = False,
    seed: int = 0,
) -> Call:
    """Return a call on x[k], with scales at random if it is ``scaled``."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-x.numel() // 32)
    values = torch.zeros(-(-blocks // 8), 256)
    values.view(-1)[: x.numel()] = x
    scales = None
    if scaled:
        scales = torch.randint(256, (8 * len(values),), generator=generator).to(torch.uint8)
    incoming = Segment(blocks, first, keys[0], scales)
    size = (payload_bytes(quantizer.element, x.numel()),)
    foreign = torch.randint(256, size, generator=generator).to(torch.uint8)
    return Call(values, incoming, replace(incoming, key=keys[1]), quantizer, foreign)


@st.composite
def entries(draw) -> Tensor:
    """Return entries whose blocks have all magnitudes, with some that are not numbers."""
    numel = draw(st.integers(1, 6000))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    blocks = -(-numel // 32)
    spread = draw(st.sampled_from([0, 3, 140]))
    exponent = torch.randint(-spread, spread + 1, (blocks,), generator=generator)
    exponent = (exponent + draw(st.sampled_from([0, -120, 100]))).clamp(-150, 127)
    scale = (2.0 ** exponent.double()).repeat_interleave(32)[:numel]
    x = (torch.randn(numel, generator=generator) * scale).clamp(-3.4e38, 3.4e38).float()
    x[torch.rand(numel, generator=generator) < draw(st.sampled_from([0.0, 0.05, 0.9]))] = 0.0
    for value in draw(st.lists(st.sampled_from([*SPECIAL, *BROKEN]), max_size=4)):
        x[draw(st.integers(0, numel - 1))] = value
    return x


@st.composite
def calls(draw) -> Call:
    quantizer = Quantizer(
        ELEMENTS[draw(st.sampled_from(list(ELEMENTS)))],
        draw(st.sampled_from(["floor", "ceil"])),
        draw(st.sampled_from(["nearest", "stochastic", "prescaled"])),
    )
    keys = st.integers(0, 2**64 - 1)
    return call_of(
        draw(entries()),
        quantizer,
        first=draw(st.integers(0, 2**40)),
        keys=(draw(keys), draw(keys)),
        scaled=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32)),
    )
