"""The manual's own environment, twenty questions, through all scripts."""
import random
import re
import runpy

import pytest

import colbench
import toy
from conftest import ROOT, actions, copy_scripts, records, save, succeed

HERE = "# your own environments are imported here"  # the line below ENVIRONMENTS
MANUAL = open(f"{ROOT}/tests/experiments/MANUAL.md", encoding="utf-8").read()


@pytest.fixture
def repo(tmp_path):
    """A copy of the scripts with the manual's words.py beside them, and its line in colbench.py."""
    copy_scripts(tmp_path)
    (code,) = re.findall(r"<!-- environment -->\n```python\n(.*?)```", MANUAL, re.S)
    (row,) = re.findall(r"add `(.*?)` below `ENVIRONMENTS`", MANUAL)
    (tmp_path / "words.py").write_text(code)
    text = (tmp_path / "colbench.py").read_text()
    assert text.count(HERE) == 1
    (tmp_path / "colbench.py").write_text(text.replace(HERE, f"{row}\n{HERE}"))
    return tmp_path


def test_twenty_questions_go_through_all_scripts(repo, monkeypatch):
    def run(name, *flags, stdin=""):
        done = succeed(str(repo / name), *flags, stdin=stdin, cwd=repo)
        return records(done.stdout), done.stderr

    tasks, _ = run("words.py")
    assert [r["task"] for r in run("colbench.py", "check", stdin=tasks)[0]] == tasks

    monkeypatch.setitem(colbench.ENVIRONMENTS, "words", None)  # words.py makes it known here, too
    words, r = runpy.run_path(str(repo / "words.py")), random.Random(0)

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
    assert f"48 answers: {100 * sum(found) / 48:.1f} % words found by own rules; 0 with a" in told

    train = ["--model", "tiny", "--epochs", 1, "--lr", 1e-4, "--out"]
    scored, _ = run("train_critic.py", *train, "critic", stdin=graded)
    assert any(action["advantage"] for r in scored for action in actions(r))
    run("train_policy.py", *train, "sweet", stdin=scored)

    ((base,), table) = run("evaluate.py", stdin=graded)
    assert base["tests_passed"] == base["success"] == round(sum(found) / 48, 4)
    assert base["unanswered"] == 0 and "not_drawn" not in base and "graded" not in table
    assert base["rewards"] == ["words found"] and table.split()[:2] == ["system", "words"]
