"""``python -m internsp``, for launchers such as torchrun that start a module."""

import sys

from internsp.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
