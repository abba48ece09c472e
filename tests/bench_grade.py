"""How fast the grader is, beside a naive exec in this process and a fresh interpreter per answer.

    python tests/bench_grade.py [--repeats 9] [--tasks 40]

All three grade the same answers (each task's reference), ten tests each, on one core, in turn; the
figures are medians. Run it where the machine is quiet.
"""
import json
import os
import statistics
import subprocess
import sys
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from colbench import Grader  # noqa: E402
import toy  # noqa: E402
from timing import in_turn, parser, ratio  # noqa: E402

TASKS = Path(__file__).resolve().parents[2] / "shared" / "colbench" / "backend_tasks.jsonl"
ONE = """import json, sys
code, tests = json.load(sys.stdin)
for test in tests:
    space = {}
    exec(code, space)
    print(repr(eval(test, space)))
"""


def naive(task, answer):
    """The released scorer's way: reference and answer run here, with nothing in between."""
    passed = 0
    for test in task["test_cases"].values():
        ours, theirs = {}, {}
        exec(task["ground_truth"], ours)
        exec(answer, theirs)
        passed += eval(test, ours) == eval(test, theirs)
    return passed / len(task["test_cases"])


def fresh(task, answer):
    """A new interpreter for each answer, without any confinement."""
    subprocess.run([sys.executable, "-I", "-c", ONE], text=True, capture_output=True,
                   input=json.dumps([answer, list(task["test_cases"].values())]))


def main():
    p = parser(__doc__, repeats=9)
    p.add_argument("--tasks", type=int, default=40, help="answers that each grades in a repeat")
    args = p.parse_args()
    os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])  # children inherit it
    if TASKS.exists():
        tasks = [json.loads(line) for line in TASKS.open()]
    else:  # the toy's
        tasks = [*islice(toy.tasks("train", toy.get_args(["tasks"])), args.tasks)]
    with Grader(workers=1) as grader:
        tasks = [t for t in tasks[:3 * args.tasks]
                 if grader.grade(t, t["ground_truth"])["reward"] == 1]  # and its value is cached
        tasks = (tasks * args.tasks)[:args.tasks]
        ways = {"grader": grader.grade, "naive": naive, "fresh interpreter": fresh}
        seconds, _ = in_turn({name: lambda way=way: [way(t, t["ground_truth"]) for t in tasks]
                              for name, way in ways.items()}, args.repeats)
    print(f"{'real' if TASKS.exists() else 'toy'} tasks, one core, answers a second:")
    for name, times in seconds.items():
        speedup, _, _ = ratio(times, seconds["grader"])
        print(f"  {name:18} {len(tasks) / statistics.median(times):8.0f}   "
              f"grader is {speedup:5.2f} of it")


if __name__ == "__main__":
    main()
