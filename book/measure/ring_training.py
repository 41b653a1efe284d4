"""Puzzle 22's transformer trained on several GPUs or processes, in each of the ways that PyTorch has, and over the ring.

    torchrun --standalone --nproc-per-node 4 -m book.measure.ring_training gpt2 --csv training.csv

Every way sees the same batches from the same parameters, so that its losses are those of one process but for rounding:

- `one`: every rank by itself, the whole batch.
- `moved`: as `one`, from parameters moved by half a unit in their last place: what rounding alone does to the losses.
- `ddp`: `DistributedDataParallel`; each rank has some rows of the batch.
- `fsdp`: the same with `fully_shard`; parameters, gradients and the optimizer's state are cut up too.
- `ring`: each rank has a part of every sequence (zig-zag), and attention goes round; parameters as in `ddp`.
- `context`: as `ring`, with PyTorch's own `context_parallel` (on GPUs).

Each is trained with PyTorch's own layers and with LayerNormLinear. Losses may be four times as far from those of one process
as `moved` is. Rank 0 says what there is to say; Ctrl-C ends all ranks.
"""

import argparse
import dataclasses
import functools
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

from book.measure.gpt2_training import GPT2, move_by_half_a_place, on_device, start_as_gpt2, tolerance
from book.measure.shared import join, write_to
from harness.bench.loss_curves import furthest
from harness.bench.machine import machine
from harness.bench.timing import CudaClock, WallClock, summary
from harness.console import print_lines
from harness.errors import BadUse, WorkbookError
from harness.nn import LayerNormLinear, ring_attention
from harness.nn.ring_blocks import BLOCKS
from harness.puzzles.p22.demo import SIZES, SMALL
from harness.puzzles.p22.demo_model import Block, CharacterModel, plain_pair
from harness.puzzles.p22.training import (
    OURS,
    PLAIN,
    Options,
    Text,
    Trainee,
    batches,
    make_model,
    one_step,
    read_text,
    training_progress,
)
from harness.puzzles.p25 import layout
from harness.toolchain import roots

PAIRS = {PLAIN: plain_pair, OURS: LayerNormLinear}
PRESETS = {"small": SMALL, "gpt2": GPT2}
UNTIMED = 5
"""First steps, whose time holds compiling and connecting."""
FIELDS = (
    *("precision", "layers", "width", "heads", "context", "batch"),
    *("ranks", "way", "pairs", "step", "loss", "step_us", "peak_bytes"),
)
Batch = tuple[torch.Tensor, torch.Tensor]


# ---- Ways to train one model on several ranks ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process among the others."""

    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype
    """In which the products are computed."""
    blocks: str
    """What computes the blocks of the ring."""

    def rows(self, batch: Batch) -> Batch:
        """This rank's rows of a batch."""
        rows = slice(*layout.cut(len(batch[0]), self.size)[self.rank])
        return batch[0][rows], batch[1][rows]


@contextmanager
def one(model: CharacterModel, ranks: Ranks) -> Iterator[tuple[nn.Module, Any]]:
    """By itself."""
    yield model, lambda batch: batch


@contextmanager
def moved(model: CharacterModel, ranks: Ranks) -> Iterator[tuple[nn.Module, Any]]:
    """By itself, from parameters that are a rounding away."""
    move_by_half_a_place(model.cpu(), ranks.dtype, seed=0)
    model.to(ranks.device)
    yield model, lambda batch: batch


@contextmanager
def ddp(model: CharacterModel, ranks: Ranks) -> Iterator[tuple[nn.Module, Any]]:
    """Rows of the batch, gradients averaged."""
    yield replicated(model, ranks), ranks.rows


@contextmanager
def fsdp(model: CharacterModel, ranks: Ranks) -> Iterator[tuple[nn.Module, Any]]:
    """Rows of the batch, and a part of every parameter."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    yield model, ranks.rows


@contextmanager
def ring(model: CharacterModel, ranks: Ranks) -> Iterator[tuple[nn.Module, Any]]:
    """A part of every sequence, zig-zag."""
    length = model.position.num_embeddings
    places = torch.from_numpy(layout.places(ranks.rank, ranks.size, length, True)).to(ranks.device)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attention = functools.partial(ring_attention, balanced=True, length=length, blocks=ranks.blocks)
    yield at_places(model, places, ranks)


@contextmanager
def context(model: CharacterModel, ranks: Ranks) -> Iterator[tuple[nn.Module, Any]]:
    """The same by PyTorch's context parallel, which lays its buffers out as it wants them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    places = torch.arange(model.position.num_embeddings, device=ranks.device)
    kernels = SDPBackend.CUDNN_ATTENTION if ranks.blocks == "cuDNN" else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel(kernels), context_parallel(mesh, buffers=[places], buffer_seq_dims=[0]):
        yield at_places(model, places, ranks)


def at_places(model: CharacterModel, places: torch.Tensor, ranks: Ranks) -> tuple[nn.Module, Any]:
    """A model that sees some places of every sequence."""
    model.places = places
    return replicated(model, ranks), lambda batch: (batch[0][:, places], batch[1][:, places])


def replicated(model: nn.Module, ranks: Ranks) -> nn.Module:
    """All parameters on every rank, their gradients averaged."""
    on = [ranks.device] if ranks.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=on)


WAYS = {"one": one, "moved": moved, "ddp": ddp, "fsdp": fsdp, "ring": ring, "context": context}


# ---- Training -----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Curve:
    """The mean loss of all ranks at every step; this rank's microseconds of each, and bytes at the peak."""

    losses: list[float]
    times: list[float]
    peak: int

    @property
    def step(self) -> float:
        """Microseconds of a step, without the first ones."""
        return summary(self.times[UNTIMED:] or self.times).median


def train(console: Console, options: Options, ranks: Ranks, way: str, pairs: str, text: Text) -> Curve:
    """Trains one model on all ranks."""
    clock = CudaClock() if ranks.device.type == "cuda" else WallClock()
    losses = []
    with ExitStack() as stack:
        model = make_model(options, text.vocabulary, PAIRS[pairs])
        if options.recipe.bytes:  # the preset gpt2
            start_as_gpt2(model, options)
        model.to(ranks.device)
        wrapped, mine = stack.enter_context(WAYS[way](model, ranks))
        trainee = Trainee(wrapped, torch.optim.AdamW(wrapped.parameters(), **options.recipe.optimizer))
        progress = stack.enter_context(training_progress(console))
        task = progress.add_task(f"{way}, {pairs}", total=options.steps, losses="")
        for number, batch in zip(range(options.steps), batches(text.tokens, options), strict=False):
            one_step(trainee, mine(batch), number, options, clock)
            loss = torch.tensor(trainee.losses[-1], device=ranks.device)
            dist.all_reduce(loss)
            losses.append(loss.item() / ranks.size)
            progress.update(task, advance=1, losses=f"{losses[-1]:.4f}")
    return Curve(losses, trainee.times, trainee.peak)


def line(way: str, pairs: str, size: int, curve: Curve, alone: Curve | None) -> str:
    """How a way has done, beside one process with the same layers."""
    said = f"   {way:<8} {pairs:<16} loss {curve.losses[0]:.4f} -> {curve.losses[-1]:.4f}"
    said += f"  {curve.step / 1e3:9.2f} ms a step"
    if curve.peak:
        said += f"  {curve.peak / 2**20:8,.0f} MiB at the peak"
    if alone is None or alone is curve:
        return said
    ideal = "" if way == "moved" else f"  {alone.step / curve.step / size:4.0%} of the ideal,"
    return f"{said}{ideal}  losses apart by {furthest(curve.losses, alone.losses):.1e}"


# ---- The command --------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(prog="book.measure.ring_training", description="Train on several ranks.")
    add = made.add_argument
    add("preset", nargs="?", choices=PRESETS, default="small", help="default: small")
    for name in SIZES:
        add(f"--{name}", type=int, help="default: the preset's")
    add("--ways", nargs="+", choices=WAYS, help="default: all that the device has")
    add("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    add("--precision", choices=("autocast", "float32"), help="default: autocast on GPUs")
    add("--blocks", choices=BLOCKS, help="of the ring; default: flash on GPUs, else the solution's")
    add("--patience", type=float, default=120.0, help="seconds to wait for another rank")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    add("--csv", type=Path, help="loss and time of every step go here, after each way")
    return made


def main(arguments: list[str] | None = None, chapters: Path | None = None) -> int:
    """Trains in each way on the ranks that torchrun has started; rank 0 reports. The exit code is 1 where losses part."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a rank that waits for another one hears no exception
    flags = parser().parse_args(arguments)
    kind = flags.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = make_options(flags, join(kind, flags.patience))
    blocks = flags.blocks or ("flash" if kind == "cuda" else "solution")
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), options.device, options.dtype, blocks)
    wanted = flags.ways or [way for way in WAYS if ranks.device.type == "cuda" or way != "context"]
    check(options, ranks.size, wanted)
    console = Console(highlight=False, quiet=ranks.rank != 0)
    try:
        right = compare(
            console, options, ranks, wanted, flags, read_text(chapters or roots.book() / "src", options)
        )
    finally:
        dist.destroy_process_group()
    return int(not right)


def compare(console: Console, options: Options, ranks: Ranks, wanted: list[str], flags, text: Text) -> bool:
    """Trains in every way that is asked for and reports; whether all losses are those of one process."""
    sizes = f"{options.layers} layers of width {options.width}, {options.batch} x {options.context} tokens"
    where = f"{ranks.size} ranks, {machine(ranks.device)['device']}"
    print_lines(console, [f"{sizes}, {options.precision}, {options.steps} steps on {where}"])
    curves: dict[tuple[str, str], Curve] = {}

    def rows() -> Iterator[dict[str, Any]]:
        for way in wanted:
            for pairs in flags.pairs[: 1 if way == "moved" else None]:
                curve = curves[way, pairs] = train(console, options, ranks, way, pairs, text)
                print_lines(console, [line(way, pairs, ranks.size, curve, curves.get(("one", pairs)))])
                shared = {name: getattr(options, name) for name in FIELDS[:6]}
                for each in steps(curve):
                    yield shared | {"ranks": ranks.size, "way": way, "pairs": pairs} | each

    write_to(None if ranks.rank else flags.csv, rows(), FIELDS, said=False)
    lines, right = verdict(curves, ranks.dtype)
    print_lines(console, lines)
    return right


def steps(curve: Curve) -> Iterator[dict[str, Any]]:
    """What differs in the rows of the CSV from step to step."""
    for number, (loss, microseconds) in enumerate(zip(curve.losses, curve.times, strict=True)):
        yield {
            "step": number,
            "loss": f"{loss:.6f}",
            "step_us": f"{microseconds:.1f}",
            "peak_bytes": curve.peak or "",
        }


def verdict(curves: dict[tuple[str, str], Curve], dtype: torch.dtype) -> tuple[list[str], bool]:
    """Whether all losses are one process's, as far as rounding lets them; nothing to say where that was not trained."""
    spread = [
        furthest(curve.losses, curves["one", pairs].losses)
        for (way, pairs), curve in curves.items()
        if way == "moved" and ("one", pairs) in curves
    ]
    if not spread:
        return [], True
    allowed = tolerance(spread[0], dtype)
    away = {
        (way, pairs): furthest(curve.losses, curves["one", pairs].losses)
        for (way, pairs), curve in curves.items()
        if way not in ("one", "moved") and ("one", pairs) in curves
    }
    parted = [f"{way} with {pairs}" for (way, pairs), distance in away.items() if not distance <= allowed]
    words = f"❌ {', '.join(parted)}: the losses part" if parted else "✅ all losses are those of one process"
    return [f"   {words} (limit {allowed:.1e}; by rounding alone {spread[0]:.1e})"], not parted


def make_options(flags, device: torch.device) -> Options:
    """The preset with what the flags say."""
    preset = PRESETS[flags.preset]
    sizes = {name: getattr(preset if getattr(flags, name) is None else flags, name) for name in SIZES}
    return on_device(dataclasses.replace(preset, **sizes), device, flags.precision)


def check(options: Options, ranks: int, wanted: list[str]) -> None:
    """Raises BadUse for sizes that the ranks cannot share."""
    rows = ranks if {"ddp", "fsdp"} & set(wanted) else 1
    places = 2 * ranks if {"ring", "context"} & set(wanted) else 1
    for name, value, parts in (("batch", options.batch, rows), ("context", options.context, places)):
        if value < 1 or value % parts:
            raise BadUse(f"--{name} {value}: must be a multiple of {parts}, for {ranks} ranks")
    if options.width % options.heads or min(options.width, options.heads, options.layers, options.steps) < 1:
        raise BadUse(
            f"--width {options.width}: must be a multiple of --heads {options.heads}, and all at least 1"
        )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WorkbookError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
