"""The devices that kernels run on: cpu and gpu through MAX custom ops, virtual through `harness.vgpu`.

- targets.py: which devices a run takes, and why it leaves one out
- graphs.py, for the CPU and a GPU: a package's ops in one MAX graph
- recorder.py, for the virtual GPU: what would be launched, by the Mojo compiler; kernel_cache.py keeps each kernel
- replay.py: runs on the virtual GPU what was recorded
- poison.py: what outputs hold before a run
- processes.py: several ranks of torch.distributed, for files in Python
"""
