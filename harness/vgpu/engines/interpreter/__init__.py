"""The engine that starts at once: NumPy over the threads of many thread blocks."""
