"""Devices that kernels run on: cpu and gpu through MAX custom ops, virtual through `harness.vgpu`.

- targets.py: selection of devices
- graphs.py, for the CPU and a GPU: a package's ops in one MAX graph
- recorder.py, for the virtual GPU: launches recorded by a compiled program; kernel_cache.py caches each
kernel
- replay.py: replays a recording on the virtual GPU
- poison.py: the initial contents of outputs
- processes.py: several ranks of torch.distributed, for Python files
"""
