"""Where the book lies. Importing this puts its tools on the import path."""

import sys
from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]
BOOK = ROOT / "book"
sys.path.insert(0, str(BOOK / "tools"))
