"""Measure the virtual GPU's share of a command: `python tests/vgpu/execution_share.py p22 --backward ...`.

Runs `python -m harness ARGUMENTS` in this process and prints CPU seconds: the total with child processes,
mainly the Mojo compiler, and those of launches. CPU time excludes other work on the machine.
"""

import os
import sys
import time

from harness.cli import main
from harness.vgpu import VirtualGPU


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    launch_seconds, launches, longest, instructions = 0.0, 0, 0.0, 0
    launch = VirtualGPU.launch

    def timed_launch(self, *args, **kwargs):
        nonlocal launch_seconds, launches, longest, instructions
        start = time.process_time()
        try:
            result = launch(self, *args, **kwargs)
            instructions += result.counters.instructions
            return result
        finally:
            seconds = time.process_time() - start
            launch_seconds, launches, longest = launch_seconds + seconds, launches + 1, max(longest, seconds)

    VirtualGPU.launch = timed_launch
    try:
        return main(arguments)
    finally:
        t = os.times()
        total = t.user + t.system + t.children_user + t.children_system
        print(
            f"{' '.join(arguments)}: {total:.1f} s of processor time, {launch_seconds:.2f} s in {launches} launches"
            f" on the virtual GPU, the longest {longest:.2f} s; {instructions / 1e6:.1f} M thread instructions,"
            f" {60e-6 * instructions / max(launch_seconds, 1e-9):,.0f} M a minute",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
