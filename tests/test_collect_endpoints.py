"""Servers as human, engine and judge: real HTTP, to a server of the test's own that fails."""
import asyncio
import http.server
import itertools
import json
import random
import re
import runpy
import threading
import time
from pathlib import Path

import pytest

import colbench
import collect
import model as M
from conftest import ROOT, dialogue, key_of, turns_of
from utils import rng


TIMEOUT = 3  # seconds; more than a busy machine needs to answer


class Server(http.server.ThreadingHTTPServer):
    """An OpenAI-compatible server: `reply(path, body)` gives the JSON.

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
            trouble = s.random.choice([500, 429, "cut", "stall"]) if fails else None
        if s.refuse or trouble in (500, 429):
            return self.send('{"error": "busy"}', s.refuse or trouble)
        good = s.reply(self.path, body)
        if isinstance(good, tuple):  # text and status
            return self.send(*good)
        if trouble == "stall":
            time.sleep(TIMEOUT + 0.5)
        if trouble == "cut":
            self.close_connection = True
            return self.send(json.dumps(good)[:20], length=999)
        self.send(json.dumps(good))


def chat(text, why="stop"):
    return {"choices": [{"finish_reason": why, "message": {"role": "assistant", "content": text}}]}


def said(path, body):
    """A human who says a number that is a function of what it read."""
    return chat(f"it is {rng(body['messages'][0]['content']).randrange(10 ** 6)}")


PLAY = ["--max_turns", 3, "--max_tokens", 12, "--timeout", TIMEOUT]


# --- the human ------------------------------------------------------------------------------------

def test_a_human_who_dies_ends_the_run_by_one_line(tasks, playing):
    """What ended before is written; of 400 episodes hardly any is begun after that."""
    def reply(path, body):
        human.refuse = 503 if len(human.seen) == 40 else None
        return said(path, body)
    human = Server(reply)
    flags = ["-k", 100, "--concurrency", 16, "--retries", 0, "--human", human.url]
    played, _, end = playing(tasks, *PLAY, *flags)
    assert re.fullmatch(f"error: .* failed: OSError: {human.url}: .*503.*; rerun with --resume "
                        "FILE to continue", str(end))
    assert 5 < len(played) < 40 and len(human.seen) < 80


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
    """Of a dialogue it writes, however it marks the speakers, its own first words are the reply."""
    r = random.Random(0)

    def label(names):
        style = r.choice([str, str.upper, str.lower])
        return r.choice(FORMS).format(style(r.choice(names))) + r.choice([" ", "\n", "  "])

    for _ in range(2000):
        own, more, other = r.sample(WORDS, 3)
        assert collect.own_words(own) == own
        reply = r.choice(["", label(NAMES)]) + own
        if r.random() < 0.5:
            reply += r.choice(["\n", "\n\n"]) + label(["Assistant", "Agent", "AI assistant", "AI"])
            reply += other + r.choice(["", f"\n{label(NAMES)}{more}"])
        assert collect.own_words(reply) == own, reply
        replayed = f"{label(['Assistant'])}{other}\n{label(NAMES)}{own}"
        assert collect.own_words(replayed) == own, replayed
    assert collect.own_words("Assistant: It is 4.") == "It is 4."
    assert collect.own_words("You:\nAssistant:") == collect.own_words("") == ""


def test_the_agent_does_not_read_what_the_human_says_for_others(tasks, playing):
    told = ["You: it is {}", "**Human:** it is {}\n\n**Assistant:** And the fee?\nYou: 13",
            "it is {}", "it is {}\nassistant: And the fee?"]
    turn = itertools.count()
    human = Server(lambda path, body: chat(told[next(turn) % 4].format(4)))
    played, _, _ = playing(tasks[:4], *PLAY, "--concurrency", 1, "--human", human.url)
    replies = [m["content"] for r in played for m in r["dialogue_history"][2::2]]
    assert len(replies) >= 4 and {*replies} == {"it is 4"}


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

    That the engine's model has another name is told.
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
    assert f"serves m, assumed to be {tiny_dir}" in told
    tokenizer = M.find_model(tiny_dir)[1]
    bodies = [body for _, body, _ in server.seen if "prompt" in body]
    assert all(b["temperature"] == temperature and b["top_p"] == top_p for b in bodies)
    stop, seeds = bodies[0]["stop_token_ids"], set()
    for r in got:
        history = r["dialogue_history"]
        turns = turns_of(tokenizer, {"dialogue_history": history})
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
    assert ("only the human can make" in told) == (not temperature)


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


PAGE = "not that of an OpenAI-compatible server"
DRAWN = {"finish_reason": "length", "token_ids": [7], "logprobs": {"token_logprobs": [-0.5]}}


@pytest.mark.parametrize("choice, why", [
    ({**DRAWN, "finish_reason": "abort"}, "shutting down"), ({**DRAWN, "logprobs": None}, PAGE),
    ({**DRAWN, "token_ids": None}, "0.10"), ({**DRAWN, "token_ids": []}, "0.10")])
def test_a_reply_that_is_of_no_use_is_no_action(choice, why):
    async def sample(choice):
        args = collect.get_args(["--engine", Server(lambda *_: {"choices": [choice]}).url])
        return await collect.VllmEngine(args, {1})([5], [(0, "task", 0, 0)], 9)
    assert asyncio.run(sample(DRAWN)) == [([7], [-0.5])]
    with pytest.raises(OSError, match=why):
        asyncio.run(sample(choice))


# --- a server that is not as it should be ---------------------------------------------------------

def endpoint(server, retries=8):
    args = collect.get_args(["--engine", server.url, "--timeout", str(TIMEOUT), "--retries",
                             str(retries)])
    return collect.Endpoint(server.url, args, {})


def test_the_engine_does_not_get_the_humans_key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    args = collect.get_args(["--engine", "http://127.0.0.1:9/v1"])
    assert collect.VllmEngine(args, {1}).client.api_key == "none"


async def chat_with(one):
    return await one.request("/chat/completions", collect.reply_text,
                             messages=[{"role": "user", "content": "x"}])


def test_an_error_of_a_server_is_the_episodes_if_it_has_answered_others(monkeypatch):
    """A refused request is not made again."""
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    server = Server(said)

    async def expect(error, status, one):
        server.refuse = status
        with pytest.raises(error, match=f"{server.url}: .*{status}"):
            await chat_with(one)

    async def all_of():
        new, old = endpoint(server), endpoint(server, retries=0)
        await expect(OSError, 400, new)
        assert [key for _, _, key in server.seen] == ["Bearer sesame"]
        server.refuse = None
        await chat_with(old)
        await expect(collect.EpisodeError, 400, old)
        await expect(OSError, 503, old)
    asyncio.run(all_of())


LENGTHS = "length", "max_tokens"
WHICH = ("serves a, b, not None; choose one by --human_params or --agent_params, or for --engine by "
         "--model")
LONGER = """truncated: allow more tokens, such as by --human_params '{"max_tokens": 4000}'"""


EMPTY = "the reply is empty or incomplete, finish_reason "


@pytest.mark.parametrize("reply, why", [
    (chat("<think>4?</think> it is 4"), None),
    (chat("it says 5.\n</think>\n\nit is 4"), None),  # the server's prompt has opened the thought
    *((chat("it is 4", why), None) for why in (None, "eos_token", "eos", "end_turn", "COMPLETE")),
    *((chat("it is 4 and", why), LONGER) for why in LENGTHS), (chat("", "length"), LONGER),
    *((chat("it is 4 and", why), EMPTY + why) for why in ("content_filter", "tool_calls", "error")),
    (chat("<think>no end", "end_turn"), EMPTY + "end_turn"), (chat(None, "stop"), EMPTY + "stop")])
def test_a_humans_reply_is_whole_and_without_thoughts(reply, why):
    """Tokens are spoken of only if they are the reason."""
    if why:
        with pytest.raises(ValueError, match=re.escape(why)) as raised:
            collect.reply_text(reply)
        assert ("max_tokens" in str(raised.value)) == (why == LONGER)
    else:
        assert collect.reply_text(reply) == "it is 4"


@pytest.mark.parametrize("reply, models, path, params, why", [
    (said, ["m"], "", {}, "does not list its models (is the server running, does its address end in /v1, "),
    (said, ["a", "b"], "/v1", {}, WHICH),
    (said, ["a", "b"], "/v1", {"model": "b"}, None),
    (lambda *_: chat("<think>no end", "length"), ["m"], "/v1", {}, LONGER)])
def test_a_line_says_what_to_do_about_an_odd_server(reply, models, path, params, why, tiny_dir,
                                                    tasks):
    server = Server(reply)
    server.models = models
    flags = ["--human", server.url.removesuffix("/v1") + path, "--retries", "0"]
    args = collect.get_args(["--model", tiny_dir, *flags, "--human_params", json.dumps(params)])

    async def hear():
        runner = await collect.EpisodeRunner(args).load()
        return await runner.human_reply(tasks[0]["task"], dialogue("write f", "which rate?"))
    if why:
        with pytest.raises((OSError, SystemExit), match=re.escape(why)):
            asyncio.run(hear())
    else:
        assert asyncio.run(hear()).startswith("it is ")
        assert server.seen[-1][1]["model"] == models[-1]


def test_a_file_is_resumed_with_the_humans_model(tiny_dir):
    server = Server(said)
    args = collect.get_args(["--model", tiny_dir, "--human", server.url])
    old = asyncio.run(collect.EpisodeRunner(args).load()).meta
    new = collect.EpisodeRunner(args)
    new.resumed = [colbench.settings(old)]
    asyncio.run(new.load())
    server.models = ["n"]
    with pytest.raises(SystemExit, match="holds episodes with human_model m, not n; "):
        asyncio.run(new.load())


@pytest.mark.parametrize("reply", [
    {"error": {"message": "no luck", "code": 429}}, {"error": "no luck", "choices": None},
    {"choices": [{**chat("it is 4 and", "error")["choices"][0], "error": {"message": "x"}}]}])
def test_an_error_in_a_200_is_no_reply(reply):
    with pytest.raises(OSError, match="not that of an OpenAI-compatible server|finish_reason error"):
        asyncio.run(chat_with(endpoint(Server(lambda *_: reply), retries=0)))


@pytest.mark.parametrize("status", [None, 401, 404, 500])
def test_a_server_without_a_list_of_models_is_an_error_with_advice(status, monkeypatch):
    server = Server(said)
    monkeypatch.setattr(Handler, "do_GET", lambda self: self.send('{"error": "no"}', status))
    if not status:
        server.server_close()
        server.shutdown()
    advice = "is the server running, does its address end in /v1, is the key in OPENAI_API_KEY right"
    with pytest.raises(SystemExit, match=re.escape(f"models ({advice}?)")) as end:
        asyncio.run(endpoint(server).find_served_model())
    assert str(status) in str(end.value) or "connect" in str(end.value).lower()


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
