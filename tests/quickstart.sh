#!/usr/bin/env bash
# The whole method on a toy, on two CPU cores: installs into .venv, trains models below runs/, and
# prints how many tasks they solve. What the programs print goes to runs/quickstart.log.
#
#   bash tests/quickstart.sh
#   N=40 DEMOS=2000 bash tests/quickstart.sh    # a rehearsal: few tasks, poor models
#   SEED=1 R=runs/seed1 bash tests/quickstart.sh
#
# If it is interrupted, run it again: finished models are kept. Choose another R (the directory of
# the run) if you change SEED, N (tasks), DEMOS (demonstrations) or the scripts. On one machine
# results depend on these alone, because every random draw is seeded, not on which process is faster.
set -euo pipefail
cd "$(dirname "$0")/.."
SEED=${SEED:-0} N=${N:-400} DEMOS=${DEMOS:-8000} R=${R:-runs}
export OMP_NUM_THREADS=1        # one thread per process, because two processes share the cores
mkdir -p $R
exec 3>&2 2>> $R/quickstart.log
pids=()
step() { printf '%4d s  %s\n' $SECONDS "$*" >&3; }
finish() {
    local code=$?
    for pid in ${pids[@]}; do kill -- -$pid || true; done
    ((code == 0)) || tail -n 5 $R/quickstart.log >&3
}
trap finish EXIT

step "installing into .venv (torch's CPU build unless there is an NVIDIA GPU)"
python3 -m venv .venv && . .venv/bin/activate
cpu=https://download.pytorch.org/whl/cpu index=
if ! command -v nvidia-smi > /dev/null && curl -sfI --max-time 20 $cpu/torch/ > /dev/null; then
    index="--extra-index-url $cpu"   # whose torch 2.13.0+cpu comes before PyPI's 2.13.0
fi
pip install -q -r requirements.txt $index

# The programs, with what all calls share. The human is a script, tests/toy.py.
episodes() {   # of tasks (stdin), graded by the hidden tests
    python collect.py --seed $SEED --human tests/toy.py --max_turns 6 --max_tokens 40 "$@" |
        python colbench.py grade
}
policy() { python train_policy.py --seed $SEED "$@"; }
dpo() {
    policy --beta 1 --nll_coef 3 --mix 0.25 --logprob_weight 0.1 --lr 6e-4 --batch_size 32 "$@"
}
rft() { policy --loss rft --lr 5e-4 --epochs 8 "$@"; }
# explore MODEL OUT [FLAGS]: training data, four episodes per task. Each of two processes has half of
# the tasks.
explore() {
    beside explore_half 0 "$@"
    beside explore_half 1 "$@"
    wait_for_all
    cat $R/$2-[01].jsonl > $R/$2.jsonl
}
explore_half() {
    awk "NR % 2 == $1" $R/train-tasks.jsonl | episodes --model $R/$2 -k 4 "${@:4}" > $R/$3-$1.jsonl
}
try() { episodes --model $R/$1 < $R/tasks.jsonl > $R/test-$1.jsonl; }   # on the test tasks
# Runs a command in the background. wait_for_all ends the script if such a command has failed.
beside() { set -m; "$@" & set +m; pids+=($!); }   # -m: in a process group, which finish() kills
wait_for_all() { for pid in "${pids[@]}"; do wait $pid; done; pids=(); }

python tests/toy.py tasks --n $N --seed $SEED > $R/train-tasks.jsonl
python tests/toy.py tasks --n $N --split test > $R/tasks.jsonl   # the same for all seeds

step "the agent: a tiny Llama, fine-tuned on $DEMOS demonstrations"
beside python tests/toy.py model --seed $SEED --out $R/tiny
python tests/toy.py demos --n $DEMOS --seed $SEED > $R/demos.jsonl
wait_for_all
policy --loss rft --all 1 --model $R/tiny --lr 3e-3 --out $R/base < $R/demos.jsonl

step "episodes of the agent: training data, half of them with 16 candidates at every turn"
explore base train --candidates 16 --candidates_share 0.5

step "SWEET-RL, stage 1: the critic is trained, and scores every message;"
step "beside it the agent itself, untrained, scores them, too"
beside python train_critic.py --score $R/base --model $R/base --ref_context agent \
    < $R/train.jsonl > $R/untrained.jsonl
python train_critic.py --seed $SEED --model $R/base --out $R/critic --beta 1 --nll_coef 0.3 \
    --lr 4e-4 --batch_size 16 < $R/train.jsonl > $R/trained.jsonl
wait_for_all
scored=$(python tests/experiments/choose_critic.py $R/trained.jsonl $R/untrained.jsonl 2>&3)

step "stage 2: the policy is trained on $scored;"
step "beside it the agent's test, and a rival: the agent fine-tuned on what it solved (RFT)"
rival() {
    rft --model $R/base --out $R/rft < $R/train.jsonl
    try rft
    try base
}
beside rival
dpo --model $R/base --out $R/sweet < $scored
wait_for_all

step "second round: SWEET-RL's policy, fine-tuned on those of its own episodes that it solved;"
step "beside it the same for the rival"
explore sweet again
explore rft again-rft
second_rival() {
    rft --model $R/rft --out $R/rft2 < $R/again-rft.jsonl
    try rft2
    try sweet
}
beside second_rival
rft --model $R/sweet --out $R/sweet2 < $R/again.jsonl
try sweet2
python train_critic.py --score $R/critic < $R/again.jsonl > $R/trained-again.jsonl
wait_for_all

step "the training episodes of both rounds, with the critic's credit for every message"
python tests/experiments/report.py --logprob_weight 0.1 base=$R/trained.jsonl \
    sweet=$R/trained-again.jsonl > $R/report.html

step "done; open $R/report.html in a browser. Tests passed and tasks solved, with 95 % intervals:"
python evaluate.py $R/test-{base,rft,rft2,sweet,sweet2}.jsonl 2>&3 > $R/results.jsonl
