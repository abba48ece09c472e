"""The rivals of eq. 3, a regression head and a value head: each scores, resumes and chooses."""
import io
import math
import shutil
import statistics
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import colbench
import model as M
import train_critic as tc
from conftest import complaint, critic_turns, lines, records, script


def test_a_turns_value_is_the_head_on_the_mean_state_of_all_its_tokens(tiny_dir, episodes):
    model, tokenizer = M.load(tiny_dir, head=True)
    turns = [turn for r in episodes[:3] for turn in critic_turns(tokenizer, r, "regression")]
    reference, _ = M.load_lm(tiny_dir, "cpu")
    for (prompt, action), value in zip(turns, M.action_logps(model, turns)):
        states = reference.model(torch.tensor([[*prompt, *action]])).last_hidden_state[0]
        assert torch.allclose(value, F.linear(states.mean(0), model.score.weight), atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("head, world", [("regression", 1), ("regression", 2), ("value", 1)])
def test_a_critic_with_a_head_learns_scores_resumes_and_chooses(head, world, rewarded, tiny_dir,
                                                                tasks, tmp_path):
    for r in rewarded:  # what tells the two apart
        for m in colbench.agent_messages(r):
            m["output"] = "what is the rate?" if r["reward"] == 1 else "what is the color?"
    epochs, reached = (8, 0.1) if head == "regression" else (24, 0.3)
    flags = ["--model", tiny_dir, "--head", head, "--held_out", 0, "--lr", 1e-3, "--beta", 1,
             "--epochs", epochs, "--batch_size", 4, "--save_every", 3, "--out", tmp_path / "c"]
    done = script("train_critic.py", *flags, stdin=rewarded, ranks=world)
    assert done.returncode == 0, done.stderr
    first, *steps, last = records((tmp_path / "c" / "metrics.jsonl").read_text())
    assert steps[-1]["loss"] < reached < steps[0]["loss"]
    assert last["finished"] == len(steps)
    model, tokenizer = M.load(tiny_dir, head=True)  # step 0, pair by pair, from eq. 2
    key = lambda r: (r["task"]["id"], r["sample"])
    sums = {key(r): sum(M.action_logps(model, critic_turns(tokenizer, r, "regression"))).item()
            for r in rewarded}
    tasks_of = {task for task, _ in sums}
    losses = [math.log1p(math.exp(sums[task, 1] - sums[task, 0])) for task in tasks_of]
    assert first["pairs"] == len(losses)
    if head == "regression":
        assert steps[0]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    out = records(done.stdout)
    of_turns = sum if head == "regression" else statistics.mean
    total = {key(r): of_turns([m["advantage"] for m in colbench.agent_messages(r)]) for r in out}
    assert all(total[task, 0] > total[task, 1] for task, _ in total)
    again = script("train_critic.py", *flags, "--resume", 1, stdin=rewarded)
    for r, s in zip(out, records(again.stdout)):
        for m, n in zip(colbench.agent_messages(r), colbench.agent_messages(s)):
            assert m["advantage"] == pytest.approx(n["advantage"], abs=1e-4)
    play = ["--model", tiny_dir, "--best_of", 3, "--critic", tmp_path / "c", "--max_turns", 2]
    done = script("collect.py", *play, "--max_tokens", 20, stdin=tasks[:1])
    assert done.returncode == 0 and len(records(done.stdout)) == 1, done.stderr


@pytest.mark.full
@pytest.mark.parametrize("head, world", [("logratio", 1), ("regression", 1), ("logratio", 2)])
def test_a_finished_critic_scores_a_stream_as_it_scored_what_it_learned_from(head, world, rewarded,
                                                                             tiny_dir, tmp_path):
    critic = ["train_critic.py", "--out", tmp_path / "c"]
    first = script(*critic, "--model", tiny_dir, "--head", head, "--normalize", "none",
                   "--ref_context", "agent", "--held_out", 0, "--lr", 1e-3, stdin=rewarded)
    assert first.returncode == 0, first.stderr
    many = [{**r, "sample": 100 * i + r["sample"]} for i in range(10) for r in rewarded]
    for r in many:
        del r["reward"]
    done = script(*critic, "--score", 1, stdin=lines(many) + "no record\n", ranks=world)
    assert done.returncode and "error: stdin, line 81: not JSON" in done.stderr
    assert done.stderr.count("error: ") == 1 and done.stdout == ""
    done = script(*critic, "--score", 1, stdin=many, ranks=world)
    assert done.returncode == 0, done.stderr
    want, got = records(first.stdout), records(done.stdout)
    assert len(got) == len(many) == 80
    moved = 0
    for i, r in enumerate(got):
        assert {**r, "dialogue_history": 0} == {**many[i], "dialogue_history": 0}
        both = map(colbench.agent_messages, (r, want[i % len(want)]))
        for m, n in zip(*both, strict=True):
            for a, b in zip([m, *m["candidates"]], [n, *n["candidates"]], strict=True):
                assert a["advantage"] == pytest.approx(b["advantage"], abs=1e-4, rel=1e-4)
                moved += abs(b["advantage"]) > 1e-3
    assert moved > 100
    done = script("train_critic.py", "--score", 1, "--out", tiny_dir, stdin=rewarded)
    assert done.returncode == 1 and done.stderr.startswith("error: no critic in")
    assert done.stderr.count("\n") == 1


def test_what_a_message_holds_under_turn_passes_through(rewarded, tiny_dir, tmp_path):
    for r in rewarded:
        for i, m in enumerate(r["dialogue_history"]):
            m["turn"] = i
    flags = ["--model", tiny_dir, "--held_out", 0, "--epochs", 1, "--out", tmp_path / "c"]
    done = script("train_critic.py", *flags, stdin=rewarded)
    assert done.returncode == 0, done.stderr
    for r, sent in zip(records(done.stdout), rewarded, strict=True):
        for m, n in zip(r["dialogue_history"], sent["dialogue_history"], strict=True):
            assert ("advantage" in m) == (m["role"] == "assistant")
            assert m["turn"] == n["turn"] and m.keys() - {"advantage"} == n.keys()


def test_a_small_share_still_holds_one_task_out(rewarded, tiny_dir, tmp_path):
    """So that the accuracy on held-out pairs says something where tasks are few."""
    flags = ["--model", tiny_dir, "--epochs", 1, "--held_out"]
    held = {}
    for share in (0, 0.001):
        out = tmp_path / str(share)
        done = script("train_critic.py", *flags, share, "--out", out, stdin=rewarded)
        assert done.returncode == 0, done.stderr
        first, *_, last = records((out / "metrics.jsonl").read_text())
        held[share] = last["held_out_pairs"], first["tasks"], last["held_out_accuracy"]
        pairs, tasks, accuracy = held[0]
    assert (pairs, accuracy) == (0, None)
    assert held[0.001][0] > 0 and held[0.001][1] == tasks - 1 and held[0.001][2] in (0, 1)


def test_one_task_is_never_held_out(rewarded, tiny_dir, monkeypatch):
    """Whatever is drawn for it."""
    one = [r for r in rewarded if r["task"]["id"] == rewarded[0]["task"]["id"]]
    for seed in range(30):
        flags = ["--model", tiny_dir, "--out", "none", "--seed", str(seed)]
        monkeypatch.setattr(sys, "stdin", io.BytesIO(lines(one).encode()))
        _, train, held, *_ = tc.prepare(tc.get_args(flags), [])
        assert len(train) == 1 and not held


def test_a_critic_whose_reference_has_changed_scores_nothing(rewarded, tiny_dir, tmp_path):
    base, out = shutil.copytree(tiny_dir, tmp_path / "base"), tmp_path / "c"
    flags = ["train_critic.py", "--model", base, "--epochs", 1, "--out", out]
    assert script(*flags, stdin=rewarded).returncode == 0
    state = load_file(base / "model.safetensors")
    save_file({k: v * 1.001 for k, v in state.items()}, base / "model.safetensors")
    error = complaint(script(*flags, "--score", 1, stdin=rewarded))
    assert error == (f"error: {base} has other weights now than the model that the critic in {out} "
                     "began as")
    shutil.rmtree(base)
    error = complaint(script(*flags, "--score", 1, stdin=rewarded))
    assert error.startswith(f"error: no model at '{base}'")


def test_the_teacher_is_the_model_with_hidden_information_less_without(rewarded, tiny_dir,
                                                                       tmp_path):
    for r in rewarded:
        r["reward"] = 0  # it needs no pairs
    flags = ["train_critic.py", "--out", tmp_path / "c"]
    done = script(*flags, "--model", tiny_dir, "--head", "teacher", stdin=rewarded)
    assert done.returncode == 0, done.stderr
    model, tokenizer = M.load(tiny_dir)
    reads, largest = {"head": "logratio", "ref_context": "agent"}, 0
    for r in records(done.stdout):
        for t, message in enumerate(r["dialogue_history"]):
            if message["role"] == "user":
                continue
            actions = [message, *message["candidates"]]
            with_c, without = (
                tc.critic_turns({**reads, "hidden_info": c}, tokenizer, r["task"],
                                r["dialogue_history"][:t], actions) for c in (1, 0))
            for action, (turn, _), (ref, _) in zip(actions, with_c, without, strict=True):
                p, q = M.action_logps(model, [turn, ref])
                assert action["advantage"] == pytest.approx((p - q).mean().item(), abs=1e-4)
                largest = max(largest, abs(action["advantage"]))
    assert largest > 1e-3
    again = script(*flags, "--score", 1, stdin=rewarded)
    for r, s in zip(records(done.stdout), records(again.stdout), strict=True):
        for m, n in zip(colbench.agent_messages(r), colbench.agent_messages(s), strict=True):
            assert m["advantage"] == pytest.approx(n["advantage"], abs=1e-4)
