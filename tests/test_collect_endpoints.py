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
import model as M
from conftest import records, script
from collect import judge
from utils import Endpoint, EndpointError, rng


TIMEOUT = 3  # seconds; more than a busy machine needs to answer


class Server(http.server.ThreadingHTTPServer):
    """An OpenAI-compatible server: `reply(path, body)` gives the JSON.

    trouble: the share of requests that fail, in all the ways that servers have. refuse: a status
    for all of them.
    """
    daemon_threads, request_queue_size = True, 256

    def __init__(self, reply, trouble=0.0, refuse=None):
        self.reply, self.trouble, self.refuse = reply, trouble, refuse
        self.random = random.Random(0)
        self.seen, self.lock = [], threading.Lock()
        self.busy = self.busiest = 0
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, *_):
        pass  # a client that gave up


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def send(self, body, code=200):
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self):
        self.send(json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}))

    def do_POST(self):
        s, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with s.lock:
            s.seen.append((self.path, body, self.headers["Authorization"]))
            kind = s.random.choice(["500", "html", "cut", "stall", "none", "empty", "429"]) \
                if s.random.random() < s.trouble else ""
            s.busy += kind != "stall"  # the client gives that up, and this thread goes on
            s.busiest = max(s.busy, s.busiest)
        try:
            if s.refuse:
                return self.send('{"error": "no"}', s.refuse)
            good = json.dumps(s.reply(self.path, body))
            if kind in ("500", "429"):
                return self.send('{"error": "busy"}', int(kind))
            if kind == "stall":
                time.sleep(TIMEOUT + 0.5)
            if kind == "cut":
                self.close_connection = True
                cut = b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n" + good[:20].encode()
                return self.wfile.write(cut)
            self.send({"html": "<html>bad gateway</html>", "none": '{"choices": []}',
                       "empty": json.dumps(chat(None))}.get(kind, good))
        finally:
            with s.lock:
                s.busy -= kind != "stall"


def chat(text):
    choice = {"index": 0, "finish_reason": "stop",
              "message": {"role": "assistant", "content": text}}
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "m",
            "choices": [choice]}


def said(path, body):
    """A human who says a number that is a function of what it read."""
    return chat(f"it is {rng(body['messages'][0]['content']).randrange(10 ** 6)}")


PLAY = ["--max_turns", 3, "--max_tokens", 12, "--timeout", TIMEOUT]


def play(tiny_dir, tasks, *flags):
    return script("collect.py", "--model", tiny_dir, *PLAY, *flags, stdin=tasks)


@pytest.mark.full
def test_a_flaky_human_loses_no_episode_and_never_becomes_a_made_up_reply(tiny_dir, tasks):
    servers = [Server(said, trouble=0.3), Server(said, trouble=0.3)]
    nobody = "http://127.0.0.1:9/v1"
    urls = ",".join([servers[0].url, nobody, servers[1].url])
    done = play(tiny_dir, tasks, "-k", 6, "--human", urls, "--in_flight", 3)
    assert done.returncode == 0, done.stderr
    got = records(done.stdout)
    keys = sorted((r["task"]["id"], r["sample"]) for r in got)
    assert keys == sorted((t["task"]["id"], i) for t in tasks for i in range(6))
    replies = 0
    for r in got:
        history = r["dialogue_history"]
        for t, m in enumerate(history[1:], 1):
            if m["role"] == "user":
                prompt = colbench.human_prompt(r["task"], history[:t])
                reply = said("", {"messages": [{"content": prompt}]})["choices"][0]["message"]
                assert m["content"] == reply["content"]
                assert r["task"]["ground_truth"] in prompt and history[t - 1]["content"] in prompt
                replies += 1
    assert replies > 24 and all(s.busiest <= 3 for s in servers)
    seen = [x for s in servers for x in s.seen]
    assert len(seen) > replies  # some were asked again
    assert all(body["temperature"] == 0 for _, body, _ in seen)


@pytest.mark.full
def test_episodes_that_fail_are_not_written_and_are_played_again(tiny_dir, tasks, tmp_path):
    bad = tasks[1]["task"]["problem_description"]

    def reply(path, body):
        return chat(None) if bad in body["messages"][0]["content"] else said(path, body)
    flags = ["-k", 2, "--retries", 1, "--human"]
    done = play(tiny_dir, tasks, *flags, Server(reply).url)
    assert done.returncode == 1 and "2 episodes failed" in done.stderr and "empty" in done.stderr
    failed = tasks[1]["task"]["id"]
    played = {r["task"]["id"] for r in records(done.stdout)}
    assert played == {t["task"]["id"] for t in tasks} - {failed}
    (tmp_path / "all.jsonl").write_text(done.stdout)
    again = play(tiny_dir, tasks, *flags, Server(said).url, "--resume", tmp_path / "all.jsonl")
    assert again.returncode == 0
    assert [r["task"]["id"] for r in records(again.stdout)] == [failed] * 2


@pytest.mark.full
def test_where_no_server_answers_it_says_so_at_once(tiny_dir, tasks):
    for flag in ("--human", "--engine"):
        done = play(tiny_dir, tasks, flag, "http://127.0.0.1:9/v1", "--retries", 0)
        assert done.returncode == 1 and done.stdout == ""
        assert done.stderr.startswith("error: http://127.0.0.1:9/v1")
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.full
def test_the_key_comes_from_the_environment(tiny_dir, tasks, monkeypatch):
    import asyncio

    from utils import Endpoint
    server = Server(said)
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")

    async def ask(client):
        messages = [{"role": "user", "content": "?"}]
        return await client.chat.completions.create(model="m", messages=messages)
    asyncio.run(Endpoint(server.url)(ask))
    assert server.seen[0][2] == "Bearer sesame"


@pytest.mark.full
def test_quoted_code_is_cut_out(tiny_dir, tasks):
    def reply(path, body):
        prompt = body["messages"][0]["content"]
        code = next(line for line in prompt.splitlines() if line.startswith("def "))
        return chat(f"sure: {code} ok")
    done = play(tiny_dir, tasks, "--human", Server(reply).url)
    replies = [m["content"] for r in records(done.stdout) for m in r["dialogue_history"][1:]
               if m["role"] == "user"]
    assert replies and set(replies) == {"sure: [...] ok"}


@pytest.mark.parametrize("flags, tokens", [([], 150), (["--human_tokens", 20], 20)])
def test_an_llm_human_is_asked_for_few_tokens_and_cut_at_the_characters(
        flags, tokens, tiny_dir, tasks):
    server = Server(lambda path, body: chat("so " * 300))
    done = play(tiny_dir, tasks[:1], *flags, "--human", server.url)
    assert done.returncode == 0, done.stderr
    assert {body["max_tokens"] for _, body, _ in server.seen} == {tokens}
    replies = [m["content"] for r in records(done.stdout) for m in r["dialogue_history"][1:]
               if m["role"] == "user"]
    assert replies and all(reply == ("so " * 300)[:400] for reply in replies)


def test_redact_is_about_lines_of_code_however_spaced():
    hidden = "def f(x):\n    total = x * 34 + 7\n    if y:\n        return y\n"
    assert colbench.redact("use total=x*34 +7 there", hidden) == "use [...] there"
    free = "multiply by 34 and add 7; if y: return"
    assert colbench.redact(free, hidden) == free


def draw(prompt, seed, most, stop):
    """(token_ids, logprobs) that are functions of prompt and seed."""
    r = rng(prompt, seed)
    ids = [r.randrange(6, 300) for _ in range(r.randrange(1, most))] + stop[:1]
    return ids, [-i / 8 for i in range(len(ids))]


def sampled(path, body):
    """What a vLLM server says: n draws, the i-th by seed + i."""
    assert path == "/v1/completions" and body["n"] == 1 or body["temperature"] > 0
    choices = []
    for i in range(body["n"]):
        ids, logprobs = draw(body["prompt"], body["seed"] + i, body["max_tokens"],
                             body["stop_token_ids"])
        logprobs = {"token_logprobs": logprobs, "tokens": [], "top_logprobs": [], "text_offset": []}
        choices.append({"index": i, "text": "", "finish_reason": "stop", "token_ids": ids,
                        "logprobs": logprobs})
    return {"id": "x", "object": "text_completion", "created": 0, "model": "m", "choices": choices}


def key_of(record):
    return record["task"]["id"], record["sample"]


@pytest.mark.full
@pytest.mark.parametrize("best_of, temperature", [(1, 1), (1, 0)])
def test_an_http_engine_gives_the_servers_tokens_for_the_rendered_prompts(
        best_of, temperature, tiny_dir, tasks):
    servers = [Server(sampled, trouble=0.2), Server(sampled)]
    urls = ",".join(s.url for s in servers)
    flags = ["-k", 2, "--candidates", 3, "--engine", urls, "--temperature", temperature,
             "--top_p", 0.9]
    done, again = (play(tiny_dir, tasks, *flags) for _ in range(2))
    assert done.returncode == 0, done.stderr
    got = sorted(records(done.stdout), key=key_of)
    assert got == sorted(records(again.stdout), key=key_of)  # each draw has a seed of its own
    tokenizer, bodies = M.find_model(tiny_dir)[1], [body for s in servers for _, body, _ in s.seen]
    assert all(b["temperature"] == temperature and b["top_p"] == 0.9 for b in bodies)
    stop, seeds = bodies[0]["stop_token_ids"], set()
    for r in got:
        history = r["dialogue_history"]
        turns = M.turns_of(tokenizer, {"dialogue_history": history})
        for n, (m, (prompt, action)) in enumerate(zip(history[1::2], turns)):
            seed = rng(0, *key_of(r), n, 0).getrandbits(31)
            draws = [draw(prompt, seed + i * bool(temperature), 12, stop) for i in range(4)]
            assert (m["token_ids"], m["logprobs"]) == draws[0] and action == tuple(draws[0][0])
            assert [(c["token_ids"], c["logprob"]) for c in m["candidates"]] == [
                (ids, round(sum(logprobs), 6)) for ids, logprobs in draws[1:]]
            seeds.add(seed)
    assert {b["seed"] for b in bodies} == seeds  # one request a turn, but for those asked again
    assert {b["n"] for b in bodies} == {4 if temperature else 1}


def test_an_episode_stays_at_its_server_until_that_fails():
    """48 episodes of 5 turns; then one of the three servers dies, and 5 turns more."""
    servers = [Server(said) for _ in range(3)]

    async def episode(endpoint, number):
        async def ask(client):
            message = {"role": "user", "content": str(number)}
            return await client.post("/chat/completions", cast_to=object,
                                     body={"model": "m", "messages": [message]})
        for _ in range(5):
            await endpoint(ask, ("task", number))

    def at():
        """For each server the episodes that it saw."""
        seen = [{int(body["messages"][0]["content"]) for _, body, _ in s.seen} for s in servers]
        for s in servers:
            s.seen.clear()
        return seen

    async def play():
        endpoint = Endpoint(",".join(s.url for s in servers), timeout=TIMEOUT)
        await asyncio.gather(*(episode(endpoint, n) for n in range(48)))
        before = at()
        assert sorted(map(len, before)) == [16, 16, 16]  # each saw its own: 48 in all
        servers[0].shutdown()
        servers[0].server_close()
        for connection in endpoint.servers[0].client._client._transport._pool.connections:
            await connection.aclose()
        await asyncio.gather(*(episode(endpoint, n) for n in range(48)))
        after = at()
        assert before[1] <= after[1] and before[2] <= after[2]
        assert after[1] | after[2] == set(range(48)) and not after[1] & after[2]
    asyncio.run(play())


@pytest.mark.parametrize("status", [401, 404])
def test_a_server_that_refuses_takes_no_request_from_the_others(status):
    good, bad = Server(said), Server(said, refuse=status)

    async def ask(client):
        message = {"role": "user", "content": "x"}
        return await client.post("/chat/completions", cast_to=object,
                                 body={"model": "m", "messages": [message]})

    async def play():
        both = Endpoint(f"{bad.url},{good.url}", timeout=TIMEOUT)
        await asyncio.gather(*(both(ask) for _ in range(12)))
        assert len(good.seen) == 12 and bad.seen
        bad.seen.clear()
        with pytest.raises(EndpointError, match=str(status)):
            await Endpoint(bad.url, timeout=TIMEOUT)(ask)
        assert len(bad.seen) == 1
    asyncio.run(play())


def test_half_a_character_in_a_reply_becomes_a_mark(tiny_dir, tasks):
    human = Server(lambda path, body: chat("hi \ud83d there"))
    done = play(tiny_dir, tasks, "--human", human.url)
    assert done.returncode == 0, done.stderr
    said = {m["content"] for r in records(done.stdout) for m in r["dialogue_history"][2::2]}
    assert said == {"hi \ufffd there"}


@pytest.mark.parametrize("change, message", [
    ({"token_ids": ["a"]}, "no token ids"), ({"token_ids": [-1, 3]}, "no token ids"),
    ({"logprobs": {"token_logprobs": [-1.0]}}, "1 logprobs of ")])
def test_odd_token_ids_of_a_server_are_refused(change, message, tiny_dir, tasks):
    def odd(path, body):
        reply = sampled(path, body)
        reply["choices"][0].update(change)
        return reply
    done = play(tiny_dir, tasks, "--engine", Server(odd).url, "--retries", 0)
    assert message in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 1 and not done.stdout


def prefers(word, trouble=0.0, taste=1):
    """A judge who takes the message with more of a word, with taste=-1 less, and thinks first."""
    def reply(path, body):
        prompt = body["messages"][0]["content"]
        a, b = re.search(r"\nA: (.*)\n\nB: (.*)\n\nWhich", prompt, re.S).groups()
        assert "def f(x, rate=3)" in prompt and body["temperature"] == 0 and a != b
        better = "A" if taste * (a.count(word) - b.count(word)) > 0 else "B"
        return chat(f"<think>B or A?</think>The better one is {better}.")
    return Server(reply, trouble)


def judged(actions, server, retries=8):
    async def main():
        servers = Endpoint(server.url, timeout=TIMEOUT, retries=retries)
        task = {"problem_description": "write f(x)", "ground_truth": "def f(x, rate=3): return x"}
        history = [{"role": "user", "content": "write f(x)"}]
        return await judge(servers, "m", task, history, actions)
    return asyncio.run(main())


def test_a_judge_gives_each_message_the_share_of_its_comparisons_that_it_wins():
    said = [{"output": text} for text in ("so", "no", "no no", "no no no", "no no no")]
    # so < no < no no < no no no = no no no > so, in a circle
    assert judged(said, prefers("no", trouble=0.3)) == [0, 0.5, 0.5, 0.75, 0.75]
    assert judged(said[:2], prefers("no")) == [0, 1]
    for reply in ("neither", "A better one is B"):
        with pytest.raises(EndpointError, match="not one of A and B"):
            judged(said, Server(lambda path, body: chat(reply)), retries=1)


def test_a_judge_chooses_messages(tiny_dir, tasks):
    """Two judges of opposite taste: what one chooses of the same four draws the other does not."""
    task, chosen = {**tasks[0]["task"], "hidden_information": "def f(x, rate=3)"}, []
    for taste in (1, -1):
        server = prefers("e", taste=taste)
        flags = ["--max_turns", 1, "--max_tokens", 20, "--best_of", 4, "--critic", server.url]
        done = script("collect.py", "--model", tiny_dir, *flags, stdin=[task])
        assert done.returncode == 0 and 0 < len(server.seen) <= 4, done.stderr
        chosen.append(records(done.stdout)[0]["dialogue_history"][1]["output"].count("e"))
    assert chosen[0] > chosen[1]
