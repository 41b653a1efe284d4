"""patch(model): a pair is computed by the kernels where the Linear is given what a LayerNorm has just returned, and nothing
that a model computes, holds or shows changes; and that it can be undone.

One test has the real kernels. The others count the pairs, which an autograd function in PyTorch computes in their place
from the same arguments: what may go wrong here is which tensors are taken for what, and where gradients go.
"""

import copy

import pytest
import torch
from patch_checks import (
    H,
    Named,
    O,
    Scaled,
    assert_same,
    assert_unchanged,
    fresh,
    outcome,
    seeded,
    sequential,
)
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from typed import loosely, present

from harness.nn import patch, patching

# ---- A model as it is written -------------------------------------------------------------------------------------


class Conv1D(nn.Module):
    """As GPT-2 has it: a Linear whose weight lies as [in, out]."""

    def __init__(self, out: int, features: int):
        super().__init__()
        self.nf = out
        self.weight, self.bias = nn.Parameter(torch.randn(features, out)), nn.Parameter(torch.randn(out))

    def forward(self, x):
        rows = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], -1)


def post_norm(block, x):
    """As BERT has it: three Linear layers and a residual read one LayerNorm."""
    h = block.norm(x)
    return block.out((block.q(h) * block.k(h)).tanh() + block.v(h)) + h


def attention_block(**children):
    layers = {name: nn.Linear(H, H) for name in ("q", "k", "v", "out")}
    return Named(post_norm, norm=nn.LayerNorm(H), **{**layers, **children})


def encoder(norm_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(H, 2, 16, dropout=0.0, norm_first=norm_first, batch_first=True)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: sequential(nn.GELU(), nn.LayerNorm(H), nn.Linear(H, O)), ["0 1", "3 4"]),
        (lambda: sequential(nn.LayerNorm(H, bias=False), nn.Linear(H, O, bias=False)), ["0 1", "2 3"]),
        (lambda: nn.Sequential(nn.LayerNorm(H, elementwise_affine=False), nn.Linear(H, O)), ["0 1"]),
        (lambda: sequential(nn.ReLU(), nn.Identity()), ["0 1"]),
        (attention_block, ["norm q", "norm k", "norm v"]),
        (lambda: encoder(norm_first=True), ["norm2 linear1"]),
        (lambda: encoder(norm_first=False), ["norm1 linear1"]),
        (lambda: nn.Sequential(nn.LayerNorm(H), nn.Dropout(0.0), nn.Linear(H, O)).eval(), ["0 2"]),
    ],
)
def test_every_linear_that_reads_a_layernorm_is_swapped(pairs, make, expected):
    model = fresh(make())
    plain, done = copy.deepcopy(model), patch(model)
    assert done.swapped == [] and pairs == []
    x = seeded(2, 3, H).requires_grad_()
    use = lambda m, x: m(x)  # noqa: E731
    assert_same(outcome(model, use, x), outcome(plain, use, x))
    assert sorted(" ".join(pair) for pair in done.swapped) == sorted(expected)
    assert pairs == ["fast"] * len(expected)


def test_a_linear_of_gpt2_that_keeps_its_weight_turned(pairs, monkeypatch):
    monkeypatch.setitem(patching.sys.modules, "transformers.pytorch_utils", type("", (), {"Conv1D": Conv1D}))
    assert_unchanged(nn.Sequential(nn.LayerNorm(H), Conv1D(O, H)))
    assert pairs == ["fast"] * 2


def test_a_class_of_that_name_is_not_taken_for_it(pairs):
    assert_unchanged(nn.Sequential(nn.LayerNorm(H), Conv1D(O, H)))
    assert pairs == []


# ---- What reads a LayerNorm beside its Linear, or comes between ----------------------------------------------------


def block(m, x):
    """A class of the user's own whose names are those of a well-known one."""
    h = m.norm1(x)
    return m.qkv(h) + h.tanh() * m.qkv(m.norm1(h))


def before_it_is_read(change):
    """Something happens between the LayerNorm and the Linear: to (model, x, what the LayerNorm returned)."""

    def use(m, x):
        x = x * 1
        h = m[0](x)
        change(m, x, h)
        return m[1](h)

    return use


def without_grad(function, *arguments):
    with torch.no_grad():
        function(*arguments)


READERS = {
    "the LayerNorm alone": lambda m, x: m[0](x),
    "a slice with the LayerNorm": lambda m, x: m[:1](x),
    "a slice with both": lambda m, x: m[:2](x),
    "a residual": lambda m, x: m[1](m[0](x)) + m[0](x),
    "a residual of the same output": lambda m, x: (lambda h: m[1](h) + h)(m[0](x)),
    "a residual first": lambda m, x: (lambda h: h.exp() + m[1](h))(m[0](x)),
    "the layers by hand": lambda m, x: m[1](m[0](x)),
    "something between": lambda m, x: m[1](m[0](x).relu()),
    "a view between": lambda m, x: m[1](m[0](x).view(-1, H)),
    "a part of it": lambda m, x: m[1](m[0](x)[:, :2]),
    "the Linear alone": lambda m, x: m[1](x),
    "the Linear twice": lambda m, x: m[1](m[1](m[0](x))),
    "both twice": lambda m, x: m(m(x)),
    "detached": lambda m, x: m[1](m[0](x).detach()),
    "two inputs, read in the other order": lambda m, x: (lambda a, b: m[1](b) - m[1](a) * 2)(m[0](x), m[0](-x.exp())),
    "stacked": lambda m, x: m[1](torch.stack([m[0](x), m[0](2 * x)])),
    "an output changed in place": before_it_is_read(lambda m, x, h: h.mul_(3)),
    "an output changed in place without grad": before_it_is_read(lambda m, x, h: without_grad(h.detach().mul_, 3)),
    "an output changed through a view": before_it_is_read(lambda m, x, h: h[0].add_(1)),
    "an output that is detached in place": before_it_is_read(lambda m, x, h: h.detach_()),
    "an output with a hook": before_it_is_read(lambda m, x, h: h.register_hook(lambda g: 3 * g)),
    "an output whose hook is gone": before_it_is_read(lambda m, x, h: h.register_hook(lambda g: 3 * g).remove()),
    "a copy": lambda m, x: m[1](m[0](x).clone()),
    "the same by another name": lambda m, x: m[1](m[0](x).contiguous().to(x.dtype)),
    "a hook on the input": before_it_is_read(lambda m, x, h: x.register_hook(lambda g: 3 * g)),
    "no grad for the LayerNorm": lambda m, x: m[1](torch.no_grad()(m[0])(x)),
    "no grad for the Linear": lambda m, x: m[0](x) + torch.no_grad()(m[1])(m[0](x)),
    "no grad, then a leaf": lambda m, x: m[1](torch.no_grad()(m[0])(x).requires_grad_()),
    "gradients of gradients of others": lambda m, x: m(x) + torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)[0],
}  # fmt: skip
"""Uses of LayerNorm -> Linear that a patch must not change."""


@pytest.mark.parametrize("name", READERS)
def test_who_else_reads_it(pairs, name):
    assert_unchanged(sequential(), READERS[name])


MODELS = {
    "a Linear twice in a Sequential": lambda: (lambda lin: sequential(lin, nn.ReLU(), lin))(nn.Linear(H, H)),
    "a LayerNorm twice": lambda: (lambda ln: nn.Sequential(ln, nn.Linear(H, H), ln, nn.GELU()))(nn.LayerNorm(H)),
    "a Linear of two Sequentials": lambda: (
        lambda lin: nn.Sequential(nn.Sequential(nn.LayerNorm(H), lin), nn.Sequential(nn.ReLU(), lin))
    )(nn.Linear(H, H)),
    "a Linear behind two LayerNorms": lambda: (
        lambda lin: nn.Sequential(nn.LayerNorm(H), lin, nn.LayerNorm(H, eps=0.5), lin)
    )(nn.Linear(H, H)),
    "a subclass": lambda: nn.Sequential(Scaled(H), nn.Linear(H, H)),
    "names of a well-known block": lambda: Named(block, norm1=nn.LayerNorm(H), qkv=nn.Linear(H, H)),
    "a wide LayerNorm": lambda: nn.Sequential(nn.LayerNorm([3, H]), nn.Linear(H, O)),
    "no rows of the output": lambda: nn.Sequential(nn.LayerNorm(H), nn.Linear(H, 0)),
    "a parametrized Linear": lambda: nn.Sequential(nn.LayerNorm(H), parametrizations.weight_norm(nn.Linear(H, H))),
    "a low-rank addition": lambda: Named(
        lambda m, x: (lambda h: m.base(h) + m.b(m.a(h)))(m.norm(x)),
        norm=nn.LayerNorm(H), base=nn.Linear(H, O).requires_grad_(False), a=nn.Linear(H, 2), b=nn.Linear(2, O),
    ),
    "a frozen LayerNorm": lambda: nn.Sequential(nn.LayerNorm(H).requires_grad_(False), nn.Linear(H, O)),
    "a frozen Linear": lambda: nn.Sequential(nn.LayerNorm(H), nn.Linear(H, O).requires_grad_(False)),
    "all frozen": lambda: sequential().requires_grad_(False),
    "an attention block": attention_block,
    "a LayerNorm at the end": lambda: sequential(nn.LayerNorm(H)),
}  # fmt: skip


@pytest.mark.parametrize("wanted", [True, False], ids=["dx", "no dx"])
@pytest.mark.parametrize("name", MODELS)
def test_modules_shared_derived_frozen(pairs, name, wanted):
    assert_unchanged(MODELS[name](), x=seeded(2, 3, H).requires_grad_(wanted))


def test_an_input_changed_in_place_before_the_linear_reads(pairs):
    """The gradient is refused then, by torch itself; the values are right."""
    model = fresh(sequential())
    plain = copy.deepcopy(model)
    patch(model)
    use = before_it_is_read(lambda m, x, h: x.add_(1))
    x = seeded(2, 3, H)
    with torch.no_grad():
        assert torch.equal(use(model, x), use(plain, x))
    for m in (model, plain):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            use(m, x).sum().backward()
    frozen = [m.requires_grad_(False) for m in (model, plain)]
    assert torch.equal(*(use(m, x) for m in frozen))
    assert pairs == []


def test_parameters_changed_before_the_linear_reads(pairs):
    def change(m, x, h):
        with torch.no_grad():
            m[0].weight.mul_(1.5)
            m[0].bias.add_(1)
            m[1].weight.add_(0.1)

    model = fresh(sequential())
    plain = copy.deepcopy(model)
    patch(model)
    with torch.no_grad():
        for use in (before_it_is_read(change), lambda m, x: m(x)):
            assert_same(
                [use(model, seeded(3, H).fill_(2).cumsum(1))], [use(plain, seeded(3, H).fill_(2).cumsum(1))]
            )
    assert len(pairs) == 1


def test_gradients_go_where_they_went_when_the_layernorm_ran(pairs):
    def use(m, x):
        m[0].requires_grad_(True)
        return before_it_is_read(lambda m, x, h: m[0].requires_grad_(False))(m, x)

    assert_unchanged(sequential(), use)
    assert pairs == []


def test_an_input_detached_in_place_is_refused_by_torch_as_ever(pairs):
    model = fresh(sequential())
    patch(model)
    with pytest.raises(RuntimeError, match="detached in-place"):
        outcome(model, before_it_is_read(lambda m, x, h: x.detach_()), seeded(2, H).requires_grad_())


def test_a_gradient_that_is_kept_at_the_output(pairs):
    gradients = []
    for m in (fresh(sequential()), fresh(sequential())):
        if gradients:
            patch(m)
        h = m[0](seeded(2, H, generator=torch.Generator().manual_seed(3)))
        h.retain_grad()
        m[1](h).square().sum().backward()
        gradients.append(h.grad)
    assert_same(*([g] for g in gradients))


# ---- What a patched model shows, the report, undo -----------------------------------------------------------------


def test_a_patched_model_looks_as_before():
    model, plain = sequential(nn.GELU()), sequential(nn.GELU())
    parameters = [id(p) for p in model.parameters()]
    patch(model)
    assert repr(model) == repr(plain)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [id(p) for p in model.parameters()] == parameters
    assert isinstance(model[0], nn.LayerNorm) and isinstance(model[1], nn.Linear)
    assert model.load_state_dict(plain.state_dict()).missing_keys == []


def test_undo_puts_everything_back(pairs):
    model = fresh(sequential())
    before = [(type(m), dict(vars(m))) for m in model.modules()]
    x, use = seeded(2, H).requires_grad_(), lambda m, x: m(x)
    expected, done = outcome(model, use, x), patch(model)
    model(x)
    done.undo()
    done.undo()
    assert [(type(m), dict(vars(m))) for m in model.modules()] == before
    for mine, other in zip(outcome(model, use, x), expected, strict=True):
        assert torch.equal(present(mine), present(other))
    assert pairs == ["fast"]
    again = patch(model)
    done.undo()
    assert len(again.linears) == 1 and isinstance(model[1], patching.Taking)


def test_undo_below_a_parametrization(pairs):
    model = fresh(sequential())
    done = patch(model)
    parametrizations.weight_norm(model[1])
    done.undo()
    parametrize.remove_parametrizations(model[1], "weight")
    assert [type(m) for m in model] == [nn.LayerNorm, nn.Linear]


def test_twice_is_refused():
    model = sequential()
    done = patch(model)
    with pytest.raises(ValueError, match="it is patched already"):
        patch(model)
    done.undo()
    assert len(patch(model).linears) == 1


def test_what_is_left_alone_says_why(pairs):
    hooked, own = sequential(), sequential()
    hooked[0].register_forward_hook(lambda m, a, out: None)
    hooked[1].register_full_backward_hook(lambda m, i, o: None)
    own[1].forward = lambda x: x
    model = nn.ModuleDict(
        {
            "plain": sequential(),
            "alone": nn.LayerNorm(5),
            "hooked": hooked,
            "own": own,
            "axes": nn.LayerNorm([2, H]),
            "derived": Scaled(H),
            "normed": parametrizations.weight_norm(nn.Linear(H, H)),
        }
    )
    done = patch(model)
    assert dict(done.left) == {
        "alone": "no Linear layer of the model reads 5 features",
        "hooked.0": "it has hooks",
        "hooked.1": "it has hooks",
        "own.1": "it has a forward of its own",
        "axes": "it normalises 2 axes, [2, 8]",
        "derived": "it is no LayerNorm, but a subclass, Scaled",
        "normed": "it has parametrizations",
    }
    assert done.layernorms == ["plain.0", "own.0"] and done.linears == ["plain.1"]
    first = "patched: LayerNorm 2, Linear 1; left alone: 7; pairs computed so far: "
    assert done.report.splitlines()[0] == first + "0"
    model["plain"](torch.randn(2, H))
    assert done.report.splitlines()[:3] == [
        first + "1",
        "  swapped  plain.0 -> plain.1",
        "  left     alone: no Linear layer of the model reads 5 features",
    ]


def test_no_module_is_refused():
    with pytest.raises(TypeError, match=r"model: expected nn\.Module, got list"):
        loosely(patch)([nn.LayerNorm(H)])


def test_an_unknown_algorithm_is_refused_before_anything_changes():
    model = sequential()
    with pytest.raises(
        ValueError, match="algorithm: expected 'unfused' or 'fused' or 'fast' or 'pairs', got 'nope'"
    ):
        patch(model, algorithm="nope")
    assert [type(m) for m in model] == [nn.LayerNorm, nn.Linear]


def test_the_algorithm_reaches_the_kernels(pairs):
    model = fresh(sequential())
    patch(model, algorithm="unfused")
    model(seeded(2, H))
    assert pairs == ["unfused"]


def median_error(ours, exact):
    """The median over the first axis of each part's relative error."""
    parts = (ours.double() - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
    return parts.median()


@pytest.mark.compiler
def test_the_real_kernels():
    """Values and every gradient as near to float64's as PyTorch's own, with a LayerNorm that three Linear layers and a sum read.

    By the median over 32 inputs: the error of a single one is the luck of a few roundings.
    """
    model = fresh(nn.Sequential(sequential(nn.GELU()), attention_block()))

    def results(m, dtype):
        torch.manual_seed(0)
        batches = [(seeded(2, 5, H).to(dtype).requires_grad_(), seeded(2, 5, H).to(dtype)) for _ in range(32)]
        outputs = [m(x) for x, _ in batches]
        gradients = [
            torch.autograd.grad(output, (x, *m.parameters()), weights)
            for output, (x, weights) in zip(outputs, batches, strict=True)
        ]
        return [torch.stack(outputs).detach(), *map(torch.stack, zip(*gradients, strict=True))]

    truth = results(model, torch.float64)
    plain = results(model.float(), torch.float32)
    done = patch(model)
    for ours, theirs, exact in zip(results(model, torch.float32), plain, truth, strict=True):
        far, near = (median_error(one, exact) for one in (ours, theirs))
        assert far <= 2 * near + torch.finfo(torch.float32).eps
    assert len(done.swapped) == 4
