"""value.diff on regression.diff: test_readme.py runs this in a copy of the scripts with both."""
import math
import statistics

import pytest
import torch

import model as M
import train_critic
from colbench import agent_messages
from conftest import train


def test_the_loss_is_the_cross_entropy_of_success():
    chosen, rejected = [0.5, -1.0, 2.0], [0.3, -0.2]  # logits, one a turn
    pair = M.Pair(tuple("abc"), tuple("de"))
    logits = {turn: torch.tensor([x]) for turn, x in zip("abcde", chosen + rejected)}
    loss, metrics = train_critic.critic_loss(None, [pair], logits, None)
    p = [1 / (1 + math.exp(-x)) for x in chosen + rejected]
    want = -sum(map(math.log, p[:3])) - sum(math.log(1 - x) for x in p[3:])
    assert loss.item() == pytest.approx(want / 5)
    assert metrics["margin"] == pytest.approx(0.5 - 0.05)


def test_a_critic_learns(rewarded, tiny_dir, tmp_path):
    for r in rewarded:
        for m in agent_messages(r):  # what tells the two apart
            del m["token_ids"], m["logprobs"]
            m["output"] = "what is the rate?" if r["reward"] == 1 else "what is the color?"
    got, (_, *rows, _) = train(rewarded, "train_critic.py", "--out", tmp_path / "c", "--model",
                               tiny_dir, "--held_out", 0, "--lr", 1e-3, "--epochs", 24,
                               "--batch_size", 4)
    assert rows[-1]["loss"] < 0.3 < rows[0]["loss"]
    value = {(r["task"]["id"], r["sample"]): statistics.mean(
        m["advantage"] for m in agent_messages(r)) for r in got}
    assert all(value[task, 0] > value[task, 1] for task, _ in value)
