"""Where compiled kernels are kept between processes, and what identifies their sources."""

import hashlib
import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder for compiled kernels, which need not exist.

    It is ``$DYNAMIQ_CACHE``, else ``$XDG_CACHE_HOME/dynamiq``, else ``~/.cache/dynamiq``. Variables
    that are empty count as unset, and as the XDG specification asks, so does a relative
    ``XDG_CACHE_HOME``.

    Raises:
        RuntimeError: No variable is set and this user has no home.
    """
    if chosen := os.environ.get("DYNAMIQ_CACHE"):
        return Path(chosen).expanduser()
    if (shared := Path(os.environ.get("XDG_CACHE_HOME", ""))).is_absolute():
        return shared / "dynamiq"
    return Path.home() / ".cache" / "dynamiq"


def source_digest(*folders: Path) -> bytes:
    """Return a digest of the kernel sources in folders: of their names and their bytes."""
    digest = hashlib.sha256()
    for path in (p for f in folders for p in sorted([*f.glob("*.cu"), *f.glob("*.cuh")])):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.digest()
