"""Each gradient check accepts a correct function and detects an incorrect one."""

import pytest
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from harness.check import gradient_checks as checks
from harness.check.gradients import Subject

LEADING_AXES = {"odd": (3, 5), "square": (4, 4), "row": (), "deep": (2, 3, 2), "tall": (4096,)}


def make_inputs(sizes: str, seed: int) -> tuple[torch.Tensor, ...]:
    """Return x [..., 4 or 7] and a scale for its last dimension."""
    generator = torch.Generator().manual_seed(seed)
    H = 4 if sizes == "square" else 7
    x = torch.randn(*LEADING_AXES[sizes], H, generator=generator, dtype=torch.float64)
    return x, 1 + torch.rand(H, generator=generator, dtype=torch.float64)


def reference(x, scale):
    return x * scale


def sum_leading(terms: torch.Tensor) -> torch.Tensor:
    return terms.flatten(0, -2).sum(0) if terms.dim() > 1 else terms


class Scale(Function):
    """Compute x * scale; the incorrect functions below change one method."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, dy):
        x, scale = ctx.saved_tensors
        return dy * scale, sum_leading(dy * x)


def make_subject(function: type[Function], **options) -> Subject:
    return Subject(function.apply, reference, make_inputs, **options)


def make_scale(backward) -> type[Function]:
    return type("Wrong", (Scale,), {"backward": staticmethod(backward)})


def assume_contiguous_gradient(ctx, dy):
    flat = torch.as_strided(dy, dy.shape, torch.empty(dy.shape).stride()) if dy.stride()[-1] else dy * 0
    return Scale.backward(ctx, flat)


def ignore_gradient(ctx, dy):
    x, scale = ctx.saved_tensors
    return scale.expand_as(x).clone(), sum_leading(x).clone()


def sum_first_axis_only(ctx, dy):
    x, scale = ctx.saved_tensors
    total = (dy * x).sum(0)
    return dy * scale, (total if total.dim() == 1 else total.flatten(0, -2)[0]) if dy.dim() > 1 else dy * x


def write_into_gradient(ctx, dy):
    dx, dscale = Scale.backward(ctx, dy)
    return dy.copy_(dx), dscale


def return_none_for_scale(ctx, dy):
    dx, dscale = Scale.backward(ctx, dy)
    return dx, dscale if all(ctx.needs_input_grad) else None


def sum_in_bfloat16(ctx, dy):
    x, scale = ctx.saved_tensors
    total = torch.zeros_like(scale)
    for row in (dy * x).flatten(0, -2):
        total = total + row
    return dy * scale, total


class StateOnClass(Scale):
    """Stores its inputs on the class, where a second call overwrites them."""

    @staticmethod
    def forward(ctx, x, scale):
        StateOnClass.saved = x, scale
        return x * scale

    @staticmethod
    def backward(ctx, dy):
        x, scale = StateOnClass.saved
        return dy * scale, sum_leading(dy * x)


class SavesExtraTensor(Scale):
    @staticmethod
    def forward(ctx, x, scale):
        y = x * scale
        ctx.save_for_backward(x, scale, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, scale, _ = ctx.saved_tensors
        return dy * scale, sum_leading(dy * x)


def add_noise(ctx, dy):
    dx, dscale = Scale.backward(ctx, dy)
    return dx * (1 + 1e-12 * torch.rand((), dtype=torch.float64)), dscale


class WrongForward(Scale):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale + 1e-3


class TensorsOnCtx(Scale):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.x, ctx.scale = x, scale
        return x * scale

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.scale, sum_leading(dy * ctx.x)


def assume_contiguous_input(ctx, dy):
    x, scale = ctx.saved_tensors
    return dy * scale, sum_leading(dy * torch.as_strided(x, x.shape, torch.empty(x.shape).stride()))


class OverwritesSavedCopy(Scale):
    """Saves a copy that the first backward pass overwrites."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.factor = scale.expand_as(x).clone()
        return x * scale

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return ctx.factor.mul_(dy), sum_leading(dy * x)


class SavesCopy(Scale):
    """Correct, but second derivatives treat the scale as a constant."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale.clone())
        return x * scale


class OnceDifferentiable(SavesCopy):
    """`SavesCopy` declared once differentiable."""

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return Scale.backward(ctx, dy)


def propagate_infinity(ctx, dy):
    dx, dscale = Scale.backward(ctx, dy)
    return dx + 0 * dy.sum(), dscale


def make_multiply_and_divide(factor):
    """Return `Scale` with the gradient of x multiplied and divided by factor(x)."""

    def backward(ctx, dy):
        dx, dscale = Scale.backward(ctx, dy)
        value = factor(ctx.saved_tensors[0])
        return dx * value / value, dscale

    return make_scale(backward)


def underflow_in_float16(ctx, dy):
    dx, dscale = Scale.backward(ctx, dy)
    return (dx / 1e9 * 1e9 if dy.dtype == torch.float16 else dx), dscale


class SecondOutput(Function):
    """Return x * scale and its maximum, which has no gradient."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale, (x * scale).amax()

    @staticmethod
    def backward(ctx, dy, _):
        return Scale.backward(ctx, dy)


class MarkedOutput(SecondOutput):
    @staticmethod
    def forward(ctx, x, scale):
        outputs = SecondOutput.forward(ctx, x, scale)
        ctx.mark_non_differentiable(outputs[1])
        return outputs


SAVED_BYTES = {"expected_saved_bytes": lambda x, scale: 4 * (x.numel() + scale.numel())}


CHECKS = [check for check in vars(checks).values() if hasattr(check, "__wrapped__")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_correct_function_passes(check):
    assert check(make_subject(Scale, **SAVED_BYTES)) is None


@pytest.mark.parametrize(
    ("check", "function", "expected"),
    [
        (checks.forward, WrongForward, "the forward pass itself is wrong"),
        (checks.against_autograd, make_scale(sum_first_axis_only), "gradients at"),
        (checks.gradcheck_float64, make_scale(ignore_gradient), "GradcheckError"),
        (checks.gradcheck_float32, make_scale(ignore_gradient), "GradcheckError"),
        (checks.random_directions, make_scale(ignore_gradient), "the slope along a random direction"),
        (checks.square_shapes, make_scale(ignore_gradient), "square sizes"),
        (checks.expanded_gradient, make_scale(assume_contiguous_gradient), "expanded gradient"),
        (checks.strided_gradient, make_scale(assume_contiguous_gradient), "not contiguous"),
        (checks.strided_inputs, make_scale(assume_contiguous_input), "an input that is not contiguous"),
        (checks.frozen_inputs, make_scale(return_none_for_scale), "only input 1"),
        (checks.second_backward, OverwritesSavedCopy, "a second backward pass of the same call"),
        (checks.written_between, TensorsOnCtx, "a write to an input or a result after the call"),
        (checks.second_derivatives, SavesCopy, "the gradient of a gradient is wrong, without an error"),
        (
            checks.infinite_gradient,
            make_scale(propagate_infinity),
            "input 0 at [1, 0, 0]: got nan, expected -0.144245",
        ),
        (
            checks.far_from_zero,
            make_multiply_and_divide(torch.exp),
            "with inputs near 800, where exp is infinite",
        ),
        (
            checks.far_from_zero,
            make_multiply_and_divide(lambda x: x.clamp(max=0).exp()),
            "with inputs near -800, where exp is 0",
        ),
        (
            checks.narrow_dtypes,
            make_scale(underflow_in_float16),
            "in float16 at odd sizes: the gradient of input 0 at [",
        ),
        (checks.two_calls, StateOnClass, "a second call"),
        (checks.under_checkpoint, StateOnClass, "under checkpoint"),
        (checks.inputs_unchanged, make_scale(write_into_gradient), "the gradient coming in is changed"),
        (checks.repeat_runs, make_scale(add_noise), "different gradients"),
        (checks.at_zero, make_scale(ignore_gradient), "exactly 0"),
        (checks.many_rows_bfloat16, make_scale(sum_in_bfloat16), "over many rows"),
        (checks.memory_saved, SavesExtraTensor, "bytes are kept"),
        (checks.held_by_ctx, TensorsOnCtx, "ctx.x holds a tensor"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_incorrect_function_is_detected(check, function, expected):
    assert expected in (check(make_subject(function, **SAVED_BYTES)) or "")


@pytest.mark.parametrize(
    "check", [checks.differentiable_outputs, checks.random_directions], ids=lambda check: check.__name__
)
def test_output_without_gradient_must_be_marked(check):
    def compute_with_largest(x, scale):
        return x * scale, (x * scale).amax().detach()

    assert check(Subject(MarkedOutput.apply, compute_with_largest, make_inputs)) is None
    message = check(Subject(SecondOutput.apply, compute_with_largest, make_inputs))
    expected = "output 1 has a gradient for autograd and should have none"
    assert message and (expected in message or check is checks.random_directions)


def test_once_differentiable_function_passes():
    """A missing second derivative is accepted; a wrong one is not."""
    assert checks.second_derivatives(make_subject(OnceDifferentiable)) is None


@pytest.mark.parametrize("layout", ["a slice of longer rows", "with leading axes exchanged"])
def test_all_memory_layouts_are_checked(layout):
    """The function is incorrect only for this layout's strides."""
    strides = checks.LAYOUTS[layout](torch.zeros(3, 5, 7)).stride()

    def backward(ctx, dy):
        dx, dscale = Scale.backward(ctx, dy)
        return (2 * dx if dy.stride() == strides else dx), dscale

    assert layout in (checks.strided_gradient(make_subject(make_scale(backward))) or "")


def test_every_subset_of_frozen_inputs_is_checked():
    """The function is incorrect only if exactly two of three inputs require gradients."""

    class Product(Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return tensors[0] * tensors[1] * tensors[2]

        @staticmethod
        def backward(ctx, dy):
            x, y, z = ctx.saved_tensors
            gradients = dy * y * z, dy * x * z, dy * x * y
            return tuple(None if sum(ctx.needs_input_grad) == 2 else g for g in gradients)

    def make_three_inputs(sizes, seed):
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randn(3, 5, generator=generator, dtype=torch.float64) for _ in range(3))

    message = checks.frozen_inputs(
        Subject(Product.apply, lambda x, y, z: x * y * z, make_three_inputs, sizes=("odd",))
    )
    assert "with only input 0 and input 1 asking for a gradient (the others frozen)" in (message or "")


def test_factor_is_reported_only_if_zeros_stay_zero():
    expected = torch.tensor([2.0, 3.0, 0.0], dtype=torch.float64)
    assert (
        checks.describe_constant_factor(5 * expected, expected, [])
        == "every element is 5 times what it should be"
    )
    assert checks.describe_constant_factor(expected + torch.tensor([0.0, 0.0, 1.0]), expected, []) == ""


def test_cancellation_is_not_reported():
    """The gradient of softmax for a constant output gradient is 0 up to rounding."""
    make_input = lambda sizes, seed: make_inputs(sizes, seed)[:1]  # noqa: E731
    softmax = Subject(lambda x: x.exp() / x.exp().sum(-1, keepdim=True), lambda x: x.softmax(-1), make_input)
    assert checks.expanded_gradient(softmax) is None


def test_allclose_on_ones_misses_mistakes():
    """An output gradient of ones cannot detect an ignored gradient."""
    assert checks.allclose_on_ones(make_subject(make_scale(ignore_gradient))) is None
    assert checks.allclose_on_ones(make_subject(WrongForward)) is None
    doubled = make_scale(lambda ctx, dy: tuple(2 * g for g in Scale.backward(ctx, dy)))
    assert "1e-4" in (checks.allclose_on_ones(make_subject(doubled)) or "")


def test_exception_in_the_function_is_reported():
    def raise_error(ctx, dy):
        raise AttributeError("no such thing as ctx.mask")

    assert (
        checks.against_autograd(make_subject(make_scale(raise_error)))
        == "AttributeError: no such thing as ctx.mask"
    )


def test_saved_bytes_are_counted_once_per_storage():
    class SavesTwice(Scale):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.save_for_backward(x, x, scale)
            return x * scale

    x, scale = torch.randn(3, 7, requires_grad=True), torch.ones(7)
    bytes_saved, lines = checks.count_saved_bytes(SavesTwice.apply, [x, scale])
    assert bytes_saved == 4 * (21 + 7)
    assert lines == ["[3, 7] float32, 84 bytes", "[7] float32, 28 bytes"]
