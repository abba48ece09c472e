#!/usr/bin/env bash
# SWEET-RL and RFT on ColBench's backend tasks, from download to table, on one machine with 8 GPUs.
#
#   bash tests/experiments/eight_gpus.sh     # after the quickstart's install, `hf auth login`
#                                            # and `pip install vllm==0.32.0`
#   GPUS=2 TASKS=50 TESTS=20 HUMAN=http://localhost:8000/v1 MODEL=DIR ...    # smaller
#
# While collecting, half of the GPUs serve the human, unless HUMAN is a server's address, and half
# the agent. Prints a table to stderr. Downloads to data/, writes all else to runs8/. Rerun it if it
# is killed. It has not been run on GPUs yet, only on a CPU with GPUS=2, a tiny MODEL and toy tasks.
. tests/experiments/common.sh
mkdir -p runs8
GPUS=${GPUS:-8}
MODEL=${MODEL:-meta-llama/Llama-3.1-8B-Instruct}
HUMAN=${HUMAN:-meta-llama/Llama-3.1-70B-Instruct}
TASKS=${TASKS:-5000} TESTS=${TESTS:-1000}
half=$((GPUS / 2)) url=http://localhost:8000/v1
if [[ $HUMAN = http* ]]; then url=$HUMAN; fi

serve_human() {
  CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((half - 1))) exec vllm serve $HUMAN \
      --tensor-parallel-size $half --max-model-len 16384
}
start_human() {
  if [ $url = $HUMAN ]; then return; fi
  serve_human & server=$!
  trap 'kill $server || true' EXIT
  until curl -sf localhost:8000/health; do kill -0 $server; sleep 5; done
}
stop_human() {
  if [ $url = $HUMAN ]; then return; fi
  kill $server && wait $server || true
  trap - EXIT
}
run_episodes() {  # FILE MODEL [FLAGS]: appends to FILE the episodes that it lacks of stdin's tasks
  CUDA_VISIBLE_DEVICES=$(seq -s, $half $((GPUS - 1))) bash tests/experiments/with_vllm.sh $2 \
      --data-parallel-size $half --max-model-len 16384 -- \
      python collect.py --human $url --model $2 --concurrency $((256 * half)) "${@:3}" \
      --resume $1 >> $1
}
checked_tasks() { head -$((TASKS * 6 / 5)) $tasks/train.jsonl | python colbench.py check; }

hf download facebook/collaborative_agent_bench --repo-type dataset --local-dir data
tasks=data/backend_tasks
stage runs8/tasks.jsonl checked_tasks
start_human
# 15,000 episodes, a tenth of them with 16 candidates per turn
head -$TASKS runs8/tasks.jsonl |
  run_episodes runs8/played.jsonl $MODEL -k 3 --candidates 16 --candidates_share ${SHARE:-0.1}
stage runs8/train.jsonl python colbench.py grade < runs8/played.jsonl
stop_human  # training needs all GPUs
# the untrained critic; one trained on its policy's episodes may be better (RESULTS.md, "A critic
# that never loses")
stage runs8/scored.jsonl torchrun --nproc_per_node=$GPUS train_critic.py --untrained 1 \
    --model $MODEL < runs8/train.jsonl
# Pairs of a trajectory share a batch and their prefix. With batches of 32, 8 GPUs compute 2.8 times
# fewer tokens than with the paper's 8, but the toy lost 3 points; with 128, 5 times fewer, and it
# lost 6 (RESULTS.md, "Speed on CPUs", "What did not work"). The paper's setting has neither flag.
torchrun --nproc_per_node=$GPUS train_policy.py --model $MODEL --out runs8/sweet --batch_size 32 \
    --lr 4e-7 < runs8/scored.jsonl
torchrun --nproc_per_node=$GPUS train_policy.py --model $MODEL --out runs8/rft --loss rft \
    < runs8/train.jsonl
start_human
for m in rft sweet; do
  head -$TESTS $tasks/test.jsonl | run_episodes runs8/played-$m.jsonl runs8/$m
  stage runs8/test-$m.jsonl python colbench.py grade --rules official < runs8/played-$m.jsonl
done
stop_human
python evaluate.py runs8/test-rft.jsonl runs8/test-sweet.jsonl > runs8/table.jsonl
