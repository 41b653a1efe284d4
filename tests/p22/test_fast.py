"""The fast variant: right on the virtual GPU in every dtype, the same bits in every run, and launched within the limits;
its matrix products alone against NumPy in float64: every form, ragged, unaligned."""

import functools
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.check.compare import EPSILON
from harness.check.reference import Reference
from harness.devices.kernel_cache import WHAT
from harness.devices.record_program import program_of
from harness.devices.recorder import LAUNCHER, RecordedLaunch, RecordedTensor, Recording, parse
from harness.devices.replay import Replay
from harness.devices.targets import Target
from harness.puzzles.p22.spec import PUZZLE, ledger
from harness.spec.puzzle import Case
from harness.toolchain import roots
from harness.toolchain.cache import cache_folder, digest, keep
from harness.toolchain.packages import run_mojo
from harness.vgpu import Checks
from harness.vgpu.checks.findings import Findings

ROOT = Path(__file__).resolve().parents[2]
VIRTUAL = Target("virtual", None, "virtual GPU (sm_90a)")
QUANTITIES = [*PUZZLE.forward, *PUZZLE.backward]

# B, S, H, O: what the harness's own cases, being small, do not reach.
SEVERAL_TURNS = Case("several turns", "more rows than all blocks hold at a time", (5, 860, 8, 8), "hard")
TWO_WARPS = Case(
    "two warps", "a row that several warps share, and several rows a block", (3, 190, 520, 8), "hard"
)
LONG_ROWS = Case("long rows", "two vectors a thread backward, a large block forward", (1, 3, 4104, 8), "hard")
# In 16 bits four, eight or sixteen threads share such rows.
NARROW_ROWS = Case("narrow rows", "more of them than all blocks hold at a time", (5, 3440, 72, 8), "hard")
TWO_VECTORS = Case("two vectors", "rows that four threads share, two vectors each", (3, 31, 56, 8), "hard")
HALF_A_WARP = Case("half a warp", "rows that half of a warp shares", (3, 30, 136, 8), "hard")
ONE_COLUMN = Case("one column", "x_hat and the gradient of the input are exactly 0", (2, 9, 1, 4), "hard")
# More columns than 132 large tiles of a product have, one for each multiprocessor of an H100.
LONGER_ROWS = Case("longer rows", "too long for a block's registers", (1, 2, 16904, 8), "hard")
TARGETS = {"sm_80": ("sm_80", "-DPLAN"), "gfx942": ("mi300x",), "apple-m4": ("apple-m4",)}
"""What Mojo calls them. For sm_80 the kernels are compiled elsewhere: its extension module (test_extension.py) has all of
them, in these five kinds."""


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """dtype -> what the fast variant launches at every size that is tested here, and its products alone: one program, as
    they have kernels in common."""
    package = roots.op_package(roots.solutions(), PUZZLE.name)
    program = ROOT / "tests" / "p22" / "p22_fast_record.mojo"
    of_variants = tmp_path_factory.mktemp("record") / "record.mojo"
    of_variants.write_text(program_of("p22", package.path), "utf-8")
    sizes = [("fast", *dims) for dims in {case.dims for case in (*PUZZLE.cases(None), *extra())}]
    words = [
        str(word) for size in (*sorted(sizes), *(("gemm", *size) for size in (*SIZES, LONG))) for word in size
    ]
    texts = [path.read_text("utf-8") for path in (program, LAUNCHER, of_variants)]

    def recorded(dtype: str) -> Recording:
        places = [word for path in (LAUNCHER, package.path, of_variants) for word in ("-I", str(path.parent))]
        flags = ("-D", f"DTYPE={dtype}", "-D", "VARIANT_fast", *places)

        def make(staged: Path) -> None:
            done = run_mojo("run", "--target-accelerator", "sm_90a", *flags, str(program), *words)
            assert done.returncode == 0, done.stderr
            staged.write_text(done.stdout, "utf-8")

        file = cache_folder("recordings") / f"{digest([package.digest, dtype, *words, *texts])}.txt"
        return parse(keep(file, make, WHAT).read_text("utf-8"))

    return functools.cache(recorded)


def extra() -> list[Case]:
    """The cases above."""
    return [
        SEVERAL_TURNS,
        NARROW_ROWS,
        TWO_VECTORS,
        HALF_A_WARP,
        TWO_WARPS,
        LONG_ROWS,
        LONGER_ROWS,
        ONE_COLUMN,
    ]


@pytest.fixture(scope="module")
def players(recording):
    """dtype -> what replays the recording."""
    return functools.cache(lambda dtype: player_of(recording(dtype), dtype))


def player_of(recording: Recording, dtype: str) -> Replay:
    """A virtual GPU that reads each kernel once: at most of these sizes that takes longer than running it."""
    return Replay(recording, PUZZLE, dtype, checks=Checks(counters=False))


def replayed(players, case: Case, dtype: str, blocks: str = "natural"):
    """What the fast variant writes in one case, the machine it ran on, with what it found, and the case's truth."""
    reference = Reference(PUZZLE, dtype, seed=0)
    player = players(dtype)
    player.gpu.blocks, player.gpu.launches, player.gpu.findings = blocks, [], Findings()
    return player.run("fast", case, reference.inputs(case)), player.gpu, reference


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", [*PUZZLE.cases(None), *extra()], ids=lambda case: case.name)
def test_right_on_the_virtual_gpu_without_a_finding(players, case, dtype):
    outputs, gpu, reference = replayed(players, case, dtype)
    verdicts = reference.compared(case, VIRTUAL, "fast", outputs, QUANTITIES)
    assert {name: verdict for name, verdict in verdicts.items() if not verdict.ok} == {}
    assert not gpu.findings, gpu.findings[0].text()


@pytest.mark.compiles
@pytest.mark.parametrize("case", [TWO_WARPS, SEVERAL_TURNS], ids=lambda case: case.name)
def test_the_same_bits_in_whatever_order_the_blocks_run(players, case):
    natural, _, _ = replayed(players, case, "float32")
    shuffled, gpu, _ = replayed(players, case, "float32", blocks="shuffled:5")
    for name in QUANTITIES:
        assert np.array_equal(natural[name], shuffled[name]), name
    assert any(launch.grid[0] > 1 for launch in gpu.launches)


@pytest.mark.compiles
def test_one_column_has_a_gradient_of_exactly_zero(players):
    outputs, _, _ = replayed(players, ONE_COLUMN, "float32")
    assert not outputs["grad_input"].any()


@pytest.mark.compiles
def test_every_kernel_of_the_rows_is_reached(recording):
    """That the sizes above choose what they are meant to choose."""
    launched = recording("bfloat16")
    names = {case: [event.name for event in launched.cases["fast", case.dims]] for case in extra()}
    assert "ln_backward_rows" in names[SEVERAL_TURNS] and "layernorm_rows" in names[LONG_ROWS]
    assert "ln_backward_any" in names[LONGER_ROWS] and "layernorm_any" in names[LONGER_ROWS]
    assert {"layernorm_rows", "ln_backward_elements"} <= set(names[ONE_COLUMN])
    symbols = {
        event.symbol
        for case in extra()
        for event in launched.cases["fast", case.dims]
        if event.name in ("ln_backward_rows", "layernorm_rows") and case is not ONE_COLUMN
    }
    # Forward: 4, 8, 16 and all lanes of a warp, and a large block. Backward: one vector a thread, of 4 lanes and of whole
    # warps, and two, of 8 and 16 too.
    assert len(symbols) == 5 + 6


@pytest.mark.compiles
def test_nothing_is_added_with_atomics(recording):
    for ptx in recording("bfloat16").ptx.values():
        assert not re.search(r"\b(atom|red)\.", ptx)


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ledger_is_what_the_launches_ask_for(recording, dtype):
    for case in (*PUZZLE.cases(None), *extra()):
        events = recording(dtype).cases["fast", case.dims]
        asked = [e for e in events if isinstance(e, RecordedTensor) and e.scratch]
        parts = ledger(case.dims, dtype).between["fast"]
        partials = sum(e.nbytes for e in asked if e.name.endswith("partials"))
        assert sum(e.nbytes for e in asked) - partials == sum(parts.values()) - parts[PARTIALS], case.name
        assert 0 < partials <= parts[PARTIALS], case.name


PARTIALS = "backward partial sums, at most"


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


# ---- Other GPUs ---------------------------------------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=["sm_80", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gfx942", "apple-m4"))],
)
def launches(request):
    """The words of each line that the launch program prints for a target: launch, kind, rows, H, O, shift, name, ..."""
    package = roots.op_package(roots.solutions(), PUZZLE.name).path
    name, *flags = TARGETS[request.param]
    flags = (
        f"--target-accelerator={request.param}",
        "-D",
        f"TARGET={name}",
        *flags,
        "-I",
        str(package.parent),
    )
    done = run_mojo("run", *flags, str(ROOT / "tests" / "p22" / "p22_fast_launches.mojo"), timeout=550)
    # The compiler may print a target's error and return 0.
    assert done.returncode == 0 and "error" not in done.stderr.lower(), done.stderr
    return [line.split() for line in done.stdout.splitlines() if line.startswith("launch ")], request.param


@pytest.mark.compiles
def test_every_kernel_compiles_and_every_grid_is_within_what_all_targets_allow(launches):
    lines, target = launches
    assert {line[1] for line in lines} == {"float32", "tf32", "bfloat16", "float16", "float64"} - (
        {"float64"} if target == "apple-m4" else set()
    )
    shared_limit = {"sm_80": 163 * 1024, "gfx942": 64 * 1024, "apple-m4": 32 * 1024}[target]
    for line in lines:
        grid_x, grid_y, block_x, block_y, shared, *code = map(int, line[7:])
        assert 1 <= grid_x < 2**31 and 1 <= grid_y <= 65535 and 1 <= block_x * block_y <= 1024, line
        assert 0 <= shared <= shared_limit, line
        assert all(size > 500 for size in code) and len(code) == (target != "sm_80"), line


@pytest.mark.compiles
def test_unaligned_and_long_rows_take_kernels_of_their_own(launches):
    lines, _ = launches
    names = {}
    for line in lines:
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
    lines, _ = launches
    assert {line[6] for line in lines if line[2] == "0"} == {"finish_sums", "grad_weight"}


# ---- The command line ---------------------------------------------------------------------------------------


@pytest.mark.compiles
def test_fast_runs_only_when_it_is_asked_for(puzzle, command_line):
    assert puzzle.default_variants == ("fused", "unfused")
    assert puzzle.compiled_with(("fused",)) == ("fused", "unfused"), "one graph serves every default run"
    assert puzzle.compiled_with(("fast",)) == ("fast",)
    assert puzzle.compiled_with(("unfused", "fast")) == ("fused", "unfused", "fast")
    shown = command_line("p22", "--help").out
    assert "--fast" in shown and "default: fused and unfused" in shown


@pytest.mark.compiles
def test_the_command_line_judges_the_fast_variant(command_line):
    finished = command_line("p22", "--solution", "--backward", "--fast", "--device", "cpu")
    assert finished.code == 6 and finished.err == ""
    assert "   - CPU Backward (fast):  ✅ CORRECT" in finished.lines
    assert not any("(unfused)" in line or "CPU Backward:" in line for line in finished.lines)
