"""All test programs in one binary, so that they are compiled only once: `suite NAME` runs one of them."""

import faults
from async_copy import main as async_copy
from histogram import main as histogram
from std.sys import argv
from tensor_core import main as tensor_core


def main() raises:
    var name = String(argv()[1])
    if name == "histogram":
        histogram()
    elif name == "async_copy":
        async_copy()
    elif name == "tensor_core":
        tensor_core()
    elif name == "out_of_bounds":
        faults.out_of_bounds()
    elif name == "race":
        faults.race()
    elif name == "wait_forever":
        faults.wait_forever()
    elif name == "endless":
        faults.endless()
    elif name == "too_many_threads":
        faults.too_many_threads()
    elif name == "too_many_blocks":
        faults.too_many_blocks()
    elif name == "opt_in_shared_memory":
        faults.opt_in_shared_memory()
    elif name == "too_much_shared":
        faults.too_much_shared()
    elif name == "out_of_memory":
        faults.out_of_memory()
    elif name == "out_of_memory_handled":
        faults.out_of_memory_handled()
    elif name == "graph":
        faults.graph()
    elif name == "failed_assert":
        faults.failed_assert()
    elif name == "no_gpu":
        faults.no_gpu()
    else:
        raise Error(t"no program named {name}")
