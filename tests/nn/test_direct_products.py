"""The direct way where torch multiplies: which products are torch's, and weights that lie transposed.

No test needs a GPU: `direct_module.py` stands in for the built module.
"""

import math

import pytest
import torch
from direct_module import DTYPES, WAYS, bits, forget_plans
from layer_checks import (
    EPS,
    ROWS,
    H,
    O,
    assert_as_good_as_torch,
    assert_near,
    assert_only_needed_gradients,
    make_inputs,
    output_and_gradients,
    plain_torch,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from typed import loosely, present

from harness.nn import autograd, layernorm_direct, layernorm_plan, layers
from harness.nn.layernorm_plan import LIBRARY, OWN, PADDED
from harness.nn.layers import LayerNormLinear

fused_layernorm_linear = loosely(layers.fused_layernorm_linear)


def test_the_first_plain_call_of_every_plan_launches_what_a_graph_will(module, chosen, monkeypatch):
    """Also of a plan that takes the place in memory of one that is no longer in use."""
    monkeypatch.setattr(layernorm_direct, "is_capturing", lambda: False)
    chosen(OWN, OWN, OWN, graph=(LIBRARY, OWN, OWN))
    for rows in range(2, 12):
        for parts in (["forward_rows", "forward"], ["forward"]):
            module.calls.clear()
            fused_layernorm_linear(*make_inputs(torch.float32, (rows,)))
            assert [call[0] for call in module.calls] == parts, rows
        forget_plans()


@pytest.mark.parametrize("rows", [ROWS, (4,), (2, 1, 3, 2)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_torch_between_the_rows(module, library, no_operator, dtype, rows):
    assert_as_good_as_torch(fused_layernorm_linear, make_inputs(dtype, rows))
    parts = [call[0] for call in module.calls]
    assert parts == (["forward_rows", "backward"] if dtype.itemsize >= 4 else ["forward", "backward"])
    few = 64 * (math.prod(rows) <= O)
    assert module.calls[-1][2] == (2 + 4 + 8 + 16 + 32 + few if dtype.itemsize >= 4 else 15)


@pytest.mark.parametrize(
    ("rows", "hopper", "precision", "dtype", "elements", "transposed"),
    [
        (16, True, "tf32", torch.float32, H * O, True),
        (16, True, "tf32", torch.float32, H * O + 1, False),
        (16, True, "ieee", torch.float32, H * O, False),
        (16, False, "tf32", torch.float32, H * O, False),
        (15, True, "tf32", torch.float32, H * O, False),
        (16, True, "tf32", torch.float64, H * O, False),
        (12, True, "tf32", torch.float32, H * O, False),
        (4, True, "tf32", torch.float32, H * O, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("lies", ["row by row", "transposed"])
def test_tf32_on_hopper_multiplies_dW_along_the_sum(
    module, library, no_operator, monkeypatch, rows, hopper, precision, dtype, elements, transposed, lies
):
    """ln_out transposed, but for rows that the library's loads do not divide, small products, and few rows, of which one launch
    makes it."""
    monkeypatch.setattr(layernorm_direct, "ALONG_SUMS_FROM", 15 * H * O)
    monkeypatch.setattr(layernorm_direct, "ALONG_SUMS_ELEMENTS", elements)
    monkeypatch.setattr(present(layernorm_direct.kernels.table[-1]), "hopper", hopper)
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", precision)
    inputs = make_inputs(dtype, (rows,))
    if lies == "transposed":
        inputs[3] = inputs[3].detach().t().contiguous().t().requires_grad_()
    assert_as_good_as_torch(fused_layernorm_linear, inputs)
    assert bool(module.calls[-1][2] & 128) == transposed


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(7, 6), (8, 16), (16, 5)], ids=str)
def test_whoever_multiplies(module, chosen, no_operator, dtype, way, sizes):
    chosen(*way)
    H, O = sizes
    assert_as_good_as_torch(fused_layernorm_linear, make_inputs(dtype, H=H, O=O))
    forward, backward = module.calls
    assert forward[0] == ("forward" if way[0] == OWN else "forward_rows")
    few = 64 * (math.prod(ROWS) <= O and OWN not in way[1:])
    assert backward[2] == 2 + 4 + 8 + (way[2] == OWN) + 16 * (way[1] != OWN) + 32 * (way[2] != OWN) + few


@pytest.mark.parametrize("way", [(OWN, OWN, OWN), *WAYS], ids=str)
@pytest.mark.parametrize("number", range(1, 32))
def test_only_what_is_asked_for_is_computed_or_multiplied(
    module, chosen, no_operator, monkeypatch, way, number
):
    """By what the module is asked for, by torch's own products, and by the result: every set of frozen inputs."""
    chosen(*way)
    inputs = make_inputs()
    for index, tensor in enumerate(inputs):
        tensor.requires_grad_(bool(number >> index & 1))
    products_made = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *factors: products_made.append(factors) or mm(*factors))
    assert_only_needed_gradients(inputs)
    wanted, expected = module.calls[-1][2], bits(inputs)
    if expected & 1 and way[2] != OWN:
        expected += 32 - 1
    if expected & (4 | 8) and way[1] != OWN:
        expected += 16
    assert wanted == expected
    assert len(products_made) == bool(expected & 16) + bool(expected & 32)


def test_dx_takes_the_place_of_the_gradient_before_it(module, chosen, monkeypatch):
    """Where both lie alike, and rows are not few: one allocation for two."""
    chosen(LIBRARY, LIBRARY, LIBRARY)
    mm = torch.mm
    monkeypatch.setattr(layernorm_direct, "MOST_FEW_ROWS", 4)
    for rows, alike in ((3, False), (4, False), (5, True)):
        inputs = make_inputs(rows=(rows,))
        output = fused_layernorm_linear(*inputs)
        dln = []
        with monkeypatch.context() as context:
            context.setattr(torch, "mm", lambda *factors, dln=dln: dln.append(mm(*factors)) or dln[-1])
            (dx,) = torch.autograd.grad(output.sum(), inputs[0])
        assert (dx.data_ptr() == dln[0].data_ptr()) == alike, rows
        assert bool(module.calls[-1][2] & 64) != alike, (
            "one launch for few rows reads the one while it writes the other"
        )


def test_dW_has_room_for_a_copy_of_the_weight_on_hopper(module, no_operator):
    """Where rows of the weight begin at any address; nobody sees it but the module, and the memory's owner."""
    kernels = present(layernorm_direct.kernels.table[-1])
    for hopper, dtype, width, room in (
        (True, torch.bfloat16, 9, 64),
        (True, torch.bfloat16, 65, 128),
        (True, torch.bfloat16, 16, 16),
        (True, torch.float32, 9, 9),
        (False, torch.bfloat16, 9, 9),
    ):
        kernels.hopper = hopper
        forget_plans()
        inputs = make_inputs(dtype, H=width, O=5)
        (dW,) = torch.autograd.grad(fused_layernorm_linear(*inputs).sum(), inputs[3])
        assert dW.shape == (5, width) and dW.is_contiguous()
        assert dW.untyped_storage().nbytes() == 5 * room * dtype.itemsize
        assert_as_good_as_torch(fused_layernorm_linear, inputs)
    kernels.hopper = False
    forget_plans()


def test_a_graph_has_its_own_choice(module, chosen, no_operator, monkeypatch):
    chosen(OWN, OWN, OWN, graph=(LIBRARY, LIBRARY, LIBRARY))
    inputs = make_inputs()
    names = []
    for capturing in (False, False, True):
        monkeypatch.setattr(layernorm_direct, "is_capturing", lambda capturing=capturing: capturing)
        module.calls.clear()
        assert_as_good_as_torch(fused_layernorm_linear, inputs)
        names.append([call[0] for call in module.calls])
    own, graph = ["forward", "backward"], ["forward_rows", "backward"]
    # The first call loads the kernels of a graph, which none could while it is captured.
    assert names == [["forward_rows", "forward", "backward", "backward"], own, graph]


@pytest.mark.parametrize(
    ("dtype", "sizes", "kind"),
    [
        (torch.float32, (8, 16), 5),
        (torch.float32, (7, 16), 0),
        (torch.float32, (8, 12), 0),
        (torch.float64, (8, 16), 4),
        (torch.bfloat16, (8, 16), 2),
    ],
    ids=str,
)
def test_pairs_are_for_whole_rows_of_float32(module, no_operator, dtype, sizes, kind):
    forget_plans()
    kernels = present(layernorm_direct.kernels.table[-1])
    inputs = make_inputs(dtype, H=sizes[0], O=sizes[1])

    def function(*tensors):
        return fused_layernorm_linear(*tensors, algorithm="pairs")

    for hopper in (False, True):
        kernels.hopper = hopper
        module.calls.clear()
        assert_as_good_as_torch(function, inputs)
        expected = kind if hopper else layernorm_direct.KINDS[dtype]
        assert module.calls == [("forward", expected), ("backward", expected, 15)]
    layer = LayerNormLinear(*sizes, algorithm="pairs", dtype=dtype)
    assert layer.explain(inputs[0])["way"].endswith("pairs of float16") == (kind == 5)
    forget_plans()


@pytest.mark.parametrize("rows", [2**20 - 1, 2**20])
def test_large_products_are_torch_s(rows):
    plan = layernorm_plan.make_plan(torch.Size([rows, 4]), 4, torch.float32)
    assert plan.choice.captured == (layernorm_plan.ALL_LIBRARY if rows == 2**20 else layernorm_plan.ALL_OWN)
    assert (
        layernorm_plan.make_plan(torch.Size([rows, 8]), 8, torch.bfloat16).choice.captured
        == layernorm_plan.ALL_OWN
    )


@pytest.mark.parametrize(("width", "outputs", "aligned"), [(64, 64, True), (63, 64, False), (64, 60, False)])
def test_unaligned_products_of_16_bits_are_torch_s_where_they_are_large(width, outputs, aligned):
    few, many = (
        layernorm_plan.make_plan(torch.Size([rows, width]), outputs, torch.bfloat16).choice.plain
        for rows in (8, 4096)
    )
    assert few == layernorm_plan.ALL_OWN and (many == layernorm_plan.ALL_OWN) == aligned


def test_explain_says_who_multiplies(module, chosen):
    layer = LayerNormLinear(H, O)
    x = make_inputs()[0]
    chosen(OWN, LIBRARY, LIBRARY)
    assert layer.explain(x) == {"way": "extension module", "output": OWN, "dln": LIBRARY, "dW": LIBRARY}
    chosen(OWN, OWN, OWN, graph=(PADDED, LIBRARY, OWN))
    assert layer.explain(x) == {
        **{"way": "extension module", "output": OWN, "dln": OWN, "dW": OWN},
        **{"output in a CUDA graph": PADDED, "dln in a CUDA graph": LIBRARY, "dW in a CUDA graph": OWN},
    }
    layer.algorithm = "unfused"
    assert layer.explain(x)["way"] == "MAX graph, unfused"
    assert module.calls == [], "nothing is computed"


def test_explain_under_autocast(module, monkeypatch):
    forget_plans()
    monkeypatch.setattr(layernorm_plan, "LIBRARY_FROM_IN_A_LOOP", 1)
    layer, x = LayerNormLinear(8, 8), torch.ones(4, 8)
    assert layer.explain(x)["dW"] == LIBRARY
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.explain(x)["dW"] == OWN
    forget_plans()


def test_explain_without_a_module(monkeypatch):
    monkeypatch.setattr(layernorm_direct, "kernels", lambda device: None)
    assert LayerNormLinear(H, O).explain(make_inputs()[0])["way"] == "MAX graph, unfused"


# ---- A weight that lies transposed, as GPT-2's do -----------------------------------------------------------


def transposed_inputs(dtype=torch.float32, rows=ROWS):
    """Inputs whose linear weight is the transpose of a matrix that lies row by row."""
    inputs = make_inputs(dtype, rows)
    inputs[3] = inputs[3].detach().t().contiguous().t().requires_grad_()
    assert layernorm_direct.lies_transposed(inputs[3])
    return inputs


@pytest.mark.parametrize("rows", [ROWS, (4,), (2, 1, 3, 2), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_that_lies_transposed_is_not_copied(module, no_operator, dtype, rows):
    inputs = transposed_inputs(dtype, rows)
    if 0 not in rows:
        assert_as_good_as_torch(fused_layernorm_linear, inputs)
        assert [call[0] for call in module.calls] == ["forward_rows", "backward"]
    output = fused_layernorm_linear(*inputs)
    gradient = torch.autograd.grad(output.sum(), inputs[3])[0]
    assert gradient.shape == (O, H) and gradient.stride() == inputs[3].stride()


def test_a_weight_with_gaps_is_copied(module, no_operator):
    inputs = make_inputs()
    inputs[3] = torch.randn(O, 2 * H)[:, ::2].requires_grad_()
    assert not layernorm_direct.lies_transposed(inputs[3])
    assert_as_good_as_torch(fused_layernorm_linear, inputs)
    assert [call[0] for call in module.calls] == ["forward", "backward"]


def test_the_operator_leaves_a_transposed_weight_where_it_lies(module):
    inputs = transposed_inputs()
    output, statistics = autograd.layernorm_linear(*inputs, EPS, "fast")
    assert [call[0] for call in module.calls] == ["forward_rows"]
    x, gamma, beta, weight = inputs[:4]
    arguments = (torch.ones_like(output), x, statistics, gamma, beta, weight, 3, "fast")
    dW = autograd.layernorm_linear_backward(*arguments)[3]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(a.detach()) if isinstance(a, torch.Tensor) else a for a in arguments]
        fake = autograd.layernorm_linear_backward(*fakes)[3]
    assert dW.stride() == weight.stride() == fake.stride() and dW.shape == fake.shape


def test_products_of_torch_and_its_modes(module, library, no_operator):
    """Without grad, in inference mode, backward under autocast, and an in-place operation on the output."""
    inputs = make_inputs()
    expected = output_and_gradients(plain_torch, inputs, torch.ones(*ROWS, O))
    with torch.no_grad():
        assert_near(fused_layernorm_linear(*inputs), expected[0])
    with torch.inference_mode():
        assert_near(fused_layernorm_linear(*inputs).clone(), expected[0])
    output = fused_layernorm_linear(*inputs)
    output.add_(1)
    assert_near(output.detach() - 1, expected[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gradients = torch.autograd.grad(output, inputs, torch.ones(*ROWS, O))
    for ours, theirs in zip(gradients, expected[1:], strict=True):
        assert_near(ours, theirs)


@pytest.mark.parametrize(
    "way", [(OWN, OWN, OWN), (LIBRARY, LIBRARY, LIBRARY), (PADDED, PADDED, PADDED)], ids=str
)
@pytest.mark.parametrize("rows", [ROWS, (1,), (), (1, 1, 1)], ids=str)
def test_the_output_may_be_changed_in_place(module, chosen, no_operator, way, rows):
    """PyTorch refuses that of a view that a Function returns; H and O are odd, so that padded rows are cut."""
    chosen(*way)
    inputs, grad = make_inputs(rows=rows, H=7, O=5), torch.ones(*rows, 5)

    def doubled(*tensors):
        return fused_layernorm_linear(*tensors).mul_(2)

    got = output_and_gradients(doubled, inputs, grad)
    expected = output_and_gradients(plain_torch, inputs, 2 * grad)
    assert_near(got[0], 2 * expected[0])
    assert got[0].untyped_storage().nbytes() == got[0].nbytes
    for ours, theirs in zip(got[1:], expected[1:], strict=True):
        assert_near(ours, theirs)


def test_out_of_memory_in_a_product(module, library, monkeypatch):
    def no_room(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    inputs = make_inputs()
    output = fused_layernorm_linear(*inputs)
    monkeypatch.setattr(torch, "mm", no_room)
    monkeypatch.setattr(layernorm_direct, "linear", no_room)
    results, scratch = 15 * O * 4 + 2 * 15 * 4, 15 * H * 4
    with pytest.raises(torch.OutOfMemoryError, match=f"forward pass .* needed {results + scratch:,} bytes"):
        fused_layernorm_linear(*inputs)
    results, scratch = 4 * (15 * H + 2 * H + O * H + O), 15 * H * 4
    with pytest.raises(torch.OutOfMemoryError, match=f"backward pass .* needed {results + scratch:,} bytes"):
        output.sum().backward()
