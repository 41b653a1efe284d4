"""What no gate of the puzzle has, on the virtual GPU: shared heads, diagonals, masks of blocks; and kernels
that get them wrong.
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
OF_MASK = ("mask_b", "mask_n", "mask_s", "mask_t")
SIZED = replace(
    PUZZLE,
    dim_names=("B", "N", "S", "T", "d", "G", "diagonal", "mask_block"),
    derived_sizes=lambda dims: dict(zip(OF_MASK, mask_shape(dims), strict=True)),
)
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


def mask_shape(dims) -> tuple[int, ...]:
    """The shape of a mask of blocks for all heads."""
    S, T, block = dims[2], dims[3], dims[7]
    return (1, 1, -(-S // block), -(-T // block))


def inputs(dims) -> dict[str, torch.Tensor]:
    """Random tensors, and a mask, a third of it -inf."""
    B, N, S, T, d, G, *_ = dims
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator) + 0.5

    mask = randn(*mask_shape(dims))
    mask[torch.rand(mask.shape, generator=generator) < 0.33] = -torch.inf
    query, key, value, grad_output = (
        randn(B, N, S, d),
        randn(B, G, T, d),
        randn(B, G, T, d),
        randn(B, N, S, d),
    )
    return {"query": query, "key": key, "value": value, "grad_output": grad_output, "attn_mask": mask}


def truth(dims, tensors) -> dict[str, torch.Tensor]:
    """PyTorch's answer in float64, with the mask written out element by element."""
    S, T, _, _, diagonal, block = dims[2:8]
    query, key, value, grad = (tensors[name].double() for name in ("query", "key", "value", "grad_output"))
    mask = tensors["attn_mask"].double()
    if block > 1:
        mask = mask.repeat_interleave(block, 2).repeat_interleave(block, 3)[..., :S, :T]
    mask = mask.masked_fill(~torch.ones(S, T, dtype=torch.bool).tril(diagonal), -torch.inf)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    output = F.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    grads = torch.autograd.grad(output, leaves, grad)
    return {
        "output": output.detach(),
        **dict(zip(("grad_query", "grad_key", "grad_value"), grads, strict=True)),
    }


def errors(player, dims) -> dict[str, float]:
    """What the kernels wrote, each error in units of the largest value, or of 1; infinite for a finding."""
    tensors = inputs(dims)
    given = {name: tensor.numpy() for name, tensor in tensors.items()}
    written = anew(player).run("fused", Case("options", "", dims, ""), given)
    if any(finding.is_error for finding in player.gpu.findings):
        return {player.gpu.findings[0].text(): float("inf")}
    apart = {
        name: (torch.from_numpy(written[name]).double() - right).abs().max() / right.abs().max().clamp(min=1)
        for name, right in truth(dims, tensors).items()
    }
    return {name: float(error.nan_to_num(nan=torch.inf)) for name, error in apart.items()}


@pytest.fixture(scope="module")
def players(solution, tmp_path_factory, request):
    """Name -> what replays the solution, under "", and the chosen wrong kernels, all recorded together."""

    def changed(name: str, file: str, old: str, new: str) -> OpPackage:
        folder = tmp_path_factory.mktemp("wrong") / "op"
        shutil.copytree(solution.path, folder)
        text = (folder / file).read_text()
        assert text.count(old) == 1, name
        (folder / file).write_text(text.replace(old, new))
        return OpPackage(folder)

    names, sizes = chosen(request, "name"), tuple(OPTIONS.values())
    packages = {"": solution}
    packages |= {name: changed(name, *edit) for name, edit in WRONG.items() if name in names}
    orders = [Order(package, sizes, ("fused",), small_grid=True) for package in packages.values()]
    recordings = record_many(orders, "p23")
    return {name: Replay(each, SIZED, "float32") for name, each in zip(packages, recordings, strict=True)}


@pytest.mark.parametrize("dims", OPTIONS.values(), ids=OPTIONS)
def test_the_options_are_right(players, dims):
    assert max(errors(players[""], dims).values()) < 3e-6


@pytest.mark.parametrize(
    "name", [*list(WRONG)[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in list(WRONG)[2:])]
)
def test_a_wrong_index_is_noticed(players, name):
    assert any(max(errors(players[name], dims).values()) > 1e-3 for dims in OPTIONS.values())


def test_hidden_tiles_cost_nothing(players):
    """Of a mask that hides every second block the kernels load fewer keys than of one that says so element by element."""
    by_block, by_element = OPTIONS["blocks of two tiles, causal"], OPTIONS["one head for all, causal"]
    assert by_block[-1] % 16 == 0 and by_element[-1] == 1
    loads, recording = [], players[""].recording
    for hide in (False, True):
        tensors = inputs(by_block)
        tensors["attn_mask"] = torch.zeros_like(tensors["attn_mask"])
        tensors["attn_mask"][..., :, 0] = -torch.inf if hide else 0.0
        player = Replay(recording, SIZED, "float32")
        given = {name: tensor.numpy() for name, tensor in tensors.items()}
        player.run("fused", Case("hidden", "", by_block, ""), given)
        loads.append(sum(launch.counters.global_load.bytes for launch in player.gpu.launches))
    assert loads[1] < 0.75 * loads[0]
