"""What sharing prefixes saves, beside the official procedure and TRL's DPOTrainer.

    OMP_NUM_THREADS=1 python tests/bench_train.py                # one core; pip install trl==1.16.0
    python tests/bench_train.py --job policy --repeats 5         # one job alone
    python tests/bench_train.py --memory 1                       # peak memory, a large vocabulary
    python tests/bench_train.py --device cuda --dtype bf16 --shape 8b

policy    DPO, eq. 4: 24 pairs, 4 a turn of 16 candidates of about 60 tokens, 6 turns, prompts of
          400 to 1500 tokens
critic    eq. 2: 6 pairs of the 4 trajectories of a task, 6 turns each, a hidden reference of 260
          tokens in front (ColBench's have about 100 in backend and 450 in frontend tasks)
scoring   the 16 candidates of each of the 6 turns, without gradient

Token ids and weights are random, pi_ref is the policy plus a little noise, the NLL term is off. In
the small shape the head has the same share of the weights as in Llama-3.2-1B (21 %), so that full
logits do not flatter us. The contenders of a job read the same pairs and share one set of weights:

official         a pair is a batch of two padded sequences, full logits, pi_ref on the same batch
                 at every step; the critic reads a trajectory again for each pair it is in
trl              DPOTrainer.training_step, a pair a micro-batch, no checkpointing; pi_ref at every
                 step
trl precomputed  the same with precompute_ref_log_probs
unshared         action_logps of each sequence alone, no padding, pi_ref once
shared           action_logps of the whole batch in one tree, pi_ref once

Every repeat runs each of them, in turn. The table's ratios are its CPU time (cuda: wall time) over
that of `shared`: median [min, max] of the repeats. The bound is the ratio if a token cost the same
everywhere: 1 forward, 3 forward and backward. pi_ref is part of the first epoch; later epochs need
it no more, but for `official` and `trl`. Peak memory is what a step needs beyond weights and
gradients (a pair at a time: with the longest). `of matmuls` is the share of the machine's rate in
large matrix products that the layers' weights alone come to, in a later epoch. stdout has the
figures as JSON. Exits with 1 if losses, gradients (whole vectors) or scores differ by more than
1e-5 of their norm.
"""
import argparse
import copy
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["TQDM_DISABLE"] = "1"

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

from model import TURN, TreeLM, action_logps, pick_attention, score  # noqa: E402
from train_critic import critic_loss, trajectory_pairs  # noqa: E402
from train_policy import candidate_pairs, dpo_loss  # noqa: E402
from utils import fail  # noqa: E402

TRL = "1.16.0"
PROMPTS, ACTION, CANDIDATES, HIDDEN, BETA = range(400, 1501, 220), (40, 80), 16, 260, 0.1
#           width, MLP, layers, heads, KV heads, head size, vocabulary, tied
SHAPES = {"tiny": (64, 128, 1, 2, 1, 32, 256, True),
          "small": (768, 2048, 2, 12, 3, 64, 4096, False),
          "memory": (128, 384, 2, 4, 1, 32, 128256, False),
          "1b": (2048, 8192, 16, 32, 8, 64, 128256, True),
          "3b": (3072, 8192, 28, 24, 8, 128, 128256, True),
          "8b": (4096, 14336, 32, 32, 8, 128, 128256, False)}
TIME = {"cpu": "cpu", "cuda": "wall"}  # what is compared
TOKENS = {False: 0, True: 0}  # that went through a model without gradient, and with


def get_args():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    jobs = ["policy", "critic", "scoring"]
    p.add_argument("--job", nargs="+", choices=jobs, default=jobs)
    p.add_argument("--shape", choices=SHAPES, default="small",
                   help="real shapes have random weights, too")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32",
                   help="of all weights, of all contenders")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--memory", type=int, choices=[0, 1], default=0,
                   help="1: peak memory alone, --shape memory")
    return p.parse_args()


# --- models and dialogues -------------------------------------------------------------------------

def build(shape, device, dtype):
    """(model, reference): random weights, and the same with noise, else the loss were log 2."""
    width, mlp, layers, heads, kv, size, vocab, tied = SHAPES[shape]
    torch.manual_seed(0)
    with torch.device(device):
        lm = LlamaForCausalLM(LlamaConfig(
            vocab_size=vocab, hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers,
            head_dim=size, num_attention_heads=heads, num_key_value_heads=kv,
            tie_word_embeddings=tied, max_position_embeddings=8192,
            attn_implementation="sdpa", pad_token_id=0)).to(dtype)
    ref = copy.deepcopy(lm).requires_grad_(False)
    for p in ref.parameters():
        p.add_(torch.randn_like(p) * 0.002)
    for m in (lm, ref):  # every contender's forward passes here, also in a twin
        m.model.register_forward_pre_hook(count, with_kwargs=True)
    return lm, ref


def count(module, args, kwargs):
    TOKENS[torch.is_grad_enabled()] += kwargs["input_ids"].numel()


def twin(lm, attention="sdpa"):
    """A second module over the same parameters, with a config of its own."""
    other = copy.deepcopy(lm, {id(p): p for p in lm.parameters()})
    other.config._attn_implementation = attention
    return other


def ours(lm):
    """What action_logps takes, over the parameters of lm."""
    return TreeLM(twin(lm, "tree_" + pick_attention("auto", lm.device, lm.dtype)))


def examples(job, vocab):
    """Pairs ([turn, ...], [turn, ...]) of policy and critic; or the turns to score."""
    r = random.Random(0)
    words = lambda n: tuple(r.randrange(1, vocab) for _ in range(n))

    def dialogue(first):
        turns, front = [], len(first) - PROMPTS[0]
        for n in PROMPTS:
            prompt = turns[-1][0] + turns[-1][1] if turns else first
            turns.append((prompt + words(front + n - len(prompt)), words(r.randint(*ACTION))))
        return turns

    if job == "critic":
        first = words(HIDDEN + PROMPTS[0])
        trajectories = [dialogue(first) for _ in range(4)]
        task = {"id": "0", "problem_description": "", "ground_truth": ""}
        records = [{"task": task, "reward": reward,
                    "dialogue_history": [{"role": "assistant", TURN: turn} for turn in turns]}
                   for reward, turns in zip((1, 0.6, 0.3, 0), trajectories)]
        pairs = trajectory_pairs(records, "all", 0.1)["0"]
    else:
        action = lambda: words(r.randint(*ACTION))
        candidate = lambda prompt: {TURN: (prompt, action()), "advantage": r.random()}
        states = [[candidate(prompt) for _ in range(CANDIDATES)]
                  for prompt, _ in dialogue(words(PROMPTS[0]))]
        if job == "scoring":
            return [c[TURN] for candidates in states for c in candidates]
        pairs = [pair for t, candidates in enumerate(states)
                 for pair in candidate_pairs(candidates, 4, 0, t)]
    return [(list(pair.chosen), list(pair.rejected)) for pair in pairs]


def loss_of(job, *sides):
    """The loss of a pair. sides: chosen, rejected, both under pi_ref: lists of (L,) log-probs."""
    if job == "critic":
        return critic_loss(*sides, BETA, 0, "turn")[0]
    return dpo_loss(*map(torch.cat, sides), BETA, 0)[0]


# --- contenders -----------------------------------------------------------------------------------

# A contender is (once, step): once(items) gives the refs that step(items, refs) takes, and step
# leaves gradients.


def pad(seqs, device):
    """(ids, mask) of sequences, padded on the right."""
    length = max(map(len, seqs))
    return (torch.tensor([[*s, *[0] * (length - len(s))] for s in seqs], device=device),
            torch.tensor([[1] * len(s) + [0] * (length - len(s)) for s in seqs], device=device))


def official(job, lm, ref):
    def rows(model, ids, mask):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logits = logits[:, :-1].float()  # (B, T - 1, V)
        return logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]

    def step(pairs, _):
        total = 0.0
        for pair in pairs:
            ids, mask = pad([side[-1][0] + side[-1][1] for side in pair], lm.device)
            with torch.no_grad():
                ref_rows = rows(ref, ids, mask)
            sides = [[row[len(p) - 1:len(p) - 1 + len(a)] for p, a in side]
                     for x in (rows(lm, ids, mask), ref_rows) for row, side in zip(x, pair)]
            loss = loss_of(job, *sides) / len(pairs)
            loss.backward()
            total += loss.item()
        return total
    return None, step


def packed(job, lm, ref, share):
    """Ours. share: all in one tree; else each sequence alone, a pair's two at a time."""
    lm, ref = ours(lm), ours(ref)
    def trees(pairs):
        sides = sorted({tuple(side) for pair in pairs for side in pair})
        return [sorted({turn for side in sides for turn in side})] if share else sides

    logps_of = lambda model, pairs: {turn: x for turns in trees(pairs) for turn, x in
                                     zip(turns, action_logps(model, turns))}

    def step(pairs, refs):
        total = 0.0
        for part in [pairs] if share else [[pair] for pair in pairs]:
            logps = logps_of(lm, part)
            losses = []
            for pair in part:
                sides = [[x[turn] for turn in side] for x in (logps, refs) for side in pair]
                losses.append(loss_of(job, *sides))
            loss = sum(losses) / len(pairs)
            loss.backward()
            total += loss.item()
        return total
    return torch.no_grad()(lambda pairs: logps_of(ref, pairs)), step


def trl(lm, ref, pairs):
    """{name: (once, step)} of TRL's DPOTrainer on the same token ids; {} if it isn't installed."""
    try:
        import trl
        from datasets import Dataset
        from tokenizers import Tokenizer, models
    except ImportError as e:
        print(f"without TRL ({e}): pip install trl=={TRL}", file=sys.stderr)
        return {}
    if trl.__version__ != TRL:
        print(f"TRL {trl.__version__} is installed, this was made for {TRL}", file=sys.stderr)

    class Tokenised(trl.DPOTrainer):
        def _prepare_dataset(self, dataset, *args):
            return dataset  # token ids already

    def batches(pairs, refs=None):
        rows = [{"prompt_ids": list(a[0][0]), "chosen_ids": list(a[0][1]),
                 "rejected_ids": list(b[0][1])} for a, b in pairs]
        for row, r in zip(rows, refs or []):
            row["ref_chosen_logps"], row["ref_rejected_logps"] = (x.item() for x in r)
        return rows

    def once(pairs):  # as in DPOTrainer._precompute_ref_logps
        inputs = [trainer._prepare_inputs(trainer.data_collator([row])) for row in batches(pairs)]
        return [trainer.compute_ref_log_probs(trainer.ref_model, x) for x in inputs]

    def step(pairs, refs):
        trainer.precompute_ref_logps = refs is not None
        trainer.current_gradient_accumulation_steps = len(pairs)
        return sum(trainer.training_step(trainer.model, trainer.data_collator([row])).item()
                   for row in batches(pairs, refs))

    warnings.filterwarnings("ignore")
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))  # not used
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>",
                                        eos_token="<eos>")
    with tempfile.TemporaryDirectory() as out:
        config = trl.DPOConfig(
            out, beta=BETA, max_length=None, per_device_train_batch_size=1, report_to="none",
            gradient_checkpointing=False, bf16=False, use_cpu=lm.device.type == "cpu")
        trainer = Tokenised(twin(lm), twin(ref), args=config, processing_class=tokenizer,
                            train_dataset=Dataset.from_list(batches(pairs)))
    return {"trl": (None, step), "trl precomputed": (once, step)}


def scorers(lm):
    """Two unshared ways of scoring, by the plain model with its head on actions alone; and ours."""
    tree = ours(lm)

    def logps_of(hidden, action):
        logps = lm.lm_head(hidden).float().log_softmax(-1)
        return logps.gather(1, torch.tensor(action, device=lm.device)[:, None])[:, 0].cpu()

    def padded(by):
        def step(turns, _):
            out = []
            for part in (turns[i:i + by] for i in range(0, len(turns), by)):
                ids, mask = pad([p + a for p, a in part], lm.device)
                mask = mask if by > 1 else None
                hidden = lm.model(input_ids=ids, attention_mask=mask, use_cache=False)[0]
                out += [logps_of(h[len(p) - 1:len(p) - 1 + len(a)], a)
                        for h, (p, a) in zip(hidden, part)]
            return torch.cat(out)
        return None, torch.no_grad()(step)
    return {"one by one": padded(1), f"padded by {CANDIDATES}": padded(CANDIDATES),
            "shared": (None, lambda turns, _: torch.cat(score(tree, turns, 16384)))}


# --- measuring ------------------------------------------------------------------------------------

def measure(fn, device):
    """(fn(), what it cost)."""
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    sync()
    TOKENS.update({False: 0, True: 0})
    cpu, wall = time.process_time(), time.perf_counter()
    out = fn()
    sync()
    return out, {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall,
                 "weighted_tokens": TOKENS[False] + 3 * TOKENS[True],
                 "forward_only": TOKENS[False], "forward_backward": TOKENS[True]}


def peak(fn, device):
    """Bytes that fn() needs beyond what is held before it; on the CPU in a fresh fork."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fn()
        return torch.cuda.max_memory_allocated() - before
    receive, send = os.pipe()
    if not os.fork():
        try:
            before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            fn()
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            os.write(send, str(most - before).encode())
        finally:
            os._exit(0)
    os.wait()
    return int(os.read(receive, 99))


def matmul_rate(device, dtype):
    """FLOP/s in large square products."""
    n = 8192 if device == "cuda" else 1024
    a = torch.randn(n, n, device=device, dtype=dtype)
    costs = [measure(lambda: [a @ a for _ in range(5)], device)[1] for _ in range(6)]
    return 5 * 2 * n ** 3 / statistics.median(cost[TIME[device]] for cost in costs[1:])


def compare(job, args):
    """Runs the contenders of one job; the figures, as they go to stdout."""
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    lm, ref = build(args.shape, args.device, dtype)
    items = examples(job, lm.config.vocab_size)
    if job == "scoring":
        ways = scorers(lm)
    else:
        ways = {"official": official(job, lm, ref)}
        if job == "policy" and not args.memory:
            ways |= trl(lm, ref, items)
        ways |= {"unshared": packed(job, lm, ref, share=False),
                 "shared": packed(job, lm, ref, share=True)}
    for p in lm.parameters():
        p.grad = torch.ones_like(p)  # held before a peak is measured
    last = items[-CANDIDATES if job == "scoring" else -1:]
    held = {name: items if name == "shared" else last for name in ways}  # at a time
    refs, peaks = {}, {}
    for name, (once, _) in ways.items():
        refs[name] = once(held[name]) if once else None
    for name, (_, step) in ways.items():
        peaks[name] = peak(lambda: step(held[name], refs[name]), args.device)
    torch.set_num_threads(args.threads)  # after the forks, which would hang
    costs, first = {name: [] for name in ways}, None
    for repeat in range(-1, 0 if args.memory else args.repeats):
        for name, (once, step) in ways.items():
            lm.zero_grad()
            if repeat < 0:  # warm up
                step(held[name], refs[name])
                continue
            refs[name], before = measure(lambda: once(items) if once else None, args.device)
            out, cost = measure(lambda: step(items, refs[name]), args.device)
            costs[name].append((before, cost))
            if not repeat:
                got = [p.grad for p in lm.parameters() if p.grad is not None]
                got.insert(0, torch.as_tensor(out))
                first = first or [x.clone() for x in got]
                norm = lambda xs: sum(x.double().norm().item() ** 2 for x in xs) ** 0.5
                cost["differs"] = [norm(x - y for x, y in zip(a, b)) / norm(b)
                                   for a, b in ((got[:1], first[:1]), (got[1:], first[1:])) if b]
    rate = matmul_rate(args.device, dtype)
    in_layers = sum(p.numel() for layer in lm.model.layers for p in layer.parameters())
    seconds = 2 * in_layers / rate  # a token
    figures = {**vars(args), "job": job, "parameters": lm.num_parameters(),
               "matmul_tflops": rate / 1e12, "ways": {}}
    for name in ways:
        way = {"peak": peaks[name], "peak_ratio": peaks["shared"] / peaks[name]}
        figures["ways"][name] = way
        if costs[name]:
            shares = [seconds * cost["weighted_tokens"] / cost[TIME[args.device]]
                      for _, cost in costs[name]]
            way |= {"costs": costs[name], "differs": costs[name][0][1]["differs"],
                    "of_matmuls": statistics.median(shares)}
            for epoch, k in (("first", 1), ("later", 0)):
                total = lambda name, key: [k * a[key] + b[key] for a, b in costs[name]]
                over = lambda key: [a / b for a, b in zip(total(name, key), total("shared", key))]
                x = over(TIME[args.device])
                way[epoch] = {"times": statistics.median(x), "min": min(x), "max": max(x),
                              "bound": over("weighted_tokens")[0]}
    return figures


def table(figures):
    """The same for people."""
    say = lambda *x: print(*x, file=sys.stderr)
    say(f"\n{figures['job']}: {figures['parameters'] / 1e6:.0f}M parameters, "
        f"{figures['dtype']}, {figures['device']}")
    say(f"{'':16}  tokens: backward  forward   CPU s  wall s  of matmuls  peak MB  "
        f"{'first epoch':>28} of bound  {'later':>24} of bound")
    for name, way in figures["ways"].items():
        line = f"{name:16}"
        if "costs" in way:
            (before, cost), middle = way["costs"][0], lambda key: statistics.median(
                a[key] + b[key] for a, b in way["costs"])
            forward = before["forward_only"] + cost["forward_only"]
            line += f"  {cost['forward_backward']:16} {forward:8}"
            line += f" {middle('cpu'):7.2f} {middle('wall'):7.2f}  {way['of_matmuls']:10.0%}"
        line = f"{line:71}  {way['peak'] / 2 ** 20:7.0f}"
        for epoch in ("first", "later") if "costs" in way else ():
            e = way[epoch]
            line += f"   {e['times']:6.2f} [{e['min']:5.2f}, {e['max']:5.2f}]"
            line += f" / {e['bound']:5.2f} {e['times'] / e['bound']:6.0%}"
        say(line, *(f" differs {x:.1e}" for x in way.get("differs", ())))


def main():
    args = get_args()
    torch.set_num_threads(1)
    if args.memory and args.shape == "small":
        args.shape = "memory"
    for job in args.job:
        figures = compare(job, args)
        table(figures)
        print(json.dumps(figures), flush=True)
        differs = [x for way in figures["ways"].values() for x in way.get("differs", ())]
        if args.dtype == "fp32" and differs and max(differs) > 1e-5:
            fail(f"the contenders of {job} do not agree")


if __name__ == "__main__":
    main()
