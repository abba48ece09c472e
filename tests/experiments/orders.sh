#!/usr/bin/env bash
# Trained and untrained critic on a waiter's orders (orders.py), five seeds. RESULTS.md, "Orders".
#
#   bash tests/experiments/orders.sh     # from the repo's root, after the quickstart's install
#   SEEDS=0 PARTS=words N=20 TESTS=10 DEMOS=200 bash tests/experiments/orders.sh     # smaller
#
# Everything goes to runs/orders, which has a copy of the scripts that knows this kind of task. The
# tables and the critics' accuracies on pairs also go to stderr.
SEEDS=${SEEDS:-0 1 2 3 4}
PARTS=${PARTS:-spelled40 spelled spelled_shown words words_shown}
N=${N:-100}           # tasks
TESTS=${TESTS:-100}   # test tasks, four episodes each
DEMOS=${DEMOS:-1000}  # demonstrations
. tests/experiments/compare.sh
mkdir -p runs/orders/runs
cp *.py tests/toy.py tests/experiments/orders.py runs/orders
cd runs/orders
sed -i 's/^ENVIRONMENTS = .*/&\nimport orders/' colbench.py

graded() {  # TASKS [FLAGS]
  python collect.py --human orders.py --max_turns 4 --max_tokens $max_tokens --seed $s $FLAGS \
      "${@:2}" < $1 | python colbench.py grade
}
part() {  # NAME VOCABULARY SHOWN MAX_TOKENS: see orders.py; the vocabulary is toy's or orders'
  max_tokens=$4 e=1 tests=runs/tests.jsonl test_draws="-k 4"
  stage $S/$2.log python $2.py model --seed $s --out $S/$2
  stage $S/demos$3.jsonl python orders.py demos --seed $s --n $DEMOS --shown $3
  base base-$2$3 $S/$2 demos$3 --lr 3e-3
  R=$S/$1; mkdir -p $R
  stage $R/tasks.jsonl python orders.py tasks --seed $s --n $N
  play train $B $R/tasks.jsonl -k 4 --candidates 16 --candidates_share 0.5
  play test-base $B $tests $test_draws
  for c in eq3 untrained; do
    scored $c 2> $R/$c.log
    policy $c@0.1
  done
}
# the toy's vocabulary spells these words letter by letter, the longest orders in 40 tokens and an end
spelled40() { part spelled40 toy 0 40; }
spelled() { part spelled toy 0 64; }
spelled_shown() { part spelled_shown toy 0.4 64; }
words() { part words orders 0 40; }
words_shown() { part words_shown orders 0.4 40; }

stage runs/tests.jsonl python orders.py tasks --seed 1000 --n $TESTS
lanes "$SEEDS" "$PARTS"
: > runs/results.jsonl
for p in $PARTS; do
  echo "$p:" >&2
  table $(rows $p "$SEEDS" base eq3@0.1 untrained@0.1)
done
grep -o "advantages order [^,]*" runs/seed*/*/*.log >&2
