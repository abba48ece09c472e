"""Shared by all scripts.

    flags            get_args() of each script is a list of flag(...), see there
    training         Log: metrics.jsonl and the progress bar; the learning rate
    --out            RunDirectory: what resumes, and what must not have changed
    ranks            the processes that torchrun starts
    records          reading and writing JSON lines
    messages         warnings, progress bars
    errors           one line for bad input, a traceback for a mistake in code, out of memory
    the program      Ctrl-C, closed streams
    hashes           also seeded randomness, and the version of the scripts

A reader of the method needs only the section on training: the others are what any program has.

Left out on purpose: config files, because the first row of a run's metrics.jsonl has its flags; and
experiment trackers, because each run's metrics are a file (wandb.diff also sends them to one).
"""
import argparse
import contextlib
import errno
import fcntl
import filecmp
import functools
import glob
import hashlib
import json
import marshal
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
import traceback
from collections import Counter
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version as package_version
from itertools import chain

from tqdm import tqdm

HERE = os.path.dirname(os.path.abspath(__file__))
RANK = int(os.environ.get("RANK") or 0)  # torchrun sets both; without it this is rank 0 of 1
WORLD = int(os.environ.get("WORLD_SIZE") or 1)
WARNINGS = {}  # {what: [example]}
if WORLD > 1:  # a slow import, needed only to communicate
    import torch.distributed as dist


# --- flags ----------------------------------------------------------------------------------------

class StoreGiven(argparse.Action):
    """Stores a flag's value, and its name in args.given, the list of the flags that were given."""

    def __call__(self, parser, args, value, option_string=None):
        setattr(args, self.dest, value)
        args.given = [*args.given, self.dest]


class Parser(argparse.ArgumentParser):
    """Prints errors on rank 0 only."""

    def __init__(self, **how):
        super().__init__(**how)
        self.set_defaults(given=[])  # see StoreGiven

    def refuse_unused(self, args, holds):
        """Exits if a flag is given that has no effect. holds: {a flag's `only`: whether it is so}.

        Every `only` of this parser's flags must be in `holds`.
        """
        for action in self._actions:
            only = getattr(action, "only", None)
            if only and not holds[only] and action.dest in args.given:
                self.error(f"--{action.dest} has an effect only {only}")

    def error(self, message):
        if RANK:
            end_after_rank_0(message)
        super().error(message)


def parser(doc, usage, parallel=False):
    """Returns a Parser whose --help shows a script's docstring; flags can't be abbreviated.

    parallel: whether torchrun may start several processes of the script, see refuse_processes.
    """
    refuse_processes(parallel)
    form = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=36, width=110)
    return Parser(description=doc, usage=usage, formatter_class=form, allow_abbrev=False)


def flag(p, name, default, text, kind=str, least=0, most=math.inf, only=None, **more):
    """Adds a flag. Its type is that of the default, or `kind` if the default is None.

    Numbers must be in [least, most]. only: where the flag has an effect, such as "with --loss dpo",
    for --help and refuse_unused().
    """
    if only:
        text += f" ({only})"
    if default is not None:
        kind, text = type(default), text + " [%(default)s]"

    def read(value):
        number = kind(value)
        if kind is not str and not least <= number <= most:  # NaN, too
            raise argparse.ArgumentTypeError(f"{value} is not in [{least}, {most}]")
        return number

    read.__name__ = kind.__name__  # for argparse's "invalid int value"
    if kind is not str and "choices" not in more:
        more["metavar"] = "N"
    if not name.startswith("-"):
        name = "--" + name
    action = p.add_argument(name, action=StoreGiven, type=read, default=default, help=text, **more)
    action.only = only  # for refuse_unused


def machine_flags(p):
    """Adds the trainers' flags for speed, memory, input and checkpoints."""
    g = p.add_argument_group("speed and memory (only --dtype changes results beyond rounding)")
    flag(g, "tree_tokens", 16384, "most tokens per forward, to bound memory", least=1)
    flag(g, "dtype", "auto", "auto: bf16 on a GPU, fp32 on a CPU; master weights are fp32",
         choices=["auto", "bf16", "fp32"])
    flag(g, "recompute", None, "1: activation checkpointing, a fifth slower; default: 1 on a GPU",
         kind=int, choices=[0, 1], only="with --out")
    flag(g, "compile", None, "1: torch.compile the layers and the head; default: 1 on a GPU",
         kind=int, choices=[0, 1])
    flag(g, "offload", 0, "1: keep weights and optimizer state in CPU memory", choices=[0, 1])
    g = p.add_argument_group("input and --out")
    flag(g, "max_length", 16384, "skip turns with more tokens than this, prompt included")
    flag(g, "save_every", 100, "steps between checkpoints", least=1, only="with --out")


# --- training: metrics.jsonl and the learning rate ------------------------------------------------

class Log:
    """Writes the metrics of a training run to metrics.jsonl, and shows them on stderr.

    Every rank needs one, because a step's tokens are summed over the ranks.
    """

    def __init__(self, directory, label, total):
        """directory: the RunDirectory. label: of the progress bar. total: the number of steps."""
        self.directory, self.label = directory, label
        self.last_step, self.total = directory.step, total

    def steps(self):
        """Yields the remaining steps, counted from 0, while a bar shows the progress."""
        self.bar = progress(self.label, total=self.total, initial=self.last_step)
        for step in range(self.last_step, self.total):
            self.began, self.last_step = time.monotonic(), step + 1
            yield step
        self.bar.close()

    def step_row(self, tokens, **row):
        """Writes the metrics of a training step and its duration. tokens: those of this rank."""
        row["tokens"] = int(sum_over_ranks(tokens))
        seconds = time.monotonic() - self.began
        row |= {"seconds": round(seconds, 4), "tokens_per_second": round(row["tokens"] / seconds)}
        if RANK == 0:
            self.directory.append(row)
            self.bar.set_postfix(row, refresh=False)
            self.bar.update()

    def row(self, **row):
        """Writes other metrics, and prints them."""
        if RANK == 0:
            self.directory.append(row)
            say(f"{self.label}: {', '.join(f'{name} {value}' for name, value in row.items())}")

    def finish(self):
        """Writes the last row, and removes the checkpoints, as the model is in --out."""
        self.row(finished=self.last_step)
        drop_checkpoints(self.directory.out)


def lr_at(step, steps, peak):
    """Returns the learning rate of a 0-based step: linear warm-up to `peak`, cosine to a tenth."""
    warmup = max(round(0.03 * steps), min(3, steps // 3))
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / (steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


# --- the --out directory of a run -----------------------------------------------------------------

class RunDirectory:
    """The directory --out of a training run, which it locks; it also has copies of the scripts.

    rows: those of metrics.jsonl, [] in a new run; the first one has all flags. step: that of the
    last checkpoint, from which a run resumes. A run that is resumed, or that is only read because
    it is `finished`, must have the same scripts, flags and data as this command.
    """
    MAY_CHANGE = ["out", "tree_tokens", "recompute", "compile", "offload", "save_every",
                  "eval_every", "model", "given"]  # of the model, begin() compares the weights

    def __init__(self, args):
        self.args, self.out = args, args.out
        self.path = os.path.join(args.out, "metrics.jsonl")
        self.rows, self.step = from_rank_0(self.lock_and_read)
        self.finished = any("finished" in row for row in self.rows)
        if self.rows:
            self.compare_scripts_and_flags()

    def lock_and_read(self):
        """Locks --out. Returns (rows of metrics.jsonl, step of the last checkpoint)."""
        out = self.out
        with fail_on_error(f"--out {out or repr(out)}"):
            os.makedirs(out, exist_ok=True)
            self.lock = os.open(out, os.O_RDONLY)
        with fail_on_error(f"--out {out} is in use by another run"):
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not set(os.listdir(out)) - {"metrics.jsonl.part"}:
            return [], 0  # new, or killed before its first row
        with fail_on_error(f"{self.path} is damaged; choose another --out to start over",
                           parses=True):
            rows = rows_of(out)
        if not rows:
            fail(f"--out {out} exists and is not a run: choose another")
        names = glob.glob("checkpoint-*", root_dir=out)
        steps = [name.removeprefix("checkpoint-") for name in names]
        return rows, max([int(step) for step in steps if step.isdecimal()], default=0)

    def compare_scripts_and_flags(self):
        """Exits if the run in --out is of other scripts or flags."""
        if changed := changed_scripts(self.out):
            self.refuse(f"different {changed} (it has copies)")
        old = [row for row in self.rows if "args" in row][-1]["args"]
        for name, new in vars(self.args).items():
            if old.get(name) != new and name not in self.MAY_CHANGE:
                self.refuse(f"--{name} {old.get(name)}, not {new}")

    def compare_facts(self, facts):
        """Exits if the run in --out has other data, steps, weights or precision."""
        for name, new in facts.items():
            if self.rows[0].get(name) != new:
                self.refuse(f"different {name}")

    def refuse(self, difference):
        """Exits because the run in --out differs from the command."""
        fail(f"the run in {self.out} has {difference}: repeat its command with its data, model and "
             "scripts, or choose another --out")

    def begin(self, groups, held_out, steps, **facts):
        """Writes the first row, or checks that the run in --out has the same facts and pairs.

        groups: [[Pair]] to train on; held_out: held-out [Pair]. The row stores their hash.
        """
        if RANK:
            return
        pairs = list(chain(*groups))
        facts = {"steps": steps, "pairs": len(pairs), "held_out_pairs": len(held_out),
                 "pairs_hash": digest([digest(pair) for pair in chain(pairs, held_out)]),
                 **facts}
        if self.rows:
            self.compare_facts(facts)
        if self.finished:
            drop_checkpoints(self.out)  # a kill may have left some
            return say(f"{self.out} is already trained with these scripts, flags and data; choose "
                       "another --out to train again")
        unit = "pairs" if any(pair.rejected for pair in pairs) else "trajectories"
        say(f"{len(pairs)} {unit}, {steps} steps")
        self.write_first_row(facts)
        with fail_on_error(f"{self.out} can't be written"):
            for name in glob.glob("*.py", root_dir=HERE):
                copy = os.path.join(self.out, name)
                if not os.path.exists(copy):  # keep those of the first start
                    shutil.copy(os.path.join(HERE, name), copy)

    def write_first_row(self, facts):
        """Writes metrics.jsonl anew: its rows before self.step, then a row about this start."""
        first = {"args": vars(self.args), "argv": sys.argv, "cwd": os.getcwd(),
                 "version": version(), "world": WORLD, **facts}
        if self.rows:
            first = {"resumed": self.step, **first}
        rows = [row for row in self.rows if row.get("step", -1) < self.step]
        with writing(self.path) as part, open(part, "w") as f:
            f.writelines(json.dumps(row) + "\n" for row in (*rows, first))
        self.file = open(self.path, "a", buffering=1)

    def append(self, row):
        """Appends a row to metrics.jsonl."""
        with fail_on_error(f"{self.path} can't be written"):
            self.file.write(json.dumps(row) + "\n")


def changed_scripts(out):
    """Names those of the running scripts that differ from the copies in a run's directory."""
    running = {*sys.modules, os.path.basename(sys.argv[0]).removesuffix(".py")}
    ours = [name for name in glob.glob("*.py", root_dir=HERE) if name[:-3] in running]
    _, changed, _ = filecmp.cmpfiles(HERE, out, ours, shallow=False)
    return ", ".join(sorted(changed))


def rows_of(out):
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

# {variable: its value if srun or mpirun started one process}; SLURM_NTASKS is also a batch script's
SINGLE = {"SLURM_PROCID": 0, "SLURM_STEP_NUM_TASKS": 1, "OMPI_COMM_WORLD_SIZE": 1, "PMI_SIZE": 1}


def refuse_processes(parallel):
    """Exits if this is one of several processes, except a `parallel` script's by torchrun."""
    if not 0 <= RANK < WORLD:
        fail(f"the environment has RANK={RANK}, WORLD_SIZE={WORLD}: let torchrun set both")
    if WORLD > 1 and not parallel:
        fail(f"{WORLD} processes were started, but this script is one: leave out torchrun")
    if "RANK" in os.environ:
        return  # torchrun's
    start = "one torchrun per node" if parallel else "one"
    for name, value in SINGLE.items():
        if int(os.environ.get(name) or 0) > value:
            fail(f"{name}={os.environ[name]}: several processes were started, each of which would "
                 f"do all the work; start {start}, or unset {name}")


def end_after_rank_0(message):
    """Waits 5 s, so that rank 0 prints the error and torchrun ends this rank; then exits."""
    time.sleep(5)
    sys.exit(f"rank {RANK}: {message}")


def init_distributed():
    """Initializes the process group, of one rank without torchrun; returns the torch.device."""
    import torch
    import torch.distributed as dist
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():  # batch shapes vary and would fragment memory
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun sets one thread per rank
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
        backend = "cpu:gloo,cuda:nccl"
    alone = {}
    if WORLD == 1:
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo listens on the network
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timedelta(hours=1), **alone)
    return device


def sum_over_ranks(number):
    """Returns the sum of a number over all ranks, which must all call this."""
    if WORLD == 1:
        return number
    import torch
    total = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def barrier():
    """Waits until all ranks have called this."""
    sum_over_ranks(0)


def from_rank_0(make):
    """Returns make() of rank 0, or raises its SystemExit, on all ranks; only rank 0 calls it."""
    return kept_and_shared(lambda: (None, make()))[1]


def kept_and_shared(make):
    """Returns (kept, shared) = make() on rank 0, and (None, shared) on all others.

    Only rank 0 calls make(). If that exits, all ranks do.
    """
    if WORLD == 1:
        return make()
    # create the group first: creating it times out after an hour, and make() may take longer
    group = dist.new_group(backend="gloo", timeout=timedelta(days=30))
    kept, shared = None, None
    if RANK == 0:
        try:
            kept, shared = make()
        except SystemExit as e:
            shared = e
    to_all = [shared]
    dist.broadcast_object_list(to_all, src=0, group=group)
    if isinstance(to_all[0], SystemExit):
        raise to_all[0]
    return kept, to_all[0]


# --- records: JSON lines from stdin or a file to stdout -------------------------------------------

def read_jsonl(stream, name="stdin"):
    """Yields (place, object) of each line but blank ones; exits at others, and if there is none."""
    if stream is sys.stdin and stream.isatty():
        say("reading records from the terminal; for a file use < FILE, and Ctrl-D ends the input")
    is_empty = True
    for number, line in enumerate(getattr(stream, "buffer", stream), 1):
        if not line.strip():
            continue
        is_empty, place = False, f"{name}, line {number}"
        refuse_pointer(line, name)
        try:
            record = parse_json(line)
            if b"\\ud" in line.lower() or b"\xed" in line:  # it may hold a surrogate
                record = without_surrogates(record)
        except (ValueError, RecursionError) as e:
            fail(f"{place}: not JSON ({e}); every line must be one JSON object")
        if not isinstance(record, dict):
            fail(f"{place}: not a JSON object")
        yield place, record
    if is_empty:
        fail(f"{name} is empty: did the previous stage fail, or was there nothing left to resume?")


def without_surrogates(record):
    """Replaces lone surrogates, which a model may sample, because UTF-8 can't encode them."""
    text = json.dumps(record, ensure_ascii=False).encode("utf-16", "surrogatepass")
    return parse_json(text.decode("utf-16", "replace"))


def finite(text):
    """Parses a JSON number; raises ValueError for NaN, Infinity and 1e999."""
    if not math.isfinite(float(text)):
        raise ValueError(f"{text} is not a finite number")
    return float(text)


def unique_keys(pairs):
    """Returns the dict of a JSON object's [(key, value)]; ValueError if a key comes twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        [(key, count)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key!r} occurs {count} times in one object; keep one of them")
    return values


def parse_json(text):
    """Returns the value of a JSON text; ValueError for NaN, 1e999 or a key that occurs twice."""
    return json.loads(text, object_pairs_hook=unique_keys, parse_float=finite,
                      parse_constant=finite)


def refuse_pointer(start, path):
    """Exits if a file, of which these are the first bytes, is a pointer of Git LFS."""
    if start.startswith(b"version https://git-lfs"):
        fail(f"{path} is only a pointer of Git LFS: run `git lfs pull` in the clone it is from")


def open_stdout():
    """Reserves stdout for records, and returns emit(record), which writes a line of JSON.

    Redirects library prints to stderr, so call this before they load. Only rank 0 writes. Exits if
    stdout is closed or can't be written; if its reader has closed it (`| head`), silently and by
    SIGPIPE, as other programs do, so that a pipe with `set -o pipefail` fails.
    """
    if sys.stdout is None:
        fail("stdout is closed; redirect it to a file or a pipe")
    stdout = open(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)

    def emit(record):
        if RANK:
            return
        try:
            stdout.write(json.dumps(record, allow_nan=False) + "\n")
            stdout.flush()
        except ValueError:
            fail("a result is NaN or infinite; check the weights of the model")
        except BrokenPipeError:  # Python ignores SIGPIPE, so that a closed socket is an exception
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.raise_signal(signal.SIGPIPE)
        except OSError as e:
            say(f"error: stdout: {e.strerror}")
            os._exit(1)
    return emit


def private_copy(data):
    """Returns a deep copy of JSON data, for the user's code, which may change what it gets.

    pickle is five times as fast as copy.deepcopy.
    """
    return pickle.loads(pickle.dumps(data))


def api_key(variable):
    """Returns the API key in an environment variable, without spaces around it, or "none"."""
    key = os.environ.get(variable, "").strip() or "none"
    if wrong := [c for c in key if not "!" <= c <= "~"]:
        fail(f"the API key in {variable} has the character {wrong[0]!r}, which no key has: copy it "
             "again")
    return key


# --- messages -------------------------------------------------------------------------------------

def inline(message):
    """Replaces unprintable characters, so that data in a message can't inject terminal escapes."""
    return "".join(c if c.isprintable() else "?" for c in str(message))


def say(message):
    """Prints one line to stderr, on rank 0 only."""
    if RANK == 0:
        print_to_stderr(inline(message))


def print_to_stderr(text):
    """Prints lines to stderr by a single write, so that those of several processes do not mix."""
    write = tqdm.write if sys.stderr.isatty() else print  # keeps progress bars intact
    with contextlib.suppress(OSError):  # a full disk under stderr must not end the work
        write(text + "\n", file=sys.stderr, end="")


def add_warning(what, example):
    """Collects a warning about the data; print_warnings prints one line per kind."""
    WARNINGS.setdefault(what, []).append(example)


def print_warnings():
    """Prints how often each kind of warning was added, with its first example, and resets."""
    for what, examples in WARNINGS.items():
        say(f"{len(examples)} {what} (the first: {examples[0]})")
    WARNINGS.clear()


def progress(label, items=None, total=None, initial=0, estimates=True):
    """Returns a tqdm bar, over items or updated by hand, that only rank 0 shows.

    estimates: whether tqdm estimates the time left; else the caller does, as the bar's postfix.
    """
    how = {"mininterval": 0.1, "delay": 0.1, "leave": False}
    if not estimates:
        how["bar_format"] = "{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}"
    if not sys.stderr.isatty():  # a line every 10 seconds instead of a bar
        left = ", {remaining} left" if estimates else ""
        how = {"mininterval": 10, "delay": 10, "leave": True,
               "bar_format": "{desc}: {n_fmt} of {total_fmt}" + left + "{postfix}\n"}
    return tqdm(items, total=total, initial=initial, desc=label, disable=RANK > 0,
                file=sys.stderr, position=0, **how)


# --- errors ---------------------------------------------------------------------------------------

# Errors that mean a mistake in code, such as in an edit, and not bad data. RuntimeError: torch
# raises it for tensors that do not fit together.
CODE_ERRORS = (NameError, AttributeError, TypeError, LookupError, AssertionError, ArithmeticError,
               RuntimeError)
SHOWN = set()  # (file, line) of the errors whose traceback show_traceback has printed


def fail(message):
    """Exits with a one-line error message on stderr and status 1."""
    raise SystemExit(f"error: {inline(message)}")


@contextlib.contextmanager
def fail_on_error(what, parses=False):
    """Turns an exception inside into the message "error: WHAT: reason".

    A code error (CODE_ERRORS) also shows its traceback, unless the code inside `parses` a file or
    reply of others, where bad data raises such errors, too. It leaves running out of memory to run.
    """
    try:
        yield
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as e:  # torch's CheckpointException does not subclass Exception
        if is_out_of_memory(e):
            raise
        if not parses:
            show_traceback(e)
        fail(f"{what}: {reason_of(e)}")


def reason_of(e):
    """Returns an exception's message in one line."""
    last_line = str(e).strip().rpartition("\n")[2].strip()
    if isinstance(e, CODE_ERRORS):
        return f"{type(e).__name__}: {last_line}"
    if getattr(e, "strerror", None):  # an OSError's, without its number and file
        return e.strerror
    return last_line or type(e).__name__


def show_traceback(e):
    """Prints the traceback of a code error, on any rank, but only one per line of code."""
    frames = traceback.extract_tb(e.__traceback__)
    place = frames[-1].filename, frames[-1].lineno
    if not isinstance(e, CODE_ERRORS) or place in SHOWN:
        return
    SHOWN.add(place)
    text = "Traceback (most recent call last):\n" + "".join(traceback.format_list(frames))
    print_to_stderr(text + inline(f"{type(e).__name__}: {e}"))


@contextlib.contextmanager
def writing(path):
    """Writes a file or directory atomically: yields path + ".part", and renames it at the end.

    On an error the program exits, and `path` is unchanged. All ranks may write to a directory if
    the code inside ends with a barrier.
    """
    part = path + ".part"
    with fail_on_error(f"{path} can't be written"):
        try:
            yield part
            if RANK == 0:
                os.replace(part, path)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)  # if it is a directory
            with contextlib.suppress(OSError):
                os.remove(part)  # if it is a file
            raise


def is_out_of_memory(e):
    """Returns whether an error says that the memory of the CPU or a GPU is exhausted."""
    if isinstance(e, MemoryError) or getattr(e, "errno", None) == errno.ENOMEM:
        return True
    words = ("out of memory", "ALLOC_FAILED", "DefaultCPUAllocator", "Cannot allocate memory",
             "can't start new thread")
    return isinstance(e, RuntimeError) and any(text in str(e) for text in words)


MEMORY_ADVICE = {"tree_tokens": "a lower --tree_tokens", "recompute": "--recompute 1",
                 "offload": "--offload 1", "max_batch_tokens": "a lower --max_batch_tokens",
                 "concurrency": "a lower --concurrency"}  # {flag: how it saves memory}


@contextlib.contextmanager
def fail_if_out_of_memory(args):
    """Exits if the code inside runs out of memory, and names the script's flags that save some."""
    try:
        yield
    except Exception as e:
        if WORLD > 1 and "closed by peer" in str(e):  # gloo's words
            fail("another rank has ended: see its error")
        if not is_out_of_memory(e):
            raise
        advice = [text for name, text in MEMORY_ADVICE.items()
                  if hasattr(args, name) and getattr(args, name) != 1]
        fail(f"out of memory: {reason_of(e)}; try {', '.join([*advice, 'a larger machine'])}")


# --- the program and its signals ------------------------------------------------------------------

def open_standard_streams():
    """Opens /dev/null in place of closed standard streams, so that no file gets their numbers.

    If stdout is closed, sys.stdout stays None, and open_stdout exits.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:  # it is closed, so it is the number of the next file
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or open(0)
    sys.stderr = sys.stderr or open(2, "w")


def end_at_ctrl_c():
    """Lets Ctrl-C kill this process by SIGINT: no traceback, and a shell's loop stops, too."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # not ignored, as after a &
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(main, args):
    """Calls main(args), which Ctrl-C kills. An error of another rank waits for that of rank 0."""
    end_at_ctrl_c()
    try:
        with fail_if_out_of_memory(args):
            main(args)
    except SystemExit as e:
        if RANK:
            end_after_rank_0(e.code)
        raise
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
    return hashlib.sha256(marshal.dumps(plain(x), 2)).hexdigest()[:16]


def plain(x):
    """Returns x with plain tuples in place of named ones, which marshal rejects."""
    if isinstance(x, tuple):
        return tuple(plain(item) for item in x)
    if isinstance(x, list):
        return [plain(item) for item in x]
    return x


def commit():
    """Returns the commit of these scripts, with "-dirty" if files have changed since.

    It is "unknown" for scripts that git does not track, whatever repo is around them.
    """
    git = functools.partial(subprocess.run, cwd=HERE, capture_output=True, text=True)
    with contextlib.suppress(OSError):  # git may not be installed
        if git(["git", "ls-files", "--error-unmatch", os.path.basename(__file__)]).returncode == 0:
            return git(["git", "describe", "--always", "--dirty"]).stdout.strip() or "unknown"
    return "unknown"


@functools.cache
def version():
    """Returns the commit of these scripts (see commit) and the package versions."""
    parts = [commit(), f"python {platform.python_version()}"]
    for package in ("torch", "transformers", "vllm", "flash-attn"):
        with contextlib.suppress(PackageNotFoundError):
            parts.append(f"{package} {package_version(package)}")
    return ", ".join(parts)


open_standard_streams()
if os.path.dirname(os.path.abspath(sys.argv[0])) == HERE:  # one of the scripts is run
    end_at_ctrl_c()  # already now, since libraries take seconds to load
