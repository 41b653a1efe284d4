"""Measures the virtual GPU: `python -m harness.vgpu.speed`. All checks on, after compilation.

What is measured: all kernels of puzzle 22 (unfused and fused, forward and backward) at the chapter's size and at a
larger one, the tiled matmul of the unfused path at B=2, S=64, H=64, O=128, and a 256 x 256 x 256 tiled matmul. The
launches are recorded by speed_kernels.mojo and replayed here.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .machine import Checks, Kernel, VirtualGPU

ROOT = Path(__file__).resolve().parents[2]
RECORDER = Path(__file__).with_name("speed_kernels.mojo")


@dataclass
class Case:
    """The recorded launches of one variant: `events` are ("tensor", name, address, bytes) or ("launch", name, kernel,
    grid, block, argument bytes) in order."""

    variant: str
    dtype: str
    sizes: tuple[int, int, int, int]  # B, S, H, O
    events: list[tuple] = field(default_factory=list)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that have one of their own (scratch memory has none)."""
        B, S, H, O = self.sizes
        rows = B * S
        out = {name: (H,) for name in ("gamma", "beta", "dgamma", "dbeta")}
        out |= {"x": (rows, H), "dx": (rows, H), "W": (O, H), "dW": (O, H), "bias": (O,), "db": (O,)}
        return out | {"dy": (rows, O), "output": (rows, O), "mean": (rows,), "rstd": (rows,)}

    def inputs(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Random float64 values, x with a mean far from 0."""
        rng = np.random.default_rng(seed)
        shapes = self.shapes()
        return {
            n: rng.normal(3.0 if n == "x" else 0.5, 1.0, shapes[n])
            for n in ("x", "gamma", "beta", "W", "bias", "dy")
        }


@dataclass
class Recording:
    """All cases, and the PTX of every kernel by its symbol."""

    cases: list[Case]
    ptx: dict[str, str]

    def case(self, variant: str, dtype: str, *sizes: int) -> Case:
        """The recorded case."""
        return next(c for c in self.cases if (c.variant, c.dtype, c.sizes) == (variant, dtype, sizes))


def record() -> str:
    """Run the recorder with the Mojo compiler. Raises RuntimeError."""
    mojo = shutil.which("mojo") or str(Path(sys.executable).parent / "mojo")
    command = [mojo, "run", "-g1", "--target-accelerator", "sm_90a", "-I", str(ROOT / "solutions" / "p22")]
    done = subprocess.run([*command, str(RECORDER)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the Mojo compiler failed:\n{done.stderr}")
    return done.stdout


def parse(text: str) -> Recording:
    """Read what the recorder prints."""
    cases: list[Case] = []
    ptx: dict[str, list[str]] = {}
    body: list[str] = []
    for line in text.splitlines():
        if not line.startswith("//@ "):
            body.append(line)
            continue
        what, *words = line[4:].split()
        if what == "ptx":
            body = ptx[words[0]] = []
        elif what == "case":
            cases.append(Case(words[0], words[1], tuple(map(int, words[2:]))))
        elif what == "tensor":
            cases[-1].events.append(("tensor", words[0], int(words[1]), int(words[2])))
        elif what == "launch":
            geometry = tuple(map(int, words[2:8]))
            args = [bytes.fromhex(w) for w in words[8:]]
            cases[-1].events.append(("launch", words[0], words[1], geometry[:3], geometry[3:], args))
    return Recording(cases, {name: "\n".join(lines) for name, lines in ptx.items()})


def to_device(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values as the device stores them: float32, or the bits of bfloat16 rounded to nearest even."""
    values = values.astype(np.float32)
    if dtype != "bfloat16":
        return values
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


class Replay:
    """A virtual GPU that replays recorded launches with real tensors."""

    def __init__(self, recording: Recording, **options):
        self.gpu = VirtualGPU(**options)
        self.recording = recording
        self.kernels: dict[str, Kernel] = {}
        self.tensors: dict[str, tuple[int, int]] = {}

    def kernel(self, symbol: str) -> Kernel:
        """A kernel, loaded when first used."""
        if symbol not in self.kernels:
            self.kernels[symbol] = self.gpu.load(self.recording.ptx[symbol]).kernels[symbol]
        return self.kernels[symbol]

    def run(self, case: Case, skip: tuple[str, ...] = ()) -> None:
        """Upload the case's inputs and run its launches, but for those named in `skip`."""
        inputs, shapes = case.inputs(), case.shapes()
        real: dict[bytes, bytes] = {}
        for event in case.events:
            if event[0] == "tensor":
                _, name, made_up, nbytes = event
                address = self.gpu.allocate(nbytes, name)
                if name in shapes:
                    wide = nbytes // max(int(np.prod(shapes[name])), 1)
                    self.gpu.name(address, nbytes, name, shapes[name], {2: "bfloat16", 4: "float32"}[wide])
                self.tensors[name] = address, nbytes
                real[made_up.to_bytes(8, "little")] = address.to_bytes(8, "little")
                if name in inputs:
                    self.gpu.write(address, to_device(inputs[name], case.dtype))
            elif event[1] not in skip:
                _, name, symbol, grid, block, args = event
                self.gpu.launch(self.kernel(symbol), grid, block, [real.get(a, a) for a in args], name=name)

    def get(self, name: str, case: Case) -> np.ndarray:
        """A result as float32."""
        address, nbytes = self.tensors[name]
        raw, shape = self.gpu.read(address, nbytes), case.shapes()[name]
        if nbytes == 2 * int(np.prod(shape)):
            raw = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.uint8)
        return raw.view(np.float32).reshape(shape)

    def matmul(self, m: int, k: int, n: int):
        """Random float32 a [m, k] @ b [k, n] with the puzzle's tiled kernel: (seconds, largest error)."""
        launch = next(e for e in self.recording.cases[0].events if e[0] == "launch" and e[1] == "matmul")
        rng = np.random.default_rng(0)
        a, b = rng.random((m, k), np.float32), rng.random((k, n), np.float32)
        at = [
            self.gpu.allocate(size * 4, name) for name, size in (("out", m * n), ("a", m * k), ("b", k * n))
        ]
        self.gpu.write(at[1], a)
        self.gpu.write(at[2], b)
        kernel = self.kernel(launch[2])
        args = [*(x.to_bytes(8, "little") for x in at), *(np.int32(v).tobytes() for v in (m, n, k))]
        start = time.perf_counter()
        self.gpu.launch(kernel, (-(-m // 16), -(-n // 16), 1), (16, 16, 1), args, name="matmul")
        seconds = time.perf_counter() - start
        got = self.gpu.read(at[0], m * n * 4).view(np.float32).reshape(m, n)
        return seconds, float(np.abs(got - a.astype(np.float64) @ b).max())


def main(argv: list[str] | None = None) -> int:
    """Print the measurements. Returns 1 if a kernel had a finding."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.vgpu.speed", description="Measure the virtual GPU on the puzzle's kernels."
    )
    parser.add_argument(
        "--no-checks", action="store_true", help="switch the optional checks and counters off"
    )
    parser.add_argument(
        "--repeat", type=int, default=3, metavar="N", help="show the best of N runs (default 3)"
    )
    options = parser.parse_args(argv)
    checks = Checks(False, False, False) if options.no_checks else Checks()
    start = time.perf_counter()
    recording = parse(record())
    print(f"compiling and recording the kernels (not counted below): {time.perf_counter() - start:.1f} s")
    bad = 0

    def show(title: str, target: str, work):
        nonlocal bad
        best, gpu = min((work() for _ in range(options.repeat)), key=lambda r: r[0])
        bad += sum(f.is_error for f in gpu.findings)
        lanes = sum(launch.counters.instructions for launch in gpu.launches) / 1e6
        print(
            f"{title:58} {best:7.3f} s  target {target:6} {lanes:7.2f} M thread instructions, {lanes / best:.0f} M/s"
        )

    def puzzle(dtype: str, *sizes: int):
        start = time.perf_counter()
        replay = Replay(recording, checks=checks)
        for variant in ("unfused", "fused"):
            replay.run(recording.case(variant, dtype, *sizes))
        return time.perf_counter() - start, replay.gpu

    def matmul(*sizes: int):
        replay = Replay(recording, checks=checks)
        return replay.matmul(*sizes)[0], replay.gpu

    show("puzzle 22, all kernels, B=4 S=4 H=8 O=16, float32", "1 s", lambda: puzzle("float32", 4, 4, 8, 16))
    show("puzzle 22, all kernels, B=4 S=4 H=8 O=16, bfloat16", "-", lambda: puzzle("bfloat16", 4, 4, 8, 16))
    show("puzzle 22, all kernels, B=2 S=16 H=32 O=48, float32", "-", lambda: puzzle("float32", 2, 16, 32, 48))
    show("tiled matmul M=128 K=64 N=128", "0.5 s", lambda: matmul(128, 64, 128))
    show("tiled matmul M=256 K=256 N=256", "5 s", lambda: matmul(256, 256, 256))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
