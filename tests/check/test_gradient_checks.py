"""Each named check of a gradient passes a right function, and sees the mistake that it is there for."""

import pytest
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from harness.check import gradient_checks as checks
from harness.check.gradients import Subject

LEADING = {"odd": (3, 5), "square": (4, 4), "row": (), "deep": (2, 3, 2), "tall": (4096,)}


def scaled_inputs(sizes: str, seed: int) -> tuple[torch.Tensor, ...]:
    """x [..., 4 or 7] and a scale for its last axis."""
    generator = torch.Generator().manual_seed(seed)
    H = 4 if sizes == "square" else 7
    x = torch.randn(*LEADING[sizes], H, generator=generator, dtype=torch.float64)
    return x, 1 + torch.rand(H, generator=generator, dtype=torch.float64)


def reference(x, scale):
    return x * scale


def summed(terms: torch.Tensor) -> torch.Tensor:
    """The sum over all axes but the last."""
    return terms.flatten(0, -2).sum(0) if terms.dim() > 1 else terms


class Scale(Function):
    """x * scale over the last axis, right; the wrong ones below change one method."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, dy):
        x, scale = ctx.saved_tensors
        return dy * scale, summed(dy * x)


def subject(function: type[Function], **more) -> Subject:
    return Subject(function.apply, reference, scaled_inputs, **more)


def backward_of(wrong) -> type[Function]:
    """Scale with another backward pass."""
    return type("Wrong", (Scale,), {"backward": staticmethod(wrong)})


def reads_as_contiguous(ctx, dy):
    flat = torch.as_strided(dy, dy.shape, torch.empty(dy.shape).stride()) if dy.stride()[-1] else dy * 0
    return Scale.backward(ctx, flat)


def ignores_gradient(ctx, dy):
    x, scale = ctx.saved_tensors
    return scale.expand_as(x).clone(), summed(x).clone()


def first_axis_only(ctx, dy):
    x, scale = ctx.saved_tensors
    total = (dy * x).sum(0)
    return dy * scale, (total if total.dim() == 1 else total.flatten(0, -2)[0]) if dy.dim() > 1 else dy * x


def writes_into_gradient(ctx, dy):
    dx, dscale = Scale.backward(ctx, dy)
    return dy.copy_(dx), dscale


def none_for_scale(ctx, dy):
    dx, dscale = Scale.backward(ctx, dy)
    return dx, dscale if all(ctx.needs_input_grad) else None


def sums_in_bfloat16(ctx, dy):
    x, scale = ctx.saved_tensors
    total = torch.zeros_like(scale)
    for row in (dy * x).flatten(0, -2):
        total = total + row
    return dy * scale, total


class RemembersLastCall(Scale):
    """What is kept hangs on the class: the second call overwrites the first one's."""

    @staticmethod
    def forward(ctx, x, scale):
        RemembersLastCall.kept = x, scale
        return x * scale

    @staticmethod
    def backward(ctx, dy):
        x, scale = RemembersLastCall.kept
        return dy * scale, summed(dy * x)


class KeepsTooMuch(Scale):
    @staticmethod
    def forward(ctx, x, scale):
        y = x * scale
        ctx.save_for_backward(x, scale, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, scale, _ = ctx.saved_tensors
        return dy * scale, summed(dy * x)


def noisy(ctx, dy):
    dx, dscale = Scale.backward(ctx, dy)
    return dx * (1 + 1e-12 * torch.rand((), dtype=torch.float64)), dscale


class ForwardOff(Scale):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale + 1e-3


class AttributeOfCtx(Scale):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.x, ctx.scale = x, scale
        return x * scale

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.scale, summed(dy * ctx.x)


def reads_input_as_it_lies(ctx, dy):
    x, scale = ctx.saved_tensors
    return dy * scale, summed(dy * torch.as_strided(x, x.shape, torch.empty(x.shape).stride()))


class OverwritesItsOwn(Scale):
    """What is kept is a copy, and the first backward pass writes its result there."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.factor = scale.expand_as(x).clone()
        return x * scale

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return ctx.factor.mul_(dy), summed(dy * x)


class KeepsACopy(Scale):
    """Right, but for a second derivative the scale is a constant."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale.clone())
        return x * scale


class Refuses(KeepsACopy):
    """The same, and says so."""

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return Scale.backward(ctx, dy)


def spreads_infinity(ctx, dy):
    dx, dscale = Scale.backward(ctx, dy)
    return dx + 0 * dy.sum(), dscale


def times(factor):
    """Multiply the gradient of x by a function of x and divide it by the same again."""

    def backward(ctx, dy):
        dx, dscale = Scale.backward(ctx, dy)
        both = factor(ctx.saved_tensors[0])
        return dx * both / both, dscale

    return backward_of(backward)


def loses_float16(ctx, dy):
    dx, dscale = Scale.backward(ctx, dy)
    return (dx / 1e9 * 1e9 if dy.dtype == torch.float16 else dx), dscale


class SecondOutput(Function):
    """x * scale, and its largest element, through which nothing flows back."""

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


LEDGER = {"saved": lambda x, scale: 4 * (x.numel() + scale.numel())}


CHECKS = [check for check in vars(checks).values() if hasattr(check, "__wrapped__")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_right_function_passes(check):
    assert check(subject(Scale, **LEDGER)) is None


@pytest.mark.parametrize(
    ("check", "function", "words"),
    [
        (checks.forward, ForwardOff, "the forward pass itself is wrong"),
        (checks.against_autograd, backward_of(first_axis_only), "gradients at"),
        (checks.gradcheck_float64, backward_of(ignores_gradient), "GradcheckError"),
        (checks.gradcheck_float32, backward_of(ignores_gradient), "GradcheckError"),
        (checks.random_directions, backward_of(ignores_gradient), "the slope along a random direction"),
        (checks.square_shapes, backward_of(ignores_gradient), "square sizes"),
        (checks.expanded_gradient, backward_of(reads_as_contiguous), "expanded gradient"),
        (checks.strided_gradient, backward_of(reads_as_contiguous), "not contiguous"),
        (checks.strided_inputs, backward_of(reads_input_as_it_lies), "an input that is not contiguous"),
        (checks.frozen_inputs, backward_of(none_for_scale), "only input 1"),
        (checks.second_backward, OverwritesItsOwn, "a second backward pass of the same call"),
        (checks.written_between, AttributeOfCtx, "a write to an input or a result after the call"),
        (checks.second_derivatives, KeepsACopy, "the gradient of a gradient is wrong, without an error"),
        (
            checks.infinite_gradient,
            backward_of(spreads_infinity),
            "input 0 at [1, 0, 0]: got nan, expected -0.144245",
        ),
        (checks.far_from_zero, times(torch.exp), "with inputs near 800, where exp is infinite"),
        (
            checks.far_from_zero,
            times(lambda x: x.clamp(max=0).exp()),
            "with inputs near -800, where exp is 0",
        ),
        (
            checks.narrow_dtypes,
            backward_of(loses_float16),
            "in float16 at odd sizes: the gradient of input 0 at [",
        ),
        (checks.two_calls, RemembersLastCall, "a second call"),
        (checks.under_checkpoint, RemembersLastCall, "under checkpoint"),
        (checks.inputs_unchanged, backward_of(writes_into_gradient), "the gradient coming in is changed"),
        (checks.repeat_runs, backward_of(noisy), "different gradients"),
        (checks.at_zero, backward_of(ignores_gradient), "exactly 0"),
        (checks.many_rows_bfloat16, backward_of(sums_in_bfloat16), "over many rows"),
        (checks.memory_saved, KeepsTooMuch, "the ledger says"),
        (checks.held_by_ctx, AttributeOfCtx, "ctx.x holds a tensor"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_wrong_function_is_seen(check, function, words):
    assert words in (check(subject(function, **LEDGER)) or "")


@pytest.mark.parametrize(
    "check", [checks.differentiable_outputs, checks.random_directions], ids=lambda check: check.__name__
)
def test_an_output_without_a_gradient_must_be_marked(check):
    def with_largest(x, scale):
        return x * scale, (x * scale).amax().detach()

    assert check(Subject(MarkedOutput.apply, with_largest, scaled_inputs)) is None
    said = check(Subject(SecondOutput.apply, with_largest, scaled_inputs))
    words = "output 1 has a gradient for autograd and should have none"
    assert said and (words in said or check is checks.random_directions)


def test_a_second_derivative_may_be_refused():
    """By whoever knows of none: it is the silent number that is wrong."""
    assert checks.second_derivatives(subject(Refuses)) is None


@pytest.mark.parametrize(
    ("laid", "words"), [("slice_rows", "a slice of longer rows"), ("exchange_axes", "leading axes exchanged")]
)
def test_a_layout_that_a_transpose_does_not_show_is_tried(laid, words):
    """Wrong for one layout alone, which its strides tell."""
    strides = getattr(checks, laid)(torch.zeros(3, 5, 7)).stride()

    def wrong(ctx, dy):
        dx, dscale = Scale.backward(ctx, dy)
        return (2 * dx if dy.stride() == strides else dx), dscale

    assert words in (checks.strided_gradient(subject(backward_of(wrong))) or "")


def test_inputs_frozen_in_pairs_are_tried():
    """Right where all ask and where one asks alone."""

    class Product(Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return tensors[0] * tensors[1] * tensors[2]

        @staticmethod
        def backward(ctx, dy):
            tensors = ctx.saved_tensors
            right = [dy * tensors[1] * tensors[2], dy * tensors[0] * tensors[2], dy * tensors[0] * tensors[1]]
            return tuple(None if sum(ctx.needs_input_grad) == 2 else g for g in right)

    def three(sizes, seed):
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randn(3, 5, generator=generator, dtype=torch.float64) for _ in range(3))

    words = checks.frozen_inputs(Subject(Product.apply, lambda x, y, z: x * y * z, three, sizes=("odd",)))
    assert "with only inputs 0 and 1 asking for a gradient (the others frozen)" in (words or "")


def test_a_factor_is_named_only_where_zeros_stay_zeros():
    expected = torch.tensor([2.0, 3.0, 0.0], dtype=torch.float64)
    assert checks.constant_factor(5 * expected, expected, []) == "every element is 5 times what it should be"
    assert checks.constant_factor(expected + torch.tensor([0.0, 0.0, 1.0]), expected, []) == ""


def test_what_cancels_is_no_mistake():
    """The gradient of softmax under a constant gradient is what rounding leaves of 0."""
    one = lambda sizes, seed: scaled_inputs(sizes, seed)[:1]  # noqa: E731
    softmax = Subject(lambda x: x.exp() / x.exp().sum(-1, keepdim=True), lambda x: x.softmax(-1), one)
    assert checks.expanded_gradient(softmax) is None


def test_the_weak_checks_are_weak():
    """Ones hide a gradient that ignores what comes in; that is why they stand in the table and not in a verdict."""
    assert checks.allclose_on_ones(subject(backward_of(ignores_gradient))) is None
    assert checks.allclose_on_ones(subject(ForwardOff)) is None
    doubled = backward_of(lambda ctx, dy: tuple(2 * g for g in Scale.backward(ctx, dy)))
    assert "1e-4" in (checks.allclose_on_ones(subject(doubled)) or "")


def test_what_a_function_raises_is_what_is_wrong():
    def raises(ctx, dy):
        raise AttributeError("no such thing as ctx.mask")

    assert (
        checks.against_autograd(subject(backward_of(raises))) == "AttributeError: no such thing as ctx.mask"
    )


def test_bytes_kept_are_counted_once_for_each_piece_of_memory():
    class Twice(Scale):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.save_for_backward(x, x, scale)
            return x * scale

    x, scale = torch.randn(3, 7, requires_grad=True), torch.ones(7)
    kept, lines = checks.saved_bytes(Twice.apply, [x, scale])
    assert kept == 4 * (21 + 7)
    assert lines == ["[3, 7] float32, 84 bytes", "[7] float32, 28 bytes"]
