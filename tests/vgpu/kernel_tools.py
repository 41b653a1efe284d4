"""Helpers for the virtual GPU's tests: the PTX of the Mojo test kernels, and simple launches."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from harness.toolchain.cache import cache_file, compute_digest, get_cache_folder
from harness.toolchain.packages import get_mojo_version
from harness.vgpu import VirtualGPU

KERNELS = Path(__file__).parent / "kernels"


PRINT_PTX = """
def show[F: TrivialRegisterPassable, //, f: F](name: StaticString):
    var info = compile_info[f, emission_kind="asm", target=get_gpu_target["sm_90a"]()]()
    print("//==", name, sep="")
    print(info.asm)

def main():
"""


@functools.cache
def compile_kernels() -> dict[str, str]:
    """Return kernel name -> PTX for tests/vgpu/kernels, compiled as one program or read from the cache."""
    texts = {file.stem: file.read_text() for file in sorted(KERNELS.glob("*.mojo"))}
    names_by_file = {
        stem: re.findall(r"^def (\w+)\(\s*(?:o|flag): ", text, re.M) for stem, text in texts.items()
    }
    imports = [f"from {stem} import {', '.join(names)}" for stem, names in names_by_file.items()]
    imports += ["from max.gpu.host.compile import get_gpu_target", "from std.compile import compile_info"]
    calls = [f'    show[{name}]("{name}")' for names in names_by_file.values() for name in names]
    program = "\n".join([*imports, PRINT_PTX, *calls, ""])

    def write_ptx(staged: Path) -> None:
        mojo = shutil.which("mojo") or str(Path(sys.executable).parent / "mojo")
        main = staged.with_suffix(".mojo")
        main.write_text(program)
        command = [mojo, "run", "-g1", "-I", str(KERNELS), str(main)]
        completed = subprocess.run(command, capture_output=True, text=True, timeout=300)
        main.unlink()
        assert completed.returncode == 0, completed.stderr
        staged.write_text(completed.stdout)

    name = f"kernels-{compute_digest([get_mojo_version(), str(KERNELS), program, *texts.values()])}.txt"
    text = cache_file(get_cache_folder("tests") / name, write_ptx, "PTX of the tests' kernels").read_text()
    sections = (part.partition("\n") for part in text.split("//==")[1:])
    return {name.strip(): ptx for name, _, ptx in sections}


def find_line(file: str, text: str, nth: int = 0) -> int:
    """Return the line number of the nth line that contains `text`."""
    lines = (KERNELS / file).read_text().split("\n")
    return [k for k, line in enumerate(lines, 1) if text in line][nth]


class Bench:
    """A virtual GPU with named arrays; `run` takes NumPy arrays and scalars in the kernel's argument order."""

    def __init__(self, **options):
        self.gpu = VirtualGPU(**options)
        self.gpu.echo = False
        self.arrays: dict[int, tuple[int, np.ndarray]] = {}
        self.references: list = []

    def empty(self, name: str, shape, dtype: DTypeLike = np.float32) -> np.ndarray:
        """Allocate an uninitialized array on the device."""
        return self.upload(name, np.empty(shape, dtype), write=False)

    def upload(self, name: str, array: np.ndarray, write: bool = True) -> np.ndarray:
        """Copy an array to the device; the returned array is its handle for `run` and `download`."""
        array = np.ascontiguousarray(array)
        address = self.gpu.allocate(array.nbytes, name)
        self.gpu.name(address, array.nbytes, name, array.shape, str(array.dtype))
        if write:
            self.gpu.write(address, array)
        self.arrays[id(array)] = (address, array)
        self.references.append(array)
        return array

    def address(self, array) -> int:
        return self.arrays[id(array)][0]

    def download(self, array) -> np.ndarray:
        """Copy the array from the device."""
        address, template = self.arrays[id(array)]
        return self.gpu.read(address, template.nbytes).view(template.dtype).reshape(template.shape)

    def run(self, ptx: str, grid, block, *args, **options):
        """Launch the only kernel of `ptx`."""
        kernel = next(iter(self.gpu.load(ptx).kernels.values()))
        raw = [
            self.address(a).to_bytes(8, "little") if id(a) in self.arrays else np.asarray(a).tobytes()
            for a in args
        ]
        blocks, threads = ((*(t if isinstance(t, tuple) else (t,)), 1, 1)[:3] for t in (grid, block))
        return self.gpu.launch(kernel, blocks, threads, raw, **options)

    def errors(self) -> list:
        """Return the findings that are errors."""
        return [f for f in self.gpu.findings if f.is_error]
