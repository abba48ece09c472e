"""What critics rank right on the functions of toy.py: the share of a turn's pairs of candidates.

    python tests/experiments/ranks.py runs/real1/scored-*.jsonl

A question is useful if it asks for a detail of the function that the human has not told yet.
"""
import os
import sys
from collections import defaultdict

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
from toy import WORLDS, asked_for, slots_of
from colbench import Grader, agent_messages, read_action
from utils import progress, read_jsonl

WORLD = WORLDS["english"]
PAIRS = {  # name: (are details open, the better kind of candidate, the worse one)
    "all told: right answer over question": (False, "right", "useless"),
    "all told: right answer over wrong one": (False, "right", "wrong"),
    "details open: useful question over wrong answer": (True, "useful", "wrong"),
    "details open: useful question over useless one": (True, "useful", "useless")}


def kind_of(candidate, task, told, grader):
    """right or wrong, of an answer; useful or useless, of a question."""
    content, answer = read_action(candidate["output"], last=False)
    if answer is None:
        useful = asked_for(WORLD, content) in slots_of(task["ground_truth"]).keys() - told
        return "useful" if useful else "useless"
    return "right" if grader.grade(task, answer)["reward"] >= 1 else "wrong"


def count(records, grader):
    """{name of PAIRS: [pairs ranked right, pairs]}"""
    found = {name: [0, 0] for name in PAIRS}
    for r in records:
        told = set()
        for m in agent_messages(r):
            by_kind = defaultdict(list)
            for c in m.get("candidates", ()):
                if "advantage" in c:
                    by_kind[kind_of(c, r["task"], told, grader)].append(c["advantage"])
            details_open = not slots_of(r["task"]["ground_truth"]).keys() <= told
            for name, (state, better, worse) in PAIRS.items():
                if state == details_open:
                    pairs = [a > b for a in by_kind[better] for b in by_kind[worse]]
                    found[name][0] += sum(pairs)
                    found[name][1] += len(pairs)
            told.add(asked_for(WORLD, m["content"]))
    return found


def main(paths):
    rows = {}
    with Grader() as grader:
        for path in progress("files", paths, len(paths)):
            with open(path) as f:
                rows[path] = count(read_jsonl(f, (), path), grader)
    for name in PAIRS:
        print(name)
        for path, found in rows.items():
            right, n = found[name]
            print(f"  {100 * right / max(1, n):5.1f} % of {n:,}  {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
