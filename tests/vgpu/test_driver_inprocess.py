"""The virtual GPU in this very process: through a MAX graph, by the driver API, and how a process with it ends.

Every program here is a process of its own, because switching the device on lasts as long as the process.
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typed import present

from harness.vgpu.driver import build, inprocess
from harness.vgpu.driver.kernel_names import KernelCatalogue, fingerprint, readable

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GRAPH = str(HERE / "graph_program.py")
SECONDS, MEMORY = (
    120,
    20 << 30,
)  # bounds of a program that Ctrl-C ends; 16 GB of it are address space that the simulator reserves
ENV = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"}

# Opens the device by the driver API on the main thread, with a kernel that does not end.
SPIN = """
import ctypes
from harness.vgpu.driver import inprocess
gpu = inprocess.start()
import cuda_api
cuda = cuda_api.Cuda()
cuda("cuInit", 0)
ptx = b'''
.version 8.0
.target sm_80
.address_size 64
.visible .entry spin(.param .u64 flag)
{
    .reg .pred %p<2>;
    .reg .b32 %r<3>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [flag];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r2, 0;
AGAIN:  // it writes its count: a poll that changes nothing would be ended as one that nobody can satisfy
    ld.volatile.global.u32 %r1, [%rd2];
    add.u32 %r2, %r2, 1;
    st.volatile.global.u32 [%rd2+4], %r2;
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra AGAIN;
    ret;
}
'''
spin = cuda.function(ptx, b"spin")
flag = cuda.upload([0.0, 0.0])
print("spinning", flush=True)
try:
    cuda.launch(spin, (1, 1, 1), (1, 1, 1), [flag])
    print("came back", flush=True)
except KeyboardInterrupt:
    print("interrupted; memory still answers", cuda.download(flag, ctypes.c_float, 1), flush=True)
    raise
"""

# A temporary owns device memory and is freed while an exception travels up: its callback must not lose the exception.
FREED_DURING_EXCEPTION = """
import ctypes
from harness.vgpu.driver import inprocess
gpu = inprocess.start()
import cuda_api
cuda = cuda_api.Cuda()
cuda("cuInit", 0)

# A C function that frees device memory: called by the interpreter itself while it unwinds, as a Buffer's end does.
free = ctypes.cast(cuda.library.cuMemFree_v2, ctypes.c_void_p).value
address = cuda.allocate(64).value
Destructor = ctypes.CFUNCTYPE(None, ctypes.py_object)
new = ctypes.pythonapi.PyCapsule_New
new.restype = ctypes.py_object
new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
# PyCapsule destructors get the capsule, whose address cuMemFree_v2 refuses: the callback runs all the same.
try:
    int("x", *(new(address, None, free),))
except (TypeError, ValueError) as error:
    print(type(error).__name__, len(inprocess.device().errors))
"""


def python(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**ENV, **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def interrupt(*arguments: str) -> tuple[int, str, str]:
    """Run a program until it says "spinning", press Ctrl-C, and wait: (exit code, output, errors)."""
    with subprocess.Popen(
        [sys.executable, *arguments],
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit,
    ) as process:
        try:
            assert present(process.stdout).readline() == "spinning\n", process.communicate()[1]
            time.sleep(0.5)  # until the kernel runs; much later its step budget would end it
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    return process.returncode, out, err


def limit() -> None:
    """Bounds a program whose kernel does not end, should it be deaf to Ctrl-C: processor seconds and bytes of its own."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """PTX of the graph's sum kernel, compiled outside of the graph with a line table."""
    done = subprocess.run(
        [build.find_mojo(), "run", "-g1", "record.mojo"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    path = tmp_path_factory.mktemp("recorded") / "add.ptx"
    path.write_text(done.stdout)
    return path


@pytest.fixture(scope="module")
def graph(recorded) -> dict:
    """What graph_program.py reports. This compiles the graph; the later tests find it in MAX's cache."""
    done = python(GRAPH, "all", str(recorded))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.compiles
def test_graph_with_custom_ops_runs(graph):
    assert graph["device"] == ["cuda", "sm_90a"]
    assert graph["difference"] == 0
    assert graph["findings_of_right_run"] == 0
    assert graph["errors"] == []
    assert graph["again"]


@pytest.mark.compiles
def test_kernels_have_names_and_lines_inside_a_graph(graph):
    """One kernel is named by the catalogue, whose twin has lines; the other by its @__name attribute."""
    assert graph["launches"] == ["add and overrun", "wait_for_flag"] * 2
    (finding,) = graph["findings"]
    assert finding["kind"] == "out-of-bounds load"
    assert finding["error"]
    assert (finding["tensor"], finding["index"]) == ("b", 100)
    assert finding["count"] == 3  # three elements past the end
    source = HERE / "graph_ops" / "sums.mojo"
    line = 1 + next(i for i, text in enumerate(source.read_text().splitlines()) if "i + Int(extra)" in text)
    assert finding["where"].startswith(f"{source}:{line}:")


@pytest.mark.compiles
def test_exception_ends_the_process_cleanly(graph):
    done = python(GRAPH, "exception")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("RuntimeError: on purpose")


@pytest.mark.compiles
def test_ctrl_c_during_a_launch_inside_max(graph):
    code, out, err = interrupt(GRAPH, "interrupt")
    assert code == -signal.SIGINT
    assert out == "interrupted\n"
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert "Exception ignored" not in err


@pytest.mark.compiles
def test_ctrl_c_during_a_launch_on_the_main_thread():
    code, out, err = interrupt("-c", SPIN)
    assert code == -signal.SIGINT
    assert out == "interrupted; memory still answers [0.0]\n"
    assert "Exception ignored" not in err


@pytest.mark.compiles
def test_pending_exception_survives_a_callback():
    done = python("-c", FREED_DURING_EXCEPTION)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "TypeError 1\n"


def test_no_trace_without_start():
    code = (
        "import os, signal; from harness.vgpu.driver import inprocess; import max.driver;"
        "print(inprocess.active(), inprocess.device(), max.driver.accelerator_count(),"
        "'workbook_vgpu' in open('/proc/self/maps').read(), 'MODULAR_NVPTX_COMPILER_PATH' in os.environ,"
        "signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )
    done = python("-c", code)
    assert done.stdout == "False None 0 False False True\n", done.stderr


@pytest.mark.compiles
def test_a_driver_that_is_loaded_already_is_an_error():
    code = (
        f"import ctypes; ctypes.CDLL({str(build.build().libcuda)!r});"
        "from harness.vgpu.driver import inprocess; inprocess.start()"
    )
    done = python("-c", code)
    assert done.returncode == 1
    assert "VirtualGPUUnavailable: a CUDA driver is loaded already" in done.stderr


@pytest.mark.compiles
def test_starting_after_max_has_looked_for_gpus_is_an_error():
    code = (
        "from max.driver import accelerator_count; accelerator_count()\n"
        "from harness.vgpu.driver import inprocess; inprocess.start()"
    )
    if inprocess.gpu_present():
        pytest.skip("this machine has a GPU: MAX finds that one")
    assert "VirtualGPUUnavailable: MAX has looked for GPUs already" in python("-c", code).stderr


@pytest.mark.compiles
def test_starting_before_max_looks_is_enough():
    code = (
        "import max.driver; from harness.vgpu.driver import inprocess; inprocess.start()\n"
        "print(max.driver.accelerator_count(), max.driver.Accelerator().label)"
    )
    assert python("-c", code).stdout == "1 gpu\n"


@pytest.mark.compiles
def test_memory_page_that_is_taken_is_an_error():
    """The libraries keep their state at a fixed address; another mapping there is left alone."""
    source = (build.HERE / "transport.mojo").read_text()
    address = present(re.search(r"comptime STATE = (\w+)", source))[1]
    code = (
        "import ctypes\n"
        "libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p\n"
        f"taken = libc.mmap(ctypes.c_void_p({address}), ctypes.c_size_t(4096), 3, 0x100022, -1, ctypes.c_long(0))\n"
        f"assert taken == {address}\n"
        "from harness.vgpu.driver import inprocess; inprocess.start()"
    )
    assert (
        "VirtualGPUUnavailable: the virtual GPU's driver found its memory page taken"
        in python("-c", code).stderr
    )


@pytest.mark.compiles
def test_one_target_a_process():
    code = "from harness.vgpu.driver import inprocess; inprocess.start('sm_80'); inprocess.start('sm_90a')"
    assert "runs as sm_80: one target a process" in python("-c", code).stderr


def test_unknown_target():
    with pytest.raises(ValueError, match="unknown virtual GPU 'sm_30'"):
        inprocess.start("sm_30")
    with pytest.raises(ValueError, match="unknown virtual GPU 'gfx942'"):
        inprocess.start("gfx942")
    assert not inprocess.active()


@pytest.mark.compiles
def test_forked_child_does_not_share_the_device():
    code = (
        "import ctypes, os\n"
        "from harness.vgpu.driver import inprocess; inprocess.start()\n"
        "import cuda_api; cuda = cuda_api.Cuda(); cuda('cuInit', 0)\n"
        "allocate = lambda: cuda.error('cuMemAlloc_v2', ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(8))\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(allocate() != 'CUDA_ERROR_NOT_INITIALIZED')\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), allocate())"
    )
    assert python("-c", code).stdout == "0 CUDA_SUCCESS\n"


# ---- names of kernels ----------------------------------------------------------------------------------------------


@pytest.mark.compiles
def test_fingerprint_ignores_names_and_lines_only(recorded):
    ptx = recorded.read_text()
    plain = "\n".join(line for line in ptx.splitlines() if not line.strip().startswith((".loc", ".file")))
    assert plain != ptx
    symbol = ptx.split(".entry ")[1].split("(")[0]
    assert fingerprint(plain.replace(symbol, "mojo_pkg_0123_4567")) == fingerprint(ptx)
    assert fingerprint(ptx.replace("add.f32", "sub.f32", 1)) != fingerprint(ptx)


@pytest.mark.compiles
def test_catalogue_finds_the_twin(recorded):
    ptx = recorded.read_text()
    symbol = ptx.split(".entry ")[1].split("(")[0]
    catalogue = KernelCatalogue()
    assert catalogue.match(ptx) is None
    catalogue.add("sum", ptx)
    twin = present(catalogue.match(ptx.replace(symbol, "mojo_pkg_0123_4567")))
    assert (twin.name, twin.ptx, twin.entry, twin.given_entry) == ("sum", ptx, symbol, "mojo_pkg_0123_4567")


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("app_vector_add_Pointer6A6AoA6A6A_0daf4aec4dd85128", "app_vector_add"),
        ("app_dW_kernel_TileTensor_DType_float32_01a0f766aaaa1111", "app_dW_kernel"),
        ("wait_for_flag_01a0f766", "wait_for_flag"),
        ("scale", "scale"),
    ],
)
def test_readable_names(symbol, name):
    assert readable(symbol) == name


def test_kernels_without_a_name_are_numbered():
    catalogue = KernelCatalogue()
    symbols = ["mojo_pkg_0123456789abcdef_aa", "ops_0123456789abcdef_layernorm_6A6A_249de5df4a21c6e5"]
    assert [catalogue.label(symbol) for symbol in [*symbols, symbols[0]]] == [
        "kernel 1",
        "kernel 2",
        "kernel 1",
    ]


@pytest.mark.compiles
def test_pytorch_sees_no_gpu_and_does_not_complain():
    """A PyTorch with CUDA finds the stand-in library too."""
    code = (
        "from harness.vgpu.driver import inprocess; inprocess.start()\n"
        "import torch, max.driver; print(torch.cuda.is_available(), max.driver.accelerator_count())"
    )
    done = python("-c", code)
    assert (done.stdout, done.stderr) == ("False 1\n", "")
