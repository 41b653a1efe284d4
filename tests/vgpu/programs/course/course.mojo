"""Programs of a GPU course: `mojo run course.mojo` runs all of them; each checks its own results."""

import cooperation
import host_memory
import launches


def main() raises:
    host_memory.main()
    launches.main()
    cooperation.main()
