"""``python -m trencadis.server [FLAGS]`` is ``trencadis serve``; with a sub-command first it is ``trencadis``."""

import sys

from trencadis.server.cli.main import CHECK, COMMANDS, main, serve_main

if __name__ == "__main__":
    words = sys.argv[1:2]
    sub_command = words and (words[0] in COMMANDS or words[0].startswith(CHECK))
    sys.exit(main() if sub_command else serve_main())
