"""What runs a launch: one definition of each opcode (opcodes), and two engines that use it (interpreter,
native)."""
