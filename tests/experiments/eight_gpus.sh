#!/usr/bin/env bash
# ColBench's backend tasks on one machine with eight GPUs: SWEET-RL and RFT, from data to table.
#
#   bash tests/experiments/eight_gpus.sh     # after the quickstart's install, `hf auth login`
#                                            # and `pip install vllm==0.32.0`
#   GPUS=2 TASKS=50 TESTS=20 HUMAN=http://localhost:8000/v1 MODEL=DIR ...    # smaller
#
# Half of the GPUs serve the human, unless HUMAN is a server's address, and half the agent. Killed
# and started again, it goes on where it was. Nobody has run it on GPUs yet. Tried with GPUS=2 on a
# CPU: a tiny MODEL, a small server as HUMAN, toy tasks in place of the download.
. tests/experiments/common.sh
mkdir -p runs8
GPUS=${GPUS:-8}
MODEL=${MODEL:-meta-llama/Llama-3.1-8B-Instruct}
HUMAN=${HUMAN:-meta-llama/Llama-3.1-70B-Instruct}
TASKS=${TASKS:-5000} TESTS=${TESTS:-1000}
half=$((GPUS / 2)) url=http://localhost:8000/v1
if [[ $HUMAN = http* ]]; then url=$HUMAN; fi

serve() {
  CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((half - 1))) exec vllm serve $HUMAN \
      --tensor-parallel-size $half --max-model-len 16384
}
begin() {
  if [ $url = $HUMAN ]; then return; fi
  serve & server=$!
  trap 'kill $server || true' EXIT
  until curl -sf localhost:8000/health; do kill -0 $server; sleep 5; done
}
end() {
  if [ $url = $HUMAN ]; then return; fi
  kill $server && wait $server || true
  trap - EXIT
}
play() {  # FILE MODEL [FLAGS]: episodes of stdin's tasks, after those in FILE
  CUDA_VISIBLE_DEVICES=$(seq -s, $half $((GPUS - 1))) bash tests/experiments/with_vllm.sh $2 \
      --data-parallel-size $half --max-model-len 16384 -- \
      python collect.py --human $url --model $2 --concurrency $((256 * half)) "${@:3}" \
      --resume $1 >> $1
}
sound() { head -$((TASKS * 6 / 5)) $tasks/train.jsonl | python colbench.py check; }

hf download facebook/collaborative_agent_bench --repo-type dataset --local-dir data
tasks=data/backend_tasks
stage runs8/tasks.jsonl sound
begin
# 15,000 episodes, a tenth with 16 candidates a turn
head -$TASKS runs8/tasks.jsonl |
  play runs8/played.jsonl $MODEL -k 3 --candidates 16 --candidates_share ${SHARE:-0.1}
stage runs8/train.jsonl python colbench.py grade < runs8/played.jsonl
end  # training takes all GPUs
# the untrained critic; one of its policy's episodes is better yet (RESULTS.md, "A critic that never
# loses")
stage runs8/scored.jsonl torchrun --nproc_per_node=$GPUS train_critic.py --untrained 1 \
    --model $MODEL < runs8/train.jsonl
# batches of 32 that keep trajectories together: 8 GPUs compute 2.8 times fewer tokens than with the
# paper's batch of 8, and the toy lost 3 points by it; a batch of 128 computes 5 times fewer and
# lost 6 (RESULTS.md, "Speed on CPUs", "What did not work"); without the two flags it is the paper's
torchrun --nproc_per_node=$GPUS train_policy.py --model $MODEL --out runs8/sweet --batch_size 32 \
    --lr 4e-7 < runs8/scored.jsonl
torchrun --nproc_per_node=$GPUS train_policy.py --model $MODEL --out runs8/rft --loss rft \
    < runs8/train.jsonl
begin
for m in rft sweet; do
  head -$TESTS $tasks/test.jsonl | play runs8/played-$m.jsonl runs8/$m
  stage runs8/test-$m.jsonl python colbench.py grade --rules official < runs8/played-$m.jsonl
done
end
python evaluate.py runs8/test-rft.jsonl runs8/test-sweet.jsonl > runs8/table.jsonl
