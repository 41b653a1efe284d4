"""Warp-wide instructions (shuffles, votes, mma), atomics, fences, asynchronous copies and vprintf."""

from __future__ import annotations

import re
import struct

import numpy as np

from harness.vgpu.engine.opcodes import numeric
from harness.vgpu.engine.opcodes.fragments import compute_fragment_maps, parse_shape
from harness.vgpu.errors import UnsupportedInstruction
from harness.vgpu.memory.access import LOCAL_WINDOW, Access

from .mbarrier import MBarrierOps

u2, u4, u8 = np.uint16, np.uint32, np.uint64
ALL_LANES = u4(0xFFFFFFFF)


def broadcast_to_threads(value: np.ndarray, count: int) -> np.ndarray:
    return value if value.ndim else np.full(count, value)


class WarpOps(MBarrierOps):
    """Warp-wide instructions, atomics and asynchronous copies of a batch."""

    def init_warps(self):
        self.all_warps_full = self.threads_per_block % 32 == 0
        self.warps = self.num_blocks * self.warps_per_block
        self.exited_masks = np.zeros(self.warps, u4)
        self.initial_masks = self.warp_masks = self.gather_masks(np.arange(self.num_threads))
        # [positions, their groups, access, target, data, multiply-adds at commit]
        self.copies: list[list] = []
        self.commits: np.ndarray | None = None  # groups of asynchronous copies committed, per thread
        self.counting = self.run.checks.counters
        # multiply-adds per thread, if their overlap with copies is counted
        self.multiply_adds_done: np.ndarray | None = None
        if self.counting and any(i.op == "cp" and "async" in i.mods for i in self.program.instrs):
            self.multiply_adds_done = np.zeros(self.num_threads, np.int64)
        self.init_mbarriers()
        # sources of shuffles with constant operands
        self.shuffle_sources: dict[tuple, tuple[np.ndarray, ...]] = {}

    def compact_warps(self, active):
        self.warp_masks = self.gather_masks(np.arange(len(active)))
        self.exited_masks[:] = 0
        self.all_warps_full = False
        self.shuffle_sources = {}

    def gather_masks(self, active, value=None) -> np.ndarray:
        """Return each warp's mask of the active lanes (with `value`, of those where it is true)."""
        weight = (np.int64(1) << self.lane_of[active]).astype(np.float64)
        if value is not None:
            weight = weight * value
        return np.bincount(self.warp_of[active], weights=weight, minlength=self.warps).astype(u8).astype(u4)

    def get_live_lanes(self) -> np.ndarray:
        return self.warp_masks & ~self.exited_masks

    def check_active_lanes(self, instr, mask, active) -> np.ndarray | None:
        """Return each warp's mask of active lanes (None: all lanes of all warps); report lanes of `mask` that
        are not active, and active lanes outside `mask`.

        Of the instructions that call this, only bar.warp.sync orders memory.
        """
        if np.any(mask != ALL_LANES):
            outside = self.get_positions(active)[mask >> self.get_lanes(active) & u4(1) == 0]
            if len(outside):
                self.run.report_outside_mask(self, instr, outside[0], len(outside))
        if active is None and self.all_warps_full:
            return None
        positions = self.get_positions(active)
        active_lanes = self.gather_masks(positions)
        missing = (
            self.get_live_lanes()[self.warp_of[positions]] & mask & ~active_lanes[self.warp_of[positions]]
        )
        if missing.any():
            self.run.report_warp_divergence(
                self, instr, positions[np.flatnonzero(missing)[0]], int(np.count_nonzero(missing))
            )
        return active_lanes

    def warp_sync(self, instr, mask, active):
        self.check_active_lanes(instr, mask, active)
        self.log.warp_sync(self, mask, active)
        if self.async_order:
            self.async_order.warp_sync(self.get_positions(active), mask)

    def proxy_fence(self, active):
        if self.async_order:
            self.async_order.proxy_fence(self.get_positions(active))

    def scatter_to_lanes(self, value, active) -> np.ndarray:
        """Scatter the values of the active lanes into an array [warp * 32 + lane], 0 elsewhere."""
        positions = self.get_positions(active)
        table = np.zeros(self.warps * 32, value.dtype)
        table[self.warp_of[positions] * 32 + self.lane_of[positions]] = value
        return table

    def shuffle(self, instr, mode: str, a, b, c, mask, active):
        active_lanes = self.check_active_lanes(instr, mask, active)
        if self.counting:
            self.run.counters.count_issue(instr, self.count_warps(active))
        if a.ndim == 0:
            a = np.full(self.num_threads if active is None else len(active), a)
        key = (mode, int(b), int(c)) if active is None and b.ndim == 0 and c.ndim == 0 else None
        source = self.shuffle_sources.get(key) if key else None
        if source is None:
            lanes, warp = self.lane_of if active is None else self.lane_of[active], self.get_warps(active)
            j, inside = numeric.compute_shuffle_sources(mode, lanes, b, c)
            source = (warp * 32 + j, inside, j, warp)
            if key:
                self.shuffle_sources[key] = source
        index, inside, j, warp = source
        if active_lanes is None:
            return a[index], inside
        absent = (active_lanes[warp] >> j.astype(u4)) & u4(1) == 0
        if absent.any():
            first = int(np.flatnonzero(absent)[0])
            self.run.report_absent_shuffle_lane(
                self, instr, self.get_positions(active)[first], int(j[first]), int(absent.sum())
            )
        return self.scatter_to_lanes(a, active)[index], inside

    def count_warps(self, active) -> int:
        return int(np.count_nonzero(np.bincount(self.get_warps(active))))

    def get_lanes(self, active) -> np.ndarray:
        return (self.lane_of if active is None else self.lane_of[active]).astype(u4)

    def get_warps(self, active):
        return self.warp_of if active is None else self.warp_of[active]

    def get_active_mask(self, active) -> np.ndarray:
        return self.gather_masks(self.get_positions(active))[self.get_warps(active)]

    def get_active_masks(self, mask, active) -> np.ndarray:
        """Return each active thread's mask, restricted to active lanes of its warp."""
        return self.get_active_mask(active) & mask

    def vote(self, instr, mode: str, p, mask, active):
        self.check_active_lanes(instr, mask, active)
        positions, warp = self.get_positions(active), self.get_warps(active)
        yes = self.gather_masks(positions, np.broadcast_to(p, len(positions)))[warp] & mask
        return numeric.compute_vote(mode, yes, self.get_active_masks(mask, active))

    def elect(self, instr, mask, active):
        self.check_active_lanes(instr, mask, active)
        bits = self.get_active_masks(mask, active)
        lowest = numeric.popc((bits & (~bits + u4(1))) - u4(1))
        return lowest, self.get_lanes(active) == lowest

    def match(self, instr, mode: str, value, mask, active):
        self.check_active_lanes(instr, mask, active)
        warp, lanes = self.get_warps(active), self.get_active_masks(mask, active)
        value, out = np.broadcast_to(value, len(warp)), np.zeros(len(warp), u4)
        table = self.scatter_to_lanes(value, active)
        for k in range(32):
            same = (table[warp * 32 + k] == value) & (lanes >> u4(k) & u4(1) != 0)
            out |= np.where(same, u4(1 << k), u4(0))
        return numeric.compute_match(mode, out, lanes)

    def redux(self, instr, op: str, value, mask, active):
        self.check_active_lanes(instr, mask, active)
        if self.counting:
            self.run.counters.count_issue(instr, self.count_warps(active))
        warp, lanes = self.get_warps(active), self.get_active_masks(mask, active)
        value = np.broadcast_to(value, len(warp))
        table = self.scatter_to_lanes(value, active)
        out, started = np.zeros_like(value), np.zeros(len(warp), bool)
        for k in range(32):
            member = lanes >> u4(k) & u4(1) != 0
            v = table[warp * 32 + k]
            out = np.where(member, np.where(started, numeric.combine(op, out, v), v), out)
            started = started | member
        return out

    # -- atomics --------------------------------------------------------------------------------------------
    def atomic(self, access: Access, op: str, kind: str, address, values, active, used: bool):
        if access.space == "generic":
            name, window = self.get_window(access, address)
            if name not in ("global", "shared"):
                message = "an atomic on local memory, or on several state spaces at once"
                raise UnsupportedInstruction(access.instr, message)
            access, address = access.with_space(name), address - u8(window)
        count = self.num_threads if active is None else len(active)
        address = broadcast_to_threads(address, count)
        clocks = self.log.clocks if op == "cas" and used else None
        if clocks:
            clocks.deferred_accesses = []
        space, index = self.resolve(access, address, active)
        data, written, full = access.get_views(space)
        if not access.tensor.fully_written or access.is_mixed:
            access.is_mixed = False
            state = written[index] == full
            if self.checks.uninitialised and not state.all():
                self.run.report_unwritten(self, access, ~state, index, active)
            written[index] = full
        values = [broadcast_to_threads(v, count) for v in values]
        self.run.counters.count_atomic(access, index)
        if self.log.events:
            self.log.events.add_values(
                self, values[0], active, {"f4": "float32", "f8": "float64"}.get(kind, "")
            )
        if kind == "f4" and op == "add" and access.space == "global":  # which flushes subnormals
            values = [numeric.flush(values[0].view(np.float32)).view(u4)]
            cells = data.view(np.float32)
            cells[index] = numeric.flush(cells[index])
            old = update_atomically(data, index, op, kind, values, used)
            cells[index] = numeric.flush(cells[index])
            return old
        old = update_atomically(data, index, op, kind, values, used)
        if clocks:
            clocks.resolve_deferred(self.get_positions(active)[old != values[0]])
        return old

    def fence(self, active, scope: int, acquires: bool, releases: bool, is_sequential: bool):
        if self.log.clocks:
            self.log.clocks.fence(self, active, scope, acquires, releases, is_sequential)

    # -- matrices -------------------------------------------------------------------------------------------
    def count_full_warps(self, instr, active) -> int:
        """Return the number of active warps; report one that has inactive lanes."""
        self.check_active_lanes(instr, ALL_LANES, active)
        positions = self.get_positions(active)
        if len(positions) % 32 or not (self.lane_of[positions].reshape(-1, 32) == np.arange(32)).all():
            self.run.report_incomplete_warp(self, instr, positions)
        return len(positions) // 32

    def mma(self, instr, shape: str, types, a, b, c, active):
        warps = self.count_full_warps(instr, active)
        if self.counting:
            self.run.counters.count_issue(instr, warps)
        rows, columns, depth = parse_shape(shape)
        kind = types[1]
        (ar, ac), (br, bc), (cr, cc) = compute_fragment_maps(shape, kind)
        A = np.zeros((warps, rows, depth))
        B = np.zeros((warps, depth, columns))
        C = np.zeros((warps, rows, columns))
        A[:, ar, ac] = self.elements(a, kind, warps)
        B[:, br, bc] = self.elements(b, kind, warps)
        C[:, cr, cc] = self.elements(c, types[3], warps)
        D = A @ B + C
        out = D[:, cr, cc]  # [warp, element, lane]
        if types[0] == "f64":
            return [out[:, k].reshape(-1).view(u8) for k in range(out.shape[1])]
        if types[0] == "f32":
            sums = (out[:, k].reshape(-1).astype(np.float32) for k in range(out.shape[1]))
            return [numeric.canonicalize_nan(x).view(u4) for x in sums]
        bits = np.asarray(numeric.canonicalize_nan(out.astype(np.float16))).view(u2).astype(u4)
        return [(bits[:, k] | (bits[:, k + 1] << u4(16))).reshape(-1) for k in range(0, out.shape[1], 2)]

    def elements(self, registers, kind: str, warps: int) -> np.ndarray:
        """Decode fragment registers to matrix elements [warp, element, lane] in float64."""
        parts = []
        for r in registers:
            r = np.broadcast_to(r, warps * 32)
            halves = ((r & u4(0xFFFF)).astype(u2), (r >> u4(16)).astype(u2)) if "16" in kind else (r,)
            parts += [numeric.decode_elements(x, kind) for x in halves]
        return np.stack([p.reshape(warps, 32) for p in parts], axis=1)

    def ldmatrix(self, access: Access, address, number: int, transpose: bool, active):
        warps = self.count_full_warps(access.instr, active)
        positions = self.get_positions(active).reshape(warps, 32)[:, : 8 * number].reshape(-1)
        address = np.broadcast_to(address, warps * 32).reshape(warps, 32)[:, : 8 * number].reshape(-1)
        low, high = self.load(access, address, None if len(positions) == self.num_threads else positions)
        cells = np.stack([low, high], axis=1).view(u2).reshape(warps, number, 8, 8)
        if transpose:
            cells = cells.transpose(0, 1, 3, 2)
        pairs = np.ascontiguousarray(cells).view(u4).reshape(warps, number, 32)
        return [np.ascontiguousarray(pairs[:, k]).reshape(-1) for k in range(number)]

    def stmatrix(self, access: Access, address, values, transpose: bool, active):
        warps, number = self.count_full_warps(access.instr, active), len(values)
        positions = self.get_positions(active).reshape(warps, 32)[:, : 8 * number].reshape(-1)
        address = np.broadcast_to(address, warps * 32).reshape(warps, 32)[:, : 8 * number].reshape(-1)
        pairs = np.stack([np.broadcast_to(v, warps * 32).reshape(warps, 32) for v in values], axis=1)
        cells = np.ascontiguousarray(pairs).view(u2).reshape(warps, number, 8, 8)
        if transpose:
            cells = cells.transpose(0, 1, 3, 2)
        rows = np.ascontiguousarray(cells).reshape(-1, 8).view(u8)
        parts = tuple(np.ascontiguousarray(rows[:, k]) for k in range(2))
        self.store(access, address, parts, None if len(positions) == self.num_threads else positions)

    # -- asynchronous copies --------------------------------------------------------------------------------
    def is_being_copied(self, block: int, offset: int) -> bool:
        """Return whether a copy to a byte of a block's shared memory has not been waited for."""
        for positions, _, store, target, *_ in self.copies:
            covers = (target <= offset) & (offset < target.astype(np.int64) + store.nbytes)
            if (covers & (self.block_of[positions] == block)).any():
                return True
        return False

    def get_commits(self) -> np.ndarray:
        commits = self.commits
        if commits is None:
            commits = self.commits = np.zeros(self.num_threads, np.int64)
        return commits

    def copy_async(
        self, load: Access, store: Access, target, source, size_or_predicate, multiply_adds: int, active
    ):
        """Execute cp.async: read the source now, write the data when the thread waits for it.

        `size_or_predicate` is the number of bytes to copy (the rest is zero), or a predicate to ignore the
        source; `multiply_adds` counts those before this instruction in its basic block.
        """
        positions = self.get_positions(active)
        target, source = (
            broadcast_to_threads(target, len(positions)),
            broadcast_to_threads(source, len(positions)),
        )
        if size_or_predicate is None:
            loaded = self.load(load, source, active)
            parts = [loaded] if isinstance(loaded, np.ndarray) else loaded
        else:
            parts = self.load_partial(
                load, source, broadcast_to_threads(size_or_predicate, len(positions)), positions
            )
        if self.run.cluster_size == 1:
            # The hardware may write at any time from now on, so the race check also needs a store here.
            clipped = np.clip(target.astype(np.int64), 0, self.shared_size - store.nbytes)
            self.log.add_shared(
                self, store.with_space("early"), (self.shared_base[positions] + clipped) >> store.shift,
                active,
            )  # fmt: skip
        fmas_at_commit = (
            self.multiply_adds_done[positions] + multiply_adds
            if self.multiply_adds_done is not None
            else positions
        )
        self.copies.append([positions, self.get_commits()[positions], store, target, parts, fmas_at_commit])

    def load_partial(self, load: Access, source, size_or_predicate, positions) -> list:
        """Load the bytes that these threads copy, padded with zeros (see `copy_async`)."""
        nbytes = (
            np.where(size_or_predicate, 0, load.nbytes)
            if size_or_predicate.dtype == bool
            else np.minimum(size_or_predicate, load.nbytes)
        )
        mask = nbytes > 0
        parts = [np.zeros(len(positions), f"u{load.width}") for _ in range(load.count)]
        if mask.any():
            loaded = self.load(load, source[mask], positions[mask])
            for k, part in enumerate([loaded] if isinstance(loaded, np.ndarray) else loaded):
                keep = np.clip(nbytes[mask] - k * load.width, 0, load.width).astype(u8) * u8(8)
                bits = np.where(keep >= u8(64), ~u8(0), (u8(1) << np.minimum(keep, u8(63))) - u8(1))
                parts[k][mask] = part & bits.astype(part.dtype)
        return parts

    def copy_commit(self, instr, multiply_adds: int, active):
        positions, groups = self.get_positions(active), self.get_commits()
        if self.multiply_adds_done is not None:
            is_active, full = np.zeros(self.num_threads, bool), np.zeros(self.num_threads, bool)
            is_active[positions] = True
            for copy_positions, group, *_, fmas_at_commit in self.copies:
                mask = is_active[copy_positions] & (group == groups[copy_positions])
                fmas_at_commit[mask] = self.multiply_adds_done[copy_positions[mask]] + multiply_adds
                full[copy_positions[mask]] = True
            if full.any():
                self.run.counters.count_issue(instr, self.count_warps(np.flatnonzero(full)))
        groups[positions] += 1

    def copy_wait(self, instr, allowed: int, multiply_adds: int, active):
        """Complete the copies of all but the newest `allowed` groups (-1: all copies, committed or not)."""
        if not self.copies:
            return
        is_active = np.zeros(self.num_threads, bool)
        is_active[self.get_positions(active)] = True
        rest = []
        for positions, group, store, target, parts, fmas_at_commit in self.copies:
            done = is_active[positions]
            if allowed >= 0:
                done = done & (group < self.get_commits()[positions] - allowed)
            if done.any():
                if self.multiply_adds_done is not None:
                    # groups committed before any multiply-add do not count
                    counts = done & (fmas_at_commit > 0)
                    now = self.multiply_adds_done[positions[counts]] + multiply_adds
                    self.run.counters.record_overlap(instr, now - fmas_at_commit[counts])
                data = parts[0][done] if store.count == 1 else tuple(p[done] for p in parts)
                self.store(store, target[done], data, positions[done])
            if not done.all():
                keep = ~done
                rest.append(
                    [
                        positions[keep],
                        group[keep],
                        store,
                        target[keep],
                        [p[keep] for p in parts],
                        fmas_at_commit[keep],
                    ]
                )
        self.copies = rest

    # -- clusters --------------------------------------------------------------------------------------------
    def cluster_arrive(self, active, release: bool):
        """Execute barrier.cluster.arrive, which releases earlier writes and does not block."""
        if self.log.clocks:
            self.log.clocks.cluster_arrive(self, active, release)

    # -- print ----------------------------------------------------------------------------------------------
    def vprintf(self, *offsets_and_L):
        """Execute vprintf(format, arguments): print one line per thread, in thread order."""
        fmt_at, args_at, *rest = offsets_and_L
        active = rest[-1]
        for thread in self.get_positions(active).tolist():
            base = int(self.local_base[thread])
            local = self.local_space.data
            fmt = int(local[base + fmt_at : base + fmt_at + 8].view(u8)[0])
            args = int(local[base + args_at : base + args_at + 8].view(u8)[0])
            self.run.print(format_printf(self.read_string(fmt, thread), args, self, thread))
        if len(rest) > 1:  # the result, a character count, is not modelled: store 0
            for thread in self.get_positions(active).tolist():
                base = int(self.local_base[thread]) + rest[0]
                self.local_space.data[base : base + 4] = 0
                self.local_space.written[base : base + 4] = 1

    def read_bytes(self, address: int, nbytes: int, thread: int) -> bytes:
        """Read bytes at a generic address, as a thread reads them."""
        if address >= LOCAL_WINDOW:
            offset = int(self.local_base[thread]) + address - LOCAL_WINDOW
            return self.local_space.data[offset : offset + nbytes].tobytes()
        offset = address - self.arena.base
        if not 0 <= offset <= self.arena.size - nbytes:
            return bytes(nbytes)
        return self.arena.data[offset : offset + nbytes].tobytes()

    def read_string(self, address: int, thread: int) -> str:
        out = b""
        while len(out) < 1 << 16 and b"\0" not in out:
            out += self.read_bytes(address + len(out), 64, thread)
        return out.split(b"\0")[0].decode("utf-8", "replace")


_CONVERSION = re.compile(r"%([-+ #0]*)(\*|\d+)?(?:\.(\d+))?(hh|h|ll|l|z|j|t)?([diouxXcsfFeEgGp%])")


def format_printf(fmt: str, arguments: int, batch, p: int) -> str:
    """Format text like C's printf for thread `p`; `arguments` is the address of the packed arguments."""
    offset = 0

    def read_argument(nbytes: int, code: str):
        nonlocal offset
        offset = -(-offset // nbytes) * nbytes
        value = struct.unpack(code, batch.read_bytes(arguments + offset, nbytes, p))[0]
        offset += nbytes
        return value

    def convert(m):
        flags, width, precision, size, kind = m.groups()
        if kind == "%":
            return "%"
        if width == "*":
            width = str(read_argument(4, "<i"))
        spec = f"%{flags}{width or ''}{'.' + precision if precision else ''}"
        if kind in "diouxX":
            nbytes, code = (8, "<q") if size in ("l", "ll", "z", "j", "t") else (4, "<i")
            value = read_argument(nbytes, code if kind in "di" else code.upper())
            return (spec + (kind if kind in "oxX" else "d")) % value
        if kind == "c":
            return (spec + "c") % chr(read_argument(4, "<i") & 255)
        if kind == "p":
            return f"0x{read_argument(8, '<Q'):x}"
        if kind == "s":
            return (spec + "s") % batch.read_string(read_argument(8, "<Q"), p)
        return (spec + kind) % read_argument(8, "<d")

    return _CONVERSION.sub(convert, fmt)


# -- atomic arithmetic --------------------------------------------------------------------------------------
NON_NUMPY_KINDS = ("f16x2", "bf16x2", "bf16")  # kinds of values stored as bits, since NumPy has no such type


def _combine(op: str, kind: str, old, values):
    v = values[0]
    if kind == "bf16":
        x, y = numeric.bf16_to_f32(old), numeric.bf16_to_f32(v)
        return numeric.f32_to_bf16({"add": np.add, "min": np.fmin, "max": np.fmax}[op](x, y))
    if kind in ("f16x2", "bf16x2"):
        half, dtype = ("f2", np.float16) if kind == "f16x2" else ("bf16", u2)
        halves = []
        for s in (u4(0), u4(16)):
            a, b = ((x >> s).astype(u2).view(dtype) for x in (old, v))
            halves.append(_combine(op, half, a, [b]).view(u2).astype(u4))
        return halves[0] | (halves[1] << u4(16))
    if op in numeric.COMBINE:
        return numeric.combine(op, old, v)
    if op == "exch":
        return v
    if op == "cas":
        return np.where(old == v, values[1], old)
    one, zero = old.dtype.type(1), old.dtype.type(0)
    if op == "inc":
        return np.where(old >= v, zero, old + one)
    return np.where((old == zero) | (old > v), v, old - one)  # dec


def update_atomically(data, index, op: str, kind: str, values, used: bool):
    """Apply one atomic per thread, in thread order; return the old values (unsigned) if `used`."""
    view = data if kind in NON_NUMPY_KINDS else data.view(np.dtype(kind))
    typed = [v.view(view.dtype) for v in values]
    if not used and op in numeric.COMBINE and kind not in NON_NUMPY_KINDS:
        if len(index) and (index == index[0]).all():
            # All on one address: `accumulate` also adds in thread order and rounds each addition, but is much
            # faster.
            view[index[0]] = numeric.COMBINE[op].accumulate(np.concatenate((view[index[:1]], typed[0])))[-1]
        else:
            numeric.COMBINE[op].at(view, index, typed[0])
        if op == "add" and view.dtype.kind == "f":
            view[index] = numeric.canonicalize_nan(view[index])
        return None
    order = np.argsort(index, kind="stable")
    cells = index[order]
    new_group = np.ones(len(cells), bool)
    new_group[1:] = cells[1:] != cells[:-1]
    start = np.flatnonzero(new_group)
    group = np.cumsum(new_group) - 1
    rank = np.arange(len(cells)) - start[group]
    old = np.zeros(len(cells), view.dtype)
    sorted_values = [v[order] for v in typed]
    if op == "add" and view.dtype.kind in "ui" and kind not in NON_NUMPY_KINDS:
        total = np.cumsum(sorted_values[0], dtype=view.dtype)
        before = total - sorted_values[0]
        old = view[cells] + (before - before[start][group])
        last = np.append(start[1:], len(cells)) - 1
        view[cells[last]] = old[last] + sorted_values[0][last]
    else:
        for r in range(int(rank.max(initial=-1)) + 1):
            now = np.flatnonzero(rank == r)
            current = view[cells[now]]
            old[now] = current
            view[cells[now]] = _combine(op, kind, current, [v[now] for v in sorted_values])
    if not used:
        return None
    out = np.empty(len(cells), data.dtype)
    out[order] = old.view(data.dtype)
    return out
