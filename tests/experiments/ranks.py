"""Measures how often critics rank two candidates of a turn correctly, on tasks of toy.py's english.

    python tests/experiments/ranks.py runs/real1/scored-*.jsonl

A question is useful if it asks for a slot of the function that the human has not revealed yet.
"""
import os
import sys
from collections import defaultdict

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
from toy import WORLDS, asked_for, slots_of
from colbench import Grader, agent_messages, read_action, read_records
from utils import progress

WORLD = WORLDS["english"]
PAIRS = {  # name: (whether slots are unknown, the better kind of candidate, the worse one)
    "all slots known: right answer over question": (False, "right", "useless"),
    "all slots known: right answer over wrong one": (False, "right", "wrong"),
    "some slots unknown: useful question over wrong answer": (True, "useful", "wrong"),
    "some slots unknown: useful question over useless one": (True, "useful", "useless")}


def task_kind(candidate, task, asked, grader):
    """Returns "right" or "wrong" for an answer, "useful" or "useless" for a question."""
    content, answer = read_action(candidate["output"], last=False)
    if answer is None:
        useful = asked_for(WORLD, content) in slots_of(task["ground_truth"]).keys() - asked
        return "useful" if useful else "useless"
    return "right" if grader.grade(task, answer)["reward"] >= 1 else "wrong"


def count(records, grader):
    """Returns {name in PAIRS: [number of pairs ranked correctly, number of pairs]}."""
    counts = {name: [0, 0] for name in PAIRS}
    for r in records:
        asked = set()  # slots that the agent has asked for
        for m in agent_messages(r):
            by_kind = defaultdict(list)
            for c in m.get("candidates", ()):
                if "advantage" in c:
                    by_kind[task_kind(c, r["task"], asked, grader)].append(c["advantage"])
            any_unknown = not slots_of(r["task"]["ground_truth"]).keys() <= asked
            for name, (unknown, better, worse) in PAIRS.items():
                if unknown == any_unknown:
                    pairs = [a > b for a in by_kind[better] for b in by_kind[worse]]
                    counts[name][0] += sum(pairs)
                    counts[name][1] += len(pairs)
            asked.add(asked_for(WORLD, m["content"]))
    return counts


def main(paths):
    rows = {}
    with Grader() as grader:
        for path in progress("files", paths, len(paths)):
            with open(path) as f:
                rows[path] = count(read_records(f, source=path), grader)
    for name in PAIRS:
        print(name)
        for path, counts in rows.items():
            right, n = counts[name]
            print(f"  {100 * right / max(1, n):5.1f} % of {n:,}  {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
