"""What the trainers' steps and scores cost, beside other ways to compute the same; right results.

    python tests/bench_train.py                                   # some minutes of one core
    torchrun --nproc_per_node=2 tests/bench_train.py --jobs dpo critic --repeats 5
    torchrun --nproc_per_node=8 tests/bench_train.py --out rows.json            # of a GPU each
    python tests/bench_train.py --shapes 1b                       # five minutes of an H100
    python tests/bench_train.py --shapes tiny --ways 01 11 10     # a rehearsal on a CPU

Records of the paper's shape: a task has four trajectories of six turns, a turn 16 candidates and
four pairs; texts are random words, models have random weights. The trainers' own functions read
them and make the batches, on GPUs one of each job's pairs for each rank. Jobs are the trainers'
losses ("dpo 24": pairs of a trajectory, "dpo 96": of a task), and scoring, log-probs of all 17
actions a turn without gradient. A row that fails says so; at the end all are named, with exit
status 1.

matmul     TFLOP/s of large matrix products, the peak that the shares are of
oracle     the tree in 16 bits (a CPU: 32) beside separate forwards in fp32: relative errors of
           log-probs and gradients, and those of separate forwards in 16 bits, about as large
load       the model from the disk, with --compile C --recompute R ("C1 R0"), and pi_ref
JOB        the body of the trainers' loop, without the optimizer: its first run, in which torch
           compiles; tokens a second and rank, share of the peak (6 FLOPs a weight and token), on a
           GPU peak memory, and what plan.py expects. The rival, the first way only: the released
           procedure on the same pairs and weights; a pair is a batch of two padded sequences, all
           logits, pi_ref on it at every step. time_trl, on one process of a CPU: TRL's DPOTrainer,
           a pair at a time (pip install trl==1.16.0; left out without it)
scoring    the rival computes a prompt once, with a KV cache; then all its actions in one padded
           batch, with the head on actions alone

time, least, most: the rival's seconds over ours, of repeats in turn; on a CPU its time, of the
slowest rank. Ours includes pi_ref's share, by the epochs that it serves. bound: the same of
computed tokens, with a backward pass as two forwards. differs: the relative difference of losses
and gradients, or of log-probs, as whole vectors; in 32 bits a row fails if it is more than 1e-4.
"""
import contextlib
import functools
import gc
import json
import os
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["TQDM_DISABLE"] = "1"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM  # noqa: E402

import toy  # noqa: E402
import train_critic  # noqa: E402
import train_policy  # noqa: E402
from model import (action_logps, all_batches, head_logps, load,  # noqa: E402
                   score, turns_in)
from plan import count_tokens, plan  # noqa: E402
from timing import in_turn, parser, ratio, show  # noqa: E402
from utils import (RANK, WORLD, barrier, fail, from_rank_0, init_distributed,  # noqa: E402
                   leave_group, sum_over_ranks)

#               module, flags, pairs a step, epochs that pi_ref's log-probs serve
JOBS = {"dpo": (train_policy, [], 8, 1),
        "dpo 24": (train_policy, [], 24, 1),
        "dpo 96": (train_policy, [], 96, 1),
        "mtdpo": (train_policy, ["--loss", "mtdpo"], 8, 4),
        "rft": (train_policy, ["--loss", "rft"], 8, 4),
        "critic": (train_critic, ["--held_out", "0"], 8, 4)}
#           width, MLP, layers, heads, KV heads, head size, vocabulary, tied
SHAPES = {"tiny": (64, 128, 1, 2, 1, 32, 2048, True),
          "small": (384, 1024, 2, 6, 2, 64, 2048, False),
          "1b": (2048, 8192, 16, 32, 8, 64, 128256, True),
          "3b": (3072, 8192, 28, 24, 8, 128, 128256, True),
          "8b": (4096, 14336, 32, 32, 8, 128, 128256, False)}
WORDS, TURNS, CANDIDATES, TREE_TOKENS = 1700, 6, 16, 16384
GPU = torch.cuda.is_available()


def get_args():
    p = parser(__doc__, repeats=3)
    jobs = ["dpo 24", "critic", "dpo 96"] if GPU else [job for job in JOBS if job != "dpo 96"]
    p.add_argument("--jobs", nargs="+", choices=[*JOBS, "scoring"], default=[*jobs, "scoring"])
    p.add_argument("--shapes", nargs="+", choices=SHAPES,
                   default=["1b", "8b", "3b"] if GPU else ["small"])
    p.add_argument("--ways", nargs="+", default=["01", "11", "10"] if GPU else ["00"],
                   help="--compile and --recompute")
    p.add_argument("--tasks", type=int, default=8 * WORLD if GPU else 8)
    p.add_argument("--out", help="a file for the rows as JSON")
    return p.parse_args()


# --- data and models ------------------------------------------------------------------------------

def make_data(folder, tasks, shape):
    """Writes records.jsonl and a model with random weights, whose tokenizer has a token a word.

    Returns the folder.
    """
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
    toy.tiny(says, 0, r" ?\w+|\W")[1].save_pretrained(folder)
    torch.manual_seed(0)
    with torch.device("cuda" if GPU else "cpu"):
        lm = LlamaForCausalLM(config_of(shape))
    lm.to(torch.bfloat16 if GPU else None).save_pretrained(folder)
    return folder


def config_of(shape):
    """The config of a model of a shape."""
    width, mlp, layers, heads, kv, size, vocab, tied = SHAPES[shape]
    return LlamaConfig(vocab_size=vocab, hidden_size=width, intermediate_size=mlp, head_dim=size,
                       num_hidden_layers=layers, num_attention_heads=heads,
                       num_key_value_heads=kv, tie_word_embeddings=tied, pad_token_id=0,
                       max_position_embeddings=16384, initializer_range=width ** -0.5)


@functools.cache
def read_groups(job, folder):
    """The groups of pairs, as the job's trainer reads them; for scoring the critic's turns."""
    module, flags, _, _ = JOBS["critic" if job == "scoring" else job]
    args = module.get_args(["--model", folder, "--out", folder, *flags])
    with open(f"{folder}/records.jsonl") as f, patch("sys.stdin", f):
        if module is train_policy:
            return train_policy.prepare(args)[0]
        _, (ref_turn_of, pairs_of, _) = train_critic.prepare(args)
    return list(ref_turn_of) if job == "scoring" else list(pairs_of.values())


@torch.no_grad()
def load_moved(folder, device, compile=0, recompute=0):
    """A trainer's model, for a policy: its weights have moved a little from pi_ref's."""
    flags = SimpleNamespace(offload=0, compile=compile, recompute=recompute)
    model, _ = load(folder, device, "auto", flags, train=True)
    for n, p in enumerate(model.parameters()):
        own = p.to_local() if hasattr(p, "to_local") else p  # a shard's numbers are its own
        generator = torch.Generator(own.device).manual_seed(1000 * RANK + n)
        own.add_(torch.empty_like(own).normal_(0, own.std(), generator=generator), alpha=0.1)
    return model


# --- steps: each leaves gradients and returns the loss --------------------------------------------

def loss_of(job, pairs, logps, ref, batch):
    """The share of these pairs in the loss of a step, by the trainer. logps, ref: {turn: (L,)}."""
    module, flags, _, _ = JOBS[job]
    args = module.get_args(["--out", "x", *flags])

    def size(pairs):
        tokens = sum(len(action) for pair in pairs for _, action in pair.chosen)
        return tokens if job == "rft" else len(pairs)

    return module.batch_loss(args, pairs, logps, ref)[0] * size(pairs) / size(batch)


def our_step(model, job, batch, ref):
    """As the trainers do it; on all ranks the same loss."""
    logps = action_logps(model, turns_in(batch), TREE_TOKENS)
    loss = loss_of(job, batch, logps, ref, batch)
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
    return torch.tensor([[*map(ord, seq), *[0] * (length - len(seq))] for seq in seqs],
                        device=device)


def official_step(model, job, batch, ref_model):
    """By the released procedure, pair by pair; each rank takes its share of them."""
    total = 0.0
    for pair in batch[RANK::WORLD]:
        sides = [side for side in pair[:2] if side]
        ids = pad([side[-1][0] + side[-1][1] for side in sides], model.device)

        def logps_of(rows):
            return {(prompt, action): row[len(prompt) - 1:][:len(action)].cpu()
                    for row, side in zip(rows, sides) for prompt, action in side}

        with plain(model, ref_model):
            with torch.no_grad():
                ref = logps_of(ref_model(ids)) if job != "rft" else {}
            loss = loss_of(job, [pair], logps_of(model(ids)), ref, batch)
            loss.backward()
        total += loss.item()
    return sum_over_ranks(total)


def trl_step(model, ref_model, pairs):
    """A function that takes TRL's step and returns its loss; None where it can't be compared."""
    if GPU or WORLD > 1:
        return None
    try:
        import trl
        from datasets import Dataset
    except ImportError:
        return None

    class Tokenised(trl.DPOTrainer):
        def _prepare_dataset(self, dataset, *args):
            return dataset  # token ids already

    def after_prompt(side):  # with the human's replies, if it has several turns
        (first, _), (last, action) = side[0], side[-1]
        return list(map(ord, (last + action)[len(first):]))

    rows = [{"prompt_ids": list(map(ord, chosen[0][0])), "chosen_ids": after_prompt(chosen),
             "rejected_ids": after_prompt(rejected)} for chosen, rejected, _ in pairs]
    with tempfile.TemporaryDirectory() as out:
        config = trl.DPOConfig(  # beta and the NLL's weight as in train_policy.py
            out, beta=0.1, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.01],
            max_length=None, per_device_train_batch_size=1, report_to="none",
            gradient_checkpointing=False, bf16=False, use_cpu=True)
        tokenizer = AutoTokenizer.from_pretrained(model.config.name_or_path)
        trainer = Tokenised(model.lm, ref_model.lm, args=config, processing_class=tokenizer,
                            train_dataset=Dataset.from_list(rows))

    def step(*_):
        trainer.current_gradient_accumulation_steps = len(rows)
        with plain(model, ref_model):
            return sum(trainer.training_step(trainer.model, trainer.data_collator([row])).item()
                       for row in rows)

    return step


def official_tokens(batch):
    """Tokens of a forward of the released procedure, pair by pair: a side's turns in one sequence,
    padded to the longer one.
    """
    total = 0
    for pair in batch:
        lengths = [count_tokens(side) for side in (pair.chosen, pair.rejected) if side]
        total += len(lengths) * max(lengths)
    return total


# --- scores ---------------------------------------------------------------------------------------

@torch.no_grad()
def kv_cache_scores(model, turns):
    """([(L,)] of the turns, how many tokens are computed).

    Each prompt once, then its actions in a padded batch on its KV cache.
    """
    logps, by_prompt, decoder, tokens = {}, {}, model.lm.model, 0
    for prompt, action in turns:
        by_prompt.setdefault(prompt, []).append(action)
    with plain(model):
        for prompt, actions in by_prompt.items():
            first = decoder(input_ids=pad([prompt], model.device), use_cache=True)
            cache, ids = first.past_key_values, pad(actions, model.device)
            for layer in cache.layers:
                layer.keys = layer.keys.expand(len(actions), -1, -1, -1)
                layer.values = layer.values.expand(len(actions), -1, -1, -1)
            rest = decoder(input_ids=ids[:, :-1], past_key_values=cache, use_cache=True)[0]
            tokens += len(prompt) + ids[:, :-1].numel()
            hidden = torch.cat([first[0][:, -1:].expand(len(actions), -1, -1), rest], 1)
            lengths = torch.tensor([len(action) for action in actions], device=ids.device)
            real = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
            flat = head_logps(hidden[real], model.lm.lm_head.weight, None, ids[real],
                              model.config).cpu()
            for action, x in zip(actions, flat.split(lengths.tolist())):
                logps[prompt, action] = x
    return [logps[turn] for turn in turns], tokens


# --- measuring ------------------------------------------------------------------------------------

def clock():
    """Seconds: CPU time, on a GPU wall time."""
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter() if GPU else time.process_time()


def max_over_ranks(number):
    """The largest number of all ranks, which must all call this."""
    number = torch.tensor(float(number))
    if WORLD > 1:
        dist.all_reduce(number, dist.ReduceOp.MAX)
    return number.item()


def timed(ways, repeats):
    """{name: the slowest rank's seconds of each repeat} of {name: function}."""
    seconds, _ = in_turn(ways, repeats, clock)
    return {name: list(map(max_over_ranks, times)) for name, times in seconds.items()}


def difference(ours, theirs):
    """Norm of the difference of two lists of tensors, over that of the first; of all shards."""
    def norm(tensors):
        return sum_over_ranks(sum(x.double().norm().item() ** 2 for x in tensors)) ** 0.5

    return norm(x.double() - y.double() for x, y in zip(ours, theirs)) / norm(ours)


def difference_of_steps(model, pi_ref, job, batch, ref):
    """Of the losses or the gradients of our step and of the released procedure's."""
    def run(step, given):
        model.zero_grad()
        loss = step(model, job, batch, given)
        shards = [getattr(p.grad, "to_local", lambda p=p: p.grad)() for p in model.parameters()]
        return torch.tensor([loss]), shards

    ours, theirs = run(our_step, ref), run(official_step, pi_ref)
    return max(difference(ours[:1], theirs[:1]), difference(ours[1], theirs[1]))


def expected_gb(planned):
    """The peak of memory that plan.py tells, without the moments, and with pi_ref in 16 bits."""
    moments = 8e-9 * planned["trained"] / planned["gpus"]
    return planned["peak_gb_a_gpu"] - moments + 2e-9 * planned["parameters"]


def rivalry(theirs, ours, bound, differs):
    """The figures of a rival. theirs, ours: seconds of each repeat."""
    middle, least, most = ratio(theirs, ours)
    return {"time": middle, "least": least, "most": most, "bound": bound, "differs": differs}


class Bench:
    """The rows of one shape. Each method makes one, a dict of figures, or raises what is wrong."""

    def __init__(self, args, device, folder):
        self.args, self.device, self.folder = args, device, folder
        self.dtype = torch.bfloat16 if GPU else torch.float32
        self.model = self.pi_ref = None  # sharded as in training; whole, in 16 bits

    def batch(self, job):
        pairs = JOBS[job][2] * (WORLD if GPU else 1)
        return all_batches(read_groups(job, self.folder), pairs, epochs=1, seed=0)[0]

    def matmul(self):
        n = 8192 if GPU else 512
        a = torch.randn(n, n, device=self.device, dtype=self.dtype)
        seconds = timed({"": lambda: [a @ a for _ in range(10)]}, 1 + self.args.repeats)[""]
        self.peak = 10 * 2 * n ** 3 / min(seconds)
        name = torch.cuda.get_device_name() if GPU else "CPU"
        return {"tflops": self.peak / 1e12, "device": name, "ranks": WORLD}

    def oracle(self):
        turns = [(prompt[-512:], action) for job in ("dpo 24", "critic")
                 for prompt, action in turns_in(self.batch(job))[:6]]

        def numbers(dtype, separate):
            """([log-probs], [gradient]); separate: each turn has a forward of its own."""
            model, _ = load(self.folder, self.device, dtype)
            if separate:
                with plain(model):
                    logps = [model(pad([p + a], self.device))[0, len(p) - 1:] for p, a in turns]
            else:
                by_turn = action_logps(model, turns)
                logps = [by_turn[turn] for turn in turns]
            logps = torch.cat(logps)
            logps.mean().backward()
            return [logps.detach().cpu()], [p.grad for p in model.parameters()]

        right, errors = numbers(torch.float32, True), {}
        for name, separate in (("tree", False), ("separate", True)):
            for what, x, y in zip(("logps", "gradients"), right, numbers(self.dtype, separate)):
                errors[f"{name}_{what}"] = difference(x, y)
        return errors

    def load(self, compile, recompute):
        self.model, self.recompute = None, str(recompute)
        start = time.perf_counter()
        self.model = load_moved(self.folder, self.device, compile, recompute)
        seconds = time.perf_counter() - start
        if not self.pi_ref:
            self.pi_ref = load(self.folder, self.device, "auto")[0].requires_grad_(False)
        return {"seconds": seconds}

    def step(self, job, with_rival):
        batch, epochs = self.batch(job), JOBS[job][3]
        turns = turns_in(batch) if job != "rft" else []
        ref = score(self.pi_ref, turns, TREE_TOKENS)

        def of(step, given):
            self.model.zero_grad()
            return step(self.model, job, batch, given)

        ways = {"ours": functools.partial(of, our_step, ref)}
        start = time.perf_counter()
        ways["ours"]()  # to warm up
        first = time.perf_counter() - start
        if GPU:
            torch.cuda.reset_peak_memory_stats()
        ways["ours"]()
        gb = GPU and torch.cuda.max_memory_allocated() / 1e9
        if with_rival:
            ways["official"] = functools.partial(of, official_step, self.pi_ref)
            ways["pi_ref"] = functools.partial(score, self.pi_ref, turns, TREE_TOKENS)
            ways["official"]()
            if trl := job in ("dpo", "mtdpo") and trl_step(self.model, self.pi_ref, batch):
                ways["trl"] = functools.partial(of, trl, None)
        seconds = timed(ways, self.args.repeats)
        least = min(seconds["ours"])
        module, flags, _, _ = JOBS[job]
        args = module.get_args(["--out", "x", "--recompute", self.recompute, *flags])
        planned = plan(args, WORLD, self.model.config, [batch], turns)
        tokens = planned["tokens"]
        flops = 6 * planned["parameters"] * tokens["slowest_rank"] / WORLD
        figures = {"pairs": len(batch), "seconds": least, "first": first,
                   "tokens_a_second": tokens["computed"] / WORLD / least,
                   "of_peak": flops / least / self.peak}
        if GPU:
            figures |= {"peak_gb": max_over_ranks(gb), "expected_gb": expected_gb(planned)}
        if with_rival:
            ours = [a + b / epochs for a, b in zip(seconds["ours"], seconds["pi_ref"])]
            of_ours = 3 * tokens["slowest_rank"] + planned["reference_tokens"] / epochs
            bound = official_tokens(batch) * (4 if turns else 3) / of_ours
            differs = difference_of_steps(self.model, self.pi_ref, job, batch, ref)
            figures |= rivalry(seconds["official"], ours, bound, differs)
            if "trl" in ways:
                figures["time_trl"], *_ = ratio(seconds["trl"], ours)
        return figures

    def scoring(self):
        """Of two trajectories."""
        turns = read_groups("scoring", self.folder)[:2 * TURNS * (CANDIDATES + 1)]
        ways = {"ours": functools.partial(score, self.pi_ref, turns, TREE_TOKENS),
                "kv cache": functools.partial(kv_cache_scores, self.pi_ref, turns)}
        seconds = timed(ways, self.args.repeats)
        theirs, tokens = ways["kv cache"]()
        return rivalry(seconds["kv cache"], seconds["ours"], tokens / count_tokens(turns),
                       difference(ways["ours"]().values(), theirs))

    def rows(self):
        """(its name, function that makes the row, its arguments)"""
        yield "matmul", self.matmul
        if WORLD == 1:
            yield "oracle", self.oracle
        for way in self.args.ways:
            compile, recompute = map(int, way)
            name = f"C{compile} R{recompute}"
            yield f"load {name}", self.load, compile, recompute
            for job in (job for job in self.args.jobs if job in JOBS):
                rival = way == self.args.ways[0] and job != "dpo 96"
                yield f"{job} {name}", self.step, job, rival
        if WORLD == 1 and "scoring" in self.args.jobs:
            yield "scoring", self.scoring


def main(args):
    if not GPU:
        torch.set_num_threads(1)
    device, rows = init_distributed(), []
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            _, folder = from_rank_0(lambda: (None, make_data(folder, args.tasks, shape)))
            for name, make, *given in Bench(args, device, folder).rows():
                row = {"row": f"{shape} {name}"}
                try:
                    row |= make(*given)
                    if not GPU and not row.get("differs", 0) < 1e-4:
                        row["error"] = "not the same work"
                except (Exception, SystemExit) as e:
                    traceback.print_exc()
                    row["error"] = f"{type(e).__name__}: {e}".splitlines()[0]
                rows.append(row)
                show(row)
                if args.out and RANK == 0:
                    Path(args.out).write_text(json.dumps(rows, indent=1))
                barrier()  # all ranks begin the next row together
                gc.collect()
                torch.cuda.empty_cache()
        del make  # and the models: the next shape's come onto the GPU
        torch.compiler.reset()
    leave_group()
    if failed := [f"{row['row']} ({row['error']})" for row in rows if "error" in row]:
        fail(f"{len(failed)} of {len(rows)} rows failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main(get_args())
