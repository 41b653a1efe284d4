"""Helpers for tests of the torch.compile backend: models under it, their reports, and comparisons with eager mode."""

import torch

from harness.nn import mojo_workbook


class Reports(list):
    """The backend's reports, one per graph."""

    @property
    def num_replaced(self) -> int:
        return sum(len(report.swaps) for report in self)

    @property
    def reasons(self) -> list[str]:
        """The reasons for which Linear layers after a LayerNorm were not replaced."""
        return [reason for report in self for _, reason in report.skipped]


def compile_model(model, tail="aot_eager", *, fullgraph=True, dynamic=None, **options):
    """Return the model compiled by the backend, and the reports that its first call will fill."""
    torch._dynamo.reset()
    reports = Reports()
    options = {"report": reports.append, "tail": tail} | options
    return torch.compile(
        model, backend=mojo_workbook, fullgraph=fullgraph, dynamic=dynamic, options=options
    ), reports


def compute_results(call, model, *inputs) -> list:
    """Return the outputs of a call, and the gradients of its float inputs and the model's parameters."""
    torch.manual_seed(1)
    copies = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
    out = call(*copies)
    outputs = list(out) if isinstance(out, tuple) else [out]
    loss = torch.stack([(o.float() * (o.detach().float().sin() + 0.3)).sum() for o in outputs]).sum()
    leaves = [*(t for t in copies if t.requires_grad), *model.parameters()]
    return [*(o.detach() for o in outputs), *torch.autograd.grad(loss, leaves, allow_unused=True)]


def assert_same(actual: list, expected: list, rtol=2e-5, atol=2e-6) -> None:
    """Assert equal values and dtypes, and that the same gradients are None."""
    assert [t is None for t in actual] == [t is None for t in expected]
    for a, b in zip(actual, expected, strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def assert_same_as_eager(model, *inputs, tail="eager", **options) -> Reports:
    """Assert that the compiled model has eager mode's outputs and gradients; return the reports."""
    call, reports = compile_model(model, tail, **options)
    assert_same(compute_results(call, model, *inputs), compute_results(model, model, *inputs))
    return reports
