"""Real faults: kills at random moments, full and read-only disks, data that degenerates; nothing finished is lost.

KILLS=100 python -m pytest -q tests/test_utils_faults.py kills every stage so often; FAULT_SEED=1 at other moments.
"""
import ast
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from safetensors.torch import load_file, save_file

import colbench
import utils
from conftest import CPU, ROOT, lines, records, script, shell
from test_readme import SCRIPTS

KILLS, SEED = int(os.environ.get("KILLS", 6)), os.environ.get("FAULT_SEED", "0")


@pytest.fixture(scope="module")
def scored(collected):
    """Episodes with rewards and advantages: 2 a task, one of them solved."""
    rs = records(collected)
    for r in rs:
        r["reward"] = 1.0 if r["sample"] == 0 else 0.3
        for m in r["dialogue_history"]:
            for i, c in enumerate(m.get("candidates", ())):
                c["advantage"] = float(i)
    return rs


def weights(out):
    return {k: v.numpy().tobytes() for k, v in load_file(out / "model.safetensors").items()}


def key(r):
    return r["task"]["id"], r["sample"]


# stage: flags, and whether its output is what it adds to a file or what its last run prints
STAGES = {
    "collect.py": (["-k", 4, "--max_tokens", 12, "--max_turns", 3, "--concurrency", 3, "--resume", "OUT"], True),
    "train_critic.py": (["--out", "OUT", "--save_every", 1, "--batch_size", 1, "--epochs", 2, "--resume", 1], False),
    "train_policy.py": (["--out", "OUT", "--save_every", 1, "--batch_size", 4, "--resume", 1], False),
    "evaluate.py": (["--bootstrap", 300, "--html", "OUT"], False)}


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_killed_again_and_again_ends_as_if_it_had_not_been(name, tasks, scored, tiny_dir, tmp_path):
    flags, adds = STAGES[name]
    model = ["--model", tiny_dir] * (name != "evaluate.py")
    many = [{**r, "sample": 100 * i + r["sample"]} for i in range(100) for r in scored]
    stdin = lines(tasks if adds else many if name == "evaluate.py" else scored)

    def run(out, kill=None):
        if adds:
            (tmp_path / out).touch()
        return script(name, *model, *(tmp_path / out if f == "OUT" else f for f in flags), stdin=stdin,
                      out=tmp_path / out if adds else None, kill=kill)

    begin = time.monotonic()
    whole = run("whole")
    seconds = time.monotonic() - begin
    assert whole.returncode == 0, whole.stderr

    def same(out, done):
        assert done.returncode == 0, done.stderr
        if adds:
            got, want = (sorted(records((tmp_path / f).read_text()), key=key) for f in (out, "whole"))
            for m in (m for r in got + want for m in r["dialogue_history"]):
                m.pop("logprobs", None)  # other company in a batch, other rounding
            assert got == want
        elif name == "evaluate.py":
            assert done.stdout == whole.stdout and (tmp_path / out).read_text() == (tmp_path / "whole").read_text()
        else:
            assert done.stdout.replace(out, "whole") == whole.stdout
            assert weights(tmp_path / out) == weights(tmp_path / "whole")

    r, kills, resumed, out, at = random.Random(f"{SEED} {name}"), 0, 0, "killed0", (signal.SIGKILL,) * 2 + (
        signal.SIGTERM, signal.SIGINT)
    while kills < KILLS:
        how, begin = r.choice(at), time.monotonic()
        said = (tmp_path / out / "metrics.jsonl").read_text() if (tmp_path / out / "metrics.jsonl").exists() else ""
        cut = adds and (tmp_path / out).exists() and not (tmp_path / out).read_bytes().endswith(b"\n")
        done = run(out, (0.3 + r.random() * seconds, how))
        if done.returncode == 0 or how != signal.SIGKILL and "error: " not in done.stderr:  # it had done its work
            same(out, done if done.returncode == 0 else run(out))
            out = f"killed{kills}"
            continue
        kills += 1
        assert done.returncode == -how, (done.returncode, done.stderr)
        if how != signal.SIGKILL:
            (error,) = (line for line in done.stderr.splitlines() if "error" in line.lower())
            assert error.startswith(f"error: ended by {how.name}") and "Traceback" not in done.stderr, done.stderr
            assert time.monotonic() - begin < seconds + 10
            written = (tmp_path / out).read_text() if adds and not cut else done.stdout
            assert not written or written.endswith("\n")
        if name == "evaluate.py":
            assert done.stdout in (whole.stdout, "") and (
                not (tmp_path / out).exists() or (tmp_path / out).read_text() == (tmp_path / "whole").read_text())
        elif not adds and (tmp_path / out / "metrics.jsonl").exists():
            says = (tmp_path / out / "metrics.jsonl").read_text()
            rows = [json.loads(line) for line in says.split("\n")[:-1]]
            resumed += "resumed" in rows[-1] or any("resumed" in row for row in rows)
            if how != signal.SIGKILL and says != said and "step" in rows[-1]:  # after a step: its checkpoint is there
                assert (tmp_path / out / f"checkpoint-{rows[-1]['step'] + 1}").exists()
    same(out, run(out))
    assert resumed or adds or name == "evaluate.py" or KILLS < 30  # a few may all come before the first checkpoint


def test_a_signal_waits_for_the_end_of_a_line():
    """The line of 1 MB is half way through a pipe when the signal comes."""
    code = "import argparse, utils; emit = utils.open_stdout(); " \
           "utils.run(lambda _: [emit({'x': 'y' * 1_000_000}) for _ in range(9)], argparse.Namespace())"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as p:
        data = p.stdout.read(1000)
        p.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        data += p.stdout.read()
        assert p.wait() == -signal.SIGTERM and p.stderr.read() == b"error: ended by SIGTERM\n"
    assert data.endswith(b"\n") and all("x" in r for r in records(data.decode()))


def test_a_full_gpu_is_one_line():
    code = "import argparse, torch, utils\ndef main(args): raise torch.OutOfMemoryError('CUDA out of memory. Tried to "\
           "allocate 46.00 MiB. GPU 0 has 80.00 GiB of which 0 bytes is free. Of the allocated memory 78.62 GiB ...')\n" \
           "utils.run(main, argparse.Namespace(offload=0, resume=0))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "error: CUDA out of memory. Tried to allocate 46.00 MiB. GPU 0 has 80.00 GiB of which 0 bytes " \
        "is free. A lower --max_tokens, --recompute 1, --offload 1 or more GPUs need less, see --dry_run; --resume goes " \
        "on from what was finished\n"


# --- streams that are closed, a stop before the start ---------------------------------------------

def runs(tiny_dir, out):
    """Every script with flags under which it reads stdin."""
    return {"collect.py": ["--model", tiny_dir, "--max_tokens", 5, "--max_turns", 2],
            "evaluate.py": [], "colbench.py": ["grade"],
            "train_critic.py": ["--model", tiny_dir, "--out", out],
            "train_policy.py": ["--model", tiny_dir, "--out", out]}


@pytest.mark.parametrize("name", [f"{s}.py" for s in SCRIPTS])
def test_a_closed_stdin_is_an_empty_one(name, tiny_dir, tmp_path):
    flags = " ".join(map(str, runs(tiny_dir, tmp_path / "out")[name]))
    done = shell(f"python {name} {flags} <&-")
    complaint(done, "stdin is empty: nothing to do (did the stage before it fail?)")
    assert not done.stdout


@pytest.mark.parametrize("name, to", [*((f"{s}.py", "2>&-") for s in SCRIPTS),
                                      ("evaluate.py", "2>/dev/full")])
def test_where_stderr_takes_nothing_the_results_are_the_same(name, to, tasks, scored, tiny_dir,
                                                             tmp_path):
    flags, given = runs(tiny_dir, "out")[name], tmp_path / "in.jsonl"
    given.write_text(lines(tasks if name == "collect.py" else scored))
    whole = script(name, *flags, stdin=given.read_text(), cwd=tmp_path)
    (tmp_path / "elsewhere").mkdir()
    command = f"python {ROOT}/{name} {' '.join(map(str, flags))} < {given} {to}"
    done = shell(command, cwd=tmp_path / "elsewhere")
    assert done.returncode == 0 and whole.stderr and not done.stderr
    assert done.stdout == whole.stdout != ""
    if "--out" in flags:
        assert weights(tmp_path / "elsewhere" / "out") == weights(tmp_path / "out")


def test_a_closed_stdout_is_one_line():
    done = shell("python colbench.py tasks --n 3 >&-")
    assert done.returncode == 1 and done.stderr == "error: stdout is closed, and results go there\n"


@pytest.mark.parametrize("name, module", [
    *((f"{s}.py", "tqdm") for s in SCRIPTS), ("train_critic.py", "torch"),
    ("train_policy.py", "torch"), ("collect.py", "torch"), ("collect.py", "asyncio"),
    ("colbench.py", "asyncio"), ("evaluate.py", "numpy")])
def test_ctrl_c_while_modules_load_is_no_traceback(name, module, tiny_dir, tmp_path):
    """The module here is one that takes its time."""
    loads = tmp_path / "loads"
    (tmp_path / f"{module}.py").write_text(
        f"import time\nopen({str(loads)!r}, 'w')\ntime.sleep(60)")
    flags = map(str, runs(tiny_dir, tmp_path / "out")[name])
    with subprocess.Popen([sys.executable, f"{ROOT}/{name}", *flags], stdin=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, text=True,
                          env={**CPU, "PYTHONPATH": str(tmp_path)}) as p:
        while not loads.exists():
            assert p.poll() is None, p.stderr.read()
            time.sleep(0.01)
        p.send_signal(signal.SIGINT)
        said = p.communicate()[1]
    assert p.returncode == -signal.SIGINT and said in (
        "", "error: ended by SIGINT; --resume goes on from what was finished\n")


# --- disks that take no more ------------------------------------------------------------------------------------------

@pytest.fixture
def disk(tmp_path):
    """disk(kilobytes): a directory on a disk of that size."""
    mounted = []

    def mount(kilobytes):
        path = tmp_path / "disk"
        path.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", path], capture_output=True)
        if done.returncode:
            pytest.skip("only root may mount a small disk")
        mounted.append(path)
        return path
    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", path], check=True)


def complaint(done, *said):
    """The run ended by one line, which says all that."""
    (error,) = (line for line in done.stderr.splitlines() if "error" in line.lower())
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert error.startswith("error: ") and all(x in error for x in said), error
    return error


@pytest.mark.parametrize("name, kilobytes, path", [
    ("train_critic.py", 36, "reference.safetensors"), ("train_policy.py", 900, "checkpoint-1"),
    ("train_policy.py", 5000, "checkpoint-2"), ("train_critic.py", 4300, "")])
def test_a_full_disk_leaves_the_last_checkpoint(name, kilobytes, path, scored, tiny_dir, tmp_path, disk):
    """Of the tiny model's checkpoints, 3.2 MB each, and weights, 1.1 MB, not all find room."""
    run = lambda out: script(name, "--model", tiny_dir, "--save_every", 1, "--batch_size", 8, "--resume", 1, "--out", out,
                             stdin=scored)
    whole, small = run(tmp_path / "whole"), disk(kilobytes)
    out = small / "out"
    complaint(run(out), f"{out}/{path}" if path else str(out), "can't be written: ", "No space left on device",
              "--resume goes on")
    assert not [p for p in os.listdir(out) if p.endswith(".part")]
    steps = [int(p[11:]) for p in os.listdir(out) if p.startswith("checkpoint-")]
    assert len(steps) <= 1 and (path != "checkpoint-2" or steps == [1])
    subprocess.run(["mount", "-o", "remount,size=50m", small], check=True)
    done = run(out)
    assert done.returncode == 0 and (resumed := [r for r in records((out / "metrics.jsonl").read_text())
                                                 if "resumed" in r]) and resumed[0]["resumed"] == max([0, *steps])
    assert done.stdout.replace(str(out), "X") == whole.stdout.replace(str(tmp_path / "whole"), "X")
    assert weights(out) == weights(tmp_path / "whole")


def test_a_full_disk_under_stdout_keeps_whole_lines(tasks, scored, tiny_dir, disk):
    small = disk(40)
    play = ["-k", 4, "--model", tiny_dir, "--max_tokens", 12, "--max_turns", 3, "--resume", small / "all.jsonl"]
    (small / "all.jsonl").touch()
    complaint(script("collect.py", *play, stdin=tasks, out=small / "all.jsonl"), "stdout: No space left", "--resume")
    subprocess.run(["mount", "-o", "remount,size=50m", small], check=True)
    done = script("collect.py", *play, stdin=tasks, out=small / "all.jsonl")
    assert done.returncode == 0 and "(0 done before)" not in done.stderr, done.stderr
    assert len({key(r) for r in records((small / "all.jsonl").read_text())}) == 16
    for name, flags in (("evaluate.py", []), ("colbench.py", ["grade"]), (
            "train_critic.py", ["--model", tiny_dir, "--out", small / "out"])):
        complaint(script(name, *flags, stdin=scored, out="/dev/full"), "stdout: No space left")


def test_what_cannot_be_written_is_said_before_the_work(scored, tiny_dir, tmp_path, disk):
    small = disk(100)
    (small / "all.jsonl").write_text("{}")
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    for name in ("train_critic.py", "train_policy.py"):
        complaint(script(name, "--model", tiny_dir, "--out", small / "out", stdin=scored), f"--out {small}/out: Read-only")
    for flag in ("--html", "--plot"):
        complaint(script("evaluate.py", flag, small / "x.html", stdin=scored), f"{small}/x.html can't be written: ")
    complaint(script("collect.py", "--model", tiny_dir, "--resume", small / "all.jsonl", stdin=""),
              f"--resume {small}/all.jsonl: Read-only")


@pytest.mark.parametrize("damage", [lambda f: f.unlink(), lambda f: f.write_bytes(f.read_bytes()[:9000]),
                                    lambda f: f.write_bytes(b"")], ids=["gone", "cut", "empty"])
def test_a_damaged_checkpoint_is_named(damage, scored, tiny_dir, tmp_path):
    out = tmp_path / "out"
    train = ["train_policy.py", "--model", tiny_dir, "--out", out, "--save_every", 1, "--batch_size", 1, "--resume", 1]
    while not list(out.glob("checkpoint-*")):
        script(*train, stdin=scored, kill=(1 + 2 * random.random(), signal.SIGTERM))
    (checkpoint,) = out.glob("checkpoint-*")
    damage(next(checkpoint.glob("*.safetensors")))
    complaint(script(*train, stdin=scored), str(checkpoint), "--overwrite 1")
    done = script(*train[:-2], "--overwrite", 1, stdin=scored)
    assert done.returncode == 0, done.stderr


# --- data and models that degenerate ----------------------------------------------------------------------------------

def change(rs, message=lambda m: m, candidates=lambda c: c):
    """Copies of the records whose agent's messages went through `message`, their lists of candidates through the other."""
    rs = json.loads(json.dumps(rs))
    for m in (m for r in rs for m in r["dialogue_history"] if m["role"] == "assistant"):
        m["candidates"] = candidates(m["candidates"])
        for x in (m, *m["candidates"]):
            x.update(message(x))
    return rs


ODD = {  # what it does to the records, and of each trainer a part of its complaint, or None where it trains
    "one trajectory a task": (lambda rs: [r for r in rs if r["sample"] == 0], "no pairs in 4", None, "nothing to train"),
    "all rewards equal": (lambda rs: [{**r, "reward": 1.0} for r in rs], "no pairs in 8", None, "nothing to train on"),
    "all fail": (lambda rs: [{**r, "reward": 0.0} for r in rs], "no pairs in 8", None, "nothing to train on"),
    "actions of nothing": (lambda rs: change(rs, lambda m: {"content": "", "output": "", "token_ids": []}), None,
                           "no turn has two unlike candidates", None),
    "actions of one token": (lambda rs: change(rs, lambda m: {"token_ids": m["token_ids"][-1:]}), None, None, None),
    "the same candidate 16 times": (lambda rs: change(rs, candidates=lambda c: c[:1] * 16), None,
                                    "no turn has two unlike candidates", None),
    "one candidate": (lambda rs: change(rs, candidates=lambda c: c[:1]), None, "no turn has two unlike", None),
    "equal advantages": (lambda rs: change(rs, lambda m: {"advantage": 0.5}), None, None, None),
    "huge advantages": (lambda rs: change(rs, lambda m: {"advantage": -1e299}), None, None, None),
    "all too long": (lambda rs: change(rs, lambda m: {"token_ids": m["token_ids"] * 900}), "no pairs", "nothing", "nothing"),
    "an agent that says nothing": (lambda rs: [{**r, "dialogue_history": r["dialogue_history"][:1]} for r in rs],
                                   *["line 1: the agent says nothing"] * 3),
    "a reward of 2": (lambda rs: [{**r, "reward": 2} for r in rs], *["line 1: the reward 2 is neither"] * 3),
    "a log-prob of NaN": (lambda rs: change(rs, lambda m: {"logprob": float("nan")}),
                          *["logprob is not a finite number"] * 3)}


@pytest.mark.parametrize("odd", ODD)
def test_degenerate_data_trains_or_is_refused_in_one_line(odd, scored, tiny_dir, tmp_path):
    make, *said = ODD[odd]
    runs = ("train_critic.py",), ("train_policy.py", "--nll_coef", 0.1), ("train_policy.py", "--loss", "mtdpo")
    for (name, *flags), message in zip(runs, said, strict=True):
        out = tmp_path / "-".join([name, *map(str, flags)])
        done = script(name, "--model", tiny_dir, "--out", out, "--epochs", 1, "--max_length", 4000, *flags,
                      stdin=make(scored))
        if message:
            complaint(done, message)
            assert not out.exists()
        else:
            assert done.returncode == 0, done.stderr
            assert all(x.isfinite().all() for x in load_file(out / "model.safetensors").values())
            assert "NaN" not in done.stdout + (out / "metrics.jsonl").read_text()


@pytest.fixture
def spoiled(tiny_dir, tmp_path):
    """The tiny model with a NaN among its weights."""
    bad = shutil.copytree(tiny_dir, tmp_path / "bad")
    state = load_file(bad / "model.safetensors")
    state["model.norm.weight"][0] = float("nan")
    save_file(state, bad / "model.safetensors", {"format": "pt"})
    return bad


def test_weights_that_are_not_finite_are_never_trained_on_or_played_with(tasks, scored, spoiled,
                                                                         tiny_dir, tmp_path):
    bad = spoiled
    for name in ("train_critic.py", "train_policy.py"):
        complaint(script(name, "--model", bad, "--out", tmp_path / name, stdin=scored), "step 0: the loss is nan", "--lr")
        assert not (tmp_path / name / "model.safetensors").exists()
    critic = {"ref": str(tiny_dir), "hidden_info": 1, "normalize": "turn"}
    (bad / "critic.json").write_text(json.dumps(critic))
    complaint(script("train_critic.py", "--score", 1, "--out", bad, stdin=scored), "NaN")
    done = script("collect.py", "--model", bad, "--max_tokens", 5, stdin=tasks)
    assert done.returncode and not done.stdout and "log-probs are NaN or infinite" in done.stderr


@pytest.mark.parametrize("name", ["train_critic.py", "train_policy.py"])
def test_a_step_that_would_spoil_the_weights_is_not_made(name, scored, tiny_dir, tmp_path):
    train = [name, "--model", tiny_dir, "--out", tmp_path / "out", "--save_every", 1, "--epochs", 40]
    complaint(script(*train, "--lr", 1e30, "--clip", 1e30, stdin=scored), "the weights", "--lr")
    steps = [row for row in records((tmp_path / "out" / "metrics.jsonl").read_text()) if "step" in row]
    (checkpoint,) = (tmp_path / "out").glob("checkpoint-*")
    assert checkpoint.name == f"checkpoint-{len(steps)}" and not (tmp_path / "out" / "model.safetensors").exists()


# --- trust ------------------------------------------------------------------------------------------------------------

def test_what_is_said_cannot_steer_a_terminal(scored, tasks, tiny_dir, tmp_path):
    evil = "\x1b]0;pwned\x07\x1b[2J\x9b31m\u202e\r"
    done = [script("evaluate.py", stdin=[{**scored[0], "meta": {"rules": evil}}]),
            script("evaluate.py", stdin=[{**scored[0], "tests": {evil: 1}}]),
            script("colbench.py", "grade", stdin=[{**scored[0], "reward": evil}]),
            script("colbench.py", "check", stdin=[{**tasks[0], "id": evil, "test_cases": {evil: "f(" + evil}}]),
            script("train_policy.py", "--model", evil, "--out", tmp_path / "x", stdin=scored),
            script("collect.py", "--model", tiny_dir, "--max_tokens", 5, "--human", "http://127.0.0.1:9/v1", "--retries", 0,
                   stdin=[{**tasks[0]["task"], "id": evil}] if "task" in tasks[0] else [{**tasks[0], "id": evil}])]
    for d in done:
        assert not {*d.stderr} & {*evil[:1], "\x07", "\x9b", "\u202e", "\r"}, repr(d.stderr)
        assert "\x1b" not in d.stdout  # JSON escapes it
    assert sum("?]0;pwned" in d.stderr for d in done) >= 3, [d.stderr for d in done]


def test_what_data_says_starts_no_line(scored, tasks, spoiled, tiny_dir):
    ends = "\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029"
    evil = "x" + "".join(f"{end}error: forged" for end in ends)
    task = {**tasks[0]["task"], "id": evil, "test_cases": {evil: "f(" + evil}}
    (result,) = records(script("evaluate.py", stdin=scored).stdout)
    done = [script("evaluate.py", stdin=[{**scored[0], "meta": {"rules": evil}}]),
            script("evaluate.py", stdin=[{**scored[0], "tests": {evil: 1}}]),
            script("evaluate.py", "--results", 1, stdin=[{**result, "system": evil}]),
            script("colbench.py", "check", stdin=[{"task": task}]),
            script("collect.py", "--model", tiny_dir, stdin=[{**scored[0], "task": task}]),
            script("collect.py", "--model", spoiled, "--max_tokens", 5, stdin=[{"task": task}])]
    for d in done:
        assert "forged" in d.stderr
        assert not any(line.startswith("error: forged") for line in d.stderr.splitlines()), d.stderr


def test_nothing_is_unpickled_evaluated_or_run_by_a_shell():
    """Of the scripts' own code; what the grader's children run is a string to them."""
    for name in (*(f"{s}.py" for s in SCRIPTS), "model.py", "utils.py"):
        tree = ast.parse(open(f"{ROOT}/{name}", encoding="utf-8").read())
        children = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and name == "colbench.py"
                    and f.name in {"builtin_task", *(g.__name__ for g in colbench.SERVER)}]  # its own expressions
        allowed = {id(x) for f in children for x in ast.walk(f)}
        for node in (x for x in ast.walk(tree) if id(x) not in allowed):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = {a.name for a in node.names} | {getattr(node, "module", None)}
                assert not names & {"pickle", "dill", "cloudpickle", "shelve", "joblib"}, (name, node.lineno)
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "compile", "os.system", "os.popen", "torch.load", "pickle.load",
                                      "pickle.loads"), (name, node.lineno)
                for k in node.keywords:
                    assert k.arg not in ("shell", "trust_remote_code") or ast.unparse(k.value) == "False", (name, node.lineno)
                    assert k.arg != "use_safetensors" or ast.unparse(k.value) == "True"


def test_a_models_own_code_and_pickles_are_not_run(scored, tasks, tiny_dir, tmp_path):
    import torch
    bad, mark = shutil.copytree(tiny_dir, tmp_path / "bad"), tmp_path / "ran"
    for name in ("configuration_evil.py", "modeling_evil.py"):
        (bad / name).write_text(f"open({str(mark)!r}, 'w')\nclass C: pass\n")
    config = json.loads((bad / "config.json").read_text())
    auto = {"AutoConfig": "configuration_evil.C", "AutoModelForCausalLM": "modeling_evil.C"}
    (bad / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": auto}))
    runs = ([["collect.py", "--max_tokens", 5], tasks], [["train_critic.py", "--out", tmp_path / "out"], scored])
    for command, stdin in runs:
        complaint(script(*command, "--model", bad, stdin=stdin), "no model at", "custom code")
    (bad / "config.json").write_text(json.dumps(config))
    torch.save(load_file(bad / "model.safetensors"), bad / "pytorch_model.bin")
    (bad / "model.safetensors").unlink()
    for command, stdin in runs:
        complaint(script(*command, "--model", bad, stdin=stdin), str(bad))
    assert not mark.exists()


@pytest.mark.parametrize("command", [["train_policy.py", "--epochs", 99, "--batch_size", 1, "--out", "OUT"],
                                     ["collect.py", "-k", 999, "--max_tokens", 5, "--max_turns", 2]], ids=lambda c: c[0])
def test_nothing_listens_on_the_network(command, scored, tasks, tiny_dir, tmp_path):
    (tmp_path / "in.jsonl").write_text(lines(tasks if command[0] == "collect.py" else scored))
    flags = [str(tmp_path / "out") if f == "OUT" else str(f) for f in command[1:]]
    with open(tmp_path / "in.jsonl") as given, subprocess.Popen(
            [sys.executable, f"{ROOT}/{command[0]}", "--model", tiny_dir, *flags], stdin=given, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env=CPU) as p:
        if command[0] == "collect.py":
            p.stdout.readline()
        else:
            while not list(tmp_path.glob("out/metrics.jsonl")) or len((tmp_path / "out/metrics.jsonl").read_bytes()) < 2000:
                assert p.poll() is None
                time.sleep(0.01)
        found = [a for pid in (p.pid, *utils.descendants(p.pid)) for a in listening(pid)]
        p.kill()
    assert all(a.startswith("0100007F:") for a in found), found  # 127.0.0.1


def listening(pid):
    """The addresses, in hexadecimal, on which a process listens."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/{pid}/net/{name}").readlines()[1:]]
    listens = {f"socket:[{row[9]}]": row[1] for row in rows if row[3] == "0A"}
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return [listens[x] for x in links if x in listens]


# --- the same again ---------------------------------------------------------------------------------------------------

CHAIN = """set -euo pipefail; export PYTHONHASHSEED=$(basename $OUT)
python colbench.py tasks --n 3 --seed 4 | tee $OUT/tasks | python collect.py --model MODEL --seed 5 -k 2 --max_turns 3 \\
  --max_tokens 20 --candidates 4 | tee $OUT/played | sed 's/"sample": 1,\\(.*\\)"reward": [0-9.]*/"sample": 1,\\1"reward": 1.0/' |
  python train_critic.py --model MODEL --seed 6 --held_out 0 --lr 1e-4 --out $OUT/critic | tee $OUT/scored |
  python train_policy.py --model MODEL --seed 7 --lr 1e-4 --out $OUT/policy > $OUT/summary
python colbench.py demos --n 20 --seed 8 > $OUT/demos &
python colbench.py grade < $OUT/played > $OUT/graded &
python evaluate.py --html $OUT/report.html < $OUT/scored > $OUT/results; wait
"""


def test_the_same_seeds_give_the_same_bytes_and_stand_in_what_is_written(tiny_dir, tmp_path):
    for seed in ("1", "2"):  # of Python's hashes, which order sets; not ours
        (tmp_path / seed).mkdir()
        done = shell(CHAIN.replace("MODEL", tiny_dir).replace("$OUT", str(tmp_path / seed)))
        assert done.returncode == 0, done.stderr
    for name in ("tasks", "played", "scored", "summary", "demos", "graded", "results", "report.html",
                 "critic/model.safetensors", "policy/model.safetensors", "critic/reference.safetensors"):
        a, b = ((tmp_path / seed / name).read_bytes() for seed in "12")
        assert a and a == b.replace(f"{tmp_path}/2".encode(), f"{tmp_path}/1".encode()), name
    meta = records((tmp_path / "1/played").read_text())[0]["meta"]
    rows = [records((tmp_path / f"1/{x}/metrics.jsonl").read_text())[0] for x in ("critic", "policy")]
    assert [meta["seed"], *(row["args"]["seed"] for row in rows)] == [5, 6, 7]
    for version in (meta["version"], *(row["version"] for row in rows), records((tmp_path / "1/results").read_text())[0]["version"]):
        assert f"python {sys.version.split()[0]}, torch 2." in version and "transformers 5." in version
