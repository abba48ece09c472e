#!/usr/bin/env bash
# The comparison: every method on five seeds, 300 test tasks each. 44 minutes on two cores.
#
#   bash tests/experiments/compare.sh     # from the repo's root, after the quickstart's install
#
# Everything goes to runs/; the tables to stderr and runs/results.jsonl. Killed and started again,
# it goes on where it was. Settings were chosen on validation tasks; RESULTS.md says how.
# SEEDS="0 1" takes fewer seeds. Sourced by map.sh, this file only defines the functions.
set -euo pipefail
SEEDS=${SEEDS:-0 1 2 3 4}
. .venv/bin/activate
export OMP_NUM_THREADS=1
mkdir -p runs

# Variables of a part: s seed, S its directory, R directory of the part, C the critics' base,
# B the policies' base, turns, tests; q and e multiply the epochs where there are fewer tasks; E the
# scripts' directory, of `edited`.

edited() {  # EDITS: the directory of a copy of the scripts with them
  local copy=$(mktemp -d)
  cp *.py $copy
  git -C $copy apply $(printf "$PWD/tests/experiments/edits/%s.diff " "$@")
  echo $copy
}
play() {  # NAME MODEL [FLAGS]: episodes of stdin's tasks, to $R/NAME.jsonl
  python ${E:-.}/collect.py --human tests/toy.py --max_turns $turns --max_tokens 40 --seed $s \
      --resume $R/$1.jsonl --model "${@:2}" | python colbench.py grade >> $R/$1.jsonl
}
base() {  # MODEL [FLAGS]: the base $C, from demonstrations on stdin
  python train_policy.py --loss rft --all 1 --seed $s --out $C --model $1 "${@:2}"
}
tiny() {  # [FLAGS of the demonstrations]: the tiny model $S/tiny, with their words
  python tests/toy.py model --seed $s --out $S/tiny "$@"
}
fit() {  # NAME [FLAGS]: a policy from the base $B
  python train_policy.py --model $B --seed $s --out $R/"$@"
}
rft() { fit rft --loss rft --lr 5e-4 --epochs $((8 * q)) < $R/train.jsonl; }
mtdpo() {
  fit mtdpo --loss mtdpo --beta 0.3 --nll_coef 3 --lr 3e-4 --batch_size 16 \
      --epochs $((4 * q)) < $R/train.jsonl
}
critic() {  # NAME [FLAGS]
  python ${E:-.}/train_critic.py --model $C --seed $s --out $R/critic-$1 \
      --beta 1 --nll_coef 0.3 --lr 4e-4 --batch_size 16 --epochs $((4 * e)) "${@:2}" \
      < $R/train.jsonl > $R/scored-$1.jsonl
}
sweet() {  # NAME [FLAGS]: the policy of critic NAME
  fit $1 --beta 1 --nll_coef 3 --lr 6e-4 --batch_size 32 --mix 0.25 --prior 0.1 "${@:2}" \
      < $R/scored-$1.jsonl
}
try() { for m in "$@"; do play test-$m $R/$m < $tests; done; }      # NAMES: on the test tasks
by() { critic "$@"; sweet $1; try $1; }                             # NAME [FLAGS]: of the critic
untrained() {  # the critic's start, and no critic: all advantages are 0, so only --prior ranks
  python train_critic.py --untrained 1 --model $C < $R/train.jsonl > $R/scored-teacher.jsonl
  sweet teacher; try teacher
  sed -E 's/("advantage": )[-+.e0-9]+/\10/g' $R/scored-sweet.jsonl > $R/scored-uncritical.jsonl
  sweet uncritical; try uncritical
}
methods() {
  rft; mtdpo; by sweet
  critic paper --nll_coef 0.01; sweet paper --mix 0 --prior 0
  try rft mtdpo paper
}
collect() {  # NAME SHARE [FLAGS of the tasks]: 4 episodes a task, SHARE of them with candidates
  R=$S/$1; mkdir -p $R
  python tests/toy.py tasks --seed $s "${@:3}" > $R/tasks.jsonl
  play train $B -k 4 --candidates 16 --candidates_share $2 < $R/tasks.jsonl
}

at_plain() { C=$S/base B=$S/base R=$S/plain turns=6 tests=runs/tests.jsonl q=1 e=1; }
plain() {  # the quickstart's base and tasks
  at_plain
  tiny
  python tests/toy.py demos --seed $s | base $S/tiny --lr 3e-3
  collect plain 0.5 --n 400; methods; E=$(edited no_hidden) by blind
  play test-base $B < $tests
  turns=1 play test-single $B < $tests
}
few() {  # fewer tasks
  at_plain
  q=2 e=2; collect plain150 0.5 --n 150; methods
  q=5 e=5; collect plain50 0.5 --n 50; methods
}
others() {  # other critics; best of N; other temperatures; fewer tasks
  at_plain
  E=$(edited trajectory) by trajectory; E=$(edited sum) by none; by agent --ref_context agent
  E=$(edited regression) by regression; E=$(edited regression value) by value; untrained
  for n in 2 4 8 16; do
    play best$n-prior $B --best_of $n --critic $R/critic-sweet --prior 0.1 < runs/tests200.jsonl
    for c in sweet blind value; do
      E=.
      case $c in
        blind) E=$(edited no_hidden) ;;
        value) E=$(edited regression value) ;;
      esac
      play best$n-$c $B --best_of $n --critic $R/critic-$c < runs/tests200.jsonl
    done
    unset E
  done
  for t in 0 0.5; do
    play test-base-$t $B --temperature $t < $tests
    for m in rft mtdpo sweet; do play test-$m-$t $R/$m --temperature $t < $tests; done
  done
  few
}

lane() {  # SEEDS PARTS: one after another, for one core
  ( for s in $1; do
      S=runs/seed$s; mkdir -p $S
      for part in $2; do $part; done
    done ) >> runs/lane.log 2>&1
}
lanes() {  # SEEDS PARTS: on two cores
  even=""; odd=""
  for s in $1; do if ((s % 2)); then odd+=" $s"; else even+=" $s"; fi; done
  lane "$even" "$2" & lane "$odd" "$2"; wait $!
}
row() { echo "$1=$(for s in $3; do echo runs/seed$s/$2.jsonl; done | paste -sd,)"; }  # NAME FILE SEEDS
rows() { for m in "${@:3}"; do row $m $1/test-$m "$2"; done; }               # PART SEEDS NAMES
table() { python evaluate.py "$@" >> runs/results.jsonl; }
figure() {  # NAME SYSTEMS
  python evaluate.py "${@:2}" | tee -a runs/results.jsonl |
    python tests/experiments/plot.py runs/$1.png
}
others_tables() {  # SEEDS: other critics and temperatures, figures
  table $(rows plain "$1" sweet blind paper trajectory none agent regression value \
      teacher uncritical)
  for t in 0 0.5; do
    table $(for m in sweet rft mtdpo base; do row $m-$t plain/test-$m-$t "$1"; done)
  done
  figure best_of_n $(for c in prior sweet blind value; do
      row $c@1 plain/test-base "$1"
      for n in 2 4 8 16; do row $c@$n plain/best$n-$c "$1"; done
    done)
  figure scaling $(for m in rft mtdpo paper sweet; do
      row $m@200 plain50/test-$m "$1"
      row $m@600 plain150/test-$m "$1"
      row $m@1600 plain/test-$m "$1"
    done)
}
[ "${BASH_SOURCE[0]}" = "$0" ] || return 0

pip install -q matplotlib
python tests/toy.py tasks --split test --n 300 > runs/tests.jsonl
head -200 runs/tests.jsonl > runs/tests200.jsonl
first=$(echo $SEEDS | cut -d" " -f1-2)  # the rows of `others` take two seeds; map.sh adds the rest
lanes "$SEEDS" plain
lanes "$first" others
: > runs/results.jsonl
table $(rows plain "$SEEDS" sweet base single rft mtdpo paper blind)  # differences to the first
others_tables "$first"
for s in $SEEDS; do  # the released scorer's verdicts
  for m in rft mtdpo sweet; do
    f=runs/seed$s/plain/test-$m
    python colbench.py grade --rules official < $f.jsonl > $f-official.jsonl
  done
done
table $(rows plain "$SEEDS" sweet-official rft-official mtdpo-official)
