"""Puzzle 21: a test of backward passes. It must find every wrong one, and must not accuse a right one.

`check(op)` is called with one op after the other, right ones and wrong ones. It raises, or returns a line that says what is
wrong, where it has something against the op; it returns None where it has nothing. An op has

    op.function(*inputs)           what is tested; returns a tensor, or a tuple of them
    op.reference(*inputs)          the same by PyTorch's own differentiable operations: what is right
    op.inputs(sizes, seed, dtype)  fresh inputs; those of a floating-point dtype are leaves that ask for a gradient
    op.sizes                       the sizes that `inputs` knows: "odd", "square", "row" (no leading axis), "deep" (three of
                                   them), and maybe "tall" (thousands of rows)
    op.dtypes                      the dtypes that the function computes in, the widest first; not all know float64

A right op may be written in any way, and may add up in another order each time: it is then right to rounding. Its inputs
may lie at a corner of the function. A wrong one may be right in most calls.
"""

import torch


def check(op):
    """Raises AssertionError where an op is wrong."""

    # BLANK-START check: a test that finds every wrong op and accuses no right one
    def randomly(outputs):
        generator = torch.Generator().manual_seed(1)
        return [(0.5 + torch.randn(t.shape, generator=generator)).to(t.dtype) for t in outputs]

    def expanded(outputs):
        return [torch.tensor(1.25, dtype=t.dtype).expand(t.shape) for t in outputs]

    def transposed(outputs):
        return [turned(t) for t in randomly(outputs)]

    def turned(t):
        return t.mT.contiguous().mT if t.dim() > 1 else t

    def leaf(t, like):
        return t.detach().requires_grad_(like.requires_grad)

    def run(function, inputs, incoming, between=lambda: None):
        """Which outputs ask for a gradient, and the gradients of the inputs; nothing that is handed in may change."""
        outputs = function(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        between()
        asking = [t for t in outputs if t.requires_grad]
        leaves = [t for t in inputs if t.requires_grad]
        gradients = incoming(asking)
        touchable = [*inputs, *outputs, *gradients]
        before = [t.detach().clone() for t in touchable]
        found = torch.autograd.grad(asking, leaves, gradients, allow_unused=True)
        for now, then in zip(touchable, before, strict=True):
            assert torch.equal(now.detach(), then), "the backward pass writes into what is not its own"
        found = [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True)]
        return [t.requires_grad for t in outputs], found

    def compare(inputs, incoming=randomly, between=lambda: None):
        """Against float64; what rounding does is measured by PyTorch's own function in the same dtype."""
        wide = [leaf(t.double() if t.is_floating_point() else t, t) for t in inputs]
        copy = [leaf(t.clone(), t) for t in inputs]
        narrow = next(t.dtype for t in inputs if t.is_floating_point())
        rounded = lambda outputs: [t.to(narrow).double() for t in incoming(outputs)]  # noqa: E731
        same = lambda outputs: [t.to(narrow) for t in incoming(outputs)]  # noqa: E731
        asks, truth = run(op.reference, wide, rounded)
        _, baseline = run(op.reference, copy, same)
        got_asks, got = run(op.function, inputs, incoming, between)
        assert got_asks == asks, "an output asks for a gradient that it does not have"
        for ours, theirs, right in zip(got, baseline, truth, strict=True):
            assert ours.shape == right.shape, f"a gradient has shape {list(ours.shape)}"
            scale = max(1.0, right.abs().max().item())
            error, usual = ((t.double() - right).abs().max().item() / scale for t in (ours, theirs))
            slack = 2**-8 if narrow == torch.bfloat16 else 64 * torch.finfo(narrow).eps
            assert error <= 2 * usual + slack, f"a gradient is off by {error:.1e} of its largest element"

    for dtype in op.dtypes:
        for sizes in op.sizes:
            for incoming in (randomly, expanded, transposed):
                compare(op.inputs(sizes, 0, dtype), incoming)
        # A second call before the first one's backward pass.
        compare(
            op.inputs("odd", 0, dtype), between=lambda dtype=dtype: op.function(*op.inputs("odd", 1, dtype))
        )
        compare([leaf(turned(t.detach()), t) for t in op.inputs("odd", 2, dtype)])
        # Zeros among the inputs: as a ReLU in front of it makes them.
        compare([leaf(t.clamp(min=0), t) if t.is_floating_point() else t for t in op.inputs("odd", 3, dtype)])
        # All but one input frozen.
        for kept in range(len(op.inputs())):
            inputs = op.inputs("odd", 4, dtype)
            if inputs[kept].is_floating_point():
                compare([t.detach().requires_grad_(i == kept) for i, t in enumerate(inputs)])
    # BLANK-END check
