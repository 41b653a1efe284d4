"""LLVM: IR as text to an object file, and an object file to a function that can be called.

Objects are kept in the workbook's cache, because compiling takes longer than most launches. Nothing in them
depends on a launch or on addresses of this process. Without llvmlite, or on a processor without fused
multiply-add and conversions of 16-bit floats, there is no native engine; `unavailable` says why."""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable
from pathlib import Path

from harness.toolchain.cache import cache_folder, digest, discard, keep

NEEDED = {"x86_64": ("fma", "f16c", "avx2"), "aarch64": ()}
"""What a processor must have, by architecture: without it LLVM calls libraries, or rounds otherwise."""


@functools.cache
def unavailable() -> str | None:
    """Why there is no native engine here, or None."""
    try:
        import llvmlite.binding as llvm
    except ImportError:
        return "llvmlite is not installed"
    machine = platform.machine()
    if machine not in NEEDED:
        return f"it is not written for {machine} processors"
    features = llvm.get_host_cpu_features()
    missing = [name for name in NEEDED[machine] if not features.get(name)]
    if missing:
        return f"the processor lacks {', '.join(missing)}"
    return None


def _target():
    """A machine for one use: an engine takes it over."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=1, jit=True
    )


@functools.cache
def setting() -> str:
    """What an object depends on besides its source: this engine, LLVM, the processor."""
    import llvmlite
    import llvmlite.binding as llvm

    own = sorted(Path(__file__).parents[2].rglob("*.py"))
    features = llvm.get_host_cpu_features().flatten()
    return digest(
        [
            *(p.read_bytes() for p in own),
            llvmlite.__version__,
            str(llvm.llvm_version_info),
            llvm.get_host_cpu_name(),
            features,
        ]
    )


def compiled(text: str) -> bytes:
    """The object file of a module of LLVM IR."""
    import llvmlite.binding as llvm

    machine = _target()
    module = llvm.parse_assembly(text)
    module.triple = llvm.get_default_triple()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=1))
    passes = llvm.create_new_module_pass_manager()
    passes.add_always_inliner_pass()
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    passes.run(module, builder)
    return machine.emit_object(module)


class Code:
    """A loaded object; `run(ctx)` calls its function."""

    def __init__(self, data: bytes):
        import llvmlite.binding as llvm

        machine = _target()
        self.engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self.engine.add_object_file(llvm.ObjectFileRef.from_data(data))
        self.engine.finalize_object()
        address = self.engine.get_function_address("run")
        self.run: Callable[[int], None] = ctypes.CFUNCTYPE(None, ctypes.c_uint64)(address)


def key(parts: list[str]) -> str:
    """The name of an object in the cache."""
    return digest([setting(), *parts])


def place(name: str) -> Path:
    """Where an object lies, if it is there."""
    return cache_folder("native") / f"{name}.o"


def load(name: str, make: Callable[[], bytes]) -> Code:
    """The object of this name, out of the cache or made now."""
    file = keep(place(name), lambda path: path.write_bytes(make()), "machine code for the virtual GPU")
    try:
        return Code(file.read_bytes())
    except RuntimeError:
        discard(file)
        raise
