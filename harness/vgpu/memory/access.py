"""Registers and memory instructions, as shared by the executor and the generated code.

`KIND` maps each PTX type to its NumPy kind, the windows place the state spaces among generic addresses, and
an `Access` is one memory instruction of a program.
"""

from __future__ import annotations

import numpy as np

from harness.vgpu.ptx.parser import Instr

from .arena import NOWHERE, Extent, Space, Views

KIND = {"pred": "p", "b128": "u8"}
for _bits in (8, 16, 32, 64):
    KIND |= {f"b{_bits}": f"u{_bits // 8}", f"u{_bits}": f"u{_bits // 8}", f"s{_bits}": f"i{_bits // 8}"}
KIND |= {"f16": "f2", "f32": "f4", "f64": "f8", "bf16": "u2", "f16x2": "u4", "bf16x2": "u4", "tf32": "f4"}
DTYPE = {k: np.dtype(k).type for k in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8")}
DTYPE["p"] = np.bool_

#: Start of the shared, local and parameter windows in the generic address space.
SHARED_WINDOW, LOCAL_WINDOW, PARAM_WINDOW = 1 << 56, 1 << 57, 1 << 58


# How many threads an atomic, a strong access or a fence is for.
BLOCK_SCOPE, CLUSTER_SCOPE, DEVICE_SCOPE = range(3)


class Access:
    """One memory instruction: what the checks and counters need, and a cache of its last tensor."""

    __slots__ = [
        "_space", "_twins", "_views", "acquires", "count", "instr", "kind", "mask", "mixed", "nbytes",
        "number", "releases", "scope", "shape", "shift", "shift64", "space", "tensor", "unlogged", "used",
        "width", "writes",
    ]  # fmt: skip

    def __init__(self, number: int, instr: Instr, kind: str, space: str, width: int, count: int):
        self.number, self.instr, self.space = number, instr, space
        self.kind = kind  # R, W or A (atomic, or a strong load or store)
        self.width, self.count = width, count  # bytes of an element, elements per thread
        self.nbytes = width * count
        self.shift = self.nbytes.bit_length() - 1
        self.shift64 = np.uint64(self.shift)
        self.mask = self.nbytes - 1
        self.acquires = self.releases = self.mixed = self.unlogged = self.used = False
        self.scope = DEVICE_SCOPE
        self.writes = kind == "W" or (kind == "A" and instr.op != "ld")
        self._twins: dict[str, Access] = {}
        self.forget()

    @property
    def narrow(self) -> bool:
        """Atomic, or strong, with block scope only."""
        return self.scope == BLOCK_SCOPE

    @property
    def role(self) -> str:
        """Its role in the race check: R and W non-atomic, A atomic or strong store, S strong load; B and T
        are A and S with block scope."""
        if self.kind != "A":
            return self.kind
        load = self.instr.op == "ld"
        return ("T" if load else "B") if self.narrow else "S" if load else "A"

    def forget(self):
        """Drop what was cached about the last launch."""
        self.tensor: Extent = NOWHERE
        self._space: Space | None = None
        self._views: Views | None = None
        for twin in self._twins.values():
            twin.forget()

    def views(self, space: Space) -> Views:
        """Return the views of `space` with this access's element size."""
        if self._space is not space or self._views is None:
            self._space, self._views = space, space.views(self.width, self.count)
        return self._views

    def in_space(self, name: str) -> Access:
        """Return the same access in state space `name` (for generic addresses)."""
        twin = self._twins.get(name)
        if twin is None:
            twin = self._twins[name] = Access(
                self.number, self.instr, self.kind, name, self.width, self.count
            )
            twin.acquires, twin.releases, twin.used = self.acquires, self.releases, self.used
            twin.scope = self.scope
        return twin
