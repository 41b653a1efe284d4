"""The extension module: which architecture, building once, the cache, loading elsewhere, the kernels on the virtual GPU.

The modules are built with the compiler once and then come from the workbook's cache: for sm_90a what most tests need, for sm_80
in a slow test.
"""

import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from extension_runs import on_virtual_gpu

from harness.devices import targets
from harness.errors import BadUse, CompileFailed, EnvironmentProblem
from harness.screens import doctor
from harness.toolchain import extension, libraries
from harness.toolchain.cache import keep

ROOT = Path(__file__).resolve().parents[3]
VIRTUAL = Path(__file__).with_name("layernorm_linear_run.py")


def run_python(code: str, *arguments: str | Path, **env: str) -> subprocess.CompletedProcess:
    """Runs code in a process of its own, in the checkout."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, **env},
    )


# ---- Which architecture -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((12, 0), "sm_120a"),
    ],
)
def test_nvidia_architectures_are_ones_that_mojo_knows(capability, name):
    assert extension.nvidia_architecture(capability) == name
    assert extension.supported()[name] == name


@pytest.mark.parametrize("capability", [(7, 5), (7, 0), (6, 1)])
def test_an_nvidia_gpu_that_is_too_old(capability):
    name = f"sm_{capability[0]}{capability[1]}"
    with pytest.raises(extension.Unsupported, match=f"want sm_80 or newer, not {name}"):
        extension.nvidia_architecture(capability)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("sm_90", "sm_90a"),
        ("sm_90a", "sm_90a"),
        ("sm_80", "sm_80"),
        ("sm_100", "sm_100a"),
        ("mi300x", "gfx942"),
    ],
)
def test_a_name_becomes_the_one_that_is_looked_for(given, expected):
    assert extension.canonical(given) == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100", "--arch h100: unknown; there is .*gfx942.*sm_90a"),
        ("sm_75", "--arch sm_75: the fast kernels want sm_80 or newer, not sm_75"),
        ("mi300a", "--arch mi300a: extension modules are for GPUs of NVIDIA and AMD"),
    ],
)
def test_a_name_without_a_module(name, message):
    with pytest.raises(BadUse, match=message):
        extension.canonical(name)


def test_torch_s_device_decides(monkeypatch):
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: {1: (9, 0)}[device.index])
    assert extension.architecture(device) == "sm_90a"
    with pytest.raises(extension.Unsupported, match="no extension module for mps"):
        extension.architecture(torch.device("mps"))


def test_a_rocm_device(monkeypatch):
    class Properties:
        gcnArchName = "gfx942:sramecc+:xnack-"

    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert extension.architecture(torch.device("cuda", 0)) == "gfx942"


# ---- The name of the file -----------------------------------------------------------------------------------


@pytest.fixture
def copied(monkeypatch, tmp_path):
    """A copy of a layer's sources that a test may change, and modules of its own."""
    for file in extension.sources():
        copy = tmp_path / file.relative_to(extension.KERNELS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text())
    monkeypatch.setattr(extension, "KERNELS", tmp_path)
    monkeypatch.setenv(extension.VARIABLE, str(tmp_path / "modules"))
    extension.file_name.cache_clear()
    yield tmp_path / "layernorm_linear"
    extension.file_name.cache_clear()


def test_the_name_follows_everything_that_the_module_depends_on(copied, monkeypatch):
    def name(architecture="sm_80"):
        extension.file_name.cache_clear()
        return extension.file_name(architecture)

    names = [name(), name("sm_86")]
    kernels = copied / "rows.mojo"
    kernels.write_text(kernels.read_text() + "\n")
    names.append(name())
    (copied / "more.mojo").write_text('"""Nothing."""\n')
    names.append(name())
    monkeypatch.setattr(extension, "mojo_version", lambda: "0.0")
    names.append(name())
    assert len(set(names)) == 5 and all(
        each.startswith("layernorm_linear_sm_8") and each.endswith(".so") for each in names
    )
    assert name() == names[-1]


def test_the_sources_are_those_of_the_checkout():
    files = extension.sources()
    assert files[0] == ROOT / "harness" / "nn" / "kernels" / "layernorm_linear" / "extension.mojo"
    assert {"launches.mojo", "gemm.mojo", "launcher.mojo"} <= {file.name for file in files}


def test_the_variable_names_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv(extension.VARIABLE, str(tmp_path / "a" / "b"))
    assert extension.folder() == tmp_path / "a" / "b" and (tmp_path / "a" / "b").is_dir()
    monkeypatch.setenv(extension.VARIABLE, "")
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))
    assert extension.folder() == tmp_path / "cache" / "extensions"


def test_a_folder_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(extension.VARIABLE, str(tmp_path / "file" / "modules"))
    with pytest.raises(
        EnvironmentProblem, match=r"cannot make the folder .*; set WORKBOOK_EXTENSIONS to a folder"
    ):
        extension.build("sm_80")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="this system has no /proc")
def test_a_folder_that_cannot_be_written():
    with pytest.raises(
        EnvironmentProblem, match=r"cannot write the extension module to /proc/self .*; name another --output"
    ):
        extension.build("sm_80", Path("/proc/self"))


# ---- Building -----------------------------------------------------------------------------------------------


@pytest.mark.compiles
def test_a_module_that_is_there_is_not_built_again(monkeypatch):
    built = extension.build("sm_90a")
    monkeypatch.setattr(extension, "compile_module", None)
    again = extension.build("sm_90a", on_build=lambda: pytest.fail("built again"))
    assert again.path == built.path and again.seconds == 0


def slow_compile(architecture, staging, layer):
    """In the place of the compiler: leaves a mark and takes a while."""
    (staging.parent / f"mark-{os.getpid()}-{time.monotonic_ns()}").touch()
    time.sleep(0.5)
    target = staging / "module.so"
    target.write_text(architecture)
    return target


def build_with_slow_compile(folder):
    extension.compile_module = slow_compile
    return extension.build("sm_80", folder)


@pytest.mark.compiles
def test_several_processes_build_once(tmp_path):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        results = pool.map(build_with_slow_compile, [tmp_path] * 4)
    assert len({result.path for result in results}) == 1 and results[0].path.read_text() == "sm_80"
    assert len(list(tmp_path.glob("mark-*"))) == 1
    assert sorted(result.seconds > 0 for result in results) == [False, False, False, True]


def test_a_build_that_fails_leaves_nothing(monkeypatch, tmp_path):
    def fail(architecture, staging, layer):
        (staging / "half").write_text("")
        raise CompileFailed("no")

    monkeypatch.setattr(extension, "compile_module", fail)
    with pytest.raises(CompileFailed):
        extension.build("sm_80", tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(extension, "compile_module", slow_compile)
    assert extension.build("sm_80", tmp_path).path.read_text() == "sm_80"


@pytest.mark.compiles
def test_a_kernel_that_does_not_compile(copied):
    kernels = copied / "launches.mojo"
    text = kernels.read_text()
    assert "sizes.rows()" in text
    kernels.write_text(text.replace("sizes.rows()", "sizes.rowz()", 1))
    with pytest.raises(
        CompileFailed, match=r"extension\.mojo does not compile\n.*launches\.mojo:\d+"
    ) as caught:
        extension.build("sm_80")
    assert "'Sizes' value has no attribute 'rowz'" in caught.value.details


@pytest.mark.compiles
def test_a_linker_that_is_missing(copied, monkeypatch, tmp_path):
    """The error is the environment's, and says the linker's last words."""
    broken = tmp_path / "bin"
    broken.mkdir()
    (broken / "cc").write_text("#!/bin/sh\necho 'cc: no room on the device' >&2\nexit 1\n")
    (broken / "cc").chmod(0o755)
    (copied / "extension.mojo").write_text(
        '"""Small."""\n\n\n@export\ndef f() abi("C") -> Int:\n    return 1\n'
    )
    monkeypatch.setenv("PATH", f"{broken}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(EnvironmentProblem, match="the extension module cannot be built: ") as caught:
        extension.build("sm_80")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.compiles
def test_it_links_without_a_c_compiler(copied, tmp_path, monkeypatch):
    """With a PATH on which there is no C compiler."""
    small = '"""Small."""\n\n\n@export\ndef answer() abi("C") -> Int:\n    return 42\n'
    (copied / "extension.mojo").write_text(small)
    for name in ("sh", "cp", "env"):
        (tmp_path / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(tmp_path))
    path = extension.build("sm_80").path
    import ctypes

    extension.load_runtime()
    assert ctypes.CDLL(str(path)).answer() == 42


# ---- Loading ------------------------------------------------------------------------------------------------

LOAD = """
import json, sys
from pathlib import Path
from harness.toolchain import extension, libraries
assert not {"max", "torch"} & set(sys.modules)
module = extension.load(Path(sys.argv[1]))
sizes = (12, 300, 20)
print(json.dumps({
    "forward": [module.forward(0, 0, 0, 0, kind, *sizes, 1e-5, *[0] * 8) for kind in range(5)],
    "backward": [module.backward(0, 0, 0, 0, kind, *sizes, 15, *[0] * 15) for kind in range(5)],
    "small": [module.forward(0, 0, 0, 0, 0, 16, 8, 16, 1e-5, *[0] * 8),
              module.backward(0, 0, 0, 0, 0, 16, 8, 16, 15, *[0] * 15)],
    "frozen": module.backward(0, 0, 0, 0, 0, *sizes, 12, *[0] * 15),
    # With addresses and without: what counts ahead of time knows none.
    "addresses": [[module.backward(0, 0, 0, 0, kind, *sizes, wanted, *addresses)
                   for addresses in ([0] * 15, [4096] * 14 + [sizes[1]])]
                  for kind in range(6) for sizes in ((12, 300, 20), (640, 768, 304))
                  for wanted in (15, 1, 2, 4, 8, 15 + 16, 14 + 32, 14 + 48)],
    "runtime": sorted({line.split()[-1] for line in open("/proc/self/maps") if "libKGENCompilerRTShared" in line}),
}))
calls = [lambda: module.forward(0, 0, 0, 0), lambda: module.backward(*[0] * 22), lambda: module.open(0)]
for call in calls:
    try:
        call()
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.mark.compiles
@pytest.mark.parametrize("architecture", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90a"])
def test_it_loads_without_max_and_counts_without_a_gpu(architecture, tmp_path):
    """Also where the folder in which it was built is gone: Mojo's libraries come from this environment.

    sm_90a has Hopper's own matrix products.
    """
    moved = tmp_path / "elsewhere.so"
    data = extension.build(architecture).path.read_bytes()
    moved.write_bytes(data)
    result = run_python(LOAD, moved)
    assert result.returncode == 0, result.stderr
    counted = json.loads(result.stdout.splitlines()[0])
    assert len(counted["runtime"]) == 1 and "modular" in counted["runtime"][0]
    # Forward: at least the LayerNorm output; backward: that and dln. Each piece begins at a multiple of 256.
    for kind, itemsize in enumerate((4, 4, 2, 2, 8)):
        rows, H = 12, 300
        assert counted["forward"][kind] >= rows * H * itemsize and counted["forward"][kind] % 256 == 0
        assert counted["backward"][kind] >= rows * H * itemsize and counted["backward"][kind] % 256 == 0
    assert all(without == with_some for without, with_some in counted["addresses"])
    assert counted["frozen"] <= counted["backward"][0] and counted["small"] == [0, 0]
    errors = result.stdout.splitlines()[1:]
    assert errors[:2] == ["Exception expected 17 arguments, got 4", "Exception expected 24 arguments, got 22"]
    if not torch.cuda.is_available():
        assert errors[2].startswith("Exception "), "no GPU to open"


def test_a_file_that_is_no_module(tmp_path):
    path = tmp_path / "module.so"
    path.write_text("not a library")
    with pytest.raises(EnvironmentProblem, match=f"cannot load {path}: "):
        extension.load(path)


@pytest.fixture
def fresh_runtime():
    extension.load_runtime.cache_clear()
    yield
    extension.load_runtime.cache_clear()


def test_without_max(monkeypatch, fresh_runtime):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match="MAX is not installed"):
        extension.load_runtime()


def test_without_mojo_s_libraries(monkeypatch, fresh_runtime):
    monkeypatch.setattr(libraries, "RUNTIME", ("libnothing.so",))
    with pytest.raises(EnvironmentProblem, match=r"libnothing.so is in neither .*; reinstall MAX"):
        extension.load_runtime()


# ---- The kernels on the virtual GPU -------------------------------------------------------------------------


@pytest.mark.compiles
@pytest.mark.slow
def test_the_module_on_the_virtual_gpu():
    """The built file itself, through the driver's interface: addresses, order of arguments, scratch memory, streams.

    For sm_80, which has everything but Hopper's own kernels.
    """
    run = on_virtual_gpu(VIRTUAL, extension.build("sm_80").path, arch="sm_80")
    errors = run.report["errors"]
    assert run.findings == []
    of_norm = {"dgamma", "dbeta"}
    of_dW = {"dW", "ln_out again"}
    skipped = {"frozen": {"dW", "db"}, "frozen weight": of_dW, "frozen bias": {"db"}, "frozen input": {"dx"}}
    skipped |= {
        "frozen norm": of_norm,
        "dx alone": {"db", *of_dW, *of_norm},
        "dW alone": {"dx", "db", *of_norm},
        "ln_out alone": {"dx", "db", *of_norm},
    }
    skipped |= {"dgamma alone": {"dx", "db", *of_dW}, "db alone": {"dx", *of_dW, *of_norm}}
    for label, of_case in errors.items():
        case = label.split(", ")[-1]
        left = {name for name, error in of_case.items() if error == "untouched"}
        assert left == skipped.get(case, set()) & of_case.keys(), label
        limit = {"tf32": 2e-3, "bfloat16": 2e-2, "float16": 2e-3, "float64": 1e-14}.get(case, 2e-6)
        largest = max(error for error in of_case.values() if error != "untouched")
        assert largest < limit, (label, of_case)
        # A kind that computed in a wider dtype than it says would be as good as the next one.
        assert largest > limit / 1000, (label, of_case)
        # One launch without scratch memory makes what is left of a pass.
        assert not label.startswith("few rows") or len(run.by_part[label]) == 2, run.by_part[label]
    assert "bytes of scratch memory, got" in run.report["refused"]


@pytest.mark.compiles
def test_hopper_s_kernels_on_the_virtual_gpu():
    """Both passes of the fast variant as an H100 runs them: TMA, wgmma, the sums on the side; no finding."""
    run = on_virtual_gpu(
        VIRTUAL, extension.build("sm_90a").path, "hopper", arch="sm_90a", blocks="shuffled:1"
    )
    told = run.report
    assert run.findings == []
    assert [run.maps[f"maps, {which}"] for which in ("first", "second", "third")] == [3, 0, 2], (
        "maps are kept, but not for a matrix that has become another one; W is the same"
    )
    bits = {"dW": 1, "db": 2, "dx": 4, "dgamma": 8, "dbeta": 8}
    expected = 0
    for label, of_case in told["errors"].items():
        wanted = int(label.removeprefix("wanted ")) if label.startswith("wanted") else 15
        # What is not wanted is not multiplied: dln for dW or db alone or nothing, dW without it.
        expected += 1 + bool(wanted & (bits["dx"] | bits["dgamma"])) + bool(wanted & bits["dW"])
        left = {name for name, error in of_case.items() if error == "untouched"}
        assert left == {name for name, bit in bits.items() if not wanted & bit}, label
        largest = max(error for error in of_case.values() if error != "untouched")
        assert 1e-5 < largest < (2e-3 if label in told["narrow"] else 2e-2), (label, of_case)
    launches = run.by_part[""]
    products = [launch for launch in launches if "gemm_ho" in launch.name]
    assert len(products) == expected, launches
    assert max(launch.grid[0] for launch in products) > 4
    errors = [
        error for of_case in told["pairs"].values() for error in of_case.values() if error != "untouched"
    ]
    assert max(errors) < 1e-6, told["pairs"]
    assert len([launch for launch in launches if "pairs_gemm" in launch.name]) == 3 + 3 + 2 + 2 + 1 + 3


# ---- The command --------------------------------------------------------------------------------------------


def test_build_ext_says_what_and_where(command_line, monkeypatch, tmp_path):
    monkeypatch.setattr(extension, "compile_module", slow_compile)
    done = command_line("build-ext", "--arch", "sm_80", "--arch", "mi300x", "--output", tmp_path)
    assert done.code == 0
    wanted = [(layer, name) for name in ("sm_80", "gfx942") for layer in extension.LAYERS]
    assert {path.name for path in tmp_path.glob("*.so")} == {
        extension.file_name(name, layer) for layer, name in wanted
    }
    for (layer, name), line in zip(wanted, done.lines[1::2], strict=True):
        assert line.startswith(f"{layer}, {name}: built in 0.")
        assert line.endswith(extension.file_name(name, layer))
    assert (
        done.lines[0]
        == "Building the extension module of layernorm_linear for sm_80 (a minute or two, once) ..."
    )
    again = command_line("build-ext", "layernorm_linear", "--arch", "sm_80", "--output", tmp_path)
    assert again.code == 0 and again.lines[0].startswith("layernorm_linear, sm_80: was there already")
    assert len(again.lines) == 1


def test_build_ext_builds_for_the_gpus_here(command_line, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    capabilities = {0: (9, 0), 1: (8, 0), 2: (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    monkeypatch.setattr(extension, "compile_module", slow_compile)
    assert command_line("build-ext", "layernorm_linear", "--output", tmp_path).code == 0
    assert {path.name for path in tmp_path.glob("*.so")} == {
        extension.file_name(a) for a in ("sm_80", "sm_90a")
    }


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--arch", "h100"], 2, "--arch h100: unknown"),
        (["--arch"], 2, "expected one argument"),
        (["--nonsense"], 2, "--nonsense"),
        (["p21"], 2, "invalid choice: 'p21'"),
        (["--arch", "sm_80", "--output", "/dev/null/x"], 5, "cannot make the folder /dev/null/x"),
    ],
)
def test_build_ext_refuses(command_line, arguments, code, words):
    done = command_line("build-ext", *arguments)
    assert done.code == code and words in done.err and len(done.err.splitlines()) == 1


def test_build_ext_without_a_gpu_asks_for_a_name(command_line, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    done = command_line("build-ext")
    assert (
        done.code == 2
        and "sees no GPU on this machine; name what to build for, as in --arch sm_90a" in done.err
    )


@pytest.mark.compiles
def test_build_ext_with_a_kernel_that_does_not_compile(command_line, copied):
    (copied / "extension.mojo").write_text('"""Broken."""\n\n\ndef broken(:\n    pass\n')
    done = command_line("build-ext", "--arch", "sm_80")
    assert done.code == 4 and "does not compile" in done.err


def test_build_ext_help(command_line):
    done = command_line("build-ext", "--help")
    assert (
        done.code == 0
        and "--arch" in done.out
        and extension.VARIABLE in done.out
        and "exit codes" in done.out
    )


# ---- The doctor ---------------------------------------------------------------------------------------------


def test_the_doctor_without_a_gpu(monkeypatch):
    monkeypatch.setattr(targets, "gpu_may_exist", lambda: False)
    (finding,) = doctor.extension_module()
    assert finding.state == "note" and "build-ext --arch NAME" in finding.words


def test_the_doctor_with_gpus(monkeypatch, tmp_path):
    monkeypatch.setattr(targets, "gpu_may_exist", lambda: True)
    monkeypatch.setattr(extension, "present", lambda: ["sm_80", "sm_90a"])
    monkeypatch.setenv(extension.VARIABLE, str(tmp_path))
    there = keep(tmp_path / extension.file_name("sm_90a"), lambda staged: staged.write_text(""), "it")
    missing, present = doctor.extension_module()
    assert missing.state == "note" and "not built for sm_80 yet" in missing.words
    assert present.state == "good" and present.words == str(there)


def test_the_doctor_with_an_old_gpu(monkeypatch):
    monkeypatch.setattr(targets, "gpu_may_exist", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    (finding,) = doctor.extension_module()
    assert finding.state == "note" and "want sm_80 or newer, not sm_75: " in finding.words
