"""The execution of a launch: one definition per opcode (opcodes), run by NumPy over many threads
(interpreter)."""
