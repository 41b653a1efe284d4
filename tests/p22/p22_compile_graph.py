"""Compiles the graph of puzzle 22 for a GPU that is not there: `p22_compile_graph.py API ARCH PACKAGE all|fused_backward`.

One target a process, because MAX's virtual device belongs to the process. It cannot run, so that nothing is loaded.
MAX may print a target's error and go on: whoever calls this must read standard error.
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

api, arch, package, what = sys.argv[1:]
set_virtual_device_count(1)
set_virtual_device_api(api)
set_virtual_device_target_arch(arch)

from max.engine import InferenceSession  # noqa: E402
from max.graph import DeviceRef  # noqa: E402

from harness.devices import graphs  # noqa: E402
from harness.puzzles.p22.spec import PUZZLE  # noqa: E402
from harness.toolchain.packages import OpPackage  # noqa: E402

calls = PUZZLE.calls_of(PUZZLE.default_variants) if what == "all" else PUZZLE.variants["fused"][1:]
graph, names = graphs.build("p22", OpPackage(Path(package)), calls, "float32", DeviceRef.GPU(0))
InferenceSession(devices=[CPU(), Accelerator(0)]).compile(graph)
print(f"compiled {len(calls)} calls with {len(names)} arguments for {arch}", flush=True)
sys.stderr.flush()
os._exit(0)  # MAX's threads for a virtual device may end a process that tears them down with an abort
