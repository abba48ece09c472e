"""What several scripts share and nobody would ablate: flags, JSON lines, servers, processes, --out, the lr curve.

Scripts import it first: it sets up their streams and signals before anything that loads slowly.
"""
import ctypes
import os
import signal
import sys


def set_up_process():
    """Opens a script's closed streams, ends it by Ctrl-C until `run` listens, and a rank with its torchrun."""
    while (null := os.open(os.devnull, os.O_RDWR)) < 3:  # else files get a closed stream's number
        os.set_inheritable(null, True)
    os.close(null)
    sys.stdin = sys.stdin or open(0)
    sys.stderr = sys.stderr or open(2, "w", errors="replace")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: killed when the parent's thread ends
        if os.getppid() != parent:  # it has ended before
            os.kill(os.getpid(), signal.SIGKILL)


if os.path.dirname(os.path.abspath(getattr(sys.modules["__main__"], "__file__", "/"))) == os.path.dirname(__file__):
    set_up_process()  # not in a test or a notebook that imports this

import argparse
import asyncio
import atexit
import contextlib
import errno
import fcntl
import functools
import glob
import hashlib
import json
import marshal
import math
import random
import re
import shutil
import subprocess
import threading
import time
from importlib.metadata import PackageNotFoundError, version as package_version

from tqdm import tqdm

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun's; alone: 0 of 1


def parser(doc):
    """An ArgumentParser that shows `doc` and the defaults in --help and takes no abbreviated flags."""
    class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
        pass
    p = argparse.ArgumentParser(description=doc, formatter_class=Help, allow_abbrev=False)
    p.error = p.error if RANK == 0 else lambda message: time.sleep(5) or sys.exit(2)  # one process says it
    return p


def skip_bad_flag(p):
    p.add_argument("--skip_bad", type=int, choices=[0, 1], default=0,
                   help="1: lines that are no records are left out and counted; else the first one ends the program")


def machine_flags(p):
    """The trainers' flags that change where and how fast a run computes, but not what, except --dtype."""
    skip_bad_flag(p)
    p.add_argument("--max_tokens", type=int, default=16384, help="tree tokens computed at once: bounds the memory")
    p.add_argument("--max_length", type=int, default=16384,
                   help="a turn of more tokens, prompt and action, is left out and counted")
    p.add_argument("--attention", choices=["auto", "flash", "torch", "sdpa"], default="auto",
                   help="flash: the flash-attn package; torch: torch's varlen kernel; sdpa: a loop; auto: the first "
                   "that this machine has")
    p.add_argument("--dtype", choices=["auto", "bf16", "fp32"], default="auto",
                   help="of the computation and the saved model; weights train in fp32; auto: bf16 on a GPU")
    p.add_argument("--recompute", type=int, choices=[0, 1],
                   help="1: activations are computed again in the backward pass; not given: 1 on a GPU")
    p.add_argument("--replicate", type=int, default=1, help="copies of the model, each spread over the other processes")
    p.add_argument("--offload", type=int, choices=[0, 1], default=0, help="1: weights and moments rest in CPU memory")
    p.add_argument("--save_every", type=int, default=100, help="steps between checkpoints to resume from; 0: none")
    p.add_argument("--resume", type=int, choices=[0, 1], default=0,
                   help="1: continue the run in --out where it was killed; start it where there is none")
    p.add_argument("--overwrite", type=int, choices=[0, 1], default=0, help="1: remove the run in --out first")
    p.add_argument("--dry_run", type=int, default=0, metavar="N",
                   help="print the steps, tokens, hours and memory of a run on N GPUs, and train nothing")


# characters that steer a terminal, but for tabs and line ends
CONTROL = "[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]"


def inline(message):
    """The message without line breaks: a task's id, say, can't begin a line of its own."""
    return re.sub(f"{CONTROL}|[\r\n]", "?", str(message))


def say(message):
    """Print one line for people on stderr, at once: a signal's line must not come into it."""
    sys.stderr.write(inline(message) + "\n")


def fail(message):
    """End the program with one clear line on stderr and exit status 1."""
    raise SystemExit(f"error: {inline(message)}")


def check_finite(step, **values):
    """Ends a run before a step that would spoil the weights."""
    for name, value in values.items():
        if not math.isfinite(value):
            fail(f"step {step}: the {name} is {value}, and this step would spoil the weights. A lower --lr, a lower "
                 "--beta or --dtype fp32 may help; the last checkpoint is whole")


def rng(*key):
    """A random.Random that is a pure function of `key`, the same on every machine and Python."""
    return random.Random(hashlib.sha256(json.dumps(key).encode()).digest())


# --- JSON lines -------------------------------------------------------------------------------------------------------

ACTION = {"content": str, "output": str, "token_ids": [int], "logprobs": [float], "logprob": float, "advantage": float}
RECORD = {  # what the fields are, where there are any; all others pass through unseen
    "task": {"kind": str, "problem_description": str, "ground_truth": str,
             "hidden_information": str, "agent_prompt": str, "test_cases": {...: str}},
    "dialogue_history": [{"role": str, **ACTION, "candidates": [ACTION]}],
    "sample": int, "answer": str, "reward": float, "reward_letterbox": float, "tests": {...: str}, "failure": str,
    "meta": {"rules": str, "model_weights": str}, "text": str}
PLAIN = {  # what a str, an int or a float must be
    str: ("text", lambda x: isinstance(x, str)),
    int: ("a whole number from 0 on", lambda x: isinstance(x, int) and 0 <= x < 1 << 62),
    float: ("a finite number", lambda x: isinstance(x, (int, float)) and abs(x) < 1e300)}


def shape_error(x, shape, path=""):
    """What in x is not of a shape (a type of PLAIN, [shape], {key: shape}; ...: any key), or None. Removes nulls."""
    if shape in (str, int, float):
        what, fits = PLAIN[shape]
        return None if fits(x) else f"{path} is not {what}"
    if not isinstance(x, type(shape)):
        return f"{path} is not {'a list' if isinstance(shape, list) else 'an object'}"
    if isinstance(shape, list):
        return next(filter(None, (shape_error(v, shape[0], f"{path}[{i}]") for i, v in enumerate(x))), None)
    for key in [key for key in x if x[key] is None and key in shape]:
        del x[key]
    return next(filter(None, (shape_error(x[key], shape.get(key, shape.get(...)), f"{path}.{key}".lstrip("."))
                              for key in x if key in shape or ... in shape)), None)


def encodable(x):
    """JSON data with "\ufffd" for every lone surrogate, which a model may sample and no UTF-8 file can hold."""
    if isinstance(x, str):
        return x.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(x, list):
        return [encodable(v) for v in x]
    if isinstance(x, dict):
        return {encodable(k): encodable(v) for k, v in x.items()}
    return x


def checked(line, need):
    """The record in a line, with every field of `need`; ValueError says what is wrong."""
    try:
        record = json.loads(line)
        line = line.encode("utf-8", "surrogatepass") if isinstance(line, str) else line
        if b"\\ud" in line.lower() or b"\xed" in line:  # the only ways to spell one
            record = encodable(record)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"not JSON ({e}); every line must be one JSON object") from None
    if not isinstance(record, dict):
        raise ValueError("not a JSON object with fields")
    if "task" not in record and "problem_description" in record:
        record = {"task": record}  # ColBench's published task files hold bare tasks
    if wrong := shape_error(record, RECORD):
        raise ValueError(wrong)
    history = record.get("dialogue_history", ())
    if any(m.get("role") not in ("system", "user", "assistant") or "content" not in m for m in history):
        raise ValueError("a message of dialogue_history lacks content, or a role of system, user and assistant")
    if history and history[0]["role"] == "assistant":
        raise ValueError("dialogue_history starts with the assistant, who has nothing to answer to")
    if not -1 <= record.get("reward", 0) <= 1:
        raise ValueError(f"the reward {record['reward']} is neither a share of tests nor a likeness")
    for path in need(record) if callable(need) else need:
        at = record
        for key in path.split("."):
            at = at.get(key) if isinstance(at, dict) else None
        if at in (None, {}, []):
            raise ValueError(f"no {path!r} in this record")
    return record


def read_jsonl(stream, need=(), name="stdin", skip_bad=0):
    """Yields one dict a line; fails naming the line that is not JSON, not an object, or lacks a field of `need`.

    A field is a path such as "task.ground_truth"; `need` may be a function of the record. With skip_bad such lines are
    left out, and counted on stderr.
    """
    lineno = skipped = 0
    for lineno, line in enumerate(getattr(stream, "buffer", stream), 1):  # bytes, which may not be UTF-8
        try:
            record = checked(line, need)
        except ValueError as e:
            if not skip_bad:
                fail(f"{name}, line {lineno}: {e} (--skip_bad 1 leaves such lines out)")
            skipped += 1
            continue
        yield record
    if skipped:
        say(f"{skipped} of {lineno} lines of {name} are no such records and were skipped")
    if not lineno:
        fail(f"{name} is empty: nothing to do (did the stage before it fail?)")


def open_stdout():
    """Keeps stdout for data alone: returns emit(record), and sends what any library prints to stderr.

    Call it before libraries load. A reader that goes away (`| head`) ends the program quietly: see `run`. Of several
    processes only rank 0 writes.
    """
    if sys.stdout is None:
        fail("stdout is closed, and results go there")
    data = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)

    def emit(record):
        if RANK:
            return
        try:
            line = json.dumps(record, allow_nan=False) + "\n"
        except ValueError:
            fail("a result is NaN or infinite, so no more is written: are the model's weights sound?")
        with SIGNALS.writing:
            try:
                data.write(line)
            except OSError as e:
                raise StdoutError(e.errno, e.strerror) from None
    return emit


def plain_stderr():
    """Keeps what models, servers and files say from steering the terminal: control characters are shown as "?"."""
    write = sys.stderr.write
    control = re.compile(f"(?!^)\r|{CONTROL}")

    def plain(text):
        try:
            return write(control.sub("?", text))
        except OSError:  # it takes no more, say its reader has gone: what it would say goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.stderr.write = plain


class StdoutError(OSError):
    """Our stdout takes no more: a full disk, a reader who has gone. Not any other broken pipe, a grader's, say."""


@contextlib.contextmanager
def fail_on_error(what, hint="", part=None):
    """Ends the program by one line, what: the reason, hint, where what is done inside fails; `part` is removed then."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as e:  # of the system, of safetensors, of torch's checkpoints, which is no Exception
        with contextlib.suppress(OSError):
            part and remove(part)
        said = [line.strip() for line in str(e).splitlines() if line.strip()] or [type(e).__name__]
        fail(f"{what}: {getattr(e, 'strerror', None) or said[-1]}{hint}")


@contextlib.contextmanager
def writing(path, part=None):
    """with writing(path) as part: what is written to `part` becomes `path` at the end."""
    own = path + ".part"
    with fail_on_error(f"{path} can't be written", SIGNALS.hint, part or own):
        yield own
        if part is None and os.path.exists(own):
            os.replace(own, path)


def reading(path):
    """with reading(path): what reads a file of the run that is resumed."""
    return fail_on_error(f"{path} is damaged, so this run can't go on", "; --overwrite 1 starts it over")


class Signals:
    """SIGTERM and Ctrl-C end the program with one line: at once, or after the step under way where steps are made.

    It ends by the signal itself, so that a shell's loop ends, too. A thread waits for them, for the main one may be
    inside a kernel, or wait for another rank. `first` is the number of the one that came while steps were made.
    """

    def __init__(self):
        self.writing, self.steps, self.first, self.hint = threading.Lock(), False, 0, ""

    def listen(self, hint):
        ours, theirs = os.pipe()
        os.set_blocking(theirs, False)
        signal.set_wakeup_fd(theirs)
        self.hint = hint
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: None)  # what counts is the byte in the pipe
        os.register_at_fork(after_in_child=self.forget)
        threading.Thread(target=self.watch, args=(ours,), daemon=True).start()

    @staticmethod
    def forget():
        """In a forked child, whose signals are its own."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)

    def watch(self, pipe):
        since = math.inf
        while number := os.read(pipe, 1)[0]:
            if number in (signal.SIGTERM, signal.SIGINT):
                since = min(since, time.monotonic())
                if not self.steps or time.monotonic() > since + 2:  # no echo: torchrun passes on what all have heard
                    self.end(number)
                self.first = self.first or number

    def end(self, number=None):
        """Ends the program by a signal, maybe one that only another rank got; never within a line of stdout."""
        number = number or self.first or signal.SIGTERM
        self.writing.acquire(timeout=5)
        if RANK == 0:
            line = f"error: ended by {signal.Signals(number).name}{self.hint}\n"
            os.write(2, ("\n" * sys.stderr.isatty() + line).encode())
        ctypes.CDLL(None).signal(number, 0)  # the default action; Python's signal.signal is for the main thread alone
        os.kill(os.getpid(), number)


SIGNALS = Signals()


def run(main, args):
    """main(args), ended with one line by a signal and where stdout takes no more; quietly where its reader has gone."""
    plain_stderr()
    resumes = hasattr(args, "resume") and not getattr(args, "score", 0)
    SIGNALS.listen("; --resume goes on from what was finished" if resumes else "")
    try:
        main(args)
        leave()
    except StdoutError as e:
        if e.errno != errno.EPIPE:
            say(f"error: stdout: {e.strerror}{SIGNALS.hint}")
        os._exit(e.errno != errno.EPIPE)  # no flush at exit: it would only fail again
    except BaseException as e:
        SIGNALS.steps = False
        if WORLD > 1:  # rank 0 says what all would say: torchrun then ends the others, and who failed as another died
            time.sleep(5 if RANK else 1)
        elif "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
            leave()  # or NCCL prints a warning
        if SIGNALS.first:
            SIGNALS.end()
        if RANK and isinstance(e, SystemExit):
            sys.exit(1)
        if type(e).__name__ == "OutOfMemoryError":  # torch's, of a GPU
            less = "A lower --max_tokens, --recompute 1, --offload 1 or more GPUs need less, see --dry_run" \
                if hasattr(args, "offload") else "Fewer at a time need less (--concurrency)"
            fail(f"{str(e).partition(' Of the ')[0]} {less}{SIGNALS.hint}")
        raise


def leave():
    """Ends what `join` began."""
    if "torch" in sys.modules and (dist := sys.modules["torch"].distributed).is_initialized():
        dist.destroy_process_group()


def descendants(of=None):
    """Ids of the processes that a process, or else this one, has started, and of those that they have."""
    of = of or os.getpid()
    parents, found = {}, {of}
    for path in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError), open(path) as f:
            pid, _, rest = f.read().partition(" (")
            parents[int(pid)] = int(rest.rpartition(")")[2].split()[1])
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {of}


def watchdog(pids):
    """Has processes killed when this one ends, however it ends; returns what sees to it, which may be killed before.

    It is a shell that waits for our end of its pipe.
    """
    return subprocess.Popen(["sh", "-c", 'read x; kill -9 "$@"', "sh", *map(str, pids)], stdin=subprocess.PIPE,
                            stderr=subprocess.DEVNULL, start_new_session=True)


# --- servers ----------------------------------------------------------------------------------------------------------

class EndpointError(Exception):
    """No server gave a usable reply, or one says that the request itself is wrong."""


class Endpoint:
    """OpenAI-compatible servers: each request goes to the least busy one, and on to another where that fails.

    urls: "http://host:port/v1", several comma-separated. At most `in_flight` requests are under way at each. A server
    that failed rests, ever longer, while the others go on. The API key is taken from the environment alone.
    """

    def __init__(self, urls, in_flight=64, timeout=120, retries=8):
        try:
            import openai
        except ImportError:
            fail("an http:// engine or human needs the openai client: pip install openai")
        self.openai, self.timeout, self.retries = openai, timeout, retries
        self.urls = urls.split(",")
        self.clients = [openai.AsyncOpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"),
                                           timeout=timeout, max_retries=0) for url in self.urls]
        self.rooms = [asyncio.Semaphore(in_flight) for _ in self.urls]
        self.asked, self.failed, self.rests = ([0] * len(self.urls) for _ in range(3))

    async def __call__(self, request):
        """await request(client), which raises ValueError where the reply is of no use; EndpointError at the end."""
        for attempt in range(self.retries + 1):
            if attempt:
                await asyncio.sleep(min(30, 0.25 * 2 ** attempt) * random.uniform(0.5, 1))
            n = min(range(len(self.urls)), key=lambda n: (max(0, self.rests[n] - time.monotonic()), self.asked[n]))
            self.asked[n] += 1
            try:
                async with self.rooms[n]:
                    reply = await asyncio.wait_for(request(self.clients[n]), self.timeout)
                self.failed[n] = 0
                return reply
            except (self.openai.OpenAIError, TimeoutError, ValueError, TypeError, AttributeError, LookupError) as e:
                reason = f"{self.urls[n]}: {type(e).__name__}: {' '.join(str(e).split())[:200]}"
                if getattr(e, "status_code", 500) in (400, 401, 403, 404, 413, 422):
                    break
                self.failed[n] += 1
                self.rests[n] = time.monotonic() + min(60, 2 ** self.failed[n] - 2)
            finally:
                self.asked[n] -= 1
        raise EndpointError(reason)

    async def model(self, wanted=None):
        """The name of the model that the servers serve, `wanted` if that is among them; fails where none answers."""
        async def names(client):
            return [m.id for m in (await client.models.list()).data]
        try:
            served = await self(names)
        except EndpointError as e:
            fail(e)
        if wanted not in served and len(served) != 1:
            fail(f"{self.urls[0]} serves {', '.join(served)}: say which")
        return wanted if wanted in served else served[0]


# --- many processes ---------------------------------------------------------------------------------------------------

def init_distributed():
    """Joins the processes that torchrun started, or makes a group of one; returns this process's torch.device."""
    import datetime

    import torch
    import torch.distributed as dist
    device = torch.device("cpu")
    if torch.cuda.is_available():
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # trees differ in size
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if alone:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # which would listen to the network, for nobody
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                                timeout=datetime.timedelta(hours=1), **alone)
    return device


def max_over_ranks(n):
    """The largest n of all ranks, which must all call this."""
    if WORLD == 1:
        return n
    import torch
    import torch.distributed as dist
    dist.all_reduce(n := torch.tensor(n), dist.ReduceOp.MAX)
    return n.item()


def barrier():
    """Waits until all ranks are here."""
    max_over_ranks(0)


def sum_over_ranks(*numbers):
    """Each number summed over all ranks, which must all call this: a list of floats."""
    if WORLD == 1:
        return list(numbers)
    import torch
    import torch.distributed as dist
    dist.all_reduce(numbers := torch.tensor(numbers, dtype=torch.float64))
    return numbers.tolist()


def from_rank_0(make):
    """make()'s result on every rank, or its failure: it runs on rank 0 alone, which may wait for hours on stdin.

    Under torchrun all ranks inherit one stdin: by a pipe rank 0 got it all, from a file lines were torn between them.
    """
    if WORLD == 1:
        return make()
    import torch.distributed as dist
    group, box = patient(), [None]  # made before rank 0 goes to wait: this wait is not patient
    if RANK == 0:
        try:
            box = [make()]
        except SystemExit as e:
            box = [e]
    dist.broadcast_object_list(box, src=0, group=group)
    if isinstance(box[0], SystemExit):
        raise box[0]
    return box[0]


@functools.cache
def patient():
    """A group of all ranks that waits for 30 days."""
    import datetime

    import torch.distributed as dist
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(days=30))


# --- an --out directory -----------------------------------------------------------------------------------------------

class Log:
    """The --out directory of a run, which no other run can share: metrics.jsonl, a copy of the script.

    metrics.jsonl: first the facts of the run, then a line per call. Lines also go to stderr, at most one every `every`
    seconds unless last=True. Only rank 0 writes. All know `step`, and of a run to be resumed the row that says that its
    model is `trained` and written, and whether it is `finished`.
    """
    MAY_CHANGE = {"out", "max_tokens", "attention", "recompute", "replicate", "offload", "save_every", "resume",
                  "overwrite", "browser"}  # between a run and the one that resumes it

    def __init__(self, args, every=10):
        self.args, self.out, self.every, self.said = args, args.out, every, 0.0
        self.path = os.path.join(args.out, "metrics.jsonl")
        self.rows, self.step = from_rank_0(self.claim)
        ends = [row for row in self.rows if "trained" in row or "finished" in row]
        self.trained, self.finished = bool(ends) and ends[0], bool(ends) and "finished" in ends[-1]
        if ends:
            self.step = self.trained.get("trained", self.trained.get("finished"))

    def claim(self):
        """Takes the directory; returns the rows of the run to be resumed, [] for a new one, and its last checkpoint."""
        args, out = self.args, self.out
        try:
            os.makedirs(out, exist_ok=True)
            self.lock = os.open(out, os.O_RDONLY)
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f"--out {out} is in use by another run")
        except OSError as e:
            fail(f"--out {out}: {e.strerror}")
        atexit.register(remove_empty, out)
        if not set(os.listdir(out)) - {"metrics.jsonl.part", "pictures"}:  # new, or killed as it began
            return [], 0
        if not os.path.exists(self.path):
            fail(f"--out {out} exists already and holds no run: name another")
        if args.overwrite:
            return [], 0  # the old run goes when the new one begins
        if not args.resume:
            fail(f"--out {out} holds a run already: name another, or --resume 1 continues it, --overwrite 1 removes it")
        with reading(self.path), open(self.path) as f:
            rows = [json.loads(line) for line in f if line.endswith("}\n")]  # a kill may have cut the last line
            rows[0]["args"]
        return rows, max([0, *checkpoints(out)])

    def begin(self, **facts):
        """Starts the record, or goes on at self.step: a run that is resumed must be of the same flags and facts."""
        new = {"args": vars(self.args), "argv": sys.argv, "version": version(), "world": WORLD, **facts}
        if RANK:
            return
        before = [("flag --", self.rows[0]["args"], vars(self.args)),
                  ("", facts | self.rows[0], facts)] if self.rows else []  # old ones lack some
        for what, old, now in before:
            for key in now:
                if key not in self.MAY_CHANGE and old.get(key) != now[key]:
                    hint = ""
                    if key == "data":
                        hint = " (an older version may have read the same data otherwise)"
                    fail(f"--resume 1: {what}{key} was {old.get(key)} in the run in {self.out}, now {now[key]}: "
                         f"it must be the same{hint}")
        if self.finished:
            return
        for name in set(os.listdir(self.out)) - {"pictures"} if not self.rows else ():  # --overwrite 1
            remove(os.path.join(self.out, name))
        rows = [r for r in self.rows if "step" not in r or r["step"] < self.step]
        rows += [{"resumed": self.step, **new}] * bool(rows)
        part = self.path + ".part"
        with writing(self.path, part):
            with open(part, "w") as f:
                f.writelines(json.dumps(row) + "\n" for row in rows or [new])
            os.replace(part, self.path)
            self.file = open(self.path, "a", buffering=1)
            if sys.argv[0].endswith(".py"):
                shutil.copy(sys.argv[0], self.out)

    def steps(self, what, n):
        """Yields the steps up to n that are still to be made. Meanwhile a signal waits for the end of one."""
        SIGNALS.steps = True
        yield from progress(what, range(self.step, n))
        SIGNALS.steps = False
        if SIGNALS.first:
            SIGNALS.end()

    def __call__(self, last=False, **row):
        if RANK:
            return
        with writing(self.path):
            self.file.write(json.dumps(row) + "\n")
        if last or time.time() - self.said > self.every:
            self.said = time.time()
            tqdm.write("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
                                 if v is not None),
                       file=sys.stderr)


def remove(path):
    """Removes a file, or a directory with all that is in it, if it is there."""
    if os.path.isdir(path):
        shutil.rmtree(path)
    elif os.path.exists(path):
        os.remove(path)


def remove_empty(out):
    """Leaves no empty --out behind where a run fails before it begins."""
    with contextlib.suppress(OSError):
        os.rmdir(out)


def checkpoints(out):
    """The steps of the complete checkpoints in out."""
    return [int(name[11:]) for name in os.listdir(out) if name[:11] == "checkpoint-" and name[11:].isdigit()]


def drop_checkpoints(out, keep=None):
    """Removes the checkpoints in out, and what a kill left of one, but that of step `keep`."""
    for name in os.listdir(out) if RANK == 0 else ():
        if name.startswith("checkpoint-") and name != f"checkpoint-{keep}":
            remove(os.path.join(out, name))


def digest(x):
    """A short hash of nested lists, tuples, numbers and strings, by value."""
    return hashlib.sha256(marshal.dumps(x, 2)).hexdigest()[:16]


@functools.cache
def version():
    """The commit of this checkout, marked where files differ from it ("unknown" outside git), and what it runs on."""
    here = os.path.dirname(os.path.abspath(__file__))
    git = subprocess.run(["git", "-C", here, "describe", "--always", "--dirty"], capture_output=True, text=True)
    found = [("python", ".".join(map(str, sys.version_info[:3])))]
    for package in ("torch", "transformers", "vllm", "flash-attn"):
        with contextlib.suppress(PackageNotFoundError):
            found.append((package, package_version(package)))
    return ", ".join([git.stdout.strip() or "unknown", *map(" ".join, found)])


def progress(what, items=None, total=None):
    """A tqdm bar over items (or to update by hand, up to total) on a terminal; silent elsewhere."""
    return tqdm(items, total=total, desc=what, disable=RANK > 0 or not sys.stderr.isatty(), leave=False)


def lr_at(step, steps, peak):
    """Learning rate of 0-based `step`: 3 % linear warm-up to `peak`, then a cosine to a tenth of it."""
    warmup = max(1, round(0.03 * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
