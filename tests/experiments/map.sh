#!/usr/bin/env bash
# Where the method's order holds: other bases, horizons and noise. After compare.sh, 90 minutes.
#
#   bash tests/experiments/map.sh      # compare.sh's header says how to run it smaller
. tests/experiments/compare.sh

early() {  # then a second round, new tasks, a new critic
  at_early
  methods; policy untrained@0.1; policy none@0.1
  play test-base $B $tests
  local new="--n $((N * 3 / 8)) --seed $((1000 + s))"
  for m in rft mtdpo; do
    B=$S/early/$m
    collect round2-$m 0 $new; $m; try $m
  done
  B=$S/early/eq3@0.1
  collect round2-eq3@0.1 1 $new; policy eq3@0.1
}
long() { at_long; methods; play test-base $B $tests; }
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

tests tests-long --min_slots 4 --max_slots 5
lanes "$SEEDS" "early long noise others"
for r in plain plain150 plain50 early long noise; do
  table $(rows $r "$SEEDS" eq3@0.1 rft mtdpo paper@0)
done
table $(rows early "$SEEDS" eq3@0.1 untrained@0.1 none@0.1)
table $(for m in eq3@0.1 rft mtdpo; do row round2-$m round2-$m/test-$m "$SEEDS"; done)
others_tables "$SEEDS"
