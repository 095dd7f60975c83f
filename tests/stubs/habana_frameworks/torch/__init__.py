"""As the plug-in, it reads its variables when it is imported."""

import os

AT_IMPORT = {n: v for n, v in os.environ.items() if n.startswith("PT_HPU")}
