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
from audit import KINDS, Reference, faults, numbers, plain  # noqa: E402
from collect import redact  # noqa: E402
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
    ("which hours?", "h" * 400, ["broke_off"]),
    ("which hours?", "You: below 6\nAssistant: and trips?", ["both_sides"]),
    ("which hours?", "**You:** below 6", ["both_sides"])])
def test_single_replies(asked, text, kinds):
    assert faults(TASK, dialogue("write pay", asked), text) == kinds


BOOK = {"kind": "backend", "problem_description": "write due(kind, days, members, fee_cap=-15)",
        "ground_truth": """def due(kind, days, members, fee_cap=-15):
    rates = {'e-book': 0.25, 'hard-cover': 0.125, 'DVD (used)': 40, 'map': 3}
    people = len(members)
    if kind == 'e-book' and days < 21:
        return 0
    elif people > 8 or "staff" in members:
        return days * rates[kind] - people * 70
    return days * rates[kind] + 350"""}


@pytest.mark.parametrize("asked, text, kinds", [
    ("when is it free?", "if days < 21, I think", ["quoted"]),
    ("when is it free?", 'if kind == "e-book"', ["quoted"]),   # in other quotation marks
    ("who pays less?", "check '\"staff\" in members'", ["quoted"]),
    ("how do I get the rate?", "by rates[kind], of course", ["quoted"]),
    ("when is it free?", "an e-book is, below 21 days", []),
    ("which kinds are there?", "e-book, hard-cover, DVD (used) and map", []),
    ("which kinds are there?", "Four: e-book, hard-cover, DVD (used), map.", []),
    ("how many are there?", "Four of them, that's all.", []),
    ("how many are there?", "Four days.", ["contradicted"]),
    ("how many decimals?", "three decimals", []),
    ("how many decimals?", "five decimals", ["contradicted"]),
    ("what is the rate?", "a quarter for one, one eighth for the other", []),
    ("what is the rate?", "two fifths", ["contradicted"]),
    ("what is added?", "three hundred and fifty", []),
    ("what is added?", "three hundred and five", ["contradicted"]),
    ("what is added?", "three hundred thousand", ["contradicted"]),
    ("how do days count?", "I would take 22 of them", ["contradicted"]),
    ("how do days count?", "I would take 21 of them", []),
    ("how do days count?", "below 21, e.g. 12, it would be free", []),
    ("how do days count?", "with 12, say, it would be free", []),
    ("how do days count?", "up to 20.9 days, from 0 to 20.9", []),
    ("how do days count?", "it is in the ISO-8601 form, for under-14s, as UTF-8", []),
    ("what is the cap?", "minus fifteen", []),
    ("how do days count?", "below 21. Above 8 members 70 each is taken off.", ["told"]),
    ("how do days count?", "below 21. For the kind e-book only.", ["told"]),
    ("which members pay less?", "staff, or more than 8. An e-book is free.", [])])
def test_replies_about_a_reference_like_colbenchs(asked, text, kinds):
    assert faults(BOOK, dialogue(BOOK["problem_description"], asked), text) == kinds


@pytest.mark.parametrize("text, number", [
    ("one and a half", 1.5), ("two and a half", 2.5), ("an hour and a half", 1.5), ("half", 0.5),
    ("two fifths", 0.4), ("a third of it", 1 / 3), ("three quarters", 0.75), ("a tenth", 0.1),
    ("twenty-five", 25), ("twenty five", 25), ("a thousand", 1000), ("12k", 12000),
    ("one hundred thousand", 100000), ("two hundred and five", 205), ("2.5 million", 2.5e6),
    ("1,500", 1500), ("two dozen", 24), ("twice", 2), ("ninety-nine", 99), ("fifteen", 15)])
def test_numbers_in_words(text, number):
    found = [x for x, *_ in numbers(plain(f"It is {text}, yes."))]
    assert found == [pytest.approx(number)]


@pytest.mark.parametrize("text", ["the third time", "a third person", "COVID-19", "UTF-8", "5th",
                                  "x2", "often", "weight", "tension"])
def test_what_is_no_number(text):
    assert numbers(plain(text)) == []


def test_any_python_can_be_a_reference():
    for path in Path(ROOT).glob("*.py"):
        known = Reference(path.read_text())
        assert known.parameters and known.values
    assert Reference("no python").values == []


def test_a_value_belongs_to_the_parameters_of_its_term_and_of_the_conditions_on_it():
    values = Reference("""def f(a, b, c=-8, *, d=9):
    half = b / 50
    total = (a * 22 + b * 3) * c + half * 7
    for x in a:
        total += x * 5
    if a > 2 or b < 4:
        total += 11
    elif c == 6 and d != 12:
        total *= 13
    else:
        return 15 if d else 16
    return total""").values
    assert {v.value: "".join(sorted(v.parameters)) for v in values} == {
        8: "abcd", 9: "d", 50: "b", 22: "abc", 3: "abc", 7: "b", 5: "a", 2: "a", 4: "b", 11: "ab",
        6: "c", 12: "d", 13: "cd", 15: "cd", 16: "cd"}


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
        "broke_off": 25.0, "both_sides": 0.0, "redacted": 25.0, "success": 75.0,
        "tainted": 33.3}]
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
