"""Run generated NumPy code over the threads of many thread blocks at once."""
