"""What a real GPU gives for the edge values of arithmetic and conversions: the instructions, the operands, the runner.

`python tests/vgpu/edge_values.py --out FILE` runs every instruction of `CASES` on the first NVIDIA GPU, through the
CUDA driver alone (no package but Python's own), and writes the result bits. `tests/vgpu/data/edge_values.json.gz` is
such a file, measured on an H200; a test compares the virtual GPU with it. Operands are made here and are the same everywhere: signed zeros,
subnormals, limits of the integer types, rounding ties, infinities, NaNs of several payloads, and random bits.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

BYTES = {"f16": 2, "bf16": 2, "f16x2": 4, "bf16x2": 4, "f32": 4, "tf32": 4, "f64": 8}
BYTES |= {f"{sign}{bits}": bits // 8 for sign in "su" for bits in (8, 16, 32, 64)}
FLOATS = ("f16", "bf16", "f32", "f64")
INTEGERS = ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64")
BLOCK = 32

#: Exponent bits and mantissa bits of the floating types.
LAYOUT = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}

_VALUES = [0.5, 1.0, 1.5, 2.5, 3.5, 0.49999997, 0.75, 2.0, 127.0, 127.5, 128.0, 128.5, 255.0, 255.5, 256.0]
_VALUES += [32767.0, 32767.5, 32768.0, 65504.0, 65519.0, 65520.0, 65535.0, 65535.5, 65536.0, 1e5]
_VALUES += [2147483520.0, 2147483647.0, 2147483647.5, 2147483648.0, 4294967040.0, 4294967295.0, 4294967295.5]
_VALUES += [4294967296.0, 9223371487098961920.0, 2.0**63, 18446742974197923840.0, 2.0**64, 1e30, 3e38, 1e300]
_VALUES += [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-24, 1 + 2.0**-12]
_VALUES += [2.0**-24, 2.0**-25, 3 * 2.0**-25, 2.0**-14, 2.0**-133, 2.0**-134, 2.0**-149, 2.0**-150]


def float_bits(value: float, kind: str) -> int:
    """The bits of a Python float in a type: rounded to nearest, bf16 cut off; infinity where it is too large."""
    try:
        if kind == "f16":
            return int.from_bytes(struct.pack("<e", value), "little")
        single = int.from_bytes(struct.pack("<f", value), "little")
    except OverflowError:
        single = None
    if kind == "f64":
        return int.from_bytes(struct.pack("<d", value), "little")
    if single is None:
        return special(kind)[4]
    return single >> 16 if kind == "bf16" else single


def special(kind: str) -> list[int]:
    """0, smallest subnormal, largest subnormal, smallest normal, infinity, largest, and four NaNs."""
    exponent, mantissa = LAYOUT[kind]
    infinity = ((1 << exponent) - 1) << mantissa
    quiet = 1 << (mantissa - 1)
    return [
        0, 1, (1 << mantissa) - 1, 1 << mantissa, infinity, infinity - 1,
        infinity | quiet, infinity | quiet | 0x2D, infinity | 1, infinity | (1 << mantissa) - 1,
    ]  # fmt: skip


def random_bits(count: int, nbytes: int) -> list[int]:
    """The same bits everywhere: a linear congruential generator."""
    state, out = 12345, []
    for _ in range(count):
        value = 0
        for _ in range(nbytes):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            value = value << 8 | state >> 56
        out.append(value)
    return out


def edge_operands(kind: str) -> list[int]:
    """Operands of one-operand instructions."""
    size = BYTES[kind]
    sign = 1 << (8 * size - 1)
    if kind in LAYOUT:
        positive = list(dict.fromkeys([*special(kind), *(float_bits(v, kind) for v in _VALUES)]))
        return [*positive, *(p | sign for p in positive), *random_bits(24, size)]
    full = 2 * sign - 1
    near = [
        v
        for e in (0, 7, 8, 15, 16, 24, 31, 32, 53, 63)
        if e < 8 * size
        for v in ((1 << e) - 1, 1 << e, (1 << e) + 1)
    ]
    near += [
        sign - 1,
        sign,
        sign + 1,
        full,
        full - 1,
        100,
        65519 & full,
        65520 & full,
        16777217 & full,
        33554435 & full,
    ]
    return [*dict.fromkeys([*near, *(-v & full for v in near)]), *random_bits(16, size)]


def few_operands(kind: str, count: int) -> list[int]:
    """Operands of instructions with several: special values, and 1, 3 and -2."""
    exponent, mantissa = LAYOUT[kind]
    zero, tiny, subnormal, normal, infinity, largest, quiet, payload, signalling, ones = special(kind)
    sign = 1 << (exponent + mantissa)
    one, three, minus_two = (float_bits(v, kind) for v in (1.0, 3.0, -2.0))
    ordered = [one, payload, infinity, zero, minus_two, infinity | sign, largest, signalling | sign]
    ordered += [zero | sign, tiny, quiet | sign, ones, three, normal | sign, subnormal]
    return ordered[:count]


@dataclass(frozen=True)
class Case:
    """One instruction. `text` uses %x0, %x1, %x2 (operands), %y0 (result), %a0 (address of the result).

    `takes` and `gives` are the types of operands and result; `approximate` where the PTX manual allows an error.
    """

    name: str
    text: str
    takes: tuple[str, ...]
    gives: str
    approximate: bool = False

    def operands(self) -> list[tuple[int, ...]]:
        """The operands of every thread, as bits; a multiple of 32 of them."""
        kinds = self.takes
        if len(kinds) == 1 and kinds[0] in ("f16x2", "bf16x2"):
            some = edge_operands(kinds[0][:-2])
            rows = [(a | b << 16,) for a, b in zip(some, some[::-1], strict=True)]
        elif len(kinds) == 1:
            rows = [(a,) for a in edge_operands(kinds[0])]
        elif kinds[0] in ("f16x2", "bf16x2"):
            some = few_operands(kinds[0][:-2], 12 if len(kinds) == 2 else 6)
            rows = [()]
            for _ in kinds:
                rows = [(*row, a | b << 16) for row in rows for a, b in zip(some, some[::-1], strict=True)]
        else:
            rows = [()]
            for kind in kinds:
                some = few_operands(kind, 15 if len(kinds) == 2 else 6)
                rows = [(*row, a) for row in rows for a in some]
        return rows + [rows[0]] * (-len(rows) % BLOCK)

    def ptx(self) -> str:
        """A kernel: array 0 takes the results, arrays 1... hold the operands."""
        widths = [BYTES[self.gives], *(BYTES[t] for t in self.takes)]
        names = ["%y0", *(f"%x{k}" for k in range(len(self.takes)))]
        lines = [
            ".reg .pred %p<4>;", ".reg .b32 %r<16>, %i, %n, %b;", ".reg .b64 %d<4>, %a<4>;", ".reg .b16 %h<8>;",
            *(f".reg .b{max(8 * w, 16)} {n};" for n, w in zip(names, widths, strict=True)),
            "mov.u32 %b, %ctaid.x;", "mov.u32 %n, %ntid.x;", "mov.u32 %i, %tid.x;", "mad.lo.s32 %i, %b, %n, %i;",
        ]  # fmt: skip
        for k, width in enumerate(widths):
            lines += [f"ld.param.u64 %a{k}, [q{k}];", f"mad.wide.u32 %a{k}, %i, {width}, %a{k};"]
        for k, (name, width) in enumerate(zip(names, widths, strict=True)):
            if k:
                lines.append(f"ld.global.b{8 * width} {name}, [%a{k}];")
        lines += [self.text, f"st.global.b{8 * widths[0]} [%a0], %y0;", "ret;"]
        params = ",\n".join(f".param .u64 q{k}" for k in range(len(widths)))
        body = "\n".join(lines)
        head = ".version 8.5\n.target sm_90a\n.address_size 64\n"
        return f"{head}.visible .entry k(\n{params}\n)\n{{\n{body}\n}}\n"


def _one(instruction: str, takes: str, gives: str, approximate: bool = False) -> Case:
    return Case(instruction, f"{instruction} %y0, %x0;", (takes,), gives, approximate)


def _several(instruction: str, kind: str, count: int, approximate: bool = False) -> Case:
    operands = ", ".join(f"%x{k}" for k in range(count))
    return Case(instruction, f"{instruction} %y0, {operands};", (kind,) * count, kind, approximate)


def _conversions() -> list[Case]:
    out = []
    for frm in FLOATS:
        for to in INTEGERS:
            if frm == "bf16" and BYTES[to] == 1:  # PTX does not have it
                continue
            for mode in ("rni", "rzi", "rmi", "rpi"):
                out.append(_one(f"cvt.{mode}.{to}.{frm}", frm, to))
            if frm == "f32":
                out.append(_one(f"cvt.rzi.ftz.{to}.f32", frm, to))
                out.append(_one(f"cvt.rni.sat.{to}.f32", frm, to))
    for frm in INTEGERS:
        for to in FLOATS:
            for mode in (
                ("rn", "rz", "rm", "rp") if to in ("f32", "f64") or frm[1:] in ("32", "64") else ("rn",)
            ):
                if to != "bf16" or (mode == "rn" and BYTES[frm] > 1):
                    out.append(_one(f"cvt.{mode}.{to}.{frm}", frm, to))
        for to in INTEGERS:
            narrower = BYTES[to] < BYTES[frm] or (BYTES[to] == BYTES[frm] and to != frm)
            if narrower or (frm[0] == "s" and to[0] == "u"):
                out.append(_one(f"cvt.sat.{to}.{frm}", frm, to))
    for kind in ("f16", "f32", "f64"):
        for mode in ("rni", "rzi", "rmi", "rpi"):
            out.append(_one(f"cvt.{mode}.{kind}.{kind}", kind, kind))
    for frm, to in (("f32", "f16"), ("f64", "f16"), ("f64", "f32")):
        for mode in ("rn", "rz", "rm", "rp"):
            out.append(_one(f"cvt.{mode}.{to}.{frm}", frm, to))
    out += [_one(f"cvt.{to}.{frm}", frm, to) for frm, to in (
        ("f16", "f32"), ("f16", "f64"), ("bf16", "f32"), ("bf16", "f64"), ("f32", "f64"))]  # fmt: skip
    out += [_one(f"cvt.{mods}.{to}.{frm}", frm, to) for mods, frm, to in (
        ("ftz", "f32", "f64"), ("rn.ftz", "f64", "f32"), ("rn.sat", "f64", "f32"), ("sat", "f32", "f32"),
        ("ftz", "f32", "f32"), ("ftz.sat", "f32", "f32"), ("sat", "f64", "f64"), ("sat", "f16", "f16"),
        ("rn.ftz", "f32", "f16"), ("rn.sat", "f32", "f16"), ("rn.sat", "f64", "f16"), ("ftz.sat", "f16", "f32"),
        ("sat", "f16", "f32"), ("ftz", "f16", "f32"), ("sat", "f16", "f64"), ("sat", "f32", "f64"),
        ("rn.relu", "f32", "f16"), ("rz.relu", "f32", "f16"), ("rn", "f32", "bf16"), ("rz", "f32", "bf16"),
        ("rn.relu", "f32", "bf16"), ("rz.relu", "f32", "bf16"), ("rn", "f64", "bf16"), ("rn", "f16", "bf16"),
        ("rn", "bf16", "f16"), ("rna", "f32", "tf32"), ("rn", "f32", "tf32"), ("rz", "f32", "tf32"),
        ("rn.relu", "f32", "tf32"), ("rna.satfinite", "f32", "tf32"))]  # fmt: skip
    for to in ("f16x2", "bf16x2"):
        for mods in ("rn", "rz", "rn.relu", "rz.relu"):
            name = f"cvt.{mods}.{to}.f32"
            out.append(Case(name, f"{name} %y0, %x0, %x1;", ("f32", "f32"), to))
    return out


def _arithmetic() -> list[Case]:
    out = []
    for op in ("add", "sub", "mul"):
        for kind in ("f32", "f64", "f16", "f16x2", "bf16", "bf16x2"):
            out.append(_several(f"{op}.rn.{kind}", kind, 2))
        out.append(_several(f"{op}.rn.ftz.f32", "f32", 2))
        out.append(_several(f"{op}.rn.sat.f32", "f32", 2))
    for kind in ("f32", "f64", "f16", "f16x2", "bf16", "bf16x2"):
        out.append(_several(f"fma.rn.{kind}", kind, 3))
        if "16" in kind:
            out.append(_several(f"fma.rn.relu.{kind}", kind, 3))
        for op in ("min", "max"):
            out.append(_several(f"{op}.{kind}", kind, 2))
            if kind != "f64":
                out.append(_several(f"{op}.NaN.{kind}", kind, 2))
        for op in ("abs", "neg"):
            out.append(_one(f"{op}.{kind}", kind, kind))
    out += [_several(name, "f32", 3) for name in ("fma.rn.ftz.f32", "fma.rn.sat.f32", "fma.rn.ftz.sat.f32")]
    out += [_several(name, "f32", 2) for name in ("min.ftz.f32", "max.ftz.f32")]
    out += [_one(f"{op}.ftz.f32", "f32", "f32") for op in ("abs", "neg")]
    out += [_several("copysign.f32", "f32", 2), _several("copysign.f64", "f64", 2)]
    out += [_several(f"div.rn.{k}", k, 2) for k in ("f32", "f64")] + [_several("div.rn.ftz.f32", "f32", 2)]
    out += [_several(f"div.{m}.f32", "f32", 2, True) for m in ("full", "full.ftz", "approx", "approx.ftz")]
    out += [_one(f"{op}.rn.{k}", k, k) for op in ("sqrt", "rcp") for k in ("f32", "f64")]
    out += [_one(f"{op}.rn.ftz.f32", "f32", "f32") for op in ("sqrt", "rcp")]
    for op in ("sqrt", "rcp", "rsqrt", "ex2", "lg2", "sin", "cos"):
        out += [_one(f"{op}.approx{ftz}.f32", "f32", "f32", True) for ftz in ("", ".ftz")]
    out.append(_one("tanh.approx.f32", "f32", "f32", True))
    out += [_one(f"{op}.approx.{k}", k, k, True) for op in ("ex2", "tanh") for k in ("f16", "f16x2")]
    out += [_one(f"ex2.approx.ftz.{k}", k, k, True) for k in ("bf16", "bf16x2")]
    out += [_one(f"tanh.approx.{k}", k, k, True) for k in ("bf16", "bf16x2")]
    out += [_one("rsqrt.approx.f64", "f64", "f64", True), _one("rcp.approx.ftz.f64", "f64", "f64", True)]
    return out


def _memory_and_matrices() -> list[Case]:
    out = []
    for kind in ("f32", "f64", "f16x2", "bf16x2"):
        bits, rounding = 8 * BYTES[kind], "" if kind in ("f32", "f64") else ".noftz"
        old = "%d0" if bits == 64 else "%r0"
        name = f"atom.global.add{rounding}.{kind}"
        text = f"st.global.b{bits} [%a0], %x0; {name} {old}, [%a0], %x1; ld.global.b{bits} %y0, [%a0];"
        out.append(Case(name, text, (kind, kind), kind))
    for kind, inside in (("bf16", "{%r0, %r0}"), ("f16", "{%r0, %r0}")):
        name = f"mma.sync.aligned.m16n8k8.row.col.f32.{kind}.{kind}.f32"
        text = f"mov.b32 %r0, 0; {name} {{%y0, %r1, %r2, %r3}}, {inside}, {{%r0}}, {{%x0, %x0, %x0, %x0}};"
        out.append(Case(name, text, ("f32",), "f32"))
    return out


CASES = [*_conversions(), *_arithmetic(), *_memory_and_matrices()]


def packed(values: list[int], kind: str) -> bytes:
    """Bits as bytes in memory."""
    return b"".join(v.to_bytes(BYTES[kind], "little") for v in values)


def arrays(case: Case) -> list[bytes]:
    """The operand arrays of a case."""
    rows = case.operands()
    return [packed([row[k] for row in rows], kind) for k, kind in enumerate(case.takes)]


def digest() -> int:
    """A checksum of all instructions and operands: results of other operands must not be compared."""
    total = 0
    for case in CASES:
        total = zlib.crc32(b"".join([case.ptx().encode(), *arrays(case)]), total)
    return total


class DriverError(Exception):
    """A call of the CUDA driver failed; `code` is its result."""

    def __init__(self, name: str, code: int):
        super().__init__(f"{name}: {code}")
        self.code = code


class Device:
    """The first NVIDIA GPU, through the CUDA driver's C functions."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, 256, device)
        self.name = name.value.decode()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *args):
        """Call a function. Raises DriverError."""
        if code := getattr(self.library, name)(*args):
            raise DriverError(name, code)

    def allocate(self, nbytes: int) -> ctypes.c_uint64:
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address

    def run(self, case: Case) -> bytes:
        """The result array of a case. Raises DriverError."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(case.ptx().encode()))
        self.call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(b"k"))
        count = len(case.operands())
        size = count * BYTES[case.gives]
        places = [self.allocate(size)]
        for data in arrays(case):
            places.append(self.allocate(len(data)))
            self.call("cuMemcpyHtoD_v2", places[-1], ctypes.c_char_p(data), ctypes.c_size_t(len(data)))
        pointers = (ctypes.c_void_p * len(places))(*(ctypes.addressof(p) for p in places))
        self.call("cuLaunchKernel", function, count // BLOCK, 1, 1, BLOCK, 1, 1, 0, None, pointers, None)
        self.call("cuCtxSynchronize")
        out = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoH_v2", out, places[0], ctypes.c_size_t(size))
        for place in places:
            self.call("cuMemFree_v2", place)
        self.call("cuModuleUnload", module)
        return out.raw

    def host_fills(self) -> dict[str, object]:
        """What fills and copies of pinned host memory give: the driver's result, and the first bytes (hex)."""
        memory, n = ctypes.c_void_p(), 64
        self.call("cuMemAllocHost_v2", ctypes.byref(memory), ctypes.c_size_t(n))
        start = memory.value
        assert start is not None
        host, stream = ctypes.c_uint64(start), None
        size = ctypes.c_size_t
        device = self.allocate(n)
        self.call("cuMemsetD8_v2", device, ctypes.c_ubyte(0x5A), size(n))
        calls = {
            "cuMemsetD8_v2": (host, ctypes.c_ubyte(0x11), size(n)),
            "cuMemsetD16_v2": (host, ctypes.c_ushort(0x2233), size(n // 2)),
            "cuMemsetD32_v2": (host, ctypes.c_uint(0x44556677), size(n // 4)),
            "cuMemsetD8Async": (host, ctypes.c_ubyte(0x12), size(n), stream),
            "cuMemsetD16Async": (host, ctypes.c_ushort(0x2334), size(n // 2), stream),
            "cuMemsetD32Async": (host, ctypes.c_uint(0x45566778), size(n // 4), stream),
            "cuMemsetD2D8_v2": (host, size(16), ctypes.c_ubyte(0x13), size(4), size(4)),
            "cuMemsetD2D32_v2": (host, size(32), ctypes.c_uint(0x01020304), size(2), size(2)),
            "cuMemcpy": (host, device, size(n)),
            "cuMemcpyAsync": (host, device, size(n), stream),
            "cuMemcpyDtoD_v2": (host, device, size(n)),
            "cuMemcpyHtoD_v2": (host, ctypes.c_uint64(device.value), size(n)),
            "cuMemcpyDtoH_v2": (host, device, size(n)),
        }
        out: dict[str, object] = {}
        for name, args in calls.items():
            ctypes.memset(start, 0, n)
            code = getattr(self.library, name)(*args) or self.library.cuCtxSynchronize()
            out[name] = [code, ctypes.string_at(start, n).hex()]
        out["past the end"] = self.library.cuMemsetD8_v2(host, ctypes.c_ubyte(1), size(1 << 30))
        return out


def main() -> None:
    """Run everything on a GPU and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    out = parser.parse_args().out
    device = Device()
    results: dict[str, str] = {}
    errors: dict[str, str] = {}
    for case in CASES:
        try:
            results[case.name] = device.run(case).hex()
        except DriverError as error:
            errors[case.name] = str(error)
            if error.code in (700, 715, 716, 717, 718, 719):  # the context is lost
                break
    report = {"device": device.name, "digest": digest(), "errors": errors, "results": results}
    out.parent.mkdir(parents=True, exist_ok=True)
    report["host"] = device.host_fills()
    out.write_text(json.dumps(report, indent=0) + "\n")
    print(f"{device.name}: {len(results)} instructions, {len(errors)} refused; wrote {out}")


if __name__ == "__main__":
    main()
