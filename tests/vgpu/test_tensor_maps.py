"""Tensor maps: encoding, invalid arguments of the driver's call, unsupported maps."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from harness.vgpu import VirtualGPU
from harness.vgpu.driver.device import Device
from harness.vgpu.driver.interface import RESULT_CODES, Op
from harness.vgpu.memory.tensor_map import (
    ENCODED_BYTES,
    InvalidTensorMap,
    TensorMap,
    encode_tiled,
    swizzle_address,
)

VALID: dict[str, Any] = {"data_type": 9, "address": 0x1000, "dims": (40, 20, 6), "strides": (80, 1600), "box": (32, 8, 2), "element_strides": (1, 1, 1),
        "interleave": 0, "swizzle": 2, "promotion": 3, "fill": 0}  # fmt: skip


def test_encoded_map_can_be_decoded():
    original = encode_tiled(**VALID)
    assert len(original.encode()) == ENCODED_BYTES and TensorMap.decode(original.encode()) == original
    assert (original.width, original.nbytes, original.strides) == (2, 2 * 32 * 8 * 2, (2, 80, 1600))
    assert TensorMap.decode(bytes(ENCODED_BYTES)) is None


def test_tile_elements_have_expected_addresses():
    address, inside = encode_tiled(**{**VALID, "box": (8, 2, 2)}).compute_elements((36, 19, -1))
    assert address.shape == inside.shape == (4, 8)
    assert inside.tolist() == [[False] * 8] * 2 + [[True] * 4 + [False] * 4, [False] * 8]
    assert address[2, :4].tolist() == [0x1000 + 19 * 80 + 2 * (36 + k) for k in range(4)]


@pytest.mark.parametrize(("span", "rows"), [(128, 8), (64, 4), (32, 2)])
def test_swizzle_is_its_own_inverse(span, rows):
    addresses = np.arange(0, 2048, 16)
    assert (swizzle_address(swizzle_address(addresses, span), span) == addresses).all() and sorted(
        swizzle_address(addresses, span)
    ) == addresses.tolist()
    units = swizzle_address(addresses, span) // 16 % (span // 16)
    assert units[::8].tolist() == [k % rows for k in range(16)]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"dims": (4,) * 6, "strides": (16,) * 5, "box": (8,) * 6, "element_strides": (1,) * 6},
            "6 dimensions, allowed are 1 to 5",
        ),
        ({"address": 0x1008}, "the address 0x1008 is not a multiple of 16"),
        ({"dims": (40, 0, 6)}, "dimensions \\[40, 0, 6\\]"),
        ({"strides": (80, 1601)}, "strides \\[80, 1601\\] in bytes: multiples of 16"),
        ({"strides": (80, 1 << 40)}, "below 2\\^40"),
        ({"box": (32, 300, 2)}, "box \\[32, 300, 2\\], allowed are 1 to 256"),
        ({"box": (12, 8, 2)}, "24 bytes of the box along the innermost dimension are not a multiple of 16"),
        ({"swizzle": 1}, "64 bytes of the box along the innermost dimension, the swizzle spans 32"),
        ({"data_type": 1, "fill": 1}, "elements outside of the tensor are NaN, but the type has none"),
        ({"data_type": 20}, "an enumeration has a value that CUDA 12 does not know"),
        ({"swizzle": 7}, "an enumeration has a value"),
    ],
)
def test_invalid_maps_are_rejected(change, text):
    with pytest.raises(InvalidTensorMap, match=text):
        encode_tiled(**VALID | change)


NOT_SIMULATED = {
    "interleaved layouts": {"interleave": 1},
    "maps that convert elements": {"data_type": 11},
    "element strides other than 1": {"element_strides": (1, 2, 1)},
}


@pytest.mark.parametrize("text", NOT_SIMULATED)
def test_unsupported_maps_are_reported(text):
    with pytest.raises(NotImplementedError, match=text):
        encode_tiled(**VALID | NOT_SIMULATED[text])


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({}, "CUDA_SUCCESS", ""),
        ({"address": 8}, "CUDA_ERROR_INVALID_VALUE", "cuTensorMapEncodeTiled: the address 0x8"),
        (
            {"interleave": 1},
            "CUDA_ERROR_NOT_SUPPORTED",
            "the virtual GPU does not simulate tensor maps with interleaved",
        ),
    ],
)
def test_driver_call_returns_cuda_errors(change, code, text):
    messages: list[str] = []
    device, values = Device(VirtualGPU(), log=messages.append), VALID | change
    words = [word for name in ("dims", "strides", "box", "element_strides") for word in (*values[name], 0, 0)]
    arguments = [
        values[name] for name in ("data_type", "address", "interleave", "swizzle", "promotion", "fill")
    ]
    arguments.insert(1, 3)
    result, _, output = device.handle(
        Op.ENCODE_TENSOR_MAP, arguments, struct.pack("<19q", *words), ENCODED_BYTES
    )
    assert result == RESULT_CODES[code]
    if text:
        assert text in messages[0]
    else:
        assert TensorMap.decode(output) == encode_tiled(**VALID)
