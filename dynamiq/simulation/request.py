"""What a user asks to simulate, turned into a world; every refusal says what to ask instead."""

from dataclasses import dataclass
from pathlib import Path

from dynamiq.core.errors import InputError
from dynamiq.simulation.one_chunk import OneChunk
from dynamiq.simulation.sources import MIXTURE, SYNTHETIC, Drawn, mixture, read, resampled
from dynamiq.simulation.worlds import AllChunks, World

WORLD_SIZE = 8
"""Of synthetic gradients, if nothing else is asked for."""
ENTRIES = 1 << 20
"""The same of one rank."""
MOST_ENTRIES = 1 << 28
"""Of all ranks together, 1 GiB in FP32, that are drawn at once."""


@dataclass(frozen=True)
class Request:
    """Which gradients on how many ranks.

    Attributes:
        gradients: A file, or the name of a synthetic spectrum.
        tensor: Name of the tensor in the file.
        world_size: Ranks; None for as many as the file has.
        entries: Of one rank; None for all there are.
        seed: Of what is drawn.
        resample: Draw the ranks from the file's spectrum and correlation.
        one_chunk: Simulate one chunk for all of them.
    """

    gradients: str
    tensor: str | None = None
    world_size: int | None = None
    entries: int | None = None
    seed: int = 0
    resample: bool = False
    one_chunk: bool = False

    def world(self) -> World:
        """Return the gradients, ready to be all-reduced.

        Raises:
            InputError: They cannot be read or drawn.
        """
        if self.world_size is not None and self.world_size < 2:
            raise InputError(f"an all-reduce needs two ranks, got {self.world_size}")
        if self.gradients.startswith(SYNTHETIC):
            return self._drawn(self._synthetic(), self.world_size or WORLD_SIZE)
        gradients = read(Path(self.gradients), self.tensor)
        ranks = gradients.shape[0]
        n = self.world_size or ranks
        if self.resample:
            return self._drawn(resampled(gradients, self.entries, self.seed), n)
        if self.one_chunk:
            raise InputError(f"one chunk is drawn, and {self.gradients} is a file: add --resample")
        if n > ranks:
            raise InputError(
                f"{self.gradients} holds the gradients of {ranks} ranks, not of {n}; --resample "
                f"draws any number of ranks with the same spectrum and correlation"
            )
        if ranks < 2:
            raise InputError(f"{self.gradients} holds {ranks} rank(s), and an all-reduce needs two")
        return AllChunks(gradients[:n, : self.entries].contiguous())

    def _synthetic(self) -> Drawn:
        if self.gradients != MIXTURE:
            raise InputError(f"no spectrum is named {self.gradients!r}; there is {MIXTURE}")
        if self.resample or self.tensor is not None:
            raise InputError(f"--resample and --tensor are for files; {MIXTURE} is drawn anyway")
        return mixture(self.entries or ENTRIES, self.seed)

    def _drawn(self, spectrum: Drawn, world_size: int) -> World:
        if self.one_chunk:
            return OneChunk(spectrum, world_size)
        if world_size * spectrum.numel > MOST_ENTRIES:
            raise InputError(
                f"{world_size} ranks of {spectrum.numel} entries are more than the {MOST_ENTRIES} "
                f"that are drawn at once; ask for fewer --entries, or --one-chunk"
            )
        return AllChunks(spectrum.matrix(world_size))
