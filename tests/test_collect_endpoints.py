"""Servers as human, engine and judge: real HTTP, to a server of the test's own that fails."""
import asyncio
import base64
import http.server
import itertools
import json
import random
import re
import runpy
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import colbench
import collect
import model as M
from conftest import ROOT, dialogue, key_of, turns_of
from utils import rng


class Server(http.server.ThreadingHTTPServer):
    """An OpenAI-compatible server: `reply(path, body)` gives the JSON, or (text, status), or a
    function that answers the request by its handler.

    trouble: the share of requests that fail in passing, in the ways that servers have. refuse: a
    status for all of them.
    """
    daemon_threads, request_queue_size = True, 256

    def __init__(self, reply, trouble=0.0, refuse=None):
        self.reply, self.trouble, self.refuse = reply, trouble, refuse
        self.models, self.random = ["m"], random.Random(0)
        self.seen, self.lock = [], threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, *_):
        pass  # a client that gave up


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def send(self, text, status=200, length=None):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(length or len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        if self.path != "/v1/models":
            return self.send('{"detail": "Not Found"}', 404)
        self.send(json.dumps({"data": [{"id": name} for name in self.server.models]}))

    def do_POST(self):
        s, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with s.lock:
            s.seen.append((self.path, body, self.headers["Authorization"]))
            fails = s.random.random() < s.trouble
            trouble = s.random.choice([500, 429, "cut"]) if fails else None
        if s.refuse or trouble in (500, 429):
            return self.send('{"error": "busy"}', s.refuse or trouble)
        good = s.reply(self.path, body)
        if isinstance(good, tuple):  # text and status
            return self.send(*good)
        if callable(good):
            self.close_connection = True
            return good(self)
        if trouble == "cut":
            self.close_connection = True
            return self.send(json.dumps(good)[:20], length=999)
        self.send(json.dumps(good))


def chat(text, why="stop"):
    return {"choices": [{"finish_reason": why, "message": {"role": "assistant", "content": text}}]}


def said(path, body):
    """A human who says a number that is a function of what it read."""
    return chat(f"it is {rng(body['messages'][0]['content']).randrange(10 ** 6)}")


PLAY = ["--max_turns", 3, "--max_tokens", 12]


# --- the human ------------------------------------------------------------------------------------

def test_a_human_who_dies_ends_the_run_by_one_line(tasks, playing):
    """What ended before is written; of 400 episodes few are begun after that."""
    def reply(path, body):
        human.refuse = 503 if len(human.seen) >= 40 else None  # of several threads
        return said(path, body)
    human = Server(reply)
    flags = ["-k", 100, "--concurrency", 16, "--retries", 0, "--human", human.url]
    played, told, end = playing(tasks, *PLAY, *flags)
    assert re.search(f"sample \\d+ failed: OSError: {human.url}: .*503", told)
    assert told.count("\n16 episodes in a row failed, so no further one starts\n") == 1
    assert re.match("error: \\d+ episodes failed; --resume FILE reruns them, and what", str(end))
    assert 5 < len(played) < 40 and len(human.seen) < 200


def test_an_llm_humans_reply_is_short_and_quotes_no_code_however_spaced(tasks, playing):
    """The fact that it may tell stays, if it is none of the code."""
    prose = "the rate is four percent a year"
    task = {**tasks[0]["task"], "hidden_information": prose + "\nthere is no fee"}
    code = task["ground_truth"].replace(" ", "  ")
    human = Server(lambda path, body: chat(f"hi \ud83d, {prose}: {code} " + "so " * 300))
    params = '{"max_tokens": null, "max_completion_tokens": 20, "top_p": 0.5}'
    played, _, _ = playing([{"task": task}], *PLAY, "--human_params", params, "--human", human.url)
    replies = [m["content"] for r in played for m in r["dialogue_history"][2::2]]
    start = f"hi ?, {prose}: [...] so so"
    assert replies and all(r.startswith(start) and len(r) <= 400 for r in replies)
    for _, body, _ in human.seen:
        assert "max_tokens" not in body and body["max_completion_tokens"] == 20
        assert body["temperature"] == 0 and body["top_p"] == 0.5
        assert prose in body["messages"][0]["content"]


CODE = "def f(x):\n    total = x * 34 + 7\n    if y:\n        return y\n"


def test_lines_of_the_reference_are_redacted_and_what_is_like_them_is_not():
    task = {"ground_truth": CODE}
    assert collect.redact("use total=x*34 +7 there", task) == "use [...] there"
    assert collect.redact(f"so: {CODE.strip().replace(' ', '  ')}!", task) == "so: [...]!"
    free = "multiply by 34 and add 7; if y: return"
    assert collect.redact(free, task) == free


def test_short_lines_that_are_long_together_are_redacted():
    r = random.Random(0)
    for _ in range(300):
        lines = [f"v{i} = {r.randrange(9)}" for i in range(9)]
        a, b = sorted(r.sample(range(10), 2))
        quote = r.choice(["\n", " "]).join(lines[a:b])
        got = collect.redact(f"so {quote}, ok", {"ground_truth": "\n".join(lines)})
        assert got == f"so {'[...]' if b - a > 2 else quote}, ok"


NAMES = "You", "User", "Human", "The human", "Colleague"
FORMS = "{}:", "**{}:**", "**{}**:", "*{}*:", "[{}]:", "### {}:"
WORDS = ["It is 4 percent.", "The prize for you: 3 euros.", "Call f(user: 3) then?", "half\nof it",
         "- user: the name\n- agent: the browser", "{\n    you: 3,\n    agent: 4\n}",
         "user:secret", "As I said, you, the agent: no"]


def test_an_llm_human_speaks_for_itself_only():
    """Of a dialogue that it writes, however it marks the speakers, the first words are the reply."""
    r = random.Random(0)

    def label(names):
        style = r.choice([str, str.upper, str.lower])
        return r.choice(FORMS).format(style(r.choice(names))) + r.choice([" ", "\n", "  "])

    for _ in range(2000):
        own, more, other = r.sample(WORDS, 3)
        assert collect.first_speech(own) == own
        reply = r.choice(["", label(NAMES)]) + own
        if r.random() < 0.5:
            reply += r.choice(["\n", "\n\n"]) + label(["Assistant", "Agent", "AI assistant", "AI"])
            reply += other + r.choice(["", f"\n{label(NAMES)}{more}"])
        assert collect.first_speech(reply) == own, reply
        assert collect.first_speech(f"{label(['Assistant', 'AI'])}\n{reply}") == own, reply
    assert collect.first_speech("Assistant: It is 4.") == "It is 4."
    assert collect.first_speech("You:\nAssistant:") == collect.first_speech("") == ""


def test_the_agent_does_not_read_what_the_human_says_for_others(tasks, playing):
    told = ["You: it is {}", "**Human:** it is {}\n\n**Assistant:** And the fee?\nYou: 13",
            "it is {}", "it is {}\nassistant: And the fee?"]
    turn = itertools.count()
    human = Server(lambda path, body: chat(told[next(turn) % 4].format(4)))
    played, _, _ = playing(tasks[:4], *PLAY, "--concurrency", 1, "--human", human.url)
    replies = [m["content"] for r in played for m in r["dialogue_history"][2::2]]
    assert len(replies) >= 4 and {*replies} == {"it is 4"}
    nobody = Server(lambda path, body: chat("You:\nAssistant:"))
    playing(tasks[:4], *PLAY, "--human", nobody.url)
    reasons = {r["failed"] for r in playing.failed}
    assert reasons == {"ValueError: the reply is only a speaker's name"}


def test_the_manuals_human_reads_the_dialogue_with_roles_exchanged(tasks, tmp_path, playing,
                                                                   monkeypatch):
    text = Path(ROOT, "tests/experiments/MANUAL.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"<!-- human -->\n```python\n(.*?)```", text, re.S)
    (tmp_path / "mine.py").write_text(code)
    server = Server(lambda path, body: chat(f"it is {len(body['messages'])}"))
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    flags = ["--max_turns", 3, "--max_tokens", 12]
    (r,), _, _ = playing(tasks[:1], *flags, "--human", tmp_path / "mine.py")
    history = r["dialogue_history"]
    assert [m["content"] for m in history[2::2]] == ["it is 2", "it is 4"]
    system, *others = server.seen[-1][1]["messages"]
    assert system["role"] == "system" and system["content"].endswith(r["task"]["ground_truth"])
    assert [m["role"] for m in others] == ["user", "assistant", "user"]
    assert [m["content"] for m in others] == [m["content"] for m in history[1:4]]


def test_the_manuals_agent_reads_roles_and_contents(tasks, tmp_path, playing, monkeypatch):
    text = Path(ROOT, "tests/experiments/MANUAL.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"<!-- agent -->\n```python\n(.*?)```", text, re.S)
    (tmp_path / "agent.py").write_text(code)
    server = Server(lambda path, body: {
        **chat(f"question {len(body['messages'])}?"), "usage": {"completion_tokens": 7}})
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    (r,), _, _ = playing(tasks[:1], "--max_turns", 2, "--agent", tmp_path / "agent.py")
    history = r["dialogue_history"]
    assert [m["content"] for m in history[1::2]] == ["question 1?", "question 3?"]
    assert all(m["completion_tokens"] == 7 and not m["cut"] for m in history[1::2])
    seen = server.seen[-1][1]["messages"]
    assert seen == [{name: m[name] for name in ("role", "content")} for m in history[:3]]


# --- the engine -----------------------------------------------------------------------------------

def draw(prompt, seed, most, stop):
    """(token_ids, logprobs) that are functions of prompt and seed."""
    r = rng(prompt, seed)
    ids = [r.randrange(6, 300) for _ in range(r.randrange(1, most))] + stop[:1]
    return ids, [-i / 8 for i in range(len(ids))]


def sampled(path, body):
    """What a vLLM server says: n draws, the i-th by seed + i."""
    assert path == "/v1/completions" and body["n"] == 1 or body["temperature"] > 0
    drawn = [draw(body["prompt"], body["seed"] + i, body["max_tokens"], body["stop_token_ids"])
             for i in range(body["n"])]
    return {"choices": [{"finish_reason": "stop", "token_ids": ids,
                         "logprobs": {"token_logprobs": logprobs}} for ids, logprobs in drawn]}


@pytest.mark.full
@pytest.mark.parametrize("temperature", [1, 0])
def test_flaky_servers_lose_no_episode_and_nothing_is_made_up(temperature, tiny_dir, tasks,
                                                              playing):
    """The engine's tokens are those for the rendered prompts, the human's replies to the dialogue.
    """
    server = Server(lambda *asked: (said if "messages" in asked[1] else sampled)(*asked), 0.2)
    flags = [*PLAY, "-k", 2, "--engine", server.url, "--temperature", temperature,
             "--human", server.url]
    top_p, candidates = 1, 0
    if temperature:
        top_p, candidates = 0.9, 3
        flags += ["--top_p", top_p, "--candidates", candidates]
    got, told, _ = playing(tasks, *flags)
    got.sort(key=key_of)
    again = sorted(playing(tasks, *flags)[0], key=key_of)
    assert got == again  # each draw has a seed of its own
    assert [*map(key_of, got)] == sorted((t["task"]["id"], i) for t in tasks for i in range(2))
    chat_of_model = M.find_model(tiny_dir)[1]
    bodies = [body for _, body, _ in server.seen if "prompt" in body]
    assert all(b["temperature"] == temperature and b["top_p"] == top_p for b in bodies)
    stop, seeds = bodies[0]["stop_token_ids"], set()
    for r in got:
        history = r["dialogue_history"]
        turns = turns_of(chat_of_model, {"dialogue_history": history})
        for n, (m, (prompt, action)) in enumerate(zip(history[1::2], turns)):
            seed = rng(0, *key_of(r), n, 0).getrandbits(31)
            ids = [*map(ord, prompt)]
            draws = [draw(ids, seed + i, 12, stop) for i in range(1 + candidates)]
            assert (m["token_ids"], m["logprobs"]) == draws[0]
            assert [*map(ord, action)] == draws[0][0]
            assert [(c["token_ids"], c["logprob"]) for c in m.get("candidates", ())] == [
                (ids, round(sum(logprobs), 6)) for ids, logprobs in draws[1:]]
            seeds.add(seed)
        for t in range(2, len(history), 2):
            asked = {"messages": [{"content": colbench.human_prompt(r["task"], history[:t])}]}
            assert history[t]["content"] == said("", asked)["choices"][0]["message"]["content"]
    assert {b["seed"] for b in bodies} == seeds  # one request a turn, but for those asked again
    assert {b["n"] for b in bodies} == {1 + candidates}


def test_each_message_of_an_engine_has_a_seed_of_its_own(tasks, playing):
    """It depends on the task, the sample, the turn and --seed, and on nothing else."""
    def seeds(*flags):
        server = Server(sampled)
        played, _, _ = playing(tasks[:2], *PLAY, "-k", 2, "--engine", server.url, *flags)
        turns = sum(len(colbench.agent_messages(r)) for r in played)
        bodies = [body for path, body, _ in server.seen if path == "/v1/completions"]
        found = {body["seed"] for body in bodies}
        assert turns == len(bodies) == len(found) > len(played) == 4
        return found
    first = seeds()
    assert seeds("--concurrency", 1) == first and not seeds("--seed", 9) & first


DRAWN = {"finish_reason": "length", "token_ids": [7], "logprobs": {"token_logprobs": [-0.5]}}


@pytest.mark.parametrize("choice", [
    {**DRAWN, "finish_reason": "abort"}, {**DRAWN, "logprobs": None}, {**DRAWN, "token_ids": []},
    {**DRAWN, "token_ids": None}, {**DRAWN, "token_ids": [10 ** 6]},
    *({**DRAWN, "logprobs": {"token_logprobs": [x]}} for x in (None, -9999.0))])
def test_a_reply_that_is_of_no_use_is_no_action(choice, tasks, playing):
    def sample(choice):
        server = Server(lambda *_: {"choices": [choice]})
        return playing(tasks[:1], "--engine", server.url, *PLAY, "--max_turns", 1)
    (r,), _, end = sample(DRAWN)
    assert not end and colbench.agent_messages(r)[0]["token_ids"] == [7]
    assert "1 episodes failed" in str(sample(choice)[2]) and not sample(choice)[0]


# --- what is sent ---------------------------------------------------------------------------------

def test_the_bodies_of_requests_have_these_fields_and_no_others(tasks, tiny_dir, playing):
    """A sampling parameter that a server's own default would change is sent, too."""
    server = Server(lambda path, body: (said if "messages" in body else sampled)(path, body))
    flags = ["--max_turns", 2, "--human", server.url, "--top_p", 0.9]
    playing(tasks[:1], *flags, "--engine", server.url, "--max_tokens", 12, "--candidates", 2,
            "--temperature", 0.7)
    playing(tasks[:1], *flags, "--agent", server.url, "--max_tokens", 55)
    stop = sorted(M.find_model(tiny_dir)[1].stop)
    (engine, human, *_), (agent,) = ([body for _, body, _ in server.seen[i:j]]
                                     for i, j in ((0, 2), (-3, -2)))
    assert engine.pop("prompt") and 0 <= engine.pop("seed") < 2 ** 31
    assert engine == {
        "model": "m", "n": 3, "max_tokens": 12, "temperature": 0.7, "top_p": 0.9, "top_k": 0,
        "min_p": 0, "repetition_penalty": 1, "stop_token_ids": stop, "skip_special_tokens": False,
        "logprobs": 0, "return_token_ids": True}
    assert human.pop("messages")[0]["role"] == "user"
    assert human == {"model": "m", "temperature": 0, "max_tokens": 1024}
    assert agent.pop("messages") == [colbench.first_message(tasks[0]["task"], 2)]
    assert agent == {"model": "m", "temperature": 1, "top_p": 0.9, "max_tokens": 55}


def test_an_llm_human_reads_who_said_what_in_order(tasks, playing):
    """The agent is the assistant, the human is "You", and the agent's instructions are left out."""
    human = Server(lambda path, body: chat(f"reply {len(human.seen)}!"))
    secret = {**tasks[0]["task"], "hidden_information": "the fee is {dialogue} 4"}
    (r,), _, _ = playing([{"task": secret}], "--max_turns", 4, "--max_tokens", 5, "--human",
                         human.url)
    texts = [m["content"] for m in r["dialogue_history"]]
    for n, (_, body, _) in enumerate(human.seen):
        prompt = body["messages"][0]["content"]
        names = itertools.cycle(["Assistant", "You"])
        expected = "\n".join(f"{name}: {text}" for name, text in zip(names, texts[1:2 * n + 2]))
        assert f"\n{expected}\n" in prompt and prompt.count(expected) == 1
        assert "\nthe fee is {dialogue} 4\n" in prompt
    assert texts[2::2] == [f"reply {n}!" for n in (1, 2, 3)]


# --- secrets --------------------------------------------------------------------------------------

@pytest.mark.parametrize("role", ["agent", "human"])
def test_no_redirect_carries_key_or_prompt_to_another_host(role, tasks, playing, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    other = Server(said)
    gets = []
    monkeypatch.setattr(Handler, "do_GET", lambda self: gets.append(self.server))

    def moved(status):
        def answer(handler):
            handler.send_response(status)
            handler.send_header("Location", f"{other.url}/chat/completions")
            handler.send_header("Content-Length", "0")
            handler.end_headers()
        return lambda path, body: answer
    for status in (301, 302, 303, 307, 308):
        server = Server(moved(status))
        given = {"agent": "fixed:hi", "human": "fixed:ok", role: server.url}
        flags = [f"--{role}_params", '{"model": "m"}', "--max_turns", 2, "--retries", 1]
        played, told, _ = playing(tasks[:1], *flags, "--agent", given["agent"], "--human",
                                  given["human"])
        assert not played and str(status) in told
        assert len(server.seen) == 1 and not other.seen and not gets


def test_what_may_be_a_password_in_an_address_is_sent_and_nowhere_written(tasks, playing):
    """In records, on stderr, in errors."""
    r, letters = random.Random(0), "abcdefgh0123456789%.-_~"
    for _ in range(6):
        user, password, key = ("".join(r.choices(letters[:18], k=9)) for _ in range(3))
        server = Server(lambda path, body: chat("which rate?"))
        address = server.url.replace("//", f"//{user}:{password}@")
        with_key = f"{address}?key={key}"  # which does not work
        for address, params, works in ((address, {}, True), (address, {"model": "m"}, True),
                                       (with_key, {}, False), (with_key, {"model": "m"}, False)):
            server.refuse = None if works else 400
            played, told, end = playing(
                tasks[:1], "--max_turns", 2, "--agent", address, "--human", address, "--retries",
                0, "--agent_params", json.dumps(params), "--human_params", json.dumps(params))
            assert bool(played) == works and bool(end) != works
            for text in (json.dumps(played + playing.failed), told, str(end)):
                assert not any(secret in text for secret in (user, password, key))
            assert all(r["meta"]["human"] == server.url for r in played)
        assert all(auth.startswith("Basic ") for _, _, auth in server.seen)


# --- replies without an end -----------------------------------------------------------------------

def trickle(handler):
    """A byte now and then, first of the headers."""
    for part in [b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"] + 100 * [b" "]:
        handler.wfile.write(part)
        time.sleep(0.1)


@pytest.mark.parametrize("retries", [0, 2])
def test_a_reply_without_an_end_fails_its_episode_soon(retries, tasks, playing):
    """Though each read is short, and however often the request would be retried."""
    server = Server(lambda path, body: trickle)
    start = time.time()
    played, told, end = playing(tasks[:1], "--human", server.url, "--timeout", 2, "--retries",
                                retries, "--max_turns", 2, "--agent", "fixed:hi")
    assert not played and "1 episodes failed" in str(end) and time.time() - start < 8
    assert f"OSError: {server.url}: no reply within --timeout" in told


def test_the_time_limit_is_that_of_a_request_with_its_retries(tasks, playing):
    """Of a server that is busy each time, until it is not, or until the time is over."""
    server = Server(said, refuse=503)
    flags = ["--human", server.url, "--retries", 9, "--max_turns", 2, "--agent", "fixed:hi"]
    start = time.time()
    played, told, _ = playing(tasks[:1], *flags, "--timeout", 2)
    assert not played and "no reply within --timeout" in told
    assert 2 <= time.time() - start < 20 and 1 < len(server.seen) < 9
    threading.Timer(1, lambda: setattr(server, "refuse", None)).start()
    assert len(playing(tasks[:1], *flags, "--timeout", 60)[0]) == 1


# --- a server that is not as it should be ---------------------------------------------------------

def client(server, role="human", retries=8, **body):
    args = SimpleNamespace(timeout=60, retries=retries)
    return collect.Server(args, role, server.url, {"model": "m", **body})


def hear(one, reply_chars=400):
    """What an LLM human says to a message of the agent."""
    task = {"problem_description": "write f", "ground_truth": "def f(): return 1"}
    return asyncio.run(collect.llm_reply(one, task, dialogue("write f", "which rate?")))


@pytest.mark.parametrize("keys, want", [
    (("a", "o", "v"), ("a", "o", "v")), ((None, "o", None), ("o", "o", "none")),
    (("", "o", ""), ("o", "o", "none")), (("a", None, None), ("a", "none", "none"))])
def test_each_role_gets_only_its_own_key(keys, want, monkeypatch):
    for name, key in zip(("AGENT_API_KEY", "OPENAI_API_KEY", "VLLM_API_KEY"), keys):
        monkeypatch.delenv(name, raising=False)
        if key is not None:
            monkeypatch.setenv(name, key)
    server = Server(said)
    for role in ("agent", "human", "engine"):
        hear(client(server, role))
    assert [key for _, _, key in server.seen] == [f"Bearer {key}" for key in want]


def test_a_refused_request_is_not_made_again_and_others_are():
    server = Server(said, refuse=400)
    with pytest.raises(OSError, match=f"{server.url}: .*400"):
        hear(client(server))
    assert len(server.seen) == 1
    server.refuse = 503
    with pytest.raises(OSError, match=f"{server.url}: .*503"):
        hear(client(server, retries=2))
    assert len(server.seen) == 4


EMPTY = "the reply is empty or incomplete: "
SHORT = "the reply is truncated: start a new file with other --human_params"


@pytest.mark.parametrize("reply, why", [
    (chat("<think>4?</think> it is 4"), None),
    (chat("it says 5.\n</think>\n\nit is 4"), None),  # the server's prompt has opened the thought
    *((chat("it is 4", why), None) for why in (None, "eos_token", "end_turn", "COMPLETE")),
    *((chat("it is 4 and", why), SHORT) for why in ("length", "max_tokens")),
    *((chat(text, why), EMPTY + str(why)) for text, why in (
        ("it is 4 and", "content_filter"), ("it is 4 and", "error"), (None, "tool_calls"),
        ("<think>no end", "end_turn"), (None, "stop"), ("", "length")))])
def test_a_humans_reply_is_whole_and_without_thoughts(reply, why):
    one = client(Server(lambda *_: reply))
    if why:
        with pytest.raises(ValueError, match=re.escape(why)):
            hear(one)
    else:
        assert hear(one) == "it is 4"


@pytest.mark.parametrize("kind", ["backend", "frontend"])
def test_a_truncated_reply_is_whole_if_the_agent_reads_no_more_of_it(kind, monkeypatch):
    """Because it is long, or because the human has continued for the agent."""
    limit = colbench.environments()[kind].reply_chars
    task = {"kind": kind, "problem_description": "p", "ground_truth": "g", "hidden_information": ""}
    monkeypatch.setattr(collect, "renderer", lambda: SimpleNamespace(render_pair=lambda *_: []))
    r = random.Random(0)
    for n in [limit - 1, limit, *(r.randrange(2 * limit) for _ in range(20))]:
        more = r.choice(["", "", "\nAssistant: and the", "\n\n**Assistant:** ok\nYou: so"])
        text = "You: " + "x" * n + more
        reply = collect.llm_reply(client(Server(lambda *_: chat(text, "length"))), task,
                                  dialogue("p", "<html>"))
        if n >= limit or n and more:
            assert asyncio.run(reply) == "x" * n
        else:
            with pytest.raises(ValueError, match=SHORT if n else "truncated"):
                asyncio.run(reply)


def test_the_model_is_asked_for_or_given_or_an_error_says_how(tasks, playing):
    server = Server(lambda path, body: chat(f"I am {body['model']}"))
    flags = ["--agent", server.url, "--max_turns", 1, "--retries", 0]
    for models, params, why in (
            (["a"], {}, None), (["a", "b"], {"model": "b"}, None), ([], {"model": "b"}, None),
            (["a", "b"], {}, f"{server.url} serves a, b; choose one by --human_params"),
            ([], {}, f"{server.url} serves ; choose one by ")):
        server.models = models
        played, told, end = playing(tasks[:1], *flags, "--agent_params", json.dumps(params))
        assert why in str(end) if why else end is None
        for r in played:
            name = params.get("model", "a")
            assert r["meta"]["agent_model"] == name
            assert colbench.agent_messages(r)[0]["content"] == f"I am {name}"


def test_a_server_without_a_list_of_models_is_an_error(monkeypatch):
    server = Server(said)
    for status, text in ((401, "no"), (404, "no"), (200, "{}"), (200, "<html>")):
        monkeypatch.setattr(Handler, "do_GET", lambda self: self.send(text, status))
        with pytest.raises(SystemExit, match=f"{server.url}/models has no list of models"):
            asyncio.run(client(server, retries=0).choose_model())
    server.server_close()
    server.shutdown()
    with pytest.raises(SystemExit, match="no list of models .*: Connection error"):
        asyncio.run(client(server, retries=0).choose_model())


def test_the_models_that_answered_are_counted(tasks, playing):
    r = random.Random(0)

    def reply(path, body):
        with server.lock:
            server.answered.append(r.choice("abc"))
            return {**chat("which rate?"), "model": server.answered[-1]}
    server = Server(reply)
    server.answered = []
    played, told, _ = playing(tasks, "-k", 3, "--agent", server.url, "--max_turns", 2)
    for name in "abc":
        what, n = f"agent_replies_by_{name}", server.answered.count(name)
        assert f"'{what}': {n}" in told.splitlines()[-1]
        assert sum(r["usage"].get(what, 0) for r in played) == n


def test_a_file_is_resumed_with_the_humans_model(tasks, tmp_path, playing):
    server, file = Server(said), tmp_path / "all.jsonl"
    flags = [*PLAY, "--human", server.url]
    played, _, _ = playing(tasks[:1], *flags)
    file.write_text("".join(json.dumps(r) + "\n" for r in played))
    assert playing(tasks[:1], *flags, "--resume", file)[2] is None
    server.models = ["n"]
    _, _, end = playing(tasks, *flags, "--resume", file)
    assert "holds episodes with human_model m, not n; " in str(end)


@pytest.mark.parametrize("reply", [
    {"error": {"message": "no luck", "code": 429}}, {"error": "no luck", "choices": None},
    {"choices": [{**chat("it is 4 and", "error")["choices"][0], "error": {"message": "x"}}]}])
def test_an_error_in_a_200_is_no_reply(reply):
    with pytest.raises((LookupError, TypeError, ValueError)):
        hear(client(Server(lambda *_: reply), retries=0))


# --- the judge ------------------------------------------------------------------------------------

def test_a_judge_scores_a_message_by_the_share_of_its_comparisons_that_it_wins(tiny_dir,
                                                                               monkeypatch):
    """In a circle: so < no < no no < no no no = no no no > so."""
    task = {"problem_description": "write f(x)", "ground_truth": "def f(x, rate=3): return x"}
    actions = [{"output": text} for text in ("so", "no", "no no", "no no no", "no no no")]
    judge = f"{ROOT}/tests/experiments/judge.py"
    args = collect.get_args(["--model", tiny_dir, "--best_of", "5", "--critic", judge])

    def prefers_no(path, body):
        prompt = body["messages"][0]["content"]
        a, b = re.search(r"\nA: (.*)\n\nB: (.*)\n\nWhich", prompt, re.S).groups()
        assert "def f(x, rate=3)" in prompt and body["temperature"] == 0 and a != b
        better = "A" if a.count("no") > b.count("no") else "B"
        return chat(f"<think>B or A?</think>The better one is {better}.")

    async def judged(reply):
        monkeypatch.setenv("JUDGE", Server(reply).url)
        critic = (await collect.EpisodeRunner(args).load()).critic
        return await collect.call_user_function(critic, task, dialogue("write f(x)"), actions)
    assert asyncio.run(judged(prefers_no)) == [0, 0.5, 0.5, 0.75, 0.75]
    for reply, error, why in (
            (chat("A is better than B"), ValueError, "must name A or B, not both"),
            (("no", 404), OSError, "the judge at http")):
        with pytest.raises(error, match=why):
            asyncio.run(judged(lambda path, body: reply))


@pytest.fixture(scope="module")
def verdict():
    """judge.py's verdict(reply, finish_reason)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUDGE", "http://127.0.0.1:9/v1")
        return runpy.run_path(f"{ROOT}/tests/experiments/judge.py")["verdict"]


@pytest.mark.parametrize("reply, letter", [
    ("A", "A"), ("**B**", "B"), ("Answer: (B)", "B"), ("B.", "B"), ("Message A", "A"),
    ("<think>A or B?</think>\n\nB", "B"), ("A is better.", "A"), ("A, as it asks for the fee", "A"),
    ("A because a fee is missing", "A"), ("B: a question that a colleague can answer", "B"),
    ("A good question decides, so B", "B"), ("The better one is A", "A"),
    ("A better message would be the second one.", None), ("Option b", None), ("Neither.", None),
    ("A is good, B is better", None), ("B. A", None), ("", None), ("A\nB", None),
    ("<think>\nA first look says the second one asks for the fee, so", None)])
def test_a_judge_names_one_message_and_the_article_is_no_name(reply, letter, verdict):
    if letter:
        assert verdict(reply, "stop") == letter
    else:
        with pytest.raises(ValueError, match="is no verdict: it must name A or B, not both"):
            verdict(reply, "stop")
    for reason in ("length", "max_tokens"):
        with pytest.raises(ValueError, match="truncated"):
            verdict(reply, reason)


def test_an_llm_human_sees_the_agents_page_first(monkeypatch):
    monkeypatch.setattr(collect, "renderer", lambda: SimpleNamespace(
        render_pair=lambda *_: [{"png": b"agent"}, {"png": b"reference"}]))
    seen = []

    def answer(path, body):
        seen.append(body)
        return chat("ok")

    task = {"kind": "frontend", "problem_description": "p", "ground_truth": "g"}
    asyncio.run(collect.llm_reply(client(Server(answer)), task, dialogue("p", "<html>")))
    _, *pages = seen[0]["messages"][0]["content"]
    shown = [page["image_url"]["url"].partition("base64,")[2] for page in pages]
    assert [base64.b64decode(page) for page in shown] == [b"agent", b"reference"]
