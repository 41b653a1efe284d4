"""Correct kernels that differ from the solution pass: textbook formulas, other summation orders.

Each is an edit of the solution, as in the bug zoo.
"""

import pytest
from marks import list_values
from recordings import make_order

from harness.check.checker import Checker
from harness.check.zoo import WrongSolution
from harness.puzzles.p22.spec import PUZZLE

STATISTICS = """
    var elements = CompensatedSum[accum]()
    for h in range(hidden_dim):
        elements += x[h].cast[accum]()
    var first_mean = elements.total / count

    var deviations = CompensatedSum[accum]()
    var squares = CompensatedSum[accum]()
    for h in range(hidden_dim):
        var deviation = x[h].cast[accum]() - first_mean
        deviations += deviation
        squares += deviation * deviation
    var correction = deviations.total / count
    var variance = squares.total / count - correction * correction
    return RowStatistics(first_mean + correction, 1 / sqrt(variance + eps))"""
WELFORD = """
    var mean = Scalar[accum](0)
    var squares = Scalar[accum](0)
    for h in range(hidden_dim):
        var deviation = x[h].cast[accum]() - mean
        mean += deviation / Scalar[accum](h + 1)
        squares += deviation * (x[h].cast[accum]() - mean)
    return RowStatistics(mean, 1 / sqrt(squares / count + eps))"""
TWO_PASSES = """
    var sum = Scalar[accum](0)
    for h in range(hidden_dim):
        sum += x[h].cast[accum]()
    var squares = Scalar[accum](0)
    for h in range(hidden_dim):
        var deviation = x[h].cast[accum]() - sum / count
        squares += deviation * deviation
    return RowStatistics(sum / count, sqrt(1 / (squares / count + eps)))"""
FROM_THE_END = """
    var sum = Scalar[accum](0)
    for h in range(hidden_dim):
        sum += x[hidden_dim - 1 - h].cast[accum]()
    var even = Scalar[accum](0)
    var odd = Scalar[accum](0)
    for h in range(0, hidden_dim, 2):
        even += (x[h].cast[accum]() - sum / count) ** 2
    for h in range(1, hidden_dim, 2):
        odd += (x[h].cast[accum]() - sum / count) ** 2
    return RowStatistics(sum / count, 1 / sqrt((even + odd) / count + eps))"""
TWO_PASS_SUMS = """
        var corrected = term - self._excess
        var grown = self.total + corrected
        # The actual increase of `total` minus the exact increase.
        self._excess = (grown - self.total) - corrected
        self.total = grown"""

# Name -> (file, old text, new text, affected variant).
CORRECT = {
    "welford": ("shared/common.mojo", STATISTICS, WELFORD, "fused"),
    "welford_unfused": ("shared/common.mojo", STATISTICS, WELFORD, "unfused"),
    "two_plain_passes": ("shared/common.mojo", STATISTICS, TWO_PASSES, "fused"),
    "from_the_end_and_in_halves": ("shared/common.mojo", STATISTICS, FROM_THE_END, "fused"),
    "plain_sums": ("shared/common.mojo", TWO_PASS_SUMS, "\n        self.total += term", "fused"),
    "dx_factored": ("layernorm_linear.mojo", "(row_rstd * (g - c2 - x_hat * c1)).cast[dtype]()",
        "(row_rstd * g - row_rstd * (c2 + x_hat * c1)).cast[dtype]()", "fused"),
    "dx_from_sums": (
        "layernorm_linear.mojo",
        "(row_rstd * (g - c2 - x_hat * c1)).cast[dtype]()",
        "(row_rstd / Scalar[accum](H) * (Scalar[accum](H) * g - sum_g.total - x_hat * sum_g_x_hat.total))"
        ".cast[dtype]()",
        "fused",
    ),
    "dgamma_of_the_deviation": ("layernorm_linear.mojo", "atomic_add(grad_ln_weight, h, dln * x_hat)",
        "atomic_add(grad_ln_weight, h, dln * (x[row, h].cast[accum]() - row_mean) * row_rstd)", "fused"),
    "db_from_the_end": ("layernorm_linear.mojo", "atomic_add(grad_bias, o, dy[row, o].cast[accum]())",
        "atomic_add(grad_bias, O - 1 - o, dy[row, O - 1 - o].cast[accum]())", "fused"),
    "one_thread_a_row": (
        "layernorm_linear.mojo",
        """
    for h in range(thread_idx.x, H, ROW_THREADS):
        var deviation = x[row, h].cast[accum]() - mean[unsafe_offset=row]
        var x_hat = deviation * rstd[unsafe_offset=row]
        var g = dy_ln""",
        """
    for h in range(thread_idx.x * H, H):
        var deviation = x[row, h].cast[accum]() - mean[unsafe_offset=row]
        var x_hat = deviation * rstd[unsafe_offset=row]
        var g = dy_ln""",
        "unfused",
    ),
    "rstd_last": (
        "layernorm_linear.mojo",
        """
        sum_g_x_hat += g * x_hat
        sum_g += g
    # block.sum contains""",
        """
        sum_g_x_hat += g * deviation * rstd[unsafe_offset=row]
        sum_g += g
    # block.sum contains""",
        "unfused",
    ),
    "gamma_times_rstd_first": (
        "layernorm_linear.mojo",
        "var shifted = x_hat * gamma[h].cast[accum]() + beta[h].cast[accum]()",
        "var shifted = deviation * (rstd[unsafe_offset=row] * gamma[h].cast[accum]()) + beta[h].cast[accum]()",
        "unfused",
    ),
    "columns_in_contiguous_parts": (
        "layernorm_linear.mojo",
        "    for h in range(thread_idx.x, H, block_dim.x):\n        var deviation = x[row, h].cast[accum]() - "
        "mean[unsafe_offset=row]\n        var x_hat = deviation * rstd[unsafe_offset=row]\n        var shifted",
        "    var part = (H + block_dim.x - 1) // block_dim.x\n    for h in range(thread_idx.x * part, min(H, (thread_idx.x + 1) * part))"
        ":\n        var deviation = x[row, h].cast[accum]() - mean[unsafe_offset=row]\n        var x_hat = deviation * "
        "rstd[unsafe_offset=row]\n        var shifted",
        "unfused",
    ),
}  # fmt: skip


def list_cases(puzzle, name):
    """Return the cases; `two_plain_passes` skips "wide", where its sums are less accurate than PyTorch's."""
    return [case for case in puzzle.list_cases(None) if (name, case.name) != ("two_plain_passes", "wide")]


def copy_package(name, folder):
    return WrongSolution("p22", name, "", "none", *CORRECT[name][:3]).copy_package(folder / name)


def list_orders(folder, tests):
    by_name = {name: copy_package(name, folder) for name in list_values(tests, "name")}
    return {
        name: make_order("p22", list_cases(PUZZLE, name), [CORRECT[name][3]], package)
        for name, package in by_name.items()
    }


@pytest.fixture(scope="module")
def checker(puzzle):
    return Checker(puzzle)


def test_edits_of_variants_apply(tmp_path):
    for name in CORRECT:
        copy_package(name, tmp_path)


@pytest.mark.compiles
@pytest.mark.parametrize(
    "name", [*list(CORRECT)[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in list(CORRECT)[2:])]
)
def test_correct_kernel_variants_are_accepted(name, puzzle, checker, recorded):
    variant = CORRECT[name][3]
    gates = [gate.id for gate in puzzle.kernel_gates if gate.variant == variant]
    results = checker.check(recorded[name].package, gates, list_cases(puzzle, name))
    assert {result.state for result in results} == {"correct"}, [
        line for result in results for line in result.diagnosis
    ]
