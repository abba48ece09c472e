"""--dry_run: tokens as in the run, FLOPs as torch counts them, memory as autograd keeps it."""
import io
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

import model as M
import train_policy
import utils
from conftest import demos, lines, records, script
from test_model import some_turns

FLAGS = {"critic": ["train_critic.py", "--held_out", 0.3, "--batch_size", 2, "--epochs", 2],
         "value": ["train_critic.py", "--head", "value", "--epochs", 1],
         "dpo": ["train_policy.py", "--batch_size", 9],
         "mtdpo": ["train_policy.py", "--loss", "mtdpo"],
         "tiny": ["train_policy.py", "--loss", "rft", "--all", 1, "--model", "tiny"]}
SMALL = LlamaConfig(vocab_size=1000, hidden_size=192, intermediate_size=512, num_hidden_layers=8,
                    head_dim=32, num_attention_heads=6, num_key_value_heads=6,
                    attn_implementation="tree_sdpa")
LARGE = LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336,
                    num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)


@pytest.mark.full
@pytest.mark.parametrize("job, world", [
    ("critic", 1), ("value", 1), ("dpo", 1), ("mtdpo", 1), ("tiny", 1), ("critic", 2), ("dpo", 2)])
def test_tokens_are_those_of_the_run(job, world, rewarded, tiny_dir, tmp_path):
    """In the log; --max_tokens is such that some trees are computed in parts."""
    for r in rewarded:
        for m in r["dialogue_history"]:
            for i, c in enumerate(m.get("candidates", ())):
                c["advantage"] = float(i)
    name, *flags = FLAGS[job]
    flags = [name, "--model", tiny_dir, *flags, "--max_tokens", 200, "--out"]
    given = demos(12) if job == "tiny" else rewarded
    dry = script(*flags, tmp_path / "dry", "--dry_run", world, stdin=given)
    assert dry.returncode == 0 and not (tmp_path / "dry").exists(), dry.stderr
    plan = json.loads(dry.stdout)
    done = script(*flags, tmp_path / "run", stdin=given, ranks=world)
    assert done.returncode == 0, done.stderr
    run = records((tmp_path / "run" / "metrics.jsonl").read_text())
    assert plan["steps"] == run[0]["steps"] and plan["gpus"] == world
    tokens, (told,) = plan["tokens"], (row for row in run if "sharing" in row)
    slowest = tokens.pop("slowest_rank")
    for key in ("tokens", "reference_tokens", "sharing"):
        assert plan[key] == told[key]
    assert 0 < tokens["computed"] <= slowest
    if world == 1:
        assert tokens["computed"] == slowest


def planned(config, steps, reference=(), **flags):
    args = {"dry_run": 1, "gpu_gb": 80, "replicate": 1, "max_tokens": 10 ** 6, "dtype": "fp32",
            "offload": 0, "reshard": 1, "recompute": 0}
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
        shares = list(map(M.tree_tokens, M.deal(turns, 10 ** 6, gpus)))
        total, slowest = sum(shares), gpus * max(shares)
        assert len(shares) == gpus and (gpus > 1 or total == both)
        plan = planned(SMALL, [pairs, pairs], turns, dry_run=gpus)
        assert plan["tokens"] == {"official": 2 * official, "computed": 2 * total,
                                  "slowest_rank": 2 * slowest}
        assert plan["reference_tokens"] == {"official": 2 * official, "computed": total}
        assert plan["sharing"] == 4 * official / (3 * total)
        assert plan["scoring_tokens"] == total and plan["examples"] == 4
    assert planned(SMALL, [pairs])["reference_tokens"] == {"official": 0, "computed": 0}
    plan = planned(SMALL, [pairs[:1]], max_tokens=15)  # the chosen side, then the other's turns
    assert plan["tokens"]["computed"] == 12 + (3 + 6) + 16 and plan["largest_tree"] == 16


def kept_bytes(model, turns):
    """(all log-probs, the bytes that autograd keeps for their backward pass)."""
    kept = {}

    def note(x):
        if not any(x is p for p in model.parameters()):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        logps = torch.cat(M.action_logps(model, turns))
    return logps, sum(kept.values())


@pytest.mark.full
@pytest.mark.parametrize("recompute", [0, 1])
def test_flops_and_memory_are_those_of_a_step(recompute):
    turns = sorted({(tuple(20 * p), tuple(10 * a)) for p, a in some_turns()})
    plan = planned(SMALL, [[M.Pair((turn,)) for turn in turns]], turns, recompute=recompute)
    model = M.TreeLM(LlamaForCausalLM(SMALL))
    assert plan["parameters"] == sum(p.numel() for p in model.parameters())
    gb = plan["gb_a_gpu"]
    assert gb["weights_gradients_moments"] == pytest.approx(16 * plan["parameters"] / 1e9, rel=0.01)
    if recompute:
        model.room = 0
    with FlopCounterMode(display=False) as counter:
        M.score(model, turns, 10 ** 6)
        logps, kept = kept_bytes(model, turns)
        logps.sum().backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counts.items()
                   if str(op) in ("aten.mm", "aten.addmm", "aten.bmm"))
    keys = M.Tree(turns).pos.add(1).sum().item()
    attention = 4 * 8 * 6 * 32 * keys * (1 + 3 + recompute)
    # A layer is not recomputed to its very end: its last product keeps nothing.
    rel = 0.05 if recompute else 0.01
    assert plan["petaflops"] * 1e15 == pytest.approx(products + attention, rel=rel)
    if not recompute:  # recomputed ones are kept later
        assert gb["activations"] * 1e9 == pytest.approx(kept, rel=0.15)


@pytest.mark.full
def test_as_many_layers_are_recomputed_as_must_be():
    """Bit for bit the same gradients in any room; what autograd keeps fits in it."""
    turns = [(20 * prompt, 10 * action) for prompt, action in some_turns()]
    tree, model, want = M.Tree(turns), M.TreeLM(LlamaForCausalLM(SMALL)), None
    rooms = [M.activation_bytes(SMALL, tree, 4, n, "cpu") for n in range(8)]
    assert rooms == sorted(rooms, reverse=True)
    for n, room in ((0, rooms[0]), (4, rooms[4]), (7, rooms[7]), (8, 0)):
        model.room = room
        model.zero_grad()
        logps, kept = kept_bytes(model, turns)
        logps.sum().backward()
        assert model.recomputed == n and (kept <= 1.15 * room or not room)
        got = [logps.detach(), *(p.grad for p in model.parameters())]
        want = want or [x.clone() for x in got]
        assert all(map(torch.equal, want, got))
    assert kept < rooms[0] / 3
    with torch.no_grad():
        M.action_logps(model, turns)
    assert model.recomputed == 0


def test_free_memory_is_the_least_of_the_machines_and_the_cgroups(monkeypatch):
    files = {"/proc/meminfo": "MemTotal: 900 kB\nMemAvailable:   800 kB\n",
             "/proc/self/cgroup": "1:name=x:/y\n0::/a/b\n"}
    monkeypatch.setattr(utils, "open", lambda path: there(path), raising=False)

    def there(path):
        if path not in files:
            raise FileNotFoundError
        return io.StringIO(files[path])

    def limit(group, most, used, cache):
        for name, value in (("max", most), ("current", used), ("stat", f"inactive_file {cache}\n")):
            files[f"/sys/fs/cgroup{group}/memory.{name}"] = str(value)

    assert utils.free_memory() == 800 * 1024
    limit("/a/b", "max", 5, 5)
    assert utils.free_memory() == 800 * 1024
    limit("/a", 7000, 3000, 1000)
    assert utils.free_memory() == 5000
    limit("", 4000, 4500, 200)
    assert utils.free_memory() == 0


@pytest.mark.parametrize("loss", ["dpo", pytest.param("rft", marks=pytest.mark.full)])
def test_a_run_with_little_memory_makes_the_same_bits(loss, tiny_dir, rewarded, tmp_path,
                                                      monkeypatch, capfd):
    """It recomputes layers, and says if not even the weights fit."""
    for r in rewarded:
        for m in r["dialogue_history"]:
            for i, c in enumerate(m.get("candidates", ())):
                c["advantage"] = float(i)
    weights, recomputed, forward = [], [], M.layer_forward

    def noted(model, n, *args, **kwargs):
        recomputed.append(model.recomputed)
        return forward(model, n, *args, **kwargs)

    monkeypatch.setattr(M, "layer_forward", noted)
    for gb in (1000, 0.001):
        recomputed.clear()
        monkeypatch.setattr(M, "free_memory", lambda: 1e9 * gb)
        monkeypatch.setattr(sys, "stdin", io.BytesIO(lines(rewarded).encode()))
        out = tmp_path / str(gb)
        args = train_policy.get_args(["--model", tiny_dir, "--out", str(out), "--loss", loss,
                                      "--lr", "1e-3"])
        train_policy.main(args)
        weights.append((out / "model.safetensors").read_bytes())
        said = capfd.readouterr().err
        assert any(recomputed) == ("0.001 GB are free" in said) == (gb < 1)
    assert weights[0] == weights[1]


def test_layers_are_recomputed_that_do_not_fit():
    """More room: fewer of them, so more useful work; never more than 0.9 of the GPU."""
    tree = ((tuple(range(16000)), (5,) * 400),), ((tuple(range(16000)), (6,) * 300),)
    seen = []
    for gb in (40, 80, 141, 300):
        flags = {"dtype": "auto", "recompute": None, "gpu_gb": gb, "dry_run": 8}
        plan = planned(LARGE, [[M.Pair(*tree)] * 8], **flags)
        seen.append((plan["recomputed_layers"], -plan["useful_tflops"]))
        assert plan["gb_a_gpu"]["total"] <= 0.9 * gb
        if plan["recomputed_layers"]:  # with one layer less it would not fit
            assert plan["gb_a_gpu"]["total"] + 3.5 > 0.9 * gb
    assert seen == sorted(seen, reverse=True)
    assert seen[0][0] > seen[1][0] > seen[2][0] > seen[3][0] == 0
    kept = {reshard: planned(LARGE, [[M.Pair(*tree)] * 8], reshard=reshard, **flags)
            for reshard in (0, 1)}
    assert kept[0]["hours"]["sending"] < kept[1]["hours"]["sending"]
    gathered = [kept[reshard]["gb_a_gpu"]["gathered"] for reshard in (0, 1)]
    assert gathered[0] == pytest.approx(gathered[1] + 31 * 0.436, rel=0.01)


def test_more_gpus_hold_less_each_and_an_8b_model_takes_16_gb_on_8():
    prompt = tuple(range(3000))
    flags = {"dtype": "auto", "recompute": 1}
    chosen, rejected = ((prompt, (5,) * 400),), ((prompt, (6,) * 300),)
    plan = planned(LARGE, [[M.Pair(chosen, rejected)]], dry_run=8, **flags)
    assert plan["parameters"] == 8_030_261_248 and plan["largest_tree"] == 3400
    gb = plan["gb_a_gpu"]
    assert gb["weights_gradients_moments"] == pytest.approx(16.06, rel=0.01)
    # By hand: 32 layers' inputs in 2 bytes, 1 GB; the head's gradient twice, 2.1 GB; its logits.
    assert gb["activations"] == pytest.approx(0.97 + 2.1 + 1.07, rel=0.01)
    # A layer has 218M weights: 3 * 2 + 4 bytes each; embedding and head 1.05B: 2 bytes each.
    assert gb["gathered"] == pytest.approx(2.18 + 2.1, rel=0.01)
    assert gb["total"] == pytest.approx(16.06 + 4.28 + gb["activations"], rel=0.01)
    # With few activations the end of the backward pass needs most: gradients in 16 and 32 bits.
    few = planned(LARGE, [[M.Pair((((1,) * 9, (5,) * 4),))]], dry_run=8, **flags)["gb_a_gpu"]
    assert few["activations"] < 2.5
    assert few["total"] == pytest.approx(16.06 + max(6.3, 4.28 + few["activations"]), rel=0.01)
    halves = planned(LARGE, [[M.Pair(chosen)]], dry_run=16, replicate=2, **flags)["gb_a_gpu"]
    assert halves["weights_gradients_moments"] == gb["weights_gradients_moments"]


def test_copies_that_do_not_divide_the_processes_are_refused(tiny_dir):
    steps = [[M.Pair((((1,) * 9, (5,) * 4),))]]
    message = "error: --replicate {} does not divide the number of processes, {}"
    with pytest.raises(SystemExit, match=message.format(3, 4)):
        planned(LARGE, steps, dry_run=4, replicate=3)
    with pytest.raises(SystemExit, match=message.format(2, 1)):
        M.load(tiny_dir, replicate=2)
