"""The scripts as a user runs them: pipes, the same bytes again, complaints of bad input."""
import json
import os
import shlex

import pytest

import model as M
from colbench import agent_messages, task_id
from conftest import PLAY, ROOT, complaint, lines, records, script, shell

REAL = os.path.join(ROOT, "..", "shared", "colbench", "backend_tasks.jsonl")
MAKE = os.path.join(ROOT, "..", "shared", "models", "make.sh")
# An untrained model solves nothing, so this filter gives sample 0 of a task full marks.
GRAFT = """python -c "
import json, sys
for line in sys.stdin:
    r = json.loads(line)
    r['reward'] = 1.0 if r['sample'] == 0 else r['reward'] * 0.5
    print(json.dumps(r))
" """
weights = lambda out: open(os.path.join(out, "model.safetensors"), "rb").read()


# --- the whole pipe -------------------------------------------------------------------------------

@pytest.fixture(params=["tiny", "SmolLM2-135M-Instruct"])
def chat_model(request, tiny_dir, tmp_path):
    """(model, kind of tasks): the tiny one; a real one, after a warm-up on demonstrations."""
    if request.param == "tiny":
        return tiny_dir, "backend"
    if not os.path.exists(MAKE):
        pytest.skip("no ../shared/models beside this checkout, which makes SmolLM2-135M-Instruct")
    done = shell(f"""set -o pipefail; bash {shlex.quote(MAKE)} {tmp_path} &&
        python colbench.py demos --kind english --n 8 | python train_policy.py --loss rft --all 1 \
            --model {tmp_path}/smollm2 --out {tmp_path}/base --epochs 1 --batch_size 4 --lr 1e-4""", timeout=600)
    assert done.returncode == 0, done.stderr
    return f"{tmp_path}/base", "english"


@pytest.mark.full
def test_one_pipe_from_tasks_to_a_policy(chat_model, tmp_path):
    model, kind = chat_model
    m, d = shlex.quote(model), shlex.quote(str(tmp_path))
    done = shell(f"""set -o pipefail
        python colbench.py tasks --kind {kind} --n 3 --seed 1 |
        python collect.py --model {m} -k 2 --candidates 4 --max_tokens 40 --max_turns 4 | {GRAFT} |
        python train_critic.py --model {m} --out {d}/critic --pairs all --margin 0 --lr 1e-4 \
            --epochs 1 --held_out 0 |
        tee {d}/scored.jsonl | python train_policy.py --model {m} --out {d}/policy --lr 1e-4""",
                 timeout=600)
    assert done.returncode == 0, done.stderr
    scored = records(open(tmp_path / "scored.jsonl").read())
    assert len(scored) == 6 and len({(r["task"]["id"], r["sample"]) for r in scored}) == 6
    for message in (m for r in scored for m in agent_messages(r)):
        assert len(message["candidates"]) == 4
        assert all(isinstance(x["advantage"], float) for x in (message, *message["candidates"]))
    (summary,) = records(done.stdout)
    assert summary["summary"] == "train_policy" and summary["out"] == f"{tmp_path}/policy"
    for out in (tmp_path / "critic", tmp_path / "policy"):  # a model, and how it was made
        first, *rows = records(open(out / "metrics.jsonl").read())
        assert first["args"]["lr"] == 1e-4 and {"argv", "version"} <= set(first)
        assert first["steps"] == sum("step" in row for row in rows)
        assert weights(out) != weights(model) and M.load(str(out))
        assert any(name.endswith(".py") for name in os.listdir(out))
    # the policy plays again, the critic helps it, and evaluate compares
    test = script("colbench.py", "tasks", "--kind", kind, "--split", "test", "--n", 3).stdout
    flags = ["--model", tmp_path / "policy", "--max_tokens", 20, "--max_turns", 3]
    for name, more in (("plain", []), ("best", ["--best_of", 2, "--critic", tmp_path / "critic"])):
        played = script("collect.py", *flags, *more, stdin=test)
        (tmp_path / f"{name}.jsonl").write_text(played.stdout)
    done = script("evaluate.py", tmp_path / "plain.jsonl", tmp_path / "best.jsonl")
    assert done.returncode == 0, done.stderr
    plain, best = records(done.stdout)
    assert plain["system"] == "plain" and best["minus_first"]["clusters"] == 3


def test_unknown_fields_survive_each_stage(tasks, tiny_dir, tmp_path):
    note = {"x": [1, "é", None]}
    played = script("collect.py", "--model", tiny_dir, *PLAY, stdin=[
        {"note": note, **t, "meta": {"mine": 1}, "task": {**t["task"], "note": note}}
        for t in tasks[:2]])
    rs = records(played.stdout)
    assert len(rs) == 4, played.stderr
    for r in rs:
        assert r["note"] == r["task"]["note"] == note
        assert r["meta"]["mine"] == 1 and r["meta"]["model"] == tiny_dir
        r["reward"] = float(r["sample"])
        for m in r["dialogue_history"]:
            m["note"] = note
        for m in agent_messages(r):
            m["candidates"][0]["note"] = note
    critic = ["--model", tiny_dir, "--out", tmp_path / "c", "--held_out", 0]
    scored = script("train_critic.py", *critic, stdin=rs)
    after = records(scored.stdout)
    assert len(after) == 4, scored.stderr
    for r in after:
        for m in agent_messages(r):
            for x in (m, *m["candidates"]):
                del x["advantage"]
    assert after == rs  # one line in, one line out, in order, nothing else changed


def test_unknown_fields_survive_grading(tasks):
    rs = [{"note": [1], **t, "answer": t["task"]["ground_truth"]} for t in tasks]
    done = script("colbench.py", "grade", stdin=rs)
    got = records(done.stdout)
    assert [r["reward"] for r in got] == [1.0] * len(tasks), done.stderr
    assert all({k: r[k] for k in sent} == sent for r, sent in zip(got, rs))


@pytest.mark.full
@pytest.mark.parametrize("stage", ["tasks", "demos", "collect", "train_critic"])
def test_head_ends_a_stage_cleanly(stage, rewarded, tiny_dir, tmp_path):
    padded = [r | {"padding": "x" * 50_000} for r in rewarded]  # more than a pipe holds
    (tmp_path / "in.jsonl").write_text(lines(padded))
    command = {"tasks": "python colbench.py tasks --n 5000", "demos": "python colbench.py demos",
               "collect": "python colbench.py tasks --n 40 | python collect.py --concurrency 2 "
                          f"--model {tiny_dir} --max_tokens 20 --max_turns 2",
               "train_critic": f"python train_critic.py --model {tiny_dir} --out {tmp_path}/c "
                               f"--held_out 0 --epochs 1 < {tmp_path}/in.jsonl"}[stage]
    done = shell(f"{command} | head -1; echo ${{PIPESTATUS[@]}} >&2")
    assert len(records(done.stdout)) == 1
    assert set(done.stderr.splitlines()[-1].split()) == {"0"}, done.stderr
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


# --- the same command again -----------------------------------------------------------------------

@pytest.mark.full
def test_train_critic_gives_the_same_bytes_and_weights(rewarded, tiny_dir, tmp_path):
    flags = ["--model", tiny_dir, "--lr", 1e-4, "--epochs", 1, "--batch_size", 2, "--held_out", 0]
    runs = [script("train_critic.py", *flags, "--out", tmp_path / out, "--seed", seed,
                   stdin=rewarded, fresh=out == "b")
            for out, seed in (("a", 5), ("b", 5), ("c", 6))]
    assert all(r.returncode == 0 for r in runs), runs[0].stderr
    assert runs[0].stdout == runs[1].stdout and weights(tmp_path / "a") == weights(tmp_path / "b")
    assert runs[0].stdout != runs[2].stdout and weights(tmp_path / "a") != weights(tmp_path / "c")


# --- bad input ------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, flags", [
    ("colbench.py", ["tasks", "--nn", "3"]),
    ("collect.py", ["--temprature", "1"]),
    ("train_critic.py", ["--out", "x", "--learning_rate", "1"]),
    ("train_critic.py", ["--out", "x", "--epoch", "1"]),  # no abbreviations
    ("train_critic.py", []),
    ("train_policy.py", ["--out", "x", "--loss", "ppo"]),
    ("evaluate.py", ["--seed", "1"])])
def test_wrong_flags(name, flags, tmp_path):
    done = script(name, *flags, cwd=tmp_path)
    complaint(done)
    assert done.returncode == 2 and not os.listdir(tmp_path)


def same_rewards(rs):
    return [{**r, "reward": 0.0} for r in rs]


def without(key):
    return lambda rs: [{k: v for k, v in r.items() if k != key} for r in rs]


@pytest.mark.parametrize("name", ["train_critic.py", "train_policy.py"])
@pytest.mark.parametrize("change, message", [
    (same_rewards, "no task has a solved and a worse"),
    (without("dialogue_history"), "line 1: no 'dialogue_history'"),
    (without("reward"), "line 1: no 'reward'"),
    (lambda rs: [], "stdin is empty"),
    ("model", "no model at"),
    ("out", "exists already")],
    ids=["no pairs", "no dialogue", "no reward", "empty", "no model", "out exists"])
def test_trainers_complain_and_leave_nothing(name, change, message, rewarded, tiny_dir, tmp_path):
    out, model = tmp_path / "out", "no/such/dir" if change == "model" else tiny_dir
    if change == "out":
        out.mkdir()
        (out / "precious").write_text("mine")
    flags = ["--loss", "mtdpo"] if name == "train_policy.py" else []
    given = change(rewarded) if callable(change) else rewarded
    done = script(name, "--model", model, "--out", out, *flags, stdin=given)
    assert message in complaint(done)
    if change == "out":
        assert os.listdir(out) == ["precious"] and (out / "precious").read_text() == "mine"
    else:
        assert not out.exists()


@pytest.mark.parametrize("loss, message", [
    ("dpo", "advantage"), ("rft", "no trajectory is solved")])
def test_the_policy_says_what_it_lacks(loss, message, episodes, tiny_dir, tmp_path):
    """Candidates without the critic's advantages; no solved trajectory."""
    flags = ["--loss", loss, "--model", tiny_dir, "--out", tmp_path / "p"]
    done = script("train_policy.py", *flags, stdin=same_rewards(episodes))
    assert message in complaint(done) and not (tmp_path / "p").exists()


# --- real tasks -----------------------------------------------------------------------------------

@pytest.mark.full
@pytest.mark.skipif(not os.path.exists(REAL), reason=f"no real ColBench tasks at {REAL}")
def test_real_tasks_run_through(tiny_dir, tmp_path):
    tasks = [{"task": json.loads(line)} for line in open(REAL).readlines()[:2]]
    flags = ["-k", 2, "--candidates", 2, "--max_tokens", 30, "--max_turns", 3]
    done = script("collect.py", "--model", tiny_dir, "--human", "fixed:I do not know.", *flags,
                  stdin=tasks)
    rs = records(done.stdout)
    assert len(rs) == 4, done.stderr
    for r in rs:
        assert r["task"]["id"] == task_id(r["task"]) and r["task"]["kind"] == "backend"
        assert set(r["tests"]) == set(r["task"]["test_cases"])
        first, *rest = (m["content"] for m in r["dialogue_history"] if m["role"] == "user")
        assert first.endswith(r["task"]["problem_description"]) and set(rest) <= {"I do not know."}
        assert r["reward"] == 0
    critic = ["--model", tiny_dir, "--pairs", "all", "--margin", 0, "--held_out", 0,
              "--out", tmp_path / "c"]
    assert "no pairs in 4 trajectories" in complaint(script("train_critic.py", *critic, stdin=rs))
    rs[0]["reward"] = 0.1
    scored = records(script("train_critic.py", *critic, stdin=rs).stdout)
    assert len(scored) == 4 and all("advantage" in c for r in scored for m in agent_messages(r)
                                    for c in m["candidates"])
    assert len(records(script("evaluate.py", stdin=scored).stdout)) == 1
