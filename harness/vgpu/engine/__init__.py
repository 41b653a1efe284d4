"""What runs a launch: one definition of each opcode (opcodes), and NumPy over many threads (interpreter)."""
