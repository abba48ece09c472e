"""What the trainers' steps and scores cost, beside other ways to compute the same.

    python tests/bench_train.py                           # ten minutes of one core
    python tests/bench_train.py --jobs dpo scoring --repeats 5

Records of the paper's shape go to disk: a task has four trajectories of six turns, a turn has 16
candidates and four pairs; texts are random words. The trainers' own functions read them, make the
batches and deal them to the ranks. A step is the body of the trainers' loop: pack, forward, loss,
backward. It runs on 1 process, on 2 of torchrun, and on 8 simulated ones: the shares of 8 ranks
one after another, of which the slowest counts.

dpo, dpo 24         pairs of candidates, 8 a step, or 24, which are all of a trajectory
mtdpo, critic       pairs of trajectories, 8 a step
rft                 solved trajectories, 8 a step
scoring             log-probs without gradient: of all 17 actions a turn, which get advantages, and
                    of those in the pairs of dpo, for pi_ref

Rivals read the same pairs and have the same weights:

official   a pair is a batch of two padded sequences, all logits, pi_ref on it at every step
trl        TRL's DPOTrainer, a pair at a time (pip install trl==1.16.0; left out without it). In
           mtdpo it trains on the human's replies, too, so its loss is another
kv cache   scoring: a prompt once, with a KV cache; then all its actions in one padded batch, with
           the head on actions alone

Every repeat runs all of them in turn. `time` is the slowest rank's CPU time over that of ours:
median [min, max]. `tokens` is the same of computed tokens, with a backward pass as two forwards.
`of bound` is time / tokens. Ours includes pi_ref's share, by the epochs that it serves. `differs`
is the largest relative difference of losses, of gradients or of log-probs, as whole vectors. Each
row goes to stdout as JSON, the table to stderr. Exits with 1 if one differs by more than 1e-4.
"""
import argparse
import contextlib
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["TQDM_DISABLE"] = "1"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from transformers import LlamaConfig  # noqa: E402

import train_critic  # noqa: E402
import train_policy  # noqa: E402
from model import (action_logps, batches, deal, gathered, head_logps, load, score,  # noqa: E402
                   tiny, turns_in)
from utils import RANK, WORLD, fail, init_distributed, leave_group, sum_over_ranks  # noqa: E402

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
WORDS, TURNS, CANDIDATES, BETA, NLL, MAX_TOKENS = 1700, 6, 16, 0.1, 0.01, 16384
TOKENS = [0]  # that went through a model: 1 a forward, 2 a backward


def get_args():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--jobs", nargs="+", choices=[*JOBS, "scoring"], default=[*JOBS, "scoring"])
    p.add_argument("--shape", choices=SHAPES, default="small", help="of the model: random weights")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--data", help="what torchrun's processes read: a folder made before")
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


def our_step(model, job, batch, ref, others, rank, world):
    """A rank's share of the loss of a step, as the trainers compute it; leaves gradients.

    others: {turn: (L,)} that a simulated rank would get from the other ones.
    """
    turns = turns_in(batch)
    if world != WORLD:
        parts = deal(turns, MAX_TOKENS, world)
        share = -(-len(parts) // world)
        turns = [turn for part in parts[rank * share:(rank + 1) * share] for turn in part]
    own = action_logps(model, turns, MAX_TOKENS) if turns else []
    logps = {**others, **dict(zip(turns, own))}
    loss = sum(pair_loss(job, pair, logps, ref) for pair in batch) / loss_size(job, batch)
    if turns:  # a rank may have none
        loss.backward()
    return loss.item() / world


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


def trl_step(model, ref_model, pairs):
    """A function that takes TRL's step and returns its loss; None where TRL is not installed."""
    try:
        import trl
        from datasets import Dataset
    except ImportError as e:
        print(f"without TRL ({e}): pip install trl==1.16.0", file=sys.stderr)
        return None

    class Tokenised(trl.DPOTrainer):
        def _prepare_dataset(self, dataset, *args):
            return dataset  # token ids already

    def step():
        trainer.current_gradient_accumulation_steps = len(rows)
        with plain(model, ref_model):
            return sum(trainer.training_step(trainer.model, trainer.data_collator([row])).item()
                       for row in rows)

    warnings.filterwarnings("ignore")

    def after_prompt(side):  # with the human's replies, if it has several turns
        (first, _), (last, action) = side[0], side[-1]
        return list((last + action)[len(first):])

    rows = [{"prompt_ids": list(chosen[0][0]), "chosen_ids": after_prompt(chosen),
             "rejected_ids": after_prompt(rejected)} for chosen, rejected, _ in pairs]
    with tempfile.TemporaryDirectory() as out:
        config = trl.DPOConfig(
            out, beta=BETA, loss_type=["sigmoid", "sft"], loss_weights=[1.0, NLL],
            max_length=None, per_device_train_batch_size=1, report_to="none",
            gradient_checkpointing=False, bf16=False, use_cpu=True)
        tokenizer = AutoTokenizer.from_pretrained(model.config.name_or_path)
        trainer = Tokenised(model.lm, ref_model.lm, args=config, processing_class=tokenizer,
                            train_dataset=Dataset.from_list(rows))
    return step


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


def max_over_ranks(number):
    """The largest number of all ranks, which must all call this."""
    number = torch.tensor(float(number))
    if WORLD > 1:
        dist.all_reduce(number, dist.ReduceOp.MAX)
    return number.item()


def slowest(costs):
    """(seconds, tokens): of the slowest rank, and of the one with most tokens."""
    return torch.tensor([max_over_ranks(max(column)) for column in torch.stack(costs).T.tolist()])


def difference(ours, theirs):
    """Norm of the difference of two lists of tensors, over that of the first."""
    def norm(tensors):
        return sum(x.double().norm().item() ** 2 for x in tensors) ** 0.5

    return norm(x.double() - y.double() for x, y in zip(ours, theirs)) / norm(ours)


def take_gradients(model, loss):
    """[loss, gradient, ...] of all ranks; the model has no gradients any more."""
    got = [torch.tensor(sum_over_ranks(loss))]
    got += [gathered(p.grad) for p in model.parameters()]
    model.zero_grad()
    return got


def row(job, ranks, items, rival, theirs, ours, differs):
    """A row of the table. theirs, ours: (seconds, tokens) of each repeat; differs: of each, too."""
    times, tokens = (torch.stack(theirs) / torch.stack(ours)).T.tolist()
    middle = statistics.median(times)
    return {"job": job, "ranks": ranks, "items": items, "rival": rival, "tokens": tokens[0],
            "time": middle, "min": min(times), "max": max(times), "of_bound": middle / tokens[0],
            "differs": max(differs)}


def compare_steps(model, ref_model, job, batch, repeats):
    """Rows of a step of a job: by all ranks that there are, or by one and by eight simulated."""
    device, size, epochs = model.device, loss_size(job, batch), JOBS[job][3]
    worlds = {1: range(1), 8: range(8)} if WORLD == 1 else {WORLD: [RANK]}
    turns = turns_in(batch) if job != "rft" else []
    official_step(model, ref_model, job, batch[0], size)  # to warm up
    model.zero_grad()
    trl = trl_step(model, ref_model, batch) if "dpo" in job and WORLD == 1 else None
    everything = turns_in(batch)
    others = dict(zip(everything, score(model, everything, MAX_TOKENS)))
    costs, differs = {}, {}  # {(way, world): [figures of each repeat]}
    for _ in range(repeats):
        scored, ref_cost = cost(device, score, ref_model, turns, MAX_TOKENS)
        ref, gradients = dict(zip(turns, scored)), {}

        def note(way, world, by_rank, got):
            costs.setdefault((way, world), []).append(slowest(by_rank))
            ours = gradients.setdefault(world, got)  # the first
            new = max(difference(ours[:1], got[:1]), difference(ours[1:], got[1:]))
            differs.setdefault((way, world), []).append(new)

        for world, ranks in worlds.items():
            losses, by_rank = zip(*(
                cost(device, our_step, model, job, batch, ref, others, rank, world)
                for rank in ranks))
            # pi_ref's share. Real ranks without a part repeat one; over a data set, few do.
            share = ref_cost / epochs / len(ranks)
            note("ours", world, [x + share for x in by_rank], take_gradients(model, sum(losses)))
        losses, pairs = zip(*(cost(device, official_step, model, ref_model, job, pair, size)
                              for pair in batch[RANK::WORLD]))
        got = take_gradients(model, sum(losses))
        for world, ranks in worlds.items():
            dealt = [pairs] if WORLD > 1 else [pairs[rank::world] for rank in ranks]
            note("official", world, [sum(part) for part in dealt if part], got)
        if trl:
            loss, by_trl = cost(device, trl)
            note("trl", 1, [by_trl], take_gradients(model, loss))
    return [row(job, world, len(batch), way, theirs, costs["ours", world], differs[way, world])
            for (way, world), theirs in costs.items() if way != "ours"]


def compare_scoring(model, name, turns, repeats):
    """The row of log-probs of these turns, beside the KV cache."""
    ours, theirs, differs = [], [], []
    for _ in range(repeats):
        got, mine = cost(model.device, score, model, turns, MAX_TOKENS)
        want, rival = cost(model.device, kv_cache_scores, model, turns)
        ours.append(mine)
        theirs.append(rival)
        differs.append(difference(got, want))
    return row(name, 1, len(turns), "kv cache", theirs, ours, differs)


def table(rows):
    """The rows as a markdown table."""
    lines = ["| job | ranks | items | rival | tokens | time | of bound | differs |",
             "|---|---|---|---|---|---|---|---|"]
    for r in rows:
        lines.append(f"| {r['job']} | {r['ranks']} | {r['items']} | {r['rival']} | "
                     f"{r['tokens']:.2f} | {r['time']:.2f} [{r['min']:.2f}, {r['max']:.2f}] | "
                     f"{r['of_bound']:.0%} | {r['differs']:.0e} |")
    return "\n".join(lines)


def measure(args, folder, device):
    """Rows of all jobs, by the processes that run this. Scoring takes two trajectories."""
    model = random_model(folder, device, recompute=0)
    ref_model = random_model(folder, device, noise=0.1, recompute=0)
    for job in args.jobs:
        if job != "scoring":
            batch = batches(read_groups(job, folder), JOBS[job][2], seed=(0, 0))[0]
            yield from compare_steps(model, ref_model, job, batch, args.repeats)
        elif WORLD == 1:
            some = read_groups(job, folder)[:2 * TURNS * (CANDIDATES + 1)]
            pairs = read_groups("dpo 24", folder)[:2]
            for name, turns in (("advantages", some), ("pi_ref", turns_in(sum(pairs, [])))):
                yield compare_scoring(model, name, turns, args.repeats)


def main():
    args = get_args()
    torch.set_num_threads(1)
    device = init_distributed()
    if args.data:
        for line in measure(args, args.data, device):
            if RANK == 0:
                print(json.dumps(line), flush=True)
        return leave_group()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_data(folder, 8, args.shape)
        for line in measure(args, folder, device):
            rows.append(line)
            print(json.dumps(line), flush=True)
        again = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", __file__,
                 "--data", folder, "--repeats", str(args.repeats), "--jobs", *args.jobs]
        said = subprocess.run(again, stdout=subprocess.PIPE, text=True, check=True).stdout
        print(said, end="", flush=True)
        rows += map(json.loads, said.splitlines())
    rows.sort(key=lambda r: list(JOBS).index(r["job"]) if r["job"] in JOBS else len(JOBS))
    print(table(rows), file=sys.stderr)
    leave_group()
    wrong = [f"{r['rival']} of {r['job']}" for r in rows
             if not r["differs"] < 1e-4 and (r["rival"], r["job"]) != ("trl", "mtdpo")]
    if wrong:
        fail(f"not the same work: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
