"""Start the command `workbook`, also as `python -m harness`: Ctrl-C is one line from the first import on.

`harness.check` has the way from the command to a verdict, `harness.nn` that from a layer to its launches, file by file.
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
