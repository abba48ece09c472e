#!/usr/bin/env bash
# Trained and untrained critic on a waiter's orders (orders.py), five seeds. RESULTS.md, "Orders".
#
#   bash tests/experiments/orders.sh     # from the repo's root, after the quickstart's install
#   SEEDS=0 PARTS=words N=24 TESTS=4 DEMOS=400 bash tests/experiments/orders.sh     # smaller
#
# Everything goes to runs/orders, a copy of the scripts that knows this kind of task. The tables,
# and how many pairs of trajectories each critic orders correctly, go to stderr.
N=${N:-100} TESTS=${TESTS:-100} DEMOS=${DEMOS:-1000}  # tasks, test tasks, demonstrations
. tests/experiments/compare.sh

enter_orders() {  # makes the copy of the scripts, goes there, and writes the test tasks
  mkdir -p runs/orders/runs runs/orders/tests/experiments
  cp *.py tests/{toy,experiments/orders}.py runs/orders
  cp tests/experiments/{lessons,choose_critic}.py runs/orders/tests/experiments
  cd runs/orders
  sed -i '/^ENVIRONMENTS = /a import orders' *.py
  stage runs/tests.jsonl python orders.py tasks --seed 1000 --n $TESTS
}
graded_episodes() {  # TASKS [FLAGS]
  python collect.py --human orders.py --max_turns 4 --max_tokens 40 --seed $seed $FLAGS "${@:2}" \
      < $1 | python colbench.py grade
}
setup_orders() {  # NAME VOCABULARY SHOWN: the vocabulary is toy.py's or orders.py's
  critic_scale=1 policy_scale=1 tests=runs/tests.jsonl test_args="-k 4"
  stage $seed_dir/$2.log python $2.py model --seed $seed --out $seed_dir/$2
  stage $seed_dir/demos$3.jsonl python orders.py demos --seed $seed --n $DEMOS --shown $3
  train_base base-$2$3 $seed_dir/$2 demos$3 --lr 3e-3
  dir=$seed_dir/$1; mkdir -p $dir
  train_args=(-k 4 --candidates 16 --candidates_share 0.5)
  stage $dir/tasks.jsonl python orders.py tasks --seed $seed --n $N
  run_episodes train $base $dir/tasks.jsonl "${train_args[@]}"
}
# the toy's vocabulary has few of these words, and spells the others byte by byte
setup_spelled() { setup_orders spelled toy 0; }
setup_spelled_shown() { setup_orders spelled_shown toy 0.4; }
setup_words() { setup_orders words orders 0; }
setup_words_shown() { setup_orders words_shown orders 0.4; }

part() {  # NAME
  setup_$1
  run_episodes test-base $base $tests $test_args
  for c in eq3 untrained; do score $c 2>> $dir/$c.log; sweet_row $c@0.1; done
}
spelled() {
  part spelled
  for c in eq3 untrained; do
    train_sweet $c-mix1 1 0.1 < $dir/scored-$c.jsonl; test_policies $c-mix1
  done
}
spelled_shown() { part spelled_shown; }
words() { part words; }
words_shown() { part words_shown; }
[ "${BASH_SOURCE[0]}" = "$0" ] || return 0

PARTS=${PARTS:-spelled spelled_shown words words_shown}
enter_orders
run_in_parallel "$SEEDS" "$PARTS"
: > runs/results.jsonl
for p in $PARTS; do
  table $(rows $p "$SEEDS" $(cd runs/seed${SEEDS%% *}/$p && ls test-* | sed 's/test-\|.jsonl//g'))
done
