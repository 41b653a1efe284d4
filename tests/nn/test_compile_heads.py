"""The torch.compile backend replaces heads by `linear_cross_entropy` or skips them with a reason."""

import pytest
import torch
from compile_checks import assert_same, assert_same_as_eager, compile_model, compute_results
from torch import nn
from torch.nn import functional as F

from harness.nn import attention_layer, cross_entropy
from harness.nn.compile import head as head_module

B, S, H, V = 2, 5, 8, 12


@pytest.fixture(autouse=True)
def reset_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)


class Model(nn.Module):
    """Module whose forward is `body`, with an embedding [V, H], a head with bias, and a matrix [H, V]."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.table, self.head = nn.Embedding(V, H), nn.Linear(H, V)
        self.w, self.c = nn.Parameter(torch.randn(H, V)), nn.Parameter(torch.randn(V))

    def forward(self, x, targets):
        return self.body(self, x, targets)


def make_inputs(batch: int = B, length: int = S) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and targets with two ignored elements."""
    targets = torch.randint(V, (batch, length))
    targets[0, :2] = -100
    return torch.randn(batch, length, H), targets


def flatten_and_compute_loss(logits, targets, *args, **options):
    return F.cross_entropy(logits.view(-1, V), targets.view(-1), *args, **options)


def compute_head_loss(m, x, t):
    return flatten_and_compute_loss(m.head(x), t)


def compute_transformers_loss(m, x, t):
    """Compute transformers' ForCausalLMLoss."""
    logits = F.linear(x, m.table.weight).float()
    shifted = F.pad(t, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return F.cross_entropy(logits.view(-1, V), shifted, ignore_index=-100, reduction="sum") / 7


def compute_shifted_loss(m, x, t):
    logits = m.head(x)[..., :-1, :].contiguous()
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    return loss(logits.view(-1, logits.size(-1)), t[..., 1:].reshape(-1))


def compute_tied_loss(m, x, t):
    x = x + m.table(t.clamp(min=0))
    return F.cross_entropy((x @ m.table.weight.T).flatten(0, 1), t.clamp(min=0).flatten(), ignore_index=3)


def compute_addmm_loss(m, x, t):
    return F.cross_entropy(torch.addmm(m.c, x.view(-1, H), m.w), t.view(-1), reduction="sum")


def compute_last_row_loss(m, x, t):
    return F.cross_entropy(m.head(x)[:, -1], t[:, -1])


def compute_single_row_loss(m, x, t):
    return F.cross_entropy(m.head(x[0, 3]), t[0, 3])


def compute_matrix_row_loss(m, x, t):
    return F.cross_entropy(m.head(x[0, 3]).view(1, V), t[0, 3:4])


def compute_two_losses(m, x, t):
    return flatten_and_compute_loss(m.head(x), t) + flatten_and_compute_loss(F.linear(x, m.table.weight), t)


def compute_next_token_loss(m, x, t):
    """Slice tokens and targets from the same tensor, as in pytorch#190938."""
    t = t.clamp(min=0)
    return F.cross_entropy(m.head(m.table(t[:, :-1])).flatten(0, 1), t[:, 1:].flatten())


@pytest.mark.parametrize(
    ("body", "heads"),
    [
        (compute_head_loss, 1),
        (compute_next_token_loss, 1),
        (compute_transformers_loss, 1),
        (compute_shifted_loss, 1),
        (compute_tied_loss, 1),
        (compute_addmm_loss, 1),
        (compute_last_row_loss, 1),
        (compute_single_row_loss, 1),
        (compute_matrix_row_loss, 1),
        (compute_two_losses, 2),
    ],
)
@pytest.mark.parametrize("tail", ["eager", "aot_eager"])
def test_head_and_loss_are_replaced(body, heads, tail):
    reports = assert_same_as_eager(Model(body), *make_inputs(), tail=tail, head=True)
    assert [len(report.heads) for report in reports] == [heads]
    assert not any(report.skipped_heads for report in reports)


def modify_between(m, x, t):
    y = x * 3
    logits = m.head(x)
    y.mul_(2)
    return flatten_and_compute_loss(logits, t) + y.sum()


def exit_autocast_between(m, x, t):
    with torch.autocast("cpu", torch.bfloat16):
        logits = m.head(x)
    return flatten_and_compute_loss(logits.float(), t)


def return_logits(m, x, t):
    logits = m.head(x)
    return flatten_and_compute_loss(logits.float(), t), logits


def reuse_logits(m, x, t):
    logits = m.head(x).view(-1, V)
    return F.cross_entropy(logits, t.view(-1)) + logits.square().mean()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (return_logits, "its logits are outputs"),
        (reuse_logits, "square also reads its logits"),
        (modify_between, "mul_ in between may change a tensor in place"),
        (exit_autocast_between, "_exit_autocast in between switches a mode of PyTorch"),
        (lambda m, x, t: flatten_and_compute_loss(torch.tanh(m.head(x)), t), "tanh is between the Linear and its loss"),
        (lambda m, x, t: F.cross_entropy(m.head(x).transpose(1, 2), t), "transpose is between the Linear and its loss"),
        (lambda m, x, t: F.cross_entropy(m.head(x).view(-1, V)[:3], t.view(-1)[:3]),
         "its logits are reshaped, then sliced"),
        (lambda m, x, t: flatten_and_compute_loss(m.head(x).bfloat16().float(), t), "its logits are cast to bfloat16"),
        (lambda m, x, t: flatten_and_compute_loss(m.head(x), t, m.c.detach().abs()), "its loss has class weights"),
        (lambda m, x, t: flatten_and_compute_loss(m.head(x), t, reduction="none"), "its loss has the reduction 'none'"),
        (lambda m, x, t: flatten_and_compute_loss(m.head(x), t, size_average=False),
         "its loss has a deprecated argument, size_average or reduce"),
        (lambda m, x, t: F.cross_entropy(m.head(x).view(-1, V), torch.softmax(x @ m.w, -1).view(-1, V)),
         "its targets are float32, not classes"),
        (lambda m, x, t: F.cross_entropy(m.head(x)[:, :, None].view(-1, V, 1), t.view(-1, 1)),
         "view is between the Linear and its loss"),
        (lambda m, x, t: F.cross_entropy(torch.addmm(m.c, x.view(-1, H), m.w, beta=2), t.view(-1)), "beta is 2"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:size_average")
def test_unsupported_head_is_skipped_with_a_reason(body, reason):
    reports = assert_same_as_eager(Model(body), *make_inputs(), head=True)
    assert [reason for report in reports for _, reason in report.skipped_heads] == [reason]
    assert not any(report.heads for report in reports)


@pytest.mark.parametrize("tail", ["eager", "aot_eager"])
def test_nothing_is_replaced_inside_torch_func(tail, monkeypatch):
    monkeypatch.setattr(attention_layer, "explain", lambda *arguments, **options: "wgmma")
    model, (x, t) = Model(compute_head_loss).requires_grad_(False), make_inputs()

    def compute_gradient(x):
        def loss(x):
            x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]
            return compute_head_loss(model, F.layer_norm(x, (H,)), t)

        return torch.func.grad(loss)(x)

    call, reports = compile_model(compute_gradient, tail, head=True, attention=True)
    torch.testing.assert_close(call(x), compute_gradient(x))
    reason = "its tensors are wrapped, by a transform of torch.func or in a subclass"
    for skipped in (reports[0].skipped_heads, reports[0].skipped, reports[0].skipped_attentions):
        assert [reason for _, reason in skipped] == [reason]


def test_head_rejected_by_linear_cross_entropy_is_skipped(monkeypatch):
    def raise_error(*arguments, **options):
        raise NotImplementedError("not today")

    monkeypatch.setattr(cross_entropy, "linear_cross_entropy", raise_error)
    reports = assert_same_as_eager(Model(compute_addmm_loss), *make_inputs(), head=True)
    assert [reason for _, reason in reports[0].skipped_heads] == ["not today"]


def test_small_logits_are_skipped_by_default(monkeypatch):
    x, t = make_inputs()
    logits = B * S * V * 4
    for size, head, num_replaced, num_skipped in (
        (logits, None, 1, 0),
        (logits + 1, None, 0, 1),
        (2**40, True, 1, 0),
        (1, False, 0, 0),
    ):
        monkeypatch.setattr(head_module, "MIN_LOGITS_BYTES", size)
        call, reports = compile_model(Model(compute_head_loss), "eager", head=head)
        call(x, t)
        assert [(len(r.heads), len(r.skipped_heads)) for r in reports] == [(num_replaced, num_skipped)]
    monkeypatch.undo()
    call, reports = compile_model(Model(compute_head_loss), "eager", head=None)
    call(x, t)
    assert reports[0].skipped_heads == [("head", "its logits are smaller than 32 MiB")]


def test_head_after_layer_norm_is_fused_with_loss_or_norm():
    def body(m, x, t, return_logits=False):
        logits = m.head(F.layer_norm(x, (H,)))
        loss = F.cross_entropy(logits.view(-1, V), t.view(-1))
        return (loss, logits) if return_logits else loss

    for return_logits, heads, num_pairs in ((False, 1, 0), (True, 0, 1)):
        model = Model(lambda m, x, t, r=return_logits: body(m, x, t, r))
        reports = assert_same_as_eager(model, *make_inputs(), tail="aot_eager", head=True)
        assert [(len(r.heads), len(r.swaps)) for r in reports] == [(heads, num_pairs)]


def test_dynamic_graph_accepts_any_number_of_rows():
    model = Model(compute_transformers_loss)
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

    def compute_without_autocast(m, x, t):
        x = x + m.table(t.clamp(min=0))
        return F.cross_entropy(F.linear(x, m.table.weight).view(-1, V), t.view(-1))

    model, (x, t) = Model(body), make_inputs(4, 40)
    call, reports = compile_model(model, head=True)
    compiled_results, eager_results = compute_results(call, model, x, t), compute_results(model, model, x, t)
    model.body = compute_without_autocast
    truth = compute_results(model.double(), model, x.double(), t)
    assert [report.heads[0].dtype for report in reports] == ["bfloat16"]
    for compiled, eager, expected in zip(compiled_results, eager_results, truth, strict=True):
        if expected is not None:
            assert compiled.dtype == eager.dtype
            assert (compiled - expected).abs().max() <= 2 * (
                eager - expected
            ).abs().max() + 1e-3 * expected.abs().max()


def test_16_bit_loss_keeps_its_dtype():
    model, (x, t) = Model(compute_head_loss).bfloat16(), make_inputs()
    call, reports = compile_model(model, head=True)
    assert_same(
        *(compute_results(function, model, x.bfloat16(), t) for function in (call, model)),
        rtol=2e-2,
        atol=2e-2,
    )
    assert len(reports[0].heads) == 1


def test_head_is_replaced_without_gradients():
    model, (x, t) = Model(compute_head_loss), make_inputs()
    call, reports = compile_model(model, head=True)
    with torch.no_grad():
        torch.testing.assert_close(call(x, t), model(x, t))
    assert len(reports[0].heads) == 1


def test_report_is_printed(capsys):
    call, _ = compile_model(Model(compute_two_losses), "eager", head=True, report=True)
    call(*make_inputs())
    messages = capsys.readouterr().err.splitlines()
    assert messages == [
        "mojo_workbook: 2 of 2 heads with cross-entropy swapped",
        "  swapped  head with its loss: 10 rows, 8 -> 12, float32",
        f"  swapped  {messages[-1].split()[1]} with its loss: 10 rows, 8 -> 12, float32",
    ]
