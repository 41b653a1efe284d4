"""Programs as a GPU course has them, all in one: `mojo run course.mojo` runs each; every one checks itself."""

import cooperation
import host_memory
import launches


def main() raises:
    host_memory.main()
    launches.main()
    cooperation.main()
