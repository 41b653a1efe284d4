"""A strict transport for a checked ring: torch.distributed's sends and receives without gloo's leniency.

In gloo, a small send completes before it is received, and a block often arrives before the wait; a GPU's network
guarantees neither. Here, a send completes only after the neighbour has begun to receive, a received tensor is
NaN until the wait, and no buffer may change in transit.
"""

import datetime
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

FIRST_TAG = 1000
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)
PATCHED = ("isend", "irecv", "send", "recv")


class Broken(Exception):
    """A violation of the transport's rules; `mistake` is the known mistake that explains it.

    If a rank's wait timed out, `stuck` is "send" or "receive", the rank that it waits for, and the group ranks
    from which it has begun to receive.
    """

    def __init__(self, mistake: str, words: str, stuck: tuple[str, int, tuple[int, ...]] | None = None):
        super().__init__(words)
        self.mistake = mistake
        self.stuck = stuck


class Wire:
    """The sends and receives of one rank, within `route`; tensors narrower than `dtype` must not be sent."""

    def __init__(self, seconds: float, dtype: torch.dtype):
        self.patience = datetime.timedelta(seconds=seconds)
        self.seconds = seconds
        self.dtype = dtype
        self.real: dict[str, Callable[..., Any]] = {name: getattr(c10d, name) for name in PATCHED}
        self.numbers: dict[tuple, int] = defaultdict(int)
        self.pending: list[Send | Receive] = []
        self.sent: list[tuple[torch.Tensor, Any]] = []
        self.sends_in_16_bits = 0
        """Number of sent tensors whose values all fit into 16 bits."""

    @contextmanager
    def route(self) -> Iterator[None]:
        """Route torch.distributed's transfers over this wire. Raises Broken if a transfer is never waited for."""
        replacements = {"isend": self.isend, "irecv": self.irecv, "send": self.send, "recv": self.recv}
        try:
            for module in (dist, c10d):
                for name, function in replacements.items():
                    setattr(module, name, function)
            yield
        finally:
            for module in (dist, c10d):
                for name, function in self.real.items():
                    setattr(module, name, function)
        if self.pending:
            message = f"{len(self.pending)} sends and receives are never waited for"
            raise Broken("never-waited", f"{message}: a block may be read before it has arrived")
        for _, work in self.sent:
            work.wait(self.patience)

    def isend(self, tensor, dst=None, group=None, tag=0, group_dst=None):
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize < self.dtype.itemsize:
            message = f"a block is sent as {tensor.dtype}, its tensors are {self.dtype}".replace("torch.", "")
            raise Broken("travels-in-bfloat16", f"{message}: the sum is rounded at every rank")
        self.sends_in_16_bits += fits_in_16_bits(tensor)
        return self._begin(Send, tensor, dst, group, group_dst, tag)

    def irecv(self, tensor, src=None, group=None, tag=0, group_src=None):
        return self._begin(Receive, tensor, src, group, group_src, tag)

    def send(self, tensor, dst=None, group=None, tag=0, group_dst=None):
        self.isend(tensor, dst, group, tag, group_dst).wait()

    def recv(self, tensor, src=None, group=None, tag=0, group_src=None):
        self.irecv(tensor, src, group, tag, group_src).wait()

    def _begin(self, kind, tensor, peer, group, group_peer, tag):
        group = group or dist.group.WORLD
        assert group is not None  # the default group exists
        other = dist.get_group_rank(group, peer) if group_peer is None else group_peer
        if other == dist.get_rank(group):
            raise Broken("wrong-neighbour", f"group rank {other} sends to itself, or receives from itself")
        if not tensor.is_contiguous():
            error_message = "a non-contiguous tensor is sent or received into"
            raise Broken("not-contiguous", f"{error_message}: a transfer reads or writes contiguous memory")
        for earlier in self.pending:
            if (isinstance(earlier, Receive) or kind is Receive) and overlap(earlier.tensor, tensor):
                error_message = "a block is received into memory that is still being sent or received into"
                raise Broken("overwritten-while-sent", error_message)
        key = (kind, group, other, tag)
        number, self.numbers[key] = self.numbers[key], self.numbers[key] + 1
        message = kind(self, tensor, group, other, FIRST_TAG + 3 * number)
        self.pending.append(message)
        return message


class Message:
    """Base class of sends and receives; header, data and receipt have separate tags."""

    def __init__(self, wire: Wire, tensor: torch.Tensor, group, other: int, tag: int):
        self.wire = wire
        self.tensor = tensor
        self.group = group
        self.other = other
        self.tag = tag
        self.begin()

    def header(self) -> torch.Tensor:
        return torch.tensor([self.tensor.numel(), DTYPES.index(self.tensor.dtype)])

    def post(self, tensor: torch.Tensor, part: int) -> Any:
        """Send a tensor through gloo; keep it and the work alive until the send is done."""
        work = self.wire.real["isend"](tensor, group=self.group, tag=self.tag + part, group_dst=self.other)
        self.wire.sent.append((tensor, work))
        return work

    def fetch(self, tensor: torch.Tensor, part: int) -> Any:
        return self.wire.real["irecv"](tensor, group=self.group, tag=self.tag + part, group_src=self.other)

    def begin(self) -> None:
        raise NotImplementedError

    def wait(self, timeout=None) -> bool:
        raise NotImplementedError

    def wait_for(self, work: Any, doing: str) -> None:
        """Wait for a message from the other rank. Raises Broken if none arrives."""
        receiving_from = tuple(pending.other for pending in self.wire.pending if isinstance(pending, Receive))
        try:
            work.wait(self.wire.patience)
        except RuntimeError as error:
            message = f"timed out waiting to {doing} group rank {self.other} ({self.wire.seconds:g} s)"
            if "imed out" not in str(error):
                message = f"lost group rank {self.other}, waiting to {doing} it"
            raise Broken("", message, (doing.split()[0], self.other, receiving_from)) from error


class Send(Message):
    """A send, which completes once the other rank has begun to receive."""

    def begin(self) -> None:
        """Send a copy, which `wait` compares with the tensor."""
        self.copy = self.tensor.detach().clone()
        self.receipt = torch.zeros(2, dtype=torch.int64)
        self.post(self.header(), 0)
        self.post(self.copy.contiguous(), 1)
        self.answer = self.fetch(self.receipt, 2)

    def wait(self, timeout=None) -> bool:
        """Raise Broken if the other rank does not receive or expects another tensor, or if the tensor changed."""
        if self not in self.wire.pending:
            return True
        self.wait_for(self.answer, "send to")
        self.wire.pending.remove(self)
        if self.receipt.tolist() != self.header().tolist():
            message = f"sends {describe_header(self.header())} to group rank {self.other}"
            raise Broken("block-sizes-differ", f"{message}, which expects {describe_header(self.receipt)}")
        if not torch.equal(torch.nan_to_num(self.copy), torch.nan_to_num(self.tensor.detach())):
            raise Broken("overwritten-while-sent", "a block changes while it is being sent")
        return True


class Receive(Message):
    """A receive, whose tensor is NaN until `wait`."""

    def begin(self) -> None:
        """Notify the other rank, and fill the tensor with NaN."""
        self.announced = torch.zeros(2, dtype=torch.int64)
        self.coming = self.fetch(self.announced, 0)
        self.post(self.header(), 2)
        if self.tensor.is_floating_point():
            self.tensor.fill_(torch.nan)

    def wait(self, timeout=None) -> bool:
        """Copy the received data into the tensor. Raises Broken if nothing or another tensor arrives."""
        if self not in self.wire.pending:
            return True
        self.wait_for(self.coming, "receive from")
        if self.announced.tolist() != self.header().tolist():
            self.wire.pending.remove(self)
            message = f"expects {describe_header(self.header())} from group rank {self.other}"
            raise Broken("block-sizes-differ", f"{message}, which sends {describe_header(self.announced)}")
        data = torch.empty(self.tensor.shape, dtype=self.tensor.dtype)
        self.wait_for(self.fetch(data, 1), "receive from")
        self.wire.pending.remove(self)
        self.tensor.copy_(data)
        return True


def fits_in_16_bits(tensor: torch.Tensor) -> bool:
    """Return whether all elements fit into bfloat16 or into float16, and at least 8 are not 0."""
    if not tensor.is_floating_point() or int((tensor != 0).sum()) < 8:
        return False
    rounded_copies = (tensor.to(dtype).to(tensor.dtype) for dtype in (torch.bfloat16, torch.float16))
    return any(torch.equal(tensor, rounded) for rounded in rounded_copies)


def describe_header(header: torch.Tensor) -> str:
    count, dtype = header.tolist()
    return f"{count} elements of {str(DTYPES[dtype]).removeprefix('torch.')}"


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the address ranges of two tensors overlap."""

    def ends(tensor: torch.Tensor) -> tuple[int, int]:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        return start, start + (last + 1) * tensor.element_size() if tensor.numel() else start

    (a, b), (c, d) = ends(one), ends(other)
    return max(a, c) < min(b, d)
