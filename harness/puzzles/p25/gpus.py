"""The ring on several GPUs of one host, beside one GPU and beside PyTorch's context parallel.

    torchrun --standalone --nproc-per-node 2 -m harness.puzzles.p25.gpus --json ring.json

The ring is the solution's; its blocks are computed by PyTorch's own flash attention, which hands out the log-sum-exp. Causal,
bfloat16, zig-zag. Times are forward and backward together, by CUDA events, the median of several runs after a warm-up; all ranks start a
run together, and the slowest counts. MAX is not needed.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.check.python_files import load
from harness.puzzles.p25 import layout
from harness.toolchain import roots

LENGTHS = (16384, 32768, 65536, 131072)
HEADS = 16
ALIKE = 2.0**-5
"""How far two computations in bfloat16 may be apart, of the largest element: a few units in its last place."""


# ---- Blocks -------------------------------------------------------------------------------------------------


def flash_ring() -> dict[str, Any]:
    """The solution's functions, with PyTorch's flash attention in the two that compute a block."""
    module = load(roots.solutions() / "p25" / "in_torch.py")
    outputs: dict[tuple[int, int], torch.Tensor] = {}
    others: dict[tuple, tuple] = {}
    whole = module["ring_backward"]

    def ring_backward(dO, q, k, v, out, lse, length, scale, causal, balanced, group):
        """PyTorch's backward makes delta itself, of the output: that of each range is laid out for it."""
        mine = module["chunks"](dist.get_rank(group), dist.get_world_size(group), length, balanced)
        for queries, rows in zip(mine, module["slices"](mine), strict=True):
            outputs[queries] = out[:, :, rows]
        try:
            return whole(dO, q, k, v, out, lse, length, scale, causal, balanced, group)
        finally:
            outputs.clear()

    def block_backward(dO, q, k, v, lse, delta, queries, keys, scale, causal):
        return flash_backward(
            dO, q, k, v, outputs[queries], lse, others[queries, keys], scale, causal and queries == keys
        )

    def block_forward(q, k, v, queries, keys, scale, causal):
        out, lse, others[queries, keys] = flash_forward(q, k, v, scale, causal and queries == keys)
        return out, lse

    module.update(ring_backward=ring_backward, block_backward=block_backward, block_forward=block_forward)
    return module


def flash_forward(q, k, v, scale: float, diagonal: bool) -> tuple[torch.Tensor, torch.Tensor, tuple]:
    """out [B, N, s, d] and lse [B, N, s] of a block that is seen whole, or up to its diagonal; what else backward takes."""
    flash = (
        torch.ops.aten._scaled_dot_product_flash_attention
        if q.is_cuda
        else torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    )
    out, lse, *others = flash(q, k, v, 0.0, diagonal, scale=scale)
    return out, lse, tuple(others[:6])


def flash_backward(
    dO, q, k, v, out, lse, others: tuple, scale: float, diagonal: bool
) -> tuple[torch.Tensor, ...]:
    """What a block adds to dQ, dK and dV, from the output and lse of all keys."""
    if not q.is_cuda:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(dO, q, k, v, out, lse.contiguous(), 0.0, diagonal, scale=scale)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    before, behind = others[:4], others[4:]  # lengths of packed sequences; the state of dropout
    return backward(dO, q, k, v, out, lse.contiguous(), *before, 0.0, diagonal, *behind, scale=scale)


# ---- Candidates ---------------------------------------------------------------------------------------------


class Problem:
    """One size: the whole tensors on every rank, [1, HEADS, S, d], alike on all, and this rank's zig-zag part of them."""

    def __init__(self, length: int, d: int, rank: int, size: int, device: torch.device, dtype: torch.dtype):
        generator = torch.Generator(device).manual_seed(length + d)
        shape = (1, HEADS, length, d)
        self.whole = [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(4)]
        self.scale = d**-0.5
        places = torch.from_numpy(layout.places(rank, size, length, True)).to(device)
        self.places = places
        self.part = [tensor[:, :, places].contiguous() for tensor in self.whole]


def one_device(problem: Problem, backend: SDPBackend) -> Callable[[], list[torch.Tensor]]:
    """scaled_dot_product_attention over the whole sequence."""
    q, k, v = (tensor.detach().requires_grad_() for tensor in problem.whole[:3])

    def run() -> list[torch.Tensor]:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return [out.detach(), *torch.autograd.grad(out, (q, k, v), problem.whole[3])]

    return run


def ring(problem: Problem, module: dict[str, Any]) -> Callable[[], list[torch.Tensor]]:
    """The ring over all ranks."""
    leaves, grad = [tensor.detach().requires_grad_() for tensor in problem.part[:3]], problem.part[3]
    length, group = problem.whole[0].shape[2], dist.group.WORLD

    def run() -> list[torch.Tensor]:
        out = module["RingAttention"].apply(*leaves, length, problem.scale, True, True, group)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    return run


def time_context_parallel(problem: Problem, backend: SDPBackend, rotation: str, runs: int) -> float:
    """Milliseconds of PyTorch's context parallel, whose buffers are the rank's only inside of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(rotation)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    buffers = [tensor.clone() for tensor in problem.whole]
    with sdpa_kernel(backend), context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
        q, k, v = (tensor.detach().requires_grad_() for tensor in buffers[:3])

        def run() -> list[torch.Tensor]:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return [out, *torch.autograd.grad(out, (q, k, v), buffers[3])]

        return milliseconds(run, runs)


def milliseconds(run: Callable[[], object], runs: int, everybody: bool = True) -> float:
    """The median of several runs; of each the slowest rank's time, where everybody takes part."""
    times = []
    for number in range(runs + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if everybody:
            dist.barrier()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if number >= 3:
            times.append(start.elapsed_time(end))
    slowest = torch.tensor(times, device="cuda")
    if everybody:
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def apart(problem: Problem, got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference of a ring's part from one device's whole, relative to the largest element."""
    worst = 0.0
    for one, other in zip(got, expected, strict=True):
        other = other[:, :, problem.places].float()
        worst = max(worst, float((one.float() - other).abs().max() / other.abs().max()))
    return worst


# ---- The run ------------------------------------------------------------------------------------------------


def measure(problem: Problem, module: dict[str, Any], runs: int) -> dict[str, Any]:
    """Times by candidate, and how far the ring is from one device; a candidate that fails has its words in place of a time."""
    flash, cudnn = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
    candidates: dict[str, Callable[[], float]] = {
        "one GPU, flash": lambda: milliseconds(one_device(problem, flash), runs),
        "one GPU, cuDNN": lambda: milliseconds(one_device(problem, cudnn), runs),
        "ring, flash blocks": lambda: milliseconds(ring(problem, module), runs),
        **{
            f"context parallel, {name}, {rotation}": lambda backend=backend, rotation=rotation: (
                time_context_parallel(problem, backend, rotation, runs)
            )
            for name, backend in (("flash", flash), ("cuDNN", cudnn))
            for rotation in ("allgather", "alltoall")
        },
    }
    found: dict[str, Any] = {}
    expected = one_device(problem, flash)()
    found["apart"] = apart(problem, ring(problem, module)(), expected)
    del expected
    for name, candidate in candidates.items():
        try:
            found[name] = candidate()
        except Exception as error:  # a candidate that this PyTorch lacks is a line of the table
            found[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measures every size on the ranks that torchrun has started; rank 0 prints, and writes JSON. 1 where a ring is wrong."""
    made = argparse.ArgumentParser(prog="harness.puzzles.p25.gpus", description=main.__doc__)
    made.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    made.add_argument("--dims", type=int, nargs="+", default=(64, 128), help="elements of a head")
    made.add_argument("--runs", type=int, default=9)
    made.add_argument("--json", type=Path)
    flags = made.parse_args(arguments)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, size = dist.get_rank(), dist.get_world_size()
    module, rows, right = flash_ring(), [], True
    for d in flags.dims:
        for length in flags.lengths:
            problem = Problem(length, d, rank, size, device, torch.bfloat16)
            found = measure(problem, module, flags.runs)
            right = right and found["apart"] < ALIKE
            rows.append({"length": length, "d": d, "ranks": size, **found})
            if rank == 0:
                print(*lines(rows[-1]), sep="\n", flush=True)
            del problem
            torch.cuda.empty_cache()
    if rank == 0 and flags.json:
        facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "heads": HEADS, "batch": 1}
        flags.json.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n", encoding="utf-8")
    dist.destroy_process_group()
    return int(not right)


def lines(row: dict[str, Any]) -> list[str]:
    """A size: each candidate's time, and its throughput in percent of the ideal, one GPU's (flash) times the ranks."""
    base = row["one GPU, flash"]
    said = [
        f"S = {row['length']}, d = {row['d']}, {row['ranks']} ranks; ring and one GPU apart by {row['apart']:.1e}"
    ]
    for name, value in row.items():
        if name in ("length", "d", "ranks", "apart"):
            continue
        if isinstance(value, str):
            said.append(f"   {name:<38} {value}")
            continue
        ideal = 1 if name.startswith("one GPU") else row["ranks"]
        share = (
            f"{base / value:6.2f}x, {base / value / ideal:4.0%} of the ideal"
            if isinstance(base, float)
            else ""
        )
        said.append(f"   {name:<38} {value:9.3f} ms {share}")
    return said


if __name__ == "__main__":
    sys.exit(main())
