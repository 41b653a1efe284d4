"""Python's bytecode where it is told to keep none: in the workbook's cache.

Images of containers like to set PYTHONDONTWRITEBYTECODE, so that nothing is written beside the sources. Then every
command compiles PyTorch anew, some seconds each time, unless the installer left its bytecode there.

Python writes bytecode without a look at how much of it a full disk has taken, and then fails at every start. Here a file that
is no bytecode gives way to its source.
"""

import marshal
import os
import sys
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
)
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from harness.errors import WorkbookError
from harness.toolchain.cache import cache_folder

FORBID = "PYTHONDONTWRITEBYTECODE"
PLACE = "PYTHONPYCACHEPREFIX"
SPOILED = (EOFError, ValueError, TypeError)
"""What `marshal` raises for half a file."""
HEADER = 16
"""Bytes before the code in a file of bytecode."""


class MendingLoader(SourceFileLoader):
    """Loads a module from its source where its bytecode is spoiled, and takes that away, so that it is written anew."""

    def get_code(self, fullname: str):
        try:
            return super().get_code(fullname)
        except SPOILED:
            source = self.get_filename(fullname)
            try:
                os.unlink(cache_from_source(source))
            except OSError:  # it is another's
                return self.source_to_code(self.get_data(source), source)
            return super().get_code(fullname)


def mend_bytecode() -> None:
    """Lets whatever this process imports from now on be loaded so."""
    details = (ExtensionFileLoader, EXTENSION_SUFFIXES), (MendingLoader, SOURCE_SUFFIXES)
    sys.path_hooks.insert(0, FileFinder.path_hook(*details))
    sys.path_importer_cache.clear()


def spoiled(folder: Path) -> list[Path]:
    """The files of bytecode in a folder that are none."""
    broken: list[Path] = []
    for path in folder.rglob("*.pyc"):
        try:
            marshal.loads(path.read_bytes()[HEADER:])
        except SPOILED:
            broken.append(path)
    return broken


def keep_bytecode() -> None:
    """Lets this process and those that it starts keep bytecode in the cache, where FORBID says none and torch has none."""
    if not os.environ.get(FORBID) or os.environ.get(PLACE) or compiled("torch"):
        return
    try:
        folder = str(cache_folder("bytecode"))
    except WorkbookError:  # what needs the cache says so; this does without
        return
    del os.environ[FORBID]
    os.environ[PLACE] = sys.pycache_prefix = folder
    sys.dont_write_bytecode = False


def compiled(package: str) -> bool:
    """Whether a package's bytecode lies where Python reads it."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None and Path(cache_from_source(spec.origin)).is_file()
