"""Both trainers as real processes: many, killed and resumed, and what --out allows.

The oracle of almost all of it is `whole`: the same job in one process that nobody disturbs.
"""
import contextlib
import functools
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from glob import glob
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import model as M
from conftest import CPU, ROOT, demos, lines, records, script, without_clock
from test_model import save_random

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
POLICY = ["train_policy.py", "--lr", 1e-5, "--loss"]
JOBS = {"critic": ["train_critic.py", "--held_out", 0.3, "--batch_size", 2, "--epochs", 6,
                   "--lr", 1e-4, "--beta", 1],
        "dpo": [*POLICY, "dpo", "--beta", 1, "--pairs_per_turn", 2, "--mix", 0.3,
                "--batch_size", 17],
        "mtdpo": [*POLICY, "mtdpo", "--batch_size", 3, "--epochs", 6],
        "rft": [*POLICY, "rft", "--all", 1, "--batch_size", 5],
        "tiny": [*POLICY, "rft", "--all", 1, "--batch_size", 5, "--epochs", 3, "--model", "tiny"],
        "bf16": [*POLICY, "dpo", "--pairs_per_turn", 1, "--batch_size", 6, "--epochs", 2,
                 "--lr", 2e-7, "--dtype", "bf16"]}


def agent(record):
    return [m for m in record["dialogue_history"] if m["role"] == "assistant"]


def scored(record):
    """The agent's messages and their candidates."""
    return [x for m in agent(record) for x in (m, *m.get("candidates", ()))]


def read(path):
    return open(path, "rb").read()


def metrics(out):
    return records(open(f"{out}/metrics.jsonl").read())


def steps(out):
    return [row for row in metrics(out) if "step" in row]


def leftovers(out):
    return [name for name in os.listdir(out) if "checkpoint" in name or name.endswith(".part")]


# --- running --------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def data(collected, tmp_path_factory):
    """A file of 8 episodes of 1 to 4 turns, with advantages; of each task sample 0 is solved."""
    r, rs = random.Random(0), records(collected)
    for n, record in enumerate(rs):
        history = record["dialogue_history"]
        del history[len(history) - 2 * (n % 3):]
        record["reward"] = 1.0 if record["sample"] == 0 else 0.3
        for m in agent(record):
            m["content"] = m["content"][:r.randrange(10, 40)]
            del m["logprobs"]  # the ids below do not spell its output
            for x in (m, *m["candidates"]):
                x["token_ids"] = x["token_ids"][:r.randrange(5, 40)]
            for c in m["candidates"]:
                c["advantage"] = r.gauss(0, 1)
    path = tmp_path_factory.mktemp("data") / "in.jsonl"
    path.write_text(lines(rs))
    (path.parent / "demos.jsonl").write_text(lines(demos(12)))
    return path


@pytest.fixture(scope="module")
def command(tiny_dir):
    """command(job, out, *flags): the script and its flags, as text."""
    def make(job, out, *flags):
        name, *usual = JOBS[job]
        return [str(x) for x in (name, "--model", tiny_dir, *usual, "--out", out, *flags)]
    return make


@pytest.fixture(scope="module")
def whole(command, data, tmp_path_factory):
    """whole(job): (its --out, its stdout), run in one process without a break."""
    @functools.cache
    def run(job):
        out = tmp_path_factory.mktemp("whole") / job
        stdin = data.parent / "demos.jsonl" if job == "tiny" else data
        done = script(*command(job, out), stdin=stdin.read_text())
        assert done.returncode == 0, done.stderr
        return out, done.stdout
    return run


def running(mark, *settings):
    """Ids of the processes that have all of these in their environment."""
    found = []
    for path in glob("/proc/[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if {mark, *settings} <= set(read(path).decode(errors="replace").split("\0")):
                found.append(int(path.split("/")[2]))
    return found


@contextlib.contextmanager
def started(command, stdin=os.devnull, launcher=(sys.executable,)):
    """A script as a process that ends with the context. stdin: a file's name, or PIPE.

    launcher: maybe torchrun. It starts each rank in a session of its own: they are found by a mark
    in their environment.
    """
    mark = f"TEST_TRAIN={uuid.uuid4()}"
    if stdin != subprocess.PIPE:
        stdin = open(stdin)
    name, *flags = command
    p = subprocess.Popen([*launcher, os.path.join(ROOT, name), *map(str, flags)], cwd=ROOT,
                         text=True, env={**CPU, "TEST_TRAIN": mark.partition("=")[2]},
                         start_new_session=True, stdin=stdin, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE)
    p.mark = mark
    try:
        yield p
    finally:
        while left := running(mark):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            p.poll()
        with p:
            p.kill()


def ended(p, timeout=150):
    """The finished process, with text in stdout and stderr."""
    out, err = p.communicate(timeout=timeout)
    return subprocess.CompletedProcess(p.args, p.returncode, out, err)


def until(there, p, seconds=100):
    """Waits until there() is true; not longer than the process p lives."""
    end = time.time() + seconds
    while not there():
        assert p.poll() is None, p.communicate()[1]
        assert time.time() < end
        time.sleep(0.002)


def kill_at(there, command, data):
    """Runs it until there() is true, then kill -9."""
    done = script(*command, stdin=data.read_text(), kill=(there, signal.SIGKILL))
    assert done.returncode == -signal.SIGKILL, done.stderr


def same_to_rounding(whole, out, stdout):
    """A run against the undisturbed one: every step's metrics, the weights, stdout."""
    want_out, want_stdout = whole
    for a, b in zip(steps(out), steps(want_out), strict=True):
        assert a["step"] == b["step"] and a["lr"] == b["lr"]
        for key in ("loss", "grad_norm"):  # a margin near 0 may flip an accuracy
            assert math.isclose(a[key], b[key], rel_tol=1e-4), (a, b)
    assert metrics(out)[-1]["finished"] == metrics(want_out)[-1]["finished"]
    start = {"tiny": f"{want_out}/init"}.get(start := metrics(out)[0]["args"]["model"], start)
    got, want, base = (load_file(f"{o}/model.safetensors") for o in (out, want_out, start))
    assert got.keys() == want.keys()
    for name in want:  # where gradients are tiny, Adam makes rounding larger
        moved = (want[name] - base[name]).abs().mean()
        assert (got[name] - want[name]).abs().mean() < 1e-2 * moved, name
    assert not leftovers(out)
    got, want = records(stdout), records(want_stdout)
    assert len(got) == len(want)
    for a, b in zip(got, want):
        if "summary" in b:
            assert {**a, "out": b["out"]} == b
            continue
        for x, y in zip(scored(a), scored(b), strict=True):
            assert abs(x.pop("advantage") - y.pop("advantage")) < 1e-5
        assert a == b  # nothing else changed, the order neither


def same_bits(whole, out, stdout):
    want_out, want_stdout = whole
    assert read(f"{out}/model.safetensors") == read(f"{want_out}/model.safetensors")
    assert without_clock(steps(out)) == without_clock(steps(want_out)) and not leftovers(out)
    assert stdout == want_stdout.replace(json.dumps(str(want_out)), json.dumps(str(out)))


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.full)])
def test_each_step_tells_its_seconds_and_the_tokens_that_all_ranks_computed(world, whole, command,
                                                                            data, tmp_path):
    out = whole("critic")[0]
    if world > 1:
        out = tmp_path / "out"
        done = script(*command("critic", out), stdin=data.read_text(), ranks=world)
        assert done.returncode == 0, done.stderr
    for row in steps(out):
        assert row["seconds"] * row["tokens_per_second"] == pytest.approx(row["tokens"], rel=0.02)


# --- many processes -------------------------------------------------------------------------------

# Several trainings by one start of the ranks. Each rank notes how many parts the ranks lacked, and
# the largest number of groups in a tree, which gather few keys here.
MANY = """
import importlib, json, os, sys
sys.path.insert(0, sys.argv[1])
import model
model.GATHERED = 100
tree_logps, deal = model.tree_logps, model.deal
def noted(of, tree, *more):
    groups.append(len(tree.groups))
    return tree_logps(of, tree, *more)
def noted_deal(*given):
    parts = deal(*given)
    seen.append(-len(parts) % model.WORLD)
    return parts
model.tree_logps, model.deal = noted, noted_deal
for name, flags, given, taken in json.loads(sys.argv[2]):
    os.dup2(os.open(given, os.O_RDONLY), 0)
    os.dup2(os.open(taken, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    sys.stdin, seen, groups = open(0, closefd=False), [], []
    script = importlib.import_module(name.removesuffix(".py"))
    script.main(script.get_args(flags))
    json.dump([seen, max(groups)], open(f"{taken}.{model.RANK}", "w"))
model.dist.destroy_process_group()  # or gloo may abort as the process ends
"""
SPREAD = {2: (["critic", "dpo", "mtdpo"], []),
          4: (["critic", "dpo"], ["--replicate", 2, "--recompute", 1, "--offload", 1])}


@pytest.mark.full
@pytest.mark.parametrize("world", SPREAD)
def test_many_processes_and_small_branches_make_the_same_steps(world, whole, command, data,
                                                               tmp_path):
    """The last batch of an epoch is smaller, the ranks' trees differ, most exceed --tree_tokens."""
    jobs, flags = SPREAD[world]
    (tmp_path / "many.py").write_text(MANY)
    todo = []
    for job in jobs:
        name, *argv = command(job, tmp_path / job, "--tree_tokens", 150, *flags)
        todo.append((name, argv, str(data), str(tmp_path / f"{job}.jsonl")))
    done = script(tmp_path / "many.py", ROOT, json.dumps(todo), ranks=world)
    assert done.returncode == 0, done.stderr
    filled = 0
    for job in jobs:
        same_to_rounding(whole(job), tmp_path / job, (tmp_path / f"{job}.jsonl").read_text())
        noted = [json.load(open(tmp_path / f"{job}.jsonl.{rank}")) for rank in range(world)]
        seen, groups = zip(*noted)
        assert max(groups) > 1
        assert len({*map(tuple, seen)}) == 1  # the same on each rank
        filled += sum(map(bool, seen[0]))
        assert metrics(tmp_path / job)[0]["world"] == world
    assert filled > 0 or world == 2  # ranks with fewer parts than another


@pytest.mark.full
def test_two_agents_are_two_machines(whole, command, data, tmp_path):
    """Only the first one reads stdin, writes, and makes the model. The second one comes late."""
    def read_tables():
        return "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]

    def launch(n):
        return [*TORCHRUN, "--nnodes=2", f"--node_rank={n}", "--master_addr=127.0.0.1",
                f"--master_port={port}"]
    tiny = command("tiny", tmp_path / "out", "--tree_tokens", 150)
    (tmp_path / "wrong.jsonl").write_text("this is no record\n")
    with started(tiny, data.parent / "demos.jsonl", launch(0)) as first:
        until(lambda: f":{port:04X} " in read_tables(), first)  # it listens
        with started(tiny, tmp_path / "wrong.jsonl", launch(1)) as second:
            done, other = ended(first), ended(second)
    assert done.returncode == other.returncode == 0, done.stderr + other.stderr
    assert not other.stdout
    same_to_rounding(whole("tiny"), tmp_path / "out", done.stdout)


@pytest.mark.full
@pytest.mark.parametrize("flags, message", [
    ([], "error: stdin, line 2: not JSON"),
    (["--learning_rate", 1], "error: unrecognized arguments: --learning_rate 1")],
    ids=["bad line", "unknown flag"])
def test_under_torchrun_an_error_is_said_once_and_leaves_nothing(flags, message, command, data,
                                                                 tmp_path):
    first = data.read_text().splitlines()[0]
    (tmp_path / "in.jsonl").write_text(first + "\n{'single': 'quotes'}\n")
    with started(command("critic", tmp_path / "out", *flags), tmp_path / "in.jsonl",
                 [*TORCHRUN, "--standalone", "--nproc_per_node=2"]) as p:
        done = ended(p, 60)
        assert not running(p.mark)
    assert done.returncode and not done.stdout and not [*tmp_path.glob("out/*")]
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    assert len(errors) == 1 and message in errors[0], done.stderr


PATIENCE = """
import datetime, sys, time
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist, utils
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))
print(utils.from_rank_0(lambda: time.sleep(5) or "here"), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.full
def test_the_others_wait_for_rank_0_longer_than_for_each_other(tmp_path):
    """It may wait for hours on stdin, before the first group of their own as well."""
    (tmp_path / "wait.py").write_text(PATIENCE)
    done = script(tmp_path / "wait.py", ROOT, ranks=2)
    assert not done.returncode and done.stdout.count("here") == 2  # two ranks' lines may mix


@pytest.mark.full
def test_a_dead_rank_ends_the_job_and_one_process_finishes_it(whole, command, data, tmp_path):
    """Here stdin is a pipe that takes its time, elsewhere a file."""
    out, sent = tmp_path / "out", data.read_text()
    mtdpo = command("mtdpo", out, "--save_every", 2)
    with started(mtdpo, subprocess.PIPE, [*TORCHRUN, "--standalone", "--nproc_per_node=2"]) as p:
        p.stdin.write(sent[:len(sent) // 2])
        p.stdin.flush()
        until(lambda: out.exists(), p)
        p.stdin.write(sent[len(sent) // 2:])
        p.stdin.close()
        p.stdin = None
        until(lambda: (out / "checkpoint-2").exists(), p)
        (worker,) = running(p.mark, "RANK=1")
        os.kill(worker, signal.SIGKILL)
        done = ended(p, 60)
        assert not running(p.mark)  # the other one too
    assert done.returncode and "SIGKILL" in done.stderr and not done.stdout
    assert not (out / "model.safetensors").exists()
    done = script(*mtdpo, "--resume", 1, stdin=sent)
    assert done.returncode == 0, done.stderr
    (resumed,) = (row for row in metrics(out) if "resumed" in row)
    assert 2 <= resumed["resumed"] < metrics(out)[0]["steps"] and resumed["world"] == 1
    same_to_rounding(whole("mtdpo"), out, done.stdout)


@pytest.mark.full
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_torchrun_ended_by_a_signal_has_its_last_step_on_disk_and_says_so_once(
        how, whole, command, data, tmp_path):
    out = tmp_path / "out"
    mtdpo = command("mtdpo", out, "--save_every", 0)
    with started(mtdpo, data, [*TORCHRUN, "--standalone", "--nproc_per_node=2"]) as p:
        until(lambda: (out / "metrics.jsonl").exists() and len(steps(out)) > 2, p)
        p.send_signal(how)
        done = ended(p, 60)
        assert not running(p.mark)
    ours = done.stderr.split("Traceback")[0]  # torchrun shows its own one
    assert ours.count("error: ") == done.stderr.count("error: ended by") == 1
    assert done.stderr.count("Traceback") <= 1
    assert "torch/distributed/run.py" in done.stderr and not done.stdout
    assert (out / f"checkpoint-{steps(out)[-1]['step'] + 1}").exists()
    assert not (out / "model.safetensors").exists()
    done = script(*mtdpo, "--resume", 1, stdin=data.read_text())
    assert done.returncode == 0, done.stderr
    same_to_rounding(whole("mtdpo"), out, done.stdout)


# --- a killed run ---------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def killed(command, data, tmp_path_factory):
    """killed(job): --out of a run that got kill -9 when its first checkpoint was there."""
    @functools.cache
    def run(job):
        out = tmp_path_factory.mktemp("killed") / job
        kill_at(lambda: (out / "checkpoint-2").exists(), command(job, out, "--save_every", 2), data)
        assert not (out / "model.safetensors").exists() and "finished" not in metrics(out)[-1]
        return out
    return run


@pytest.mark.parametrize("job", ["critic", pytest.param("bf16", marks=pytest.mark.full)])
def test_a_killed_run_resumes_to_the_same_bits(job, killed, whole, command, data, tmp_path):
    out = shutil.copytree(killed(job), tmp_path / "out")
    (out / "checkpoint-7.part").mkdir()  # what a kill leaves while a checkpoint is being written
    (out / "checkpoint-7.part" / ".metadata").write_text("{")
    with open(out / "metrics.jsonl", "a") as f:
        f.write('{"step": 9}\n{"step": 10, "lo')
    done = script(*command(job, out, "--resume", 1, "--save_every", 3), stdin=data.read_text())
    assert done.returncode == 0, done.stderr
    same_bits(whole(job), out, done.stdout)
    (resumed,) = (row for row in metrics(out) if "resumed" in row)
    assert 2 <= resumed["resumed"] < metrics(out)[0]["steps"]
    ends, want = ([row for row in metrics(folder) if "finished" in row]
                  for folder in (out, whole(job)[0]))
    assert ends == want  # as if there had been no kill


@pytest.mark.full
def test_a_run_killed_before_its_first_checkpoint_starts_over(whole, command, data, tmp_path):
    out = tmp_path / "out"
    mtdpo = command("mtdpo", out, "--save_every", 0)
    kill_at(lambda: out.exists() and (out / "metrics.jsonl").exists() and steps(out), mtdpo, data)
    assert not (out / "model.safetensors").exists() and not leftovers(out)
    for _ in range(2):  # with --resume 1 a run goes on, or says again what it found
        done = script(*mtdpo, "--resume", 1, stdin=data.read_text())
        assert done.returncode == 0, done.stderr
        same_bits(whole("mtdpo"), out, done.stdout)


@pytest.mark.full
def test_two_processes_finish_what_one_began(killed, whole, command, data, tmp_path):
    out = shutil.copytree(killed("critic"), tmp_path / "out")
    resume = command("critic", out, "--resume", 1, "--tree_tokens", 200)
    done = script(*resume, stdin=data.read_text(), ranks=2)  # both inherit the open file
    assert done.returncode == 0, done.stderr
    assert [row["world"] for row in metrics(out) if "args" in row] == [1, 2]
    same_to_rounding(whole("critic"), out, done.stdout)


def test_a_resumed_run_takes_the_references_that_were_computed(killed, whole, command, data,
                                                               tmp_path):
    """If they were computed again, a change of the file would change nothing."""
    out = shutil.copytree(killed("critic"), tmp_path / "out")
    path = str(out / "reference.safetensors")
    save_file({"logps": load_file(path)["logps"] + 1}, path)
    done = script(*command("critic", out, "--resume", 1), stdin=data.read_text())
    assert done.returncode == 0, done.stderr
    shifts = []
    for a, b in zip(records(done.stdout), records(whole("critic")[1]), strict=True):
        for x, y in zip(scored(a), scored(b), strict=True):
            shifts.append(x["advantage"] - y["advantage"])
    assert abs(sum(shifts) / len(shifts) + 1) < 0.1


@pytest.mark.full
def test_a_mixture_of_experts_trains_resumes_and_spreads_over_ranks(command, data, tiny_dir,
                                                                    tmp_path):
    """5 experts on 2 ranks: the shards are uneven."""
    save_random("qwen3_moe", M.find_model(tiny_dir)[1], tmp_path / "moe")
    moe, given = ["--model", tmp_path / "moe"], data.read_text()
    out = tmp_path / "out"
    done = script(*command("critic", out, *moe), stdin=given)
    assert done.returncode == 0, done.stderr
    whole = out, done.stdout
    kill_at(lambda: (tmp_path / "killed" / "checkpoint-2").exists(),
            command("critic", tmp_path / "killed", *moe, "--save_every", 2), data)
    resumed = script(*command("critic", tmp_path / "killed", *moe, "--resume", 1), stdin=given)
    same_bits(whole, tmp_path / "killed", resumed.stdout)
    spread = script(*command("critic", tmp_path / "spread", *moe), stdin=given, ranks=2)
    assert spread.returncode == 0, spread.stderr
    same_to_rounding(whole, tmp_path / "spread", spread.stdout)
    got, base = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "moe"))
    assert got.keys() == base.keys() and all((got[n] != base[n]).any() for n in base)
    policy = script(*command("dpo", tmp_path / "policy", *moe), stdin=done.stdout)
    assert policy.returncode == 0 and steps(tmp_path / "policy"), policy.stderr
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "policy").config.num_experts == 5


# --- the --out directory --------------------------------------------------------------------------

def refused(done):
    """The one line that says why."""
    assert done.returncode == 1 and not done.stdout, done.stderr
    *said, error = done.stderr.splitlines()
    assert not any("error: " in line for line in said)  # how many pairs there are, at most
    return error


def contents(out):
    return {name: read(os.path.join(out, name)) for name in os.listdir(out)}


@pytest.mark.full
@pytest.mark.parametrize("job", ["critic", "mtdpo"])
def test_a_finished_run_is_only_read(job, whole, command, data, tmp_path):
    out, stdout = shutil.copytree(whole(job)[0], tmp_path / "out"), whole(job)[1]
    before = contents(out)
    said = stdout.replace(json.dumps(str(whole(job)[0])), json.dumps(str(out)))
    assert "exists already" in refused(script(*command(job, out), stdin=data.read_text()))
    done = script(*command(job, out, "--resume", 1), stdin=data.read_text())
    assert (done.returncode, done.stdout) == (0, said), done.stderr
    assert contents(out) == before


def test_what_is_no_run_is_never_removed(command, data, tmp_path):
    (tmp_path / "precious").write_text("mine")
    done = script(*command("mtdpo", tmp_path, "--resume", 1), stdin=data.read_text())
    assert "exists already" in refused(done) and contents(tmp_path) == {"precious": b"mine"}


@pytest.mark.parametrize("flags, change, message", [
    (["--lr", 3], str, "flag --lr was 0.0001 in the run in {out}, now 3.0"),
    (["--held_out", 0.1], str, "flag --held_out was 0.3 in the run in {out}, now 0.1"),
    ([], lambda text: text.replace('"reward": 0.3', '"reward": 1.0', 1), "was "),
    ([], lambda text: text.replace('"content": "write', '"content": "Write', 1), "data was ")],
    ids=["lr", "held_out", "a reward", "a token"])
def test_only_the_same_run_is_resumed(flags, change, message, killed, command, data):
    out = killed("critic")
    before = metrics(out), sorted(os.listdir(out))
    resume = command("critic", out, "--resume", 1, "--save_every", 2, *flags)
    done = script(*resume, stdin=change(data.read_text()))
    assert message.format(out=out) in refused(done)
    assert (metrics(out), sorted(os.listdir(out))) == before


@pytest.mark.full
@pytest.mark.parametrize("job", ["critic", "mtdpo"])
def test_a_run_is_resumed_only_with_the_weights_it_began_with(job, command, data, tiny_dir,
                                                              tmp_path):
    base = shutil.copytree(tiny_dir, tmp_path / "base")
    out, older = tmp_path / "out", tmp_path / "older"
    train = command(job, out, "--save_every", 2, "--model", base)
    kill_at(lambda: (out / "checkpoint-2").exists(), train, data)
    resume = lambda *flags: script(*train, "--resume", 1, *flags, stdin=data.read_text())
    files = lambda: {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    before, weights = files(), load_file(base / "model.safetensors")
    save_file({k: v * 1.001 for k, v in weights.items()}, base / "model.safetensors")
    error = refused(resume())
    assert error.startswith("error: --resume 1: model_weights was ") and files() == before

    shutil.copytree(out, older)  # a run that did not note them
    rows = metrics(out)
    del rows[0]["model_weights"]
    (older / "metrics.jsonl").write_text(lines(rows))
    done = resume("--out", older)
    assert done.returncode == 0, done.stderr

    shutil.copy(f"{tiny_dir}/model.safetensors", base)
    done = resume()
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_two_runs_cannot_share_an_out(whole, command, data, tmp_path):
    """The second is refused while the first waits for stdin and while it trains."""
    out = tmp_path / "out"

    def check_refused():
        second = script(*command("critic", out, "--resume", 1), stdin=data.read_text())
        assert "in use" in refused(second)

    with started(command("critic", out), subprocess.PIPE) as p:
        until(out.exists, p)
        check_refused()
        p.stdin.write(data.read_text())
        p.stdin.close()
        p.stdin = None
        until(lambda: (out / "metrics.jsonl").exists() and steps(out), p)
        p.send_signal(signal.SIGSTOP)
        check_refused()
        p.send_signal(signal.SIGCONT)
        done = ended(p)
    assert done.returncode == 0, done.stderr
    same_bits(whole("critic"), out, done.stdout)


# --- what is left out, what it is saved as --------------------------------------------------------

LIMIT = 500


@pytest.mark.full
@pytest.mark.parametrize("job", ["critic", "dpo", "mtdpo", "rft"])
def test_turns_that_are_too_long_are_left_out_and_counted(job, command, data, tmp_path):
    """Training is that on data without them, and the critic still writes a line for each record."""
    short, long = (records(data.read_text()) for _ in range(2))
    [m for m in long[3]["dialogue_history"] if m["role"] == "user"][2]["content"] += " x" * LIMIT
    later = agent(long[3])[2:]
    left_out = [x for m in later for x in (m, *m["candidates"])]
    if job == "critic":
        other = next(i for i, r in enumerate(long) if i != 3 and len(agent(r)) > 1)
        left_out.append(agent(long[other])[1]["candidates"][2])
        left_out[-1]["token_ids"] = [7] * LIMIT
        agent(short[other])[1]["candidates"].pop(2)
    alone = ["--mix", 0] * (job == "dpo")  # here turns are examples of their own
    if alone:
        for m in agent(short[3])[2:]:
            del m["candidates"]
    else:
        del short[3]
    runs = {}
    for name, given, flags in (("short", short, []), ("long", long, ["--max_length", LIMIT])):
        done = script(*command(job, tmp_path / name, "--epochs", 2, *alone, *flags), stdin=given)
        assert done.returncode == 0, done.stderr
        runs[name] = done, metrics(tmp_path / name)[0]
    count = len(left_out)
    said = runs["long"][0].stderr.splitlines()
    assert any(line.startswith(f"{count} ") and "--max_length" in line for line in said)
    assert count > 0 and runs["long"][1]["pairs"] == runs["short"][1]["pairs"]
    for a, b in zip(steps(tmp_path / "long"), steps(tmp_path / "short"), strict=True):
        assert math.isclose(a["loss"], b["loss"], rel_tol=1e-5) and a["lr"] == b["lr"]
    got, want = (load_file(tmp_path / name / "model.safetensors") for name in ("long", "short"))
    assert all((got[name] - want[name]).abs().mean() < 1e-7 for name in want)
    if job == "critic":
        got = records(runs["long"][0].stdout)
        for r, given in zip(got, long, strict=True):
            for x, sent in zip(scored(r), scored(given), strict=True):
                sent.pop("advantage", None)  # of whoever scored it before
                assert any(sent is y for y in left_out) or isinstance(x.pop("advantage"), float)
        assert got == long


def test_bf16_computes_and_saves_in_16_bits_and_trains_in_32(killed, whole, tiny_dir, command, data,
                                                             tmp_path):
    """A step of 2e-7 is lost on a 16-bit weight."""
    fp32 = command("bf16", tmp_path / "fp32", "--dtype", "fp32", "--epochs", 1)
    done = script(*fp32, stdin=data.read_text())
    assert done.returncode == 0, done.stderr
    low, high = (load_file(out / "reference.safetensors")["logps"]
                 for out in (whole("bf16")[0], tmp_path / "fp32"))
    assert 1e-3 < (low - high).abs().mean() < 0.05
    (checkpoint,) = glob(f"{killed('bf16')}/checkpoint-*")
    assert {name.rpartition(".")[2] for name in os.listdir(checkpoint)} == {"safetensors"}
    (file,) = glob(f"{checkpoint}/*")
    kept, base = load_file(file), load_file(f"{tiny_dir}/model.safetensors")
    state = {name.removeprefix("lm."): x for name, x in kept.items() if name.startswith("lm.")}
    moments = {name.rpartition(".")[2] for name in kept if name.startswith("state.")}
    assert state.keys() >= base.keys() and moments == {"step", "exp_avg", "exp_avg_sq"}
    assert {x.dtype for x in state.values()} == {torch.float32}
    flat = lambda weights, dtype: torch.cat([weights[n].to(dtype).flatten() for n in base])
    changed = lambda dtype: (flat(state, dtype) != flat(base, dtype)).double().mean()
    assert changed(torch.float32) > 0.9 and changed(torch.bfloat16) < 0.01
    assert metrics(whole("bf16")[0])[0]["dtype"] == "torch.bfloat16"
    saved = load_file(whole("bf16")[0] / "model.safetensors")
    assert {x.dtype for x in saved.values()} == {torch.bfloat16}
    lm = AutoModelForCausalLM.from_pretrained(whole("bf16")[0])
    assert lm.dtype == torch.bfloat16 and lm(torch.arange(6, 60)[None]).logits.isfinite().all()
    assert all(torch.equal(p, saved[n]) for n, p in lm.named_parameters())
