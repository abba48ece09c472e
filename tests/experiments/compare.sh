#!/usr/bin/env bash
# The comparison: every method on five seeds, 300 test tasks each. 44 minutes on two cores.
#
#   bash tests/experiments/compare.sh     # from the repo's root, after the quickstart's install
#   SEEDS=0 N=60 TESTS=20 DEMOS=4000 bash tests/experiments/compare.sh     # smaller
#
# The tables go to stderr and runs/results.jsonl, all else to runs/, what the stages say to
# runs/lane.log. Settings were chosen on validation tasks; RESULTS.md says how.
# Sourced by map.sh and critics.sh, this file only defines the functions.
. tests/experiments/common.sh
SEEDS=${SEEDS:-0 1 2 3 4}
N=${N:-400}           # tasks
TESTS=${TESTS:-300}   # test tasks
DEMOS=${DEMOS:-8000}  # demonstrations

# Besides those of common.sh: S is the seed's directory; turns and tests are a part's; q and e
# multiply the epochs of the rivals and of the critics where there are fewer tasks.

play() {  # NAME MODEL TASKS [FLAGS]: episodes, by $E's collect.py
  stage $R/$1.jsonl graded "${@:3}" --model $2
}
graded() {  # TASKS [FLAGS]
  python ${E:-.}/collect.py --human tests/toy.py --max_turns $turns --max_tokens 40 --seed $s \
      $FLAGS "${@:2}" < $1 | python colbench.py grade
}
learn() {  # NAME RECORDS [FLAGS]
  python $E/train_critic.py --model $C --seed $s $FLAGS --out $R/critic-$1 --beta 1 --nll_coef 0.3 \
      --lr 4e-4 --batch_size 16 --epochs $((4 * e)) "${@:3}" < $R/$2.jsonl
}
sweet() {  # NAME MIX WEIGHT
  fit $1 --beta 1 --nll_coef 3 --lr 6e-4 --batch_size 32 --mix $2 --logprob_weight $3
}
rft() { fit rft --loss rft --lr 5e-4 --epochs $((8 * q)) < $R/train.jsonl; }
mtdpo() {
  fit mtdpo --loss mtdpo --beta 0.3 --nll_coef 3 --lr 3e-4 --batch_size 16 \
      --epochs $((4 * q)) < $R/train.jsonl
}
methods() { rft; mtdpo; policy eq3@0.1; policy paper@0; try rft mtdpo; }

tests() {  # FILE [FLAGS]: test tasks
  stage runs/$1.jsonl python tests/toy.py tasks --split test --n $TESTS "${@:2}"
}
base() {  # NAME FROM DEMOS [FLAGS]: the base $S/NAME, where critics and policies start
  R=$S B=$2
  fit $1 --loss rft --all 1 "${@:4}" < $S/$3.jsonl
  B=$S/$1 C=$S/$1
}
collect() {  # NAME SHARE [FLAGS of the tasks]: 4 episodes a task, SHARE of them with candidates
  R=$S/$1; mkdir -p $R
  draws=(-k 4 --candidates 16 --candidates_share $2)
  stage $R/tasks.jsonl python tests/toy.py tasks --seed $s "${@:3}"
  play train $B $R/tasks.jsonl "${draws[@]}"
}
at_plain() {  # the quickstart's base and tasks
  turns=6 tests=runs/tests.jsonl q=1 e=1
  stage $S/tiny.log python tests/toy.py model --seed $s --out $S/tiny
  stage $S/demos.jsonl python tests/toy.py demos --seed $s --n $DEMOS
  base base $S/tiny demos --lr 3e-3
  collect plain 0.5 --n $N
}
at_early() {  # a base that answers early, few tasks
  at_plain
  e=2
  stage $S/demos-early.jsonl python tests/toy.py demos --seed $((100 + s)) --n $((DEMOS * 3 / 8)) \
      --at_once 0.65 --early 0.1 --distract 0.1
  base early-base $S/base demos-early --lr 1e-3 --epochs 2
  collect early 1 --n $((N * 3 / 8))
}
at_long() {  # four or five slots, ten turns
  local slots="--min_slots 3 --max_slots 5 --max_turns 10"
  turns=10 tests=runs/tests-long.jsonl q=1 e=1
  stage $S/tiny-long.log python tests/toy.py model --seed $s --out $S/tiny-long $slots
  stage $S/demos-long.jsonl python tests/toy.py demos --seed $s --n $DEMOS $slots
  base long-base $S/tiny-long demos-long --lr 3e-3
  collect long 0.5 --n $N --min_slots 4 --max_slots 5
}

plain() {
  at_plain
  methods; policy without_c@0.1
  play test-base $B $tests
  turns=1 play test-single $B $tests
}
few() {  # fewer tasks
  at_plain
  q=2 e=2; collect plain150 0.5 --n $((N * 3 / 8)); methods
  q=5 e=5; collect plain50 0.5 --n $((N / 8)); methods
}
others() {  # other critics; best of N; other temperatures; fewer tasks
  at_plain
  for c in trajectory sum trained regression value untrained none; do policy $c@0.1; done
  for n in 2 4 8 16; do
    play best$n-prior $B runs/tests200.jsonl --best_of $n --critic $R/critic-eq3 --logprob_weight 0.1
    for c in eq3 without_c value; do
      E=.
      case $c in
        without_c) E=$(edited no_hidden) ;;
        value) E=$(edited regression value) ;;
      esac
      play best$n-$c $B runs/tests200.jsonl --best_of $n --critic $R/critic-$c
    done
    E=.
  done
  for t in 0 0.5; do
    play test-base-$t $B $tests --temperature $t
    for m in rft mtdpo eq3@0.1; do play test-$m-$t $R/$m $tests --temperature $t; done
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
  lane "$even" "$2" & local one=$!
  lane "$odd" "$2" &
  wait $one && wait $! || { tail -3 runs/lane.log >&2; exit 1; }
}
row() {  # NAME FILE SEEDS
  echo "$1=$(for s in $3; do echo runs/seed$s/$2.jsonl; done | paste -sd,)"
}
rows() { for m in "${@:3}"; do row $m $1/test-$m "$2"; done; }  # PART SEEDS NAMES
table() { python evaluate.py "$@" >> runs/results.jsonl; }  # differences are to the first system
figure() {  # NAME SYSTEMS
  python evaluate.py "${@:2}" | tee -a runs/results.jsonl |
    python tests/experiments/plot.py runs/$1.png
}
others_tables() {  # SEEDS: other critics and temperatures, figures
  table $(for c in eq3 without_c trajectory trained sum regression value untrained none; do
      row $c plain/test-$c@0.1 "$1"
    done)
  for t in 0 0.5; do
    table $(for m in eq3@0.1 rft mtdpo base; do row $m-$t plain/test-$m-$t "$1"; done)
  done
  figure best_of_n $(for c in prior eq3 without_c value; do
      row $c@1 plain/test-base "$1"
      for n in 2 4 8 16; do row $c@$n plain/best$n-$c "$1"; done
    done)
  figure scaling $(for m in rft mtdpo paper@0 eq3@0.1; do
      for part in plain50 plain150 plain; do
        row ${m%@*}@$(cat runs/seed${1%% *}/$part/train.jsonl | wc -l) $part/test-$m "$1"
      done
    done)
}
[ "${BASH_SOURCE[0]}" = "$0" ] || return 0

pip install -q matplotlib
tests tests
head -$((TESTS * 2 / 3)) runs/tests.jsonl > runs/tests200.jsonl
first=$(echo $SEEDS | cut -d" " -f1-2)  # the rows of `others` take two seeds; map.sh adds the rest
lanes "$SEEDS" plain
lanes "$first" others
: > runs/results.jsonl
table $(rows plain "$SEEDS" eq3@0.1 base single rft mtdpo paper@0 without_c@0.1)
others_tables "$first"
for s in $SEEDS; do  # the released scorer's verdicts
  for m in rft mtdpo eq3@0.1; do
    f=runs/seed$s/plain/test-$m
    python colbench.py grade --rules official < $f.jsonl > $f-official.jsonl
  done
done
table $(rows plain "$SEEDS" eq3@0.1-official rft-official mtdpo-official)
