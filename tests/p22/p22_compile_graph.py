"""Compiles the graph of puzzle 22 for a GPU that is not present, and next to it one that is wrong on AMD
GPUs: `p22_compile_graph.py API ARCH PACKAGE WRONG_SCOPE`.

One target per process, which owns MAX's virtual device. It cannot execute, so nothing is loaded. MAX may
print a target's error, which names the kernel, and continue: callers must read standard error.
"""

import os
import sys
from pathlib import Path

from max.driver import (
    CPU,
    Accelerator,
    set_virtual_device_api,
    set_virtual_device_count,
    set_virtual_device_target_arch,
)

api, arch, package, wrong_scope = sys.argv[1:]
set_virtual_device_count(1)
set_virtual_device_api(api)
set_virtual_device_target_arch(arch)

from max.engine import InferenceSession  # noqa: E402
from max.graph import DeviceRef  # noqa: E402

from harness.devices import graphs  # noqa: E402
from harness.puzzles.p22.spec import PUZZLE  # noqa: E402
from harness.spec.ops import Argument, Call, OpSpec  # noqa: E402
from harness.toolchain.packages import OpPackage  # noqa: E402

calls, gpu = PUZZLE.list_calls(PUZZLE.default_variants), DeviceRef.GPU(0)
packages = [OpPackage(Path(folder)) for folder in (package, wrong_scope)]
count = Call(OpSpec("count", writes={"sum": Argument((1,))}, reads={}))
graph, names = graphs.build_graph("p22", packages[0], calls, "float32", gpu)
graphs.build_graph("wrong_scope", packages[1], (count,), "float32", gpu, graph.module)
session = InferenceSession(devices=[CPU(), Accelerator(0)])
session.compile(graph.module, custom_extensions=[package.compile() for package in packages])
print(f"compiled {len(calls)} calls with {len(names)} arguments for {arch}", flush=True)
sys.stderr.flush()
os._exit(0)  # tearing down MAX's threads for a virtual device may abort the process
