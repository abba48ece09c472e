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

from model import action_logps, batches, dry_run, gathered, score  # noqa: E402
from model import turns_in  # noqa: E402
import model as model_py  # noqa: E402
from utils import RANK, WORLD, barrier, init_distributed, leave_group  # noqa: E402

POLICY = "dpo 24"
KERNELS = "flash", "sdpa"
FLASH = model_py.flash_kernel


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


def take_kernel(name, device):
    """Makes model.py use this kernel on a GPU."""
    if name == "flash" and device.type != "cuda":
        raise SystemExit("error: flash needs a GPU")
    model_py.flash_kernel = model_py.sdpa_kernel if name == "sdpa" else FLASH


class Bench:
    """The rows. Each method makes one, a dict of figures, or raises what the row then says."""

    def __init__(self, args, device, folder):
        self.args, self.device, self.folder = args, device, folder
        self.gpu = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.gpu else torch.float32
        self.peak = self.kernel_seconds = self.loaded = None  # FLOP/s; of the first; (shape, ...)
        self.ours = {}  # {(shape, job): (seconds, loss, gradient's norm)}

    def path(self, shape):
        """The folder of a shape's config, tokenizer and records."""
        path = f"{self.folder}/{shape}"
        if not os.path.exists(path):
            os.makedirs(path)
            B.make_data(path, 1 if self.args.tiny else 4 * WORLD, shape)
        return path

    @functools.cache
    def groups(self, job):
        return B.read_groups(job, self.path(self.args.shapes[0]))

    def batch(self, job):
        """The first batch: for each GPU as many pairs as the trainers' step has by default."""
        pairs = 2 if self.args.tiny else B.JOBS[job][2]
        return batches(self.groups(job), pairs * WORLD, seed=(0, 0))[0]

    def plan(self, shape, job, recompute):
        """What --dry_run says of a step."""
        flags = SimpleNamespace(dry_run=WORLD, dtype="bf16" if self.gpu else "fp32", replicate=1,
                                offload=0, recompute=recompute,
                                tree_tokens=B.MAX_TOKENS)
        return dry_run(flags, AutoConfig.from_pretrained(self.path(shape)), [self.batch(job)], [])

    def load(self, shape):
        """(policy, pi_ref) of a shape: sharded as in training; whole, in 16 bits."""
        if self.loaded is None or self.loaded[0] != shape:
            self.loaded = None
            tidy()
            how = {"dtype": self.dtype}
            policy = B.random_model(self.path(shape), self.device, recompute=1, **how)
            pi_ref = B.random_model(self.path(shape), self.device, noise=0.1, **how)
            self.loaded = shape, policy, pi_ref.requires_grad_(False)
        return self.loaded[1:]

    def time(self, fn):
        """Seconds of the slowest rank, the median of the repeats."""
        costs = [B.cost(self.device, fn) for _ in range(self.args.repeats)]
        return B.max_over_ranks(statistics.median(cost[0].item() for _, cost in costs))

    def matmul(self):
        n = 8192 if self.gpu else 512
        a = torch.randn(n, n, device=self.device, dtype=self.dtype)
        for _ in range(2):  # the first warms up
            seconds = self.time(lambda: [a @ a for _ in range(10)])
        self.peak = 10 * 2 * n ** 3 / seconds
        name = torch.cuda.get_device_name() if self.gpu else "CPU"
        return {"tflops": self.peak / 1e12, "device": name, "ranks": WORLD}

    def oracle(self, shape, kernel):
        take_kernel(kernel, self.device)
        turns = turns_in(self.batch(POLICY))[:8] + turns_in(self.batch("critic"))[:4]
        turns = [(prompt[-512:], action) for prompt, action in turns]

        def numbers(dtype, separate):
            """([log-probs], [gradient]); separate: each turn has a forward of its own."""
            model = B.random_model(self.path(shape), self.device)
            for p in model.parameters():  # and no buffers: positions must not be rounded
                p.data = p.data.to(self.dtype).to(dtype)
            if separate:
                with B.plain(model):
                    logps = [model(B.pad([p + a], self.device))[0, len(p) - 1:] for p, a in turns]
            else:
                logps = action_logps(model, turns)
            logps = torch.cat(logps)
            logps.mean().backward()
            return [logps.detach().cpu()], [p.grad for p in model.parameters()]

        right = numbers(torch.float32, True)
        errors = {}
        for name, separate in (("tree", False), ("separate", True)):
            for what, x, y in zip(("logps", "gradients"), right, numbers(self.dtype, separate)):
                errors[f"{name}_{what}"] = B.difference(x, y)
        return errors

    def step(self, shape, job):
        plan = self.plan(shape, job, 1)
        expected = plan["gb_a_gpu"] / 2  # weights and gradients, no moments; and
        expected += plan["parameters"] * self.dtype.itemsize / 1e9  # pi_ref
        if self.gpu:
            have = torch.cuda.mem_get_info()[1] / 1e9
            if expected > 0.95 * have:
                raise MemoryError(f"it needs {expected:.0f} GB, the GPU has {have:.0f} GB")
        model, pi_ref = self.load(shape)
        batch = self.batch(job)
        turns = turns_in(batch)
        ref = dict(zip(turns, score(pi_ref, turns, B.MAX_TOKENS)))
        run = functools.partial(B.our_step, model, job, batch, ref, {}, RANK, WORLD)
        model.zero_grad()
        loss = B.sum_over_ranks(run())[0]
        norm = gradient_norm(model)
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds = self.time(run)
        self.ours[shape, job] = seconds, loss, norm
        figures = {"pairs": len(batch), "seconds": seconds,
                   "tokens_a_second": plan["tokens"]["computed"] / WORLD / seconds}
        for name, recompute in (("of_peak", 1), ("of_peak_useful", 0)):
            flops = self.plan(shape, job, recompute)["hours"] * 3600 * 400e12  # of a GPU
            figures[name] = flops / seconds / self.peak
        if self.gpu:
            figures["peak_gb"] = B.max_over_ranks(torch.cuda.max_memory_allocated() / 1e9)
            figures["expected_gb"] = expected
        return figures

    def official(self, shape, job):
        if (shape, job) not in self.ours:
            raise RuntimeError("no step of ours to compare with")
        seconds, our_loss, our_norm = self.ours[shape, job]
        model, pi_ref = self.load(shape)
        batch = self.batch(job)
        model.zero_grad()

        def step():
            return sum(B.official_step(model, pi_ref, job, pair, len(batch))
                       for pair in batch[RANK::WORLD])

        loss, theirs = B.cost(self.device, step)
        return {"time": B.max_over_ranks(theirs[0].item()) / seconds, "our_loss": our_loss,
                "loss": B.sum_over_ranks(loss)[0], "gradient": gradient_norm(model) / our_norm}

    def scoring(self, shape):
        turns = self.groups("scoring")[:B.TURNS * (B.CANDIDATES + 1)]  # every rank the same
        pi_ref = self.load(shape)[1]
        B.compare_scoring(pi_ref, "", turns, 1)  # to warm up
        row = B.compare_scoring(pi_ref, "", turns, self.args.repeats)
        return {name: row[name] for name in ("tokens", "time", "of_bound", "differs")}

    def kernel(self, shape, kernel):
        take_kernel(kernel, self.device)
        model = self.load(shape)[0]
        self.loaded = None  # the next row loads another, with its own kernel
        step = functools.partial(self.forward_backward, model, "critic")
        step()  # to warm up
        seconds = self.time(step)
        self.kernel_seconds = self.kernel_seconds or seconds
        return {"seconds": seconds, "time": seconds / self.kernel_seconds}

    def forward_backward(self, model, job):
        logps = action_logps(model, turns_in(self.batch(job)[RANK::WORLD]))
        torch.cat(logps).sum().backward()

    def gaps(self, shape):
        model = self.load(shape)[0]
        with torch.profiler.profile() as profiler:
            self.forward_backward(model, POLICY)
        kind = torch.autograd.DeviceType.CUDA if self.gpu else torch.autograd.DeviceType.CPU
        spans = [(e.time_range.start, e.time_range.end, e.name) for e in profiler.events()
                 if e.device_type == kind and not e.is_user_annotation]
        longest, idle = idle_stretches(spans)
        figures = {"idle": idle / (max(end for _, end, _ in spans) - min(spans)[0])}
        for n, (length, before, after) in enumerate(longest[:3], 1):
            figures[f"gap_{n}"] = f"{length / 1e3:.2f} ms, {before[:30]} -> {after[:30]}"
        return figures

    def rows(self):
        """(name, function that makes the row, its arguments), the most telling ones first."""
        first = self.args.shapes[0]
        yield "matmul", self.matmul
        for name in KERNELS:
            yield "oracle", self.oracle, first, name
        for shape in self.args.shapes:
            for job in (POLICY, "critic"):
                yield "step", self.step, shape, job
                yield "official", self.official, shape, job
            yield "scoring", self.scoring, shape
            if shape == first:
                for name in KERNELS:
                    yield "kernel", self.kernel, shape, name
                yield "gaps", self.gaps, shape


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


def gradient_norm(model):
    return gathered(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))).item()


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
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    device, rows, end = init_distributed(), [], time.monotonic() + 60 * args.minutes

    def add(row):
        rows.append(row)
        if RANK == 0:
            with open(args.out, "w") as f:
                json.dump(rows, f, indent=1)
            print(table([row]).splitlines()[-1], file=sys.stderr, flush=True)

    def give_up(name, seconds):
        add({"row": name, "error": f"no end in {seconds:.3g} s: the run ends here"})
        if RANK == 0:
            print(table(rows), flush=True)
        os._exit(1)

    with tempfile.TemporaryDirectory() as folder:
        for kind, make, *about in Bench(args, device, folder).rows():
            name = " ".join([kind, *about])
            seconds = min(end - time.monotonic(), args.row_seconds)
            watchdog = threading.Timer(seconds, give_up, (name, seconds))
            watchdog.daemon = True
            watchdog.start()
            try:
                row = {"row": name, **make(*about)}
            except (Exception, SystemExit) as e:
                row = {"row": name, "error": f"{type(e).__name__}: {e}".splitlines()[0]}
            barrier()  # all ranks begin the next row together
            watchdog.cancel()
            add(row)
            tidy()
    if RANK == 0:
        print(table(rows))
    leave_group()


if __name__ == "__main__":
    main(get_args())
