"""What no gate of the puzzle has, on the virtual GPU: options, the backward pass in one kernel, the mask's gradient.

Shared heads, diagonals, masks of blocks, masks broadcast along any axis; and kernels that get them wrong.
"""

import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from marks import chosen
from players import anew

from harness.devices.recorder import Order, record_many
from harness.devices.replay import Replay
from harness.puzzles.p23.spec import PUZZLE
from harness.spec.puzzle import Case
from harness.toolchain.packages import OpPackage

pytestmark = pytest.mark.compiles

OPTIONS = {
    "causal from the top left": (1, 2, 20, 33, 5, 2, 0, 1),
    "causal from the bottom right": (1, 2, 20, 33, 5, 2, 13, 1),
    "more queries than keys, bottom right": (1, 2, 33, 20, 5, 2, -13, 1),
    "shared heads": (2, 4, 18, 9, 6, 2, 9, 1),
    "one head for all, causal": (1, 3, 35, 35, 4, 1, 0, 1),
    "blocks of a tile": (1, 2, 40, 50, 4, 1, 50, 16),
    "blocks of two tiles, causal": (1, 1, 70, 70, 4, 1, 0, 32),
    "blocks that no tile holds": (1, 1, 40, 50, 4, 1, 0, 3),
    "five tiles of keys": (1, 1, 70, 70, 4, 1, 70, 1),
}
"""B, N, S, T, d, heads of key and value, diagonal, size of the mask's blocks."""
MASKS = {
    "a mask for each head": (2, 4, 18, 9, 6, 2, 9, 1, 0, 0, 0, 0),
    "the same for all heads, causal": (2, 2, 20, 33, 5, 2, 0, 1, 1, 1, 0, 0),
    "a number for each key": (2, 3, 20, 33, 5, 3, 33, 1, 0, 1, 1, 0),
    "a number for each query": (1, 2, 35, 20, 5, 1, 20, 1, 1, 0, 0, 1),
    "one number": (2, 2, 17, 18, 4, 2, 18, 1, 1, 1, 1, 1),
}
"""The same, and for each axis of the mask whether it is broadcast. The block is of one element."""
BROADCAST_ALONG_KEYS = {
    "(20, 1)": (1, 2, 20, 33, 64, 2, 33, 1, 1, 1, 0, 1),
    "(1,)": (2, 1, 20, 33, 64, 1, 33, 1, 1, 1, 1, 1),
}
OF_MASK = ("mask_b", "mask_n", "mask_s", "mask_t")
SIZED = replace(
    PUZZLE,
    dim_names=("B", "N", "S", "T", "d", "G", "diagonal", "mask_block"),
    derived_sizes=lambda dims: dict(zip(OF_MASK, mask_shape(dims), strict=True)),
)
MASKED = replace(SIZED, dim_names=(*SIZED.dim_names, "one_b", "one_n", "one_s", "one_t"))
WRONG = {
    "diagonal one too low": ("tiles.mojo", "t > s + Int(sizes.diagonal)", "t >= s + Int(sizes.diagonal)"),
    "diagonal forgotten": ("tiles.mojo", "t > s + Int(sizes.diagonal)", "t > s"),
    "keys behind the diagonal dropped": (
        "flash_tensors.mojo",
        "query + Int(self.diagonal) + 1",
        "query - Int(self.diagonal) + 1",
    ),
    "queries dropped": (
        "flash_tensors.mojo",
        "max(0, key - Int(self.diagonal))",
        "max(0, key + Int(self.diagonal))",
    ),
    "shared heads in turns": (
        "flash_tensors.mojo",
        "return head // self.group()",
        "return head // Int(self.query_heads) * Int(self.key_heads) + head % Int(self.key_heads)",
    ),
    "gradient of one head of the group": (
        "attention.mojo",
        "for member in range(sizes.group())",
        "for member in range(1)",
    ),
    "block of the query within its block": (
        "flash_tensors.mojo",
        "query // block * Int(self.mask_s)",
        "query % block * Int(self.mask_s)",
    ),
    "hidden tile looked up at the first key": (
        "tiles.mojo",
        "mask[unsafe_offset=sizes.mask_at(s0, t0)] == hidden",
        "mask[unsafe_offset=sizes.mask_at(s0, 0)] == hidden",
    ),
}

WRONG_ATOMIC = {
    "slopes of the transposed tile": ("one_pass.mojo", "slopes[i, y] * keys", "slopes[y, i] * keys"),
    "sums of another query": ("one_pass.mojo", "(head * S + s0 + y) * d", "(head * S + s0 + x) * d"),
    "sums of the first head": ("one_pass.mojo", "(head * S + s0 + y) * d", "(shared_head * S + s0 + y) * d"),
    "the last sums not cleared": (
        "one_pass.mojo",
        "        sums[unsafe_offset=global_idx.x] = 0",
        "        pass",
    ),
}
WRONG_MASKED = {
    "batch not added up": ("mask_gradient.mojo", "first_b + 1 if sizes.mask_b else B", "first_b + 1"),
    "heads not added up": ("mask_gradient.mojo", "first_n + 1 if sizes.mask_n else N", "first_n + 1"),
    "one tile of queries": ("mask_gradient.mojo", "first_s + 1 if sizes.mask_s else S", "first_s + 1"),
    "one tile of keys": ("mask_gradient.mojo", "first_t + 1 if sizes.mask_t else T", "first_t + 1"),
    "one row of the tile": ("mask_gradient.mojo", "y + 1 if sizes.mask_s else TILE", "y + 1"),
    "one column of the tile": ("mask_gradient.mojo", "x + 1 if sizes.mask_t else TILE", "x + 1"),
    "scaled": (
        "mask_gradient.mojo",
        "weight = probability(score, row_lse)",
        "weight = scale * probability(score, row_lse)",
    ),
    "delta of no output": ("mask_gradient.mojo", "exact - rounded", "exact"),
}


def mask_shape(dims) -> tuple[int, ...]:
    """The shape of a mask: of blocks for all heads, or with the broadcast axes that the sizes say."""
    B, N, S, T, _, _, _, block, *one = dims
    whole = (B, N, -(-S // block), -(-T // block))
    return tuple(1 if single else size for single, size in zip(one or (1, 1, 0, 0), whole, strict=True))


def inputs(dims) -> dict[str, torch.Tensor]:
    """Random tensors, and a mask, a third of it -inf; a single number is finite."""
    B, N, S, T, d, G, *_ = dims
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator) + 0.5

    mask = randn(*mask_shape(dims))
    if mask.numel() > 1:
        mask[torch.rand(mask.shape, generator=generator) < 0.33] = -torch.inf
    query, key, value, grad_output = (
        randn(B, N, S, d),
        randn(B, G, T, d),
        randn(B, G, T, d),
        randn(B, N, S, d),
    )
    return {"query": query, "key": key, "value": value, "grad_output": grad_output, "attn_mask": mask}


def truth(dims, tensors, grad_lse: float = 0) -> dict[str, torch.Tensor]:
    """PyTorch's answer in float64, with the mask written out element by element; `grad_lse` is the gradient of each row's lse."""
    S, T, _, _, diagonal, block = dims[2:8]
    query, key, value, grad = (tensors[name].double() for name in ("query", "key", "value", "grad_output"))
    mask = tensors["attn_mask"].double()
    sees = torch.ones(S, T, dtype=torch.bool).tril(diagonal)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, mask)]
    if block > 1:
        mask = mask.repeat_interleave(block, 2).repeat_interleave(block, 3)[..., :S, :T]
    mask = mask.masked_fill(~sees, -torch.inf)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    # A row that sees no key has no lse; a finite number in the place of -inf keeps its gradient from being NaN.
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    lse = torch.logsumexp(query @ keys.mT / query.shape[-1] ** 0.5 + mask.clamp(min=-1e30), -1)
    of_rows = grad_lse * (lse > -1e29).double()
    names = ("grad_query", "grad_key", "grad_value", "grad_attn_mask")
    grads = torch.autograd.grad((output, lse), leaves, (grad, of_rows))
    gradients = dict(zip(names, grads, strict=True))
    return {"output": output.detach(), **gradients}


def errors(player, dims, variant="fused") -> dict[str, float]:
    """What the kernels wrote, each error in units of the largest value, or of 1; infinite for a finding.

    Without a gradient of lse that of a mask that is the same for all keys is 0: every score of a row grows by the same.
    """
    tensors = inputs(dims)
    anew(player)
    case, grad_lse = Case("options", "", dims, ""), 0.25 if variant == "masked" else 0
    written = player.run(variant, case, tensors)
    if grad_lse:
        written = player.run(variant, case, tensors, {"delta": written["delta"] - grad_lse})
    if any(finding.is_error for finding in player.gpu.findings):
        return {player.gpu.findings[0].text(): float("inf")}
    exact = truth(dims, tensors, grad_lse)
    apart = {
        name: (written[name].double() - right).abs().max() / right.abs().max().clamp(min=1)
        for name, right in exact.items()
        if name in written
    }
    return {name: float(error.nan_to_num(nan=torch.inf)) for name, error in apart.items()}


@pytest.fixture(scope="module")
def players(solution, tmp_path_factory, request):
    """Variant and name -> what replays the solution, under "" or a dtype, and the chosen wrong kernels, all recorded together."""

    def changed(name: str, file: str, old: str, new: str) -> OpPackage:
        folder = tmp_path_factory.mktemp("wrong") / "op"
        shutil.copytree(solution.path, folder)
        text = (folder / file).read_text()
        assert text.count(old) == 1, name
        (folder / file).write_text(text.replace(old, new))
        return OpPackage(folder)

    kernels, names = {"fused": WRONG, "atomic": WRONG_ATOMIC, "masked": WRONG_MASKED}, chosen(request, "name")
    orders = {
        (variant, name): Order(package, recorded_at(variant), (variant,), small_grid=True)
        for variant, wrong in kernels.items()
        for name, package in {
            "": solution,
            **{name: changed(name, *edit) for name, edit in wrong.items() if name in names},
        }.items()
    }
    narrow = Order(solution, tuple(BROADCAST_ALONG_KEYS.values()), ("masked",), True, "bfloat16")
    orders["masked", narrow.dtype] = narrow
    recordings = record_many(list(orders.values()), "p23")
    return {
        key: Replay(recording, MASKED if key[0] == "masked" else SIZED, orders[key].dtype)
        for key, recording in zip(orders, recordings, strict=True)
    }


def sizes_of(variant: str) -> dict[str, tuple[int, ...]]:
    """What a variant is tried at."""
    return MASKS if variant == "masked" else OPTIONS


def recorded_at(variant: str) -> tuple[tuple[int, ...], ...]:
    """What it is recorded at."""
    more = BROADCAST_ALONG_KEYS if variant == "masked" else {}
    return (*sizes_of(variant).values(), *more.values())


@pytest.mark.parametrize("variant", ["fused", "atomic"])
@pytest.mark.parametrize("dims", OPTIONS.values(), ids=OPTIONS)
def test_the_options_are_right(players, dims, variant):
    assert max(errors(players[variant, ""], dims, variant).values()) < 3e-6


@pytest.mark.parametrize("dims", MASKS.values(), ids=MASKS)
def test_the_gradient_of_a_mask_is_summed_over_what_it_was_broadcast_to(players, dims):
    by_name = errors(players["masked", ""], dims, "masked")
    assert set(by_name) == {"output", "grad_attn_mask"} and max(by_name.values()) < 3e-6


@pytest.mark.parametrize("dims", BROADCAST_ALONG_KEYS.values(), ids=BROADCAST_ALONG_KEYS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_gradient_of_a_mask_broadcast_along_the_keys_is_0_whatever_was_rounded(players, dims, dtype):
    """Every score of a row grows by the same. What is left of P * dP less P * delta must have neither the rounding of the output,
    of 16 bits, nor that of lse, as another kernel's may have it."""
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in inputs(dims).items()}
    player = anew(players["masked", dtype if dtype == "bfloat16" else ""])
    case = Case("broadcast", "", dims, "")
    lse = player.run("masked", case, tensors)["lse"]
    for factor in (1, 1 + 1e-6):
        written = player.run("masked", case, tensors, {"lse": lse * factor})
        assert not player.gpu.findings
        assert written["grad_attn_mask"].abs().max() < 1e-4
    assert truth(dims, tensors)["grad_attn_mask"].abs().max() < 1e-10


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        *(("fused", name) for name in list(WRONG)[:2]),
        *(pytest.param("fused", name, marks=pytest.mark.slow) for name in list(WRONG)[2:]),
        *(("atomic", name) for name in WRONG_ATOMIC),
        *(("masked", name) for name in WRONG_MASKED),
    ],
)
def test_a_wrong_index_is_noticed(players, variant, name):
    wrong = players[variant, name]
    assert any(max(errors(wrong, dims, variant).values()) > 1e-3 for dims in sizes_of(variant).values())


def test_only_the_pass_with_atomics_adds_in_an_order_of_its_own(players):
    """Blocks in another order: the same bits of every gradient, but of the query's where atomics add it up."""
    dims, bits = OPTIONS["five tiles of keys"], {}  # two terms would add up alike in any order
    for variant in ("fused", "atomic"):
        for blocks in ("natural", "reversed"):
            player = Replay(players[variant, ""].recording, SIZED, "float32", blocks=blocks)
            bits[variant, blocks] = player.run(variant, Case("order", "", dims, ""), inputs(dims))
    for variant, differ in (("fused", set()), ("atomic", {"grad_query"})):
        first, second = bits[variant, "natural"], bits[variant, "reversed"]
        assert {name for name in first if not torch.equal(first[name], second[name])} == differ
    one_pass = {launch.name: launch.counters.global_atomic.bytes for launch in player.gpu.launches}
    assert [name for name, count in one_pass.items() if count] == ["one_pass"]


def test_hidden_tiles_cost_nothing(players):
    """Of a mask that hides every second block the kernels load fewer keys than of one that says so element by element."""
    by_block, by_element = OPTIONS["blocks of two tiles, causal"], OPTIONS["one head for all, causal"]
    assert by_block[-1] % 16 == 0 and by_element[-1] == 1
    loads, recording = [], players["fused", ""].recording
    for hide in (False, True):
        tensors = inputs(by_block)
        tensors["attn_mask"] = torch.zeros_like(tensors["attn_mask"])
        tensors["attn_mask"][..., :, 0] = -torch.inf if hide else 0.0
        player = Replay(recording, SIZED, "float32")
        player.run("fused", Case("hidden", "", by_block, ""), tensors)
        loads.append(sum(launch.counters.global_load.bytes for launch in player.gpu.launches))
    assert loads[1] < 0.75 * loads[0]
