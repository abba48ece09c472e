"""ColBench's public files: bare tasks, and trajectories without ids, numbers or token ids."""
import re

import pytest

from colbench import task_id
from conftest import SHARED, complaint, dialogue, key_of, records, script, succeed, train

REAL = SHARED / "colbench" / "backend_tasks.jsonl"


def public_task(n):
    """A bare task: its description is vague, the function is what the human sees."""
    return {"problem_description": f"I need a function price{n}(x) that gives the price of x.",
            "ground_truth": f"def price{n}(x):\n    return x * {n} + 17",
            "test_cases": {f"test{i}": f"price{n}({i})" for i in range(1, 11)}}


def public_trajectory(n, block):
    """An offline record: the first block's answers are right, the second's wrong by one."""
    answer = f"def price{n}(x):\n    return x * {n} + {17 + block}"
    history = dialogue(f"a long instruction. I need a function price{n}(x).", "What is the rate?",
                       f"It is {n}.", f"I WANT TO ANSWER:\n```python\n{answer}\n```")
    for message in history[1::2]:
        message |= {"input": "the prompt as text", "output": f"I see. OUTPUT: {message['content']}"}
    return {"task": public_task(n), "dialogue_history": history,
            "answer": f"```python\n{answer}\n```", "reward": 1.0 - block}


@pytest.mark.full
def test_bare_tasks(tiny_dir):
    tasks = [public_task(n) for n in (2, 3)]
    done = succeed("colbench.py", "check", stdin=tasks)
    assert [r["task"] for r in records(done.stdout)] == tasks
    flags = ["--model", tiny_dir, "-k", 2, "--human", "fixed:no", "--max_turns", 2,
             "--max_tokens", 5]
    done = script("collect.py", *flags, stdin=[*tasks, tasks[0]])
    got = sorted(map(key_of, records(done.stdout)))
    wanted = [(task_id(task), i) for task in tasks for i in (0, 1)]
    assert got == sorted([*wanted, (task_id(tasks[0]), 2), (task_id(tasks[0]), 3)])


@pytest.mark.full
def test_offline_trajectories_go_into_every_stage(tiny_dir, tmp_path):
    """Three tasks once, then all again, as the released file has them."""
    trajectories = [public_trajectory(n, block) for block in (0, 1) for n in (2, 3, 4)]
    done = script("colbench.py", "grade", stdin=trajectories)
    assert [r["reward"] for r in records(done.stdout)] == [1.0] * 3 + [0.0] * 3, done.stderr
    (row,) = records(script("evaluate.py", stdin=trajectories).stdout)
    assert row["episodes"] == 6 and row["success"] == 0.5

    critic = ["train_critic.py", "--model", tiny_dir, "--held_out", 0, "--epochs", 1, "--lr", 1e-3]
    done = script(*critic, "--out", tmp_path / "critic", stdin=trajectories)
    complaint(done, "line 1: the field 'input' is not read")  # what the agent may really have read
    for r in trajectories:
        for m in r["dialogue_history"]:
            m.pop("input", None)
    scored, (first, *_) = train(trajectories, *critic, "--out", tmp_path / "critic")
    assert first["pairs"] == 3  # by task: no two of one stand together
    for r, before in zip(scored, trajectories, strict=True):
        assert all("advantage" in m for m in r["dialogue_history"] if m["role"] == "assistant")
        for m in r["dialogue_history"]:
            m.pop("advantage", None)
        assert r == before  # nothing else has changed

    for loss in ("rft", "mtdpo"):
        flags = ["--model", tiny_dir, "--loss", loss, "--epochs", 1, "--out", tmp_path / loss]
        succeed("train_policy.py", *flags, stdin=trajectories)

    collect = ["collect.py", "--model", tiny_dir, "--candidates", 3, "--max_tokens", 5]
    done = succeed(*collect, "--candidates_share", 0, stdin=trajectories)
    assert not any("candidates" in m for r in records(done.stdout) for m in r["dialogue_history"])
    sampled = records(succeed(*collect, stdin=trajectories).stdout)
    got = sorted((r["task"]["problem_description"], r["sample"], r["reward"]) for r in sampled)
    assert got == sorted((public_task(n)["problem_description"], block, 1.0 - block)
                         for n in (2, 3, 4) for block in (0, 1))
    scored, _ = train(sampled, *critic, "--out", tmp_path / "critic2")
    policy = ["train_policy.py", "--model", tiny_dir, "--out", tmp_path / "sweet"]
    assert train(scored, *policy)[0][0]["steps"] > 0


@pytest.mark.full
@pytest.mark.skipif(not REAL.exists(), reason="no ../shared/colbench/backend_tasks.jsonl")
def test_check_finds_the_real_tasks_that_cannot_be_graded():
    """A missing module, a file written, random numbers."""
    tasks = records(REAL.read_text(encoding="utf-8"))
    done = script("colbench.py", "check", stdin=tasks)
    dropped = dict(re.findall(r"^line (\d+): (dropped: .*)", done.stderr, re.M))
    assert set(dropped) == {"215", "236", "265"}
    assert "bs4" in dropped["215"] and "wrong value" in dropped["265"]
    kept = [r["task"] for r in records(done.stdout)]  # datetimes, types are values
    assert kept == [task for n, task in enumerate(tasks, 1) if str(n) not in dropped]
