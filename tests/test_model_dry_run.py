"""--dry_run: tokens as in the run."""
import json
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig

import model as M
from conftest import demos, records, script

FLAGS = {"critic": ["train_critic.py", "--held_out", 0.3, "--batch_size", 2, "--epochs", 2],
         "value": ["train_critic.py", "--head", "value", "--epochs", 1],
         "dpo": ["train_policy.py", "--batch_size", 9],
         "mtdpo": ["train_policy.py", "--loss", "mtdpo"],
         "tiny": ["train_policy.py", "--loss", "rft", "--all", 1, "--model", "tiny"]}
SMALL = LlamaConfig(vocab_size=1000, hidden_size=192, intermediate_size=512, num_hidden_layers=8,
                    head_dim=32, num_attention_heads=6, num_key_value_heads=6,
                    attn_implementation="tree")
LARGE = LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336,
                    num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)


@pytest.mark.full
@pytest.mark.parametrize("job, world", [
    ("critic", 1), ("value", 1), ("dpo", 1), ("mtdpo", 1), ("tiny", 1), ("critic", 2), ("dpo", 2)])
def test_tokens_are_those_of_the_run(job, world, rewarded, tiny_dir, tmp_path):
    """In the log; --tree_tokens is such that some trees are computed in parts."""
    for r in rewarded:
        for m in r["dialogue_history"]:
            for i, c in enumerate(m.get("candidates", ())):
                c["advantage"] = float(i)
    name, *flags = FLAGS[job]
    flags = [name, "--model", tiny_dir, *flags, "--tree_tokens", 200, "--out"]
    given = demos(12) if job == "tiny" else rewarded
    dry = script(*flags, tmp_path / "dry", "--dry_run", world, stdin=given)
    assert dry.returncode == 0 and not (tmp_path / "dry").exists(), dry.stderr
    plan = json.loads(dry.stdout)
    done = script(*flags, tmp_path / "run", stdin=given, ranks=world)
    assert done.returncode == 0, done.stderr
    run = records((tmp_path / "run" / "metrics.jsonl").read_text())
    assert plan["steps"] == run[0]["steps"] and plan["gpus"] == world
    tokens = plan["tokens"]
    assert tokens["computed"] == sum(row["tokens"] for row in run if "step" in row)
    assert 0 < tokens["computed"] <= tokens["slowest_rank"]
    if world == 1:
        assert tokens["computed"] == tokens["slowest_rank"]


def planned(config, steps, reference=(), **flags):
    args = {"dry_run": 1, "replicate": 1, "tree_tokens": 10 ** 6, "dtype": "fp32",
            "offload": 0, "recompute": 0}
    return M.dry_run(SimpleNamespace(**{**args, **flags}), config, steps, reference)


def test_tokens_by_hand():
    """Two trajectories of a task, two turns each; a second pair with shorter actions."""
    def trajectory(action, n):
        return ((1, 2, 3), (action,) * n), ((1, 2, 3, *[action] * n, 4), (action,) * n)

    pairs = [M.Pair(trajectory(5, 4), trajectory(6, 6)), M.Pair(trajectory(7, 1), trajectory(8, 2))]
    official = 2 * (3 + 6 + 1 + 6) + 2 * (3 + 2 + 1 + 2)
    both = 3 + (4 + 1 + 4) + (6 + 1 + 6) + (1 + 1 + 1) + (2 + 1 + 2)
    turns = M.turns_in(pairs)
    for gpus in (1, 2, 3):
        shares = list(map(M.count_tokens, M.deal(turns, 10 ** 6, gpus)))
        total, slowest = sum(shares), gpus * max(shares)
        assert len(shares) == gpus and (gpus > 1 or total == both)
        plan = planned(SMALL, [pairs, pairs], turns, dry_run=gpus)
        assert plan["tokens"] == {"official": 2 * official, "computed": 2 * total,
                                  "slowest_rank": 2 * slowest}
        assert plan["reference_tokens"] == {"official": 2 * official, "computed": total}
        assert plan["sharing"] == 4 * official / (3 * total)
        assert plan["scoring_tokens"] == total and plan["examples"] == 4
    assert planned(SMALL, [pairs])["reference_tokens"] == {"official": 0, "computed": 0}
    plan = planned(SMALL, [pairs[:1]], tree_tokens=15)  # the chosen side, then the other's turns
    assert plan["tokens"]["computed"] == 12 + (3 + 6) + 16


def test_more_gpus_hold_less_each_and_an_8b_model_takes_16_gb_on_8():
    prompt = tuple(range(3000))
    steps = [[M.Pair(((prompt, (5,) * 400),), ((prompt, (6,) * 300),))]]
    plan = planned(LARGE, steps, dry_run=8, recompute=None)
    assert plan["parameters"] == 8_030_261_248
    assert plan["gb_a_gpu"] == pytest.approx(16.06, rel=0.01)
    assert planned(LARGE, steps, dry_run=16, replicate=2)["gb_a_gpu"] == plan["gb_a_gpu"]
    assert planned(LARGE, steps, offload=1)["gb_a_gpu"] == 0
    # of 6 to 8 FLOPs a weight and token, at 400 TFLOP/s
    tokens = plan["tokens"]["slowest_rank"]
    assert plan["hours"] == pytest.approx(8 * 8.03e9 * tokens / 8 / 4e14 / 3600, rel=0.01)


def test_copies_that_do_not_divide_the_processes_are_refused(tiny_dir):
    steps = [[M.Pair((((1,) * 9, (5,) * 4),))]]
    message = "error: --replicate {} does not divide the number of processes, {}"
    with pytest.raises(SystemExit, match=message.format(3, 4)):
        planned(LARGE, steps, dry_run=4, replicate=3)
    with pytest.raises(SystemExit, match=message.format(2, 1)):
        M.load(tiny_dir, replicate=2)
