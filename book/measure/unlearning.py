"""Find the training steps of small GPTs that undo what was learned: `python -m book.measure unlearning`, twenty minutes on a CPU.

A model of puzzle 27's form trains on the bytes of this book, or of PyTorch's documentation. After each update the loss on the batch of
that update is measured again, so a rise is caused by the update, whatever the next batch holds. A row is a run. With the argument
`path` (record `unlearning_path`) a row is a point between two updates of one run, and the loss is that of one batch throughout.
With `causes` (`unlearning_causes`) each run's worst step is repeated with other batches, and its effect undone in parts; with
`parts` (`unlearning_parts`) it is undone for one kind of parameter at a time; with `fractions` (`unlearning_fractions`) only a part of
it is taken; with `steps` (`unlearning_steps`) the cause is looked for in all steps; with `scales` (`unlearning_scales`) the shared
vector of one run is scaled; with `settings` (`unlearning_settings`) runs use other learning rates, means of squares and limits.
"""

import copy
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from book.measure import record
from book.measure.shared import write
from harness.puzzles.p27.autograd import Model, Tensors, init_parameters
from harness.puzzles.p27.training import read_text
from harness.toolchain import roots

TORCH_TEXT = Path(torch.__file__).with_name("_torch_docs.py")
TEXTS: dict[str, Callable[[], bytes]] = {
    "book": lambda: bytes(read_text(roots.get_book() / "src", CONTEXT).numpy()),
    "PyTorch": TORCH_TEXT.read_bytes,
}
SIZES = {"small": (3, 96), "large": (4, 192)}
"""Name -> blocks and channels."""
SEEDS = range(1, 9)
WARM_UPS = (1, 20, 100)
"""Steps in which the learning rate grows to its full size; 1 is no warm-up."""
STEPS, LONG, BATCH, CONTEXT = 60, 160, 16, 64
RATE, DECAY, CLIP = 3e-3, 0.1, 1.0
BETAS, EPS = (0.9, 0.95), 1e-8
RISE = 0.25
"""Nats by which an update must raise the loss of its own batch to count as one that unlearns."""
WHICH = ("text", "size", "warm_up", "seed")
FOLLOWED = ("PyTorch", "small", 1, 8)
"""The run whose way is followed: its text, size, warm-up and seed."""
SPOILED, LAST, PARTS = 15, 17, 8
"""The update that spoils the followed run, the last one of the path, and points between two updates."""
OTHERS = 40
"""Batches from which a run's worst update is made instead of its own."""
FRACTIONS = {"sixty_fourth": 1 / 64, "eighth": 1 / 8, "quarter": 1 / 4, "half": 1 / 2}
SCALES = [step / 40 for step in range(40, -49, -1)]
FREQUENT = b" teon"
"""Bytes whose probabilities are told."""
SETTINGS = [
    (rate, beta, clip) for beta, clip in ((0.95, 1.0), (0.999, 1.0), (0.95, math.inf)) for rate in (3e-3, 1e-3, 3e-4)
]  # fmt: skip
"""Learning rates, Adam's second beta, and limits of the gradients' norm."""


class Run:
    """A model in training: its parameters, AdamW's means, and the batch of the last update."""

    rate, beta, clip, steps = RATE, BETAS[1], CLIP, STEPS

    def __init__(self, text: str, size: str, warm_up: int, seed: int):
        self.text = torch.frombuffer(bytearray(TEXTS[text]()), dtype=torch.uint8)
        self.blocks, width = SIZES[size]
        self.seed, self.warm_up, self.number = seed, warm_up, 0
        self.p = init_parameters(
            layers=self.blocks, width=width, vocabulary=256, context=CONTEXT, seed=seed, dtype=torch.float32
        )
        self.means = {name: (torch.zeros_like(t), torch.zeros_like(t)) for name, t in self.p.items()}
        self.old = self.p

    def batches(self) -> Iterator[Tensor]:
        """Random excerpts of the text, int64 [batch, context + 1], one for each step."""
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.steps):
            starts = torch.randint(len(self.text) - CONTEXT, (BATCH, 1), generator=generator)
            yield self.text[starts + torch.arange(CONTEXT + 1)].long()

    def gradients(self, batch: Tensor) -> tuple[float, Tensors]:
        """The loss of a batch and the gradients, clipped to a common norm."""
        leaves = {name: t.detach().requires_grad_() for name, t in self.p.items()}
        loss = Model(records_parts=False).loss(batch[:, :-1], batch[:, 1:], leaves)
        grads = torch.autograd.grad(loss, list(leaves.values()))
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        factor = (self.clip / (norm + 1e-6)).clamp(max=1)
        return float(loss.detach()), {name: grad * factor for name, grad in zip(leaves, grads, strict=True)}

    def update(self, grads: Tensors) -> None:
        """One AdamW step, as puzzle 27 has it."""
        self.number += 1
        rate = self.rate * min(1.0, self.number / self.warm_up)
        new = {}
        for name, t in self.p.items():
            mean, square = self.means[name]
            mean.lerp_(grads[name], 1 - BETAS[0])
            square.lerp_(grads[name].square(), 1 - self.beta)
            root = (square / (1 - self.beta**self.number)).sqrt()
            kept = t * (1 - rate * DECAY) if t.dim() > 1 else t
            new[name] = kept - rate / (1 - BETAS[0] ** self.number) * mean / (root + EPS)
        self.old, self.p = self.p, new

    @torch.no_grad()
    def look(self, batch: Tensor, p: Tensors | None = None) -> tuple[float, list[Tensor]]:
        """The loss of a batch, and after each block the vector that all places share: the mean of the stream."""
        model = Model()
        loss = model.loss(batch[:, :-1], batch[:, 1:], p or self.p)
        streams = [model.outputs[f"block{i}"] for i in range(self.blocks)]
        return float(loss), [stream.mean((0, 1)) for stream in streams]


def worst(run: Run) -> dict:
    """The update of a run that raises the loss of its own batch most, and what the next one makes of it."""
    rises, found, batch_of = [], {}, None
    for batch in run.batches():
        before, grads = run.gradients(batch)
        _, vectors = run.look(batch)
        run.update(grads)
        after, moved = run.look(batch)
        if batch_of is not None:
            found["next_loss"], batch_of = run.look(batch_of)[0], None
        rises.append(after - before)
        if rises[-1] == max(rises):
            turned = [float(F.cosine_similarity(a, b, dim=0)) for a, b in zip(vectors, moved, strict=True)]
            found = {
                "update": run.number,
                "before_loss": before,
                "after_loss": after,
                "next_loss": float("nan"),
            }
            found |= {"first_cosine": turned[0], "last_cosine": turned[-1]}
            batch_of = batch
    count = sum(rise > RISE for rise in rises)
    return {"unlearning": count} | {
        name: f"{value:.4f}" if isinstance(value, float) else value
        for name, value in {"rise": max(rises), **found, "end_loss": before}.items()
    }


def run_rows() -> Iterator[dict]:
    """A row for each run."""
    for run in product(TEXTS, SIZES, WARM_UPS, SEEDS):
        yield dict(zip(WHICH, run, strict=True)) | worst(Run(*run))


def setting_rows() -> Iterator[dict]:
    """A row for each run without warm-up on PyTorch's documentation, in each of SETTINGS."""
    for size, (rate, beta, clip), seed in product(SIZES, SETTINGS, SEEDS):
        run = Run("PyTorch", size, 1, seed)
        run.rate, run.beta, run.clip = rate, beta, clip
        yield {"size": size, "at_rate": rate, "beta": beta, "clip": clip, "seed": seed} | worst(run)


def path_rows() -> Iterator[dict]:
    """A row for each place on the way of one run: the loss of the batch of SPOILED, the shared vector, what is predicted.

    The vector is given in a plane: along what it was before that update, and across, towards what it is after. `size`, `angle` (from
    before that update) and `move` (since the last whole update) need no plane.
    """
    run, places, batches = Run(*FOLLOWED), [], []
    for batch in run.batches():
        places.append(run.p)
        batches.append(batch)
        if run.number == LAST:
            break
        run.update(run.gradients(batch)[1])
    batch = batches[SPOILED - 1]
    before, after = (run.look(batch, places[number])[1][-1] for number in (SPOILED - 1, SPOILED))
    along = before / before.norm()
    across = after - (after @ along) * along
    across /= across.norm()
    for place in range(LAST * PARTS + 1):
        number, part = divmod(place, PARTS)
        p = {
            name: t.lerp(places[number + (part > 0)][name], part / PARTS)
            for name, t in places[number].items()
        }
        model = Model()
        loss = float(model.loss(batch[:, :-1], batch[:, 1:], p))
        stream = model.outputs[f"block{run.blocks - 1}"]
        shared, told = stream.mean((0, 1)), compute_shares(model.outputs["ln_f"] @ p["token"].T, batch)
        start = run.look(batch, places[number if part or not number else number - 1])[1][-1]
        vector = {
            "along_size": float(shared @ along),
            "across_size": float(shared @ across),
            "size": float(shared.norm()),
            "angle": math.degrees(math.acos(min(1.0, float(F.cosine_similarity(shared, before, dim=0))))),
            "move": float((shared - start).norm()),
        }
        yield {"place_updates": f"{place / PARTS:.3f}"} | {
            name: f"{value:.4g}" if name in told else f"{value:.4f}"
            for name, value in {"loss": loss, **vector, "spread": spread(stream), **told}.items()
        }


def compute_shares(logits: Tensor, batch: Tensor) -> dict[str, float]:
    """Return the geometric mean of the next byte's probability, where it is one of the FREQUENT bytes, and elsewhere.

    The loss is minus the mean of the same logarithms over all positions.
    """
    targets = batch[:, 1:].flatten()
    logs = logits.detach().flatten(0, 1).log_softmax(-1)[torch.arange(len(targets)), targets]
    rest = ~torch.isin(targets, torch.tensor(list(FREQUENT)))
    where = {f"of_{byte:02x}": targets == byte for byte in FREQUENT} | {"of_others": rest}
    return {name: float(logs[mask].mean().exp()) for name, mask in where.items()}


# ---- The cause ----------------------------------------------------------------------------------------------


@torch.no_grad()
def read_stream(run: Run, batch: Tensor) -> Tensor:
    """Return the last block's output, [batch, context, channels]."""
    model = Model()
    model.loss(batch[:, :-1], batch[:, 1:], run.p)
    return model.outputs[f"block{run.blocks - 1}"]


@torch.no_grad()
def compute_head(run: Run, stream: Tensor, batch: Tensor) -> tuple[float, Tensor]:
    """Return the loss and the logits that the final LayerNorm and the token table make of a stream."""
    p = run.p
    ln_out = F.layer_norm(stream, stream.shape[-1:], p["ln_f.weight"], p["ln_f.bias"])
    logits = ln_out @ p["token"].T
    return float(F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())), logits


def updated(run: Run, grads: Tensors) -> Run:
    """Return a copy of a run after one more update from these gradients."""
    run = copy.copy(run)
    run.means = {name: (mean.clone(), square.clone()) for name, (mean, square) in run.means.items()}
    run.update(grads)
    return run


def replay(text: str, size: str, warm_up: int, seed: int, update: int) -> tuple[Run, list[Tensor]]:
    """Return a run just before one of its updates, and all its batches, that of the update first."""
    run = Run(text, size, warm_up, seed)
    batches = list(run.batches())
    for batch in batches[: update - 1]:
        run.update(run.gradients(batch)[1])
    return run, batches[update - 1 :] + batches[: update - 1]


def spoiled_runs() -> Iterator[tuple[dict, Run, list[Tensor]]]:
    """Yield each run on PyTorch's documentation whose worst step counts: its row, the run before that step, and its batches."""
    for row in record.rows("unlearning"):
        if row["text"] != "book" and float(row["rise"]) > RISE:
            run, batches = replay(
                row["text"], row["size"], int(row["warm_up"]), int(row["seed"]), int(row["update"])
            )
            yield {name: row[name] for name in (*WHICH, "update")}, run, batches


def cause_rows() -> Iterator[dict]:
    """Yield a row for each of these runs.

    `restored_loss` is that after the update with the shared vector of before, and nothing else, put back; `shared_loss` that before
    it with nothing but this vector, and `bytes_loss` the least that one prediction for all positions can have: the entropy of the
    batch's bytes. The sizes are that vector's lengths, the spreads the root mean square of what remains without it. The rises are
    of the same batch's loss, after an update made from one of OTHERS batches, or from a gradient of zero.
    """
    for known, run, (batch, *others) in spoiled_runs():
        before, grads = run.gradients(batch)
        after = updated(run, grads)
        old, new = read_stream(run, batch), read_stream(after, batch)
        shared, moved = old.mean((0, 1)), new.mean((0, 1))
        restored = new - moved + shared
        rises = [updated(run, run.gradients(other)[1]).look(batch)[0] - before for other in others[:OTHERS]]
        zero = {name: torch.zeros_like(tensor) for name, tensor in run.p.items()}
        numbers = {
            "before_loss": before,
            "after_loss": after.look(batch)[0],
            "cosine": float(F.cosine_similarity(shared, moved, dim=0)),
            "before_size": float(shared.norm()),
            "after_size": float(moved.norm()),
            "before_spread": spread(old),
            "after_spread": spread(new),
            "restored_loss": compute_head(after, restored, batch)[0],
            "shared_loss": compute_head(run, shared.expand_as(old), batch)[0],
            "bytes_loss": float(torch.distributions.Categorical(batch[:, 1:].flatten().bincount()).entropy()),
            "others_least_rise": min(rises),
            "others_median_rise": statistics.median(rises),
            "others_most_rise": max(rises),
            "momentum_rise": updated(run, zero).look(batch)[0] - before,
        }
        yield known | digits(numbers)


def digits(numbers: dict[str, float]) -> dict[str, str]:
    """Return numbers as the records write them."""
    return {name: f"{number:.4f}" for name, number in numbers.items()}


def spread(stream: Tensor) -> float:
    """Return the root mean square distance of the positions' vectors from their mean."""
    return float((stream - stream.mean((0, 1))).square().sum(-1).mean().sqrt())


def step_rows() -> Iterator[dict]:
    """Yield what steps of the runs on PyTorch's documentation do to the loss of their batch and to the shared vector.

    A row is a step that raises the loss by more than RISE, turns the vector by more than a right angle or halves its ratio to the
    spread, or a run's last step. Runs with the longest warm-up have LONG steps.
    """
    for size, warm_up, seed in product(SIZES, WARM_UPS, SEEDS):
        run = Run("PyTorch", size, warm_up, seed)
        run.steps = LONG if warm_up == max(WARM_UPS) else STEPS
        for batch in run.batches():
            before, grads = run.gradients(batch)
            old = read_stream(run, batch)
            run.update(grads)
            new = read_stream(run, batch)
            rise = compute_head(run, new, batch)[0] - before
            cosine = float(F.cosine_similarity(old.mean((0, 1)), new.mean((0, 1)), dim=0))
            ratios = [float(stream.mean((0, 1)).norm()) / spread(stream) for stream in (old, new)]
            if rise > RISE or cosine < 0 or ratios[1] < ratios[0] / 2 or run.number == run.steps:
                numbers = {
                    "rise": rise,
                    "cosine": cosine,
                    "before_ratio": ratios[0],
                    "after_ratio": ratios[1],
                }
                yield {"size": size, "warm_up": warm_up, "seed": seed, "update": run.number} | digits(numbers)


def part_rows() -> Iterator[dict]:
    """Yield a row for each of these runs and each kind of parameter.

    `undone_loss` is that after the update with the old parameters of this kind put back, `alone_loss` that with only these updated.
    """
    for known, run, (batch, *_) in spoiled_runs():
        before, grads = run.gradients(batch)
        after = updated(run, grads)
        for kind, names in group_parameters(run.p).items():
            changed, left = ({} for _ in range(2))
            for name, rows in names.items():
                changed[name], left[name] = run.p[name].clone(), after.p[name].clone()
                changed[name][rows], left[name][rows] = after.p[name][rows], run.p[name][rows]
            numbers = {
                "before_loss": before,
                "after_loss": after.look(batch)[0],
                "undone_loss": after.look(batch, after.p | left)[0],
                "alone_loss": run.look(batch, run.p | changed)[0],
            }
            yield known | {"kind": kind} | digits(numbers)


def fraction_rows() -> Iterator[dict]:
    """Yield a row for each of these runs: the loss of the batch after FRACTIONS of the update, and after two parts of it.

    `repeated_loss` is that after the part along the update before, `new_loss` that after the rest, and `cosine` that of both updates.
    `norm` is that of the clipped gradients, `value_norm` that of attention's values alone, now and one update `earlier`.
    """
    for known, run, batches in spoiled_runs():
        before, grads = run.gradients(batches[0])
        after = updated(run, grads)
        earlier = copy.copy(run)
        earlier.p = run.old
        steps = [
            flatten({name: b[name] - a[name] for name in a}) for a, b in ((run.old, run.p), (run.p, after.p))
        ]
        share = float(steps[0] @ steps[1] / (steps[0] @ steps[0]))
        repeated = {name: share * (tensor - run.old[name]) for name, tensor in run.p.items()}
        rest = {name: tensor - repeated[name] for name, tensor in after.p.items()}
        values = group_parameters(run.p)["value"]
        norms = [
            float(flatten({name: some[name][rows] for name, rows in values.items()}).norm())
            for some in (earlier.gradients(batches[-1])[1], grads)
        ]
        places = {
            name: {each: t.lerp(after.p[each], part) for each, t in run.p.items()}
            for name, part in FRACTIONS.items()
        }
        places |= {
            "after": after.p,
            "repeated": {name: tensor + repeated[name] for name, tensor in run.p.items()},
            "new": rest,
        }
        numbers = {"before_loss": before}
        numbers |= {f"{name}_loss": run.look(batches[0], p)[0] for name, p in places.items()}
        numbers |= {
            "cosine": float(F.cosine_similarity(*steps, dim=0)),
            "norm": float(flatten(grads).norm()),
            "earlier_value_norm": norms[0],
            "value_norm": norms[1],
        }
        yield known | digits(numbers)


def flatten(tensors: Tensors) -> Tensor:
    """Return all elements as one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def group_parameters(p: Tensors) -> dict[str, dict[str, slice]]:
    """Return the rows of the parameters of each kind, over all blocks; attention's input projection is three kinds."""
    groups: dict[str, dict[str, slice]] = {}
    for name, tensor in p.items():
        part = name.split(".")[1 if "block" in name else 0]
        rows = {part: slice(None)}
        if part == "qkv":
            third = len(tensor) // 3
            rows |= {
                kind: slice(i * third, (i + 1) * third) for i, kind in enumerate(("query", "key", "value"))
            }
        for kind, where in rows.items():
            groups.setdefault(kind, {})[name] = where
    return groups


def scale_rows() -> Iterator[dict]:
    """Yield what the followed run predicts before its worst update, with its shared vector scaled by each of SCALES."""
    run, (batch, *_) = replay(*FOLLOWED, SPOILED)
    stream = read_stream(run, batch)
    shared = stream.mean((0, 1))
    for scale in SCALES:
        loss, logits = compute_head(run, stream + (scale - 1) * shared, batch)
        told = compute_shares(logits, batch)
        yield {"scale": scale, "loss": f"{loss:.4f}"} | {name: f"{value:.4g}" for name, value in told.items()}


ROWS = {
    "path": path_rows,
    "causes": cause_rows,
    "steps": step_rows,
    "parts": part_rows,
    "fractions": fraction_rows,
    "scales": scale_rows,
    "settings": setting_rows,
}

if __name__ == "__main__":
    torch.set_num_threads(1)  # small matmuls: threads only wait for each other
    write(ROWS[sys.argv[2]]() if len(sys.argv) > 2 else run_rows())
