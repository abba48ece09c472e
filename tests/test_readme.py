"""The README: its commands use flags that exist, its edits work.

.ci/run runs the quickstart and the tests themselves."""
import glob
import importlib.util
import inspect
import math
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import time
from importlib import import_module
from itertools import combinations
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import colbench
import model
import toy
import toy_pages
import train_critic
import train_policy
from colbench import BROWSERS, CACHE, agent_messages
from conftest import (CPU, ROOT, change_weights, copy_scripts, demos, key_of, lines, metrics,
                      read_by, records, save, script, shell, stdin_of, steps, succeed, train, weights)
from test_colbench_environment import repo  # a fixture

SCRIPTS = ("collect", "train_critic", "train_policy", "evaluate", "colbench", "toy", "toy_pages")
EDITS = f"{ROOT}/tests/experiments/edits"
LN2 = math.log(2)


def commands(text):
    """[(script, argv)] of every `script.py ...` in a text; a pipe, `>` or line end closes it."""
    text = re.sub(r"\$\(\(.*?\)\)", "1", text)
    text = re.sub(r"\$\([^()]*\)", "X", re.sub(r"\\\n|(?<=\|)\n", " ", text))
    for line in text.splitlines():
        for part in re.split(r"\s[|]\s*|\s(?:[<>]|>>)\s|;|&&|\s#|\)", line + " "):
            found = re.search(r"\b(?:python|train|torchrun .*) (?:\S*/)?"
                              rf"({'|'.join(SCRIPTS)})\.py\s+(.*)", part + " ")
            if found and not part.lstrip().startswith(("|", "`")):
                argv = [a for a in shlex.split(found[2]) if a not in ('"$@"', "$@", "...", "…")]
                # a variable is some flag's value, or else several flags
                yield found[1], [re.sub(r"^\$(\w+|{.*})$", "1", a)
                                 for before, a in zip(["", *argv], argv)
                                 if before.startswith("-") or not a.startswith("$")]


def all_commands():
    texts = [import_module(name).__doc__ for name in SCRIPTS]
    texts += [Path(path).read_text() for path in (f"{ROOT}/tests/quickstart.sh",
                                                  *glob.glob(f"{ROOT}/tests/experiments/*.sh"))]
    for path in ("README.md", "tests/experiments/MANUAL.md"):
        blocks = re.findall(r"```bash\n(.*?)```", Path(ROOT, path).read_text(), re.S)
        texts += blocks
    found = [command for text in texts for command in commands(text)]
    assert len({name for name, _ in found}) == len(SCRIPTS) and len(found) > 40
    return found


def test_commands_parse(monkeypatch):
    monkeypatch.setattr(train_critic, "read_critic", lambda folder: {"args": {"model": "m"}})
    for name, argv in all_commands():
        print(name, argv)  # of which pytest shows the last one if that fails
        import_module(name).get_args(argv)


@pytest.mark.parametrize("path", glob.glob(f"{ROOT}/tests/**/*.sh", recursive=True))
def test_a_script_fails_if_any_stage_of_a_pipe_does(path):
    commands = re.sub(r"^ *#.*\n", "", Path(path).read_text(), flags=re.M)
    assert re.match(r"\s*set -euo pipefail\n", commands)


def test_a_block_fails_if_any_stage_of_a_pipe_does():
    readme = Path(ROOT, "README.md").read_text()
    piped = [text for text in re.findall(r"```bash\n(.*?)```", MANUAL + readme, re.S)
             if " |" in text]
    assert len(piped) >= 7
    for text in piped:
        assert re.search(r"^set -(eu)?o pipefail", text.partition(" |")[0], re.M), text
        if "torchrun" in text:  # a step that fails must end it, not train on a part
            assert text.startswith("set -euo pipefail"), text


# --- "Change X -> edit Y": each patch of tests/experiments/edits is applied to a copy -------------

def edited(names, folder):
    """The path of a copy of the scripts with patches applied, in the order of their names."""
    folder.mkdir(exist_ok=True)
    copy_scripts(folder)
    patches = [f"{EDITS}/{name}.diff" for name in names.split()]
    subprocess.run(["git", "apply", "--whitespace=error", *patches], cwd=folder, check=True)
    return folder


def edited_module(names, folder, script="train_critic"):
    """A script of such a copy, as a module beside the plain ones."""
    path = f"{edited(names, folder)}/{script}.py"
    spec = importlib.util.spec_from_file_location("edited", path)
    module = importlib.util.module_from_spec(spec)
    plain = ALL_ATTENTION_FUNCTIONS["tree"]
    spec.loader.exec_module(module)
    # a copy of model.py has registered its own, with which later tests would compute
    AttentionInterface.register("tree", plain)
    return module


def first_step(copy, name, given, base, *flags, ranks=1, out=None):
    """Metrics of the first step of a trainer of the copy, and its stdout's records."""
    nll = [] if {"grpo", "opsd"} & set(flags) else ["--nll_coef", 0]  # which has none
    got, (_, first, *_) = train(given, f"{copy}/{name}.py", "--model", base, *nll, "--epochs", 1,
                                *flags, "--out", out or f"{copy}/out", ranks=ranks)
    return first, got


def test_two_edits_combine_but_for_those_of_one_place(tmp_path):
    """What the manual says. value is a part of regression."""
    names = {Path(path).stem for path in glob.glob(f"{EDITS}/*.diff")} - {"value"}
    conflicts = set()
    for pair in combinations(sorted(names, key=lambda name: (name != "regression", name)), 2):
        try:
            edited(" ".join(pair), tmp_path)
        except subprocess.CalledProcessError:
            conflicts.add(pair)
    told = re.search(r"\*\*Edits\*\*: .*? except (.*?)\.\s", MANUAL, re.S)[1]
    of_one_line = {("regression", "sqrt_length"),
                   ("regression", "sum"), ("sqrt_length", "sum"),  # of the critic's loss
                   ("regression", "margin_by_gap"),
                   ("ipo", "margin_by_gap"), ("ipo", "two_references"),  # of the policy's loss
                   ("moving_reference", "two_references"),
                   ("grpo", "opsd")}  # of LOSSES
    assert "change the same line" in told and conflicts - of_one_line == {
        tuple(re.findall(r"`(\w+)`", pair)) for pair in told.split(",")[:3]}


def test_every_edit_is_in_the_readme_and_has_a_test():
    edits = {Path(path).stem for path in glob.glob(f"{EDITS}/*.diff")}
    named = set(re.findall(r"\b(\w+)\.diff\b", Path(ROOT, "README.md").read_text()))
    tested = re.findall(r'(?:edited|edited_module|param)\("([\w ]+)"', Path(__file__).read_text())
    assert edits == named == set(" ".join(tested).split())


@pytest.mark.full
@pytest.mark.parametrize("names", [pytest.param("regression"), pytest.param("regression value")])
def test_edits_with_tests_of_their_own(names, tmp_path):
    """Those of the last one, in a copy of the scripts and of what the tests share."""
    copy, name = edited(names, tmp_path), names.split()[-1]
    (copy / "tests").mkdir()
    for shared in ("conftest.py", "forks.py", "plan.py", "test_model.py", "toy.py",
                   "toy_pages.py"):
        shutil.copy(f"{ROOT}/tests/{shared}", copy / "tests")
    shutil.copy(f"{EDITS}/{name}.py", copy / "tests" / f"test_{name}.py")
    done = shell(f"python -m pytest -q -rs tests/test_{name}.py", cwd=copy, timeout=600,
                 in_forks=1)
    if done.returncode == 5:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout


def test_the_edits_of_what_the_loss_sums(tmp_path):
    """A turn's log-ratios, or all of a trajectory's in one mean."""
    logps = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0]), "c": torch.tensor([5.0])}
    ref = {turn: 0 * x for turn, x in logps.items()}
    args, pair = SimpleNamespace(beta=1, nll_coef=0), model.Pair(("a", "b"), ("c",))
    for critic, want in ((train_critic, 1.5 + 3 - 5), (edited_module("sum", tmp_path), 3 + 3 - 5),
                         (edited_module("trajectory", tmp_path), (1 + 2 + 3) / 3 - 5)):
        _, metrics = critic.critic_loss(args, [pair], logps, ref)
        assert metrics["margin"] == pytest.approx(want)


def test_the_edit_no_hidden(rewarded, tiny_dir, tmp_path):
    """Critic and reference read what the policy does."""
    args = train_policy.get_args(["--model", str(tiny_dir)])
    critics = edited_module("no_hidden", tmp_path, "model")
    with stdin_of(rewarded):
        policys = model.read_trajectories(args, pi_reads_hidden=False, ref_reads_hidden=False)
    with stdin_of(rewarded):
        assert policys == critics.read_trajectories(args, pi_reads_hidden=True,
                                                    ref_reads_hidden=True)
    # tests of any order compute with the plain model.py
    assert inspect.unwrap(ALL_ATTENTION_FUNCTIONS["tree"]) is model.tree_attention


@pytest.mark.full
def test_the_edit_hsdp(rewarded, tiny_dir, tmp_path):
    """Two copies of the model, each on two of four ranks."""
    copy = edited("hsdp", tmp_path)
    want, plain = first_step(ROOT, "train_critic", rewarded, tiny_dir, out=tmp_path / "plain")
    got, scored = first_step(copy, "train_critic", rewarded, tiny_dir, "--replicate", 2, ranks=4)
    for key in ("loss", "grad_norm"):
        assert got[key] == pytest.approx(want[key], rel=1e-4)
    assert len(scored) == len(plain)


@pytest.mark.full
@pytest.mark.parametrize("edit, name, flags, ranks, loss", [
    pytest.param("ipo", "train_policy", [], 1, pytest.approx(25)),  # (0 - 1 / (2 beta)) ** 2
    # ratios of 1: the mean of some normalised advantages
    pytest.param("grpo", "train_policy", ["--loss", "grpo", "--batch_size", 8], 1,
                 pytest.approx(0, abs=1)),
    pytest.param("lora", "train_critic", ["--dtype", "bf16"], 2, pytest.approx(LN2, abs=1e-3)),
    pytest.param("margin_by_gap", "train_critic", ["--held_out", 0], 2,
                 pytest.approx(math.log1p(math.exp(0.7))))])
def test_the_first_loss_of_edits(edit, name, flags, ranks, loss, ranked, tiny_dir, tmp_path):
    """On a base in 16 bits."""
    model.save(*model.load(tiny_dir, dtype="bf16"), str(tmp_path / "base"))
    first, _ = first_step(edited(edit, tmp_path), name, ranked, tmp_path / "base", *flags,
                          ranks=ranks)
    assert first["grad_norm"] > 0 and first["loss"] == loss


@pytest.mark.full
def test_the_policys_edits_of_the_margin(ranked, tiny_dir, tmp_path):
    """By the gap of the advantages; and by two references, of which one differs from pi."""
    other = shutil.copytree(tiny_dir, tmp_path / "other")
    change_weights(other, lambda state: {name: x * 1.1 for name, x in state.items()})
    groups, _ = read_by(ranked, train_policy, "--model", tiny_dir)
    pairs = [pair for group in groups for pair in group]
    logps, other_logps = (model.turn_logps(model.load(folder)[0], model.turns_in(pairs), math.inf)
                          for folder in (tiny_dir, other))

    def change(side):  # half of log pi - log pi_ref of the other reference
        return sum((logps[turn] - other_logps[turn]).sum().item() for turn in side) / 2

    gaps = [pair.chosen_score - pair.rejected_score for pair in pairs]
    margins = [0.1 * (change(pair.chosen) - change(pair.rejected)) for pair in pairs]
    assert {*gaps} == {1, 2, 3} and max(map(abs, margins)) > 0.01
    flags = ["--batch_size", 10_000]
    for copy, more, want in (
            (edited("margin_by_gap", tmp_path / "1"), [], [-gap for gap in gaps]),
            (edited("two_references", tmp_path / "2"), ["--other", other], margins)):
        first, _ = first_step(copy, "train_policy", ranked, tiny_dir, *flags, *more)
        mean_loss = fmean(math.log1p(math.exp(-x)) for x in want)
        assert first["loss"] == pytest.approx(mean_loss, rel=1e-4)


@pytest.mark.full
def test_the_edit_sqrt_length(rewarded, tiny_dir, tmp_path):
    copy = edited("sqrt_length", tmp_path)
    flags = "--lr", 1e-3, "--held_out", 0
    _, scored = first_step(copy, "train_critic", rewarded, tiny_dir, *flags)
    plain = records(succeed("train_critic.py", "--score", copy / "out", stdin=scored).stdout)
    for ours, theirs in zip(scored, plain, strict=True):
        for a, b in zip(agent_messages(ours), agent_messages(theirs), strict=True):
            root = len(a["token_ids"]) ** 0.5
            assert a["advantage"] == pytest.approx(b["advantage"] * root, rel=1e-3) != 0


@pytest.mark.full
def test_the_edit_opsd(ranked, tiny_dir, tmp_path):
    """Its first loss is a mean over turns of KL(pi_ref given c || pi), by transformers."""
    first, _ = first_step(edited("opsd", tmp_path), "train_policy", ranked, tiny_dir,
                          "--loss", "opsd", "--batch_size", 10_000)
    lm, chat = model.load_lm(tiny_dir, torch.device("cpu"))

    def log_probs(turn):
        ids = torch.tensor([[*map(ord, turn.prompt + turn.action)]])
        logits = lm(ids).logits[0, len(turn.prompt) - 1:-1]
        return torch.log_softmax(logits, -1)

    divergences = []
    for record in ranked:
        for history, actions in model.turn_actions(record):
            for _, turn, teacher_turn in model.read_actions(
                    chat, record, history, actions[:4], pi_reads_hidden=False,
                    ref_reads_hidden=True):
                pi, teacher = log_probs(turn), log_probs(teacher_turn)
                divergences.append((teacher.exp() * (teacher - pi)).sum(-1).mean().item())
    assert first["grad_norm"] > 0
    assert first["loss"] == pytest.approx(sum(divergences) / len(divergences), rel=1e-4) != 0


def resumed(run, out, given, step):
    """Kills a run at its checkpoint of this step; resumes it. Returns the checkpoint's weights."""
    script(*run, out, "--save_every", step, stdin=given,
           kill=(out / f"checkpoint-{step}", signal.SIGKILL))
    dcp_to_torch_save(out / f"checkpoint-{step}", out.parent / "saved")
    saved = torch.load(out.parent / "saved")["weights"]
    _, rows = train(given, *run, out)
    assert [row["resumed"] for row in rows if "resumed" in row] == [step]
    return saved


@pytest.mark.full
@pytest.mark.parametrize("edit, flags", [
    pytest.param("moving_reference", ["--ema", 0.5, "--batch_size", 12, "--epochs", 1]),
    pytest.param("early_stop", ["--held_out", 0.5, "--eval_every", 1, "--patience", 2,
                                "--batch_size", 4, "--epochs", 6])])
def test_edits_with_state_of_their_own_resume_to_the_same_bits(edit, flags, ranked, tiny_dir,
                                                               tmp_path):
    """On two ranks to rounding. A reference that follows pi at once gives margins of 0. An early
    end says its step, and saves the weights of the best one."""
    ranked = sorted(ranked, key=key_of)[:4]  # of two tasks
    run = [edited(edit, tmp_path) / "train_policy.py", "--model", tiny_dir, "--lr", 3e-3, *flags,
           "--out"]
    whole, killed, two = (tmp_path / name for name in ("whole", "killed", "two"))
    _, (start, *rows, last) = train(ranked, *run, whole)
    assert last["finished"] == len(steps(whole)) >= 3
    first = 2  # checkpoint
    if edit == "early_stop":
        measured = [row["held_out_loss"] for row in rows if "held_out_loss" in row]
        first = 1 + measured.index(min(measured))
        assert last["finished"] == first + 2 < start["steps"]
    else:
        _, (_, *rows, _) = train(ranked, *run, tmp_path / "close", "--ema", 0)
        assert all(abs(row["margin"]) < 1e-5 for row in rows)
        assert all(abs(row["margin"]) > 1e-4 for row in steps(whole)[1:])
    saved = resumed(run, killed, ranked, first)
    train(ranked, *run, two, ranks=2)
    want, again, of_two = map(weights, (whole, killed, two))
    for name, p in want.items():
        assert p.equal(again[name]) and (p - of_two[name]).abs().mean() < 1e-3
        assert edit != "early_stop" or p.equal(saved[f"best_lm_{name}".replace(".", "_")])


@pytest.mark.full
def test_the_edit_lora(ranked, tiny_dir, tmp_path):
    """Only low-rank updates move, a checkpoint has no others, 2 processes make the same."""
    copy = edited("lora", tmp_path)
    run = [copy / "train_policy.py", "--model", tiny_dir, "--nll_coef", 0, "--lr", 1e-3,
           "--batch_size", 24, "--dtype", "fp32", "--epochs", 1, "--out"]
    whole, killed, two = (tmp_path / name for name in ("whole", "killed", "two"))
    first = train(ranked, *run, whole)[1][1]
    assert first["loss"] == pytest.approx(LN2, abs=1e-5) and first["grad_norm"] > 0
    base, got = weights(tiny_dir), weights(whole)
    assert base.keys() == got.keys()
    for name in base:
        moved = got[name] - base[name]
        if "_proj" not in name:
            assert not moved.any(), name
        else:
            assert 1 <= torch.linalg.matrix_rank(moved, rtol=1e-3) <= 16, name
    saved = resumed(run, killed, ranked, 2)
    saved.pop("lm.lm_head.weight", None)  # torch keeps a tied one
    assert {name[-2:] for name in saved} == {".A", ".B"}
    train(ranked, *run, two, ranks=2)
    for out in (killed, two):
        again = weights(out)
        assert all((again[name] - got[name]).abs().max() < 1e-5 for name in base)


def test_the_edit_marker(tmp_path):
    copy = edited("marker", tmp_path)
    (copy / "tests").mkdir()
    said = script(shutil.copy(f"{ROOT}/tests/toy.py", copy / "tests"), "demos", "--n", 50).stdout
    assert "MY ANSWER IS:" in said and "I WANT TO ANSWER" not in said


WANDB = """import json, os
from types import SimpleNamespace
def record(row):
    with open(os.path.dirname(__file__) + "/calls.jsonl", "a") as f:
        print(json.dumps(row), file=f)
def init(project, config, id, resume):
    record({"project": project, "config": config, "id": id, "resume": resume})
    return SimpleNamespace(id=id or f"new{os.getpid()}", log=lambda row, step: record([row, step]))
"""  # its stand-in


def test_the_edit_csv_has_each_step_once_with_its_held_out_metrics(tmp_path):
    """Also those of a run that was killed after its checkpoint, and trained these steps again."""
    utils = edited_module("csv", tmp_path, "utils")
    out = tmp_path / "out"

    def run(until):
        log = utils.RunLog(SimpleNamespace(out=str(out)))
        log.check({})
        log.start("policy", 5)
        for step in range(log.step, 5):
            log.step_row(time.monotonic(), 10, step=step, loss=until + step / 10)
            if step % 2:
                log.row(step=step, held_out_loss=step / 100)
            if step + 1 == until:
                break  # as if it was killed
        os.close(log.lock)

    run(4)
    (out / "checkpoint-2").mkdir()
    run(5)
    head, *values = (out / "metrics.csv").read_text().splitlines()
    rows = [dict(zip(head.split(","), row.split(","), strict=True)) for row in values]
    assert [(row["step"], row["loss"], row["held_out_loss"]) for row in rows] == [
        ("0", "4.0", ""), ("1", "4.1", "0.01"), ("2", "5.2", ""), ("3", "5.3", "0.03"),
        ("4", "5.4", "")]
    assert all(row["tokens_per_second"] for row in rows)


def test_the_edit_grpo_normalizes_what_can_be_compared(tmp_path, recwarn):
    weigh = edited_module("grpo", tmp_path, "train_policy").weighted_candidates
    scored = [SimpleNamespace(turn=str(x), fields={"advantage": x}) for x in (1.0, 2.0, 6.0)]
    unscored = SimpleNamespace(turn="x", fields={})
    assert weigh([]) == weigh([unscored]) == weigh([unscored, scored[0]]) == []
    gaps = [pair.chosen_score for pair in weigh([unscored, *scored])]
    assert sum(gaps) == pytest.approx(0, abs=1e-5) and gaps == sorted(gaps)
    assert sum(gap ** 2 for gap in gaps) == pytest.approx(3, rel=1e-4)
    assert not recwarn.list


@pytest.mark.full
def test_the_edits_csv_and_wandb(ranked, tiny_dir, tmp_path):
    """The steps are in the CSV. One tracked run has all rows, of rank 0 only, also after a kill; a
    finished run starts none."""
    copy = edited("csv wandb", tmp_path)
    (copy / "wandb.py").write_text(WANDB)
    out = copy / "out"
    run = [copy / "train_policy.py", "--model", tiny_dir, "--batch_size", 24, "--save_every", 1,
           "--out", out]
    script(*run, stdin=ranked, kill=(out / "checkpoint-2", signal.SIGKILL))
    for ranks in (2, 1):
        train(ranked, *run, ranks=ranks)
    head, *values = (out / "metrics.csv").read_text().splitlines()
    assert [dict(zip(head.split(","), row.split(","))) for row in values] == [
        {key: str(value) for key, value in step.items()} for step in steps(out)]
    calls, rows = records((copy / "calls.jsonl").read_text()), metrics(out)
    starts = [row for row in rows if "args" in row]
    assert [call for call in calls if "project" in call] == [
        {"project": "sweet-rl", "config": row["args"], "id": run_id, "resume": "allow"}
        for row, run_id in zip(starts, (None, starts[0]["wandb"]), strict=True)]
    assert starts[0]["wandb"] == starts[1]["wandb"]
    logged = [row for row, step in (call for call in calls if "project" not in call)
              if step == row.get("step")]
    assert logged == [row for row in rows if "args" not in row] and len(logged) == len(calls) - 2


# --- the manual's blocks --------------------------------------------------------------------------

MANUAL = Path(ROOT, "tests/experiments/MANUAL.md").read_text()


@pytest.fixture
def folder(ranked, tiny_dir, tmp_path):
    """The scripts, and what the quickstart leaves in runs/, of a tiny model and a few episodes."""
    copy_scripts(tmp_path)
    (tmp_path / "tests").symlink_to(f"{ROOT}/tests")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "base").symlink_to(tiny_dir)
    for name in ("train", "again", "test-base", "test-sweet"):
        (tmp_path / "runs" / f"{name}.jsonl").write_text(lines(ranked))
    return tmp_path


def block(name):
    """The code block of the manual below a title, or below the comment <!-- name -->."""
    return re.search(rf"(?:## {name}|<!-- {name} -->)\n```\w+\n(.*?)```", MANUAL, re.S)[1]


def run(command, folder):
    """Runs a bash command, with forks for its scripts; returns the CompletedProcess."""
    done = shell(f"set -euo pipefail\n{command}", cwd=folder, timeout=1800, in_forks=1)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.skipif(not shutil.which("jq"), reason="jq is not installed")
def test_the_manuals_lines_of_jq(folder, tasks):
    """Tasks by id or by reward; and scores by which train_policy.py ranks: short is good."""
    runs = folder / "runs"
    (runs / "tasks.jsonl").write_text(lines(tasks))
    first = tasks[0]["task"]["id"]
    run(block("ids").replace("pay-rate4", first), folder)
    assert records((folder / "some.jsonl").read_text()) == [tasks[0]]
    unsolved = {r["task"]["id"] for r in records((folder / "unsolved.jsonl").read_text())}
    assert unsolved == {r["task"]["id"] for r in tasks} != {first}

    run(block("scores"), folder)
    jq = re.search(r"jq -c '(\.dialogue_history.*?)'", block("scores"))[1]
    scored = records(subprocess.run(["jq", "-c", jq], input=(runs / "train.jsonl").read_text(),
                                    text=True, stdout=subprocess.PIPE, check=True).stdout)
    candidates = [c for r in scored for m in agent_messages(r) for c in m["candidates"]]
    assert candidates and all(c["advantage"] == -len(c["token_ids"]) for c in candidates)
    assert len(steps(runs / "short")) > 0


def test_the_manuals_collection_resumes(folder, tasks):
    """After a kill in the middle of a line. Each episode is there once, those before are kept."""
    (folder / "runs" / "tasks.jsonl").write_text(lines(tasks))
    command = block("resume").replace("--max_turns 6", "--max_turns 2")
    run(command, folder)
    path = folder / "runs" / "all.jsonl"
    first, second, *_ = whole = path.read_text().splitlines(keepends=True)
    path.write_text(first + second[:-20])
    run(command, folder)
    assert path.read_text().startswith(first)
    assert sorted(map(key_of, records(path.read_text()))) == sorted(
        key_of(record) for line in whole for record in records(line))


@pytest.mark.full
def test_the_manuals_demonstrations_make_a_base(repo):
    """In small: of a part of them, and of a model whose words are theirs. A guess finds one word
    of eight."""
    (repo / "tests").symlink_to(f"{ROOT}/tests")
    (repo / "demos.py").write_text(block("demonstrations").replace("2000", "800"))
    save(toy.tiny_model(records(run("python demos.py", repo).stdout)), repo / "runs" / "tiny")
    *_, result = records(run(block("base"), repo).stdout)
    assert result["success"] > 0.25 and result["episodes"] == 200


@pytest.mark.full
def test_the_manuals_better_critic_and_figures(folder):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    run(block("better"), folder)
    runs = folder / "runs"
    assert metrics(runs / "better")[0]["args"]["ref_context"] == "agent"
    assert metrics(runs / "sweet-better")[-1]["finished"] == len(steps(runs / "sweet-better")) > 0
    (runs / "better").rename(runs / "critic")
    (runs / "sweet-better").rename(runs / "sweet")
    run(block("Reports and figures"), folder)
    assert "hidden reference" in (folder / "report.html").read_text()
    for name in ("figure.png", "metrics.png"):
        assert (folder / name).read_bytes()[:4] == b"\x89PNG"


@pytest.mark.full
def test_the_manuals_pages(folder):
    pytest.importorskip("playwright", reason="no playwright (MANUAL.md, \"Frontend Design\")")
    if not any(map(shutil.which, BROWSERS)) or not os.path.exists(f"{CACHE}/tailwind.min.css"):
        pytest.skip("no Chromium, or no Tailwind sheet (MANUAL.md, \"Frontend Design\")")
    tiny = folder / "runs" / "compare" / "pages" / "0" / "tiny"
    tiny.parent.mkdir(parents=True)
    save(toy.tiny_model(demos(200, of=toy_pages), 0, toy_pages.PIECES), tiny)
    tiny.with_suffix(".log").touch()  # made already
    small = "METHODS='regression@0 rft' SEEDS=0 N=6 TESTS=1 DEMOS=800"
    run(f"{small} bash tests/experiments/compare.sh pages", folder)
    results = records((folder / "runs" / "results.jsonl").read_text())
    assert [r["system"] for r in results] == ["regression@0", "rft", "base"]


@pytest.mark.full
def test_methods_are_compared_on_a_kind_of_task_of_ones_own(folder, monkeypatch):
    """A waiter's orders in small: both critics, the better one of them, and second rounds."""
    orders = runpy.run_path(f"{ROOT}/tests/experiments/orders.py")
    monkeypatch.setitem(colbench.environments(), "orders", orders["ENVIRONMENTS"]["orders"])
    monkeypatch.setitem(CPU, "ENVIRONMENTS_FILE", f"{ROOT}/tests/experiments/orders.py")
    seed = folder / "runs" / "compare" / "spelled" / "0"
    seed.mkdir(parents=True)
    save(toy.tiny_model(orders["demos"](SimpleNamespace(n=200, seed=0, shown=0.5))), seed / "tiny")
    (seed / "tiny.log").touch()  # made already
    methods = ["eq3-rft", "untrained@0.3", "better", "another", "none", "rft-rft"]
    run(f"SEEDS=0 N=10 TESTS=1 DEMOS=300 METHODS='{' '.join(methods)}' "
        "bash tests/experiments/compare.sh spelled", folder)
    results = records((folder / "runs" / "results.jsonl").read_text())
    assert [r["system"] for r in results] == [*methods, "eq3", "rft", "base"]
    assert results[0]["episodes"] == 4
    run("python tests/experiments/orders.py model --out words", folder)  # as setup words does
    assert (folder / "words" / "config.json").exists()
    scored = [seed / f"scored-{name}.jsonl" for name in ("eq3", "untrained", "better")]
    chosen = run(f"python tests/experiments/choose_critic.py {scored[0]} {scored[1]}",
                 folder).stdout.strip()
    other = {r["task"]["id"]: r["task"]["hidden_information"]
             for r in records((seed / "another.jsonl").read_text())}
    own = {task["id"]: task["hidden_information"]
           for task in records((seed / "tasks.jsonl").read_text())}
    assert sorted(other.values()) == sorted(own.values()) and other != own
    given = [c["advantage"] for r in records((seed / "scored-none.jsonl").read_text())
             for m in agent_messages(r) for c in m.get("candidates", ())]
    assert given and not any(given)
    assert Path(chosen).read_text() == scored[2].read_text()
    flags = {name: metrics(seed / name)[0]["args"]
             for name in ("eq3", "untrained@0.3", "better", "eq3-rft", "rft", "rft-rft")}
    assert {name: (args["loss"], Path(args["model"]).name, args["logprob_weight"])
            for name, args in flags.items()} == {
        "eq3": ("dpo", "base", 0.1), "untrained@0.3": ("dpo", "base", 0.3),
        "better": ("dpo", "base", 0.1), "rft": ("rft", "base", 0), "eq3-rft": ("rft", "eq3", 0),
        "rft-rft": ("rft", "rft", 0)}
    for name in "train", "again-eq3":
        episodes = records((seed / f"{name}.jsonl").read_text())
        assert (name == "train") == any("candidates" in m for r in episodes
                                        for m in agent_messages(r))
    log = (folder / "runs" / "compare.log")
    assert "error" not in log.read_text()
    again = run(f"SEEDS=0 METHODS='{' '.join(methods)}' bash tests/experiments/compare.sh spelled",
                folder)  # all is there
    assert "rft-rft" in again.stderr and "spelled/0/test" not in again.stderr


def test_a_comparison_says_why_it_fails(folder):
    """Not with status 1 and silence: which setups there are, or the last lines of the programs."""
    compare = "bash tests/experiments/compare.sh"
    for wrong in "", "plain nosuch":
        done = shell(f"{compare} {wrong}", cwd=folder)
        assert done.returncode == 2 and "spelled, words" in done.stderr
    done = shell(f"SEEDS='0 1' FLAGS=--nosuch DEMOS=2 {compare} real", cwd=folder, in_forks=1)
    assert done.returncode and "unrecognized arguments: --nosuch" in done.stderr
