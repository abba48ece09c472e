"""What the tests share: running a script, a tiny untrained model, a few of its episodes.

A test starts a program by `script(name, *flags, stdin=...)`, or by `succeed` if it must end well.
The program runs in a fork of a process that has torch loaded (forks.py), which saves seconds; it may
be killed, or run on several ranks. `shell(command, in_forks=1)` does that for the programs of a bash
command. A test that needs no process calls main() here, as the fixtures `playing` and `grading` do.
Only what needs a terminal or another Python starts a process of its own.

The processes of `pytest -n 2` share nothing: each has a server of forks, a model and folders.
"""
import contextlib
import functools
import glob
import io
import json
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SHARED = Path(ROOT).parent / "shared"  # what a checkout may have beside it
sys.path.insert(0, ROOT)
os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # in the background of a shell, and all processes that the tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
FULL = bool(os.environ.get("FULL"))  # the full dose: kills, fuzz, browsers, vLLM, more processes
CPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # the scripts' environment: no GPU

import colbench  # noqa: E402
import forks  # noqa: E402
import toy  # noqa: E402
import utils  # noqa: E402


def pytest_configure(config):
    config.addinivalue_line("markers", "full: slow; runs with FULL=1 in the environment")
    if not FULL:
        config.option.markexpr = "not full"


def pytest_terminal_summary(terminalreporter):
    """Says once, in `pytest -q`, too, what was skipped and why."""
    skipped = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", ())]
    for reason in sorted(set(skipped)):
        terminalreporter.write_line(f"{reason} ({skipped.count(reason)} times)")


@functools.cache
def forks_server(number):
    """(name of the socket at which forks.py serves, its process), started at the first call."""
    if number == 1 and "FORKS" in os.environ:  # that of the tests which have started these tests
        return os.environ["FORKS"], None
    name = f"colbench-tests-{os.getpid()}-{number}"
    server = subprocess.Popen([sys.executable, f"{ROOT}/tests/forks.py", name], env=CPU,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    server.stdout.readline()  # it listens
    return name, server


def script(name, *flags, stdin="", cwd=ROOT, out="", kill=None, ranks=1):
    """Runs `python name flags`; returns the CompletedProcess, with text in stdout and stderr.

    It runs in a fork of a process that has torch loaded, which saves seconds a call: see forks.py.
    stdin: text or records. out: a file to which stdout is appended. kill: (when, signal) to send
    it; when: seconds, if it has not ended by then, or a path, as soon as it has written that.
    ranks: how many processes run it, as torchrun would start them.
    """
    given = stdin if isinstance(stdin, str) else lines(stdin)
    command = [os.path.join(ROOT, name), *map(str, flags)]
    when, how = kill or (None, None)
    last = [str(when), how] if isinstance(when, Path) else None
    with tempfile.TemporaryDirectory() as d:
        files = [Path(d, name) for name in ("in", "out", "err")]
        for file, text in zip(files, (given, "", "")):
            file.write_text(text, encoding="utf-8")
        files[1] = out or files[1]
        fds = [os.open(file, os.O_RDWR | os.O_APPEND) for file in files]
        answer = forks.request(forks_server(1)[0], fds, command, str(cwd), CPU, ranks, last)
        for fd in fds:
            os.close(fd)
        with answer:
            pid = int(answer.readline())
            if kill and not last and not select.select([answer], [], [], when)[0]:
                with contextlib.suppress(ProcessLookupError):  # it ended just now
                    os.kill(pid, how)
            code = int(answer.readline())
        said = ["" if out else files[1].read_text(encoding="utf-8"), files[2].read_text("utf-8")]
        return subprocess.CompletedProcess(command, code, *said)


def succeed(*command, **how):
    """script(), which must end with exit status 0."""
    done = script(*command, **how)
    assert done.returncode == 0, done.stderr
    return done


def shell(command, cwd=ROOT, timeout=180, in_forks=0):
    """Runs a bash command with `python` the one of the tests; returns the CompletedProcess.

    in_forks: the number of a server; scripts run in its forks, as those of script() in 1's.
    """
    name = in_forks and forks_server(in_forks)[0]
    with tempfile.TemporaryDirectory() as d:
        if in_forks:
            python = Path(d, "python")
            python.write_text(forks.python_program(name))
            python.chmod(0o755)
        path = os.pathsep.join([d, os.path.dirname(sys.executable), os.environ["PATH"]])
        env = {**CPU, "PATH": path} | ({"FORKS": name} if name else {})
        return subprocess.run(["bash", "-c", command], text=True, capture_output=True, cwd=cwd,
                              timeout=timeout, env=env)


def descendants(pid=None):
    """PIDs of all descendants of a process (default: this one)."""
    pid = pid or os.getpid()
    parents = {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError), open(path) as f:
            child, _, rest = f.read().partition(" (")
            parents[int(child)] = int(rest.rpartition(")")[2].split()[1])
    family, size = {pid}, 0
    while len(family) > size:
        size = len(family)
        family |= {child for child, parent in parents.items() if parent in family}
    return family - {pid}


def until(there, p=None, seconds=100):
    """Waits until there() is true; not longer than the process p lives."""
    end = time.time() + seconds
    while not there():
        assert p is None or p.poll() is None, p.communicate()
        assert time.time() < end
        time.sleep(0.01)


def gone(pids, seconds=20):
    """Fails unless these processes have ended within so many seconds; zombies have."""
    def ended(pid):
        with contextlib.suppress(OSError):
            return ") Z " in Path(f"/proc/{pid}/stat").read_text()
        return True
    until(lambda: all(map(ended, pids)), seconds=seconds)


def complaint(done, *parts):
    """The last and only line that says what is wrong, with all these parts; nothing on stdout."""
    said = done.stderr.splitlines()
    assert done.returncode in (1, 2) and not done.stdout and "Traceback" not in done.stderr, said
    errors = [line for line in said if "error: " in line]
    assert errors == said[-1:] and all(part in errors[0] for part in parts), said
    return errors[0]


def lines(records):
    return "".join(json.dumps(r) + "\n" for r in records)


def dialogue(*contents):
    """Messages of user and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


def turns_of(chat, record):
    """The [Turn] of the assistant messages in a record, in order."""
    import model  # slow to load
    thinking = record.get("meta", {}).get("thinking", 0)
    turns = []
    for history, actions in model.turn_actions(record):
        prompt = chat.prompt_ids(history, thinking)
        action = chat.action_ids(actions[0], history, thinking)
        turns.append(model.Turn(model.packed(prompt), model.packed(action)))
    return turns


def plain_ids(tokenizer, text):
    """Token ids of text in which nothing is a special token."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def records(text):
    return [json.loads(line) for line in text.splitlines()]


def stdin_of(given):
    """A context in which sys.stdin has this text or these records."""
    text = given if isinstance(given, str) else lines(given)
    return patch("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def read_by(given, trainer, *flags):
    """(groups of pairs, pairs held out) that a trainer makes of records."""
    import model  # here, because it takes seconds
    args = trainer.get_args([*map(str, flags), "--out", "x"])
    with stdin_of(given):
        trajectories = trainer.read(args)
    if trainer.__name__ == "train_policy":
        pi_ref = model.load(args.model)[0] if args.logprob_weight else None
        ref_logps = trainer.candidate_logps(args, trajectories, pi_ref)
        groups, held_out = trainer.make_pairs(args, trajectories, ref_logps)
    else:
        groups, held_out = trainer.make_pairs(args, trajectories)
    return [pairs for _, pairs in groups], held_out


def key_of(record):
    return colbench.task_id(record["task"]), record["sample"]


def agent_texts(record):
    return [m["content"] for m in colbench.agent_messages(record)]


def actions(record):
    """The agent's messages and their candidates."""
    return [x for m in colbench.agent_messages(record) for x in (m, *m.get("candidates", ()))]


def uncut(given):
    """Records in which no action is cut, however the noise of an untrained model has ended."""
    for r in given:
        for x in actions(r):
            x.pop("cut", None)
    return given


def metrics(out):
    """The whole rows of a run's metrics.jsonl; [] if there is none."""
    path = Path(out, "metrics.jsonl")
    return records(path.read_text().rpartition("\n")[0]) if path.exists() else []


def steps(out):
    return [row for row in metrics(out) if "tokens" in row]


def train(given, *command, ranks=1):
    """(stdout's records, metrics.jsonl's rows) of a trainer that must succeed."""
    done = succeed(*command, stdin=given, ranks=ranks)
    return records(done.stdout), metrics(command[command.index("--out") + 1])


def demos(n, seed=0, of=toy, **knobs):
    """Demonstrations of toy or toy_pages."""
    knobs |= {"n": n, "seed": seed}
    flags = [str(x) for name, value in knobs.items() for x in ("--" + name, value)]
    return list(of.demos(of.get_args(["demos", *flags])))


def save(made, out):
    """Saves what toy.tiny makes."""
    for part in made:
        part.save_pretrained(out)


def weights(folder):
    from safetensors.torch import load_file
    return load_file(f"{folder}/model.safetensors")


def change_weights(folder, change):
    """Replaces a model's weights {name: tensor} by change(weights)."""
    from safetensors.torch import save_file
    save_file(change(weights(folder)), f"{folder}/model.safetensors", {"format": "pt"})


def change_json(file, **fields):
    """Sets fields of a JSON file; returns what it has then."""
    content = {**json.loads(Path(file).read_text()), **fields}
    Path(file).write_text(json.dumps(content))
    return content


def copy_scripts(folder):
    for path in glob.glob(f"{ROOT}/*.py"):
        shutil.copy(path, folder)
    return folder


def nucleus(logps, top_p):
    """Log-probs (n, vocabulary) of sampling with --top_p: -inf for what is never drawn."""
    out = logps.detach().clone().fill_(-float("inf"))
    for row, all_of in zip(out, logps):
        for token in all_of.argsort(descending=True).tolist():
            if row.exp().sum() >= top_p:
                break
            row[token] = all_of[token].item()
    return out.log_softmax(-1)


@pytest.fixture(autouse=True)
def no_warnings():
    """No test finds the warnings about data that another one has left."""
    utils.WARNINGS.clear()


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    """A tiny model whose words are those of 200 demonstrations, untrained, saved."""
    out = str(tmp_path_factory.mktemp("model") / "tiny")
    save(toy.tiny_model(demos(200)), out)
    return out


@pytest.fixture(scope="session")
def graders():
    """A Grader by honest rules, and one by official ones."""
    if platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("no sandbox for this processor")
    with contextlib.closing(colbench.Grader(workers=2)) as honest, \
            contextlib.closing(colbench.Grader("official", workers=1)) as official:
        yield honest, official


@pytest.fixture
def grader(graders):
    return graders[0]


def task(reference, *tests):
    """A task for a function: its reference and the expressions that test it."""
    return {"problem_description": "d", "ground_truth": reference,
            "test_cases": {f"test{i}": test for i, test in enumerate(tests, 1)}}


DOUBLE = task("def f(x):\n    return x * 2", "f(1)", "f(2)", "f(3)", "f(4)")
HONEST = "def f(x):\n    return x + x"  # a right answer to it
PYTHON = "Python %d.%d" % sys.version_info[:2]  # which the names of graders end with


@pytest.fixture
def quick(monkeypatch):
    """Shorter limits of an answer, only to save time."""
    monkeypatch.setattr(colbench, "LIMITS", {**colbench.LIMITS, "test": .2, "answer": .2})


@pytest.fixture
def grading(capsys):
    """Runs a command of colbench.py here: grading(given, *flags) -> (records, stderr, its end)."""
    def run(given, *flags, command="grade"):
        emitted, end = [], None
        args = colbench.get_args([command, "--workers", "2", *map(str, flags)])
        try:
            with stdin_of(given):
                colbench.COMMANDS[command](args, lambda record: emitted.append(json.dumps(record)))
        except (SystemExit, colbench.GraderError) as e:
            end = e
        return list(map(json.loads, emitted)), capsys.readouterr().err, end
    return run


SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGKILL


def end_grading(answers, number, grader="colbench.py"):
    """Ends the grading of these records by a signal when the first is graded; nothing is left."""
    pipe = subprocess.PIPE
    grading = subprocess.Popen(
        [sys.executable, grader, "grade", "--workers", "1"], cwd=ROOT, text=True, env=CPU,
        stdin=pipe, stdout=pipe, stderr=pipe,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    grading.stdin.write(lines(answers))
    grading.stdin.flush()
    assert grading.stdout.readline()
    children = descendants(grading.pid)
    grading.send_signal(number)
    assert grading.wait(30) == -number and children
    assert "Traceback" not in grading.stderr.read()
    gone(children)


HUMAN = ["--human", toy.__file__]
PLAY = [*HUMAN, "-k", 2, "--candidates", 4, "--max_tokens", 40, "--max_turns", 4, "--seed", 3]


@pytest.fixture(scope="session")
def tasks():
    return records(script("tests/toy.py", "tasks", "--n", 4, "--seed", 1).stdout)


@pytest.fixture(scope="session")
def collected(tasks, tiny_dir):
    """collect.py's stdout on the tasks: 2 episodes each, 4 candidates a turn. All text is noise."""
    return succeed("collect.py", "--model", tiny_dir, *PLAY, stdin=tasks).stdout


@pytest.fixture
def playing(tiny_dir, monkeypatch, capsys):
    """Runs collect.py here, of tiny_dir unless flags have an --agent.

    playing(given, *flags) -> (episodes, stderr, its end); playing.failed are those that failed
    """
    import collect  # slow to load
    def run(given, *flags):
        written, end = [], None
        monkeypatch.setattr(collect, "open_stdout", lambda: lambda r: written.append(json.dumps(r)))
        model = [] if "--agent" in flags else ["--model", tiny_dir]
        args = collect.get_args([*model, *HUMAN, *map(str, flags)])
        try:
            with stdin_of(given):
                collect.main(args)
        except SystemExit as e:
            end = e.with_traceback(None)  # which would hold the lock of a --resume file
        got = list(map(json.loads, written))
        run.failed = [r for r in got if "failed" in r]
        return [r for r in got if "failed" not in r], capsys.readouterr().err, end
    return run


@pytest.fixture
def episodes(collected):
    return records(collected)


@pytest.fixture
def rewarded(episodes):
    """The episodes with rewards: of each task sample 0 is solved, sample 1 is not."""
    for r in episodes:
        r["reward"] = 1.0 if r["sample"] == 0 else 0.3
    return uncut(episodes)


@pytest.fixture
def ranked(rewarded):
    """The episodes with rewards and candidates' advantages."""
    for r in rewarded:
        for message in colbench.agent_messages(r):
            for i, candidate in enumerate(message["candidates"]):
                candidate["advantage"] = float(i)
    return rewarded
