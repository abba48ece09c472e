#!/usr/bin/env bash
# ColBench's backend tasks on one machine with eight GPUs: SWEET-RL and RFT, from data to table.
#
#   bash tests/experiments/eight_gpus.sh     # after the quickstart's install, `pip install vllm==0.32.0`
#                                            # and `hf auth login`; flash-attn is optional
# Nobody has run it on GPUs yet. Killed and started again, it goes on where it was.
set -euo pipefail
. .venv/bin/activate
mkdir -p runs
hf download facebook/collaborative_agent_bench --repo-type dataset --local-dir data
human() {
  CUDA_VISIBLE_DEVICES=0,1,2,3 exec vllm serve meta-llama/Llama-3.1-70B-Instruct \
      --tensor-parallel-size 4 --max-model-len 16384
}
play() {  # MODEL [FLAGS]
  CUDA_VISIBLE_DEVICES=4,5,6,7 bash tests/experiments/with_vllm.sh "$1" \
      --data-parallel-size 4 --max-model-len 16384 -- \
      python collect.py --human http://localhost:8000/v1 --concurrency 1024 --model "$@"
}
until_up() { until curl -sf localhost:8000/health; do kill -0 $server; sleep 5; done; }
human & server=$!
trap 'kill $server || true' EXIT
until_up
# 15,000 episodes, a tenth with 16 candidates a turn; --resume makes it safe to start again
python colbench.py check < data/backend_tasks/train.jsonl | head -5000 > runs/tasks.jsonl
play meta-llama/Llama-3.1-8B-Instruct -k 3 --candidates 16 --candidates_share 0.1 --resume runs/played.jsonl \
    < runs/tasks.jsonl >> runs/played.jsonl
python colbench.py grade < runs/played.jsonl > runs/train.jsonl
kill $server && wait $server || true  # training takes all eight
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=1800  # seconds for the checkpoint after Ctrl-C, not 30
# the untrained critic; one trained on the episodes of its policy is better yet (RESULTS.md, "A critic
# that never loses")
torchrun --nproc_per_node=8 train_critic.py --untrained 1 < runs/train.jsonl > runs/scored.jsonl
# batches of 32 that keep trajectories together: 8 GPUs compute 2.8 times fewer tokens than with the
# paper's batch of 8, and the toy lost 3 points by it; a batch of 128 computes 5 times fewer and
# lost 6 (RESULTS.md, "Speed"); without the two flags it is the paper's
torchrun --nproc_per_node=8 train_policy.py --out runs/sweet --batch_size 32 --lr 4e-7 \
    < runs/scored.jsonl
torchrun --nproc_per_node=8 train_policy.py --out runs/rft --loss rft < runs/train.jsonl
human & server=$!
until_up
for m in rft sweet; do
  head -1000 data/backend_tasks/test.jsonl |
    play runs/$m --resume runs/played-$m.jsonl >> runs/played-$m.jsonl
  python colbench.py grade --rules official < runs/played-$m.jsonl > runs/test-$m.jsonl
done
python evaluate.py runs/test-rft.jsonl runs/test-sweet.jsonl > runs/table.jsonl
