#!/bin/sh
# Installs torch into the given Python by one rule: importable: keep it; NVIDIA or Gaudi device nodes: the default
# index; else the CPU build, whose "+cpu" version sorts above the plain one. An index out of reach costs seconds.
set -eu
python=$1
version=2.13.0
if "$python" -c "import torch" 2>/dev/null; then exit 0; fi
if ls /dev/nvidia[0-9]* /dev/accel/accel[0-9]* /dev/hl[0-9]* >/dev/null 2>&1; then
    exec "$python" -m pip install -q --disable-pip-version-check "torch>=2.11,<2.14"
fi
exec "$python" -m pip install -q --disable-pip-version-check --retries 0 --timeout 10 "torch==$version" \
    --extra-index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"
