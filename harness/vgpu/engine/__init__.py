"""Execute a launch: NumPy code per opcode (opcodes/), run over many threads at once (interpreter/)."""
