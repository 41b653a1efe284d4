"""Record findings about the errors that the engine and the checks detect."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from harness.vgpu.checks.findings import Finding, Findings, add_article, format_count, format_index, mark_name
from harness.vgpu.checks.races import AccessLog
from harness.vgpu.checks.trial import SavedTensors
from harness.vgpu.engine.interpreter.executor import Trap
from harness.vgpu.engine.opcodes.codegen import Code
from harness.vgpu.memory.access import Access
from harness.vgpu.memory.arena import ITEMSIZE, NO_EXTENT, NULL_PAGE, Arena, Extent, find_extent
from harness.vgpu.ptx.locations import format_location, is_library_algorithm
from harness.vgpu.ptx.provenance import get_address_origin

WRITE_VIOLATIONS = {
    "store to constant memory": "a constant",
    "store to an input": "an input, which this launch may only read",
    "undeclared atomic": "a result that must be summed in a fixed order: the order of atomics differs from"
    " run to run",
}


class Reports:
    """Record findings with their location, tensor and index, block and thread."""

    arena: Arena
    findings: Findings
    log: AccessLog
    launch: Any  # machine.Launch, machine.Kernel: machine.py imports this module
    kernel: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_extents: list[Extent]
    local_extents: list[Extent]
    uncertain_findings: list[Finding]
    code: Code
    tensors_before_launch: SavedTensors | None
    _owners: dict[int, list[Extent]]
    _param_bytes: bytes

    def block_index(self, number: int) -> tuple[int, int, int]:
        gx, gy, _ = self.grid
        return number % gx, number // gx % gy, number // (gx * gy)

    def thread_index(self, number: int) -> tuple[int, int, int]:
        bx, by, _ = self.block
        return number % bx, number // bx % by, number // (bx * by)

    def get_thread_index(self, batch, position: int):
        position = int(position)
        block = int(batch.blocks[batch.block_of[position]])
        return self.block_index(block), self.thread_index(int(batch.thread_of[position]))

    def record(
        self, kind, instr, message, *, tensor="", index=None, block=None, thread=None, count=1, other_instr=None,
        is_note=None, access_kinds=frozenset(),
    ):  # fmt: skip
        """Record a finding about an instruction; `other_instr` is the other instruction of a race, and
        `access_kinds` are the kinds of both accesses.

        If `is_note` is None, the finding is a note if all its code is library code.
        """
        library = is_library_algorithm(instr.loc) if instr is not None else False
        if other_instr is not None:
            library = library and is_library_algorithm(other_instr.loc)
        if is_note is not None:
            library = is_note
        location, other_location = (
            format_location(instr),
            format_location(other_instr) if other_instr is not None else "",
        )
        causes = (
            (get_cause(instr),)
            if other_instr is None
            else tuple(sorted((get_cause(instr), get_cause(other_instr))))
        )
        finding = Finding(
            kind, message, location, self.launch.name, tensor, index, block, thread, int(count), not library,
            other_location, access_kinds, instr, other_instr,
        )  # fmt: skip
        if self.shared_extents:
            names = {shorten_shared_name(k): name for k, name in self.kernel.shared_names.items()}
            finding = finding.rename_tensors(lambda name: names.get(name, name))
        return self.findings.record(finding, (kind, causes, tensor))

    def record_at(self, batch, position, kind, instr, message, *, is_note: bool | None = False, **more):
        block, thread = self.get_thread_index(batch, position)
        return self.record(kind, instr, message, block=block, thread=thread, is_note=is_note, **more)

    def report_bad_address(self, batch, access: Access, addresses, positions, inside, aligned):
        verb = get_verb(access)
        if inside is None:
            fault, message = f"out-of-bounds {verb}", "a store to the kernel's parameters"
            self.record_at(batch, positions[0], fault, access.instr, message, is_note=None)
            return
        cases = [("misaligned", inside & ~aligned)]
        null = (
            ~inside & (addresses < NULL_PAGE) if access.space == "global" else np.zeros(len(addresses), bool)
        )
        cases += [("null pointer", null), ("out-of-bounds", ~inside & ~null)]
        for fault, bad in cases:
            indices = np.flatnonzero(bad)
            if not len(indices):
                continue
            first = int(indices[0])
            address = int(addresses[first])
            extent = self._guess_tensor(access, address)
            outside = fault == "out-of-bounds" and access.space in ("global", "shared")
            if self.log.events and outside and extent is not None:
                self.log.events.add_out_of_bounds(
                    batch, access, extent, addresses[indices], positions[indices]
                )
            is_note = False if access.space == "global" else None
            message = self._describe_bad_address(access, extent, fault, verb, address)
            owner = extent if fault != "null pointer" else None
            self.record_at(
                batch, positions[first], f"{fault} {verb}", access.instr, message, tensor=owner.name if owner else "",
                index=owner.index(address, access.width) if owner else None, count=len(indices), is_note=is_note,
            )  # fmt: skip

    def get_pointer_targets(self, access: Access) -> list[Extent]:
        owners = self._owners.get(access.number)
        if owners is None:
            origin = get_address_origin(access.instr, self.code.origins) or ()
            values = [int.from_bytes(self._param_bytes[o : o + 8], "little") for o in origin]
            owners = self._owners[access.number] = [e for e in map(self.arena.find, values) if e is not None]
        return owners

    def report_stray_address(self, batch, access: Access, owners: list[Extent], addresses, positions, bad):
        """Report an address that was computed from a pointer to one tensor but is inside another."""
        indices = np.flatnonzero(bad)
        address = int(addresses[indices[0]])
        owner, target = owners[0], self.arena.find(address)
        verb = get_verb(access)
        side = "past the end" if address >= owner.end else "before the start"
        actual = (
            f"{mark_name(target.name)}{format_index(target.index(address, access.width))}"
            if target
            else "another tensor"
        )
        self.record_at(
            batch, positions[indices[0]], f"out-of-bounds {verb}", access.instr,
            f"{add_article(verb)} so far {side} of {mark_name(owner.name)} that it lands in {actual}",
            tensor=owner.name, index=owner.index(address, access.width), count=len(indices),
        )  # fmt: skip

    def _guess_tensor(self, access: Access, address: int) -> Extent | None:
        """Guess the tensor that an invalid address was meant for."""
        if access.space == "global":
            if access.tensor is not NO_EXTENT:
                return access.tensor
            return self.arena.find(address) or self.arena.find_nearest(address)
        extents = self.shared_extents if access.space == "shared" else self.local_extents
        below = [x for x in extents if x.start <= address] or extents
        return max(below, key=lambda x: x.start, default=None)

    def _describe_bad_address(
        self, access: Access, e: Extent | None, fault: str, verb: str, address: int
    ) -> str:
        if fault == "null pointer":
            return f"the kernel uses a null pointer: address {address:#x}"
        subject = f"{verb} of {format_count(access.nbytes, 'byte')} at"
        if e is None:
            return f"{subject} {address:#x}, where there is no tensor"
        name, element = mark_name(e.name), format_index(e.index(address, access.width))
        if fault == "misaligned":
            return f"{subject} {name}{element} is not {access.nbytes}-byte aligned"
        if (address - e.end if address >= e.end else e.start - address) > 1 << 24:
            return f"{subject} {address:#x}, far from any tensor (nearest: {name})"
        size = (e.end - e.start) // ITEMSIZE.get(e.dtype, access.width)
        side = "past the end" if address >= e.start else "before the start"
        shape = f"shape {list(e.shape)}" if len(e.shape) > 1 else format_count(size, "element")
        return f"{add_article(verb)} {side} of {name} ({shape}): element {element}"

    def report_unwritten(self, batch, access: Access, bad, index, active):
        """Report a read of unwritten memory.

        In library algorithms it is an error only if the memory is global, or if user code kept threads of the
        block from writing it.
        """
        positions = batch.get_positions(active)
        bad = np.broadcast_to(bad.any(axis=-1) if np.ndim(bad) > np.ndim(index) else bad, len(positions))
        indices = np.flatnonzero(bad)
        cells = np.broadcast_to(index, len(positions))[indices]
        if access.space == "global":
            sink = self.arena.sink >> access.shift
            keep = (cells < sink) | (cells >= sink + (4096 >> access.shift))
            indices, cells = indices[keep], cells[keep]
        if not len(indices):
            return
        first = int(indices[0])
        byte = int(cells[0]) << access.shift
        if access.space == "global":
            e = self.arena.find(self.arena.base + byte)
            element = e.index(self.arena.base + byte, access.width) if e else None
            tensor = e.name if e else ""
        else:
            base = batch.shared_base if access.space == "shared" else batch.local_base
            extents = self.shared_extents if access.space == "shared" else self.local_extents
            offset = byte - int(base[positions[first]])
            e = find_extent(extents, offset)
            tensor = e.name if e else f"{access.space} memory"
            element = e.index(offset, access.width) if e else None
        verb = "an atomic updates" if access.kind == "A" and access.instr.op != "ld" else "reads"
        subject = f"{verb} {mark_name(tensor)}{format_index(element)}"
        message = f"{subject}, which was never written"
        kind, is_note = "uninitialised read", False if access.space == "global" else None
        if access.space == "shared":
            number = int(batch.block_of[positions[first]])
            exited = batch.threads_per_block - int(batch.live_threads[number])
            if batch.is_being_copied(number, offset):
                kind = "unfinished copy"
                message = f"{subject}, and the asynchronous copy to it has not been waited for"
            elif batch.divergence.diverges_in_user_code(access.instr, block=number):
                is_note = False
                if exited:
                    kind = "early return"
                    message += f": {exited} of {format_count(batch.threads_per_block, 'thread')} of the block had already returned"
        finding = self.record_at(
            batch, positions[first], kind, access.instr, message,
            tensor=tensor, index=element, count=len(indices), is_note=is_note,
        )  # fmt: skip
        uncertain_findings = (
            self.tensors_before_launch is not None
            and access.space == "shared"
            and access.kind == "R"
            and kind in ("uninitialised read", "unfinished copy")
        )
        if uncertain_findings and not any(f is finding for f in self.uncertain_findings):
            self.uncertain_findings.append(finding)

    def report_forbidden_write(self, batch, access: Access, tensor: Extent, addresses, active):
        """Report a forbidden write to a tensor, except by a stray address (`report_stray_address`)."""
        owners = self.get_pointer_targets(access)
        if (tensor.write_violation == "undeclared atomic" and get_verb(access) != "atomic") or (
            owners and tensor not in owners
        ):
            return
        positions = batch.get_positions(active)
        index = tensor.index(int(np.broadcast_to(addresses, len(positions))[0]), access.width)
        verb = "an atomic updates" if get_verb(access) == "atomic" else "the kernel writes to"
        self.record_at(
            batch, positions[0], tensor.write_violation, access.instr,
            f"{verb} {mark_name(tensor.name)}{format_index(index)}, {WRITE_VIOLATIONS[tensor.write_violation]}",
            tensor=tensor.name, index=index, count=len(positions),
        )  # fmt: skip

    def report_barrier_divergence(self, batch, waiting, deadlock: bool, only=None):
        """Report threads of one thread block that wait at different barriers, or never arrive."""
        for block in np.flatnonzero(batch.live_threads > 0 if only is None else only):
            groups = [(i, positions[batch.block_of[positions] == block]) for i, positions, _ in waiting]
            groups = [(i, positions) for i, positions in groups if len(positions)]
            barriers = {i for i, _ in groups}
            if not groups or (len(barriers) < 2 and not deadlock):
                continue
            index, positions = groups[0]
            term = batch.program.blocks[index].term
            num_waiting = sum(len(x) for _, x in groups)
            if len(barriers) > 1:
                other_instr = batch.program.blocks[next(i for i, _ in groups if i != index)].term
                message = (
                    f"{format_count(len(positions), 'thread')} of the block wait here and {num_waiting - len(positions)} at"
                    " another barrier: every thread of a block must reach the same barrier"
                )
            else:
                other_instr = None
                message = (
                    f"{len(positions)} of {format_count(int(batch.live_threads[block]), 'thread')} wait at this barrier, the"
                    " others never reach it: every thread of a block must"
                )
            by_user = any(
                batch.divergence.diverges_in_user_code(batch.program.blocks[i].term, block=block)
                for i in barriers
            )
            self.record_at(
                batch, positions[0], "barrier divergence", term, message, count=len(positions), other_instr=other_instr,
                is_note=False if by_user else None,
            )  # fmt: skip

    def report_early_exit(self, batch, term, block: int, same_warp: bool):
        """Report threads that exited while others of their block (`same_warp`: some of the same warp) wait at
        a barrier.

        Whole warps may exit before a barrier in user code, but not before one of a library collective.
        """
        exited, all_of = (
            int(batch.threads_per_block - batch.live_threads[block]),
            format_count(batch.threads_per_block, "thread"),
        )
        by_user = batch.divergence.diverges_in_user_code(term, block=block)
        kind, is_note = "barrier divergence", False
        if same_warp:
            is_note = False if by_user else None
            message = (
                f"{exited} of {all_of} of the block, some of them from the same warp as threads that wait here,"
                " returned without this barrier: every thread of a block must reach it"
            )
        elif by_user and is_library_algorithm(term.loc):
            message = (
                f"{exited} of {all_of} of the block returned before this call into the library,"
                " which needs every thread of the block"
            )
        else:
            kind, is_note = "threads exited before a barrier", True
            message = (
                f"{format_count(exited, 'thread')} of the block (whole warps) had already returned when the others"
                " waited at this barrier; the hardware counts them as arrived"
            )
        number = self.block_index(int(batch.blocks[block]))
        self.record(kind, term, message, block=number, is_note=is_note)

    def report_warp_divergence(self, batch, instr, position, count: int):
        """Report threads in an instruction's mask that are elsewhere in the program."""
        by_user = batch.divergence.diverges_in_user_code(instr, warp=int(batch.warp_of[position]))
        self.record_at(
            batch, position, "warp divergence", instr,
            f"{instr.name} names threads of its warp that are elsewhere in the program: all of them must"
            " reach it",
            count=count, is_note=False if by_user else None,
        )  # fmt: skip

    def report_outside_mask(self, batch, instr, position, count: int):
        message = f"{instr.name} is executed by a thread that its mask leaves out: the result is undefined"
        self.record_at(batch, position, "warp divergence", instr, message, count=count)

    def report_absent_shuffle_lane(self, batch, instr, position, lane: int, count: int):
        """Report a shuffle from a lane that is elsewhere, has exited, or does not exist (a partial warp)."""
        warp = int(batch.warp_of[position])
        missing = not int(batch.initial_masks[warp]) >> lane & 1
        by_user = missing or batch.divergence.diverges_in_user_code(instr, warp=warp)
        self.record_at(
            batch, position, "shuffle from an absent thread", instr,
            f"reads a value from lane {lane} of the warp, which does not take part: the result is undefined",
            count=count, is_note=False if by_user else None,
        )  # fmt: skip

    def report_incomplete_warp(self, batch, instr, positions):
        by_user = batch.divergence.diverges_in_user_code(instr, warp=int(batch.warp_of[positions[0]]))
        message = f"{instr.name} needs all 32 threads of the warp"
        self.record_at(
            batch, positions[0], "warp divergence", instr, message, is_note=False if by_user else None
        )
        raise Trap(instr, batch, positions)

    def report_incomplete_warpgroup(self, batch, instr, positions):
        message = f"{instr.name} needs all 128 threads of a warpgroup"
        self.record_at(batch, positions[0], "warp divergence", instr, message)
        raise Trap(instr, batch, positions)

    def report_misaligned_copy(self, batch, instr, position, value: int, subject: str):
        unit = 128 if "tensor" in instr.mods and "address" in subject else 16
        message = f"the {subject}, {format_count(value, 'byte')}, is not a multiple of {unit}"
        self.record_at(batch, position, "misaligned bulk copy", instr, message)

    def report_unordered(self, batch, kind: str, instr, other_instr, thread: int, count: int, message: str):
        """Report an asynchronous operation that is not ordered with another access; `thread` is numbered in
        the batch."""
        block = self.block_index(int(batch.blocks[thread // batch.threads_per_block]))
        self.record(
            kind, instr, message, block=block, thread=self.thread_index(thread % batch.threads_per_block), count=count,
            other_instr=other_instr, is_note=False,
        )  # fmt: skip

    def report_register_hazard(self, batch, instr, product, register: str, role: str, position, count: int):
        """Report the use of a product's register ("accumulator" or "operand") before the wait for it."""
        kind, contents = (
            ("accumulator in use", "sums") if role == "accumulator" else ("operand overwritten", "a factor")
        )
        message = f"{register} holds {contents} of a wgmma that wgmma.wait_group has not waited for"
        self.record_at(batch, position, kind, instr, message, count=count, other_instr=product)

    def report_register_budget(self, batch, instr, position, message: str, block: int = 0, thread: int = 0):
        """Report a setmaxnreg that cannot be satisfied; `block` and `thread` are used without a position."""
        first = self.block_index(int(batch.blocks[block])), self.thread_index(thread)
        block_, thread_ = first if position is None else self.get_thread_index(batch, position)
        self.record("register budget", instr, message, block=block_, thread=thread_, is_note=False)

    def report_uninitialised_mbarrier(self, batch, access: Access, position, count: int):
        message = "the mbarrier at this address has not been initialised"
        self.record_at(
            batch, position, "mbarrier not initialised", access.instr, message, count=count, is_note=None
        )


def get_cause(instr) -> str:
    """Return the key that groups findings: the source location, or without a line table the opcode, because
    unrolled loops repeat it."""
    return instr.name if instr is not None and instr.loc is None else format_location(instr)


def get_verb(access: Access) -> str:
    if access.kind == "R" or access.instr.op == "ld":
        return "load"
    return "store" if access.kind == "W" or access.instr.op == "st" else "atomic"


def shorten_shared_name(name: str) -> str:
    """Shorten `kernel_$__global_alloc_1_$__gpu_shared_mem` to `shared array 1`."""
    numbered = re.search(r"__global_alloc_(\d+)", name)
    return f"shared array {numbered[1]}" if numbered else f"shared array {name}"
