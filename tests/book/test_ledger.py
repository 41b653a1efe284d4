"""The byte ledger matches the launches, tensors and bytes counted by the virtual GPU."""

import pytest

pytestmark = pytest.mark.compiles

# Op argument -> symbol printed in the ledger.
LETTERS = {
    "input": "x", "ln_weight": "gamma", "ln_bias": "beta", "linear_weight": "W", "linear_bias": "bias",
    "grad_output": "dy", "grad_input": "dx", "grad_ln_weight": "dgamma", "grad_ln_bias": "dbeta",
    "grad_weight": "dW", "grad_bias": "db",
}  # fmt: skip


@pytest.fixture(scope="module")
def launches_by_variant():
    """Variant -> launches of both passes at the default sizes on the virtual GPU."""
    from harness.check.profile import CountRequest
    from harness.learner.exercise import Exercise
    from harness.puzzles.p22.spec import PUZZLE
    from harness.toolchain import roots

    work = Exercise(PUZZLE, PUZZLE.main_rung, roots.get_solutions())
    return {
        variant: run.launches for variant, run in CountRequest(work, PUZZLE.default_variants).replay().items()
    }


@pytest.mark.parametrize("variant", ["unfused", "fused"])
def test_ledger_matches_the_kernels(launches_by_variant, variant):
    from book.measure import ledger
    from harness.puzzles.p22 import spec as p22

    dims = p22.PUZZLE.dims
    expected = ledger.LAUNCHES["forward", variant] + ledger.LAUNCHES["backward", variant]
    assert [launch.name for launch in launches_by_variant[variant]] == [step.name for step in expected]
    for launch, step in zip(launches_by_variant[variant], expected, strict=True):
        touched = {LETTERS.get(name, name): traffic for name, traffic in launch.counters.tensors.items()}
        assert {name for name, t in touched.items() if t.read and not t.atomics} == set(step.reads), step.name
        assert {name for name, t in touched.items() if t.written and not t.atomics} == set(step.writes), (
            step.name
        )
        assert {name for name, t in touched.items() if t.atomics} == set(step.adds), step.name
        for name in step.writes:  # each element is stored exactly once
            assert touched[name].written == ledger.size(name, dims), (step.name, name)
        for name in step.reads:  # each element is loaded at least once
            assert touched[name].read >= ledger.size(name, dims), (step.name, name)


def test_ledger_matches_manual_counts():
    """With one row, column and output, every tensor has a single element."""
    from book.measure import ledger

    assert ledger.moved("forward", "fused", (1, 1, 1, 1)) == 4 * 8
    assert ledger.moved("forward", "unfused", (1, 1, 1, 1)) == 4 * (3 + 6 + 2 + 3 + 3)
    assert ledger.moved("backward", "fused", (1, 1, 1, 1)) == 8 * 4 + (4 * 8 + 8 * 4) + (8 * 4 + 4 * 4)
