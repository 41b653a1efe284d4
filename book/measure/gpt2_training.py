"""Trains GPT-2 small's sizes with LayerNormLinear beside plain PyTorch, over the bytes of the book: `python -m book.measure training`.

Losses differ by rounding, which grows from step to step. A control shows how much: plain PyTorch whose first parameters
are moved by half a unit in their last place. The exit code is 1 where other losses are more than four times as far from
plain PyTorch's.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from rich.console import Console

from book.measure.character_model import Block, CharacterModel, plain_pair
from book.measure.shared import write
from book.measure.side_by_side import (
    OURS,
    PLAIN,
    SIZES,
    Options,
    Trainee,
    furthest,
    make_model,
    make_trainees,
    train,
)
from harness.nn import attention
from harness.nn.layers import LayerNormLinear
from harness.toolchain import roots

BOTH, CONTROL = "with attention", "plain PyTorch, moved"
"""LayerNormLinear and the workbook's attention instead of PyTorch's; and the control."""
TIMES_CONTROL = 4.0
GPT2 = Options(
    optimizer={"lr": 6e-4, "betas": (0.9, 0.95), "weight_decay": 0.1},
    warm_up=20,
    **dict(zip(SIZES, (200, 12, 768, 12, 1024, 8), strict=True)),
)


def on_device(options: Options, device: torch.device, precision: str | None = None) -> Options:
    """The options for a device: on a GPU autocast to bfloat16, and one kernel for all parameters of the optimizer."""
    if device.type != "cuda":
        return dataclasses.replace(options, device=device, precision=precision or "float32")
    optimizer = {**options.optimizer, "fused": True}
    return dataclasses.replace(options, optimizer=optimizer, device=device, precision=precision or "autocast")


def start_as_gpt2(model: CharacterModel, options: Options) -> None:
    """GPT-2's first parameters: normal with deviation 0.02, smaller where a block adds to the stream."""
    generator = torch.Generator().manual_seed(options.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                adds = "join_heads" in name or "narrow" in name
                deviation = 0.02 / (math.sqrt(2 * options.layers) if adds else 1)
                parameter.copy_(deviation * torch.randn(parameter.shape, generator=generator))
            elif "bias" in name:
                parameter.zero_()


def move_by_half_a_place(model: torch.nn.Module, dtype: torch.dtype, seed: int) -> None:
    """Moves every parameter by half a unit in its last place in a dtype, up or down by chance."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.finfo(dtype).eps / 2
    with torch.no_grad():
        for parameter in model.parameters():
            up = torch.randint(2, parameter.shape, generator=generator) * 2 - 1
            parameter.copy_(parameter.double() * (1 + half * up))


def models(options: Options, with_attention: bool) -> dict[str, CharacterModel]:
    """The models from the same parameters, the control's moved."""
    pairs = {OURS: LayerNormLinear, BOTH: LayerNormLinear, PLAIN: plain_pair, CONTROL: plain_pair}
    if not with_attention:
        del pairs[BOTH]
    made = {name: make_model(options, pair) for name, pair in pairs.items()}
    for model in made.values():
        start_as_gpt2(model, options)
    if with_attention:
        for block in made[BOTH].modules():
            if isinstance(block, Block):
                block.attention = attention
    move_by_half_a_place(made[CONTROL], options.dtype, options.seed)
    return made


def tolerance(control: float, dtype: torch.dtype) -> float:
    """How far two right curves may be apart.

    The control shows what one rounding at the start grows into; LayerNormLinear rounds differently in every layer at
    every step. The last term is for the first steps, when nothing has grown: the rounding of the loss itself. Where the control's
    losses are no numbers, no distance is within it.
    """
    if not math.isfinite(control):
        return math.nan
    return TIMES_CONTROL * control + max(torch.finfo(dtype).eps / 8, 4 * torch.finfo(torch.float32).eps)


def agree(trainees: dict[str, Trainee], dtype: torch.dtype) -> bool:
    """Whether all losses are as near to plain PyTorch's as rounding makes them."""
    away = {name: furthest(one.losses, trainees[PLAIN].losses) for name, one in trainees.items()}
    return all(far <= tolerance(away[CONTROL], dtype) for far in away.values())


def rows(trainees: dict[str, Trainee], options: Options) -> Iterator[Mapping[str, object]]:
    """One row for each step of each model."""
    shared = {name: getattr(options, name) for name in ("precision", *SIZES[1:], "seed")}
    for name, one in trainees.items():
        for step, (loss, microseconds) in enumerate(zip(one.losses, one.times, strict=True)):
            own = {"step": step, "model": name, "loss": f"{loss:.6f}", "step_us": f"{microseconds:.1f}"}
            yield shared | own | {"peak_bytes": one.peak or ""}


def main(chapters: Path) -> int:
    """Trains, writes the rows, and says by the exit code whether the curves agree."""
    parser = argparse.ArgumentParser(prog="book.measure.gpt2_training")
    parser.add_argument("file", metavar="FILE", help="where the rows go")
    parser.add_argument("--attention", action="store_true", help="with the workbook's attention besides")
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, default=getattr(GPT2, name), help="default: %(default)s")
    given = vars(parser.parse_args())
    sizes = {name: given[name] for name in SIZES}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = on_device(dataclasses.replace(GPT2, **sizes), device)
    trainees = make_trainees(options, models(options, given["attention"]))
    train(Console(highlight=False), options, trainees, chapters)
    write(rows(trainees, options))
    return 0 if agree(trainees, options.dtype) else 1


if __name__ == "__main__":
    sys.exit(main(roots.book() / "src"))
