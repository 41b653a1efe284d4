"""The book's paths."""

from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]
BOOK = ROOT / "book"
