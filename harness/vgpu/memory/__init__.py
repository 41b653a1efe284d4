"""What kernels read and write: device memory with exact tensors, memory instructions, mbarriers, tensor
maps."""
