"""Ring attention's blocks and the benchmark for several GPUs, tested with processes on gloo where possible."""

import csv
import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from typed import three

from book.measure import ring as gpus
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
    """Queries after the keys or on the diagonal; two query heads share a key head."""
    torch.manual_seed(0)
    q, dO = torch.randn(2, 1, 4, 6, 8, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, 5, 8, dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    scores = 0.3 * (q @ k.repeat_interleave(2, 1).mT)
    if causal:
        scores = scores.masked_fill(torch.arange(*keys) > torch.arange(*queries)[:, None], -torch.inf)
    lse, out = torch.logsumexp(scores, -1), torch.softmax(scores, -1) @ v.repeat_interleave(2, 1)
    expected = (out, lse, *torch.autograd.grad(out, leaves, dO))
    rest = (queries, keys, 0.3, causal, False)
    got = ring.run_block_forward(q, k, v, *rest)
    delta = (dO * out).sum(-1)
    got += ring.run_block_backward(dO, q, k, v, lse.detach(), delta.detach(), *rest)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


def test_autocast_sends_narrow_tensors_and_sums_in_float32(group_of_one, monkeypatch):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 8, 4)
    merge, dtypes = ring.merge, set()

    def record_dtypes(*tensors):
        dtypes.update(each.dtype for each in tensors)
        return merge(*tensors)

    monkeypatch.setattr(ring, "merge", record_dtypes)
    with torch.autocast("cpu", torch.bfloat16):
        out = ring_attention(q, k, v)
        assert ring_attention(q.double(), k.double(), v.double()).dtype == torch.float64, "as in PyTorch"
    assert out.dtype == torch.bfloat16 and dtypes == {torch.float32, torch.float64}
    expected = torch.nn.functional.scaled_dot_product_attention(
        *three(each.bfloat16().double() for each in (q, k, v))
    )
    assert (out.double() - expected).abs().max() < 2**-8 * expected.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("balanced", [False, True])
def test_gpu_blocks_run_the_kernels(group_of_one, balanced):
    generator = torch.Generator("cuda").manual_seed(0)
    *leaves, grad = torch.randn(4, 1, 2, 200, 64, generator=generator, device="cuda").bfloat16()
    leaves = three(leaf.requires_grad_() for leaf in leaves)
    assert has_kernels(leaves[0]) and not has_kernels(leaves[0].float())
    out = ring_attention(*leaves, is_causal=True, balanced=balanced)
    wide = three(leaf.detach().double().requires_grad_() for leaf in leaves)
    right = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
    gradients = zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(right, wide, grad.double()), strict=True
    )
    for one, other in ((out, right), *gradients):
        assert (one.double() - other).abs().max() < 2**-7 * other.abs().max()


# ---- The bench ----------------------------------------------------------------------------------------------


def torchrun(*arguments, **options):
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
    assert len(kinds) == 2 and all(kinds)


def test_plan_starts_with_one_gpu():
    jobs = list(gpus.plan([32768, 65536, 131072], [128, 64], [1, 2, 4], ["Mojo", "flash", "cuDNN"]))
    assert jobs[0] == Job(ONE, "Mojo", 1, 32768, 128, True)
    assert [job.length for job in jobs].index(131072) < [job.length for job in jobs].index(65536)
    assert len(set(jobs)) == len(jobs) and not any(job.ranks == 1 and job.candidate != ONE for job in jobs)


def test_row_uses_the_slowest_rank_and_the_fastest_gpu():
    ranks = [Own([4.0, 6.0, 5.0], 10, 1e-3), Own([5.0, 5.0, 4.0], 20, 2e-3)]
    job = Job(RING, "flash", 2, 1000, 8, True)
    row = gpus.row(job, ranks)
    assert (row["ms"], row["slowest_ms"], row["bytes_a_rank"], row["apart"]) == (5.0, 6.0, 20, "2.00e-03")
    assert row["tokens_per_s"] == 200_000
    assert gpus.row(dataclasses.replace(job, candidate=ONE), ranks)["ms"] == 4.0


def test_share_of_the_ideal_time():
    alone = {}
    one, ring = Job(ONE, "flash", 1, 64, 8, True), Job(RING, "flash", 2, 64, 8, True)
    assert gpus.of_ideal(ring, 5.0, alone) == {}, "not yet timed on one GPU"
    assert gpus.of_ideal(one, 8.0, alone) == {"of_ideal": 1.0}
    assert gpus.of_ideal(ring, 5.0, alone) == {"of_ideal": 0.8}
    assert gpus.of_ideal(dataclasses.replace(ring, candidate=PARALLEL), None, alone) == {}
    assert gpus.of_ideal(dataclasses.replace(ring, candidate=gpus.BLOCKS), 5.0, alone) == {}
    assert gpus.of_ideal(dataclasses.replace(ring, d=16), 5.0, alone) == {}, "another size"


def test_failure_becomes_a_note():
    own = Own()
    with own.heard():
        raise RuntimeError("out of\nmemory")
    assert own.note == "RuntimeError: out of memory"


def test_uneven_length_is_split(group_of_one, monkeypatch):
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
        ("fast_hopper_keys_hopper_key_value_kernel", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "elements"),
    ],
)
def test_kinds_of_kernels(kernel, kind):
    assert gpus.kind_of(kernel) == kind
