"""--dry_run: its tokens are those of the run itself, its FLOPs those that torch counts, its memory what lives on the CPU."""
import json
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

import model as M
from conftest import demos, records, script
from test_model import some_turns

FLAGS = {"critic": ["train_critic.py", "--held_out", 0.3, "--batch_size", 2, "--epochs", 2],
         "dpo": ["train_policy.py", "--batch_size", 9], "mtdpo": ["train_policy.py", "--loss", "mtdpo"],
         "rft": ["train_policy.py", "--loss", "rft"], "tiny": ["train_policy.py", "--loss", "rft", "--all", 1, "--model", "tiny"]}


@pytest.mark.parametrize("job, bound", [("critic", 16384), ("dpo", 16384), ("mtdpo", 400), ("rft", 16384),
                                        ("tiny", 100)])
def test_tokens_are_those_of_the_run(job, bound, rewarded, tiny_dir, tmp_path):
    for r in rewarded:
        for m in r["dialogue_history"]:
            for i, c in enumerate(m.get("candidates", ())):
                c["advantage"] = float(i)
    name, *flags = FLAGS[job]
    flags = [name, "--model", tiny_dir, *flags, "--max_tokens", bound, "--out"]
    if job == "tiny":
        rewarded = demos(12)
    dry = script(*flags, tmp_path / "dry", "--dry_run", 4, stdin=rewarded)
    assert dry.returncode == 0 and not (tmp_path / "dry").exists(), dry.stderr
    plan = json.loads(dry.stdout)
    assert script(*flags, tmp_path / "run", stdin=rewarded).returncode == 0
    run = records((tmp_path / "run" / "metrics.jsonl").read_text())
    assert plan["steps"] == run[0]["steps"] and plan["gpus"] == 4
    assert plan["training_tokens"] + plan["scoring_tokens"] == run[-1]["computed"]


def planned(config, examples, **more):
    args = SimpleNamespace(**{"dry_run": 1, "replicate": 1, "max_tokens": 10 ** 6, "dtype": "fp32", "recompute": 0, **more})
    return M.dry_run(args, config, [examples], [M.turns_in(examples)])


@pytest.mark.parametrize("recompute", [0, 1])
def test_flops_and_memory_are_those_of_a_step(recompute):
    config = LlamaConfig(vocab_size=1000, hidden_size=192, intermediate_size=512, num_hidden_layers=4, head_dim=32,
                         num_attention_heads=6, num_key_value_heads=6, attn_implementation="tree_sdpa")
    turns = sorted({(tuple(20 * p), tuple(10 * a)) for p, a in some_turns()})
    plan = planned(config, [M.Pair((turn,)) for turn in turns], recompute=recompute)
    model = M.TreeLM(LlamaForCausalLM(config))
    assert plan["parameters"] == sum(p.numel() for p in model.parameters())
    assert plan["gb_a_gpu"]["weights_gradients_moments"] == pytest.approx(16 * plan["parameters"] / 1e9, rel=0.01)
    if recompute:
        M.recompute_layers(model)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with FlopCounterMode(display=False) as counter:
        M.score(model, turns, 10 ** 6)
        sum(x.sum() for x in M.action_logps(model, turns)).backward()
    of = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in of.items() if str(op) in ("aten.mm", "aten.addmm", "aten.bmm"))
    tokens, keys = M.tree_size(turns)
    attention = 4 * 4 * 6 * 32 * keys * (1 + 3 + recompute)
    # a layer is not computed again to its very end: the last product keeps nothing
    assert plan["petaflops"] * 1e15 == pytest.approx(products + attention, rel=0.05 if recompute else 0.01)

    with M.LiveBytes(model.parameters()) as live:
        tree = M.pack(turns)
        model(tree, torch.cat(tree.actions).unique(), 10 ** 6).sum().backward()
    assert plan["gb_a_gpu"]["activations"] * 1e9 == pytest.approx(live.peak, rel=0.1)


def test_live_bytes_are_those_alive_at_once():
    with M.LiveBytes() as live:
        a = torch.zeros(1000)
        b = a.view(10, 100) + 1  # 4000 bytes; the view none
        del a
        c = b * 2
        assert live.now == 8000 and live.peak == 8000, live.now
        del b, c
        torch.zeros(10)
    assert live.now == 0 and live.peak == 8000


def test_more_gpus_hold_less_each_and_an_8b_model_takes_16_gb_on_8():
    config = LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                         num_attention_heads=32, num_key_value_heads=8)
    prompt = tuple(range(3000))
    flags = {"dtype": "auto", "recompute": None}
    chosen, rejected = ((prompt, (5,) * 400),), ((prompt, (6,) * 300),)
    plan = planned(config, [M.Pair(chosen, rejected)], dry_run=8, **flags)
    assert plan["parameters"] == 8_030_261_248 and plan["largest_tree"] == 3700
    assert plan["gb_a_gpu"]["weights_gradients_moments"] == pytest.approx(16.06, rel=0.01)
    # by hand: 32 layers' inputs in 2 bytes, 1 GB; the head's gradient twice, 2.1 GB; its logits, a layer's insides
    assert 3.1 < plan["gb_a_gpu"]["activations"] < 6
    # a layer has 218M weights: 3 * 2 + 4 bytes each; embedding and head 1.05B: 2 bytes each, and with few activations
    # the most is at the end, when their gradients are in 16 and in 32 bits
    assert plan["gb_a_gpu"]["gathered"] == pytest.approx(2.18 + 2.1, rel=0.01)
    assert plan["gb_a_gpu"]["total"] == pytest.approx(16.06 + 4.28 + plan["gb_a_gpu"]["activations"], rel=0.01)
    few = planned(config, [M.Pair((((1,) * 9, (5,) * 4),))], dry_run=8, **flags)["gb_a_gpu"]
    assert few["activations"] < 2.5 and few["total"] == pytest.approx(16.06 + max(6.3, 4.28 + few["activations"]), rel=0.01)
    halves = planned(config, [M.Pair(chosen)], dry_run=16, replicate=2, **flags)
    assert halves["gb_a_gpu"]["weights_gradients_moments"] == plan["gb_a_gpu"]["weights_gradients_moments"]
