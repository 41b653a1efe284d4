"""`check_backward` rejects incorrect functions, accepts correct ones, and reports errors with locations."""

import csv
import doctest
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from correct_cases import list_functions, list_layers, list_public, make_integers
from faults import KeepsInputs, list_corrected, list_faults
from torch import Tensor
from zoo_cases import (
    Arguments,
    list_p20,
    list_p21,
    list_p21_solutions,
    list_p23,
    list_p24,
    list_registrations,
    list_wrong_ops,
    make_targets,
)  # fmt: skip

import harness.testing
from book.measure.hunt_versions import reports
from harness import nn
from harness.check.call_comparison import InvalidReference
from harness.puzzles.p21.known import KNOWN_FORMULAS
from harness.testing import CHECKS, check_backward
from harness.testing.checks import reject_bad_index
from harness.testing.problem import make_problem
from harness.toolchain import roots

RECORD = roots.CHECKOUT / "book" / "records" / "check_backward.csv"
RECORD_LINES = [line for line in RECORD.read_text().splitlines() if not line.startswith("#")]
RECORDED_ROWS = {row["wrong"]: row for row in csv.DictReader(RECORD_LINES)}
REPORTS = reports()
WRONG = {case.name: case for case in [*list_wrong_ops(), *list_faults()]}
CORRECT = [*list_layers(), *list_functions(), *list_public()]
SLOW_CHECKS = ("compile", "thousands of rows", "larger than a block", "gradcheck")
"""Slow checks, or those that load the compiler."""
SHAPES = {"x": ("N", "H"), "w": ("H",)}


def run_case(case: Arguments, **options):
    """Return the report for a case."""
    return check_backward(
        case.make(), reference=case.reference, inputs=case.inputs, **(case.options | options)
    )


def test_record_has_every_wrong_function():
    assert RECORDED_ROWS.keys() == WRONG.keys()
    counts = [
        len(list(wrong))
        for wrong in (list_p21(), list_p20(), list_registrations(), list_p23(), list_p24(), list_faults())
    ]
    assert counts == [46, 11, 7, 2, 7, 24], "all wrong functions of the puzzles and of public reports"


def test_number_of_correct_functions():
    assert (
        len({case.name for case in list_functions()}) >= 40
        and len({case.name for case in list_public()}) >= 15
    )
    right = [*CORRECT, *list_p21_solutions(), *list_corrected()]
    assert len(list_p21_solutions()) == 13 and len(list_corrected()) == 17
    assert len({case.name for case in right}) == 95, "the number in an essay"
    parts = {"Part", "attention_backward", "attention_block", "attention_block_backward", "attention_delta"}
    others = parts | {"mojo_workbook", "replace"}
    assert {case.name for case in list_layers()} == {*nn.MODULES} - others | {"attention, causal"}


@pytest.fixture
def destroy_process_group():
    """Destroy the process group that `ring_attention` requires."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", WRONG)
def test_wrong_function_is_rejected_by_the_recorded_check(name):
    report = run_case(WRONG[name], only=[RECORDED_ROWS[name]["check_backward"]])
    assert [result.name for result in report.wrong] == [RECORDED_ROWS[name]["check_backward"]], report
    assert report.mistake == RECORDED_ROWS[name]["named"]
    if name in REPORTS:
        assert ("raises" in report.wrong[0].message) == REPORTS[name].get("raises", False)


@pytest.mark.parametrize("case", CORRECT, ids=lambda case: case.name)
@pytest.mark.usefixtures("destroy_process_group")
def test_correct_function_passes(case):
    run_case(case, leave_out=[*SLOW_CHECKS, *case.options.get("leave_out", [])]).raise_if_wrong()


@pytest.mark.parametrize("case", list_p21_solutions(), ids=lambda case: case.name)
def test_solutions_of_puzzle_21_pass_at_all_sizes(case):
    """Skip autocast, which is not required, and infinite scores, where PyTorch's attention is 0."""
    infinite = ["infinity", "negative infinity"] * (case.name == "p21 attention")
    run_case(case, leave_out=[*SLOW_CHECKS, "autocast", *infinite]).raise_if_wrong()


@pytest.mark.parametrize("case", list_corrected(), ids=lambda case: case.name)
def test_corrected_reports_pass(case):
    """The bugs of the reports are not in code for autocast."""
    run_case(case, leave_out=["compile", "thousands of rows", "gradcheck", "autocast"]).raise_if_wrong()


@pytest.mark.slow
@pytest.mark.usefixtures("destroy_process_group")
@pytest.mark.parametrize("list_cases", [list_layers, list_functions, list_public])
def test_correct_function_passes_the_slow_checks(list_cases):
    for case in list_cases():
        report = run_case(case, only=SLOW_CHECKS)
        assert report.ok, (case.name, report)


# ---- Names ---------------------------------------------------------------------------------------------------

WB = {"x": ("N", "H"), "w": ("H",), "b": ("H",)}
OPS = {
    "layer_norm": (lambda x, w, b: F.layer_norm(x, w.shape, w, b), WB),
    "rms_norm": (lambda x, w: F.rms_norm(x, w.shape, w, 1e-5), SHAPES),
    "linear": (F.linear, {"x": ("N", 5), "w": (5, 5)}),
    "softmax": (lambda x: x.softmax(-1), {"x": ("N", "H")}),
    "log_softmax": (lambda x: x.log_softmax(-1), {"x": ("N", "H")}),
    "attention": (
        F.scaled_dot_product_attention,
        {"q": ("B", "S", 4), "k": ("B", "T", 4), "v": ("B", "T", 4)},
    ),
    "cross_entropy": (
        lambda x, t: F.cross_entropy(x.flatten(0, 1), t.flatten()),
        {"x": ("N", "T", "C"), "t": make_targets},
    ),
    "gelu": (F.gelu, {"x": ("N", "H")}),
    "silu": (F.silu, {"x": ("N", "H")}),
    "relu": (F.relu, {"x": ("N", "H")}),
    "embedding": (F.embedding, {"i": make_integers(5, "N", "T"), "w": (5, "H")}),
    "indexing": (lambda w, i: w[i], {"w": (5, "H"), "i": make_integers(5, "N", "T")}),
}


def make_wrong_op(op: str, number: int, formula, wrong: str):
    """Create an op with a mistake in the gradient of one input."""

    class WrongBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return OPS[op][0](*tensors)

        @staticmethod
        def backward(ctx, dy):
            leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in ctx.saved_tensors]
            with torch.enable_grad():
                out = OPS[op][0](*leaves)
            asking = [t for t in leaves if t.requires_grad]
            grads = iter(torch.autograd.grad(out, asking, dy))
            expected = [next(grads) if t.requires_grad else None for t in leaves]
            with torch.enable_grad():
                expected[number] = formula([t.detach() for t in leaves], dy, wrong)
            return tuple(expected)

    return WrongBackward.apply


MISTAKES = [
    (number, formula, wrong, words)
    for number, formula, wrongs in KNOWN_FORMULAS
    for wrong, words in wrongs.items()
]
NAMED_OPS = (
    ["layer_norm"] * 6 + ["rms_norm"] * 3 + ["layer_norm"] * 3 + ["rms_norm"] * 2 + ["linear"] + ["softmax"] * 5
    + ["log_softmax"] * 2 + ["attention"] * 4 + ["cross_entropy"] * 4 + ["gelu", "silu", "relu", "embedding", "indexing"]
)  # fmt: skip


@pytest.mark.parametrize(
    ("op", "mistake"),
    list(zip(NAMED_OPS, MISTAKES, strict=True)),
    ids=lambda value: value if isinstance(value, str) else value[3],
)
def test_known_mistake_is_identified(op, mistake):
    number, formula, wrong, words = mistake
    reference, inputs = OPS[op]
    report = report_on(make_wrong_op(op, number, formula, wrong), inputs, reference, only=["plain"])
    assert report.mistake == f"the gradient of {list(inputs)[number]} equals the reference {words}", report


FOR_ONES = "the gradient of x is right for a gradient of ones coming in, not for this one"
GENERAL = [
    (lambda x, w, dy: (dy.mT * w, dy * x), "the gradient of x is transposed"),
    (lambda x, w, dy: (dy * x, dy * x), "the gradient of x is the gradient of w"),
    (lambda x, w, dy: (dy * w * 3, dy * x), "the gradient of x is 3 times what it should be"),
    (lambda x, w, dy: (w.clone(), dy * x), FOR_ONES),
    (lambda x, w, dy: (0 * dy, dy * x), "the gradient of x is 0 everywhere"),
    (lambda x, w, dy: (dy * w + 1, dy * x), ""),
]


@pytest.mark.parametrize(
    ("backward", "name"), GENERAL, ids=lambda value: value if isinstance(value, str) else None
)
def test_general_mistakes_are_identified(backward, name):
    symmetric = torch.tensor([[1.0, 2.0, 3.0], [2.0, -1.0, 4.0], [3.0, 4.0, 0.5]])
    inputs = {"x": (3, 3), "w": symmetric}
    wrong = make_scale(lambda ctx, dy: backward(*ctx.saved_tensors, dy))
    assert report_on(wrong.apply, inputs, only=["plain"]).mistake == name


def test_random_results_are_reported():
    """The function has dropout, and the reference does not."""
    report = report_on(lambda x, w: F.dropout(x * w), only=["plain"])
    assert report.mistake == "the function gives another result in a second run"
    not_a_number = report_on(lambda x, w: x * w + torch.nan, only=["plain"])
    assert not_a_number.wrong and not_a_number.mistake == ""


def test_ignored_output_gradient_is_identified():
    """The gradients also differ by a constant factor, the output gradient."""

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(2 * x)
            return x.square().sum()

        @staticmethod
        def backward(ctx, dy):
            return ctx.saved_tensors[0]

    report = report_on(Loss.apply, {"x": ("N",)}, lambda x: x.square().sum(), only=["plain"])
    assert report.mistake == FOR_ONES


def test_error_in_a_second_run_is_reported():
    runs: dict = {}

    def once(x, w):
        runs[x.sum().item()] = runs.get(x.sum().item(), 0) + 1
        if runs[x.sum().item()] > 2:
            raise RuntimeError("the workspace is gone")
        return 2 * x * w

    report = report_on(once, only=["plain"], dtypes=[torch.float64])
    assert report.mistake == "the function raises RuntimeError: the workspace is gone in a second run"


def test_ambiguous_mistake_has_no_name():
    """The gradients of x and y are transposes of each other."""

    class Exchanged(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y, w):
            ctx.save_for_backward(w)
            return (x * w).sum() + (y * w.mT).sum()

        @staticmethod
        def backward(ctx, d):
            (w,) = ctx.saved_tensors
            return d * w.mT, d * w.mT, None

    weight = torch.arange(9).view(3, 3)
    inputs = {"x": (3, 3), "y": (3, 3), "w": lambda sizes, generator: weight}
    report = report_on(
        Exchanged.apply, inputs, lambda x, y, w: (x * w).sum() + (y * w.mT).sum(), only=["plain"]
    )
    assert "the gradient of x" in report.wrong[0].message and report.mistake == ""


# ---- The report ------------------------------------------------------------------------------------------


def test_docstring_example_runs():
    result = doctest.testmod(harness.testing)
    assert result.attempted and not result.failed


class Scale(torch.autograd.Function):
    """x * w with a correct backward pass."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return dy * w, (dy * x).flatten(0, -2).sum(0)


def make_scale(backward) -> type[Scale]:
    """Create `Scale` with another backward pass."""
    return type("Wrong", (Scale,), {"backward": staticmethod(backward)})


def report_on(function, inputs=SHAPES, reference=torch.mul, **options):
    return check_backward(
        function, reference=reference, inputs=inputs, **{"leave_out": SLOW_CHECKS, **options}
    )


def test_assertion_contains_the_report():
    wrong = make_scale(lambda ctx, dy: (dy * ctx.saved_tensors[1] * 2, (dy * ctx.saved_tensors[0]).sum(0)))
    report = report_on(wrong.apply)
    with pytest.raises(AssertionError) as raised:
        report.raise_if_wrong()
    assert str(report) in str(raised.value) and not report.ok
    assert str(report).startswith("WRONG: odd sizes: the gradient of x at [")
    assert "in the check 'plain'" in str(report) and "no other was made" in str(report)
    assert "wrong in the only check, float64 on cpu" in str(report)
    assert len(str(report).splitlines()) < 40 and max(map(len, str(report).splitlines())) <= 100


def test_report_lists_the_tries():
    report = report_on(Scale.apply)
    assert report.ok and "the same bits in two runs" in str(report)
    assert "another stream" not in [result.name for result in report.select("right")], (
        "not available on a CPU"
    )


def narrow(x, w):
    """Multiply float32 tensors; raise TypeError for other dtypes."""
    if x.dtype != torch.float32:
        raise TypeError("float32 only")
    return Scale.apply(x, w)


def test_function_may_support_a_single_dtype():
    report = report_on(narrow)
    assert report.ok and report.where.startswith("float32")
    assert {result.name for result in report.select("refused")} == {"float64", "bfloat16", "float16"}
    assert "refused: float64: TypeError: float32 only" in str(report)
    alone = report_on(narrow, only=["float64"])
    assert str(alone).startswith("right in no check, float32 on cpu")
    strict = report_on(narrow, allow_refusal=False)
    assert {result.name for result in strict.wrong} == {"float64", "bfloat16", "float16"}
    some = report_on(narrow, allow_refusal=["float64"])
    assert {result.name for result in some.wrong} == {"bfloat16", "float16"}
    assert report_on(narrow, dtypes=[torch.float32], allow_refusal=False).ok


def test_basic_call_must_not_raise():
    def raise_type_error(x, w):
        raise ValueError("never")

    assert report_on(raise_type_error).wrong[0].message == "it raises ValueError: never (odd sizes)"


def test_exception_in_backward_is_an_error():
    def raise_in_backward(ctx, dy):
        raise KeyError("mask") if not dy.is_contiguous() else ValueError

    report = report_on(make_scale(raise_in_backward).apply)
    assert report.wrong[0].message.startswith("its backward pass raises ValueError")


def test_any_subgradient_at_a_kink_is_accepted():
    def other(x: Tensor) -> Tensor:
        return torch.where(x < 0, 0.0, x)

    assert report_on(other, {"x": ("N", "H")}, F.relu).ok
    strict = report_on(other, {"x": ("N", "H")}, F.relu, subgradients=False)
    assert "zeros" in [result.name for result in strict.wrong]


def test_module_parameters_are_inputs():
    class Wrong(torch.nn.Linear):
        def forward(self, input):
            return F.linear(input, self.weight, self.bias.detach())

    report = report_on(Wrong(6, 5), {"x": (..., 6)}, torch.nn.Linear(6, 5))
    assert "the gradient of bias" in report.wrong[0].message
    assert report_on(torch.nn.Linear(6, 5), {"x": (..., 6)}, torch.nn.Linear(6, 5)).ok
    with pytest.raises(ValueError, match="input weight has the name of a parameter"):
        report_on(torch.nn.Linear(6, 5), {"weight": (..., 6)}, torch.nn.Linear(6, 5))
    with pytest.raises(ValueError, match=r"the function has parameters \['weight', 'bias'\], the reference"):
        report_on(torch.nn.Linear(6, 5), {"x": (..., 6)}, torch.nn.Linear(6, 5, bias=False))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": ["nonsense"]}, "there is no check nonsense; there are plain, "),
        ({"allow_refusal": ["float46"]}, "there is no check float46; there are plain, "),
        ({"only": "plain"}, "only is 'plain', and should be a list of names of checks"),
        ({"leave_out": None}, "leave_out is None, and should be a list of names of checks"),
        ({"leave_out": [3]}, "there is no check 3; there are plain, "),
        ({"allow_refusal": 1}, "allow_refusal is 1, and should be a list of names of checks"),
        ({"only": []}, "no check is left: see only, leave_out and dtypes"),
        ({"only": ["float64"], "dtypes": [torch.float32]}, "no check is left: see only, leave_out and dtypes"),
        ({"dtypes": torch.float32}, "dtypes is torch.float32, and should be a list of some of float64, "),
        ({"dtypes": []}, r"dtypes is \[\], and should be a list of some of "),
        ({"dtypes": ["float32"]}, r"dtypes is \['float32'\], and should be a list of some of "),
        ({"dtypes": [torch.int32]}, r"dtypes is \[torch.int32\], and should be a list of some of "),
        ({"function": 3}, "function is 3, and should be a module or a function of tensors"),
        ({"function": Scale}, "function is <class '.*Scale'>, and should be a module or a .* `apply` of"),
        ({"reference": None}, "reference is None, and should be a module or a function of tensors"),
        ({"inputs": [("N", "H")]}, r"inputs is \[\('N', 'H'\)\], and should be a dict from names to shapes"),
        ({"inputs": {}}, "inputs is {}, and should be a dict from names to shapes"),
        ({"inputs": SHAPES | {"x": "NH"}}, r"input x is 'NH', and should be a shape such as \('N', 3\), a tensor"),
        ({"inputs": {"x": 3, "w": ("H",)}}, "input x is 3, and should be a shape"),
        ({"inputs": {"x": ("N", 2.5), "w": ("H",)}}, r"input x is \('N', 2.5\), and should be a shape"),
        ({"inputs": {"x": ("N", -1), "w": ("H",)}}, r"input x is \('N', -1\), and should be a shape"),
        ({"inputs": {"x": ("...", "H"), "w": ("H",)}}, r"input x is \('...', 'H'\), and should be a shape"),
        ({"inputs": SHAPES | {"w": lambda sizes: sizes}}, "the function of input w raises TypeError: "),
        ({"inputs": SHAPES | {"w": lambda sizes, generator: 3}},
         "the result of the function of input w is 3, and should be a tensor"),
        ({"reference": lambda x, w: F.dropout(x * w)}, "the reference gives another result in a second run"),
        ({"saved": 80}, "saved is 80, and should be a function of the inputs"),
        ({"saved": lambda x: 80}, "saved raises TypeError: "),
        ({"saved": lambda x, w: None}, "the result of saved is None, and should be a number of bytes"),
        ({"device": "gpu"}, "torch.empty on device 'gpu' raises RuntimeError: "),
        ({"device": 3.5}, "torch.empty on device 3.5 raises TypeError: "),
        ({"inputs": {"x": ("N", "H"), "w": ("K",)}}, "the reference raises RuntimeError"),
        ({"reference": lambda x, w: (x * w).detach()}, "no output of the reference has a gradient"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_rejected(options, message):
    with pytest.raises(ValueError, match=message) as raised:
        check_backward(**{"function": Scale.apply, "reference": torch.mul, "inputs": SHAPES, **options})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (3, "0 tensors, expected 1"),
        ({"y": torch.ones(3)}, "0 tensors, expected 1"),
        ((1, torch.ones(3), torch.ones(3)), "2 tensors, expected 1"),
    ],
)
def test_nontensor_results_are_rejected(returned, message):
    assert report_on(lambda x, w: returned).wrong[0].message == f"odd sizes: the function returns {message}"
    pair = report_on(torch.mul, reference=lambda x, w: (x * w, x + w), only=["plain"])
    assert pair.wrong[0].message == "odd sizes: the function returns 1 tensor, expected 2"


def test_error_reports_the_failing_call():
    """One function raises without leading dimensions, another if an output has no gradient."""
    wrong = make_scale(lambda ctx, dy: (dy * ctx.saved_tensors[1], (dy * ctx.saved_tensors[0]).sum(0)))
    message = report_on(wrong.apply, {"x": (..., "H"), "w": ("H",)}, only=["plain"]).wrong[0].message
    assert message.startswith("its backward pass raises RuntimeError: ") and message.endswith("(row sizes)")

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(False)
            return 2 * x, 3 * x

        @staticmethod
        def backward(ctx, d, e):
            return 2 * d + 3 * e

    (some,) = report_on(Both.apply, {"x": ("N",)}, lambda x: (2 * x, 3 * x), only=["some outputs"]).wrong
    assert "NoneType" in some.message and some.message.endswith("(where only output 0 is used)")


def test_buffers_shared_between_calls_are_reported():
    """The next call overwrites a previous gradient or result."""
    shared: dict = {}

    def share(t):
        return shared.setdefault((t.shape, t.dtype), t.clone()).copy_(t)

    gradient = make_scale(
        lambda ctx, dy: (dy * ctx.saved_tensors[1], share((dy * ctx.saved_tensors[0]).sum(0)))
    )
    (result,) = report_on(gradient.apply, only=["alternating calls"]).wrong
    assert "before the results are read" in result.message or "the gradient of w at [" in result.message
    result = type(
        "Result", (Scale,), {"forward": staticmethod(lambda ctx, x, w: share(Scale.forward(ctx, x, w)))}
    )
    (result,) = report_on(result.apply, only=["alternating calls"]).wrong
    assert result.message == "a later call overwrites an earlier result"


def test_second_derivative_uses_unmodified_inputs():
    """The backward pass overwrites its input."""
    (report,) = run_case(WRONG["unslothai/unsloth#5002"], only=["second derivative"]).wrong
    assert report.message.startswith("the gradient of a gradient")


def test_module_buffers_are_converted():
    modules = [torch.nn.BatchNorm1d(4).eval() for _ in range(2)]
    report = report_on(modules[0], {"x": ("N", 4)}, modules[1], only=["plain", "float64", "bfloat16"])
    assert report.where.startswith("float64") and len(report.select("right")) == 3


def test_parameter_without_gradient_is_reported():
    """The function has no gradient for its weight."""

    class Frozen(torch.nn.Linear):
        def forward(self, input):
            return F.linear(input, self.weight.detach(), self.bias)

    module = Frozen(6, 5)
    assert not report_on(module, {"x": (..., 6)}, torch.nn.Linear(6, 5)).ok
    module.weight.requires_grad_(False)
    assert report_on(module, {"x": (..., 6)}, torch.nn.Linear(6, 5)).ok


def test_skipped_comparison_is_reported_once_per_tensor():
    """In 16 bits the sum's terms cancel."""
    large = lambda x: (x * 1e4 + x - x * 1e4).sum(-1)  # noqa: E731
    (result,) = report_on(large, {"x": ("N", "H")}, large, only=["bfloat16"]).results
    assert result.state == "dropped"
    assert (
        result.message.startswith("the result (PyTorch's own error is ")
        and result.message.count("the result") == 1
    )


def test_module_with_a_function_as_reference():
    module = torch.nn.Linear(4, 4)
    report = report_on(
        module,
        {"x": ("N", 4)},
        lambda x: F.linear(x, module.weight.to(x), module.bias.to(x)),
        only=["plain", "bfloat16", "deepcopy"],
        device=torch.device("cpu"),
    )
    assert "the module's parameters are not checked" in str(report)
    assert [result.name for result in report.select("right")] == ["plain", "bfloat16", "deepcopy"]


@pytest.mark.parametrize("name", [name for name in CHECKS if name not in SLOW_CHECKS])
def test_each_try_can_be_selected(name):
    names = {result.name for result in report_on(Scale.apply, leave_out=[*SLOW_CHECKS, name]).results}
    assert name not in names
    assert [result.name for result in report_on(Scale.apply, only=[name], leave_out=()).results] == [name]


def test_baseline_error_covers_other_summation_orders():
    """A single summation order of cancelling terms can be exact by chance, so it must not set the limit."""

    def other_order(x):
        return x.flip(0).cumsum(0)[-1]

    large = torch.tensor([1e4, 1.0, -1e4, 1e-3, 3.0, -3.0]).repeat(50)
    report_on(other_order, {"x": large}, lambda x: x.sum(0), dtypes=[torch.float32]).raise_if_wrong()


def test_inputs_and_gradient_with_equal_strides_are_tried():
    """The backward pass reads memory linearly if the gradient has the strides of x."""

    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        coming = (dy if dy.stride() == x.stride() else dy.contiguous()).as_strided((dy.numel(),), (1,))
        return coming.view(dy.shape) * w, (dy * x).flatten(0, -2).sum(0)

    report = report_on(make_scale(backward).apply)
    assert [result.name for result in report.wrong] == ["layout of the gradient"]
    assert report.wrong[0].message.startswith("where inputs and gradient are not contiguous (transposed)")


def test_index_into_an_empty_tensor_is_rejected_on_a_gpu():
    """PyTorch's embedding reads out of bounds for an empty table, in forward or backward."""
    inputs = {"w": ("V", "H"), "i": lambda s, g: torch.randint(max(s["V"], 1), (s["N"],), generator=g)}
    problem = make_problem(lambda w, i: w[i], lambda w, i: w[i], inputs, [torch.float32], "cpu")
    assert problem.size_names == ("V", "H", "N")
    on_gpu = replace(problem, device="cuda")
    for sizes in ("0 for V", "0 for H"):
        with pytest.raises(InvalidReference, match="an index into an empty tensor may end the GPU's context"):
            reject_bad_index(on_gpu, sizes)
        reject_bad_index(problem, sizes)
    for sizes in ("0 for N", "0 for all"):
        reject_bad_index(on_gpu, sizes)
    masked = {"x": ("N", "H"), "m": lambda s, g: torch.ones(s["N"], 1, dtype=torch.bool)}
    mask = make_problem(torch.mul, torch.mul, masked, [torch.float32], "cpu")
    reject_bad_index(replace(mask, device="cuda"), "0 for H")


def test_lost_cuda_context_stops_further_tries(monkeypatch):
    words = iter(["", "device-side assert triggered"])
    monkeypatch.setattr(harness.testing, "find_lost_context", lambda device: next(words))
    report = report_on(Scale.apply)
    assert [result.name for result in report.results] == ["plain", "written to"]
    assert report.wrong[0].message == "the CUDA context is lost: device-side assert triggered"


def make_sine(backward) -> Callable[..., Tensor]:
    """Return a sine with this backward pass."""
    return type(
        "Sine",
        (KeepsInputs,),
        {"forward": staticmethod(lambda x: x.sin()), "backward": staticmethod(backward)},
    ).apply


@pytest.mark.parametrize(
    ("is_wrong", "message"),
    [
        (lambda x: x.shape[-1] == 64, r"at a larger size \(64 for H\)"),
        (lambda x: x.shape[-1] > 2048, r"at a larger size \(2304 for H\)"),
        (lambda x: x.shape[-1] > 1024 and x.dtype == torch.float32, r"\(1031 for H\) in float32"),
        (lambda x: x.shape[-1] == 64 and x.dtype == torch.bfloat16, r"\(64 for H\) in bfloat16"),
        (lambda x: x.dtype == torch.float32 and x.max() > 80, "exp is infinite in float32"),
    ],
)
def test_mistake_of_one_path_is_rejected(is_wrong, message):
    """Kernels have a path of their own for aligned rows, for wide rows and for a dtype."""

    def sine(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy * x.cos() * (2 if is_wrong(x) else 1)

    call = make_sine(sine)
    report = check_backward(
        call, reference=torch.sin, inputs={"x": ("N", "H")}, only=("far", "larger than a block")
    )
    assert re.search(message, " ".join(str(report).split()))


def test_nested_outputs_are_compared():
    call = make_sine(lambda ctx, dy: 2 * dy)
    reference = lambda x: (x * 1, (x.sin(),))  # noqa: E731
    report = check_backward(
        lambda x: (x * 1, (call(x),)), reference=reference, inputs={"x": ("N", "H")}, only=["plain"]
    )
    assert not report.ok


def test_sparse_gradients_are_compared():
    inputs = {
        "index": lambda sizes, generator: torch.randint(5, (sizes["N"],), generator=generator),
        "w": (5, "H"),
    }
    for scale in (1, 2):
        report = check_backward(
            lambda index, w: F.embedding(index, w, sparse=True), reference=lambda index, w, by=scale: F.embedding(index, w) * by,
            inputs=inputs, only=["plain", "added to existing", "two calls"],
        )  # fmt: skip
        assert report.ok == (scale == 1), report
