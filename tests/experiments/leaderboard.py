"""Prints the row of the leaderboard (RESULTS.md) for the results of seeds.sh.

    python tests/experiments/leaderboard.py < runs/seeds.jsonl

The last column, what changed, is yours to write. If a system lacks seeds, tasks or episodes, as in
a rehearsal, that column says so instead. A commit that ends in "-dirty" had uncommitted changes
when seeds.sh evaluated it: commit them and run seeds.sh again.
"""
import datetime
import json
import os
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", ".."))
from utils import fail, parser, run  # noqa: E402

SYSTEMS = "sweet2", "sweet", "rft", "base"  # in the row's order
FULL_SIZE = "5 seeds, 400 tasks, 2000 episodes"


def cell(result):
    """Returns the success with its interval, such as "86.8 [85.0, 88.2]"."""
    low, high = result["success_95"]
    return f"{100 * result['success']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def main(args):
    results = {r["system"]: r for r in map(json.loads, sys.stdin)}
    missing = [name for name in SYSTEMS if name not in results]
    if missing:
        fail(f"stdin has no results of {', '.join(missing)}; it must be what seeds.sh writes")
    commit = results["sweet"]["version"].split(",")[0]
    git = subprocess.run(["git", "config", "user.name"], capture_output=True, text=True)
    name = git.stdout.strip() or "your name"
    sizes = {f"{len(r['files'])} seeds, {r['tasks']} tasks, {r['episodes']} episodes"
             for r in results.values()}
    changed = "what you changed"
    if sizes != {FULL_SIZE}:
        changed = f"NO ROW: {' or '.join(sorted(sizes))} instead of {FULL_SIZE}"
    cells = [*(cell(results[system]) for system in SYSTEMS), commit,
             str(datetime.date.today()), name, changed]
    print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    run(main, parser(__doc__, "%(prog)s < runs/seeds.jsonl").parse_args())
