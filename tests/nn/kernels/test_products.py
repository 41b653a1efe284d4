"""The matrix products that run on every GPU against NumPy in float64: every form, ragged, unaligned. And which kernels of
LayerNorm + Linear are launched where, within the limits of a GPU."""

import functools
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.check.compare import EPSILON
from harness.devices.kernel_cache import WHAT
from harness.devices.recorder import LAUNCHER, RecordedLaunch, RecordedTensor, Recording, parse
from harness.devices.replay import Replay
from harness.puzzles.p22.spec import PUZZLE
from harness.toolchain.cache import cache_folder, digest, keep
from harness.toolchain.extension import KERNELS
from harness.toolchain.packages import mojo_files, run_mojo
from harness.vgpu import Checks
from harness.vgpu.checks.findings import Findings

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """dtype -> the products alone."""
    program, recorder = HERE / "products_record.mojo", tmp_path_factory.mktemp("record") / "recorder.mojo"
    # The kernels have the folder that a puzzle's recorder finds in its op package.
    recorder.write_text(LAUNCHER.read_text("utf-8").replace("from op.shared", "from shared"), "utf-8")
    words = [str(number) for size in (*SIZES, LONG) for number in size]
    files = (program, recorder, *mojo_files(KERNELS / "common"), *mojo_files(KERNELS / "shared"))
    texts = [path.read_text("utf-8") for path in files]

    def recorded(dtype: str) -> Recording:
        flags = ("-D", f"DTYPE={dtype}", "-I", str(recorder.parent), "-I", str(KERNELS))

        def make(staged: Path) -> None:
            done = run_mojo("run", "--target-accelerator", "sm_90a", *flags, str(program), *words)
            assert done.returncode == 0, done.stderr
            staged.write_text(done.stdout, "utf-8")

        file = cache_folder("recordings") / f"{digest([dtype, *words, *texts])}.txt"
        return parse(keep(file, make, WHAT).read_text("utf-8"))

    return functools.cache(recorded)


def player_of(recording: Recording, dtype: str) -> Replay:
    """A virtual GPU that reads each kernel once: at most of these sizes that takes longer than running it."""
    return Replay(recording, PUZZLE, dtype, checks=Checks(counters=False))


# ---- The matrix products alone ------------------------------------------------------------------------------

KINDS = ("float32", "tf32", "bfloat16", "float16")
FORMS = ("nt", "nn", "tn")
LONG = (1, 8, 4096, 0)
# m, n, k, shift: whole tiles, nothing that divides anything, one row, several tiles each way, unaligned addresses, and
# more turns along k than the kernels have buffers.
SIZES = [(64, 64, 64, 0), (37, 53, 29, 0), (1, 8, 16, 0), (130, 200, 72, 0), (40, 48, 56, 1), (1, 8, 520, 0)]


@pytest.fixture(scope="module")
def products(recording):
    """Kind -> what replays the recorded products, and nothing else."""

    def of(kind: str) -> Replay:
        recorded, prefix = recording("float32" if kind == "tf32" else kind), "tf32_" if kind == "tf32" else ""
        cases = {
            (name.removeprefix(prefix), size): events
            for (name, size), events in recorded.cases.items()
            if re.fullmatch(rf"{prefix}(nt|nn|tn)(64|128)", name)
        }
        alone = Recording(cases)
        alone.ptx = {symbol: recorded.ptx[symbol] for symbol in alone.kernel_names()}
        return player_of(alone, kind)

    return functools.cache(of)


def operands(form: str, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """a and b as the form stores them, and the bias."""
    random = np.random.default_rng([m, n, k])
    a = random.standard_normal((m, k)) + 0.5
    b = random.standard_normal((k, n)) - 0.25
    bias = 3 * random.standard_normal(n)
    return (a.T.copy() if form == "tn" else a), (b.T.copy() if form == "nt" else b), bias


def multiplied(player: Replay, case, tensors: dict[str, torch.Tensor], result: torch.Tensor):
    """Launches a recorded product on tensors; returns what it wrote and the machine, with what it found."""
    gpu = player.gpu
    gpu.findings = Findings()
    shift = case[1][3]
    places = {}
    for event in player.recording.cases[case]:
        if isinstance(event, RecordedTensor):
            tensor = tensors.get(event.name, result)
            padded = torch.cat([tensor.new_full((shift,), torch.nan), tensor.reshape(-1)])
            address = gpu.allocate(event.nbytes, event.name)
            gpu.write(address, padded.view(torch.uint8).numpy())
            places[event.name] = (event.address, event.nbytes, address)
        elif isinstance(event, RecordedLaunch):
            arguments = [moved(argument, places.values()) for argument in event.arguments]
            gpu.launch(
                player.kernel(event.symbol), event.grid, event.block, arguments, event.shared, name=event.name
            )
    _, nbytes, address = places["c"]
    written = torch.from_numpy(gpu.read(address, nbytes)).view(result.dtype)
    assert written[:shift].isnan().all(), "nothing in front of c"
    for _, _, address in places.values():
        gpu.free(address)
    return written[shift:].reshape(result.shape), gpu


def moved(argument: bytes, places) -> bytes:
    """An address of the recording as the one on the machine; anything else as it is."""
    value = int.from_bytes(argument, "little")
    for recorded, nbytes, address in places:
        if len(argument) == 8 and recorded <= value < recorded + nbytes:
            return (address + value - recorded).to_bytes(8, "little")
    return argument


@pytest.mark.compiles
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
        got, gpu = multiplied(products(kind), case, {"a": a, "b": b, "bias": bias}, result)
        left = (a.T if form == "tn" else a).double()
        right = (b.T if form == "nt" else b).double()
        exact = left @ right + (bias.double() if form == "nt" else 0)
        # What rounding may do: to the factors (tf32 keeps 10 bits), to k additions, to the result.
        terms = left.abs() @ right.abs() + (bias.double().abs() if form == "nt" else 0)
        factor = 2 * 2.0**-11 if kind == "tf32" else 0.0
        allowed = terms * (factor + k * 2.0**-24) + exact.abs() * EPSILON[str(dtype).removeprefix("torch.")]
        assert ((got.double() - exact).abs() <= allowed).all(), (size, (got.double() - exact).abs().max())
        assert not gpu.findings, gpu.findings[0].text()


@pytest.mark.compiles
def test_tf32_rounds_to_nearest_where_cutting_off_would_lose_a_bit(products):
    """1 + 3 * 2^-12 lies nearer to 1 + 2^-10 than to 1; 64 products of a cut-off factor would be far below."""
    m = n = k = 64
    a = torch.full((m, k), 1 + 3 * 2.0**-12)
    b = torch.ones(n, k)
    for form in FORMS:
        left, right = (a.T.contiguous() if form == "tn" else a), (b if form == "nt" else b.T.contiguous())
        tensors = {"a": left, "b": right, "bias": torch.zeros(n)}
        got, _ = multiplied(
            products("tf32"), (f"{form}64", (m, n, k, 0)), tensors, torch.full((m, n), torch.nan)
        )
        assert (got == 64 * (1 + 2.0**-10)).all(), form


@pytest.mark.compiles
@pytest.mark.parametrize("tile", [64, 128])
def test_long_float32_sums_lose_less_than_one_running_sum(products, tile):
    m, n, k, _ = LONG
    random = np.random.default_rng(7)
    a, b = (
        random.uniform(0.5, 1.5, (m, k)).astype(np.float32),
        random.uniform(0.5, 1.5, (k, n)).astype(np.float32),
    )
    tensors = {"a": torch.from_numpy(a), "b": torch.from_numpy(b), "bias": torch.zeros(n)}
    got, _ = multiplied(products("float32"), (f"nn{tile}", LONG), tensors, torch.zeros(m, n))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    running = np.zeros(n, np.float32)
    for j in range(k):
        running = (running + a[0, j].astype(np.float64) * b[j]).astype(np.float32)
    plain = np.sqrt(((running - exact) ** 2).mean())
    assert np.sqrt(((got.numpy() - exact) ** 2).mean()) < plain / 3


@pytest.mark.compiles
@pytest.mark.parametrize("kind", KINDS)
def test_not_a_number_and_infinity_stay_in_their_row(products, kind):
    dtype = getattr(torch, "float32" if kind == "tf32" else kind)
    size = (37, 53, 29, 0)
    a, b, bias = (torch.from_numpy(array).to(dtype) for array in operands("nn", *size[:3]))
    a[3, 5], a[30, 28] = torch.nan, torch.inf
    got, _ = multiplied(
        products(kind), ("nn64", size), {"a": a, "b": b, "bias": bias}, torch.zeros(37, 53, dtype=dtype)
    )
    assert got[3].isnan().all() and not got[30].isfinite().any()
    rest = [row for row in range(37) if row not in (3, 30)]
    assert got[rest].isfinite().all()


@pytest.mark.compiles
@pytest.mark.parametrize("kind", ["tf32", "bfloat16", "float16"])
def test_tensor_cores_are_used_and_nothing_is_added_with_atomics(products, kind):
    for ptx in products(kind).recording.ptx.values():
        assert "mma.sync" in ptx and "cp.async" in ptx
        assert not re.search(r"\b(atom|red)\.", ptx)
    assert all("mma.sync" not in ptx for ptx in products("float32").recording.ptx.values()), (
        "IEEE float32 stays IEEE"
    )


# ---- What is launched ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def launches():
    """The words of each line that the launch program prints: launch, kind, rows, H, O, shift, name, ..."""
    program = str(HERE / "launches.mojo")
    done = run_mojo("run", "--target-accelerator=sm_80", "-I", str(KERNELS), program, timeout=550)
    # The compiler may print a target's error and return 0.
    assert done.returncode == 0 and "error" not in done.stderr.lower(), done.stderr
    return [line.split() for line in done.stdout.splitlines() if line.startswith("launch ")]


@pytest.mark.compiles
def test_every_grid_is_within_what_a_gpu_allows(launches):
    assert {line[1] for line in launches} == {"float32", "tf32", "bfloat16", "float16", "float64"}
    for line in launches:
        grid_x, grid_y, block_x, block_y, shared = map(int, line[7:])
        assert 1 <= grid_x < 2**31 and 1 <= grid_y <= 65535 and 1 <= block_x * block_y <= 1024, line
        assert 0 <= shared <= 163 * 1024, line


@pytest.mark.compiles
def test_unaligned_and_long_rows_take_kernels_of_their_own(launches):
    names = {}
    for line in launches:
        names.setdefault((line[1], int(line[3]), int(line[5])), set()).add(line[6])
    for kind in ("float32", "bfloat16"):
        assert {"layernorm_rows", "ln_backward_rows"} <= names[kind, 768, 0], kind
        for sizes in ((37, 0), (768, 1)):
            assert {"layernorm_rows", "ln_backward_elements"} <= names[kind, *sizes], (kind, sizes)
            assert "ln_backward_rows" not in names[kind, *sizes], (kind, sizes)
        assert {"layernorm_any", "ln_backward_any"} <= names[kind, 100000, 0], kind
        assert not {"layernorm_rows", "ln_backward_elements"} & names[kind, 100000, 0], kind


@pytest.mark.compiles
def test_no_rows_leave_only_the_launches_that_write_zeros(launches):
    assert {line[6] for line in launches if line[2] == "0"} == {"finish_sums", "grad_weight"}
