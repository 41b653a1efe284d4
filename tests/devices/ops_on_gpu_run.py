"""Call the public ops of several packages on the GPU: `python ops_on_gpu_run.py FILE.npz PACKAGE...`.

Does not use the harness. FILE has the inputs and is overwritten with the outputs. All ops are in one graph, which
compiles as fast as a single op. Print the errors of three calls with invalid shapes.
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


def make_type(name: str, array: np.ndarray) -> TensorType:
    """Return a tensor type with a distinct symbol per dimension, so that the op checks the sizes."""
    return TensorType(DType.from_numpy(array.dtype), [f"{name}{i}" for i in range(array.ndim)], device=gpu)


types = {name: make_type(name, array) for name, array in arrays.items()}
normalized = BufferType(DType.float32, ["rows", "columns"], device=gpu)
with Graph("public", input_types=[*types.values(), normalized], kernel_library=library) as graph:
    *tensors, output = graph.inputs
    v = dict(zip(types, (tensor.tensor for tensor in tensors), strict=True))

    def add_op(op: str, outputs: str, *inputs: str) -> None:
        """Add an op to the graph; an output NAME:LIKE has the type of tensor LIKE."""
        pairs = [output.split(":") for output in outputs.split()]
        results = ops.custom(op, gpu, [v[name] for name in inputs], [v[like].type for _, like in pairs])
        v.update(zip((name for name, _ in pairs), (result.tensor for result in results), strict=True))

    add_op("relu_mask", "relu:x mask:words", "x")
    add_op("relu_mask_backward", "grad_relu:x", "dy", "mask")
    add_op("softmax", "softmax:x", "x")
    add_op("softmax_backward", "grad_softmax:x", "dy", "softmax")
    add_op("attention", "attention:query", "query", "key", "value")
    add_op(
        "attention_backward",
        "grad_query:query grad_key:key grad_value:value",
        "grad_output",
        "query",
        "key",
        "value",
    )
    add_op("hilbert_gather", "gathered:cells", "cells", "order")
    add_op("hilbert_scatter", "scattered:cells", "gathered", "order")
    ops.inplace_custom("ramp_rmsnorm", gpu, [output.buffer, v["matrix"], v["weight"]])
    names = [name for name in v if name not in types]
    graph.output(*(v[name] for name in names))
model = InferenceSession(devices=[CPU(), device]).load(graph)


def run(**replacements: np.ndarray) -> dict[str, np.ndarray]:
    """Run the ops on the arrays after replacing some (`replacements`); return the results."""
    buffers = {
        name: Buffer.from_numpy(array).to(device) for name, array in {**arrays, **replacements}.items()
    }
    rows = Buffer.from_numpy(np.full_like(arrays["matrix"], np.nan)).to(device)
    results = dict(zip(names, model.execute(*buffers.values(), rows), strict=True))
    return {name: output.to(CPU()).to_numpy() for name, output in {**results, "normalized": rows}.items()}


np.savez(file, allow_pickle=False, **run())
errors = []
for name in ("key", "order", "weight"):
    try:
        run(**{name: np.ascontiguousarray(arrays[name][..., :-1])})
    except Exception as error:
        errors.append(str(error))
print(json.dumps(errors))
