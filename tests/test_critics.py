"""The rivals of eq. 3: a regression head, a value head, the training-free gain; each scores, resumes and chooses."""
import math
import os
import statistics

import pytest
import torch
import torch.nn.functional as F

import colbench
import model as M
from conftest import critic_turns, lines, records, script, shell


def test_a_turns_value_is_the_head_on_the_mean_state_of_all_its_tokens(tiny_dir, episodes):
    model, tokenizer = M.load(tiny_dir, head=True)
    turns = [turn for r in episodes[:3] for turn in critic_turns(tokenizer, r, "regression")]
    reference, _ = M.load_lm(tiny_dir, "cpu")
    for (prompt, action), value in zip(turns, M.action_logps(model, turns)):
        states = reference.model(torch.tensor([[*prompt, *action]])).last_hidden_state[0]
        assert torch.allclose(value, F.linear(states.mean(0), model.score.weight), atol=1e-5)


@pytest.mark.parametrize("head, world", [("regression", 1), ("regression", 2), ("value", 1)])
def test_a_critic_with_a_head_learns_scores_resumes_and_chooses(head, world, rewarded, tiny_dir, tasks, tmp_path):
    for r in rewarded:  # what tells the two apart
        for m in colbench.agent_messages(r):
            m["output"] = "what is the rate?" if r["reward"] == 1 else "what is the color?"
    epochs, reached = (8, 0.1) if head == "regression" else (24, 0.3)
    flags = ["--model", tiny_dir, "--head", head, "--held_out", 0, "--lr", 1e-3, "--beta", 1, "--epochs", epochs,
             "--batch_size", 4, "--save_every", 3]
    (tmp_path / "in").write_text(lines(rewarded))
    launch = f"torchrun --nproc_per_node={world}" if world > 1 else "python"
    done = shell(f"{launch} train_critic.py {' '.join(map(str, flags))} --out {tmp_path}/c < {tmp_path}/in")
    assert done.returncode == 0, done.stderr
    first, *steps, _, _ = records((tmp_path / "c" / "metrics.jsonl").read_text())
    assert steps[-1]["loss"] < reached < steps[0]["loss"]
    model, tokenizer = M.load(tiny_dir, head=True)  # step 0, pair by pair, from eq. 2
    sums = {(r["task"]["id"], r["sample"]): sum(M.action_logps(model, critic_turns(tokenizer, r, "regression"))).item()
            for r in rewarded}
    losses = [math.log1p(math.exp(sums[task, 1] - sums[task, 0])) for task in {task for task, _ in sums}]
    assert first["pairs"] == len(losses)
    if head == "regression":
        assert steps[0]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    out = records(done.stdout)
    of_turns = sum if head == "regression" else statistics.mean
    total = {(r["task"]["id"], r["sample"]): of_turns([m["advantage"] for m in colbench.agent_messages(r)]) for r in out}
    assert all(total[task, 0] > total[task, 1] for task, _ in total)
    again = script("train_critic.py", *flags, "--resume", 1, "--out", tmp_path / "c", stdin=rewarded)
    for r, s in zip(out, records(again.stdout)):
        for m, n in zip(colbench.agent_messages(r), colbench.agent_messages(s)):
            assert m["advantage"] == pytest.approx(n["advantage"], abs=1e-4)
    done = script("collect.py", "--model", tiny_dir, "--best_of", 3, "--critic", tmp_path / "c", "--max_turns", 2,
                  "--max_tokens", 20, stdin=tasks[:1])
    assert done.returncode == 0 and len(records(done.stdout)) == 1, done.stderr


@pytest.mark.parametrize("head, world", [("logratio", 1), ("regression", 1), ("gain", 1), ("logratio", 2)])
def test_a_finished_critic_scores_a_stream_as_it_scored_what_it_learned_from(head, world, rewarded, tiny_dir, tmp_path):
    flags = f"--out {tmp_path}/c --model {tiny_dir} --head {head} --normalize none --ref_context agent --held_out 0 --lr 1e-3"
    first = script("train_critic.py", *flags.split(), stdin=rewarded)
    assert first.returncode == 0, first.stderr
    many = [{**r, "sample": 100 * i + r["sample"]} for i in range(10) for r in rewarded]  # two portions
    for r in many:
        del r["reward"]
    (tmp_path / "in").write_text(lines(many) + "no record\n" + lines(many[:1]))
    launch = f"torchrun --nproc_per_node={world}" if world > 1 else "python"
    done = shell(f"{launch} train_critic.py --score 1 --out {tmp_path}/c < {tmp_path}/in")
    assert done.returncode and "error: stdin, line 81: not JSON" in done.stderr and done.stderr.count("error: ") == 1
    want, got = records(first.stdout), records(done.stdout)
    assert len(got) == len(many) == 80
    moved = 0
    for i, r in enumerate(got):
        assert {**r, "dialogue_history": 0} == {**many[i], "dialogue_history": 0}
        for m, n in zip(colbench.agent_messages(r), colbench.agent_messages(want[i % len(want)]), strict=True):
            for a, b in zip([m, *m["candidates"]], [n, *n["candidates"]], strict=True):
                assert a["advantage"] == pytest.approx(b["advantage"], abs=1e-4, rel=1e-4)
                moved += abs(b["advantage"]) > 1e-3
    assert moved > 100
    done = script("train_critic.py", "--score", 1, "--out", tiny_dir, stdin=rewarded)
    assert done.returncode == 1 and done.stderr.startswith("error: no critic in") and done.stderr.count("\n") == 1


def test_gain_trains_nothing_and_is_how_much_likelier_the_reference_gets(rewarded, tiny_dir, tasks, tmp_path):
    done = script("train_critic.py", "--model", tiny_dir, "--head", "gain", "--out", tmp_path / "c", stdin=rewarded)
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(tmp_path / "c")) == ["critic.json", "metrics.jsonl", "reference.safetensors", "train_critic.py"]
    model, tokenizer = M.load_lm(tiny_dir, "cpu")

    def logp(history, text):
        prompt = M.render(tokenizer, history)
        answer = M.plain_ids(tokenizer, f"{colbench.ANSWER}\n{text}") + M.end_of_turn(tokenizer)
        logps = model(torch.tensor([[*prompt, *answer]])).logits[0].log_softmax(-1)[len(prompt) - 1:-1]
        return logps.gather(1, torch.tensor(answer)[:, None]).mean().item()
    for r in records(done.stdout)[:2]:
        for t, m in enumerate(r["dialogue_history"]):
            for a in [m, *m["candidates"]] if m["role"] == "assistant" else ():
                says = {"role": "assistant", "content": colbench.read_action(a["output"], False)[0]}
                history, text = r["dialogue_history"][:t], r["task"]["ground_truth"]
                assert a["advantage"] == pytest.approx(logp([*history, says], text) - logp(history, text), abs=1e-4)
    again = script("train_critic.py", "--model", tiny_dir, "--head", "gain", "--resume", 1, "--out", tmp_path / "c",
                   stdin=rewarded)
    assert again.returncode == 0 and again.stdout == done.stdout, again.stderr
    done = script("collect.py", "--model", tiny_dir, "--best_of", 3, "--critic", tmp_path / "c", "--max_turns", 2,
                  "--max_tokens", 20, stdin=tasks[:1])
    assert done.returncode == 0 and len(records(done.stdout)) == 1, done.stderr
    done = script("train_critic.py", "--model", tiny_dir, "--head", "gain", "--dry_run", 8, "--out", tmp_path / "d",
                  stdin=rewarded)
    assert done.returncode == 1 and done.stderr == "error: --dry_run: --head gain trains nothing\n"
