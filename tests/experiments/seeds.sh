#!/usr/bin/env bash
# The quickstart with five seeds, and two more systems: multi-turn DPO and SWEET-RL with the
# untrained critic. Prints one table; its episodes are in runs/seed*/. 25 minutes on two cores.
#
#   bash tests/experiments/seeds.sh
#   SEEDS="0 1" N=40 DEMOS=2000 bash tests/experiments/seeds.sh   # a rehearsal
set -euo pipefail
SEEDS=${SEEDS:-0 1 2 3 4}
dpo() { policy --beta 1 --nll_coef 3 --mix 0.25 --logprob_weight 0.1 --lr 6e-4 --batch_size 32 "$@"; }
policy() { python train_policy.py --seed $s --model $R/base "$@" > /dev/null; }
try() {
    python collect.py --seed $s --human tests/toy.py --max_turns 6 --max_tokens 40 --model $R/$1 \
        < $R/tasks.jsonl | python colbench.py grade > $R/test-$1.jsonl
}
for s in $SEEDS; do
    export SEED=$s R=runs/seed$s
    bash tests/quickstart.sh
    . .venv/bin/activate
    export OMP_NUM_THREADS=1
    { policy --loss mtdpo --beta 0.3 --nll_coef 3 --lr 3e-4 --batch_size 16 --out $R/mtdpo \
        < $R/train.jsonl && try mtdpo; } & mtdpo=$!
    python train_critic.py --untrained 1 --model $R/base < $R/train.jsonl |
        dpo --out $R/untrained
    try untrained
    wait $mtdpo
done
row() { echo $1=$(printf "runs/seed%s/test-$1.jsonl\n" $SEEDS | paste -sd,); }
python evaluate.py $(for m in sweet base rft mtdpo untrained sweet2; do row $m; done) > runs/seeds.jsonl
