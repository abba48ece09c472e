"""The benchmarks: they run; equal work is found equal, unequal work is found out."""
import json
import shutil

import bench_train as B
import pytest
import torch
from conftest import ROOT, key_of, records, script, succeed
from model import Pair, find_model
from test_collect_endpoints import Server, chat
from test_model import FAMILIES, SLOW, small, some_turns
from utils import rng


@pytest.mark.parametrize("job", ["dpo", "rft"])
def test_unequal_work_is_found_out(job, tmp_path, monkeypatch):
    """All of a step's gradient and loss are compared."""
    folder, cpu = B.make_data(str(tmp_path), 2, "tiny"), torch.device("cpu")
    model, pi_ref = B.load_perturbed(folder, cpu), B.load(folder, cpu)[0]
    batch = B.all_batches(B.read_groups(job, folder), 3, epochs=1, seed=0)[0]
    given = model, pi_ref, job, batch, B.score(pi_ref, B.turns_in(batch), B.TREE_TOKENS)
    assert B.difference_of_steps(*given) < 1e-5
    loss_of = B.loss_of  # official_step takes one pair of the batch at a time
    monkeypatch.setattr(B, "loss_of", lambda job, pairs, *more: loss_of(job, pairs, *more)
                        * (1.01 if pairs == batch[-1:] else 1))
    assert B.difference_of_steps(*given) > 1e-3


def told_gb(job, shape, recompute, folder):
    """What plan.py tells of the job's first batch of make_data's, less the moments, in GB."""
    module, flags, size, _ = B.JOBS[job]
    groups = B.read_groups(job.split()[0], folder)  # read once for all sizes of a batch
    batch = B.all_batches(groups, size, epochs=1, seed=0)[0]
    args = module.get_args(["--out", "x", "--recompute", str(recompute), *flags])
    return B.expected_gb(B.plan(args, 1, B.config_of(shape), [batch], []))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return B.make_data(str(tmp_path_factory.mktemp("data")), 8, "tiny")


@pytest.mark.parametrize("job, recompute, measured", [
    ("dpo 24", 1, 13.48), ("dpo 24", 0, 17.49), ("critic", 1, 14.68), ("critic", 0, 34.38),
    ("dpo 96", 1, 15.2)])
def test_plan_tells_the_memory_that_an_h100_took(job, recompute, measured, data):
    """In GB, of a model with 1.2B weights that is not compiled.

    Then a turn's candidate pairs were drawn with replacement, so that a batch had fewer turns.
    """
    within = 0.03 if job.startswith("dpo") else 0.022
    assert told_gb(job, "1b", recompute, data) == pytest.approx(measured, rel=within)


@pytest.mark.parametrize("kind, own, supports_trees", [
    *((kind, own, True) for kind, own in FAMILIES.values()),
    *((kind, own, False) for kind, own in SLOW.items())])
def test_plan_tells_the_memory_of_trees_alone(kind, own, supports_trees):
    turns = some_turns()
    pair, args = Pair((turns[0],), (turns[1],)), B.train_critic.get_args(["--out", "x"])
    told = B.plan(args, 2, small(kind, **own).config, [[pair]], [])["peak_gb_per_gpu"]
    assert (told is not None) == supports_trees


def test_plan_tells_the_tokens_of_an_llm_human_to_5_percent(tiny_dir):
    """From every other episode of a collection, whose server counts what it receives and sends."""
    tokenizer, sizes = find_model(tiny_dir)[1], []

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
def test_and_of_8b_by_lora(tmp_path, data):
    from test_readme import edited  # which reads the README; the copy has none
    copy = edited("lora", tmp_path)
    shutil.copytree(f"{ROOT}/tests", copy / "tests")
    plan = copy / "tests" / "plan.py"
    plan.write_text(plan.read_text().replace("# after lora.diff: ", ""))
    (copy / "tests" / "told.py").write_text(
        "import sys, test_bench\nprint(test_bench.told_gb('critic', '8b', 1, sys.argv[1]))")
    done = succeed(copy / "tests" / "told.py", data)
    pi_ref = 2 * 8.07  # was not there
    assert float(done.stdout) - pi_ref == pytest.approx(25.91, rel=0.03)


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
        assert rows["tiny dpo C0 R1"]["differs"] < 1e-4 > rows["tiny scoring"]["differs"]
