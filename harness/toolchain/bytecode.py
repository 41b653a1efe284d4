"""Python's bytecode where it is told to keep none: in the workbook's cache.

Images of containers like to set PYTHONDONTWRITEBYTECODE, so that nothing is written beside the sources. Then every
command compiles PyTorch anew, some seconds each time, unless whoever installed it has left its bytecode there.
"""

import os
import sys
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from harness.errors import WorkbookError
from harness.toolchain.cache import cache_folder

FORBID = "PYTHONDONTWRITEBYTECODE"
PLACE = "PYTHONPYCACHEPREFIX"


def keep_bytecode() -> None:
    """Lets this process and those that it starts keep bytecode in the cache, where FORBID says none and torch has none."""
    if not os.environ.get(FORBID) or os.environ.get(PLACE) or compiled("torch"):
        return
    try:
        folder = str(cache_folder("bytecode"))
    except WorkbookError:  # whoever needs the cache says so; this is done without
        return
    del os.environ[FORBID]
    os.environ[PLACE] = sys.pycache_prefix = folder
    sys.dont_write_bytecode = False


def compiled(package: str) -> bool:
    """Whether a package's bytecode lies where Python reads it."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None and Path(cache_from_source(spec.origin)).is_file()
