"""Which rank of a group is gone, in one sentence, in the place of what gloo says of its sockets.

gloo raises wherever it notices: while it waits, but also where a send or a receive begins. It connects every rank with every
other, so that one who has lost a neighbour can ask who else is there. NCCL says nothing of the kind; there both neighbours are named.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

TAG = 2**20
"""Of the receives by which others are asked for; a ring uses no tags."""
LOST = r"gone or late|\.cc:\d+\]|onnection|imed out|Broken pipe|[Gg]loo|NCCL"
"""What is said of a rank that is gone or late, and never of a mistake in the code."""
asked: list[tuple[torch.Tensor, Any]] = []
"""gloo wants what it may still write to: it lives as long as the process, which has lost its ring."""


def name_losses(module: dict[str, Any]) -> None:
    """Puts others in the place of a ring's `exchange` and `finish`, which raise what `losses_named` does."""
    exchange, finish = module["exchange"], module["finish"]

    def named_exchange(tensors, shapes, group):
        with losses_named(group, "beginning a transfer"):
            return exchange(tensors, shapes, group)

    def named_finish(works, step, group):
        with losses_named(group, f"step {step}"):
            return finish(works, step, group)

    module.update(exchange=named_exchange, finish=named_finish)


@contextmanager
def losses_named(group, where: str) -> Iterator[None]:
    """Raises RuntimeError, one sentence with this rank, where it is and who is gone or late, for what a backend raises."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # On a time limit gloo closes this rank's connections itself: they say nothing of the others any more.
        late = "imed out" in str(error)
        lost = [] if late else gone(group)
        if not lost and not re.search(LOST, str(error)):
            raise
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        raise RuntimeError(f"rank {rank} of {size}, {where}: {said(lost, rank, size, error)}") from error


def said(lost: list[int], rank: int, size: int, error: RuntimeError) -> str:
    """Who is gone, or who of the neighbours is gone or late."""
    if lost:
        who = f"rank {lost[0]} is" if len(lost) == 1 else f"ranks {' and '.join(map(str, lost))} are"
        return f"{who} gone, or gave up on another"
    neighbours = " or ".join(map(str, sorted({(rank - 1) % size, (rank + 1) % size})))
    words = plain(str(error.__cause__ or error))
    return f"rank {neighbours} is {'late' if 'imed out' in words else 'gone or late'}: {words}"


def plain(words: str) -> str:
    """What gloo says without the place in its own source, and without advice."""
    words = re.sub(r"\[\S+\.cc:\d+\] ", "", " ".join(words.split()))
    return words.partition(". This is typically")[0].replace(";", ",")[:160]


def gone(group) -> list[int]:
    """The ranks of a group to which there is no connection any more, as far as its backend can tell; in order."""
    if dist.get_backend(group) != "gloo":
        return []
    return [
        rank
        for rank in range(dist.get_world_size(group))
        if rank != dist.get_rank(group) and not connected(rank, group)
    ]


def connected(rank: int, group) -> bool:
    """Whether a receive from a rank of a group on gloo can begin: not so where the connection is closed."""
    tensor = torch.empty(1)
    try:
        asked.append((tensor, dist.irecv(tensor, group=group, group_src=rank, tag=TAG)))
    except RuntimeError:
        return False
    return True
