"""The virtual GPU: executes the PTX of Mojo GPU kernels on the CPU, and checks memory and races while it does.

`VirtualGPU` (machine.py) is the device; everything else here serves it.
"""
