"""What torch calls for the entry point ``torch.backends``: imports the plug-in unless lazy mode is asked for."""

import os

is_loaded = False


def __autoload() -> None:
    from habana_frameworks.release import LAZY_BY_DEFAULT

    requested = os.getenv("PT_HPU_AUTOLOAD", "-1")
    lazy = os.getenv("PT_HPU_LAZY_MODE", "1" if LAZY_BY_DEFAULT else "0") == "1"
    if is_loaded or requested == "0" or (requested != "1" and lazy):
        return
    import habana_frameworks.torch  # noqa: F401
