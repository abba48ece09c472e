#!/usr/bin/env bash
# Starts a vLLM server, runs a command with it as the engine (--engine), and stops the server.
#
#   bash tests/experiments/with_vllm.sh runs/sweet --data-parallel-size 4 -- \
#       python collect.py --model runs/sweet --human human.py < tasks.jsonl > episodes.jsonl
#
# Before -- come the arguments of `vllm serve`, after it the command, which gets the flag --engine.
set -euo pipefail
serve=()
while [ "$1" != -- ]; do serve+=("$1"); shift; done
shift
port=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
# if this script is killed, pipe 3 closes, which makes the shell below kill the server's processes
exec 3> >(exec setsid sh -c '("$@" < /dev/null >&2; kill -9 -$$) & read -r line; kill -9 -$$' sh \
    python -m vllm.entrypoints.openai.api_server --model "${serve[@]}" --host 127.0.0.1 \
    --port "$port" --generation-config vllm --logprobs-mode processed_logprobs)
server=$!
until curl -sf --noproxy '*' "http://127.0.0.1:$port/health"; do
  kill -0 $server 2> /dev/null || { echo "error: the vLLM server has exited" >&2; exit 1; }
  sleep 1
done
status=0
"$@" --engine "http://127.0.0.1:$port/v1" 3>&- || status=$?
exec 3>&-
wait $server 2> /dev/null || exit $status  # so that its GPU memory is free
