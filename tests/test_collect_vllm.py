"""A real vLLM, in its CPU build, on a tiny model: in process, and as a server of either side."""
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
import torch

import colbench
import model as M
from conftest import (HUMAN, CPU, ROOT, descendants, gone, key_of, lines, nucleus, records,
                      turns_of, until)

pytest.importorskip("vllm", reason="vllm is not installed (its CPU build: see .ci/run)")
FAST = {**CPU, "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
PLAY = [*HUMAN, "--max_turns", 3, "--max_tokens", 12, "--temperature", 0.7, "--top_p", 0.9,
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


@pytest.fixture
def servers(tiny_dir):
    """[(process, url)] of two vLLM servers of the tiny model."""
    running = []
    for _ in range(2):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        flags = ["--model", tiny_dir, "--host", "127.0.0.1", "--port", port, "--dtype", "float32",
                 "--max-model-len", 2048, "--enforce-eager", "--no-enable-chunked-prefill",
                 "--kv-cache-memory-bytes", 1 << 28, "--generation-config", "vllm",
                 "--logprobs-mode", "processed_logprobs", "--uvicorn-log-level", "warning"]
        server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *map(str, flags)]
        process = subprocess.Popen(server, env=FAST, start_new_session=True)  # pytest shows its log
        running.append((process, f"http://127.0.0.1:{port}"))

    def healthy(url):
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(url + "/health", timeout=5)

    for process, url in running:
        until(lambda: healthy(url), process, 300)
    yield [(process, url + "/v1") for process, url in running]
    for process, _ in running:
        stop(process)


def stop(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def start(command, tasks, path, *flags):
    """collect.py, started, with its first episode in the file `path`: its process."""
    with open(path, "w") as out:
        process = subprocess.Popen([*map(str, [*command, *flags])], cwd=ROOT, text=True, env=FAST,
                                   stdin=subprocess.PIPE, stdout=out, stderr=subprocess.PIPE)
    process.stdin.write(lines(tasks))
    process.stdin.close()
    process.stdin = None  # communicate() would flush it
    until(path.read_text, process, 500)  # two workers on two busy cores start slowly
    return process


def check(got, tiny_dir, tasks):
    """Each episode is there once; its log-probs are the model's own at temperature and top_p.

    Rounding may take one token more or less into the nucleus.
    """
    lm, tokenizer = M.load_lm(tiny_dir, "cpu")
    assert sorted(map(key_of, got)) == sorted((t["task"]["id"], i) for t in tasks for i in range(2))
    for r in got:
        turns = [[[*map(ord, text)] for text in turn] for turn in turns_of(tokenizer, r)]
        for m, (prompt, action) in zip(colbench.agent_messages(r), turns):
            assert action == m["token_ids"] and len(m["candidates"]) == 2
            logits = lm(torch.tensor([[*prompt, *action]])).logits[0, len(prompt) - 1:-1] / 0.7
            logps = logits.log_softmax(-1)
            kept = logps.where(nucleus(logps, 0.9).isfinite(), -math.inf).logsumexp(-1)
            want = logps[range(len(action)), action] - kept
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
        later = [[*map(ord, prompt)] for prompt, _ in turns_of(tokenizer, r)[1:]]
        ranks = {rank for prompt, rank, _ in asked if prompt in later}
        assert len(ranks) <= 1
        homes += ranks
    assert homes.count(0) > 1 and homes.count(1) > 1


def test_killed_it_leaves_no_process_behind(command, tasks, tmp_path):
    # few at once: before the first episode has ended, more would fill the pipe of stderr
    flags = [*IN_PROCESS, "-k", 500, "--concurrency", 8, "--tensor_parallel", 2]
    process = start(command, tasks, tmp_path / "out", *flags)
    its = descendants(process.pid)
    assert len(its) > 3  # an engine, its two workers, and whoever sees to their end
    process.kill()
    process.wait()
    gone(its)


def test_servers_answer_as_the_human_or_sample_and_one_that_dies_is_left_out(
        tiny_dir, tasks, servers, tmp_path):
    command = [sys.executable, "collect.py", "--model", tiny_dir, *PLAY, "--retries", 1]
    urls, out = ",".join(url for _, url in servers), tmp_path / "out"
    for flags in (["--human", urls, "--human_tokens", 400],  # few of an untrained one say nothing
                  ["--engine", urls, "--concurrency", 1]):
        process = start(command, tasks, out, *flags)
        if "--engine" in flags:
            stop(servers[1][0])
        assert process.wait(120) == 0, process.stderr.read()
        got = records(out.read_text())
        check(got, tiny_dir, tasks)
        replies = {m["content"] for r in got for m in r["dialogue_history"][2::2]}
        assert replies and all(0 < len(reply) <= 400 for reply in replies)
