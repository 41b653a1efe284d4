"""GEMM selection, compared with measured times of all candidates."""

import pytest
import torch

from book.measure import record
from harness.nn import host
from harness.nn.layers import TWO_STREAMS, decode_plan

pytestmark = [pytest.mark.on_virtual_gpu("layernorm_linear"), pytest.mark.usefixtures("default_device")]
LEAST_MEMORY, CUBLAS = 2, ("library",) * 3


def make_plan(M, H, O, *, captured=True, options=0, transposed=False, dtype=torch.bfloat16, x_dtype=None):
    """Return the plan's bits for expanded tensors, which allocate almost no memory."""
    assert host.load("layernorm_linear", host.DEVICE)
    x = torch.empty(1, dtype=x_dtype or dtype).expand(M, H)
    W = torch.empty(1, dtype=dtype).expand(O, H)
    if transposed:
        W = torch.empty(H, O, dtype=dtype).t()
    return torch.ops.mojo_workbook.layernorm_linear_plan(x, None, None, W, None, options, captured)


def select_gemms(*size, **options):
    """Return the GEMM implementations of output, dln and dW."""
    return tuple(decode_plan(make_plan(*size, **options)).values())


def group_by_size(name, get_key, get_times):
    """Return a record's times as a mapping size -> implementation -> times."""
    groups: dict[tuple[int, ...], dict] = {}
    for row in record.rows(name):
        size = tuple(int(row[dimension]) for dimension in "MHO")
        groups.setdefault(size, {})[get_key(row)] = get_times(row)
    return groups


def test_number_of_streams_is_near_the_fastest():
    """At most 7 % slower than the best at each size, 2 % on average, and 5 % slower than one stream."""
    ratios = []
    measured = group_by_size(
        "branches", lambda row: (row["dln"], row["dW"], int(row["branches"])), lambda row: float(row["us"])
    )
    for size, times in measured.items():
        bits = make_plan(*size)
        selected = times[(*select_gemms(*size)[1:], 2 if bits & TWO_STREAMS else 1)]
        ratios.append(selected / min(times.values()))
        assert ratios[-1] < 1.07, size
        assert selected < 1.05 * min(time for key, time in times.items() if key[2] == 1), size
    assert len(ratios) > 30 and sum(ratios) / len(ratios) < 1.02


@pytest.mark.parametrize("direction", [0, 1], ids=["forward", "backward"])
def test_gemm_selection_is_near_the_fastest(direction):
    """At most 12 % plus 4 us (launch overhead) slower than the best at each size, 3 % on average."""
    ratios = []
    measured = group_by_size(
        "products",
        lambda row: (row["output"], row["dln"], row["dW"]),
        lambda row: (float(row["forward_us"]), float(row["backward_us"])),
    )
    select_pass = (lambda gemms: gemms[:1]) if direction == 0 else (lambda gemms: gemms[1:])
    for size, measured_times in measured.items():
        if direction and make_plan(*size) & TWO_STREAMS:
            continue
        times = {select_pass(gemms): time[direction] for gemms, time in measured_times.items()}
        selected = times.get(select_pass(select_gemms(*size)))
        if selected is not None:
            best = min(times.values())
            assert selected <= 1.12 * best + 4, (size, times)
            ratios.append(selected / best)
    assert len(ratios) > (20, 5)[direction] and sum(ratios) / len(ratios) < 1.03


@pytest.mark.parametrize("size", [(4096, 768, 3072), (128, 64, 256), (100, 75, 53)], ids=str)
def test_eager_calls_use_our_gemms(size):
    assert select_gemms(*size, captured=False) == ("own", "own", "own")


@pytest.mark.parametrize("captured", [False, True])
def test_unsupported_cases_always_use_cublas(captured):
    assert select_gemms(4096, 768, 3072, transposed=True, captured=captured) == CUBLAS
    assert select_gemms(4096, 767, 3072, options=LEAST_MEMORY, captured=captured) == CUBLAS
    assert select_gemms(4096, 768, 3071, options=LEAST_MEMORY, captured=captured) == (
        "own",
        "library",
        "library",
    )


def test_eager_plans_use_one_stream():
    for size in ((4096, 768, 3072), (30, 338, 97), (128, 64, 256)):
        assert make_plan(*size) & TWO_STREAMS and not make_plan(*size, captured=False) & TWO_STREAMS


@pytest.mark.parametrize(("H", "elements"), [(768, 0), (767, 3072 * 768), (75, 3072 * 128)])
def test_workspace_fits_aligned_copy_of_W(H, elements):
    assert make_plan(4096, H, 3072) >> 8 == elements
    assert make_plan(4096, H, 3072, options=LEAST_MEMORY) >> 8 == 0


@pytest.mark.slow
@pytest.mark.parametrize("captured", [False, True])
def test_float32_uses_cublas(captured):
    """Slow, like the next test, because the plan requires the build of another library."""
    assert select_gemms(4096, 768, 3072, dtype=torch.float32, captured=captured) == CUBLAS


@pytest.mark.slow
def test_float32_x_does_not_change_the_plan():
    for size in ((4096, 768, 3072), (512, 256, 1024), (8192, 4096, 4096)):
        assert make_plan(*size, x_dtype=torch.float32) == make_plan(*size)
