#!/usr/bin/env bash
# Where the method's order holds: other bases, horizons and noise. After compare.sh, 90 minutes.
#
#   bash tests/experiments/map.sh
. tests/experiments/compare.sh

early() {  # a base that answers early, few tasks; then a second round, new tasks, a new critic
  C=$S/early-base B=$S/early-base turns=6 tests=runs/tests.jsonl q=1 e=2
  python tests/toy.py demos --seed $((100 + s)) --n 3000 --at_once 0.65 --early 0.1 --distract 0.1 |
    base $S/base --lr 1e-3 --epochs 2
  collect early 1 --n 150; methods; untrained
  play test-base $B < $tests
  for m in rft mtdpo sweet; do
    B=$S/early/$m
    collect round2-$m $([ $m = sweet ] && echo 1 || echo 0) --n 150 --seed $((1000 + s))
    if [ $m = sweet ]; then by sweet; else $m; try $m; fi
  done
}
long() {  # four or five slots, ten turns
  C=$S/long-base B=$S/long-base turns=10 tests=runs/tests-long.jsonl q=1 e=1
  tiny --min_slots 3 --max_slots 5 --max_turns 10
  python tests/toy.py demos --seed $s --min_slots 3 --max_slots 5 --max_turns 10 |
    base $S/tiny --lr 3e-3
  collect long 0.5 --n 400 --min_slots 4 --max_slots 5; methods
  play test-base $B < $tests
}
noise() {  # three in ten episodes count as failed
  at_plain
  R=$S/noise; mkdir -p $R
  python -c 'import json, random, sys
r = random.Random(0)
for line in sys.stdin:
    record = json.loads(line)
    record["reward"] *= r.random() > 0.3
    print(json.dumps(record))' < $S/plain/train.jsonl > $R/train.jsonl
  methods
}

python tests/toy.py tasks --split test --n 300 --min_slots 4 --max_slots 5 > runs/tests-long.jsonl
lanes "$SEEDS" "early long noise others"
for r in plain plain150 plain50 early long noise; do
  table $(rows $r "$SEEDS" sweet rft mtdpo paper)
done
table $(rows early "$SEEDS" sweet teacher uncritical)
table $(for m in sweet rft mtdpo; do row round2-$m round2-$m/test-$m "$SEEDS"; done)
others_tables "$SEEDS"
