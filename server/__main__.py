"""``python -m trencadis.server [FLAGS]`` is ``trencadis serve``; with a sub-command first it is ``trencadis``."""

import sys

from trencadis.server.cli.main import COMMANDS, main, serve_main

if __name__ == "__main__":
    sys.exit(main() if sys.argv[1:2] and sys.argv[1] in COMMANDS else serve_main())
