"""Find the training steps of small GPTs that undo what was learned: `python -m book.measure unlearning`, twenty minutes on a CPU.

A model of puzzle 27's form trains on the bytes of this book, or of PyTorch's documentation. After each update the loss on the batch of
that update is measured again, so a rise is the update's doing, whatever the next batch holds. A row is a run; with the argument `path`
(`python -m book.measure unlearning_path`), a row is a place on the way of one run, and the loss is that of one batch throughout.
"""

import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from book.measure.shared import write
from harness.puzzles.p27.autograd import Model, Tensors, parameters
from harness.puzzles.p27.excerpts import read_text
from harness.toolchain import roots

TORCH_TEXT = Path(torch.__file__).with_name("_torch_docs.py")
TEXTS: dict[str, Callable[[], bytes]] = {
    "book": lambda: bytes(read_text(roots.book() / "src", CONTEXT).numpy()),
    "PyTorch": TORCH_TEXT.read_bytes,
}
SIZES = {"small": (3, 96), "large": (4, 192)}
"""Name -> blocks and channels."""
SEEDS = range(1, 9)
WARM_UPS = (1, 20, 100)
"""Steps in which the learning rate grows to its full size; 1 is no warm-up."""
STEPS, BATCH, CONTEXT = 60, 16, 64
RATE, DECAY, CLIP = 3e-3, 0.1, 1.0
BETAS, EPS = (0.9, 0.95), 1e-8
RISE = 0.25
"""Nats by which an update must raise the loss of its own batch to count as one that unlearns."""
FOLLOWED = ("PyTorch", "small", 1, 8)
"""The run whose way is followed: text, size, warm-up and seed."""
FROM, SPOILED, TO, PARTS = 8, 15, 17, 8
"""Updates after which the way begins, of which one spoils the model, and after which it ends; places between two updates."""
FREQUENT = b" teon"
"""Bytes whose probabilities are told."""


class Run:
    """A model in training: its parameters, AdamW's means, and the batch of the last update."""

    def __init__(self, text: str, size: str, warm_up: int, seed: int):
        self.text = torch.frombuffer(bytearray(TEXTS[text]()), dtype=torch.uint8)
        self.blocks, width = SIZES[size]
        self.seed, self.warm_up, self.number = seed, warm_up, 0
        self.p = parameters(
            layers=self.blocks, width=width, vocabulary=256, context=CONTEXT, seed=seed, dtype=torch.float32
        )
        self.means = {name: (torch.zeros_like(t), torch.zeros_like(t)) for name, t in self.p.items()}

    def batches(self) -> Iterator[Tensor]:
        """Random excerpts of the text, int64 [batch, context + 1], one for each step."""
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(STEPS):
            starts = torch.randint(len(self.text) - CONTEXT, (BATCH, 1), generator=generator)
            yield self.text[starts + torch.arange(CONTEXT + 1)].long()

    def gradients(self, batch: Tensor) -> tuple[float, Tensors]:
        """The loss of a batch and the gradients, clipped to a common norm of 1."""
        leaves = {name: t.detach().requires_grad_() for name, t in self.p.items()}
        loss = Model(recording=False).loss(batch[:, :-1], batch[:, 1:], leaves)
        grads = torch.autograd.grad(loss, list(leaves.values()))
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        factor = (CLIP / (norm + 1e-6)).clamp(max=1)
        return float(loss.detach()), {name: grad * factor for name, grad in zip(leaves, grads, strict=True)}

    def update(self, grads: Tensors) -> None:
        """One AdamW step, as puzzle 27 has it."""
        self.number += 1
        rate = RATE * min(1.0, self.number / self.warm_up)
        new = {}
        for name, t in self.p.items():
            mean, square = self.means[name]
            mean.lerp_(grads[name], 1 - BETAS[0])
            square.lerp_(grads[name].square(), 1 - BETAS[1])
            root = (square / (1 - BETAS[1] ** self.number)).sqrt()
            kept = t * (1 - rate * DECAY) if t.dim() > 1 else t
            new[name] = kept - rate / (1 - BETAS[0] ** self.number) * mean / (root + EPS)
        self.p = new

    @torch.no_grad()
    def look(self, batch: Tensor, p: Tensors | None = None) -> tuple[float, list[Tensor]]:
        """The loss of a batch, and after each block the vector that all places share: the mean of the stream."""
        model = Model()
        loss = model.loss(batch[:, :-1], batch[:, 1:], p or self.p)
        streams = [model.outputs[f"block{i}"] for i in range(self.blocks)]
        return float(loss), [stream.mean((0, 1)) for stream in streams]


def worst(text: str, size: str, warm_up: int, seed: int) -> dict:
    """The update of a run that raises the loss of its own batch most, and what the next one makes of it."""
    run, rises, found, batch_of = Run(text, size, warm_up, seed), [], {}, None
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
    known = {"text": text, "size": size, "warm_up": warm_up, "seed": seed}
    count = sum(rise > RISE for rise in rises)
    return {**known, "unlearning": count, "rise": max(rises), **found, "end_loss": before}


def run_rows() -> Iterator[dict]:
    """A row for each run."""
    for run in product(TEXTS, SIZES, WARM_UPS, SEEDS):
        row = worst(*run)
        yield {name: f"{value:.4f}" if isinstance(value, float) else value for name, value in row.items()}


def path_rows() -> Iterator[dict]:
    """A row for each place on the way of one run: the loss of the batch of SPOILED, the shared vector, what is predicted.

    The vector is given in a plane: along what it was before that update, and across, towards what it is after.
    """
    run, places, batches = Run(*FOLLOWED), [], []
    for batch in run.batches():
        places.append(run.p)
        batches.append(batch)
        if run.number == TO:
            break
        run.update(run.gradients(batch)[1])
    batch = batches[SPOILED - 1]
    before, after = (run.look(batch, places[number])[1][-1] for number in (SPOILED - 1, SPOILED))
    along = before / before.norm()
    across = after - (after @ along) * along
    across /= across.norm()
    absent = torch.ones(256, dtype=torch.bool)
    absent[batch.flatten()] = False
    for place in range(FROM * PARTS, TO * PARTS + 1):
        number, part = divmod(place, PARTS)
        p = {
            name: t.lerp(places[number + (part > 0)][name], part / PARTS)
            for name, t in places[number].items()
        }
        loss, vectors = run.look(batch, p)
        shares = predicted(batch, p)
        told = {f"of_{byte:02x}": float(shares[byte]) for byte in FREQUENT}
        told |= {"of_absent": float(shares[absent].sum())}
        vector = {"along_size": float(vectors[-1] @ along), "across_size": float(vectors[-1] @ across)}
        yield {"place_updates": f"{place / PARTS:.3f}"} | {
            name: f"{value:.4f}" for name, value in {"loss": loss, **vector, **told}.items()
        }


@torch.no_grad()
def predicted(batch: Tensor, p: Tensors) -> Tensor:
    """The mean probability of each byte over all places of a batch."""
    model = Model()
    model.loss(batch[:, :-1], batch[:, 1:], p)
    return (model.outputs["ln_f"] @ p["token"].T).softmax(-1).mean((0, 1))


if __name__ == "__main__":
    torch.set_num_threads(1)  # small products: threads only wait for each other
    write(path_rows() if "path" in sys.argv[2:] else run_rows())
