"""Servers as human, engine and judge: real HTTP, to a server of the test's own that fails."""
import asyncio
import http.server
import json
import random
import re
import threading
import time

import pytest

import colbench
import collect
import model as M
from conftest import HUMAN, ROOT, dialogue, key_of, records, script, succeed, turns_of
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


def play(tiny_dir, tasks, *flags, how=script):
    return how("collect.py", "--model", tiny_dir, *HUMAN, *PLAY, *flags, stdin=tasks)


# --- the human ------------------------------------------------------------------------------------

@pytest.mark.full
def test_a_flaky_human_loses_no_episode_and_never_becomes_a_made_up_reply(tiny_dir, tasks):
    human = Server(said, trouble=0.3)
    done = play(tiny_dir, tasks, "-k", 6, "--human", human.url, "--retries", 8, how=succeed)
    got, replies = records(done.stdout), 0
    assert sorted(map(key_of, got)) == sorted((t["task"]["id"], i) for t in tasks for i in range(6))
    for r in got:
        history = r["dialogue_history"]
        for t in range(2, len(history), 2):
            prompt = colbench.human_prompt(r["task"], history[:t])
            reply = said("", {"messages": [{"content": prompt}]})["choices"][0]["message"]
            assert history[t]["content"] == reply["content"]
            assert r["task"]["ground_truth"] in prompt and history[t - 1]["content"] in prompt
            replies += 1
    assert 24 < replies < len(human.seen)  # some were asked again
    assert all(body["temperature"] == 0 for _, body, _ in human.seen)


@pytest.mark.full
def test_failed_episodes_are_not_written_and_are_played_again(tiny_dir, tasks, tmp_path):
    """Those of one task, each with another reply that is of no use."""
    bad, failed = tasks[1]["task"]["problem_description"], tasks[1]["task"]["id"]
    useless = iter([chat(None), chat("<think>no end"), {"choices": []}, "no"])

    def reply(path, body):
        return next(useless) if bad in body["messages"][0]["content"] else said(path, body)
    flags = ["-k", 4, "--retries", 1, "--human"]
    done = play(tiny_dir, tasks, *flags, Server(reply).url)
    assert done.returncode == 1 and "4 episodes failed" in done.stderr
    played = {r["task"]["id"] for r in records(done.stdout)}
    assert played == {t["task"]["id"] for t in tasks} - {failed}
    (tmp_path / "all.jsonl").write_text(done.stdout)
    flags += [Server(said).url, "--resume", tmp_path / "all.jsonl"]
    again = play(tiny_dir, tasks, *flags, how=succeed)
    assert [r["task"]["id"] for r in records(again.stdout)] == [failed] * 4


def test_a_human_who_dies_ends_the_run_by_one_line(tiny_dir, tasks):
    """What ended before is written; of 400 episodes hardly any is begun after that."""
    def reply(path, body):
        human.refuse = 503 if len(human.seen) == 40 else None
        return said(path, body)
    human = Server(reply)
    flags = ["-k", 100, "--concurrency", 16, "--retries", 0, "--human", human.url]
    done = play(tiny_dir, tasks, *flags)
    (error,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert done.returncode == 1 and error.startswith(f"error: {human.url}")
    assert "503" in error and "--resume FILE goes on" in error
    assert 5 < len(records(done.stdout)) < 40 and len(human.seen) < 80


def test_an_llm_humans_reply_is_short_and_quotes_no_code_however_spaced(tiny_dir, tasks):
    """The prose that it may tell stays, if it is none of the code."""
    prose = "the rate is four percent a year"
    task = {**tasks[0]["task"], "hidden_information": prose}
    code = task["ground_truth"].replace(" ", "  ")
    human = Server(lambda path, body: chat(f"hi \ud83d, {prose}: {code} " + "so " * 300))
    params = '{"max_tokens": null, "max_completion_tokens": 20, "top_p": 0.5}'
    done = play(tiny_dir, [{"task": task}], "--human_params", params, "--human", human.url)
    replies = [m["content"] for r in records(done.stdout) for m in r["dialogue_history"][2::2]]
    start = f"hi ?, {prose}: [...] so so"
    assert replies and all(r.startswith(start) and len(r) <= 400 for r in replies)
    for _, body, _ in human.seen:
        assert "max_tokens" not in body and body["max_completion_tokens"] == 20
        assert body["temperature"] == 0 and body["top_p"] == 0.5
        assert prose in body["messages"][0]["content"]


def test_what_is_like_the_code_is_redacted_and_prose_is_not():
    hidden = "def f(x):\n    total = x * 34 + 7\n    if y:\n        return y\n"
    assert colbench.redact("use total=x*34 +7 there", hidden) == "use [...] there"
    free = "multiply by 34 and add 7; if y: return"
    assert colbench.redact(free, hidden) == free


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
def test_an_http_engine_gives_the_servers_tokens_for_the_rendered_prompts(
        temperature, tiny_dir, tasks):
    server = Server(sampled, trouble=0.2)
    flags = ["-k", 2, "--candidates", 3, "--engine", server.url, "--temperature", temperature,
             "--top_p", 0.9]
    done, again = (play(tiny_dir, tasks, *flags, how=succeed) for _ in range(2))
    got = sorted(records(done.stdout), key=key_of)
    assert got == sorted(records(again.stdout), key=key_of)  # each draw has a seed of its own
    tokenizer, bodies = M.find_model(tiny_dir)[1], [body for _, body, _ in server.seen]
    assert all(b["temperature"] == temperature and b["top_p"] == 0.9 for b in bodies)
    stop, seeds = bodies[0]["stop_token_ids"], set()
    for r in got:
        history = r["dialogue_history"]
        turns = turns_of(tokenizer, {"dialogue_history": history})
        for n, (m, (prompt, action)) in enumerate(zip(history[1::2], turns)):
            seed = rng(0, *key_of(r), n, 0).getrandbits(31)
            ids = [*map(ord, prompt)]
            draws = [draw(ids, seed + i * bool(temperature), 12, stop) for i in range(4)]
            assert (m["token_ids"], m["logprobs"]) == draws[0]
            assert [*map(ord, action)] == draws[0][0]
            assert [(c["token_ids"], c["logprob"]) for c in m["candidates"]] == [
                (ids, round(sum(logprobs), 6)) for ids, logprobs in draws[1:]]
            seeds.add(seed)
    assert {b["seed"] for b in bodies} == seeds  # one request a turn, but for those asked again
    assert {b["n"] for b in bodies} == {4 if temperature else 1}


PAGE = "not that of an OpenAI-compatible server"
USELESS = [  # changes of a draw of one token, and what is said
    ({"token_ids": None}, "0.10"), ({"token_ids": []}, "0.10"), ({"logprobs": None}, PAGE),
    ({"finish_reason": "abort"}, "shutting down")]


def test_a_reply_that_is_of_no_use_is_no_action(tiny_dir, capsys):
    """That the server's model has another name is told once."""
    server = Server(sampled)

    async def sample(players, **change):
        choice = {"finish_reason": "stop", "token_ids": [7], "logprobs": {"token_logprobs": [-0.5]}}
        server.reply = lambda path, body: {"choices": [choice | change]}
        return await players.draw(dialogue("write f"), (0, "task", 0, 0), 1, 0)

    async def all_of():
        args = collect.get_args(["--model", tiny_dir, "--engine", server.url])
        players = await collect.Players(args).load()
        ((action,), _) = await sample(players)
        assert action["token_ids"] == [7] and action["logprobs"] == [-0.5] and action["cut"]
        for change, why in USELESS:
            with pytest.raises((ValueError, SystemExit), match=why):
                await sample(players, **change)
    asyncio.run(all_of())
    assert f"serves {server.models[0]}, taken for {tiny_dir}" in capsys.readouterr().err


# --- a server that is not as it should be ---------------------------------------------------------

def endpoint(server, retries=8):
    args = collect.get_args(["--timeout", str(TIMEOUT), "--retries", str(retries)])
    return collect.Endpoint(server.url, args, {})


def test_the_engine_does_not_get_the_humans_key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    url = "http://127.0.0.1:9/v1"
    args = collect.get_args(["--engine", url, "--human", url])
    assert collect.LLM(args).client.api_key == "sesame"
    assert collect.VllmEngine(args, {1}).client.api_key == "none"


async def chat_with(one):
    return await one.request("/chat/completions", collect.reply_text,
                             messages=[{"role": "user", "content": "x"}])


def test_a_request_that_fails_is_an_error_of_its_episode_and_the_16th_in_a_row_of_the_run(
        monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")

    async def all_of():
        bad = Server(said, refuse=400)
        one = endpoint(bad)
        for refuse in [*[400] * 15, None, *[400] * 15]:
            bad.refuse = refuse
            if not refuse:
                assert (await chat_with(one)).startswith("it is ")
                continue
            with pytest.raises(ValueError, match="400"):
                await chat_with(one)
        assert len(bad.seen) == 31  # what is refused is not asked again
        with pytest.raises(SystemExit, match="400.*--resume FILE goes on"):
            await chat_with(one)
        assert {key for _, _, key in bad.seen} == {"Bearer sesame"}
    asyncio.run(all_of())


def picky(path, body):
    """A human as OpenAI's newer ones."""
    if "max_tokens" in body or body.get("temperature", 1) != 1:
        return '{"error": {"message": "Use max_completion_tokens instead"}}', 400
    return said(path, body)


WHICH = """serves a, b, not None; --human_params '{"model": "NAME"}'"""
LONGER = """finish_reason length (--human_params '{"max_tokens": 4000, """
ODD = {  # name: (what it replies, its models, its path, --human_params, what is said)
    "without /v1": (said, ["m"], "", {}, "lists no models (an address ends in /v1)"),
    "several models": (said, ["a", "b"], "/v1", {}, WHICH),
    "one of several": (said, ["a", "b"], "/v1", {"model": "b"}, None),
    "picky": (picky, ["m"], "/v1", {}, "Use max_completion_tokens instead (--human_params '{\"max"),
    "picky, told": (picky, ["m"], "/v1", {"max_tokens": None, "temperature": 1}, None),
    "no choices": (lambda *_: {"choices": None}, ["m"], "/v1", {}, PAGE),
    "thinks": (lambda *_: chat(None, "length"), ["m"], "/v1", {}, LONGER)}


@pytest.mark.parametrize("case", ODD)
def test_a_line_says_what_to_do_about_an_odd_server(case, tiny_dir, tasks):
    reply, models, path, params, why = ODD[case]
    server = Server(reply)
    server.models = models
    flags = ["--human", server.url.removesuffix("/v1") + path, "--retries", "0"]
    args = collect.get_args(["--model", tiny_dir, *flags, "--human_params", json.dumps(params)])

    async def hear():
        players = await collect.Players(args).load()
        return await players.human(tasks[0]["task"], dialogue("write f", "which rate?"))
    if why:
        with pytest.raises((ValueError, SystemExit), match=re.escape(why)):
            asyncio.run(hear())
    else:
        assert asyncio.run(hear()).startswith("it is ")
        assert server.seen[-1][1]["model"] == models[-1]


def test_a_server_on_this_machine_is_behind_no_proxy(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert asyncio.run(chat_with(endpoint(Server(said), retries=0))).startswith("it is ")


# --- the judge ------------------------------------------------------------------------------------

def test_a_judge_scores_a_message_by_the_share_of_its_comparisons_that_it_wins(tiny_dir,
                                                                               monkeypatch):
    """The best one is sent. In a circle: so < no < no no < no no no = no no no > so."""
    task = {"problem_description": "write f(x)", "ground_truth": "def f(x, rate=3): return x"}
    actions = [{"output": text, "logprobs": []}
               for text in ("so", "no", "no no", "no no no", "no no no")]
    judge = f"{ROOT}/tests/experiments/judge.py"
    args = collect.get_args(["--model", tiny_dir, "--best_of", "5", "--critic", judge])

    def prefers_no(path, body):
        prompt = body["messages"][0]["content"]
        a, b = re.search(r"\nA: (.*)\n\nB: (.*)\n\nWhich", prompt, re.S).groups()
        assert "def f(x, rate=3)" in prompt and body["temperature"] == 0 and a != b
        better = "A" if a.count("no") > b.count("no") else "B"
        return chat(f"<think>B or A?</think>The better one is {better}.")

    async def drawn(*_):
        return actions, []

    async def judged(reply):
        monkeypatch.setenv("JUDGE", Server(reply).url)
        players = await collect.Players(args).load()
        monkeypatch.setattr(players, "draw", drawn)
        history = dialogue("write f(x)")
        sent = await players.act(task, history, (0, "task", 0, 0), 0)
        return sent["output"], await players.critic(task, history, actions)
    assert asyncio.run(judged(prefers_no)) == ("no no no", [0, 0.5, 0.5, 0.75, 0.75])
    for reply, error, why in (
            (chat("A better one is B"), ValueError, "not one of A and B"),
            (("too long", 400), ValueError, "the judge http"),
            (("no", 404), SystemExit, "human or critic: .*the judge http")):  # it ends the run
        with pytest.raises(error, match=why):
            asyncio.run(judged(lambda path, body: reply))
