"""What the trainers' steps and scores cost, beside other ways to compute the same.

    python tests/bench_train.py                           # ten minutes of one core
    python tests/bench_train.py --jobs dpo scoring --repeats 5
    torchrun --nproc_per_node=8 tests/bench_train.py --shape 8b    # on GPUs in bf16; or on a CPU

Records of the paper's shape go to disk: a task has four trajectories of six turns, a turn has 16
candidates and four pairs; texts are random words. The trainers' own functions read them, make the
batches and deal them to the ranks. A step is the body of the trainers' loop: pack, forward, loss,
backward. Weights are random, drawn on the device.

dpo, dpo 24         pairs of candidates, 8 a step, or 24, which are all of a trajectory
mtdpo, critic       pairs of trajectories, 8 a step
rft                 solved trajectories, 8 a step
scoring             one process: log-probs without gradient, of all 17 actions a turn, which get
                    advantages, and of those in the pairs of dpo, for pi_ref

Rivals read the same pairs and have the same weights:

official   a pair is a batch of two padded sequences, all logits, pi_ref on it at every step
kv cache   scoring: a prompt once, with a KV cache; then all its actions in one padded batch, with
           the head on actions alone

Every repeat runs both in turn. `time` is the slowest rank's CPU time, on a GPU its wall time, over
that of ours: median [min, max]. `tokens` is the same of computed tokens, with a backward pass as
two forwards. `of bound` is time / tokens. Ours includes pi_ref's share, by the epochs that it
serves; of ours are `seconds`, `TFLOP/s` a rank (2 for each weight and token) and `GB`, the most
memory of a GPU. `differs` is the largest relative difference of losses, of gradients or of
log-probs, as whole vectors. Each row goes to stdout as JSON, the table to stderr. Exits with 1 if
one differs by more than 1e-4, in bf16 by more than 0.1.
"""
import argparse
import contextlib
import functools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["TQDM_DISABLE"] = "1"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig  # noqa: E402

import train_critic  # noqa: E402
import train_policy  # noqa: E402
from model import (action_logps, batches, head_logps, load, score, tiny, turns_in)  # noqa: E402
from utils import (RANK, WORLD, fail, from_rank_0, init_distributed, leave_group,  # noqa: E402
                   sum_over_ranks)

#               module, flags, pairs a step, epochs that pi_ref's log-probs serve
JOBS = {"dpo": (train_policy, [], 8, 1),
        "dpo 24": (train_policy, [], 24, 1),
        "mtdpo": (train_policy, ["--loss", "mtdpo"], 8, 4),
        "rft": (train_policy, ["--loss", "rft"], 8, 4),
        "critic": (train_critic, ["--held_out", "0"], 8, 4)}
#           width, MLP, layers, heads, KV heads, head size, vocabulary, tied
SHAPES = {"tiny": (64, 128, 1, 2, 1, 32, 2048, True),
          "small": (384, 1024, 2, 6, 2, 64, 2048, False),
          "1b": (2048, 8192, 16, 32, 8, 64, 128256, True),
          "3b": (3072, 8192, 28, 24, 8, 128, 128256, True),
          "8b": (4096, 14336, 32, 32, 8, 128, 128256, False)}
WORDS, TURNS, CANDIDATES, MAX_TOKENS = 1700, 6, 16, 16384
TOKENS = [0]  # that went through a model: 1 a forward, 2 a backward


def get_args():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--jobs", nargs="+", choices=[*JOBS, "scoring"], default=[*JOBS, "scoring"])
    p.add_argument("--shape", choices=SHAPES, default="small", help="of the model: random weights")
    p.add_argument("--repeats", type=int, default=3)
    return p.parse_args()


# --- data and models ------------------------------------------------------------------------------

def make_data(folder, tasks, shape):
    """Writes records.jsonl, and a model's config.json and tokenizer, one token a word."""
    r = random.Random(0)

    def text(low, high):
        return "".join(f" w{r.randrange(WORDS)}" for _ in range(r.randint(low, high)))

    with open(f"{folder}/records.jsonl", "w") as f:
        for n in range(tasks):
            task = {"id": str(n), "problem_description": text(300, 500),
                    "ground_truth": text(100, 450)}
            for reward in (1.0, 1.0, 0.6, 0.2):
                history = [{"role": "user", "content": task["problem_description"]}]
                for _ in range(TURNS):
                    candidates = [{"output": text(20, 100), "advantage": r.random()}
                                  for _ in range(CANDIDATES)]
                    history.append({"role": "assistant", "content": text(20, 100),
                                    "candidates": candidates})
                    history.append({"role": "user", "content": text(60, 160)})
                f.write(json.dumps({"task": task, "reward": reward,
                                    "dialogue_history": history[:-1]}) + "\n")
    words = "".join(f" w{n}" for n in range(WORDS)) * 2  # a tokenizer wants to see a word twice
    says = [{"dialogue_history": [{"role": "assistant", "content": words}]}]
    tokenizer = tiny(says, 0, r" ?\w+|\W")[1]
    tokenizer.save_pretrained(folder)
    width, mlp, layers, heads, kv, size, vocab, tied = SHAPES[shape]
    LlamaConfig(vocab_size=vocab, hidden_size=width, intermediate_size=mlp, head_dim=size,
                num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv,
                tie_word_embeddings=tied, max_position_embeddings=16384, pad_token_id=0,
                architectures=["LlamaForCausalLM"]).save_pretrained(folder)


def read_groups(job, folder):
    """The groups of pairs, as the job's trainer reads them; for scoring the critic's turns."""
    module, flags, _, _ = JOBS["critic" if job == "scoring" else job]
    args = module.get_args(["--model", folder, "--out", folder, *flags])
    with open(f"{folder}/records.jsonl") as f, patch("sys.stdin", f):
        if module is train_policy:
            return train_policy.prepare(args)[0]
        ref_of, train, *_ = train_critic.prepare(args, [])
    return list(ref_of) if job == "scoring" else train


def random_model(folder, device, noise=0.0, **how):
    """model.load of a folder without weights: they are drawn on the device, pi_ref's with noise."""
    @torch.no_grad()
    def draw(model):
        for n, p in enumerate(model.parameters()):
            own, seed = p, n
            if hasattr(p, "to_local"):
                own, seed = p.to_local(), n + 1000 * RANK  # a shard's numbers are its own
            generator = torch.Generator(own.device).manual_seed(seed)
            if own.ndim == 1:
                own.fill_(1)  # a norm's
                continue
            scale = own.shape[1] ** -0.5
            own.normal_(0, scale, generator=generator)
            drawn = torch.empty_like(own).normal_(0, scale, generator=generator)
            own.add_(drawn, alpha=noise)

    def made(path, dtype, attn_implementation, **rest):
        torch.manual_seed(0)  # on every rank the same, as from files
        lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path),
                                              attn_implementation=attn_implementation,
                                              dtype=torch.float32 if dtype == "auto" else dtype)
        return lm, {"missing_keys": (), "mismatched_keys": ()}

    with (patch("model.AutoModelForCausalLM.from_pretrained", made),
          patch("model.weight_files", lambda path: [path])):
        model, _ = load(folder, device, **how)
    draw(model)
    model.lm.model.register_forward_pre_hook(count, with_kwargs=True)
    return model


def count(module, args, kwargs):
    TOKENS[0] += kwargs["input_ids"].numel() * (3 if torch.is_grad_enabled() else 1)


# --- steps ----------------------------------------------------------------------------------------

@functools.cache
def flags_of(job):
    """The module of a job's trainer, and its flags as parsed."""
    module, flags, _, _ = JOBS[job]
    return module, module.get_args(["--out", "x", *flags])


def pair_loss(job, pair, logps, ref):
    """The trainer's. logps, ref: {turn: (L,)}."""
    module, args = flags_of(job)
    if ref:
        ref = {turn: ref[turn].to(logps[turn].device) for turn in turns_in([pair])}
    return module.pair_loss(args, pair, logps, ref)[0]


def loss_size(job, batch):
    """What a step's sum of losses is divided by: pairs, or for rft tokens."""
    if job == "rft":
        return sum(len(action) for pair in batch for _, action in pair.chosen)
    return len(batch)


def our_step(model, job, batch, ref):
    """The loss of a step, as the trainers compute it; leaves gradients."""
    turns = turns_in(batch)
    logps = dict(zip(turns, action_logps(model, turns, MAX_TOKENS)))
    loss = sum(pair_loss(job, pair, logps, ref) for pair in batch) / loss_size(job, batch)
    loss.backward()
    return loss.item()


@contextlib.contextmanager
def plain(*models):
    """Inside, a model's forward takes padded ids (B, T), without a tree; gives (B, T-1) logps."""
    def forward(model, ids):
        logits = model.lm(input_ids=ids, use_cache=False).logits[:, :-1].float()
        return logits.log_softmax(-1).gather(2, ids[:, 1:, None]).sum(2)  # no view, for FSDP

    kernels = [model.config._attn_implementation for model in models]
    for model in models:
        model.config._attn_implementation = "sdpa"
        model.forward = functools.partial(forward, model)
    yield
    for model, kernel in zip(models, kernels):
        model.config._attn_implementation = kernel
        del model.forward


def pad(seqs, device):
    """(B, T) ids, padded on the right: with a causal mask, nobody sees the padding."""
    length = max(map(len, seqs))
    return torch.tensor([[*seq, *[0] * (length - len(seq))] for seq in seqs], device=device)


def official_step(model, ref_model, job, pair, size):
    """The loss of one pair over the step's size, by the released procedure; leaves gradients."""
    sides = [side for side in pair[:2] if side]
    ids = pad([side[-1][0] + side[-1][1] for side in sides], model.device)

    def logps_of(rows):
        return {(prompt, action): row[len(prompt) - 1:][:len(action)].cpu()
                for row, side in zip(rows, sides) for prompt, action in side}

    ref = {}
    with plain(model, ref_model):
        if job != "rft":
            with torch.no_grad():
                ref = logps_of(ref_model(ids))
        loss = pair_loss(job, pair, logps_of(model(ids)), ref) / size
        loss.backward()
    return loss.item()


@torch.no_grad()
def kv_cache_scores(model, turns):
    """[(L,)] of the turns: each prompt once, then its actions in a padded batch on its KV cache."""
    by_prompt, logps = {}, {}
    for prompt, action in turns:
        by_prompt.setdefault(prompt, []).append(action)
    decoder = model.lm.model
    with plain(model):
        for prompt, actions in by_prompt.items():
            first = decoder(input_ids=pad([prompt], model.device), use_cache=True)
            cache, ids = first.past_key_values, pad(actions, model.device)
            for layer in cache.layers:
                layer.keys = layer.keys.expand(len(actions), -1, -1, -1)
                layer.values = layer.values.expand(len(actions), -1, -1, -1)
            rest = decoder(input_ids=ids[:, :-1], past_key_values=cache, use_cache=True)[0]
            hidden = torch.cat([first[0][:, -1:].expand(len(actions), -1, -1), rest], 1)
            lengths = torch.tensor([len(action) for action in actions], device=ids.device)
            real = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
            flat = head_logps(hidden[real], model.lm.lm_head.weight, None, ids[real],
                              model.config).cpu()
            for action, x in zip(actions, flat.split(lengths.tolist())):
                logps[prompt, action] = x
    return [logps[turn] for turn in turns]


# --- measuring ------------------------------------------------------------------------------------

def cost(device, fn, *args):
    """(fn(*args), its (seconds, tokens), a tensor): CPU time, on a GPU wall time."""
    sync, clock = (lambda: None), time.process_time
    if device.type == "cuda":
        sync, clock = torch.cuda.synchronize, time.perf_counter
    sync()
    TOKENS[0], start = 0, clock()
    out = fn(*args)
    sync()
    return out, torch.tensor([clock() - start, TOKENS[0]], dtype=torch.float64)


def slowest(cost):
    """A tensor of figures, each the largest of all ranks, which must all call this."""
    if WORLD > 1:
        dist.all_reduce(cost, dist.ReduceOp.MAX)
    return cost


def difference(ours, theirs):
    """Norm of the difference of two lists of tensors, of all ranks, over that of the first."""
    def norm(tensors):
        return sum_over_ranks(sum(x.double().norm().item() ** 2 for x in tensors))[0] ** 0.5

    return norm(x.double() - y.double() for x, y in zip(ours, theirs)) / norm(ours)


def take_gradients(model):
    """This rank's shards of the gradients; the model has none any more."""
    grads = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
             for p in model.parameters()]
    model.zero_grad()
    return grads


def row(job, model, items, rival, theirs, ours, differs):
    """A row of the table. theirs, ours: (seconds, tokens) of each repeat; differs: of each, too."""
    times, tokens = (torch.stack(theirs) / torch.stack(ours)).T.tolist()
    middle, seconds = statistics.median(times), statistics.median(x[0].item() for x in ours)
    flops = 2 * sum(p.numel() for p in model.parameters()) * ours[0][1].item()
    return {"job": job, "ranks": WORLD, "items": items, "rival": rival, "tokens": tokens[0],
            "time": middle, "min": min(times), "max": max(times), "of_bound": middle / tokens[0],
            "seconds": seconds, "tflops": flops / seconds / 1e12, "differs": max(differs)}


def compare_steps(model, ref_model, job, batch, repeats):
    """The row of a step of a job, by all ranks that there are."""
    device, size, epochs = model.device, loss_size(job, batch), JOBS[job][3]
    turns = turns_in(batch) if job != "rft" else []
    official_step(model, ref_model, job, batch[0], size)  # to warm up
    model.zero_grad()
    ours, theirs, differs, gigabytes = [], [], [], 0
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        # pi_ref's log-probs, of which a rank of several computes a share
        scored, ref_cost = cost(device, score, ref_model, turns, MAX_TOKENS)
        loss, mine = cost(device, our_step, model, job, batch, dict(zip(turns, scored)))
        if device.type == "cuda":
            gigabytes = torch.cuda.max_memory_allocated() / 1e9
        ours.append(slowest(mine + ref_cost / epochs))
        gradients = take_gradients(model)
        losses, pairs = zip(*(cost(device, official_step, model, ref_model, job, pair, size)
                              for pair in batch[RANK::WORLD]))
        theirs.append(slowest(sum(pairs)))
        their_loss, = sum_over_ranks(sum(losses))
        differs.append(max(abs(loss - their_loss) / abs(loss),
                           difference(gradients, take_gradients(model))))
    figures = row(job, model, len(batch), "official", theirs, ours, differs)
    return {**figures, "gb": slowest(torch.tensor(gigabytes)).item()}


def compare_scoring(model, name, turns, repeats):
    """The row of log-probs of these turns, beside the KV cache."""
    ours, theirs, differs = [], [], []
    for _ in range(repeats):
        got, mine = cost(model.device, score, model, turns, MAX_TOKENS)
        want, rival = cost(model.device, kv_cache_scores, model, turns)
        ours.append(mine)
        theirs.append(rival)
        differs.append(difference(got, want))
    return row(name, model, len(turns), "kv cache", theirs, ours, differs)


def table(rows):
    """The rows as a markdown table."""
    lines = ["| job | ranks | items | rival | tokens | time | of bound | seconds | TFLOP/s | GB "
             "| differs |", "|---|---|---|---|---|---|---|---|---|---|---|"]
    for r in rows:
        lines.append(f"| {r['job']} | {r['ranks']} | {r['items']} | {r['rival']} | "
                     f"{r['tokens']:.2f} | {r['time']:.2f} [{r['min']:.2f}, {r['max']:.2f}] | "
                     f"{r['of_bound']:.0%} | {r['seconds']:.3g} | {r['tflops']:.3g} | "
                     f"{r.get('gb', 0):.3g} | {r['differs']:.0e} |")
    return "\n".join(lines)


def measure(args, folder, device):
    """Rows of all jobs. Scoring takes two trajectories."""
    model = random_model(folder, device, dtype="auto", recompute=None)  # as the trainers load it
    ref_model = random_model(folder, device, noise=0.1, dtype="auto").requires_grad_(False)
    for job in args.jobs:
        if job != "scoring":
            batch = batches(read_groups(job, folder), JOBS[job][2], seed=(0, 0))[0]
            yield compare_steps(model, ref_model, job, batch, args.repeats)
        elif WORLD == 1:
            some = read_groups(job, folder)[:2 * TURNS * (CANDIDATES + 1)]
            pairs = read_groups("dpo 24", folder)[:2]
            for name, turns in (("advantages", some), ("pi_ref", turns_in(sum(pairs, [])))):
                yield compare_scoring(ref_model, name, turns, args.repeats)


def main():
    args, rows = get_args(), []
    torch.set_num_threads(1)
    device = init_distributed()
    with tempfile.TemporaryDirectory() as folder:
        folder = from_rank_0(lambda: folder)
        from_rank_0(lambda: make_data(folder, 8, args.shape))
        for line in measure(args, folder, device):
            rows.append(line)
            if RANK == 0:
                print(json.dumps(line), flush=True)
    leave_group()
    if RANK == 0:
        print(table(rows), file=sys.stderr)
        most = 0.1 if device.type == "cuda" else 1e-4
        if wrong := [f"{r['rival']} of {r['job']}" for r in rows if not r["differs"] < most]:
            fail(f"not the same work: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
