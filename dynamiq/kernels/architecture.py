"""NVIDIA's GPU architectures as values: what runs on what.

Code comes in two forms. A *cubin* holds machine instructions: ``sm_86`` runs on compute capability
8.6 and on later minor versions of 8. *PTX* is translated by the driver when it is loaded:
``compute_86`` runs on everything from 8.6 on. An architecture with the suffix ``a`` may use
instructions that later GPUs lack, and runs on that one capability, in both forms.
"""

import re
from dataclasses import dataclass
from typing import Literal

from dynamiq.core.errors import KernelError


@dataclass(frozen=True, order=True)
class Architecture:
    """One architecture; they are ordered by age.

    Attributes:
        major: Major version of the compute capability.
        minor: Its minor version.
        suffix: "a" if code for it may use what later GPUs do not have, else "".
    """

    major: int
    minor: int
    suffix: Literal["", "a"] = ""

    @classmethod
    def parse(cls, name: str) -> "Architecture":
        """Read "sm_86" or "sm_90a".

        Raises:
            KernelError: The name does not look like that.
        """
        match = re.fullmatch(r"sm_([1-9]\d*)(\d)(a?)", name)
        if not match:
            raise KernelError(
                f"{name!r} is no architecture; they look like 'sm_86' (compute capability 8.6) or "
                f"'sm_90a'"
            )
        return cls(int(match[1]), int(match[2]), "a" if match[3] else "")

    @property
    def without_suffix(self) -> "Architecture":
        """The same capability, with only those instructions that later GPUs have, too."""
        return Architecture(self.major, self.minor)

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability, as torch and the driver give it."""
        return self.major, self.minor

    def __str__(self) -> str:
        return f"sm_{self.major}{self.minor}{self.suffix}"


@dataclass(frozen=True)
class Target:
    """What the compiler is asked for.

    Attributes:
        architecture: Whose instructions may be used.
        form: "cubin" for machine code, "ptx" for what the driver translates at load.
    """

    architecture: Architecture
    form: Literal["cubin", "ptx"] = "cubin"

    def runs_on(self, major: int, minor: int) -> bool:
        """Whether a GPU of this compute capability can run such code."""
        own = self.architecture
        if own.suffix:
            return own.capability == (major, minor)
        if self.form == "ptx":
            return own.capability <= (major, minor)
        return own.major == major and own.minor <= minor

    def __str__(self) -> str:
        """Return what NVRTC calls it: "sm_90a" for a cubin, "compute_90" for PTX."""
        prefix = "sm" if self.form == "cubin" else "compute"
        return str(self.architecture).replace("sm", prefix)
