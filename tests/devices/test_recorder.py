"""The recording launcher on small packages: many compiled together are recorded as each would be alone."""

import re
import shutil
from dataclasses import replace

import pytest
from kernel_texts import fingerprint

from harness import puzzles
from harness.devices import recorder
from harness.devices.recorder import Order, record, record_many
from harness.errors import CompileFailed
from harness.toolchain import roots
from harness.toolchain.packages import OpPackage

pytestmark = pytest.mark.compiles

TOY = roots.CHECKOUT / "tests" / "toys" / "solutions" / "p90"
DIMS = ((2, 3), (4, 5))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """name, text, replacement -> a copy of the toy's op package with that edit; recordings start anew."""
    monkeypatch.setattr(roots, "solutions", lambda: TOY.parent)
    monkeypatch.setattr(puzzles, "__path__", [*puzzles.__path__, str(TOY.parents[1] / "puzzles")])
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))

    def make(name: str, old: str = "", new: str = "") -> OpPackage:
        folder = tmp_path / name
        shutil.copytree(TOY / "op", folder)
        (folder / "shared").symlink_to(roots.CHECKOUT / "solutions" / "shared")
        text = (folder / "square.mojo").read_text()
        assert not old or text.count(old) == 1
        (folder / "square.mojo").write_text(text.replace(old, new) if old else text)
        return OpPackage(folder)

    return make


def lines(recording) -> list[list[str]]:
    """The lines of the source that each kernel's instructions come from."""
    return [re.findall(r"\.loc\t\d+ \d+ \d+", text) for text in recording.ptx.values()]


def arguments(recording) -> list:
    """Every launch without its kernel's symbol, whose hash goes by the copy."""
    return [replace(launch, symbol="") for launch in recording.launches()]


def test_packages_recorded_together_are_recorded_as_alone_and_kept(package, monkeypatch, tmp_path):
    right, wrong = package("right"), package("wrong", "2 * x[from_row", "3 * x[from_row")
    together = record_many([Order(right, DIMS), Order(wrong, DIMS[:1])], "p90", "float32")
    assert [list(recording.cases) for recording in together] == [
        [("plain", (2, 3)), ("plain", (4, 5))],
        [("plain", (2, 3))],
    ]
    for recording, own in zip(together, (right, wrong), strict=True):
        assert all(f'"{own.path}/square.mojo"' in text for text in recording.ptx.values())
        assert all(launch.symbol in recording.ptx for launch in recording.launches())
    square, dsquare = zip(*(map(fingerprint, own.ptx.values()) for own in together), strict=True)
    assert square[0] == square[1] and dsquare[0] != dsquare[1], "only the backward kernel was edited"

    with monkeypatch.context() as patch:  # found in the cache: nothing is compiled
        patch.delattr(recorder, "run_mojo")
        assert record(right, "p90", "float32", DIMS) == together[0]
        assert record(wrong, "p90", "float32", DIMS[:1]) == together[1]

    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "other"))
    alone = record(wrong, "p90", "float32", DIMS[:1])
    assert [*map(fingerprint, alone.ptx.values())] == [square[1], dsquare[1]]
    assert lines(alone) == lines(together[1]) and all(lines(alone))
    assert arguments(alone) == arguments(together[1])


def test_of_many_packages_the_one_that_does_not_compile_is_named(package):
    broken = package("broken", "2 * x[from_row", "no_such_name * x[from_row")
    orders = [Order(own, DIMS) for own in (package("right"), broken)]
    with pytest.raises(CompileFailed, match="no_such_name") as caught:
        record_many(orders, "p90", "float32")
    assert str(caught.value).startswith(f"{broken.path} does not compile")
    assert f"{broken.path}/square.mojo:" in caught.value.details
