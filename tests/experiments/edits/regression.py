"""regression.diff: test_readme.py runs this in a copy of the scripts and tests with the edit."""
import math
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import model as M
import train_critic
from colbench import agent_messages
from conftest import HUMAN, actions, records, succeed, train, turns_of
from test_model import ids_of


def test_the_loss_is_eq_2_of_values_without_the_nll():
    r = random.Random(0)
    pair, args = M.Pair(tuple("abc"), tuple("def")), SimpleNamespace(beta=0.7, nll_coef=0.5)
    values = {turn: torch.tensor([r.gauss(0, 1)]) for turn in "abcdef"}
    ref_logps = train_critic.reference_logps(values)
    loss, metrics = train_critic.critic_loss(args, [pair], values, ref_logps)
    chosen, rejected = (sum(values[turn] for turn in side) for side in ("abc", "def"))
    margin = 0.7 * (chosen - rejected).item()
    assert metrics["margin"] == pytest.approx(margin)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-margin)))
    assert train_critic.advantage(values["a"], ref_logps["a"]) == values["a"]


def test_a_turns_value_is_the_head_on_the_mean_state_of_all_its_tokens(tiny_dir, episodes):
    model, chat = M.load(tiny_dir, head=True)
    turns = [turn for r in episodes[:3] for turn in turns_of(chat, r)]
    reference, _ = M.load_lm(tiny_dir, "cpu")
    for (prompt, action), value in M.forward(model, turns)[0].items():
        states = reference.model(ids_of(prompt + action)).last_hidden_state[0]
        assert torch.allclose(value, F.linear(states.mean(0), model.score.weight), atol=1e-5)


@pytest.mark.parametrize("world, dtype", [(1, "fp32"), (2, "bf16")])
def test_a_critic_learns_scores_and_chooses(world, dtype, rewarded, tasks, tiny_dir, tmp_path):
    for r in rewarded:
        for m in agent_messages(r):  # its text tells the two apart, ids are another model's
            m["token_ids"], m["logprobs"] = [10 ** 9], [0.0]
            m["output"] = "what is the rate?" if r["reward"] == 1 else "what is the color?"
    critic = ["train_critic.py", "--out", tmp_path / "c"]
    flags = ["--model", tiny_dir, "--held_out", 0, "--lr", 1e-3, "--beta", 1, "--epochs", 8,
             "--batch_size", 4, "--dtype", dtype]
    first, (_, *rows, last) = train(rewarded, *critic, *flags, ranks=world)
    assert rows[-1]["loss"] < 0.1 < rows[0]["loss"] and last["finished"] == len(rows)
    again = records(succeed(critic[0], "--score", critic[2], "--dtype", dtype, stdin=rewarded,
                            ranks=world).stdout)
    for r, s in zip(first, again, strict=True):
        for x, y in zip(actions(r), actions(s), strict=True):
            assert x["advantage"] == pytest.approx(y["advantage"], abs=1e-4, rel=1e-4)
    play = ["--model", tiny_dir, *HUMAN, "--best_of", 3, "--critic", tmp_path / "c", "--max_turns",
            2]
    done = succeed("collect.py", *play, "--max_tokens", 20, stdin=tasks[:1])
    assert len(records(done.stdout)) == 1
