"""Measures the virtual GPU: `python -m harness.vgpu.speed`. All checks on, after compilation.

Three figures: all kernels of puzzle 22 (unfused and fused, forward and backward) at the chapter's size and at larger
ones, the tiled matmul of the unfused path at B=2, S=64, H=64, O=128, and a 256 x 256 x 256 tiled matmul.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .machine import Checks, Kernel, VirtualGPU

ROOT = Path(__file__).resolve().parents[2]
TILE, ROW_THREADS, COLUMN_TILE = 16, 128, 32
EPS = 1e-5


def puzzle_ptx() -> dict[str, str]:
    """ "NAME:DTYPE" -> PTX of the solution's kernels, by one run of the Mojo compiler. Raises RuntimeError."""
    mojo = shutil.which("mojo") or str(Path(sys.executable).parent / "mojo")
    source = Path(__file__).with_name("speed_kernels.mojo")
    done = subprocess.run(
        [mojo, "run", "-g1", "-I", str(ROOT / "solutions" / "p22"), str(source)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"the Mojo compiler failed:\n{done.stderr}")
    parts = (part.partition("\n") for part in done.stdout.split("//==")[1:])
    return {name.strip(): ptx for name, _, ptx in parts}


@dataclass
class Sizes:
    """Batch, sequence length, hidden and output dimension."""

    B: int
    S: int
    H: int
    O: int


class Puzzle:
    """Puzzle 22 on one virtual GPU: uploads a case, runs the launches of a variant, gives the results back."""

    def __init__(self, ptx: dict[str, str], sizes: Sizes, dtype: str = "float32", **options):
        self.gpu = VirtualGPU(**options)
        self.sizes, self.dtype = sizes, dtype
        self.kernels: dict[str, Kernel] = {}
        for name, text in ptx.items():
            kernel, _, kind = name.partition(":")
            if kind == dtype:
                self.kernels[kernel] = next(iter(self.gpu.load(text).kernels.values()))
        self.tensors: dict[str, tuple[int, tuple[int, ...], str]] = {}

    def tensor(self, name: str, shape, accumulate: bool = False) -> int:
        """The address of a tensor, allocated when first named; `accumulate` ones are float32."""
        if name not in self.tensors:
            dtype = "float32" if accumulate else self.dtype
            nbytes = int(np.prod(shape)) * (4 if dtype == "float32" else 2)
            address = self.gpu.allocate(nbytes, name)
            self.gpu.name(address, nbytes, name, shape, dtype)
            self.tensors[name] = address, tuple(shape), dtype
        return self.tensors[name][0]

    def put(self, name: str, values: np.ndarray) -> None:
        """Upload values (float) as a tensor."""
        address = self.tensor(name, values.shape)
        values = values.astype(np.float32)
        if self.dtype == "bfloat16":
            bits = values.view(np.uint32)
            values = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        self.gpu.write(address, values)

    def get(self, name: str) -> np.ndarray:
        """A tensor as float32."""
        address, shape, dtype = self.tensors[name]
        raw = self.gpu.read(address, int(np.prod(shape)) * (4 if dtype == "float32" else 2))
        if dtype == "bfloat16":
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
        return raw.view(np.float32).reshape(shape)

    def launch(self, kernel: str, grid, block, *args):
        """Integers are addresses, NumPy scalars are themselves."""
        raw = [a.to_bytes(8, "little") if isinstance(a, int) else a.tobytes() for a in args]
        triple = [(*t, 1, 1)[:3] for t in (grid, block)]
        return self.gpu.launch(self.kernels[kernel], *triple, raw, name=kernel)

    def forward(self, fused: bool) -> None:
        """Forward pass: `output`, `mean`, `rstd`."""
        z, i4 = self.sizes, np.int32
        rows, H, O = z.B * z.S, z.H, z.O
        x, gamma, beta = self.tensor("x", (rows, H)), self.tensor("gamma", (H,)), self.tensor("beta", (H,))
        W, bias = self.tensor("W", (O, H)), self.tensor("bias", (O,))
        y = self.tensor("output", (rows, O))
        mean, rstd = self.tensor("mean", (rows,), True), self.tensor("rstd", (rows,), True)
        if fused:
            sizes = [i4(v) for v in (z.B, z.S, H, O)]
            self.launch(
                "fused_forward",
                (z.B, z.S),
                (1,),
                y,
                mean,
                rstd,
                x,
                gamma,
                beta,
                W,
                bias,
                *sizes,
                np.float32(EPS),
            )
            return
        ln, Wt = self.tensor("ln_out", (rows, H)), self.tensor("W_t", (H, O))
        self.launch(
            "row_statistics", (-(-rows // 128),), (128,), mean, rstd, x, i4(rows), i4(H), np.float32(EPS)
        )
        self.launch("layernorm", (rows,), (128,), ln, x, mean, rstd, gamma, beta, i4(rows), i4(H))
        self.launch("transpose", (-(-O // TILE), -(-H // TILE)), (TILE, TILE), Wt, W, i4(O), i4(H))
        self.matmul(y, ln, Wt, rows, O, H)
        self.launch("add_bias", (rows,), (128,), y, bias, i4(rows), i4(O))

    def matmul(self, out: int, a: int, b: int, m: int, n: int, k: int):
        """out [m, n] = a [m, k] @ b [k, n]."""
        grid = (-(-m // TILE), -(-n // TILE))
        return self.launch("matmul", grid, (TILE, TILE), out, a, b, *(np.int32(v) for v in (m, n, k)))

    def backward(self, fused: bool) -> None:
        """Backward pass: `dx`, `dgamma`, `dbeta`, `dW`, `db`. Needs a forward pass before."""
        z, i4 = self.sizes, np.int32
        rows, H, O = z.B * z.S, z.H, z.O
        t = {name: self.tensors[name][0] for name in ("x", "mean", "rstd", "gamma", "beta", "W")}
        dy = self.tensor("dy", (rows, O))
        dx = self.tensor("dx", (rows, H))
        shapes = {"dgamma": (H,), "dbeta": (H,), "dW": (O, H), "db": (O,)}
        grads = [self.tensor(name, shape) for name, shape in shapes.items()]
        if fused:
            half = self.dtype != "float32"
            sums = [self.tensor(f"sum_{n}", s, True) for n, s in shapes.items()] if half else grads
            blocks = (-(-max(H, O, O * H) // 128),)
            self.launch("clear", blocks, (128,), *sums, i4(H), i4(O))
            rest = (t["x"], t["mean"], t["rstd"], t["gamma"], t["beta"], t["W"])
            sizes = [i4(v) for v in (z.B, z.S, H, O)]
            self.launch("fused_backward", (z.B, z.S), (1,), dx, *sums, dy, *rest, *sizes)
            if half:
                self.launch("convert", blocks, (128,), *grads, *sums, i4(H), i4(O))
            return
        ln, dln = self.tensor("ln_out", (rows, H)), self.tensor("dln", (rows, H))
        dyt, c = self.tensor("dy_t", (O, rows)), self.tensor("row_sums", (rows, 2), True)
        self.matmul(dln, dy, t["W"], rows, H, O)
        self.launch(
            "layernorm",
            (rows,),
            (128,),
            ln,
            t["x"],
            t["mean"],
            t["rstd"],
            t["gamma"],
            t["beta"],
            i4(rows),
            i4(H),
        )
        self.launch("transpose", (-(-rows // TILE), -(-O // TILE)), (TILE, TILE), dyt, dy, i4(rows), i4(O))
        self.matmul(grads[2], dyt, ln, O, H, rows)
        square = (COLUMN_TILE, COLUMN_TILE)
        self.launch("column_sums", (-(-O // COLUMN_TILE),), square, grads[3], dy, i4(rows), i4(O))
        stats = (t["x"], t["mean"], t["rstd"])
        self.launch("row_sums", (rows,), (128,), c, dln, *stats, t["gamma"], i4(rows), i4(H))
        self.launch("backward_input", (rows,), (128,), dx, c, dln, *stats, t["gamma"], i4(rows), i4(H))
        columns = (-(-H // COLUMN_TILE),)
        self.launch("backward_parameters", columns, square, *grads[:2], dln, *stats, i4(rows), i4(H))


def case(sizes: Sizes, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float64 inputs whose mean is far from 0."""
    rng = np.random.default_rng(seed)
    rows = sizes.B * sizes.S
    shapes = {
        "x": (rows, sizes.H),
        "gamma": (sizes.H,),
        "beta": (sizes.H,),
        "W": (sizes.O, sizes.H),
        "bias": (sizes.O,),
    }
    shapes["dy"] = (rows, sizes.O)
    return {name: rng.normal(3.0 if name == "x" else 0.5, 1.0, shape) for name, shape in shapes.items()}


def run_puzzle(ptx, sizes: Sizes, dtype: str = "float32", variants=(False, True), **options) -> Puzzle:
    """Forward and backward of both variants; the results of the last variant stay in the returned Puzzle."""
    puzzle = Puzzle(ptx, sizes, dtype, **options)
    for name, values in case(sizes).items():
        puzzle.put(name, values)
    for fused in variants:
        puzzle.forward(fused)
        puzzle.backward(fused)
    return puzzle


def main(argv: list[str] | None = None) -> int:
    """Print the measurements. Returns 1 if a kernel had a finding."""
    parser = argparse.ArgumentParser(prog="python -m harness.vgpu.speed", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--no-checks", action="store_true", help="switch the optional checks and counters off"
    )
    parser.add_argument(
        "--repeat", type=int, default=3, metavar="N", help="show the best of N runs (default 3)"
    )
    options = parser.parse_args(argv)
    checks = Checks(False, False, False) if options.no_checks else Checks()
    start = time.perf_counter()
    ptx = puzzle_ptx()
    print(f"compiling the kernels to PTX (not counted below): {time.perf_counter() - start:.1f} s")
    bad = 0

    def measure(title: str, target: str, work):
        nonlocal bad
        best, gpu = min((work() for _ in range(options.repeat)), key=lambda r: r[0])
        bad += sum(f.is_error for f in gpu.findings)
        lanes = sum(launch.counters.instructions for launch in gpu.launches)
        rate = lanes / best / 1e6
        print(
            f"{title:58} {best:7.3f} s  target {target:7}  {lanes / 1e6:8.2f} M thread instructions, {rate:.0f} M/s"
        )

    def puzzle_work(sizes: Sizes, dtype: str = "float32"):
        def work():
            start = time.perf_counter()
            p = run_puzzle(ptx, sizes, dtype, checks=checks)
            return time.perf_counter() - start, p.gpu

        return work

    def matmul_work(m: int, k: int, n: int):
        def work():
            p = Puzzle(ptx, Sizes(1, m, k, n), checks=checks)
            rng = np.random.default_rng(0)
            p.put("a", rng.random((m, k)))
            p.put("b", rng.random((k, n)))
            out = p.tensor("out", (m, n))
            start = time.perf_counter()
            p.matmul(out, p.tensors["a"][0], p.tensors["b"][0], m, n, k)
            return time.perf_counter() - start, p.gpu

        return work

    measure("puzzle 22, all kernels, B=4 S=4 H=8 O=16, float32", "1 s", puzzle_work(Sizes(4, 4, 8, 16)))
    measure(
        "puzzle 22, all kernels, B=4 S=4 H=8 O=16, bfloat16", "-", puzzle_work(Sizes(4, 4, 8, 16), "bfloat16")
    )
    measure("puzzle 22, all kernels, B=2 S=16 H=32 O=48, float32", "-", puzzle_work(Sizes(2, 16, 32, 48)))
    measure("tiled matmul M=128 K=64 N=128", "0.5 s", matmul_work(128, 64, 128))
    measure("tiled matmul M=256 K=256 N=256", "5 s", matmul_work(256, 256, 256))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
