"""Short names of kernels for reports."""

from __future__ import annotations

import re


def shorten_symbol(symbol: str) -> str:
    """Remove the compiler's suffix, parameter types and a hash, from a kernel symbol.

    `app_vector_add_Pointer6A6AoA_0daf4aec4dd85128` -> `app_vector_add` (`app` is the Mojo module).
    """
    without_hash = re.sub(r"_[0-9a-f]{8,16}$", "", symbol)
    return re.sub(r"(?<=[a-z0-9])_[A-Z][A-Za-z]*\w*$", "", without_hash)


class KernelNames:
    """The short names of a program's kernels."""

    def __init__(self):
        self._labels: dict[str, str] = {}

    def get_label(self, symbol: str) -> str:
        """Return a short name for a kernel.

        Kernels of a MAX package are numbered in the order of first use: their symbols contain only the
        package's name, `ops_` or `mojo_pkg_`, and a hash.
        """
        if symbol not in self._labels:
            unnamed = re.match(r"\w*_[0-9a-f]{16}_", symbol)
            self._labels[symbol] = f"kernel {1 + len(self._labels)}" if unnamed else shorten_symbol(symbol)
        return self._labels[symbol]
