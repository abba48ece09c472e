"""A real vLLM server, in its CPU build, of a tiny model: as the engine, the human and the agent."""
import json
import math
import os
import subprocess
import sys

import pytest
import torch

import colbench
import model as M
from conftest import (HUMAN, CPU, ROOT, descendants, gone, key_of, lines, nucleus, records,
                      turns_of, until)

pytest.importorskip("vllm", reason="vllm is not installed (its CPU build: see .ci/run)")
pytestmark = pytest.mark.full
BIN = os.path.dirname(sys.executable)  # has `vllm`
FAST = {**CPU, "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PATH": f"{BIN}:{os.environ['PATH']}"}
PLAY = ["--max_turns", 3, "--max_tokens", 12, "--temperature", 0.7, "--top_p", 0.9,
        "--candidates", 2, "-k", 2]
# chunked prefill crashes seeded draws on a CPU
ON_A_CPU = ["--dtype", "float32", "--enforce-eager", "--no-enable-chunked-prefill",
            "--kv-cache-memory-bytes", 1 << 28, "--uvicorn-log-level", "warning"]


def with_server(tiny_dir, serve, *command):
    """The command, with a server of the model: a list of texts."""
    start = ["bash", "tests/experiments/with_vllm.sh", tiny_dir, *ON_A_CPU, *serve, "--"]
    return [*map(str, [*start, *command])]


def check(got, tiny_dir, tasks):
    """Each episode is there once; its log-probs are the model's own at temperature and top_p.

    Rounding may take one token more or less into the nucleus.
    """
    lm, chat = M.load_lm(tiny_dir, "cpu")
    assert sorted(map(key_of, got)) == sorted((t["task"]["id"], i) for t in tasks for i in range(2))
    for r in got:
        turns = [[[*map(ord, text)] for text in turn] for turn in turns_of(chat, r)]
        for m, (prompt, action) in zip(colbench.agent_messages(r), turns):
            assert action == m["token_ids"] and len(m["candidates"]) == 2
            logits = lm(torch.tensor([[*prompt, *action]])).logits[0, len(prompt) - 1:-1] / 0.7
            logps = logits.log_softmax(-1)
            kept = logps.where(nucleus(logps, 0.9).isfinite(), -math.inf).logsumexp(-1)
            want = logps[range(len(action)), action] - kept
            assert torch.allclose(torch.tensor(m["logprobs"]), want, atol=5e-3)


@pytest.fixture(scope="module")
def served(tiny_dir, tasks, tmp_path_factory):
    """{name: (stdout, stderr, exit code)} of a collection whose engine is a server of two copies of
    the model ("agent"), of one whose human it is, and of one that it plays alone ("both").

    A task is too long for the context. The human's replies are made to end.
    """
    long = {**tasks[0]["task"], "id": "long", "problem_description": "one word more " * 900}
    eos = M.find_model(tiny_dir)[1].tokenizer.eos_token_id
    params = json.dumps({"max_tokens": 400, "min_tokens": 20, "logit_bias": {eos: 100}})
    human = ["--human_params", f"'{params}'", "--human", "$1"]
    local = ["--model", tiny_dir, *PLAY]
    runs = {"agent": ([tasks[0], {"task": long}, *tasks[1:]], [*local, *HUMAN, "--engine", "$1"]),
            "human": (tasks, [*local, *human]),
            "both": (tasks, ["--agent", "$1", *human, "--max_turns", 3, "--max_tokens", 12])}
    out, command = tmp_path_factory.mktemp("served"), ""
    for name, (given, flags) in runs.items():
        (out / f"{name}.in").write_text(lines(given))
        collect = " ".join(map(str, ["python collect.py", *flags]))
        at = out / name
        command += f"{collect} < {at}.in > {at}.out 2> {at}.err; echo $? > {at}.code\n"
    before = descendants()
    done = subprocess.run(
        with_server(tiny_dir, ["--data-parallel-size", 2, "--max-model-len", 1536], "bash", "-c",
                    command), cwd=ROOT, text=True, env=FAST, timeout=500, capture_output=True)
    assert done.returncode == 0, done.stderr
    gone(descendants() - before)
    return {name: ((out / f"{name}.out").read_text(), (out / f"{name}.err").read_text(),
                   int((out / f"{name}.code").read_text())) for name in runs}


def episodes(stdout):
    return [r for r in records(stdout) if "failed" not in r]


def test_a_server_samples_as_the_model_does(served, tiny_dir, tasks):
    """A task that its context can't hold is an episode that fails."""
    stdout, stderr, code = served["agent"]
    check(episodes(stdout), tiny_dir, tasks)
    assert code == 1 and "2 episodes failed" in stderr and " of 1536 tokens" in stderr


def test_it_plays_the_human(served):
    """An untrained one; replies that are empty fail their episode."""
    stdout, stderr, code = served["human"]
    failed = [line for line in stderr.splitlines() if " failed: " in line]
    assert all("the reply is empty" in line for line in failed) and code == bool(failed), stderr
    replies = {m["content"] for r in episodes(stdout) for m in r["dialogue_history"][2::2]}
    assert replies and all(0 < len(reply) <= 400 for reply in replies)


def test_it_plays_agent_and_human_at_once(served, tiny_dir):
    """The untrained agent does not end its messages, so that the server truncates each."""
    stdout, stderr, code = served["both"]
    failed = [line for line in stderr.splitlines() if " failed: " in line]
    assert all("the reply is empty" in line for line in failed) and code == bool(failed), stderr
    played = episodes(stdout)
    assert played and all(r["meta"]["agent_model"] == tiny_dir for r in played)
    for r in played:
        messages = colbench.agent_messages(r)
        assert r["dialogue_history"][0] == colbench.first_message(r["task"], 3)
        assert [m["completion_tokens"] for m in messages if m["cut"]] == [12] * len(messages)
        usage = r["usage"]
        assert usage["agent_completion_tokens"] == 12 * len(messages)
        assert usage["agent_prompt_tokens"] > 9 * len(messages)
        assert usage[f"human_replies_by_{tiny_dir}"] == len(messages) - 1


def test_killed_it_leaves_no_process_behind(tiny_dir, tasks, tmp_path):
    # few at once: before the first episode has ended, more would fill the pipe of stderr
    flags = "-k", 500, "--concurrency", 8, "--retries", 0  # it ends when the server has
    (tmp_path / "tasks").write_text(lines(tasks))
    with open(tmp_path / "tasks") as given, open(tmp_path / "out", "w") as out:
        command = with_server(tiny_dir, ["--tensor-parallel-size", 2], "python", "collect.py",
                              "--model", tiny_dir, *HUMAN, *PLAY, *flags)
        process = subprocess.Popen(command, cwd=ROOT, text=True, env=FAST, stdin=given, stdout=out,
                                   stderr=subprocess.PIPE)
    # two workers on two busy cores start slowly
    until((tmp_path / "out").read_text, process, 500)
    its = descendants(process.pid)
    assert len(its) > 4  # a server, its engine, two workers, and collect.py
    process.kill()
    process.wait()
    gone(its)
