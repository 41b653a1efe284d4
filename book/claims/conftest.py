"""What pages and the README say of committed measurements: `poe book` checks it. Whoever changes a kernel changes none of it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[2] / "tests" / "book"))
