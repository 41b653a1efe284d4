"""The ladder's predictions by hand, what its tables show, and what it refuses; the reading of a profiler's trace."""

import pytest

DIMS = (8, 1024, 768, 3072)
# What the profiler leaves of the names: Mojo cuts them.
PASSES = {
    ("fused", "forward"): ["minimal_fu"],
    ("fused", "backward"): ["clear_grad", "minimal_fu", "convert_gr"],
    ("unfused", "forward"): ["row_statis", "layernorm", "transpose", "matmul_idi", "add_bias_k"],
    ("unfused", "backward"): [
        "matmul_idi", "layernorm", "transpose", "matmul_idi", "column_sum", "ln_backwar", "ln_backwar", "ln_backwar",
    ],
    ("fast", "forward"): ["layernorm_rows", "gemm_hopper_ker"],
    ("fast", "backward"): ["gemm_hopper_ker", "ln_backward_rows", "gemm_hopper_ker", "finish_sums_DTy"],
}  # fmt: skip


def measured(passes=PASSES):
    """A ladder in which the i-th launch of a pass took i + 1 microseconds; `passes` may be other ones."""
    from book.figures import ladder

    facts = {letter: str(size) for letter, size in zip("BSHO", DIMS, strict=True)}
    facts |= {"device": "a GPU", "date": "a day", "torch": "2", "dtype": "bfloat16"}
    return ladder.load(
        [
            facts | {"algorithm": algorithm, "pass": direction, "kernel": kernel, "median_us": str(i + 1)}
            for (algorithm, direction), kernels in passes.items()
            for i, kernel in enumerate(kernels)
        ]
    )


def predicted(ladder, algorithm, direction, kernel) -> float:
    """The prediction for a launch, the first of its name."""
    return next(x.predicted for x in ladder.of(algorithm, direction) if x.kernel == kernel)


def test_predictions_by_hand():
    machine = measured()
    rows, H, O = 8 * 1024, 768, 3072
    lanes = 132 * 4 * 1.98e9  # warp instructions a second
    assert predicted(machine, "fused", "forward", "minimal_fused_forward") == pytest.approx(
        9 * rows * H * O / lanes * 1e6
    )
    assert predicted(machine, "fused", "backward", "minimal_fused_backward") == pytest.approx(
        17 * rows * H * O / lanes * 1e6
    )
    loads = 2 * rows * H * O / 32  # of a warp, from shared memory
    assert predicted(machine, "unfused", "forward", "matmul") == pytest.approx(loads / (132 * 1.98e9) * 1e6)
    assert predicted(machine, "unfused", "forward", "add_bias") == pytest.approx(
        (2 * rows * O + O) * 2 / 4.8e6
    )
    assert predicted(machine, "fused", "backward", "clear_gradients") == pytest.approx(
        (O * H + 2 * H + O) * 4 / 4.8e6
    )
    assert predicted(machine, "fast", "forward", "layernorm_rows") == pytest.approx(2 * rows * H * 2 / 4.8e6)
    assert predicted(machine, "fast", "backward", "ln_backward_rows") == pytest.approx(
        4 * rows * H * 2 / 4.8e6
    )
    assert predicted(machine, "fast", "forward", "gemm_hopper_kernel") == pytest.approx(
        2 * rows * H * O / 989e6
    )


def test_tables_and_versions():
    from book.figures import ladder

    pages = ladder.pages(measured())
    assert "a GPU, bfloat16, B = 8, S = 1,024, H = 768, O = 3,072" in pages["ladder_where.md"]
    assert "| `gemm_hopper_kernel` | tensor cores | 39.1 µs | 2.00 µs | 0.051 |" in pages["ladder_4.md"]
    assert "| together |  |" in pages["ladder_6_unfused.md"] and "together" not in pages["ladder_4.md"]
    assert "together" not in pages["ladder_6.md"], "the launches overlap: their times have no sum"
    totals = {name: took for name, (_, took) in ladder.versions(measured()).items()}
    # Launches took 1, 2, ... in their pass: unfused 1 to 5, fast 1 and 2.
    assert list(totals.values()) == [1, 15, 15 - 3 + 1, 1 + 2 + 5, 3]
    svg = pages["ladder.svg"]
    assert svg.count("\n") == 1 and "black" not in svg and "5 epilogue" in svg


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({("fast", "forward"): ["layernorm_rows"]}, "0 matrix products"),
        ({("fast", "forward"): ["gemm_hopper_ker"]}, "no row of layernorm_rows"),
        ({("unfused", "forward"): PASSES["unfused", "forward"][:4]}, "unfused, forward: 4 rows"),
        ({("fused", "backward"): []}, "fused, backward: 0 rows"),
        ({("fast", "backward"): ["gemm_hopper_ker", "mystery"]}, "no prediction for the kernel mystery"),
        ({("fused", "forward"): ["layernorm"]}, "kernel layernorm in the place of minimal_fused_forward"),
        ({("fast", "forward"): ["layernorm_rows", "other cublas"]}, "other cublas: 2 of 3 us"),
    ],
)
def test_a_missing_or_unknown_row_is_refused(change, message):
    from book.figures import ladder

    with pytest.raises(LookupError, match=message):
        ladder.pages(measured(PASSES | change))


def test_what_fusing_could_gain_is_what_was_measured():
    """The page on fusing LayerNorm into the product rests on a recorded output."""
    from book_paths import BOOK

    from book.measure import outputs

    text = " ".join((BOOK / "src" / "fast" / "why_not_fused.md").read_text(encoding="utf-8").split())
    rows = [line.split() for line in outputs.load("algebra").text.splitlines()[1:]]
    errors = {(dtype, int(offset)): list(map(float, values)) for dtype, offset, *values in rows}
    assert f"{errors['bfloat16', 100][2]:.0%}".replace("%", " %") in text  # the sum of unrounded weights
    for offset in (10, 100, 1000):
        in_order, after, *_ = errors["float32", offset]
        assert 5.5 < after / in_order < 8.5 and "six to eight times" in text


def event(name: str, ts: float, dur: float, cat: str = "kernel") -> dict:
    return {"name": name, "ts": ts, "dur": dur, "cat": cat}


ROWS, GEMM = (
    "op_fast_forward_layernorm_rows6A6A6A6A_390ae7114d9dd59a",
    "op_shared_gemm_hopper_gemm_ho6A6A6A6A_02b6",
)


def test_trace_becomes_launches_with_medians():
    from book.measure import kernel_times

    events = [
        event(ROWS, 10, 4), event(GEMM, 20, 8), event("copy", 15, 9, "gpu_memcpy"),
        event(GEMM, 120, 6), event(ROWS, 110, 2),
        event(ROWS, 210, 3), event(GEMM, 220, 7),
    ]  # fmt: skip
    assert kernel_times.sequence(events, 3) == [("layernorm_rows", 3), ("gemm_hopper_kernel", 7)]
    with pytest.raises(RuntimeError, match="6 kernels in 4 calls"):
        kernel_times.sequence(events, 4)
    with pytest.raises(RuntimeError, match="0 kernels"):
        kernel_times.sequence([], 4)
    with pytest.raises(RuntimeError, match="calls differ"):
        kernel_times.sequence([event("a", 1, 1), event("b", 2, 1)], 2)


def test_names_as_the_compiler_cuts_them():
    """Taken from compiled kernels; a name that is none of ours says so."""
    from book.measure import kernel_times

    for mangled, name in {
        "op_layernorm_linear_minimal_fu6A6A6A6A_0123456789abcdef": "minimal_fu",
        "op_layernorm_linear_transpose_6A6A6A6A_0123456789abcdef": "transpose",
        "op_fast_sums_finish_sums_DTy6A6A6A6AcB6A6A_2ffd2575c074490d": "finish_sums_DTy",
        "op_shared_gemm_portable_gemm_6A6A6A6A6A6A_76130e5e5f9102cd": "gemm_kernel",
        "vectorized_elementwise_kernel": "other vectorized_elementwise_kernel",
    }.items():
        assert kernel_times.kernel_name(mangled) == name


def test_launches_of_a_max_graph_get_their_names_from_the_ledger():
    from book.measure import kernel_times

    assert kernel_times.kernel_name("ops_0123456789abcdef_layernorm_6A6A_3b5464cbdd42fd6a") == ""
    launches = [("other fill", 1.0), ("", 2.0), ("", 3.0), ("", 4.0)]
    assert kernel_times.named(launches, "fused", "backward") == [
        ("other fill", 1.0), ("clear_gradients", 2.0), ("minimal_fused_backward", 3.0), ("convert_gradients", 4.0),
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match="fused, backward: 2 launches, the ledger has 3"):
        kernel_times.named(launches[:3], "fused", "backward")
    assert kernel_times.named([("gemm_hopper_ker", 1.0)], "fast", "forward") == [("gemm_hopper_ker", 1.0)]
