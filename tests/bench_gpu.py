"""One command for a machine with GPUs: speed, memory and right results.

    python tests/bench_gpu.py                                   # one GPU
    torchrun --nproc_per_node=8 tests/bench_gpu.py
    python tests/bench_gpu.py --shapes 1b                       # five minutes of an H100
    python tests/bench_gpu.py --shapes tiny                     # a rehearsal on a CPU

Models have random weights; nothing is fetched. Records and batches are those of bench_train.py.
After every row all rows so far are in --out as JSON. A row that fails says so, and the next begins;
at the end all that failed are named, with exit status 1.

matmul     TFLOP/s of large matrix products, the peak that the shares are of
oracle     the tree in 16 bits beside separate forwards in fp32: relative errors of log-probs and
           gradients, and the errors of separate forwards in 16 bits, which should be about as large
load       the model from the disk, proven, with --compile C --recompute R ("C1 R0"), and pi_ref
step       our step without the optimizer: tokens a second and GPU, share of the peak (of_peak: what
           is computed; useful: no layer recomputed), peak memory, and what plan.py expects; its
           first run, in which torch compiles
official   the released procedure on the same pairs: its seconds over ours (C0 R1), its loss, its
           gradient's norm over ours
scoring    the rival with a KV cache, as in bench_train.py
"""
import gc
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench_train as B  # noqa: E402
import torch  # noqa: E402
from timing import parser, ratio, show  # noqa: E402

from model import action_logps, batches, gathered, load, score, turns_in  # noqa: E402
from plan import plan  # noqa: E402
from utils import (RANK, WORLD, barrier, fail, from_rank_0, init_distributed,  # noqa: E402
                   leave_group)

JOBS = "dpo 24", "critic", "dpo 96"
WAYS = (0, 1), (1, 1), (1, 0)  # compile, recompute


def get_args():
    p = parser(__doc__, repeats=3)
    p.add_argument("--out", default="bench_gpu.json")
    p.add_argument("--shapes", nargs="+", choices=B.SHAPES, default=["1b", "8b", "3b"])
    return p.parse_args()


class Bench:
    """The rows of one shape. Each method makes one, a dict of figures, or raises what is wrong."""

    def __init__(self, args, device, folder, shape):
        self.repeats, self.device, self.folder = args.repeats, device, folder
        self.gpu = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.gpu else torch.float32
        tasks, pairs = (1, 2) if shape == "tiny" else (4 * WORLD, None)
        from_rank_0(lambda: B.make_data(folder, tasks, shape))
        self.batch = {job: batches(B.read_groups(job, folder), (pairs or B.JOBS[job][2]) * WORLD,
                                   seed=(0, 0))[0] for job in JOBS}
        self.model = self.pi_ref = None  # sharded as in training; whole, in 16 bits
        self.ours = {}  # {job: (seconds of each repeat, loss, gradient's norm)}

    def time(self, way):
        seconds, gave = B.timed(self.device, {"": way}, self.repeats)
        return seconds[""], gave[""]

    def matmul(self):
        n = 8192 if self.gpu else 512
        a = torch.randn(n, n, device=self.device, dtype=self.dtype)
        for _ in range(2):  # the first warms up
            seconds, _ = self.time(lambda: [a @ a for _ in range(10)])
        self.peak = 10 * 2 * n ** 3 / min(seconds)
        name = torch.cuda.get_device_name() if self.gpu else "CPU"
        return {"tflops": self.peak / 1e12, "device": name, "ranks": WORLD}

    def oracle(self):
        turns = [(prompt[-512:], action) for job in JOBS[:2]
                 for prompt, action in turns_in(self.batch[job])[:6]]

        def numbers(dtype, separate):
            """([log-probs], [gradient]); separate: each turn has a forward of its own."""
            model, _ = load(self.folder, self.device, dtype)
            if separate:
                with B.plain(model):
                    logps = [model(B.pad([p + a], self.device))[0, len(p) - 1:] for p, a in turns]
            else:
                logps = action_logps(model, turns)
            logps = torch.cat(logps)
            logps.mean().backward()
            return [logps.detach().cpu()], [p.grad for p in model.parameters()]

        right, errors = numbers(torch.float32, True), {}
        for name, separate in (("tree", False), ("separate", True)):
            for what, x, y in zip(("logps", "gradients"), right, numbers(self.dtype, separate)):
                errors[f"{name}_{what}"] = B.difference(x, y)
        return errors

    def load(self, compile, recompute):
        self.model = None
        start = time.perf_counter()
        self.model = B.load_moved(self.folder, self.device, dtype=self.dtype, compile=compile,
                                  recompute=recompute)
        seconds = time.perf_counter() - start
        if not self.pi_ref:
            self.pi_ref = load(self.folder, self.device, self.dtype)[0].requires_grad_(False)
        return {"seconds": seconds}

    def plan(self, job, recompute):
        """What plan.py says of a step."""
        args = B.JOBS[job][0].get_args(["--out", "x", "--recompute", str(recompute)])
        return plan(args, WORLD, self.model.config, [self.batch[job]], [])

    def norm(self):
        """The gradient's; it is left."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), float("inf"))
        return gathered(norm).item()

    def step(self, job, compile, recompute):
        plan, batch = self.plan(job, recompute), self.batch[job]
        turns = turns_in(batch)
        ref = dict(zip(turns, score(self.pi_ref, turns, B.TREE_TOKENS)))
        self.model.zero_grad()
        start = time.perf_counter()
        B.our_step(self.model, job, batch, ref)  # to warm up
        first, norm = time.perf_counter() - start, self.norm()
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds, loss = self.time(lambda: B.our_step(self.model, job, batch, ref))
        self.ours[job] = seconds, loss, norm
        figures = {"pairs": len(batch), "seconds": min(seconds), "first": first, "loss": loss,
                   "tokens_a_second": plan["tokens"]["computed"] / WORLD / min(seconds)}
        for name, again in (("of_peak", recompute), ("of_peak_useful", 0)):
            flops = self.plan(job, again)["hours"] * 3600 * 400e12  # of a GPU
            figures[name] = flops / min(seconds) / self.peak
        if self.gpu:
            figures["peak_gb"] = B.max_over_ranks(torch.cuda.max_memory_allocated() / 1e9)
            # weights and gradients, no moments; and pi_ref
            figures["expected_gb"] = plan["gb_a_gpu"] / 2 + plan["parameters"] * 2 / 1e9
        return figures

    def official(self, job):
        ours, our_loss, our_norm = self.ours[job]
        self.model.zero_grad()
        B.official_step(self.model, job, self.batch[job], self.pi_ref)
        norm = self.norm()
        seconds, loss = self.time(
            lambda: B.official_step(self.model, job, self.batch[job], self.pi_ref))
        return {"time": ratio(seconds, ours)[0], "our_loss": our_loss, "loss": loss,
                "gradient": norm / our_norm}

    def scoring(self):
        turns = B.read_groups("scoring", self.folder)[:B.TURNS * (B.CANDIDATES + 1)]
        return B.compare_scoring(self.pi_ref, turns, self.repeats)

    def rows(self):
        """(words of its name, function that makes the row, its arguments)"""
        yield ["matmul"], self.matmul
        if WORLD == 1:
            yield ["oracle"], self.oracle
        for how in WAYS:
            name = "C{} R{}".format(*how)
            yield ["load", name], self.load, *how
            for job in JOBS:
                yield ["step", job, name], self.step, job, *how
                if how == WAYS[0] and job != "dpo 96":
                    yield ["official", job], self.official, job
        yield ["scoring"], self.scoring


def main(args):
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    device, rows = init_distributed(), []
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            folder = from_rank_0(lambda: folder)
            for (kind, *more), make, *given in Bench(args, device, folder, shape).rows():
                row = {"row": " ".join([kind, shape, *more])}
                try:
                    row |= {k: v for k, v in make(*given).items() if k != "row"}
                except (Exception, SystemExit) as e:
                    traceback.print_exc()
                    row["error"] = f"{type(e).__name__}: {e}".splitlines()[0]
                rows.append(row)
                show(row)
                if RANK == 0:
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
