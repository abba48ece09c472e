"""Faults: kills at random moments, full and read-only disks, degenerate data. No work is lost.

FULL=1 KILLS=100 python -m pytest -q tests/test_utils_faults.py kills every stage 100 times;
FAULT_SEED=1 kills at other moments.
"""
import errno
import json
import math
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import model
import utils
from conftest import (CPU, HUMAN, ROOT, actions, change_json, change_weights, complaint,
                      copy_scripts, key_of, lines, metrics, records, script, shell, steps, succeed,
                      train, weights)

KILLS, SEED = int(os.environ.get("KILLS", 3)), os.environ.get("FAULT_SEED", "0")


def bits(out):
    return {name: x.numpy().tobytes() for name, x in weights(out).items()}


STAGES = {  # stage: its flags. collect.py appends to OUT, the trainers make it.
    "collect.py": [*HUMAN, "-k", 2, "--max_tokens", 12, "--max_turns", 3, "--concurrency", 3,
                   "--resume", "OUT"],
    "train_critic.py": ["--out", "OUT", "--save_every", 1, "--batch_size", 1, "--epochs", 2],
    "train_policy.py": ["--out", "OUT", "--save_every", 1, "--batch_size", 24]}


@pytest.mark.full
@pytest.mark.parametrize("name", STAGES)
def test_a_stage_killed_again_and_again_ends_as_if_it_had_not_been(name, tasks, ranked, tiny_dir,
                                                                   tmp_path):
    trains, whole = name != "collect.py", tmp_path / "whole"

    def run(out, kill=None):
        flags = [out if flag == "OUT" else flag for flag in STAGES[name]]
        if not trains:
            out.touch()
        return script(name, "--model", tiny_dir, *flags, stdin=ranked if trains else tasks,
                      out="" if trains else out, kill=kill)

    def result(out, done):
        """What a run that came to its end leaves."""
        assert done.returncode == 0, done.stderr
        if trains:
            return done.stdout.replace(str(out), "OUT"), bits(out)
        played = sorted(records(out.read_text()), key=key_of)
        for r in played:
            r["meta"].pop("asked", None)  # which the first record of each run has
        for m in (m for r in played for m in r["dialogue_history"]):
            m.pop("logprobs", None)  # other company in a batch, other rounding
        return played

    begin = time.monotonic()
    want, seconds = result(whole, run(whole)), time.monotonic() - begin
    r, kills, resumed, out = random.Random(f"{SEED} {name}"), 0, 0, tmp_path / "killed0"
    while kills < KILLS:
        how = r.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        done = run(out, (0.3 + r.random() * seconds, how))
        if done.returncode == 0:  # it had done its work
            assert result(out, done) == want
            out = tmp_path / f"killed{kills}"
            continue
        kills += 1
        assert done.returncode == -how, (done.returncode, done.stderr)
        loading = "KeyboardInterrupt" in done.stderr  # Python's own, before utils is imported
        assert loading or "Traceback" not in done.stderr, done.stderr
        resumed += any("resumed" in row for row in metrics(out))
    assert result(out, run(out)) == want
    # a few kills may all come before the first checkpoint
    assert resumed or not trains or KILLS < 30


SLEEPS = """
import argparse, time, utils
def main(args):
    print("begun", flush=True)
    time.sleep(60)
utils.run(main, argparse.Namespace())
"""


@pytest.mark.parametrize("nohup", [False, True])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_program_at_once_and_nohup_ignores_ctrl_c(how, nohup):
    first = signal.SIG_IGN if nohup else signal.default_int_handler
    with subprocess.Popen([sys.executable, "-c", SLEEPS], cwd=ROOT, text=True,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, first),
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as p:
        assert p.stdout.readline() == "begun\n"
        p.send_signal(how)
        if nohup:
            p.send_signal(signal.SIGTERM)
        assert p.communicate() == ("", "")
        assert p.returncode == -(signal.SIGTERM if nohup else how)


def ctrl_c_as_usual():
    """In a process that starts: it does not ignore Ctrl-C, as one in the background does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


SCRIPTS = {"colbench.py": "grade", "collect.py": "--human fixed:no --model MODEL",
           "evaluate.py": "", "train_critic.py": "--out OUT", "train_policy.py": "--out OUT"}


def test_a_program_that_only_imports_ours_keeps_its_own_handling_of_ctrl_c(tmp_path):
    """Such as pytest, or a notebook."""
    (tmp_path / "other.py").write_text(
        f"import sys\nsys.path.insert(0, {ROOT!r})\nimport colbench, utils, signal\n"
        "assert signal.getsignal(signal.SIGINT) == signal.default_int_handler\n")
    subprocess.run([sys.executable, tmp_path / "other.py"], check=True,
                   preexec_fn=ctrl_c_as_usual)


CLOSED = {"<&-": "stdin is empty", ">&- < /dev/null": "stdout is closed", "<&- 2>&-": "",
          "<&- >&- 2>&-": ""}  # {redirections: what is said}


@pytest.mark.parametrize("name, closed", [
    pytest.param(name, closed, marks=[] if quick else pytest.mark.full)
    for name in SCRIPTS for closed in CLOSED
    for quick in [name in ("colbench.py", "evaluate.py") or closed == "<&-"]])
def test_a_closed_stream_is_an_error_of_one_line(name, closed, tiny_dir, tmp_path):
    flags = SCRIPTS[name].replace("MODEL", tiny_dir).replace("OUT", str(tmp_path))
    done = shell(f"python {name} {flags} {closed}")
    if CLOSED[closed]:
        complaint(done, CLOSED[closed])
    else:
        assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "colbench.py"])
def test_ctrl_c_ends_a_script_that_is_still_importing_without_a_traceback(name, tmp_path):
    """A library takes long to load here; colbench.py loads none that does."""
    slow = "import time\nprint('loading', flush=True)\ntime.sleep(60)\n"
    for library in ("torch.py", "numpy.py"):
        (tmp_path / library).write_text(slow)
    with subprocess.Popen([sys.executable, name, *SCRIPTS[name].split()], cwd=ROOT, text=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)},
                          preexec_fn=ctrl_c_as_usual, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as p:
        assert p.stdout.readline() == "loading\n"
        p.send_signal(signal.SIGINT)
        assert p.communicate() == ("", "") and p.returncode == -signal.SIGINT


@pytest.mark.parametrize("redirect", ["", "2>&-", "2>/dev/full", "2> >(true)"])
def test_no_record_is_lost_with_the_messages(redirect):
    """Where stderr is closed, full or has no reader."""
    tasks = [{"id": i, "problem_description": "d", "test_cases": {"a": "f()"},
              "ground_truth": f"def f(): return {'nosuch' if i % 2 else i}"} for i in range(6)]
    done = shell(f"python colbench.py check {redirect} <<'END'\n{lines(tasks)}END")
    assert [r["task"]["id"] for r in records(done.stdout)] == [0, 2, 4], done.stderr
    assert done.stderr.count("dropped") == (0 if redirect else 3)


def test_closed_streams_give_their_numbers_to_no_file(tmp_path):
    """Else messages would be written into the next file that is opened."""
    code = ("import utils\nfile = open('kept', 'w'); file.write('kept'); file.flush()\n"
            "utils.say('a message'); print(file.fileno())\nimport os\n"
            "assert all(map(os.get_inheritable, range(3))), 'a child would lack them'\n"
            "utils.print_warnings()")
    for closed in ("<&-", "2>&-", "<&- 2>&-"):
        done = shell(f"PYTHONPATH={ROOT} python -c \"{code}\" {closed}", cwd=tmp_path)
        assert done.returncode == 0 and int(done.stdout) > 2, done.stderr
        assert (tmp_path / "kept").read_text() == "kept"


@pytest.mark.parametrize("name, env, message", [
    ("train_policy.py", "RANK=1", "the environment has RANK=1, WORLD_SIZE=1: "),
    ("train_critic.py", "RANK=2 WORLD_SIZE=2", "RANK=2, WORLD_SIZE=2: let torchrun set both"),
    ("collect.py", "WORLD_SIZE=4", "4 processes were started, but this script is one"),
    ("colbench.py", "TORCHRUN", "2 processes were started, but this script is one"),
    ("train_critic.py", "TORCHRUN", ""), ("colbench.py", "RANK=0 WORLD_SIZE=1", ""),
    ("train_critic.py", "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2", "start one torchrun per node"),
    ("train_critic.py", "SLURM_PROCID=1", "several processes were started"),
    ("evaluate.py", "PMI_RANK=0 PMI_SIZE=2", "several processes were started"),
    ("train_critic.py", "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 TORCHRUN", ""),
    ("evaluate.py", "SLURM_NTASKS=8 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1", "")])
def test_a_script_refuses_to_be_one_of_several_unless_torchrun_starts_a_trainer(name, env, message):
    """A batch script of Slurm has SLURM_NTASKS, too, without being several."""
    torchrun = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=x MASTER_PORT=1"
    done = shell(f"{env.replace('TORCHRUN', torchrun)} python {name} --help", in_forks=1)
    if message:
        complaint(done, message)
    else:
        assert done.returncode == 0, done.stderr


def test_a_machine_without_git_has_a_version(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert utils.version.__wrapped__().startswith("unknown, python 3.")


def test_the_version_is_the_commit_of_the_scripts_not_of_the_repo_around_their_copies(tmp_path):
    def git(*command, cwd):
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *name, *command], cwd=cwd, check=True, text=True,
                              capture_output=True).stdout.strip()

    def version(folder):
        done = subprocess.run([sys.executable, "-c", "import utils; print(utils.version())"],
                              cwd=folder, capture_output=True, text=True)
        return done.stdout.partition(", python 3.")[0] or done.stderr

    repo, run = tmp_path / "repo", tmp_path / "repo/runs/critic"
    run.mkdir(parents=True)
    git("init", "-q", cwd=repo)
    shutil.copy(f"{ROOT}/utils.py", repo)
    assert version(repo) == "unknown"  # nothing is committed yet
    git("add", "utils.py", cwd=repo)
    git("commit", "-qm", "scripts", cwd=repo)
    scripts = git("rev-parse", "--short", "HEAD", cwd=repo)
    assert version(repo) == scripts
    shutil.copy(f"{ROOT}/utils.py", run)
    assert version(run) == "unknown"
    with (repo / "utils.py").open("a") as f:
        f.write("#")
    assert version(repo) == f"{scripts}-dirty"
    git("add", "runs", cwd=repo)
    git("commit", "-qm", "and a run", cwd=repo)
    assert version(run) == git("rev-parse", "--short", "HEAD", cwd=repo) + "-dirty"


# --- mistakes in code, and memory -----------------------------------------------------------------

@pytest.mark.parametrize("error, shown", [
    *((error, True) for error in (
        NameError("x"), UnboundLocalError("x"), AttributeError("x"), TypeError("x"), KeyError("x"),
        IndexError("x"), RuntimeError("x"), AssertionError("x"), ZeroDivisionError("x"))),
    *((error, False) for error in (ValueError("x"), OSError(2, "x"), UnicodeError("x"),
                                   ImportError("x"), json.JSONDecodeError("x", "", 0)))])
def test_a_mistake_in_code_shows_its_traceback_and_one_in_data_is_one_line(error, shown, capsys):
    """But where the data of others are parsed, which may raise any of these errors."""
    for parses in (False, True):
        with pytest.raises(SystemExit, match="^error: the file: .*x"):
            with utils.fail_on_error("the file", parses):
                raise error
        err = capsys.readouterr().err
        wanted = shown and not parses
        assert ("Traceback" in err and "raise error" in err) == wanted and bool(err) == wanted


POLICY = ["train_policy.py", "--model", "MODEL", "--out", "OUT"]
EDITS = {  # {function: (command, file, what the edit changes, to what)}
    "pi_and_ref_turns": (POLICY, "model.py", "prompt = prompt_ids(pi_reads_c)",
                     "prompt = prompt_ids(pi_reads_d)"),
    "forward": (POLICY, "model.py", "previous, targets = tree.parent[tree.scored]",
                "previous, targets = tree.parents[tree.scored]"),
    "dpo_loss": (POLICY, "train_policy.py", "margin = args.beta", "margin = args.betta"),
    "save": (POLICY, "model.py", "weights = {name: state[name]", "weights = {name: states[name]"),
    "sample_turn": (["collect.py", "--model", "MODEL", "--human", "fixed:ok", "--max_tokens", 5],
                    "collect.py", "finite = all(x is not None", "finite = alll(x is not None"),
    "grade": (["colbench.py", "grade"], "colbench.py", "tests, answer = list(task[",
              "tests, answer = list(task.test_cases, [")}


@pytest.mark.parametrize("function", EDITS)
def test_a_mistake_in_an_edit_shows_where_it_is(function, ranked, tasks, tiny_dir, tmp_path):
    command, file, old, new = EDITS[function]
    edited = copy_scripts(tmp_path) / file
    assert edited.read_text().count(old) == 1
    edited.write_text(edited.read_text().replace(old, new))
    paths = {"MODEL": tiny_dir, "OUT": tmp_path / "out"}
    name, *flags = (paths.get(word, word) for word in command)
    done = script(tmp_path / name, *flags, stdin=tasks if name == "collect.py" else ranked)
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1, done.stderr
    assert re.search(rf'{file}", line \d+, in {function}\n', done.stderr)
    assert new in done.stderr


GPU = ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.72 GiB "
       "of which 1.50 GiB is free.")
CPU_RAM = ("[enforce fail at alloc_cpu.cpp:128] err == 0. DefaultCPUAllocator: can't allocate "
           "memory: you tried to allocate 800 bytes. Error code 12 (Cannot allocate memory)")


@pytest.mark.parametrize("error, is_memory", [
    (torch.OutOfMemoryError(GPU), True), (RuntimeError(CPU_RAM), True),
    (RuntimeError("CUDA error: out of memory"), True), (MemoryError(), True),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `f`"), True),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
    (ValueError("the server is out of memory"), False), (OSError(errno.ENOSPC, "No space"), False),
    (RuntimeError("The size of tensor a (3) must match"), False)])
def test_memory_that_ends_is_recognized_and_nothing_else_is_blamed(error, is_memory):
    assert utils.is_out_of_memory(error) == is_memory
    with pytest.raises(type(error) if is_memory else SystemExit):
        with utils.fail_on_error("--model's chat template rejects the task"):
            raise error


@pytest.mark.parametrize("flags, error, advice", [
    (dict(tree_tokens=9, recompute=None, offload=0, out="x"), GPU,
     "a lower --tree_tokens, --recompute 1, --offload 1"),
    (dict(max_batch_tokens=5, concurrency=7), CPU_RAM,
     "a lower --max_batch_tokens, a lower --concurrency")])
def test_who_runs_out_of_memory_reads_which_flags_save_some(flags, error, advice):
    with pytest.raises(SystemExit) as end:
        with utils.fail_if_out_of_memory(SimpleNamespace(**flags)):
            raise RuntimeError(error)
    want = f"error: out of memory: RuntimeError: {error}; try {advice}, a larger machine"
    assert str(end.value) == want


LIMITED = """
import re, resource, runpy, sys
import collect  # loads all libraries first
used = 1024 * int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1])
resource.setrlimit(resource.RLIMIT_AS, 2 * (used + MEGABYTES * 2 ** 20,))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.full
@pytest.mark.parametrize("name, flags, megabytes", [
    ("train_policy.py", ["--out", "OUT"], 300),
    ("train_critic.py", ["--out", "OUT", "--held_out", 0], 300),
    ("collect.py", ["--human", "fixed:ok", "--max_tokens", 5, "--max_turns", 1], 200)])
def test_a_stage_whose_memory_is_limited_says_so_in_one_line(name, flags, megabytes, ranked, tasks,
                                                             tiny_dir, tmp_path):
    """The allocator's own error, in a process that may use little more than its libraries do."""
    given = tasks if name == "collect.py" else ranked
    for r in given:
        r["task"]["agent_prompt"] = " rate" * 6000
        for message in r.get("dialogue_history", ())[:1]:
            message["content"] += " rate" * 6000
    flags = [tmp_path / "out" if flag == "OUT" else flag for flag in flags]
    code = LIMITED.replace("MEGABYTES", str(megabytes))
    done = subprocess.run([sys.executable, "-c", code, name, "--model", tiny_dir, *map(str, flags)],
                          input=lines(given), capture_output=True, text=True, cwd=ROOT, env=CPU)
    advice = "max_batch_tokens" if name == "collect.py" else "tree_tokens"
    assert done.returncode == 1 and "Traceback" not in done.stderr and "chat" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert re.search(rf"error: out of memory: .*; try a lower --{advice}", last), done.stderr


@pytest.mark.full
def test_out_of_memory_on_another_rank_is_one_line_with_its_rank(tmp_path):
    shutil.copy(f"{ROOT}/utils.py", tmp_path)
    (tmp_path / "stage.py").write_text(
        "import types, torch, utils\n\ndef main(args):\n    utils.init_distributed()\n"
        f"    if utils.RANK:\n        raise torch.OutOfMemoryError({GPU!r})\n"
        "    utils.barrier()\n\nutils.run(main, types.SimpleNamespace(tree_tokens=7))\n")
    done = script(tmp_path / "stage.py", ranks=2)
    assert done.returncode
    assert f"rank 1: error: out of memory: OutOfMemoryError: {GPU}; try a lower" in done.stderr


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
                make(Path(part))
                raise OSError(errno.ENOSPC, "No space left")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


@pytest.fixture
def disk(tmp_path):
    """disk(options): a directory on a disk, "size=40k"; called again, it changes the disk."""
    path = tmp_path / "disk"
    path.mkdir()

    def mount(options):
        if os.path.ismount(path):
            options = f"remount,{options}"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", path]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("only root may mount a small disk")
        return path
    yield mount
    subprocess.run(["umount", "-l", path])


@pytest.mark.full
def test_a_full_disk_leaves_the_last_checkpoint(ranked, tiny_dir, tmp_path, disk):
    """Beside the scripts, one of the tiny model's checkpoints, 3.2 MB each, finds room."""
    def run(out, how=succeed):
        return how("train_policy.py", "--model", tiny_dir, "--save_every", 1, "--batch_size", 32,
                   "--out", out, stdin=ranked)

    whole, kilobytes = tmp_path / "whole", 4980
    said = run(whole).stdout
    for kept in whole.glob("*.py"):
        kilobytes += 4 * -(-kept.stat().st_size // 4096)
    out = disk(f"size={kilobytes}k") / "out"
    complaint(run(out, script), f"{out}/checkpoint-2 can't be written: ", "No space left on device")
    assert [p.name for p in out.glob("checkpoint-*")] == ["checkpoint-1"]
    disk("size=50m")
    assert run(out).stdout.replace(str(out), "X") == said.replace(str(whole), "X")
    resumed = [row["resumed"] for row in metrics(out) if "resumed" in row]
    assert resumed == [1] and bits(out) == bits(whole)


@pytest.mark.full
def test_a_full_disk_under_stdout_keeps_whole_lines(tasks, ranked, tiny_dir, disk):
    """That it can't be written at all is said before the work."""
    out = disk("size=50m") / "all.jsonl"
    out.touch()
    play = ["collect.py", *HUMAN, "--model", tiny_dir, "--max_tokens", 12, "--max_turns", 3,
            "--resume", out]
    succeed(*play, stdin=tasks, out=out)  # one episode per task: four lines of 2 to 3 KB
    whole = out.read_text()
    disk("size=16k")
    complaint(script(*play, "-k", 4, stdin=tasks, out=out), "stdout: No space left")
    assert out.read_text().startswith(whole)
    disk("size=50m")
    assert re.search(r" \([4-9] more in the --resume file\)",
                     succeed(*play, "-k", 4, stdin=tasks, out=out).stderr)
    assert len(set(map(key_of, records(out.read_text())))) == 16
    complaint(script("evaluate.py", stdin=ranked, out="/dev/full"), "stdout: No space left")
    disk("ro")
    complaint(script(*play), f"--resume {out}: Read-only")


def test_only_checkpoints_are_dropped(tmp_path):
    mine = "checkpoint-3-copy", "checkpoint-best", "notes"
    for name in ("checkpoint-2", "checkpoint-3", "checkpoint-4.part", *mine):
        (tmp_path / name).mkdir()
    utils.drop_checkpoints(str(tmp_path), keep=3)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-3", *mine}


@pytest.mark.full
def test_a_damaged_checkpoint_is_named(ranked, tiny_dir, tmp_path):
    out = tmp_path / "out"
    train = ["train_policy.py", "--model", tiny_dir, "--out", out, "--save_every", 1,
             "--batch_size", 1]
    checkpoint = out / "checkpoint-2"
    script(*train, stdin=ranked, kill=(checkpoint, signal.SIGTERM))
    file = next(checkpoint.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:9000])
    done = script(*train, stdin=ranked)
    assert done.returncode == 1 and not (out / "model.safetensors").exists()
    assert done.stderr.splitlines()[-1].startswith(f"error: {checkpoint} is damaged; ")


TRAINS = ["--model", "MODEL", "--out", "OUT"]
READERS = [["colbench.py", "grade"], ["colbench.py", "check"], ["evaluate.py"],
           ["collect.py", "--human", "fixed:ok", "--model", "MODEL"], ["train_policy.py", *TRAINS],
           ["train_critic.py", *TRAINS], ["train_critic.py", "--untrained", 1, *TRAINS[:2]],
           *([f"tests/experiments/{name}.py"] for name in ("preferences", "offline", "audit",
                                                           "rollouts")),
           ["tests/experiments/credit.py", "--by", "reaction", *TRAINS[:2]]]


@pytest.mark.full
@pytest.mark.parametrize("command", READERS, ids=lambda command: " ".join(map(str, command)))
def test_a_script_whose_stdin_is_a_terminal_says_that_it_reads_from_there(command, tiny_dir,
                                                                          tmp_path):
    """As when one forgets `< FILE`."""
    keys, terminal = pty.openpty()
    paths = {"MODEL": tiny_dir, "OUT": str(tmp_path / "out")}
    argv = [str(paths.get(word, word)) for word in command]
    with subprocess.Popen([sys.executable, *argv], stdin=terminal, stderr=subprocess.PIPE, cwd=ROOT,
                          stdout=subprocess.PIPE, text=True, env=CPU, start_new_session=True) as p:
        os.close(terminal)
        os.write(keys, b"\x04")  # Ctrl-D, for when it reads
        said = p.communicate(timeout=100)[1].splitlines()
    assert said[0].startswith("reading records from the terminal; for a file use < FILE")
    assert said[-1] == ("error: stdin is empty: did the previous stage fail, or was there "
                        "nothing left to resume?")
    os.close(keys)


# --- data and models that degenerate --------------------------------------------------------------

@pytest.mark.full
def test_a_critic_learns_of_empty_messages_nothing_that_is_not_finite(ranked, tiny_dir, tmp_path):
    for x in (x for r in ranked for x in actions(r)):
        x |= {"content": "", "output": "", "token_ids": []}
    scored, rows = train(ranked, "train_critic.py", "--model", tiny_dir, "--epochs", 1, "--out",
                         tmp_path)
    assert all(x.isfinite().all() for x in weights(tmp_path).values())
    assert "NaN" not in lines([*scored, *rows])


@pytest.mark.full
def test_weights_that_are_not_finite_are_never_trained_on_or_played_with(tasks, ranked, tiny_dir,
                                                                         tmp_path, playing):
    bad = shutil.copytree(tiny_dir, tmp_path / "bad")
    change_weights(bad, lambda state: {name: x * math.nan if name == "model.norm.weight" else x
                                       for name, x in state.items()})
    for name in ("train_critic.py", "train_policy.py"):
        done = script(name, "--model", bad, "--out", tmp_path / name, stdin=ranked)
        complaint(done, "NaN or infinite")
    assert not [*tmp_path.glob("train*/model.safetensors")]
    played, _, end = playing(tasks, "--model", bad, "--max_tokens", 5)
    assert "NaN or infinite" in str(end) and not played


@pytest.mark.parametrize("name", ["train_critic.py", "train_policy.py"])
def test_a_step_that_would_spoil_the_weights_is_not_made(name, ranked, tiny_dir, tmp_path):
    out = tmp_path / "out"
    done = script(name, "--model", tiny_dir, "--out", out, "--save_every", 1, "--epochs", 40,
                  "--lr", 1e30, stdin=ranked)
    complaint(done, "the weights", "--lr")
    assert [path.name for path in out.glob("checkpoint-*")] == [f"checkpoint-{len(steps(out))}"]
    assert not (out / "model.safetensors").exists()


def test_a_folder_that_is_no_whole_model_is_named_for_what_it_is(tiny_dir, tmp_path):
    """A LoRA adapter, with and without config.json, and a run that was killed while it saved."""
    adapter, run = (shutil.copytree(tiny_dir, tmp_path / name) for name in ("adapter", "run"))
    (adapter / "model.safetensors").rename(adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text("{}")
    (run / "metrics.jsonl").write_text('{"args": {}}\n{"step": 3}\n')
    for _ in range(2):
        with pytest.raises(SystemExit, match="it is an adapter; merge it into its base model"):
            model.find_model(str(adapter))
        (adapter / "config.json").unlink(missing_ok=True)
    with pytest.raises(SystemExit, match="it is an unfinished run; repeat its command"):
        model.find_model(str(run))
    for rows in ('{"args": {}}\n{"finished": 4}\n', "of another program"):
        (run / "metrics.jsonl").write_text(rows)
        model.find_model(str(run))


def test_weights_beside_an_index_of_others_are_refused(tiny_dir, tmp_path, playing, tasks):
    """transformers would load a stale model.safetensors, and leave out the shards."""
    folder = shutil.copytree(tiny_dir, tmp_path / "both")
    index, shard = folder / "model.safetensors.index.json", folder / "a.safetensors"
    shutil.copy(folder / "model.safetensors", shard)
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights(tiny_dir),
                                                                             shard.name)}))
    why = "both' has model.safetensors, which transformers would load, and an index"
    with pytest.raises(SystemExit, match=why):
        model.load(str(folder))
    _, _, end = playing(tasks, "--model", folder, "--max_tokens", 5)
    assert why in str(end)
    (folder / "model.safetensors").unlink()
    model.load(str(folder))  # the shards
    shutil.copy(shard, folder / "model.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weights(tiny_dir),
                                                             "model.safetensors")}))
    model.load(str(folder))  # its index names no other file
    index.unlink()
    model.load(str(folder))  # the single file


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1053472\n"


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json",
                                  "chat_template.jinja"])
def test_a_pointer_of_git_lfs_in_a_model_is_named(file, tiny_dir, tmp_path):
    """Whether weights are asked for or not: before pairs are made."""
    folder = shutil.copytree(tiny_dir, tmp_path / "m")
    (folder / file).write_text(POINTER)
    for want_weights in (False, True):
        with pytest.raises(SystemExit, match=f"error: {folder}/{file} is only a pointer of Git"):
            model.find_model(str(folder), want_weights)


def test_weights_whose_download_is_incomplete_are_named(tiny_dir, tmp_path):
    folder = shutil.copytree(tiny_dir, tmp_path / "m")
    whole = (folder / "model.safetensors").read_bytes()
    for size in (0, 3, 900, len(whole) // 2, len(whole) - 1):
        (folder / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(SystemExit, match=f"the weights in '{folder}' can't be read: ."):
            model.load(str(folder))


@pytest.mark.parametrize("command", [["evaluate.py"], ["colbench.py", "grade"], [
    "tests/experiments/preferences.py"]])
def test_records_that_are_a_pointer_of_git_lfs_are_named(command):
    complaint(script(*command, stdin=POINTER), "stdin is only a pointer of Git LFS: run `git lfs")


@pytest.mark.parametrize("settings", [
    {"num_return_sequences": 4}, {"num_beams": 4, "early_stopping": "x"}, {"max_new_tokens": -1},
    {"temperature": -3.0, "top_p": "high", "do_sample": False, "cache_implementation": "none"}])
def test_settings_of_sampling_beside_the_weights_are_no_fault_of_theirs(settings, tiny_dir,
                                                                        tmp_path):
    """Nothing reads them: collect.py has its own, and a saved model keeps the base's file."""
    base, out = shutil.copytree(tiny_dir, tmp_path / "base"), tmp_path / "out"
    out.mkdir()
    change_json(base / "generation_config.json", **settings)
    change_json(base / "config.json", num_return_sequences=4)
    want = json.loads((base / "generation_config.json").read_text())
    model.save(*model.load(str(base)), out)
    assert json.loads((out / "generation_config.json").read_text()) == want
    model.load(str(out))


def test_a_config_that_transformers_can_not_parse_is_one_line(tiny_dir, tmp_path):
    folder = shutil.copytree(tiny_dir, tmp_path / "m")
    for file, text in (("tokenizer.json", '{"model": 3}'), ("config.json", "[]"),
                       ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 3}}')):
        before = (folder / file).read_text()
        (folder / file).write_text(text)
        with pytest.raises(SystemExit, match=f"error: no model at '{folder}': ."):
            model.find_model(str(folder))
        (folder / file).write_text(before)


# --- trust ----------------------------------------------------------------------------------------

@pytest.mark.full
def test_an_error_of_another_rank_is_told(tmp_path):
    shutil.copy(f"{ROOT}/utils.py", tmp_path)
    (tmp_path / "stage.py").write_text("import utils\n\ndef main(args):\n"
                                       "    utils.init_distributed()\n"
                                       "    utils.RANK and utils.fail('no room on this node')\n"
                                       "    utils.barrier()\n\nutils.run(main, None)\n")
    done = script(tmp_path / "stage.py", ranks=2)
    assert done.returncode and "rank 1: error: no room on this node" in done.stderr


def test_what_data_says_neither_steers_a_terminal_nor_starts_a_line(tasks, tmp_path, grading,
                                                                    playing):
    (tmp_path / "silent.py").write_text("def reply(task, history): return None")
    steering = "\x1b\x07\x9b\u202e"
    ends = "\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029"
    evil = f"{steering}]0;pwned" + "".join(f"{end}error: forged" for end in ends)
    task = {**tasks[0]["task"], "id": evil, "test_cases": {evil: "f(" + evil}}
    silent = ["--human", tmp_path / "silent.py", "--max_tokens", 5]
    for said in (script("evaluate.py", evil).stderr,
                 "{1}{2}".format(*grading([{"task": task}], command="check")),
                 "{1}{2}".format(*playing([{"task": task}], *silent))):
        assert "forged" in said and not {*steering, "\r"} & {*said}, repr(said)
        assert not any(line.startswith("error: forged") for line in said.splitlines()), said


def test_a_models_own_code_and_pickles_are_not_run(tasks, tiny_dir, tmp_path, playing):
    bad, mark = shutil.copytree(tiny_dir, tmp_path / "bad"), tmp_path / "ran"
    (bad / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass C: pass\n")
    config = (bad / "config.json").read_text()
    change_json(bad / "config.json", model_type="evil", auto_map=dict.fromkeys(
        ["AutoConfig", "AutoModelForCausalLM"], "evil.C"))
    _, _, end = playing(tasks, "--model", bad)
    assert "no model at" in str(end) and "custom code" in str(end)
    (bad / "config.json").write_text(config)
    torch.save(weights(bad), bad / "pytorch_model.bin")
    (bad / "model.safetensors").unlink()
    _, _, end = playing(tasks, "--model", bad)
    assert str(bad) in str(end) and not mark.exists()
