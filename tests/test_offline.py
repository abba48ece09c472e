"""offline.py: the published trajectories' form, through one command, into both trainers."""
import pytest

import train_critic
import train_policy
from colbench import agent_messages, first_message
from conftest import complaint, lines, read_by, records, script, succeed

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


def test_both_trainers_read_what_the_agent_wrote_after_its_instructions(given, tiny_dir):
    done = succeed(OFFLINE, stdin=given)
    rs = records(done.stdout)
    assert [r["sample"] for r in rs] == [0, 0, 1, 1] and "4 trajectories of 2 tasks" in done.stderr
    for old, new in zip(given, rs):
        assert new["dialogue_history"][0] == first_message(new["task"], 10)
        for m, n in zip(agent_messages(old), agent_messages(new), strict=True):
            assert n == {name: m[name] for name in m if name != "input"}
    for trainer, flags, n in ((train_critic, [], 1),  # which holds one task out
                              (train_policy, ["--loss", "mtdpo"], 2),
                              (train_policy, ["--loss", "rft"], 2)):
        groups, _ = read_by(rs, trainer, "--model", tiny_dir, *flags)
        assert sum(map(len, groups)) == n


def test_what_trajectories_lack_is_counted(given):
    """None lacks the thought, of four one lacks tests, and one has what sampling leaves."""
    del given[1]["task"]["test_cases"]
    for message in agent_messages(given[2]):
        message |= {"token_ids": [5], "candidates": [{"output": "x"}]}
    _, *lacking = succeed(OFFLINE, stdin=given).stderr.splitlines()
    assert lacking == ["1 lack test_cases (to grade them again)",
                       "3 lack token_ids (what was sampled; the text is tokenized)",
                       "3 lack candidates (for --loss dpo)"]


def test_a_file_of_another_kind_is_refused(given):
    given[0]["dialogue_history"][0]["content"] = "Hello"
    complaint(script(OFFLINE, stdin=lines(given)), "is not its description")
