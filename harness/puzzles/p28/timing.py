"""Puzzle 28's kernels as a shared library, which $WORKBOOK_FAST_STEPS can provide where Mojo is missing."""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from harness.errors import EnvironmentProblem
from harness.toolchain import libraries
from harness.toolchain.packages import list_mojo_files

SOURCE = Path(__file__).with_suffix(".mojo")
LIBRARY_FOLDER = "WORKBOOK_FAST_STEPS"
WORKSPACE_BYTES = 2**28
"""Bytes of workspace that a step's launches share."""
TRANSPOSE, BIAS_AND_SUMS, GRAD_INPUT = 13, 14, 15
"""Numbers of launches that are not steps; in `timing.mojo` they follow the steps' numbers."""


def build_library(package: Path, form: str, dtype: str) -> Path:
    """Return an op package's library for this GPU, building it unless $WORKBOOK_FAST_STEPS provides it.

    Raises EnvironmentProblem if it cannot be built, CompileFailed if the package does not compile.
    """
    prebuilt_folder = os.environ.get(LIBRARY_FOLDER)
    if prebuilt_folder:
        return Path(prebuilt_folder) / f"{form}_{dtype}.so"
    libraries.load_runtime()
    capability = "sm_{}{}".format(*torch.cuda.get_device_capability())
    architecture = "sm_90a" if capability == "sm_90" else capability
    files = [SOURCE, *list_mojo_files(package)]
    library = libraries.make_mojo_library(
        f"fast_steps_{dtype}", files, package.parent, architecture, DTYPE=dtype
    )
    return library.build().path


class StepLibrary:
    """The steps of one library."""

    def __init__(self, path: Path):
        self.module = ctypes.CDLL(str(path))
        self.module.workbook_open.restype = self.module.workbook_step.restype = ctypes.c_int64
        self.device = self.module.workbook_open()
        if not self.device:
            raise EnvironmentProblem(f"{path.name} finds no GPU")
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def enqueue(self, step: int, tensors: Sequence[Tensor], rows: int, hidden: int, outputs: int = 0) -> None:
        """Enqueue a step's launches on PyTorch's current stream; the tensors are in its op's order."""
        pointers = (ctypes.c_int64 * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
        stream = torch.cuda.current_stream().cuda_stream
        numbers = (self.device, stream, step, ctypes.addressof(pointers), rows, hidden, outputs)
        values = (ctypes.c_int64(number) for number in (*numbers, self.workspace.data_ptr()))
        if not self.module.workbook_step(*values):
            raise EnvironmentProblem(f"step {step} could not be launched")


STEPS = (
    "rows", "once", "vectors", "shuffles", "dx", "dgamma", "tiled", "registers", "copies", "tensor", "layouts",
    "epilogue",
)  # fmt: skip


@dataclass
class Problem:
    """Tensors of one size, shared by all forms of a step, and the calls of each step on them."""

    rows: int
    hidden: int
    outputs: int
    dtype: torch.dtype

    def __post_init__(self):
        R, H, O = self.rows, self.hidden, self.outputs

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda").to(self.dtype)

        self.x = 2 * normal(R, H) + 1
        self.dln, self.ln_out, self.dy = normal(R, H), normal(R, H), normal(R, O)
        self.gamma, self.beta, self.bias = 1 + normal(H) / 2, normal(H), normal(O)
        self.weight = normal(O, H) / H**0.5
        x32 = self.x.float()
        self.mean, self.rstd = x32.mean(-1), (x32.var(-1, unbiased=False) + 1e-5).rsqrt()
        self.y, self.dx, self.grad_ln_out = (torch.empty_like(self.x) for _ in range(3))
        self.dgamma, self.dbeta = torch.empty_like(self.gamma), torch.empty_like(self.gamma)
        self.output, self.dw, self.db = (torch.empty_like(t) for t in (self.dy, self.weight, self.bias))
        self.transposed = [t.T.contiguous() for t in (self.weight, self.dy, self.ln_out)]

    def enqueue_step(self, steps: StepLibrary, number: int) -> None:
        operands = (self.ln_out, self.weight)
        tensors = {
            **dict.fromkeys(range(1, 5), (self.y, self.x, self.gamma, self.beta)),
            5: (self.dx, self.dln, self.x, self.mean, self.rstd, self.gamma),
            6: (self.dgamma, self.dbeta, self.dln, self.x, self.mean, self.rstd),
            **dict.fromkeys(range(7, 11), (self.output, *operands)),
            11: (self.grad_ln_out, self.dw, self.dy, *operands),
            12: (self.output, self.dw, self.db, self.dy, *operands, self.bias),
        }[number]
        steps.enqueue(number, tensors, self.rows, self.hidden, self.outputs)

    def enqueue_gradient(self, steps: StepLibrary, number: int, name: str) -> None:
        """Enqueue the matmul of "dln" or "dW" by a forward matmul's step, which reads transposed copies."""
        R, H, O = self.rows, self.hidden, self.outputs
        weight, dy, ln_out = self.transposed
        if name == "dln":
            steps.enqueue(number, (self.grad_ln_out, self.dy, weight), R, O, H)
        else:
            steps.enqueue(number, (self.dw, dy, ln_out), O, R, H)

    def get_result_pairs(self, number: int) -> list[tuple[Tensor, Tensor]]:
        """Return a step's outputs, each with its expected values in float32."""
        tensors = (self.x, self.gamma, self.beta, self.dln, self.ln_out, self.weight, self.dy)
        x, gamma, beta, dln, ln_out, weight, dy = (tensor.float() for tensor in tensors)
        shape = [self.hidden]
        if number <= 4:
            return [(self.y, torch.nn.functional.layer_norm(x, shape, gamma, beta, 1e-5))]
        if number <= 6:
            statistics = self.mean[:, None], self.rstd[:, None]
            dx, dgamma, dbeta = torch.ops.aten.native_layer_norm_backward(
                dln, x, shape, *statistics, gamma, beta, [True] * 3
            )
            return [(self.dx, dx)] if number == 5 else [(self.dgamma, dgamma), (self.dbeta, dbeta)]
        if number <= 10:
            return [(self.output, ln_out @ weight.T)]
        backward = [(self.dw, dy.T @ ln_out)]
        if number == 11:
            return [*backward, (self.grad_ln_out, dy @ weight)]
        return [*backward, (self.output, ln_out @ weight.T + self.bias.float()), (self.db, dy.sum(0))]

    def enqueue_both_passes(self, initial: StepLibrary, current: StepLibrary, last_step: int) -> None:
        """Enqueue both passes, with steps up to `last_step` from `current` and the others from `initial`."""
        R, H, O = self.rows, self.hidden, self.outputs

        def select_steps(number: int) -> StepLibrary:
            return current if number <= last_step else initial

        norm_step = min(max(last_step, 1), 4)
        select_steps(1).enqueue(norm_step, (self.ln_out, self.x, self.gamma, self.beta), R, H)
        if last_step >= 12:
            self.enqueue_step(current, 12)
        else:
            matmul_step = min(max(last_step, 7), 10)
            select_steps(7).enqueue(matmul_step, (self.output, self.ln_out, self.weight), R, H, O)
            current.enqueue(BIAS_AND_SUMS, (self.output, self.db, self.dy, self.bias), R, H, O)
        if last_step == 11:
            self.enqueue_step(current, 11)
        elif last_step == 12:
            current.enqueue(GRAD_INPUT, (self.grad_ln_out, self.dy, self.weight), R, H, O)
        else:
            for transposed, matrix in zip(self.transposed, (self.weight, self.dy, self.ln_out), strict=True):
                current.enqueue(TRANSPOSE, (transposed, matrix), *matrix.shape)
            self.enqueue_gradient(select_steps(7), matmul_step, "dln")
            self.enqueue_gradient(select_steps(7), matmul_step, "dW")
        statistics = (self.x, self.mean, self.rstd)
        select_steps(5).enqueue(5, (self.dx, self.grad_ln_out, *statistics, self.gamma), R, H)
        select_steps(6).enqueue(6, (self.dgamma, self.dbeta, self.grad_ln_out, *statistics), R, H)
