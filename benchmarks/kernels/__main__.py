"""``PYTHONPATH=$PWD python -P -m benchmarks.kernels``."""

import sys

from benchmarks.kernels.run import main

if __name__ == "__main__":
    sys.exit(main())
