"""``python -m trencadis`` is the command ``trencadis``."""

import sys

from trencadis.server.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
