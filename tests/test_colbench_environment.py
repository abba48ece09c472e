"""The manual's own environment, twenty questions, through all scripts; kinds that nobody knows."""
import glob
import random
import re
import runpy
import shutil

import pytest

import colbench
import toy
from conftest import ROOT, complaint, dialogue, lines, records, save, script, succeed
from test_collect_endpoints import Server, chat

HERE = "# your own environments are imported here"  # the line below ENVIRONMENTS
README = open(f"{ROOT}/tests/experiments/MANUAL.md", encoding="utf-8").read()


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    """A copy of the scripts with the README's words.py beside them, and its line in colbench.py."""
    folder = tmp_path_factory.mktemp("repo")
    for path in glob.glob(f"{ROOT}/*.py"):
        shutil.copy(path, folder)
    (code,) = re.findall(r"<!-- environment -->\n```python\n(.*?)```", README, re.S)
    (row,) = re.findall(r"add `(.*?)` below `ENVIRONMENTS`", README)
    (folder / "words.py").write_text(code)
    text = (folder / "colbench.py").read_text()
    assert text.count(HERE) == 1
    (folder / "colbench.py").write_text(text.replace(HERE, f"{row}\n{HERE}"))
    return folder


def run(repo, name, *flags, stdin=""):
    done = succeed(str(repo / name), *flags, stdin=stdin, cwd=repo)
    return records(done.stdout), done.stderr


def demonstrations(repo, tasks):
    """300 scripted episodes of an agent who asks up to three questions and then guesses."""
    words = runpy.run_path(str(repo / "words.py"))  # makes its kind known here, too
    r, told = random.Random(0), words["WORDS"]

    def episode(task):
        asked = r.sample(["alive", "big", "fast"], r.randrange(4))
        alike = [w for w in told if all((q in told[w]) == (q in told[task["id"]]) for q in asked)]
        outputs = [f"is it {q}?" for q in asked] + [f"{colbench.ANSWER}\n{r.choice(alike)}"]
        return toy.episode(task, 4, lambda turn, said: outputs[turn],
                           lambda history: words["reply"](task, history))
    try:
        return [episode(r.choice(tasks)) for _ in range(300)]
    finally:
        del colbench.ENVIRONMENTS["words"]


def test_twenty_questions_go_through_all_scripts(repo):
    """Demonstrations, base, episodes with both humans, critic, policy, grades and the table."""
    tasks = [{"task": task} for task in run(repo, "words.py")[0]]
    assert len({t["task"]["id"] for t in tasks}) == 8
    demos = demonstrations(repo, [t["task"] for t in tasks])
    save(toy.tiny(demos), repo / "tiny")
    flags = ["--loss", "rft", "--all", 1, "--model", "tiny", "--lr", 3e-3, "--epochs", 6]
    run(repo, "train_policy.py", *flags, "--out", "base", stdin=demos)

    play = ["--model", "base", "--max_turns", 4, "--max_tokens", 20, "-k", 6, "--candidates", 4]
    played, _ = run(repo, "collect.py", *play, "--human", "words.py", stdin=tasks)
    played, told = run(repo, "colbench.py", "grade", stdin=played)
    found = sum(r["reward"] for r in played)
    assert len(played) == 48 and 4 < found < 44
    assert f"48 answers: {100 * found / 48:.1f} % words found by own rules; 0 failed" in told
    for r in played:
        first, *rest = r["dialogue_history"]
        assert first["content"].endswith("You have 4 messages.")
        assert r["reward"] == float(r["answer"].strip() == r["task"]["ground_truth"])
        for question, reply in zip(rest[::2], rest[1::2]):
            true = re.findall(r"alive|big|fast", r["task"]["hidden_information"])
            asked = any(name in question["content"] for name in true)
            assert reply["content"] == ("yes" if asked else "no")

    human = Server(lambda path, body: chat("perhaps"))
    heard, _ = run(repo, "collect.py", *play, "--human", human.url, stdin=tasks)
    assert {m["content"] for r in heard for m in r["dialogue_history"][2::2]} == {"perhaps"}
    prompts = {body["messages"][0]["content"].partition("\n")[0] for _, body, _ in human.seen}
    hidden = (t["task"]["hidden_information"] for t in tasks)
    assert prompts <= {f"Your word is {word}. Reply yes or no." for word in hidden}

    critic = ["--model", "base", "--margin", 0.1, "--held_out", 0, "--epochs", 1, "--lr", 1e-4]
    scored, _ = run(repo, "train_critic.py", *critic, "--out", "critic", stdin=played)
    actions = [a for r in scored for m in colbench.agent_messages(r) for a in (m, *m["candidates"])]
    assert any(a["advantage"] for a in actions)
    run(repo, "train_policy.py", "--model", "base", "--out", "sweet", "--lr", 1e-4, stdin=scored)
    best = ["--best_of", 2, "--critic", "critic"]
    human = ["--human", "words.py"]
    after, _ = run(repo, "collect.py", "--model", "sweet", *play[2:-2], *best, *human, stdin=tasks)
    after, _ = run(repo, "colbench.py", "grade", stdin=after)
    assert len(after) == 48

    (repo / "base.jsonl").write_text(lines(played))
    (repo / "sweet.jsonl").write_text(lines(after))
    (base, _), table = run(repo, "evaluate.py", "base.jsonl", "sweet.jsonl", "--bootstrap", 0)
    assert base["tests_passed"] == base["success"] == round(found / 48, 4)
    assert base["unanswered"] is not None and "not_drawn" not in base and "graded" not in table
    assert table.splitlines()[0].split()[:3] == ["system", "words", "%"]
    assert base["rewards"] == ["words found"]
    assert run(repo, "colbench.py", "check", stdin=tasks)[0] == tasks


@pytest.mark.parametrize("command", [
    "colbench.py grade", "colbench.py check", "collect.py --model MODEL", "evaluate.py",
    "train_critic.py --model MODEL --out OUT", "train_policy.py --model MODEL --out OUT"])
def test_an_unknown_kind_is_an_error_that_names_the_known_ones(command, tiny_dir, tmp_path):
    values = {"MODEL": tiny_dir, "OUT": tmp_path / "out"}
    command = [values.get(part, part) for part in command.split()]
    for kind, error in ((["words"], "task.kind is not text"),
                        ("words", "unknown task.kind 'words'; known are backend, frontend")):
        task = {"kind": kind, "problem_description": "a word", "ground_truth": "ant"}
        record = {"task": task, "answer": "", "reward": 1, "dialogue_history": dialogue("?", "ant")}
        assert f"error: stdin, line 1: {error}" in complaint(script(*command, stdin=[record]))


@pytest.mark.parametrize("kind, task", [
    ("backend", {"ground_truth": "def f(): return '<html>'", "test_cases": {"a": "f()"}}),
    ("backend", {"ground_truth": "def f(): return 1"}), ("frontend", {"ground_truth": "<BODY>a"}),
    ("frontend", {"ground_truth": "a", "kind": "frontend"})])
def test_published_tasks_without_a_kind_are_recognised(kind, task):
    assert colbench.environment(task) is colbench.ENVIRONMENTS[kind]
