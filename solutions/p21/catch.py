"""Puzzle 21: a test of backward passes. It must reject every wrong one, and no correct one.

`check(op)` is called with correct and incorrect ops, one at a time. If an op is wrong, it raises or returns a line that
describes the error; otherwise it returns None. An op has

    op.function(*inputs)           the function to test; returns a tensor or a tuple of tensors
    op.reference(*inputs)          the correct result, from PyTorch's own differentiable operations
    op.inputs(sizes, seed, dtype)  new inputs; those of a floating-point dtype are leaves that require a gradient
    op.sizes                       the sizes that `inputs` supports: "odd", "square", "row" (no leading axis), "deep"
                                   (three leading axes), and maybe "tall" (thousands of rows)
    op.dtypes                      the dtypes that the function supports, the widest first; float64 may be missing

A correct op may use any method, and may sum in a different order in each call: its results are then correct up to
rounding. Its inputs may be at a corner of the function, and it may ignore one of them. It may raise a RuntimeError for
second derivatives, or for a backward pass after its inputs have been overwritten. A wrong op may be right in most
calls.
"""

import torch


def check(op):
    """Raise AssertionError if an op is wrong."""

    # BLANK-START check: a test that rejects every wrong op and no right one
    import itertools

    def randomly(outputs, seed=1):
        generator = torch.Generator().manual_seed(seed)
        return [(0.5 + torch.randn(t.shape, generator=generator)).to(t.dtype) for t in outputs]

    def expanded(outputs):
        return [torch.tensor(1.25, dtype=t.dtype).expand(t.shape) for t in outputs]

    def infinite(outputs):
        """Infinity for the first part of each output that has parts."""
        gradients = randomly(outputs)
        for t in gradients:
            if t.dim():
                t[0] = torch.inf
        return gradients

    layouts = (
        lambda t: t,
        lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
        lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]] if t.dim() else t,
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() > 2 else t,
    )

    def leaf(t, like):
        return t.detach().requires_grad_(like.requires_grad)

    def outputs_of(function, inputs):
        outputs = function(*inputs)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def numbers(gradients, like):
        return [torch.zeros_like(t) if g is None else g for t, g in zip(like, gradients, strict=True)]

    def first(function, inputs, incoming, between):
        """Return which outputs require a gradient, and the gradients twice; no input may change."""
        outputs = outputs_of(function, inputs)
        between(inputs, outputs)
        differentiable = [t for t in outputs if t.requires_grad]
        leaves = [t for t in inputs if t.requires_grad]
        gradients = incoming(differentiable)
        tensors = [*inputs, *outputs, *gradients]
        before = [t.detach().clone() for t in tensors]

        def differentiate():
            options = {"allow_unused": True, "retain_graph": True}
            return numbers(torch.autograd.grad(differentiable, leaves, gradients, **options), leaves)

        found = [t.clone() for t in differentiate()] + differentiate()
        for now, then in zip(tensors, before, strict=True):
            assert torch.equal(now.detach(), then), "the backward pass writes into what is not its own"
        return [t.requires_grad for t in outputs], found

    def second(function, inputs, incoming, _):
        """Return the gradients of a random sum of the gradients."""
        differentiable = [t for t in outputs_of(function, inputs) if t.requires_grad]
        leaves = [t for t in inputs if t.requires_grad]
        gradients = [g.requires_grad_() for g in incoming(differentiable)]
        found = torch.autograd.grad(differentiable, leaves, gradients, allow_unused=True, create_graph=True)
        found = numbers(found, leaves)
        total = sum((g * w.to(g.dtype)).sum() for g, w in zip(found, randomly(found, 2), strict=True))
        if total.requires_grad:
            total.backward()  # unlike grad it runs all that there is, once_differentiable too
        return None, numbers([t.grad for t in (*leaves, *gradients)], (*leaves, *gradients))

    def compare(inputs, incoming=randomly, between=lambda inputs, outputs: None, derive=first):
        """Compare with float64; the tolerance is PyTorch's own error in the same dtype."""
        wide = [leaf(t.double() if t.is_floating_point() else t.clone(), t) for t in inputs]
        copy = [leaf(t.clone(), t) for t in inputs]
        narrow = next(t.dtype for t in inputs if t.is_floating_point())
        rounded = lambda outputs: [t.to(narrow).double() for t in incoming(outputs)]  # noqa: E731
        nothing = lambda inputs, outputs: None  # noqa: E731
        asks, truth = derive(op.reference, wide, rounded, nothing)
        _, baseline = derive(op.reference, copy, incoming, nothing)
        got_asks, got = derive(op.function, inputs, incoming, between)
        assert got_asks == asks, "an output asks for a gradient that it does not have"
        for ours, theirs, right in zip(got, baseline, truth, strict=True):
            assert ours.shape == right.shape, f"a gradient has shape {list(ours.shape)}"
            finite = right.isfinite()
            if not finite.any():
                continue
            scale = max(1.0, right[finite].abs().max().item())
            error, noise = ((t.double() - right)[finite].abs().max().item() / scale for t in (ours, theirs))
            slack = {torch.float64: 1e-9, torch.float32: 1e-6}.get(narrow, 2 * torch.finfo(narrow).eps)
            assert error <= 2 * noise + slack, f"a gradient is off by {error:.1e} of its largest element"

    def unless(message, *arguments, **named):
        """Compare, unless autograd raises an error with such a message."""
        try:
            compare(*arguments, **named)
        except RuntimeError as error:
            assert message in str(error), str(error)

    def another_call(*_):
        op.function(*op.inputs("odd", 1, dtype))

    def overwrite(inputs, outputs):
        with torch.no_grad():
            for t in (*inputs, *outputs):
                t.zero_()

    for dtype in op.dtypes:
        for sizes in op.sizes:
            compare(op.inputs(sizes, 0, dtype))
            compare(op.inputs(sizes, 0, dtype), expanded)
        compare(op.inputs("odd", 0, dtype), between=another_call)

    dtype = op.dtypes[0]
    for view in layouts:
        compare(op.inputs("odd", 0, dtype), lambda outputs, view=view: [view(t) for t in randomly(outputs)])
        compare([leaf(view(t.detach()), t) for t in op.inputs("odd", 2, dtype)])
    compare(op.inputs("odd", 0, dtype), infinite)
    unless("modified by an inplace operation", op.inputs("odd", 0, dtype), between=overwrite)
    unless("", op.inputs("odd", 0, dtype), derive=second)
    # Zeros among the inputs, as after a ReLU; and numbers whose exp is infinite or 0.
    far = 800 if dtype == torch.float64 else 110
    for moved in (lambda t: t.clamp(min=0), lambda t: t + far, lambda t: t - far):
        inputs = op.inputs("odd", 3, dtype)
        compare([leaf(moved(t), t) if t.is_floating_point() else t for t in inputs])
    # Some inputs require no gradient.
    floating = [t.is_floating_point() for t in op.inputs("odd", 4, dtype)]
    for asked in itertools.product((True, False), repeat=len(floating)):
        wanted = [asks and real for asks, real in zip(asked, floating, strict=True)]
        if any(wanted):
            inputs = op.inputs("odd", 4, dtype)
            compare([t.detach().requires_grad_(asks) for t, asks in zip(inputs, wanted, strict=True)])
    # BLANK-END check
