"""float32 by pairs of float16, on the virtual GPU: as exact as PyTorch's float32, on hard inputs too, and the plain path where
pairs are no good; the path is chosen by the kernels."""

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from players import anew
from test_p23_fast import SIZED, truth
from test_p23_fast import inputs as masked_inputs
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.devices.recorder import Order, RecordedLaunch, RecordedTensor, record_many
from harness.devices.replay import Replay
from harness.spec.puzzle import Case

pytestmark = pytest.mark.compiles

EPS = torch.finfo(torch.float32).eps
# B, N, S, T, d, heads of key and value, diagonal, and 1 for a mask; then which of its axes have the size 1, as in `test_p23_fast`.
OPTIONS = {
    "whole tiles, in two parts": (3, 1, 128, 128, 64, 1, 128, 0),
    "a batch in two parts, ragged": (3, 1, 131, 75, 64, 1, 75, 0),
    "causal from the top left": (1, 1, 140, 140, 64, 1, 0, 0),
    "causal from the bottom right, shared heads": (1, 2, 70, 140, 64, 1, 70, 0),
    "queries that see no key": (1, 1, 70, 40, 64, 1, -50, 0),
    "odd head": (1, 1, 33, 34, 13, 1, 34, 0),
    "mask, causal, shared heads, in parts": (2, 4, 70, 77, 64, 2, 20, 1),
    "two boxes, whole tiles, in two parts": (3, 1, 128, 128, 128, 1, 128, 0),
    "two boxes, causal, shared heads": (1, 2, 70, 140, 128, 1, 70, 0),
    "two boxes, odd head, queries that see no key": (1, 1, 70, 40, 101, 1, -50, 0),
    "a box and a half, mask, in parts": (2, 4, 70, 77, 72, 2, 77, 1),
    "two boxes, mask, causal": (1, 2, 70, 77, 128, 1, 20, 1),
    "mask of every score": (2, 2, 70, 77, 64, 1, 77, 1, 0, 0, 0, 0),
    "padding, shared heads": (3, 4, 70, 140, 64, 2, 140, 1, 0, 1, 1, 0),
    "two boxes, mask of every head, causal, keys that nobody sees": (2, 2, 66, 140, 101, 2, 8, 1, 1, 0, 0, 0),
}
QUERY = (2, 4, 1, 40, 13, 2, 40, 1, 0, 0, 0, 0)
HARD = (1, 6, 70, 70, 64, 6, 70, 0)
ONE = (1, 1, 70, 70, 64, 1, 70, 0)
GRADIENTS = ("grad_query", "grad_key", "grad_value")


def inputs(dims) -> dict[str, torch.Tensor]:
    """Random tensors, and the single 0 that the flash kernels read for no mask."""
    given = masked_inputs(dims, torch.float32)
    return given if dims[7] else given | {"attn_mask": torch.zeros_like(given["attn_mask"])}


def hard() -> dict[str, torch.Tensor]:
    """Inputs with a hardness of its own in each head."""
    given = inputs(HARD)
    query, key, value, grad = (given[name] for name in ("query", "key", "value", "grad_output"))
    query[:, 0] *= 32
    key[:, 1] *= 1e-6
    value[:, 1] *= 1e5
    grad[:, 1] *= 1e-4
    value[:, 2, 66, 5] *= 1000
    key[:, 3, 7, 5] *= 100
    grad[:, 4, 5, 3] *= 1e4
    query[:, 5] *= 1e5
    key[:, 5] *= 1e-5
    return given


def torch_answer(dims, given, backend=SDPBackend.MATH) -> dict[str, torch.Tensor]:
    """PyTorch's own, in float32."""
    names = ("query", "key", "value", "attn_mask") if dims[7] else ("query", "key", "value")
    leaves = {name: given[name].clone().requires_grad_() for name in names}
    hidden = ~torch.ones(dims[2], dims[3], dtype=torch.bool).tril(dims[6])
    *three, mask = ((given | leaves)[name] for name in ("query", "key", "value", "attn_mask"))
    with sdpa_kernel(backend):
        added = mask.masked_fill(hidden, -torch.inf)
        output = F.scaled_dot_product_attention(*three, attn_mask=added, enable_gqa=True)
    gradients = torch.autograd.grad(output, tuple(leaves.values()), given["grad_output"])
    return {
        "output": output.detach(),
        **dict(zip((f"grad_{name}" for name in names), gradients, strict=True)),
    }


@pytest.fixture(scope="module")
def recording(solution):
    """What the fast and the fused variant launch in float32."""
    order = Order(solution, (*OPTIONS.values(), QUERY, HARD, ONE), ("fast", "fused"), small_grid=True)
    return record_many([order], "p23", "float32")[0]


@pytest.fixture(scope="module")
def player(recording):
    """What replays it."""
    return Replay(recording, SIZED, "float32")


def run(player, dims, given, variant="fast", blocks="natural", rows=None):
    """What a variant wrote, the backward pass from the lse and delta in `rows` if they are given; there are no findings."""
    written = anew(player, blocks).run(variant, Case("pairs", "", dims, ""), given, rows)
    assert not player.gpu.findings, player.gpu.findings[0].text()
    return written


def apart(got: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference over the largest value."""
    return float((got.double() - right).abs().max() / right.abs().max())


@pytest.mark.parametrize("dims", OPTIONS.values(), ids=OPTIONS)
def test_as_exact_as_pytorch_in_every_option(player, dims):
    given = inputs(dims)
    written, right, theirs = run(player, dims, given), truth(dims, given), torch_answer(dims, given)
    for name, tensor in theirs.items():
        assert apart(written[name], right[name]) < 1.5 * apart(tensor, right[name]) + EPS, name
    some = right["lse"].isfinite()
    assert torch.equal(some, written["lse"].isfinite())
    assert apart(written["lse"][some], right["lse"][some]) < 2 * EPS


def test_as_exact_as_pytorch_on_hard_inputs(player):
    """As the worse of its two ways: as here, one computes the probabilities from lse."""
    given = hard()
    written, right = run(player, HARD, given), truth(HARD, given)
    theirs = [torch_answer(HARD, given, way) for way in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION)]
    for name in theirs[0]:
        for head in range(HARD[1]):
            ours, truly = written[name][:, head], right[name][:, head]
            bound = max(apart(way[name][:, head], truly) for way in theirs)
            assert apart(ours, truly) < 2 * bound + 2 * EPS, (name, head, apart(ours, truly), bound)


def test_what_pairs_are_no_good_for_takes_the_plain_path(player):
    """Its bits are those of the flash kernels; ordinary inputs have others."""
    given = inputs(ONE)
    for name, factor in (
        ("query", 1e4),
        ("key", 1e10),
        ("value", 1e-16),
        ("grad_output", 1e-16),
        ("value", 1),
    ):
        changed = {**given, name: given[name] * factor}
        fused = run(player, ONE, changed, "fused")
        fast = run(player, ONE, changed, rows={key: fused[key] for key in ("lse", "delta")})
        assert [torch.equal(fast[key], fused[key]) for key in GRADIENTS] == [factor != 1] * 3, name
        forward_pairs = factor == 1 or name == "grad_output"
        assert torch.equal(fast["output"], fused["output"]) != forward_pairs, name


def test_infinities_and_nans_are_where_pytorch_has_them(player):
    given = inputs(HARD)
    strange = (("query", torch.nan), ("key", torch.inf), ("value", -torch.inf))
    strange += (("grad_output", torch.nan), ("grad_output", torch.inf))
    for head, (name, value) in enumerate(strange):
        given[name][0, head, 9, 3] = value
    written, theirs = run(player, HARD, given), torch_answer(HARD, given)
    for name, tensor in theirs.items():
        assert not tensor.isfinite().all() and tensor.isfinite().any()
        for kind in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(kind(written[name]), kind(tensor)), (name, kind)


def test_a_mask_s_gradient_on_hard_inputs_and_where_scores_are_infinite_or_nan(player):
    """It takes the plain path where the others do: with the bits of the flash kernel, whose gradients of NaN are PyTorch's."""
    dims = OPTIONS["mask of every score"]
    given = inputs(dims)
    for changes in ({"query": 32}, {"value": 1e5, "grad_output": 1e-4}):
        changed = given | {name: given[name] * factor for name, factor in changes.items()}
        written, right = run(player, dims, changed)["grad_attn_mask"], truth(dims, changed)["grad_attn_mask"]
        theirs = torch_answer(dims, changed)["grad_attn_mask"]
        assert apart(written, right) < 2 * apart(theirs, right) + EPS, changes
    one, right = (f(QUERY, inputs(QUERY))["grad_attn_mask"] for f in (functools.partial(run, player), truth))
    assert apart(one, right) < 2 * EPS
    fully = given | {"attn_mask": given["attn_mask"].clone()}
    fully["attn_mask"][0, 0, 3] = -torch.inf
    assert not run(player, dims, fully)["grad_attn_mask"][0, 0, 3].any()
    strange = (("attn_mask", torch.nan), ("attn_mask", torch.inf), ("value", torch.nan), ("query", torch.nan))
    for name, value in strange:
        changed = given | {name: given[name].clone()}
        changed[name][0, 0, 9, 3] = value
        written, theirs = run(player, dims, changed)["grad_attn_mask"], torch_answer(dims, changed)
        assert written.isnan().any() and torch.equal(written.isnan(), theirs["grad_attn_mask"].isnan()), name


def test_zeros_are_zeros(player):
    given = inputs(ONE)
    given |= {name: torch.zeros_like(given[name]) for name in ("key", "grad_output")}
    written = run(player, ONE, given)
    assert all(not written[name].any() for name in GRADIENTS)
    assert apart(written["output"], truth(ONE, given)["output"]) < EPS


def test_the_same_bits_in_whatever_order_the_blocks_run(player):
    for case in ("causal from the bottom right, shared heads", "padding, shared heads"):
        dims = OPTIONS[case]
        first, second = (run(player, dims, inputs(dims), blocks=order) for order in ("natural", "shuffled:5"))
        names = ("output", "lse", *GRADIENTS, *(["grad_attn_mask"] if dims[7] else []))
        assert all(torch.equal(first[name], second[name]) for name in names)


def test_a_batch_is_done_in_parts_that_share_their_scratch_memory(recording):
    """Three entries of three blocks, where four blocks are enough."""
    events = recording.cases["fast", OPTIONS["a batch in two parts, ragged"]]
    launches = [event.name for event in events if isinstance(event, RecordedLaunch)]
    assert [launches.count(name) for name in ("split_tiles", "pairs_forward", "plain_query")] == [4, 2, 2]
    lent = [event.nbytes for event in events if isinstance(event, RecordedTensor) and event.name == "pairs"]
    tile = 2 * 64 * 64 * 2
    assert lent == [2 * 3 * tile, 2 * (3 + 3) * tile], "queries, and gradients, of two entries"
    lent = [
        event.nbytes for event in events if isinstance(event, RecordedTensor) and event.name == "key_pairs"
    ]
    assert lent == [2 * 2 * tile] * 2


def test_gradients_of_whole_tiles_lend_their_memory_to_the_pairs_of_key_and_value(recording):
    events = recording.cases["fast", OPTIONS["whole tiles, in two parts"]]
    lent = [
        event.nbytes for event in events if isinstance(event, RecordedTensor) and event.name == "value_pairs"
    ]
    assert lent == [2 * 2 * 64 * 64 * 4, 0]


def test_tensor_cores_multiply_pairs_and_nothing_is_added_with_atomics(recording):
    names = recording.kernel_names()
    multiply = {"pairs_forward", "pairs_query", "pairs_key_value", "pairs_mask_gradient"}
    others = {"split_tiles", "choose_path", "plain_forward", "plain_query", "plain_key_value"}
    others |= {"plain_mask_gradient"}
    assert multiply | others <= set(names.values())
    for symbol, name in names.items():
        ptx = recording.ptx[symbol]
        assert not re.search(r"\b(atom|red)\.", ptx)
        assert bool(re.search(r"mma\.sync\S*\.f32\.f16\.f16\.f32", ptx)) == (name in multiply)
