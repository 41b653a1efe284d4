"""Heads of models in the torch.compile backend: replaced by `linear_cross_entropy` or left with a reason; results as in eager mode."""

import pytest
import torch
from compile_checks import assert_same, assert_same_as_eager, compile_model, compute_results
from torch import nn
from torch.nn import functional as F

from harness.nn import attention_layer, cross_entropy
from harness.nn.compile import head as head_module

B, S, H, V = 2, 5, 8, 12


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


class Model(nn.Module):
    """An embedding that can be tied to a head, a head with a bias, and a matrix [H, V]; `body` computes the loss."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.table, self.head = nn.Embedding(V, H), nn.Linear(H, V)
        self.w, self.c = nn.Parameter(torch.randn(H, V)), nn.Parameter(torch.randn(V))

    def forward(self, x, targets):
        return self.body(self, x, targets)


def make_inputs(batch: int = B, length: int = S) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and targets, two of which are ignored."""
    targets = torch.randint(V, (batch, length))
    targets[0, :2] = -100
    return torch.randn(batch, length, H), targets


def cross_entropy_of(logits, targets, *args, **options):
    return F.cross_entropy(logits.view(-1, V), targets.view(-1), *args, **options)


def plain(m, x, t):
    return cross_entropy_of(m.head(x), t)


def of_transformers(m, x, t):
    """Compute the loss as ForCausalLMLoss does."""
    logits = F.linear(x, m.table.weight).float()
    shifted = F.pad(t, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return F.cross_entropy(logits.view(-1, V), shifted, ignore_index=-100, reduction="sum") / 7


def shifted_logits(m, x, t):
    logits = m.head(x)[..., :-1, :].contiguous()
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    return loss(logits.view(-1, logits.size(-1)), t[..., 1:].reshape(-1))


def tie_head(m, x, t):
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
    return cross_entropy_of(m.head(x), t) + cross_entropy_of(F.linear(x, m.table.weight), t)


def slices_of_one_tensor(m, x, t):
    """Take tokens and targets from one tensor, as in pytorch#190938."""
    t = t.clamp(min=0)
    return F.cross_entropy(m.head(m.table(t[:, :-1])).flatten(0, 1), t[:, 1:].flatten())


@pytest.mark.parametrize(
    ("body", "heads"),
    [
        (plain, 1),
        (slices_of_one_tensor, 1),
        (of_transformers, 1),
        (shifted_logits, 1),
        (tie_head, 1),
        (conv1d, 1),
        (last_row, 1),
        (one_row, 1),
        (one_row_of_a_matrix, 1),
        (two_losses, 2),
    ],
)
@pytest.mark.parametrize("tail", ["eager", "aot_eager"])
def test_head_with_its_loss_is_replaced(body, heads, tail):
    reports = assert_same_as_eager(Model(body), *make_inputs(), tail=tail, head=True)
    assert [len(report.heads) for report in reports] == [heads]
    assert not any(report.heads_left for report in reports)


def in_place_between(m, x, t):
    y = x * 3
    logits = m.head(x)
    y.mul_(2)
    return cross_entropy_of(logits, t) + y.sum()


def autocast_ends_between(m, x, t):
    with torch.autocast("cpu", torch.bfloat16):
        logits = m.head(x)
    return cross_entropy_of(logits.float(), t)


def also_returned(m, x, t):
    logits = m.head(x)
    return cross_entropy_of(logits.float(), t), logits


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
        (lambda m, x, t: cross_entropy_of(torch.tanh(m.head(x)), t), "tanh is between it and its loss"),
        (lambda m, x, t: F.cross_entropy(m.head(x).transpose(1, 2), t), "transpose is between it and its loss"),
        (lambda m, x, t: F.cross_entropy(m.head(x).view(-1, V)[:3], t.view(-1)[:3]),
         "its logits are reshaped, then sliced"),
        (lambda m, x, t: cross_entropy_of(m.head(x).bfloat16().float(), t), "its logits are cast to bfloat16"),
        (lambda m, x, t: cross_entropy_of(m.head(x), t, m.c.detach().abs()), "its loss has class weights"),
        (lambda m, x, t: cross_entropy_of(m.head(x), t, reduction="none"), "its loss has the reduction 'none'"),
        (lambda m, x, t: cross_entropy_of(m.head(x), t, size_average=False),
         "its loss has an argument of old: size_average or reduce"),
        (lambda m, x, t: F.cross_entropy(m.head(x).view(-1, V), torch.softmax(x @ m.w, -1).view(-1, V)),
         "its targets are float32, not classes"),
        (lambda m, x, t: F.cross_entropy(m.head(x)[:, :, None].view(-1, V, 1), t.view(-1, 1)),
         "view is between it and its loss"),
        (lambda m, x, t: F.cross_entropy(torch.addmm(m.c, x.view(-1, H), m.w, beta=2), t.view(-1)), "beta is 2"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:size_average")
def test_unsupported_head_is_left_with_a_reason(body, why):
    reports = assert_same_as_eager(Model(body), *make_inputs(), head=True)
    assert [reason for report in reports for _, reason in report.heads_left] == [why]
    assert not any(report.heads for report in reports)


@pytest.mark.parametrize("tail", ["eager", "aot_eager"])
def test_nothing_is_replaced_inside_torch_func(tail, monkeypatch):
    monkeypatch.setattr(attention_layer, "explain", lambda *arguments, **options: "wgmma")
    model, (x, t) = Model(plain).requires_grad_(False), make_inputs()

    def gradient(x):
        def loss(x):
            x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]
            return plain(model, F.layer_norm(x, (H,)), t)

        return torch.func.grad(loss)(x)

    call, reports = compile_model(gradient, tail, head=True, attention=True)
    torch.testing.assert_close(call(x), gradient(x))
    why = "its tensors are wrapped, by a transform of torch.func or in a subclass"
    for left in (reports[0].heads_left, reports[0].left, reports[0].attentions_left):
        assert [reason for _, reason in left] == [why]


def test_head_rejected_by_linear_cross_entropy_is_left(monkeypatch):
    def refuses(*arguments, **options):
        raise NotImplementedError("not today")

    monkeypatch.setattr(cross_entropy, "linear_cross_entropy", refuses)
    reports = assert_same_as_eager(Model(conv1d), *make_inputs(), head=True)
    assert [why for _, why in reports[0].heads_left] == ["not today"]


def test_small_logits_are_left_by_default(monkeypatch):
    x, t = make_inputs()
    logits = B * S * V * 4
    for size, head, heads, left in (
        (logits, None, 1, 0),
        (logits + 1, None, 0, 1),
        (2**40, True, 1, 0),
        (1, False, 0, 0),
    ):
        monkeypatch.setattr(head_module, "SMALL_LOGITS", size)
        call, reports = compile_model(Model(plain), "eager", head=head)
        call(x, t)
        assert [(len(report.heads), len(report.heads_left)) for report in reports] == [(heads, left)]
    monkeypatch.undo()
    call, reports = compile_model(Model(plain), "eager", head=None)
    call(x, t)
    assert reports[0].heads_left == [("head", "its logits take less than 32 MiB")]


def test_head_after_layer_norm_is_fused_with_loss_or_norm():
    def body(m, x, t, returned=False):
        logits = m.head(F.layer_norm(x, (H,)))
        loss = F.cross_entropy(logits.view(-1, V), t.view(-1))
        return (loss, logits) if returned else loss

    for returned, heads, swaps in ((False, 1, 0), (True, 0, 1)):
        model = Model(lambda m, x, t, r=returned: body(m, x, t, r))
        reports = assert_same_as_eager(model, *make_inputs(), tail="aot_eager", head=True)
        assert [(len(r.heads), len(r.swaps)) for r in reports] == [(heads, swaps)]


def test_dynamic_graph_accepts_any_number_of_rows():
    model = Model(of_transformers)
    call, reports = compile_model(model, dynamic=True, head=True)
    for batch, length in ((2, 5), (3, 7), (4, 300)):
        x, t = make_inputs(batch, length)
        assert_same(compute_results(call, model, x, t), compute_results(model, model, x, t))
    assert [len(report.heads) for report in reports] == [1]


@pytest.mark.parametrize("float_first", [True, False])
def test_head_under_autocast_is_as_accurate_as_eager(float_first):
    def body(m, x, t):
        with torch.autocast("cpu", torch.bfloat16):
            x = x + m.table(t.clamp(min=0))
            logits = F.linear(x, m.table.weight).view(-1, V)
            return F.cross_entropy(logits.float() if float_first else logits, t.view(-1))

    def exact(m, x, t):
        x = x + m.table(t.clamp(min=0))
        return F.cross_entropy(F.linear(x, m.table.weight).view(-1, V), t.view(-1))

    model, (x, t) = Model(body), make_inputs(4, 40)
    call, reports = compile_model(model, head=True)
    ours, theirs = compute_results(call, model, x, t), compute_results(model, model, x, t)
    model.body = exact
    truth = compute_results(model.double(), model, x.double(), t)
    assert [report.heads[0].dtype for report in reports] == ["bfloat16"]
    for got, near, right in zip(ours, theirs, truth, strict=True):
        if right is not None:
            assert got.dtype == near.dtype
            assert (got - right).abs().max() <= 2 * (near - right).abs().max() + 1e-3 * right.abs().max()


def test_16_bit_loss_keeps_its_dtype():
    model, (x, t) = Model(plain).bfloat16(), make_inputs()
    call, reports = compile_model(model, head=True)
    assert_same(
        *(compute_results(each, model, x.bfloat16(), t) for each in (call, model)), rtol=2e-2, atol=2e-2
    )
    assert len(reports[0].heads) == 1


def test_head_without_gradients():
    model, (x, t) = Model(plain), make_inputs()
    call, reports = compile_model(model, head=True)
    with torch.no_grad():
        torch.testing.assert_close(call(x, t), model(x, t))
    assert len(reports[0].heads) == 1


def test_report_text(capsys):
    call, _ = compile_model(Model(two_losses), "eager", head=True, report=True)
    call(*make_inputs())
    messages = capsys.readouterr().err.splitlines()
    assert messages == [
        "mojo_workbook: 2 of 2 heads with cross-entropy swapped",
        "  swapped  head with its loss: 10 rows, 8 -> 12, float32",
        f"  swapped  {messages[-1].split()[1]} with its loss: 10 rows, 8 -> 12, float32",
    ]
