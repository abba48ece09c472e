#!/usr/bin/env bash
# Is a trained critic ever worse than the untrained one? (RESULTS.md, "A critic that never loses")
#
#   bash tests/experiments/critics.sh plain early long     # three bases of the toy, five seeds
#
# Each argument is a setup of compare.sh, whose first lines say how to run less, and where the files
# go. ROWS selects rows (see common.sh). For the real model instead:
#   ROWS="untrained@0.1 better@0.1" bash tests/experiments/real_model.sh
. tests/experiments/compare.sh
ROWS=${ROWS:-untrained@0.1 untrained@0.3 untrained@1 trained@0.1 trained@0.3 eq3@0.1 eq3@0.3
    better@0.1 better@0.3 better@1 again-untrained@0.3 again-better@0.3}
FIRST=untrained@0.3

all_rows() { setup_$setup; for row in $ROWS; do sweet_row $row; done; }
make_tests tests
make_tests tests-long --min_slots 4 --max_slots 5
for setup in "$@"; do
  run_in_parallel "$SEEDS" all_rows
  table $(rows $setup "$SEEDS" $ROWS)
done
