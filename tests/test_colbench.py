"""The rules of an episode: what an action means, the first message, a task's id."""
import pytest

import colbench
from colbench import ANSWER, read_action

THOUGHTS = ["", "I wonder. OUTPUT: ", "I wonder.\nOUTPUT:\n", f"not yet: {ANSWER}? OUTPUT: ",
            f"Too early for {ANSWER} now.\nOUTPUT: ", f"<think>\n{ANSWER} no\n</think>\n\n",
            f"hm, {ANSWER}\n</think>\n"]  # <think> is cut
SENT = [  # what the human is shown, and the answer that it marks
    ("which rate?", None), ("", None), (ANSWER, ""), (f"I know. {ANSWER} code", "code"),
    (f"{ANSWER}\ndef f(x): return x", "def f(x): return x"),
    (f"{ANSWER} a {ANSWER} b", f"a {ANSWER} b"),
    (f"{ANSWER}\nprint('OUTPUT:', 3)", "print('OUTPUT:', 3)"),  # in the code
    (f"Enough.\n**{ANSWER}**\nprint('OUTPUT:', 3)", "**\nprint('OUTPUT:', 3)")]


def test_a_thought_that_does_not_end_sends_nothing():
    assert read_action(f"<think>\n{ANSWER} cut of", last=False) == ("", None)
    assert read_action(f"<think>\n{ANSWER} cut of", last=True) == ("", "")


@pytest.mark.parametrize("thought", THOUGHTS)
@pytest.mark.parametrize("content, answer", SENT)
def test_read_action(thought, content, answer):
    """A thought is private. When rounds are over, any message counts as an answer."""
    for output in (thought + content, f"{thought}  {content} \n"):
        assert read_action(output, last=False) == (content, answer)
        assert read_action(output, last=True) == (content, content if answer is None else answer)
    if answer is not None:  # this thought only mentions the marker
        assert read_action(f"{ANSWER}: now?\nOUTPUT: {content}", False) == (content, answer)


@pytest.mark.parametrize("text", ["-", "-\n", "- I WANT TO ANSWER\n", "\n"])
def test_a_long_action_is_read_in_one_pass(text):
    """A search that starts again on each line would take hours."""
    assert read_action(f"{text * 300_000}\nOUTPUT: x", last=False) == ("x", None)


def test_first_message_takes_braces_as_they_are():
    task = {"problem_description": "a {dict} {ANSWER} {problem_description} {0}",
            "ground_truth": "g"}
    text = colbench.first_message(task, 7)["content"]
    assert text.endswith(task["problem_description"]) and "You have 7 messages" in text
    own = {**task, "agent_prompt": "{max_turns}: {problem_description}"}
    assert colbench.first_message(own, 7)["content"].startswith("7: a {dict}")
    assert colbench.first_message({**task, "agent_prompt": "own"}, 7)["content"] == "own"


def test_task_id_is_given_or_a_hash():
    task = {"problem_description": "p", "ground_truth": "g"}
    assert colbench.task_id({**task, "id": 5}) == "5"
    assert colbench.task_id(task) == colbench.task_id({**task, "test_cases": {}})
    others = [{**task, "ground_truth": "h"}, {"problem_description": "pg", "ground_truth": ""},
              {**task, "problem_description": "\ud800"}]  # JSON may spell a lone surrogate
    assert len({colbench.task_id(t) for t in (task, *others)}) == 4
