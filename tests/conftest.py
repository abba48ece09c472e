"""What the tests share: running a script, a tiny untrained model, a few episodes that collect.py played with it."""
import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background, and all that we start inherits it
    signal.signal(signal.SIGINT, signal.default_int_handler)
FULL = bool(os.environ.get("FULL"))  # the full dose: kills, fuzz, browsers, vLLM, more processes
CPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # for the scripts: what the tests compare is of the CPU

import colbench  # noqa: E402
import utils  # noqa: E402


def pytest_configure(config):
    config.addinivalue_line("markers", "full: slow; runs with FULL=1 in the environment")


def pytest_collection_modifyitems(config, items):
    slow = [] if FULL else [item for item in items if item.get_closest_marker("full")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


FORKS = """
import gc, json, os, runpy, sys
sys.path.insert(0, sys.argv[1])
import model, numpy, transformers.models.auto.modeling_auto, transformers.models.llama.modeling_llama  # slow
gc.freeze()  # a fork need not copy torch only to tear it down
for line in sys.stdin:
    argv, cwd, files = json.loads(line)
    pid = os.fork()
    if not pid:
        for fd, path in enumerate(files):
            os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), fd)
        os.chdir(cwd)
        sys.argv, sys.stdin, sys.path[0] = argv, open(0, encoding="utf-8"), os.path.dirname(argv[0])
        runpy.run_path(argv[0], run_name="__main__")
        sys.exit()
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@functools.cache
def forks():
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", FORKS, ROOT], bufsize=0, stdin=pipe, stdout=pipe, env=CPU)


def script(name, *flags, stdin="", cwd=ROOT, fresh=False, out=None, kill=None):
    """Runs `python name flags`; returns it finished, with text in stdout and stderr. stdin: text or records.

    In a fork of a process that has torch loaded, which saves seconds a call; fresh=True starts a new interpreter.
    out: a file to which stdout is appended. kill: (seconds, signal) to send it, if it has not ended by then.
    """
    stdin = stdin if isinstance(stdin, str) else lines(stdin)
    command = [os.path.join(ROOT, name), *map(str, flags)]
    if fresh:
        command = [sys.executable, *command]
        return subprocess.run(command, input=stdin, text=True, capture_output=True, cwd=cwd, timeout=120, env=CPU)
    with tempfile.TemporaryDirectory() as d:
        files = [os.path.join(d, f) for f in ("in", "out", "err")]
        for path in files:
            with open(path, "w", encoding="utf-8") as f:
                f.write(stdin if path == files[0] else "")
        line = json.dumps([command, str(cwd), [files[0], str(out or files[1]), files[2]]])
        forks().stdin.write(line.encode() + b"\n")
        pid = int(forks().stdout.readline())
        if kill and not select.select([forks().stdout], [], [], kill[0])[0]:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                os.kill(pid, kill[1])
        code = int(forks().stdout.readline())
        return subprocess.CompletedProcess(command, code, *(open(f, encoding="utf-8").read() for f in files[1:]))


def shell(command, cwd=ROOT):
    """Runs a bash command with `python` the one of the tests; returns the finished process."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    return subprocess.run(["bash", "-c", command], text=True, capture_output=True, cwd=cwd, timeout=180,
                          env={**CPU, "PATH": path})


def gone(pids, seconds=20):
    """Fails unless these processes have ended within so many seconds."""
    alive = lambda pid: os.path.exists(f"/proc/{pid}") and ") Z " not in open(f"/proc/{pid}/stat").read()
    end = time.time() + seconds
    while left := [pid for pid in pids if alive(pid)]:
        assert time.time() < end, [open(f"/proc/{pid}/cmdline").read() for pid in left if alive(pid)]
        time.sleep(0.1)


def lines(records):
    return "".join(json.dumps(r) + "\n" for r in records)


def records(text):
    return [json.loads(line) for line in text.splitlines()]


def demos(n, seed=0, **knobs):
    args = colbench.get_args(["demos", *(str(x) for k, v in knobs.items() for x in ("--" + k, v))])
    args.seed = seed
    kind = colbench.ENVIRONMENTS[args.kind]
    tasks = kind.tasks("train", args)
    return [kind.demonstration(next(tasks), utils.rng("demo", seed, i), args) for i in range(n)]


def critic_turns(tokenizer, record, head, hidden_info=1, pictures=None):
    """The turns by which a critic judges a record's messages."""
    import train_critic
    critic, history = {"head": head, "hidden_info": hidden_info, "ref_context": "hidden"}, record["dialogue_history"]
    turns_after = functools.partial(train_critic.critic_turns, critic, tokenizer, record["task"])
    both = [turns_after(history[:t], [m], 0, pictures)
            for t, m in enumerate(history) if m["role"] == "assistant"]
    return [turn for [(turn, _)] in both]


@pytest.fixture(scope="session", autouse=True)
def end_forks():
    yield
    if forks.cache_info().currsize:
        forks().stdin.close()
        forks().wait()


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    """A tiny model whose words are those of 200 demonstrations, untrained, saved."""
    import model
    out = str(tmp_path_factory.mktemp("model") / "tiny")
    model.save(*model.tiny(demos(200), seed=0, pieces=colbench.PIECES), out)
    return out


PLAY = ["-k", 2, "--candidates", 4, "--max_tokens", 40, "--max_turns", 4, "--seed", 3]


@pytest.fixture(scope="session")
def tasks():
    return records(script("colbench.py", "tasks", "--n", 4, "--seed", 1).stdout)


@pytest.fixture(scope="session")
def collected(tasks, tiny_dir):
    """collect.py's stdout on the tasks: 2 episodes each with 4 candidates a turn. It speaks noise."""
    done = script("collect.py", "--model", tiny_dir, *PLAY, stdin=tasks)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def episodes(collected):
    return records(collected)


@pytest.fixture
def rewarded(episodes):
    """The episodes with rewards that differ within each task: sample 0 is solved, sample 1 is not."""
    for r in episodes:
        r["reward"] = 1.0 if r["sample"] == 0 else 0.3
    return episodes
