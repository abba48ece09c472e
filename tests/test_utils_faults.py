"""Faults: kills at random moments, full and read-only disks, degenerate data. No work is lost.

FULL=1 KILLS=100 python -m pytest -q tests/test_utils_faults.py kills every stage 100 times;
FAULT_SEED=1 kills at other moments.
"""
import argparse
import errno
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import model
import utils
from conftest import (HUMAN, ROOT, actions, change_json, change_weights, complaint,
                      copy_scripts, key_of, lines, metrics, records, script, steps, succeed,
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


def test_a_machine_without_git_has_a_version(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert utils.version.__wrapped__().startswith("unknown, python 3.")


# --- mistakes in code, and memory -----------------------------------------------------------------

def test_a_mistake_in_code_keeps_its_traceback_and_an_error_of_the_input_is_one_line():
    for error in (ValueError("x"), OSError(2, "x"), json.JSONDecodeError("x", "", 0)):
        with pytest.raises(SystemExit, match="^error: the file: .*x"):
            with utils.fail_on_error("the file"):
                raise error
    for error in (NameError("x"), TypeError("x"), KeyError("x"), RuntimeError("x")):
        with pytest.raises(type(error)), utils.fail_on_error("the file"):
            raise error


POLICY = ["train_policy.py", "--model", "MODEL", "--out", "OUT"]
EDITS = {  # {function: (command, file, what the edit changes, to what)}
    "read_actions": (POLICY, "model.py", "prompt = read_prompt(pi_reads_hidden)",
                     "prompt = read_prompt(pi_reads_d)"),
    "forward": (POLICY, "model.py", "previous, targets = tree.parent[tree.scored]",
                "previous, targets = tree.parents[tree.scored]"),
    "dpo_loss": (POLICY, "train_policy.py", "nll = -joined_logps(", "nll = -joined_logp("),
    "save": (POLICY, "model.py", "weights = {name: state[name]", "weights = {name: states[name]"),
    "sample_turn": (["collect.py", "--model", "MODEL", "--human", "fixed:ok", "--max_tokens", 5],
                    "collect.py", "candidates = actions[n_actions:]",
                    "candidates = actions[n_action:]"),
    "grade": (["colbench.py", "grade"], "colbench.py", "useful = [i for i, result in enumerate(expected)",
              "useful = [i for i, result in enumerates(expected)")}


@pytest.mark.parametrize("function", EDITS)
def test_a_mistake_in_an_edit_shows_where_it_is(function, ranked, tasks, tiny_dir, tmp_path):
    command, file, old, new = EDITS[function]
    edited = copy_scripts(tmp_path) / file
    assert edited.read_text().count(old) == 1
    edited.write_text(edited.read_text().replace(old, new))
    paths = {"MODEL": tiny_dir, "OUT": tmp_path / "out"}
    name, *flags = (paths.get(word, word) for word in command)
    done = script(tmp_path / name, *flags, stdin=tasks if name == "collect.py" else ranked)
    assert done.returncode == 1 and "Traceback" in done.stderr, done.stderr
    assert re.search(rf'{file}", line \d+, in {function}\n', done.stderr)
    assert new in done.stderr


# --- disks that take no more ----------------------------------------------------------------------

def test_writing_leaves_all_or_nothing(tmp_path):
    """It makes a file or a directory; after an error the one before is as it was."""
    for name in ("file", "folder"):
        path = tmp_path / name
        make = Path.touch if name == "file" else Path.mkdir
        with utils.writing(str(path)) as part:
            make(Path(part))
            assert not path.exists()
        with pytest.raises(OSError):
            with utils.writing(str(path)) as part:
                make(Path(part))
                raise OSError(errno.ENOSPC, "No space left")
        assert not os.path.exists(path) or name in os.listdir(tmp_path)


def test_the_copy_of_a_script_is_whole_or_not_there(tmp_path, monkeypatch):
    """It is written while training begins, when a kill or a full disk may come."""
    def fail_in_the_middle(source, copy):
        Path(copy).write_text(Path(source).read_text()[:99])
        raise OSError(errno.ENOSPC, "No space left")

    args = argparse.Namespace(out=str(tmp_path))
    log = utils.RunLog(args)
    log.check({})
    with monkeypatch.context() as m, pytest.raises(OSError):
        m.setattr(shutil, "copy", fail_in_the_middle)
        log.start("policy", 1)
    assert not [*tmp_path.glob("*.py")]
    os.close(log.lock)
    log = utils.RunLog(args)
    log.check({})
    log.start("policy", 1)
    os.close(log.lock)
    whole = {path.name: path.read_text() for path in Path(ROOT).glob("*.py")}
    assert {path.name: path.read_text() for path in tmp_path.glob("*.py") if path.is_file()} == whole


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
    assert "No space left on device" in run(out, script).stderr
    assert [p.name for p in out.glob("checkpoint-*") if p.suffix != ".part"] == ["checkpoint-1"]
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
    assert "No space left" in script(*play, "-k", 4, stdin=tasks, out=out).stderr
    assert out.read_text().startswith(whole)
    disk("size=50m")
    assert re.search(r" \([4-9] more in the --resume file\)",
                     succeed(*play, "-k", 4, stdin=tasks, out=out).stderr)
    assert len(set(map(key_of, records(out.read_text())))) == 16
    disk("ro")
    complaint(script(*play, stdin=tasks), f"--resume {out}: Read-only")


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
    file = next(checkpoint.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:9000])
    done = script(*train, stdin=ranked)
    assert done.returncode == 1 and not (out / "model.safetensors").exists()


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
        complaint(done, "differ by nan")
    assert not [*tmp_path.glob("train*/model.safetensors")]
    played, _, end = playing(tasks, "--model", bad, "--max_tokens", 5)
    assert "differ by nan" in str(end) and not played


@pytest.mark.parametrize("name", ["train_critic.py", "train_policy.py"])
def test_a_step_that_would_spoil_the_weights_is_not_made(name, ranked, tiny_dir, tmp_path):
    out = tmp_path / "out"
    done = script(name, "--model", tiny_dir, "--out", out, "--save_every", 1, "--epochs", 40,
                  "--lr", 1e30, stdin=ranked)
    complaint(done, "the weights", "--lr")
    assert [path.name for path in out.glob("checkpoint-*")] == [f"checkpoint-{len(steps(out))}"]
    assert not (out / "model.safetensors").exists()


@pytest.mark.parametrize("settings", [
    {"num_return_sequences": 4}, {"num_beams": 4, "early_stopping": "x"}, {"max_new_tokens": -1},
    {"temperature": -3.0, "top_p": "high", "do_sample": False, "cache_implementation": "none"}])
def test_settings_of_sampling_beside_the_weights_are_no_fault_of_theirs(settings, tiny_dir,
                                                                        tmp_path):
    """Nothing reads them: collect.py has its own, and a saved model has none."""
    base, out = shutil.copytree(tiny_dir, tmp_path / "base"), tmp_path / "out"
    out.mkdir()
    change_json(base / "generation_config.json", **settings)
    change_json(base / "config.json", num_return_sequences=4)
    model.save(*model.load(str(base)), out)
    assert not settings.keys() & json.loads((out / "generation_config.json").read_text()).keys()
    model.load(str(out))


# --- trust ----------------------------------------------------------------------------------------

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
