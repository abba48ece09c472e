#!/usr/bin/env bash
# Is a trained critic ever behind its untrained self? RESULTS.md, "A critic that never loses".
#
#   bash tests/experiments/critics.sh plain early long     # bases of the toy, five seeds
#
# ROWS names others of common.sh's rows; compare.sh's header says how to run it smaller. Of the real
# model: ROWS="untrained@0.1 better@0.1" bash tests/experiments/real_model.sh
. tests/experiments/compare.sh
ROWS=${ROWS:-untrained@0.1 untrained@0.3 untrained@1 trained@0.1 trained@0.3 eq3@0.1 eq3@0.3
    better@0.1 better@0.3 better@1 again-untrained@0.3 again-better@0.3}
FIRST=untrained@0.3

rows_of() {  # the part's
  at_$base
  for row in $ROWS; do policy $row; done
}
tests tests
tests tests-long --min_slots 4 --max_slots 5
for base in "$@"; do
  lanes "$SEEDS" rows_of
  table $(rows $base "$SEEDS" $ROWS)
done
