"""The print edition: Chromium prints mdBook's page of all chapters, folds open, with an outline of its headings."""

import shutil
import subprocess
import tempfile
from pathlib import Path

LIMIT = 600
"""Seconds: the book has some hundreds of pages."""


def find_browser() -> str | None:
    """Chromium or Chrome on this machine."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


def print_book(site: Path, file: Path) -> list[str]:
    """Prints a built book into `file`; returns what went wrong."""
    browser = find_browser()
    if browser is None:
        return ["the print edition needs Chromium or Chrome on the PATH (Debian: apt-get install chromium)"]
    file.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="book-print-", ignore_cleanup_errors=True) as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--no-pdf-header-footer",
                   "--disable-background-networking", "--disable-component-update", "--generate-pdf-document-outline",
                   f"--user-data-dir={profile}", f"--print-to-pdf={file}", (site / "print.html").as_uri()]  # fmt: skip
        run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    if run.returncode or not file.is_file():
        return [f"{Path(browser).name} did not print the book: {run.stderr.strip()[-400:]}"]
    return []
