"""The torch.compile backend: replaced and skipped pairs, reasons, and results as in eager mode."""

import importlib.metadata
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from compile_checks import assert_same, assert_same_as_eager, compile_model, compute_results
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from book.measure import record
from harness.nn import attention_layer, mojo_workbook
from harness.nn.compile import backend as backend_module

B, S, H, O = 2, 3, 8, 6


@pytest.fixture(autouse=True)
def reset_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)


class FunctionModel(nn.Module):
    """Module whose forward is `body`, with a LayerNorm, two Linear layers, and a weight [H, O] with bias."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.ln, self.a, self.b = nn.LayerNorm(H), nn.Linear(H, O), nn.Linear(H, O, bias=False)
        self.w, self.c = nn.Parameter(torch.randn(H, O)), nn.Parameter(torch.randn(O))
        with torch.no_grad():
            self.ln.weight.normal_()
            self.ln.bias.normal_()

    def forward(self, x):
        return self.body(self, x)


def call_aten(m, x):
    h = torch.ops.aten.native_layer_norm.default(x, [H], m.ln.weight, m.ln.bias, 1e-5)[0]
    return torch.ops.aten.linear.default(h, m.a.weight, m.a.bias)


def call_with_keywords(m, x):
    h = F.layer_norm(input=x, normalized_shape=(H,), bias=m.ln.bias, weight=m.ln.weight, eps=1e-3)
    return F.linear(bias=m.c, input=h, weight=m.b.weight)


def call_addmm(m, x):
    return torch.addmm(m.c, m.ln(x).view(-1, H), m.w).view(B, S, O)


def share_layernorm(m, x):
    h = m.ln(x)
    return m.a(h), m.b(h), h @ m.w, h + x


@pytest.mark.parametrize(
    "body,num_replaced",
    [
        (lambda m, x: m.a(m.ln(x)), 1),
        (lambda m, x: m.b(m.ln(x)), 1),
        (lambda m, x: F.linear(F.layer_norm(x, (H,)), m.b.weight), 1),
        (lambda m, x: m.a(F.layer_norm(x, (H,), m.ln.weight)), 1),
        (call_with_keywords, 1),
        (call_aten, 1),
        (call_addmm, 1),
        (lambda m, x: m.ln(x) @ m.a.weight.T + m.c, 1),
        (lambda m, x: torch.matmul(torch.layer_norm(x, [H]), m.w), 1),
        (share_layernorm, 3),
        (lambda m, x: m.a(F.dropout(m.ln(x), 0.5, training=False).reshape(-1, H)), 1),
        (lambda m, x: m.a(m.ln(x * 2 + x.flip(0))), 1),
        (lambda m, x: m.a(m.ln(x.transpose(0, 1)).contiguous()), 1),
        (lambda m, x: m.a(m.ln(x)[:, -1:]), 1),
        (lambda m, x: m.a(m.ln(x)[:, 0]), 1),
        (lambda m, x: m.a(m.ln(x)[1]), 1),
        (lambda m, x: m.a(m.ln(x)[..., 1:, :]), 1),
        (lambda m, x: m.a(m.ln(x)[None, :, ::2].reshape(-1, H)), 1),
        (lambda m, x: m.a(m.ln(x)[:, 1:, :]) + m.ln(x)[:, :-1].sum(), 1),
        (lambda m, x: m.a(m.ln(x)[:, :0]), 1),
        (lambda m, x: m.a(m.ln(x)[0, 1]), 1),
    ],
)
def test_supported_pairs_are_replaced(body, num_replaced):
    reports = assert_same_as_eager(FunctionModel(body), torch.randn(B, S, H))
    assert reports.num_replaced == num_replaced and not reports.reasons


def modify_between(m, x):
    """Modify an unrelated tensor in place; the backend does not track aliases, so it skips the pair."""
    other = x * 1.0
    h = m.ln(x)
    other.add_(1.0)
    return m.a(h) + other.sum()


def modify_weight_between(m, x):
    w = m.a.weight * 1.0
    h = m.ln(x)
    w[0] = 0.0
    return F.linear(h, w)


@pytest.mark.parametrize(
    "body,reason",
    [
        (lambda m, x: m.a(F.dropout(m.ln(x), 0.5)), "dropout is between"),
        (lambda m, x: m.a(m.ln(x)[..., torch.arange(H).flip(0)]), "getitem is between"),
        (lambda m, x: m.a(m.ln(x)[..., None].expand(B, S, H, H)), "is between"),
        (lambda m, x: m.a(m.ln(x)[torch.tensor([1, 0])]), "getitem is between"),
        (lambda m, x: m.a(m.ln(x).relu()), "relu is between"),
        (lambda m, x: m.a(m.ln(x).reshape(B, H, S).mT), "is between"),
        (modify_between, "may change a tensor in place"),
        (modify_weight_between, "may change a tensor in place"),
        (lambda m, x: torch.addmm(m.c, m.ln(x).view(-1, H), m.w, beta=2), "beta is 2"),
        (lambda m, x: m.a(F.layer_norm(x, (S, H))), "over 2 axes"),
        (lambda m, x: torch.matmul(m.ln(x), m.w.expand(B, H, O)), "its weight has 3 axes"),
    ],
)
def test_unsupported_pairs_are_skipped_with_a_reason(body, reason):
    reports = assert_same_as_eager(FunctionModel(body), torch.randn(B, S, H))
    assert reports.num_replaced == 0 and len(reports.reasons) == 1 and reason in reports.reasons[0]


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: m.a(F.rms_norm(x, (H,))),
        lambda m, x: m.ln(m.a(x.flip(-1)).repeat(1, 1, 4)[..., :H]),
        lambda m, x: m.a(x),
    ],
)
def test_linear_without_layer_norm_is_ignored(body):
    reports = assert_same_as_eager(FunctionModel(body), torch.randn(B, S, H))
    assert reports.num_replaced == 0 and not reports.reasons


def test_pair_with_inplace_op_between_is_skipped():
    """The fused operator would read the modified input."""

    def body(m, x):
        x = x * 1.0
        h = m.ln(x)
        x.mul_(2.0).add_(x.flip(-1))
        return m.a(h)

    model, x = FunctionModel(body), torch.randn(B, S, H)
    call, reports = compile_model(model, "eager")
    with torch.no_grad():
        torch.testing.assert_close(call(x), model(x))
    assert reports.num_replaced == 0
    assert "mul_ in between may change a tensor in place" in reports.reasons[0]


def test_inplace_op_before_a_pair_is_allowed():
    def body(m, x):
        x = x * 1.0
        x.add_(1.0)
        return m.a(m.ln(x))

    assert assert_same_as_eager(FunctionModel(body), torch.randn(B, S, H)).num_replaced == 1


def test_dynamic_shapes_do_not_recompile():
    """With dynamic=True the backend gets a graph twice, first with a symbolic eps; the second serves every size."""
    model = FunctionModel(share_layernorm)
    call, reports = compile_model(model, "eager", dynamic=True)
    graphs = []
    for rows in ((2, 3), (4, 5), (7, 2)):
        x = torch.randn(*rows, H)
        assert_same(compute_results(call, model, x), compute_results(model, model, x))
        graphs.append(len(reports))
    assert graphs[0] == graphs[1] == graphs[2] <= 2


def test_compilations_are_independent():
    for model in (FunctionModel(share_layernorm), FunctionModel(share_layernorm)):
        for _ in range(2):
            assert assert_same_as_eager(model, torch.randn(B, S, H)).num_replaced == 3


def test_pairs_are_replaced_without_gradients():
    model, x = FunctionModel(share_layernorm), torch.randn(B, S, H)
    call, reports = compile_model(model, "eager")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(call(x), model(x))
    assert reports.num_replaced >= 3


@pytest.mark.parametrize(
    ("make_mode", "name"),
    [(torch.no_grad, "_set_grad_enabled"), (lambda: torch.autocast("cpu", torch.bfloat16), "_exit_autocast")],
    ids=["no_grad", "autocast"],
)
def test_pair_across_a_mode_switch_is_skipped(make_mode, name):
    """The LayerNorm runs inside the mode and the Linear outside."""

    def body(m, x):
        with make_mode():
            h = m.ln(x)
        return m.a(h)

    reports = assert_same_as_eager(FunctionModel(body), torch.randn(B, S, H))
    assert reports.num_replaced == 0 and f"{name} in between switches a mode" in reports.reasons[0]


def test_frozen_layer_norm_gets_no_gradient():
    model = FunctionModel(lambda m, x: m.a(m.ln(x)))
    model.ln.requires_grad_(False)
    x = torch.randn(B, S, H, requires_grad=True)
    compile_model(model, "eager")[0](x).sum().backward()
    assert model.ln.weight.grad is None and model.a.weight.grad is not None and x.grad is not None


@pytest.mark.parametrize("inside_model", [False, True])
def test_autocast_matches_eager(inside_model):
    """LayerNorm runs in float32 and the matmul in bfloat16; a large mean exposes other dtypes."""

    def body(m, x):
        with torch.autocast("cpu", torch.bfloat16) if inside_model else nullcontext():
            return m.a(m.ln(x))

    model, x = FunctionModel(body), torch.randn(B, S, H) + 100
    call, reports = compile_model(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside_model):
        compiled_results, eager_results = compute_results(call, model, x), compute_results(model, model, x)
    assert reports.num_replaced == 1 and reports[0].swaps[0].dtype == "bfloat16"
    assert_same(compiled_results, eager_results, 2**-6, 2**-6)


def test_checkpointed_pair_is_replaced():
    model = FunctionModel(lambda m, x: checkpoint(lambda t: m.a(m.ln(t)).tanh(), x, use_reentrant=False))
    assert assert_same_as_eager(model, torch.randn(B, S, H), tail="aot_eager").num_replaced == 1


def test_pair_rejected_by_the_operator_is_skipped(monkeypatch):
    def raise_error(*_):
        raise ValueError("H and W do not go together")

    monkeypatch.setattr(backend_module.NodeInserter, "function", raise_error)
    reports = assert_same_as_eager(FunctionModel(call_addmm), torch.randn(B, S, H))
    assert reports.reasons == ["H and W do not go together"]


def test_inductor_compiles_the_remaining_graph(monkeypatch):
    """Inductor receives only its own options."""
    monkeypatch.setattr("torch._inductor.config.force_disable_caches", True)
    model = FunctionModel(lambda m, x: m.a(m.ln(x)).tanh())
    reports = assert_same_as_eager(model, torch.randn(B, S, H), tail="inductor", max_autotune=False)
    assert [len(report.swaps) for report in reports] == [1]


# ---- The report, the options, the entry point ---------------------------------------------------------------


def test_report_has_the_models_layer_names(capfd, monkeypatch):
    monkeypatch.setenv(backend_module.REPORT_VARIABLE, "1")
    model = nn.Sequential(nn.LayerNorm(H), nn.Linear(H, O), nn.LayerNorm(O), nn.Dropout(0.5), nn.Linear(O, 2))
    torch.compile(model, backend=mojo_workbook, options={"tail": "eager"})(torch.randn(B, S, H))
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        "mojo_workbook: 1 of 2 Linear layers after a LayerNorm swapped",
        "  swapped  1: 2x3 rows, 8 -> 6, float32",
        "  left     4: dropout is between the LayerNorm and the Linear",
    ]


def test_no_report_by_default_or_without_matches(capfd, monkeypatch):
    monkeypatch.delenv(backend_module.REPORT_VARIABLE, raising=False)
    options: dict[str, Any] = {"tail": "eager"}
    torch.compile(FunctionModel(share_layernorm), backend=mojo_workbook, options=options)(
        torch.randn(B, S, H)
    )
    torch.compile(nn.Linear(H, O), backend=mojo_workbook, options=options | {"report": True})(
        torch.randn(B, H)
    )
    assert "mojo_workbook" not in capfd.readouterr().err


def test_unknown_tail_is_rejected():
    with pytest.raises(Exception, match="tail 'llvm': choose one of inductor, aot_eager, eager"):
        torch.compile(FunctionModel(share_layernorm), backend=mojo_workbook, options={"tail": "llvm"})(
            torch.randn(B, S, H)
        )


def test_missing_cpp_compiler_is_reported_once(monkeypatch, capfd):
    monkeypatch.setenv("CXX", "/none")
    backend_module.has_compiler.cache_clear()
    try:
        model = FunctionModel(lambda m, x: m.a(m.ln(x)))
        compiled = torch.compile(model, backend=mojo_workbook)
        for rows in (2, 5):
            x = torch.randn(rows, S, H)
            assert_same(compute_results(compiled, model, x), compute_results(model, model, x))
    finally:
        backend_module.has_compiler.cache_clear()
    messages = [line for line in capfd.readouterr().err.splitlines() if "no C++ compiler" in line]
    assert len(messages) == 1


def test_backend_is_registered_by_entry_point():
    points = importlib.metadata.entry_points(group="torch_dynamo_backends", name="mojo_workbook")
    assert [point.load() for point in points][:1] == [mojo_workbook]
    assert "mojo_workbook" in torch._dynamo.list_backends()


# ---- Attention ----------------------------------------------------------------------------------------------


class AttentionModel(nn.Module):
    """LayerNorm, Linear and three attentions: causal GQA, with `options`, and self-attention."""

    def __init__(self, **options):
        super().__init__()
        self.ln, self.qkv, self.options = nn.LayerNorm(16), nn.Linear(16, 32), options

    def forward(self, x):
        q, k, v = self.qkv(self.ln(x)).split([16, 8, 8], -1)
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v))
        first = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        second = F.scaled_dot_product_attention(first, k, value=v, enable_gqa=True, **self.options)
        return F.scaled_dot_product_attention(second, second, second)


@pytest.fixture
def support_all_attention(monkeypatch):
    """Make the backend accept every attention without dropout; the CPU path runs it."""

    def explain(query, key=None, value=None, mask=None, dropout_p=0.0, **options):
        return "PyTorch's own operations: dropout" if dropout_p else "wgmma"

    monkeypatch.setattr(attention_layer, "explain", explain)


@pytest.mark.usefixtures("support_all_attention")
def test_attention_is_replaced_if_requested():
    model, x = AttentionModel(), torch.randn(2, 5, 16)
    (report,) = assert_same_as_eager(model, x, tail="aot_eager", attention=True)
    assert len(report.swaps) == 1 and len(report.attentions) == 3 and not report.skipped_attentions
    lines = report.format_lines()
    assert "mojo_workbook: 3 of 3 attentions swapped" in lines
    assert any(line.endswith("attention of [2, 4, 5, 4] to [2, 2, 5, 4], float32") for line in lines)
    for options in ({}, {"attention": False}):
        (report,) = assert_same_as_eager(model, x, tail="aot_eager", **options)
        assert not report.attentions and "attentions" not in "".join(report.format_lines())


@pytest.mark.usefixtures("support_all_attention")
def test_compiled_attention_accepts_strided_key_slices():
    """The slices keep the strides of the full tensor (pytorch#146377)."""
    query, key, value = torch.randn(3, 1, 2, 64, 8)
    compiled, _ = compile_model(F.scaled_dot_product_attention, attention=True)
    for keys in (slice(64), slice(48), slice(16, 47)):
        arguments = query, key[:, :, keys], value[:, :, keys]
        torch.testing.assert_close(compiled(*arguments), F.scaled_dot_product_attention(*arguments))


@pytest.mark.parametrize(
    ("outputs", "dtype", "hopper", "num_replaced"),
    [
        (97, torch.bfloat16, True, 0),
        (97, torch.bfloat16, False, 1),
        (97, torch.float32, True, 1),
        (96, torch.bfloat16, True, 1),
        (95, torch.bfloat16, True, 1),
    ],
)
def test_wide_unaligned_head_is_skipped_on_hopper(monkeypatch, outputs, dtype, hopper, num_replaced):
    """The kernels would copy such rows, for example GPT-2's 50,257 classes; Inductor pads them."""
    monkeypatch.setattr(backend_module, "is_hopper", lambda device: hopper)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, outputs)).to(dtype)
    x = torch.randn(4, 8, dtype=dtype)
    call, reports = compile_model(model, "eager")
    torch.testing.assert_close(call(x), model(x), rtol=2e-2, atol=2e-2)
    reason = "rows of 97 outputs are unaligned; padding by Inductor is faster"
    assert reports.num_replaced == num_replaced and reports.reasons == [reason] * (1 - num_replaced)


@pytest.mark.usefixtures("support_all_attention")
def test_attention_is_replaced_by_default_where_faster(monkeypatch):
    """On Hopper, attention is replaced only if it is faster and gradients are required."""
    monkeypatch.setattr(backend_module, "is_hopper", lambda device: True)
    monkeypatch.setattr(attention_layer, "uses_wgmma", lambda query: False)
    model, x = AttentionModel(), torch.randn(2, 5, 16)

    def list_reasons() -> list[str]:
        (report,) = assert_same_as_eager(model, x, tail="aot_eager")
        assert len(report.attentions) + len(report.skipped_attentions) == 3
        return [reason for _, reason in report.skipped_attentions]

    assert list_reasons() == ["the kernels are faster only in 16 bits on Hopper"] * 3
    slower = "get_reason_slower"
    monkeypatch.setattr(attention_layer, slower, lambda q, k, *_: "few" if q.shape[1] == 4 else None)
    assert list_reasons() == ["few"] * 3
    monkeypatch.setattr(attention_layer, slower, lambda *_: None)
    assert list_reasons() == []
    call, reports = compile_model(model)
    with torch.no_grad():
        call(x)
    assert [reason for _, reason in reports[0].skipped_attentions] == [
        "PyTorch is faster without gradients"
    ] * 3


def make_call(dtype=torch.bfloat16, *, heads=64, queries=512, keys=512, mask=None, dropout_p=0.0):
    """Return arguments of `get_reason_slower` on meta tensors."""
    query, key = (torch.empty(1, 2, length, heads, dtype=dtype, device="meta") for length in (queries, keys))
    return query, key, mask, dropout_p


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (make_call(), None),
        (make_call(torch.float16, heads=160, queries=4096), None),
        (make_call(torch.float32), "the kernels are faster only in 16 bits on Hopper"),
        (make_call(heads=60), "PyTorch is faster for head dimension 60"),
        (make_call(queries=1024, keys=1024, mask=torch.ones(1024)), None),
        (make_call(queries=1024, keys=1031, heads=128, mask=torch.ones(1024, 1031).bool()), None),
        (make_call(mask=torch.ones(512)), "it is faster only from 1024 queries and keys on"),
        (make_call(mask=torch.ones(1)), "PyTorch is faster for an attn_mask with 1 columns"),
        (
            make_call(mask=torch.ones(1001)),
            "PyTorch is faster for an attn_mask with 1001 columns",
        ),
        (
            make_call(heads=200, mask=torch.ones(512)),
            "PyTorch is faster for head dimension 200 with attn_mask",
        ),
        (make_call(dropout_p=0.1), "dropout would use other random numbers"),
        (make_call(heads=128), "PyTorch is faster for head dimension 128"),
        (make_call(keys=511), "it is faster only from 512 queries and keys on"),
    ],
)
def test_attention_is_skipped_where_pytorch_is_faster(call, reason, monkeypatch):
    monkeypatch.setattr(attention_layer, "uses_wgmma", lambda query: query.dtype.itemsize == 2)
    assert attention_layer.get_reason_slower(*call) == reason


def test_default_replacements_are_faster_in_the_record(monkeypatch):
    """Check every recorded call that is replaced by default."""
    masks = {"padding": torch.ones(1024).bool(), "bool S x S": torch.ones(1024, 1024).bool()}
    masks |= {"bias": torch.ones(1024, 1024), "none": None, "causal": None}
    lengths = {"queries": 1024, "keys": 1024}
    monkeypatch.setattr(attention_layer, "uses_wgmma", lambda query: query.dtype.itemsize == 2)
    replaced = [
        row
        for row in record.rows("attention_options")
        if row["option"] in masks
        and attention_layer.get_reason_slower(
            *make_call(
                getattr(torch, row["dtype"]), heads=int(row["d"]), mask=masks[row["option"]], **lengths
            )
        )
        is None
    ]
    assert {(row["option"], int(row["d"])) for row in replaced} == {
        (option, d)
        for option in masks
        for d in (64, 72, 128, 160)
        if d in (64, 160) or masks[option] is not None
    }
    assert max(float(row["ratio"]) for row in replaced) <= 1


@pytest.mark.usefixtures("support_all_attention")
def test_unsupported_attention_is_skipped_with_a_reason():
    model, x = AttentionModel(dropout_p=0.5), torch.randn(2, 5, 16)
    (report,) = assert_same_as_eager(model, x, tail="aot_eager", attention=True)
    assert len(report.attentions) == 2
    ((_, reason),) = report.skipped_attentions
    assert "dropout" in reason and f"left     {report.skipped_attentions[0][0]}: {reason}" in "".join(
        report.format_lines()
    )
