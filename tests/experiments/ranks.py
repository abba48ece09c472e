"""What critics rank right on the functions of toy.py: the share of a turn's pairs of candidates.

    python tests/experiments/ranks.py runs/real1/scored-*.jsonl

A question is useful if it asks for a detail of the function that the human has not told yet. It
is a repeated one if the dialogue has it already. An answer is lucky if it is right although details
are open: the agent can't have known. Files joined by commas are one row. "prior" ranks
by the candidates' log-probs when they were sampled, without a critic; "with prior" as
train_policy.py --logprob_weight 0.1 does.
"""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
from toy import WORLDS, asked_for, slots_of
from colbench import Grader, read_action
from utils import progress, read_jsonl

WORLD = WORLDS["english"]
PAIRS = {  # name: (the better kind of candidate, the worse one)
    "all told: right answer over question": ("right", "useless"),
    "all told: right answer over wrong one": ("right", "wrong"),
    "details open: useful question over wrong answer": ("useful", "wrong"),
    "details open: useful question over useless one": ("useful", "useless"),
    "details open: useful question over repeated one": ("useful", "repeated"),
    "details open: useful question over lucky answer": ("useful", "right")}


def kinds_of(candidate, task, told, grader, graded):
    """right or wrong, of an answer; useful or useless, of a question, which may be repeated."""
    content, answer = read_action(candidate["output"], last=False)
    if answer is None:
        slot = asked_for(WORLD, content)
        if slot in slots_of(task["ground_truth"]).keys() - told:
            return ["useful"]
        return ["useless", "repeated"] if slot in told else ["useless"]
    if (task["id"], answer) not in graded:
        graded[task["id"], answer] = grader.grade(task, answer)["reward"] >= 1
    return ["right" if graded[task["id"], answer] else "wrong"]


def count(records, grader, graded, value):
    """{name of PAIRS: [pairs ranked right, pairs]}; value(candidate): what ranks it."""
    found = {name: [0, 0] for name in PAIRS}
    for r in records:
        told = set()
        for m in r["dialogue_history"]:
            by_kind = {kind: [] for pair in PAIRS.values() for kind in pair}
            for c in m.get("candidates", ()):
                if "advantage" in c:
                    for kind in kinds_of(c, r["task"], told, grader, graded):
                        by_kind[kind].append(value(c))
            open_slots = slots_of(r["task"]["ground_truth"]).keys() - told
            state = "details open" if open_slots else "all told"
            for name, (better, worse) in PAIRS.items():
                if name.startswith(state):
                    pairs = [a > b for a in by_kind[better] for b in by_kind[worse]]
                    found[name][0] += sum(pairs)
                    found[name][1] += len(pairs)
            if m["role"] == "assistant":
                told.add(asked_for(WORLD, m["content"]))
    return found


def main(paths):
    graded = {}
    with Grader(workers=os.cpu_count()) as grader:
        rows = {}
        for path in progress("files", paths, len(paths)):
            records = []
            for name in path.split(","):
                with open(name) as f:
                    records += read_jsonl(f, (), name)
            rows[path + " with prior"] = count(
                records, grader, graded, lambda c: c["advantage"] + 0.1 * c["logprob"])
            rows[path] = count(records, grader, graded, lambda c: c["advantage"])
            rows["prior"] = count(records, grader, graded, lambda c: c["logprob"])
    for name in PAIRS:
        print(name)
        for path, found in rows.items():
            right, n = found[name]
            print(f"  {100 * right / max(1, n):5.1f} % of {n:,}  {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
