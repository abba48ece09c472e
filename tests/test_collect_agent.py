"""collect.py --agent: a chat model behind an address, and a file with act()."""
import ast
import asyncio
import json
import math
import re
from collections import Counter

import pytest

import colbench
import collect
import evaluate
from colbench import ANSWER, agent_messages, first_message
from conftest import key_of, lines, records, succeed
from test_collect_endpoints import Server, chat
from utils import rng


@pytest.fixture(autouse=True)
def no_model_is_touched(monkeypatch):
    for name in ("find_model", "load_lm", "weights_digest"):
        monkeypatch.setattr(collect, name, lambda *_, **__: pytest.fail("a model was read"))


def agent_file(folder, code, **names):
    """The path of a file with this code, in which these names have these values."""
    file = folder / "agent.py"
    file.write_text("".join(f"{name} = {value!r}\n" for name, value in names.items()) + code)
    return file


# --- a file ---------------------------------------------------------------------------------------

REPLAY = """
import json
LEFT = [json.loads(line) for line in open(EPISODES)]
NOW = {}
%s act(task, history):
    history[0]["content"] = task["problem_description"] = "changed by the agent"
    if len(history) == 1:  # the task's next episode; one runs at a time
        NOW[task["id"]] = LEFT.pop(next(i for i, r in enumerate(LEFT)
                                        if r["task"]["id"] == task["id"]))
    return %s(NOW[task["id"]]["dialogue_history"][len(history)])
text = lambda message: message["output"]
whole = lambda message: message
bare = lambda message: {"output": message["output"], "content": "ours is another", "role": None}
"""
SCRIPTED = """
import random
draw = random.Random(SEED)
def act(task, history):
    '''Asks, thinks aloud, answers, in all the ways that agents have.'''
    text = draw.choice(["which rate?", "", "what is the fee?", "x" * 900, "\\udc80 cap?",
                        ANSWER, f"{ANSWER} def f(): return 1", f"```\\n{ANSWER}\\nx = 1\\n```"])
    before = draw.choice(["", "", f"{ANSWER}? OUTPUT: ", f"<think>{ANSWER}</think>", "<think>"])
    return before + text
"""


@pytest.mark.parametrize("form", ["def text", "async def text", "def whole", "async def bare"])
@pytest.mark.parametrize("source", ["a model's", 1, 2])
def test_a_replayed_agent_gives_the_same_records(form, source, tasks, episodes, playing, tmp_path):
    """Field by field, but for tokens and meta, whatever was said and whoever said it."""
    flags = ["--max_turns", 4, "--concurrency", 1]
    if source != "a model's":
        scripted = agent_file(tmp_path, SCRIPTED, SEED=source, ANSWER=ANSWER)
        episodes, _, _ = playing(tasks, "--agent", scripted, "-k", 5, *flags)
        assert len({len(r["dialogue_history"]) for r in episodes}) > 2
        assert {r["answered"] for r in episodes} == {True, False}
    (tmp_path / "episodes").write_text(lines(sorted(episodes, key=key_of)))
    define, _, text = form.rpartition(" ")
    agent = agent_file(tmp_path, REPLAY % (define, text), EPISODES=str(tmp_path / "episodes"))
    ks = {task_id: sum(r["task"]["id"] == task_id for r in episodes) for task_id, _ in
          map(key_of, episodes)}
    (k,) = set(ks.values())
    again, _, end = playing(tasks, "--agent", agent, "-k", k, *flags)
    assert end is None

    def known(record):
        """Without what only a model has, or a message that is but a text."""
        kept = {name: x for name, x in record.items() if name not in ("usage", "meta")}
        unknown = {"token_ids", "logprobs", "candidates"} | ({"cut"} if text != "whole" else set())
        kept["dialogue_history"] = [{name: x for name, x in m.items() if name not in unknown}
                                    for m in record["dialogue_history"]]
        return kept
    by_key = {key_of(r): r for r in again}
    assert len(by_key) == len(again) == len(episodes)
    for r in episodes:
        assert known(by_key[key_of(r)]) == known(r)
        if text == "whole":
            assert by_key[key_of(r)]["dialogue_history"] == r["dialogue_history"]


@pytest.mark.parametrize("returned, why", [
    ("None", "ValueError: act()'s message is not an object"), ("5", "is not an object"),
    ("['text']", "is not an object"),
    *((message, "ValueError: act()'s message has no output") for message in (
        "{'text': 'x'}", "{'content': 'x'}", "{'output': None}")),
    ("{'output': 5}", "act()'s message.output is not text"),
    ("{'output': 'x', 'token_ids': 'abc'}", "act()'s message.token_ids is not a list"),
    ("{'output': 'x', 'of': open}", "TypeError: Object of type builtin_function"),
    ("1 / 0", "ZeroDivisionError")])
def test_a_message_that_no_record_can_hold_fails_its_episode(returned, why, tasks, playing,
                                                             tmp_path):
    bad = tasks[0]["task"]["id"]
    agent = agent_file(tmp_path, "def act(task, history):\n"
                       f"    return {returned} if task['id'] == {bad!r} else 'which rate?'\n")
    played, said, end = playing(tasks, "--agent", agent, "--max_turns", 2)
    assert len(played) == len(tasks) - 1
    assert f"task {bad}, sample 0 failed: " in said and why in said
    assert ("Traceback" in said) == any(x in why for x in ("TypeError", "ZeroDiv"))
    assert str(end).startswith("error: 1 episodes failed; --resume FILE reruns them")


def test_an_agent_that_fails_always_ends_the_run(tasks, playing, tmp_path):
    agent = agent_file(tmp_path, "async def act(task, history):\n    raise OSError('gone')\n")
    _, said, end = playing(tasks, "--agent", agent, "-k", 30, "--concurrency", 2)
    n_failed = said.count(" failed: OSError: gone\n")
    assert n_failed in (16, 17)  # one more may have been running
    assert said.count("\n16 episodes in a row failed, so no further one starts\n") == 1
    assert str(end).startswith(f"error: {n_failed} episodes failed; --resume FILE reruns them")
    with pytest.raises(SystemExit, match="agent.py defines no act()"):
        agent_file(tmp_path, "")
        args = collect.get_args(["--agent", str(agent)])
        asyncio.run(collect.EpisodeRunner(args).load())


# --- flags ----------------------------------------------------------------------------------------

def test_two_seeds_of_an_agent_that_has_none_are_one_run(tasks, playing, tmp_path):
    """evaluate.py would pool them as two, so the seed is no setting, as the model is none."""
    agent = agent_file(tmp_path, "def act(task, history):\n    return 'which rate?'\n")
    server = Server(lambda *_: chat("which rate?"))
    for who in (agent, server.url, "fixed:which rate?"):
        one, two = (sorted(playing(tasks, "--agent", who, "--max_turns", 2, "--seed", seed)[0],
                           key=key_of) for seed in (0, 1))
        assert one == two and not {"seed", "model", "model_weights"} & one[0]["meta"].keys()


@pytest.mark.parametrize("flags", [["--candidates", 4], ["--best_of", 2, "--critic", "c.py"]])
def test_an_agent_has_no_candidates_and_no_critic(flags):
    """A record's meta would say that its messages were chosen by a critic."""
    with pytest.raises(SystemExit, match="^error: --candidates and --best_of need a --model"):
        collect.get_args(["--agent", "fixed:x", *map(str, flags)])


def test_an_agent_is_an_address_a_text_or_a_file():
    with pytest.raises(SystemExit, match="--agent gpt-4o: give the http://host:port/v1 of an LLM"):
        asyncio.run(collect.EpisodeRunner(collect.get_args(["--agent", "gpt-4o"])).load())


@pytest.mark.parametrize("changed, why", [
    ("file", "agent agent.py "), ("model", "agent_model m, not n"),
    ("temperature", "temperature 1.0, not 0.5")])
def test_episodes_are_resumed_only_with_the_same_agent(changed, why, tasks, playing, tmp_path):
    server, done = Server(lambda *_: chat("which rate?")), tmp_path / "all.jsonl"
    agent = agent_file(tmp_path, "def act(task, history):\n    return 'which rate?'\n")
    flags = ["--agent", agent if changed == "file" else server.url, "--max_turns", 1]
    played, _, _ = playing(tasks[:2], *flags)
    done.write_text(lines(played))
    flags += ["--resume", done]
    again, _, end = playing(tasks, *flags)
    assert end is None and {key_of(r)[0] for r in again} == {t["task"]["id"] for t in tasks[2:]}
    agent.write_text(agent.read_text() + "\n")
    if changed == "temperature":
        flags += ["--temperature", 0.5]
    else:
        server.models = ["n"]
    again, _, end = playing(tasks, *flags)
    assert not again and f"{done} holds episodes with {why}" in str(end)


# --- a server -------------------------------------------------------------------------------------

class Conversation:
    """A server that is agent and human at once, and checks what it is sent in either role.

    The agent is known by its temperature. What it says is a function of what it read, so that the
    record can be predicted.
    """

    def __init__(self, tasks, usage=True):
        self.tasks, self.usage = [t["task"] for t in tasks], usage
        self.server = Server(self.reply)

    def completion(self, messages, content, why="stop", **fields):
        """Its usage is a function of the contents, too."""
        reply = chat(content, why)
        reply["choices"][0]["message"] |= fields
        if self.usage:
            read = sum(len(m["content"]) for m in messages)
            reply["usage"] = {"prompt_tokens": read, "completion_tokens": len(content),
                              "total_tokens": read + len(content)}
        return reply

    def reply(self, path, body):
        assert path == "/v1/chat/completions"
        messages = body["messages"]
        if body["temperature"] == 0:
            assert body.keys() == {"model", "messages", "temperature", "max_tokens"}
            return self.completion(messages, self.human_says(messages[0]["content"]))
        assert body.keys() == {"model", "messages", "temperature", "top_p", "max_tokens"}
        assert [m.keys() for m in messages] == [{"role", "content"}] * len(messages)
        roles = [m["role"] for m in messages]
        assert roles == (["user", "assistant"] * 5)[:len(roles)] and roles[-1] == "user"
        assert all(t["ground_truth"] not in m["content"] and "SECRET" not in m["content"]
                   for t in self.tasks for m in messages)
        return self.completion(messages, *self.agent_says(messages), reasoning_content="SECRET",
                               refusal=None, tool_calls=None)

    @staticmethod
    def human_says(prompt):
        assert "SECRET" not in prompt
        return f"it is {rng(prompt).randrange(10 ** 6)}"

    @staticmethod
    def agent_says(messages):
        """Returns (content, finish_reason)."""
        r = rng([m["content"] for m in messages])
        text = r.choice(["which rate?", f"{ANSWER} def f(x): return {r.random()}", "and the cap"])
        thought = r.choice(["", "<think>SECRET</think> ", "SECRET?</think>\n\n", "SECRET OUTPUT: "])
        return thought + text, r.choice(["stop", "stop", "length"])


@pytest.mark.parametrize("usage", [True, False])
def test_a_server_plays_the_agent_and_the_human_and_sees_only_what_they_may(
        usage, tasks, playing, capsys):
    both = Conversation(tasks, usage)
    flags = ["--agent", both.server.url, "--human", both.server.url, "--max_turns", 3, "-k", 6]
    played, said, end = playing(tasks, *flags, "--max_tokens", 77)
    assert end is None and len(played) == 6 * len(tasks)
    total = Counter()
    for r in played:
        history, cost = r["dialogue_history"], Counter()
        assert history[0] == first_message(r["task"], 3)
        assert r["meta"]["agent"] == both.server.url and r["meta"]["agent_model"] == "m"
        for t in range(1, len(history)):
            if t % 2 == 0:
                prompt = colbench.human_prompt(r["task"], history[:t])
                assert history[t]["content"] == both.human_says(prompt)
                cost.update(human_prompt_tokens=len(prompt), human_replies_by_None=1,
                            human_completion_tokens=len(history[t]["content"]))
                continue
            content, why = both.agent_says(history[:t])
            cost.update(agent_prompt_tokens=sum(len(m["content"]) for m in history[:t]),
                        agent_completion_tokens=len(content), agent_replies_by_None=1)
            shown = content.rpartition("</think>")[2].strip()
            want = {"role": "assistant", "output": shown,
                    "content": shown.rpartition("OUTPUT: ")[2],
                    **({"cut": True} if why == "length" else {}),
                    **({"completion_tokens": len(content)} if usage else {})}
            assert history[t] == want
        reported = dict(cost) if usage else {
            name: n for what, n in cost.items() if "replies" in what
            for name in (what, what.replace("by_None", "without_tokens"))}
        assert r["usage"] == reported
        total.update(reported)
        assert ("cut" in str(history)) == any("cut" in m for m in agent_messages(r))
    assert any("cut" in m for r in played for m in agent_messages(r)[:-1])  # shown to the human
    assert Counter(ast.literal_eval(said.rpartition("\nusage: ")[2])) == total
    for r in played:
        r["reward"] = 0.0
    metrics = [evaluate.episode_metrics(r) for r in played]
    if usage:
        assert sum(m["tokens"] for m in metrics) == total["agent_completion_tokens"]
    else:
        assert all(math.isnan(m["tokens"]) for m in metrics)


def test_parameters_change_the_requests_and_choose_the_model(tasks, playing):
    server = Server(lambda path, body: chat("which rate?"))
    server.models = ["a", "b"]
    flags = ["--agent", server.url, "--max_turns", 1]
    _, _, end = playing(tasks[:1], *flags)
    assert str(end) == (f"error: {server.url} serves a, b; choose one by --human_params "
                        "or --agent_params, or for --engine by --model")
    params = {"model": "b", "max_tokens": None, "max_completion_tokens": 9, "temperature": 0.25}
    (r,), _, _ = playing(tasks[:1], *flags, "--agent_params", json.dumps(params))
    ((_, body, _),) = server.seen
    assert body.keys() == {"model", "messages", "temperature", "top_p", "max_completion_tokens"}
    assert body["model"] == r["meta"]["agent_model"] == "b" and body["temperature"] == 0.25
    assert r["meta"]["agent_params"] == params


def test_a_message_without_text_fails_its_episode_and_says_what_to_try(tasks, playing):
    """Also a thought that does not end. The next episodes run. Without a finish_reason it is whole.
    """
    bad = iter([chat(""), chat(None, "length"), chat("<think>so", "length"),
                chat("<think>so</think>\n"), chat("which", "content_filter"), chat("which", None)])
    server = Server(lambda *_: next(bad, chat("which rate?")))
    flags = ["--agent", server.url, "--max_turns", 1, "--concurrency", 1, "-k", 2]
    played, said, end = playing(tasks, *flags)
    sent = [agent_messages(r)[0]["content"] for r in played]
    assert sent == ["which", "which rate?", "which rate?"]
    assert str(end).startswith("error: 5 episodes failed")
    reasons = re.findall(r"failed: ValueError: the reply is empty or incomplete: (.*)", said)
    assert reasons == ["stop", "length", "length", "stop", "content_filter"]
    assert {type(n) for r in playing.failed for n in r["usage"].values()} == {int}


@pytest.mark.parametrize("agents, humans, want", [
    ("sesame", "poppy", ("sesame", "poppy")), (None, "poppy", ("poppy", "poppy")),
    ("sesame", None, ("sesame", "none")), ("", "poppy", ("poppy", "poppy"))])
def test_agent_and_human_have_keys_of_their_own(agents, humans, want, tasks, playing, monkeypatch):
    for name, key in (("AGENT_API_KEY", agents), ("OPENAI_API_KEY", humans)):
        monkeypatch.delenv(name, raising=False)
        if key is not None:
            monkeypatch.setenv(name, key)
    agent, human = Server(lambda *_: chat("which rate?")), Server(lambda *_: chat("4"))
    playing(tasks[:1], "--agent", agent.url, "--human", human.url, "--max_turns", 2)
    assert {key for _, _, key in agent.seen} == {f"Bearer {want[0]}"}
    assert {key for _, _, key in human.seen} == {f"Bearer {want[1]}"}


def test_an_agent_designs_pages_as_any_other(playing):
    """Its answer is the last page that it sent; its dialogue has the page that the human saw."""
    task = {"id": "p", "kind": "frontend", "problem_description": "a blue page",
            "ground_truth": "<html>blue</html>"}
    pages = iter(["Here: <html>1</html>", "<think>larger</think><html>2</html>!", "Sorry, no."])
    server = Server(lambda *_: chat(next(pages)))
    flags = ["--agent", server.url, "--human", "fixed:larger", "--max_turns", 3]
    (r,), _, _ = playing([{"task": task}], *flags)
    assert r["answer"] == "<html>2</html>" and not r["answered"]
    assert [m["content"] for m in agent_messages(r)] == [
        "Here: <html>1</html>", "<html>2</html>!", "Sorry, no."]


def test_the_command_line_grades_and_evaluates_an_agent(tasks, tmp_path):
    """Without a model on the disk: its name would be looked up on the hub."""
    agent = agent_file(tmp_path, "def act(task, history):\n    return ANSWER + task['ground_truth']"
                       "\n", ANSWER=ANSWER)
    done = succeed("collect.py", "--agent", agent, "--human", "fixed:no", stdin=tasks)
    graded = records(succeed("colbench.py", "grade", stdin=records(done.stdout)).stdout)
    assert [r["reward"] for r in graded] == [1.0] * len(tasks)
    (row,) = records(succeed("evaluate.py", stdin=graded).stdout)
    assert row["success"] == 1 and row["turns"] == 1
