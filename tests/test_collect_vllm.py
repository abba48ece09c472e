"""A real vLLM, in its CPU build, on a tiny model: in process, and as a server of either side."""
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch

import colbench
import model as M
from conftest import CPU, ROOT, descendants, gone, lines, nucleus, records, script

pytest.importorskip("vllm", reason="vllm is not installed (its CPU build: see .ci/run)")
FAST = {**CPU, "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
PLAY = ["--max_turns", 3, "--max_tokens", 12, "--temperature", 0.7, "--top_p", 0.9,
        "--candidates", 2, "-k", 2]
IN_PROCESS = [*PLAY, "--engine", "vllm", "--max_model_len", 1024]
WATCHED = """
import json, os, runpy, sys, vllm
from vllm.v1.engine.async_llm import AsyncLLM
generate, made = AsyncLLM.generate, vllm.AsyncEngineArgs

def watched(self, prompt, params, request_id, **how):
    asked = [prompt["prompt_token_ids"], how["data_parallel_rank"], params.n]
    print("asked", json.dumps(asked), file=sys.stderr)
    return generate(self, prompt, params, request_id, **how)

def on_a_cpu(**options):  # where chunked prefill crashes seeded draws
    return made(**options, dtype="float32", enforce_eager=True, enable_chunked_prefill=False,
                kv_cache_memory_bytes=1 << 28)

if __name__ == "__main__":
    AsyncLLM.generate, vllm.AsyncEngineArgs, sys.argv = watched, on_a_cpu, sys.argv[1:]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def command(tiny_dir, tmp_path):
    """collect.py on a tiny model, by a vllm that is watched."""
    (tmp_path / "watched.py").write_text(WATCHED)
    return [sys.executable, str(tmp_path / "watched.py"), os.path.join(ROOT, "collect.py"),
            "--model", str(tiny_dir)]


def serve(models, folder):
    """[(process, url)] of a vLLM server for each model."""
    out = []
    for i, model in enumerate(models):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        flags = ["--host", "127.0.0.1", "--port", port, "--dtype", "float32",
                 "--max-model-len", 2048, "--enforce-eager", "--no-enable-chunked-prefill",
                 "--kv-cache-memory-bytes", 1 << 28, "--generation-config", "vllm",
                 "--logprobs-mode", "processed_logprobs", "--uvicorn-log-level", "warning"]
        with open(folder / f"log{i}", "w") as log:
            server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
            process = subprocess.Popen([*server, "--model", model, *map(str, flags)],
                                       stdout=log, stderr=log, env=FAST, start_new_session=True)
            out.append((process, f"http://127.0.0.1:{port}", log.name))
    end = time.time() + 300
    for process, url, log in out:
        while True:
            assert process.poll() is None and time.time() < end, open(log).read()[-3000:]
            try:
                urllib.request.urlopen(url + "/health", timeout=5)
                break
            except OSError:
                time.sleep(0.5)
    return [(process, url + "/v1") for process, url, _ in out]


@pytest.fixture(scope="module")
def servers(tiny_dir, tmp_path_factory):
    """[(process, url)] of two vLLM servers of the tiny model."""
    running = serve([tiny_dir] * 2, tmp_path_factory.mktemp("servers"))
    yield running
    for process, _ in running:
        stop(process)


def stop(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def start(command, tasks, path, *flags):
    """collect.py, started: its process; stdout goes to the file `path`."""
    with open(path, "w") as out:
        process = subprocess.Popen([*command, *map(str, flags)], cwd=ROOT, stdin=subprocess.PIPE,
                                   stdout=out, stderr=subprocess.PIPE, text=True, env=FAST)
    process.stdin.write(lines(tasks))
    process.stdin.close()
    end = time.time() + 500  # two workers on two busy cores start slowly
    while not path.read_text():
        assert process.poll() is None and time.time() < end, process.stderr.read()
        time.sleep(0.05)
    return process


def check(got, tiny_dir, tasks):
    """Each episode is there once; its log-probs are the model's own at temperature and top_p.

    Rounding may take one token more or less into the nucleus.
    """
    lm, tokenizer = M.load_lm(tiny_dir, "cpu")
    keys = sorted((r["task"]["id"], r["sample"]) for r in got)
    assert keys == sorted((t["task"]["id"], i) for t in tasks for i in range(2))
    for r in got:
        turns = M.turns_of(tokenizer, r)
        for m, (prompt, action) in zip(colbench.agent_messages(r), turns):
            assert list(action) == m["token_ids"] and len(m["candidates"]) == 2
            logits = lm(torch.tensor([[*prompt, *action]])).logits[0, len(prompt) - 1:-1] / 0.7
            logps = logits.log_softmax(-1)
            kept = logps.where(nucleus(logps, 0.9).isfinite(), -math.inf).logsumexp(-1)
            want = logps[range(len(action)), list(action)] - kept
            assert torch.allclose(torch.tensor(m["logprobs"]), want, atol=5e-3)


def test_in_process(command, tiny_dir, tasks):
    """Two copies: a turn's draws are one request, and an episode stays where its prefix is."""
    long = {**tasks[0]["task"], "id": "long", "problem_description": "one word more " * 600}
    flags = [*IN_PROCESS, "--data_parallel", 2]
    done = subprocess.run([*command, *map(str, flags)], cwd=ROOT, text=True, env=FAST, timeout=400,
                          capture_output=True,
                          input=lines([tasks[0], {"task": long}, *tasks[1:]]))
    assert done.returncode == 1 and done.stdout, done.stderr
    got = records(done.stdout)
    check(got, tiny_dir, tasks)
    assert "2 episodes failed" in done.stderr  # the prompt is longer than --max_model_len
    assert "Traceback" not in done.stderr
    asked = [json.loads(line[6:]) for line in done.stderr.splitlines() if line[:6] == "asked "]
    assert len(asked) == 2 + sum(len(colbench.agent_messages(r)) for r in got)
    assert {n for _, _, n in asked} == {3}  # a message and two candidates
    tokenizer, homes = M.find_model(tiny_dir)[1], []
    for r in got:
        later = [list(prompt) for prompt, _ in M.turns_of(tokenizer, r)[1:]]
        ranks = {rank for prompt, rank, _ in asked if prompt in later}
        assert len(ranks) <= 1
        homes += ranks
    assert homes.count(0) > 1 and homes.count(1) > 1


def test_killed_it_leaves_no_process_behind(command, tasks, tmp_path):
    flags = [*IN_PROCESS, "-k", 500, "--tensor_parallel", 2]
    process = start(command, tasks, tmp_path / "out", *flags)
    its = descendants(process.pid)
    assert len(its) > 3  # an engine, its two workers, and whoever sees to their end
    process.kill()
    process.wait()
    gone(its)


def test_a_server_answers_as_the_human(tiny_dir, tasks, servers):
    replies = []
    for _, url in servers:  # few tokens of an untrained human say nothing
        flags = [*PLAY, "--human_tokens", 400, "--human", url]
        done = script("collect.py", "--model", tiny_dir, *flags, stdin=tasks)
        assert done.returncode == 0, done.stderr
        got = records(done.stdout)
        check(got, tiny_dir, tasks)
        replies.append({m["content"] for r in got for m in r["dialogue_history"][2::2]})
    assert replies[0] == replies[1] != set()  # temperature 0
    assert all(0 < len(reply) <= colbench.Functions.reply_chars for reply in replies[0])


def test_servers_sample_and_one_that_dies_is_left_out(tiny_dir, tasks, servers, tmp_path):
    urls = ",".join(url for _, url in servers)
    process = start([sys.executable, "collect.py", "--model", tiny_dir], tasks, tmp_path / "out",
                    *PLAY, "--engine", urls, "--concurrency", 1, "--retries", 1)
    stop(servers[1][0])
    assert process.wait(120) == 0, process.stderr.read()
    check(records((tmp_path / "out").read_text()), tiny_dir, tasks)
