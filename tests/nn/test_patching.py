"""patch(model): a pair is computed by the kernels where the Linear is given what a LayerNorm has just returned, and nothing
that a model computes, holds or shows changes; and that it can be undone.

One test has the real kernels. The others count the pairs, which an autograd function in PyTorch computes in their place
from the same arguments: what may go wrong here is which tensors are taken for what, and where gradients go.
"""

import copy
import functools
import io
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from harness.nn import patch, patching

H, O = 8, 6
seeded = functools.partial(torch.randn, dtype=torch.float64)


class Pair(torch.autograd.Function):
    """Both layers, from the LayerNorm's input."""

    @staticmethod
    def function(x, gamma, beta, weight, bias, eps):
        return F.linear(F.layer_norm(x, x.shape[-1:], gamma, beta, eps), weight, bias)

    @staticmethod
    def forward(ctx, *arguments):
        *tensors, ctx.eps = arguments
        ctx.save_for_backward(*tensors)
        # As the layer, whose output is no view: some PyTorch's linear returns one, which nobody could change in place.
        return Pair.function(*arguments).clone()

    @staticmethod
    def backward(ctx, grad_output):
        own = [None if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            output = Pair.function(*own, ctx.eps)
        gradients = iter(torch.autograd.grad(output, [t for t in own if t is not None], grad_output))
        return *(None if t is None else next(gradients) for t in own), None


@pytest.fixture
def pairs(monkeypatch):
    """The algorithms of the pairs that were computed, one after the other; no kernel is compiled."""
    calls = []

    def compute(*arguments, algorithm, memory):
        calls.append(algorithm)
        return Pair.apply(*arguments)

    monkeypatch.setattr(patching, "fused_layernorm_linear", compute)
    return calls


def fresh(module: nn.Module) -> nn.Module:
    """In float64, with random parameters: LayerNorms begin with ones and zeros, behind which mistakes hide."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.copy_(seeded(parameter.shape, generator=generator))
    return module


def sequential(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(H), nn.Linear(H, H), *more)


def outcome(model: nn.Module, use, x: torch.Tensor) -> list[torch.Tensor | None]:
    """What `use(model, x)` returns, and the gradients of x and every parameter."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_(x.requires_grad)
    output = use(model, x)
    if output.requires_grad:
        (output * output.detach().cos()).sum().backward()
    return [output.detach(), x.grad, *(p.grad for p in model.parameters())]


def assert_same(ours, theirs, **limits):
    """The same numbers, to rounding in float64, and gradients in the same places."""
    assert [t is None for t in ours] == [t is None for t in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        if other is not None:
            torch.testing.assert_close(mine, other, **(limits or {"rtol": 1e-9, "atol": 1e-9}))


def assert_unchanged(model: nn.Module, use=lambda m, x: m(x), x: torch.Tensor | None = None):
    """A patched model does what its copy does that is not patched."""
    x = seeded(2, 3, H, generator=torch.Generator().manual_seed(6)).requires_grad_() if x is None else x
    model = fresh(model)
    plain = copy.deepcopy(model)
    patch(model)
    for _ in range(2):
        assert_same(outcome(model, use, x), outcome(plain, use, x))


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


class Named(nn.Module):
    """Any children, and a forward over them."""

    def __init__(self, forward, **children):
        super().__init__()
        self.run = forward
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x):
        return self.run(self, x)


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


class Scaled(nn.LayerNorm):
    """A LayerNorm with a forward of its own."""

    def forward(self, input):
        return 2 * super().forward(input).tanh()


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
    "a wide LayerNorm": lambda: nn.Sequential(nn.LayerNorm((3, H)), nn.Linear(H, O)),
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


# ---- Changes after the patch --------------------------------------------------------------------------------------


def hook_all(m):
    m.handles = [
        nn.modules.module.register_module_forward_hook(
            lambda m, a, out: 2 * out if type(m) is not nn.Sequential else None
        )
    ]


def parametrized(*layers):
    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    for layer in layers:
        parametrize.register_parametrization(layer, "weight", Double())


def replaced(m):
    m[1].weight = nn.Parameter(seeded(O, H, generator=torch.Generator().manual_seed(2)))
    m[1].bias = None


CHANGES = {
    "a hook that changes the LayerNorm's output": lambda m: m[0].register_forward_hook(lambda m, a, out: out * 3),
    "a hook that changes it in place": lambda m: m[0].register_forward_hook(lambda m, a, out: out.mul_(3)),
    "a hook before the Linear": lambda m: m[1].register_forward_pre_hook(lambda m, a: (a[0].relu(),)),
    "a hook before the LayerNorm": lambda m: m[0].register_forward_pre_hook(lambda m, a: (a[0].exp(),)),
    "a hook on the Linear's output": lambda m: m[1].register_forward_hook(lambda m, a, out: out * a[0].sum()),
    "a hook on the LayerNorm's gradient": lambda m: m[0].register_full_backward_hook(lambda m, i, o: (3 * i[0],)),
    "one before it": lambda m: m[0].register_full_backward_pre_hook(lambda m, o: (3 * o[0],)),
    "a hook on the Linear's gradient": lambda m: m[1].register_full_backward_hook(lambda m, i, o: (3 * i[0],)),
    "a hook of all modules": hook_all,
    "a hook of all that only looks": lambda m: setattr(
        m, "handles", [nn.modules.module.register_module_forward_hook(lambda m, a, out: None)]
    ),
    "parametrizations of the LayerNorm": lambda m: parametrized(m[0]),
    "parametrizations of the Linear": lambda m: parametrized(m[1]),
    "one bias for all": lambda m: setattr(m[1], "bias", nn.Parameter(m[1].bias.data[:1])),
    "no output": lambda m: m.__setitem__(1, nn.Linear(H, 0, dtype=torch.float64)),
    "another weight": replaced,
    "the Linear gone": lambda m: m.__setitem__(1, nn.Identity()),
    "another Linear": lambda m: m.__setitem__(1, nn.Linear(H, 5, dtype=torch.float64)),
    "another LayerNorm": lambda m: m.__setitem__(0, nn.LayerNorm(H, eps=0.1, dtype=torch.float64)),
    "another module between": lambda m: m.insert(1, nn.ReLU()),
    "another eps": lambda m: setattr(m[0], "eps", 0.5),
    "frozen": lambda m: m[0].requires_grad_(False),
    "another dtype": lambda m: m.float(),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("after", [True, False], ids=["after the patch", "before it"])
def test_a_model_that_is_changed(pairs, name, after):
    torch.manual_seed(0)
    model, x = fresh(sequential()), seeded(4, H)
    use, plain = lambda m, x: m(x.to(m[0].bias.dtype)), copy.deepcopy(model)
    x, both = x.requires_grad_(), (model, plain)
    for m in both:
        if m is model and after:
            patch(m)
        torch.manual_seed(1)
        CHANGES[name](m)
        if m is model and not after:
            patch(m)
    limits = {"rtol": 1e-5, "atol": 1e-5} if name == "another dtype" else {}
    try:
        assert_same(*(outcome(m, use, x) for m in both), **limits)
    finally:
        for handle in (h for m in both for h in vars(m).get("handles", [])):
            handle.remove()
    if any(word in name for word in ("hook", "before", "parametrizations", "bias for all", "no output")):
        assert pairs == []


def test_what_stays_swapped_after_a_hook_is_gone(pairs):
    model = fresh(sequential())
    patch(model)
    handle = model[0].register_forward_hook(lambda m, a, out: None)
    model(seeded(2, H))
    assert pairs == []
    handle.remove()
    model(seeded(2, H))
    assert pairs == ["fast"]


# ---- torch's modes and transforms ---------------------------------------------------------------------------------


def through_checkpoint(m, x, reentrant):
    return checkpoint(m, x, use_reentrant=reentrant)


def with_half_the_parameters(m, x):
    return torch.func.functional_call(m, {name: p * 0.5 for name, p in m.named_parameters()}, (x,))


def derivative(m, x):
    return torch.func.grad(lambda t: m(t).sin().sum())(x)


def of_each(m, x):
    return torch.func.vmap(m)(x)


def tangent(m, x):
    return torch.func.jvp(m, (x,), (x.detach().cos(),))[1]


def dual(m, x):
    with torch.autograd.forward_ad.dual_level():
        pair = torch.autograd.forward_ad.make_dual(x, x.detach().cos())
        return torch.autograd.forward_ad.unpack_dual(m(pair)).tangent


def on_replicas(m, x):
    """What DataParallel does, on the one device that there is."""
    replicas = [m._replicate_for_data_parallel() for _ in range(2)]
    for replica in replicas:
        for name, child in list(m.named_children()):
            copied = child._replicate_for_data_parallel()
            for key, parameter in child._parameters.items():
                setattr(copied, key, parameter if parameter is None else parameter * 2)
            setattr(replica, name, copied)
    return torch.cat([replica(part) for replica, part in zip(replicas, x.chunk(2), strict=True)])


def saved_elsewhere(m, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return m(x)


def with_device(m, x):
    with torch.device("cpu"):
        return m(x)


def doubled(m, x):
    class Twice(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            return result * 2 if function is F.layer_norm else result

    with Twice():
        return m(x)


WAYS = {
    "checkpoint": (lambda m, x: through_checkpoint(m, x, False), 4),
    "reentrant checkpoint": (lambda m, x: through_checkpoint(m, x, True), 4),
    "functional_call": (with_half_the_parameters, 2),
    "a checkpoint from between the two": (lambda m, x: through_checkpoint(m[1:], m[0](x), False), 0),
    "a reentrant one": (lambda m, x: through_checkpoint(m[1:], m[0](x), True), 2),
    "replicas": (on_replicas, 4),
    "hooks on what is saved": (saved_elsewhere, 2),
    "no_grad": (lambda m, x: torch.no_grad()(m)(x), 2),
    "inference_mode": (lambda m, x: torch.inference_mode()(m)(x).clone(), 0),
    "func.grad": (derivative, 0),
    "func.vmap": (of_each, 0),
    "func.jvp": (tangent, 0),
    "forward-mode": (dual, 0),
    "a mode over functions": (doubled, 0),
    "the default device": (with_device, 2),
}


@pytest.mark.parametrize("name", WAYS)
def test_modes_and_transforms(pairs, name):
    use, expected = WAYS[name]
    assert_unchanged(sequential(nn.GELU(), nn.Linear(H, O)), use)
    assert len(pairs) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_is_left_to_torch(pairs, dtype):
    """Torch normalises in float32 there what the kernels would round to 16 bits first."""
    model = fresh(sequential()).float()
    plain, x = copy.deepcopy(model), (seeded(4, H) + 100).to(dtype).requires_grad_()
    patch(model)
    use = torch.autocast("cpu", torch.bfloat16)(lambda m, x: m(x).float())
    for mine, other in zip(outcome(model, use, x), outcome(plain, use, x), strict=True):
        assert torch.equal(mine, other)
    assert pairs == []


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_the_layers_are_torch_s(pairs, backend):
    """Also where a graph breaks between the two, and one of them runs uncompiled."""

    def broken(m, x):
        h = m.norm(x)
        torch._dynamo.graph_break()
        return m.linear(h) * 2

    for make in (sequential, lambda: Named(broken, norm=nn.LayerNorm(H), linear=nn.Linear(H, O))):
        torch._dynamo.reset()
        assert_unchanged(make(), lambda m, x: torch.compile(m, backend=backend)(x))
    assert pairs == []
    model = fresh(sequential())
    plain, x = copy.deepcopy(model), seeded(2, H).requires_grad_()
    patch(model)
    half = lambda m, x: m[1](torch.compile(m[0], backend=backend)(x))  # noqa: E731
    other = lambda m, x: torch.compile(m[1], backend=backend)(m[0](x))  # noqa: E731
    for use in (half, other):
        assert_same(outcome(model, use, x), outcome(plain, use, x))
    assert pairs == []


def test_a_graph_of_functions(pairs):
    """`torch.fx` and `torch.jit.trace` see the layers that are there."""
    model = fresh(sequential())
    x = seeded(2, H)
    expected, _ = model(x), patch(model)
    graph = torch.fx.symbolic_trace(model)
    assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
    traced = torch.jit.trace(model, x, check_trace=False)
    assert torch.equal(traced(x), expected) and "layer_norm" in str(traced.inlined_graph)
    assert pairs == []


# ---- Copies, pickles, training, threads ---------------------------------------------------------------------------


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": saved,
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_patched_and_their_own(pairs, name):
    model = fresh(sequential())
    plain, done = copy.deepcopy(model), patch(model)
    other = COPIES[name](model)
    done.undo()
    with torch.no_grad():
        for m in (other, plain):
            m[0].weight.mul_(2)
            m[1].bias.add_(1)
    x, use = seeded(3, H).requires_grad_(), lambda m, x: m(x)
    assert_same(outcome(other, use, x), outcome(plain, use, x))
    assert pairs == ["fast"] and done.swapped == []
    with pytest.raises(ValueError, match="it is patched already"):
        patch(other)


def test_a_shallow_copy_has_the_parameters_that_it_is_given(pairs):
    model = fresh(sequential())
    patch(model)
    other = nn.Sequential(*(copy.copy(layer) for layer in model))
    other[0]._parameters = {"weight": None, "bias": None}
    x = seeded(3, H).requires_grad_()
    expected = F.linear(F.layer_norm(x, (H,)), model[1].weight, model[1].bias)
    assert_same([other(x)], [expected])
    assert pairs == ["fast"]


def test_what_a_layernorm_returned_is_an_ordinary_tensor(pairs):
    model = fresh(sequential())
    x = seeded(3, H)
    expected, _ = model[0](x), patch(model)
    h = model[0](x)
    assert type(h) is torch.Tensor and not vars(h) and torch.equal(h, expected)
    file = io.BytesIO()
    torch.save(h, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), h)
    assert str(h) == str(expected) and h.detach().numpy().tolist() == expected.tolist()


def test_nothing_is_kept_once_an_output_is_gone(pairs):
    model = fresh(sequential())
    patch(model)
    before = set(patching.origins)
    model(seeded(3, H))
    h = model[0](seeded(3, H))
    assert set(patching.origins) - before == {id(h)}
    h.square().sum().backward()
    del h
    assert set(patching.origins) <= before


def test_autograd_keeps_no_output_of_a_swapped_layernorm(pairs):
    model = fresh(sequential())
    kept = []
    x = seeded(50, H).requires_grad_()
    for patched in (False, True):
        if patched:
            patch(model)
        kept.append({})
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept[-1].setdefault(t.data_ptr(), t), lambda t: t
        ):
            y = model(x)
        y.sum().backward()
    wide = [sum(t.shape == x.shape for t in tensors.values()) for tensors in kept]
    assert wide == [2, 1]


def test_trained_as_if_it_were_not_patched(pairs):
    torch.manual_seed(0)
    model = fresh(sequential(nn.GELU(), nn.LayerNorm(H), nn.Linear(H, H)))
    plain = copy.deepcopy(model)
    patch(model)
    losses = []
    for m in (model, plain):
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.05, foreach=False)
        losses.append([])
        for step in range(6):
            x = seeded(16, H, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            loss = (m(x) - x.sin()).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    torch.testing.assert_close(*losses, rtol=1e-9, atol=0)
    assert losses[0][-1] < losses[0][0] and len(pairs) == 12


def test_several_threads_keep_their_outputs_apart(pairs):
    model = fresh(sequential())
    plain = copy.deepcopy(model)
    patch(model)
    wrong = []

    def work(seed):
        for step in range(30):
            x = seeded(3, H, generator=torch.Generator().manual_seed(100 * seed + step))
            if not torch.allclose(model(x), plain(x)):
                wrong.append((seed, step))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and len(pairs) == 120


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
        assert torch.equal(mine, other)
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
            "axes": nn.LayerNorm((2, H)),
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
        patch([nn.LayerNorm(H)])


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
