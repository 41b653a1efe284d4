"""`python -m book.build [--no-open]` builds the book strictly and opens it."""

import sys

from book.build.site import main

if __name__ == "__main__":
    sys.exit(main())
