#!/bin/sh
# install.sh cpu|cuda|gaudi SOURCE [PREFIX]: installs the server for one device, with a user that owns nothing of it.
# An image's layers call it; it also works in an empty virtual environment (PYTHON names its interpreter).
set -eu
device=$1
source=$2
prefix=${3:-}
python=${PYTHON:-python3}

case $device in
    cpu | cuda | gaudi) ;;
    *) echo "install.sh: $device is no device; known are cpu, cuda and gaudi" >&2; exit 2 ;;
esac
pip() { "$python" -m pip install --no-cache-dir --disable-pip-version-check --root-user-action=ignore "$@"; }

extra=cpu
if [ "$device" = cuda ]; then
    extra=cuda
elif [ "$device" = gaudi ]; then
    "$python" -c "import importlib.util as u, sys; sys.exit(0 if u.find_spec('habana_frameworks') else 1)" || {
        echo "install.sh: this image has no Gaudi plug-in; build from Gaudi's container (docs/hpu.md)" >&2
        exit 2
    }
    extra=
fi
# The CPU build of torch comes from its own index: the default index's brings 3 GB of CUDA libraries.
if [ "$device" = cpu ] && ! "$python" -c "import torch" 2>/dev/null; then
    pip "torch>=2.11,<2.14" --extra-index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"
fi
# EXTRAS=ray, for one: more of the package's extras.
extra=$extra${EXTRAS:+${extra:+,}$EXTRAS}
pip "$source${extra:+[$extra]}"

install -d "$prefix/opt/trencadis"
install -m 755 "$source/deploy/entrypoint.sh" "$prefix/opt/trencadis/entrypoint.sh"
[ -n "$prefix" ] && exit 0
# Volumes of vLLM's images are mounted at /root/.cache/huggingface, so a user that is not root must reach it.
id trencadis >/dev/null 2>&1 || useradd --uid 2000 --create-home --shell /usr/sbin/nologin trencadis
install -d -o trencadis -g trencadis /root/.cache /root/.cache/huggingface
chmod 711 /root
