"""The ring on the GPUs of one host, beside one GPU and beside PyTorch's context parallel, as a CSV that grows row by row.

    torchrun --standalone --nproc-per-node 4 -m book.measure.ring --csv ring.csv

bfloat16, one sequence, 16 heads, zig-zag where causal; forward and backward together. One command measures 1, 2, 4, ... of the ranks
that torchrun has started. Times are by CUDA events, behind an all-reduce that lets all ranks begin together; of each run
the slowest rank counts. The most telling sizes come first; when `--budget` seconds are over, the rest is left out, and said so.
The blocks of a ring, and "one GPU" with it, are `harness.nn`'s kernels; PyTorch's flash attention and cuDNN's
stand beside them on one GPU and in context parallel. `--device cpu` rehearses it all on gloo.
"""

import argparse
import datetime
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from book.measure.shared import write_to
from harness.nn import attention
from harness.nn import ring as layer
from harness.puzzles.p25 import layout

HEADS = 16
ALIKE = 2.0**-5
"""How far two computations in bfloat16 may be apart, of the largest element: a few units in its last place."""
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
OWN = "Mojo"
ONE, RING, BLOCKS, PARALLEL = "one GPU", "ring", "ring, blocks alone", "context parallel"
FIELDS = (
    *("dtype", "batch", "heads"),
    *("candidate", "kernels", "ranks", "length", "d", "causal"),
    *("ms", "fastest_ms", "slowest_ms", "runs", "tokens_per_s", "of_ideal", "bytes_a_rank", "apart", "note"),
)
LONG, MOST = 2500.0, 9
"""A first run of so many milliseconds is the only one; else it is not counted, and there are as many behind it at most."""
Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Job:
    """One row: a candidate at a size on the first `ranks` ranks."""

    candidate: str
    kernels: str
    ranks: int
    length: int
    d: int
    causal: bool

    @property
    def size(self) -> tuple[int, int, bool]:
        """What the tensors are made by."""
        return self.length, self.d, self.causal


# ---- What is measured, the most telling first ---------------------------------------------------------------


def plan(lengths: list[int], dims: list[int], counts: list[int], makers: list[str]) -> Iterator[Job]:
    """All rows in their order; `counts` are numbers of ranks, ascending, `makers` OWN and of BACKENDS."""
    first = [length for length in (32768, 131072) if length in lengths] or lengths[:1]
    for length, d, kernels in itertools.product(first, dims, makers):
        yield from one_size(kernels, length, d, counts)
    for length, d in itertools.product(first, dims):  # every query sees every key
        yield Job(ONE, OWN, 1, length, d, False)
        for ranks in counts[1:]:
            yield Job(RING, OWN, ranks, length, d, False)
    others = [length for length in lengths if length not in first]
    for length, d, kernels in itertools.product(others, dims, makers):
        yield from one_size(kernels, length, d, counts)


def one_size(kernels: str, length: int, d: int, counts: list[int]) -> Iterator[Job]:
    """The causal rows of a size with the kernels of one maker."""
    yield Job(ONE, kernels, 1, length, d, True)
    for ranks in reversed(counts[1:]):
        yield Job(RING if kernels == OWN else PARALLEL, kernels, ranks, length, d, True)
    if kernels == OWN:
        yield Job(BLOCKS, kernels, counts[-1], length, d, True)


# ---- The ranks ----------------------------------------------------------------------------------------------


@dataclass
class World:
    """This process among the ranks: its device, groups of the first n ranks, and one on gloo for words between them."""

    device: torch.device
    groups: dict[int, Any]
    words: Any
    rank: int = 0

    def everybody(self, mine: Any) -> list[Any]:
        """What each rank says, in order."""
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, mine, group=self.words)
        return said

    def begin(self, group: Any) -> None:
        """Lets the ranks of a group begin together: what is enqueued next starts when all have come here."""
        if dist.get_world_size(group) > 1:
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)


def world_of(kind: str, seconds: float) -> World:
    """Joins the ranks that torchrun has started, and makes their groups. Who waits for another longer than `seconds` is ended by PyTorch."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=seconds)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=limit)
    size = dist.get_world_size()
    counts = [n for n in (1, 2, 4, 8, 16) if n < size] + [size]
    groups: dict[int, Any] = {n: dist.new_group(list(range(n)), timeout=limit) for n in counts}
    for ranks, group in groups.items():
        if dist.get_rank() < ranks:
            dist.all_reduce(torch.zeros(1, device=device), group=group)  # connects them
    words = dist.new_group(list(range(size)), backend="gloo", timeout=10 * limit)
    return World(device, groups, words, dist.get_rank())


# ---- Candidates ---------------------------------------------------------------------------------------------


class Problem:
    """One size: query, key, value and grad_output [1, HEADS, S, d], alike on all ranks; of a rank its part of them.

    In memory they are [1, S, HEADS, d], as models have them and flash attention takes them without copies.
    """

    def __init__(self, length: int, d: int, causal: bool, world: World):
        generator = torch.Generator(world.device).manual_seed(length + d)
        shape = (1, length, HEADS, d)
        self.whole = [
            torch.randn(shape, generator=generator, device=world.device, dtype=torch.bfloat16).transpose(1, 2)
            for _ in range(4)
        ]
        self.size, self.length, self.causal, self.scale = (length, d, causal), length, causal, d**-0.5
        self.world = world
        self.expected: Tensors = []
        """What one device finds, as far as it has been asked."""

    def part(self, tensor: torch.Tensor, ranks: int) -> torch.Tensor:
        """This rank's part of a tensor [1, HEADS, S, d] that so many ranks hold; zig-zag where causal."""
        ranges = layout.get_ranges(self.world.rank, ranks, self.length, self.causal)
        return as_in_models(torch.cat([tensor[:, :, slice(*each)] for each in ranges], 2))


def as_in_models(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor [1, HEADS, s, d] that lies in memory as [1, s, HEADS, d]."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


Run = Callable[[], Tensors]


@contextmanager
def one_device(problem: Problem, job: Job) -> Iterator[Run]:
    """Attention over the whole sequence, on every rank by itself."""
    query, key, value = leaves = [tensor.detach().requires_grad_() for tensor in problem.whole[:3]]

    def run() -> Tensors:
        on_gpu = problem.world.device.type == "cuda"
        attend = attention if job.kernels == OWN and on_gpu else F.scaled_dot_product_attention
        out = attend(query, key, value, is_causal=job.causal)
        return [out.detach(), *torch.autograd.grad(out, leaves, problem.whole[3])]

    with nullcontext() if job.kernels == OWN else sdpa_kernel(BACKENDS[job.kernels]):
        yield run


@contextmanager
def ring(problem: Problem, job: Job) -> Iterator[Run]:
    """The ring, whole or without its transfers."""
    kernels = problem.world.device.type == "cuda"
    *leaves, grad = (problem.part(tensor, job.ranks) for tensor in problem.whole)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    rest = problem.length, problem.scale, job.causal, job.causal, problem.world.groups[job.ranks]

    def run() -> Tensors:
        out = layer.RingAttention.apply(*leaves, *rest, kernels)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    exchange = layer.exchange
    if job.candidate == BLOCKS:
        layer.exchange = lambda tensors, shapes, group: (list(tensors), [])
    try:
        yield run
    finally:
        layer.exchange = exchange


@contextmanager
def context_parallel(problem: Problem, job: Job) -> Iterator[Run]:
    """PyTorch's context parallel: the buffers are this rank's part only within."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method("alltoall")
    mesh = DeviceMesh.from_group(problem.world.groups[job.ranks], problem.world.device.type)
    buffers = [tensor.contiguous() for tensor in problem.whole]
    with (
        sdpa_kernel(BACKENDS[job.kernels]),
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)),
    ):
        *leaves, grad = (as_in_models(buffer) for buffer in buffers)
        query, key, value = leaves = [leaf.requires_grad_() for leaf in leaves]

        def run() -> Tensors:
            out = F.scaled_dot_product_attention(query, key, value, is_causal=job.causal)
            return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

        yield run


CANDIDATES = {ONE: one_device, RING: ring, BLOCKS: ring, PARALLEL: context_parallel}


# ---- One row ------------------------------------------------------------------------------------------------


def measure(problem: Problem, job: Job, seconds: float) -> dict[str, Any]:
    """A row. All ranks come here, also those without a part; who fails has its words as a note, and all go on."""
    world, own = problem.world, Own()
    takes_part = job.candidate == ONE or world.rank < job.ranks
    with ExitStack() as stack:
        run: Run | None = None
        if takes_part:
            with own.heard():
                run = stack.enter_context(CANDIDATES[job.candidate](problem, job))
                own.first(problem, job, run)
        first, notes = slowest_of(world, own)
        if first < LONG and not notes:
            again(problem, job, run, own, 1)  # the first one compiles, plans and connects too
            each, notes = slowest_of(world, own)
            if not notes and (runs := min(MOST, int(1e3 * seconds / each))) > 1:
                again(problem, job, run, own, runs)
        everybody = [each for each in world.everybody(own) if each.times]
    notes = notes or [each.note for each in everybody if each.note]
    return {"note": notes[0]} if notes else row(job, everybody)


def slowest_of(world: World, own: "Own") -> tuple[float, list[str]]:
    """The longest last run of all ranks in milliseconds, and what went wrong with any."""
    said = world.everybody((own.note, own.times[-1] if own.times else 0.0))
    return max(taken for _, taken in said), [note for note, _ in said if note]


def again(problem: Problem, job: Job, run: Run | None, own: "Own", runs: int) -> None:
    """Runs a rank's share so many times, if it has one: these times take the place of earlier ones."""
    if run is not None:
        with own.heard():
            own.times = [milliseconds(problem, job, run)[0] for _ in range(runs)]


@dataclass
class Own:
    """What one rank has of a row: milliseconds of each run, bytes at the peak, how far from one device, what went wrong."""

    times: Any = ()
    peak: int = 0
    apart: float | None = None
    note: str = ""

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Whatever goes wrong is a note: a candidate that this PyTorch lacks is no reason to end."""
        try:
            yield
        except Exception as error:
            self.note = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"

    def first(self, problem: Problem, job: Job, run: Run) -> None:
        """The first run: its time, its memory, and what it found."""
        on_gpu = problem.world.device.type == "cuda"
        before = 0
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        taken, result = milliseconds(problem, job, run)
        self.times = [taken]
        if on_gpu:
            part = sum(tensor.nbytes for tensor in problem.whole) // (
                1 if job.candidate == ONE else job.ranks
            )
            self.peak = torch.cuda.max_memory_allocated() - before + part
        if job.candidate == ONE and not problem.expected:
            problem.expected = result
        elif problem.expected and job.candidate in (ONE, RING, PARALLEL):
            alone = job.candidate == ONE  # every rank then has the whole
            right = (each if alone else problem.part(each, job.ranks) for each in problem.expected)
            self.apart = max(map(apart, result, right))


def milliseconds(problem: Problem, job: Job, run: Run) -> tuple[float, Tensors]:
    """The time of one run on this rank, begun with the others, and what it found."""
    world = problem.world
    if job.candidate != ONE:
        world.begin(world.groups[job.ranks])
    if world.device.type != "cuda":
        start = time.perf_counter()
        result = run()
        return 1e3 * (time.perf_counter() - start), result
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    result = run()
    ended.record()
    torch.cuda.synchronize()
    return begun.elapsed_time(ended), result


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, relative to the largest element; NaN where one is."""
    return float((one.float() - other.float()).abs().max() / other.abs().max())


def row(job: Job, ranks: list[Own]) -> dict[str, Any]:
    """What is made of the ranks' numbers: of each run the slowest rank's time; of one GPU the fastest GPU's."""
    choose = min if job.candidate == ONE else max
    times = [choose(run) for run in zip(*(each.times for each in ranks), strict=True)]
    median = statistics.median(times)
    differences = [each.apart for each in ranks if each.apart is not None]
    return {
        "ms": round(median, 4),
        "fastest_ms": round(min(times), 4),
        "slowest_ms": round(max(times), 4),
        "runs": len(times),
        "tokens_per_s": round(1e3 * job.length / median),
        "bytes_a_rank": max(each.peak for each in ranks) or "",
        "apart": f"{max(differences):.2e}" if differences else "",
    }


# ---- The run ------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="book.measure.ring", description=main.__doc__)
    add = made.add_argument
    add("--lengths", type=int, nargs="+", default=[2**n for n in range(15, 20)])
    add("--dims", type=int, nargs="+", default=[128, 64], help="elements of a head")
    add("--seconds", type=float, default=0.5, help="of runs for a row, 1 to 9 runs")
    add("--budget", type=float, default=150.0, help="seconds after which no row is begun")
    add("--patience", type=float, default=60.0, help="seconds to wait for another rank")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--csv", type=Path, help="rows go here as they are found")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Measures every size on the ranks that torchrun has started; rank 0 writes. 1 where a ring is wrong."""
    flags = parser().parse_args(arguments)
    world = world_of(flags.device, flags.patience)
    most = max(world.groups)
    for length in flags.lengths:
        if length % (2 * most):
            raise SystemExit(f"--lengths {length}: must be a multiple of {2 * most}, twice the ranks")
    wrong: list[Job] = []
    leads = world.rank == 0
    write_to(flags.csv if leads else None, rows(world, flags, wrong), FIELDS, said=leads)
    dist.destroy_process_group()
    return int(bool(wrong))


def rows(world: World, flags: argparse.Namespace, wrong: list[Job]) -> Iterator[dict[str, Any]]:
    """A row for each job until the budget is spent; rings that are wrong are added to `wrong`."""
    begun, counts, makers = time.monotonic(), sorted(world.groups), [OWN, *BACKENDS]
    makers = makers[: 3 if flags.device == "cuda" else 2]
    for kernels in makers:  # unseen: what loads and connects at the first call of all
        for candidate, ranks in ((ONE, 1), (RING if kernels == OWN else PARALLEL, counts[-1])):
            first = Job(candidate, kernels, ranks, flags.lengths[0], flags.dims[0], True)
            measure(Problem(*first.size, world), first, 0.0)
    alone: dict[tuple, float] = {}
    problem: Problem | None = None
    jobs = list(plan(flags.lengths, flags.dims, counts, makers))
    for number, job in enumerate(jobs):
        if world.everybody(time.monotonic() - begun > flags.budget)[0]:
            if world.rank == 0:
                print(f"{len(jobs) - number} rows left out: {flags.budget:g} s are over", flush=True)
            return
        if problem is None or problem.size != job.size:
            problem = None  # its memory is free before the next takes its own
            problem = Problem(*job.size, world)
        figures = measure(problem, job, flags.seconds)
        if job.candidate == RING and figures.get("apart") and not float(figures["apart"]) < ALIKE:
            wrong.append(job)
        known = {"dtype": "bfloat16", "batch": 1, "heads": HEADS} | vars(job) | {"causal": int(job.causal)}
        yield known | figures | of_ideal(job, figures.get("ms"), alone)


def of_ideal(job: Job, milliseconds: float | None, alone: dict[tuple, float]) -> dict[str, float]:
    """The time of one GPU, shared out, over a candidate's; `alone` knows the times of one GPU, and learns them here."""
    key = job.kernels, *job.size
    if milliseconds and job.candidate == ONE:
        alone[key] = milliseconds
    if not milliseconds or key not in alone or job.candidate == BLOCKS:
        return {}
    return {"of_ideal": round(alone[key] / milliseconds / job.ranks, 4)}


if __name__ == "__main__":
    sys.exit(main())
