"""The choice of devices: what was asked for, what the machine has, and the reason for every device left out."""

import pytest

from harness.devices import targets
from harness.devices.targets import CPU_LIMIT, VIRTUAL, VIRTUAL_LIMIT, Skipped, Target, choose
from harness.errors import BadUse, EnvironmentProblem

GPU = Target("gpu", None, "a GPU")


@pytest.fixture
def no_gpu(monkeypatch):
    """MAX sees no GPU."""
    monkeypatch.setattr(targets, "gpu_may_exist", lambda: True)
    monkeypatch.setattr(targets, "gpu", lambda: None)


@pytest.fixture
def one_gpu(monkeypatch):
    """MAX sees a GPU."""
    monkeypatch.setattr(targets, "gpu_may_exist", lambda: True)
    monkeypatch.setattr(targets, "gpu", lambda: GPU)


def kinds(chosen: list[Target]) -> list[str]:
    """The kinds, in order."""
    return [target.kind for target in chosen]


@pytest.mark.parametrize("wanted", ["auto", "all"])
def test_without_a_gpu_the_virtual_one_takes_its_place(no_gpu, wanted):
    chosen, skipped = choose(wanted, 100, "float32", True)
    assert kinds(chosen) == ["cpu", "virtual"] and not skipped


def test_nothing_looks_for_a_gpu_where_none_can_be(no_gpu, monkeypatch):
    """MAX looks once, and a layer that wants the virtual GPU by its driver could no longer switch it on."""
    monkeypatch.setattr(targets, "gpu_may_exist", lambda: False)
    monkeypatch.setattr(targets, "gpu", lambda: pytest.fail("looked for a GPU"))
    assert kinds(choose("auto", 100, "float32", True)[0]) == ["cpu", "virtual"]


def test_what_is_too_large_for_the_virtual_gpu_is_run_when_asked_for(no_gpu):
    chosen, skipped = choose("auto", VIRTUAL_LIMIT + 1, "float32", True)
    assert kinds(chosen) == ["cpu"]
    assert skipped == [Skipped("gpu", "no GPU, and too large for the virtual one; --device virtual runs it")]
    assert choose("virtual", VIRTUAL_LIMIT + 1, "float32", True)[0] == [VIRTUAL]


def test_with_a_gpu_auto_is_both(one_gpu):
    chosen, skipped = choose("auto", 100, "float32", True)
    assert kinds(chosen) == ["cpu", "gpu"] and not skipped


def test_cpu_alone_skips_nothing(one_gpu):
    chosen, skipped = choose("cpu", 100, "float32", True)
    assert kinds(chosen) == ["cpu"] and not skipped


def test_gpu_alone(one_gpu):
    chosen, skipped = choose("gpu", 100, "float32", True)
    assert chosen == [GPU] and not skipped


def test_gpu_by_name_without_one_is_bad_use(no_gpu):
    with pytest.raises(EnvironmentProblem, match="--device gpu: MAX sees no GPU on this machine"):
        choose("gpu", 100, "float32", True)


@pytest.mark.parametrize("wanted", ["gpu", "virtual"])
def test_float64_on_a_gpu_by_name_is_bad_use(one_gpu, wanted):
    with pytest.raises(
        BadUse, match=f"--dtype float64 is for the CPU path; --device {wanted} does not run it"
    ):
        choose(wanted, 100, "float64", True)


@pytest.mark.parametrize(("work", "runs"), [(CPU_LIMIT, True), (CPU_LIMIT + 1, False)])
def test_a_large_case_leaves_the_cpu_out_unless_asked_for(one_gpu, work, runs):
    chosen, skipped = choose("auto", work, "float32", True)
    assert ("cpu" in kinds(chosen)) == runs
    assert [s.kind for s in skipped] == ([] if runs else ["cpu"])
    assert all("2^28 multiply-adds; --device cpu runs it" in s.reason for s in skipped)
    assert kinds(choose("cpu", work, "float32", True)[0]) == ["cpu"]


def test_float64_stays_on_the_cpu(one_gpu):
    chosen, skipped = choose("auto", 100, "float64", True)
    assert kinds(chosen) == ["cpu"]
    assert skipped == [Skipped("gpu", "float64 is for the CPU path")]


@pytest.mark.parametrize("wanted", ["auto", "all"])
def test_without_a_cpu_path_there_is_one_gpu(no_gpu, wanted):
    assert choose(wanted, 100, "float32", False) == ([VIRTUAL], [])
    _, skipped = choose(wanted, VIRTUAL_LIMIT + 1, "float32", False)
    assert [each.kind for each in skipped] == ["gpu"]


@pytest.mark.parametrize(
    ("wanted", "dtype", "flag"), [("cpu", "float32", "--device cpu"), ("auto", "float64", "--dtype float64")]
)
def test_a_cpu_path_that_is_not_there_is_bad_use(wanted, dtype, flag):
    with pytest.raises(BadUse, match=f"{flag} is for a CPU path"):
        choose(wanted, 100, dtype, False)


def test_a_simulated_gpu_is_never_called_a_gpu():
    assert Target("virtual", None, "sm_90a").label == "Virtual GPU"
    assert Target("gpu", None, "").label == "GPU" and Target("cpu", None, "").label == "CPU"


def test_this_machine_has_a_cpu():
    target = targets.cpu()
    assert target.kind == "cpu" and target.device.label == "cpu" and target.detail
