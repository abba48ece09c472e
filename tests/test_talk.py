"""tests/experiments/talk.py in a pseudo-terminal: what its user sees and types."""
import fcntl
import os
import pty
import runpy
import select
import signal
import subprocess
import sys
import termios
import time
from types import SimpleNamespace

import pytest

import model as M
from colbench import ANSWER, agent_messages
from conftest import CPU, ROOT, complaint, descendants, gone, lines, records, succeed
from test_collect_endpoints import Server

TALK = [sys.executable, f"{ROOT}/tests/experiments/talk.py"]


class Terminal:
    """Runs talk.py in a terminal of its own. stdin: a file; None: the terminal, like stdout."""

    def __init__(self, *flags, stdin=None, stdout=None, cwd=ROOT):
        self.keys, self.tty = pty.openpty()
        termios.tcsetwinsize(self.tty, (40, 120))
        self.before, self.text = termios.tcgetattr(self.tty), ""
        self.process = subprocess.Popen(
            [*TALK, *map(str, flags)], cwd=cwd, stderr=self.tty,
            env={**CPU, "TERM": "dumb", "COLUMNS": "120"},
            stdin=stdin or self.tty, stdout=stdout or self.tty, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(2, termios.TIOCSCTTY, 0))

    def read(self, end=None, seconds=100):
        """Returns what is written until `end` comes; without one, until the program has ended."""
        start, limit = len(self.text), time.time() + seconds
        while end is None or end not in self.text[start:]:
            alive = self.process.poll() is None
            if select.select([self.keys], [], [], 0.1)[0]:
                self.text += os.read(self.keys, 1 << 16).decode(errors="replace").replace("\r", "")
            elif not alive:
                assert end is None, self.text
                break
            assert time.time() < limit, self.text
        return self.text[start:]

    def type(self, text):
        os.write(self.keys, text.encode())

    def leave(self, key):
        """Presses a key at a prompt; all processes end. Returns the exit status."""
        time.sleep(0.3)  # input() misses a signal between its prompt and its wait for keys
        pids = descendants(self.process.pid)
        self.type(key)
        self.read()
        gone(pids)
        assert termios.tcgetattr(self.tty) == self.before and "Traceback" not in self.text
        return self.process.returncode

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.keys)
        os.close(self.tty)


def scripted(tiny_dir, *texts):
    """A server of the tiny model, which samples these texts, one a request."""
    tokenizer, left = M.find_model(tiny_dir)[1].tokenizer, list(texts)

    def reply(path, body):
        ids = tokenizer(left.pop(0), add_special_tokens=False)["input_ids"]
        ids += body["stop_token_ids"][:1]
        return {"choices": [{"finish_reason": "stop", "token_ids": ids,
                             "logprobs": {"token_logprobs": [-0.5] * len(ids)}}]}
    return Server(reply)


@pytest.fixture
def folder(tasks, tmp_path):
    """Has runs/tasks.jsonl with two tasks."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tasks.jsonl").write_text(lines(tasks[:2]))
    return tmp_path


def test_a_solved_episode_with_advantages_then_ctrl_d(rewarded, tasks, tiny_dir, folder):
    flags = ["--model", tiny_dir, "--epochs", 1, "--lr", 1e-4, "--out", folder / "critic"]
    succeed("train_critic.py", *flags, stdin=rewarded)
    one, two = (r["task"] for r in tasks[:2])
    answer = f"{one['ground_truth']}\nx = 1"
    server = scripted(tiny_dir, "which \x1b[31m rate?", f"{ANSWER}\n{answer}", "which cap?")
    with (folder / "runs" / "tasks.jsonl").open() as stdin, (folder / "out").open("w") as stdout, \
            Terminal("--model", tiny_dir, "--engine", server.url, "--critic", folder / "critic",
                     "--concurrency", 8, stdin=stdin, stdout=stdout) as t:
        seen = t.read("you    ")
        seen_words = " ".join(seen.split())  # lines are wrapped at the terminal's width
        assert one["problem_description"] in seen_words and one["ground_truth"] in seen_words
        assert "agent  which ?[31m rate?\n" in seen and two["ground_truth"] not in seen
        t.type("\n größe x\x7f4 \n")  # an empty reply; then one with a backspace
        end, n = t.read("Enter: "), len(one["test_cases"])
        assert f"agent  {ANSWER}\n       {one['ground_truth']}\n       x = 1\n" in end
        assert f"reward 1.00: {n} of {n} tests passed\n" in end
        assert all(f"    {call}  pass\n" in end for call in one["test_cases"].values())
        t.type("\n")
        seen = t.read("you    ")
        assert two["ground_truth"] in seen and "agent  which cap?\n" in seen
        assert t.leave("\x04") == 0
    (got,) = records((folder / "out").read_text())
    assert got["dialogue_history"][2]["content"] == "größe 4" and got["reward"] == 1
    critic = ["train_critic.py", "--score", folder / "critic"]
    assert records(succeed(*critic, stdin=[got]).stdout) == [got]
    asked, answered = (f"{m['advantage']:+10.3f}" for m in agent_messages(got))
    assert asked != answered
    assert f"{asked}  which ?[31m rate?\n{answered}  {ANSWER} ...\n" in end


def test_replies_of_the_episodes_that_the_agent_was_trained_on_are_shown_first(rewarded, folder,
                                                                               tiny_dir):
    """Those of --episodes; without it of runs/train.jsonl, if that is there."""
    replies = [m["content"] for r in rewarded for m in r["dialogue_history"][2::2]]
    some = list(dict.fromkeys(replies))[:3]
    assert len(some) == 3

    def shown(*flags):
        server = scripted(tiny_dir, "which rate?")
        with Terminal("--model", tiny_dir, "--engine", server.url, *flags, cwd=folder) as t:
            seen = t.read("you    ")
            t.leave("\x04")
        return [line.removeprefix("human  ") for line in seen.splitlines() if "human  " in line]
    assert shown() == []
    (folder / "mine.jsonl").write_text(lines(rewarded))
    assert shown("--episodes", "mine.jsonl") == some
    (folder / "runs" / "train.jsonl").write_text(lines(rewarded))
    assert shown() == some
    with Terminal("--model", "x", "--episodes", "gone", cwd=folder) as t:
        assert t.read().startswith("error: --episodes gone: No such file or directory")


@pytest.mark.parametrize("flag, message", [
    ("--temprature=0", "collect.py: error: unrecognized arguments: --temprature=0"),
    ("--best_of=2", "collect.py: error: --best_of (2 or more) and --critic need each other")])
def test_a_stage_that_fails_shows_its_error(flag, message, folder):
    with Terminal("--model", "x", flag, cwd=folder) as t:
        *_, last = t.read().splitlines()
        assert last.startswith(message) and t.process.wait() == 1 and "Traceback" not in t.text


def test_before_the_dialogue_a_critic_is_known_to_be_one():
    talk = runpy.run_path(TALK[1])
    with pytest.raises(SystemExit, match="error: --critic runs/x is no critic that train_critic"):
        talk["main"](SimpleNamespace(critic="runs/x"), [])


def test_without_a_terminal_or_without_tasks_it_says_so(tasks, tmp_path):
    done = subprocess.run([*TALK, "--model", "x"], input=lines(tasks), capture_output=True,
                          text=True, start_new_session=True)
    complaint(done, "talk.py needs a terminal")
    with Terminal("--model", "x", cwd=tmp_path) as t:
        assert t.read().startswith("error: no tasks on stdin, and runs/tasks.jsonl can't be read")


@pytest.mark.full
def test_a_failed_episode_of_a_model_and_ctrl_c(tiny_dir, folder):
    """At a prompt, and while the model is loaded."""
    flags = ["--model", tiny_dir, "--max_tokens", 9, "--max_turns", 2, "--candidates", 16]
    with Terminal(*flags, cwd=folder) as t:
        t.read("you    ")
        t.type("no\n")
        end = t.read("Enter: ")
        assert "reward 0.00: 0 of 10 tests passed (the agent submitted no answer)\n" in end
        assert end.count('  raised "') == 10 and "advantage" not in end
        t.type("\n")
        t.read("you    ")
        assert t.leave("\x03") == -signal.SIGINT
    with Terminal(*flags, cwd=folder) as t:
        t.read("loading")
        assert t.leave("\x03") == -signal.SIGINT
