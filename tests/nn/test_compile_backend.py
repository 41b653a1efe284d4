"""The torch.compile backend: what it swaps, what it leaves alone and why, and that values and gradients are eager's."""

import importlib.metadata
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from book.measure import record
from harness.nn import attention_layer, mojo_workbook
from harness.nn.compile import backend as backend_module

B, S, H, O = 2, 3, 8, 6


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


class Recorder:
    """The backend, with an eager tail, and the reports of every graph that it was handed."""

    def __init__(self, tail: str = "eager"):
        self.reports = []
        self.tail = tail

    def __call__(self, gm, example_inputs, **options):
        own = {"report": self.reports.append, "tail": self.tail}
        return mojo_workbook(gm, example_inputs, options=own, **options)

    @property
    def swaps(self) -> int:
        return sum(len(report.swaps) for report in self.reports)

    @property
    def reasons(self) -> list[str]:
        return [why for report in self.reports for _, why in report.left]


class Pieces(nn.Module):
    """Parameters for the functions below: a LayerNorm and two Linear layers, each weight also as [H, O]."""

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


def both_ways(model, *inputs, **options) -> tuple[list, list, Recorder]:
    """Outputs and gradients of a model, eager and compiled by the backend, and what the backend reported."""
    recorder = Recorder()
    compiled = torch.compile(model, backend=recorder, fullgraph=True, **options)
    return results(model, inputs), results(compiled, inputs, of=model), recorder


def results(call, inputs, of=None) -> list:
    """[outputs, gradients of inputs and parameters] of a call."""
    torch.manual_seed(1)
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = call(*leaves)
    outputs = list(out) if isinstance(out, tuple) else [out]
    wanted = [*leaves, *(of or call).parameters()]
    losses = [(o.float() * (o.detach().float().sin() + 0.3)).sum() for o in outputs]
    loss = torch.stack(losses).sum()
    return [[o.detach() for o in outputs], torch.autograd.grad(loss, wanted, allow_unused=True)]


def assert_same(eager: list, compiled: list) -> None:
    """Equal values, dtypes, and for every gradient: none where eager has none."""
    for ours, theirs in zip(compiled, eager, strict=True):
        assert [t is None for t in ours] == [t is None for t in theirs]
        for a, b in zip(ours, theirs, strict=True):
            if b is not None:
                torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def aten_level(m, x):
    h = torch.ops.aten.native_layer_norm.default(x, [H], m.ln.weight, m.ln.bias, 1e-5)[0]
    return torch.ops.aten.linear.default(h, m.a.weight, m.a.bias)


def keywords(m, x):
    h = F.layer_norm(input=x, normalized_shape=(H,), bias=m.ln.bias, weight=m.ln.weight, eps=1e-3)
    return F.linear(bias=m.c, input=h, weight=m.b.weight)


def conv1d(m, x):
    return torch.addmm(m.c, m.ln(x).view(-1, H), m.w).view(B, S, O)


def shared(m, x):
    h = m.ln(x)
    return m.a(h), m.b(h), h @ m.w, h + x


@pytest.mark.parametrize(
    "body,swaps",
    [
        (lambda m, x: m.a(m.ln(x)), 1),
        (lambda m, x: m.b(m.ln(x)), 1),
        (lambda m, x: F.linear(F.layer_norm(x, (H,)), m.b.weight), 1),
        (lambda m, x: m.a(F.layer_norm(x, (H,), m.ln.weight)), 1),
        (keywords, 1),
        (aten_level, 1),
        (conv1d, 1),
        (lambda m, x: m.ln(x) @ m.a.weight.T + m.c, 1),
        (lambda m, x: torch.matmul(torch.layer_norm(x, [H]), m.w), 1),
        (shared, 3),
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
def test_every_way_to_write_it_is_swapped(body, swaps):
    eager, compiled, recorder = both_ways(Pieces(body), torch.randn(B, S, H))
    assert recorder.swaps == swaps and not recorder.reasons
    assert_same(eager, compiled)


def in_place_between(m, x):
    """What changes is not what LayerNorm reads; but a name does not tell, so such pairs stay."""
    other = x * 1.0
    h = m.ln(x)
    other.add_(1.0)
    return m.a(h) + other.sum()


def weight_changed_between(m, x):
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
        (in_place_between, "may change a tensor in place"),
        (weight_changed_between, "may change a tensor in place"),
        (lambda m, x: torch.addmm(m.c, m.ln(x).view(-1, H), m.w, beta=2), "beta is 2"),
        (lambda m, x: m.a(F.layer_norm(x, (S, H))), "over 2 axes"),
        (lambda m, x: torch.matmul(m.ln(x), m.w.expand(B, H, O)), "its weight has 3 axes"),
    ],
)
def test_what_only_looks_like_it_is_left_alone_with_a_reason(body, reason):
    eager, compiled, recorder = both_ways(Pieces(body), torch.randn(B, S, H))
    assert recorder.swaps == 0
    assert len(recorder.reasons) == 1 and reason in recorder.reasons[0]
    assert_same(eager, compiled)


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: m.a(F.rms_norm(x, (H,))),
        lambda m, x: m.ln(m.a(x.flip(-1)).repeat(1, 1, 4)[..., :H]),
        lambda m, x: m.a(x),
    ],
)
def test_a_linear_without_a_layer_norm_is_no_business_of_it(body):
    eager, compiled, recorder = both_ways(Pieces(body), torch.randn(B, S, H))
    assert recorder.swaps == 0 and not recorder.reasons
    assert_same(eager, compiled)


def test_an_input_that_changes_between_the_two():
    """At the place of the Linear the operator would read the changed values."""

    def body(m, x):
        x = x * 1.0
        h = m.ln(x)
        x.mul_(2.0).add_(x.flip(-1))
        return m.a(h)

    model, recorder = Pieces(body), Recorder()
    x = torch.randn(B, S, H)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=recorder)(x), model(x))
    assert recorder.swaps == 0 and "mul_ between the two may change a tensor in place" in recorder.reasons[0]


def test_a_change_before_the_pair_is_none_of_its_business():
    def body(m, x):
        x = x * 1.0
        x.add_(1.0)
        return m.a(m.ln(x))

    eager, compiled, recorder = both_ways(Pieces(body), torch.randn(B, S, H))
    assert recorder.swaps == 1
    assert_same(eager, compiled)


def test_batch_and_length_change_without_a_compilation_for_each():
    """dynamic=True hands a graph over twice, first with a symbolic eps; then one serves every size."""
    model = Pieces(shared)
    recorder = Recorder()
    compiled = torch.compile(model, backend=recorder, dynamic=True)
    graphs = []
    for rows in ((2, 3), (4, 5), (7, 2)):
        x = torch.randn(*rows, H)
        assert_same(results(model, [x]), results(compiled, [x], of=model))
        graphs.append(len(recorder.reports))
    assert graphs[0] == graphs[1] == graphs[2] <= 2


def test_two_models_and_the_same_one_twice():
    """Nothing is remembered between compilations."""
    for model in (Pieces(shared), Pieces(shared)):
        for _ in range(2):
            torch._dynamo.reset()
            eager, compiled, recorder = both_ways(model, torch.randn(B, S, H))
            assert recorder.swaps == 3
            assert_same(eager, compiled)


def test_without_gradients():
    model, recorder = Pieces(shared), Recorder()
    compiled = torch.compile(model, backend=recorder)
    x = torch.randn(B, S, H)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for a, b in zip(compiled(x), model(x), strict=True):
                torch.testing.assert_close(a, b)
    assert recorder.swaps >= 3


@pytest.mark.parametrize(
    ("switch", "name"),
    [(torch.no_grad, "_set_grad_enabled"), (lambda: torch.autocast("cpu", torch.bfloat16), "_exit_autocast")],
    ids=["no_grad", "autocast"],
)
def test_a_layer_norm_does_not_leave_the_mode_that_it_stands_in(switch, name):
    """A trunk without gradients under a head that learns: LayerNorm's parameters stay as they are."""

    def body(m, x):
        with switch():
            h = m.ln(x)
        return m.a(h)

    model, recorder = Pieces(body), Recorder()
    x = torch.randn(B, S, H)
    eager = model(x)
    eager.sum().backward()
    expected = {key: p.grad for key, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    output = torch.compile(model, backend=recorder)(x)
    output.sum().backward()
    torch.testing.assert_close(output, eager)
    for key, parameter in model.named_parameters():
        assert (parameter.grad is None) == (expected[key] is None), key
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[key])
    assert recorder.swaps == 0 and f"{name} between the two switches a mode" in recorder.reasons[0]


def test_a_frozen_layer_norm_gets_no_gradient():
    model = Pieces(lambda m, x: m.a(m.ln(x)))
    model.ln.requires_grad_(False)
    compiled = torch.compile(model, backend=Recorder())
    x = torch.randn(B, S, H, requires_grad=True)
    compiled(x).sum().backward()
    assert model.ln.weight.grad is None and model.a.weight.grad is not None and x.grad is not None


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_is_what_it_is_without_the_swap(inside):
    """The LayerNorm in float32, the product in bfloat16: rows of a large offset tell."""

    def body(m, x):
        with torch.autocast("cpu", torch.bfloat16) if inside else nullcontext():
            return m.a(m.ln(x))

    model, recorder = Pieces(body), Recorder("aot_eager")
    compiled = torch.compile(model, backend=recorder)
    x = torch.randn(B, S, H) + 100
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
        eager, ours = results(model, [x]), results(compiled, [x], of=model)
    assert recorder.swaps == 1 and recorder.reports[0].swaps[0].dtype == "bfloat16"
    for kind in (0, 1):
        for one, other in zip(ours[kind], eager[kind], strict=True):
            assert (one is None) == (other is None)
            if other is not None:
                assert one.dtype == other.dtype
                torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)


def test_a_checkpointed_region_is_a_graph_of_its_own():
    model = Pieces(lambda m, x: checkpoint(lambda t: m.a(m.ln(t)).tanh(), x, use_reentrant=False))
    recorder = Recorder("aot_eager")
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    x = torch.randn(B, S, H)
    assert_same(results(model, [x]), results(compiled, [x], of=model))
    assert recorder.swaps == 1


def test_what_the_operator_refuses_stays(monkeypatch):
    def refuse(*_):
        raise ValueError("H and W do not go together")

    monkeypatch.setattr(backend_module.Adder, "function", refuse)
    eager, compiled, recorder = both_ways(Pieces(conv1d), torch.randn(B, S, H))
    assert recorder.reasons == ["H and W do not go together"]
    assert_same(eager, compiled)


def test_inductor_compiles_the_rest(tmp_path, monkeypatch):
    """Its own options and modes go on to it; nothing of this backend's does."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = Pieces(lambda m, x: m.a(m.ln(x)).tanh())
    reports = []
    options = {"report": reports.append, "max_autotune": False}
    compiled = torch.compile(model, backend=mojo_workbook, options=options)
    x = torch.randn(B, S, H)
    assert_same(results(model, [x]), results(compiled, [x], of=model))
    assert [len(report.swaps) for report in reports] == [1]


# ---- The report, the options, the entry point ---------------------------------------------------------------


def test_report_names_layers_as_the_model_does(capfd, monkeypatch):
    monkeypatch.setenv(backend_module.REPORT, "1")
    model = nn.Sequential(nn.LayerNorm(H), nn.Linear(H, O), nn.LayerNorm(O), nn.Dropout(0.5), nn.Linear(O, 2))
    torch.compile(model, backend=mojo_workbook, options={"tail": "eager"})(torch.randn(B, S, H))
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        "mojo_workbook: 1 of 2 Linear layers after a LayerNorm swapped",
        "  swapped  1: 2x3 rows, 8 -> 6, float32",
        "  left     4: dropout is between LayerNorm and it",
    ]


def test_no_report_where_nobody_asks_and_where_there_is_nothing(capfd, monkeypatch):
    monkeypatch.delenv(backend_module.REPORT, raising=False)
    options: dict[str, Any] = {"tail": "eager"}
    torch.compile(Pieces(shared), backend=mojo_workbook, options=options)(torch.randn(B, S, H))
    torch.compile(nn.Linear(H, O), backend=mojo_workbook, options=options | {"report": True})(
        torch.randn(B, H)
    )
    assert "mojo_workbook" not in capfd.readouterr().err


def test_unknown_tail():
    with pytest.raises(Exception, match="tail 'llvm': choose one of inductor, aot_eager, eager"):
        torch.compile(Pieces(shared), backend=mojo_workbook, options={"tail": "llvm"})(torch.randn(B, S, H))


def test_without_a_compiler_the_rest_runs_uncompiled_and_one_line_says_so(monkeypatch, capfd):
    from torch._inductor import cpp_builder, exc

    def none():
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    backend_module.has_compiler.cache_clear()
    try:
        model = Pieces(lambda m, x: m.a(m.ln(x)))
        compiled = torch.compile(model, backend=mojo_workbook)
        for rows in (2, 5):
            x = torch.randn(rows, S, H)
            assert_same(results(model, [x]), results(compiled, [x], of=model))
    finally:
        backend_module.has_compiler.cache_clear()
    said = [line for line in capfd.readouterr().err.splitlines() if "no C++ compiler" in line]
    assert len(said) == 1


def test_the_name_works_without_an_import():
    points = importlib.metadata.entry_points(group="torch_dynamo_backends", name="mojo_workbook")
    assert [point.load() for point in points][:1] == [mojo_workbook]
    assert "mojo_workbook" in torch._dynamo.list_backends()


# ---- Attention ----------------------------------------------------------------------------------------------


class Attends(nn.Module):
    """Three attentions behind a LayerNorm and a Linear: causal with shared heads, with `options`, and of a tensor to itself."""

    def __init__(self, **options):
        super().__init__()
        self.ln, self.qkv, self.options = nn.LayerNorm(16), nn.Linear(16, 32), options

    def forward(self, x):
        q, k, v = self.qkv(self.ln(x)).split([16, 8, 8], -1)
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v))
        first = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        second = F.scaled_dot_product_attention(first, k, value=v, enable_gqa=True, **self.options)
        return F.scaled_dot_product_attention(second, second, second)


def attended(model, x, **options):
    """The output, the gradients of x and the parameters, and the report of a compiled model."""
    reports = []
    own = {"report": reports.append, "tail": "aot_eager", **options}
    compiled = torch.compile(model, backend="mojo_workbook", options=own, fullgraph=True)
    output = compiled(x)
    gradients = torch.autograd.grad(output.square().sum(), [x, *model.parameters()])
    (report,) = reports
    return [output, *gradients], report


@pytest.fixture
def takes_all(monkeypatch):
    """The operators take every attention without dropout, by the formula: there are no kernels on a CPU."""

    def explain(query, key=None, value=None, mask=None, dropout_p=0.0, **options):
        return "PyTorch's own operations: dropout" if dropout_p else "wgmma"

    monkeypatch.setattr(attention_layer, "explain", explain)


@pytest.mark.usefixtures("takes_all")
def test_attention_is_swapped_where_asked():
    model, x = Attends(), torch.randn(2, 5, 16, requires_grad=True)
    expected = model(x)
    expected = [expected, *torch.autograd.grad(expected.square().sum(), [x, *model.parameters()])]
    got, report = attended(model, x, attention=True)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)
    assert len(report.swaps) == 1 and len(report.attentions) == 3 and not report.attentions_left
    lines = report.lines()
    assert "mojo_workbook: 3 of 3 attentions swapped" in lines
    assert any(line.endswith("attention of [2, 4, 5, 4] to [2, 2, 5, 4], float32") for line in lines)
    for asked in ({}, {"attention": False}):
        torch._dynamo.reset()
        got, report = attended(model, x, **asked)
        assert not report.attentions and "attentions" not in "".join(report.lines()), "nobody asked, on a CPU"


@pytest.mark.usefixtures("takes_all")
def test_slices_of_keys_after_the_whole():
    """They have the strides of the whole, for which the first graph was made (pytorch#146377)."""
    query, key, value = torch.randn(3, 1, 2, 64, 8)
    options = {"attention": True, "tail": "aot_eager"}
    compiled = torch.compile(F.scaled_dot_product_attention, backend="mojo_workbook", options=options)
    for keys in (slice(64), slice(48), slice(16, 47)):
        given = query, key[:, :, keys], value[:, :, keys]
        torch.testing.assert_close(compiled(*given), F.scaled_dot_product_attention(*given))


@pytest.mark.parametrize(
    ("outputs", "dtype", "hopper", "swapped"),
    [
        (97, torch.bfloat16, True, 0),
        (97, torch.bfloat16, False, 1),
        (97, torch.float32, True, 1),
        (96, torch.bfloat16, True, 1),
        (95, torch.bfloat16, True, 1),
    ],
)
def test_a_wide_head_of_unaligned_rows_is_left_on_a_hopper(monkeypatch, outputs, dtype, hopper, swapped):
    """GPT-2's 50,257 classes: the kernels copy such rows, Inductor writes them with padding."""
    monkeypatch.setattr(backend_module, "is_hopper", lambda device: hopper)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, outputs)).to(dtype)
    x = torch.randn(4, 8, dtype=dtype)
    recorder = Recorder()
    got = torch.compile(model, backend=recorder)(x)
    assert recorder.swaps == swapped
    assert recorder.reasons == [
        "rows of 97 outputs fill no whole vectors, which Inductor pads at less cost"
    ] * (1 - swapped)
    torch.testing.assert_close(got, model(x), rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("takes_all")
def test_attention_is_swapped_without_being_asked_where_it_is_faster(monkeypatch):
    """On a GPU of the kind that was measured: what the measurements favour, and only if gradients are wanted."""
    monkeypatch.setattr(backend_module, "is_hopper", lambda device: True)
    monkeypatch.setattr(attention_layer, "takes_wgmma", lambda query: False)
    model, x = Attends(), torch.randn(2, 5, 16, requires_grad=True)
    _, report = attended(model, x)
    assert [why for _, why in report.attentions_left] == ["it is faster only in 16 bits on a Hopper"] * 3
    monkeypatch.setattr(
        attention_layer, "may_be_slower", lambda query, key, *_: "few" if query.shape[1] == 4 else None
    )
    torch._dynamo.reset()
    _, report = attended(model, x)
    assert [why for _, why in report.attentions_left] == ["few"] * 3 and not report.attentions
    monkeypatch.setattr(attention_layer, "may_be_slower", lambda *_: None)
    torch._dynamo.reset()
    _, report = attended(model, x)
    assert len(report.attentions) == 3
    torch._dynamo.reset()
    reports = []
    with torch.no_grad():
        torch.compile(
            model, backend="mojo_workbook", options={"report": reports.append, "tail": "aot_eager"}
        )(x)
    assert [why for _, why in reports[0].attentions_left] == [
        "without gradients PyTorch's is the faster one"
    ] * 3


def called(dtype=torch.bfloat16, *, heads=64, queries=512, keys=512, mask=None, dropout_p=0.0):
    """The arguments of `may_be_slower` for such a call."""
    query, key = (torch.empty(1, 2, length, heads, dtype=dtype, device="meta") for length in (queries, keys))
    return query, key, mask, dropout_p


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (called(), None),
        (called(torch.float16, heads=160, queries=4096), None),
        (called(torch.float32), "it is faster only in 16 bits on a Hopper"),
        (called(heads=60), "PyTorch's takes heads of 60 elements in less time"),
        (called(queries=1024, keys=1024, mask=torch.ones(1024)), None),
        (called(queries=1024, keys=1031, heads=128, mask=torch.ones(1024, 1031).bool()), None),
        (called(mask=torch.ones(512)), "it is measured from 1024 queries and keys on"),
        (called(mask=torch.ones(1)), "PyTorch's takes an attn_mask of rows of 1 elements in less time"),
        (called(mask=torch.ones(1001)), "PyTorch's takes an attn_mask of rows of 1001 elements in less time"),
        (
            called(heads=200, mask=torch.ones(512)),
            "PyTorch's takes attn_mask and heads of 200 elements in less time",
        ),
        (called(dropout_p=0.1), "with dropout_p it would draw other numbers than PyTorch's"),
        (called(heads=128), "PyTorch's takes heads of 128 elements in less time"),
        (called(keys=511), "it is measured from 512 queries and keys on"),
    ],
)
def test_which_attention_is_faster_than_pytorch_s(call, why, monkeypatch):
    monkeypatch.setattr(attention_layer, "takes_wgmma", lambda query: query.dtype.itemsize == 2)
    assert attention_layer.may_be_slower(*call) == why


def test_an_attention_that_is_swapped_unasked_is_faster_on_record(monkeypatch):
    """In every row of the record that the choice favours."""
    masks = {"padding": torch.ones(1024).bool(), "bool S x S": torch.ones(1024, 1024).bool()}
    masks |= {"bias": torch.ones(1024, 1024), "none": None, "causal": None}
    lengths = {"queries": 1024, "keys": 1024}
    monkeypatch.setattr(attention_layer, "takes_wgmma", lambda query: query.dtype.itemsize == 2)
    favoured = [
        row
        for row in record.rows("attention_options")
        if row["option"] in masks
        and attention_layer.may_be_slower(
            *called(getattr(torch, row["dtype"]), heads=int(row["d"]), mask=masks[row["option"]], **lengths)
        )
        is None
    ]
    assert {(row["option"], int(row["d"])) for row in favoured} == {
        (option, d)
        for option in masks
        for d in (64, 72, 128, 160)
        if d in (64, 160) or masks[option] is not None
    }
    assert max(float(row["ratio"]) for row in favoured) <= 1


@pytest.mark.usefixtures("takes_all")
def test_an_attention_that_the_workbook_refuses_stays_and_says_why():
    model, x = Attends(dropout_p=0.5), torch.randn(2, 5, 16, requires_grad=True)
    _, report = attended(model, x, attention=True)
    assert len(report.attentions) == 2
    ((_, why),) = report.attentions_left
    assert "dropout" in why and f"left     {report.attentions_left[0][0]}: {why}" in "".join(report.lines())
