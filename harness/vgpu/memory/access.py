"""Register types and memory accesses, as shared by the executor and the generated code."""

from __future__ import annotations

import numpy as np

from harness.vgpu.ptx.parser import Instr

from .arena import NO_EXTENT, Extent, Space, Views

NUMPY_KINDS = {"pred": "p", "b128": "u8"}
for _bits in (8, 16, 32, 64):
    NUMPY_KINDS |= {f"{sign}{_bits}": f"{kind}{_bits // 8}" for sign, kind in zip("bus", "uui", strict=True)}
NUMPY_KINDS |= {"f16": "f2", "f32": "f4", "f64": "f8", "bf16": "u2"}
NUMPY_KINDS |= {"f16x2": "u4", "bf16x2": "u4", "tf32": "f4"}
NUMPY_TYPES = {
    k: np.dtype(k).type for k in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8")
}
NUMPY_TYPES["p"] = np.bool_

#: Start of the shared, local and parameter windows in the generic address space.
SHARED_WINDOW, LOCAL_WINDOW, PARAM_WINDOW = 1 << 56, 1 << 57, 1 << 58


# Scopes of atomics, strong accesses and fences.
BLOCK_SCOPE, CLUSTER_SCOPE, DEVICE_SCOPE = range(3)


class Access:
    """One memory instruction, as the checks and counters see it, with a cache of its last tensor."""

    __slots__ = [
        "_space", "_variants", "_views", "acquires", "count", "instr", "is_mixed", "kind", "mask", "nbytes",
        "number", "releases", "result_used", "scope", "shape", "shift", "shift64", "space", "tensor", "width",
        "writes",
    ]  # fmt: skip

    def __init__(self, number: int, instr: Instr, kind: str, space: str, width: int, count: int):
        self.number, self.instr, self.space = number, instr, space
        self.kind = kind  # R, W or A (atomic, or a strong load or store)
        self.width, self.count = width, count  # bytes of an element, elements per thread
        self.nbytes = width * count
        self.shift = self.nbytes.bit_length() - 1
        self.shift64 = np.uint64(self.shift)
        self.mask = self.nbytes - 1
        self.acquires = self.releases = self.is_mixed = self.result_used = False
        self.scope = DEVICE_SCOPE
        self.writes = kind == "W" or (kind == "A" and instr.op != "ld")
        self._variants: dict[str, Access] = {}
        self.clear_cache()

    @property
    def is_block_scope(self) -> bool:
        return self.scope == BLOCK_SCOPE

    @property
    def role(self) -> str:
        """The access's role in the race check: R and W non-atomic, A atomic or strong store, S strong load; B
        and T are A and S with block scope."""
        if self.kind != "A":
            return self.kind
        load = self.instr.op == "ld"
        return ("T" if load else "B") if self.is_block_scope else "S" if load else "A"

    def clear_cache(self):
        self.tensor: Extent = NO_EXTENT
        self._space: Space | None = None
        self._views: Views | None = None
        for variant in self._variants.values():
            variant.clear_cache()

    def get_views(self, space: Space) -> Views:
        """Return the views of `space` with this access's element size."""
        if self._space is not space or self._views is None:
            self._space, self._views = space, space.get_views(self.width, self.count)
        return self._views

    def with_space(self, name: str) -> Access:
        """Return the same access in state space `name` (for generic addresses)."""
        variant = self._variants.get(name)
        if variant is None:
            variant = self._variants[name] = Access(
                self.number, self.instr, self.kind, name, self.width, self.count
            )
            variant.acquires, variant.releases = self.acquires, self.releases
            variant.result_used, variant.scope = self.result_used, self.scope
        return variant
