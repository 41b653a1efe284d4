"""The choice of devices: what was asked for, what the machine has, and the reason for every device left out."""

import pytest

from harness.devices import targets
from harness.devices.targets import CPU_LIMIT, VIRTUAL_LIMIT, Target, choose
from harness.errors import BadUse, EnvironmentProblem

GPU = Target("gpu", None, "a GPU")


@pytest.fixture
def sees(monkeypatch):
    """Call it with whether MAX sees a GPU."""

    def there(is_one: bool) -> None:
        monkeypatch.setattr(targets, "gpu_may_exist", lambda: True)
        monkeypatch.setattr(targets, "gpu", lambda: GPU if is_one else None)

    return there


LARGE, LARGE_CPU = VIRTUAL_LIMIT + 1, CPU_LIMIT + 1


@pytest.mark.parametrize(
    ("is_gpu", "wanted", "work", "dtype", "on_cpu", "chosen", "skipped"),
    [
        (False, "auto", 100, "float32", True, "cpu virtual", {}),
        (False, "all", 100, "float32", True, "cpu virtual", {}),
        (False, "auto", LARGE, "float32", True, "cpu", {"gpu": "--device virtual runs it"}),
        (False, "virtual", LARGE, "float32", True, "virtual", {}),
        (False, "auto", 100, "float32", False, "virtual", {}),
        (False, "all", LARGE, "float32", False, "", {"gpu": "too large for the virtual one"}),
        (True, "auto", 100, "float32", True, "cpu gpu", {}),
        (True, "cpu", 100, "float32", True, "cpu", {}),
        (True, "gpu", 100, "float32", True, "gpu", {}),
        (True, "auto", CPU_LIMIT, "float32", True, "cpu gpu", {}),
        (
            True,
            "auto",
            LARGE_CPU,
            "float32",
            True,
            "gpu",
            {"cpu": "2^28 multiply-adds; --device cpu runs it"},
        ),
        (True, "cpu", LARGE_CPU, "float32", True, "cpu", {}),
        (True, "auto", 100, "float64", True, "cpu", {"gpu": "float64 is for the CPU path"}),
    ],
)
def test_what_is_chosen_and_why_the_rest_is_not(sees, is_gpu, wanted, work, dtype, on_cpu, chosen, skipped):
    """Without a GPU the virtual one takes its place."""
    sees(is_gpu)
    found, left_out = choose(wanted, work, dtype, on_cpu)
    assert [target.kind for target in found] == chosen.split()
    assert [each.kind for each in left_out] == [*skipped]
    assert all(skipped[each.kind] in each.reason for each in left_out)


@pytest.mark.parametrize(
    ("is_gpu", "wanted", "dtype", "on_cpu", "error", "said"),
    [
        (False, "gpu", "float32", True, EnvironmentProblem, "--device gpu: MAX sees no GPU on this machine"),
        (True, "gpu", "float64", True, BadUse, "--device gpu does not run it"),
        (True, "virtual", "float64", True, BadUse, "--device virtual does not run it"),
        (False, "cpu", "float32", False, BadUse, "--device cpu is for a CPU path"),
        (False, "auto", "float64", False, BadUse, "--dtype float64 is for a CPU path"),
    ],
)
def test_what_cannot_be_chosen_is_said(sees, is_gpu, wanted, dtype, on_cpu, error, said):
    sees(is_gpu)
    with pytest.raises(error, match=said):
        choose(wanted, 100, dtype, on_cpu)


def test_nothing_looks_for_a_gpu_where_none_can_be(monkeypatch):
    """MAX looks once, and a layer that wants the virtual GPU by its driver could no longer switch it on."""
    monkeypatch.setattr(targets, "gpu_may_exist", lambda: False)
    monkeypatch.setattr(targets, "gpu", lambda: pytest.fail("looked for a GPU"))
    assert [target.kind for target in choose("auto", 100, "float32", True)[0]] == ["cpu", "virtual"]


def test_a_simulated_gpu_is_never_called_a_gpu():
    assert Target("virtual", None, "sm_90a").label == "Virtual GPU"
    assert Target("gpu", None, "").label == "GPU" and Target("cpu", None, "").label == "CPU"


def test_this_machine_has_a_cpu():
    target = targets.cpu()
    assert target.kind == "cpu" and target.device.label == "cpu" and target.detail
