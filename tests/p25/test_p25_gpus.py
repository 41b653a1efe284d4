"""What runs on several GPUs, as far as processes on gloo show it: other kernels in a ring's blocks, and the bench."""

import csv
import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from typed import three

from book.measure import ring as gpus
from book.measure.ring import ONE, PARALLEL, RING, Job, Own
from harness import cli
from harness.devices.processes import run_ranks
from harness.nn import ring_attention
from harness.nn.ring_blocks import joined, ring_with
from harness.puzzles.p25 import layout
from harness.puzzles.p25.spec import EVERY, PUZZLE, reference
from harness.spec.puzzle import Case
from harness.toolchain import roots

NAMES = ("query", "key", "value", "grad_output")


# ---- Blocks -------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("balanced", [False, True])
def test_flash_attention_s_blocks_fit_into_the_ring(balanced):
    """PyTorch's own flash attention in the place of the blocks, as on GPUs, on two ranks; float64, against the reference."""
    case = Case("flash", "", (1, 2, 2, 32, 8), "causal", 2)
    arrays = PUZZLE.inputs(case, "float64", 0)
    right = reference({name: torch.tensor(array) for name, array in arrays.items()})
    split = {name: layout.split(arrays[name], 2, balanced) for name in NAMES}
    parts = [(balanced, *(np.ascontiguousarray(split[name][rank]) for name in NAMES)) for rank in range(2)]
    by_rank = run_ranks(with_flash_blocks, parts)
    for number, name in enumerate(EVERY):
        got = layout.joined([each[number] for each in by_rank], balanced)
        np.testing.assert_allclose(got, right[name].numpy(), rtol=1e-9, atol=1e-9)


def with_flash_blocks(balanced, *arrays):
    """What a rank of a model gets."""
    *leaves, grad = (torch.from_numpy(array) for array in arrays)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = ring_attention(*leaves, is_causal=True, balanced=balanced, blocks="flash", length=32)
    return [tensor.detach().numpy() for tensor in (out, *torch.autograd.grad(out, leaves, grad))]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_joined_pairs_see_what_single_ones_see(size, balanced, causal):
    """Every (query, key) that the mask shows, once, over all steps; a pair is whole, or the rank's own up to the diagonal."""
    length, counts = 16, np.zeros((16, 16), int)
    for rank in range(size):
        mine = layout.held(rank, size, length, balanced)
        rows = layout.places(rank, size, length, balanced)
        for origin in range(size):
            theirs = layout.held(origin, size, length, balanced)
            columns = layout.places(origin, size, length, balanced)
            pairs = list(joined(mine, theirs, causal))
            assert len(pairs) <= 1
            for queries, of_rows, keys, of_columns in pairs:
                index = np.ix_(rows[of_rows], columns[of_columns])
                block = np.ones((len(rows[of_rows]), len(columns[of_columns])), int)
                counts[index] += np.tril(block) if causal and queries == keys else block
    assert np.array_equal(counts, np.tril(np.ones_like(counts)) if causal else np.ones_like(counts))


@pytest.mark.compiler
@pytest.mark.parametrize("causal", [False, True])
def test_puzzle_23_s_kernels_compute_a_block(attention_graphs, causal):
    """Queries behind the keys, on their diagonal, and a head of key for two of query; against plain float64."""
    torch.manual_seed(0)
    ring, right = ring_with("mojo"), ring_with("solution")
    q, dO = torch.randn(2, 1, 4, 6, 8, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, 5, 8, dtype=torch.float64)
    for queries, keys in (((8, 14), (0, 5)), ((3, 9), (3, 8))):
        rest = (queries, keys, 0.3, causal)
        expected = right["block_forward"](q, k, v, *rest)
        got = ring["block_forward"](q, k, v, *rest)
        out, lse = expected
        delta = (dO * out).sum(-1)
        expected += right["block_backward"](dO, q, k, v, lse, delta, *rest)
        got += ring["block_backward"](dO, q, k, v, lse, delta, *rest)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_under_autocast_what_travels_is_narrow_and_sums_are_wide(group_of_one, monkeypatch):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 8, 4)
    ring, dtypes = ring_with("solution"), set()
    merge = ring["merge"]
    ring["merge"] = lambda *tensors: dtypes.update(each.dtype for each in tensors) or merge(*tensors)
    monkeypatch.setattr("harness.nn.ring.ring_of", lambda blocks: ring)
    with torch.autocast("cpu", torch.bfloat16):
        out = ring_attention(q, k, v)
        assert ring_attention(q.double(), k.double(), v.double()).dtype == torch.float64, "as by torch's own"
    assert out.dtype == torch.bfloat16 and dtypes == {torch.float32, torch.float64}
    expected = torch.nn.functional.scaled_dot_product_attention(
        *three(each.bfloat16().double() for each in (q, k, v))
    )
    assert (out.double() - expected).abs().max() < 2**-8 * expected.abs().max()


@pytest.mark.parametrize(
    ("options", "heads", "words"),
    [
        ({"blocks": "none"}, 2, "blocks: expected one of solution, mojo, flash, cuDNN, got 'none'"),
        ({"blocks": "flash", "balanced": True}, 2, "'flash' takes lengths that 2 divides"),
        ({"blocks": "cuDNN"}, 1, "one head of key and value for each of query, got 9, and 1 for 2"),
    ],
)
def test_blocks_that_do_not_suit(group_of_one, options, heads, words):
    with pytest.raises(ValueError, match=words):
        key, value = torch.zeros(2, 1, heads, 9, 4)
        ring_attention(torch.zeros(1, 2, 9, 4), key, value, **options)


def test_other_blocks_are_for_the_solution(capsys):
    assert cli.main(["p25", "--backward", "--blocks", "flash"]) == 2
    assert "--blocks flash: allowed with argument --solution only" in capsys.readouterr().err
    assert cli.main(["p25", "--backward", "--solution", "--blocks", "flash", "--ranks", "3"]) == 2
    assert "--blocks flash: 6 must divide 512 positions, and 4 heads be 2" in capsys.readouterr().err


def test_mojo_s_blocks_need_room_for_max(capsys, monkeypatch):
    monkeypatch.setattr("harness.puzzles.p25.run.available", lambda: 8 * 2**30)
    assert cli.main(["p25", "--backward", "--solution", "--blocks", "mojo", "--ranks", "4"]) == 5
    assert "--ranks 4: that many processes take 10.9 GiB, and 8.0 are free" in capsys.readouterr().err


@pytest.mark.long
def test_the_command_with_flash_blocks(capfd):
    sizes = ("--dims", "1", "2", "2", "32", "4", "--ranks", "2")
    assert cli.main(["p25", "--backward", "--solution", "--blocks", "flash", *sizes]) == 0
    said = capfd.readouterr().out
    assert "blocks: PyTorch's flash attention for CPUs" in said and "agree with one device" in said


# ---- The bench ----------------------------------------------------------------------------------------------


def torchrun(*arguments, **options):
    """A module under torchrun with two processes on gloo, in a process group of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    environment = {**os.environ, "PYTHONPATH": str(roots.CHECKOUT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *map(str, arguments)], cwd=roots.CHECKOUT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, **options,
    )  # fmt: skip


@pytest.mark.long
def test_the_bench_rehearsed_on_gloo(tmp_path):
    target = tmp_path / "ring.csv"
    sizes = ("--lengths", 64, "--dims", 8, "--seconds", 0.01, "--trace", tmp_path / "trace")
    run = torchrun("book.measure.ring", "--device", "cpu", *sizes, "--csv", target)
    said, err = run.communicate(timeout=300)
    assert run.returncode == 0, said + err
    rows = list(csv.DictReader(target.open()))
    by_key = {(row["candidate"], row["ranks"], row["causal"]): row for row in rows}
    assert set(by_key) == {
        *(("one GPU", "1", causal) for causal in "01"), *(("ring", "2", causal) for causal in "01"),
        *((each, "2", "1") for each in ("ring, blocks alone", "context parallel")),
    }  # fmt: skip
    assert 0 < float(by_key["ring", "2", "1"]["apart"]) < gpus.ALIKE
    assert "NotImplementedError" in by_key["context parallel", "2", "1"]["note"]  # PyTorch has none for CPUs
    traced = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    kinds = [{kind for kind, _, _ in kernels} for kernels in traced[0]["kernels_by_rank"]]
    assert len(kinds) == 2 and all("attention" in each for each in kinds)


def test_the_plan_begins_with_the_telling_sizes_and_one_gpu():
    jobs = list(gpus.plan([32768, 65536, 131072], [128, 64], [1, 2, 4], ["flash", "cuDNN"]))
    assert jobs[0] == Job(ONE, "flash", 1, 32768, 128, True)
    assert [job.length for job in jobs].index(131072) < [job.length for job in jobs].index(65536)
    assert len(set(jobs)) == len(jobs) and not any(job.ranks == 1 and job.candidate != ONE for job in jobs)


def test_a_row_counts_the_slowest_rank_and_the_fastest_gpu():
    ranks = [Own([4.0, 6.0, 5.0], 10, 1e-3), Own([5.0, 5.0, 4.0], 20, 2e-3)]
    job = Job(RING, "flash", 2, 1000, 8, True)
    row = gpus.row(job, ranks)
    assert (row["ms"], row["slowest_ms"], row["bytes_a_rank"], row["apart"]) == (5.0, 6.0, 20, "2.00e-03")
    assert row["tokens_per_s"] == 200_000
    assert gpus.row(dataclasses.replace(job, candidate=ONE), ranks)["ms"] == 4.0


def test_percent_of_the_ideal():
    alone = {}
    one, ring = Job(ONE, "flash", 1, 64, 8, True), Job(RING, "flash", 2, 64, 8, True)
    assert gpus.of_ideal(ring, 5.0, alone) == {}, "one GPU has not been timed"
    assert gpus.of_ideal(one, 8.0, alone) == {"of_ideal": 1.0}
    assert gpus.of_ideal(ring, 5.0, alone) == {"of_ideal": 0.8}
    assert gpus.of_ideal(dataclasses.replace(ring, candidate=PARALLEL), None, alone) == {}
    assert gpus.of_ideal(dataclasses.replace(ring, candidate=gpus.BLOCKS), 5.0, alone) == {}
    assert gpus.of_ideal(dataclasses.replace(ring, d=16), 5.0, alone) == {}, "a size of its own"


def test_what_fails_is_a_note():
    own = Own()
    with own.heard():
        raise RuntimeError("out of\nmemory")
    assert own.note == "RuntimeError: out of memory"


def test_a_length_that_ranks_cannot_share_equally(group_of_one, monkeypatch):
    world = gpus.World(torch.device("cpu"), {1: None, 2: None}, None)
    monkeypatch.setattr(gpus, "world_of", lambda device, seconds: world)
    with pytest.raises(SystemExit, match="--lengths 30: must be a multiple of 4, twice the ranks"):
        gpus.main(["--device", "cpu", "--lengths", "30"])


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "transfer"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "elements"),
    ],
)
def test_kinds_of_kernels(kernel, kind):
    assert gpus.kind_of(kernel) == kind
