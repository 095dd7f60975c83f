#!/bin/sh
# Gives the given Python a torch by one rule: one that is there is kept; NVIDIA's device nodes: the default index; else
# the CPU build, whose "+cpu" version sorts above the plain one. An index out of reach costs seconds.
# A Gaudi's torch comes with its container and is never installed here.
set -eu
python=$1
version=2.13.0
root=${TRENCADIS_MACHINE_ROOT:-}
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 # a device's plug-in that does not load is no reason to replace torch
if "$python" -c "import torch" 2>/dev/null; then exit 0; fi
if outside=$("$python" -c "import importlib.util as u, sys; s = u.find_spec('torch')
print(s.origin if s and not s.origin.startswith(sys.prefix) else '')" 2>/dev/null) && [ -n "$outside" ]; then
    echo "trencadis: $outside does not load and is not replaced, because it is the container's: see $python -c 'import torch'" >&2
    exit 1
fi
if ls "$root"/dev/nvidia[0-9]* >/dev/null 2>&1; then
    exec "$python" -m pip install -q --disable-pip-version-check "torch>=2.11,<2.14"
fi
if grep -qs 0x1da3 "$root"/sys/bus/pci/devices/*/vendor; then
    echo "trencadis: there is a Gaudi and this Python has no torch for it: start from Gaudi's container (docs/hpu.md); installing the CPU build of torch" >&2
fi
exec "$python" -m pip install -q --disable-pip-version-check --retries 0 --timeout 10 "torch==$version" \
    --extra-index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"
