#!/usr/bin/env bash
# One recipe beside its rivals. Every method learns twice: from the base's episodes, then from those
# of the policy that it made of them, so each has the same number of the human's replies.
#
#   bash tests/experiments/recipe.sh plain early long     # setups of compare.sh
#   bash tests/experiments/recipe.sh spelled words        # orders of orders.sh
#   SEEDS=0 METHODS="recipe rft" bash tests/experiments/recipe.sh plain
#   SEEDS=1 MODEL=DIR FLAGS="--dtype bf16" bash tests/experiments/recipe.sh real    # real_model.sh
#
# Start each of these three separately, the last with one seed a time, as it uses both cores.
#
# Rows METHOD are of the first round's policies, rows METHOD-2 of the second's. A method is
#   rft, mtdpo   the two rivals, by --loss of train_policy.py
#   eq3          SWEET-RL. In the second round the same critic scores the new candidates
#   eq3-mix1     the same with --mix 1
#   untrained    SWEET-RL with the untrained critic, twice
#   recipe       first round: ranked by the untrained critic if it orders two thirds of the pairs,
#                else by eq. 3, with --mix 1. Second round: a critic is trained on the first
#                policy's episodes (`trained`, with --nll_coef 1), and ranks its candidates
#   decided      eq3, or untrained if that critic orders more trajectory pairs; without its second
#                round, if it orders fewer than two thirds of that round's pairs (lessons.py)
#   METHOD-rft   the second round is RFT, on the first policy's solved episodes. It samples no
#                candidates, so list these methods last
#   METHOD-all   the second round trains as the first one did, anew, on the episodes of both
# compare.sh's and real_model.sh's first lines say how to run less. Tables go to stderr, numbers to
# runs/recipe.jsonl.
set -euo pipefail
shopt -s extglob
shopt -s inherit_errexit  # so that a stage which fails inside $(...) ends the script
case " $* " in
  *" real "*) . tests/experiments/common.sh; . tests/experiments/real_model.sh ;;
  *" spelled "* | *" words "*) . tests/experiments/orders.sh; enter_orders ;;
  *)
    . tests/experiments/compare.sh
    make_tests tests
    make_tests tests-long --min_slots 4 --max_slots 5 ;;
esac
METHODS=${METHODS:-recipe rft mtdpo eq3 untrained}
WEIGHT=${WEIGHT:-0.1}  # --logprob_weight

orders_enough_pairs() {  # FILE: whether train_critic.py's messages name two thirds of the pairs
  awk '/^pair accuracy/ {enough = ($3 >= 66.7)} END {exit !enough}' $1
}
scored_by() {  # CRITIC RECORDS: prints them with advantages
  case $1 in
    untrained) python train_critic.py --untrained 1 $FLAGS --model $critic_base < $2 ;;
    eq3) code=. train_critic eq3 train ;;
    eq3-again) python train_critic.py --score $first_dir/critic-eq3 $FLAGS < $2 ;;
    trained) code=. train_critic trained train --ref_context agent --nll_coef 1 ;;
  esac 2>> $dir/$1.log
}
sweet_by() {  # CRITIC NAME MIX: trains a policy, ranked by the critic
  stage $dir/scored-$1.jsonl scored_by $1 $dir/train.jsonl
  train_sweet $2 $3 $WEIGHT < $dir/scored-$1.jsonl
}
lessons_of() {  # SCORED: writes what lessons.py prints of it to SCORED.lessons
  stage $1.lessons python tests/experiments/lessons.py < $1.jsonl
}
pairs_ordered() {  # CRITIC: prints how many trajectory pairs of the base's episodes it orders
  stage $dir/scored-$1.jsonl scored_by $1 $dir/train.jsonl
  lessons_of $dir/scored-$1
  sed -E 's/.*"ordered": ([0-9]+).*/\1/' $dir/scored-$1.lessons
}
first_policy_of() {  # METHOD: prints the name of its policy of the first round
  case $1 in
    decided*)
      local untrained eq3
      untrained=$(pairs_ordered untrained)
      eq3=$(pairs_ordered eq3)
      if ((untrained > eq3)); then echo untrained; else echo eq3; fi ;;
    recipe*)
      stage $dir/scored-untrained.jsonl scored_by untrained $dir/train.jsonl
      if orders_enough_pairs $dir/untrained.log; then echo untrained; else echo eq3-mix1; fi ;;
    *) echo ${1%-@(all|rft)} ;;
  esac
}
first_round() {  # POLICY
  case $1 in
    rft | mtdpo) train_$1 ;;
    eq3 | untrained) sweet_by $1 $1 $mix ;;
    eq3-mix1) sweet_by eq3 $1 1 ;;
  esac
}
second_round() {  # METHOD, whose second policy is $dir/METHOD
  case $1 in
    rft | mtdpo) train_$1 ;;
    eq3) sweet_by eq3-again eq3 $mix ;;
    eq3-mix1) sweet_by eq3-again eq3-mix1 1 ;;
    untrained) sweet_by untrained untrained $mix ;;
    recipe) sweet_by trained recipe $mix ;;
  esac
}
two_rounds() {  # METHOD
  local first_dir=$dir dir=$dir start=$base base=$base first second=$1
  local train_args=("${train_args[@]}")
  case $1 in
    rft* | mtdpo* | *-rft) train_args=("${train_args[@]:0:2}") ;;  # -k, without candidates
    decided)
      first=$(first_policy_of decided)
      two_rounds $first
      cp $dir/test-$first.jsonl $dir/test-decided.jsonl
      local scored=$dir/again-$first/scored-$first
      if [ $first = eq3 ]; then scored+=-again; fi
      lessons_of $scored
      second=$first-2
      if grep -q "fewer than two thirds" $scored.lessons; then second=$first; fi
      cp $dir/test-$second.jsonl $dir/test-decided-2.jsonl
      return ;;
  esac
  first=$(first_policy_of $1)
  first_round $first
  test_policies $first
  base=$first_dir/$first
  dir=$first_dir/again-$first
  mkdir -p $dir
  run_episodes train $base $first_dir/tasks.jsonl "${train_args[@]}"
  case $1 in
    *-all)
      base=$start second=$first
      dir=$first_dir/all-$first
      mkdir -p $dir
      stage $dir/train.jsonl cat $first_dir/train.jsonl $first_dir/again-$first/train.jsonl
      first_round $first ;;
    *-rft) second=rft; second_round rft ;;
    *) second_round $1 ;;
  esac
  test_policies $second
  cp $dir/test-$second.jsonl $first_dir/test-$1-2.jsonl
  if [ $first != $1 ]; then cp $first_dir/test-$first.jsonl $first_dir/test-$1.jsonl; fi
}
all_methods() {
  local method
  setup_$setup
  run_episodes test-base $base $tests ${test_args:-}
  for method in $METHODS; do two_rounds $method; done
}
names() { for m in $METHODS; do echo $m-2; done; for m in $METHODS; do echo $m; done; echo base; }

mix=${MIX:-0.25}
for setup in "$@"; do
  run_in_parallel "$SEEDS" all_methods
  python evaluate.py $(rows $setup "$SEEDS" $(names)) >> runs/recipe.jsonl
done
