"""`p25 --backward`: the ring over gloo, its report, and failing ranks."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from process_groups import assert_exited, has_processes

from harness import cli
from harness.check import zoo
from harness.devices import processes
from harness.puzzles.p25 import run
from harness.toolchain import roots

pytestmark = pytest.mark.usefixtures("no_processes_left")
SMALL = ("--dims", "1", "2", "2", "32", "4")


@pytest.fixture
def ring(capfd):
    """Return a function that runs `p25 --backward` in this process and returns exit code and output."""

    def call(*arguments):
        code = cli.main(["p25", "--backward", *map(str, arguments)])
        out, err = capfd.readouterr()
        return code, out + err

    return call


def test_four_ranks_agree_with_one_device(ring):
    with socket.socket() as occupied:  # a ring on one machine needs no port
        occupied.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        occupied.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(occupied.getsockname()[1])
        try:
            code, output = ring("--solution", *SMALL)
        finally:
            del os.environ["MASTER_PORT"]
    assert code == 0, output
    assert all(f"✅ {name}" in output for name in ("output", "grad_query", "grad_key", "grad_value"))
    assert "Overall Result: ✅ output and all gradients agree with one device" in output


def test_saved_memory_decreases_with_the_number_of_ranks(ring):
    saved_bytes = {}
    for ranks in (1, 2, 4):
        code, output = ring("--solution", "--dims", 1, 4, 2, 64, 8, "--ranks", ranks)
        assert code == 0, output
        saved_line = output.partition("kept for the backward pass (measured): ")[2]
        saved_bytes[ranks] = int(saved_line.split()[0].replace(",", ""))
    assert saved_bytes[1] == 2 * saved_bytes[2] == 4 * saved_bytes[4]


def test_ranks_can_have_uneven_ranges(ring):
    code, output = ring("--solution", "--dims", 1, 2, 1, 19, 4, "--ranks", 3, "--plain", "--full")
    assert (
        code == 0
        and "every key visible" in output
        and "one range a rank: the largest part has 7 of 19" in output
    )


def test_too_few_cores_are_reported(ring, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    code, output = ring("--solution", *SMALL, "--ranks", 2)
    assert code == 0 and "note: 2 processes share 1 cores: no time here says anything about a ring" in output


def test_unsolved_ring_is_reported(ring):
    if not (roots.CHECKOUT / "problems" / "p25").is_dir():
        pytest.skip("problems/ is not there")
    code, output = ring()
    assert code == 3 and "in_torch.py: unsolved blanks: " in output and "merge" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", 0), "--ranks 0: must be 1 to 16"),
        (("--ranks", 17), "--ranks 17: must be 1 to 16"),
        (("--dims", 1, 3, 2, 8, 4), "sizes must be at least 1, and 2 heads must divide 3"),
        (("--dims", 1, 2, 2, 0, 4), "sizes must be at least 1"),
        (("--seconds", 0), "--seconds 0: must be above 0"),
        (("--break", "4:0:dies"), "--break 4:0:dies: expected RANK:TRANSFER:HOW, a rank below 4"),
        (("--break", "1:0:sings"), "--break 1:0:sings: expected RANK:TRANSFER:HOW"),
        (("--device", "cpu"), "unrecognized arguments: --device cpu"),
    ],
)
def test_invalid_arguments_are_reported(ring, arguments, message):
    code, output = ring("--solution", *arguments)
    assert code == 2 and output.startswith("error: ") and message in output and output.count("\n") == 1


def test_too_many_ranks_for_memory_are_rejected(ring, monkeypatch):
    monkeypatch.setattr(run, "get_free_memory", lambda: 2**30)
    code, output = ring("--solution", "--ranks", 8)
    assert code == 5 and "--ranks 8: that many processes take 2.3 GiB, and 1.0 are free" in output


def test_available_memory_is_read():
    assert 2**20 < run.get_free_memory() <= 2**63


@pytest.mark.parametrize(
    ("fault", "patterns"),
    [
        ("2:1:dies", [r"rank 2 of 4: ended without an answer \(exit code 7\)", r"rank 3 of 4(, step \d)?: rank 0 or 2 is gone, or gave up on another\n"]),
        ("2:4:dies", [r"rank 2 of 4: ended without an answer \(exit code 7\)", r"rank 3 of 4(, step \d)?: rank 0 or 2 is gone, or gave up on another\n"]),
        ("1:0:late", ["rank 2 of 4, step 0: rank 1 or 3 is late"]),
        ("1:0:shape", [r"every rank: rank 1 of 4 has query, key and value of \[1, 2, 7, 4\], ", "the ranks have 8, 7, 8, 8 positions, expected 8, 8, 8, 8, of 32, or "]),
        ("3:0:dtype", ["every rank: rank 3 of 4 has tensors of float64, the others of float32"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_failed_rank_is_reported_and_stops_all(ring, fault, patterns):
    code, output = ring("--solution", *SMALL, "--seconds", 3, "--break", fault)
    assert code == 5, output
    assert "error: the ring is broken: " in output and "in_torch.py fails" not in output
    assert all(re.search(pattern, output) for pattern in patterns), output


def write_solution(monkeypatch, tmp_path, text):
    path = tmp_path / "problems" / "p25" / "in_torch.py"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    monkeypatch.setattr(roots, "get_problems", lambda: tmp_path / "problems")
    return path


def test_wrong_ring_is_rejected(ring, monkeypatch, tmp_path):
    wrong = next(bug for bug in zoo.load_wrong_solutions("p25") if bug.name == "local_index")
    write_solution(monkeypatch, tmp_path, wrong.build_target().read_text())
    code, output = ring(*SMALL)
    assert code == 1 and "❌ output     error " in output and "Overall Result: ❌ WRONG" in output, output
    message = "is computed from output, which is wrong: fix that first\n"
    assert all(f"❌ grad_{name:<5} {message}" in output for name in ("query", "key", "value")), output


def test_raising_ring_counts_as_wrong(ring, monkeypatch, tmp_path):
    text = (roots.get_solutions() / "p25" / "in_torch.py").read_text()
    path = write_solution(
        monkeypatch, tmp_path, text.replace("torch.logaddexp(lse", "torch.logaddexp(nothing")
    )
    code, output = ring(*SMALL, "--ranks", 2)
    assert code == 1 and "NameError: name 'nothing' is not defined" in output, output
    assert f"{path.name} fails in 2 of 2 ranks" in output


@pytest.fixture
def late_ring():
    """A ring that waits for a late rank, in a separate process group."""
    command = ["-m", "harness", "p25", "--backward", "--solution", "--break", "1:0:late", *SMALL]
    started = subprocess.Popen(
        [sys.executable, *command], cwd=roots.CHECKOUT, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(roots.CHECKOUT)},
    )  # fmt: skip
    assert started.stdout is not None
    while "processes on gloo" not in started.stdout.readline():
        assert started.poll() is None
    yield started
    if has_processes(started.pid):
        os.killpg(started.pid, signal.SIGKILL)
    started.communicate()


def test_ctrl_c_stops_all_ranks(late_ring):
    """Send the signal to every process, as a terminal does."""
    time.sleep(1)
    os.killpg(late_ring.pid, signal.SIGINT)
    _, err = late_ring.communicate(timeout=60)
    assert late_ring.returncode == 130 and err == "interrupted\n"
    assert_exited(late_ring.pid)


@pytest.mark.parametrize(
    ("kind", "ranks_started"),
    [(signal.SIGTERM, True), (signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGKILL, False)],
)
def test_ranks_exit_with_their_parent(late_ring, kind, ranks_started):
    """Send the signal only to the parent; the ranks would wait a hundred seconds for rank 1."""
    if ranks_started:
        time.sleep(3)
    late_ring.send_signal(kind)
    assert late_ring.wait(timeout=60) == (130 if kind == signal.SIGINT else -kind)
    assert_exited(late_ring.pid)


def test_ctrl_c_during_startup_is_not_lost(monkeypatch):
    """The fork server starts with SIGINT blocked, and the parent receives it directly afterwards.

    The signal is sent to this thread, because one to the process may be handled by another thread of a test worker.
    """

    def start():
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())

    monkeypatch.setattr(processes.forkserver, "ensure_running", start)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            processes.start_server()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
