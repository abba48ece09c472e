"""The scripts as a user runs them: pipes, a kill and --resume, the same bytes again, complaints of bad input."""
import asyncio
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

import collect
import model as M
from colbench import task_id
from conftest import PLAY, ROOT, lines, records, script, shell
from train_critic import advantage

REAL = os.path.join(ROOT, "..", "shared", "colbench", "backend_tasks.jsonl")
# An untrained model solves nothing, so this filter gives sample 0 of a task full marks.
GRAFT = """python -c "
import json, sys
for line in sys.stdin:
    r = json.loads(line)
    r['reward'] = 1.0 if r['sample'] == 0 else r['reward'] * 0.5
    print(json.dumps(r))
" """
agent = lambda r: [m for m in r["dialogue_history"] if m["role"] == "assistant"]
weights = lambda out: open(os.path.join(out, "model.safetensors"), "rb").read()


# --- the whole pipe ---------------------------------------------------------------------------------------------------

def test_one_pipe_from_tasks_to_a_policy(tiny_dir, tmp_path):
    m, d = shlex.quote(tiny_dir), shlex.quote(str(tmp_path))
    done = shell(f"""set -o pipefail
        python colbench.py tasks --n 3 --seed 1 |
        python collect.py --model {m} -k 2 --candidates 4 --max_tokens 40 --max_turns 4 | {GRAFT} |
        python train_critic.py --model {m} --out {d}/critic --pairs all --margin 0 --lr 1e-4 --epochs 1 --held_out 0 |
        tee {d}/scored.jsonl | python train_policy.py --model {m} --out {d}/policy --lr 1e-4""")
    assert done.returncode == 0, done.stderr
    scored = records(open(tmp_path / "scored.jsonl").read())
    assert len(scored) == 6 and len({(r["task"]["id"], r["sample"]) for r in scored}) == 6
    for message in (m for r in scored for m in agent(r)):
        assert len(message["candidates"]) == 4
        assert all(isinstance(x["advantage"], float) for x in (message, *message["candidates"]))
    (summary,) = records(done.stdout)
    assert summary["summary"] == "train_policy" and summary["out"] == f"{tmp_path}/policy"
    for out in (tmp_path / "critic", tmp_path / "policy"):  # a model, and how it was made
        first, *rows = records(open(out / "metrics.jsonl").read())
        assert first["args"]["lr"] == 1e-4 and first["steps"] == sum("step" in row for row in rows) and {"argv", "version"} <= set(first)
        assert weights(out) != weights(tiny_dir) and M.load(str(out))
        assert any(name.endswith(".py") for name in os.listdir(out))
    # the policy plays again, the critic helps it, and evaluate compares
    test = script("colbench.py", "tasks", "--split", "test", "--n", 3).stdout
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
        {"note": note, **t, "meta": {"mine": 1}, "task": {**t["task"], "note": note}} for t in tasks[:2]])
    rs = records(played.stdout)
    assert len(rs) == 4, played.stderr
    for r in rs:
        assert r["note"] == r["task"]["note"] == note and r["meta"]["mine"] == 1 and r["meta"]["model"] == tiny_dir
        r["reward"] = float(r["sample"])
        for m in r["dialogue_history"]:
            m["note"] = note
        for m in agent(r):
            m["candidates"][0]["note"] = note
    scored = script("train_critic.py", "--model", tiny_dir, "--out", tmp_path / "c", "--held_out", 0, stdin=rs)
    after = records(scored.stdout)
    assert len(after) == 4, scored.stderr
    for r in after:
        for m in agent(r):
            for x in (m, *m["candidates"]):
                del x["advantage"]
    assert after == rs  # one line in, one line out, in order, nothing else changed


def test_unknown_fields_survive_grading(tasks):
    rs = [{"note": [1], **t, "answer": t["task"]["ground_truth"]} for t in tasks]
    done = script("colbench.py", "grade", stdin=rs)
    got = records(done.stdout)
    assert [r["reward"] for r in got] == [1.0] * len(tasks), done.stderr
    assert all({k: r[k] for k in sent} == sent for r, sent in zip(got, rs))


@pytest.mark.parametrize("stage", ["tasks", "demos", "collect", "train_critic"])
def test_head_ends_a_stage_cleanly(stage, rewarded, tiny_dir, tmp_path):
    (tmp_path / "in.jsonl").write_text(lines(r | {"padding": "x" * 50_000} for r in rewarded))  # more than a pipe holds
    command = {"tasks": "python colbench.py tasks --n 5000", "demos": "python colbench.py demos",
               "collect": f"python colbench.py tasks --n 40 | python collect.py --model {tiny_dir} --concurrency 2 "
                          "--max_tokens 20 --max_turns 2",
               "train_critic": f"python train_critic.py --model {tiny_dir} --out {tmp_path}/c --held_out 0 --epochs 1 "
                               f"< {tmp_path}/in.jsonl"}[stage]
    done = shell(f"{command} | head -1; echo ${{PIPESTATUS[@]}} >&2")
    assert len(records(done.stdout)) == 1
    assert set(done.stderr.splitlines()[-1].split()) == {"0"}, done.stderr
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


# --- the same command again -------------------------------------------------------------------------------------------

def test_collect_gives_the_same_bytes(tasks, collected, tiny_dir):
    again = script("collect.py", "--model", tiny_dir, *PLAY, stdin=tasks, fresh=True)
    assert again.stdout == collected
    assert len({(r["task"]["id"], r["sample"]) for r in records(collected)}) == 2 * len(tasks)
    said = [tuple(agent(r)[0]["token_ids"]) for r in records(collected)]
    assert len(set(said)) == len(said)  # each sample has its own draws
    drawn = [tuple(c["token_ids"]) for r in records(collected) for m in agent(r) for c in m["candidates"]]
    assert len(set(drawn)) == len(drawn)


def test_train_critic_gives_the_same_bytes_and_weights(rewarded, tiny_dir, tmp_path):
    runs = [script("train_critic.py", "--model", tiny_dir, "--out", tmp_path / out, "--seed", seed, "--lr", 1e-4,
                   "--epochs", 1, "--batch_size", 2, "--held_out", 0, stdin=rewarded, fresh=out == "b")
            for out, seed in (("a", 5), ("b", 5), ("c", 6))]
    assert all(r.returncode == 0 for r in runs), runs[0].stderr
    assert runs[0].stdout == runs[1].stdout and weights(tmp_path / "a") == weights(tmp_path / "b")
    assert runs[0].stdout != runs[2].stdout and weights(tmp_path / "a") != weights(tmp_path / "c")


def test_a_draw_does_not_depend_on_its_company(tasks, collected, tiny_dir):
    """Batches of another size, other tasks beside it: the same words (the numbers only but for rounding)."""
    alone = script("collect.py", "--model", tiny_dir, *PLAY, "--concurrency", 1, "--max_batch_tokens", 100, stdin=tasks[1:2])
    want = {(r["task"]["id"], r["sample"]): r for r in records(collected)}
    for r in records(alone.stdout):
        there = want[r["task"]["id"], r["sample"]]
        assert [m["token_ids"] for m in agent(r)] == [m["token_ids"] for m in agent(there)]
        assert [[c["token_ids"] for c in m["candidates"]] for m in agent(r)] == \
            [[c["token_ids"] for c in m["candidates"]] for m in agent(there)]


# --- what collect samples ---------------------------------------------------------------------------------------------

def test_the_samplers_logprobs_are_the_models(episodes, tiny_dir):
    """Padding, the cache, dropped rows: none of it changes what the model would say of the same tokens."""
    model, tokenizer = M.load(tiny_dir)
    for r in episodes:
        own = M.turns_of(tokenizer, r)
        for m, (prompt, action), logps in zip(agent(r), own, M.score(model, own, 4096)):
            assert list(action) == m["token_ids"] and len(action) <= 40
            assert torch.allclose(logps, torch.tensor(m["logprobs"]), rtol=0, atol=1e-4)
            alternatives = [(prompt, tuple(c["token_ids"])) for c in m["candidates"]]
            for c, logps in zip(m["candidates"], M.score(model, alternatives, 4096)):
                assert abs(logps.sum().item() - c["logprob"]) < 1e-3


def players(tiny_dir, *flags):
    return asyncio.run(collect.Players().make(collect.get_args(["--model", tiny_dir, *map(str, flags)])))


def test_the_sampler_draws_from_the_models_distribution(tiny_dir):
    for temperature in (1.0, 0.5):
        p = players(tiny_dir, "--max_tokens", 1, "--temperature", temperature, "--max_batch_tokens", 10 ** 9)
        prompt = p.render([{"role": "user", "content": "write f"}])
        (drawn,) = asyncio.run(ask(p.engine, [(prompt, [(0, j) for j in range(6000)])]))
        with torch.no_grad():
            logits = M.load_lm(tiny_dir, "cpu")[0](torch.tensor([prompt])).logits[0, -1].double()
        logps = (logits / temperature).log_softmax(-1)
        seen = torch.tensor([logps[ids[0]] for ids, _ in drawn])
        mean = (logps.exp() * logps).sum()
        variance = (logps.exp() * (logps - mean) ** 2).sum()
        assert abs(seen.mean() - mean) < 5 * (variance / 6000) ** 0.5
    greedy = players(tiny_dir, "--max_tokens", 1, "--temperature", 0)
    (drawn,) = asyncio.run(ask(greedy.engine, [(prompt, [(0, 0), (0, 1)])]))
    assert [ids for ids, _ in drawn] == [[logits.argmax().item()]] * 2


async def ask(engine, requests):
    return await asyncio.gather(*map(engine, requests))


def test_best_of_sends_the_critics_favourite(tasks, rewarded, tiny_dir, tmp_path):
    flags = ["--model", tiny_dir, "--out", tmp_path / "c", "--lr", 1e-3, "--held_out", 0]
    done = script("train_critic.py", *flags, stdin=rewarded)
    assert done.returncode == 0, done.stderr
    p = players(tiny_dir, "--best_of", 5, "--critic", tmp_path / "c", "--max_tokens", 12)
    task, favourites = tasks[0]["task"], []
    history = [{"role": "user", "content": task["problem_description"]}]
    hidden = [{"role": "user", "content": f"Hidden reference:\n{task['ground_truth']}\n\n{history[0]['content']}"}]
    for turn in range(6):
        key = (0, task["id"], 0, turn)
        (drawn,) = asyncio.run(ask(p.engine, [(p.render(history), [(*key, j) for j in range(5)])]))
        turns = [(tuple(p.render(hidden)), tuple(ids)) for ids, _ in drawn]
        now, ref = (M.score(M.load(path)[0], turns, 4096) for path in (str(tmp_path / "c"), tiny_dir))
        scores = [advantage(a, b, "turn").item() for a, b in zip(now, ref)]
        for p.args.prior in (0, 0.1):
            sent = asyncio.run(p.act(task, history, key, 0))["token_ids"]
            favourites.append(max(range(5), key=lambda i: scores[i] + p.args.prior * sum(drawn[i][1])))
            assert sent == drawn[favourites[-1]][0]
    assert len(set(favourites)) > 1 and favourites[::2] != favourites[1::2]


def test_dialogues_that_exist_only_get_candidates(episodes, tiny_dir):
    bare = [{**r, "dialogue_history": without("candidates")(r["dialogue_history"])} for r in episodes]
    done = script("collect.py", "--model", tiny_dir, *PLAY, stdin=bare)
    assert done.returncode == 0, done.stderr
    by_key = lambda rs: {(r["task"]["id"], r["sample"]): r["dialogue_history"] for r in rs}
    assert by_key(records(done.stdout)) == by_key(episodes)  # the very same ones


# --- a killed run -----------------------------------------------------------------------------------------------------

def test_resume_after_kill_gives_each_episode_once(tiny_dir, tmp_path):
    file = tmp_path / "all.jsonl"
    flags = ["--model", tiny_dir, "-k", "7", "--max_tokens", "30", "--max_turns", "3", "--concurrency", "3",
             "--resume", str(file)]
    tasks = script("colbench.py", "tasks", "--n", 6).stdout
    with open(file, "ab") as out:
        run = subprocess.Popen([sys.executable, "collect.py", *flags], stdin=subprocess.PIPE, stdout=out,
                               stderr=subprocess.DEVNULL, cwd=ROOT)
        run.stdin.write(tasks.encode())
        run.stdin.close()
        end = time.time() + 60
        while file.read_bytes().count(b"\n") < 5 and time.time() < end and run.poll() is None:
            time.sleep(0.005)
        run.send_signal(signal.SIGKILL)
        run.wait()
    lines = file.read_bytes().splitlines(keepends=True)
    killed = b"".join(lines[:5])  # the kill may come a little late: in the middle of the first task, and of a line
    file.write_bytes(killed + lines[0][:len(lines[0]) // 2])
    with open(file, "ab") as out:
        done = subprocess.run([sys.executable, "collect.py", *flags], input=tasks, stdout=out, text=True, cwd=ROOT,
                              stderr=subprocess.PIPE, timeout=100)
    assert done.returncode == 0, done.stderr
    rs = records(file.read_text())
    keys = [(r["task"]["id"], r["sample"]) for r in rs]
    assert len(keys) == len(set(keys)) == 42 and file.read_bytes().startswith(killed)
    assert set(keys) == {(r["task"]["id"], s) for r in records(tasks) for s in range(7)}


@pytest.mark.parametrize("lacks", ["problem_description", "ground_truth"])
def test_what_is_no_episode_in_a_resumed_file_is_named(lacks, tasks, episodes, tiny_dir, tmp_path):
    file, bad = tmp_path / "all.jsonl", json.loads(json.dumps(episodes[1]))
    del bad["task"][lacks]
    file.write_text(lines([episodes[0], bad, *episodes[2:]]))
    flags = ["--model", tiny_dir, "-k", 2, "--max_tokens", 5, "--resume", file]
    error = complaint(script("collect.py", *flags, stdin=tasks))
    assert error.startswith(f"error: {file}, line 2: no 'task.{lacks}' in this record")
    done = script("collect.py", *flags, "--skip_bad", 1, stdin=tasks)
    (again,) = records(done.stdout)  # it is played again
    assert (again["task"]["id"], again["sample"]) == (bad["task"]["id"], bad["sample"])


def test_a_file_is_resumed_only_with_the_weights_that_played_it(tasks, tiny_dir, tmp_path):
    base, file = shutil.copytree(tiny_dir, tmp_path / "base"), tmp_path / "all.jsonl"
    play = lambda: script("collect.py", "--model", base, "--max_tokens", 5, "--max_turns", 2,
                          "--resume", file, stdin=tasks)
    rs = records(play().stdout)
    assert {r["meta"]["model_weights"] for r in rs} == {M.weights_digest(str(base))}
    file.write_text(lines(rs[:-1]))
    state = load_file(base / "model.safetensors")
    save_file({k: v * 1.001 for k, v in state.items()}, base / "model.safetensors")
    error = complaint(play())
    assert error == (f"error: --resume {file} holds episodes of other weights than those at "
                     f"--model {base}: take the old weights, or another file")
    save_file(state, base / "model.safetensors")  # the same again, in another file
    (again,) = records(play().stdout)
    assert (again["task"], again["answer"]) == (rs[-1]["task"], rs[-1]["answer"])
    for r in rs:  # of before this was noted: nobody can know
        del r["meta"]["model_weights"]
    file.write_text(lines(rs[:-1]))
    assert len(records(play().stdout)) == 1


# --- bad input --------------------------------------------------------------------------------------------------------

def complaint(done):
    """The one line that says what is wrong; argparse's comes with its usage and exit status 2."""
    assert done.returncode != 0 and not done.stdout and "Traceback" not in done.stderr, done.stderr
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    assert len(errors) == 1 and done.stderr.splitlines()[-1] == errors[0], done.stderr
    if not done.stderr.startswith("usage:"):  # collect.py may say before what it did until then
        assert done.returncode == 1 and all("episodes" in x for x in done.stderr.splitlines()[:-1]), done.stderr
    return errors[0]


@pytest.mark.parametrize("name, flags", [("colbench.py", ["tasks", "--nn", "3"]), ("collect.py", ["--temprature", "1"]),
                                         ("train_critic.py", ["--out", "x", "--learning_rate", "1"]),
                                         ("train_critic.py", ["--out", "x", "--epoch", "1"]),  # no abbreviations
                                         ("train_critic.py", []),
                                         ("train_policy.py", ["--out", "x", "--loss", "ppo"]),
                                         ("evaluate.py", ["--seed", "1"])])
def test_wrong_flags(name, flags, tmp_path):
    done = script(name, *flags, cwd=tmp_path)
    complaint(done)
    assert done.returncode == 2 and not os.listdir(tmp_path)


TASK = {"problem_description": "p", "ground_truth": "def f(): return 1", "test_cases": {"test1": "f()"}}


@pytest.mark.parametrize("stdin, message", [
    (lines([{"task": TASK}])[:-3], "line 1: not JSON"), ("[1]\n", "line 1: not a JSON object"), ("", "stdin is empty"),
    (lines([{"task": {**TASK, "test_cases": None}}]), "line 1: no 'task.test_cases'"),
    (lines([{"tusk": TASK}]), "line 1: no 'task.problem_description'"),
    (lines([{"task": TASK, "dialogue_history": [{"role": "user", "content": "p"}]}]), "a dialogue already")],
    ids=["cut", "list", "empty", "no tests", "no task", "played"])
def test_collect_complains(stdin, message, tiny_dir):
    assert message in complaint(script("collect.py", "--model", tiny_dir, stdin=stdin))


@pytest.mark.parametrize("flags, message", [(["--model", "no/such/dir"], "no model at 'no/such/dir'"),
                                            (["--best_of", 2], "--critic"), (["--human", "me"], "--human 'me'"),
                                            (["--best_of", 2, "--critic", "no/critic"], "no/critic"),
                                            (["--agent_prompt", "no/file"], "no/file")])
def test_collect_complains_of_flags(flags, message, tiny_dir, tasks):
    assert message in complaint(script("collect.py", "--model", tiny_dir, *flags, stdin=tasks))


def test_a_bad_line_later_on_loses_nothing_before_it(tasks, tiny_dir):
    done = script("collect.py", "--model", tiny_dir, "--max_tokens", 20, "--max_turns", 2, "--concurrency", 1,
                  stdin=lines(tasks[:2]) + "{\n")
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("error: stdin, line 3: not JSON")
    assert "Traceback" not in done.stderr and len(records(done.stdout)) == 2


def same_rewards(rs):
    return [{**r, "reward": 0.0} for r in rs]


def without(key):
    return lambda rs: [{k: v for k, v in r.items() if k != key} for r in rs]


@pytest.mark.parametrize("name", ["train_critic.py", "train_policy.py"])
@pytest.mark.parametrize("change, message", [
    (same_rewards, "no task has a solved and a worse"), (without("dialogue_history"), "line 1: no 'dialogue_history'"),
    (without("reward"), "line 1: no 'reward'"), (lambda rs: [], "stdin is empty"), ("model", "no model at"),
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


@pytest.mark.parametrize("loss, message", [("dpo", "advantage"), ("rft", "no trajectory is solved")])
def test_the_policy_says_what_it_lacks(loss, message, episodes, tiny_dir, tmp_path):
    """Candidates without the critic's advantages; no solved trajectory."""
    flags = ["--loss", loss, "--model", tiny_dir, "--out", tmp_path / "p"]
    done = script("train_policy.py", *flags, stdin=same_rewards(episodes))
    assert message in complaint(done) and not (tmp_path / "p").exists()


# --- real tasks -------------------------------------------------------------------------------------------------------

@pytest.mark.skipif(not os.path.exists(REAL), reason="no real ColBench tasks at ../shared/colbench/backend_tasks.jsonl")
def test_real_tasks_run_through(tiny_dir, tmp_path):
    tasks = [{"task": json.loads(line)} for line in open(REAL).readlines()[:2]]
    done = script("collect.py", "--model", tiny_dir, "--human", "fixed:I do not know.", "-k", 2, "--candidates", 2,
                  "--max_tokens", 30, "--max_turns", 3, stdin=tasks)
    rs = records(done.stdout)
    assert len(rs) == 4, done.stderr
    for r in rs:
        assert r["task"]["id"] == task_id(r["task"]) and r["task"]["kind"] == "backend"
        assert set(r["tests"]) == set(r["task"]["test_cases"])
        first, *rest = (m["content"] for m in r["dialogue_history"] if m["role"] == "user")
        assert first.endswith(r["task"]["problem_description"]) and set(rest) <= {"I do not know."}
        assert r["reward"] == 0
    critic = ["--model", tiny_dir, "--pairs", "all", "--margin", 0, "--held_out", 0, "--out", tmp_path / "c"]
    assert "no pairs in 4 trajectories" in complaint(script("train_critic.py", *critic, stdin=rs))
    rs[0]["reward"] = 0.1
    scored = records(script("train_critic.py", *critic, stdin=rs).stdout)
    assert len(scored) == 4 and all("advantage" in c for r in scored for m in agent(r) for c in m["candidates"])
    assert len(records(script("evaluate.py", stdin=scored).stdout)) == 1
