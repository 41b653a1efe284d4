"""Start `workbook`, also as `python -m harness`; Ctrl-C prints one line, even during the first imports."""

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
