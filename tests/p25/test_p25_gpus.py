"""Ring attention's blocks, and its benchmark for several GPUs, tested with gloo where possible."""

import csv
import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from typed import as_triple

from book.measure import ring as ring_bench
from book.measure.ring import ONE, PARALLEL, RING, Job, Own
from harness.nn import ring, ring_attention
from harness.nn.attention_layer import has_kernels
from harness.toolchain import roots

# ---- Blocks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys"), [((8, 14), (0, 5)), ((3, 9), (3, 8))], ids=["after", "diagonal"]
)
def test_block_matches_autograd(causal, queries, keys):
    """Query blocks after the keys or on the diagonal, with two query heads per key head."""
    torch.manual_seed(0)
    q, dO = torch.randn(2, 1, 4, 6, 8, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, 5, 8, dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    scores = 0.3 * (q @ k.repeat_interleave(2, 1).mT)
    if causal:
        scores = scores.masked_fill(torch.arange(*keys) > torch.arange(*queries)[:, None], -torch.inf)
    lse, out = torch.logsumexp(scores, -1), torch.softmax(scores, -1) @ v.repeat_interleave(2, 1)
    expected = (out, lse, *torch.autograd.grad(out, leaves, dO))
    arguments = (queries, keys, 0.3, causal, False)
    got = ring.run_block_forward(q, k, v, *arguments)
    delta = (dO * out).sum(-1)
    got += ring.run_block_backward(dO, q, k, v, lse.detach(), delta.detach(), *arguments)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


def test_autocast_sends_bfloat16_and_accumulates_in_float32(group_of_one, monkeypatch):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 8, 4)
    merge, dtypes = ring.merge_blocks, set()

    def record_dtypes(*tensors):
        dtypes.update(tensor.dtype for tensor in tensors)
        return merge(*tensors)

    monkeypatch.setattr(ring, "merge_blocks", record_dtypes)
    with torch.autocast("cpu", torch.bfloat16):
        out = ring_attention(q, k, v)
        assert ring_attention(q.double(), k.double(), v.double()).dtype == torch.float64, "as in PyTorch"
    assert out.dtype == torch.bfloat16 and dtypes == {torch.float32, torch.float64}
    expected = torch.nn.functional.scaled_dot_product_attention(
        *as_triple(tensor.bfloat16().double() for tensor in (q, k, v))
    )
    assert (out.double() - expected).abs().max() < 2**-8 * expected.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("balanced", [False, True])
def test_gpu_blocks_run_the_kernels(group_of_one, balanced):
    generator = torch.Generator("cuda").manual_seed(0)
    *leaves, grad = torch.randn(4, 1, 2, 200, 64, generator=generator, device="cuda").bfloat16()
    leaves = as_triple(leaf.requires_grad_() for leaf in leaves)
    assert has_kernels(leaves[0]) and not has_kernels(leaves[0].float())
    out = ring_attention(*leaves, is_causal=True, balanced=balanced)
    leaves_float64 = as_triple(leaf.detach().double().requires_grad_() for leaf in leaves)
    reference = torch.nn.functional.scaled_dot_product_attention(*leaves_float64, is_causal=True)
    gradients = zip(
        torch.autograd.grad(out, leaves, grad),
        torch.autograd.grad(reference, leaves_float64, grad.double()),
        strict=True,
    )
    for actual, expected in ((out, reference), *gradients):
        assert (actual.double() - expected).abs().max() < 2**-7 * expected.abs().max()


# ---- The benchmark ----------------------------------------------------------------------------------------------


def start_torchrun(*arguments, **options):
    """Start a module under torchrun with two processes on gloo, in a new process group."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    environment = {**os.environ, "PYTHONPATH": str(roots.CHECKOUT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *map(str, arguments)], cwd=roots.CHECKOUT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, **options,
    )  # fmt: skip


@pytest.mark.slow
def test_bench_runs_on_gloo(tmp_path):
    target = tmp_path / "ring.csv"
    sizes = ("--lengths", 64, "--dims", 8, "--seconds", 0.01)
    run = start_torchrun("book.measure.ring", "--device", "cpu", *sizes, "--csv", target)
    stdout, stderr = run.communicate(timeout=300)
    assert run.returncode == 0, stdout + stderr
    rows = list(csv.DictReader(target.open()))
    by_key = {(row["candidate"], row["ranks"], row["causal"]): row for row in rows}
    assert set(by_key) == {
        *(("one GPU", "1", causal) for causal in "01"), *(("ring", "2", causal) for causal in "01"),
        *((candidate, "2", "1") for candidate in ("ring, blocks alone", "context parallel")),
    }  # fmt: skip
    assert 0 < float(by_key["ring", "2", "1"]["apart"]) < ring_bench.ALIKE
    assert (
        "NotImplementedError" in by_key["context parallel", "2", "1"]["note"]
    )  # not implemented in PyTorch for CPUs


def test_plan_measures_one_gpu_first():
    jobs = list(ring_bench.plan([32768, 65536, 131072], [128, 64], [1, 2, 4], ["Mojo", "flash", "cuDNN"]))
    assert jobs[0] == Job(ONE, "Mojo", 1, 32768, 128, True)
    assert [job.length for job in jobs].index(131072) < [job.length for job in jobs].index(65536)
    assert len(set(jobs)) == len(jobs) and not any(job.ranks == 1 and job.candidate != ONE for job in jobs)


def test_row_uses_slowest_rank_and_fastest_gpu():
    ranks = [Own([4.0, 6.0, 5.0], 10, 1e-3), Own([5.0, 5.0, 4.0], 20, 2e-3)]
    job = Job(RING, "flash", 2, 1000, 8, True)
    row = ring_bench.row(job, ranks)
    assert (row["ms"], row["slowest_ms"], row["bytes_a_rank"], row["apart"]) == (5.0, 6.0, 20, "2.00e-03")
    assert row["tokens_per_s"] == 200_000
    assert ring_bench.row(dataclasses.replace(job, candidate=ONE), ranks)["ms"] == 4.0


def test_efficiency_relative_to_one_gpu():
    single_gpu_times = {}
    single, ring = Job(ONE, "flash", 1, 64, 8, True), Job(RING, "flash", 2, 64, 8, True)
    assert ring_bench.of_ideal(ring, 5.0, single_gpu_times) == {}, "one GPU has not been timed yet"
    assert ring_bench.of_ideal(single, 8.0, single_gpu_times) == {"of_ideal": 1.0}
    assert ring_bench.of_ideal(ring, 5.0, single_gpu_times) == {"of_ideal": 0.8}
    assert ring_bench.of_ideal(dataclasses.replace(ring, candidate=PARALLEL), None, single_gpu_times) == {}
    assert (
        ring_bench.of_ideal(dataclasses.replace(ring, candidate=ring_bench.BLOCKS), 5.0, single_gpu_times)
        == {}
    )
    assert ring_bench.of_ideal(dataclasses.replace(ring, d=16), 5.0, single_gpu_times) == {}, "another size"


def test_exception_is_recorded_as_note():
    measurement = Own()
    with measurement.heard():
        raise RuntimeError("out of\nmemory")
    assert measurement.note == "RuntimeError: out of memory"


def test_length_must_be_divisible_by_twice_the_ranks(group_of_one, monkeypatch):
    world = ring_bench.World(torch.device("cpu"), {1: None, 2: None}, None)
    monkeypatch.setattr(ring_bench, "world_of", lambda device, seconds: world)
    with pytest.raises(SystemExit, match="--lengths 30: must be a multiple of 4, twice the ranks"):
        ring_bench.main(["--device", "cpu", "--lengths", "30"])
