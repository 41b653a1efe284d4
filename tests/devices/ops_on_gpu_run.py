"""Calls the public ops of several packages on the GPU of the process: `python ops_on_gpu_run.py FILE.npz PACKAGE...`.

It knows nothing of the harness. FILE holds the inputs, and gets what the ops write; all of them are one graph, because a graph
costs as much as all. Prints what each of three calls with wrong shapes raises.
"""

import json
import sys
from pathlib import Path

import numpy as np
from max.driver import CPU, Accelerator, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import BufferType, DeviceRef, Graph, KernelLibrary, TensorType, ops

assert "harness" not in sys.modules
file, packages = Path(sys.argv[1]), [Path(package) for package in sys.argv[2:]]
arrays = dict(np.load(file))
device, gpu = Accelerator(), DeviceRef.GPU(0)
library = KernelLibrary()
library.load_paths(packages)


def type_of(name: str, array: np.ndarray) -> TensorType:
    """Every size a symbol of its own: what does not fit is found by the op."""
    return TensorType(DType.from_numpy(array.dtype), [f"{name}{i}" for i in range(array.ndim)], device=gpu)


types = {name: type_of(name, array) for name, array in arrays.items()}
normalised = BufferType(DType.float32, ["rows", "columns"], device=gpu)
with Graph("public", input_types=[*types.values(), normalised], kernel_library=library) as graph:
    *tensors, written = graph.inputs
    v = dict(zip(types, (each.tensor for each in tensors), strict=True))

    def call(op: str, outputs: str, *inputs: str) -> None:
        """An op with new outputs NAME:LIKE, each of the type of an input or of an output before it."""
        pairs = [each.split(":") for each in outputs.split()]
        results = ops.custom(op, gpu, [v[name] for name in inputs], [v[like].type for _, like in pairs])
        v.update(zip((name for name, _ in pairs), (each.tensor for each in results), strict=True))

    call("relu_mask", "relu:x mask:words", "x")
    call("relu_mask_backward", "grad_relu:x", "dy", "mask")
    call("softmax", "softmax:x", "x")
    call("softmax_backward", "grad_softmax:x", "dy", "softmax")
    call("attention", "attention:query", "query", "key", "value")
    call(
        "attention_backward",
        "grad_query:query grad_key:key grad_value:value",
        "grad_output",
        "query",
        "key",
        "value",
    )
    call("hilbert_gather", "gathered:cells", "cells", "order")
    call("hilbert_scatter", "scattered:cells", "gathered", "order")
    ops.inplace_custom("ramp_rmsnorm", gpu, [written.buffer, v["matrix"], v["weight"]])
    names = [name for name in v if name not in types]
    graph.output(*(v[name] for name in names))
model = InferenceSession(devices=[CPU(), device]).load(graph)


def run(**others: np.ndarray) -> dict[str, np.ndarray]:
    """What the ops make of the arrays, some of them changed."""
    given = {name: Buffer.from_numpy(array).to(device) for name, array in {**arrays, **others}.items()}
    rows = Buffer.from_numpy(np.full_like(arrays["matrix"], np.nan)).to(device)
    results = dict(zip(names, model.execute(*given.values(), rows), strict=True))
    return {name: each.to(CPU()).to_numpy() for name, each in {**results, "normalised": rows}.items()}


np.savez(file, allow_pickle=False, **run())
raised = []
for name in ("key", "order", "weight"):
    try:
        run(**{name: np.ascontiguousarray(arrays[name][..., :-1])})
    except Exception as error:
        raised.append(str(error))
print(json.dumps(raised))
