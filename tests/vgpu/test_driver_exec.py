"""`vgpu exec`: Mojo GPU programs run on the virtual GPU, agree with NumPy, and end cleanly whatever happens.

All programs are one binary (programs/suite.mojo), compiled once for this file.
"""

import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from typed import present

from harness.vgpu import Finding, cli
from harness.vgpu.driver import build, server
from harness.vgpu.errors import LaunchError, StepBudgetExceeded

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VGPU = [sys.executable, "-m", "harness.vgpu.cli"]


@pytest.fixture(scope="session")
def suite(tmp_path_factory) -> str:
    """The test programs as one executable whose kernels are PTX text with line tables."""
    binary = tmp_path_factory.mktemp("suite") / "suite"
    source = str(HERE / "programs" / "suite.mojo")
    command = [build.find_mojo(), "build", "-g1", "--target-accelerator", "sm_90a", source, "-o", str(binary)]
    done = subprocess.run(
        command,
        env={**os.environ, **build.build().environment()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return str(binary)


@pytest.fixture(scope="session")
def suite_on_gpu(request) -> str:
    """The same executable, where there is a Mojo to build it with: GPU machines may have MAX alone."""
    try:
        build.find_mojo()
    except build.DriverBuildError as error:
        pytest.skip(str(error))
    return request.getfixturevalue("suite")


def vgpu(*arguments: str, timeout: float = 100, **options) -> subprocess.CompletedProcess:
    """`vgpu exec ARGUMENTS`, with a time limit that no test should reach."""
    return subprocess.run(
        [*VGPU, "exec", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        **options,
    )


def run_suite(suite: str, name: str, *options: str) -> subprocess.CompletedProcess:
    return vgpu(*options, "--", suite, name)


def numbers(done: subprocess.CompletedProcess, dtype) -> np.ndarray:
    """What a program printed, one number a line; the run must be without error."""
    assert done.returncode == 0, done.stderr
    assert ", 0 errors" in done.stderr
    return np.array([float(line) for line in done.stdout.split()]).astype(dtype)


def exact(expected: np.ndarray) -> np.ndarray:
    """A float64 result as float32, where that loses nothing: then the kernel must give the very same number."""
    single = np.asarray(expected).ravel().astype(np.float32)
    np.testing.assert_array_equal(single, np.ravel(expected))
    return single


def eighths(n: int) -> np.ndarray:
    """The programs' float input, exact in every format used: ((37 i) mod 101 - 50) / 8."""
    return (np.arange(n) * 37 % 101 - 50).astype(np.float32) / 8


def integers(n: int) -> np.ndarray:
    """The programs' integer input."""
    return np.arange(n) * 7919 % 1009 - 500


# ---- the programs against NumPy ------------------------------------------------------------------------------------


@pytest.mark.compiler
def test_vector_add(suite):
    i = np.arange(1000)
    expected = (i * 37 % 101) / 8 + (i * 53 % 97) / 16  # exact in float32
    np.testing.assert_array_equal(numbers(run_suite(suite, "vector_add"), np.float32), exact(expected))


@pytest.mark.compiler
def test_shared_memory_reduction(suite):
    x = np.zeros(1024)
    x[:1000] = eighths(1000)
    # Sums of a few hundred multiples of 1/8 are exact in float32, whatever the order.
    expected = exact(x.reshape(8, 128).sum(axis=1))
    np.testing.assert_array_equal(numbers(run_suite(suite, "block_sum"), np.float32), expected)


@pytest.mark.compiler
def test_warp_reduction(suite):
    x = np.zeros(512, dtype=np.int64)
    x[:500] = integers(500)
    sums = x.reshape(16, 32).sum(axis=1)
    np.testing.assert_array_equal(numbers(run_suite(suite, "warp_sum"), np.int64), [*sums, x.sum()])


@pytest.mark.compiler
def test_tiled_matmul(suite):
    a = eighths(40 * 36).reshape(40, 36).astype(np.float64)
    b = ((np.arange(36 * 28) * 53 % 97 - 48) / 16).reshape(36, 28)
    # Products are multiples of 1/128 below 2^12: exact in float32.
    np.testing.assert_array_equal(numbers(run_suite(suite, "tiled_matmul"), np.float32), exact(a @ b))


@pytest.mark.compiler
def test_prefix_sum(suite):
    np.testing.assert_array_equal(numbers(run_suite(suite, "prefix_sum"), np.int64), np.cumsum(integers(700)))


@pytest.mark.compiler
def test_histogram(suite):
    values = np.arange(3000) ** 2 % 1009 % 20
    np.testing.assert_array_equal(
        numbers(run_suite(suite, "histogram"), np.int64), np.bincount(values, minlength=20)
    )


@pytest.mark.compiler
def test_softmax(suite):
    x = eighths(500).reshape(5, 100).astype(np.float64)
    e = np.exp(x - x.max(axis=1, keepdims=True))
    expected = e / e.sum(axis=1, keepdims=True)
    got = numbers(run_suite(suite, "softmax"), np.float64).reshape(5, 100)
    # exp and the division each round once in float32, the sum about seven times.
    np.testing.assert_allclose(got, expected, rtol=float(16 * np.finfo(np.float32).eps))


@pytest.mark.compiler
def test_async_copy(suite):
    x = (np.arange(512) * 37 % 101) / 8
    expected = x.reshape(4, 128)[:, ::-1].ravel()
    np.testing.assert_array_equal(numbers(run_suite(suite, "async_copy"), np.float32), exact(expected))


@pytest.mark.compiler
def test_tensor_cores(suite):
    expected = []
    for k in (16, 8):
        a = eighths(16 * k).reshape(16, k).astype(np.float64)
        b = ((np.arange(k * 8) * 53 % 97 - 48) / 8).reshape(k, 8)
        expected += list((a @ b).ravel())  # inputs and sums are exact in bf16, tf32 and float32
    np.testing.assert_array_equal(
        numbers(run_suite(suite, "tensor_core"), np.float32), exact(np.array(expected))
    )


@pytest.mark.compiler
def test_print_from_a_kernel(suite):
    done = run_suite(suite, "kernel_print")
    assert done.returncode == 0, done.stderr
    expected = [f"block {b} thread {t} value {7 * t}" for b in range(3) for t in (0, 2)]
    assert sorted(done.stdout.split("\n")) == sorted([*expected, ""])


@pytest.mark.compiler
def test_python_program_with_max():
    code = (
        "import numpy as np; from max.driver import CPU, Accelerator, Buffer\n"
        "device = Accelerator(); x = Buffer.from_numpy(np.arange(5.0)).to(device)\n"
        "print(device.architecture_name, x.to(CPU()).to_numpy())"
    )
    done = vgpu("--", sys.executable, "-c", code)
    assert done.stdout == "sm_90a [0. 1. 2. 3. 4.]\n", done.stderr


@pytest.mark.compiler
def test_fills_of_host_buffers(suite):
    """With unified addressing a pinned host buffer is a target of fills, as in most programs of GPU courses."""
    expected = np.append(np.arange(70) + 0.5, [-3, 200])
    np.testing.assert_array_equal(numbers(run_suite(suite, "host_fill"), np.float64), expected)


COURSE = [
    *[
        "host_fills",
        "maps",
        "sub_buffers",
        "copies",
        "pinned_in_a_kernel",
        "wrapped_host_memory",
        "device_facts",
    ],
    *[
        "streams",
        "events",
        "two_dimensions",
        "three_dimensions",
        "dynamic_shared",
        "constant_memory",
        "arguments",
    ],
    *[
        "closures",
        "last_block",
        "spin_lock",
        "atomics",
        "clusters",
        "mbarriers",
        "collectives",
        "named_barriers",
    ],
    "print_and_assert",
]


@pytest.mark.compiler
def test_a_course_of_programs(tmp_path):
    """Twenty-three programs as a GPU course has them, compiled and run by one command; each checks its own results.

    Nothing was built for the virtual GPU beforehand, the kernels have no line tables, and nothing is left behind.
    """
    course = HERE / "programs" / "course" / "course.mojo"
    command = ("--verbose", "--", build.find_mojo(), "run", str(course))
    done = vgpu(*command, timeout=600, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line in COURSE] == COURSE
    said = sorted(line for line in lines if line not in COURSE)
    assert said == [f"block {b} of 2 half: 0.5 yes: True byte: -3" for b in range(2)]
    assert re.search(r" launches, 0 errors, \d+ notes?$", done.stderr.strip())
    assert "virtual GPU: ran launches_place_3d grid=(2, 2, 2) block=(2, 2, 2)" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.compiler
@pytest.mark.parametrize("order", ["reversed", "shuffled:3"])
def test_block_order_does_not_matter_to_a_right_program(suite, order):
    counts = np.bincount(np.arange(3000) ** 2 % 1009 % 20, minlength=20)
    done = run_suite(suite, "histogram", "--blocks", order)
    np.testing.assert_array_equal(numbers(done, np.int64), counts)


@pytest.mark.compiler
def test_more_shared_memory_on_request(suite):
    np.testing.assert_array_equal(
        numbers(run_suite(suite, "shared_on_request"), np.float64), np.arange(32) * 2
    )


# ---- a real GPU, where there is one --------------------------------------------------------------------------------

COMPARED = ("vector_add", "block_sum", "warp_sum", "tiled_matmul", "prefix_sum", "histogram", "async_copy")
COMPARED += ("host_fill", "tensor_core", "kernel_print", "shared_on_request", "softmax")


@pytest.mark.gpu
@pytest.mark.parametrize("name", COMPARED)
def test_real_gpu_gives_the_same_elements(suite_on_gpu, name):
    """The very same binary, on the GPU of this machine and on the virtual one.

    All of these are exact in their formats, so every digit must agree; softmax alone is not: a GPU computes its exp
    with an approximate ex2 (2 units in the last place), the virtual GPU with an accurate one.
    """
    real = subprocess.run(
        [suite_on_gpu, name], capture_output=True, text=True, timeout=100, check=True
    ).stdout.split("\n")
    virtual = run_suite(suite_on_gpu, name).stdout.split("\n")
    if name == "softmax":
        got, expected = (np.array([float(x) for x in lines if x]) for lines in (real, virtual))
        np.testing.assert_allclose(got, expected, rtol=float(8 * np.finfo(np.float32).eps))
    else:
        assert sorted(real) == sorted(virtual)  # prints of a kernel come in any order
        assert name == "kernel_print" or real == virtual


# ---- findings, errors of the device --------------------------------------------------------------------------------


@pytest.mark.compiler
def test_access_past_the_end_is_an_error_of_a_program_that_ends_well(suite):
    done = run_suite(suite, "out_of_bounds")
    assert done.returncode == 1
    assert "out-of-bounds" in done.stderr
    assert re.search(r"faults\.mojo:\d+", done.stderr)
    assert "1 launch, 2 errors" in done.stderr  # the load and the store


@pytest.mark.compiler
def test_race_between_blocks(suite):
    done = run_suite(suite, "race")
    assert done.returncode == 1
    assert "race" in done.stderr
    assert re.search(r"faults\.mojo:\d+", done.stderr)
    assert "-g1" not in done.stderr


@pytest.mark.compiler
def test_findings_for_other_programs_to_read(suite, tmp_path):
    """An exit code that no program has by itself, and a file with what was found."""
    file = tmp_path / "found.json"
    done = run_suite(suite, "race", "--error-exitcode", "99", "--json", str(file))
    assert done.returncode == 99
    found = json.loads(file.read_text())
    assert (found["exit_code"], found["program_exit_code"], found["launches"]) == (99, 0, 1)
    assert found["device"] == "virtual GPU (sm_90a)"
    (race,) = found["findings"]
    assert race["kind"] == "global race" and race["error"] and re.search(r"faults\.mojo:\d+", race["where"])
    assert race["index"] == 0 or race["index"] == [0]
    assert json.loads(run_suite(suite, "race", "--json", "-").stdout)["findings"] == [race]


def test_json_that_cannot_be_written_is_exit_code_2(tmp_path, capsys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.Executor, "run", lambda *_: 0)
        patch.setattr(build, "build", lambda: None)
        assert cli.main(["exec", "--json", str(tmp_path / "no" / "file"), "--", "true"]) == 2
    assert "No such file or directory" in capsys.readouterr().err


@pytest.mark.compiler
def test_a_program_whose_kernel_waits_for_nobody_ends(suite):
    done = run_suite(suite, "nobody_comes")
    assert done.returncode != 0
    assert "1 thread waits here for ever" in done.stderr and re.search(r"faults\.mojo:\d+", done.stderr)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("name", "code_name"),
    [
        ("too_many_threads", "CUDA_ERROR_INVALID_VALUE"),
        ("too_many_blocks", "CUDA_ERROR_INVALID_VALUE"),
        ("too_much_shared", "CUDA_ERROR_INVALID_VALUE"),
        ("out_of_memory", "CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_limits_give_the_errors_of_a_real_driver(suite, name, code_name):
    done = run_suite(suite, name)
    assert done.returncode == 1
    assert re.search(rf"virtual GPU: {code_name}: .+", done.stderr)  # the sentence
    assert f"CUDA call failed: {code_name}" in done.stderr + done.stdout  # what the program saw


@pytest.mark.compiler
def test_a_program_may_handle_an_error(suite):
    done = run_suite(suite, "out_of_memory_handled")
    assert (done.returncode, done.stdout) == (0, "too much\n")


@pytest.mark.compiler
def test_what_is_not_simulated_is_named_in_one_line(suite):
    done = run_suite(suite, "graph")
    assert done.returncode == 1
    (line,) = [
        line for line in done.stderr.splitlines() if line.startswith("virtual GPU: the program called")
    ]
    assert line == "virtual GPU: the program called cuGraphCreate, which the virtual GPU does not have"


@pytest.mark.compiler
def test_an_assertion_of_a_kernel_that_fails(suite):
    """Its text is printed as on a GPU, and the trap behind it is a finding."""
    done = run_suite(suite, "failed_assert")
    assert done.returncode == 1
    assert re.search(
        r"faults\.mojo:\d+.*block: \[0,0,0\] thread: \[16,0,0\].*thread 16 is too many", done.stdout
    )
    assert "error: trap at" in done.stderr and "first seen in kernel faults_only_for_sixteen" in done.stderr


@pytest.mark.compiler
def test_program_without_gpu_use(suite):
    done = run_suite(suite, "no_gpu")
    assert (done.returncode, done.stdout) == (0, "no kernel here\n")
    assert "the program ran no kernel, 0 errors, 0 notes" in done.stderr


# ---- the CUDA driver API, called by hand ---------------------------------------------------------------------------


@pytest.fixture(scope="session", params=["exec", "inprocess"])
def api(request) -> dict:
    """What cuda_api.py was answered, through an executor process and in process."""
    script = str(HERE / "cuda_api.py")
    if request.param == "exec":
        done = vgpu("--", sys.executable, script)
    else:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, script, "inprocess"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.compiler
def test_fills_and_copies(api):
    expected = np.full(64, 7, np.uint8)
    expected[8:16] = [4, 3, 2, 1] * 2
    expected[16:20] = [6, 5] * 2
    expected[24:28] = expected[40:44] = [9, 0, 0, 0]
    assert api["memory"]["bytes"] == list(expected)
    assert api["memory"]["range"] == [0, 64]
    assert api["memory"]["used"] == 128


@pytest.mark.compiler
def test_fills_and_copies_of_pinned_host_memory(api):
    """Every fill and copy takes pinned host memory for device memory; a freed or too short range is refused."""
    host = api["pinned"]
    row = [0] * 16
    for name, value in (("8", [0x11] * 16), ("16", [0x33, 0x22] * 8), ("32", [0x77, 0x66, 0x55, 0x44] * 4)):
        assert host[f"cuMemsetD{name}_v2"] == host[f"cuMemsetD{name}Async"] == value
        width = int(name) // 8
        for at in (0, 8):
            row[at : at + width] = value[:width]
        assert host[f"cuMemsetD2D{name}_v2"] == host[f"cuMemsetD2D{name}Async"] == row
    copies = [name for name in host if name.startswith("cuMemcpy")]
    assert len(copies) == 9 and all(host[name] == list(range(16)) for name in copies)
    assert host["registered"] == [5] * 16
    refused = ("past the end", "unregistered", "freed twice")
    assert {host[name] for name in refused} == {"CUDA_ERROR_INVALID_VALUE"}


@pytest.mark.compiler
def test_copies_of_rectangles(api):
    """Between host and device, dense and pitched, and what lies beside the rectangle stays."""
    found = api["rectangles"]
    expected = np.zeros((4, 5), int)
    expected[:2, 2:] = np.arange(20).reshape(4, 5)[1:3, 1:4]
    assert (found["pitch"], found["back"]) == (512, expected.ravel().tolist())
    assert found["past the end"] == "CUDA_ERROR_INVALID_VALUE"
    assert found["array"] == "CUDA_ERROR_NOT_SUPPORTED"


@pytest.mark.compiler
def test_memory_errors(api):
    errors = {name: code for name, code in api["memory"].items() if isinstance(code, str)}
    assert errors.pop("too large") == "CUDA_ERROR_OUT_OF_MEMORY"
    assert {errors.pop(name) for name in ("free", "free null")} == {"CUDA_SUCCESS"}
    assert set(errors.values()) == {"CUDA_ERROR_INVALID_VALUE"}
    assert len(errors) == 7


@pytest.mark.compiler
def test_three_ways_to_launch(api):
    launches = api["launches"]
    assert launches["launch"] == "CUDA_SUCCESS"
    assert launches["by pointers"] == [0, 0.5, 1, 1.5, 2, 2.5]
    assert launches["by buffer"] == [0, 3, 6, 9, 12, 15]
    assert launches["by config"] == [0, 2, 4, 6, 8, 10]
    assert launches["parameters"] == [[0, 8], [8, 8], [16, 4], [20, 4]]


@pytest.mark.compiler
def test_launches_that_a_driver_refuses(api):
    launches = api["launches"]
    refused = ("fifth parameter", "empty grid", "grid y", "block", "block z", "no arguments")
    refused += ("shared without attribute", "attribute too large")
    assert {launches[name] for name in refused} == {"CUDA_ERROR_INVALID_VALUE"}
    assert {launches[name] for name in ("attribute", "shared with attribute")} == {"CUDA_SUCCESS"}


@pytest.mark.compiler
def test_threads_do_not_get_in_each_others_way(api):
    assert api["threads"] == 8 * 25


@pytest.mark.compiler
def test_modules_that_a_driver_refuses(api):
    modules = api["modules"]
    code, log = modules["machine code"]
    assert code == "CUDA_ERROR_INVALID_IMAGE"
    assert "compiled to machine code" in log
    assert modules["not PTX"][0] == "CUDA_ERROR_INVALID_IMAGE"
    code, log = modules["unknown version"]
    assert code == "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"
    assert "99.0" in log
    assert modules["unknown kernel"] == modules["unknown variable"] == "CUDA_ERROR_NOT_FOUND"
    assert (modules["unload"], modules["unload twice"]) == ("CUDA_SUCCESS", "CUDA_ERROR_INVALID_HANDLE")
    assert modules["graphs"] == "CUDA_ERROR_NOT_SUPPORTED"
    assert modules["second device"] == "CUDA_ERROR_INVALID_DEVICE"


# ---- ends: crash, time limit, Ctrl-C, forks ------------------------------------------------------------------------


def leftovers() -> set[str]:
    """What a run could leave on the machine: files in /tmp and /dev/shm, abstract sockets."""
    files = {str(path) for folder in ("/tmp", "/dev/shm") for path in Path(folder).glob("*")}
    sockets = {line for line in Path("/proc/net/unix").read_text().split() if "workbook-vgpu" in line}
    return {name for name in files if "mojo" in name or "vgpu" in name} | sockets


@pytest.mark.compiler
def test_exit_code_and_output_of_the_program_are_kept():
    done = vgpu("--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout) == (7, "out\n")
    assert done.stderr.startswith("err\n")


@pytest.mark.compiler
def test_program_that_crashes():
    before = leftovers()
    assert vgpu("--", "sh", "-c", "kill -SEGV $$").returncode == 128 + signal.SIGSEGV
    assert leftovers() <= before


@pytest.mark.compiler
def test_program_that_is_killed_while_its_kernel_spins(suite):
    before = leftovers()
    # The shell is the program; it kills the Mojo process that waits for a kernel without end.
    done = vgpu("--", "sh", "-c", f"'{suite}' endless & sleep 1; kill -9 $!; echo ended; exit 3")
    assert (done.returncode, done.stdout) == (3, "ended\n")
    assert leftovers() <= before


@pytest.mark.compiler
def test_time_limit_ends_the_program_and_its_children():
    before = leftovers()
    done = vgpu("--timeout", "1", "--", "sh", "-c", "sleep 987 & echo $!; exec sleep 987")
    assert done.returncode == server.TIMED_OUT
    assert "stopped after 1 s" in done.stderr
    assert not Path(f"/proc/{done.stdout.strip()}").exists()
    assert leftovers() <= before


@pytest.mark.compiler
def test_time_limit_during_a_launch(suite):
    done = run_suite(suite, "endless", "--timeout", "2")
    assert done.returncode == server.TIMED_OUT


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("send", "number", "code"),
    [
        (os.kill, signal.SIGINT, 130),
        (os.kill, signal.SIGTERM, 143),
        (os.killpg, signal.SIGINT, 130),  # as a terminal does it: the program gets the signal as well
    ],
)
def test_signal_ends_everything(suite, send, number, code):
    before = leftovers()
    process = subprocess.Popen(
        [*VGPU, "exec", "--verbose", "--", suite, "endless"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for line in present(process.stderr):
        if "loaded" in line:  # the launch follows at once
            break
    time.sleep(0.3)
    send(process.pid, number)
    process.communicate(timeout=60)
    assert process.returncode == code
    with pytest.raises(ProcessLookupError):  # nobody of the session is left
        os.killpg(process.pid, 0)
    assert leftovers() <= before


@pytest.mark.compiler
def test_forked_child_does_not_share_the_device():
    code = (
        "import ctypes, os\n"
        "cuda = ctypes.CDLL('libcuda.so.1')\n"
        "assert cuda.cuInit(0) == 0\n"
        "a = ctypes.c_uint64()\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(cuda.cuMemAlloc_v2(ctypes.byref(a), ctypes.c_size_t(8)))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), cuda.cuMemAlloc_v2(ctypes.byref(a), ctypes.c_size_t(8)))"
    )
    not_initialized = 3
    assert vgpu("--", sys.executable, "-c", code).stdout == f"{not_initialized} 0\n"


@pytest.mark.compiler
def test_executor_that_dies(tmp_path):
    """A program whose executor is gone gets an error and a sentence, and does not hang."""
    code = (
        "import ctypes, os, signal, time\n"
        "cuda = ctypes.CDLL('libcuda.so.1')\n"
        "assert cuda.cuInit(0) == 0\n"
        "os.kill(os.getppid(), signal.SIGKILL)\n"
        "time.sleep(0.2)\n"
        "a = ctypes.c_uint64()\n"
        f"print(cuda.cuMemAlloc_v2(ctypes.byref(a), 8), file=open({str(tmp_path / 'out')!r}, 'w'), flush=True)\n"
    )
    done = vgpu("--", sys.executable, "-c", code)
    assert done.returncode == -signal.SIGKILL
    for _ in range(100):
        if (tmp_path / "out").exists() and (tmp_path / "out").read_text():
            break
        time.sleep(0.05)
    assert (tmp_path / "out").read_text() == "999\n"
    assert "lost the connection to the executor process" in done.stderr


@pytest.mark.compiler
def test_program_started_after_the_executor_ended():
    code = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
    env = {
        **os.environ,
        "LD_LIBRARY_PATH": str(build.build().folder),
        "WORKBOOK_VGPU_SOCKET": "workbook-vgpu-nobody",
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "100\n"  # no device
    assert "the executor process does not answer" in done.stderr


@pytest.mark.compiler
def test_two_programs_at_once(suite):
    both = [
        subprocess.Popen(
            [*VGPU, "exec", "--", suite, "warp_sum"], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0] == outputs[1] != ""


# ---- the command line ----------------------------------------------------------------------------------------------


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["exec"], "no program given"),
        (["exec", "--", "/no/such/program"], "cannot run /no/such/program"),
        (["exec", "--checks", "memory,luck", "--", "true"], "unknown check luck"),
        (["exec", "--blocks", "sideways", "--", "true"], "sideways"),
        (
            ["exec", "--timeout", "-1", "--", "true"],
            "--timeout -1: must be more than 0 and at most 10,000,000",
        ),
        (["exec", "--timeout", "0", "--", "true"], "--timeout 0: must be more than 0"),
        (["exec", "--timeout", "nan", "--", "true"], "--timeout nan: must be more than 0"),
        (["exec", "--timeout", "inf", "--", "true"], "--timeout inf: must be more than 0"),
        (["exec", "--error-exitcode", "0", "--", "true"], "--error-exitcode 0: must be from 1 to 255"),
        (["exec", "--", "/"], "cannot run /: Permission denied"),
    ],
)
def test_bad_use_is_exit_code_2(arguments, message, capsys):
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_cache_that_cannot_be_written_is_exit_code_5(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "file"))
    assert cli.main(["exec", "--", "true"]) == 5
    assert "set WORKBOOK_CACHE to a folder you can write" in capsys.readouterr().err


@dataclass
class Outcome:
    """As much of a `Device` as the summary looks at."""

    findings: list = field(default_factory=list)
    errors: list = field(default_factory=list)
    launches: tuple = (None,)

    @property
    def gpu(self):
        return self


FAULT = Finding("out-of-bounds load", "load past the end of x")
NOTE = Finding("uninitialised read", "in the library", is_error=False)


@pytest.mark.parametrize(
    ("program", "outcome", "code"),
    [
        (0, Outcome(), 0),
        (0, Outcome([NOTE]), 0),
        (0, Outcome([NOTE, FAULT]), 1),
        (3, Outcome([FAULT]), 3),
        (0, Outcome(errors=[StepBudgetExceeded("it loops")]), 1),
        (0, Outcome(errors=[LaunchError("too many threads")]), 0),  # the program saw it, and may go on
    ],
)
def test_exit_code_says_whether_something_is_wrong(program, outcome, code, capsys):
    assert cli.summarise([outcome], "sm_90a", program) == code
    errors = sum(finding.is_error for finding in outcome.findings)
    assert f"1 launch, {errors} error" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "outcome", "code"),
    [(0, Outcome(), 0), (3, Outcome([NOTE]), 3), (0, Outcome([FAULT]), 99), (3, Outcome([FAULT]), 99)],
)
def test_an_exit_code_of_its_own_goes_before_the_programs(program, outcome, code):
    assert cli.summarise([outcome], "sm_90a", program, 99) == code


@pytest.mark.compiler
def test_unsupported_instruction_is_exit_code_5_even_if_the_program_goes_on(tmp_path):
    """multimem is not simulated."""
    script = tmp_path / "program.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(HERE)!r}); import cuda_api\n"
        "cuda = cuda_api.Cuda(); cuda('cuInit', 0)\n"
        "ptx = cuda_api.PTX.replace(b'mul.f32 %f3, %f2, %f1;', b'multimem.red.relaxed.sys.global.add.f32 [%rd4], %f2;')\n"
        "ptx = ptx.replace(b'.version 8.0', b'.version 8.5').replace(b'sm_80', b'sm_90a')\n"
        "scale, x = cuda.function(ptx, b'scale'), cuda.upload([1.0])\n"
        "n = cuda_api.ctypes.c_uint32(1)\n"
        "print(cuda.launch(scale, (1, 1, 1), (1, 1, 1), [x, x, cuda_api.ctypes.c_float(1), n]))\n"
    )
    done = vgpu("--", sys.executable, str(script))
    assert (done.returncode, done.stdout) == (5, "CUDA_ERROR_NOT_SUPPORTED\n")
    assert "multimem.red" in done.stderr


@pytest.mark.compiler
def test_info_names_the_device(capsys):
    assert cli.main(["info", "--arch", "sm_80"]) == 0
    lines = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["device"] == "virtual GPU (sm_80)"
    assert lines["compute capability"] == "8.0"
    assert "166912 bytes" not in lines["threads per block"]
    assert "166912" in lines["shared memory"]


@pytest.mark.compiler
def test_strangers_are_turned_away(monkeypatch):
    """A process of another user may name the socket; it is not served."""
    executor = server.Executor(lambda: pytest.fail("a device was made"), build.build())
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as stranger:
        name = f"\0workbook-vgpu-test-{os.getpid()}"
        listener.bind(name)
        listener.listen()
        stranger.connect(name)
        monkeypatch.setattr(os, "getuid", lambda: -1)
        executor._accept(selectors.DefaultSelector(), listener)
        assert stranger.recv(1) == b""
    assert executor.devices == []
