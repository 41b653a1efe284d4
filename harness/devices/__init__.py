"""Devices that kernels run on: CPU and GPU through MAX custom ops, the virtual GPU through `harness.vgpu`.

- targets.py: select the devices of a run
- graphs.py: compile a package's ops into one MAX graph, for the CPU or a GPU
- recorder.py: record launches for the virtual GPU; kernel_cache.py caches each kernel
- replay.py: replay a recording on the virtual GPU
- poison.py: fill outputs before a run
- processes.py: run several ranks of torch.distributed, for Python files
"""
