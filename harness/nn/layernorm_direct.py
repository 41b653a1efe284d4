"""The extension module's kernels on torch tensors: allocates, launches on torch's current stream, and nothing more.

Every microsecond counts here: a small layer costs its host time. So everything that follows from shapes and dtypes alone
is worked out once (`layernorm_plan`), memory comes from torch's allocator in the way compiled graphs take it, and addresses go to
the module as integers. Whoever calls has checked that the tensors lie on one GPU.
"""

import contextlib
import functools
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch

from harness.nn import extension_kernels
from harness.nn.arguments import plain
from harness.nn.extension_kernels import (
    KINDS,
    NOTHING_TO_DO,
    NOWHERE,
    VECTOR,
    OnDevice,
    Opened,
    address,
    padded,
)
from harness.nn.layernorm_ops import EPS
from harness.nn.layernorm_plan import (
    ALL_OWN,
    ALONG_SUMS_ELEMENTS,
    ALONG_SUMS_FROM,
    AUTO,
    MANY_SUMS,
    MOST_FEW_ROWS,
    OWN,
    PADDED,
    Plan,
    Products,
    make_plan,
)
from harness.nn.private import (
    any_autocast,
    current_device,
    current_stream,
    empty_strided,
    fp32_precision,
    is_capturing,
)

Tensor = torch.Tensor
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
linear = torch.nn.functional.linear

TF32, PAIRS = 1, 5
"""How the module numbers what it computes in, beside KINDS."""
WEIGHT, BIAS, INPUT, NORM = 1, 2, 4, 8
"""Gradients that are wanted, added: dW, db, dx, and dgamma with dbeta."""
ALL_GRADIENTS = WEIGHT | BIAS | INPUT | NORM
DLN_GIVEN, LN_OUT_TAKEN, FEW_ROWS, TRANSPOSED, FEW_SHARES = 16, 32, 64, 128, 256
"""Beside these for the module: dln has been multiplied, ln_out is wanted for the product dW; with both, that rows are few
and dx apart from dln, so that one launch makes all the rest; ln_out is wanted transposed, in a launch of its own; sums
over rows have few shares, for memory's sake."""
THROUGH_MODULE = ("fast", "pairs")
"""The algorithms of the module; without one, both are a MAX graph of the unfused kernels."""


# ---- How tensors lie ----------------------------------------------------------------------------------------


def is_captured(plan: Plan) -> bool:
    """Whether a call that is made now goes into a CUDA graph, and is made otherwise there: elsewhere the host's time counts."""
    return plan.choice.differs and is_capturing()


def lies_transposed(weight: Tensor) -> bool:
    """Whether a matrix is the transpose of one that lies row by row; a copy of it would cost what a product may."""
    return not weight.is_contiguous() and weight.dim() == 2 and weight.t().is_contiguous()


def kind_of(dtype: torch.dtype, pairs: bool = False) -> int:
    """The number of a dtype; float32 has one for pairs of float16, and else two, by torch's own flag for products on CUDA."""
    if pairs:
        return PAIRS
    if dtype is torch.float32 and fp32_precision("cuda", "matmul") == "tf32":
        return TF32
    return KINDS[dtype]


# ---- One GPU ------------------------------------------------------------------------------------------------


class LayerNormKernels(OnDevice):
    """The module of LayerNorm + Linear on one GPU."""

    def __init__(self, module: ModuleType, device: torch.device):
        super().__init__(module, device)
        self.launch_forward: Callable[..., int] = module.forward
        self.launch_backward: Callable[..., int] = module.backward
        self.scratch = functools.lru_cache(maxsize=4096)(self.count_scratch)
        self.rehearsed: dict[tuple[int, int], Plan] = {}

    @functools.cached_property
    def sides(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Streams on which further branches of a CUDA graph are captured."""
        return torch.cuda.Stream(self.index), torch.cuda.Stream(self.index)

    def count_scratch(self, wanted: int | None, kind: int, rows: int, H: int, O: int) -> int:
        """The bytes of scratch memory that a pass over aligned tensors takes; forward where `wanted` is None."""
        if not rows:
            return 0
        if wanted is None:
            return self.launch_forward(*NOWHERE, kind, rows, H, O, EPS, *[0] * 8)
        return self.launch_backward(*NOWHERE, kind, rows, H, O, wanted, *[0] * 15)

    def smallest_pass(self) -> None:
        ones = torch.ones(8, 8, device=extension_kernels.DEVICE)
        self.forward(make_plan(ones.shape, 8, ones.dtype), EPS, False, ones, ones[0], ones[0], ones, ones[0])

    def is_first(self, plan: Plan, wanted: int = 0) -> bool:
        """Whether this is the first plain call of a plan that launches other kernels in a CUDA graph; forward, or backward with
        what is wanted.

        That call also runs what a graph will launch, and drops the results: a kernel is loaded when it is first launched,
        which is not possible while a graph is being captured. Plans are told apart by their id, because hashing one takes
        longer than the lookup, and kept, so that no id is used twice.
        """
        key = id(plan), wanted
        first = key not in self.rehearsed
        if first:
            self.rehearsed[key] = plan
        return first

    def forward(
        self,
        plan: Plan,
        eps: float,
        keep: bool,
        x: Tensor,
        ln_weight: Tensor,
        ln_bias: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """The output [..., O], and mean and rstd, [2, ...], where they are to be kept.

        All tensors are on this GPU; the kernels read contiguous ones, but for linear_weight where the plan says so. Raises
        torch.OutOfMemoryError with the bytes that were needed.
        """
        if current_device() != self.index:
            with torch.cuda.device(self.index):
                return self.forward(plan, eps, keep, x, ln_weight, ln_bias, linear_weight, linear_bias)
        captured = plan.choice.captured
        products = captured if is_captured(plan) else plan.choice.plain
        tensors = (
            x.contiguous(),
            ln_weight.contiguous(),
            ln_bias.contiguous(),
            linear_weight if plan.transposed else linear_weight.contiguous(),
            linear_bias.contiguous(),
        )
        if captured is not products and self.is_first(plan) and captured.output is not products.output:
            self.forward_with_library(plan, captured.output is PADDED, eps, *tensors)
        if products.output is not OWN:
            return self.forward_with_library(plan, products.output is PADDED, eps, *tensors)
        rows, H, O = plan.rows, plan.H, plan.O
        kind = kind_of(plan.dtype, plan.pairs)
        given = tuple(map(Tensor.data_ptr, tensors))
        need = self.scratch(None, kind, rows, H, O)
        if (given[0] | given[1] | given[2] | given[3] | given[4]) % VECTOR:
            need = max(need, self.launch_forward(*NOWHERE, kind, rows, H, O, eps, 0, 0, 0, *given))
        kept = 2 * rows * plan.wide.itemsize
        try:
            output = empty_strided(plan.output_size, plan.output_strides, plan.dtype)
            statistics = (
                empty_strided(plan.statistics_size, plan.statistics_strides, plan.wide) if keep else None
            )
            # The smallest problems need none, and every allocation takes half a microsecond.
            lent = need if keep else need + kept
            scratch = empty_strided((lent,), (1,), torch.uint8) if lent else None
        except torch.OutOfMemoryError as error:
            raise out_of_memory(
                "forward", plan, rows * O * plan.dtype.itemsize + kept, need, error
            ) from error
        if rows:
            start = 0 if scratch is None else scratch.data_ptr()
            mean = start + need if statistics is None else statistics.data_ptr()
            self.launch_forward(
                self.gpu,
                current_stream(self.index),
                start,
                need,
                kind,
                rows,
                H,
                O,
                eps,
                output.data_ptr(),
                mean,
                mean + kept // 2,
                *given,
            )
        return output, statistics

    def backward(
        self,
        plan: Plan,
        wanted: int,
        grad_output: Tensor,
        x: Tensor,
        statistics: Tensor,
        ln_weight: Tensor,
        ln_bias: Tensor,
        linear_weight: Tensor,
    ) -> Gradients:
        """dx [..., H], dgamma [H], dbeta [H], dW [O, H] and db [O], None for those that `wanted` leaves out.

        `statistics` is what `forward` kept. The tensors are as `forward` takes them. dW comes first where the plan is lean or memory is short. Raises torch.OutOfMemoryError with the bytes
        that were needed.
        """
        if current_device() != self.index:
            with torch.cuda.device(self.index):
                return self.backward(
                    plan, wanted, grad_output, x, statistics, ln_weight, ln_bias, linear_weight
                )
        tensors = (
            grad_output.contiguous(),
            x.contiguous(),
            statistics.contiguous(),
            ln_weight.contiguous(),
            ln_bias.contiguous(),
            linear_weight if plan.transposed else linear_weight.contiguous(),
        )
        splits = wanted & WEIGHT != 0 and wanted & (INPUT | NORM) != 0
        if splits and plan.lean:
            return self.backward_weight_first(plan, wanted, *tensors)
        if plan.lean:
            wanted |= FEW_SHARES
        try:
            return self.backward_at_once(plan, wanted, *tensors)
        except torch.OutOfMemoryError as error:
            if not splits:
                raise
            short = str(error)  # the error itself holds on to what its frames have allocated
        try:
            return self.backward_weight_first(plan, wanted, *tensors)
        except torch.OutOfMemoryError:
            raise torch.OutOfMemoryError(short) from None

    def backward_weight_first(self, plan: Plan, wanted: int, *tensors: Tensor) -> Gradients:
        """As `backward`, with less memory at the peak: dW, and then the rest, with few shares of its sums.

        ln_out is given back before dln is made; made at once, both are there.
        """
        dW = self.backward_at_once(plan, WEIGHT | FEW_SHARES, *tensors)[3]
        rest = wanted & ~WEIGHT | FEW_SHARES
        dx, dgamma, dbeta, _, db = self.backward_at_once(plan, rest, *tensors)
        return dx, dgamma, dbeta, dW, db

    def backward_at_once(self, plan: Plan, wanted: int, *tensors: Tensor) -> Gradients:
        """As `backward`, in as few launches as there can be."""
        rows, H, O, dtype = plan.rows, plan.H, plan.O, plan.dtype
        choice = plan.choice
        captured = is_captured(plan)
        products = choice.captured if captured else choice.plain
        branches = choice.forked and wanted & WEIGHT != 0 and wanted & (INPUT | NORM) != 0
        if branches and captured:
            return self.backward_on_branches(plan, wanted, self.sides, *tensors)
        if choice.differs and not captured and self.is_first(plan, wanted):
            if branches:
                self.backward_on_branches(plan, wanted, (), *tensors)
            elif choice.captured[1:] != products[1:]:
                self.backward_with_library(plan, choice.captured, wanted, *tensors)
        if products is not ALL_OWN and (products.dln is not OWN or products.dW is not OWN):
            return self.backward_with_library(plan, products, wanted, *tensors)
        try:
            dx = empty_strided(plan.input_size, plan.input_strides, dtype) if wanted & INPUT else None
            strides = (1, O) if plan.transposed else (H, 1)
            dW = None
            if wanted & WEIGHT and plan.weight_room:
                dW = empty_strided((plan.weight_room,), (1,), dtype).resize_(O, H)
            elif wanted & WEIGHT:
                dW = empty_strided((O, H), strides, dtype)
            dgamma, dbeta, db = self.launch_parts(plan, wanted, dx, dW, *tensors)[:3]
        except torch.OutOfMemoryError as error:
            need = self.scratch(wanted, kind_of(dtype, plan.pairs), rows, H, O)
            raise out_of_memory("backward", plan, result_bytes(plan, wanted), need, error) from error
        gradients = (dx, dgamma, dbeta, dW, db)
        if not rows:
            for gradient in gradients:
                if gradient is not None:
                    gradient.zero_()
        return gradients

    def reads_along_sums(self, plan: Plan) -> bool:
        """Whether the library's product dW is faster by more than it costs to write ln_out transposed: in TF32, Hopper's tensor
        cores read both factors along the sum, and the library turns those that lie otherwise as it goes."""
        elements = plan.H * plan.O
        large = elements >= ALONG_SUMS_ELEMENTS and plan.rows * elements >= ALONG_SUMS_FROM
        return self.hopper and large and plan.rows % 4 == 0 and kind_of(plan.dtype) == TF32

    def launch_parts(
        self,
        plan: Plan,
        wanted: int,
        dx: Tensor | None,
        dW: Tensor | None,
        *tensors: Tensor,
        dln: Tensor | None = None,
        ln_out: Tensor | None = None,
        stride: int = 0,
        stream: int = 0,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Launches what the module makes of a backward pass; returns dgamma, dbeta and db, which it allocates, and the scratch
        memory, for who launches on another `stream` than the current one, whose the memory is.

        `tensors` are those of `backward`. `wanted` may have DLN_GIVEN and LN_OUT_TAKEN, with dln and ln_out and the elements from
        one of their rows to the next.
        """
        grad_output, x, statistics, ln_weight, ln_bias, linear_weight = tensors
        rows, H, O, dtype = plan.rows, plan.H, plan.O, plan.dtype
        kind = kind_of(dtype, plan.pairs)
        mean = statistics.data_ptr()
        given = (
            grad_output.data_ptr(),
            x.data_ptr(),
            mean,
            mean + rows * plan.wide.itemsize,
            ln_weight.data_ptr(),
            ln_bias.data_ptr(),
            linear_weight.data_ptr(),
            address(dln),
            address(ln_out),
            stride,
        )
        need = self.scratch(wanted, kind, rows, H, O)
        if (given[0] | given[1] | given[4] | given[5] | given[6]) % VECTOR:
            need = max(need, self.launch_backward(*NOWHERE, kind, rows, H, O, wanted, *[0] * 5, *given))
        dgamma = dbeta = db = None
        if wanted & NORM:
            dgamma = empty_strided((H,), (1,), dtype)
            dbeta = empty_strided((H,), (1,), dtype)
        if wanted & BIAS:
            db = empty_strided((O,), (1,), dtype)
        scratch = empty_strided((need,), (1,), torch.uint8) if need else None
        if rows:
            self.launch_backward(
                self.gpu,
                stream or current_stream(self.index),
                address(scratch),
                need,
                kind,
                rows,
                H,
                O,
                wanted,
                *map(address, (dx, dgamma, dbeta, dW, db)),
                *given,
            )
        return dgamma, dbeta, db, scratch

    def forward_rows(
        self, plan: Plan, stride: int, eps: float, x: Tensor, ln_weight: Tensor, ln_bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The LayerNorm's output [rows, stride], zeros from column H on, and mean and rstd."""
        rows, H, dtype = plan.rows, plan.H, plan.dtype
        statistics = empty_strided(plan.statistics_size, plan.statistics_strides, plan.wide)
        ln_out = empty_strided((rows, stride), (stride, 1), dtype)
        mean = statistics.data_ptr()
        rstd = mean + rows * plan.wide.itemsize
        sizes, tensors = (rows, H, plan.O, eps), (ln_out, mean, rstd, x, ln_weight, ln_bias)
        self.launch(self.module.forward_rows, KINDS[dtype], *sizes, *tensors, stride, scratch=0)
        return ln_out, statistics

    def forward_with_library(
        self, plan: Plan, pads: bool, eps, x, ln_weight, ln_bias, linear_weight, linear_bias
    ) -> tuple[Tensor, Tensor]:
        """As `forward`, with torch's own product, which `pads` lets read copies with aligned rows."""
        rows, H, O, dtype = plan.rows, plan.H, plan.O, plan.dtype
        stride, columns = (padded(H, dtype), padded(O, dtype)) if pads else (H, O)
        try:
            with plain_torch():
                ln_out, statistics = self.forward_rows(plan, stride, eps, x, ln_weight, ln_bias)
                if pads:
                    linear_weight = with_padding(linear_weight, columns, stride)
                    linear_bias = torch.constant_pad_nd(linear_bias, (0, columns - O))
                output = linear(ln_out, linear_weight, linear_bias)
                if columns != O:
                    output = output[:, :O].clone(memory_format=torch.contiguous_format)
                # No view of the product: nobody could change in place what a Function returns as a view.
                output.resize_(plan.output_size)
        except torch.OutOfMemoryError as error:
            results = rows * O * dtype.itemsize + 2 * rows * plan.wide.itemsize
            raise out_of_memory("forward", plan, results, rows * stride * dtype.itemsize, error) from error
        return output, statistics

    def backward_with_library(
        self, plan: Plan, products: Products, wanted: int, *tensors: Tensor
    ) -> Gradients:
        """As `backward`, with one product or both torch's own."""
        rows, H, O, dtype = plan.rows, plan.H, plan.O, plan.dtype
        pads = products.dln is PADDED
        stride, columns = (padded(H, dtype), padded(O, dtype)) if pads else (H, O)
        dy, weight = tensors[0].view(rows, O), tensors[-1]
        parts = wanted
        dx = dW = dln = ln_out = None
        try:
            with plain_torch():
                if columns != O:
                    dy = with_padding(dy, rows, columns)
                if products.dln is not OWN and wanted & (INPUT | NORM):
                    if pads:
                        weight = with_padding(weight, columns, stride)
                    dln = torch.mm(dy, weight)
                    parts |= DLN_GIVEN
                    del weight
                # dx is written over dln, where its rows lie as those of x; but one launch for few rows reads dln while it
                # writes dx. That takes no more memory at the peak than dW, which comes when dln is gone.
                own_dW = products.dW is OWN and wanted & WEIGHT != 0
                few = rows <= min(MOST_FEW_ROWS, O) and bool(parts & DLN_GIVEN) and not own_dW
                few = few and not parts & FEW_SHARES
                if wanted & INPUT:
                    over = dln is not None and stride == H and not few
                    dx = dln if over else empty_strided((rows, H), (H, 1), dtype)
                if few:
                    parts |= FEW_ROWS
                if products.dW is not OWN and wanted & WEIGHT:
                    turned = not few and self.reads_along_sums(plan)
                    ln_out = empty_strided((rows, stride), (1, rows) if turned else (stride, 1), dtype)
                    parts = parts & ~WEIGHT | LN_OUT_TAKEN | (TRANSPOSED if turned else 0)
                elif wanted & WEIGHT:
                    dW = empty_strided((O, H), (H, 1), dtype)
                dgamma, dbeta, db = self.launch_parts(
                    plan, parts, dx, dW, *tensors, dln=dln, ln_out=ln_out, stride=stride
                )[:3]
                del dln
                if ln_out is not None:
                    dW = torch.mm(ln_out.t(), dy).t() if plan.transposed else torch.mm(dy.t(), ln_out)
                    if pads:
                        dW = dW[:O, :H].contiguous()
        except torch.OutOfMemoryError as error:
            scratch = rows * stride * dtype.itemsize
            raise out_of_memory("backward", plan, result_bytes(plan, wanted), scratch, error) from error
        return None if dx is None else dx.view(plan.input_size), dgamma, dbeta, dW, db

    def backward_on_branches(
        self, plan: Plan, wanted: int, sides: tuple[torch.cuda.Stream, ...], *tensors: Tensor
    ) -> Gradients:
        """As `backward`, for a CUDA graph that is being captured: dW, from an ln_out of its own, beside all the rest; and beside
        both the sum of many columns of dY, where no product of this project makes it on its way.

        Without `sides` one after the other. All memory is the current stream's; what a branch beside it uses is kept until
        they have met.
        """
        rows, H, O, dtype = plan.rows, plan.H, plan.O, plan.dtype
        products = plan.choice.captured
        main = torch.cuda.current_stream(self.index)
        beside, third = sides or (main, main)
        apart = BIAS if products.dln is not OWN and rows * O >= MANY_SUMS else 0
        for side in sides:
            side.wait_stream(main)
        try:
            kept, db = [], None
            try:
                dW = empty_strided((O, H), (H, 1), dtype)
                if products.dW is OWN:
                    kept += self.launch_parts(plan, WEIGHT, None, dW, *tensors, stream=beside.cuda_stream)
                else:
                    ln_out = empty_strided((rows, H), (H, 1), dtype)
                    lent = {"ln_out": ln_out, "stride": H, "stream": beside.cuda_stream}
                    kept += [*self.launch_parts(plan, LN_OUT_TAKEN, None, None, *tensors, **lent), ln_out]
                    with plain_torch(), torch.cuda.stream(beside):
                        torch.mm(tensors[0].view(rows, O).t(), ln_out, out=dW)
                if wanted & apart:
                    sums = self.launch_parts(plan, BIAS, None, None, *tensors, stream=third.cuda_stream)
                    db = sums[2]
                    kept += sums
            except torch.OutOfMemoryError as error:
                scratch = rows * H * dtype.itemsize
                raise out_of_memory("backward", plan, result_bytes(plan, wanted), scratch, error) from error
            if not sides:
                kept.clear()  # in one stream what dW took is free for dln
            rest = wanted & ~WEIGHT & ~apart
            dx, dgamma, dbeta, _, other = self.backward_with_library(plan, products, rest, *tensors)
        finally:
            for side in sides:
                main.wait_stream(side)
        return dx, dgamma, dbeta, dW, db if other is None else other


def with_padding(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """A copy of a matrix with zeros below and to the right."""
    copy = matrix.new_empty((rows, columns))
    height, width = matrix.shape
    copy[:height, :width].copy_(matrix)
    # Zeros where there must be some, and not everywhere first.
    if width != columns:
        copy[:, width:].zero_()
    if height != rows:
        copy[height:].zero_()
    return copy


def result_bytes(plan: Plan, wanted: int) -> int:
    """Bytes of the gradients that are wanted."""
    sizes = {INPUT: plan.rows * plan.H, NORM: 2 * plan.H, WEIGHT: plan.O * plan.H, BIAS: plan.O}
    return plan.dtype.itemsize * sum(size for bit, size in sizes.items() if wanted & bit)


def plain_torch() -> contextlib.AbstractContextManager:
    """Keeps autograd, and `torch.autocast` with its narrower operands, away from torch's own products."""
    if not (torch.is_grad_enabled() or any_autocast()):
        return NOTHING_TO_DO
    stack = contextlib.ExitStack()
    stack.enter_context(torch.no_grad())
    if any_autocast():
        stack.enter_context(torch.autocast(extension_kernels.DEVICE, enabled=False))
    return stack


def out_of_memory(
    direction: str, plan: Plan, results: int, scratch: int, error: Exception
) -> torch.OutOfMemoryError:
    """The error for a pass that found no memory: what it needed, then torch's own words."""
    return torch.OutOfMemoryError(
        f"fused_layernorm_linear, {direction} pass over {plan.rows} rows, {plan.H} -> {plan.O} in "
        f"{plain(plan.dtype)}, needed {results + scratch:,} bytes of GPU memory: {results:,} for "
        f"results and {scratch:,} for scratch. {error}"
    )


# ---- Who computes a call ------------------------------------------------------------------------------------


kernels = Opened(
    "layernorm_linear",
    LayerNormKernels,
    lambda device: "fused_layernorm_linear goes through a MAX graph of its unfused kernels",
)
"""The kernels of a device."""


class Way(NamedTuple):
    """Who computes a call."""

    algorithm: str
    """Of the MAX graph, where there is no plan."""
    kernels: LayerNormKernels | None = None
    """Of the extension module,"""
    plan: Plan | None = None
    """and what they do."""

    def explain(self) -> dict[str, str]:
        """In words: see `LayerNormLinear.explain`."""
        if self.plan is None:
            return {"way": f"MAX graph, {self.algorithm}", **ALL_OWN._asdict()}
        way = "extension module" + (", pairs of float16" if self.plan.pairs else "")
        way += ", dW first" if self.plan.lean else ""
        choice = self.plan.choice
        words = {"way": way, **choice.plain._asdict()}
        if choice.captured != choice.plain:
            words |= {f"{name} in a CUDA graph": who for name, who in choice.captured._asdict().items()}
        if choice.forked and not self.plan.lean:
            words["backward in a CUDA graph"] = "two branches"
        return words


def way(x: Tensor, dtype: torch.dtype, linear_weight: Tensor, algorithm: str, memory: str = AUTO) -> Way:
    """Who computes both passes of a call, of x [..., H] taken in a dtype and linear_weight [O, H].

    The registered operators and `explain` ask here. `layers.layernorm_linear_directly`, where every microsecond counts, asks the same
    three by itself: `THROUGH_MODULE`, `kernels` and `make_plan`, the last together with the check of its arguments.
    """
    if algorithm not in THROUGH_MODULE:
        return Way(algorithm)
    opened = kernels(x.device)
    if opened is None:
        return Way("unfused")
    transposed = lies_transposed(linear_weight)
    planned = make_plan(x.shape, len(linear_weight), dtype, transposed, opened.hopper, algorithm, memory)
    return Way(algorithm, opened, planned)
