"""offline.py: the published trajectories' form, through one command, into both trainers."""
import io
import sys

import pytest

import train_critic
import train_policy
from colbench import agent_messages, first_message
from conftest import complaint, lines, records, script, succeed

OFFLINE = "tests/experiments/offline.py"


def published(n, solved):
    """As the code that wrote the file does: two messages of the agent, with their `input`."""
    code = f"def price(x):\n    return x * {n} + {17 * solved}"
    said = [("Let me ask. OUTPUT: What is the rate?", " What is the rate?"),
            (f"I know enough. OUTPUT: I WANT TO ANSWER:\n{code}", f" I WANT TO ANSWER:\n{code}")]
    ask, answer = ({"role": "assistant", "content": content, "output": output, "input": "<s>..."}
                   for output, content in said)
    description = f"I need price{n}(x), the price of x."
    return {"task": {"problem_description": description, "test_cases": {"test1": "price(3)"},
                     "ground_truth": f"def price(x):\n    return x * {n} + 17"},
            "dialogue_history": [{"role": "user", "content": description}, ask,
                                 {"role": "user", "content": f"It is {n}."}, answer],
            "answer": code, "reward": float(solved)}


@pytest.fixture
def given():
    """Two blocks of all tasks, not the trajectories of a task in a row."""
    return [published(n, solved) for solved in (1, 0) for n in (2, 3)]


def test_both_trainers_read_what_the_agent_wrote_after_its_instructions(given, tiny_dir,
                                                                        monkeypatch):
    done = succeed(OFFLINE, stdin=given)
    rs = records(done.stdout)
    assert [r["sample"] for r in rs] == [0, 0, 1, 1] and "4 trajectories of 2 tasks" in done.stderr
    for old, new in zip(given, rs):
        assert new["dialogue_history"][0] == first_message(new["task"], 10)
        for m, n in zip(agent_messages(old), agent_messages(new), strict=True):
            assert n == {name: m[name] for name in m if name != "input"}
    for trainer, flags in ((train_critic, []), (train_policy, ["--loss", "mtdpo"]),
                           (train_policy, ["--loss", "rft"])):
        monkeypatch.setattr(sys, "stdin", io.BytesIO(done.stdout.encode()))
        args = trainer.get_args(["--model", str(tiny_dir), "--out", "x", *flags])
        made = trainer.prepare(args, []) if trainer is train_critic else trainer.prepare(args)
        groups = list(made[1].values()) if trainer is train_critic else made[0]
        assert sum(map(len, groups)) == 2 - (trainer is train_critic)  # which holds one task out


def test_a_file_of_another_kind_is_refused(given):
    given[0]["dialogue_history"][0]["content"] = "Hello"
    complaint(script(OFFLINE, stdin=lines(given)), "is not its description")
