"""Regression tests for bugs reported in other projects."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from typed import as_triple

from harness import nn
from harness.devices import recorder
from harness.nn import attention_layer

ROOT = Path(__file__).resolve().parents[1]


class Block(torch.nn.Module):
    """LayerNorm, an optional function, and Linear."""

    def __init__(self, width: int, out: int, between=lambda x: x):
        super().__init__()
        self.norm, self.linear, self.between = torch.nn.LayerNorm(width), torch.nn.Linear(width, out), between

    def forward(self, x):
        return self.linear(self.between(self.norm(x)))


def compile_block(block: Block, report: Any = False):
    """Compile with the workbook's backend after clearing the compiler's caches."""
    torch.compiler.reset()
    return torch.compile(block, backend="mojo_workbook", options={"report": report, "tail": "aot_eager"})


# ---- Large logits; tests/nn/test_linear_cross_entropy.py tests the kernels ----------------------------------


@pytest.mark.parametrize(
    ("dtype", "logit"),
    [(torch.float32, 1e4), (torch.float32, 1e6), (torch.float32, 1e8), (torch.bfloat16, 1e8)],
    ids=str,
)
def test_equal_large_logits_give_loss_log_2(dtype, logit):
    """Large equal logits lost precision in mlx#4188 and pytorch#11752."""
    bias = torch.zeros(2, requires_grad=True, dtype=dtype)
    weight = torch.full((2, 1), logit, dtype=dtype)
    loss = nn.linear_cross_entropy(torch.ones(1, 1, dtype=dtype), weight, torch.tensor([0]), bias)
    loss.backward()
    assert bias.grad is not None
    rtol = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(bias.grad.double(), torch.tensor([-0.5, 0.5]).double(), rtol=rtol, atol=0)
    torch.testing.assert_close(loss.double(), torch.tensor(2.0).double().log(), rtol=rtol, atol=0)


def test_compiled_head_with_equal_large_logits_gives_loss_log_2():

    def compute_loss(bias):
        logits = F.linear(torch.ones(1, 1), torch.full((2, 1), 1e8), bias)
        return F.cross_entropy(logits, torch.tensor([0]))

    torch.compiler.reset()
    reports, bias = [], torch.zeros(2, requires_grad=True)
    options = {"report": reports.append, "tail": "aot_eager", "head": True}
    loss = torch.compile(compute_loss, backend="mojo_workbook", options=options)(bias)
    (gradient,) = torch.autograd.grad(loss, bias)
    assert [len(report.heads) for report in reports] == [1]
    torch.testing.assert_close(gradient, torch.tensor([-0.5, 0.5]))
    torch.testing.assert_close(loss, torch.tensor(2.0).log())


# ---- Checkpoints --------------------------------------------------------------------------------------------


class Head(torch.nn.Module):
    """Linear and cross-entropy."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 5)

    def forward(self, x):
        return F.cross_entropy(self.linear(x), torch.zeros(len(x), dtype=torch.int64))


class Attention(torch.nn.Module):
    """Self-attention of a tensor [rows, 8] with one head."""

    def forward(self, x):
        return F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])


BLOCKS = {"swaps": lambda: Block(8, 5), "heads": Head, "attentions": Attention}
"""Attribute of the backend's report -> a model in which the backend replaces one operation."""


@pytest.mark.parametrize("attribute", BLOCKS)
def test_block_can_be_compiled_inside_a_checkpoint(attribute, monkeypatch):
    """A checkpoint compares the numbers of saved tensors (pytorch#144637, #144035)."""
    monkeypatch.setattr(attention_layer, "explain", lambda *arguments, **options: "wgmma")
    torch.manual_seed(0)
    block, reports = BLOCKS[attribute](), []
    options = {"report": reports.append, "tail": "aot_eager", "head": True, "attention": True}
    torch.compiler.reset()
    compiled = torch.compile(block, backend="mojo_workbook", options=options)
    for rows in (4, 7):
        x = torch.randn(rows, 8, requires_grad=True)
        checkpoint(compiled, x, use_reentrant=False).sum().backward()
        compiled_gradient, x.grad = x.grad, None
        block(x).sum().backward()
        torch.testing.assert_close(compiled_gradient, x.grad)
    assert [len(getattr(report, attribute)) for report in reports] == [1, 1]


# ---- Writes between LayerNorm and Linear ---------------------------------------------------------------------


@torch.library.custom_op("public_reports::shift", mutates_args={"x"})
def shift(x: torch.Tensor, by: float) -> None:
    """Add a number in place."""
    x += by


def write_by_numpy(x):
    """Write to an element of a NumPy view."""
    x.detach().numpy()[0, 0] = 100.0


def add_by_numpy(x):
    """Add a number in place through a NumPy view."""
    view = x.detach().numpy()
    view += 1


WRITERS = {
    "an operator whose name does not end in an underscore": lambda x: torch.ops.public_reports.shift(x, 50.0),
    "its function": lambda x: shift(x, 50.0),
    "an element of a NumPy view": write_by_numpy,
    "an in-place operator of NumPy": add_by_numpy,
    "NumPy's fill": lambda x: x.detach().numpy().fill(3.0),
    "NumPy's sort": lambda x: x.detach().numpy().sort(),
    "a table that is scaled": lambda x: F.embedding(torch.tensor([0, 1]), x, max_norm=0.1),
    "running statistics": lambda x: F.batch_norm(x.sin(), x[0], x[1].abs(), training=True),
    "several tensors at once": lambda x: torch.ops.aten._foreach_add_([x], 1.0),
    "an output argument": lambda x: torch.sin(x.detach().clone(), out=x),
    "an in-place activation": lambda x: F.relu(x, inplace=True),
    "an in-place activation, by position": lambda x: F.elu(x, 2.0, True),
    "a method": lambda x: x.add_(1.0),
    "assignment": lambda x: x[0].copy_(x[1]),
}


READERS = {
    "methods": lambda x: (x.size(), x.float().sum(), x.view(2, 2, 8), x.split(4, -1), x.shape, x.mT),
    "operators": lambda x: (x + 1, x * 2, -x, x[0], x > 0),
    "functions": lambda x: (
        torch.softmax(x, -1),
        torch.zeros_like(x),
        torch.einsum("ij->ji", x),
        torch.stack([x, x]),
    ),
    "layers": lambda x: (
        F.gelu(x),
        F.dropout(x, 0.1),
        F.silu(x),
        F.mse_loss(x, x),
        F.embedding(torch.tensor([0]), x),
    ),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "linear algebra": lambda x: (torch.linalg.norm(x), torch.fft.fft(x)),
    "numbers": lambda x: (torch.arange(3), torch.rand(3), torch.tensor([1.0])),
}


@pytest.mark.parametrize(
    ("access", "num_replaced"),
    [(write, 0) for write in WRITERS.values()] + [(read, 1) for read in READERS.values()],
    ids=[*WRITERS, *READERS],
)
def test_linear_is_replaced_unless_its_input_is_written(access, num_replaced):
    """Access the LayerNorm's output before the Linear reads it (pytorch#153389, #127821, #94777)."""
    torch.manual_seed(0)
    block, x, reports = Block(8, 5, lambda h: (access(h), h)[1]), torch.randn(4, 8), []
    with torch.no_grad():
        torch.testing.assert_close(compile_block(block, reports.append)(x), block(x))
    assert [len(report.swaps) for report in reports] == [num_replaced]


# ---- Autocast -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mean", [10, 100, 1000])
def test_autocast_computes_the_norm_in_float32(mean):
    """The test uses rows with a large mean (onnxruntime#28463, flax#612)."""
    torch.manual_seed(0)
    block, x = Block(64, 16), torch.randn(32, 64) + mean
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        eager, compiled = block(x), compile_block(block)(x)
    with torch.no_grad():
        exact = Block(64, 16).double()
        exact.load_state_dict(block.state_dict())
        truth = exact(x.double())
    assert (compiled.double() - truth).abs().max() <= 2 * (eager.double() - truth).abs().max()


# ---- Non-ASCII paths ---------------------------------------------------------------------------------

FAULTY = """\
from max.gpu import thread_idx
from max.gpu.host import DeviceContext


def past_the_end(values: MutPointer[Float32, MutAnyOrigin]):
    values.unsafe_store(thread_idx.x, Float32(1))


def main() raises:
    var ctx = DeviceContext()
    var values = ctx.enqueue_create_buffer[DType.float32](16)
    ctx.enqueue_function[past_the_end](values, grid_dim=1, block_dim=32)
    ctx.synchronize()
"""


@pytest.mark.compiles
def test_finding_reports_non_ascii_path(tmp_path):
    """The faulty source is in a folder with a non-ASCII name (rustlings#1904)."""
    folder = tmp_path / "Übung"
    folder.mkdir()
    (folder / "faulty.mojo").write_text(FAULTY)
    program = str(Path(sys.executable).parent / "mojo")
    completed = subprocess.run(
        [sys.executable, "-m", "harness", "vgpu", "exec", "--", program, "run", "-g1", str(folder / "faulty.mojo")],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert completed.returncode == 1, completed.stderr
    assert "faulty.mojo:6" in completed.stdout + completed.stderr
    assert "\\303" not in completed.stdout + completed.stderr


def test_recorded_ptx_has_paths_of_the_package():
    """The recorder replaces the path of the temporary copy, here with an umlaut, by the package's."""
    text = r'.file 1 "/a \303\274/copy_0/op/ramp.mojo"' + "\n.file 2 " + r'"/\377 \"b\"/c.mojo"'
    replaced = recorder._restore_paths(text, Path("/a ü"), Path("problems/p19/op"))
    assert replaced == '.file 1 "problems/p19/op/ramp.mojo"\n.file 2 ' + r'"/\377 \"b\"/c.mojo"'


# ---- Large batches; tests/book/test_browser.py tests a search for a Greek letter -----------------------------


@pytest.mark.gpu
def test_gpu_attention_accepts_batches_beyond_the_grid_limit():
    """The reference runs on the CPU, because PyTorch's GPU kernel rejects this batch too."""
    tensors = as_triple(torch.randn(66_000, 1, 1, 16, device="cuda", dtype=torch.float16) for _ in range(3))
    expected = F.scaled_dot_product_attention(*as_triple(t.cpu().float() for t in tensors)).half()
    torch.testing.assert_close(nn.attention(*tensors).cpu(), expected, rtol=2e-3, atol=2e-3)
