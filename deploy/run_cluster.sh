#!/bin/sh
# run_cluster.sh IMAGE HEAD_IP --head|--worker HF_HOME [docker's arguments ...]
#
# Starts this machine's node of a Ray cluster in a container, with the checkpoints below HF_HOME, and ends with it
# (Ctrl-C). On the head, once every node is up:
#   docker exec -it trencadis-node trencadis serve MODEL -tp 8 -pp 2
#
# Whoever reaches a cluster's ports runs code on its nodes. With RAY_AUTH_TOKEN_PATH=FILE, the same file on each machine
# (`ray get-auth-token --generate` makes one), nodes and servers must show its token.
set -eu
usage() { sed -n '2s/^# /usage: /p' "$0" >&2; exit 2; }
[ $# -ge 4 ] || usage
image=$1
head=$2
role=$3
cache=$4
shift 4
port=${RAY_PORT:-6379}
case $head in
    *[!0-9a-fA-F.:]* | "") echo "run_cluster.sh: $head is no IP address" >&2; exit 2 ;;
esac
case $role in
    --head) command="ray start --head --block --port=$port --node-ip-address=$head --include-dashboard=false" ;;
    --worker) command="ray start --block --address=$head:$port" ;;
    *) usage ;;
esac
[ -d "$cache" ] || { echo "run_cluster.sh: there is no folder $cache" >&2; exit 2; }
# A machine with several networks says which of its addresses the others reach.
if [ "$role" = --worker ] && [ -n "${VLLM_HOST_IP:-}" ]; then
    command="$command --node-ip-address=$VLLM_HOST_IP"
fi
if [ -n "${RAY_AUTH_TOKEN_PATH:-}" ]; then
    [ -r "$RAY_AUTH_TOKEN_PATH" ] || { echo "run_cluster.sh: $RAY_AUTH_TOKEN_PATH cannot be read" >&2; exit 2; }
    set -- -v "$RAY_AUTH_TOKEN_PATH:/run/ray-token:ro" -e RAY_AUTH_TOKEN_PATH=/run/ray-token -e RAY_AUTH_MODE=token "$@"
fi
# Cards: what docker is told for them stands in the arguments, such as `--gpus all` or `--runtime=habana`.
exec "${DOCKER:-docker}" run --rm --init --name trencadis-node --network host --ipc host \
    -v "$cache:/root/.cache/huggingface" -e RAY_USAGE_STATS_ENABLED=0 -e "RAY_ADDRESS=$head:$port" \
    --entrypoint /bin/sh "$@" "$image" -c "exec $command"
