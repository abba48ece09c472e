#!/usr/bin/env bash
# The quickstart with five seeds, one table of all, and their row of the leaderboard: 20 to 40
# minutes on two cores. The test tasks are the same for all seeds. Episodes and models go to
# runs/seed*/.
#
#   bash tests/experiments/seeds.sh
#   SEEDS="0 1" N=40 DEMOS=2000 bash tests/experiments/seeds.sh   # a rehearsal
set -euo pipefail
SEEDS=${SEEDS:-0 1 2 3 4}
for s in $SEEDS; do
    SEED=$s R=runs/seed$s bash tests/quickstart.sh
done
. .venv/bin/activate
row() { echo $1=$(printf "runs/seed%s/test-$1.jsonl\n" $SEEDS | paste -sd,); }
python evaluate.py $(for m in base rft sweet sweet2; do row $m; done) > runs/seeds.jsonl
echo "the leaderboard's row (RESULTS.md):"
python tests/experiments/leaderboard.py < runs/seeds.jsonl
