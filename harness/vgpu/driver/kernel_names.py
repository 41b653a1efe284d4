"""Names and source lines for kernels that arrive without them.

Kernels compiled inside a MAX graph are called `mojo_pkg_<hash>_<hash>` and carry no line table. The same
kernel compiled by the recording launcher has both. Their PTX is equal once names and line directives are
taken away, so a catalogue of recorded kernels gives a loaded module its name, and its twin with source lines
is executed instead."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

_ENTRY = re.compile(r"\.entry\s+([\w$]+)")
# Line table parts: directives, debug sections and the labels that exist only for them.
_DEBUG_SECTION = re.compile(r"\.section\s+\.debug_\w+\s*\{[^}]*\}")
_LINES = re.compile(
    r"^[ \t]*(?:\.(?:loc|file|target|version)\b.*|//.*|\$L__(?:tmp|func_begin|func_end)\d+:)$", re.M
)
_COMMENT = re.compile(r"[ \t]*//[^\n]*")


def entry_names(ptx: str) -> list[str]:
    """Kernel symbols of a PTX text, in order."""
    return _ENTRY.findall(_COMMENT.sub("", ptx))


def fingerprint(ptx: str) -> str:
    """Equal for two PTX texts of one kernel that differ in kernel name, comments and line information
    only."""
    body = _DEBUG_SECTION.sub("", ptx)
    body = _COMMENT.sub("", _LINES.sub("", body))
    for number, name in enumerate(entry_names(ptx)):
        body = body.replace(name, f"kernel{number}")
    lines = (line.strip() for line in body.splitlines())
    return hashlib.sha256("\n".join(line for line in lines if line).encode()).hexdigest()


def readable(symbol: str) -> str:
    """A kernel symbol without what the compiler appends: its parameters' types and a hash.

    `app_vector_add_Pointer6A6AoA_0daf4aec4dd85128` -> `app_vector_add` (`app` is the Mojo module).
    """
    without_hash = re.sub(r"_[0-9a-f]{8,16}$", "", symbol)
    return re.sub(r"(?<=[a-z0-9])_[A-Z][A-Za-z]*\w*$", "", without_hash)


@dataclass(frozen=True)
class Twin:
    """A recorded kernel that equals a loaded one: its name, PTX and symbol, and the loaded one's symbol."""

    name: str
    ptx: str
    entry: str
    given_entry: str


class KernelCatalogue:
    """Known kernels by fingerprint."""

    def __init__(self):
        self._known: dict[str, tuple[str, str]] = {}
        self._labels: dict[str, str] = {}

    def add(self, name: str, ptx: str) -> None:
        """Remember a recorded kernel: `name` for reports, `ptx` its text, best with line information."""
        self._known[fingerprint(ptx)] = (name, ptx)

    def match(self, ptx: str) -> Twin | None:
        """The recorded twin of a loaded module, or None."""
        known = self._known.get(fingerprint(ptx)) if self._known else None
        if known is None:
            return None
        name, text = known
        return Twin(name, text, entry_names(text)[0], entry_names(ptx)[0])

    def label(self, symbol: str) -> str:
        """A short name for a kernel that was not recorded. In a package kernels have only the package's name,
        `ops_` or `mojo_pkg_` and a hash: they are numbered in the order in which they are met."""
        if symbol not in self._labels:
            nameless = re.match(r"\w*_[0-9a-f]{16}_", symbol)
            self._labels[symbol] = f"kernel {1 + len(self._labels)}" if nameless else readable(symbol)
        return self._labels[symbol]
