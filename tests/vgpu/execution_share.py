"""How much of a command's work is execution on the virtual GPU: `python tests/vgpu/execution_share.py p22 --backward ...`.

Runs `python -m harness ARGUMENTS` in this process and prints, in seconds of processor time: all of it with the programs that
it started (the Mojo compiler, above all), and what launches on the virtual GPU took. Processor time, so that other work on
the machine does not count.
"""

import os
import sys
import time

from harness.cli import main
from harness.vgpu import VirtualGPU


def run(arguments: list[str]) -> int:
    """Run one command; its exit code."""
    spent, launches, longest, instructions = 0.0, 0, 0.0, 0
    launch = VirtualGPU.launch

    def timed(self, *given, **named):
        nonlocal spent, launches, longest, instructions
        start = time.process_time()
        try:
            done = launch(self, *given, **named)
            instructions += done.counters.instructions
            return done
        finally:
            seconds = time.process_time() - start
            spent, launches, longest = spent + seconds, launches + 1, max(longest, seconds)

    VirtualGPU.launch = timed
    try:
        return main(arguments)
    finally:
        t = os.times()
        everything = t.user + t.system + t.children_user + t.children_system
        print(
            f"{' '.join(arguments)}: {everything:.1f} s of processor time, {spent:.2f} s in {launches} launches"
            f" on the virtual GPU, the longest {longest:.2f} s; {instructions / 1e6:.1f} M thread instructions,"
            f" {60e-6 * instructions / max(spent, 1e-9):,.0f} M a minute",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
