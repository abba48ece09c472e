"""How fast the grader is, beside a naive exec in this process and a fresh interpreter per answer.

    python tests/bench_grade.py [--rounds 9] [--tasks 40]

All three grade the same answers (each task's reference), ten tests each, on one core, round after
round in turn; the figures are medians over the rounds. Run it where the machine is quiet.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from colbench import Grader  # noqa: E402

TASKS = Path(__file__).resolve().parents[2] / "shared" / "colbench" / "backend_tasks.jsonl"
ONE = """import json, sys
code, tests = json.load(sys.stdin)
for test in tests:
    space = {}
    exec(code, space)
    print(repr(eval(test, space)))
"""


def few():
    """Stand-ins, where the real tasks are not beside this checkout."""
    for i in range(10):
        code = (f"def f(xs, k={i}):\n    best = 0\n    for x in xs:\n"
                "        best = max(best + x, x, k)\n    return best")
        tests = {f"test{j}": f"f(range({j}, 60))" for j in range(10)}
        yield {"ground_truth": code, "test_cases": tests}


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
    request = json.dumps([answer, list(task["test_cases"].values())])
    command = [sys.executable, "-I", "-c", ONE]
    subprocess.run(command, input=request, text=True, capture_output=True)


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--tasks", type=int, default=40,
                   help="answers a round (a tenth of it for fresh interpreters)")
    args = p.parse_args()
    os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])  # children inherit it
    tasks = [json.loads(line) for line in TASKS.open()] if TASKS.exists() else list(few())
    with Grader(workers=1) as grader:
        tasks = [t for t in tasks[:3 * args.tasks]
                 if grader.grade(t, t["ground_truth"])["reward"] == 1]  # and its value is cached
        tasks = (tasks * args.tasks)[:args.tasks]
        ways = {"naive": (naive, tasks), "grader": (grader.grade, tasks),
                "fresh interpreter": (fresh, tasks[:max(1, args.tasks // 10)])}
        rates = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, (way, some) in ways.items():
                start = time.perf_counter()
                for task in some:
                    way(task, task["ground_truth"])
                rates[name].append(len(some) / (time.perf_counter() - start))
        which = "real tasks" if TASKS.exists() else "stand-in tasks"
        print(f"{which}, one core, answers a second:")
    for name, rate in rates.items():
        ratio = statistics.median(g / r for g, r in zip(rates["grader"], rate))
        print(f"  {name:18} {statistics.median(rate):8.0f}   grader is {ratio:5.2f} of it")


if __name__ == "__main__":
    main()
