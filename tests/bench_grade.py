"""Measures the grader's speed against exec in this process and a new interpreter per answer.

    python tests/bench_grade.py [--repeats 9] [--tasks 40]

All three grade the same answers, which are the tasks' references with ten tests each, alternately
on one core. Prints medians, in answers per second. Run it on a quiet machine.
"""
import json
import os
import statistics
import subprocess
import sys
from contextlib import closing
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from colbench import Grader  # noqa: E402
import toy  # noqa: E402
from timing import parser, ratio, time_alternately  # noqa: E402

TASKS = Path(__file__).resolve().parents[2] / "shared" / "colbench" / "backend_tasks.jsonl"
PROGRAM = """import json, sys
code, tests = json.load(sys.stdin)
for test in tests:
    space = {}
    exec(code, space)
    print(repr(eval(test, space)))
"""


def naive(task, answer):
    """Grades like the released scorer: executes reference and answer in this process."""
    passed = 0
    for test in task["test_cases"].values():
        expected, actual = {}, {}  # namespaces
        exec(task["ground_truth"], expected)
        exec(answer, actual)
        passed += eval(test, expected) == eval(test, actual)
    return passed / len(task["test_cases"])


def fresh(task, answer):
    """Runs the tests in a new interpreter, without any confinement."""
    subprocess.run([sys.executable, "-I", "-c", PROGRAM], text=True, capture_output=True,
                   input=json.dumps([answer, list(task["test_cases"].values())]))


def main():
    p = parser(__doc__, repeats=9)
    p.add_argument("--tasks", type=int, default=40, help="number of answers per repeat")
    args = p.parse_args()
    os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])  # one core, also for children
    if TASKS.exists():
        tasks = [json.loads(line) for line in TASKS.open()]
    else:  # the toy's
        tasks = [*islice(toy.tasks("train", toy.get_args(["tasks"])), args.tasks)]
    with closing(Grader(workers=1)) as grader:
        tasks = [t for t in tasks[:3 * args.tasks]
                 if grader.grade(t, t["ground_truth"])["reward"] == 1]  # and caches its values
        tasks = (tasks * args.tasks)[:args.tasks]
        graders = {"grader": grader.grade, "naive": naive, "fresh interpreter": fresh}
        seconds, _ = time_alternately({
            name: lambda grade=grade: [grade(t, t["ground_truth"]) for t in tasks]
            for name, grade in graders.items()}, args.repeats)
    print(f"{'real' if TASKS.exists() else 'toy'} tasks, one core, answers per second:")
    for name, times in seconds.items():
        speedup, _, _ = ratio(times, seconds["grader"])
        print(f"  {name:18} {len(tasks) / statistics.median(times):8.0f}   "
              f"the grader is {speedup:5.2f} times as fast")


if __name__ == "__main__":
    main()
