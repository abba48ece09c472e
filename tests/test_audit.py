"""audit.py: it finds the faults that were put into dialogues, and accuses no clean reply.

dialogues/*.txt are hand-made, on tasks in the style of ColBench's. A line "! " has the faults of
the replies above it, with "judge" if audit.py's docstring leaves them to the judge. The rules were
developed on development.txt. held_out.txt was written after them, and measured once (RESULTS.md).
"""
import random
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from conftest import ROOT, demos, dialogue, records, succeed
from test_collect_endpoints import Server

sys.path.append(f"{ROOT}/tests/experiments")
from audit import KINDS, faults  # noqa: E402
from colbench import redact  # noqa: E402
from toy import reply, slots_of  # noqa: E402

AUDIT = "tests/experiments/audit.py"


def handmade(name):
    """Yields (task, dialogue, its faults) of a file."""
    for part in Path(f"{ROOT}/tests/dialogues/{name}.txt").read_text().split("===\n")[1:]:
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
        said = " ".join(before[1:])
        other = [f"{slot}={n}" for slot, n in slots_of(code).items() if slot not in said]
        wrong = re.sub(r"\d+", lambda m: str(int(m[0]) + 100), text)
        told = [(f"{text} {x}", "told") for x in other[:1] if world == "slots"]
        for faulty, kind in (*told, (wrong, "contradicted"), ("", "broke_off"),
                             ("I can't help.", "broke_off"),
                             (f"{text} {code.split(':', 1)[1]}", "quoted"),
                             (redact(f"{text} {code}", task), "redacted")):
            yield task, dialogue(*before, faulty), [kind]


@pytest.mark.parametrize("dialogues, least", [
    (toys("slots"), 1), (toys("english"), 1), (handmade("development"), 0.8),
    (handmade("held_out"), 0.9)], ids="slots english development held_out".split())
def test_recall_and_precision(dialogues, least):
    true, right, found = Counter(), Counter(), Counter()
    for task, history, labels in dialogues:
        got = set()
        for i in range(2, len(history), 2):
            got |= {*faults(task, history[:i], history[i]["content"])}
        if "judge" not in labels:
            true.update(labels)
            found.update(got)
            right.update(got & {*labels})
            if got != {*labels}:
                print([m["content"] for m in history[1:]], labels, got)
    assert sum(true.values()) >= 50
    for kind in KINDS:
        assert right[kind] >= least * true[kind], f"{kind}: recall"
        assert right[kind] >= 0.9 * found[kind], f"{kind}: precision"


TASK = {"kind": "backend", "problem_description": "write pay(x, hours, trips)",
        "ground_truth": """def pay(x, hours, trips):
    if hours < 6:
        x += 20
    return x * 0.85 + trips * 3"""}


@pytest.mark.parametrize("asked, text, kinds", [
    ("which hours?", "up to 5", []),              # which is < 6
    ("which hours?", "over 5", ["contradicted"]),
    ("is it below 7 hours?", "not 7, below 6", []),
    ("what is x times?", "15 percent less", []),
    ("is it x * 0.85?", "yes, x * 0.85", []),
    ("what is x times?", "x * 0.85", ["quoted"]),
    ("which hours?", "below 6, and trips are 3 each", ["told"]),
    ("which hours and trips?", "below 6, and trips are 3 each", []),
    ("which hours?", "below 6, for example 4", []),
    ("which hours?", "below 6 and the", ["broke_off"]),
    ("which hours?", "h" * 400, ["broke_off"])])
def test_single_replies(asked, text, kinds):
    assert faults(TASK, dialogue("write pay", asked), text) == kinds


def test_numbers_about_a_page_are_not_new():
    page = {"kind": "frontend", "problem_description": "a page", "ground_truth": "<html>Hi</html>"}
    assert not faults(page, dialogue("a page", "<html></html>"), "Make it 300 pixels wide.")


def episode(sample, *replies, reward=1.0):
    """An episode of the toy whose agent asks for the rate, then the fee."""
    task = {"id": "pay", "kind": "backend", "problem_description": "write pay(x)",
            "ground_truth": "def pay(x, rate=4, fee=13): return x * rate + fee"}
    asked = [x for pair in zip(("what is the rate?", "what is the fee?"), replies) for x in pair]
    return {"task": task, "sample": sample, "reward": reward, "dialogue_history": dialogue(
        "write pay(x)", *asked, "I WANT TO ANSWER: 1"), "meta": {"model": "m", "human": "h.py 1f"}}


def test_the_figures_are_shares_of_episodes():
    given = [episode(0, "rate=4", "fee=13"), episode(1, "rate=4 fee=13", "fee=13"),
             episode(2, "rate=5", "", reward=0.5), episode(3, "rate=4 [...]", "fee=13")]
    done = succeed(AUDIT, stdin=given)
    assert records(done.stdout) == [{
        "system": "m with h.py", "episodes": 4, "quoted": 0.0, "told": 25.0, "contradicted": 25.0,
        "broke_off": 25.0, "redacted": 25.0, "success": 75.0, "tainted": 33.3}]
    listed = records(succeed(AUDIT, "--faults", 1, stdin=given).stdout)
    assert [(x["faults"], x["reply"]) for x in listed] == [
        (["told"], "rate=4 fee=13"), (["contradicted"], "rate=5"), (["broke_off"], ""),
        (["redacted"], "rate=4 [...]")]


def test_a_system_is_named_by_what_played_its_agent():
    """The served model, else the file of --agent, else --model."""
    metas = [{"model": "m", "agent": None}, {"model": None, "agent": "my.py 1f"},
             {"model": None, "agent": "http://x/v1", "agent_model": "gpt"}]
    given = [{**episode(0), "meta": {**meta, "human": "h.py 1f"}} for meta in metas]
    named = [r["system"] for r in records(succeed(AUDIT, stdin=given).stdout)]
    assert named == ["m with h.py", "my.py with h.py", "gpt with h.py"]


def test_a_judge_reads_the_reference_and_the_reply():
    def answer(path, body):
        prompt = body["messages"][0]["content"]
        assert "def pay" in prompt and "user: rate=4" in prompt or "you judge:\nrate" in prompt
        word = "leaked" if "you judge:\nfee=13 fine" in prompt else "fine"
        return {"choices": [{"message": {"content": word}, "finish_reason": "stop"}]}

    with Server(answer) as server:
        given = [episode(0, "rate=4", "fee=13 fine"), episode(1, "rate=4", "fee=13")]
        row, = records(succeed(AUDIT, "--judge", server.url, stdin=given).stdout)
        one, = records(succeed(AUDIT, "--judge", server.url, "--faults", 1, stdin=given).stdout)
        server.shutdown()
    assert (row["leaked"], row["contradictory"], row["evasive"]) == (50.0, 0.0, 0.0)
    assert (one["faults"], one["reply"]) == (["leaked"], "fee=13 fine")


@pytest.mark.parametrize("human, kind", [("leaky", "told"), ("careless", "contradicted")])
def test_the_other_humans_break_the_rules_that_audit_finds(human, kind, monkeypatch):
    monkeypatch.setenv("HUMAN", human)
    monkeypatch.delitem(sys.modules, "other_human", raising=False)
    import other_human
    n = 0
    for record in demos(100, hidden=0):
        task, history = record["task"], record["dialogue_history"]
        for i in range(2, len(history), 2):
            said = other_human.reply(task, history[:i])
            differs = said != reply(task, history[:i])
            assert faults(task, history[:i], said) == [kind] * differs
            n += differs
    assert n > 20
