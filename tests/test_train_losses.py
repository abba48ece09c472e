"""The losses against plain loops over tokens; which pairs are made; what c reaches, and never."""
import io
import json
import math
import random
import sys

import pytest
import torch
from safetensors.torch import load

import colbench
import model
import train_critic
import train_policy
import utils
from conftest import lines, script as run_script
from model import TURN, Pair, batches
from train_critic import trajectory_pairs
from train_policy import candidate_pairs

# --- the oracle: floats and loops, written from the equations -------------------------------------

def loop_score(logps, ref, normalize):
    total = 0.0
    for p, q in zip(logps, ref):
        turn = 0.0
        for x, y in zip(p, q):
            turn += x - y
        total += turn / len(p) if normalize == "turn" else turn
    return total / sum(len(p) for p in logps) if normalize == "trajectory" else total


def loop_loss(margin, chosen, nll_coef):
    tokens = [x for turn in chosen for x in turn]
    return math.log(1 + math.exp(-margin)) - nll_coef * sum(tokens) / len(tokens)


def trajectories(seed):
    """(chosen, rejected, ref_chosen, ref_rejected): lists of turns of log-probs.

    A turn has 1 to 9 tokens, a side 2 or 3 turns.
    """
    r = random.Random(seed)
    lengths = [[r.randrange(1, 10) for _ in range(n)] for n in (2, 3)]
    return [[[-3 * r.random() for _ in range(n)] for n in lengths[side]] for side in (0, 1, 0, 1)]


tensors = lambda turns: [torch.tensor(t, dtype=torch.float64) for t in turns]
close = lambda a, b: abs(float(a) - b) < 1e-9


@pytest.mark.parametrize("normalize", ["turn", "trajectory", "none"])
@pytest.mark.parametrize("beta, nll_coef", [(0.1, 0.01), (1.0, 0.0), (2.0, 1.0)])
def test_critic_loss_is_eq_2(normalize, beta, nll_coef):
    for seed in range(10):
        chosen, rejected, ref_chosen, ref_rejected = args = trajectories(seed)
        loss, margin = train_critic.critic_loss(*map(tensors, args), beta, nll_coef, normalize)
        want = beta * (loop_score(chosen, ref_chosen, normalize)
                       - loop_score(rejected, ref_rejected, normalize))
        assert close(margin, want) and close(loss, loop_loss(want, chosen, nll_coef))


def test_value_loss_is_the_cross_entropy_of_success():
    chosen, rejected = [[0.5], [-1.0], [2.0]], [[0.3], [-0.2]]
    loss, margin = train_critic.value_loss(*map(tensors, (chosen, rejected)))
    sigmoid = lambda x: 1 / (1 + math.exp(-x))
    want = -sum(math.log(sigmoid(x)) for x, in chosen)
    want -= sum(math.log(1 - sigmoid(x)) for x, in rejected)
    assert close(loss, want / 5) and close(margin, 0.5 - 0.05)


def test_the_normalizations_differ():
    args = list(map(tensors, trajectories(0)))
    margins = [train_critic.critic_loss(*args, 1, 0, normalize)[1].item()
               for normalize in ("turn", "trajectory", "none")]
    assert len({round(m, 6) for m in margins}) == 3


@pytest.mark.parametrize("normalize", ["turn", "none"])
def test_advantage_is_eq_3(normalize):
    p, _, q, _ = trajectories(1)
    for x, y in zip(p, q):
        got = train_critic.advantage(*tensors([x, y]), normalize)
        assert close(got, loop_score([x], [y], normalize))


@pytest.mark.parametrize("beta, nll_coef", [(0.1, 0.01), (1.0, 1.0)])
def test_dpo_loss_is_eq_4(beta, nll_coef):
    for seed in range(10):
        chosen, rejected, ref_chosen, ref_rejected = sides = [x[0] for x in trajectories(seed)]
        loss, margin = train_policy.dpo_loss(*tensors(sides), beta, nll_coef)
        want = beta * (loop_score([chosen], [ref_chosen], "none")
                       - loop_score([rejected], [ref_rejected], "none"))
        assert close(margin, want) and close(loss, loop_loss(want, [chosen], nll_coef))


def test_log_2_where_the_policy_is_the_reference_and_swapping_flips_the_margin():
    chosen, rejected, ref_chosen, ref_rejected = map(tensors, trajectories(2))
    for normalize in ("turn", "trajectory", "none"):
        critic_loss = lambda *sides: train_critic.critic_loss(*sides, 0.7, 0, normalize)
        assert close(critic_loss(chosen, rejected, chosen, rejected)[0], math.log(2))
        there = critic_loss(chosen, rejected, ref_chosen, ref_rejected)[1]
        back = critic_loss(rejected, chosen, ref_rejected, ref_chosen)[1]
        assert there != 0 and close(there, -back.item())
    a, b, c, d = chosen[0], rejected[0], ref_chosen[0], ref_rejected[0]
    assert close(train_policy.dpo_loss(a, b, a, b, 0.7, 0)[0], math.log(2))
    there = train_policy.dpo_loss(a, b, c, d, 0.7, 0)[1]
    back = train_policy.dpo_loss(b, a, d, c, 0.7, 0)[1]
    assert there != 0 and close(there, -back.item())


def test_a_bad_pair_pushes_harder_than_a_good_one():
    """The gradient raises the chosen log-probs, the more the worse the margin; beta scales it."""
    for shift in (-2.0, 0.0, 2.0):
        x = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
        ref = torch.tensor([-1.0 - shift, -1.0], dtype=torch.float64)
        train_policy.dpo_loss(x, x.detach(), ref, x.detach(), 0.5, 0)[0].backward()
        assert torch.allclose(x.grad, torch.full_like(x, -0.5 / (1 + math.exp(0.5 * shift))))


# --- pairs ----------------------------------------------------------------------------------------

def turn(i):
    return (("o", i), ("a", i))


def trajectory(i, task, reward):
    """Number i, of one turn."""
    return {"task": {"id": task, "problem_description": "p", "ground_truth": "g"}, "reward": reward,
            "dialogue_history": [{"role": "assistant", "content": "?", TURN: turn(i)}]}


# tasks interleaved: i and i + 1 are never of one task
MIXED = [trajectory(i, t, r) for i, (t, r) in enumerate([
    ("a", 0.3), ("b", 1.0), ("a", 1.0), ("c", 0.5), ("a", 0.35), ("b", 1.0), ("c", 0.9), ("a", 1.0),
    ("d", 1.0), ("c", 0.5)])]


def numbers(records, mode, margin):
    """[[(i, j)]], a task's in a list: the pairs of the trajectories with these numbers."""
    number = lambda turns: turns[0][0][1]
    return sorted(sorted((number(pair.chosen), number(pair.rejected)) for pair in pairs)
                  for pairs in trajectory_pairs(records, mode, margin))


def test_best_pairs_a_solved_trajectory_with_each_worse_one_of_its_task():
    assert numbers(MIXED, "best", 0.1) == [[(2, 0), (2, 4)]]
    # b: all solved; c: none solved; d: only one
    (pairs,) = trajectory_pairs(MIXED, "best", 0.1)
    assert [pair.gap for pair in pairs] == pytest.approx([0.7, 0.65])


def test_all_pairs_differ_by_the_margin_and_by_more_than_nothing():
    at = lambda margin: numbers(MIXED, "all", margin)
    assert at(0.1) == [[(2, 0), (2, 4), (7, 0), (7, 4)], [(6, 3), (6, 9)]]
    assert at(0.0) == [[(2, 0), (2, 4), (4, 0), (7, 0), (7, 4)], [(6, 3), (6, 9)]]
    assert at(0.5) == [[(2, 0), (2, 4), (7, 0), (7, 4)]]


def test_order_of_the_input_does_not_matter():
    shuffled = random.Random(0).sample(MIXED, len(MIXED))
    assert shuffled != MIXED
    assert numbers(shuffled, "all", 0) == numbers(MIXED, "all", 0)


def test_a_trajectory_with_a_turn_that_is_too_long_is_in_no_pair_of_the_critic():
    long = {**MIXED[2], "dialogue_history": [{"role": "assistant", TURN: None}]}
    records = [*MIXED[:2], long, *MIXED[3:]]
    assert numbers(records, "best", 0.1) == [[(7, 0), (7, 4)]]


def candidate(i, advantage, logprob=None, output="what?"):
    return {TURN: ("o", (i,)), "advantage": advantage, "logprob": logprob, "output": output}


def drawn(candidates, n, prior, seed):
    """[(a+, a-)] of candidate_pairs, by the candidates' numbers."""
    number = lambda turns: turns[0][1][0]
    pairs = candidate_pairs(candidates, per_turn=n, prior=prior, seed=(seed,))
    return [(number(pair.chosen), number(pair.rejected)) for pair in pairs]


def test_candidate_pairs_take_the_top_against_the_bottom_half():
    candidates = [candidate(i, a) for i, a in enumerate((0.3, -1.0, 2.0, 0.1, -0.5))]
    pairs = drawn(candidates, 200, 0, 0)
    assert {a for a, _ in pairs} == {2, 0}
    assert {b for _, b in pairs} == {1, 4}  # the middle is neither
    assert len(pairs) == 200 and len(set(pairs)) == 4
    assert pairs == drawn(candidates, 200, 0, 0) != drawn(candidates, 200, 0, 1)
    gaps = {pair.gap for pair in candidate_pairs(candidates, per_turn=200, prior=0, seed=(0,))}
    assert sorted(gaps) == pytest.approx([0.8, 1.3, 2.5, 3.0])


def test_the_prior_lifts_what_the_sampler_likes():
    candidates = [candidate(i, a, p) for i, (a, p) in enumerate([
        (0.3, -9.0), (0.2, -1.0), (0.1, -5.0), (0.0, -0.5)])]
    tops = lambda prior: {a for a, _ in drawn(candidates, 200, prior, 0)}
    assert tops(0) == {0, 1} and tops(0.02) == {1, 0} and tops(0.1) == {1, 3}
    # 0.1: -0.6, 0.1, -0.4, -0.05; 0.04: -0.06, 0.16, -0.1, -0.02
    assert tops(0.04) == {1, 3}


def test_candidate_pairs_need_two_different_candidates():
    same = [candidate(7, a) for a in (0.0, 1.0)]
    for candidates in ([], same[:1], same, [{**c, TURN: None} for c in same]):
        assert drawn(candidates, 4, 0, 0) == []


def mixed(mix, records=MIXED, **args):
    """make_groups of dpo, 4 candidates a record: (pairs of candidates, pairs of trajectories)."""
    flags = ["--out", "x", "--mix", str(mix), *(str(x) for kv in args.items() for x in kv)]
    candidates = [candidate(i, float(i)) for i in range(4)]
    message = lambda r: {**r["dialogue_history"][0], "candidates": candidates}
    records = [{**r, "dialogue_history": [message(r)]} for r in records]
    groups = train_policy.make_groups(train_policy.get_args(flags), records)
    pairs = [pair for group in groups for pair in group]
    of_candidates = [pair for pair in pairs if pair.chosen[0][0] == "o"]
    return of_candidates, [(p.chosen[0], p.rejected[0]) for p in pairs if p not in of_candidates]


def test_mix_adds_the_pairs_of_mtdpo_per_pair_of_candidates():
    ours, whole = mixed(0)
    assert len(ours) == 40 and not whole
    for mix, n in ((0.05, 2), (0.25, 10), (1, 40)):
        again, whole = mixed(mix)
        assert again == ours and len(whole) == n
        counts = [whole.count((turn(2), turn(j))) for j in (0, 4)]  # all that MIXED has
        assert sum(counts) == n and counts[0] == counts[1]
    pairs = {(turn(i), turn(j)) for pairs in numbers(MIXED, "all", 0.1) for i, j in pairs}
    assert set(mixed(1, **{"--pairs": "all"})[1]) == pairs


def test_the_pairs_of_a_trajectory_stay_together():
    message = {**MIXED[0]["dialogue_history"][0],
               "candidates": [candidate(i, float(i)) for i in range(4)]}
    records = [{**r, "dialogue_history": [message] * 3} for r in MIXED]
    groups = train_policy.make_groups(train_policy.get_args(["--out", "x"]), records)
    assert [len(pairs) for pairs in groups] == [3 * 4] * len(records)


@pytest.mark.parametrize("worth, chosen, rejected, warns", [(1, 100, 0, False), (-1, 0, 25, True)])
def test_it_is_said_how_many_candidates_answer_and_what_they_teach(worth, chosen, rejected, warns,
                                                                   capsys):
    """One of eight candidates answers; it is the best, or the worst."""
    says = [f"{colbench.ANSWER} 1"] + ["what?"] * 7
    records = []
    for n in range(50):
        candidates = [candidate(8 * n + i, worth * 9.0 if i == 0 else 0.1 * i, None, output)
                      for i, output in enumerate(says)]
        message = {"role": "assistant", "content": "a", TURN: None, "candidates": candidates}
        records.append({"task": {"id": "t"}, "dialogue_history": [message]})
    pairs = [Pair((c[0][TURN],), (c[-1][TURN],)) for c in
             (m["dialogue_history"][0]["candidates"] for m in records)]
    if worth < 0:
        pairs = [Pair((c[1][TURN],), (c[n % 4][TURN],)) for n, c in
                 enumerate(m["dialogue_history"][0]["candidates"] for m in records)
                 if n < 48]
    train_policy.tell_answers(pairs, records)
    said = capsys.readouterr().err
    assert f"answers are {chosen}% of the chosen candidates, {rejected}% of the rejected" in said
    assert "12% of all" in said and ("unlearn to answer" in said) == warns


def test_mix_wants_pairs_of_trajectories():
    with pytest.raises(SystemExit, match="--mix: no task has a solved and a worse trajectory"):
        mixed(0.25, [r for r in MIXED if r["task"]["id"] == "c"])


def test_candidates_without_ids_are_read_as_text(rewarded, tiny_dir, monkeypatch):
    """As a judge's are, whose sampler gave none; ids of another model's words are refused."""
    from model import end_of_turn, find_model, plain_ids, turns_in
    tokenizer = find_model(tiny_dir)[1]
    for r in rewarded:
        for c in (c for m in r["dialogue_history"] for c in m.get("candidates", ())):
            del c["token_ids"]
            c["advantage"] = float(len(c["output"]))
    args = train_policy.get_args(["--model", tiny_dir, "--out", "x"])

    def prepared():
        monkeypatch.setattr(sys, "stdin", io.BytesIO(lines(rewarded).encode()))
        return train_policy.prepare(args)[0]
    texts = {c["output"] for r in rewarded for m in r["dialogue_history"]
             for c in m.get("candidates", ())}
    ids = {(*plain_ids(tokenizer, text), *end_of_turn(tokenizer)) for text in texts}
    assert {action for group in prepared() for _, action in turns_in(group)} <= ids
    args.prior = 0.1
    message = next(m for m in rewarded[0]["dialogue_history"] if "candidates" in m)
    del message["candidates"][0]["logprob"]
    with pytest.raises(SystemExit, match="--prior needs the candidates' logprob"):
        prepared()
    message["candidates"][0]["token_ids"] = [len(tokenizer)]
    with pytest.raises(SystemExit, match="not of this --model's tokenizer"):
        prepared()
    del message["candidates"]
    message["token_ids"] = [i - 1 for i in message["token_ids"]]  # in a vocabulary, but another one
    with pytest.raises(SystemExit, match="not of this --model's tokenizer"):
        prepared()


def test_batches_are_a_permutation_and_a_function_of_the_seed():
    groups = [[(g, i) for i in range(1 + g % 4)] for g in range(30)]
    flat = lambda batches: [x for b in batches for x in b]
    one = batches(groups, 8, seed=(0, 0))
    assert sorted(flat(one)) == sorted(flat(groups))
    assert [len(b) for b in one[:-1]] == [8] * (len(one) - 1)
    assert one == batches(groups, 8, seed=(0, 0))
    assert all(one != batches(groups, 8, seed=seed) for seed in ((1, 0), (0, 1)))  # seed, epoch
    order = flat(one)
    assert all(order.index((g, i)) == order.index((g, 0)) + i for group in groups for g, i in group)
    assert groups[3] == [(3, 0), (3, 1), (3, 2), (3, 3)]  # and the input is left alone


def test_the_learning_rate_warms_up_also_where_steps_are_few():
    def lrs(steps):
        return [utils.lr_at(step, steps, 1.0) for step in range(steps)]

    # steps that warm up: 3 %, at least 3, never more than a third of them
    for steps, warmup in ((1, 0), (2, 0), (3, 1), (6, 2), (9, 3), (84, 3), (117, 4), (1000, 30)):
        got = lrs(steps)
        assert got[:warmup] == [(n + 1) / warmup for n in range(warmup)]
        assert got[warmup] == 1 and all(a > b for a, b in zip(got[warmup:], got[warmup + 1:]))
        assert got[-1] >= 0.1 and (steps < 50 or got[-1] < 0.11)


def test_auto_is_bf16_on_a_gpu_alone():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [model.pick_dtype("auto", d) for d in (cpu, gpu)] == [torch.float32, torch.bfloat16]
    assert model.pick_dtype("bf16", cpu) == torch.bfloat16


# --- c: the critic's, never the policy's ----------------------------------------------------------

def train(script, monkeypatch, records, *flags):
    """script.main on these records in this process: what it writes, weights and metrics."""
    out = []
    monkeypatch.setattr(script, "open_stdout", lambda: out.append)
    monkeypatch.setattr(sys, "stdin", io.BytesIO(lines(records).encode()))
    args = script.get_args([str(f) for f in flags])
    script.main(args)
    with open(f"{args.out}/model.safetensors", "rb") as f, open(f"{args.out}/metrics.jsonl") as g:
        return out, f.read(), g.read()


def with_c(records, c):
    copies = json.loads(json.dumps(records))
    return [{**r, "task": {**r["task"], "hidden_information": c}} for r in copies]


@pytest.mark.full
def test_c_changes_the_critic_unless_it_may_not_read_it(rewarded, tiny_dir, tmp_path, monkeypatch):
    for hidden_info in (1, 0):
        flags = ["--model", tiny_dir, "--hidden_info", hidden_info, "--lr", 1e-4, "--held_out", 0,
                 "--epochs", 1, "--out"]
        runs = [train(train_critic, monkeypatch, with_c(rewarded, c), *flags,
                      tmp_path / f"{c}{hidden_info}") for c in ("rate=3", "fee=7")]
        scores = [[m["advantage"] for r in out for m in r["dialogue_history"] if "advantage" in m]
                  for out, _, _ in runs]
        assert len(scores[0]) > 8 and all(map(math.isfinite, scores[0])) and any(scores[0])
        assert (scores[0] != scores[1]) == (runs[0][1] != runs[1][1]) == bool(hidden_info)


def decoded(tokenizer, ids):
    return tokenizer.decode(list(ids), skip_special_tokens=False)


def test_what_each_critic_reads(tiny_dir):
    """c stands before both, or pi's prompt alone, or neither's."""
    import model as M
    tokenizer = M.find_model(tiny_dir)[1]
    code = "def f(x, rate=3): return x * rate"
    task = {"problem_description": "write f(x)", "ground_truth": code}
    history, action = [{"role": "user", "content": "write f(x)"}], {"output": "what is the rate?"}

    def read(**critic):
        """[prompt, action, reference's prompt, action], as text."""
        critic = {"head": "logratio", "hidden_info": 1, "ref_context": "hidden", **critic}
        [(turn, ref_turn)] = train_critic.critic_turns(critic, tokenizer, task, history, [action])
        return [decoded(tokenizer, ids) for ids in (*turn, *ref_turn)]

    blind = "<|begin|><|user|>write f(x)<|end|><|assistant|>"
    seeing = blind.replace("write", "Hidden reference:\ndef f(x, rate=3): return x * rate\n\nwrite")
    said = "what is the rate?<|end|>"
    assert read() == read(head="value") == read(head="regression") == [seeing, said] * 2
    assert read(ref_context="agent") == [seeing, said, blind, said]
    assert read(hidden_info=0) == read(hidden_info=0, ref_context="agent") == [blind, said] * 2
    action["output"] = ""  # a candidate that ended at once
    assert read(head="value")[1] == read(head="value")[3] == "<|end|>"


@pytest.mark.parametrize("loss", ["dpo", "mtdpo", "rft"])
def test_c_never_reaches_the_policy(loss, rewarded, tiny_dir, tmp_path, monkeypatch):
    for r in rewarded:
        for m in r["dialogue_history"]:
            for i, candidate in enumerate(m.get("candidates", ())):
                candidate["advantage"] = float(i)
    flags = ["--loss", loss, "--model", tiny_dir, "--lr", 1e-4, "--epochs", 1, "--out"]
    runs = [train(train_policy, monkeypatch, with_c(rewarded, c), *flags, tmp_path / c)
            for c in ("one", "two")]
    assert runs[0][1] == runs[1][1]
    assert runs[0][1] != open(f"{tiny_dir}/model.safetensors", "rb").read()  # it did train


def test_every_pass_tells_how_far_it_is(rewarded, tiny_dir, tmp_path, monkeypatch, capfd):
    """Where stderr is no terminal: here at once, else every ten seconds."""
    monkeypatch.setattr(utils, "SHOW_EVERY", 0)
    out = tmp_path / "out"
    train(train_critic, monkeypatch, rewarded, "--model", tiny_dir, "--held_out", 0, "--out", out)
    said = capfd.readouterr().err
    for told in ("reference: ", "critic: step 1 of ", "seconds ", "advantages: "):
        assert told in said
    train(train_critic, monkeypatch, rewarded, "--score", 1, "--out", out)
    said = capfd.readouterr().err
    assert "scoring: " in said


@pytest.mark.parametrize("script", [train_critic, train_policy], ids=["critic", "policy"])
def test_training_starts_at_log_2_and_micro_batches_do_not_matter(script, rewarded, tiny_dir,
                                                                  tmp_path, monkeypatch):
    flags = ["--model", tiny_dir, "--lr", 1e-4, "--nll_coef", 0, "--batch_size", 4, "--epochs", 3]
    flags += ["--held_out", 0] if script is train_critic else ["--loss", "mtdpo"]
    runs = []
    for tree_tokens in (100, 10 ** 6):
        more = ["--tree_tokens", tree_tokens, "--out", tmp_path / str(tree_tokens)]
        _, saved, metrics = train(script, monkeypatch, rewarded, *flags, *more)
        first, *rows = map(json.loads, metrics.splitlines())
        steps = [row for row in rows if "step" in row]
        assert first["args"]["lr"] == 1e-4 and first["steps"] == len(steps) == 3
        assert abs(steps[0]["loss"] - math.log(2)) < 1e-5 and steps[-1]["loss"] < math.log(2)
        runs.append((steps, load(saved)))
    (steps, weights), (others, other_weights) = runs
    for a, b in zip(steps, others, strict=True):
        assert abs(a["loss"] - b["loss"]) < 1e-5
        assert abs(a["grad_norm"] / b["grad_norm"] - 1) < 1e-4
    for name, w in weights.items():  # where a gradient is all but zero, Adam makes rounding larger
        assert (w - other_weights[name]).abs().mean() < 1e-7, name


def test_rewards_that_differ_by_the_margin_make_a_pair():
    """One of ten tests: 0.6 - 0.5 is a little less than 0.1."""
    for k in range(1, 11):
        rs = [{"task": {"id": "t"}, "reward": r / 10, "dialogue_history": [
            {"role": "assistant", TURN: ((1,), (r,))}]} for r in (k - 1, k)]
        (pair,), = trajectory_pairs(rs, "all", 0.1)
        assert pair.chosen == (((1,), (k,)),)
        assert not trajectory_pairs(rs, "all", 0.11)


PREFERENCES = [
    {"prompt": [{"role": "user", "content": "write pay(x)"}],
     "chosen": [{"role": "assistant", "content": "what is the rate?"},
                {"role": "user", "content": "rate=3"},
                {"role": "assistant", "content": "def pay(x, rate=3): return x * rate"}],
     "rejected": [{"role": "assistant", "content": "def pay(x): return x"}]},
    {"chosen": [{"role": "system", "content": "be short"}, {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b c d"}, {"role": "user", "content": "e"},
                {"role": "assistant", "content": "f <|end|> g"}],
     "rejected": [{"role": "system", "content": "be short"}, {"role": "user", "content": "a"},
                  {"role": "assistant", "content": "b c d"}, {"role": "user", "content": "e"},
                  {"role": "assistant", "content": "h"}]}]


def test_preferences_train_on_every_token_of_the_assistant(tiny_dir, monkeypatch):
    """By a loop over one forward of the whole conversation."""
    pi, tokenizer = model.load(tiny_dir)
    pi_ref, _ = model.load(tiny_dir)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in pi.parameters():
            p += 0.01 * torch.randn_like(p)
    flags = ["--model", tiny_dir, "--loss", "mtdpo", "--beta", "0.7", "--nll_coef", "0.5"]
    args = train_policy.get_args([*flags, "--out", "x"])
    monkeypatch.setattr("sys.stdin", io.BytesIO(lines(PREFERENCES).encode()))
    groups, _ = train_policy.prepare(args)

    def by_loop(lm, history):
        """Log-probs of all tokens of the assistant, to the end of its turn."""
        whole = model.render(tokenizer, history)
        logps = lm.lm.eval()(torch.tensor([whole]), use_cache=False)  # its attention: see below
        logps, found = logps.logits[0].log_softmax(-1), []
        for t, m in enumerate(history):
            if m["role"] == "assistant":
                start = len(model.render(tokenizer, history[:t]))
                end = start + len(model.action_ids(tokenizer, m))
                assert whole[:start] == model.render(tokenizer, history[:t])
                assert whole[start:end] == list(model.action_ids(tokenizer, m))
                found += [logps[i - 1, whole[i]] for i in range(start, end)]
        return torch.stack(found)

    turns = model.turns_in(pair for pairs in groups for pair in pairs)
    logps, ref = (dict(zip(turns, model.action_logps(lm, turns))) for lm in (pi, pi_ref))
    for lm in (pi, pi_ref):
        lm.lm.set_attn_implementation("eager")
    by_chosen = {pair.chosen[-1]: pair for pairs in groups for pair in pairs}
    assert len(by_chosen) == 2
    for line in PREFERENCES:
        sides = [line.get("prompt", []) + line[side] for side in ("chosen", "rejected")]
        (chosen, ref_chosen), (rejected, ref_rejected) = (
            [by_loop(lm, side) for lm in (pi, pi_ref)] for side in sides)
        margin = 0.7 * ((chosen - ref_chosen).sum() - (rejected - ref_rejected).sum())
        want = math.log(1 + math.exp(-margin)) - 0.5 * chosen.mean().item()
        history = sides[0][:-1]
        last = tuple(model.render(tokenizer, history)), model.action_ids(tokenizer, sides[0][-1])
        loss, got = train_policy.pair_loss(args, by_chosen[last], logps, ref)
        assert got.item() == pytest.approx(margin.item(), abs=1e-5)
        assert loss.item() == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("line, message", [
    ({"chosen": PREFERENCES[0]["chosen"]}, "starts with the assistant"),
    ({**PREFERENCES[0], "rejected": None}, "no 'rejected' in this record"),
    ({**PREFERENCES[0], "chosen": "def pay(x): return x"}, "chosen is not a list"),
    ({**PREFERENCES[0], "chosen": [{"role": "user", "content": "?"}]}, "no message of the"),
    ({**PREFERENCES[0], "rejected": [{"role": "tool", "content": "?"}]}, "lacks content, or a")])
def test_what_is_wrong_with_a_preference_is_said(line, message, tiny_dir, tmp_path):
    flags = ["--loss", "mtdpo", "--model", tiny_dir, "--out", tmp_path / "o"]
    done = run_script("train_policy.py", *flags, stdin=[PREFERENCES[0], line])
    assert done.returncode == 1 and "error: stdin, line 2: " in done.stderr, done.stderr
    assert message in done.stderr
