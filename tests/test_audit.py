"""audit.py: it finds the faults that were injected into dialogues, and accuses no clean reply.

dialogues/*.txt are hand-made, on tasks in the style of ColBench: after "! " are the faults of the
replies above, with "judge" if audit.py's docstring leaves them to the judge. The rules were
developed on development.txt; held_out.txt was written before them, and measured once (RESULTS.md).
"""
import random
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from conftest import ROOT, complaint, demos, lines, records, script, succeed
from test_collect_endpoints import Server

sys.path.append(f"{ROOT}/tests/experiments")
from audit import KINDS, Reference, faults  # noqa: E402
from colbench import redact  # noqa: E402
from toy import WORLDS, slots_of  # noqa: E402

AUDIT = "tests/experiments/audit.py"


def handmade(name):
    """Yields (task, dialogue, its faults) of a file."""
    text = Path(f"{ROOT}/tests/dialogues/{name}.txt").read_text()
    for number, part in enumerate(text.split("===\n")[1:]):
        description, code, dialogues = part.split("---\n")
        task = {"id": f"{name}{number}", "kind": "backend", "ground_truth": code.strip(),
                "problem_description": description.strip()}
        for lines_of in dialogues.strip().split("\n\n"):
            history, labels = [{"role": "user", "content": description}], []
            for line in lines_of.split("\n"):
                if line.startswith("! "):
                    labels = line[2:].split()
                else:
                    role, _, content = line.partition(":")
                    role = {"agent": "assistant", "human": "user"}[role]
                    history.append({"role": role, "content": content.strip()})
            yield task, history, labels


def toys(world, n):
    """Yields the toy's demonstrations, each with a fault of every kind in one of its replies."""
    draw = random.Random(0)
    for record in demos(n, world=world, hidden=0):
        task, history = record["task"], record["dialogue_history"]
        slots, details = slots_of(task["ground_truth"]), WORLDS[world].details
        yield task, history, []
        answers = [i for i in range(2, len(history), 2) if re.search(r"\d", history[i]["content"])]
        if not answers:
            continue
        i = draw.choice(answers)
        before, reply = history[:i], history[i]["content"]
        said = " ".join(m["content"] for m in history[1:i + 1])
        hidden = [slot for slot, value in slots.items() if value.isdigit() and value not in said
                  and not re.search(details[slot].pattern, said)]
        code = task["ground_truth"]
        injected = [(re.sub(r"\d+", lambda m: str(int(m[0]) + 100), reply), "contradicted"),
                    (f"{reply} {code.split(':', 1)[1]}", "quoted"), ("", "broke_off"),
                    ("I'm sorry, but I can't help with that.", "broke_off"),
                    (redact(f"{reply} {code}", task), "redacted")]
        for slot in hidden[:1]:
            extra = draw.choice(details[slot].replies).format(n=slots[slot], unit="unit")
            injected.append((f"{reply} {extra}", "told"))
        for text, kind in injected:
            yield task, [*before, {"role": "user", "content": text}], [kind]


def measure(dialogues):
    """Returns {kind: (faults, of them found, all that was found)}."""
    true, right, found = Counter(), Counter(), Counter()
    for task, history, labels in dialogues:
        reference, got = Reference(task["ground_truth"]), set()
        for i, m in enumerate(history):
            if i and m["role"] == "user":
                got |= {*faults(task, history[:i], m["content"], reference)}
        if "judge" not in labels:
            true.update(labels)
            found.update(got)
            right.update(got & {*labels})
            if got != {*labels}:
                print([m["content"] for m in history[1:]], labels, got)
    return {kind: (true[kind], right[kind], found[kind]) for kind in KINDS}


@pytest.mark.parametrize("dialogues", [toys("slots", 100), toys("english", 100),
                                       handmade("development")],
                         ids=["slots", "english", "development"])
def test_recall_and_precision(dialogues):
    for kind, (true, right, found) in measure(dialogues).items():
        assert true and right >= 0.9 * true and right >= 0.9 * found, (kind, true, right, found)
