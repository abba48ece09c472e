#!/usr/bin/env bash
# Frontend Design on toy pages: all methods, three seeds. About ten minutes a seed on two cores.
#
#   bash tests/experiments/pages.sh       # after the installs of README, "Frontend Design"
set -euo pipefail
. .venv/bin/activate
export OMP_NUM_THREADS=1
mkdir -p runs

play() {
  python collect.py --human tests/toy_pages.py --max_turns 6 --max_tokens 40 --seed $s "$@" |
    python tests/toy_pages.py grade
}
policy() {  # NAME [FLAGS]
  python train_policy.py --model $R --seed $s --out $R-"$@"
}
edited() {  # EDITS: the directory of a copy of the scripts with them
  local copy=$(mktemp -d)
  cp *.py $copy
  git -C $copy apply $(printf "$PWD/tests/experiments/edits/%s.diff " "$@")
  echo $copy
}
critic() {  # NAME [FLAGS]: the critic and its policy
  python ${E:-.}/train_critic.py --model $R --seed $s --out $R-critic-$1 --margin 0.1 --beta 1 --lr 4e-4 \
      --batch_size 16 "${@:2}" < $R-train.jsonl |
    policy $1 --beta 1 --nll_coef 3 --lr 6e-4 --batch_size 32
}
for s in ${SEEDS:-0 1 2}; do
  R=runs/pages$s
  python tests/toy_pages.py model --n 4000 --seed $s --out $R-tiny
  python tests/toy_pages.py demos --n 4000 --seed $s |
    python train_policy.py --loss rft --all 1 --model $R-tiny --lr 3e-3 --seed $s --out $R
  python tests/toy_pages.py tasks --usual 0 --n 150 --seed $s |
    play --model $R -k 4 --candidates 16 --candidates_share 0.5 > $R-train.jsonl
  critic sweet
  E=$(edited no_hidden) critic blind
  E=$(edited regression) critic regression
  policy rft --loss rft --lr 5e-4 --epochs 8 < $R-train.jsonl
  policy mtdpo --loss mtdpo --margin 0.1 --beta 0.3 --nll_coef 3 --lr 3e-4 --batch_size 16 \
      < $R-train.jsonl
  python tests/toy_pages.py tasks --usual 0 --split test --n 150 > $R-tasks.jsonl
  for m in "" -rft -mtdpo -sweet -blind -regression; do
    play --model $R$m -k 2 < $R-tasks.jsonl > $R-test$m.jsonl
  done
done
systems() {
  for m in "" -rft -mtdpo -blind -regression -sweet; do
    echo "base$m=$(echo runs/pages?-test$m.jsonl | tr ' ' ,)"
  done
}
python evaluate.py $(systems) > runs/pages.jsonl
