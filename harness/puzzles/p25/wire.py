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
PATCHED_FUNCTIONS = ("isend", "irecv", "send", "recv")


class TransportError(Exception):
    """A violation of the transport's rules; `mistake` is the known mistake that explains it.

    If a rank's wait timed out, `blocked_wait` is "send" or "receive", the rank that it waits for, and the group ranks
    from which it has begun to receive.
    """

    def __init__(
        self, mistake: str, message: str, blocked_wait: tuple[str, int, tuple[int, ...]] | None = None
    ):
        super().__init__(message)
        self.mistake = mistake
        self.blocked_wait = blocked_wait


class Transport:
    """The sends and receives of one rank, within `patch_torch`; tensors narrower than `dtype` must not be sent."""

    def __init__(self, timeout_s: float, dtype: torch.dtype):
        self.timeout = datetime.timedelta(seconds=timeout_s)
        self.timeout_s = timeout_s
        self.dtype = dtype
        self.originals: dict[str, Callable[..., Any]] = {
            name: getattr(c10d, name) for name in PATCHED_FUNCTIONS
        }
        self.num_messages: dict[tuple, int] = defaultdict(int)
        self.pending: list[Send | Receive] = []
        self.sent_tensors: list[tuple[torch.Tensor, Any]] = []
        self.sends_in_16_bits = 0
        """Number of sent tensors whose values all fit into 16 bits."""

    @contextmanager
    def patch_torch(self) -> Iterator[None]:
        """Replace torch.distributed's transfers. Raises TransportError if a transfer is never waited for."""
        replacements = {"isend": self.isend, "irecv": self.irecv, "send": self.send, "recv": self.recv}
        try:
            for module in (dist, c10d):
                for name, function in replacements.items():
                    setattr(module, name, function)
            yield
        finally:
            for module in (dist, c10d):
                for name, function in self.originals.items():
                    setattr(module, name, function)
        if self.pending:
            message = f"{len(self.pending)} sends and receives are never waited for"
            raise TransportError("never-waited", f"{message}: a block may be read before it has arrived")
        for _, work in self.sent_tensors:
            work.wait(self.timeout)

    def isend(self, tensor, dst=None, group=None, tag=0, group_dst=None):
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize < self.dtype.itemsize:
            message = f"a block is sent as {tensor.dtype}, its tensors are {self.dtype}".replace("torch.", "")
            raise TransportError("travels-in-bfloat16", f"{message}: the sum is rounded at every rank")
        self.sends_in_16_bits += fits_in_16_bits(tensor)
        return self._start_message(Send, tensor, dst, group, group_dst, tag)

    def irecv(self, tensor, src=None, group=None, tag=0, group_src=None):
        return self._start_message(Receive, tensor, src, group, group_src, tag)

    def send(self, tensor, dst=None, group=None, tag=0, group_dst=None):
        self.isend(tensor, dst, group, tag, group_dst).wait()

    def recv(self, tensor, src=None, group=None, tag=0, group_src=None):
        self.irecv(tensor, src, group, tag, group_src).wait()

    def _start_message(self, message_class, tensor, peer, group, group_peer, tag):
        group = group or dist.group.WORLD
        assert group is not None  # the default group exists
        other_rank = dist.get_group_rank(group, peer) if group_peer is None else group_peer
        if other_rank == dist.get_rank(group):
            raise TransportError(
                "wrong-neighbour", f"group rank {other_rank} sends to itself, or receives from itself"
            )
        if not tensor.is_contiguous():
            error_message = "a non-contiguous tensor is sent or received into"
            raise TransportError(
                "not-contiguous", f"{error_message}: a transfer reads or writes contiguous memory"
            )
        for earlier in self.pending:
            if (isinstance(earlier, Receive) or message_class is Receive) and overlaps(
                earlier.tensor, tensor
            ):
                error_message = "a block is received into memory that is still being sent or received into"
                raise TransportError("overwritten-while-sent", error_message)
        key = (message_class, group, other_rank, tag)
        sequence_number, self.num_messages[key] = self.num_messages[key], self.num_messages[key] + 1
        message = message_class(self, tensor, group, other_rank, FIRST_TAG + 3 * sequence_number)
        self.pending.append(message)
        return message


class Message:
    """Base class of sends and receives; header, data and receipt have separate tags."""

    def __init__(self, transport: Transport, tensor: torch.Tensor, group, other_rank: int, tag: int):
        self.transport = transport
        self.tensor = tensor
        self.group = group
        self.other_rank = other_rank
        self.tag = tag
        self.start()

    def make_header(self) -> torch.Tensor:
        return torch.tensor([self.tensor.numel(), DTYPES.index(self.tensor.dtype)])

    def send_tensor(self, tensor: torch.Tensor, tag_offset: int) -> Any:
        """Send a tensor through gloo; keep it and the work alive until the send is done."""
        work = self.transport.originals["isend"](
            tensor, group=self.group, tag=self.tag + tag_offset, group_dst=self.other_rank
        )
        self.transport.sent_tensors.append((tensor, work))
        return work

    def receive_tensor(self, tensor: torch.Tensor, tag_offset: int) -> Any:
        return self.transport.originals["irecv"](
            tensor, group=self.group, tag=self.tag + tag_offset, group_src=self.other_rank
        )

    def start(self) -> None:
        raise NotImplementedError

    def wait(self, timeout=None) -> bool:
        raise NotImplementedError

    def wait_for(self, work: Any, action: str) -> None:
        """Wait for a message from the other rank. Raises TransportError if none arrives."""
        receiving_from = tuple(
            pending.other_rank for pending in self.transport.pending if isinstance(pending, Receive)
        )
        try:
            work.wait(self.transport.timeout)
        except RuntimeError as error:
            message = (
                f"timed out waiting to {action} group rank {self.other_rank} ({self.transport.timeout_s:g} s)"
            )
            if "imed out" not in str(error):
                message = f"lost group rank {self.other_rank}, waiting to {action} it"
            raise TransportError("", message, (action.split()[0], self.other_rank, receiving_from)) from error


class Send(Message):
    """A send, which completes once the other rank has begun to receive."""

    def start(self) -> None:
        """Send a copy, which `wait` compares with the tensor."""
        self.copy = self.tensor.detach().clone()
        self.receipt = torch.zeros(2, dtype=torch.int64)
        self.send_tensor(self.make_header(), 0)
        self.send_tensor(self.copy.contiguous(), 1)
        self.receipt_work = self.receive_tensor(self.receipt, 2)

    def wait(self, timeout=None) -> bool:
        """Raise TransportError if the other rank does not receive or expects another tensor, or if the tensor changed."""
        if self not in self.transport.pending:
            return True
        self.wait_for(self.receipt_work, "send to")
        self.transport.pending.remove(self)
        if self.receipt.tolist() != self.make_header().tolist():
            message = f"sends {describe_header(self.make_header())} to group rank {self.other_rank}"
            raise TransportError(
                "block-sizes-differ", f"{message}, which expects {describe_header(self.receipt)}"
            )
        if not torch.equal(torch.nan_to_num(self.copy), torch.nan_to_num(self.tensor.detach())):
            raise TransportError("overwritten-while-sent", "a block changes while it is being sent")
        return True


class Receive(Message):
    """A receive, whose tensor is NaN until `wait`."""

    def start(self) -> None:
        """Notify the other rank, and fill the tensor with NaN."""
        self.peer_header = torch.zeros(2, dtype=torch.int64)
        self.header_work = self.receive_tensor(self.peer_header, 0)
        self.send_tensor(self.make_header(), 2)
        if self.tensor.is_floating_point():
            self.tensor.fill_(torch.nan)

    def wait(self, timeout=None) -> bool:
        """Copy the received data into the tensor. Raises TransportError if nothing or another tensor arrives."""
        if self not in self.transport.pending:
            return True
        self.wait_for(self.header_work, "receive from")
        if self.peer_header.tolist() != self.make_header().tolist():
            self.transport.pending.remove(self)
            message = f"expects {describe_header(self.make_header())} from group rank {self.other_rank}"
            raise TransportError(
                "block-sizes-differ", f"{message}, which sends {describe_header(self.peer_header)}"
            )
        data = torch.empty(self.tensor.shape, dtype=self.tensor.dtype)
        self.wait_for(self.receive_tensor(data, 1), "receive from")
        self.transport.pending.remove(self)
        self.tensor.copy_(data)
        return True


def fits_in_16_bits(tensor: torch.Tensor) -> bool:
    """Return whether all elements fit into bfloat16 or into float16, and at least 8 are not 0."""
    if not tensor.is_floating_point() or int((tensor != 0).sum()) < 8:
        return False
    rounded_copies = (tensor.to(dtype).to(tensor.dtype) for dtype in (torch.bfloat16, torch.float16))
    return any(torch.equal(tensor, rounded) for rounded in rounded_copies)


def describe_header(header: torch.Tensor) -> str:
    num_elements, dtype = header.tolist()
    return f"{num_elements} elements of {str(DTYPES[dtype]).removeprefix('torch.')}"


def overlaps(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether the address ranges of two tensors overlap."""

    def get_bounds(tensor: torch.Tensor) -> tuple[int, int]:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        return start, start + (last + 1) * tensor.element_size() if tensor.numel() else start

    (a, b), (c, d) = get_bounds(first), get_bounds(second)
    return max(a, c) < min(b, d)
