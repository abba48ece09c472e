#!/usr/bin/env bash
# Starts a vLLM server of a model for collect.py, and ends it after that.
#
#   bash tests/experiments/with_vllm.sh runs/sweet --data-parallel-size 4 -- \
#       python collect.py --model runs/sweet --human human.py < tasks.jsonl > episodes.jsonl
#
# What stands before -- is what `vllm serve` takes. The command behind it gets --engine and the address.
set -euo pipefail
serve=()
while [ "$1" != -- ]; do serve+=("$1"); shift; done
shift
port=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
# a kill of this script closes the pipe 3, which ends all processes of the server
exec 3> >(exec setsid sh -c '("$@" < /dev/null >&2; kill -9 -$$) & read -r line; kill -9 -$$' sh \
    python -m vllm.entrypoints.openai.api_server --model "${serve[@]}" --host 127.0.0.1 \
    --port "$port" --generation-config vllm --logprobs-mode processed_logprobs)
server=$!
until curl -sf --noproxy '*' "http://127.0.0.1:$port/health"; do
  kill -0 $server 2> /dev/null || { echo "error: the vLLM server has ended" >&2; exit 1; }
  sleep 1
done
status=0
"$@" --engine "http://127.0.0.1:$port/v1" 3>&- || status=$?
exec 3>&-
wait $server 2> /dev/null || exit $status  # its memory is free for the next one
