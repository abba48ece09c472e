"""Built-in tasks in English: what their descriptions tell, and what their human understands."""
import random
import re
from itertools import islice
from types import SimpleNamespace

import pytest

import colbench
from colbench import (ANSWER, BUGS, DETAILS, STORIES, WORDINGS, Grader, asked_for, builtin_task,
                      builtin_tasks, demonstration, fill, scripted_human, slots_of)
from conftest import lines, script
from utils import rng

PERFECT = dict.fromkeys(("at_once", "early", "distract", "noise", "silent", "hidden"), 0.0)


def tasks(n, split="train", low=2, high=5):
    args = SimpleNamespace(seed=0, min_slots=low, max_slots=high, usual=0.0)
    return list(islice(builtin_tasks("english", split, args), n))


def numbers_in(text):
    """All numbers above 1 in a text."""
    return [int(n) for n in re.findall(r"[1-9]\d*", text)]


def test_who_asks_for_every_detail_can_write_the_function():
    """A perfect agent, which reads the description and not the reference, solves every task."""
    args = SimpleNamespace(**PERFECT, max_turns=7, min_slots=2, max_slots=5)
    with Grader() as grader:
        for i, task in enumerate(tasks(40)):
            record = demonstration(task, rng("perfect", i), args)
            assert grader.grade(task, record["answer"])["reward"] == 1, record


def test_another_value_of_a_detail_fails_a_test():
    for task in tasks(20):
        code, values = task["ground_truth"], slots_of(task["ground_truth"])

        def results(code):
            space = {}
            exec(code, space)
            return [eval(test, space) for test in task["test_cases"].values()]

        for slot, value in values.items():
            for other in set(DETAILS[slot].values) - {int(value)}:
                assert results(code.replace(f"{slot}={value}", f"{slot}={other}")) != results(code)


def test_the_description_tells_which_details_are_missing_and_no_number():
    for task in tasks(200):
        unit = STORIES[task["id"].split("-")[0]][1]
        told = task["problem_description"].lower()
        missing = {slot for slot, detail in DETAILS.items()
                   if any(fill(clause, unit=unit).lower() in told for clause in detail.clauses)}
        assert missing == slots_of(task["ground_truth"]).keys()
        assert not numbers_in(told)


@pytest.mark.parametrize("slot", [*DETAILS])
def test_the_human_understands_its_own_wordings(slot):
    for _, unit in STORIES.values():
        for text in DETAILS[slot].questions + DETAILS[slot].clauses:
            assert asked_for("english", fill(text, unit=unit)) == slot, text


@pytest.mark.parametrize("slot, question", [
    ("price", "what's the hourly price?"),
    ("price", "Could you tell me how much it costs per kilometer?"),
    ("price", "So what do you charge?"),
    ("price", "What is the rate?"),
    ("fee", "Is there a fee?"),
    ("fee", "Are there any additional costs?"),
    ("fee", "what is the base fare"),
    ("fee", "How much is the service charge?"),
    ("free", "Do the first few minutes cost nothing?"),
    ("free", "how many free hours are there per day"),
    ("free", "Are some pages included?"),
    ("minimum", "Is there a lower bound for the price?"),
    ("minimum", "What's the smallest amount one can pay?"),
    ("maximum", "is there a cap on the total"),
    ("maximum", "What is the upper limit of the cost?"),
    ("maximum", "It should not exceed what?"),
    ("limit", "Is there a limit to the number of parcels?"),
    ("limit", "When do you refuse?"),
    ("color", "What color should it be?"),
    (None, "Hello! How can I help you today?"),
    (None, ""),
])
def test_the_human_understands_others(slot, question):
    assert asked_for("english", question) == slot


def test_the_human_tells_one_number_and_never_code():
    """Whatever it hears: its own questions, words of the code, and the code itself."""
    r = random.Random(0)
    words = [*DETAILS, *"def return x total = min( max( price? fee, what is the code".split()]
    for task in tasks(60):
        code, values = task["ground_truth"], slots_of(task["ground_truth"])
        heard = [code, f"{ANSWER} {code}", *code.splitlines()]
        heard += [" ".join(r.choices(words, k=r.randrange(12))) for _ in range(20)]
        heard += [q for detail in DETAILS.values() for q in detail.questions]
        for message in heard:
            reply, slot = scripted_human(task, message), asked_for("english", message)
            assert colbench.redact(reply, code) == reply and not set("=()_:") & set(reply)
            assert numbers_in(reply) == ([int(values[slot])] if slot in values else []), message
            assert slot in values or reply in WORDINGS["english"].unknown
            assert reply == scripted_human(task, message)  # the same each time


def test_splits_share_no_task_and_wordings_differ():
    by_split = {split: {t["id"] for t in tasks(150, split)} for split in colbench.SPLITS}
    assert not by_split["train"] & by_split["test"] and not by_split["train"] & by_split["val"]
    assert len({t["problem_description"] for t in tasks(150)}) > 100


def test_a_bug_can_be_put_into_every_function():
    for name in STORIES:
        body = WORDINGS["english"].bodies[name]["price", "fee"]
        task = builtin_task("english", name, {"price": 3, "fee": 12}, body)
        assert any(right in task["ground_truth"] for right, _ in BUGS)


def test_impossible_numbers_of_slots_are_refused():
    for low, high in ((0, 0), (3, 2), (7, 9)):
        with pytest.raises(SystemExit, match="no built-in function has"):
            tasks(1, "train", low, high)


def test_what_a_critic_ranks_right_is_counted_by_kind(tmp_path):
    """Two turns: at the first nothing is told, at the second all but the price has been asked."""
    task, = tasks(1, "train", 2, 2)
    other = next(slot for slot in slots_of(task["ground_truth"]) if slot != "price")
    right = f"{ANSWER}\n{task['ground_truth']}"
    useful, price = (DETAILS[slot].questions[0] for slot in (other, "price"))
    candidates = [{"output": output, "advantage": advantage, "logprob": -1.0}
                  for output, advantage in ((useful, 0.5), ("What color?", 0.7),
                                            (ANSWER + "\nno", 0.1), (right, 0.9))]
    history = [{"role": "user", "content": task["problem_description"]}]
    for question in (useful, price, right):
        history += [{"role": "assistant", "content": question, "candidates": candidates},
                    {"role": "user", "content": "4"}]
    file = tmp_path / "scored.jsonl"
    file.write_text(lines([{"task": task, "dialogue_history": history}]))
    done = script("tests/experiments/ranks.py", file)
    shares = re.findall(r"(\d+\.\d) % of (\d+)  " + str(file), done.stdout)
    # all told: the right answer beats both questions and the wrong answer; before: at the first
    # turn the useful question does not beat the one of colors, at the second it is not useful
    assert shares == [("100.0", "2"), ("100.0", "1"), ("100.0", "1"), ("0.0", "1")]
    assert done.stdout.count(" 0.0 % of") == 1 + 4  # the prior: all are alike
