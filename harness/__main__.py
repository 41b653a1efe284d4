"""Start the command `workbook`, also as `python -m harness`: Ctrl-C prints one line, from the first import
on.

`harness.check` maps the path from a command to its result, `harness.nn` the path from a layer to its
launches.
"""

import os
import sys


def main() -> int:
    """Run the command line of this process and return its exit code."""
    try:
        from harness.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
