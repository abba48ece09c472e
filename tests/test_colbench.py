"""The rules of an episode, ids and kinds of tasks, and ColBench's public files."""
import random

import pytest

import colbench
from colbench import ANSWER, read_action, task_id
from conftest import DOUBLE, SHARED, records, task

REAL = SHARED / "colbench" / "backend_tasks.jsonl"

THOUGHTS = ["", "I wonder. OUTPUT: ", "I wonder.\nOUTPUT:\n", f"not yet: {ANSWER}? OUTPUT: ",
            f"Too early for {ANSWER} now.\nOUTPUT: ", f"<think>\n{ANSWER} no\n</think>\n\n",
            f"<think>hm, {ANSWER}\n</think>\n"]  # <think> is cut
SENT = [  # what the human is shown, and the answer that it marks
    ("which rate?", None), ("", None), (ANSWER, ""), (f"I know. {ANSWER} code", "code"),
    (f"{ANSWER}\ndef f(x): return x", "def f(x): return x"),
    (f"{ANSWER} a {ANSWER} b", f"a {ANSWER} b"),
    (f"Sure. {ANSWER}\ndef f():\n  print('OUTPUT:', 3)", "def f():\n  print('OUTPUT:', 3)"),
    (f"Enough.\n**{ANSWER}**\nprint('OUTPUT:', 3)", "print('OUTPUT:', 3)"),  # in bold
    (f"**{ANSWER}** def f(x): return x", "def f(x): return x"), (f"{ANSWER} **a**", "**a**"),
    (f"{ANSWER}\n\n    x = 1\n\n    if x:\n        y = 2", "x = 1\n\nif x:\n    y = 2"),
    (f"```python\n{ANSWER} x = 1\n```", "```\n x = 1\n```"),  # in a fence
    ("Shall f cut what is before </think>?", None), ("is <think>a</think> a thought?", None),
    (f"{ANSWER} def f(x): return x.split('</think>')[-1]",
     "def f(x): return x.split('</think>')[-1]"),
    (f"{ANSWER} '<think>x</think>'", "'<think>x</think>'")]


@pytest.mark.parametrize("thought", THOUGHTS)
@pytest.mark.parametrize("content, answer", SENT)
def test_read_action(thought, content, answer):
    """A thought is private. When rounds are over, any message counts as an answer."""
    for output in (thought + content, f"{thought}  {content} \n"):
        assert read_action(output, last=False) == (content, answer)
        assert read_action(output, last=True) == (content, content if answer is None else answer)
    if answer is not None:  # this thought only mentions the marker
        assert read_action(f"{ANSWER}: now?\nOUTPUT: {content}", False) == (content, answer)
    endless = f"<think>\n{thought}{content}".replace("</think>", "")  # it sends nothing
    assert [read_action(endless, last) for last in (False, True)] == [("", None), ("", "")]


def test_first_message_takes_braces_as_they_are():
    odd = {**DOUBLE, "problem_description": "a {dict} {ANSWER} {problem_description} {0}"}
    text = colbench.first_message(odd, 7)["content"]
    assert text.endswith(odd["problem_description"]) and "You have 7 messages" in text
    own = {**odd, "agent_prompt": "{max_turns} of {dict}: {problem_description}"}
    assert colbench.first_message(own, 7)["content"].startswith("7 of {dict}: a {dict}")


def test_task_id_is_given_or_a_hash_of_all_that_the_task_is():
    ids = 0, "0", 5.5, "x", True, [5]
    assert [task_id({**DOUBLE, "id": own}) for own in ids] == ["0", "0", "5.5", "x", "True", "[5]"]
    assert task_id(DOUBLE) == task_id(dict(reversed(DOUBLE.items()), kind="backend", id=None))
    others = [{**DOUBLE, name: "x"} for name in (
        "problem_description", "ground_truth", "hidden_information", "test_cases", "agent_prompt",
        "a field of its own")]
    others += [{**DOUBLE, "test_cases": {"test1": "f(2)"}}, {**DOUBLE, "kind": "frontend"},
               {**DOUBLE, "problem_description": "\ud800"}]  # JSON may spell a lone surrogate
    assert len({task_id(t) for t in (DOUBLE, *others)}) == 10


def test_an_empty_hidden_information_hides_nothing_more():
    assert colbench.hidden_information(DOUBLE) == DOUBLE["ground_truth"]
    assert colbench.hidden_information({**DOUBLE, "hidden_information": ""}) == ""


def test_published_tasks_without_a_kind_are_recognised_and_an_unknown_kind_is_not():
    page = task("def f(): return '<html>'", "f()")
    for kind, published in (("backend", page), ("backend", {"ground_truth": "def f(): return 1"}),
                            ("frontend", {"ground_truth": "<BODY>a"}),
                            ("frontend", {"ground_truth": "a", "kind": "frontend"})):
        assert colbench.environment(published) is colbench.ENVIRONMENTS[kind]
    with pytest.raises(ValueError, match="unknown task.kind 'words'; known kinds: backend"):
        colbench.environment({**DOUBLE, "kind": "words"})


@pytest.mark.full
@pytest.mark.skipif(not REAL.exists(), reason="no ../shared/colbench/backend_tasks.jsonl")
def test_check_finds_the_real_tasks_that_cannot_be_graded(grading):
    """A missing module, a file written, random numbers. Datetimes and types are values."""
    tasks = records(REAL.read_text(encoding="utf-8"))
    kept, told, _ = grading(tasks, command="check")
    assert [r["task"] for r in kept] == [
        t for line, t in enumerate(tasks, 1) if line not in (215, 236, 265)]
    assert told.count(" dropped: ") == 3


# --- the rules of an episode ----------------------------------------------------------------------

@pytest.mark.parametrize("opening", ["", "<think>"])
def test_an_episode_alternates_until_an_answer_or_the_last_turn(opening):
    """Texts are generated; what must come of them is known from how they were."""
    r = random.Random(0)
    for _ in range(300):
        kind, max_turns = r.choice(["backend", "frontend"]), r.randrange(1, 5)
        task = {"kind": kind, "problem_description": "p", "ground_truth": "g"}
        episode = colbench.Episode(task, max_turns, opening)
        want, answer = [colbench.first_message(task, max_turns)], None
        limit = {"backend": 400, "frontend": 1000}[kind]
        pages = []
        for turn in range(max_turns):
            assert not episode.ended and episode.turn == turn and answer is None
            thought = r.choice(["so</think>", f"{ANSWER} x</think>"]) if opening else ""
            shown = r.choice(["which \udc80 rate?", "", f"<html>{turn}</html>", "hm"])
            if r.random() < 0.3:
                shown, answer = f"{ANSWER} {shown} .", f"{shown} .".strip()
            elif turn == max_turns - 1:
                answer = shown
            output = thought + shown
            fields = r.choice([{}, {"output": output, "cut": True, "role": "user", "content": "!"},
                               {"output": output, "token_ids": [1]}])
            episode.act(fields or output)
            shown, answer = (text and text.replace("\udc80", "?") for text in (shown, answer))
            want.append({**fields, "role": "assistant", "content": shown,
                         "output": output.replace("\udc80", "?")})
            pages += [f"<html>{turn}</html>"] * ("<html>" in shown)
            if answer is not None:
                break
            text = r.choice(["rate=4", "\ud83d", "so " * 500])
            episode.reply(text)
            want.append({"role": "user", "content": text.replace("\ud83d", "?")[:limit]})
        assert episode.ended and episode.history == want
        if kind == "frontend":
            answer = (pages or [""])[-1]
        assert episode.fields() == {"dialogue_history": want, "answer": answer,
                                    "answered": ANSWER in want[-1]["content"]}


def test_an_episode_without_room_for_another_message_ends_with_the_agents_last():
    task = {"kind": "frontend", "problem_description": "p", "ground_truth": "g"}
    episode = colbench.Episode(task, 5)
    episode.act("<html>1</html>")
    episode.reply("larger")
    episode.abandon()
    assert episode.ended and len(episode.history) == 2
    assert episode.fields()["answer"] == "<html>1</html>" and not episode.fields()["answered"]
