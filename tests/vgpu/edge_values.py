"""Measure a GPU's results for edge cases of arithmetic and conversions: instructions, operands, runner.

`python tests/vgpu/edge_values.py --out FILE` runs every instruction of `CASES` on the first NVIDIA GPU, through the
CUDA driver (with only Python's standard library), and writes the result bits. `tests/vgpu/data/edge_values.json.gz` is
such a file, measured on an H200; a test compares the virtual GPU with it. Operands are the same on every machine: signed
zeros, subnormals, integer limits, rounding ties, infinities, NaNs with several payloads, and random bits.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import struct
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

from cuda_api import Cuda, DriverError

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


def encode_float(value: float, kind: str) -> int:
    """Return a float's bits in a type: rounded to nearest, truncated for bf16, infinity if too large."""
    try:
        if kind == "f16":
            return int.from_bytes(struct.pack("<e", value), "little")
        single = int.from_bytes(struct.pack("<f", value), "little")
    except OverflowError:
        single = None
    if kind == "f64":
        return int.from_bytes(struct.pack("<d", value), "little")
    if single is None:
        return list_specials(kind)[4]
    return single >> 16 if kind == "bf16" else single


def list_specials(kind: str) -> list[int]:
    """Return 0, smallest and largest subnormal, smallest normal, infinity, largest, and four NaNs."""
    exponent, mantissa = LAYOUT[kind]
    infinity = ((1 << exponent) - 1) << mantissa
    quiet = 1 << (mantissa - 1)
    return [
        0, 1, (1 << mantissa) - 1, 1 << mantissa, infinity, infinity - 1,
        infinity | quiet, infinity | quiet | 0x2D, infinity | 1, infinity | (1 << mantissa) - 1,
    ]  # fmt: skip


def make_random_bits(count: int, nbytes: int) -> list[int]:
    """Return random bits from a linear congruential generator, the same on every machine."""
    state, out = 12345, []
    for _ in range(count):
        value = 0
        for _ in range(nbytes):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            value = value << 8 | state >> 56
        out.append(value)
    return out


def list_edge_operands(kind: str) -> list[int]:
    """Return the operands of one-operand instructions."""
    size = BYTES[kind]
    sign = 1 << (8 * size - 1)
    if kind in LAYOUT:
        positive = list(dict.fromkeys([*list_specials(kind), *(encode_float(v, kind) for v in _VALUES)]))
        return [*positive, *(p | sign for p in positive), *make_random_bits(24, size)]
    maximum = 2 * sign - 1
    boundaries = [
        v
        for e in (0, 7, 8, 15, 16, 24, 31, 32, 53, 63)
        if e < 8 * size
        for v in ((1 << e) - 1, 1 << e, (1 << e) + 1)
    ]
    boundaries += [sign - 1, sign, sign + 1, maximum, maximum - 1, 100]
    boundaries += [v & maximum for v in (65519, 65520, 16777217, 33554435)]
    return [*dict.fromkeys([*boundaries, *(-v & maximum for v in boundaries)]), *make_random_bits(16, size)]


def list_few_operands(kind: str, count: int) -> list[int]:
    """Return operands for instructions with several operands: special values, 1, 3 and -2."""
    exponent, mantissa = LAYOUT[kind]
    zero, tiny, subnormal, normal, infinity, largest, quiet, payload, signalling, ones = list_specials(kind)
    sign = 1 << (exponent + mantissa)
    one, three, minus_two = (encode_float(v, kind) for v in (1.0, 3.0, -2.0))
    ordered = [one, payload, infinity, zero, minus_two, infinity | sign, largest, signalling | sign]
    ordered += [zero | sign, tiny, quiet | sign, ones, three, normal | sign, subnormal]
    return ordered[:count]


@dataclass(frozen=True)
class Case:
    """One instruction. `text` uses %x0, %x1, %x2 (operands), %y0 (result), %a0 (address of the result).

    `operand_types` and `result_type` are PTX types; `approximate` means that the PTX manual allows an error.
    """

    name: str
    text: str
    operand_types: tuple[str, ...]
    result_type: str
    approximate: bool = False

    def operands(self) -> list[tuple[int, ...]]:
        """Return every thread's operands as bits, padded to a multiple of 32 threads."""
        kinds = self.operand_types
        if len(kinds) == 1 and kinds[0] in ("f16x2", "bf16x2"):
            values = list_edge_operands(kinds[0][:-2])
            rows = [(a | b << 16,) for a, b in zip(values, values[::-1], strict=True)]
        elif len(kinds) == 1:
            rows = [(a,) for a in list_edge_operands(kinds[0])]
        elif kinds[0] in ("f16x2", "bf16x2"):
            values = list_few_operands(kinds[0][:-2], 12 if len(kinds) == 2 else 6)
            rows = [()]
            for _ in kinds:
                rows = [
                    (*row, a | b << 16) for row in rows for a, b in zip(values, values[::-1], strict=True)
                ]
        else:
            rows = [()]
            for kind in kinds:
                values = list_few_operands(kind, 15 if len(kinds) == 2 else 6)
                rows = [(*row, a) for row in rows for a in values]
        return rows + [rows[0]] * (-len(rows) % BLOCK)

    def ptx(self) -> str:
        """Return a kernel that writes results to array 0 and reads operands from arrays 1..."""
        widths = [BYTES[self.result_type], *(BYTES[t] for t in self.operand_types)]
        names = ["%y0", *(f"%x{k}" for k in range(len(self.operand_types)))]
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


def make_unary(instruction: str, operand_types: str, result_type: str, approximate: bool = False) -> Case:
    return Case(instruction, f"{instruction} %y0, %x0;", (operand_types,), result_type, approximate)


def make_nary(instruction: str, kind: str, count: int, approximate: bool = False) -> Case:
    operands = ", ".join(f"%x{k}" for k in range(count))
    return Case(instruction, f"{instruction} %y0, {operands};", (kind,) * count, kind, approximate)


def make_conversions() -> list[Case]:
    out = []
    for source_type in FLOATS:
        for target_type in INTEGERS:
            if source_type == "bf16" and BYTES[target_type] == 1:  # missing in PTX
                continue
            for mode in ("rni", "rzi", "rmi", "rpi"):
                out.append(make_unary(f"cvt.{mode}.{target_type}.{source_type}", source_type, target_type))
            if source_type == "f32":
                out.append(make_unary(f"cvt.rzi.ftz.{target_type}.f32", source_type, target_type))
                out.append(make_unary(f"cvt.rni.sat.{target_type}.f32", source_type, target_type))
    for source_type in INTEGERS:
        for target_type in FLOATS:
            for mode in (
                ("rn", "rz", "rm", "rp")
                if target_type in ("f32", "f64") or source_type[1:] in ("32", "64")
                else ("rn",)
            ):
                if target_type != "bf16" or (mode == "rn" and BYTES[source_type] > 1):
                    out.append(
                        make_unary(f"cvt.{mode}.{target_type}.{source_type}", source_type, target_type)
                    )
        for target_type in INTEGERS:
            narrower = BYTES[target_type] < BYTES[source_type] or (
                BYTES[target_type] == BYTES[source_type] and target_type != source_type
            )
            if narrower or (source_type[0] == "s" and target_type[0] == "u"):
                out.append(make_unary(f"cvt.sat.{target_type}.{source_type}", source_type, target_type))
    for kind in ("f16", "f32", "f64"):
        for mode in ("rni", "rzi", "rmi", "rpi"):
            out.append(make_unary(f"cvt.{mode}.{kind}.{kind}", kind, kind))
    for source_type, target_type in (("f32", "f16"), ("f64", "f16"), ("f64", "f32")):
        for mode in ("rn", "rz", "rm", "rp"):
            out.append(make_unary(f"cvt.{mode}.{target_type}.{source_type}", source_type, target_type))
    out += [make_unary(f"cvt.{target_type}.{source_type}", source_type, target_type) for source_type, target_type in (
        ("f16", "f32"), ("f16", "f64"), ("bf16", "f32"), ("bf16", "f64"), ("f32", "f64"))]  # fmt: skip
    out += [make_unary(f"cvt.{mods}.{target_type}.{source_type}", source_type, target_type) for mods, source_type, target_type in (
        ("ftz", "f32", "f64"), ("rn.ftz", "f64", "f32"), ("rn.sat", "f64", "f32"), ("sat", "f32", "f32"),
        ("ftz", "f32", "f32"), ("ftz.sat", "f32", "f32"), ("sat", "f64", "f64"), ("sat", "f16", "f16"),
        ("rn.ftz", "f32", "f16"), ("rn.sat", "f32", "f16"), ("rn.sat", "f64", "f16"), ("ftz.sat", "f16", "f32"),
        ("sat", "f16", "f32"), ("ftz", "f16", "f32"), ("sat", "f16", "f64"), ("sat", "f32", "f64"),
        ("rn.relu", "f32", "f16"), ("rz.relu", "f32", "f16"), ("rn", "f32", "bf16"), ("rz", "f32", "bf16"),
        ("rn.relu", "f32", "bf16"), ("rz.relu", "f32", "bf16"), ("rn", "f64", "bf16"), ("rn", "f16", "bf16"),
        ("rn", "bf16", "f16"), ("rna", "f32", "tf32"), ("rn", "f32", "tf32"), ("rz", "f32", "tf32"),
        ("rn.relu", "f32", "tf32"), ("rna.satfinite", "f32", "tf32"))]  # fmt: skip
    for target_type in ("f16x2", "bf16x2"):
        for mods in ("rn", "rz", "rn.relu", "rz.relu"):
            name = f"cvt.{mods}.{target_type}.f32"
            out.append(Case(name, f"{name} %y0, %x0, %x1;", ("f32", "f32"), target_type))
    return out


def make_arithmetic() -> list[Case]:
    out = []
    for op in ("add", "sub", "mul"):
        for kind in ("f32", "f64", "f16", "f16x2", "bf16", "bf16x2"):
            out.append(make_nary(f"{op}.rn.{kind}", kind, 2))
        out.append(make_nary(f"{op}.rn.ftz.f32", "f32", 2))
        out.append(make_nary(f"{op}.rn.sat.f32", "f32", 2))
    for kind in ("f32", "f64", "f16", "f16x2", "bf16", "bf16x2"):
        out.append(make_nary(f"fma.rn.{kind}", kind, 3))
        if "16" in kind:
            out.append(make_nary(f"fma.rn.relu.{kind}", kind, 3))
        for op in ("min", "max"):
            out.append(make_nary(f"{op}.{kind}", kind, 2))
            if kind != "f64":
                out.append(make_nary(f"{op}.NaN.{kind}", kind, 2))
        for op in ("abs", "neg"):
            out.append(make_unary(f"{op}.{kind}", kind, kind))
    out += [make_nary(name, "f32", 3) for name in ("fma.rn.ftz.f32", "fma.rn.sat.f32", "fma.rn.ftz.sat.f32")]
    out += [make_nary(name, "f32", 2) for name in ("min.ftz.f32", "max.ftz.f32")]
    out += [make_unary(f"{op}.ftz.f32", "f32", "f32") for op in ("abs", "neg")]
    out += [make_nary("copysign.f32", "f32", 2), make_nary("copysign.f64", "f64", 2)]
    out += [make_nary(f"div.rn.{k}", k, 2) for k in ("f32", "f64")] + [make_nary("div.rn.ftz.f32", "f32", 2)]
    out += [make_nary(f"div.{m}.f32", "f32", 2, True) for m in ("full", "full.ftz", "approx", "approx.ftz")]
    out += [make_unary(f"{op}.rn.{k}", k, k) for op in ("sqrt", "rcp") for k in ("f32", "f64")]
    out += [make_unary(f"{op}.rn.ftz.f32", "f32", "f32") for op in ("sqrt", "rcp")]
    for op in ("sqrt", "rcp", "rsqrt", "ex2", "lg2", "sin", "cos"):
        out += [make_unary(f"{op}.approx{ftz}.f32", "f32", "f32", True) for ftz in ("", ".ftz")]
    out.append(make_unary("tanh.approx.f32", "f32", "f32", True))
    out += [make_unary(f"{op}.approx.{k}", k, k, True) for op in ("ex2", "tanh") for k in ("f16", "f16x2")]
    out += [make_unary(f"ex2.approx.ftz.{k}", k, k, True) for k in ("bf16", "bf16x2")]
    out += [make_unary(f"tanh.approx.{k}", k, k, True) for k in ("bf16", "bf16x2")]
    out += [
        make_unary("rsqrt.approx.f64", "f64", "f64", True),
        make_unary("rcp.approx.ftz.f64", "f64", "f64", True),
    ]
    return out


def make_memory_and_mma() -> list[Case]:
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


CASES = [*make_conversions(), *make_arithmetic(), *make_memory_and_mma()]


def pack(values: list[int], kind: str) -> bytes:
    return b"".join(v.to_bytes(BYTES[kind], "little") for v in values)


def pack_operands(case: Case) -> list[bytes]:
    """Return the operand arrays of a case."""
    rows = case.operands()
    return [pack([row[k] for row in rows], kind) for k, kind in enumerate(case.operand_types)]


def compute_digest() -> int:
    """Return a checksum of all instructions and operands; results are comparable only if it is equal."""
    total = 0
    for case in CASES:
        total = zlib.crc32(b"".join([case.ptx().encode(), *pack_operands(case)]), total)
    return total


class Device(Cuda):
    """The first NVIDIA GPU."""

    def __init__(self):
        super().__init__()
        self("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(device), 0)
        name = ctypes.create_string_buffer(256)
        self("cuDeviceGetName", name, 256, device)
        self.name = name.value.decode()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)

    def run(self, ptx: str, grid: int, block: int, data: list[bytes], output: int, make_first=None) -> bytes:
        """Launch kernel `k` with arrays of this data; return array number `output` after the launch.

        `make_first` receives the addresses of the arrays and returns the bytes of a parameter before them.
        """
        function = self.get_function(ptx.encode(), b"k")
        buffers = [self.upload(ctypes.create_string_buffer(array, len(array))) for array in data]
        parameters: list = [*buffers]
        if make_first:
            first = make_first(self, buffers)
            parameters.insert(0, ctypes.create_string_buffer(first, len(first)))
        pointers = (ctypes.c_void_p * len(parameters))(*(ctypes.addressof(p) for p in parameters))
        self("cuLaunchKernel", function, grid, 1, 1, block, 1, 1, 0, None, pointers, None)
        out = bytes(self.download(buffers[output], ctypes.c_uint8, len(data[output])))
        for buffer in buffers:
            self("cuMemFree_v2", buffer)
        return out


def run(device: Device, case: Case) -> str:
    """Return a case's result array in hex; raise DriverError if a call fails."""
    count = len(case.operands())
    data = [bytes(count * BYTES[case.result_type]), *pack_operands(case)]
    return device.run(case.ptx(), count // BLOCK, BLOCK, data, 0).hex()


def measure(description: str | None, cases, digest: int, run) -> None:
    """Run every case on the GPU and write the results to the file that the command line names."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    out = parser.parse_args().out
    report: dict = {"device": "", "digest": digest, "errors": {}, "results": {}}
    if out.exists():  # a GPU error ends the process; the next one continues
        report = json.loads(out.read_text())
    results, errors = report["results"], report["errors"]
    device, is_context_lost = Device(), False
    for case in cases:
        if case.name in {**results, **errors}:
            continue
        try:
            results[case.name] = run(device, case)
        except DriverError as error:
            errors[case.name] = str(error)
            is_context_lost = error.code in (700, 715, 716, 717, 718, 719)  # the context is lost
            if is_context_lost:
                break
    report["device"] = device.name
    out.write_text(json.dumps(report, indent=0) + "\n")
    print(f"{device.name}: {len(results)} kernels, {len(errors)} refused; wrote {out}", flush=True)
    if is_context_lost:
        os.execv(sys.executable, [sys.executable, *sys.argv])


if __name__ == "__main__":
    measure(__doc__, CASES, compute_digest(), run)
