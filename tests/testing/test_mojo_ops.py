"""`check_backward` on op packages on the virtual GPU detects wrong values, races and invalid addresses."""

import sys

import pytest
import torch
from torch.autograd.function import once_differentiable

from harness.devices.custom_ops import Worker, finish_all
from harness.testing import MojoOps, check_backward
from harness.toolchain import roots

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(sys.platform != "linux", reason="the virtual GPU's driver needs Linux"),
]
RACY_ADDITION = "dw[unsafe_offset=column] += total"
ATOMIC_ADDITION = (
    'Atomic[Float32, scope="device"].fetch_add[ordering=Ordering.RELAXED](dw.unsafe_offset(column), total)'
)
CORRECT_SOURCES = {
    RACY_ADDITION: f"_ = {ATOMIC_ADDITION}",
    "import extensibility\n": "import extensibility\nfrom std.atomic import Atomic, Ordering\n",
}
BUGGY_OPS = {
    "right": CORRECT_SOURCES,
    "mean": CORRECT_SOURCES | {"total += dy": "total += 1 / Float32(rows) * dy"},
    "race": {},
    "bounds": CORRECT_SOURCES | {"if column < Int(columns):": "if column <= Int(columns):"},
}
"""Bug -> source, from edits of the book's example, which has the race."""
SHAPES = {"x": ("N", "H"), "w": ("H",)}
SLOW_CHECKS = ("compile", "thousands of rows", "gradcheck")


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A package with a pair of ops for each bug."""
    folder = tmp_path_factory.mktemp("own") / "ops"
    folder.mkdir()
    text = (roots.CHECKOUT / "book" / "examples" / "own_ops" / "scale.mojo").read_text()
    for name, edits in BUGGY_OPS.items():
        edited = text.replace('register("scale', f'register("{name}')
        for old, new in edits.items():
            edited = edited.replace(old, new)
        (folder / f"{name}.mojo").write_text(edited)
    ops = [f"from .{name} import Scale as {name}, ScaleBackward as {name}_backward" for name in BUGGY_OPS]
    (folder / "__init__.mojo").write_text("\n".join([*ops, ""]))
    return folder


def make_contiguous(*tensors):
    return [t.detach().contiguous() for t in tensors]


def make_scale(package, bug):
    """Create x * w with the backward op that has the `bug`."""
    ops = MojoOps(package)

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            y = x.new_empty(x.shape)
            ops.right(y, *make_contiguous(x, w))
            return y

        @staticmethod
        @once_differentiable
        def backward(ctx, dy):
            x, w = ctx.saved_tensors
            dx, dw = x.new_empty(x.shape), w.new_empty(w.shape)
            getattr(ops, f"{bug}_backward")(dx, dw, *make_contiguous(dy, x, w))
            return dx, dw

    return Scale.apply


def report_on(package, bug, dtypes=(torch.float32,), **options):
    return check_backward(
        make_scale(package, bug), reference=torch.mul, inputs=SHAPES, dtypes=dtypes, **options
    )


def test_correct_ops_pass(package):
    report = report_on(package, "right", leave_out=SLOW_CHECKS)
    report.raise_if_wrong()
    assert "races and memory" in [result.name for result in report.select("right")]
    assert "float32 on the virtual GPU (sm_90a)" in str(report) and not Worker.workers


@pytest.mark.slow
def test_wrong_kernel_is_rejected(package):
    with pytest.raises(AssertionError, match="the gradient of w is the mean over N, and should be the sum"):
        report_on(package, "mean").raise_if_wrong()


def test_race_is_rejected(package):
    wrong = {
        result.name: result.message
        for result in report_on(
            package, "race", only=["no_grad", "layout of the gradient", "races and memory"]
        ).wrong
    }
    assert wrong["races and memory"].startswith("in race_backward: global race at ")


@pytest.mark.slow
def test_out_of_bounds_address_is_rejected(package):
    report = report_on(package, "bounds", only=["graph used twice", "races and memory"])
    wrong = {result.name: result.message for result in report.wrong}
    assert "in bounds_backward: out-of-bounds load at " in wrong["races and memory"]


def test_unsupported_dtype_is_rejected(package):
    report = report_on(package, "right", dtypes=[torch.float64, torch.float32], only=["float64", "no_grad"])
    assert (
        report.ok
        and "CompileFailed" in report.select("refused")[0].message
        and report.where.startswith("float32")
    )


def test_invalid_call_is_explained(package):
    ops, x = MojoOps(package), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"right takes contiguous tensors without a gradient: pass t.detach"):
        ops.right(x, x.mT, x[0])
    with pytest.raises(RuntimeError, match=r"TypeError: right takes 3 tensors \(y, x, w\), got 1"):
        ops.right(x)
    with pytest.raises(RuntimeError, match=r"AttributeError: .* registers no op nothing"):
        ops.nothing(x)
    worker = Worker.workers[ops.package]
    worker.call_file.write_bytes(b"")
    print(file=worker.process.stdin, flush=True)
    worker.process.wait()
    with pytest.raises(RuntimeError, match="right: the process on the virtual GPU exited with 1: "):
        ops.right(x, x, x[0])
    assert finish_all() == [] and finish_all() is None
