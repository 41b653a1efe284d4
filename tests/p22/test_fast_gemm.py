"""The matrix products of the fast variant on the virtual GPU, against NumPy in float64: every form, ragged, unaligned."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.check.compare import EPSILON
from harness.devices.recorder import LAUNCHER, RecordedLaunch, RecordedTensor, parse
from harness.toolchain import roots
from harness.vgpu.machine import VirtualGPU

pytestmark = pytest.mark.compiler

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("float32", "tf32", "bfloat16", "float16")
FORMS = ("nt", "nn", "tn")
LONG = (1, 8, 4096, 0)
# m, n, k, shift: whole tiles, nothing that divides anything, one row, several tiles each way, unaligned addresses, and
# more turns along k than the kernels have buffers.
SIZES = [(64, 64, 64, 0), (37, 53, 29, 0), (1, 8, 16, 0), (130, 200, 72, 0), (40, 48, 56, 1), (1, 8, 520, 0)]


@pytest.fixture(scope="module")
def products():
    """Kind -> the recorded products."""
    recorded = {}

    def of(kind: str):
        if kind not in recorded:
            flags = ["-DTF32"] if kind == "tf32" else []
            dtype = "float32" if kind == "tf32" else kind
            package = roots.op_package(roots.solutions(), "p22").path
            command = [
                *(str(Path(sys.executable).with_name("mojo")), "run", "--target-accelerator", "sm_90a"),
                *("-D", f"DTYPE={dtype}", *flags, "-I", str(LAUNCHER.parent), "-I", str(package.parent)),
                *(
                    str(ROOT / "tests" / "p22" / "p22_gemm.mojo"),
                    *(str(number) for size in (*SIZES, LONG) for number in size),
                ),
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=550)
            assert done.returncode == 0, done.stderr
            recorded[kind] = parse(done.stdout)
        return recorded[kind]

    return of


def operands(form: str, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """a and b as the form stores them, and the bias."""
    random = np.random.default_rng([m, n, k])
    a = random.standard_normal((m, k)) + 0.5
    b = random.standard_normal((k, n)) - 0.25
    bias = 3 * random.standard_normal(n)
    return (a.T.copy() if form == "tn" else a), (b.T.copy() if form == "nt" else b), bias


def run(recording, case, tensors: dict[str, torch.Tensor], result: torch.Tensor):
    """Launches a recorded product on tensors; returns what it wrote and the machine."""
    gpu = VirtualGPU()
    shift = case[1][3]
    places = {}
    for event in recording.cases[case]:
        if isinstance(event, RecordedTensor):
            tensor = tensors.get(event.name, result)
            padded = torch.cat([tensor.new_full((shift,), torch.nan), tensor.reshape(-1)])
            address = gpu.allocate(event.nbytes, event.name)
            gpu.write(address, padded.view(torch.uint8).numpy())
            places[event.name] = (event.address, event.nbytes, address)
        elif isinstance(event, RecordedLaunch):
            arguments = [moved(argument, places.values()) for argument in event.arguments]
            kernel = gpu.load(recording.ptx[event.symbol]).kernels[event.symbol]
            gpu.launch(kernel, event.grid, event.block, arguments, event.shared, name=event.name)
    _, nbytes, address = places["c"]
    written = torch.from_numpy(gpu.read(address, nbytes)).view(result.dtype)
    assert written[:shift].isnan().all(), "nothing in front of c"
    return written[shift:].reshape(result.shape), gpu


def moved(argument: bytes, places) -> bytes:
    """An address of the recording as the one on the machine; anything else as it is."""
    value = int.from_bytes(argument, "little")
    for recorded, nbytes, address in places:
        if len(argument) == 8 and recorded <= value < recorded + nbytes:
            return (address + value - recorded).to_bytes(8, "little")
    return argument


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [64, 128])
def test_every_product_is_right_to_rounding(products, kind, form, tile):
    dtype = getattr(torch, "float32" if kind == "tf32" else kind)
    for size in SIZES:
        m, n, k, _ = size
        a, b, bias = (torch.from_numpy(array).to(dtype) for array in operands(form, m, n, k))
        result = torch.full((m, n), torch.nan, dtype=dtype)
        case = (f"{form}{tile}", size)
        got, gpu = run(products(kind), case, {"a": a, "b": b, "bias": bias}, result)
        left = (a.T if form == "tn" else a).double()
        right = (b.T if form == "nt" else b).double()
        exact = left @ right + (bias.double() if form == "nt" else 0)
        # What rounding may do: to the factors (tf32 keeps 10 bits), to k additions, to the result.
        terms = left.abs() @ right.abs() + (bias.double().abs() if form == "nt" else 0)
        factor = 2 * 2.0**-11 if kind == "tf32" else 0.0
        allowed = terms * (factor + k * 2.0**-24) + exact.abs() * EPSILON[str(dtype).removeprefix("torch.")]
        assert ((got.double() - exact).abs() <= allowed).all(), (size, (got.double() - exact).abs().max())
        assert not gpu.findings, gpu.findings[0].text()


def test_tf32_rounds_to_nearest_where_cutting_off_would_lose_a_bit(products):
    """1 + 3 * 2^-12 lies nearer to 1 + 2^-10 than to 1; 64 products of a cut-off factor would be far below."""
    m = n = k = 64
    a = torch.full((m, k), 1 + 3 * 2.0**-12)
    b = torch.ones(n, k)
    for form in FORMS:
        left, right = (a.T.contiguous() if form == "tn" else a), (b if form == "nt" else b.T.contiguous())
        tensors = {"a": left, "b": right, "bias": torch.zeros(n)}
        got, _ = run(products("tf32"), (f"{form}64", (m, n, k, 0)), tensors, torch.full((m, n), torch.nan))
        assert (got == 64 * (1 + 2.0**-10)).all(), form


@pytest.mark.parametrize("tile", [64, 128])
def test_long_float32_sums_lose_less_than_one_running_sum(products, tile):
    m, n, k, _ = LONG
    random = np.random.default_rng(7)
    a, b = (
        random.uniform(0.5, 1.5, (m, k)).astype(np.float32),
        random.uniform(0.5, 1.5, (k, n)).astype(np.float32),
    )
    tensors = {"a": torch.from_numpy(a), "b": torch.from_numpy(b), "bias": torch.zeros(n)}
    got, _ = run(products("float32"), (f"nn{tile}", LONG), tensors, torch.zeros(m, n))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    running = np.zeros(n, np.float32)
    for j in range(k):
        running = (running + a[0, j].astype(np.float64) * b[j]).astype(np.float32)
    plain = np.sqrt(((running - exact) ** 2).mean())
    assert np.sqrt(((got.numpy() - exact) ** 2).mean()) < plain / 3


@pytest.mark.parametrize("kind", KINDS)
def test_not_a_number_and_infinity_stay_in_their_row(products, kind):
    dtype = getattr(torch, "float32" if kind == "tf32" else kind)
    size = (37, 53, 29, 0)
    a, b, bias = (torch.from_numpy(array).to(dtype) for array in operands("nn", *size[:3]))
    a[3, 5], a[30, 28] = torch.nan, torch.inf
    got, _ = run(
        products(kind), ("nn64", size), {"a": a, "b": b, "bias": bias}, torch.zeros(37, 53, dtype=dtype)
    )
    assert got[3].isnan().all() and not got[30].isfinite().any()
    rest = [row for row in range(37) if row not in (3, 30)]
    assert got[rest].isfinite().all()


@pytest.mark.parametrize("kind", ["tf32", "bfloat16", "float16"])
def test_tensor_cores_are_used_and_nothing_is_added_with_atomics(products, kind):
    for ptx in products(kind).ptx.values():
        assert "mma.sync" in ptx and "cp.async" in ptx
        assert not re.search(r"\b(atom|red)\.", ptx)
    assert all("mma.sync" not in ptx for ptx in products("float32").ptx.values()), "IEEE float32 stays IEEE"
