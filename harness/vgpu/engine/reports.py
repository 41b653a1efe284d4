"""Turn the faults that the engine and the checks report into findings."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from harness.vgpu.checks.findings import Finding, Findings, index_text, mark_name, plural, with_article
from harness.vgpu.checks.races import AccessLog
from harness.vgpu.checks.trial import SavedTensors
from harness.vgpu.engine.interpreter.executor import Trap
from harness.vgpu.engine.opcodes.codegen import Code
from harness.vgpu.memory.access import Access
from harness.vgpu.memory.arena import ITEMSIZE, NOWHERE, NULL_PAGE, Arena, Extent, extent_at
from harness.vgpu.ptx.places import is_library_algorithm, place
from harness.vgpu.ptx.provenance import address_origin

FORBIDDEN = {
    "store to constant memory": "a constant",
    "store to an input": "an input, which this launch may only read",
    "undeclared atomic": "a result that is promised in a fixed order: what atomics add up differs from run"
    " to run",
}


class Reports:
    """Builds findings with a place, a tensor and an index, a block and a thread."""

    arena: Arena
    findings: Findings
    log: AccessLog
    launch: Any  # machine.Launch, machine.Kernel: machine.py imports this module
    kernel: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_extents: list[Extent]
    local_extents: list[Extent]
    doubtful: list[Finding]
    code: Code
    before: SavedTensors | None
    _owners: dict[int, list[Extent]]
    _param_bytes: bytes

    def block_index(self, number: int) -> tuple[int, int, int]:
        """Return (x, y, z) of a block number."""
        gx, gy, _ = self.grid
        return number % gx, number // gx % gy, number // (gx * gy)

    def thread_index(self, number: int) -> tuple[int, int, int]:
        """Return (x, y, z) of a thread's number in its block."""
        bx, by, _ = self.block
        return number % bx, number // bx % by, number // (bx * by)

    def thread_at(self, batch, position: int):
        """Return (block, thread) of a position in a batch."""
        position = int(position)
        block = int(batch.blocks[batch.block_of[position]])
        return self.block_index(block), self.thread_index(int(batch.thread_of[position]))

    def record(
        self,
        kind,
        instr,
        message,
        *,
        tensor="",
        index=None,
        block=None,
        thread=None,
        count=1,
        other=None,
        algorithm=None,
        verbs=frozenset(),
    ):
        """Add a finding about an instruction (for races with the other one, and the kinds of both accesses).

        `algorithm` False makes it an error, True a note; None decides by whose code the instructions are.
        """
        library = is_library_algorithm(instr.loc) if instr is not None else False
        if other is not None:
            library = library and is_library_algorithm(other.loc)
        if algorithm is not None:
            library = algorithm
        where, there = place(instr), place(other) if other is not None else ""
        causes = (_cause(instr),) if other is None else tuple(sorted((_cause(instr), _cause(other))))
        finding = Finding(
            kind, message, where, self.launch.name, tensor, index, block, thread, int(count), not library,
            there,
            verbs, instr, other,
        )  # fmt: skip
        if self.shared_extents:
            names = {shared_name(k): name for k, name in self.kernel.shared_names.items()}
            finding = finding.rename_tensors(lambda name: names.get(name, name))
        return self.findings.record(finding, (kind, causes, tensor))

    def at(self, batch, position, kind, instr, message, *, algorithm: bool | None = False, **more):
        """Add an error about the thread at a position of a batch, in user or library code."""
        block, thread = self.thread_at(batch, position)
        return self.record(kind, instr, message, block=block, thread=thread, algorithm=algorithm, **more)

    def bad_address(self, batch, A: Access, addresses, positions, inside, aligned):
        verb = _verb(A)
        if inside is None:
            what, message = f"out-of-bounds {verb}", "a store to the kernel's parameters"
            self.at(batch, positions[0], what, A.instr, message, algorithm=None)
            return
        cases = [("misaligned", inside & ~aligned)]
        null = ~inside & (addresses < NULL_PAGE) if A.space == "global" else np.zeros(len(addresses), bool)
        cases += [("null pointer", null), ("out-of-bounds", ~inside & ~null)]
        for what, bad in cases:
            which = np.flatnonzero(bad)
            if not len(which):
                continue
            first = int(which[0])
            address = int(addresses[first])
            extent = self._intended_tensor(A, address)
            outside = what == "out-of-bounds" and A.space in ("global", "shared")
            if self.log.events and outside and extent is not None:
                self.log.events.add_out_of_bounds(batch, A, extent, addresses[which], positions[which])
            tensor, index, message = self._explain(A, extent, what, verb, address)
            self.at(
                batch, positions[first], f"{what} {verb}", A.instr, message,
                tensor=tensor, index=index, count=len(which), algorithm=False if A.space == "global" else None,
            )  # fmt: skip

    def pointer_targets(self, A: Access) -> list[Extent]:
        """Return the tensors whose pointers this instruction computes its address from; none if unknown."""
        owners = self._owners.get(A.number)
        if owners is None:
            origin = address_origin(A.instr, self.code.origins) or ()
            values = [int.from_bytes(self._param_bytes[o : o + 8], "little") for o in origin]
            owners = self._owners[A.number] = [e for e in map(self.arena.find, values) if e is not None]
        return owners

    def report_stray(self, batch, A: Access, owners: list[Extent], addresses, positions, bad):
        """Report an address that was computed from a pointer to one tensor and is in another."""
        which = np.flatnonzero(bad)
        address = int(addresses[which[0]])
        owner, there = owners[0], self.arena.find(address)
        verb = _verb(A)
        side = "past the end" if address >= owner.end else "before the start"
        lands = (
            f"{mark_name(there.name)}{index_text(there.index(address, A.width))}"
            if there
            else "another tensor"
        )
        self.at(
            batch, positions[which[0]], f"out-of-bounds {verb}", A.instr,
            f"{with_article(verb)} so far {side} of {mark_name(owner.name)} that it lands in {lands}",
            tensor=owner.name, index=owner.index(address, A.width), count=len(which),
        )  # fmt: skip

    def _intended_tensor(self, A: Access, address: int) -> Extent | None:
        """Return the tensor that a wrong address probably meant."""
        if A.space == "global":
            if A.tensor is not NOWHERE:
                return A.tensor
            return self.arena.find(address) or self.arena.nearest(address)
        extents = self.shared_extents if A.space == "shared" else self.local_extents
        below = [x for x in extents if x.start <= address] or extents
        return max(below, key=lambda x: x.start, default=None)

    def _explain(self, A: Access, e: Extent | None, what: str, verb: str, address: int):
        if what == "null pointer":
            return "", None, f"the kernel uses a null pointer: address {address:#x}"
        if e is None:
            return "", None, f"{verb} of {plural(A.nbytes, 'byte')} at {address:#x}, where there is no tensor"
        index = e.index(address, A.width)
        if what == "misaligned":
            return (
                e.name,
                index,
                f"{verb} of {A.nbytes} bytes at {mark_name(e.name)}{index_text(index)} is not {A.nbytes}-byte"
                " aligned",
            )
        size = (e.end - e.start) // (A.width if not e.dtype else max(1, _itemsize(e, A)))
        outside = address - e.end if address >= e.end else e.start - address
        side = "past the end" if address >= e.start else "before the start"
        shape = f"shape {list(e.shape)}" if len(e.shape) > 1 else plural(size, "element")
        if outside > 1 << 24:
            return (
                e.name,
                index,
                f"{verb} of {plural(A.nbytes, 'byte')} at {address:#x}, far from any tensor (nearest:"
                f" {mark_name(e.name)})",
            )
        return (
            e.name,
            index,
            f"{with_article(verb)} {side} of {mark_name(e.name)} ({shape}): element {index_text(index)}",
        )

    def report_unwritten(self, batch, A: Access, bad, index, L):
        """Report a read of unwritten memory.

        In the library's algorithms it is an error where the memory is global, or where user code has kept
        threads of the block away that would have written it.
        """
        positions = batch.positions(L)
        bad = np.broadcast_to(bad.any(axis=-1) if np.ndim(bad) > np.ndim(index) else bad, len(positions))
        which = np.flatnonzero(bad)
        where = np.broadcast_to(index, len(positions))[which]
        if A.space == "global":
            sink = self.arena.sink >> A.shift
            keep = (where < sink) | (where >= sink + (4096 >> A.shift))
            which, where = which[keep], where[keep]
        if not len(which):
            return
        first = int(which[0])
        byte = int(where[0]) << A.shift
        if A.space == "global":
            e = self.arena.find(self.arena.base + byte)
            element = e.index(self.arena.base + byte, A.width) if e else None
            tensor = e.name if e else ""
        else:
            base = batch.shared_base if A.space == "shared" else batch.local_base
            extents = self.shared_extents if A.space == "shared" else self.local_extents
            offset = byte - int(base[positions[first]])
            e = extent_at(extents, offset)
            tensor = e.name if e else f"{A.space} memory"
            element = e.index(offset, A.width) if e else None
        verb = "an atomic updates" if A.kind == "A" and A.instr.op != "ld" else "reads"
        message = f"{verb} {mark_name(tensor)}{index_text(element)}, which was never written"
        kind, algorithm = "uninitialised read", False if A.space == "global" else None
        if A.space == "shared":
            number = int(batch.block_of[positions[first]])
            gone = batch.threads - int(batch.alive[number])
            if batch.splits.split_by_user(A.instr, block=number):
                algorithm = False
                if gone:
                    kind = "early return"
                    message += (
                        f": {gone} of {plural(batch.threads, 'thread')} of the block had already returned"
                    )
        finding = self.at(
            batch, positions[first], kind, A.instr, message,
            tensor=tensor, index=element, count=len(which), algorithm=algorithm,
        )  # fmt: skip
        doubtful = (
            self.before is not None and A.space == "shared" and A.kind == "R" and kind == "uninitialised read"
        )
        if doubtful and not any(f is finding for f in self.doubtful):
            self.doubtful.append(finding)

    def report_forbidden(self, batch, A: Access, tensor: Extent, addresses, L):
        """Report a write to a tensor that forbids it, or a stray one to another tensor."""
        owners = self.pointer_targets(A)
        if (tensor.forbids == "undeclared atomic" and _verb(A) != "atomic") or (
            owners and tensor not in owners
        ):
            return
        positions = batch.positions(L)
        index = tensor.index(int(np.broadcast_to(addresses, len(positions))[0]), A.width)
        verb = "an atomic updates" if _verb(A) == "atomic" else "the kernel writes to"
        self.at(
            batch, positions[0], tensor.forbids, A.instr,
            f"{verb} {mark_name(tensor.name)}{index_text(index)}, {FORBIDDEN[tensor.forbids]}",
            tensor=tensor.name, index=index, count=len(positions),
        )  # fmt: skip

    def barrier_divergence(self, batch, waiting, deadlock: bool, only=None):
        """Report threads of one thread block that wait at different barriers, or never arrive."""
        for block in np.flatnonzero(batch.alive > 0 if only is None else only):
            groups = [(i, L[batch.block_of[L] == block]) for i, L, _ in waiting]
            groups = [(i, L) for i, L in groups if len(L)]
            places = {i for i, _ in groups}
            if not groups or (len(places) < 2 and not deadlock):
                continue
            index, L = groups[0]
            term = batch.program.blocks[index].term
            waiting_ = sum(len(x) for _, x in groups)
            if len(places) > 1:
                other = batch.program.blocks[next(i for i, _ in groups if i != index)].term
                message = (
                    f"{plural(len(L), 'thread')} of the block stopped here and {waiting_ - len(L)} at"
                    " another barrier:"
                    " every thread of a block must reach the same barrier"
                )
            else:
                other = None
                message = (
                    f"{len(L)} of {plural(int(batch.alive[block]), 'thread')} stopped at this barrier, the"
                    " others never come:"
                    " every thread of a block must reach it"
                )
            readers = any(
                batch.splits.split_by_user(batch.program.blocks[i].term, block=block) for i in places
            )
            self.at(
                batch, L[0], "barrier divergence", term, message, count=len(L), other=other,
                algorithm=False if readers else None,
            )  # fmt: skip

    def early_exit(self, batch, term, block: int, torn: bool):
        """Report threads that returned while others of their block wait at a barrier; `torn`: others of their
        warp too.

        Whole warps may return before a barrier in user code, but not before those of a library collective,
        which needs every thread of the block.
        """
        gone, all_of = int(batch.threads - batch.alive[block]), plural(batch.threads, "thread")
        readers = batch.splits.split_by_user(term, block=block)
        kind, algorithm = "barrier divergence", False
        if torn:
            algorithm = False if readers else None
            message = (
                f"{gone} of {all_of} of the block, some of them from the same warp as threads that wait here,"
                " returned without this barrier: every thread of a block must reach it"
            )
        elif readers and is_library_algorithm(term.loc):
            message = (
                f"{gone} of {all_of} of the block returned before this call into the library,"
                " which needs every thread of the block"
            )
        else:
            kind, algorithm = "threads exited before a barrier", True
            message = (
                f"{plural(gone, 'thread')} of the block (whole warps) had already returned when the others"
                " waited at this barrier; the hardware counts them as arrived"
            )
        number = self.block_index(int(batch.blocks[block]))
        self.record(kind, term, message, block=number, algorithm=algorithm)

    def warp_divergence(self, batch, instr, position, count: int):
        """Report threads that an instruction names and that are alive elsewhere."""
        readers = batch.splits.split_by_user(instr, warp=int(batch.warp_of[position]))
        self.at(
            batch, position, "warp divergence", instr,
            f"{instr.name} names threads of its warp that are elsewhere in the program: all of them must"
            " reach it",
            count=count, algorithm=False if readers else None,
        )  # fmt: skip

    def outside_mask(self, batch, instr, position, count: int):
        """Report threads that execute an instruction whose mask leaves them out."""
        message = f"{instr.name} is executed by a thread that its mask leaves out: the result is undefined"
        self.at(batch, position, "warp divergence", instr, message, count=count)

    def shuffle_absent(self, batch, instr, position, lane: int, count: int):
        """Report a shuffle from a lane that is elsewhere, has returned, or never existed (a partial warp)."""
        warp = int(batch.warp_of[position])
        missing = not int(batch.initial_bits[warp]) >> lane & 1
        readers = missing or batch.splits.split_by_user(instr, warp=warp)
        self.at(
            batch, position, "shuffle from an absent thread", instr,
            f"reads a value from lane {lane} of the warp, which does not take part: the result is undefined",
            count=count, algorithm=False if readers else None,
        )  # fmt: skip

    def incomplete_warp(self, batch, instr, positions):
        readers = batch.splits.split_by_user(instr, warp=int(batch.warp_of[positions[0]]))
        message = f"{instr.name} needs all 32 threads of the warp"
        self.at(batch, positions[0], "warp divergence", instr, message, algorithm=False if readers else None)
        raise Trap(_InstructionBlock(instr), batch, positions)

    def incomplete_warpgroup(self, batch, instr, positions):
        """Report an instruction that is not executed by four whole warps, the first a multiple of four."""
        message = f"{instr.name} needs all 128 threads of a warpgroup"
        self.at(batch, positions[0], "warp divergence", instr, message)
        raise Trap(_InstructionBlock(instr), batch, positions)

    def misaligned_copy(self, batch, instr, position, value: int, what: str):
        """Report a bulk copy with a misaligned address, size or coordinate."""
        unit = 128 if "tensor" in instr.mods and "address" in what else 16
        message = f"the {what}, {plural(value, 'byte')}, is not a multiple of {unit}"
        self.at(batch, position, "misaligned bulk copy", instr, message)

    def report_unordered(self, batch, kind: str, instr, other, thread: int, count: int, message: str):
        """Report an asynchronous operation that is not ordered with another access; threads are numbered in
        the batch."""
        block = self.block_index(int(batch.blocks[thread // batch.threads]))
        self.record(
            kind, instr, message, block=block, thread=self.thread_index(thread % batch.threads), count=count,
            other=other,
            algorithm=False,
        )  # fmt: skip

    def register_hazard(self, batch, instr, product, register: str, role: str, position, count: int):
        """Report a use of a product's register before the product is waited for (role: "sums" or "factor")."""
        kind, holds = (
            ("accumulator in use", "sums") if role == "sums" else ("operand overwritten", "a factor")
        )
        message = f"{register} holds {holds} of a wgmma that wgmma.wait_group has not waited for"
        self.at(batch, position, kind, instr, message, count=count, other=product)

    def register_budget(self, batch, instr, position, message: str, block: int = 0, thread: int = 0):
        """Report a setmaxnreg that cannot be granted; block and thread are numbers where there is no
        position."""
        first = self.block_index(int(batch.blocks[block])), self.thread_index(thread)
        there, thread_ = first if position is None else self.thread_at(batch, position)
        self.record("register budget", instr, message, block=there, thread=thread_, algorithm=False)

    def mbarrier_unready(self, batch, A: Access, position, count: int):
        message = "the mbarrier at this address has not been initialised"
        self.at(batch, position, "mbarrier not initialised", A.instr, message, count=count, algorithm=None)


def _cause(instr) -> str:
    """Return the key that groups findings: the place, or without a line table the opcode (unrolled loops
    repeat it)."""
    return instr.name if instr is not None and instr.loc is None else place(instr)


class _InstructionBlock:
    """A block of which only the instruction is known."""

    def __init__(self, instr):
        self.term = instr


def _verb(A: Access) -> str:
    """Name an access as the kinds of findings do."""
    if A.kind == "R" or A.instr.op == "ld":
        return "load"
    return "store" if A.kind == "W" or A.instr.op == "st" else "atomic"


def _itemsize(e: Extent, A: Access) -> int:
    return ITEMSIZE.get(e.dtype, A.width)


def shared_name(name: str) -> str:
    """Shorten `kernel_$__global_alloc_1_$__gpu_shared_mem` to `shared array 1`."""
    numbered = re.search(r"__global_alloc_(\d+)", name)
    return f"shared array {numbered[1]}" if numbered else f"shared array {name}"
