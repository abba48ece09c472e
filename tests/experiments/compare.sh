#!/usr/bin/env bash
# Compares all methods on the toy: five seeds, 300 test tasks each. 44 minutes on two cores.
#
#   bash tests/experiments/compare.sh     # from the repo's root, after the quickstart's install
#   SEEDS=0 N=60 TESTS=20 DEMOS=4000 bash tests/experiments/compare.sh     # smaller
#
# Prints tables to stderr. Their numbers go to runs/results.jsonl, two figures to runs/*.png, models
# and records to runs/seed*/, and all messages to runs/lane.log. The settings were chosen on
# validation tasks (RESULTS.md). map.sh and critics.sh source this file for its functions only.
. tests/experiments/common.sh
N=${N:-400}           # tasks
TESTS=${TESTS:-300}   # test tasks
DEMOS=${DEMOS:-8000}  # demonstrations

# Variables besides those of common.sh: seed_dir, the seed's directory; max_turns; policy_scale and
# critic_scale, which multiply the epochs of the rivals and of the critics if there are fewer tasks.

run_episodes() {  # NAME MODEL TASKS [FLAGS]: writes graded episodes, sampled by $code/collect.py
  stage $dir/$1.jsonl graded_episodes "${@:3}" --model $2
}
graded_episodes() {  # TASKS [FLAGS]
  python ${code:-.}/collect.py --human tests/toy.py --max_turns $max_turns --max_tokens 40 \
      --seed $seed $FLAGS "${@:2}" < $1 | python colbench.py grade
}
train_critic() {  # NAME RECORDS [FLAGS]: trains $dir/critic-NAME, and prints the scored records
  python $code/train_critic.py --model $critic_base --seed $seed $FLAGS --out $dir/critic-$1 \
      --beta 1 --nll_coef 0.3 --lr 4e-4 --batch_size 16 --epochs $((4 * critic_scale)) "${@:3}" \
      < $dir/$2.jsonl
}
train_sweet() {  # NAME MIX WEIGHT
  train_policy $1 --beta 1 --nll_coef 3 --lr 6e-4 --batch_size 32 --mix $2 --logprob_weight $3
}
train_rft() {
  train_policy rft --loss rft --lr 5e-4 --epochs $((8 * policy_scale)) < $dir/train.jsonl
}
train_mtdpo() {
  train_policy mtdpo --loss mtdpo --beta 0.3 --nll_coef 3 --lr 3e-4 --batch_size 16 \
      --epochs $((4 * policy_scale)) < $dir/train.jsonl
}
methods() { train_rft; train_mtdpo; sweet_row eq3@0.1; sweet_row paper@0; test_policies rft mtdpo; }

make_tests() {  # NAME [FLAGS]: writes test tasks to runs/NAME.jsonl
  stage runs/$1.jsonl python tests/toy.py tasks --split test --n $TESTS "${@:2}"
}
train_base() {  # NAME FROM DEMOS [FLAGS]: trains $seed_dir/NAME; policies and critics start there
  dir=$seed_dir base=$2
  train_policy $1 --loss rft --all 1 "${@:4}" < $seed_dir/$3.jsonl
  base=$seed_dir/$1 critic_base=$seed_dir/$1
}
collect() {  # NAME SHARE [FLAGS of tasks]: 4 episodes per task, SHARE of them with candidates
  dir=$seed_dir/$1; mkdir -p $dir
  train_args=(-k 4 --candidates 16 --candidates_share $2)
  stage $dir/tasks.jsonl python tests/toy.py tasks --seed $seed "${@:3}"
  run_episodes train $base $dir/tasks.jsonl "${train_args[@]}"
}
setup_plain() {  # the quickstart's tasks, and a base from 8,000 demonstrations
  max_turns=6 tests=runs/tests.jsonl policy_scale=1 critic_scale=1
  stage $seed_dir/tiny.log python tests/toy.py model --seed $seed --out $seed_dir/tiny
  stage $seed_dir/demos.jsonl python tests/toy.py demos --seed $seed --n $DEMOS
  train_base base $seed_dir/tiny demos --lr 3e-3
  collect plain 0.5 --n $N
}
setup_early() {  # a base that answers early, and fewer tasks
  setup_plain
  critic_scale=2
  stage $seed_dir/demos-early.jsonl python tests/toy.py demos --seed $((100 + seed)) \
      --n $((DEMOS * 3 / 8)) --at_once 0.65 --early 0.1 --distract 0.1
  train_base early-base $seed_dir/base demos-early --lr 1e-3 --epochs 2
  collect early 1 --n $((N * 3 / 8))
}
setup_long() {  # four or five slots, ten turns
  local toy="python tests/toy.py" slots="--min_slots 3 --max_slots 5 --max_turns 10"
  max_turns=10 tests=runs/tests-long.jsonl policy_scale=1 critic_scale=1
  stage $seed_dir/tiny-long.log $toy model --seed $seed --out $seed_dir/tiny-long $slots
  stage $seed_dir/demos-long.jsonl $toy demos --seed $seed --n $DEMOS $slots
  train_base long-base $seed_dir/tiny-long demos-long --lr 3e-3
  collect long 0.5 --n $N --min_slots 4 --max_slots 5
}

plain() {
  setup_plain
  methods; sweet_row without_c@0.1
  run_episodes test-base $base $tests
  max_turns=1 run_episodes test-single $base $tests
}
few() {  # fewer tasks
  setup_plain
  policy_scale=2 critic_scale=2; collect plain150 0.5 --n $((N * 3 / 8)); methods
  policy_scale=5 critic_scale=5; collect plain50 0.5 --n $((N / 8)); methods
}
ablations() {  # other critics, best of N, other temperatures, fewer tasks
  setup_plain
  for c in trajectory sum trained regression value untrained none; do sweet_row $c@0.1; done
  for n in 2 4 8 16; do
    run_episodes best$n-prior $base runs/tests200.jsonl --best_of $n --critic $dir/critic-eq3 \
        --logprob_weight 0.1
    for c in eq3 without_c value; do
      code=.
      case $c in
        without_c) code=$(edited_copy no_hidden) ;;
        value) code=$(edited_copy regression value) ;;
      esac
      run_episodes best$n-$c $base runs/tests200.jsonl --best_of $n --critic $dir/critic-$c
    done
    code=.
  done
  for t in 0 0.5; do
    run_episodes test-base-$t $base $tests --temperature $t
    for m in rft mtdpo eq3@0.1; do run_episodes test-$m-$t $dir/$m $tests --temperature $t; done
  done
  few
}

table() { python evaluate.py "$@" >> runs/results.jsonl; }  # differences are to the first system
figure() {  # NAME SYSTEMS
  python evaluate.py "${@:2}" | tee -a runs/results.jsonl |
    python tests/experiments/plot.py runs/$1.png
}
ablation_tables() {  # SEEDS: also the figures
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
make_tests tests
head -$((TESTS * 2 / 3)) runs/tests.jsonl > runs/tests200.jsonl
first=$(echo $SEEDS | cut -d" " -f1-2)  # ablations on two seeds only; map.sh adds the others
run_in_parallel "$SEEDS" plain
run_in_parallel "$first" ablations
: > runs/results.jsonl
table $(rows plain "$SEEDS" eq3@0.1 base single rft mtdpo paper@0 without_c@0.1)
ablation_tables "$first"
for seed in $SEEDS; do  # the released scorer's verdicts
  for m in rft mtdpo eq3@0.1; do
    f=runs/seed$seed/plain/test-$m
    python colbench.py grade --rules official < $f.jsonl > $f-official.jsonl
  done
done
table $(rows plain "$SEEDS" eq3@0.1-official rft-official mtdpo-official)
