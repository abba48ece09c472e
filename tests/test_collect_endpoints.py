"""Servers as human, as engine and as maker of tasks: real HTTP, to a server of the test's own that fails as servers do."""
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
from utils import Endpoint, EndpointError, rng


TIMEOUT = 3  # seconds; more than a busy machine needs to answer


class Server(http.server.ThreadingHTTPServer):
    """An OpenAI-compatible server: `reply(path, body)` gives the JSON; `trouble` is the share of requests that fail."""
    daemon_threads, request_queue_size = True, 256

    def __init__(self, reply, trouble=0.0):
        self.reply, self.trouble, self.random, self.seen, self.lock = reply, trouble, random.Random(0), [], threading.Lock()
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
            good = json.dumps(s.reply(self.path, body))
            if kind in ("500", "429"):
                return self.send('{"error": "busy"}', int(kind))
            if kind == "stall":
                time.sleep(TIMEOUT + 0.5)
            if kind == "cut":
                self.close_connection = True
                return self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n" + good[:20].encode())
            self.send({"html": "<html>bad gateway</html>", "none": '{"choices": []}',
                       "empty": json.dumps(chat(None))}.get(kind, good))
        finally:
            with s.lock:
                s.busy -= kind != "stall"


def chat(text):
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "m",
            "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}]}


def said(path, body):
    """A human who says a number that is a function of what it read."""
    return chat(f"it is {rng(body['messages'][0]['content']).randrange(10 ** 6)}")


PLAY = ["--max_turns", 3, "--max_tokens", 12, "--timeout", TIMEOUT]


def play(tiny_dir, tasks, *flags):
    return script("collect.py", "--model", tiny_dir, *PLAY, *flags, stdin=tasks)


def test_a_flaky_human_loses_no_episode_and_never_becomes_a_made_up_reply(tiny_dir, tasks):
    servers = [Server(said, trouble=0.3), Server(said, trouble=0.3)]
    urls = ",".join([servers[0].url, "http://127.0.0.1:9/v1", servers[1].url])  # nobody listens at port 9
    done = play(tiny_dir, tasks, "-k", 6, "--human", urls, "--in_flight", 3)
    assert done.returncode == 0, done.stderr
    got = records(done.stdout)
    assert sorted((r["task"]["id"], r["sample"]) for r in got) == sorted((t["task"]["id"], i) for t in tasks
                                                                        for i in range(6))
    replies = 0
    for r in got:
        history = r["dialogue_history"]
        for t, m in enumerate(history[1:], 1):
            if m["role"] == "user":
                prompt = colbench.human_prompt(r["task"], history[:t])
                assert m["content"] == said("", {"messages": [{"content": prompt}]})["choices"][0]["message"]["content"]
                assert r["task"]["ground_truth"] in prompt and history[t - 1]["content"] in prompt
                replies += 1
    assert replies > 24 and all(s.busiest <= 3 for s in servers)
    seen = [x for s in servers for x in s.seen]
    assert len(seen) > replies and all(body["temperature"] == 0 for _, body, _ in seen)  # some were asked again


def test_episodes_that_fail_are_not_written_and_are_played_again(tiny_dir, tasks, tmp_path):
    bad = tasks[1]["task"]["problem_description"]

    def reply(path, body):
        return chat(None) if bad in body["messages"][0]["content"] else said(path, body)
    flags = ["-k", 2, "--retries", 1, "--human"]
    done = play(tiny_dir, tasks, *flags, Server(reply).url)
    assert done.returncode == 1 and "2 episodes failed" in done.stderr and "empty" in done.stderr
    assert {r["task"]["id"] for r in records(done.stdout)} == {t["task"]["id"] for t in tasks} - {tasks[1]["task"]["id"]}
    (tmp_path / "all.jsonl").write_text(done.stdout)
    again = play(tiny_dir, tasks, *flags, Server(said).url, "--resume", tmp_path / "all.jsonl")
    assert again.returncode == 0 and [r["task"]["id"] for r in records(again.stdout)] == [tasks[1]["task"]["id"]] * 2


def test_where_no_server_answers_it_says_so_at_once(tiny_dir, tasks):
    for flag in ("--human", "--engine"):
        done = play(tiny_dir, tasks, flag, "http://127.0.0.1:9/v1", "--retries", 0)
        assert done.returncode == 1 and done.stdout == "" and done.stderr.startswith("error: http://127.0.0.1:9/v1")
        assert len(done.stderr.splitlines()) == 1


def test_the_key_comes_from_the_environment(tiny_dir, tasks, monkeypatch):
    import asyncio

    from utils import Endpoint
    server = Server(said)
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")

    async def ask(client):
        return await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
    asyncio.run(Endpoint(server.url)(ask))
    assert server.seen[0][2] == "Bearer sesame"


@pytest.mark.parametrize("leak", ["count", "redact"])
def test_quoted_code_is_counted_and_cut_out(leak, tiny_dir, tasks):
    done = play(tiny_dir, tasks, "--human_leak", leak, "--human", Server(
        lambda path, body: chat("sure: " + [line for line in body["messages"][0]["content"].splitlines()
                                            if line.startswith("def ")][0] + " ok")).url)
    replies = [m["content"] for r in records(done.stdout) for m in r["dialogue_history"][1:] if m["role"] == "user"]
    assert replies and f"quoted hidden code in {len(replies)} replies" in done.stderr
    for r in records(done.stdout):
        for m in r["dialogue_history"][1:]:
            if m["role"] == "user":
                quoted = r["task"]["ground_truth"][:390] in m["content"]
                assert quoted == (leak == "count") and (leak == "count" or m["content"] == "sure: [...] ok")


def test_redact_is_about_lines_of_code_however_spaced():
    hidden = "def f(x):\n    total = x * 34 + 7\n    if y:\n        return y\n"
    assert colbench.redact("use total=x*34 +7 there", hidden) == ("use [...] there", 1)
    assert colbench.redact("multiply by 34 and add 7; if y: return", hidden) == ("multiply by 34 and add 7; if y: return", 0)


def sampled(path, body):
    """What a vLLM server says of token ids: ids and log-probs that are functions of prompt and seed."""
    r = rng(body["prompt"], body["seed"])
    ids = [r.randrange(6, 300) for _ in range(r.randrange(1, body["max_tokens"]))] + body["stop_token_ids"][:1]
    return {"id": "x", "object": "text_completion", "created": 0, "model": "m", "choices": [{
        "index": 0, "text": "", "finish_reason": "stop", "token_ids": ids,
        "logprobs": {"token_logprobs": [-i / 8 for i in range(len(ids))], "tokens": [], "top_logprobs": [],
                     "text_offset": []}}]}


def test_an_http_engine_gives_the_servers_tokens_for_the_rendered_prompts(tiny_dir, tasks):
    servers = [Server(sampled, trouble=0.2), Server(sampled)]
    flags = ["-k", 2, "--candidates", 3, "--engine", ",".join(s.url for s in servers), "--in_flight", 4]
    done, again = (play(tiny_dir, tasks, *flags) for _ in range(2))
    assert done.returncode == 0, done.stderr
    key = lambda r: (r["task"]["id"], r["sample"])
    got = sorted(records(done.stdout), key=key)
    assert got == sorted(records(again.stdout), key=key)  # each draw has a seed of its own
    tokenizer, bodies = M.find_model(tiny_dir)[1], [body for s in servers for _, body, _ in s.seen]
    assert all(b["temperature"] == 1 and b["top_p"] == 1 for b in bodies)
    answers = {(tuple(b["prompt"]), tuple(sampled("", b)["choices"][0]["token_ids"])) for b in bodies}
    for r in got:
        history = r["dialogue_history"]
        turns = M.turns_of(tokenizer, {"dialogue_history": history})
        for m, (prompt, action) in zip([m for m in history if m["role"] == "assistant"], turns):
            assert (prompt, action) in answers and m["logprobs"] == [-i / 8 for i in range(len(action))]
            assert len(m["candidates"]) == 3 and all((prompt, tuple(c["token_ids"])) in answers for c in m["candidates"])


def prefers(word, trouble=0.0, taste=1):
    """A judge who takes the message with more of a word, or with taste=-1 less, and thinks first."""
    def reply(path, body):
        prompt = body["messages"][0]["content"]
        a, b = re.search(r"\nA: (.*)\n\nB: (.*)\n\nWhich", prompt, re.S).groups()
        assert "def f(x, rate=3)" in prompt and body["temperature"] == 0 and a != b
        return chat(f"<think>B or A?</think>The answer is {'A' if taste * (a.count(word) - b.count(word)) > 0 else 'B'}.")
    return Server(reply, trouble)


def judged(actions, server, retries=8):
    async def main():
        servers = Endpoint(server.url, timeout=TIMEOUT, retries=retries)
        task = {"problem_description": "write f(x)", "ground_truth": "def f(x, rate=3): return x"}
        return await colbench.judge(servers, "m", task, [{"role": "user", "content": "write f(x)"}], actions)
    return asyncio.run(main())


def test_a_judge_gives_each_message_the_share_of_its_comparisons_that_it_wins():
    said = [{"content": "so", "output": "no no OUTPUT: so"}, *({"output": x} for x in ("no", "no no", "no no no", "no no no"))]
    # so < no < no no < no no no = no no no > so, in a circle
    assert judged(said, prefers("no", trouble=0.3)) == [0, 0.5, 0.5, 0.75, 0.75]
    assert judged(said[:1], prefers("no")) == [0] and judged(said[:2], prefers("no")) == [0, 1]
    with pytest.raises(EndpointError, match="neither A nor B"):
        judged(said, Server(lambda path, body: chat("neither")), retries=1)


def test_judge_keeps_the_records_and_their_order():
    history = [{"role": "user", "content": "write f(x)"}, {"role": "assistant", "content": "x", "candidates": [{"output": "yes"}]},
               {"role": "user", "content": "what?"}, {"role": "assistant", "content": "y", "candidates": [{"output": "yes"}]}]
    made = [{"task": {"problem_description": "write f(x)", "ground_truth": "def f(x, rate=3): return x"}, "n": n,
             "dialogue_history": history} for n in range(20)]
    server = prefers("yes")
    done = script("colbench.py", "judge", "--endpoint", server.url, "--in_flight", 3, stdin=made)
    assert done.returncode == 0, done.stderr
    for n, r in enumerate(records(done.stdout)):
        assert r["n"] == n
        for m in colbench.agent_messages(r):
            assert m.pop("advantage") == 0 and m["candidates"][0].pop("advantage") == 1
        assert r["dialogue_history"] == history
    prompts = [body["messages"][0]["content"] for _, body, _ in server.seen]
    assert len(prompts) == 80 and sum("Assistant: x\nYou: what?" in p for p in prompts) == 40


def test_a_judge_chooses_messages(tiny_dir, tasks):
    """Two judges of opposite taste: what one chooses of the same four draws the other does not."""
    task, chosen = {**tasks[0]["task"], "hidden_information": "def f(x, rate=3)"}, []
    for taste in (1, -1):
        server = prefers("e", taste=taste)
        done = script("collect.py", "--model", tiny_dir, "--max_turns", 1, "--max_tokens", 20, "--best_of", 4, "--critic",
                      server.url, stdin=[task])
        assert done.returncode == 0 and 0 < len(server.seen) <= 4, done.stderr
        chosen.append(records(done.stdout)[0]["dialogue_history"][1]["output"].count("e"))
    assert chosen[0] > chosen[1]
