"""Writes what the pages include but nobody should type: tables and figures made from the harness's own numbers.

The strict build runs it first. Everything goes to book/.cache/generated/, so it can never be older than the code.
"""

import sys
from collections.abc import Callable
from pathlib import Path

BOOK = Path(__file__).absolute().parent.parent
sys.path.insert(0, str(BOOK.parent))  # the harness of this checkout, wherever an installed one lies

from harness.puzzles import p22  # noqa: E402


def configuration() -> str:
    """The table of the chapter's constants."""
    rows = [
        ("Batch size", "BATCH_SIZE", p22.BATCH_SIZE, "B"),
        ("Sequence length", "SEQ_LEN", p22.SEQ_LEN, "S"),
        ("Hidden dimension", "HIDDEN_DIM", p22.HIDDEN_DIM, "H"),
        ("Output dimension", "OUTPUT_DIM", p22.OUTPUT_DIM, "O"),
        ("Epsilon", "EPS", "1e-5" if p22.EPS == 1e-5 else p22.EPS, "ε"),
        ("Data type", "", "float32", ""),
    ]
    lines = [
        f"| {what} | {f'`{name}`' * bool(name)} | {value} | {sign} |" for what, name, value, sign in rows
    ]
    return "\n".join(["| what | name | value | sign |", "|---|---|---|---|", *lines]) + "\n"


FILES: dict[str, Callable[[], str]] = {"configuration.md": configuration}


def main() -> None:
    """Writes all files."""
    folder = BOOK / ".cache" / "generated"
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in FILES.items():
        (folder / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
