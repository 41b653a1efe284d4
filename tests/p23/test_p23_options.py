"""The options of the flash kernels on the virtual GPU: shared heads, diagonals, masks of blocks; and kernels that get them wrong.

No gate of the puzzle has them, so that a wrong index of theirs is tried here.
"""

import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from harness.devices.recorder import Order, record_many
from harness.devices.replay import Replay
from harness.puzzles.p23.spec import PUZZLE
from harness.spec.puzzle import Case
from harness.toolchain.packages import OpPackage

pytestmark = pytest.mark.compiler

OPTIONS = {
    "causal from the top left": (1, 2, 20, 33, 5, 2, 0, 1),
    "causal from the bottom right": (1, 2, 20, 33, 5, 2, 13, 1),
    "more queries than keys, bottom right": (1, 2, 33, 20, 5, 2, -13, 1),
    "shared heads": (2, 4, 18, 9, 6, 2, 9, 1),
    "one head for all, causal": (1, 3, 35, 35, 4, 1, 0, 1),
    "blocks of a tile": (1, 2, 40, 50, 4, 1, 50, 16),
    "blocks of two tiles, causal": (1, 1, 70, 70, 4, 1, 0, 32),
    "blocks that no tile holds": (1, 1, 40, 50, 4, 1, 0, 3),
}
"""B, N, S, T, d, heads of key and value, diagonal, size of the mask's blocks."""
SIZED = replace(
    PUZZLE, dim_names=("B", "N", "S", "T", "d", "G", "diagonal", "mask_block"), derived_sizes=lambda dims: {}
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


def inputs(dims) -> dict[str, torch.Tensor]:
    """Random tensors, and a mask of blocks, a third of them -inf."""
    B, N, S, T, d, G, _, block = dims
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator) + 0.5

    mask = randn(1, 1, -(-S // block), -(-T // block))
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
    _, _, S, T, *_, diagonal, block = dims
    query, key, value, grad = (tensors[name].double() for name in ("query", "key", "value", "grad_output"))
    mask = tensors["attn_mask"].double().repeat_interleave(block, 2).repeat_interleave(block, 3)[..., :S, :T]
    sees = torch.ones(S, T, dtype=torch.bool).tril(diagonal)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    output = F.scaled_dot_product_attention(
        *leaves, attn_mask=mask.masked_fill(~sees, -torch.inf), enable_gqa=True
    )
    names = ("grad_query", "grad_key", "grad_value")
    gradients = dict(zip(names, torch.autograd.grad(output, leaves, grad), strict=True))
    return {"output": output.detach(), **gradients}


def errors(recording, dims) -> dict[str, float]:
    """What the kernels wrote, each error in units of the largest value."""
    tensors = inputs(dims)
    player = Replay(recording, SIZED, "float32")
    written = player.run("fused", Case("options", "", dims, ""), tensors)
    assert not player.gpu.findings, player.gpu.findings[0].text()
    exact = truth(dims, tensors)
    apart = {
        name: (written[name].double() - right).abs().max() / right.abs().max()
        for name, right in exact.items()
    }
    return {name: float(error.nan_to_num(nan=torch.inf)) for name, error in apart.items()}


@pytest.fixture(scope="module")
def recordings(solution, tmp_path_factory):
    """Name -> recording, of the solution under "" and of every wrong kernel; all recorded by one Mojo program."""
    packages = {"": solution}
    for name, (file, old, new) in WRONG.items():
        folder = tmp_path_factory.mktemp("wrong") / "op"
        shutil.copytree(solution.path, folder)
        text = (folder / file).read_text()
        assert text.count(old) == 1, name
        (folder / file).write_text(text.replace(old, new))
        packages[name] = OpPackage(folder)
    orders = [
        Order(package, tuple(OPTIONS.values()), ("fused",), small_grid=True) for package in packages.values()
    ]
    return dict(zip(packages, record_many(orders, "p23", "float32"), strict=True))


@pytest.mark.parametrize("dims", OPTIONS.values(), ids=OPTIONS)
def test_the_options_are_right(recordings, dims):
    assert max(errors(recordings[""], dims).values()) < 3e-6


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_index_is_noticed(recordings, name):
    assert any(max(errors(recordings[name], dims).values()) > 1e-3 for dims in OPTIONS.values())


def test_hidden_tiles_cost_nothing(recordings):
    """Of a mask that hides every second block the kernels load fewer keys than of one that says so element by element."""
    by_block, by_element = OPTIONS["blocks of two tiles, causal"], OPTIONS["one head for all, causal"]
    assert by_block[-1] % 16 == 0 and by_element[-1] == 1
    loads = []
    for hide in (False, True):
        tensors = inputs(by_block)
        tensors["attn_mask"] = torch.zeros_like(tensors["attn_mask"])
        tensors["attn_mask"][..., :, 0] = -torch.inf if hide else 0.0
        player = Replay(recordings[""], SIZED, "float32")
        player.run("fused", Case("hidden", "", by_block, ""), tensors)
        loads.append(sum(launch.counters.global_load.bytes for launch in player.gpu.launches))
    assert loads[1] < 0.75 * loads[0]
