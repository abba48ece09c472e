"""Faults: kills at random moments, full and read-only disks, degenerate data. No work is lost.

FULL=1 KILLS=100 python -m pytest -q tests/test_utils_faults.py kills every stage 100 times;
FAULT_SEED=1 kills at other moments.
"""
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

import model as M
import utils
from conftest import ROOT, records, script, shell

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


# stage: its flags. collect.py appends to OUT, evaluate.py writes it, the trainers make it.
STAGES = {
    "collect.py": ["-k", 4, "--max_tokens", 12, "--max_turns", 3, "--concurrency", 3,
                   "--resume", "OUT"],
    "train_critic.py": ["--out", "OUT", "--save_every", 1, "--batch_size", 1, "--epochs", 2,
                        "--resume", 1],
    "train_policy.py": ["--out", "OUT", "--save_every", 1, "--batch_size", 8, "--resume", 1],
    "evaluate.py": ["--bootstrap", 300, "--html", "OUT"]}


@pytest.mark.full
@pytest.mark.parametrize("name", STAGES)
def test_a_stage_killed_again_and_again_ends_as_if_it_had_not_been(name, tasks, scored, tiny_dir,
                                                                   tmp_path):
    appends, trains = name == "collect.py", name.startswith("train")
    model = [] if name == "evaluate.py" else ["--model", tiny_dir]
    many = [{**r, "sample": 100 * i + r["sample"]} for i in range(20) for r in scored]
    stdin = {"collect.py": tasks, "evaluate.py": many}.get(name, scored)

    def run(out, kill=None):
        flags = [out if flag == "OUT" else flag for flag in STAGES[name]]
        if appends:
            out.touch()
        return script(name, *model, *flags, stdin=stdin, out=out if appends else "", kill=kill)

    begin = time.monotonic()
    whole_out = tmp_path / "whole"
    whole = run(whole_out)
    seconds = time.monotonic() - begin
    assert whole.returncode == 0, whole.stderr

    def check_same(out, done):
        assert done.returncode == 0, done.stderr
        if appends:
            got, want = (sorted(records(path.read_text()), key=key) for path in (out, whole_out))
            for m in (m for r in got + want for m in r["dialogue_history"]):
                m.pop("logprobs", None)  # other company in a batch, other rounding
            assert got == want
        elif trains:
            assert done.stdout.replace(str(out), str(whole_out)) == whole.stdout
            assert weights(out) == weights(whole_out)
        else:
            assert done.stdout == whole.stdout and out.read_text() == whole_out.read_text()

    def metrics(out):
        """The whole rows of a trainer's log."""
        path = out / "metrics.jsonl" if trains else Path("none")
        return records(path.read_text().rpartition("\n")[0]) if path.exists() else []

    def check_killed(out, done, how, rows_before):
        """What it leaves is whole; ended by SIGTERM or SIGINT, its last step is in a checkpoint."""
        assert done.returncode == -how, (done.returncode, done.stderr)
        loading = "KeyboardInterrupt" in done.stderr  # Python's own, before utils.run
        assert loading or "Traceback" not in done.stderr, done.stderr
        if name == "evaluate.py":
            assert done.stdout in (whole.stdout, "")
            assert not out.exists() or out.read_text() == whole_out.read_text()
        rows = metrics(out)
        if how != signal.SIGKILL and len(rows) > rows_before and "step" in rows[-1]:
            done_steps = rows[-1]["step"] + 1
            assert (out / f"checkpoint-{done_steps}").exists()
            if done_steps < rows[0]["steps"]:  # else it may have ended silently, as it saved
                assert f"error: ended by {how.name}; --resume 1 goes on" in done.stderr

    r, kills, resumed, out = random.Random(f"{SEED} {name}"), 0, 0, tmp_path / "killed0"
    while kills < KILLS:
        how = r.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        rows_before = len(metrics(out))
        done = run(out, (0.3 + r.random() * seconds, how))
        if done.returncode == 0:  # it had done its work
            check_same(out, done)
            out = tmp_path / f"killed{kills}"
            continue
        kills += 1
        check_killed(out, done, how, rows_before)
        resumed += any("resumed" in row for row in metrics(out))
    check_same(out, run(out))
    # a few kills may all come before the first checkpoint
    assert resumed or not trains or KILLS < 30


def test_progress_is_rare_where_stderr_is_no_terminal(monkeypatch, capfd):
    list(utils.progress("scoring", range(3)))
    assert not capfd.readouterr().err  # ten seconds have not passed
    monkeypatch.setattr(utils, "SHOW_EVERY", 0)
    list(utils.progress("scoring", range(3)))
    assert "scoring:" in capfd.readouterr().err


SLEEPS = """
import argparse, time, utils
def main(args):
    print("begun", flush=True)
    time.sleep(60)
utils.run(main, argparse.Namespace())
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_program_at_once_and_nohup_ignores_it(how):
    for ignored in (False, True):
        first = signal.SIG_IGN if ignored else signal.default_int_handler
        with subprocess.Popen([sys.executable, "-c", SLEEPS], cwd=ROOT, text=True,
                              preexec_fn=lambda: signal.signal(signal.SIGINT, first),
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) as p:
            assert p.stdout.readline() == "begun\n"
            if ignored:
                p.send_signal(signal.SIGINT)
                how = signal.SIGTERM
            p.send_signal(how)
            assert p.communicate() == ("", "") and p.returncode == -how


# --- disks that take no more ----------------------------------------------------------------------

def test_writing_leaves_all_or_nothing(tmp_path):
    """It makes a file or a directory; after an error the one before is as it was."""
    for name in ("file", "folder"):
        path = tmp_path / name
        make = Path.touch if name == "file" else Path.mkdir
        with utils.writing(str(path)) as part:
            make(Path(part))
            assert not path.exists()
        with pytest.raises(SystemExit, match=f"error: {path} can't be written: No space left$"):
            with utils.writing(str(path)) as part:
                Path(part).mkdir()
                raise OSError(errno.ENOSPC, "No space left")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


@pytest.fixture
def disk(tmp_path):
    """disk(kilobytes): a directory on a disk of that size."""
    mounted = []

    def mount(kilobytes):
        path = tmp_path / "disk"
        path.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", path],
                              capture_output=True)
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


@pytest.mark.full
@pytest.mark.parametrize("name, kilobytes, path", [
    ("train_critic.py", 36, "reference.safetensors"), ("train_policy.py", 5000, "checkpoint-2"),
    ("train_critic.py", 4300, "")])
def test_a_full_disk_leaves_the_last_checkpoint(name, kilobytes, path, scored, tiny_dir, tmp_path,
                                                disk):
    """Of the tiny model's checkpoints, 3.2 MB each, and weights, 1.1 MB, not all find room."""
    def run(out):
        return script(name, "--model", tiny_dir, "--save_every", 1, "--batch_size", 8,
                      "--resume", 1, "--out", out, stdin=scored)

    whole, small = run(tmp_path / "whole"), disk(kilobytes)
    out = small / "out"
    complaint(run(out), f"{out}/{path}" if path else str(out), "can't be written: ",
              "No space left on device")
    assert not [*out.glob("checkpoint-*.part")]
    steps = [int(p[11:]) for p in os.listdir(out) if p.startswith("checkpoint-")]
    assert len(steps) <= 1 and (path != "checkpoint-2" or steps == [1])
    resize(small, "size=50m")
    done = run(out)
    assert done.returncode == 0, done.stderr
    rows = records((out / "metrics.jsonl").read_text())
    assert [row["resumed"] for row in rows if "resumed" in row] == [max([0, *steps])]
    assert done.stdout.replace(str(out), "X") == whole.stdout.replace(str(tmp_path / "whole"), "X")
    assert weights(out) == weights(tmp_path / "whole")


def resize(path, options):
    subprocess.run(["mount", "-o", f"remount,{options}", path], check=True)


@pytest.mark.full
def test_a_full_disk_under_stdout_keeps_whole_lines(tasks, scored, tiny_dir, disk):
    small = disk(40)
    out = small / "all.jsonl"
    play = ["collect.py", "-k", 4, "--model", tiny_dir, "--max_tokens", 12, "--max_turns", 3,
            "--resume", out]
    out.touch()
    complaint(script(*play, stdin=tasks, out=out), "stdout: No space left")
    resize(small, "size=50m")
    done = script(*play, stdin=tasks, out=out)
    assert done.returncode == 0 and "(0 done before)" not in done.stderr, done.stderr
    assert len({key(r) for r in records(out.read_text())}) == 16
    for command in (["evaluate.py"], ["colbench.py", "grade"],
                    ["train_critic.py", "--model", tiny_dir, "--out", small / "out"]):
        complaint(script(*command, stdin=scored, out="/dev/full"), "stdout: No space left")


def test_what_cannot_be_written_is_said_before_the_work(scored, tiny_dir, disk):
    small = disk(100)
    (small / "all.jsonl").write_text("{}")
    resize(small, "ro")
    for name in ("train_critic.py", "train_policy.py"):
        done = script(name, "--model", tiny_dir, "--out", small / "out", stdin=scored)
        complaint(done, f"--out {small}/out: Read-only")
    done = script("collect.py", "--model", tiny_dir, "--resume", small / "all.jsonl")
    complaint(done, f"--resume {small}/all.jsonl: Read-only")


@pytest.mark.full
def test_a_damaged_checkpoint_is_named(scored, tiny_dir, tmp_path):
    out = tmp_path / "out"
    train = ["train_policy.py", "--model", tiny_dir, "--out", out, "--save_every", 1,
             "--batch_size", 1, "--resume", 1]
    script(*train, stdin=scored, kill=(lambda: [*out.glob("checkpoint-*")], signal.SIGTERM))
    (checkpoint,) = out.glob("checkpoint-*")
    file = next(checkpoint.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:9000])
    done = script(*train, stdin=scored)
    assert done.returncode == 1 and not (out / "model.safetensors").exists()
    assert done.stderr.splitlines()[-1].startswith(f"error: {checkpoint} is damaged; ")


def test_what_a_kill_left_of_a_checkpoint_is_gone_before_the_next_is_written(tmp_path):
    for name in ("checkpoint-1", "checkpoint-2.part"):
        (tmp_path / name).mkdir()
    M.restore(None, None, SimpleNamespace(out=tmp_path, step=1, finished=True))
    assert os.listdir(tmp_path) == ["checkpoint-1"]


# --- data and models that degenerate --------------------------------------------------------------

def change(rs, message=None, candidates=None):
    """Copies of the records, with new fields from message(m) and lists from candidates(list)."""
    rs = json.loads(json.dumps(rs))
    for m in (m for r in rs for m in r["dialogue_history"] if m["role"] == "assistant"):
        if candidates:
            m["candidates"] = candidates(m["candidates"])
        for x in (m, *m["candidates"]) if message else ():
            x.update(message(x))
    return rs


def set_all(**fields):
    return lambda rs: [{**r, **fields} for r in rs]


def say_nothing(rs):
    return [{**r, "dialogue_history": r["dialogue_history"][:1]} for r in rs]


EMPTY = {"content": "", "output": "", "token_ids": []}
UNLIKE = "no turn has two unlike candidates"
# what it does to the records; a part of the complaint of each run below, or None where it trains
ODD = {
    "all rewards equal": (set_all(reward=1.0), "no pairs in 8", None, "nothing to train on"),
    "actions of nothing": (lambda rs: change(rs, lambda m: EMPTY), None, UNLIKE, None),
    "the same candidate 16 times": (lambda rs: change(rs, candidates=lambda c: c[:1] * 16),
                                    None, UNLIKE, None),
    "all too long": (lambda rs: change(rs, lambda m: {
        "token_ids": m["token_ids"] * 900, "output": None}),
                     "no pairs", "nothing", "nothing"),
    "an agent that says nothing": (say_nothing, *["line 1: the agent says nothing"] * 3),
    "a log-prob of NaN": (lambda rs: change(rs, lambda m: {"logprob": float("nan")}),
                          *["logprob is not a finite number"] * 3)}
ODD_RUNS = [["train_critic.py"], ["train_policy.py", "--nll_coef", 0.1],
            ["train_policy.py", "--loss", "mtdpo"]]


@pytest.mark.full
@pytest.mark.parametrize("odd", ODD)
def test_degenerate_data_trains_or_is_refused_in_one_line(odd, scored, tiny_dir, tmp_path):
    make, *complaints = ODD[odd]
    for i, (command, message) in enumerate(zip(ODD_RUNS, complaints, strict=True)):
        out = tmp_path / str(i)
        done = script(*command, "--model", tiny_dir, "--out", out, "--epochs", 1,
                      "--max_length", 4000, stdin=make(scored))
        if message:
            complaint(done, message)
            assert not os.path.exists(out / "metrics.jsonl")
        else:
            assert done.returncode == 0, done.stderr
            trained = load_file(out / "model.safetensors")
            assert all(x.isfinite().all() for x in trained.values())
            assert "NaN" not in done.stdout + (out / "metrics.jsonl").read_text()


@pytest.fixture
def spoiled(tiny_dir, tmp_path):
    """The tiny model with a NaN among its weights."""
    bad = shutil.copytree(tiny_dir, tmp_path / "bad")
    state = load_file(bad / "model.safetensors")
    state["model.norm.weight"][0] = float("nan")
    save_file(state, bad / "model.safetensors", {"format": "pt"})
    return bad


@pytest.mark.full
def test_weights_that_are_not_finite_are_never_trained_on_or_played_with(tasks, scored, spoiled,
                                                                         tmp_path):
    for name in ("train_critic.py", "train_policy.py"):
        done = script(name, "--model", spoiled, "--out", tmp_path / name, stdin=scored)
        complaint(done, "nan")
        assert not (tmp_path / name / "model.safetensors").exists()
    done = script("collect.py", "--model", spoiled, "--max_tokens", 5, stdin=tasks)
    assert done.returncode and not done.stdout and "log-probs are NaN or infinite" in done.stderr


@pytest.mark.parametrize("name", ["train_critic.py", "train_policy.py"])
def test_a_step_that_would_spoil_the_weights_is_not_made(name, scored, tiny_dir, tmp_path):
    out = tmp_path / "out"
    done = script(name, "--model", tiny_dir, "--out", out, "--save_every", 1, "--epochs", 40,
                  "--lr", 1e30, "--max_grad_norm", 1e30, stdin=scored)
    complaint(done, "the weights", "--lr")
    steps = [row for row in records((out / "metrics.jsonl").read_text()) if "step" in row]
    (checkpoint,) = out.glob("checkpoint-*")
    assert checkpoint.name == f"checkpoint-{len(steps)}"
    assert not (out / "model.safetensors").exists()


# --- trust ----------------------------------------------------------------------------------------

@pytest.mark.full
def test_what_data_says_neither_steers_a_terminal_nor_starts_a_line(scored, tasks, spoiled,
                                                                   tiny_dir, tmp_path):
    steering = "\x1b\x07\x9b\u202e"
    ends = "\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029"
    evil = f"{steering}]0;pwned" + "".join(f"{end}error: forged" for end in ends)
    task = {**tasks[0]["task"], "id": evil, "test_cases": {evil: "f(" + evil}}
    done = [script("evaluate.py", stdin=[{**scored[0], "meta": {"rules": evil}}]),
            script("evaluate.py", stdin=[{**scored[0], "tests": {evil: 1}}]),
            script("colbench.py", "check", stdin=[{"task": task}]),
            script("train_policy.py", "--model", evil, "--out", tmp_path / "x", stdin=scored),
            script("collect.py", "--model", tiny_dir, stdin=[{**scored[0], "task": task}]),
            script("collect.py", "--model", spoiled, "--max_tokens", 5, stdin=[{"task": task}])]
    for d in done:
        assert "forged" in d.stderr and not {*steering, "\r"} & {*d.stderr}, repr(d.stderr)
        assert not any(line.startswith("error: forged") for line in d.stderr.splitlines()), d.stderr


def test_a_models_own_code_and_pickles_are_not_run(scored, tasks, tiny_dir, tmp_path):
    import torch
    bad, mark = shutil.copytree(tiny_dir, tmp_path / "bad"), tmp_path / "ran"
    for name in ("configuration_evil.py", "modeling_evil.py"):
        (bad / name).write_text(f"open({str(mark)!r}, 'w')\nclass C: pass\n")
    config = json.loads((bad / "config.json").read_text())
    auto = {"AutoConfig": "configuration_evil.C", "AutoModelForCausalLM": "modeling_evil.C"}
    (bad / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": auto}))
    runs = [(["collect.py", "--max_tokens", 5], tasks),
            (["train_critic.py", "--out", tmp_path / "out"], scored)]
    for command, stdin in runs:
        complaint(script(*command, "--model", bad, stdin=stdin), "no model at", "custom code")
    (bad / "config.json").write_text(json.dumps(config))
    torch.save(load_file(bad / "model.safetensors"), bad / "pytorch_model.bin")
    (bad / "model.safetensors").unlink()
    for command, stdin in runs:
        complaint(script(*command, "--model", bad, stdin=stdin), str(bad))
    assert not mark.exists()


# --- the same again -------------------------------------------------------------------------------

CHAIN = """
set -euo pipefail; export PYTHONHASHSEED=$(basename $OUT)
solve() { sed 's/"sample": 1,\\(.*\\)"reward": [0-9.]*/"sample": 1,\\1"reward": 1.0/'; }
python colbench.py tasks --n 3 --seed 4 | tee $OUT/tasks |
  python collect.py --model MODEL --seed 5 -k 2 --max_turns 3 --max_tokens 20 --candidates 4 |
  tee $OUT/played | solve |
  python train_critic.py --model MODEL --seed 6 --held_out 0 --lr 1e-4 --out $OUT/critic |
  tee $OUT/scored | python train_policy.py --model MODEL --seed 7 --lr 1e-4 --out $OUT/policy \
  > $OUT/summary
python colbench.py demos --n 20 --seed 8 > $OUT/demos &
python colbench.py grade < $OUT/played > $OUT/graded &
python evaluate.py --html $OUT/report.html < $OUT/scored > $OUT/results; wait
"""
CHAIN_FILES = ["tasks", "played", "scored", "summary", "demos", "graded", "results", "report.html",
               "critic/model.safetensors", "policy/model.safetensors",
               "critic/reference.safetensors"]


@pytest.mark.full
def test_the_same_seeds_give_the_same_bytes_and_stand_in_what_is_written(tiny_dir, tmp_path):
    for seed in ("1", "2"):  # of Python's hashes, which order sets; not ours
        (tmp_path / seed).mkdir()
        done = shell(CHAIN.replace("MODEL", tiny_dir).replace("$OUT", str(tmp_path / seed)))
        assert done.returncode == 0, done.stderr
    for name in CHAIN_FILES:
        a, b = ((tmp_path / seed / name).read_bytes() for seed in "12")
        assert a and a == b.replace(f"{tmp_path}/2".encode(), f"{tmp_path}/1".encode()), name

    def first(name):
        return records((tmp_path / "1" / name).read_text())[0]
    meta, results = first("played")["meta"], first("results")
    critic, policy = first("critic/metrics.jsonl"), first("policy/metrics.jsonl")
    assert [meta["seed"], critic["args"]["seed"], policy["args"]["seed"]] == [5, 6, 7]
    for row in (meta, results, critic, policy):
        assert f"python {sys.version.split()[0]}, torch 2." in row["version"]
        assert "transformers 5." in row["version"]
