"""Own environments: the manual's, twenty questions, through all scripts; and a game."""
import random
import re
import runpy

import pytest

import colbench
import toy
from conftest import CPU, DOUBLE, HONEST, ROOT, actions, copy_scripts, records, save, succeed

MANUAL = open(f"{ROOT}/tests/experiments/MANUAL.md", encoding="utf-8").read()


@pytest.fixture
def repo(tmp_path, monkeypatch):
    """A copy of the scripts, with the manual's words.py beside them, which they know."""
    copy_scripts(tmp_path)
    (code,) = re.findall(r"<!-- environment -->\n```python\n(.*?)```", MANUAL, re.S)
    (line,) = re.findall(r"`export (ENVIRONMENTS_FILE=.*?)`", MANUAL)
    (tmp_path / "words.py").write_text(code)
    monkeypatch.setitem(CPU, *line.split("="))
    return tmp_path


def test_backend_tasks_are_graded_beside_them_by_servers_that_never_read_them(repo):
    with open(repo / "words.py", "a") as f:
        f.write("\nwith open('readers', 'a') as f: print('one', file=f)\n")
    given = [{"task": DOUBLE, "answer": HONEST}]
    done = succeed(str(repo / "colbench.py"), "grade", stdin=given, cwd=repo)
    assert [r["reward"] for r in records(done.stdout)] == [1]
    assert (repo / "readers").read_text() == "one\n"  # the grader's own process


def test_twenty_questions_go_through_all_scripts(repo, monkeypatch):
    def run(name, *flags, stdin=""):
        done = succeed(str(repo / name), *flags, stdin=stdin, cwd=repo)
        return records(done.stdout), done.stderr

    tasks, _ = run("words.py")
    assert [r["task"] for r in run("colbench.py", "check", stdin=tasks)[0]] == tasks

    words, r = runpy.run_path(str(repo / "words.py")), random.Random(0)
    monkeypatch.setitem(colbench.environments(), "words", words["ENVIRONMENTS"]["words"])

    def episode(task):
        """An agent asks three questions, and guesses one of two words."""
        guess = r.choice([task["id"], r.choice(list(words["WORDS"]))])
        outputs = ["is it alive?", "is it fast?", "is it big?", f"{colbench.ANSWER}\n{guess}"]
        return toy.episode(task, 4, lambda turn, said: outputs[turn],
                           lambda history: words["reply"](task, history))

    played = [{**episode(task), "sample": i} for task in tasks for i in range(6)]
    save(toy.tiny_model(played), repo / "tiny")
    flags = ["--model", "tiny", "--max_turns", 4, "--max_tokens", 20, "-k", 2]
    heard, _ = run("collect.py", *flags, "--human", "words.py", stdin=tasks)
    assert len(heard) == 16
    for r in heard:
        first, *rest = r["dialogue_history"]
        assert first["content"].endswith("You have 4 messages.")
        assert {m["content"] for m in rest[1::2]} <= {"yes", "no"}

    played, _ = run("collect.py", "--model", "tiny", "--candidates", 2, "--max_tokens", 20,
                    stdin=played)
    graded, told = run("colbench.py", "grade", stdin=played)
    found = [float(r["answer"].strip() == r["task"]["ground_truth"]) for r in graded]
    assert [r["reward"] for r in graded] == found and 0 < sum(found) < len(found) == 48
    assert "graded 48 answers\n" in told

    train = ["--model", "tiny", "--epochs", 1, "--lr", 1e-4, "--out"]
    scored, _ = run("train_critic.py", *train, "critic", stdin=graded)
    assert any(action["advantage"] for r in scored for action in actions(r))
    run("train_policy.py", *train, "sweet", stdin=scored)

    ((base,), table) = run("evaluate.py", stdin=graded)
    assert base["reward"] == base["success"] == round(sum(found) / 48, 4)
    assert base["unanswered"] == 0 and "not_drawn" not in base and "graded" not in table
    assert base["settings"]["environment"] == ["words"]


CAVE = """
from colbench import Environment, agent_messages
WAY = ["north", "east", "north"]
class Cave(Environment):  # without a reference
    agent_prompt = "Find your way out of the cave in {max_turns} moves."
    def ends(self, history):
        return history[-1]["content"] == "you are out"
    def metrics(self, record):
        return {"out": self.ends(record["dialogue_history"])}
    def grade(self, record):
        return {"reward": self.ends(record["dialogue_history"]) / len(agent_messages(record))}
ENVIRONMENTS = {"cave": Cave()}
def act(task, history):
    return task["id"].split()[len(history) // 2]
def reply(task, history):
    moves = [m["content"] for m in history if m["role"] == "assistant"]
    return "you are out" if moves[-3:] == WAY else "it is dark"
"""


def test_a_game_ends_when_its_human_says_so_and_its_dialogue_is_graded(tmp_path, monkeypatch):
    """Of one way out. Each message is a move."""
    (tmp_path / "cave.py").write_text(CAVE)
    monkeypatch.setitem(CPU, "ENVIRONMENTS_FILE", "cave.py")
    run = lambda *command, stdin: succeed(f"{ROOT}/{command[0]}", *command[1:], stdin=stdin,
                                          cwd=tmp_path)
    games = ["north east north", "east north east north", "north north north north north"]
    tasks = [{"id": moves, "kind": "cave", "problem_description": "", "ground_truth": ""}
             for moves in games]
    played = run("collect.py", "--agent", "cave.py", "--human", "cave.py", "--max_turns", 5,
                 stdin=tasks)
    graded = records(run("colbench.py", "grade", stdin=records(played.stdout)).stdout)
    assert sorted(len(r["dialogue_history"]) for r in graded) == [7, 9, 10]
    assert {r["task"]["id"]: r["reward"] for r in graded} == dict(zip(games, [1 / 3, 1 / 4, 0]))
    table = run("evaluate.py", stdin=graded).stderr
    assert re.search(r"reward % .* out % .*\n.* 19\.4 .* 66\.7 ", table)
