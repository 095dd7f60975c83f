"""``python -m trencadis.server`` is ``trencadis serve``."""

import sys

from trencadis.server.cli import serve_main

if __name__ == "__main__":
    sys.exit(serve_main())
