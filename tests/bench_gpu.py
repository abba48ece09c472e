"""One command for a machine with GPUs: speed, memory and right results, in under eight minutes.

    python tests/bench_gpu.py                                   # one GPU
    torchrun --nproc_per_node=8 tests/bench_gpu.py
    python tests/bench_gpu.py --tiny 1 --out /tmp/tiny.json     # a rehearsal on a CPU

Weights are drawn on the device by a config; nothing is fetched. Records and batches are those of
bench_train.py, dealt to the ranks by the trainers' own functions. After every row all rows so far
go to --out as JSON; the table comes last. A row that fails says so in one line and the next begins.
A row that does not end in --row_seconds ends the run, as --minutes does.

matmul     TFLOP/s of large matrix products, the peak that the shares are of
oracle     the tree in 16 bits beside separate forwards in fp32: relative errors of log-probs and
           gradients, and the errors of separate forwards in 16 bits
step       our step without the optimizer: tokens a second and GPU, share of the peak (of_peak: what
           is computed; useful: without recomputation), peak memory, and what --dry_run expects
official   the released procedure on the same pairs: its seconds over ours, its loss, its
           gradient's norm over ours
scoring    the rival with a KV cache: its seconds over ours
kernel     --attention by name: seconds of a step over those of the first one
gaps       the longest idle stretches of the GPU in a step, in ms, between which kernels
"""
import argparse
import functools
import gc
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench_train as B  # noqa: E402
import torch  # noqa: E402
from transformers import AutoConfig  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

from model import action_logps, batches, dry_run, gathered, pick_attention, score  # noqa: E402
from model import turns_in  # noqa: E402
from utils import RANK, WORLD, init_distributed, leave_group, max_over_ranks  # noqa: E402

JOBS = {"policy": "dpo by trajectory", "critic": "critic"}
KERNELS = [name for name in ("flash", "torch", "flex", "sdpa")
           if "tree_" + name in ALL_ATTENTION_FUNCTIONS]


def get_args(argv=None):
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", default="bench_gpu.json")
    p.add_argument("--shapes", nargs="+", choices=B.SHAPES, default=["1b", "8b", "3b"])
    p.add_argument("--tiny", type=int, choices=[0, 1], default=0,
                   help="1: everything with a tiny model, in seconds, also on a CPU")
    p.add_argument("--minutes", type=float, default=7.5, help="the run ends after so many")
    p.add_argument("--row_seconds", type=float, default=120, help="and if a row takes longer")
    p.add_argument("--repeats", type=int, default=3)
    args = p.parse_args(argv)
    if args.tiny:
        args.shapes = ["tiny"]
    return args


class Bench:
    """The rows. Each method makes one, a dict of figures, or raises what the row then says."""

    def __init__(self, args, device, folder):
        self.args, self.device, self.folder = args, device, folder
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.peak, self.shape, self.models = None, None, None
        self.seconds = {}  # of our steps, {(shape, job): seconds}

    def path(self, shape):
        """The folder of a shape's config, tokenizer and records."""
        path = f"{self.folder}/{shape}"
        if not os.path.exists(path):
            os.makedirs(path)
            B.make_data(path, 1 if self.args.tiny else 4 * WORLD, shape)
        return path

    @functools.cache
    def batch(self, job):
        """The first batch of a job, as many pairs a GPU as the trainers take a step."""
        pairs = 2 if self.args.tiny else B.JOBS[JOBS[job]][2]
        groups = B.read_groups(JOBS[job], self.path(self.args.shapes[0]))
        return batches(groups, pairs * WORLD, 0, 0)[0]

    def plan(self, shape, job, recompute):
        """What --dry_run says of a step."""
        flags = SimpleNamespace(dry_run=WORLD, dtype="bf16" if self.device.type == "cuda" else
                                "fp32", recompute=recompute, max_tokens=B.MAX_TOKENS, replicate=1)
        return dry_run(flags, AutoConfig.from_pretrained(self.path(shape)), [self.batch(job)], [])

    def expected(self, shape, job):
        """GB of a step on one GPU: no moments, and pi_ref whole in 16 bits. Fails if too many."""
        plan = self.plan(shape, job, 1)
        gb = plan["gb_a_gpu"]
        pi_ref = plan["parameters"] * self.dtype.itemsize / 1e9
        need = gb["total"] - gb["weights_gradients_moments"] / 2 + pi_ref
        if self.device.type == "cuda":
            have = torch.cuda.get_device_properties(self.device).total_memory / 1e9
            if need > 0.95 * have:
                raise MemoryError(f"needs {need:.0f} GB, the GPU has {have:.0f} GB")
        return need

    def load(self, shape):
        """(policy, pi_ref) of a shape: sharded as in training; whole and in 16 bits."""
        if self.shape != shape:
            self.shape, self.models = None, None
            tidy()
            path = self.path(shape)
            policy = B.random_model(path, self.device, dtype=self.dtype, recompute=1)
            pi_ref = B.random_model(path, self.device, noise=0.005, dtype=self.dtype)
            self.shape, self.models = shape, (policy, pi_ref.requires_grad_(False))
        return self.models

    def time(self, fn, *args):
        """(result, seconds of the slowest rank): the median of the repeats."""
        costs = []
        for _ in range(self.args.repeats):
            out, (seconds, _) = B.cost(self.device, fn, *args)
            costs.append(seconds)
        return out, max_over_ranks(statistics.median(costs))

    def matmul(self):
        n = 8192 if self.device.type == "cuda" else 512
        a = torch.randn(n, n, device=self.device, dtype=self.dtype)
        self.time(lambda: [a @ a for _ in range(10)])
        self.peak = 10 * 2 * n ** 3 / self.time(lambda: [a @ a for _ in range(10)])[1]
        return {"tflops": self.peak / 1e12, "device": device_name(self.device), "ranks": WORLD}

    def oracle(self, shape, kernel):
        turns = turns_in(self.batch("policy"))[:8] + turns_in(self.batch("critic"))[:4]
        turns = [(prompt[-512:], action) for prompt, action in turns]

        def numbers(dtype, separate):
            """[log-probs, gradient, ...] in fp32; separate: a forward of its own for each turn."""
            model = B.random_model(self.path(shape), self.device, dtype=dtype)
            model.config._attn_implementation = "tree_" + kernel
            if separate:
                with B.plain(model):
                    logps = [model(B.pad([p + a], self.device))[0, len(p) - 1:] for p, a in turns]
            else:
                logps = action_logps(model, turns)
            logps = torch.cat(logps)
            logps.mean().backward()
            gradients = [p.grad.float() for p in model.parameters()]
            return [logps.detach().float().cpu()], gradients

        pick_attention(kernel, self.device, self.dtype)
        right = numbers(torch.float32, True)
        errors = {}
        for name, separate in (("tree", False), ("separate", True)):
            got = numbers(self.dtype, separate)
            for what, x, y in zip(("logps", "gradients"), right, got):
                errors[f"{name}_{what}"] = B.difference(x, y)
        return errors

    def step(self, shape, job):
        expected = self.expected(shape, job)
        model, pi_ref = self.load(shape)
        batch, name = self.batch(job), JOBS[job]
        turns = turns_in(batch)
        ref = dict(zip(turns, score(pi_ref, turns, B.MAX_TOKENS)))
        run = functools.partial(B.our_step, model, name, batch, ref)
        run()  # to warm up
        model.zero_grad(set_to_none=False)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        loss, seconds = self.time(run)
        self.seconds[shape, job] = seconds
        figures = {"pairs": len(batch), "loss": B.sum_over_ranks(loss)[0], "seconds": seconds}
        plan = self.plan(shape, job, 1)
        figures["tokens_a_second"] = plan["tokens"]["computed"] / WORLD / seconds
        if self.peak:
            share = plan["petaflops"] * 1e15 / WORLD / seconds / self.peak
            useful = self.plan(shape, job, 0)["petaflops"] / plan["petaflops"]
            figures |= {"of_peak": share, "of_peak_useful": share * useful}
        if self.device.type == "cuda":
            peak = max_over_ranks(torch.cuda.max_memory_allocated() / 1e9)
            figures |= {"peak_gb": peak, "expected_gb": expected}
        return figures

    def official(self, shape, job):
        model, pi_ref = self.load(shape)
        batch, name = self.batch(job), JOBS[job]
        turns = turns_in(batch)
        ref = dict(zip(turns, score(pi_ref, turns, B.MAX_TOKENS)))

        def official():
            return sum(B.official_step(model, pi_ref, name, pair, len(batch))
                       for pair in batch[RANK::WORLD])

        found = {}
        for way, run in (("ours", functools.partial(B.our_step, model, name, batch, ref)),
                         ("official", official)):
            model.zero_grad()
            loss, (seconds, _) = B.cost(self.device, run)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
            found[way] = seconds, B.sum_over_ranks(loss)[0], gathered(norm).item()
        ours, theirs = found["ours"], found["official"]
        seconds = self.seconds.get((shape, job), ours[0])
        return {"time": max_over_ranks(theirs[0]) / seconds, "loss": theirs[1],
                "our_loss": ours[1], "gradient_norm": theirs[2] / ours[2]}

    def scoring(self, shape):
        turns = B.read_groups("scoring", self.path(shape))
        turns = turns[:B.TURNS * (B.CANDIDATES + 1)]  # of one trajectory, every rank the same
        pi_ref = self.load(shape)[1]
        B.compare_scoring(pi_ref, "", turns, 1)  # to warm up
        return B.compare_scoring(pi_ref, "scoring", turns, self.args.repeats)

    def kernel(self, shape, kernel):
        model, pi_ref = self.load(shape)
        used = model.config._attn_implementation
        model.config._attn_implementation = "tree_" + kernel
        try:
            pick_attention(kernel, self.device, self.dtype)
            turns = turns_in(self.batch("critic")[RANK::WORLD])
            run = lambda: sum(x.sum() for x in action_logps(model, turns)).backward()
            run()  # to warm up
            seconds = self.time(run)[1]
        finally:
            model.config._attn_implementation = used
        self.seconds.setdefault("kernel", seconds)
        return {"seconds": seconds, "time": seconds / self.seconds["kernel"]}

    def gaps(self, shape):
        model = self.load(shape)[0]
        turns = turns_in(self.batch("policy")[RANK::WORLD])
        with torch.profiler.profile() as profiler:
            sum(x.sum() for x in action_logps(model, turns)).backward()
        kind = getattr(torch.autograd.DeviceType, self.device.type.upper())
        spans = [(e.time_range.start, e.time_range.end, e.name) for e in profiler.events()
                 if e.device_type == kind and not e.is_user_annotation]
        longest, idle = idle_stretches(spans)
        span = max(end for _, end, _ in spans) - min(start for start, _, _ in spans)
        figures = {"idle": idle / span}
        for n, (length, before, after) in enumerate(longest[:3], 1):
            figures[f"gap_{n}"] = f"{length / 1e3:.2f} ms, {before[:30]} -> {after[:30]}"
        return figures

    def rows(self):
        """(name, function that makes the row), the most telling ones first."""
        first = self.args.shapes[0]
        yield "matmul", self.matmul
        for name in KERNELS:
            yield f"oracle {first} {name}", functools.partial(self.oracle, first, name)
        for shape in self.args.shapes:
            for job in JOBS:
                yield f"step {shape} {job}", functools.partial(self.step, shape, job)
                yield f"official {shape} {job}", functools.partial(self.official, shape, job)
            yield f"scoring {shape}", functools.partial(self.scoring, shape)
            if shape == first:
                for name in KERNELS:
                    yield f"kernel {shape} {name}", functools.partial(self.kernel, shape, name)
                yield f"gaps {shape}", functools.partial(self.gaps, shape)


def idle_stretches(spans):
    """([(length, name before, name after)], longest first; their sum) of (start, end, name)s."""
    spans = sorted(spans)
    stretches, (_, last_end, last) = [], spans[0]
    for start, end, name in spans:
        if start > last_end:
            stretches.append((start - last_end, last, name))
        if end > last_end:
            last_end, last = end, name
    return sorted(stretches, reverse=True), sum(length for length, _, _ in stretches)


def device_name(device):
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def tidy():
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def table(rows):
    def short(x):
        return f"{x:.3g}" if isinstance(x, float) else str(x)

    lines = ["| row | figures |", "|---|---|"]
    for row in rows:
        figures = [f"{k} {short(v)}" for k, v in row.items() if k != "row"]
        lines.append(f"| {row['row']} | {', '.join(figures)} |")
    return "\n".join(lines)


def main(args):
    torch.set_num_threads(torch.get_num_threads() if torch.cuda.is_available() else 1)
    device, rows, start = init_distributed(), [], time.monotonic()

    def write():
        if RANK == 0:
            with open(args.out, "w") as f:
                json.dump(rows, f, indent=1)

    def give_up(name, seconds):
        rows.append({"row": name, "error": f"no end in {seconds:.0f} s: the run ends here"})
        write()
        if RANK == 0:
            print(table(rows), flush=True)
        os._exit(1)

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, device, folder)
        for name, make in bench.rows():
            left = args.minutes * 60 - (time.monotonic() - start)
            watchdog = threading.Timer(min(left, args.row_seconds), give_up,
                                       (name, min(left, args.row_seconds)))
            watchdog.daemon = True
            watchdog.start()
            try:
                rows.append({"row": name, **make()})
            except (Exception, SystemExit) as e:
                said = str(e).strip().splitlines() or [""]
                rows.append({"row": name, "error": f"{type(e).__name__}: {said[0]}"})
            max_over_ranks(0)  # all ranks begin the next row together
            watchdog.cancel()
            tidy()
            write()
            if RANK == 0:
                print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    if RANK == 0:
        print(table(rows))
    leave_group()


if __name__ == "__main__":
    main(get_args())
