"""audit.py: it finds the faults that were put into dialogues, and accuses no clean reply.

dialogues.txt has 40, written by hand on tasks in the style of ColBench's. A task has its
description, its reference and its dialogues; a line "! " has the faults of the replies above it.
"""
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from conftest import ROOT, demos, dialogue, records, succeed
from experiments.audit import KINDS, faults
from collect import redact

AUDIT = "tests/experiments/audit.py"


def handmade():
    """Yields (task, dialogue, its faults) of the file."""
    for part in Path(f"{ROOT}/tests/dialogues.txt").read_text().split("===\n")[1:]:
        description, code, dialogues = (x.strip() for x in part.split("---\n"))
        task = {"kind": "backend", "problem_description": description, "ground_truth": code}
        for text in dialogues.split("\n\n"):
            faulty = re.search("^! (.*)", text, re.M)
            said = re.findall("^(?:agent|human):(.*)", text, re.M)
            history = dialogue(description, *map(str.strip, said))
            yield task, history, faulty[1].split() if faulty else []


def toys(world):
    """Yields demonstrations, and copies that end with a fault of each kind."""
    draw = random.Random(0)
    for record in demos(60, world=world, hidden=0):
        task, history = record["task"], record["dialogue_history"]
        yield task, history, []
        answers = [i for i in range(2, len(history), 2) if re.search(r"\d", history[i]["content"])]
        if not answers:
            continue
        i, code = draw.choice(answers), task["ground_truth"]
        text, before = history[i]["content"], [m["content"] for m in history[:i]]
        for faulty, kind in (("", "broke_off"), ("I can't help.", "broke_off"),
                             (f"You: {text}\nAssistant: and?", "both_sides"),
                             (f"{text} {code.split(':', 1)[1]}", "quoted"),
                             (redact(f"{text} {code}", task), "redacted")):
            yield task, dialogue(*before, faulty), [kind]


@pytest.mark.parametrize("dialogues, n", [(toys("slots"), 250), (toys("english"), 250),
                                          (handmade(), 24)], ids="slots english handmade".split())
def test_recall_and_precision(dialogues, n):
    true, right, found = Counter(), Counter(), Counter()
    for task, history, labels in dialogues:
        got = set()
        for i in range(2, len(history), 2):
            got |= {*faults(task, history[:i], history[i]["content"])}
        true.update(labels)
        found.update(got)
        right.update(got & {*labels})
        if got != {*labels}:
            print([m["content"] for m in history[1:]], labels, got)
    assert sum(true.values()) >= n
    for kind in KINDS:
        assert right[kind] >= 0.85 * true[kind] and right[kind] >= 0.9 * found[kind], kind


BOOK = {"kind": "backend", "problem_description": "write due(kind, days, members)",
        "ground_truth": """def due(kind, days, members):
    rates = {'e-book': 0.25, 'hard-cover': 0.125, 'DVD (used)': 40}
    people = len(members)
    if kind == 'e-book' and days < 21:
        return 0
    elif people > 8 or "staff" in members:
        return days * rates[kind] - people * 70
    return days * rates[kind] + 350"""}


@pytest.mark.parametrize("asked, text, kinds", [
    ("when is it free?", "if days < 21, I think", ["quoted"]),
    ("when is it free?", 'if kind == "e-book"', ["quoted"]),   # in other quotation marks
    ("how do I get the rate?", "by rates[kind], of course", ["quoted"]),
    ("is it days < 21?", "yes, days < 21", []),
    ("when is it free?", "an e-book is, below 21 days", []),
    ("which kinds are there?", "e-book, hard-cover, DVD (used)", []),
    ("which members pay less?", "staff in members", []),
    ("which members pay less?", "more than 8 people, and the", ["broke_off"]),
    ("when is it free?", "h" * 400, ["broke_off"]),
    ("when is it free?", "As an AI, I can’t share that", ["broke_off"]),
    ("when is it free?", "**You:** below 21", ["both_sides"])])
def test_single_replies(asked, text, kinds):
    assert faults(BOOK, dialogue(BOOK["problem_description"], asked), text) == kinds


def test_a_page_is_not_quoted():
    page = {"kind": "frontend", "problem_description": "a page", "ground_truth": "<html>Hi</html>"}
    assert not faults(page, dialogue("a page", "<html></html>"), "Make it 300 pixels wide.")


def episode(sample, *replies, reward=1.0, **meta):
    """An episode of the toy whose agent asks for the rate, then the fee."""
    task = {"id": "pay", "kind": "backend", "problem_description": "write pay(x)",
            "ground_truth": "def pay(x, rate=4, fee=13): return x * rate + fee"}
    asked = [x for pair in zip(("what is the rate?", "what is the fee?"), replies) for x in pair]
    return {"task": task, "sample": sample, "reward": reward, "dialogue_history": dialogue(
        "write pay(x)", *asked, "I WANT TO ANSWER: 1"), "meta": {"human": "h.py 1f", **meta}}


def test_the_figures_are_shares_of_episodes():
    """A system is named by what played its agent: the served model, the file, or --model."""
    given = [episode(0, "rate=4", "fee=13", model="m", agent=None),
             episode(1, "x * rate + fee", "fee=13", model="m", agent=None),
             episode(2, "rate=5", "", reward=0.5, model="m"),
             episode(3, "rate=4 [...]", "fee=13", model="m"),
             episode(4, "rate=4", model=None, agent="my.py 1f"),
             episode(5, "rate=4", model=None, agent="http://x/v1", agent_model="gpt")]
    rows = records(succeed(AUDIT, stdin=given).stdout)
    assert rows[0] == {
        "system": "m with h.py", "episodes": 4, "quoted": 25.0, "broke_off": 25.0,
        "both_sides": 0.0, "redacted": 25.0, "success": 75.0, "tainted": 33.3}
    assert [row["system"] for row in rows[1:]] == ["my.py with h.py", "gpt with h.py"]
    listed = records(succeed(AUDIT, "--faults", 1, stdin=given).stdout)
    assert [(x["faults"], x["reply"]) for x in listed] == [
        (["quoted"], "x * rate + fee"), (["broke_off"], ""), (["redacted"], "rate=4 [...]")]
