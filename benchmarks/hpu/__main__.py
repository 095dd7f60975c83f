"""``PYTHONPATH=$PWD python -P -m benchmarks.hpu``."""

import sys

from benchmarks.hpu.run import main

if __name__ == "__main__":
    sys.exit(main())
