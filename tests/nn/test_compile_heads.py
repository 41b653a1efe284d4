"""The torch.compile backend and the heads of models: which become `linear_cross_entropy`, which stay and why, and that losses and
gradients are eager's.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.nn import attention_layer, cross_entropy, mojo_workbook
from harness.nn.compile import head as head_module

B, S, H, V = 2, 5, 8, 12


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


class Model(nn.Module):
    """A table whose weight is a head's too, a head with a bias, and a matrix [H, V]; `body` makes the loss of x and targets."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.table, self.head = nn.Embedding(V, H), nn.Linear(H, V)
        self.w, self.c = nn.Parameter(torch.randn(H, V)), nn.Parameter(torch.randn(V))

    def forward(self, x, targets):
        return self.body(self, x, targets)


def given(batch: int = B, length: int = S) -> tuple[torch.Tensor, torch.Tensor]:
    """x and targets, two of which do not count."""
    targets = torch.randint(V, (batch, length))
    targets[0, :2] = -100
    return torch.randn(batch, length, H), targets


def results(call, model, x, targets) -> list:
    """The outputs and all gradients of their sum."""
    leaf = x.clone().requires_grad_()
    out = call(leaf, targets)
    outputs = out if isinstance(out, tuple) else (out,)
    loss = torch.stack([each.float().sum() * (k + 1.5) for k, each in enumerate(outputs)]).sum()
    return [*outputs, *torch.autograd.grad(loss, [leaf, *model.parameters()], allow_unused=True)]


def compiled(model, tail="aot_eager", **options):
    """The model under the backend, and its reports."""
    reports = []
    options = {"report": reports.append, "tail": tail, "head": True} | options
    return torch.compile(model, backend=mojo_workbook, fullgraph=True, options=options), reports


def assert_same(ours: list, theirs: list) -> None:
    """Equal values and dtypes, and for every gradient none where eager has none."""
    assert [each is None for each in ours] == [each is None for each in theirs]
    for one, other in zip(ours, theirs, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


def plain(m, x, t):
    return F.cross_entropy(m.head(x).view(-1, V), t.view(-1))


def of_transformers(m, x, t):
    """As ForCausalLMLoss does it."""
    logits = F.linear(x, m.table.weight).float()
    shifted = F.pad(t, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return F.cross_entropy(logits.view(-1, V), shifted, ignore_index=-100, reduction="sum") / 7


def shifted_logits(m, x, t):
    logits = m.head(x)[..., :-1, :].contiguous()
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    return loss(logits.view(-1, logits.size(-1)), t[..., 1:].reshape(-1))


def tied(m, x, t):
    x = x + m.table(t.clamp(min=0))
    return F.cross_entropy((x @ m.table.weight.T).flatten(0, 1), t.clamp(min=0).flatten(), ignore_index=3)


def conv1d(m, x, t):
    return F.cross_entropy(torch.addmm(m.c, x.view(-1, H), m.w), t.view(-1), reduction="sum")


def last_row(m, x, t):
    return F.cross_entropy(m.head(x)[:, -1], t[:, -1])


def one_row(m, x, t):
    return F.cross_entropy(m.head(x[0, 3]), t[0, 3])


def one_row_of_a_matrix(m, x, t):
    return F.cross_entropy(m.head(x[0, 3]).view(1, V), t[0, 3:4])


def two_losses(m, x, t):
    first = F.cross_entropy(m.head(x).view(-1, V), t.view(-1))
    return first + F.cross_entropy(F.linear(x, m.table.weight).view(-1, V), t.view(-1))


def slices_of_one_tensor(m, x, t):
    """Tokens and targets, as pytorch#190938 has them."""
    t = t.clamp(min=0)
    return F.cross_entropy(m.head(m.table(t[:, :-1])).flatten(0, 1), t[:, 1:].flatten())


@pytest.mark.parametrize(
    ("body", "heads"),
    [
        (plain, 1),
        (slices_of_one_tensor, 1),
        (of_transformers, 1),
        (shifted_logits, 1),
        (tied, 1),
        (conv1d, 1),
        (last_row, 1),
        (one_row, 1),
        (one_row_of_a_matrix, 1),
        (two_losses, 2),
    ],
)
@pytest.mark.parametrize("tail", ["eager", "aot_eager"])
def test_a_head_with_its_loss_is_swapped_and_has_eager_s_gradients(body, heads, tail):
    model, (x, t) = Model(body), given()
    call, reports = compiled(model, tail)
    assert_same(results(call, model, x, t), results(model, model, x, t))
    assert [len(report.heads) for report in reports] == [heads]
    assert not any(report.heads_left for report in reports)


def in_place_between(m, x, t):
    y = x * 3
    logits = m.head(x)
    y.mul_(2)
    return F.cross_entropy(logits.view(-1, V), t.view(-1)) + y.sum()


def autocast_ends_between(m, x, t):
    with torch.autocast("cpu", torch.bfloat16):
        logits = m.head(x)
    return F.cross_entropy(logits.float().view(-1, V), t.view(-1))


def also_returned(m, x, t):
    logits = m.head(x)
    return F.cross_entropy(logits.float().view(-1, V), t.view(-1)), logits


def also_read(m, x, t):
    logits = m.head(x).view(-1, V)
    return F.cross_entropy(logits, t.view(-1)) + logits.square().mean()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (also_returned, "its logits are returned"),
        (also_read, "square reads its logits too"),
        (in_place_between, "mul_ between the two may change a tensor in place"),
        (autocast_ends_between, "_exit_autocast between the two switches a mode of PyTorch"),
        (
            lambda m, x, t: F.cross_entropy(torch.tanh(m.head(x)).view(-1, V), t.view(-1)),
            "tanh is between it and its loss",
        ),
        (
            lambda m, x, t: F.cross_entropy(m.head(x).transpose(1, 2), t),
            "transpose is between it and its loss",
        ),
        (
            lambda m, x, t: F.cross_entropy(m.head(x).view(-1, V)[:3], t.view(-1)[:3]),
            "its logits are reshaped, then sliced",
        ),
        (
            lambda m, x, t: F.cross_entropy(m.head(x).bfloat16().float().view(-1, V), t.view(-1)),
            "its logits are cast to bfloat16",
        ),
        (
            lambda m, x, t: F.cross_entropy(m.head(x).view(-1, V), t.view(-1), m.c.detach().abs()),
            "its loss has weights for classes",
        ),
        (
            lambda m, x, t: F.cross_entropy(m.head(x).view(-1, V), t.view(-1), reduction="none"),
            "its loss has the reduction 'none'",
        ),
        (
            lambda m, x, t: F.cross_entropy(m.head(x).view(-1, V), t.view(-1), size_average=False),
            "its loss has an argument of old: size_average or reduce",
        ),
        (
            lambda m, x, t: F.cross_entropy(m.head(x).view(-1, V), torch.softmax(x @ m.w, -1).view(-1, V)),
            "its targets are float32, not classes",
        ),
        (
            lambda m, x, t: F.cross_entropy(m.head(x)[:, :, None].view(-1, V, 1), t.view(-1, 1)),
            "view is between it and its loss",
        ),
        (
            lambda m, x, t: F.cross_entropy(torch.addmm(m.c, x.view(-1, H), m.w, beta=2), t.view(-1)),
            "beta is 2",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:size_average")
def test_a_head_that_stays_is_reported_with_the_reason(body, why):
    model, (x, t) = Model(body), given()
    call, reports = compiled(model, "eager")
    assert_same(results(call, model, x, t), results(model, model, x, t))
    assert [reason for report in reports for _, reason in report.heads_left] == [why]
    assert not any(report.heads for report in reports)


@pytest.mark.parametrize("tail", ["eager", "aot_eager"])
def test_inside_a_transform_of_torch_func_all_stays(tail, monkeypatch):
    monkeypatch.setattr(attention_layer, "explain", lambda *arguments, **options: "wgmma")
    model, (x, t) = Model(plain).requires_grad_(False), given()

    def gradient(x):
        def loss(x):
            x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]
            return plain(model, F.layer_norm(x, (H,)), t)

        return torch.func.grad(loss)(x)

    call, reports = compiled(gradient, tail, attention=True)
    torch.testing.assert_close(call(x), gradient(x))
    why = "its tensors are wrapped, by a transform of torch.func or in a subclass"
    for left in (reports[0].heads_left, reports[0].left, reports[0].attentions_left):
        assert [reason for _, reason in left] == [why]


def test_what_linear_cross_entropy_refuses_stays(monkeypatch):
    def refuses(*arguments, **options):
        raise NotImplementedError("not today")

    monkeypatch.setattr(cross_entropy, "linear_cross_entropy", refuses)
    model, (x, t) = Model(conv1d), given()
    call, reports = compiled(model, "eager")
    assert_same(results(call, model, x, t), results(model, model, x, t))
    assert [why for _, why in reports[0].heads_left] == ["not today"]


def test_unless_asked_only_large_logits_are_swapped(monkeypatch):
    x, t = given()
    logits = B * S * V * 4
    for size, head, heads, left in (
        (logits, None, 1, 0),
        (logits + 1, None, 0, 1),
        (2**40, True, 1, 0),
        (1, False, 0, 0),
    ):
        torch._dynamo.reset()
        monkeypatch.setattr(head_module, "SMALL", size)
        call, reports = compiled(Model(plain), "eager", head=head)
        call(x, t)
        assert [(len(report.heads), len(report.heads_left)) for report in reports] == [(heads, left)]
    monkeypatch.undo()
    torch._dynamo.reset()
    call, reports = compiled(Model(plain), "eager", head=None)
    call(x, t)
    assert reports[0].heads_left == [("head", "its logits take less than 32 MiB")]


def test_behind_a_layer_norm_the_head_goes_with_its_loss_or_stays_with_the_norm():
    def body(m, x, t, returned=False):
        logits = m.head(F.layer_norm(x, (H,)))
        loss = F.cross_entropy(logits.view(-1, V), t.view(-1))
        return (loss, logits) if returned else loss

    for returned, heads, swaps in ((False, 1, 0), (True, 0, 1)):
        model, (x, t) = Model(lambda m, x, t, r=returned: body(m, x, t, r)), given()
        call, reports = compiled(model)
        assert_same(results(call, model, x, t), results(model, model, x, t))
        assert [(len(r.heads), len(r.swaps)) for r in reports] == [(heads, swaps)]


def test_one_dynamic_graph_serves_every_number_of_rows():
    model, reports = Model(of_transformers), []
    options = {"report": reports.append, "tail": "aot_eager", "head": True}
    call = torch.compile(model, backend=mojo_workbook, fullgraph=True, dynamic=True, options=options)
    for batch, length in ((2, 5), (3, 7), (4, 300)):
        x, t = given(batch, length)
        assert_same(results(call, model, x, t), results(model, model, x, t))
    assert [len(report.heads) for report in reports] == [1]


@pytest.mark.parametrize("float_first", [True, False])
def test_under_autocast_a_head_is_as_near_to_float64_as_eager_s(float_first):
    def body(m, x, t):
        with torch.autocast("cpu", torch.bfloat16):
            x = x + m.table(t.clamp(min=0))
            logits = F.linear(x, m.table.weight).view(-1, V)
            return F.cross_entropy(logits.float() if float_first else logits, t.view(-1))

    def exact(m, x, t):
        x = x + m.table(t.clamp(min=0))
        return F.cross_entropy(F.linear(x, m.table.weight).view(-1, V), t.view(-1))

    model, (x, t) = Model(body), given(4, 40)
    call, reports = compiled(model)
    ours, theirs = results(call, model, x, t), results(model, model, x, t)
    model.body = exact
    truth = results(model.double(), model, x.double(), t)
    assert [report.heads[0].dtype for report in reports] == ["bfloat16"]
    for got, near, right in zip(ours, theirs, truth, strict=True):
        if right is not None:
            assert got.dtype == near.dtype
            assert (got - right).abs().max() <= 2 * (near - right).abs().max() + 1e-3 * right.abs().max()


def test_a_loss_of_16_bits_stays_one_of_16_bits():
    model, (x, t) = Model(plain).bfloat16(), given()
    call, reports = compiled(model)
    ours, theirs = (results(each, model, x.bfloat16(), t) for each in (call, model))
    assert len(reports[0].heads) == 1
    for got, expected in zip(ours, theirs, strict=True):
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_no_gradient_is_wanted():
    model, (x, t) = Model(plain), given()
    call, reports = compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(call(x, t), model(x, t))
    assert len(reports[0].heads) == 1


def test_the_report_in_words(capsys):
    call, _ = compiled(Model(two_losses), "eager", report=True)
    call(*given())
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "mojo_workbook: 2 of 2 heads with cross-entropy swapped",
        "  swapped  head with its loss: 10 rows, 8 -> 12, float32",
        f"  swapped  {said[-1].split()[1]} with its loss: 10 rows, 8 -> 12, float32",
    ]
