#!/usr/bin/env bash
# Frontend Design on toy pages: all methods, three seeds. About ten minutes a seed on two cores.
#
#   bash tests/experiments/pages.sh       # after the installs of MANUAL.md, "Frontend Design"
#   SEEDS=0 N=30 TESTS=10 DEMOS=2000 bash tests/experiments/pages.sh     # smaller
. tests/experiments/common.sh
SEEDS=${SEEDS:-0 1 2}
N=${N:-150}           # tasks
TESTS=${TESTS:-150}   # test tasks
DEMOS=${DEMOS:-4000}  # demonstrations
ROWS=${ROWS:-eq3@0 without_c@0 regression@0}  # see common.sh
test_draws="-k 2"

toy="python tests/toy_pages.py"
play() { stage $R/$1.jsonl graded "$@"; }  # NAME MODEL TASKS [FLAGS]
graded() {
  python collect.py --human tests/toy_pages.py --max_turns 6 --max_tokens 40 --seed $s $FLAGS \
      --model $2 "${@:4}" < $3 | $toy grade
}
learn() {  # NAME RECORDS
  python $E/train_critic.py --model $C --seed $s $FLAGS --out $R/critic-$1 --min_gap 0.1 --beta 1 \
      --lr 4e-4 --batch_size 16 < $R/$2.jsonl
}
sweet() { fit $1 --beta 1 --nll_coef 3 --lr 6e-4 --batch_size 32 --logprob_weight $3; }  # NAME MIX WEIGHT

for s in $SEEDS; do
  R=runs/pages$s tests=runs/pages$s/tests.jsonl; mkdir -p $R
  stage $R/tiny.log $toy model --n 4000 --seed $s --out $R/tiny
  stage $R/demos.jsonl $toy demos --n $DEMOS --seed $s
  B=$R/tiny fit base --loss rft --all 1 --lr 3e-3 < $R/demos.jsonl
  B=$R/base C=$R/base
  stage $R/tasks.jsonl $toy tasks --usual 0 --n $N --seed $s
  play train $B $R/tasks.jsonl -k 4 --candidates 16 --candidates_share 0.5
  stage $tests $toy tasks --usual 0 --split test --n $TESTS
  fit rft --loss rft --lr 5e-4 --epochs 8 < $R/train.jsonl
  fit mtdpo --loss mtdpo --min_gap 0.1 --beta 0.3 --nll_coef 3 --lr 3e-4 --batch_size 16 \
      < $R/train.jsonl
  try base rft mtdpo
  for row in $ROWS; do policy $row; done
done
python evaluate.py $(for m in $ROWS base rft mtdpo; do
    echo "$m=$(printf "runs/pages%s/test-$m.jsonl " $SEEDS | xargs | tr ' ' ,)"
  done) > runs/pages.jsonl
