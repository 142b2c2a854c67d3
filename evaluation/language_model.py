"""The workload: a LLaMA-style decoder of 5.9 million parameters, trained from scratch on reviews.

RMSNorm, rotary positions and SwiGLU as ``transformers`` implements them; weights come from the
seed, not from a hub.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from evaluation.reviews import VOCABULARY, Tokens

SEQUENCE_TOKENS = 128
PARAMETERS = 5_868_288
# Embeddings begin at unit scale and learn faster than the rest: within a demo's forty steps a
# model with the usual settings learns how frequent each token is, and little else.
_EMBEDDING_RATE = 100


def build_model(seed: int) -> nn.Module:
    """Return the decoder with initial weights that follow from ``seed`` alone.

    Called as ``model(input_ids=batch, labels=batch)``, it returns an object with the mean
    next-token ``loss`` in nats.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=5,
        num_attention_heads=4,
        max_position_embeddings=SEQUENCE_TOKENS,
        use_cache=False,
    )
    torch.manual_seed(seed)
    model: nn.Module = LlamaForCausalLM(config)
    nn.init.normal_(_embedding(model))
    return model


def build_optimizer(model: nn.Module, *, peak: float, steps: int) -> tuple[Optimizer, LambdaLR]:
    """Return AdamW and the schedule of its rates: step the one, then the other.

    The rates rise to their peaks over a tenth of the steps (at least 3, at most 40) and fall along
    half a cosine to a tenth of them. ``peak`` is that of all weights but the embeddings.
    """
    embedding = _embedding(model)
    others = [weight for weight in model.parameters() if weight is not embedding]
    groups: list[dict[str, Any]] = [
        {"params": others},
        {"params": [embedding], "lr": peak * _EMBEDDING_RATE},
    ]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95))
    return optimizer, LambdaLR(optimizer, lambda step: _rate(step, steps))


def mean_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean next-token loss over a batch int64[sequences, tokens], in nats."""
    loss: Tensor = model(input_ids=batch, labels=batch).loss
    return loss


@dataclass(frozen=True)
class Batches:
    """Which sequences each rank sees at each step.

    All windows of the text in an order drawn from the seed; step by step and rank by rank each
    takes the next ``sequences``, so no two ranks share one. Deterministic given the seed.
    """

    tokens: Tokens
    seed: int
    world_size: int
    sequences: int

    def train(self, step: int, rank: int) -> Tensor:
        """Return int64[sequences, SEQUENCE_TOKENS], one rank's part of one step."""
        windows = _windows(self.tokens.train)
        share = self.world_size * self.sequences
        epoch, step = divmod(step, len(windows) // share)
        order = np.random.default_rng((self.seed, epoch)).permutation(len(windows))
        start = step * share + rank * self.sequences
        return _to_tensor(windows[order[start : start + self.sequences]])

    def validation(self, rank: int, sequences: int) -> Iterator[Tensor]:
        """Yield one rank's share of the first ``sequences`` held-out windows, in batches."""
        own = _windows(self.tokens.validation)[:sequences][rank :: self.world_size]
        for start in range(0, len(own), self.sequences):
            yield _to_tensor(own[start : start + self.sequences])


@torch.no_grad()
def summed_validation_loss(model: nn.Module, batches: Iterator[Tensor]) -> Tensor:
    """Return float64[2]: the sum of the sequences' mean losses, and their number."""
    total = torch.zeros(2, dtype=torch.float64)
    model.eval()
    for batch in batches:
        total += torch.tensor([mean_loss(model, batch).item() * len(batch), len(batch)])
    model.train()
    return total


def _embedding(model: nn.Module) -> nn.Parameter:
    return model.get_parameter("model.embed_tokens.weight")


def _rate(step: int, steps: int) -> float:
    """Return the learning rate as a share of its peak."""
    warmup = min(40, max(3, steps // 10))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def _windows(tokens: NDArray[np.uint16]) -> NDArray[np.uint16]:
    whole = len(tokens) // SEQUENCE_TOKENS * SEQUENCE_TOKENS
    return tokens[:whole].reshape(-1, SEQUENCE_TOKENS)


def _to_tensor(windows: NDArray[np.uint16]) -> Tensor:
    return torch.from_numpy(windows.astype(np.int64))
