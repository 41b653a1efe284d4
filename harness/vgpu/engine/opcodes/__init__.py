"""One definition of each opcode: NumPy code for the threads of a basic block."""
