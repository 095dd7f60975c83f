#!/bin/sh
# Starts the server with the flags that follow the image's name. The root file system may be read-only.
set -eu
# A volume mounted for vLLM's images holds downloads at this place; one that cannot be written is still read.
cache=${HF_HOME:-/root/.cache/huggingface}
if [ ! -w "$cache" ] && [ ! -d "$cache/hub" ]; then
    cache=${TMPDIR:-/tmp}/huggingface
    mkdir -p "$cache"
fi
export HF_HOME="$cache"
export TRENCADIS_CACHE="${TRENCADIS_CACHE:-${TMPDIR:-/tmp}/trencadis}"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/triton}"
exec trencadis serve "$@"
