"""Device selection: requested, available devices, reasons for skipped devices."""

import pytest

from harness.devices import targets
from harness.devices.targets import MAX_CPU_MULTIPLY_ADDS, MAX_VIRTUAL_MULTIPLY_ADDS, Target, choose_targets
from harness.errors import EnvironmentProblem, UsageError

GPU = Target("gpu", None, "a GPU")


@pytest.fixture
def set_gpu(monkeypatch):
    """Return a function that sets whether MAX reports a GPU."""

    def set_available(available: bool) -> None:
        monkeypatch.setattr(targets, "may_have_gpu", lambda: True)
        monkeypatch.setattr(targets, "find_gpu_target", lambda: GPU if available else None)

    return set_available


LARGE, LARGE_CPU = MAX_VIRTUAL_MULTIPLY_ADDS + 1, MAX_CPU_MULTIPLY_ADDS + 1


@pytest.mark.parametrize(
    ("has_gpu", "device", "multiply_adds", "dtype", "has_cpu_path", "selected", "skipped"),
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
        (True, "auto", MAX_CPU_MULTIPLY_ADDS, "float32", True, "cpu gpu", {}),
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
def test_requested_and_skipped_devices(
    set_gpu, has_gpu, device, multiply_adds, dtype, has_cpu_path, selected, skipped
):
    """The virtual GPU replaces a missing GPU."""
    set_gpu(has_gpu)
    targets_chosen, targets_skipped = choose_targets(device, multiply_adds, dtype, has_cpu_path)
    assert [target.kind for target in targets_chosen] == selected.split()
    assert [target.kind for target in targets_skipped] == [*skipped]
    assert all(skipped[target.kind] in target.reason for target in targets_skipped)


@pytest.mark.parametrize(
    ("has_gpu", "device", "dtype", "has_cpu_path", "error", "message"),
    [
        (False, "gpu", "float32", True, EnvironmentProblem, "--device gpu: MAX sees no GPU on this machine"),
        (True, "gpu", "float64", True, UsageError, "--device gpu does not run it"),
        (True, "virtual", "float64", True, UsageError, "--device virtual does not run it"),
        (False, "cpu", "float32", False, UsageError, "--device cpu is for a CPU path"),
        (False, "auto", "float64", False, UsageError, "--dtype float64 is for a CPU path"),
    ],
)
def test_unavailable_device_is_rejected(set_gpu, has_gpu, device, dtype, has_cpu_path, error, message):
    set_gpu(has_gpu)
    with pytest.raises(error, match=message):
        choose_targets(device, 100, dtype, has_cpu_path)


def test_no_gpu_query_if_no_gpu_can_exist(monkeypatch):
    """After MAX has queried the driver, the virtual GPU's driver can no longer be enabled."""
    monkeypatch.setattr(targets, "may_have_gpu", lambda: False)
    monkeypatch.setattr(targets, "find_gpu_target", lambda: pytest.fail("queried the GPU"))
    assert [target.kind for target in choose_targets("auto", 100, "float32", True)[0]] == ["cpu", "virtual"]
