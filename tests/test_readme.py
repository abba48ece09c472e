"""The README: its commands use flags that exist, its edits work.

.ci/run runs the quickstart and the tests themselves."""
import glob
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from importlib import import_module

import pytest
import torch
from safetensors.torch import load_file

import colbench
import model
from conftest import CPU, ROOT, records, script

SCRIPTS = ("collect", "train_critic", "train_policy", "evaluate", "colbench")


def commands(text):
    """[(script, argv)] of every `script.py ...` in a text; a pipe, `>` or line end closes it."""
    text = re.sub(r"\$\(\(.*?\)\)", "1", text)
    text = re.sub(r"\$\([^()]*\)", "X", re.sub(r"\\\n|(?<=\|)\n", " ", text))
    for line in text.splitlines():
        for part in re.split(r"\s[|]\s*|\s(?:[<>]|>>)\s|;|&&|\s#|\)", line + " "):
            found = re.search(rf"\b({'|'.join(SCRIPTS)})\.py\s+(.*)", part + " ")
            if found and not part.lstrip().startswith(("|", "`")):
                argv = [a for a in shlex.split(found[2]) if a not in ('"$@"', "$@", "...", "…")]
                # a variable is some flag's value, or else several flags
                yield found[1], [re.sub(r"^\$\w+$", "1", a) for before, a in zip(["-", *argv], argv)
                                 if before.startswith("-") or not a.startswith("$")]


def all_commands():
    readme = "".join(open(f"{ROOT}/{path}", encoding="utf-8").read()
                     for path in ("README.md", "tests/experiments/MANUAL.md"))
    for block in re.findall(r"```bash\n(.*?)```", readme, re.S):
        yield from commands(block.replace("play()", "# play()"))
    for name in SCRIPTS:
        yield from commands(import_module(name).__doc__)
    for path in glob.glob(f"{ROOT}/tests/experiments/*.sh"):
        yield from commands(open(path, encoding="utf-8").read())


@pytest.mark.parametrize("script, argv", list(all_commands()),
                         ids=lambda x: x if isinstance(x, str) else " ".join(x)[:60])
def test_commands_parse(script, argv):
    if script in ("train_critic", "train_policy") and "--out" not in argv:
        argv = [*argv, "--out", "runs/x"]  # an excerpt of a command
    import_module(script).get_args(argv)


def benchmark(name, flags):
    """Runs a benchmark on something tiny."""
    command = [sys.executable, f"{ROOT}/tests/bench_{name}.py", *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=CPU)
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.full
@pytest.mark.parametrize("name, flags", [
    ("grade", "--rounds 1 --tasks 3"),
    ("memory", "--records 20 grade"), ("tokens", ""),
    ("train", "--repeats 1 --shape tiny --jobs dpo critic scoring"),
    ("collect", "--episodes 4 --batch 4 --delay 0.01 --max_tokens 8 --max_turns 2 --repeats 1"),
    ("collect", "--sampling . --tasks 1 --candidates 2 --max_tokens 4 --max_turns 1 --repeats 1")])
def test_the_benchmarks_run(name, flags):
    benchmark(name, flags)


def test_there_are_commands():
    found = [script for script, _ in all_commands()]
    assert all(found.count(script) >= 2 for script in SCRIPTS), found


# --- "Change X -> edit Y": each patch of tests/experiments/edits is applied to a copy -------------

def edited(name, folder):
    """The path of a copy of the scripts with a patch applied."""
    for path in glob.glob(f"{ROOT}/*.py"):
        shutil.copy(path, folder)
    patch = f"{ROOT}/tests/experiments/edits/{name}.diff"
    subprocess.run(["git", "apply", "--whitespace=error", patch], cwd=folder, check=True)
    return folder


def first_step(out):
    """The metrics of a run's first step."""
    rows = records(open(f"{out}/metrics.jsonl").read())
    return next(row for row in rows if row.get("step") == 0)


def train(copy, name, stdin, tiny_dir, *flags, ranks=1):
    """Runs a trainer of the copy; returns its first step's metrics and its stdout's records."""
    out = copy / "out"
    done = script(f"{copy}/{name}.py", "--model", tiny_dir, "--out", out, "--nll_coef", 0, *flags,
                  stdin=stdin, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return first_step(out), records(done.stdout)


@pytest.fixture
def ranked(rewarded):
    """Episodes whose candidates have advantages."""
    for r in rewarded:
        for message in colbench.agent_messages(r):
            for i, candidate in enumerate(message["candidates"]):
                candidate["advantage"] = float(i)
    return rewarded


def test_every_edit_is_in_the_readme_and_has_a_test():
    edits = {os.path.basename(path) for path in glob.glob(f"{ROOT}/tests/experiments/edits/*")}
    named = set(re.findall(r"\b\w+\.diff\b", open(f"{ROOT}/README.md").read()))
    tested = set(re.findall(r'edited\("(\w+)"', open(__file__).read()))
    assert edits == named == {f"{name}.diff" for name in tested}


@pytest.mark.full
def test_the_edit_ipo(ranked, tiny_dir, tmp_path):
    copy = edited("ipo", tmp_path)
    first, _ = train(copy, "train_policy", ranked, tiny_dir, "--beta", 0.1)
    assert first["loss"] == pytest.approx(25)  # (0 - 1 / (2 beta)) ** 2


@pytest.mark.full
def test_the_edit_grpo(ranked, tiny_dir, tmp_path):
    copy = edited("grpo", tmp_path)
    first, _ = train(copy, "train_policy", ranked, tiny_dir, "--loss", "grpo", "--batch_size", 8)
    assert abs(first["loss"]) < 1  # ratios of 1: the mean of some normalised advantages
    assert first["grad_norm"] > 0


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
def test_the_edit_margin_by_gap(world, rewarded, tiny_dir, tmp_path):
    copy = edited("margin_by_gap", tmp_path)
    first, _ = train(copy, "train_critic", rewarded, tiny_dir, "--held_out", 0, ranks=world)
    assert first["loss"] == pytest.approx(math.log(1 + math.exp(0.7)))


@pytest.mark.full
def test_the_edit_sqrt_length(rewarded, tiny_dir, tmp_path):
    copy = edited("sqrt_length", tmp_path)
    flags = "--lr", 1e-3, "--epochs", 1, "--held_out", 0
    _, scored = train(copy, "train_critic", rewarded, tiny_dir, *flags)
    plain = script("train_critic.py", "--score", 1, "--out", copy / "out", stdin=scored)
    compared = 0
    for ours, theirs in zip(scored, records(plain.stdout), strict=True):
        for a, b in zip(colbench.agent_messages(ours), colbench.agent_messages(theirs)):
            length = len(a["token_ids"])
            assert a["advantage"] == pytest.approx(b["advantage"] * length ** 0.5, rel=1e-3)
            compared += length > 1 and a["advantage"] != 0
    assert compared


@pytest.mark.full
def test_the_edit_marker(tmp_path):
    copy = edited("marker", tmp_path)
    demos = script(f"{copy}/colbench.py", "demos", "--n", 50).stdout
    assert "MY ANSWER IS:" in demos and "I WANT TO ANSWER" not in demos
    train(copy, "train_policy", demos, "tiny", "--loss", "rft", "--all", 1, "--epochs", 1)
    assert "MY ANSWER IS:" in open(copy / "out" / "tokenizer.json").read()  # one token of its own


@pytest.mark.full
def test_the_edit_csv(ranked, tiny_dir, tmp_path):
    copy = edited("csv", tmp_path)
    train(copy, "train_policy", ranked, tiny_dir, "--batch_size", 8)
    head, *rows = (copy / "out" / "metrics.csv").read_text().splitlines()
    steps = [r for r in records((copy / "out" / "metrics.jsonl").read_text()) if "step" in r]
    assert [dict(zip(head.split(","), row.split(","))) for row in rows] == [
        {key: str(value) for key, value in step.items()} for step in steps]


@pytest.mark.full
def test_the_edit_lora(ranked, tiny_dir, tmp_path):
    """Only low-rank updates move, a checkpoint has them alone, 2 processes make the same."""
    copy = edited("lora", tmp_path)
    flags = "--lr", 1e-3, "--batch_size", 8, "--dtype", "fp32"
    first, _ = train(copy, "train_policy", ranked, tiny_dir, *flags)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5) and first["grad_norm"] > 0
    base, got = (load_file(f"{path}/model.safetensors") for path in (tiny_dir, copy / "out"))
    assert base.keys() == got.keys()
    for name in base:
        moved = got[name] - base[name]
        if "_proj" not in name:
            assert not moved.any(), name
        else:
            assert 1 <= torch.linalg.matrix_rank(moved, rtol=1e-3) <= 16, name
    for world, out in (1, "whole"), (2, "two"):
        run = [f"{copy}/train_policy.py", "--model", tiny_dir, "--out", copy / out,
               "--nll_coef", 0, *flags]
        if world == 1:  # killed and resumed
            done = script(*run, "--save_every", 1, stdin=ranked,
                          kill=(lambda: [*(copy / out).glob("checkpoint-2")], signal.SIGKILL))
            (file,) = (copy / out).glob("checkpoint-*[0-9]/*.safetensors")
            assert {name.split(".")[-1] for name in load_file(file) if name[:3] == "lm."} == {
                "A", "B"}
            run += ["--resume", 1]
        done = script(*run, stdin=ranked, ranks=world)
        assert done.returncode == 0, done.stderr
        again = load_file(copy / out / "model.safetensors")
        for name in base:
            assert (again[name] - got[name]).abs().max() < 1e-5, name


@pytest.mark.full
@pytest.mark.parametrize("name, world", [("train_policy", 1), ("train_critic", 2)])
def test_lora_on_a_base_in_16_bits(name, world, ranked, tiny_dir, tmp_path):
    copy, base = edited("lora", tmp_path), tmp_path / "base"
    lm, tokenizer = model.load(tiny_dir, dtype=torch.bfloat16)
    model.save(lm, tokenizer, str(base))
    head = ["--head", "regression"] if name == "train_critic" else []
    first, _ = train(copy, name, ranked, base, "--dtype", "bf16", *head, ranks=world)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-3) and first["grad_norm"] > 0
