"""Run generated code in NumPy, over the threads of many thread blocks at once."""
