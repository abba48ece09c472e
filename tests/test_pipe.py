"""The scripts as a user runs them: pipes, the same bytes again, complaints of bad input."""
import contextlib
import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import colbench
import model as M
import toy
from colbench import agent_messages
from conftest import (HUMAN, ROOT, actions, demos, dialogue, key_of, metrics, records, save,
                      shell, stdin_of, steps, succeed)
from test_model import separate

# An untrained model solves nothing, so a filter gives sample 0 of a task full marks.
PIPE = r"""
set -euo pipefail
solve() {{ sed 's/"sample": 0,\(.*\)"reward": [0-9.]*/"sample": 0,\1"reward": 1.0/'; }}
play() {{
    python collect.py --human tests/toy.py --max_tokens 30 --max_turns 2 "$@" |
        python colbench.py grade
}}
cd {root}
python tests/toy.py demos --n 50 --seed 4 > {out}/demos
python tests/toy.py tasks --n 3 --seed 4 | tee {out}/tasks |
    play --model {model} --seed 5 -k 2 --candidates 4 | tee {out}/played | solve |
    python train_critic.py --model {model} --seed 6 --min_gap 0 --lr 1e-4 --epochs 1 \
        --held_out 0 --out {out}/critic | tee {out}/scored |
    python train_policy.py --model {model} --seed 7 --lr 1e-4 --out {out}/policy
# the policy plays, the critic helps it, and evaluate compares
play --model {out}/policy --best_of 2 --critic {out}/critic < {out}/tasks > {out}/best
python evaluate.py {out}/played {out}/best > {out}/results
"""
FILES = ["demos", "tasks", "played", "scored", "best", "results",
         "critic/model.safetensors", "policy/model.safetensors"]


# --- the whole pipe -------------------------------------------------------------------------------

@pytest.mark.full
def test_one_pipe_gives_a_policy_and_the_same_bytes_again(tiny_dir, tmp_path):
    """In forks of two processes, whose hashes, which order sets, have two seeds."""
    one, two = tmp_path / "1", tmp_path / "2"
    for server, out in enumerate((one, two), 1):
        out.mkdir()
        pipe = PIPE.format(root=ROOT, out=out, model=tiny_dir)
        done = shell(pipe, timeout=600, in_forks=server)
        assert done.returncode == 0, done.stderr
    for name in FILES:
        a, b = ((out / name).read_bytes() for out in (one, two))
        assert a and a == b.replace(str(two).encode(), str(one).encode()), name
    scored = records((one / "scored").read_text())
    assert len(scored) == len(set(map(key_of, scored))) == 6
    assert all(isinstance(x["advantage"], float) for r in scored for x in actions(r))
    played, best = records((one / "results").read_text())
    assert played["system"] == str(one / "played") and best["common"] == 3
    critic, policy = metrics(one / "critic")[0], metrics(one / "policy")[0]
    for row in (scored[0]["meta"], critic, policy, played):
        assert f"python {sys.version.split()[0]}, torch 2." in row["version"]
    for out in (one / "critic", one / "policy"):  # a model, and how it was made
        assert metrics(out)[0]["steps"] == len(steps(out))
        kept = {path.name for path in out.glob("*.py")}  # all that made it
        assert kept >= {"train_critic.py", "model.py", "utils.py", "colbench.py"}
        weights = [Path(folder, "model.safetensors").read_bytes() for folder in (out, tiny_dir)]
        assert weights[0] != weights[1] and M.load(str(out))


def without(x, names):
    """x without the fields of these names, at any depth."""
    if isinstance(x, dict):
        return {name: without(value, names) for name, value in x.items() if name not in names}
    return [without(item, names) for item in x] if isinstance(x, list) else x


@pytest.mark.parametrize("command, sets", [
    ("collect.py --model MODEL --candidates 1 --max_tokens 5",
     {"candidates", "candidates_meta", "usage"}),
    ("train_critic.py --score MODEL --model MODEL --ref_context agent",
     {"advantage", "value"}),
    ("colbench.py grade", {"reward", "reward_by", "tests"})])
def test_a_stage_changes_nothing_but_its_own_fields(command, sets, ranked, tiny_dir):
    """One line in, one line out; what no stage knows survives everywhere."""
    for r in ranked:
        for x in (r, r["task"], r["meta"], r["dialogue_history"][0], *actions(r)):
            x["note"] = {"x": [1, "é", None]}
    got = records(succeed(*command.replace("MODEL", tiny_dir).split(), stdin=ranked).stdout)
    if "collect" in command:  # in the order in which they end
        got, ranked = (sorted(rs, key=key_of) for rs in (got, ranked))
    assert without(got, sets) == without(ranked, sets)
    assert all(name in str(r) for r in got for name in sets)


# --- a template that forgets thoughts -------------------------------------------------------------

FORGETS = """{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\
{{ m['content'].split('</think>')[-1].strip() }}<|end|>{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>{% endif %}{% endif %}"""


def test_each_turn_is_judged_after_the_prompt_that_the_template_renders(tasks, tmp_path):
    """By separate forwards: what collect.py writes, and what an untrained critic says.

    A thought is in its action, but not in later prompts: no prompt extends the turn before.
    """
    path, (made, tokenizer) = str(tmp_path / "model"), toy.tiny_model(demos(200))
    tokenizer.chat_template = FORGETS
    tokenizer.add_tokens(["<think>", "</think>"])
    made.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    save((made, tokenizer), path)
    lm = AutoModelForCausalLM.from_pretrained(path)

    @torch.no_grad()
    def transformers_logps(history, ids):
        text = tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True,
                                             enable_thinking=True)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        return separate(lm, [M.Turn(M.packed(prompt), M.packed(ids))])[0]

    played = succeed("collect.py", "--model", path, *HUMAN, "--thinking", 1, "--max_turns", 3,
                     "--max_tokens", 25, "--candidates", 2, stdin=tasks)
    rs = records(played.stdout)
    for history, (m, *candidates) in (turn for r in rs for turn in M.turn_actions(r)):
        if "think>" not in str(history):  # noise may spell it
            want = transformers_logps(history, m["token_ids"])
            assert torch.allclose(torch.tensor(m["logprobs"]), want, atol=1e-3)
            for c in candidates:
                want = transformers_logps(history, c["token_ids"]).sum().item()
                assert c["logprob"] == pytest.approx(want, abs=1e-2)
    for m in (m for r in rs for m in agent_messages(r)):
        m |= {"content": "what is it?", "output": "rate</think>what is it?",
              "candidates": [{"output": "color</think>which color?"}]}
        del m["token_ids"], m["logprobs"]
    untrained = succeed("train_critic.py", "--score", path, "--model", path, "--ref_context",
                        "agent", stdin=rs)
    for r in records(untrained.stdout):
        for history, (m, c) in M.turn_actions(r):
            seen = colbench.with_hidden(history, colbench.hidden_information(r["task"]))
            for action in (c, m):
                text = action["output"] + "<|end|>"
                ids = tokenizer(text, add_special_tokens=False)["input_ids"]
                want = (transformers_logps(seen, ids).mean()
                        - transformers_logps(history, ids).mean())
                assert action["advantage"] == pytest.approx(want.item(), abs=2e-4) != 0


# --- bad input ------------------------------------------------------------------------------------

TASK = {"id": "a", "problem_description": "p", "ground_truth": "def f(): return 1",
        "test_cases": {"test1": "f()"}}
PLAYED = {"task": TASK, "dialogue_history": dialogue("p", "q"), "reward": 0.5,
          "meta": {"thinking": 1}}
OTHER = {**TASK, "ground_truth": "def f(): return 2"}
BARE, ONCE = [TASK], [PLAYED]
COMPLAINTS = [  # command, its stdin, a part of the line that says what is wrong
    ("evaluate.py gone.jsonl", "", "error: gone.jsonl: No such file"),
    ("evaluate.py", [PLAYED, {**PLAYED, "reward": None}], "line 2: this record has no 'reward'"),
    ("colbench.py grade", [{"task": {**TASK, "test_cases": {}}, "answer": "x"}],
     "the task 'p' has no test_cases"),
    ("colbench.py check", [{**TASK, "test_cases": None}], "the task 'p' has no test_cases"),
    ("train_critic.py --score MODEL", "", "m is no trained critic, which names its own"),
    ("train_critic.py --out x --epoch 1", "", "--epoch 1"),  # no abbreviations
    ("train_critic.py --model MODEL", ONCE, "no task has a pair"),
    ("collect.py --model no/such --human fixed:no", BARE, "no model at 'no/such'"),
    ("collect.py --model MODEL", " \n", "stdin is empty"),
    ("collect.py --model MODEL", ONCE, "already has a dialogue"),
    ("collect.py --model MODEL --candidates 2", ONCE, "task a was sampled with --thinking 1"),
    ("collect.py --model MODEL", BARE, "--human is missing; --help says"),
    (f"collect.py --model MODEL --human {ROOT}/utils.py", BARE, "utils.py defines no reply()"),
    ("collect.py --model MODEL --human gpt-4o", BARE, "--human gpt-4o: give the http://host:port"),
    ("collect.py --model MODEL --human fixed:no", [TASK, OTHER], "line 2: the task"),
    ("collect.py --model MODEL --human fixed:no", "{\n", "stdin, line 1: not JSON"),
    ("collect.py --model MODEL --human fixed:no", BARE, "the weights in"),
    ("collect.py --best_of 2", "", "--critic"),
    *((f"collect.py {flags}", "", "must be") for flags in (
        "--temperature nan", "--temperature -1", "--top_p 0")),
    *((f"collect.py {flag} 0", "", f"argument {flag}: invalid positive value: '0'") for flag in (
        "-k", "--max_turns", "--max_tokens", "--concurrency", "--best_of")),
    ("collect.py --temperature 0 --candidates 2", "", "--temperature 0 makes all --candidates"),
    ("collect.py --human_params [1", "", "--human_params: invalid")]


@pytest.fixture(scope="module")
def unloadable(tiny_dir, tmp_path_factory):
    """The tiny model without a weight, so that what is told was told before it was loaded."""
    base = shutil.copytree(tiny_dir, tmp_path_factory.mktemp("unloadable") / "m")
    save_file({"no weight": torch.zeros(1)}, base / "model.safetensors")
    return str(base)


@pytest.mark.parametrize("command, given, message", COMPLAINTS)
def test_what_is_wrong_is_told_in_a_line_before_anything_is_made(command, given, message,
                                                                 unloadable, tmp_path, capfd):
    name, *flags = (unloadable if word == "MODEL" else word for word in command.split())
    script = import_module(name.removesuffix(".py"))
    with pytest.raises(SystemExit) as e, stdin_of(given), contextlib.chdir(tmp_path):
        script.main(script.get_args(flags))
    (out, err), code = capfd.readouterr(), e.value.code
    said = [*err.splitlines(), code] if isinstance(code, str) else err.splitlines()
    errors = [line for line in said if "error: " in line]
    assert errors == said[-1:] and message in errors[0] and not out
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
