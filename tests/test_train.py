"""Both trainers: losses against plain loops, pairs, what c reaches; many processes, kills, --out.

The oracle of the runs is `whole`: the same job in one process that nobody disturbs.
"""
import contextlib
import functools
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
from collections import Counter
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

import model as M
import train_critic
import train_policy
import utils
import colbench
from colbench import agent_messages, read_records, task_id
from conftest import (CPU, ROOT, actions, change_weights, complaint, copy_scripts, demos,
                      descendants, dialogue, gone, lines, metrics, plain_ids, read_by, records,
                      script, stdin_of, steps, succeed, uncut, until, weights)
from experiments import choose_critic
from model import Action, Pair, Trajectory
from test_model import FAMILIES, SLOW, save_strong, separate

# --- the losses: the oracle is floats and loops, written from the equations -----------------------

@pytest.mark.parametrize("loss", ["critic", "dpo", "mtdpo", "rft"])
def test_a_loss_is_that_of_its_equation(loss):
    """Eq. 2, whose advantages are eq. 3; eq. 4, of all tokens of a side; the NLL.

    Of one to three pairs, whose turns differ in number and length: the loss is a mean over pairs,
    but rft's over all tokens. The policy logs the mean change of each side's log-prob.
    """
    if loss == "critic":
        trainer, of_tokens, batch_loss = train_critic, statistics.fmean, train_critic.critic_loss
    else:
        trainer, of_tokens, batch_loss = train_policy, sum, train_policy.LOSSES[loss]
    exact = functools.partial(pytest.approx, rel=1e-9)
    mean = statistics.fmean
    for seed, (beta, nll_coef) in enumerate(3 * [(0.1, 0.01), (1.0, 0.0), (2.0, 1.0)]):
        r, pairs, logps, ref = random.Random(seed), [], {}, {}
        losses, margins, chosen_tokens, changes = [], [], [], {"chosen": [], "rejected": []}
        for i in range(1 + seed // 3):
            values, turns = [], [[(i, side, t) for t in range(r.randint(1, 3))] for side in (0, 1)]
            for side, of_side in zip(("chosen", "rejected"), turns):
                ratios = []
                for turn in of_side:
                    pi, pi_ref = ([-3 * r.random() for _ in range(n)]
                                  for n in 2 * [r.randrange(1, 10)])
                    logps[turn], ref[turn] = (torch.tensor(x, dtype=torch.float64)
                                              for x in (pi, pi_ref))
                    ratios.append([x - y for x, y in zip(pi, pi_ref)])
                values.append(sum(map(of_tokens, ratios)))
                changes[side].append(sum(map(sum, ratios)))
            pairs.append(Pair(*map(tuple, turns)))
            chosen = [logps[turn].tolist() for turn in turns[0]]
            chosen_tokens += sum(chosen, [])
            margins.append(beta * (values[0] - values[1]))
            parts = chosen if loss == "critic" else [sum(chosen, [])]  # the policy's is by token
            nll = -mean(map(mean, parts))
            losses.append(math.log(1 + math.exp(-margins[-1])) + nll_coef * nll)
        flags = ["--loss", loss] if trainer is train_policy else []
        if loss != "rft":
            flags += ["--beta", str(beta), "--nll_coef", str(nll_coef)]
        got, facts = batch_loss(trainer.get_args(flags), pairs, logps, ref)
        if loss == "rft":
            assert got.item() == exact(-mean(chosen_tokens)) and not facts
            continue
        assert got.item() == exact(mean(losses)) and facts["margin"] == exact(mean(margins))
        assert facts["accuracy"] == mean(margin > 0 for margin in margins)
        if loss != "critic":
            assert all(facts[f"{side}_change"] == exact(mean(changes[side])) for side in changes)


def test_metrics_may_be_lists_which_only_the_file_has(tmp_path, capsys):
    """Such as a histogram: the progress bar and stderr show numbers."""
    results = {"x": (torch.tensor(1.0), {"a": torch.tensor(2.0), "b": 1}),
               "y": (torch.tensor(2.0), {"a": torch.tensor(5.0), "b": 2})}
    loss, means = M.mean_over_pairs(lambda args, pair, *_: results[pair])({}, "xy", {}, {})
    assert loss == 1.5 and means == {"a": 3.5, "b": 1.5}
    log = utils.RunLog(SimpleNamespace(out=str(tmp_path)))
    log.check({})
    log.start("critic", 1)
    log.step_row(0, 7, step=0, **means, histogram=[1, 2])
    assert "b=1.5" in log.bar.postfix and "histogram" not in log.bar.postfix
    log.row(step=0, held_out_histogram=[3, 4])
    os.close(log.lock)
    assert capsys.readouterr().err.endswith("critic: step 0\n")
    _, first, second = metrics(tmp_path)
    assert first["histogram"] == [1, 2] and second["held_out_histogram"] == [3, 4]


def test_the_learning_rate_warms_up_also_where_steps_are_few():
    # steps that warm up: 3 %, at least 3, never more than a third of them
    for steps, warmup in ((1, 0), (2, 0), (3, 1), (6, 2), (9, 3), (117, 4), (1000, 30)):
        got = [utils.lr_at(step, steps, 1.0) for step in range(steps)]
        assert got[:warmup] == [(n + 1) / warmup for n in range(warmup)]
        assert got[warmup] == 1 and all(a > b for a, b in zip(got[warmup:], got[warmup + 1:]))
        assert got[-1] >= 0.1 and (steps < 50 or got[-1] < 0.11)


def test_the_constants_of_training_are_these_numbers(rewarded, tiny_dir, tmp_path):
    """A quarter of the decay is at 0.868 of the peak. Without a gradient no weight moves."""
    assert utils.lr_at(3 + 25, 103, 2.0) == pytest.approx(2 * 0.868198, rel=1e-6)
    epochs = [train_policy.get_args(["--loss", loss]).epochs for loss in ("dpo", "mtdpo", "rft")]
    assert epochs == [1, 4, 4] and train_critic.get_args([]).epochs == 4
    sizes = [train_policy.get_args(["--loss", loss]).batch_size for loss in ("dpo", "rft")]
    assert sizes == [8, 32] and train_critic.get_args([]).batch_size == 8
    out = tmp_path / "out"
    succeed("train_critic.py", "--model", tiny_dir, "--beta", 0, "--nll_coef", 0, "--lr", 0.5,
            "--epochs", 2, "--out", out, stdin=rewarded)
    got, base = weights(out), weights(tiny_dir)
    assert all(got[name].equal(base[name]) for name in base) and len(steps(out)) > 1


@pytest.mark.parametrize("trainer", [train_critic, train_policy])
def test_adam_is_called_with_these_numbers(trainer, ranked, tiny_dir, tmp_path, capfd):
    flags = ["--model", str(tiny_dir), "--out", str(tmp_path), "--lr", "0.125"]
    with (patch.object(torch.optim, "AdamW", side_effect=InterruptedError) as adam,
          stdin_of(ranked), pytest.raises(InterruptedError)):
        trainer.main(trainer.get_args(flags))
    assert adam.call_args.kwargs == {"lr": 0.125, "betas": (0.9, 0.95), "weight_decay": 0.0,
                                     "fused": True}


def test_a_checkpoint_is_dropped_only_when_the_next_one_is_whole(tiny_dir, tmp_path):
    model, _ = M.load(tiny_dir)
    optimizer = torch.optim.AdamW(model.parameters())
    M.save_checkpoint(model, optimizer, str(tmp_path), 1)
    before = contents(tmp_path / "checkpoint-1")
    with patch.object(M.dcp, "save", side_effect=OSError("no space")), pytest.raises(OSError):
        M.save_checkpoint(model, optimizer, str(tmp_path), 2)
    assert before and contents(tmp_path / "checkpoint-1") == before
    M.save_checkpoint(model, optimizer, str(tmp_path), 3)
    assert os.listdir(tmp_path) == ["checkpoint-3"]


def test_every_special_token_ends_a_sampled_message(collected, tiny_dir):
    """An untrained model samples each token, and those that are special only at the end."""
    special = M.find_model(tiny_dir)[1].stop
    sampled = [x["token_ids"] for r in records(collected) for x in actions(r)]
    assert not special & {i for ids in sampled for i in ids[:-1]}
    assert len(special & {ids[-1] for ids in sampled}) > 1


# --- pairs ----------------------------------------------------------------------------------------

def trajectory(i, task, reward, too_long=False):
    """Number i, of one turn."""
    turn = None if too_long else (("o", i), ("a", i))
    return Trajectory(task, {"reward": reward}, [[Action({}, turn, turn)]])


def test_pairs_of_trajectories_are_those_of_two_loops():
    """Over random trajectories with rewards in tenths, whose floats differ by a little less."""
    r = random.Random(0)
    for _ in range(300):
        tenths = [r.choice([3, 5, 6, 7, 10, 10]) for _ in range(r.randrange(1, 10))]
        task, too_long = [r.choice("abc") for _ in tenths], [r.random() < 0.2 for _ in tenths]
        given = [trajectory(i, *facts) for i, facts in
                 enumerate(zip(task, [n / 10 for n in tenths], too_long))]
        margin = r.choice([0, 1, 4])
        fit = [i for i in range(len(given)) if not too_long[i]]
        worse = [(i, j) for i in fit for j in fit if task[i] == task[j] and tenths[i] > tenths[j]]
        apart = {(i, j) for i, j in worse if tenths[i] - tenths[j] >= margin}
        solved = {task[i]: i for i in reversed(fit) if tenths[i] == 10}  # the first of each task
        best = {(i, j) for i, j in worse if solved.get(task[i]) == i}
        for least, want in ((None, best), (margin / 10, apart)):
            if not want:
                assert not M.trajectory_pairs(given, least)
                continue
            groups = M.trajectory_pairs(given, least).values()
            pairs = [(pair.chosen[0][0][1], pair.rejected[0][0][1])
                     for group in groups for pair in group]
            assert sorted(pairs) == sorted(want)
            assert sorted((pair.chosen_score, pair.rejected_score) for g in groups for pair in g) \
                == sorted((tenths[i] / 10, tenths[j] / 10) for i, j in want)
            assert all(len({task[pair.chosen[0][0][1]] for pair in g}) == 1 for g in groups)


def candidate(i, advantage, logprob=0, **fields):
    return Action({"advantage": advantage, "logprob": logprob, **fields}, M.Turn("o", (i,)), None)


def test_candidate_pairs_are_distinct_ones_of_the_upper_half_against_the_lower():
    """By advantage + weight * sum of pi_ref's log-probs, up to --pairs_per_turn. The middle is
    in neither half, what is too long is left out, and what is cut is not chosen.
    """
    r, by_seed, by_turn = random.Random(0), Counter(), Counter()

    def draw(candidates, n=1, weight=0, seed=0):
        args = SimpleNamespace(pairs_per_turn=n, logprob_weight=weight, seed=seed)
        ref_logps = {c.turn: torch.tensor([c.fields["logprob"] - 1, 1.0], dtype=torch.float64)
                     for c in candidates if c.turn}
        return train_policy.candidate_pairs(args, candidates, ref_logps)

    for seed in range(600):
        weight = r.choice([0, 0.1])
        logprobs = [9 * r.gauss(0, 1) for _ in range(7)]
        given = [candidate(i, r.gauss(0, 1), logprobs[i], cut=r.random() < 0.1)
                 for i in range(r.randrange(7)) for _ in range(r.randint(1, 3))]
        r.shuffle(given)
        value = lambda c: c.fields["advantage"] + weight * c.fields["logprob"]
        ranked, half = sorted(given, key=value), len(given) // 2
        possible = {((high.turn,), (low.turn,))
                    for high, low in product(ranked[len(given) - half:], ranked[:half])
                    if high.turn != low.turn and not high.fields["cut"]}
        for n in 1, 4, 99:
            pairs = draw([*given, candidate(9, 9.0, 0.0)._replace(turn=None)], n, weight, seed)
            sides = {(pair.chosen, pair.rejected) for pair in pairs}
            assert len(sides) == len(pairs) == min(n, len(possible)) and sides <= possible
            scores = [(pair.chosen, pair.chosen_score) for pair in pairs]
            scores += [(pair.rejected, pair.rejected_score) for pair in pairs]
            assert {(side, round(score, 9)) for side, score in scores} <= {
                ((c.turn,), round(value(c), 9)) for c in given}
            assert pairs == draw(given[::-1], n, weight, seed)
        (pair,) = draw([candidate(i, i) for i in range(4)], seed=seed)
        by_seed[pair] += 1
        (pair,) = draw([candidate(4 * seed + i, i) for i in range(4)])  # another turn's ids
        by_turn[tuple(turn.action[0] % 4 for turn in pair.chosen + pair.rejected)] += 1
    for counts in by_seed, by_turn:
        assert len(counts) == 4 and all(110 < n < 190 for n in counts.values())  # equally often
    assert not draw([candidate(i, 0.5) for i in range(4)])  # the critic does not tell them apart


def test_mix_adds_the_pairs_of_mtdpo_per_pair_of_candidates(tiny_dir):
    given = [trajectory(i, "ab"[i % 2], reward) for i, reward in enumerate(
        (0.3, 0.4, 1.0, 0.5, 0.35))]  # two pairs in task a, none in b
    for t in given:
        t.actions[0] += [candidate(i, i) for i in range(4)]
        t.actions.append(t.actions[0])
    for mix, n in ((0, 0), (0.05, 2), (0.25, 10), (1, 40)):
        args = train_policy.get_args(["--out", "x", "--mix", str(mix), "--model", str(tiny_dir)])
        groups = [pairs for _, pairs in train_policy.make_groups(args, given, {})]
        assert [len(pairs) for pairs in groups[:5]] == 5 * [8]  # a trajectory's stay together
        added = [(p.chosen[0][0][1], p.rejected[0][0][1]) for g in groups[5:] for p in g]
        assert sorted(added) == sorted(n // 2 * [(2, 0), (2, 4)])


def test_a_new_loss_needs_an_entry_only(ranked, tiny_dir):
    """It gets the pairs of --loss dpo, with all flags."""
    flags = ["--model", tiny_dir, "--logprob_weight", 0.1, "--mix", 0.5, "--loss"]
    with patch.dict(train_policy.LOSSES, mine=train_policy.LOSSES["dpo"]):
        assert read_by(ranked, train_policy, *flags, "mine") == (
            read_by(ranked, train_policy, *flags, "dpo"))
    with pytest.raises(SystemExit):
        train_policy.get_args(["--loss", "mine"])


def test_candidates_without_ids_are_read_as_text(rewarded, tiny_dir):
    """As a judge's are, whose sampler gave none; ids of another model's words are refused."""
    chat = M.find_model(tiny_dir)[1]
    candidates = [c for r in rewarded for m in agent_messages(r) for c in m["candidates"]]
    for c in candidates:
        del c["token_ids"]
        c["advantage"] = float(len(c["output"]))
    make = functools.partial(read_by, rewarded, train_policy, "--model", tiny_dir)
    end = chat.text_ids(chat.end)
    ids = {M.packed(plain_ids(chat.tokenizer, c["output"]) + end) for c in candidates}
    assert {action for group in make()[0] for _, action in M.turns_in(group)} <= ids


def test_what_is_trained_is_what_was_shown(rewarded, tiny_dir, capsys):
    """The sampled tokens of an untouched message or candidate. After an edit of its output, its
    content or its ids, or with a special token inside, the tokens of the text, as if there had been
    no others.
    """
    r, chat = random.Random(0), M.find_model(tiny_dir)[1]
    tokenizer, end = chat.tokenizer, chat.text_ids(chat.end)
    args = SimpleNamespace(model=tiny_dir, max_length=9999)
    words, wanted, n_changed = ["rate", " fee", "what", " is"], [], 0
    for record in rewarded:
        for history, found in M.turn_actions(record):
            for x in found:
                ids = [*plain_ids(tokenizer, "".join(r.choices(words, k=3))), *end]
                x["token_ids"] = ids
                x["output"] = tokenizer.decode(x["token_ids"], skip_special_tokens=True)
                if x is found[0]:
                    x["content"] = x["output"].strip()
                change = r.choice(["", "output", "content", "ids", "special"])
                text = x["output"]
                if change == "output":
                    text = x["output"] = "edited " + text
                    if x is found[0]:
                        x["content"] = text
                elif change == "content" and x is found[0]:
                    text = x["content"] = "edited " + text
                elif change == "ids":
                    x["token_ids"][0] = len(tokenizer) + r.randrange(9)  # of another model
                elif change == "special":
                    x["token_ids"].insert(1, r.choice(sorted(chat.stop)))
                else:
                    change = ""
                n_changed += bool(change)
                wanted.append(plain_ids(tokenizer, text.strip()) + end if change
                              else x["token_ids"])
    with stdin_of(rewarded):
        read = M.read_trajectories(args, pi_reads_hidden=False, ref_reads_hidden=False)
    got = [x.turn.action for t in read for found in t.actions for x in found]
    assert [tokenizer.decode([*map(ord, x)]).strip() for x in got] == [
        tokenizer.decode(x).strip() for x in wanted]
    assert f"{n_changed} messages or candidates have token_ids of another text" in (
        capsys.readouterr().err)
    assert 20 < n_changed < len(wanted) - 20


def test_no_trajectory_learns_a_truncated_message(rewarded, tiny_dir):
    """It has no end token. Others of its trajectory are trained; without any there are no pairs."""
    tokenizer = M.find_model(tiny_dir)[1].tokenizer
    for seed in range(10):
        r, kept, truncated = random.Random(seed), 0, set()
        given = records(lines(rewarded))
        for record in given:
            for m in agent_messages(record):
                if r.random() < 0.4:
                    m["token_ids"] = [*(i for i in m["token_ids"] if i > 9), 99]
                    m["output"] = tokenizer.decode(m["token_ids"])
                    m["content"], m["cut"] = m["output"].strip(), True
                    truncated.add(M.packed(m["token_ids"]))
            kept += any(not m.get("cut") for m in agent_messages(record))
        made = [read_by(given, train_policy, "--model", tiny_dir, *flags)[0] for flags in (
            ["--loss", "rft", "--all", 1], ["--loss", "mtdpo", "--min_gap", 0])]
        made.append(read_by(given, train_critic, "--model", tiny_dir, "--min_gap", 0)[0])
        for groups in made:
            assert truncated.isdisjoint(turn.action for g in groups for turn in M.turns_in(g))
        assert sum(map(len, made[0])) == kept


@pytest.mark.parametrize("trainer, flags", [
    (train_critic, []), (train_critic, ["--min_gap", 0]), (train_policy, ["--mix", 0.5]),
    (train_policy, ["--loss", "mtdpo"]), (train_policy, ["--loss", "rft"])])
def test_nothing_is_learned_of_held_out_tasks(trainer, flags, ranked, tiny_dir):
    """A small share still holds one out, so that the accuracy says something; one always trains.

    Records may come in any order.
    """
    names = sorted({r["task"]["id"] for r in ranked})
    for r in ranked:  # some tasks have one description
        r["dialogue_history"][0]["content"] += " write" * names.index(r["task"]["id"])
    given = ranked + [{**r, "sample": 2, "reward": 1.0} for r in ranked if r["sample"] == 1]
    for tasks, share, n in ((4, 0, 0), (4, 0.001, 1), (4, 0.5, 2), (4, 1, 3), (1, 0.5, 0)):
        some = [r for r in given if r["task"]["id"] in names[:tasks]]
        made, again = (read_by(rs, trainer, "--model", tiny_dir, *flags, "--held_out",
                               share) for rs in (some, random.Random(0).sample(some, len(some))))
        assert made == again
        train, measured = ({prompt[:prompt.find(chr(2))] for pair in pairs
                            for prompt, _ in pair.chosen} for pairs in (chain(*made[0]), made[1]))
        assert len(train) == tasks - n and len(measured) == n and not train & measured


def test_the_share_that_is_held_out_is_exact_and_mixed_pairs_are_measured_once(ranked, tiny_dir):
    for n in range(1, 101):
        for percent in range(101):
            train, held = M.hold_out(range(n), percent / 100, 0)
            assert len(held) == min(-(-percent * n // 100), n - 1)
            assert sorted(train + held) == [*range(n)]
    flags = ["--model", tiny_dir, "--held_out", 0.5]
    plain, mixed = (Counter(read_by(ranked, train_policy, *flags, "--mix", mix)[1])
                    for mix in (0, 9))
    assert {*mixed.values()} == {1} and mixed.keys() > plain.keys()


@pytest.mark.parametrize("trainer", [train_critic, train_policy])
def test_the_same_episode_is_not_trained_on_twice(trainer, ranked, tiny_dir):
    """Two are the same if their task, sample, settings and texts are; its scores may differ."""
    again = {**ranked[3], "reward": 0.0, "meta": {**ranked[3]["meta"], "version": "2", "model": "x",
                                                  "candidates_meta": {"seed": 1}}}
    name, sample = task_id(again["task"]), again["sample"]
    why = f"stdin, line 9: sample {sample} of the task {name} is also in stdin, line 4: "
    with pytest.raises(SystemExit, match=why):
        read_by([*ranked, again], trainer, "--model", tiny_dir)
    seeds = [{**r, "meta": {**r["meta"], "seed": 1}} for r in ranked]  # as of a second file
    rounds = [{**r, "meta": {**r["meta"], "model_weights": "1a"}} for r in ranked]
    unnumbered = [{name: r[name] for name in r if name != "sample"} for r in ranked]
    for more in (seeds, rounds, unnumbered, unnumbered + unnumbered):
        assert read_by(ranked + more, trainer, "--model", tiny_dir)


# --- c: the critic's, never the policy's ----------------------------------------------------------

@pytest.mark.parametrize("flags, pairs", [
    (["--mix", 0.5], None), (["--loss", "mtdpo"], 4), (["--loss", "rft"], 4),
    (["--loss", "rft", "--all", 1], 8)])
def test_c_never_reaches_the_policy(flags, pairs, ranked, tiny_dir):
    """All that it is trained on is the same, whatever c is."""
    groups = []
    for c in ("rate=3", "fee=7"):
        for r in ranked:
            r["task"] |= {"hidden_information": c, "ground_truth": f"def f(): return {c!r}"}
        groups.append(read_by(ranked, train_policy, "--model", tiny_dir, *flags)[0])
    assert groups[0] == groups[1] and pairs in (None, sum(map(len, groups[0])))
    assert all(bool(pair.rejected) == ("rft" not in flags) for pair in chain(*groups[0]))


# --- the critic's reference, when it is finished --------------------------------------------------

def test_a_finished_critic_finds_its_reference_and_takes_no_other(rewarded, tiny_dir, tmp_path):
    """Or --model says where it is. It reads what it read in training; no reward is needed."""
    shutil.copytree(tiny_dir, tmp_path / "runs" / "base")
    flags = ["--model", "base", "--epochs", 1, "--ref_context", "agent", "--out", "c"]
    done = succeed("train_critic.py", *flags, stdin=rewarded, cwd=tmp_path / "runs")
    first = records(done.stdout)
    assert any(x["advantage"] for r in first for x in actions(r))
    assert "trajectory pairs correctly (tasks: all)" in done.stderr
    base, out = tmp_path / "runs" / "base", tmp_path / "runs" / "c"
    score = ["train_critic.py", "--score", out]
    for r in first + rewarded:
        del r["reward"]
    again = succeed(*score, stdin=rewarded[::-1], cwd=tmp_path / "runs")
    assert records(again.stdout) == first[::-1]
    elsewhere = shutil.copytree(base, tmp_path / "elsewhere")
    change_weights(base, lambda state: {name: x * 1.001 for name, x in state.items()})
    done = script(*score, stdin=rewarded, cwd=tmp_path / "runs")  # retrained at the same path
    complaint(done, f"base is not the pi_ref of the critic in {out}")
    shutil.rmtree(base)
    complaint(script(*score, stdin=rewarded), "no model at 'base'")
    assert records(succeed(*score, "--model", elsewhere, stdin=rewarded).stdout) == first


# --- running --------------------------------------------------------------------------------------

CRITIC = ["train_critic.py", "--held_out", 0.3, "--eval_every", 2, "--batch_size", 2,
          "--epochs", 6, "--lr", 1e-4, "--beta", 1]
POLICY = ["train_policy.py", "--lr", 1e-5, "--loss"]
JOBS = {"critic": CRITIC, "moe": CRITIC,  # 5 experts: on 2 ranks the shards are uneven
        "dpo": [*POLICY, "dpo", "--beta", 1, "--pairs_per_turn", 2, "--mix", 0.3,
                "--held_out", 0.3, "--eval_every", 2, "--batch_size", 9],
        "rft": [*POLICY, "rft", "--all", 1, "--batch_size", 5],
        # a step of 2e-7 is lost on a 16-bit weight
        "bf16": [*POLICY, "dpo", "--pairs_per_turn", 1, "--batch_size", 6, "--epochs", 2,
                 "--lr", 2e-7, "--dtype", "bf16"]}


@pytest.fixture(scope="module")
def data(collected, tiny_dir):
    """8 episodes of 1 to 4 turns, with advantages, as text; of each task sample 0 is solved."""
    r, rs = random.Random(0), records(collected)
    tokenizer = M.find_model(tiny_dir)[1].tokenizer
    for n, record in enumerate(rs):
        history = record["dialogue_history"]
        del history[len(history) - 2 * (n % 3):]
        record["reward"] = 1.0 if record["sample"] == 0 else 0.3
        for m in agent_messages(record):
            del m["logprobs"]
            for c in m["candidates"]:
                c["advantage"] = r.gauss(0, 1)
        for x in actions(record):
            x["token_ids"] = [i for i in x["token_ids"] if i > 9][:r.randrange(5, 40)] or [99]
            x["output"] = tokenizer.decode(x["token_ids"])
        for m in agent_messages(record):
            m["content"], _ = colbench.read_action(m["output"], last=False)
    return lines(uncut(rs))


@pytest.fixture(scope="module")
def command(tiny_dir, tmp_path_factory):
    """command(job, out, *flags): the script and its flags."""
    model, chat = M.load(tiny_dir)
    bases = {job: tmp_path_factory.mktemp(job) for job in ("moe", "bf16")}
    save_strong(*FAMILIES["qwen3_moe"], chat.tokenizer, bases["moe"])
    model.dtype = torch.bfloat16  # of the files, as of models on the hub
    M.save(model, chat, str(bases["bf16"]))

    def make(job, out, *flags):
        name, *usual = JOBS[job]
        return [name, "--model", bases.get(job, tiny_dir), *usual, "--out", out, *flags]
    return make


@pytest.fixture(scope="module")
def whole(command, data, tmp_path_factory):
    """whole(job): (its --out, its stdout), run in one process without a break."""
    @functools.cache
    def run(job):
        out = tmp_path_factory.mktemp("whole") / job
        return out, succeed(*command(job, out), stdin=data).stdout
    return run


def same_steps(out, want_out):
    for a, b in zip(steps(out), steps(want_out), strict=True):
        assert a["step"] == b["step"] and a["lr"] == b["lr"]
        for key in ("loss", "grad_norm"):  # a margin near 0 may flip an accuracy
            assert math.isclose(a[key], b[key], rel_tol=1e-4), (a, b)


def same_to_rounding(whole, out, stdout):
    """A run against the undisturbed one: every step's metrics, the weights, stdout."""
    want_out, want_stdout = whole
    same_steps(out, want_out)
    assert [row["finished"] for row in metrics(out) if "finished" in row] == [len(steps(out))]
    start = metrics(out)[0]["args"]["model"]
    got, want, base = map(weights, (out, want_out, start))
    assert got.keys() == want.keys()
    for name in want:  # where gradients are tiny, Adam makes rounding larger
        moved = (want[name] - base[name]).abs().mean()
        assert (got[name] - want[name]).abs().mean() < 1e-2 * moved, name
    got, want = records(stdout), records(want_stdout)
    for a, b in zip(got, want, strict=True):
        for x, y in zip(actions(a), actions(b), strict=True):
            assert abs(x.pop("advantage") - y.pop("advantage")) < 1e-5
        assert abs(a.pop("value") - b.pop("value")) < 1e-4
    assert got == want  # nothing else changed, the order neither


def same_bits(whole, out, stdout):
    """A run against the undisturbed one: the same, but for what the wall clock says."""
    want_out, want_stdout = whole
    bits = [Path(folder, "model.safetensors").read_bytes() for folder in (out, want_out)]
    rows = [[{key: value for key, value in row.items() if "second" not in key}
             for row in metrics(folder) if "args" not in row] for folder in (out, want_out)]
    assert bits[0] == bits[1] and rows[0] == rows[1]
    assert stdout == want_stdout.replace(json.dumps(str(want_out)), json.dumps(str(out)))


# --- many processes -------------------------------------------------------------------------------

def planned(command, data, world=1):
    """What plan.py tells of a run on `world` GPUs."""
    return json.loads(succeed("tests/plan.py", *command, "--gpus", world, stdin=data).stdout)


@pytest.mark.parametrize("job", ["critic", "dpo", pytest.param("rft", marks=pytest.mark.full)])
def test_a_run_is_a_plain_loop_over_separate_forwards(job, whole, command, data, tiny_dir):
    """It takes the tokens that plan.py tells."""
    trainer, (_, *flags) = train_critic if job == "critic" else train_policy, command(job, "x")
    args = trainer.get_args([*map(str, flags)])
    groups, held = read_by(records(data), trainer, *flags)
    pi, pi_ref = (AutoModelForCausalLM.from_pretrained(tiny_dir) for _ in range(2))

    def by_turn(lm, pairs):
        turns = M.turns_in(pairs)
        return dict(zip(turns, separate(lm, turns)))

    with torch.no_grad():
        ref = by_turn(pi_ref, chain(*groups, held))

    def loss_of(pairs):
        logps = by_turn(pi, pairs)
        if job == "rft":
            return -torch.cat([logps[turn] for pair in pairs for turn in pair.chosen]).mean()
        loss = train_critic.critic_loss if job == "critic" else train_policy.dpo_loss
        return sum(loss(args, [pair], logps, ref)[0] for pair in pairs) / len(pairs)

    optimizer = torch.optim.AdamW(pi.parameters(), betas=(0.9, 0.95), weight_decay=0)
    batches = M.all_batches([("a task", pairs) for pairs in groups], args.batch_size, args.epochs,
                            args.seed)
    made, last = steps(whole(job)[0]), len(batches) - 1
    measured = {row["step"]: row["held_out_loss"] for row in metrics(whole(job)[0])
                if "held_out_loss" in row}
    want = [step for step in range(last + 1) if step % 2 or step == last] if held else []
    assert [*measured] == want and bool(held) == (job != "rft")
    for step, (batch, row) in enumerate(zip(batches, made, strict=True)):
        loss = loss_of(batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(pi.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = utils.lr_at(step, len(batches), args.lr)
        optimizer.step()
        optimizer.zero_grad()
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-3)
        assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-2)
        if step in measured:
            assert measured[step] == pytest.approx(loss_of(held).item(), rel=1e-3)
    plan = planned(command(job, "x"), data)
    tokens = sum(row["tokens"] for row in made)
    assert plan["tokens"] == {"computed": tokens, "slowest_rank": tokens}
    assert plan["steps"] == len(made)
    flops = 2 * (plan["reference_tokens"] + plan["critic_tokens"])  # of each weight
    flops += (6 + 2) * tokens  # layers are computed again
    hours = flops * plan["parameters"] / 4e14 / 3600
    assert plan["hours"] == pytest.approx(hours, rel=0.01)


# Runs a script: RANK in its flags is the rank, and torch.compile only traces, as compiling takes
# minutes.
AROUND = """
import functools, os, runpy, sys, torch
torch.compile = functools.partial(torch.compile, backend="eager")
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
sys.argv = [word.replace("RANK", os.environ.get("RANK", "")) for word in sys.argv]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.full
@pytest.mark.parametrize("world, job, flags", [
    (1, "rft", ["--offload", 1, "--compile", 1]), (2, "dpo", []), (2, "moe", []),
    (4, "critic", ["--recompute", 1, "--offload", 1])])
def test_many_processes_and_small_trees_make_the_same_steps(world, job, flags, whole, command, data,
                                                            tmp_path):
    """The last batch of an epoch is smaller, the ranks' trees differ, most exceed --tree_tokens.

    Each rank takes the whole loss. Some ranks of four have no part left, and compute one again. One
    process offloads by FSDP, too.
    """
    train = command(job, tmp_path / job, "--tree_tokens", 150, *flags)
    (tmp_path / "around.py").write_text(AROUND)
    done = succeed(tmp_path / "around.py", f"{ROOT}/{train[0]}", *train[1:], stdin=data,
                   ranks=world)
    same_to_rounding(whole(job), tmp_path / job, done.stdout)
    assert metrics(tmp_path / job)[0]["world"] == world
    if job == "moe":  # a finished critic scores
        done = succeed(train[0], "--score", tmp_path / job, stdin=data, ranks=world)
        same_to_rounding(whole(job), tmp_path / job, done.stdout)
    tokens = planned([*train, "--out", tmp_path / "plan"], data, world)["tokens"]
    made, least = (sum(row["tokens"] for row in steps(out)) for out in (tmp_path / job,
                                                                        whole(job)[0]))
    assert least < made == tokens["computed"] <= tokens["slowest_rank"]


def test_two_processes_train_turn_by_turn_as_one_does(tmp_path, tiny_dir):
    """With as many forwards on each."""
    tokenizer = M.find_model(tiny_dir)[1].tokenizer
    base = save_strong("qwen3_next", SLOW["qwen3_next"], tokenizer, tmp_path / "base")
    rft = ["train_policy.py", "--loss", "rft", "--all", 1, "--model", base, "--batch_size", 3,
           "--epochs", 1, "--lr", 1e-4, "--out"]
    one = succeed(*rft, tmp_path / "1", stdin=demos(5))
    assert "\n5 trajectories, 2 steps" in "\n" + one.stderr
    two = succeed(*rft, tmp_path / "2", "--recompute", 1, "--save_every", 1, stdin=demos(5),
                  ranks=2)
    assert "turn by turn" in one.stderr and "turn by turn" in two.stderr
    same_steps(tmp_path / "2", tmp_path / "1")
    rows = [steps(tmp_path / world) for world in "12"]  # one rank computes a copy of a turn, too
    assert [row["tokens"] for row in rows[0]] == [row["tokens"] for row in rows[1]]
    got, want = weights(tmp_path / "2"), weights(tmp_path / "1")
    for name in want:  # Adam moves a weight without gradient by rounding's sign, 1e-4 a step
        assert (got[name] - want[name]).abs().max() < 1e-3, name


@pytest.mark.full
def test_ranks_that_read_other_weights_are_refused(tiny_dir, tmp_path):
    """As where each node has a copy of its own."""
    (tmp_path / "around.py").write_text(AROUND)
    for rank in "01":
        shutil.copytree(tiny_dir, tmp_path / rank)
    change_weights(tmp_path / "1", lambda state: {name: x + 1e-3 for name, x in state.items()})
    done = script(tmp_path / "around.py", f"{ROOT}/train_policy.py", "--loss", "rft", "--all", 1,
                  "--model", tmp_path / "RANK", "--out", tmp_path / "out", stdin=demos(4), ranks=2)
    assert done.returncode and "are not the same on all ranks" in done.stderr


def test_ranks_wait_for_a_day_for_rank_0_which_may_read_a_pipe(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *a, **kw: asked.append(kw))
    utils.init_distributed()
    assert asked[0]["timeout"].total_seconds() == 24 * 3600


@pytest.mark.full
def test_one_process_finishes_what_two_of_torchrun_began(whole, command, data, tmp_path):
    """One of two ranks is killed, which ends torchrun and the other one."""
    out = tmp_path / "out"
    critic = command("critic", out, "--save_every", 2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    (tmp_path / "in").write_text(data)
    with open(tmp_path / "in") as stdin, subprocess.Popen(
            [*torchrun, *map(str, critic)], cwd=ROOT, text=True, env=CPU, start_new_session=True,
            stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as p:
        try:
            until(lambda: len(steps(out)) > 2, p)
            family = descendants(p.pid)
            (rank_1,) = (pid for pid in family
                         if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
            os.kill(rank_1, signal.SIGKILL)
            stdout, _ = p.communicate(timeout=150)
            gone(family)
        finally:
            for pid in (p.pid, *descendants(p.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert p.returncode and not stdout and not (out / "model.safetensors").exists()
    done = succeed(*critic, stdin=data)
    (resumed,) = (row for row in metrics(out) if "resumed" in row)
    assert 2 <= resumed["resumed"] < resumed["steps"] and resumed["world"] == 1
    same_to_rounding(whole("critic"), out, done.stdout)


# --- a killed run, and the --out directory --------------------------------------------------------

@pytest.fixture(scope="module")
def killed(command, data, tmp_path_factory):
    """killed(job): --out of a run that got kill -9 when its first checkpoint was there; of two
    ranks one got SIGTERM.
    """
    @functools.cache
    def run(job, ranks=1):
        out, how = tmp_path_factory.mktemp("killed") / job, signal.SIGKILL
        if ranks > 1:
            how = signal.SIGTERM
        done = script(*command(job, out, "--save_every", 2), stdin=data, ranks=ranks,
                      kill=(out / "checkpoint-2", how))
        assert done.returncode in (-how, 256 - how), done.stderr
        assert not (out / "model.safetensors").exists() and "finished" not in metrics(out)[-1]
        return out
    return run


@pytest.mark.parametrize("job, began, world", [
    ("critic", 1, 1), ("dpo", 1, 1), *(pytest.param(*case, marks=pytest.mark.full) for case in (
        ("bf16", 1, 1), ("critic", 1, 2), ("moe", 2, 1)))])
def test_a_killed_run_resumes_to_the_same_bits(job, began, world, killed, whole, command, data,
                                               tmp_path):
    """Where it has had two processes, to rounding. Only what a finished run needs is left."""
    out = shutil.copytree(killed(job, began), tmp_path / "out")
    saved = max(int(path.name[11:]) for path in out.glob("checkpoint-*") if path.suffix != ".part")
    (out / "checkpoint-7.part").mkdir()  # what a kill leaves while a checkpoint is being written
    (out / "checkpoint-7.part" / ".metadata").write_text("{")
    with open(out / "metrics.jsonl", "a") as f:
        f.write(f'{{"step": {saved}}}\n{{"step": 10, "lo')  # a step that is computed again
    done = succeed(*command(job, out, "--save_every", 3), stdin=data, ranks=world)
    (same_bits if began == world else same_to_rounding)(whole(job), out, done.stdout)
    (resumed,) = (row for row in metrics(out) if "resumed" in row)
    assert 2 <= saved == resumed["resumed"] < resumed["steps"] and resumed["world"] == world
    assert sorted(os.listdir(out)) == sorted(os.listdir(whole(job)[0]))


def contents(out):
    return {path: path.read_bytes() for path in Path(out).rglob("*") if path.is_file()}


@pytest.mark.parametrize("job", ["critic", pytest.param("dpo", marks=pytest.mark.full)])
def test_a_finished_run_is_only_read_and_what_is_no_run_never_removed(job, whole, command, data,
                                                                      tmp_path):
    out, stdout = whole(job)
    before = contents(out)
    done = succeed(*command(job, out), stdin=data)
    assert done.stdout == stdout and f"{out} is already trained with these" in done.stderr
    if job == "critic":
        assert succeed("train_critic.py", "--score", out, stdin=data).stdout == stdout
    assert contents(out) == before
    (tmp_path / "precious").write_text("mine")
    done = script(*command(job, tmp_path), stdin=data)
    complaint(done, "exists and is not a run")
    assert contents(tmp_path) == {tmp_path / "precious": b"mine"}


@pytest.mark.parametrize("finished, flags, change, message", [
    (False, ["--lr", 3], ("", ""), "different lr"),
    (True, ["--dtype", "bf16"], ("", ""), "different dtype"),
    (True, ["--eval_every", 7], ('"content": "write', '"content": "Write'),
     "different data_hash"),
    (False, ["--model", "OTHER"], ("", ""), "different model_weights")])
def test_only_the_same_run_goes_on(finished, flags, change, message, killed, whole, command, data,
                                   tiny_dir, tmp_path):
    """--eval_every changes no result, so it is not what is refused."""
    if "OTHER" in flags:
        flags = ["--model", shutil.copytree(tiny_dir, tmp_path / "other")]
        change_weights(flags[1], lambda state: {name: x + 1e-3 for name, x in state.items()})
    out = whole("critic")[0] if finished else killed("critic")
    before = contents(out)
    done = script(*command("critic", out, *flags), stdin=data.replace(*change, 1))
    complaint(done, f"the run in {out} has {message}: ", "or choose another --out")
    assert contents(out) == before


def test_an_edited_script_neither_resumes_nor_scores_in_silence(killed, whole, command, data,
                                                                tmp_path):
    """The run's own copies of the scripts do, and what is not loaded may change."""
    copy_scripts(tmp_path)
    (tmp_path / "evaluate.py").write_text("# edited")
    edited = tmp_path / "train_critic.py"
    edited.write_text(edited.read_text().replace("(logps - ref_logps).mean()",
                                                 "(logps - ref_logps).sum()"))
    out, (finished, stdout) = shutil.copytree(killed("critic"), tmp_path / "out"), whole("critic")
    for folder in (out, finished):
        before = contents(folder)
        complaint(script(edited, *command("critic", folder)[1:], stdin=data),
                  f"the run in {folder} has different train_critic.py: ")
        assert contents(folder) == before
    done = succeed(edited, "--score", finished, stdin=data)
    assert f"the critic in {finished} was trained by another train_critic.py" in done.stderr
    assert done.stdout != stdout
    own = succeed(out / "train_critic.py", *command("critic", out)[1:], stdin=data)
    same_bits(whole("critic"), out, own.stdout)


def test_any_two_models_score_and_a_critics_run_gives_what_is_not_said(whole, data, tiny_dir,
                                                                        tmp_path):
    """The oracle: separate forwards of the two models. Only a critic has a pi_ref of its own."""
    (dpo, _), (critic, _) = whole("dpo"), whole("critic")
    given, chat = records(data)[:3], M.find_model(tiny_dir)[1]
    for flags, folder, ref, ref_reads_hidden in (
            ([dpo, "--model", tiny_dir], dpo, tiny_dir, False), ([critic], critic, tiny_dir, True),
            ([tiny_dir, "--model", dpo, "--ref_context", "hidden"], tiny_dir, dpo, True),
            ([dpo, "--model", dpo, "--ref_context", "agent"], dpo, dpo, False),
            ([critic, "--ref_context", "agent"], critic, tiny_dir, False)):
        got = records(succeed("train_critic.py", "--score", *flags, stdin=given).stdout)
        pi, pi_ref = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, ref))
        for record in got:
            for history, found in M.turn_actions(record):
                for action, turn, ref_turn in M.read_actions(
                        chat, record, history, found, pi_reads_hidden=True,
                        ref_reads_hidden=ref_reads_hidden):
                    want = separate(pi, [turn])[0] - separate(pi_ref, [ref_turn])[0]
                    assert action["advantage"] == pytest.approx(want.mean().item(), abs=1e-4)
    complaint(script("train_critic.py", "--score", critic, "--model", dpo, stdin=given),
              f"{dpo} is not the pi_ref of the critic in {critic}")
    complaint(script("train_critic.py", "--score", dpo, stdin=given),
              f"--model is needed, because {dpo} is")


def test_a_run_whose_last_save_fails_goes_on(killed, whole, command, data, tmp_path):
    out = shutil.copytree(killed("critic"), tmp_path / "out")
    (out / "tokenizer.json").mkdir()
    resume = command("critic", out, "--save_every", 2)
    assert script(*resume, stdin=data).returncode == 1
    (out / "tokenizer.json").rmdir()
    done = succeed(*resume, stdin=data)
    same_bits(whole("critic"), out, done.stdout)
    assert [row["resumed"] for row in metrics(out) if "resumed" in row] == [2, 6]


def test_the_scripts_that_changed_are_those_that_run_and_train(tmp_path, monkeypatch):
    """collect.py runs where a critic guides it, but has trained nothing."""
    r, names = random.Random(0), sorted(path.name for path in Path(ROOT).glob("*.py"))
    for _ in range(40):
        main, changed = r.choice(names), {name for name in names if r.random() < 0.4}
        for name in names:
            text = Path(ROOT, name).read_text()
            (tmp_path / name).write_text(text + "\n" * (name in changed))
        runs = {main} | {name for name in names if name[:-3] in sys.modules}
        monkeypatch.setattr(sys, "argv", [f"somewhere/{main}"])
        told = utils.changed_scripts(str(tmp_path))
        assert {*told} == changed & runs - {"collect.py"}


def test_two_runs_cannot_share_an_out(command, data, tmp_path):
    first = utils.RunLog(train_critic.get_args(["--out", str(tmp_path / "out")]))
    complaint(script(*command("critic", first.out), stdin=data), "is in use by another run")
    os.close(first.lock)


# --- what is left out, what it is saved as --------------------------------------------------------

def test_turns_that_are_too_long_get_no_advantage_and_are_counted(data, tiny_dir):
    flags = ["--score", tiny_dir, "--ref_context", "agent", "--max_length", 150]
    done = succeed("train_critic.py", "--model", tiny_dir, *flags, stdin=data)
    scored = ["advantage" in x for r in records(done.stdout) for x in actions(r)]
    left_out = scored.count(False)
    assert 0 < left_out < len(scored)
    assert f"{left_out} turns exceed 150 tokens" in done.stderr


def scored_trajectories(r, n):
    """([Trajectory], {turn: log-probs}, {turn: pi_ref's}) of n random episodes of tasks a, b, c."""
    given, logps, ref = [], {}, {}
    for i in range(n):
        turns = [((i, t), (r.randrange(9),) * r.randint(1, 4)) for t in range(r.randint(1, 3))]
        for turn in turns:
            logps[turn], ref[turn] = (torch.tensor([r.choice([-0.5, -1.0, -2.0]) for _ in turn[1]])
                                      for _ in range(2))
        task = r.choice("abc")
        record = {"task": {"problem_description": task, "id": f"another id of {task}"},
                  "reward": r.choice([0.5, 0.7, 1.0]), "sample": i}
        given.append(Trajectory(task, record, [[Action({}, x, x)] for x in turns]))
    return given, logps, ref


@pytest.mark.parametrize("beta", [1e-5, 1e-4, 1.0])
def test_accuracy_does_not_depend_on_beta(beta):
    """Nor does a loss of DPO's; the margin does."""
    given, logps, ref = scored_trajectories(random.Random(0), 18)
    pairs = [*chain(*M.trajectory_pairs(given, 0).values())]
    for batch_loss, of_tokens in ((train_critic.critic_loss, statistics.fmean),
                                  (train_policy.LOSSES["dpo"], sum)):
        args = SimpleNamespace(beta=beta, nll_coef=0)
        values = [[sum(of_tokens((logps[turn] - ref[turn]).tolist()) for turn in side)
                   for side in (pair.chosen, pair.rejected)] for pair in pairs]
        want = statistics.fmean(0.5 if abs(a - b) < 1e-4 else a > b for a, b in values)
        _, metrics = batch_loss(args, pairs, logps, ref)
        assert metrics["accuracy"] == pytest.approx(want)
        margin = statistics.fmean(a - b for a, b in values)
        assert metrics["margin"] == pytest.approx(beta * margin, rel=1e-5)


def scored_records(r, n):
    """([Trajectory], their records with values) of scored_trajectories."""
    given, logps, ref = scored_trajectories(r, n)
    train_critic.add_scores(given, logps, ref)
    for t in given:
        t.record["task"]["ground_truth"] = "def f(): 0"
        t.record["dialogue_history"] = [
            m for turn, (message,) in zip(t.turns(), t.actions)
            for m in ({"role": "user", "content": "go on"},
                      {"role": "assistant", "content": f"{turn}", **message.fields})]
    return given, [t.record for t in given]


def ordered_by_a_plain_loop(rs, least):
    """How many of the trajectory pairs of records the sums of their advantages order, and of how
    many.
    """
    values = [(r["task"]["problem_description"], r["reward"],
               sum(m["advantage"] for m in agent_messages(r))) for r in rs]
    first = {task: n for n, (task, reward, _) in reversed([*enumerate(values)])
             if reward == 1}  # the first solved one of each task
    right = [0.5 if abs(a - b) < 1e-4 else a > b
             for n, (task, high, a) in enumerate(values) for other, low, b in values
             if task == other and (first.get(task) == n and low < 1 if least is None
                                   else high - low > least - 0.01)]
    return sum(right), len(right)


def test_ordered_pairs_are_those_of_a_plain_loop_also_in_choose_critic(tmp_path, capsys):
    """Of all tasks, and of those that the critic was not trained on: their ids are other ones. A
    tie counts half. choose_critic.py reads the same numbers from the written records.
    """
    r, trained_on = random.Random(0), [colbench.content_hash(
        {"problem_description": "a", "ground_truth": "def f(): 0"})]
    for least in (None, 0.3) * 10:
        given, rs = scored_records(r, 18)
        unseen = [x for x in rs if x["task"]["problem_description"] != "a"]
        train_critic.print_ordered_pairs(given, least, trained_on)
        counts = [ordered_by_a_plain_loop(some, least) for some in (rs, unseen)]
        assert capsys.readouterr().err == (
            "the critic orders {:g} of {} trajectory pairs correctly (tasks: all)\n"
            "the critic orders {:g} of {} trajectory pairs correctly (tasks: that it was not "
            "trained on)\n".format(*counts[0], *counts[1]))
        written = [choose_critic.as_trajectory(record) for record in records(lines(rs))]
        assert train_critic.count_ordered_pairs(written, least) == pytest.approx(counts[0])


def test_equal_dialogues_of_two_tasks_have_values_of_their_own():
    rs = [{"task": {"id": task}, "sample": i, "reward": 1 - i, "value": value,
           "dialogue_history": dialogue("pay", ("which rate?", "which fee?")[i])}
          for task, i, value in [("a", 0, 2.0), ("a", 1, 1.0), ("b", 0, 1.0), ("b", 1, 2.0)]]
    written = [choose_critic.as_trajectory(record) for record in rs]
    assert train_critic.count_ordered_pairs(written, None) == (1, 2)


def test_critics_are_chosen_by_the_same_pairs_or_not_at_all(tmp_path, capsys):
    r, args = random.Random(1), SimpleNamespace(files=["0", "1"], min_gap=0)
    with contextlib.chdir(tmp_path):
        def choose(*files):
            for name, rs in zip("01", files):
                Path(name).write_text(lines(rs))
            choose_critic.main(args)
            return int(capsys.readouterr().out)

        for _ in range(10):
            _, rs = scored_records(r, 12)
            others = records(lines(rs))
            for record in others:
                for m in agent_messages(record):
                    m["advantage"] = r.gauss(0, 1)
                record["value"] = sum(m["advantage"] for m in agent_messages(record))
            ordered = [ordered_by_a_plain_loop(some, 0)[0] for some in (rs, others)]
            assert choose(rs, r.sample(others, 12)) == (ordered[1] > ordered[0])
            i, again = r.randrange(12), records(lines(others))
            again[i]["dialogue_history"][1]["content"] += "x"
            unscored = records(lines(others))
            del unscored[i]["value"], unscored[i]["dialogue_history"][1]["advantage"]
            rewarded = records(lines(others))
            rewarded[i]["reward"] = 0.6
            more = [*others, others[0] | {"sample": 99}]
            for wrong in others[1:], more, again, unscored, rewarded:
                with pytest.raises(SystemExit, match="0 and 1 do not belong together"):
                    choose(rs, wrong)


def test_an_edited_value_of_a_trajectory_is_that_of_the_loss_and_of_both_accuracies(data, command,
                                                                                   tmp_path):
    """A discount per turn: what is printed is what the last row of a run's metrics has."""
    copy_scripts(tmp_path)
    script_file = tmp_path / "train_critic.py"
    plain = script_file.read_text()
    discounted = plain.replace(
        "return sum(advantage(logps[turn], ref_logps[turn]) for turn in turns)",
        "return sum(advantage(logps[turn], ref_logps[turn]) * (-0.5) ** t\n"
        "               for t, turn in enumerate(turns))")
    assert discounted != plain
    found = []
    for text in plain, discounted:
        script_file.write_text(text)
        out = tmp_path / f"out{len(found)}"
        done = succeed(script_file, *command("critic", out)[1:], stdin=data)
        *_, last, _ = metrics(out)
        printed = re.search(r"orders (\S+) of (\d+) .* \(tasks: that it was not", done.stderr)
        n = metrics(out)[0]["held_out_pairs"]
        assert int(printed[2]) == n and float(printed[1]) == n * last["held_out_accuracy"]
        again = succeed(script_file, "--score", out, stdin=data)
        assert printed[0] in again.stderr and again.stdout == done.stdout
        found.append(([row["margin"] for row in steps(out)], last["held_out_margin"]))
    assert found[0] != found[1] and found[0][1] != found[1][1]


@pytest.mark.parametrize("pi_reads_hidden", [False, True])
def test_a_turn_of_exactly_max_length_tokens_is_not_too_long(pi_reads_hidden, tiny_dir):
    def read(max_length):
        with stdin_of(demos(5)):
            return M.read_trajectories(SimpleNamespace(model=tiny_dir, max_length=max_length),
                                       pi_reads_hidden=pi_reads_hidden, ref_reads_hidden=False)

    sizes = {sum(map(len, turn)) for t in read(9999) for turn in t.turns()}
    for longest in (min(sizes), max(sizes), sorted(sizes)[len(sizes) // 2]):
        kept = {sum(map(len, message.turn)) for t in read(longest) for message, *_ in t.actions
                if message.turn}
        assert kept == {size for size in sizes if size <= longest}


def test_the_first_solved_trajectory_is_the_same_whatever_the_order_of_seeds(ranked, tiny_dir):
    """Files of two seeds number their episodes alike."""
    for r in ranked:
        r["reward"] = float(r["sample"] == 0)
    others = records(lines(ranked))
    for r in others:
        r["meta"]["seed"] = 8
        for x in actions(r):
            x["token_ids"] = x["token_ids"][::-1]
            x.pop("logprobs", None)  # the ids do not spell the output
    for flags in (["--loss", "mtdpo"], ["--mix", 0.5], ["--loss", "rft"]):
        made = [read_by(given, train_policy, "--model", tiny_dir, *flags)[0]
                for given in (ranked + others, others + ranked)]
        assert made[0] == made[1] and made[0]


@pytest.mark.parametrize("trainer", [train_critic, train_policy])
@pytest.mark.parametrize("flag", ["--batch_size", "--epochs", "--save_every", "--eval_every"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5"])
def test_no_run_without_a_step(trainer, flag, value, capsys):
    """It would save the base as a trained model."""
    with pytest.raises(SystemExit):
        trainer.get_args([flag, value])
    assert f"argument {flag}: invalid positive value: '{value}'" in capsys.readouterr().err


@pytest.mark.parametrize("share", [-0.1, 1.5, 10, math.nan, math.inf])
def test_a_share_of_tasks_to_hold_out_is_from_0_to_1(share):
    """A percentage would hold out nearly all tasks; a negative share would train on the rest."""
    with pytest.raises(SystemExit, match="^error: --held_out must be from 0 to 1"):
        M.hold_out("abc", share, 0)


def test_rewards_that_round_to_1_or_0_are_these(tiny_dir):
    """Wherever records are read: sums of tenths differ from 1 in the last bit, on either side."""
    r, near = random.Random(0), []
    for _ in range(200):
        parts = [0.1] * 10 + [r.random() for _ in range(r.randrange(4))]
        r.shuffle(parts)
        half = len(parts) // 2
        total = sum(parts[:half]) + sum(parts[half:])
        near.append(total - sum(sorted(parts)) + 1)
    for reward in (0.1 + 0.2 + 0.3 + 0.4, sum([0.1] * 10), 1 + 2 ** -52, *near):
        for base in (0, 1):
            given = [{"task": {"id": "a", "problem_description": "d", "ground_truth": "def f(): 1"},
                      "dialogue_history": [], "reward": reward - 1 + base}]
            with stdin_of(given):
                (read,) = read_records(sys.stdin, "reward")
            assert read["reward"] == base and abs(reward - 1) < 1e-12
    for reward, kept in ((1 + 1e-6, False), (1 - 1e-6, True), (-1e-6, True), (-1.1, False)):
        given[0]["reward"] = reward
        with stdin_of(given), contextlib.ExitStack() as stack:
            if not kept:
                stack.enter_context(pytest.raises(SystemExit, match="is not between -1 and 1"))
            (read,) = read_records(sys.stdin, "reward")
            assert read["reward"] == reward
