"""The fast variant on the virtual GPU: right against float64 in every option, without a finding, the same bits in every run."""

import functools
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from harness.check.reference import Reference, judge_variant
from harness.devices.recorder import Order, RecordedLaunch, record_many
from harness.devices.replay import Replay
from harness.devices.targets import Target
from harness.puzzles.p23.spec import PUZZLE
from harness.spec.puzzle import Case

pytestmark = pytest.mark.compiler

VIRTUAL = Target("virtual", None, "virtual GPU (sm_90a)")
QUANTITIES = [*PUZZLE.forward, "lse", "delta", *PUZZLE.backward]
# B, N, S, T, d, heads of key and value, diagonal, size of the mask's blocks: 0 for no mask.
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
}
NARROWER = ("ragged", "mask")
"""What is tried in float16 too."""
RUNS = [("bfloat16", name) for name in OPTIONS] + [("float16", name) for name in NARROWER]


def mask_sizes(dims) -> dict[str, int]:
    """The axes of the mask, in blocks."""
    side = max(1, dims[7])
    return {"mask_b": 1, "mask_n": 1, "mask_s": -(-dims[2] // side), "mask_t": -(-dims[3] // side)}


SIZED = replace(
    PUZZLE, dim_names=("B", "N", "S", "T", "d", "G", "diagonal", "mask_block"), derived_sizes=mask_sizes
)


def inputs(dims, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random tensors, and a mask of blocks, a third of them -inf; 0 where there is none."""
    B, N, S, T, d, G, _, block = dims
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return (torch.randn(shape, generator=generator) + 0.25).to(dtype)

    side = max(1, block)
    mask = randn(1, 1, -(-S // side), -(-T // side))
    mask[torch.rand(mask.shape, generator=generator) < 0.33] = -torch.inf
    return {
        "query": randn(B, N, S, d),
        "key": randn(B, G, T, d),
        "value": randn(B, G, T, d),
        "grad_output": randn(B, N, S, d),
        "attn_mask": mask if block else torch.full_like(mask, torch.nan),
    }


def truth(dims, given) -> dict[str, torch.Tensor]:
    """PyTorch's answer in float64, with the mask written out element by element."""
    _, _, S, T, *_, diagonal, block = dims
    query, key, value, grad = (given[name].double() for name in ("query", "key", "value", "grad_output"))
    mask = torch.zeros(S, T, dtype=torch.float64)
    if block:
        mask = (
            given["attn_mask"].double().repeat_interleave(block, 2).repeat_interleave(block, 3)[..., :S, :T]
        )
    hidden = ~torch.ones(S, T, dtype=torch.bool).tril(diagonal)
    mask = mask.masked_fill(hidden, -torch.inf)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    output = F.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    names = ("grad_query", "grad_key", "grad_value")
    gradients = dict(zip(names, torch.autograd.grad(output, leaves, grad), strict=True))
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


def run(recording, dims, dtype: str, blocks: str = "natural"):
    """What the fast variant wrote at some sizes, and the machine."""
    player = Replay(recording(dtype), SIZED, dtype, blocks=blocks)
    return player.run("fast", Case("options", "", dims, ""), inputs(dims, getattr(torch, dtype))), player.gpu


@pytest.mark.parametrize(("dtype", "name"), RUNS)
def test_right_in_every_option_without_a_finding(recording, dtype, name):
    dims = OPTIONS[name]
    written, gpu = run(recording, dims, dtype)
    assert not gpu.findings, gpu.findings[0].text()
    limit = torch.finfo(getattr(torch, dtype)).eps
    for quantity, right in truth(dims, inputs(dims, getattr(torch, dtype))).items():
        got = written[quantity].double()
        assert torch.equal(got.isfinite(), right.isfinite()), quantity
        right, got = (torch.where(right.isfinite(), tensor, 0) for tensor in (right, got))
        assert (got - right).abs().max() < limit * right.abs().max(), quantity


@pytest.mark.parametrize("case", PUZZLE.cases(None), ids=lambda case: case.name)
def test_right_in_the_puzzles_cases(recording, case):
    reference = Reference(PUZZLE, "bfloat16", seed=0)
    player = Replay(recording("bfloat16"), PUZZLE, "bfloat16")
    outputs = player.run("fast", case, reference.inputs(case))
    verdicts = judge_variant(reference, case, VIRTUAL, "fast", outputs, QUANTITIES)
    assert {name: verdict for name, verdict in verdicts.items() if not verdict.ok} == {}
    assert not player.gpu.findings, player.gpu.findings[0].text()


@pytest.mark.parametrize("name", ["ragged", "causal from the bottom right, shared heads"])
def test_the_same_bits_in_whatever_order_the_blocks_run(recording, name):
    first, gpu = run(recording, OPTIONS[name], "bfloat16")
    second, _ = run(recording, OPTIONS[name], "bfloat16", blocks="shuffled:5")
    for quantity, tensor in first.items():
        assert torch.equal(tensor.view(torch.uint8), second[quantity].view(torch.uint8)), quantity
    assert any(launch.grid[0] > 1 for launch in gpu.launches)


def test_tensor_cores_multiply_and_nothing_is_added_with_atomics(recording):
    """Of heads up to 128 columns; wider ones take the flash variant's kernels."""
    launched = recording("bfloat16")
    narrow = {launch.symbol: launch.name for (_, dims), events in launched.cases.items() if dims[4] <= 128
              for launch in events if isinstance(launch, RecordedLaunch)}  # fmt: skip
    assert set(narrow.values()) == {"fast_forward", "fast_delta", "fast_query", "fast_key_value"}
    for symbol, name in narrow.items():
        assert ("mma.sync" in launched.ptx[symbol]) == (name != "fast_delta")
    assert not any(re.search(r"\b(atom|red)\.", ptx) for ptx in launched.ptx.values())
