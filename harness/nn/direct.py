"""The extension module's kernels on torch tensors: allocates, launches on torch's current stream, and nothing more.

Every microsecond counts here: a small layer costs its host time. So everything that follows from shapes and dtypes alone
is worked out once (`Plan`), memory comes from torch's allocator in the way compiled graphs take it, and addresses go to
the module as integers. Whoever calls has checked that the tensors lie on one GPU.
"""

import contextlib
import functools
import math
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from harness.errors import WorkbookError
from harness.nn.ops import EPS
from harness.nn.private import any_autocast, current_device, current_stream, empty_strided, fp32_precision
from harness.toolchain import extension

Tensor = torch.Tensor

# How the module numbers what it computes in.
KINDS = {torch.float32: 0, torch.bfloat16: 2, torch.float16: 3, torch.float64: 4}
TF32 = 1
DEVICE = "cuda"
"""What torch calls NVIDIA's and AMD's GPUs."""
LIBRARY_FROM = 2**24
"""From this many multiply-adds on, the products of float32 and float64 are torch's own, between this project's row
kernels: the vendor's library is faster in them, and follows torch's flag for TF32 by itself."""
LIBRARY_FROM_UNALIGNED = 2**16
"""The same for the 16-bit types where rows of a factor begin at any address, and neither wide loads nor tensor cores' tiles
fit: the products of an H200's library take 0.18 to 0.8 of the time there (book/measurements/h200_own_or_library.csv)."""
VECTOR = 16
"""Bytes to which every address must be aligned for the kernels' wide loads; others take a slower variant."""

LARGEST = 2**31 - 1
WEIGHT, BIAS = 1, 2
"""Gradients of the linear layer that are wanted, added."""
NOWHERE = (0, 0, 0, 0)
"""In the place of GPU, stream and scratch memory: launches nothing, and only counts the scratch memory."""


# ---- Sizes and scratch memory -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What follows from the shapes and the dtype of a call."""

    rows: int
    H: int
    O: int
    dtype: torch.dtype
    wide: torch.dtype
    """Of the statistics."""
    library: bool
    """Whether the products are torch's own."""
    transposed: bool
    """Whether linear_weight lies in memory as [H, O], as in GPT-2; then so does its gradient."""
    input_size: tuple[int, ...]
    input_strides: tuple[int, ...]
    output_size: tuple[int, ...]
    output_strides: tuple[int, ...]
    statistics_size: tuple[int, ...]
    statistics_strides: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def plan(shape: torch.Size, output_dim: int, dtype: torch.dtype, transposed: bool = False) -> Plan:
    """The plan for x of a shape [..., H] and linear_weight [O, H], which may lie transposed.

    Raises ValueError where a size is beyond the 32-bit integers that the kernels take.
    """
    rows, H = math.prod(shape[:-1]), shape[-1]
    for name, size in (("rows", rows), ("H", H), ("O", output_dim)):
        if size > LARGEST:
            raise ValueError(f"{name}: the kernels take at most {LARGEST:,}, got {size:,}")
    output_size = (*shape[:-1], output_dim)
    statistics_size = (2, *shape[:-1])
    return Plan(
        rows,
        H,
        output_dim,
        dtype,
        torch.float64 if dtype == torch.float64 else torch.float32,
        bool(rows) and (transposed or rows * H * output_dim >= library_from(H, output_dim, dtype)),
        transposed,
        tuple(shape),
        contiguous_strides(shape),
        output_size,
        contiguous_strides(output_size),
        statistics_size,
        contiguous_strides(statistics_size),
    )


def library_from(H: int, O: int, dtype: torch.dtype) -> float:
    """The multiply-adds from which torch's own products are taken."""
    if dtype.itemsize >= 4:
        return LIBRARY_FROM
    aligned = (H * dtype.itemsize) % VECTOR == 0 == (O * dtype.itemsize) % VECTOR
    return math.inf if aligned else LIBRARY_FROM_UNALIGNED


def lies_transposed(weight: Tensor) -> bool:
    """Whether a matrix is the transpose of one that lies row by row; a copy of it would cost what a product may."""
    return not weight.is_contiguous() and weight.dim() == 2 and weight.t().is_contiguous()


def as_it_lies(weight: Tensor) -> Tensor:
    """A matrix that lies row by row or column by column: itself, or a copy."""
    return weight if lies_transposed(weight) else weight.contiguous()


def contiguous_strides(size: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a dense row-major tensor."""
    strides = []
    step = 1
    for extent in reversed(size):
        strides.append(step)
        step *= max(1, extent)
    return tuple(reversed(strides))


def kind_of(dtype: torch.dtype) -> int:
    """The number of a dtype; float32 has two, by torch's own flag for matrix products on CUDA."""
    if dtype is torch.float32 and fp32_precision("cuda", "matmul") == "tf32":
        return TF32
    return KINDS[dtype]


# ---- One GPU ------------------------------------------------------------------------------------------------


class Kernels:
    """The module on one GPU.

    Args:
        module: The loaded extension module.
        index: torch's number of the GPU, which is MAX's too.
    """

    def __init__(self, module: ModuleType, index: int):
        self.index = index
        self.launch_forward: Callable[..., int] = module.forward
        self.launch_backward: Callable[..., int] = module.backward
        self.module = module
        self.gpu = module.open(index)
        self.scratch = functools.lru_cache(maxsize=4096)(self.count_scratch)

    def count_scratch(self, wanted: int | None, kind: int, rows: int, H: int, O: int) -> int:
        """The bytes of scratch memory that a pass over aligned tensors takes; forward where `wanted` is None."""
        if not rows:
            return 0
        if wanted is None:
            return self.launch_forward(*NOWHERE, kind, rows, H, O, EPS, *[0] * 8)
        return self.launch_backward(*NOWHERE, kind, rows, H, O, wanted, *[0] * 12)

    def probe(self) -> None:
        """Launches one small forward pass. Raises whatever the driver and the kernels' assembler have against it."""
        with torch.cuda.device(self.index):
            if torch.cuda.is_current_stream_capturing():
                return
            ones = torch.ones(8, 8, device="cuda")
            self.forward(plan(ones.shape, 8, ones.dtype), EPS, False, ones, ones[0], ones[0], ones, ones[0])

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

        All tensors are contiguous, but for linear_weight where the plan says so, and on this GPU. Raises
        torch.OutOfMemoryError with the bytes that were needed.
        """
        if current_device() != self.index:
            with torch.cuda.device(self.index):
                return self.forward(plan, eps, keep, x, ln_weight, ln_bias, linear_weight, linear_bias)
        if plan.library:
            return self.forward_with_library(plan, eps, x, ln_weight, ln_bias, linear_weight, linear_bias)
        rows, H, O = plan.rows, plan.H, plan.O
        kind = kind_of(plan.dtype)
        given = (
            x.data_ptr(),
            ln_weight.data_ptr(),
            ln_bias.data_ptr(),
            linear_weight.data_ptr(),
            linear_bias.data_ptr(),
        )
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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """dx [..., H], dgamma [H], dbeta [H], dW [O, H] and db [O]; the last two where `wanted` has WEIGHT and BIAS.

        `statistics` is what `forward` kept. All tensors are contiguous, but for linear_weight where the plan says so, and
        on this GPU. Raises torch.OutOfMemoryError with the bytes that were needed.
        """
        if current_device() != self.index:
            with torch.cuda.device(self.index):
                return self.backward(
                    plan, wanted, grad_output, x, statistics, ln_weight, ln_bias, linear_weight
                )
        if plan.library:
            tensors = (grad_output, x, statistics, ln_weight, ln_bias, linear_weight)
            return self.backward_with_library(plan, wanted, *tensors)
        rows, H, O, dtype = plan.rows, plan.H, plan.O, plan.dtype
        kind = kind_of(dtype)
        mean = statistics.data_ptr()
        given = (
            grad_output.data_ptr(),
            x.data_ptr(),
            mean,
            mean + rows * plan.wide.itemsize,
            ln_weight.data_ptr(),
            ln_bias.data_ptr(),
            linear_weight.data_ptr(),
        )
        need = self.scratch(wanted, kind, rows, H, O)
        if (given[0] | given[1] | given[4] | given[5] | given[6]) % VECTOR:
            need = max(need, self.launch_backward(*NOWHERE, kind, rows, H, O, wanted, *[0] * 5, *given))
        try:
            dx = empty_strided(plan.input_size, plan.input_strides, dtype)
            dgamma = empty_strided((H,), (1,), dtype)
            dbeta = empty_strided((H,), (1,), dtype)
            strides = (1, O) if plan.transposed else (H, 1)
            dW = empty_strided((O, H), strides, dtype) if wanted & WEIGHT else None
            db = empty_strided((O,), (1,), dtype) if wanted & BIAS else None
            scratch = empty_strided((need,), (1,), torch.uint8) if need else None
        except torch.OutOfMemoryError as error:
            results = (rows * H + 2 * H + O * H + O) * dtype.itemsize
            raise out_of_memory("backward", plan, results, need, error) from error
        gradients = (dx, dgamma, dbeta, dW, db)
        if not rows:
            for gradient in gradients:
                if gradient is not None:
                    gradient.zero_()
            return gradients
        self.launch_backward(
            self.gpu,
            current_stream(self.index),
            0 if scratch is None else scratch.data_ptr(),
            need,
            kind,
            rows,
            H,
            O,
            wanted,
            dx.data_ptr(),
            dgamma.data_ptr(),
            dbeta.data_ptr(),
            dW.data_ptr() if dW is not None else 0,
            db.data_ptr() if db is not None else 0,
            *given,
        )
        return gradients

    def launch_rows(self, launch, plan: Plan, extra: float | int, addresses: tuple[int, ...]) -> None:
        """Launches the rows of a pass, with scratch memory counted for just these addresses."""
        arguments = (KINDS[plan.dtype], plan.rows, plan.H, plan.O, extra, *addresses)
        need = launch(*NOWHERE, *arguments)
        scratch = empty_strided((need,), (1,), torch.uint8)
        launch(self.gpu, current_stream(self.index), scratch.data_ptr(), need, *arguments)

    def forward_with_library(
        self, plan: Plan, eps, x, ln_weight, ln_bias, linear_weight, linear_bias
    ) -> tuple[Tensor, Tensor]:
        """As `forward`, with torch's own product."""
        rows, H, O = plan.rows, plan.H, plan.O
        try:
            with torch.no_grad(), without_autocast():
                output = empty_strided(plan.output_size, plan.output_strides, plan.dtype)
                statistics = empty_strided(plan.statistics_size, plan.statistics_strides, plan.wide)
                ln_out = empty_strided((rows, H), (H, 1), plan.dtype)
                mean = statistics.data_ptr()
                addresses = (
                    ln_out.data_ptr(),
                    mean,
                    mean + rows * plan.wide.itemsize,
                    x.data_ptr(),
                    ln_weight.data_ptr(),
                    ln_bias.data_ptr(),
                )
                self.launch_rows(self.module.forward_rows, plan, eps, addresses)
                torch.addmm(linear_bias, ln_out, linear_weight.t(), out=output.view(rows, O))
        except torch.OutOfMemoryError as error:
            results = rows * O * plan.dtype.itemsize + 2 * rows * plan.wide.itemsize
            raise out_of_memory("forward", plan, results, rows * H * plan.dtype.itemsize, error) from error
        return output, statistics

    def backward_with_library(
        self, plan: Plan, wanted, grad_output, x, statistics, ln_weight, ln_bias, linear_weight
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """As `backward`, with torch's own products."""
        rows, H, O, dtype = plan.rows, plan.H, plan.O, plan.dtype
        dy = grad_output.view(rows, O)
        try:
            with torch.no_grad(), without_autocast():
                dln = torch.mm(dy, linear_weight)
                dx = empty_strided(plan.input_size, plan.input_strides, dtype)
                dgamma = empty_strided((H,), (1,), dtype)
                dbeta = empty_strided((H,), (1,), dtype)
                db = empty_strided((O,), (1,), dtype) if wanted & BIAS else None
                ln_out = empty_strided((rows, H), (H, 1), dtype)
                mean = statistics.data_ptr()
                addresses = (
                    dx.data_ptr(),
                    dgamma.data_ptr(),
                    dbeta.data_ptr(),
                    ln_out.data_ptr(),
                    db.data_ptr() if db is not None else 0,
                    dy.data_ptr(),
                    dln.data_ptr(),
                    x.data_ptr(),
                    mean,
                    mean + rows * plan.wide.itemsize,
                    ln_weight.data_ptr(),
                    ln_bias.data_ptr(),
                )
                self.launch_rows(self.module.backward_rows, plan, wanted, addresses)
                dW = None
                if wanted & WEIGHT:
                    dW = torch.mm(ln_out.t(), dy).t() if plan.transposed else torch.mm(dy.t(), ln_out)
        except torch.OutOfMemoryError as error:
            results = (rows * H + 2 * H + O * H + O) * dtype.itemsize
            raise out_of_memory("backward", plan, results, 2 * rows * H * dtype.itemsize, error) from error
        return dx, dgamma, dbeta, dW, db


def without_autocast():
    """Keeps `torch.autocast` from narrowing the operands of torch's own products."""
    on = any_autocast()
    return torch.autocast(DEVICE, enabled=False) if on else contextlib.nullcontext()


def out_of_memory(
    direction: str, plan: Plan, results: int, scratch: int, error: Exception
) -> torch.OutOfMemoryError:
    """The error for a pass that found no memory: what it needed, then torch's own words."""
    return torch.OutOfMemoryError(
        f"fused_layernorm_linear, {direction} pass over {plan.rows} rows, {plan.H} -> {plan.O} in "
        f"{str(plan.dtype).removeprefix('torch.')}, needed {results + scratch:,} bytes of GPU memory: {results:,} for "
        f"results and {scratch:,} for scratch. {error}"
    )


# ---- Which GPUs have a module -------------------------------------------------------------------------------

found: dict[int, Kernels | None] = {}
"""By torch's number of the GPU; None where building or loading has failed."""
_finding = threading.Lock()


def kernels(device: torch.device) -> Kernels | None:
    """The kernels for a device, built, loaded and opened when it is first asked for; None where there are none.

    Where that fails on a GPU, one warning says why.
    """
    if device.type != "cuda":
        return None
    index = device.index
    try:
        return found[index]
    except KeyError:
        with _finding:
            if index not in found:
                found[index] = find(device)
            return found[index]


def graph_algorithm(device: torch.device) -> str:
    """Which algorithm a MAX graph runs in the place of the extension module: "fast" wherever its kernels run."""
    old = device.type == "cuda" and not torch.version.hip and capability(device) < extension.OLDEST_NVIDIA
    return "unfused" if old else "fast"


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of an NVIDIA GPU."""
    return torch.cuda.get_device_capability(device)


def find(device: torch.device) -> Kernels | None:
    """Builds, loads, opens and tries; warns where that fails."""
    try:
        built = extension.build(extension.architecture(device))
        found = Kernels(extension.load(built.path), device.index)
        found.probe()
        return found
    except (
        Exception
    ) as error:  # whatever the toolchain, the loader or the driver raises, there is another way
        reason = str(error) if isinstance(error, WorkbookError) else f"{type(error).__name__}: {error}"
        warnings.warn(
            f"fused_layernorm_linear goes through a MAX graph of its {graph_algorithm(device)} kernels on {device}, "
            f"which is slower and cannot be captured in a CUDA graph; there is no extension module: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
