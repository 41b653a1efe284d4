"""The devices that kernels run on: cpu and gpu through MAX custom ops, virtual through `harness.vgpu`."""
