"""Device memory with exact tensors, memory instructions, mbarriers and tensor maps."""
