"""Which release the stub plays: that of its metadata, as ``tests/stubs/gaudi_container.py`` writes it."""

from importlib import metadata

try:
    VERSION = metadata.version("habana-torch-plugin")
except metadata.PackageNotFoundError:
    VERSION = "1.19.0.561"

RELEASE = tuple(int(part) for part in VERSION.split(".")[:2])
LAZY_BY_DEFAULT = RELEASE < (1, 21)
TAKES_PLAIN_TORCH = RELEASE >= (1, 24)
"""Whether a torch whose version names no build is looked at as upstream's; before, it ended in an AttributeError."""
