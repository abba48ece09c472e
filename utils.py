"""Shared by all scripts.

    flags            the argument parser of all scripts, and flags of both trainers
    training         the learning rate; RunLog: the --out directory, metrics, what resumes
    ranks            the processes that torchrun starts
    records          reading and writing JSON lines
    messages         warnings, progress bars
    errors           one line for bad input, a traceback for a mistake in code
    the program      main() and Ctrl-C
    hashes           also seeded randomness, and the version of the scripts

A reader of the method needs only the section on training: the others are what any program has.

Left out on purpose: config files, because the first row of a run's metrics.jsonl has its flags; and
experiment trackers, because each run's metrics are a file (wandb.diff also sends them to one).
"""
import argparse
import contextlib
import fcntl
import filecmp
import functools
import glob
import hashlib
import json
import math
import os
import pickle
import platform
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextvars import ContextVar
from datetime import timedelta
from importlib.metadata import version as package_version

from tqdm import tqdm

HERE = os.path.dirname(os.path.abspath(__file__))
RANK = int(os.environ.get("RANK") or 0)  # torchrun sets both; without it this is rank 0 of 1
WORLD = int(os.environ.get("WORLD_SIZE") or 1)
WARNINGS = {}  # {what: [example]}
# The usage (colbench.RECORD) of collect.py's running episode; here, so that FILE.py can import it
USAGE = ContextVar("usage", default=Counter())


# --- flags ----------------------------------------------------------------------------------------

class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows a docstring as it is written, and the default of every flag that has one."""

    def _get_help_string(self, action):
        return action.help if action.default is None else super()._get_help_string(action)


def parser(doc, usage):
    """Returns an ArgumentParser whose --help shows a docstring; flags can't be abbreviated."""
    return argparse.ArgumentParser(description=doc, usage=usage, formatter_class=HelpFormatter,
                                   allow_abbrev=False)


def positive(text):
    """Returns the integer that a flag's text spells; ValueError below 1."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def machine_flags(p):
    """Adds the trainers' flags for speed, memory, input and checkpoints."""
    g = p.add_argument_group("speed and memory (only --dtype changes results beyond rounding)")
    g.add_argument("--tree_tokens", type=positive, default=16384,
                   help="most tokens per forward, to bound memory")
    g.add_argument("--dtype", default="auto", choices=["auto", "bf16", "fp32"],
                   help="auto: bf16 on a GPU, fp32 on a CPU; master weights are fp32")
    g.add_argument("--recompute", type=int, choices=[0, 1],
                   help="1: activation checkpointing, a fifth slower; default: 1 on a GPU")
    g.add_argument("--compile", type=int, choices=[0, 1],
                   help="1: torch.compile the layers and the head; default: 1 on a GPU")
    g.add_argument("--offload", type=int, default=0, choices=[0, 1],
                   help="1: keep weights and optimizer state in CPU memory")
    g = p.add_argument_group("input and --out")
    g.add_argument("--max_length", type=int, default=16384,
                   help="skip turns with more tokens than this, prompt included")
    g.add_argument("--save_every", type=positive, default=100, help="steps between checkpoints")


# --- training: the learning rate and the --out directory ------------------------------------------

def lr_at(step, steps, peak):
    """Returns the learning rate of a 0-based step: linear warm-up to `peak`, cosine to a tenth.

    The warm-up takes 3 % of the steps, at least three, but at most a third of a short run.
    """
    warmup = max(round(0.03 * steps), min(3, steps // 3))
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / (steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


class RunLog:
    """The directory --out of a training run: it has the metrics, and copies of the scripts.

        log = RunLog(args)  # locks --out; log.rows: those of its metrics.jsonl, [] in a new run
        log.check(facts)    # exits if the run in --out is another one
        if not log.finished:
            log.start("policy", steps)
            for step in range(log.step, steps):  # log.step: that of the last checkpoint
                log.step_row(began, own_tokens, step=step, loss=loss)
                log.row(step=step, held_out_loss=loss)  # any other metrics
            log.finish()

    Every rank needs a RunLog, because a step's tokens are summed over the ranks.
    """
    MAY_CHANGE = ["out", "tree_tokens", "recompute", "compile", "offload", "save_every",
                  "eval_every", "model", "dtype"]  # of these two, the facts are compared

    def __init__(self, args):
        self.args, self.out = args, args.out
        self.path = os.path.join(args.out, "metrics.jsonl")
        self.rows, self.step = from_rank_0(self.lock_and_read)
        self.finished = any("finished" in row for row in self.rows)
        self.facts = self.bar = self.file = None

    def lock_and_read(self):
        """Locks --out. Returns (rows of metrics.jsonl, step of the last checkpoint)."""
        out = self.out
        os.makedirs(out, exist_ok=True)
        self.lock = os.open(out, os.O_RDONLY)
        with fail_on_error(f"--out {out} is in use by another run"):
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not set(os.listdir(out)) - {"metrics.jsonl.part"}:
            return [], 0  # new, or killed before its first row
        rows = read_metrics(out)
        if not rows:
            fail(f"--out {out} exists and is not a run: choose another")
        names = glob.glob("checkpoint-*", root_dir=out)
        steps = [name.removeprefix("checkpoint-") for name in names]
        return rows, max([int(step) for step in steps if step.isdecimal()], default=0)

    def check(self, facts):
        """Exits if the run in --out has other scripts, flags or facts than this command."""
        self.facts = facts
        if RANK:
            return
        if self.rows:
            first = self.rows[0]
            flags = {name: x for name, x in vars(self.args).items() if name not in self.MAY_CHANGE}
            different = changed_scripts(self.out)
            different += [name for name in flags if first["args"].get(name) != flags[name]]
            different += [name for name in facts if first.get(name) != facts[name]]
            if different:
                fail(f"the run in {self.out} has different {', '.join(different)}: repeat its "
                     "command with its data, model and scripts (it has copies), or choose another "
                     "--out")
        if self.finished:
            drop_checkpoints(self.out)  # a kill may have left some
            say(f"{self.out} is already trained with these scripts, flags and data; choose another "
                "--out to train again")

    def start(self, label, steps, **numbers):
        """Writes the first row, and copies the scripts.

        label: of the progress bar. steps: their number. numbers: of pairs and the like.
        """
        self.bar = progress(label, total=steps, initial=self.step)
        if RANK:
            return
        first = {"args": vars(self.args), "argv": sys.argv, "cwd": os.getcwd(),
                 "version": version(), "world": WORLD, **self.facts, "steps": steps, **numbers}
        if self.rows:
            first = {"resumed": self.step, **first}
        rows = [row for row in self.rows if row.get("step", -1) < self.step]
        with writing(self.path) as part, open(part, "w") as f:
            f.writelines(json.dumps(row) + "\n" for row in (*rows, first))
        self.file = open(self.path, "a", buffering=1)
        for name in glob.glob("*.py", root_dir=HERE):
            copy = os.path.join(self.out, name)
            if not os.path.exists(copy):  # keep those of the first start
                with writing(copy) as part:
                    shutil.copy(os.path.join(HERE, name), part)

    def step_row(self, began, own_tokens, **row):
        """Writes the metrics of a training step.

        began: time.monotonic() at its start. own_tokens: those of this rank.
        """
        row["tokens"] = int(sum_over_ranks(own_tokens))
        seconds = time.monotonic() - began
        row |= {"seconds": round(seconds, 4), "tokens_per_second": round(row["tokens"] / seconds)}
        if RANK == 0:
            self.append(row)
            self.bar.set_postfix(numbers_of(row), refresh=False)
            self.bar.update()

    def row(self, **row):
        """Writes other metrics, and prints them."""
        if RANK == 0:
            self.append(row)
            numbers = ", ".join(f"{name} {x}" for name, x in numbers_of(row).items())
            say(f"{self.bar.desc}: {numbers}")

    def append(self, row):
        """Appends a row to metrics.jsonl."""
        self.file.write(json.dumps(row) + "\n")

    def finish(self):
        """Writes the last row, and removes the checkpoints, as the model is in --out."""
        self.bar.close()
        self.row(finished=self.bar.n)
        drop_checkpoints(self.out)


def numbers_of(row):
    """Returns the metrics of a row that are numbers; metrics.jsonl may have lists, too."""
    return {name: x for name, x in row.items() if isinstance(x, (int, float))}


def changed_scripts(out):
    """Lists those of the running scripts that differ from the copies in a run's directory."""
    running = {*sys.modules, os.path.basename(sys.argv[0]).removesuffix(".py")}
    running -= {"collect"}  # no trainer calls it
    names = [name for name in glob.glob("*.py", root_dir=HERE) if name[:-3] in running]
    _, changed, _ = filecmp.cmpfiles(HERE, out, names, shallow=False)
    return sorted(changed)


def read_metrics(out):
    """Returns the rows of a run's metrics.jsonl, [] if there is none."""
    path = os.path.join(out, "metrics.jsonl")
    if not os.path.exists(path):
        return []
    with open(path) as f:  # a kill may cut the last line
        rows = [json.loads(line) for line in f if line.endswith("}\n")]
    return rows if rows and "args" in rows[0] else []


def drop_checkpoints(out, keep=None):
    """Removes all checkpoints in `out`, partial ones too, except that of step `keep`."""
    if RANK == 0:
        for name in glob.glob("checkpoint-*", root_dir=out):
            step = name.removeprefix("checkpoint-").removesuffix(".part")
            if step.isdecimal() and name != f"checkpoint-{keep}":
                shutil.rmtree(os.path.join(out, name))


# --- ranks ----------------------------------------------------------------------------------------

def cpus():
    """Returns how many CPUs this process may use, by its affinity and its container's quota."""
    count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # it may be "max"
        with open("/sys/fs/cgroup/cpu.max") as f:
            limit, period = f.read().split()
        count = min(count, math.ceil(int(limit) / int(period)))
    return count


def init_distributed():
    """Initializes the process group, of one rank without torchrun; returns the torch.device.

    Ranks wait for each other at most a day, as rank 0 may read from a pipe for hours.
    """
    import torch  # slow, and not every script needs it
    import torch.distributed as dist
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():  # batch shapes vary and would fragment memory
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun sets one thread per rank
        torch.set_num_threads(max(1, cpus() // ranks))
        backend = "cpu:gloo,cuda:nccl"
    alone = {}
    if WORLD == 1:
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo listens on the network
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timedelta(days=1), **alone)
    return device


def from_rank_0(make):
    """Returns make() of rank 0 on all ranks; only rank 0 calls it."""
    if WORLD == 1:
        return make()
    import torch.distributed as dist
    objects = [None if RANK else make()]
    dist.broadcast_object_list(objects, src=0)
    return objects[0]


def sum_over_ranks(number):
    """Returns the sum of a number over all ranks, which must all call this."""
    if WORLD == 1:
        return number
    import torch
    total = torch.tensor(number, dtype=torch.float64)
    torch.distributed.all_reduce(total)
    return total.item()


# --- records: JSON lines from stdin or a file to stdout -------------------------------------------

def read_jsonl(stream, name="stdin"):
    """Yields (place, object) of each line but blank ones; exits at others, and if there is none."""
    is_empty = True
    for number, line in enumerate(getattr(stream, "buffer", stream), 1):
        if not line.strip():
            continue
        is_empty, place = False, f"{name}, line {number}"
        try:
            record = parse_json(line)
        except (ValueError, RecursionError) as e:
            fail(f"{place}: not JSON ({e}); every line must be one JSON object")
        if not isinstance(record, dict):
            fail(f"{place}: not a JSON object")
        yield place, record
    if is_empty:
        fail(f"{name} is empty: did the previous stage fail, or was there nothing left to resume?")


def parse_json(text):
    """Returns the value of a JSON text; ValueError for NaN and Infinity, which Python takes."""
    def refuse(constant):
        raise ValueError(f"{constant} is not a finite number")

    return json.loads(text, parse_constant=refuse)


def open_stdout():
    """Reserves stdout for records, and returns emit(record), which writes a line of JSON.

    Redirects library prints to stderr, so call this before they load. Only rank 0 writes.
    """
    stdout = open(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)

    def emit(record):
        if RANK == 0:
            stdout.write(json.dumps(record, allow_nan=False) + "\n")
            stdout.flush()
    return emit


def private_copy(data):
    """Returns a deep copy of JSON data, for the user's code, which may change what it gets.

    pickle is five times as fast as copy.deepcopy.
    """
    return pickle.loads(pickle.dumps(data))


# --- messages -------------------------------------------------------------------------------------

def inline(message):
    """Replaces unprintable characters, so that a message is one line, without terminal escapes."""
    return "".join(c if c.isprintable() else "?" for c in str(message))


def say(message):
    """Prints one line to stderr, on rank 0 only."""
    if RANK == 0:
        write = tqdm.write if sys.stderr.isatty() else print  # keeps progress bars intact
        write(inline(message), file=sys.stderr)


def add_warning(what, example):
    """Collects a warning about the data; print_warnings prints one line per kind."""
    WARNINGS.setdefault(what, []).append(example)


def print_warnings():
    """Prints how often each kind of warning was added, with its first example, and resets."""
    for what, examples in WARNINGS.items():
        say(f"{len(examples)} {what} (the first: {examples[0]})")
    WARNINGS.clear()


def progress(label, items=None, total=None, initial=0):
    """Returns a tqdm bar, over items or updated by hand, that only rank 0 shows."""
    interval = 0.1 if sys.stderr.isatty() else 10
    return tqdm(items, total=total, initial=initial, desc=label, disable=RANK > 0, leave=False,
                mininterval=interval, delay=interval)


# --- errors ---------------------------------------------------------------------------------------

def fail(message):
    """Exits with a one-line error message on stderr and status 1."""
    raise SystemExit(f"error: {inline(message)}")


@contextlib.contextmanager
def fail_on_error(what):
    """Turns an error of the input into the message "error: WHAT: reason"."""
    try:
        yield
    except (OSError, ValueError, ImportError) as e:  # any other may be a mistake in code
        fail(f"{what}: {getattr(e, 'strerror', None) or e}")


@contextlib.contextmanager
def writing(path):
    """Writes a file or directory atomically: yields path + ".part", and renames it at the end.

    On an error `path` is unchanged. All ranks may write to a directory if the code inside ends with
    a barrier.
    """
    yield path + ".part"
    if RANK == 0:
        os.replace(path + ".part", path)


# --- the program ----------------------------------------------------------------------------------

def run(main, args):
    """Calls main(args). Ctrl-C kills it by SIGINT: no traceback, and a shell's loop stops, too."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # not ignored, as after a &
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    main(args)
    torch = sys.modules.get("torch")  # not every script imports it
    if torch and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # prevents a warning of NCCL


# --- hashes, seeded randomness, the version of the scripts ----------------------------------------

def rng(*key):
    """Returns a random.Random seeded by `key`, the same on every machine and Python version."""
    text = json.dumps(key)
    return random.Random(hashlib.sha256(text.encode()).digest())


def digest(x):
    """Returns a short hash, by value, of nested lists, tuples, numbers and strings."""
    return hashlib.sha256(ascii(x).encode()).hexdigest()[:16]


@functools.cache
def version():
    """Returns the commit of these scripts, "-dirty" if files differ, and the package versions."""
    commit = ""
    # a run's own copies are in no repository of theirs; and there may be no git
    if os.path.exists(os.path.join(HERE, ".git")) and shutil.which("git"):
        commit = subprocess.run(["git", "-C", HERE, "describe", "--always", "--dirty"],
                                capture_output=True, text=True).stdout.strip()
    packages = [f"{name} {package_version(name)}" for name in ("torch", "transformers")]
    return ", ".join([commit or "unknown", f"python {platform.python_version()}", *packages])
