#!/usr/bin/env bash
# Tests the ranking of the methods with other bases, horizons and reward noise, and compare.sh's
# ablations on all seeds. Run it after compare.sh; 90 minutes on two cores.
#
#   bash tests/experiments/map.sh      # compare.sh's first lines say how to run less, and where to
. tests/experiments/compare.sh

early() {  # two rounds, the second one with new tasks and a new critic
  setup_early
  methods; sweet_row untrained@0.1; sweet_row none@0.1
  run_episodes test-base $base $tests
  local new="--n $((N * 3 / 8)) --seed $((1000 + seed))"
  for m in rft mtdpo; do
    base=$seed_dir/early/$m
    collect round2-$m 0 $new; train_$m; test_policies $m
  done
  base=$seed_dir/early/eq3@0.1
  collect round2-eq3@0.1 1 $new; sweet_row eq3@0.1
}
long() { setup_long; methods; run_episodes test-base $base $tests; }
noise() {  # three in ten episodes get reward 0
  setup_plain
  dir=$seed_dir/noise; mkdir -p $dir
  python -c 'import json, random, sys
r = random.Random(0)
for line in sys.stdin:
    record = json.loads(line)
    record["reward"] *= r.random() > 0.3
    print(json.dumps(record))' < $seed_dir/plain/train.jsonl > $dir/train.jsonl
  methods
}

make_tests tests-long --min_slots 4 --max_slots 5
run_in_parallel "$SEEDS" "early long noise ablations"
for part in plain plain150 plain50 early long noise; do
  table $(rows $part "$SEEDS" eq3@0.1 rft mtdpo paper@0)
done
table $(rows early "$SEEDS" eq3@0.1 untrained@0.1 none@0.1)
table $(for m in eq3@0.1 rft mtdpo; do row round2-$m round2-$m/test-$m "$SEEDS"; done)
ablation_tables "$SEEDS"
