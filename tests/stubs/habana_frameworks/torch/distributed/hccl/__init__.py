from habana_frameworks.torch import AT_IMPORT

LAZY_COLLECTIVES = AT_IMPORT.get("PT_HPU_ENABLE_LAZY_COLLECTIVES", "False").lower() in ["true", "1"]
