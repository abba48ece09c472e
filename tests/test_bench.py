"""The benchmarks: they run; equal work is found equal, unequal work is found out."""
import json
import random

import bench_train as B
import plan
import pytest
import torch
from conftest import key_of, records, script, succeed
from model import Pair, find_model, turns_in
from test_collect_endpoints import Server, chat
from test_model import FAMILIES, SLOW, small, some_turns
from utils import rng


@pytest.mark.parametrize("job", ["dpo", "rft"])
def test_unequal_work_is_found_out(job, tmp_path, monkeypatch):
    """All of a step's gradient and loss are compared."""
    folder, cpu = B.make_data(str(tmp_path), 2, "tiny"), torch.device("cpu")
    model, pi_ref = B.load_perturbed(folder, cpu), B.load(folder, cpu)[0]
    batch = B.all_batches(B.read_groups(job, folder), 3, epochs=1, seed=0)[0]
    given = model, pi_ref, job, batch, B.turn_logps(pi_ref, B.turns_in(batch), B.TREE_TOKENS)
    assert B.difference_of_steps(*given) < 1e-5
    loss_of = B.loss_of  # official_step takes one pair of the batch at a time
    monkeypatch.setattr(B, "loss_of", lambda job, pairs, *more: loss_of(job, pairs, *more)
                        * (1.01 if pairs == batch[-1:] else 1))
    assert B.difference_of_steps(*given) > 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_memory_is_that_of_the_tensors_alive(seed):
    """A view shares its tensor's memory, which is free when neither is left."""
    r, alive, ignored = random.Random(seed), [], torch.empty(99, device="meta")
    with plan.Memory([ignored]) as memory:
        peak = 0
        for _ in range(200):
            action = r.choice(["new", "new", "view", "sum", "drop", "drop"])
            if action == "new" or not alive:
                alive.append(torch.empty(r.randrange(1, 100), device="meta"))
            elif action == "view":
                alive.append(r.choice(alive).view(1, -1))
            elif action == "sum":
                alive.append(ignored[:1] + r.choice(alive))
            else:
                alive.pop(r.randrange(len(alive)))
            sizes = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in alive}
            assert memory.now == sum(sizes.values())
            peak = max(peak, memory.now)
        assert memory.peak == peak


def tree_tokens(turns):
    """Tokens of a tree: the distinct prefixes of its turns."""
    return len({(turn.prompt + turn.action)[:n + 1] for turn in turns
                for n in range(len(turn.prompt + turn.action))})


def test_a_plan_is_that_of_plain_sums():
    """Of tokens, FLOPs and bytes; what takes more memory is told to take more."""
    r, config = random.Random(0), small("llama").config
    pairs = [Pair(*((turn,) for turn in some_turns(r.sample(range(40), 20))[:2]))
             for _ in range(6)]
    batches, ref_turns = [pairs[:4], pairs[4:]], turns_in(pairs)

    def told(gpus=1, **flags):
        args = B.train_critic.get_args(["--out", "x", "--tree_tokens", "9999"])
        vars(args).update(flags)
        return plan.plan(args, gpus, config, batches, ref_turns)

    got, n = told(recompute=0), sum(p.numel() for p in small("llama").parameters())
    by_batch = [tree_tokens(turns_in(batch)) for batch in batches]
    assert got["tokens"] == {"computed": sum(by_batch), "slowest_rank": sum(by_batch)}
    assert got["reference_tokens"] == tree_tokens(ref_turns) and got["parameters"] == n
    flops = 6 * sum(by_batch) + 2 * tree_tokens(ref_turns)
    assert got["hours"] == pytest.approx(n * flops / 400e12 / 3600, rel=5e-3)
    assert told(recompute=1)["hours"] / got["hours"] == pytest.approx(
        (flops + 2 * sum(by_batch)) / flops, rel=1e-2)
    assert got["gb_per_gpu"] == pytest.approx(16 * n / 1e9, rel=5e-3)
    assert told(gpus=4)["gb_per_gpu"] == pytest.approx(4 * n / 1e9, rel=5e-3)
    assert told(offload=1)["gb_per_gpu"] == 0
    offloaded, shared, usual, kept = (told(**flags)["peak_gb_per_gpu"] for flags in (
        {"offload": 1, "recompute": 1}, {"gpus": 4, "recompute": 1}, {"recompute": 1},
        {"recompute": 0}))
    assert max(offloaded, shared) < usual < kept and usual > 12 * n / 1e9


@pytest.mark.parametrize("kind, own, supports_trees", [
    *((kind, own, True) for kind, own in FAMILIES.values()),
    *((kind, own, False) for kind, own in SLOW.items())])
def test_plan_tells_the_memory_of_trees_alone(kind, own, supports_trees):
    turns = some_turns()
    pair, args = Pair((turns[0],), (turns[1],)), B.train_critic.get_args(["--out", "x"])
    told = plan.plan(args, 2, small(kind, **own).config, [[pair]], [])["peak_gb_per_gpu"]
    assert (told is not None) == supports_trees


def test_plan_tells_the_tokens_of_an_llm_human_to_5_percent(tiny_dir):
    """From every other episode of a collection, whose server counts what it receives and sends."""
    tokenizer, sizes = find_model(tiny_dir)[1].tokenizer, []

    def reply(path, body):
        prompt = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)
        r = rng(body["messages"][0]["content"])
        text = " ".join(r.choices(["the", "rate", "is", "4", "odd"], k=r.randint(10, 30)))
        sizes.append((len(prompt["input_ids"]), len(tokenizer(text)["input_ids"]) + 1))
        return chat(text)

    tasks = script("tests/toy.py", "tasks", "--n", 6, "--seed", 1).stdout
    done = succeed("collect.py", "--model", tiny_dir, "-k", 10, "--max_turns", 4, "--max_tokens", 9,
                   "--human", Server(reply).url, stdin=tasks)
    episodes = sorted(records(done.stdout), key=key_of)
    assert len(episodes) == 60 and len(sizes) > 150
    used = dict(zip(("read", "written"), map(sum, zip(*sizes))))
    flags = ["--tasks", 6, "-k", 10, "--human_model", tiny_dir]
    for sample, within in ((episodes, 1e-6), (episodes[::2], 0.05)):
        prices = ["--price_in", 0.15, "--price_out", 0.6]
        told = json.loads(succeed("tests/plan.py", "collect.py", *flags, *prices,
                                  stdin=sample).stdout)
        for name, tokens in used.items():
            assert told[name] == pytest.approx(tokens, rel=within)
            assert told[f"{name}_per_episode"] == pytest.approx(tokens / 60, rel=within)
        dollars = (0.15 * used["read"] + 0.6 * used["written"]) / 1e6
        assert told["dollars"] == pytest.approx(dollars, rel=within + 0.005)


@pytest.mark.full
@pytest.mark.parametrize("command", [
    "grade --repeats 1 --tasks 3",
    "train --repeats 1 --tasks 1 --shapes tiny --jobs dpo scoring --ways 01 10",
    "collect --episodes 4 --batch 4 --delay 0.01 --max_turns 2 --repeats 1"])
def test_the_benchmarks_run(command, tmp_path):
    name, *flags = command.split()
    rows = tmp_path / "rows.json"
    if name == "train":  # it fails if values differ from those of the released procedure
        flags += ["--out", rows]
    done = succeed(f"tests/bench_{name}.py", *flags)
    assert done.stdout
    if name == "train":
        rows = {row["row"]: row for row in json.loads(rows.read_text())}
        assert rows["tiny oracle"]["tree_gradients"] < 1e-4
        assert rows["tiny dpo C0 R1"]["differs"] < 1e-4 and rows["tiny scoring"]["seconds"] > 0
