"""A patched model in use: changed after the patch, in torch's modes and transforms, copied, pickled, trained, in threads."""

import copy
import io
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from patch_checks import H, Named, O, assert_same, assert_unchanged, fresh, outcome, seeded, sequential
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from typed import present

from harness.nn import patch, patching

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
        assert torch.equal(present(mine), present(other))
    assert pairs == []


@pytest.mark.long
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
    traced: Any = torch.jit.trace(model, x, check_trace=False)
    assert torch.equal(traced(x), expected) and "layer_norm" in str(traced.inlined_graph)
    assert pairs == []


# ---- Copies, pickles, training, threads ---------------------------------------------------------------------------


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "torch.save": saved}


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_patched_and_their_own(pairs, name):
    model = fresh(sequential())
    plain, done = copy.deepcopy(model), patch(model)
    other = COPIES[name](model)
    done.undo()
    with torch.no_grad():
        for m in (other, plain):
            m.get_parameter("0.weight").mul_(2)
            m.get_parameter("1.bias").add_(1)
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
    expected = F.linear(
        F.layer_norm(x, (H,)), *(model.get_parameter(f"1.{name}") for name in ("weight", "bias"))
    )
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
