"""Warpgroup instructions: matrix products (wgmma), and setmaxnreg.

A warpgroup is four consecutive warps, the first with an index that is a multiple of four. A product is
computed when it is issued; async_order.py (for shared memory) and hazards.py (for registers) check that
threads wait for it before they use its operands and results.

Layouts are those of the PTX manual's "Asynchronous warpgroup level matrix instructions". An operand in shared
memory consists of 16-byte units. In a K-major operand, a unit contains neighbours along k, and 8 rows of
units make a group; in a transposed (MN-major) operand, a unit contains neighbours along m or n.
"""

from __future__ import annotations

import functools

import numpy as np

from harness.vgpu.engine.opcodes import numeric
from harness.vgpu.engine.opcodes.fragments import compute_fragment_maps
from harness.vgpu.engine.opcodes.hopper_ops import Operand
from harness.vgpu.errors import UnsupportedInstruction
from harness.vgpu.memory.access import Access
from harness.vgpu.memory.tensor_map import swizzle_address
from harness.vgpu.ptx.parser import Instr

from .tma import BulkCopyOps

u4, u8 = np.uint32, np.uint64

REGISTERS_PER_SM = 65536
MAX_REGISTERS = 255  # per thread


SWIZZLE_SPANS = (0, 128, 64, 32)  # bytes that the swizzle spans, by bits 62 and 63 of a matrix descriptor


@functools.lru_cache(maxsize=4096)
def compute_unit_offsets(descriptor: int, operand: Operand) -> np.ndarray:
    """Return the shared memory addresses of an operand's 16-byte units; the operand is 32 bytes deep.

    K-major: [rows, 2]. Transposed (16-bit types only): [16, rows / 8].
    """
    start, leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    span = SWIZZLE_SPANS[descriptor >> 62]
    units = max(span // 16, 1)  # number of contiguous units
    if operand.transposed:
        k = np.arange(16)[:, None]
        unit = np.arange(operand.rows // 8)[None]
        along = (leading, stride) if span else (stride, leading)  # byte offsets along rows, and per 8 along k
        address = unit % units * 16 + unit // units * along[0] + k % 8 * 16 * units + k // 8 * along[1]
    else:
        row, unit = np.arange(operand.rows)[:, None], np.arange(2)[None]
        address = row % 8 * 16 * units + row // 8 * stride + unit * (16 if span else leading)
    return swizzle_address(start + address, span)


def get_initial_registers(function, threads: int) -> int:
    """Return the initial number of registers per thread of a kernel with setmaxnreg.

    It is .maxnreg, or follows from .maxntid and .minnctapersm, rounded down to a multiple of 8.
    """
    if function.max_registers:
        return function.max_registers
    limit = REGISTERS_PER_SM // ((function.max_threads or threads) * max(function.min_blocks, 1))
    return min(limit, MAX_REGISTERS) // 8 * 8


class WarpgroupOps(BulkCopyOps):
    """The warpgroup instructions of a batch."""

    def init_warpgroups(self):
        start = get_initial_registers(self.program.entry, self.threads_per_block)
        self.register_counts = np.full(self.warps, start)  # per thread, by warp
        self.register_pool = start * self.warps_per_block
        self.over_budget: dict[int, tuple[Instr, int]] = {}  # thread block -> (excessive setmaxnreg, thread)

    def count_full_warpgroups(self, instr: Instr, active) -> int:
        """Return the number of active warpgroups; report one that has inactive threads."""
        positions = self.get_positions(active)
        groups = self.count_full_warps(instr, active)
        first = self.warp_of[positions[::128]] % self.warps_per_block % 4 == 0
        if (
            groups % 4
            or not first.all()
            or (np.diff(self.warp_of[positions].reshape(-1, 4, 32)[:, :, 0]) != 1).any()
        ):
            self.run.report_incomplete_warpgroup(self, instr, positions)
        return groups // 4

    def set_registers(self, instr: Instr, number: int, increases: bool, active):
        """Execute setmaxnreg: set the registers per thread of the active warps to `number`."""
        self.count_full_warpgroups(instr, active)
        positions = self.get_positions(active)
        warps = self.warp_of[positions[::32]]
        previous = self.register_counts[warps]
        is_invalid = number % 8 != 0 or not 24 <= number <= 256
        is_invalid = (previous > number if increases else previous < number) | is_invalid
        if is_invalid.any():
            k = int(np.flatnonzero(is_invalid)[0])
            self.run.report_register_budget(
                self, instr, positions[32 * k],
                f"the warp has {previous[k]} registers per thread; the operand of {'.inc' if increases else '.dec'},"
                f" {number}, must be a multiple of 8 from 24 to 256 and not {'smaller' if increases else 'greater'}",
            )  # fmt: skip
        self.register_counts[warps] = number
        for block in np.unique(self.block_of[positions]).tolist():
            counts = self.register_counts[block * self.warps_per_block :][: self.warps_per_block]
            if counts.sum() <= self.register_pool:
                self.over_budget.pop(block, None)
            elif increases:
                self.over_budget[block] = (
                    instr,
                    int(self.thread_of[positions[self.block_of[positions] == block][0]]),
                )

    # -- products -------------------------------------------------------------------------------------------
    def read_shared_operand(
        self, access: Access, descriptors, operand: Operand, first, active
    ) -> tuple[np.ndarray, np.ndarray]:
        """Read an operand from shared memory.

        Return (operand [warpgroup, rows, k] in float64, its locations in 16-byte units [warpgroup, units]).
        `first` contains the position of each warpgroup's first thread.
        """
        positions = self.get_positions(active)
        values = np.broadcast_to(descriptors, len(positions)).reshape(-1, 128)
        if (values != values[:, :1]).any():
            first_uneven = positions[np.flatnonzero((values != values[:, :1]).any(axis=1))[0] * 128]
            message = "the threads of a warpgroup pass different matrix descriptors"
            self.run.record_at(self, first_uneven, "uneven matrix descriptor", access.instr, message)
        indices = []
        for descriptor, position in zip(values[:, 0].tolist(), first.tolist(), strict=True):
            if descriptor >> 49 & 7:
                raise UnsupportedInstruction(access.instr, "a matrix descriptor with a base offset")
            address = compute_unit_offsets(descriptor, operand).reshape(-1)
            base = np.zeros(self.num_threads, np.int64)
            base[position] = self.block_of[position] * self.shared_size
            element_positions = np.full(len(address), position)
            indices.append(
                self.get_offset_index(access, address, base, self.run.shared_extents, element_positions)
            )
        index = np.stack(indices)
        cells, written, full = access.get_views(self.shared_space)
        if self.checks.uninitialised:
            for k, position in enumerate(first.tolist()):
                state = written[index[k]] != full
                if state.any():
                    self.run.report_unwritten(
                        self, access, state, index[k], np.full(index.shape[1], position)
                    )
        bits = np.ascontiguousarray(cells[index]).view(f"u{operand.width}")
        if operand.transposed:
            bits = bits.reshape(len(first), 16, operand.rows).transpose(0, 2, 1)
        matrix = numeric.decode_elements(bits.reshape(len(first), operand.rows, -1), operand.kind)
        return -matrix if operand.negated else matrix, index

    def read_register_operand(self, registers, operand: Operand, groups: int) -> np.ndarray:
        """Read operand A [warpgroup, 64, k] from registers, in float64; each warp has 16 rows."""
        shape = "m16n8k8" if operand.kind == "tf32" else "m16n8k16"
        rows, columns = compute_fragment_maps(shape, operand.kind)[0]
        matrix = np.zeros((4 * groups, 16, 8 if operand.kind == "tf32" else 16))
        matrix[:, rows, columns] = self.elements(registers, operand.kind, 4 * groups)
        return (-matrix if operand.negated else matrix).reshape(groups, 64, -1)

    def wgmma(
        self, a_access: Access | None, b_access: Access, accumulators, kind: str, left, a: Operand, right,
        b: Operand, scale_d, active,
    ):  # fmt: skip
        """Execute wgmma.mma_async: D [64, n] = left [64, k] @ right [k, n], plus the old D if `scale_d`.

        `left` is a matrix descriptor, or four registers if A is None. Return the registers of D.
        """
        groups = self.count_full_warpgroups(b_access.instr, active)
        if self.counting:
            self.run.counters.count_issue(b_access.instr, groups)
        positions = self.get_positions(active)
        first = positions[::128]
        indices = []
        if a_access is None:
            matrix = self.read_register_operand(left, a, groups)
        else:
            matrix, index = self.read_shared_operand(a_access, left, a, first, active)
            indices.append(index)
        right_matrix, index = self.read_shared_operand(b_access, right, b, first, active)
        indices.append(index)
        if self.async_order:
            self.async_order.start_product(
                b_access.instr, positions.reshape(groups, 128), np.concatenate(indices, axis=1)
            )
        needed = len(accumulators) + (4 if a_access is None else 0)
        if self.program.uses_setmaxnreg and (self.register_counts[self.warp_of[first]] < needed).any():
            self.run.report_register_budget(
                self, b_access.instr, first[0],
                f"the product needs {needed} registers per thread, but setmaxnreg left its warp"
                f" {self.register_counts[self.warp_of[first[0]]]}",
            )  # fmt: skip
        total = matrix @ right_matrix.transpose(0, 2, 1)  # [warpgroup, row, column]
        # row = 16 * warp + 8 * half + lane // 4, column = 8 * group + 2 * (lane % 4) + (0 or 1)
        parts = total.reshape(groups, 4, 2, 8, -1, 4, 2)
        product = parts.transpose(0, 4, 2, 6, 1, 3, 5).reshape(groups, -1, 128)  # [.., element, thread]
        old = self.read_accumulators(accumulators, kind, groups)
        product = np.where(
            np.broadcast_to(scale_d, len(positions)).reshape(groups, 1, 128), product + old, product
        )
        return pack_accumulators(product, kind)

    def read_accumulators(self, registers, kind: str, groups: int) -> np.ndarray:
        """Decode the accumulators [warpgroup, element, thread] to float64."""
        words = np.empty((len(registers), 128 * groups), u4)
        for row, register in zip(words, registers, strict=True):
            row[:] = register
        words = words.reshape(-1, groups, 128).transpose(1, 0, 2)
        if kind == "f32":
            return words.view(np.float32).astype(np.float64)
        halves = np.stack([words & u4(0xFFFF), words >> u4(16)], axis=2).astype(np.uint16)
        return halves.view(np.float16).astype(np.float64).reshape(groups, -1, 128)

    def check_register_hazard(
        self, instr: Instr, products: tuple[Instr, ...], register: str, role: str, guard, active
    ):
        """Report the use of a register of `products` if one of them is in flight.

        `guard` is a mask of the threads that execute the instruction.
        """
        if self.async_order is None:
            return
        positions = self.get_positions(active)
        for product in products:
            bad = self.async_order.find_unfinished(positions, product) & guard
            if bad.any():
                k = int(np.flatnonzero(bad)[0])
                self.run.report_register_hazard(
                    self, instr, product, register, role, positions[k], int(bad.sum())
                )
                return

    def report_unfenced_product(self, instr: Instr, register: str, added, active):
        """Report a product that reads registers written since the last wgmma.fence."""
        positions = self.get_positions(active)
        bad = np.broadcast_to(added, len(positions))
        if bad.any() and self.checks.races:
            written = f"{register} has been written since the last wgmma.fence"
            message = written if register else "no wgmma.fence comes before it"
            self.run.record_at(self, positions[np.flatnonzero(bad)[0]], "missing wgmma fence", instr, message)

    def wgmma_commit(self, instr: Instr, active):
        self.count_full_warpgroups(instr, active)
        if self.async_order:
            self.async_order.wgmma_commit(self.get_positions(active))

    def wgmma_wait(self, instr: Instr, allowed: int, active):
        """Execute wgmma.wait_group: wait for all but the newest `allowed` groups."""
        self.count_full_warpgroups(instr, active)
        if self.async_order:
            self.async_order.wgmma_wait(self.get_positions(active), allowed)

    # -- registers ------------------------------------------------------------------------------------------

    def report_over_budget(self):
        """Report blocks whose warps request more registers than the block has, which would deadlock."""
        for block, (instr, thread) in self.over_budget.items():
            counts = self.register_counts[block * self.warps_per_block :][: self.warps_per_block]
            self.run.report_register_budget(
                self, instr, None,
                f"the warps of the block request {32 * int(counts.sum())} registers, but it owns"
                f" {32 * self.register_pool}: these warps wait forever",
                block=block, thread=thread,
            )  # fmt: skip


def pack_accumulators(product: np.ndarray, kind: str) -> list[np.ndarray]:
    """Round accumulators [warpgroup, element, thread] once and pack them into registers."""
    dtype, bits = (np.float32, u4) if kind == "f32" else (np.float16, np.uint16)
    rounded = np.asarray(numeric.canonicalize_nan(product.astype(dtype).reshape(-1)))
    words = rounded.view(bits).reshape(product.shape).astype(u4)
    if kind != "f32":
        words = words[:, 0::2] | words[:, 1::2] << u4(16)
    return [np.ascontiguousarray(words[:, k]).reshape(-1) for k in range(len(words[0]))]
