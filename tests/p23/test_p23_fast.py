"""The fast variant on the virtual GPU: right against float64 in every option, without a finding, the same bits in every run."""

import functools
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from players import anew
from typed import present

from harness.check.reference import Reference
from harness.devices.recorder import Order, RecordedLaunch, record_many
from harness.devices.replay import Replay
from harness.devices.targets import Target
from harness.puzzles.p23.spec import PUZZLE
from harness.spec.puzzle import Case
from harness.spec.rounding import as_array, values

pytestmark = pytest.mark.compiles

VIRTUAL = Target("virtual", None, "virtual GPU (sm_90a)")
QUANTITIES = [*PUZZLE.forward, "lse", "delta", *PUZZLE.backward]
# B, N, S, T, d, heads of key and value, diagonal, size of the mask's blocks: 0 for no mask; then the axes of the mask that have
# the size 1, of batch, heads, queries and keys: without them batch and heads.
OPTIONS = {
    "whole tiles": (1, 2, 128, 128, 64, 2, 128, 0),
    "whole tiles, wide, shared heads": (1, 2, 128, 256, 128, 1, 256, 0),
    "ragged": (2, 1, 131, 75, 64, 1, 75, 0),
    "causal from the top left": (1, 2, 140, 140, 64, 2, 0, 0),
    "causal from the bottom right, shared heads": (1, 4, 70, 200, 64, 2, 130, 0),
    "queries that see no key": (1, 1, 150, 70, 64, 1, -80, 0),
    "narrow": (1, 2, 40, 30, 24, 1, 30, 0),
    "wide": (1, 2, 130, 70, 128, 2, 70, 0),
    "wide, causal, shared heads": (1, 2, 133, 133, 88, 1, 0, 0),
    "mask": (1, 2, 70, 66, 64, 1, 66, 1),
    "mask of blocks, causal": (1, 1, 200, 200, 64, 1, 0, 32),
    "wide, mask": (1, 1, 40, 50, 80, 1, 50, 1),
    "odd head": (1, 1, 33, 34, 13, 1, 34, 0),
    "padding, shared heads": (3, 4, 70, 200, 64, 2, 200, 1, 0, 1, 1, 0),
    "padding, wide": (3, 1, 130, 72, 128, 1, 72, 1, 0, 1, 1, 0),
    "mask of every score, causal": (2, 2, 140, 136, 64, 1, -3, 1, 0, 0, 0, 0),
    "mask of every score, wide": (1, 2, 70, 200, 80, 2, 200, 1, 0, 0, 0, 0),
    "mask of every head, ragged": (2, 2, 66, 75, 64, 2, 75, 1, 1, 0, 0, 0),
    "mask of every query": (2, 1, 66, 75, 64, 1, 75, 1, 0, 1, 0, 1),
    "mask of blocks, wide": (1, 1, 100, 130, 128, 1, 130, 16),
    "wider than a row of 256 bytes": (1, 2, 70, 75, 136, 1, 5, 0),
    "of 160, odd": (1, 1, 33, 40, 129, 1, 40, 0),
    "of 192": (1, 1, 70, 34, 192, 1, 34, 0),
    "of 192, mask, causal": (1, 2, 40, 50, 176, 1, 10, 1),
    "of 256, shared heads, causal": (1, 2, 66, 66, 256, 1, 0, 0),
    "of 256, a row short": (1, 1, 40, 40, 200, 1, -10, 0),
    "of 256, odd, mask of blocks": (1, 1, 66, 40, 251, 1, 40, 32),
}
NARROWER = ("ragged", "mask", "of 256, a row short")
"""What is tried in float16 too."""
RUNS = [("bfloat16", name) for name in OPTIONS] + [("float16", name) for name in NARROWER]


def mask_shape(dims) -> tuple[int, ...]:
    """The axes of the mask, in blocks."""
    side, one = max(1, dims[7]), dims[8:] or (1, 1, 0, 0)
    sizes = (*dims[:2], -(-dims[2] // side), -(-dims[3] // side))
    return tuple(1 if single else size for size, single in zip(sizes, one, strict=True))


def mask_sizes(dims) -> dict[str, int]:
    """By the names that the puzzle has for them."""
    return dict(zip(("mask_b", "mask_n", "mask_s", "mask_t"), mask_shape(dims), strict=True))


FAST = (*PUZZLE.variants["fast"], *present(PUZZLE.mojo_rung).recorded["fast"])
"""The ops of the variant, and that of the mask's gradient."""
SIZED = replace(
    PUZZLE,
    variants={**PUZZLE.variants, "fast": FAST},
    dim_names=("B", "N", "S", "T", "d", "G", "diagonal", "mask_block", "one_b", "one_n", "one_s", "one_t"),
    derived_sizes=mask_sizes,
)


def inputs(dims, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random tensors, and a mask, a third of it -inf; NaN where there is none. Where it is one row for each entry of the batch, the
    second entry has 64 keys that are seen, and the third none."""
    B, N, S, T, d, G, _, block, *one = dims
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return (torch.randn(shape, generator=generator) + 0.25).to(dtype)

    mask = randn(*mask_shape(dims))
    mask[torch.rand(mask.shape, generator=generator) < 0.33] = -torch.inf
    if one == [0, 1, 1, 0]:
        mask[1, ..., 64:], mask[2] = -torch.inf, -torch.inf
    return {
        "query": randn(B, N, S, d),
        "key": randn(B, G, T, d),
        "value": randn(B, G, T, d),
        "grad_output": randn(B, N, S, d),
        "attn_mask": mask if block else torch.full_like(mask, torch.nan),
    }


def truth(dims, given) -> dict[str, torch.Tensor]:
    """PyTorch's answer in float64, with the mask written out element by element."""
    S, T, diagonal, block = dims[2], dims[3], dims[6], dims[7]
    query, key, value, grad = (given[name].double() for name in ("query", "key", "value", "grad_output"))
    added = given["attn_mask"].double() if block else torch.zeros(S, T, dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, added)]
    mask = added
    for axis, length in ((2, S), (3, T)) if block > 1 else ():
        mask = mask.repeat_interleave(block, axis).narrow(axis, 0, length)
    mask = mask.masked_fill(~torch.ones(S, T, dtype=torch.bool).tril(diagonal), -torch.inf)
    output = F.scaled_dot_product_attention(*leaves[:3], attn_mask=mask, enable_gqa=True)
    names = ("grad_query", "grad_key", "grad_value", "grad_attn_mask")
    gradients = dict(zip(names, torch.autograd.grad(output, leaves, grad), strict=True))
    if block != 1 or dims[4] > 128 or mask_shape(dims)[3] == 1:  # whose gradient is not made
        del gradients["grad_attn_mask"]
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT / query.shape[-1] ** 0.5
    lse = torch.logsumexp(scores + mask, -1)
    return {"output": output.detach(), "lse": lse.detach(), **gradients}


@pytest.fixture(scope="module")
def recording(solution):
    """dtype -> what the fast variant launches at every size that is tested here."""
    cases = sorted({case.dims for case in PUZZLE.cases(None)})
    sizes = {"bfloat16": (*cases, *OPTIONS.values()), "float16": tuple(OPTIONS[name] for name in NARROWER)}

    return functools.cache(
        lambda dtype: record_many([Order(solution, sizes[dtype], ("fast",))], "p23", dtype)[0]
    )


@pytest.fixture(scope="module")
def puzzle_player(recording):
    """What replays the puzzle's own cases."""
    return Replay(recording("bfloat16"), PUZZLE, "bfloat16")


@pytest.fixture(scope="module")
def players(recording):
    """dtype -> what replays the recording."""
    return functools.cache(lambda dtype: Replay(recording(dtype), SIZED, dtype))


def run(players, dims, dtype: str, blocks: str = "natural"):
    """What the fast variant wrote at some sizes, and the machine."""
    player = anew(players(dtype), blocks)
    given = {name: as_array(tensor) for name, tensor in inputs(dims, getattr(torch, dtype)).items()}
    return player.run("fast", Case("options", "", dims, ""), given), player.gpu


@pytest.mark.parametrize(("dtype", "name"), RUNS)
def test_right_in_every_option_without_a_finding(players, dtype, name):
    dims = OPTIONS[name]
    written, gpu = run(players, dims, dtype)
    assert not gpu.findings, gpu.findings[0].text()
    limit = torch.finfo(getattr(torch, dtype)).eps
    for quantity, right in truth(dims, inputs(dims, getattr(torch, dtype))).items():
        got = torch.from_numpy(values(written[quantity]))
        assert torch.equal(got.isfinite(), right.isfinite()), quantity
        right, got = (torch.where(right.isfinite(), tensor, 0) for tensor in (right, got))
        # What a mask adds to all keys of a query changes nothing: its gradient is 0, and so is the largest of it.
        assert (got - right).abs().max() < limit * max(right.abs().max(), 1e-3), quantity


@pytest.mark.parametrize("case", PUZZLE.cases(None), ids=lambda case: case.name)
def test_right_in_the_puzzles_cases(puzzle_player, case):
    reference = Reference(PUZZLE, "bfloat16", seed=0)
    player = anew(puzzle_player)
    outputs = player.run("fast", case, reference.inputs(case))
    verdicts = reference.compared(case, VIRTUAL, "fast", outputs, QUANTITIES)
    assert {name: verdict for name, verdict in verdicts.items() if not verdict.ok} == {}
    assert not player.gpu.findings, player.gpu.findings[0].text()


@pytest.mark.parametrize("name", ["ragged", "causal from the bottom right, shared heads"])
def test_the_same_bits_in_whatever_order_the_blocks_run(players, name):
    first, gpu = run(players, OPTIONS[name], "bfloat16")
    second, _ = run(players, OPTIONS[name], "bfloat16", blocks="shuffled:5")
    for quantity, tensor in first.items():
        assert tensor.tobytes() == second[quantity].tobytes(), quantity
    assert any(launch.grid[0] > 1 for launch in gpu.launches)


def test_tensor_cores_multiply_and_nothing_is_added_with_atomics(recording):
    """In every option."""
    launched = recording("bfloat16")
    every = (launch for events in launched.cases.values() for launch in events)
    names = {launch.symbol: launch.name for launch in every if isinstance(launch, RecordedLaunch)}
    products = {"fast_forward", "fast_query", "fast_key_value", "fast_mask_gradient"}
    assert set(names.values()) == products | {"fast_delta"}
    for symbol, name in names.items():
        assert ("mma.sync" in launched.ptx[symbol]) == (name in products)
    assert not any(re.search(r"\b(atom|red)\.", ptx) for ptx in launched.ptx.values())
