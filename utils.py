"""What the scripts share: flags, messages, signals, JSON lines, ranks, --out."""
import argparse
import contextlib
import fcntl
import filecmp
import functools
import glob
import hashlib
import json
import marshal
import math
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version as package_version
from itertools import chain

from tqdm import tqdm

HERE = os.path.dirname(os.path.abspath(__file__))
RANK = int(os.environ.get("RANK", 0))  # torchrun sets both; without it: rank 0 of 1
WORLD = int(os.environ.get("WORLD_SIZE", 1))
NOTES = {}  # {what: [example]}
if WORLD > 1:  # slow to load; what is below needs it only between ranks
    import torch.distributed as dist


# --- flags ----------------------------------------------------------------------------------------

class Parser(argparse.ArgumentParser):
    """Only rank 0 prints an error. args.given: the names of the --flags that were given."""

    def parse_args(self, argv=None):
        args = super().parse_args(argv)
        words = sys.argv[1:] if argv is None else argv
        args.given = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
        return args

    def error(self, message):
        if RANK:
            end_after_rank_0(message)
        super().error(message)


def parser(doc, usage):
    """A Parser that describes itself by a script's docstring, and takes no abbreviated flags."""
    form = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=36, width=110)
    return Parser(description=doc, usage=usage, formatter_class=form, allow_abbrev=False)


def end_after_rank_0(message):
    """Ends another rank after 5 s: if rank 0 has the same error, only its line is printed."""
    time.sleep(5)
    sys.exit(f"rank {RANK}: {message}")


def flag(p, name, default, text, kind=str, least=0, most=math.inf, **more):
    """Adds a flag of the default's type; without a default it is text, or of `kind`.

    A number must be between `least` and `most`. Its line of --help ends with [the default].
    """
    if default is not None:
        kind, text = type(default), text + " [%(default)s]"

    def read(value):
        number = kind(value)
        if kind is not str and not least <= number <= most:  # NaN, too
            raise argparse.ArgumentTypeError(f"{value} is not from {least} to {most}")
        return number

    read.__name__ = kind.__name__  # argparse names it: "invalid int value"
    if kind is not str and "choices" not in more:
        more["metavar"] = "N"
    p.add_argument(name if name.startswith("-") else "--" + name, type=read, default=default,
                   help=text, **more)


def machine_flags(p):
    """The trainers' flags for speed, memory, input and checkpoints."""
    g = p.add_argument_group("speed and memory (but for rounding, only --dtype changes results)")
    flag(g, "tree_tokens", 16384, "tokens of a tree computed at once: bounds the memory", least=1)
    flag(g, "dtype", "auto", "auto: bf16 on a GPU, fp32 on a CPU; weights train in fp32",
         choices=["auto", "bf16", "fp32"])
    flag(g, "recompute", None, "1: activation checkpointing, a fifth slower; not given: 1 on a GPU",
         kind=int, choices=[0, 1])
    flag(g, "compile", None, "1: torch.compile of layers and head; not given: 1 on a GPU", kind=int,
         choices=[0, 1])
    flag(g, "offload", 0, "1: weights and moments rest in CPU memory", choices=[0, 1])
    g = p.add_argument_group("input and --out")
    flag(g, "max_length", 16384, "leave out, and count, turns of more tokens (prompt and action)")
    flag(g, "save_every", 100, "steps between checkpoints to go on from", least=1)


# --- messages and errors --------------------------------------------------------------------------

def inline(message):
    """The message on one line: data in it can't steer the terminal or begin a line of its own."""
    return "".join(c if c.isprintable() else "?" for c in str(message))


def say(message):
    """Prints one line for people on stderr, on rank 0."""
    if RANK == 0:
        write = tqdm.write if sys.stderr.isatty() else print  # the former keeps a bar below
        write(inline(message) + "\n", file=sys.stderr, end="")


def fail(message):
    """Ends the program with one line on stderr and exit status 1."""
    raise SystemExit(f"error: {inline(message)}")


def note(what, example):
    """Counts something odd in the data; tell_notes says each kind once."""
    NOTES.setdefault(what, []).append(example)


def tell_notes():
    """Says each kind that was noted: how often, and the first example. Then it counts anew."""
    for what, examples in NOTES.items():
        say(f"{len(examples)} {what} (the first: {examples[0]})")
    NOTES.clear()


@contextlib.contextmanager
def fail_on_error(what):
    """Ends the program by "error: WHAT: reason" if the code inside fails; DEBUG=1: a traceback."""
    try:
        yield
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as e:  # torch's error of checkpoints is no Exception
        if os.environ.get("DEBUG"):
            raise
        last_line = str(e).strip().rpartition("\n")[2].strip()
        if isinstance(e, (NameError, AttributeError, TypeError, LookupError)):  # of an edit, maybe
            last_line = f"{type(e).__name__}: {last_line} (DEBUG=1 shows where)"
        fail(f"{what}: {getattr(e, 'strerror', None) or last_line or type(e).__name__}")


@contextlib.contextmanager
def writing(path):
    """Yields path + ".part". What is written there, a file or a directory, becomes `path`.

    An error ends the program, and `path` is as it was. All ranks may write to a directory, if the
    code inside ends with a barrier.
    """
    part = path + ".part"
    with fail_on_error(f"{path} can't be written"):
        try:
            yield part
            if RANK == 0:
                os.replace(part, path)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)  # a directory
            with contextlib.suppress(OSError):
                os.remove(part)  # or a file
            raise


def check_finite(step, **values):
    """Ends a run before a step that would spoil the weights."""
    for name, value in values.items():
        if not math.isfinite(value):
            fail(f"step {step}: the {name} is {value}, and this step would spoil the weights: "
                 "a lower --lr or --beta, or --dtype fp32, may help")


def progress(label, items=None, total=None, initial=0):
    """A tqdm bar over items, or to update by hand; rank 0 alone shows it.

    Where stderr is no terminal it is a line every 10 seconds.
    """
    every, form = 0.1, None
    if not sys.stderr.isatty():
        every, form = 10, "{desc}: {n_fmt} in {elapsed}{postfix}\n"
        if items or total:
            form = "{desc}: {n_fmt} of {total_fmt}, {remaining} left{postfix}\n"
    bar = tqdm(items, total=total, initial=initial, desc=label, disable=RANK > 0, leave=False,
               mininterval=every, delay=every, bar_format=form, file=sys.stderr, position=0)
    if form:
        bar.close = lambda: None  # it would blank the last line
    return bar


# --- the program and its signals ------------------------------------------------------------------

def run(main, args):
    """Calls main(args). Ctrl-C ends it at once, and the shell's loop that it is in."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # else a shell's & ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback
    try:
        main(args)
    except SystemExit as e:
        if RANK:
            end_after_rank_0(e.code)
        raise
    finally:
        if WORLD == 1 or sys.exc_info()[0] is None:  # after an error other ranks may wait
            leave_group()  # or NCCL prints a warning


# --- JSON lines -----------------------------------------------------------------------------------

# The shapes of the fields that the scripts read, where a record has them. All others pass through.
# A shape is str, int, float, [shape], or {key: shape}, where the key ... stands for any key.
ACTION = {"content": str, "output": str, "token_ids": [int], "logprobs": [float],
          "logprob": float, "advantage": float}
RECORD = {
    "task": {"kind": str, "problem_description": str, "ground_truth": str,
             "hidden_information": str, "agent_prompt": str, "test_cases": {...: str}},
    "dialogue_history": [{"role": str, **ACTION, "candidates": [ACTION]}],
    "sample": int, "answer": str, "answered": bool, "reward": float,
    "tests": {...: str}, "failure": str, "reward_by": str,
    "meta": {"model_weights": str, "candidates": {}}}
NOT_READ = {  # fields that would change what a model reads or learns, and what to do instead
    "system": "a system text is a first message with that role",
    "input": "the agent reads the messages before its own: drop it if the first has the "
             "instructions, else write them there",
    "reasoning_content": "a thought is a part of content, <think> ... </think>",
    **dict.fromkeys(["tools", "tool_calls"], "tools are not supported (TRL has them)"),
    **dict.fromkeys(["loss_mask", "weight", "train"], "all the assistant's messages count alike")}
TYPES = {
    str: ("text", lambda x: isinstance(x, str)),
    bool: ("true or false", lambda x: isinstance(x, bool)),
    int: ("a whole number from 0 on", lambda x: isinstance(x, int) and 0 <= x < 2 ** 62),
    float: ("a finite number", lambda x: isinstance(x, (int, float)) and abs(x) < 1e300),
    list: ("a list", lambda x: isinstance(x, list)),
    dict: ("an object", lambda x: isinstance(x, dict))}


def check_shape(value, shape, path=""):
    """Raises ValueError if a value is not of the shape; removes keys whose value is None."""
    what, fits = TYPES[shape if isinstance(shape, type) else type(shape)]
    if not fits(value):
        raise ValueError(f"{path} is not {what}")
    if isinstance(shape, list):
        for i, item in enumerate(value):
            check_shape(item, shape[0], f"{path}[{i}]")
    if isinstance(shape, dict):
        for key in list(value):
            expected = shape.get(key, shape.get(...))
            if key in shape and value[key] is None:
                del value[key]
            elif expected is not None:
                check_shape(value[key], expected, f"{path}.{key}".lstrip("."))


def check_dialogue(history, name):
    """Raises ValueError if messages are no dialogue. name: what the error calls it."""
    for message in history:
        if message.get("role") not in ("system", "user", "assistant") or "content" not in message:
            raise ValueError(f"a message of {name} lacks content, or a role of system, user and "
                             "assistant")
    if history and history[0]["role"] == "assistant":
        raise ValueError(f"{name} starts with the assistant, who has nothing to answer to")


def refuse_unread(record, messages):
    """Raises ValueError if a record or one of its messages has a field of NOT_READ."""
    for part in (record, *messages):
        for name in NOT_READ:
            if part.get(name) not in (None, "", [], {}, 1):  # 1, or true, is a whole weight
                raise ValueError(f"the field {name!r} is not read: {NOT_READ[name]}")


def finite(text):
    """The float in a JSON text; ValueError for NaN, Infinity and 1e999, which can't be written."""
    if not math.isfinite(float(text)):
        raise ValueError(f"{text} is not a finite number")
    return float(text)


def parse_record(line, need):
    """The record in a line (bytes), with every field of `need`; ValueError says what is wrong."""
    try:
        record = json.loads(line, parse_float=finite, parse_constant=finite)
        if b"\\ud" in line.lower() or b"\xed" in line:  # the ways to write a surrogate
            # U+FFFD for lone ones, which a model may sample and no file can hold
            text = json.dumps(record, ensure_ascii=False).encode("utf-16", "surrogatepass")
            record = json.loads(text.decode("utf-16", "replace"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"not JSON ({e}); every line must be one JSON object") from None
    if not isinstance(record, dict):
        raise ValueError("not a JSON object with fields")
    if "task" not in record and "problem_description" in record:
        record = {"task": record}  # ColBench's published task files hold bare tasks
    if "rejected" in record and "task" not in record:
        raise ValueError("a preference; for records: python tests/experiments/preferences.py < "
                         "it.jsonl | python train_policy.py --loss mtdpo ...")
    check_shape(record, RECORD)
    check_dialogue(record.get("dialogue_history", []), "dialogue_history")
    if not -1 <= record.get("reward", 0) <= 1:
        raise ValueError(f"the reward {record['reward']} is not between -1 and 1")
    for path in need(record) if callable(need) else need:
        value = record
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value in (None, {}, []):
            raise ValueError(f"no {path!r} in this record")
    return record


def read_jsonl(stream, need=(), name="stdin"):
    """Yields a dict for each line, but blank ones. A bad line ends the program; the error names it.

    need: fields that each record must have, as paths such as "task.ground_truth"; or a function
    that returns them for a record.
    """
    found = False
    lines = getattr(stream, "buffer", stream)  # bytes: they may not be UTF-8
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = parse_record(line, need)
        except ValueError as e:
            fail(f"{name}, line {number}: {e}")
        found = True
        yield record
    if not found:
        fail(f"{name} is empty: nothing to do (did the stage before it fail?)")


def open_stdout():
    """Keeps stdout for records: returns emit(record), which writes one as a line of JSON.

    What libraries print goes to stderr: call this before they load. Only rank 0 writes. Ends the
    program when stdout takes no more, without a word if its reader has gone (`| head`).
    """
    stdout = open(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)

    def emit(record):
        if RANK:
            return
        try:
            stdout.write(json.dumps(record, allow_nan=False) + "\n")
            stdout.flush()
        except ValueError:
            fail("a result is NaN or infinite, and no more is written: are the weights sound?")
        except BrokenPipeError:
            os._exit(0)  # at once: an event loop would report an exception
        except OSError as e:
            say(f"error: stdout: {e.strerror}")
            os._exit(1)
    return emit


# --- ranks ----------------------------------------------------------------------------------------

def init_distributed():
    """Joins the ranks that torchrun started, or makes a group of one; returns a torch.device."""
    import torch
    import torch.distributed as dist
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # sizes vary
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun sets one thread for each
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
        backend = "cpu:gloo,cuda:nccl"
    alone = {}
    if "RANK" not in os.environ:
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would listen to the network
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timedelta(hours=1), **alone)
    return device


def leave_group():
    """Ends what init_distributed began."""
    torch = sys.modules.get("torch")  # not every script loads it
    if torch and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def sum_over_ranks(number):
    """A number summed over all ranks. All ranks must call this."""
    if WORLD == 1:
        return number
    import torch
    total = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def barrier():
    """Waits until all ranks are here."""
    sum_over_ranks(0)


def from_rank_0(make):
    """Calls make() on rank 0 only, which gives (kept, sent); returns (None, sent) on other ranks.

    So one rank reads stdin, which torchrun gives to all of them, and keeps what is large or can't
    be pickled. It may wait there for hours. Its SystemExit is raised on every rank.
    """
    if WORLD == 1:
        return make()
    # made before rank 0 waits: the ranks have an hour to meet
    group = dist.new_group(backend="gloo", timeout=timedelta(days=30))
    kept = sent = None
    if RANK == 0:
        try:
            kept, sent = make()
        except SystemExit as e:
            sent = e
    received = [sent]
    dist.broadcast_object_list(received, src=0, group=group)
    if isinstance(received[0], SystemExit):
        raise received[0]
    return kept, received[0]


# --- the --out directory of a run -----------------------------------------------------------------

class Log:
    """The --out directory of a run: it is locked, and has metrics.jsonl and copies of the scripts.

    A new run begins. A stopped one goes on at `step`, that of its last checkpoint. A `finished` one
    has its model. `args` gets the flags that the run began with; a flag given again must be the
    same. The first row of metrics.jsonl has the run's flags and facts; each log(...) adds a row.
    """
    MAY_CHANGE = ["out", "model", "tree_tokens", "recompute", "compile", "offload", "save_every"]
    MAY_CHANGE_LATER = ["dtype", "max_length"]  # allowed in a finished run

    def __init__(self, args):
        self.args, self.out = args, args.out
        self.path = os.path.join(args.out, "metrics.jsonl")
        self.lock, (self.rows, self.step) = from_rank_0(self.claim)
        self.finished = any("finished" in row for row in self.rows)
        self.may_change = self.MAY_CHANGE + (self.MAY_CHANGE_LATER if self.finished else [])
        if self.rows:
            old = [row for row in self.rows if "args" in row][-1]["args"]
            for name in vars(args).keys() & old.keys() - {"given"}:
                if name in args.given:
                    self.check("--" + name, old[name], getattr(args, name))
                else:
                    setattr(args, name, old[name])
        if self.finished:
            say(f"{self.out} is finished: nothing is trained")
            drop_checkpoints(self.out)  # a kill may have left some
            if self.lock:
                os.close(self.lock)  # from now on it is only read

    def check(self, name, old, new):
        """Fails if a flag or fact is not what it was when the run began, and may not change."""
        if new != old and name.removeprefix("--") not in self.may_change:
            fail(f"the run in {self.out} has {name} {old}, not {new}: name another --out")

    def claim(self):
        """Locks --out. Returns the lock, and (the rows of the run in it, the checkpoint's step)."""
        out = self.out
        with fail_on_error(f"--out {out}"):
            os.makedirs(out, exist_ok=True)
            lock = os.open(out, os.O_RDONLY)
        with fail_on_error(f"--out {out} is in use by another run"):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not set(os.listdir(out)) - {"metrics.jsonl.part"}:
            return lock, ([], 0)  # a new run, or one that was killed as it began
        if not os.path.exists(self.path):
            fail(f"--out {out} exists already, and is no run: name another")
        with fail_on_error(f"{self.path} is damaged; another --out starts over"):
            rows = rows_of(out)
        names = glob.glob("checkpoint-*", root_dir=out)
        steps = [name.removeprefix("checkpoint-") for name in names]
        return lock, (rows, max([int(step) for step in steps if step.isdecimal()], default=0))

    def begin(self, groups, held, steps, **facts):
        """Writes the first row. A run that goes on must have the same facts.

        groups: [[Pair]] to train on; held: [Pair] held out. The row keeps a hash of them.
        """
        self.total = steps
        if RANK:
            return
        pairs = sum(map(len, groups))
        hint = ": few to learn from; collect.py -k gives more" if pairs < 50 or steps < 30 else ""
        say(f"{pairs} pairs, {steps} steps{hint}")
        facts |= {"steps": steps, "pairs": pairs, "held_out_pairs": len(held),
                  "pairs_hash": digest([digest(tuple(pair)) for pair in chain(*groups, held)])}
        first = {"args": vars(self.args), "argv": sys.argv, "cwd": os.getcwd(),
                 "version": version(), "world": WORLD, **facts}
        if self.rows:
            tell_changes(self.out)
            for name, new in facts.items():  # a run of an older version may lack some
                self.check(name, self.rows[0].get(name, new), new)
            first = {"resumed": self.step, **first}
        if self.finished:
            return
        rows = [row for row in self.rows if row.get("step", -1) < self.step]
        with writing(self.path) as part, open(part, "w") as f:
            f.writelines(json.dumps(row) + "\n" for row in (*rows, first))
        self.file = open(self.path, "a", buffering=1)
        with fail_on_error(f"{self.out} can't be written"):
            for name in glob.glob("*.py", root_dir=HERE):
                copy = os.path.join(self.out, name)
                if not os.path.exists(copy):  # those that the run began with stay
                    shutil.copy(os.path.join(HERE, name), copy)

    def steps(self, what):
        """Yields the steps that are not made yet. what: names them in the progress bar."""
        self.what = what
        self.bar = progress(what, total=self.total, initial=self.step)
        for step in range(self.step, self.total):
            self.began = time.monotonic()
            yield step
        self.bar.close()

    def __call__(self, **row):
        """Adds a row to metrics.jsonl, and shows its numbers. All ranks must call this.

        A row with `tokens`, which this rank computed, is a step: it is timed, and moves the bar.
        """
        is_step = "tokens" in row
        if is_step:
            row["tokens"] = int(sum_over_ranks(row["tokens"]))
            seconds = time.monotonic() - self.began
            row |= {"seconds": round(seconds, 4),
                    "tokens_per_second": round(row["tokens"] / seconds)}
        if RANK:
            return
        with fail_on_error(f"{self.path} can't be written"):
            self.file.write(json.dumps(row) + "\n")
        if is_step:
            self.bar.set_postfix(row, refresh=False)
            self.bar.update()
        else:
            say(f"{self.what}: {', '.join(f'{name} {value}' for name, value in row.items())}")

    def finish(self):
        """Adds the last row. The model is in --out: nothing to go on from is needed."""
        self(finished=self.total)
        drop_checkpoints(self.out)


def tell_changes(out):
    """Says which scripts differ from those that the run in `out` began with."""
    scripts = glob.glob("*.py", root_dir=HERE)
    _, changed, _ = filecmp.cmpfiles(HERE, out, scripts, shallow=False)
    if changed:
        say(f"the run in {out} began with another {', '.join(changed)}, of which it has a copy")


def rows_of(out):
    """The rows of metrics.jsonl in the --out of a run."""
    with open(os.path.join(out, "metrics.jsonl")) as f:
        rows = [json.loads(line) for line in f if line.endswith("}\n")]  # a kill may cut one
    if not rows or "args" not in rows[0]:
        raise ValueError("its first row has no flags")
    return rows


def drop_checkpoints(out, keep=None):
    """Removes the checkpoints in out, also what a kill left of one, except that of step `keep`."""
    if RANK == 0:
        for name in glob.glob("checkpoint-*", root_dir=out):
            step = name.removeprefix("checkpoint-").removesuffix(".part")
            if step.isdecimal() and name != f"checkpoint-{keep}":
                shutil.rmtree(os.path.join(out, name))


def lr_at(step, steps, peak):
    """Learning rate of 0-based `step`: a linear warm-up to `peak`, a cosine to a tenth of it.

    The warm-up takes 3 % of the steps, at least 3 of them, but not more than a third.
    """
    warmup = max(round(0.03 * steps), min(3, steps // 3))
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


# --- randomness, hashes, versions -----------------------------------------------------------------

def rng(*key):
    """A random.Random that is a pure function of `key`, the same on every machine and Python."""
    text = json.dumps(key)
    return random.Random(hashlib.sha256(text.encode()).digest())


def digest(x):
    """A short hash of nested lists, tuples, numbers and strings, by value."""
    return hashlib.sha256(marshal.dumps(x, 2)).hexdigest()[:16]


@functools.cache
def version():
    """This checkout's commit ("unknown" outside git, marked if files differ) and the packages'."""
    commit = ""
    with contextlib.suppress(OSError):  # there may be no git
        commit = subprocess.run(["git", "-C", HERE, "describe", "--always", "--dirty"],
                                capture_output=True, text=True).stdout.strip()
    parts = [commit or "unknown", f"python {platform.python_version()}"]
    for package in ("torch", "transformers", "vllm", "flash-attn"):
        with contextlib.suppress(PackageNotFoundError):
            parts.append(f"{package} {package_version(package)}")
    return ", ".join(parts)
