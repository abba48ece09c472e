#!/usr/bin/env bash
# All methods on a real language model, on two CPU cores: one seed in at most two hours.
#
#   bash tests/experiments/real_model.sh     # from the repo's root, after the quickstart's install
#   SEED=1 MODEL=DIR FLAGS="--dtype bf16" bash tests/experiments/real_model.sh
#   ROWS="untrained@0.1 better@0.1" bash tests/experiments/real_model.sh   # rows of common.sh
#
# FLAGS="--dtype bf16" halves the time on CPUs with avx512_bf16. Prints two tables to stderr: after
# half an hour RFT beside the base, at the end all methods. All files, with the tables' numbers in
# *.results, go to runs/real$SEED, and seconds per stage to runs/times. RESULTS.md says how the
# settings were chosen.
# recipe.sh sources this file for its functions.
set -euo pipefail
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=99999999999  # keep freed memory: 8 % faster steps
[ "${BASH_SOURCE[0]}" = "$0" ] && . tests/experiments/common.sh
export OMP_NUM_THREADS=${THREADS:-2}
MODEL=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}
DEMOS=${DEMOS:-700}   # demonstrations, which teach the model the game
TASKS=${TASKS:-120}   # training tasks
USUAL=${USUAL:-0.3}   # probability that a guessed value is right; the base then solves a fifth
EPISODES=${EPISODES:-4}        # per training task
SHARE=${SHARE:-0.25}           # share of these episodes with candidates
CANDIDATES=${CANDIDATES:-12}   # candidates per turn
EPOCHS=${EPOCHS:-1}   # of the critic
TESTS=${TESTS:-300}   # test tasks
DRAWS=${DRAWS:-2}     # episodes per test task
train_args=(-k $EPISODES --candidates $CANDIDATES --candidates_share $SHARE)
test_args="-k $DRAWS"

make_tasks() {  # FILE N [FLAGS]
  stage $1 python tests/toy.py tasks --world english --usual $USUAL --n $2 "${@:3}"
}
run_episodes() { stage $dir/$1.jsonl graded_episodes "$@"; }  # NAME MODEL TASKS [FLAGS]
graded_episodes() {  # in two processes of one thread, each with half of the tasks
  local jobs=()
  half_of_episodes 0 "$@" & jobs+=($!)
  half_of_episodes 1 "$@" & jobs+=($!)
  wait ${jobs[0]} && wait ${jobs[1]} && cat $dir/$1.0 $dir/$1.1
}
half_of_episodes() {  # HALF NAME MODEL TASKS [FLAGS]: writes or resumes $dir/NAME.HALF
  local file=$dir/$2.$1
  if [ -e $file.done ]; then return; fi
  awk "NR % 2 == $1" $4 |
    OMP_NUM_THREADS=1 python collect.py --human tests/toy.py --max_turns 6 --max_tokens 128 \
        --seed $seed $FLAGS --model $3 --resume $file "${@:5}" |
    python colbench.py grade >> $file
  touch $file.done
}
train_critic() {  # NAME RECORDS [FLAGS]
  python $code/train_critic.py --seed $seed $FLAGS --save_every 20 --out $dir/critic-$1 \
      --model $critic_base --beta 1 --nll_coef 0.3 --lr 8e-5 --min_gap 0.3 --epochs $EPOCHS \
      "${@:3}" < $dir/$2.jsonl
}
train_sweet() {  # NAME MIX WEIGHT
  train_policy $1 --save_every 20 --beta 1 --nll_coef 0.3 --lr 3e-5 --batch_size 16 \
      --pairs_per_turn 2 --mix $2 --logprob_weight $3
}
train_rft() {  # [NAME]
  train_policy ${1:-rft} --loss rft --lr 5e-5 --batch_size 16 --epochs 3 < $dir/train.jsonl
}
train_mtdpo() {
  train_policy mtdpo --loss mtdpo --beta 0.3 --nll_coef 3 --lr 3e-5 --epochs 2 < $dir/train.jsonl
}
setup_episodes() {  # the base, warmed up on demonstrations, and its episodes
  stage $dir/demos.jsonl python tests/toy.py demos --world english --seed $seed --n $DEMOS
  base=$MODEL train_policy base --loss rft --all 1 --lr 4e-4 --epochs 1 --batch_size 8 \
      --save_every 20 < $dir/demos.jsonl
  base=$dir/base critic_base=$dir/base
  make_tasks $dir/tasks.jsonl $TASKS --seed $seed
  run_episodes train $base $dir/tasks.jsonl "${train_args[@]}"
}
setup_real() {  # for recipe.sh: every policy starts at the one that RFT makes of these episodes
  dir=$seed_dir/real; mkdir -p $dir
  setup_episodes
  tests=runs/tests-english.jsonl
  make_tasks $tests $TESTS --split test
  test_policies base
  train_rft start
  base=$dir/start
}
table() {  # NAME SYSTEMS: differences are to the first system
  local m systems=()
  for m in "${@:2}"; do systems+=($m=$dir/test-$m.jsonl); done
  python evaluate.py "${systems[@]}" > $dir/$1.results
}

[ "${BASH_SOURCE[0]}" = "$0" ] || return 0

seed=${SEED:-0}
ROWS=${ROWS:-untrained@0.1}
FIRST=untrained@0.1
dir=${R:-runs/real$seed}
mkdir -p $dir
setup_episodes
train_rft
tests=$dir/tests.jsonl
make_tasks $tests $TESTS --split test --seed $seed
test_policies base rft
table rft base rft
base=$dir/rft
for row in $ROWS; do sweet_row $row; done
train_mtdpo
train_rft rft_twice
test_policies mtdpo rft_twice
table all $ROWS mtdpo rft_twice rft base
