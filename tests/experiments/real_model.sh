#!/usr/bin/env bash
# The method on a real language model, on two CPU cores: one seed in two hours at most.
#
#   bash tests/experiments/real_model.sh     # from the repo's root, after the quickstart's install
#   SEED=1 MODEL=DIR FLAGS="--dtype bf16" bash tests/experiments/real_model.sh
#   ROWS="untrained@0.1 better@0.1" bash tests/experiments/real_model.sh   # other critics, too
#
# ROWS are those of common.sh. FLAGS="--dtype bf16" takes half the time where the CPU has it
# (avx512_bf16). The first table compares the warmed-up base with RFT, after about half an hour; the
# second one all methods. They go to stderr and to *.results in runs/real$SEED, the times of the
# stages to runs/times. RESULTS.md says how the settings were chosen.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=99999999999  # keep freed memory: 8 % faster steps
. tests/experiments/common.sh
s=${SEED:-0}
MODEL=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}
DEMOS=${DEMOS:-700}   # scripted episodes that warm the model up
TASKS=${TASKS:-120}   # tasks to learn from, EPISODES of each
USUAL=${USUAL:-0.3}   # probability of a number that a guess names; the base solves a fifth then
EPISODES=${EPISODES:-4}
SHARE=${SHARE:-0.25}  # of the episodes that get CANDIDATES at every turn
CANDIDATES=${CANDIDATES:-12}
EPOCHS=${EPOCHS:-1}   # of the critic
TESTS=${TESTS:-300}   # test tasks, DRAWS episodes of each
DRAWS=${DRAWS:-2}
ROWS=${ROWS:-untrained@0.1}
FIRST=untrained@0.1
R=${R:-runs/real$s}
mkdir -p $R
tests=$R/tests.jsonl
draws=(-k $EPISODES --candidates $CANDIDATES --candidates_share $SHARE)
test_draws="-k $DRAWS"

tasks() {  # NAME N [FLAGS]
  stage $R/$1.jsonl python tests/toy.py tasks --world english --seed $s --usual $USUAL \
      --n $2 "${@:3}"
}
play() { stage $R/$1.jsonl halves "$@"; }  # NAME MODEL TASKS [FLAGS]
halves() {  # two processes of one thread, each plays half of the tasks
  local half jobs=()
  for half in 0 1; do
    ( awk "NR % 2 == $half" $3 |
        OMP_NUM_THREADS=1 python collect.py --human tests/toy.py --max_turns 6 --max_tokens 128 \
            --seed $s $FLAGS --model $2 --resume $R/$1.$half "${@:4}" |
        python colbench.py grade >> $R/$1.$half ) & jobs+=($!)
  done
  wait ${jobs[0]} && wait ${jobs[1]} && cat $R/$1.0 $R/$1.1
}
learn() {  # NAME RECORDS [FLAGS]
  python $E/train_critic.py --seed $s $FLAGS --save_every 20 --out $R/critic-$1 --model $C \
      --beta 1 --nll_coef 0.3 --lr 8e-5 --min_gap 0.3 --epochs $EPOCHS "${@:3}" \
      < $R/$2.jsonl
}
sweet() {  # NAME MIX WEIGHT
  fit $1 --save_every 20 --beta 1 --nll_coef 0.3 --lr 3e-5 --batch_size 16 --pairs_per_turn 2 \
      --mix $2 --logprob_weight $3
}
rft() { fit $1 --loss rft --lr 5e-5 --batch_size 16 --epochs 3 < $R/train.jsonl; }
table() {  # NAME SYSTEMS: differences are to the first system
  local m systems=()
  for m in "${@:2}"; do systems+=($m=$R/test-$m.jsonl); done
  python evaluate.py "${systems[@]}" > $R/$1.results
}

stage $R/demos.jsonl python tests/toy.py demos --world english --seed $s --n $DEMOS
B=$MODEL fit base --loss rft --all 1 --lr 4e-4 --epochs 1 --batch_size 8 --save_every 20 \
    < $R/demos.jsonl
B=$R/base C=$R/base
tasks tasks $TASKS
play train $B $R/tasks.jsonl "${draws[@]}"
rft rft
tasks tests $TESTS --split test
try base rft
table rft base rft
B=$R/rft
for row in $ROWS; do policy $row; done
fit mtdpo --loss mtdpo --beta 0.3 --nll_coef 3 --lr 3e-5 --epochs 2 < $R/train.jsonl
rft rft_twice
try mtdpo rft_twice
table all $ROWS mtdpo rft_twice rft base
