"""Measures the virtual GPU: `python -m book.measure.virtual_speed`. All checks on, after compilation.

What is measured: all kernels of puzzle 22 (unfused and fused, forward and backward) at the chapter's size and at a
larger one, the tiled matmul of the unfused path at B=2, S=64, H=64, O=128, and a 256 x 256 x 256 tiled matmul.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from harness.check.reference import Reference
from harness.devices.recorder import Recording, record
from harness.devices.replay import Replay, pointer
from harness.puzzles.p22.spec import PUZZLE
from harness.spec.puzzle import Case
from harness.toolchain import roots
from harness.vgpu import Checks, VirtualGPU

SIZES = [PUZZLE.dims, (2, 16, 32, 48)]


def puzzle(
    recording: Recording, dtype: str, dims: tuple[int, ...], checks: Checks
) -> tuple[float, VirtualGPU]:
    """Every launch of every variant at one size: seconds, and the device with its counters and findings."""
    case = Case("speed", "", dims, "hard")
    inputs = Reference(PUZZLE, dtype, 0).inputs(case)
    start = time.perf_counter()
    replay = Replay(recording, PUZZLE, dtype, checks=checks)
    for variant in PUZZLE.default_variants:
        replay.run(variant, case, inputs)
    return time.perf_counter() - start, replay.gpu


def matmul(recording: Recording, m: int, k: int, n: int, checks: Checks) -> tuple[float, float, VirtualGPU]:
    """Random float32 a [m, k] @ b [k, n] with the puzzle's tiled kernel: seconds, largest error, the device."""
    replay = Replay(recording, PUZZLE, "float32", checks=checks)
    gpu = replay.gpu
    launch = next(launch for launch in recording.launches() if launch.name == "matmul")
    rng = np.random.default_rng(0)
    a, b = rng.random((m, k), np.float32), rng.random((k, n), np.float32)
    out, *factors = (
        gpu.allocate(size * 4, name) for name, size in (("out", m * n), ("a", m * k), ("b", k * n))
    )
    for address, values in zip(factors, (a, b), strict=True):
        gpu.write(address, values)
    arguments = [*map(pointer, (out, *factors)), *(np.int32(size).tobytes() for size in (m, n, k))]
    start = time.perf_counter()
    grid = (-(-m // 16), -(-n // 16), 1)
    gpu.launch(replay.kernel(launch.symbol), grid, launch.block, arguments, name="matmul")
    seconds = time.perf_counter() - start
    got = gpu.read(out, m * n * 4).view(np.float32).reshape(m, n)
    return seconds, float(np.abs(got - a.astype(np.float64) @ b).max()), gpu


def main(argv: list[str] | None = None) -> int:
    """Print the measurements. Returns 1 if a kernel had a finding."""
    parser = argparse.ArgumentParser(
        prog="python -m book.measure.virtual_speed",
        description="Measure the virtual GPU on the puzzle's kernels.",
    )
    parser.add_argument(
        "--no-checks", action="store_true", help="switch the optional checks and counters off"
    )
    parser.add_argument(
        "--repeat", type=int, default=3, metavar="N", help="show the best of N runs (default 3)"
    )
    options = parser.parse_args(argv)
    checks = Checks(False, False, False) if options.no_checks else Checks()
    package = roots.op_package(roots.solutions(), PUZZLE.name)
    start = time.perf_counter()
    recordings = {dtype: record(package, PUZZLE.name, dtype, SIZES) for dtype in ("float32", "bfloat16")}
    print(f"compiling and recording the kernels (not counted below): {time.perf_counter() - start:.1f} s")
    bad = 0

    def show(title: str, target: str, work):
        nonlocal bad
        seconds, *_, gpu = min((work() for _ in range(options.repeat)), key=lambda run: run[0])
        bad += sum(f.is_error for f in gpu.findings)
        lanes = sum(launch.counters.instructions for launch in gpu.launches) / 1e6
        print(
            f"{title:58} {seconds:7.3f} s  target {target:6} {lanes:7.2f} M thread instructions,"
            f" {lanes / seconds:.0f} M/s"
        )

    for dtype, dims, target in (
        ("float32", SIZES[0], "1 s"), ("bfloat16", SIZES[0], "-"), ("float32", SIZES[1], "-"),
    ):  # fmt: skip
        sizes = "B={} S={} H={} O={}".format(*dims)
        show(
            f"puzzle 22, all kernels, {sizes}, {dtype}",
            target,
            lambda dtype=dtype, dims=dims: puzzle(recordings[dtype], dtype, dims, checks),
        )
    floats = recordings["float32"]
    show("tiled matmul M=128 K=64 N=128", "0.5 s", lambda: matmul(floats, 128, 64, 128, checks))
    show("tiled matmul M=256 K=256 N=256", "5 s", lambda: matmul(floats, 256, 256, 256, checks))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
