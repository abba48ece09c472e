"""Own environments: the manual's, twenty questions, through all scripts; and a game."""
import random
import re
import runpy

import pytest

import colbench
import evaluate
import toy
from conftest import DOUBLE, HONEST, ROOT, actions, copy_scripts, lines, records, save, succeed

HERE = "# import here your own environments"  # the line below ENVIRONMENTS
MANUAL = open(f"{ROOT}/tests/experiments/MANUAL.md", encoding="utf-8").read()


@pytest.fixture
def repo(tmp_path):
    """A copy of the scripts with the manual's words.py beside them, and its line in colbench.py."""
    copy_scripts(tmp_path)
    (code,) = re.findall(r"<!-- environment -->\n```python\n(.*?)```", MANUAL, re.S)
    (row,) = re.findall(r"add `(.*?)` below\s`ENVIRONMENTS`", MANUAL)
    (tmp_path / "words.py").write_text(code)
    text = (tmp_path / "colbench.py").read_text()
    assert text.count(HERE) == 1
    (tmp_path / "colbench.py").write_text(text.replace(HERE, f"{row}\n{HERE}"))
    return tmp_path


def test_backend_tasks_are_graded_beside_them(repo):
    """The sandbox's servers import it, too, as it is beside them."""
    given = [{"task": DOUBLE, "answer": HONEST}]
    done = succeed(str(repo / "colbench.py"), "grade", stdin=given, cwd=repo)
    assert [r["reward"] for r in records(done.stdout)] == [1]


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
    assert "graded 48 answers\n" in told

    train = ["--model", "tiny", "--epochs", 1, "--lr", 1e-4, "--out"]
    scored, _ = run("train_critic.py", *train, "critic", stdin=graded)
    assert any(action["advantage"] for r in scored for action in actions(r))
    run("train_policy.py", *train, "sweet", stdin=scored)

    ((base,), table) = run("evaluate.py", stdin=graded)
    assert base["reward"] == base["success"] == round(sum(found) / 48, 4)
    assert base["unanswered"] == 0 and "not_drawn" not in base and "graded" not in table
    assert base["settings"]["environment"] == ["words"]


class Cave(colbench.Environment):
    """A text game without a reference: the human's "you are out" wins it."""
    agent_prompt = "Find your way out of the cave in {max_turns} moves."

    @classmethod
    def ends(cls, history):
        return history[-1]["content"] == "you are out"

    @classmethod
    def metrics(cls, record):
        return {"out": cls.ends(record["dialogue_history"])}

    def grade(self, record):
        moves = len(colbench.agent_messages(record))
        return {"reward": self.ends(record["dialogue_history"]) / moves}


def test_a_game_ends_when_its_human_says_so_and_its_dialogue_is_graded(grading, tmp_path,
                                                                       monkeypatch, capsys):
    """Of one way out: its moves are the agent's messages, and the last reply is no move."""
    monkeypatch.setitem(colbench.ENVIRONMENTS, "cave", Cave)
    way, given = ["north", "east", "north"], []
    for sample, moves in enumerate((way, ["east", *way], ["north"] * 5)):
        episode = colbench.Episode({"id": "c", "kind": "cave", "problem_description": "",
                                    "ground_truth": ""}, max_turns=5)
        steps = iter(moves)
        while not episode.ended:
            episode.act(next(steps))
            if not episode.ended:
                made = [m["content"] for m in episode.history if m["role"] == "assistant"]
                episode.reply("you are out" if made[-3:] == way else "it is dark")
        given.append({"task": episode.task, "sample": sample, **episode.fields()})
    assert [len(r["dialogue_history"]) for r in given] == [7, 9, 10]
    graded, _, _ = grading(given)
    assert [r["reward"] for r in graded] == [1 / 3, 1 / 4, 0]
    monkeypatch.setattr(evaluate, "open_stdout", lambda: lambda record: None)
    (tmp_path / "cave.jsonl").write_text(lines(graded))
    evaluate.main(evaluate.get_args([str(tmp_path / "cave.jsonl")]))
    assert re.search(r"reward % .* out % .*\n.* 19\.4 .* 66\.7 ", capsys.readouterr().err)
