"""The workbook's own cache folder: compiled op packages and graphs, the virtual GPU's driver, extension modules."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from harness.errors import EnvironmentProblem

VARIABLE = "WORKBOOK_CACHE"


def cache_folder(*parts: str) -> Path:
    """A folder inside the cache, made if it is missing. Raises EnvironmentProblem where it cannot be written.

    The cache is `~/.cache/mojo-gpu-workbook`, or what the environment variable WORKBOOK_CACHE names. Everything
    in it can be deleted at any time.
    """
    root = Path(os.environ.get(VARIABLE) or Path.home() / ".cache" / "mojo-gpu-workbook")
    folder = root.joinpath(*parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot make the cache folder {folder} ({error.strerror}); set {VARIABLE} to a folder you can write"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise EnvironmentProblem(
            f"no write access to the cache folder {folder}; set {VARIABLE} to a folder you can write"
        )
    return folder


def digest(parts: Iterable[str | bytes]) -> str:
    """A short hash of strings and bytes, in order; 16 hexadecimal digits."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()[:16]
