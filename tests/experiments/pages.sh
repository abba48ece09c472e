#!/usr/bin/env bash
# Compares all methods on the toy's frontend tasks: three seeds, ten minutes each on two cores.
# Prints a table to stderr. Its numbers go to runs/pages.jsonl, all other files to runs/pages$SEED/.
#
#   bash tests/experiments/pages.sh       # after the installs of MANUAL.md, "Frontend Design"
#   SEEDS=0 N=30 TESTS=10 DEMOS=2000 bash tests/experiments/pages.sh     # smaller
. tests/experiments/common.sh
SEEDS=${SEEDS:-0 1 2}
N=${N:-150}           # tasks
TESTS=${TESTS:-150}   # test tasks
DEMOS=${DEMOS:-4000}  # demonstrations
ROWS=${ROWS:-eq3@0 without_c@0 regression@0}  # see common.sh
test_args="-k 2"

toy="python tests/toy_pages.py"
run_episodes() { stage $dir/$1.jsonl graded_episodes "$@"; }  # NAME MODEL TASKS [FLAGS]
graded_episodes() {
  python collect.py --human tests/toy_pages.py --max_turns 6 --max_tokens 40 --seed $seed $FLAGS \
      --model $2 "${@:4}" < $3 | $toy grade
}
train_critic() {  # NAME RECORDS
  python $code/train_critic.py --model $critic_base --seed $seed $FLAGS --out $dir/critic-$1 \
      --min_gap 0.1 --beta 1 --lr 4e-4 --batch_size 16 < $dir/$2.jsonl
}
train_sweet() {  # NAME MIX WEIGHT: without --mix
  train_policy $1 --beta 1 --nll_coef 3 --lr 6e-4 --batch_size 32 --logprob_weight $3
}

for seed in $SEEDS; do
  dir=runs/pages$seed tests=runs/pages$seed/tests.jsonl; mkdir -p $dir
  stage $dir/tiny.log $toy model --n 4000 --seed $seed --out $dir/tiny
  stage $dir/demos.jsonl $toy demos --n $DEMOS --seed $seed
  base=$dir/tiny train_policy base --loss rft --all 1 --lr 3e-3 < $dir/demos.jsonl
  base=$dir/base critic_base=$dir/base
  stage $dir/tasks.jsonl $toy tasks --usual 0 --n $N --seed $seed
  run_episodes train $base $dir/tasks.jsonl -k 4 --candidates 16 --candidates_share 0.5
  stage $tests $toy tasks --usual 0 --split test --n $TESTS
  train_policy rft --loss rft --lr 5e-4 --epochs 8 < $dir/train.jsonl
  train_policy mtdpo --loss mtdpo --min_gap 0.1 --beta 0.3 --nll_coef 3 --lr 3e-4 --batch_size 16 \
      < $dir/train.jsonl
  test_policies base rft mtdpo
  for row in $ROWS; do sweet_row $row; done
done
python evaluate.py $(for m in $ROWS base rft mtdpo; do
    echo "$m=$(printf "runs/pages%s/test-$m.jsonl " $SEEDS | xargs | tr ' ' ,)"
  done) > runs/pages.jsonl
