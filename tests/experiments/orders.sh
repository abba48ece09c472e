#!/usr/bin/env bash
# Trained and untrained critic on a waiter's orders (orders.py), five seeds. RESULTS.md, "Orders".
#
#   bash tests/experiments/orders.sh     # from the repo's root, after the quickstart's install
#   SEEDS=0 PARTS=words N=20 TESTS=10 DEMOS=200 bash tests/experiments/orders.sh     # smaller
#
# Everything goes to runs/orders, a copy of the scripts that knows this kind of task. The tables,
# and how many pairs of trajectories each critic orders correctly, go to stderr.
N=${N:-100} TESTS=${TESTS:-100} DEMOS=${DEMOS:-1000}  # tasks, test tasks, demonstrations
PARTS=${PARTS:-spelled40 spelled spelled_shown words words_shown}
. tests/experiments/compare.sh
mkdir -p runs/orders/runs
cp *.py tests/{toy,experiments/orders}.py runs/orders
cd runs/orders
sed -i '/^ENVIRONMENTS = /a import orders' *.py

graded() {  # TASKS [FLAGS]
  python collect.py --human orders.py --max_turns 4 --max_tokens $max_tokens --seed $s $FLAGS \
      "${@:2}" < $1 | python colbench.py grade
}
part() {  # NAME VOCABULARY SHOWN MAX_TOKENS: VOCABULARY is toy or orders, the script that makes it
  max_tokens=$4 e=1 tests=runs/tests.jsonl test_draws="-k 4"
  stage $S/$2.log python $2.py model --seed $s --out $S/$2
  stage $S/demos$3.jsonl python orders.py demos --seed $s --n $DEMOS --shown $3
  base base-$2$3 $S/$2 demos$3 --lr 3e-3
  R=$S/$1; mkdir -p $R
  stage $R/tasks.jsonl python orders.py tasks --seed $s --n $N
  play train $B $R/tasks.jsonl -k 4 --candidates 16 --candidates_share 0.5
  play test-base $B $tests $test_draws
  for c in eq3 untrained; do scored $c 2> $R/$c.log; policy $c@0.1; done
}
# By the toy's vocabulary the orders are spelled byte by byte, the longest in 40 tokens and an end.
spelled40() { part $FUNCNAME toy 0 40; }
spelled() { part $FUNCNAME toy 0 64; }
spelled_shown() { part $FUNCNAME toy 0.4 64; }
words() { part $FUNCNAME orders 0 40; }
words_shown() { part $FUNCNAME orders 0.4 40; }

stage runs/tests.jsonl python orders.py tasks --seed 1000 --n $TESTS
lanes "$SEEDS" "$PARTS"
: > runs/results.jsonl
for p in $PARTS; do table $(rows $p "$SEEDS" base eq3@0.1 untrained@0.1); done
grep -o "advantages order [^,]*" runs/seed*/*/*.log >&2
