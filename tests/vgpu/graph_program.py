"""A Python program that runs a MAX graph with custom ops on the virtual GPU in its own process.

`python graph_program.py all PTX` runs the graph, right and wrong, with recorded PTX in the catalogue, and prints what
happened as JSON; `interrupt` waits in a kernel for Ctrl-C; `exception` ends with one while buffers are alive.
"""

import json
import sys
from pathlib import Path

import numpy as np

from harness.vgpu.driver import inprocess

gpu = inprocess.start()

from max.driver import CPU, Accelerator, Buffer  # noqa: E402  (the virtual GPU comes first)
from max.dtype import DType  # noqa: E402
from max.engine import InferenceSession  # noqa: E402
from max.graph import DeviceRef, Graph, KernelLibrary, TensorType, ops  # noqa: E402

N = 100


def load(device: Accelerator):
    """One graph with both ops, for any number of elements."""
    library = KernelLibrary()
    library.load_paths([Path(__file__).with_name("graph_ops")])
    on_gpu = DeviceRef.GPU()
    floats = TensorType(DType.float32, ["n"], device=on_gpu)
    flag = TensorType(DType.int32, [1], device=on_gpu)
    extra = TensorType(DType.int32, [], device=DeviceRef.CPU())
    with Graph("sums", input_types=[floats, floats, flag, extra], kernel_library=library) as graph:
        a, b, flag, extra = (value.tensor for value in graph.inputs)
        total = ops.custom("test_add", on_gpu, [a, b, extra], out_types=[floats])[0].tensor
        graph.output(ops.custom("test_wait", on_gpu, [total, flag], out_types=[floats])[0].tensor)
    return InferenceSession(devices=[CPU(), device]).load(graph)


def run(model, device, a, b, *, flag=1, extra=0) -> np.ndarray:
    inputs = [Buffer.from_numpy(x).to(device) for x in (a, b, np.array([flag], np.int32))]
    for buffer, name in zip(inputs, ("a", "b", "flag"), strict=True):
        size = buffer.num_elements * buffer.element_size
        gpu.name(buffer._data_ptr(), size, name, tuple(buffer.shape), buffer.dtype.name)
    out = model.execute(*inputs, Buffer.from_numpy(np.array(extra, np.int32)))[0]
    return out.to(CPU()).to_numpy()


def main() -> None:
    mode, driver = sys.argv[1], inprocess.device()
    assert driver is not None  # it was started above
    device = Accelerator()
    if mode == "all":
        driver.catalogue.add("add and overrun", Path(sys.argv[2]).read_text())
    model = load(device)
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, N), dtype=np.float32)
    right = run(model, device, a, b)
    if mode == "exception":
        raise RuntimeError("on purpose")
    if mode == "interrupt":
        print("spinning", flush=True)
        try:
            run(model, device, a, b, flag=0)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            raise
    findings = len(gpu.findings)
    run(model, device, a, b, extra=3)
    report = {
        "device": [device.api, device.architecture_name],
        "difference": float(np.abs(right - (a + b)).max()),
        "findings_of_right_run": findings,
        "findings": [
            {
                "kind": f.kind,
                "tensor": f.tensor,
                "index": f.index,
                "where": f.where,
                "count": f.count,
                "error": f.is_error,
            }
            for f in gpu.findings
        ],
        "launches": [launch.name for launch in gpu.launches],
        "errors": [str(error) for error in driver.errors],
        "again": inprocess.start() is gpu,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
