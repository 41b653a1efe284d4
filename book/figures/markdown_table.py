"""A Markdown table, as the book's tools write it."""


def table(head: list[str], rows: list[list[str]], align: str = "") -> str:
    """A Markdown table; `align` has a letter for each column, r for right, and left is what it does not name."""
    rules = ["---:" if side == "r" else "---" for side in align.ljust(len(head), "l")]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rules, *rows]) + "\n"
