"""Tensor maps, created by cuTensorMapEncodeTiled and read by TMA instructions, in a private encoding."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import numpy as np

ENCODED_BYTES = 128
MAGIC = b"vgpuTMap"
_FORMAT = "<8sQ5Q4Q5H4B"

#: CUtensorMapDataType -> bytes of an element, and the numeric kind with which reductions update it
#: (warp.update_atomically).
ELEMENT_TYPES = {
    0: (1, "u1"),
    1: (2, "u2"),
    2: (4, "u4"),
    3: (4, "i4"),
    4: (8, "u8"),
    5: (8, "i8"),
    6: (2, "f2"),
}
ELEMENT_TYPES |= {7: (4, "f4"), 8: (8, "f8"), 9: (2, "bf16"), 10: (4, "f4"), 11: (4, "f4"), 12: (4, "f4")}
_UNCONVERTED_TYPES = range(10)  # the other types flush subnormals or round to tf32 when copied
#: The NaN that fills elements outside the tensor, by floating-point type, measured on an H200.
NAN_FILLS = {6: 0x7FF7, 7: 0x7FF77FF7, 8: 0x7FF77FF77FF77FF7, 9: 0x7FF7}
UNIT_BYTES = 16  # granularity of the TMA in bytes
SWIZZLES = {0: 0, 1: 32, 2: 64, 3: 128}  # CUtensorMapSwizzle -> span of the swizzle in bytes


class InvalidTensorMap(ValueError):
    """Raised for arguments of cuTensorMapEncodeTiled that the driver rejects."""


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the tile (box) that one instruction copies; innermost dimension first.

    `strides` are in bytes, for all dimensions; `swizzle` is the span of the swizzle in bytes, 0 for none.
    """

    address: int
    data_type: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    fill_nan: bool

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return ELEMENT_TYPES[self.data_type][0]

    @property
    def nbytes(self) -> int:
        """Bytes of a tile in shared memory."""
        return self.width * int(np.prod(self.box))

    @property
    def pitch(self) -> int:
        """Bytes from one row of a tile to the next in shared memory: the swizzle's span, even if a row is
        shorter."""
        return self.swizzle or self.width * self.box[0]

    @property
    def fill(self) -> int:
        """The bits of an element outside the tensor."""
        return NAN_FILLS.get(self.data_type, 0) if self.fill_nan else 0

    def compute_elements(
        self, corner: tuple[int, ...], is_store: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the element addresses of the tile at these coordinates, [rows, box[0]], and a mask of the
        elements that are copied.

        A load copies only elements inside the tensor. A store copies every 16-byte unit that begins inside it:
        an H200 writes up to 14 bytes past a row whose length is not a multiple of 16 bytes.
        """
        address = np.zeros((1,) * len(self.box), np.int64) + self.address
        inside = np.ones((1,) * len(self.box), bool)
        for d, (first, count) in enumerate(zip(corner, self.box, strict=True)):
            coordinate = first + np.arange(count)
            shape = [1] * len(self.box)
            shape[len(self.box) - 1 - d] = count
            address = address + (coordinate * self.strides[d]).reshape(shape)
            if is_store and d == 0:
                coordinate = coordinate // (UNIT_BYTES // self.width) * (UNIT_BYTES // self.width)
            inside = inside & ((coordinate >= 0) & (coordinate < self.dims[d])).reshape(shape)
        return address.reshape(-1, self.box[0]), inside.reshape(-1, self.box[0])

    def encode(self) -> bytes:
        rank = len(self.dims)
        packed = struct.pack(
            _FORMAT, MAGIC, self.address, *_pad(self.dims), *_pad(self.strides[1:], 4), *_pad(self.box),
            rank, self.data_type, self.swizzle, self.fill_nan,
        )  # fmt: skip
        return packed.ljust(ENCODED_BYTES, b"\0")

    @classmethod
    @functools.lru_cache(maxsize=64)
    def decode(cls, data: bytes) -> TensorMap | None:
        """Decode a map from 128 bytes; return None if they are not an encoded map."""
        if len(data) != ENCODED_BYTES or not data.startswith(MAGIC):
            return None
        _, address, *rest = struct.unpack_from(_FORMAT, data)
        rank, data_type, swizzle, fill_nan = rest[14:]
        strides = (ELEMENT_TYPES[data_type][0], *rest[5 : 4 + rank])
        return cls(
            address, data_type, tuple(rest[:rank]), strides, tuple(rest[9 : 9 + rank]), swizzle,
            bool(fill_nan),
        )  # fmt: skip


def _pad(values, count: int = 5) -> list[int]:
    return [*values, *[0] * (count - len(values))]


def encode_tiled(
    data_type: int, address: int, dims, strides, box, element_strides, *, interleave: int, swizzle: int, promotion: int,
    fill: int
) -> TensorMap:  # fmt: skip
    """Create the map that cuTensorMapEncodeTiled encodes; `strides` (bytes) omit the innermost dimension.

    Raises InvalidTensorMap for arguments that the driver's documentation forbids, NotImplementedError for valid
    ones that are not simulated.
    """
    width, _ = ELEMENT_TYPES.get(data_type, (0, ""))
    recognized = (
        width and swizzle in SWIZZLES and interleave in (0, 1, 2) and fill in (0, 1) and 0 <= promotion < 4
    )
    if not recognized:
        raise InvalidTensorMap("an enumeration has a value that CUDA 12 does not know")
    if interleave:
        raise NotImplementedError("tensor maps with interleaved layouts")
    if data_type not in _UNCONVERTED_TYPES:
        raise NotImplementedError("tensor maps that convert elements (FTZ and TFLOAT32)")
    if any(step != 1 for step in element_strides):
        raise NotImplementedError("tensor maps with element strides other than 1")
    inner, span = box[0] * width, SWIZZLES[swizzle]
    checks = [
        (1 <= len(dims) <= 5, f"{len(dims)} dimensions, allowed are 1 to 5"),
        (address % 16 == 0, f"the address {address:#x} is not a multiple of 16"),
        (all(1 <= n <= 1 << 32 for n in dims), f"dimensions {list(dims)}, allowed are 1 to 2^32"),
        (all(s % 16 == 0 and s < 1 << 40 for s in strides),
         f"strides {list(strides)} in bytes: multiples of 16 below 2^40 are allowed"),
        (all(1 <= n <= 256 for n in box), f"box {list(box)}, allowed are 1 to 256"),
        (inner % 16 == 0, f"{inner} bytes of the box along the innermost dimension are not a multiple of 16"),
        (not span or inner <= span, f"{inner} bytes of the box along the innermost dimension, the swizzle"
                                    f" spans {span}"),
        (not fill or data_type in NAN_FILLS, "elements outside of the tensor are NaN, but the type has none"),
    ]  # fmt: skip
    for valid, message in checks:
        if not valid:
            raise InvalidTensorMap(message)
    return TensorMap(address, data_type, tuple(dims), (width, *strides), tuple(box), span, bool(fill))


def swizzle_address(address: np.ndarray, span: int) -> np.ndarray:
    """Apply a swizzle to addresses: XOR the index of the 16-byte unit within the span with the index of the
    128-byte line."""
    if not span:
        return address
    return address ^ ((address >> 7 & (span // 16 - 1)) << 4)
