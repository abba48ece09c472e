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
#   recipe       SWEET-RL by eq. 3's critic, or by the untrained one if that orders more trajectory
#                pairs (choose_critic.py); in the second round RFT
#   eq3          SWEET-RL by eq. 3's critic, which scores the second round's candidates, too
#   untrained    SWEET-RL by the untrained critic
#   rft, mtdpo   the two rivals, by --loss of train_policy.py
#   METHOD-rft   METHOD, in the second round RFT, which samples no candidates: list these last,
#                because methods with the same first round share the episodes of the second
# RESULTS.md has rows of methods that did not hold: recipe.sh of 867ea69 has them.
#
# compare.sh's and real_model.sh's first lines say how to run less. Tables go to stderr, numbers to
# runs/recipe.jsonl.
set -euo pipefail
shopt -s inherit_errexit  # so that a stage which fails inside $(...) ends the script
case " $* " in
  *" real "*) . tests/experiments/common.sh; . tests/experiments/real_model.sh ;;
  *" spelled "* | *" words "*) . tests/experiments/orders.sh; enter_orders ;;
  *)
    . tests/experiments/compare.sh
    make_tests tests
    make_tests tests-long --min_slots 4 --max_slots 5 ;;
esac
METHODS=${METHODS:-eq3 untrained recipe mtdpo-rft rft}
WEIGHT=${WEIGHT:-0.1}  # --logprob_weight

scored_by() {  # CRITIC RECORDS: prints them with advantages
  case $1 in
    untrained) python train_critic.py --score $critic_base --model $critic_base \
        --ref_context agent $FLAGS < $2 ;;
    eq3) code=. train_critic eq3 train ;;
    eq3-again) python train_critic.py --score $first_dir/critic-eq3 $FLAGS < $2 ;;
  esac 2>> $dir/$1.log
}
score_by() {  # CRITIC: writes $dir/scored-CRITIC.jsonl
  stage $dir/scored-$1.jsonl scored_by $1 $dir/train.jsonl
}
sweet_by() {  # CRITIC NAME: trains a policy, ranked by the critic
  score_by $1
  train_sweet $2 0.25 $WEIGHT < $dir/scored-$1.jsonl
}
better_critic() {  # prints the name of the one that orders more pairs
  score_by eq3
  score_by untrained
  python tests/experiments/choose_critic.py $dir/scored-{eq3,untrained}.jsonl |
    sed 's/.*scored-//; s/.jsonl//'
}
first_round() {  # POLICY
  case $1 in
    rft | mtdpo) train_$1 ;;
    eq3 | untrained) sweet_by $1 $1 ;;
  esac
}
second_round() {  # POLICY, whose candidates the first round's critic scores
  case $1 in
    eq3) sweet_by eq3-again eq3 ;;
    *) first_round $1 ;;
  esac
}
two_rounds() {  # METHOD, whose test results are test-METHOD and test-METHOD-2
  local first_dir=$dir dir=$dir base=$base first=${1%-rft} second
  local train_args=("${train_args[@]}")
  if [ $1 = recipe ]; then first=$(better_critic); fi
  case $1 in
    recipe | *-rft) second=rft ;;
    *) second=$first ;;
  esac
  case $second in rft | mtdpo) train_args=("${train_args[@]:0:2}") ;; esac  # no candidates
  first_round $first
  test_policies $first
  if [ $first != $1 ]; then cp $dir/test-$first.jsonl $dir/test-$1.jsonl; fi

  base=$first_dir/$first
  dir=$first_dir/again-$first
  mkdir -p $dir
  run_episodes train $base $first_dir/tasks.jsonl "${train_args[@]}"
  second_round $second
  test_policies $second
  cp $dir/test-$second.jsonl $first_dir/test-$1-2.jsonl
}
all_methods() {
  local method
  setup_$setup
  run_episodes test-base $base $tests ${test_args:-}
  for method in $METHODS; do two_rounds $method; done
}
names() { for m in $METHODS; do echo $m-2; done; for m in $METHODS; do echo $m; done; echo base; }

for setup in "$@"; do
  run_in_parallel "$SEEDS" all_methods
  python evaluate.py $(rows $setup "$SEEDS" $(names)) >> runs/recipe.jsonl
done
