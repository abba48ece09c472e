"""ColBench: the record, the prompts, the rules of an episode, and the grader.

One record is one line of JSON, and every stage adds fields to it: README, "One record".

    python colbench.py grade < episodes.jsonl > graded.jsonl   # adds the reward
    python colbench.py check < tasks.jsonl > good.jsonl        # drops broken tasks
"""
from utils import digest, fail, flag, open_stdout, parser, read_jsonl, reject_unsupported, run, say

import asyncio
import concurrent.futures
import contextlib
import functools
import html
import io
import platform
import queue
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
# The program of the fork server, below, imports the others: json, os, re and so on.


ANSWER = "I WANT TO ANSWER:"   # what follows is the final answer
OUTPUT = "OUTPUT:"             # what stands before is the agent's private thought
HIDDEN = "Hidden reference:\n{hidden}\n\n"  # before a dialogue that critic or pi_ref reads
NOT_SEEN = "i can't see your page: {}"
GRADED = "reward", "tests", "failure", "reward_by"  # the fields that a grader gives a record


class GraderError(Exception):
    """The grader itself failed: never a verdict on an answer."""


class RenderError(Exception):
    """Why a page has no picture."""


# --- the episode: what the agent sees, what an action means ---------------------------------------

def task_id(task):
    """The task's own id, else a hash of its description and reference."""
    if task.get("id") not in (None, ""):
        return str(task["id"])
    text = task["problem_description"] + "\0" + task["ground_truth"]
    return sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def hidden_information(task):
    """The training-time information c: the task's `hidden_information`, else its reference."""
    return task.get("hidden_information", task["ground_truth"])


def with_hidden(history, hidden):
    """A copy of the dialogue whose first message starts with the hidden information c."""
    first = {**history[0], "content": HIDDEN.format(hidden=hidden) + history[0]["content"]}
    return [first, *history[1:]]


def agent_messages(record):
    """The agent's messages of a dialogue, in order."""
    return [m for m in record["dialogue_history"] if m["role"] == "assistant"]


def kind_of(task):
    """The task's kind, a key of ENVIRONMENTS; ValueError if it is unknown."""
    kind = task.get("kind")
    if kind is None:  # a published task
        is_page = re.search("<(html|body)", str(task.get("ground_truth")), re.I)
        kind = "frontend" if is_page and "test_cases" not in task else "backend"
    if kind not in ENVIRONMENTS:
        known = ", ".join(ENVIRONMENTS)
        raise ValueError(f"unknown task.kind {repr(kind)[:40]}; known are {known}")
    return kind


def environment(task):
    """The class of a task's kind; ValueError if the kind is unknown."""
    return ENVIRONMENTS[kind_of(task)]


def needs(*fields, to_grade=False, to_train=False):
    """For read_jsonl: a function of a record that lists the fields the record must have.

    These are the task's description and reference, `fields`, and with to_grade what the kind's
    `grade` reads. ValueError: the kind is unknown, or another task has the same id. With to_train
    also: the agent says nothing, or a field is not supported (reject_unsupported).
    """
    texts_by_id = {}  # {task id: hash of the task's description and reference}

    def required(record):
        task = record.get("task", {})
        kind = environment(task)
        if "problem_description" in task and "ground_truth" in task:
            texts = hash((task["problem_description"], task["ground_truth"]))
            if texts_by_id.setdefault(task_id(task), texts) != texts:
                raise ValueError(f"another task above has the id {task_id(task)}, too")
        if to_train and "dialogue_history" in record and not agent_messages(record):
            raise ValueError("the agent says nothing in dialogue_history")
        if to_train:
            reject_unsupported(record, record.get("dialogue_history", ()))
        graded = kind.required_fields if to_grade else ()
        return ["task.problem_description", "task.ground_truth", *graded, *fields]
    return required


def first_message(task, max_turns):
    """The agent's instructions: the task's own `agent_prompt`, else its kind's."""
    prompt = task.get("agent_prompt") or environment(task).agent_prompt
    content = fill(prompt, max_turns=max_turns, problem_description=task["problem_description"],
                   ANSWER=ANSWER, OUTPUT=OUTPUT)
    return {"role": "user", "content": content}


def human_prompt(task, history):
    """What an LLM that plays the human reads. The dialogue lacks the agent's instructions."""
    prompt = environment(task).human_prompt
    if not prompt:
        fail(f"tasks of kind {kind_of(task)} have no prompt for an LLM human")
    names = {"assistant": "Assistant", "user": "You", "system": "You"}
    dialogue = "\n".join(f"{names[m['role']]}: {m['content']}" for m in history[1:])
    return fill(prompt, problem_description=task["problem_description"], dialogue=dialogue,
                hidden_information=hidden_information(task))


def fill(prompt, **values):
    """The prompt with each {name} replaced by its value. Other braces stay, also a value's."""
    return re.sub("{(%s)}" % "|".join(values), lambda match: str(values[match[1]]), prompt)


def redact(reply, reference):
    """The reply with "[...]" for each reference line of 12 or more characters that it quotes."""
    lines = {"".join(line.split()) for line in reference.splitlines()}  # however spaced
    for line in sorted(lines, key=len, reverse=True):
        if len(line) >= 12:
            reply = re.sub(r"\s*".join(map(re.escape, line)), "[...]", reply)
    return reply


def without_thinking(output):
    """An output without a reasoning model's thought; "" if the thought does not end."""
    thought = r"\A\s*<think>(?!.*</think>).*|\A.*?</think>"
    return re.sub(thought, "", output, flags=re.S).strip()


def read_action(output, last):
    """(what the human is shown, the final answer or None) of what the agent's model wrote.

    In the last round (`last`) a message without ANSWER is an answer, too, as in the benchmark.
    """
    output = without_thinking(output)
    thought, has_output, sent = output.partition(OUTPUT)
    # Where ANSWER begins a line, or code follows it, the answer begins, and OUTPUT is part of its
    # code, such as print("OUTPUT:"). But if ANSWER comes again, the thought only named it.
    marker = re.escape(ANSWER)
    code = r"```|def |class |import |from |@"
    answer_began = re.search(rf"^[^\w\n]*{marker}|{marker}\s*({code})", thought, re.M)
    if has_output and (not answer_began or ANSWER in sent):
        output = sent
    content = output.strip()
    before, has_answer, answer = content.partition(ANSWER)
    if not has_answer:
        return content, content if last else None
    if before.endswith("**"):  # ANSWER is in bold
        answer = answer.removeprefix("**")
    if before.count("```") % 2:  # or within a fence
        answer = "```\n" + answer
    return content, answer.strip()


def is_answer(action):
    """Whether a message or candidate of the agent hands in an answer, which ends the episode."""
    text = action.get("output") or action.get("content") or ""
    return read_action(text, last=False)[1] is not None


def answered(record):
    """The record's `answered`, else whether the agent's last message is an answer."""
    agent = agent_messages(record)
    return record.get("answered", bool(agent) and is_answer(agent[-1]))


def extract_page(text):
    """The last page in a text: <html>...</html>, else <body>...</body>, else ""."""
    for tag in ("html", "body"):
        for part in reversed(re.split(rf"(?i)(?=<{tag}\b)", text or "")[1:]):
            if end := re.search(rf"(?i)</{tag}\s*>", part):
                return part[:end.end()]
    return ""


# --- environments: all that a kind of task decides ------------------------------------------------

class Environment(contextlib.ExitStack):
    """One kind of task: what agent and human read, what the answer is, and how it is graded.

    The class knows the task. An instance grades, in several threads at once. It is an ExitStack,
    so that `with` ends what it has entered. args: the flags of `colbench.py grade`.
    """
    agent_prompt = "{problem_description}"  # may hold {max_turns}, {ANSWER} and {OUTPUT}, too
    human_prompt = None             # for an LLM that plays the human; see human_prompt()
    reply_chars = 400               # the human's reply is cut here
    shows_pages = False             # True: answers are web pages, at which an LLM human looks
    required_fields = ()            # what grade reads of a task beyond description and reference
    reward_name = "reward"          # in messages; its first word heads a column of evaluate.py

    def __init__(self, args):
        super().__init__()

    @classmethod
    def final_answer(cls, history, handed_in):
        """The answer of a dialogue. handed_in: that of the agent's last message, or None."""
        return handed_in

    @classmethod
    def metrics(cls, record):
        """{name: (numerator, denominator)} of a graded record, for evaluate.py.

        A system's value is the sum of the numerators over that of the denominators. Reward, turns
        and tokens are measured for every kind.
        """
        return {"success": (record["reward"] >= 1, 1), "unanswered": (not answered(record), 1)}

    def grade(self, task, answer):
        """{"reward": 0 to 1} and what else the record should keep.

        "failure" says what failed, "reward_by" who graded: rewards of two graders don't compare.
        """
        fail(f"{type(self).__name__} grades nothing: it needs a method grade")


class Functions(Environment):
    """Backend Programming: the answer is a function, the reward the share of tests it passes."""
    agent_prompt = """You write a Python function for a colleague. The description below leaves \
out details that only they know, and hidden unit tests check those details. Talk to them: in each \
message ask one short question about one detail. You may think first; only what follows "{OUTPUT}" \
is sent. You have {max_turns} messages in all. When you know enough, or in your last message, \
write "{ANSWER}" and after it the complete function, nothing else.

{problem_description}"""
    human_prompt = """You are the colleague in the conversation below. You want a Python function \
and an assistant writes it for you. You described it loosely; the assistant asks until it knows \
enough.

How you described it:
{problem_description}

What you really want. The assistant must not see it:
{hidden_information}

The conversation so far:
{dialogue}

Answer the assistant's last message as that colleague, in at most two short sentences. Tell only \
what was asked for, and only what the function settles; where it settles nothing, say that you do \
not mind. Write no code, quote none, and do not mention that a function exists."""
    required_fields = ("task.test_cases",)
    reward_name = "tests passed"

    def __init__(self, args):
        super().__init__(args)
        self.reward_by = f"{args.rules} rules"
        self.grader = self.enter_context(Grader(args.rules, args.workers))

    def grade(self, task, answer):
        return {**self.grader.grade(task, answer), "reward_by": self.reward_by}


class Pages(Environment):
    """Frontend Design: the answer is a web page, the reward CLIP's likeness to the reference."""
    agent_prompt = """You build a web page for a colleague who has a certain page in mind; below \
is how they describe it. In each message send one complete page, from <html> to </html>, with \
Tailwind's classes (link https://cdn.jsdelivr.net/npm/tailwindcss@2.2.19/dist/tailwind.min.css) \
and no scripts; pictures come from https://picsum.photos/WIDTH/HEIGHT. They look at it and tell \
what is most unlike their page; then send a better one. You may think first; only what follows \
"{OUTPUT}" is sent. You have {max_turns} messages in all; your last page counts.

{problem_description}"""
    human_prompt = """You look at two pictures of web pages: first the one that a designer has \
made for you, then the one that you have in mind, which the designer can't see. You described \
yours like this:
{problem_description}

Tell the designer what to change first: in at most four sentences the largest differences in \
layout, colours, sizes and texts, said of your page as it should be. Write no code, and do not \
mention pictures."""
    reply_chars = 1000
    reward_name = "likeness"
    shows_pages = True

    def __init__(self, args):
        super().__init__(args)
        self.reward_by = "clip"
        self.likeness = Clip(args.clip)  # likeness(page, reference)
        self.renderer = self.enter_context(Renderer(args.workers))

    @classmethod
    def final_answer(cls, history, handed_in):
        """The last page that the agent has shown."""
        shown = [extract_page(m["content"]) for m in history if m["role"] == "assistant"]
        return next(filter(None, reversed(shown)), "")

    @classmethod
    def metrics(cls, record):
        return {"not_drawn": ("failure" in record, 1)}

    def grade(self, task, answer):
        try:
            pages = self.renderer.pair(task, answer)
        except RenderError as e:
            return {"reward": 0.0, "reward_by": self.reward_by, "failure": str(e)}
        return {"reward": self.likeness(*pages), "reward_by": self.reward_by}


# --- the grader: a sandbox ------------------------------------------------------------------------
#
# An answer is code that nobody has read. It runs in a child: a forked process that has given up all
# system calls but CALLS, and so files, processes, network, signals and shared memory, even as root.
# Limits bound its memory, and a kill its time. Its one way out is a socket, the wire. There it
# sends a claim for each test: what the test gave. From the first line of the answer on the child
# may claim anything. The next section makes verdicts of claims.
#
# grader --"f", a wire, a file with the request--> fork server --fork--> child: confines itself,
#    \______________________a claim for each test_________________________/  runs the answer
#
# The fork server never sees code, values or references, so a child inherits nothing worth reading.

LIMITS = {
    "test": 1, "answer": 6,  # CPU seconds for one test, for all; a reference gets three times these
    "wall": 10,              # so many seconds on the wall count as one: an answer may sleep
    "memory": 1 << 30,       # bytes that a child may map
    "code": 1 << 18,         # characters of an answer
    "claim": 200}            # bytes of a claim

# The system calls that a child may make: name, number on x86_64, number on aarch64. All others
# fail with EPERM: a child opens no file, no socket and no process.
CALLS = """
read 0 63   write 1 64   close 3 57   fstat 5 80   lseek 8 62   mmap 9 222   mprotect 10 226
munmap 11 215   brk 12 214   mremap 25 216   rt_sigaction 13 134   rt_sigprocmask 14 135
rt_sigreturn 15 139   sigaltstack 131 132   sched_yield 24 124   getpid 39 172   gettid 186 178
futex 202 98   getrandom 318 278   rseq 334 293   restart_syscall 219 128   gettimeofday 96 169
clock_gettime 228 113   clock_getres 229 114   clock_nanosleep 230 115   exit 60 93
exit_group 231 94   getcwd 79 17
"""
# What an answer can import is loaded before the fork: the standard library, numpy and sympy, with
# what these two import late. NOT_LOADED: modules that are tests, or do something when imported.
NOT_LOADED = """__main__ antigravity benchmarks distutils ensurepip idlelib lib2to3 pydoc_data test
tests this tkinter turtle turtledemo""".split()
LIBRARY = [*(name for name in sorted(sys.stdlib_module_names) if name[0] != "_"),
           "_strptime", "_pylong"]
MORE = """numpy.char numpy.fft numpy.ma numpy.polynomial numpy.random numpy.rec numpy.strings
sympy.assumptions sympy.categories sympy.codegen sympy.combinatorics sympy.concrete sympy.discrete
sympy.integrals sympy.logic sympy.physics.units sympy.polys sympy.sets sympy.stats
sympy.tensor.array.array_derivatives sympy.vector""".split()
# (pattern, modules of a fork server). The first row whose pattern occurs in an answer or its tests
# runs it: a fork of fewer modules is up to ten times as fast. The first pattern: numpy|sympy.
SERVERS = [("|".join({name.partition(".")[0] for name in MORE}), LIBRARY + MORE),
           (r"import|code\(|bytes\(|bytearray\(|str\([^)]{,99},", LIBRARY),
           ("", ["_pylong", "unicodedata"])]  # for huge numbers, for "\N{...}"


def seccomp_filter():
    """The BPF program that allows CALLS, as bytes."""
    machines = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}
    if platform.machine() not in machines:
        raise GraderError(f"no sandbox on {platform.machine()}: its system calls are not listed")
    column, arch = machines[platform.machine()]
    # A step: (operation, steps to skip if it is true, if it is false, value). What `load` loads: 0
    # the call's number, 4 the machine, 16 and 24 the first two arguments.
    # BPF_LD|W|ABS, BPF_ALU|AND|K, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K
    load, mask, equal, at_least, ret = 0x20, 0x54, 0x15, 0x35, 0x06
    # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO with EPERM, SECCOMP_RET_KILL_PROCESS
    allow, deny, kill = (ret, 0, 0, 0x7FFF0000), (ret, 0, 0, 0x00050001), (ret, 0, 0, 1 << 31)
    # other processes' clocks have numbers from 16 on
    clock = [(load, 0, 0, 16), (at_least, 0, 1, 16), deny, allow]
    futex = [(load, 0, 0, 24), (mask, 0, 0, 0xFFFFFEFF)]
    for operation in 128, 129, 137, 138:  # wait or wake, within the process
        futex += [(equal, 0, 1, operation), allow]
    futex += [deny]
    checks = {"futex": futex, "clock_gettime": clock, "clock_getres": clock,
              "clock_nanosleep": clock}
    program = [(load, 0, 0, 4), (equal, 1, 0, arch), kill, (load, 0, 0, 0)]
    for name, number in zip(CALLS.split()[::3], map(int, CALLS.split()[column::3])):
        check = checks.get(name, [allow])
        program += [(equal, 0, len(check), number), *check]
    return b"".join(struct.pack("HBBI", *step) for step in [*program, deny])


# The lines between the next mark and "fork server: end" are the whole program of a fork server.
# `python -c` gets their text alone: nothing else of this file is in a child.
# fork server: begin
import collections.abc, contextlib, ctypes, datetime, gc, importlib, json, math
import numbers, os, pathlib, pkgutil, re, resource, signal, socket, struct, sys
import textwrap, types, uuid
from hashlib import sha256


def confine(libc, bpf, memory, parent):
    """Locks this process up; ends it if the server has died before."""
    for limit, value in (("AS", memory), ("CPU", 60), ("FSIZE", 0), ("CORE", 0), ("NOFILE", 64)):
        resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (value, value))
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: never outlive the server
    if os.getppid() != parent:
        os._exit(0)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    code = ctypes.create_string_buffer(bpf)
    head = struct.pack("H6xQ", len(bpf) // 8, ctypes.addressof(code))
    head = ctypes.create_string_buffer(head)
    if libc.prctl(22, 2, ctypes.addressof(head), 0, 0):  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        raise OSError("no seccomp here")


def answer_code(answer):
    """Code objects of an answer, which are run one after another.

    The whole answer if it compiles, else each block in a fence that does. If nothing compiles, the
    whole answer's error.
    """
    try:
        return [compile(answer, "<answer>", "exec")]
    except Exception as e:
        error, found = e, []
    text = re.sub("[\u200b\u2060\ufeff]", "", answer)  # invisible, and no Python
    text = text.replace("\xa0", " ").replace("\r\n", "\n")
    for block in re.split("`{3,}|~{3,}", text)[1::2]:
        first_line, newline, rest = block.partition("\n")
        with contextlib.suppress(Exception):  # it is no Python
            code = textwrap.dedent(rest if newline else first_line)
            found.append(compile(code, "<answer>", "exec"))
    if not found:
        raise error
    return found


def number_as_text(x):
    """A number of any class as text: equal numbers give the same. ValueError: NaN."""
    if isinstance(x, complex):
        imaginary = f" + {number_as_text(x.imag)}j" if x.imag else ""
        return number_as_text(x.real) + imaginary
    if x in (math.inf, -math.inf):
        return str(float(x))
    if isinstance(x, numbers.Rational):  # sympy's, too
        return "%x/%x" % (int(x.numerator), int(x.denominator))
    return "%x/%x" % (x if hasattr(x, "as_integer_ratio") else float(x)).as_integer_ratio()


def joined(values):
    return ", ".join(map(as_text, values))


def as_text(value):
    """A value as text: two values count as equal if their texts are.

    Of plain data that is ==, but for these: a value of a subclass goes as its base (a namedtuple as
    a tuple, a Counter as a dict, zeros and all), an array of numpy as lists, and one moment in two
    time zones differs. TypeError: a value of another class. ValueError: NaN.
    """
    if value is None or isinstance(value, type) and value.__module__ == "builtins":
        return ascii(value)
    if type(value).__module__ == "numpy":
        return as_text(value.tolist())
    for classes, text in TEXTS:
        if isinstance(value, classes):
            return text(value)
    raise TypeError(type(value).__name__)


TEXTS = [  # classes, and their values as text; the first row counts
    (str, lambda x: ascii(str.__str__(x))),
    (numbers.Number, number_as_text),
    ((bytes, bytearray), lambda x: ascii(bytes(x))),
    (list, lambda x: f"[{joined(x)}]"),
    (tuple, lambda x: f"({joined(x)})"),
    (dict, lambda x: "dict(%s)" % ", ".join(sorted(map(joined, x.items())))),
    (collections.abc.Set, lambda x: "{%s}" % ", ".join(sorted(map(as_text, x)))),
    (collections.deque, lambda x: f"deque({joined(x)})"),
    (range, lambda x: f"range({joined([len(x), *x[:2]])})"),
    (datetime.datetime, lambda x: f"datetime({datetime.datetime.isoformat(x)})"),
    (datetime.date, lambda x: f"date({datetime.date.isoformat(x)})"),
    (datetime.time, lambda x: f"time({datetime.time.isoformat(x)})"),
    (datetime.timedelta, lambda x: f"timedelta({x.days}, {x.seconds}, {x.microseconds})"),
    (uuid.UUID, lambda x: f"UUID({x.int})"),
    (pathlib.PurePosixPath, lambda x: f"path({ascii(str(x))})")]


def claim(codes, test, official):
    """What a child says of a test: "value " and the value's hash, "none", or "refused " and why."""
    module = sys.modules["answer"] = types.ModuleType("answer")  # for each test a fresh one
    space = vars(module)
    # the released scorer's exec inside a function has two namespaces: what the code defines
    # at its top level is invisible from inside its functions
    local = {} if official else space
    error = None
    for code in codes:
        try:
            exec(code, space, local)
        except BaseException as e:  # SystemExit, too: what is defined before it may be enough
            error = e
    if official and error:
        raise error
    try:
        value = eval(test, space, local)
    except NameError as e:
        raise error or e
    try:
        if official and getattr(value, "ndim", 0) and value.size != 1:
            raise TypeError("an array, whose == is no verdict")
        sys.setrecursionlimit(max(4500, sys.getrecursionlimit()))  # nested data
        text = as_text(value)
        return "none" if value is None else "value " + sha256(text.encode()).hexdigest()
    except RecursionError:
        return "refused nested too deeply"
    except Exception as e:
        return f"refused {type(e).__name__}: {e}"


def run_tests(request, wire, claim_bytes):
    """Runs {text, tests, official}; sends a claim of at most claim_bytes for each test."""
    text, official = request["text"], request["official"]
    error = None
    try:
        codes = [compile(text, "<answer>", "exec")] if official else answer_code(text)
    except BaseException as e:
        error = e
    for test in request["tests"]:
        try:
            if error:
                raise error
            said = claim(codes, test, official)
        except BaseException as e:  # SystemExit, KeyboardInterrupt: one more wrong answer
            missing = f": {e.name}" if type(e) is ModuleNotFoundError else ""
            said = f"raised {type(e).__name__}{missing}"
        os.write(wire, said.encode("ascii", "backslashreplace")[:claim_bytes])


def be_child(wire, request, devnull, confinement, claim_bytes):
    """The life of a child: it confines itself, says so, and runs one request."""
    try:
        for fd in (0, 1, 2):
            os.dup2(devnull, fd)
        os.close(devnull)  # `wire` is the only way out now
        for name in ("numpy.random", "sympy.core.random"):  # Python's random does so by itself
            if name in sys.modules:
                sys.modules[name].seed()
        confine(*confinement)
        os.write(wire, b"confined %d" % os.getpid())
        with open(request, closefd=False) as f:
            run_tests(json.load(f), wire, claim_bytes)
    finally:
        os._exit(0)


def load_modules(name, skip):
    """Imports a module and its submodules, but none with a name in `skip` or with an error."""
    if name.rpartition(".")[2] not in skip:
        with contextlib.suppress(Exception):
            module = importlib.import_module(name)
            for part in pkgutil.iter_modules(getattr(module, "__path__", ())):
                load_modules(f"{name}.{part.name}", skip)


def serve(bpf, modules, skip, memory, claim_bytes):
    """A fork server. Its stdin is a Unix socket, on which the grader sends two messages in turn.

    The first brings two descriptors, a wire and a request's file, and forks a child. The second
    kills and reaps it, and a byte answers. The server ends with the grader, and the child with it.
    A child opens no file, and so imports only what is loaded here: `modules` without `skip`.
    """
    libc = ctypes.CDLL(None)
    libc.prctl.argtypes = [ctypes.c_int] + 4 * [ctypes.c_ulong]
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no core for a handler, and nobody reads its memory
    for name in modules:
        load_modules(name, skip)
    if "zoneinfo" in modules:  # a zone that is kept is found without opening its file
        of = sys.modules["zoneinfo"]
        of.kept = [of.ZoneInfo(name) for name in of.available_timezones()]
    confinement = libc, bpf, memory, os.getpid()
    devnull = os.open(os.devnull, os.O_RDWR)
    control = socket.socket(fileno=0)
    text = "def f(x): return [x, 0.5, 'a', {'b': (x, None)}]"  # fills caches for all children
    run_tests({"text": text, "tests": ["f(1)", "g(2)"], "official": False}, devnull, claim_bytes)
    gc.freeze()  # a child's collector leaves frozen pages alone, and so shares them
    with contextlib.suppress(ConnectionError):  # the grader has died
        while fds := socket.recv_fds(control, 1, 2)[1]:
            pid = os.fork()
            if pid == 0:
                be_child(*fds, devnull, confinement, claim_bytes)
            for fd in fds:
                os.close(fd)
            control.recv(1)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            control.sendall(b"k")

# fork server: end


def server_program(modules):
    """The source of a fork server, which is a part of this file."""
    source = pathlib.Path(__file__).read_text()
    begin, end = source.index("\n# fork server: begin"), source.index("\n# fork server: end")
    arguments = seccomp_filter(), modules, NOT_LOADED, LIMITS["memory"], LIMITS["claim"]
    return f"{source[begin:end]}\nserve(*{arguments})\n"


class Pool(contextlib.AbstractContextManager):
    """Workers that threads borrow, one each. They start when first used; `with` stops them."""

    def __init__(self, workers):
        self.workers = workers
        self.idle = queue.LifoQueue()  # last in, first out: a light load starts few
        for worker in workers:
            self.idle.put(worker)

    @contextlib.contextmanager
    def lend(self):
        worker = self.idle.get()
        try:
            yield worker
        finally:
            self.idle.put(worker)

    def __exit__(self, *_):
        for worker in [self.idle.get() for _ in self.workers]:  # each ends its work first
            worker.stop()
            self.idle.put(worker)


class Server:
    """A running fork server, for one caller at a time."""

    def __init__(self, modules):
        self.control, theirs = socket.socketpair()
        self.control.settimeout(600)  # for a server that starts on a busy machine
        env = {"PYTHONHASHSEED": "0", "TZ": "UTC", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-s", "-P", "-B", "-Wignore", "-c", server_program(modules)]
        with theirs:  # not -I: it would ignore the hash seed
            self.process = subprocess.Popen(command, stdin=theirs, stdout=subprocess.DEVNULL,
                                            env=env, cwd="/", start_new_session=True)

    def stop(self):
        self.process.kill()
        self.process.wait()
        self.control.close()

    def run(self, request, per_test, total):
        """Runs one child. Returns ([its claims], the seconds that it is charged).

        A claim is bytes. If the child ends early, text comes last, and says why.
        It is charged its CPU seconds, so that a busy machine costs an answer nothing. If it sleeps,
        a tenth of the seconds on the wall is more, and is charged.
        per_test, total: what one test, and all, may be charged. OSError: the server failed.
        """
        wire, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)  # a message is a claim
        with wire, open(os.memfd_create("request"), "w+") as file:
            json.dump(request, file)
            file.seek(0)
            with theirs:
                socket.send_fds(self.control, [b"f"], [theirs.fileno(), file.fileno()])
            wire.settimeout(600)
            hello, _, pid = wire.recv(99).partition(b" ")
            if hello != b"confined":  # said before it has read any code
                raise OSError("a child did not start, or could not confine itself")
            claims, started = [], time.monotonic()
            clock = (~int(pid) << 3) | 2  # Linux's number for the clock of a process's CPU time

            def charged():
                on_the_wall = time.monotonic() - started
                return max(time.clock_gettime(clock), on_the_wall / LIMITS["wall"])

            while len(claims) < len(request["tests"]):
                reply = receive(wire, charged, min(total, charged() + per_test))
                claims.append(reply)
                if isinstance(reply, str):
                    break
            seconds = charged()
        self.control.sendall(b"k")
        if self.control.recv(1) != b"k":
            raise OSError("the server ended before its child")
        return claims, seconds


class Team(dict):
    """The fork servers of one worker, {row of SERVERS: Server}."""

    def run(self, request, per_test, total):
        """Server.run by the server that the request needs; GraderError: it fails twice."""
        source = "\n".join([request["text"], *request["tests"]])
        row = next(i for i, (pattern, _) in enumerate(SERVERS) if re.search(pattern, source))
        for _ in range(2):
            try:
                if row not in self:
                    self[row] = Server(SERVERS[row][1])
                return self[row].run(request, per_test, total)
            except OSError as e:
                error = e
                if row in self:
                    self.pop(row).stop()
        raise GraderError(f"a fork server failed twice: {error!r}") from error

    def stop(self):
        while self:
            self.popitem()[1].stop()


def receive(wire, charged, limit):
    """A child's next claim, as bytes, or why none came within `limit` of charged(), as text."""
    while True:
        wire.settimeout(max(1e-3, limit - charged()))  # no more is charged than passes
        try:
            return wire.recv(LIMITS["claim"]) or "process ended"
        except TimeoutError:
            if charged() >= limit:
                return "timeout"
        except ConnectionError:
            return "process ended"


# --- the grader: from claims to verdicts ----------------------------------------------------------
#
# What a child sends is bytes, decoded only for display, cut and quoted. What the grader says is
# text. A test passes if its claim has the same bytes as the reference's.

def verdict(expected, claim):
    """The word "pass", or why not. expected: the reference's claim. claim: the answer's."""
    if isinstance(expected, str) or not expected.startswith(b"value "):
        return "no expected value: " + ("None" if expected == b"none" else why_not(expected))
    return "pass" if claim == expected else why_not(claim)


def why_not(claim):
    """The verdict on a claim that does not pass."""
    if isinstance(claim, str):
        return claim
    kind, _, said = claim.partition(b" ")
    words = {b"raised": "raised", b"refused": "value refused"}.get(kind)
    return f"{words} {json.dumps(said[:80].decode('ascii', 'replace'))}" if words else "wrong value"


OFFICIAL_WORDS = ("import os", "from os", "import sys", "from sys", "sudo", "transformers", "exit(",
                  "quit(", "argparse")  # the released scorer gives an answer with one of them 0


def official_code(answer):
    """The code in an answer as the released scorer cuts it out. A tag behind ``` stays in it."""
    for fence in ("```python", "```"):
        if fence in answer:
            answer = answer.split(fence)[1].split("```")[0]
    return answer


class Grader(Pool):
    """with Grader() as grader: grader.grade(task, answer), from any thread.

    rules: "honest", or "official" for the verdicts of the released scorer. workers: answers graded
    at once. GraderError: a child can't confine itself.

    A test passes if the answer's value and the reference's have the same text: see as_text. None
    never passes, NaN equals nothing, floats are exact. Functions, iterators and instances of own
    classes have no text: the verdict names the class.

    The official rules differ from the released scorer where a refused value passes there (math.nan
    in a list, math.sqrt, an == that says True), where an answer ends it there (SystemExit), and in
    a reference's time, 3 s a test here.
    """

    def __init__(self, rules="honest", workers=2):
        self.official = rules == "official"
        self.expected = {}  # {digest of a reference and its tests: its claims}
        super().__init__([Team() for _ in range(workers)])
        self.claims("", ["0"])

    def claims(self, text, tests, stretch=1):
        """For each test a claim, or text: why there is none. stretch: of the time limits."""
        claims, seconds_left = [], LIMITS["answer"] * stretch
        with self.lend() as team:
            while len(claims) < len(tests) and seconds_left > 0:  # a child may end early
                request = {"text": text, "tests": tests[len(claims):], "official": self.official}
                more, seconds = team.run(request, LIMITS["test"] * stretch, seconds_left)
                claims += more
                seconds_left -= seconds
        return claims + ["timeout"] * (len(tests) - len(claims))

    def grade(self, task, answer):
        """{"reward": share of tests passed, "tests": {name: "pass" or the reason why not}}."""
        names, tests = list(task["test_cases"]), list(task["test_cases"].values())
        if reason := self.not_run(answer or ""):
            verdicts = [reason] * len(tests)
        else:
            code = official_code(answer) if self.official else answer
            key = digest([task["ground_truth"], tests])
            if key not in self.expected:
                self.expected[key] = self.claims(task["ground_truth"], tests, stretch=3)
            verdicts = list(map(verdict, self.expected[key], self.claims(code, tests)))
        reward = verdicts.count("pass") / len(tests)
        return {"reward": reward, "tests": dict(zip(names, verdicts))}

    def not_run(self, answer):
        """Why an answer needs no run; None where it does."""
        if not answer.strip():
            return "no answer"
        if len(answer) > LIMITS["code"]:
            return f"not run: it has more than {LIMITS['code']:,} characters"
        for word in OFFICIAL_WORDS:
            if self.official and word in answer:
                return f"not run: the official rules refuse {word!r}"


def grade_records(records, args):
    """Yields each record with what its kind's `grade` says of task and answer, in order.

    A record whose `grade` raises is named and left out. The program then fails after the others,
    and at a bad line after those before it. A GraderError ends it at once.
    """
    window, error, lost = collections.deque(), None, []

    def graded(grader, record):
        """[the record]; [] if its grade raises."""
        try:
            said = grader.grade(record["task"], record.get("answer"))
        except GraderError:
            raise
        except Exception as e:
            lost.append(record)
            say(f"not graded: task {task_id(record['task'])}: {type(e).__name__}: {e}")
            return []
        return [{name: record[name] for name in record if name not in GRADED} | said]

    with contextlib.ExitStack() as stack, \
            concurrent.futures.ThreadPoolExecutor(2 * args.workers) as pool:
        opened = functools.cache(lambda kind: stack.enter_context(kind(args)))
        try:
            for record in records:
                window.append(pool.submit(graded, opened(environment(record["task"])), record))
                while window and (window[0].done() or len(window) >= 4 * args.workers):
                    yield from window.popleft().result()
        except SystemExit as e:
            error = e
        for job in window:
            yield from job.result()
    if error:
        raise error
    if lost:
        fail(f"{len(lost)} answers could not be graded, and are left out")


# --- frontend: pages in a real browser, which reaches nothing -------------------------------------

PAGE = {"width": 1280, "height": 720, "tallest": 4096,  # pixels of a picture
        "bytes": 1 << 20, "seconds": 15}
BROWSERS = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"
BROWSER_FLAGS = [  # beside Playwright's own; the last two: the same bytes on each machine
    "--disable-gpu", "--disable-quic", "--host-resolver-rules=MAP * ~NOTFOUND",
    "--font-render-hinting=none", "--disable-lcd-text"]
# The SHA-256 of dist/tailwind.min.css in tailwindcss@2.2.19.
TAILWIND = "b6ad97402eddb903e7a5d7a73ee47a679204efbdda4521a391cbad9df509b932"
CACHE = os.path.expanduser("~/.cache/colbench")
PICTURE_HOSTS = re.compile(
    r"(^|\.)(picsum\.photos|placeholder\.com|placehold\.(co|it)|dummyimage\.com|unsplash\.com|"
    r"loremflickr\.com|placekitten\.com)$")
# What a Renderer asks of a page; the answer has a height. A form or a picture in the page may have
# the name "fonts", and then document.fonts is that form: hence the getters of the class itself.
HEIGHT = """() => {
  const get = name => Object.getOwnPropertyDescriptor(Document.prototype, name).get.call(document);
  return get('fonts').ready.then(() => ({height: get('documentElement').scrollHeight}));
}"""


class Sheet:
    """Tailwind's style sheet. sheet(page): its rules of the page's classes, as 3 MB load slowly."""
    PART = re.compile(r"([^{}@]*)\{[^{}]*\}|@[^{}]*\{|\}")  # a rule, "@media ... {", its end
    CLASS = re.compile(r"\.((?:\\.|[\w-])+)")

    def __init__(self, css):
        self.parts, self.by_class = [], collections.defaultdict(list)  # {class: parts' numbers}
        for part in self.PART.finditer(re.sub(r"/\*.*?\*/", "", css, flags=re.S)):
            for name in self.CLASS.findall(part[1] or "") or [""]:  # no class: for all pages
                name = name.replace("\\32", "2").replace("\\", "")  # \32xl\:w-1\/2: 2xl:w-1/2
                self.by_class[name].append(len(self.parts))
            self.parts.append(part[0])

    def __call__(self, page):
        text = re.sub(r"&#?\w{1,31};?", lambda match: html.unescape(match[0]), page)
        words = {"", *re.split(r"[\s\"'<>=`]+", text)}
        used = {n for word in words & self.by_class.keys() for n in self.by_class[word]}
        return "".join(self.parts[n] for n in sorted(used))


class Browser:
    """A Chromium with one tab, for one page at a time. api: playwright.async_api."""

    def __init__(self, api, path, script):
        self.api, self.path, self.script = api, path, script
        self.loop = asyncio.new_event_loop()
        self.driver = self.tab = None
        self.page = self.sheet = None  # what the tab may load

    def run(self, coroutine, seconds):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, seconds))

    async def start(self):
        # Chromium's own sandbox refuses root
        flags = BROWSER_FLAGS + (["--no-sandbox"] if os.geteuid() == 0 else [])
        # a driver ends with us, and the browser with it
        self.driver = await self.api.async_playwright().start()
        browser = await self.driver.chromium.launch(executable_path=self.path, args=flags)
        context = await browser.new_context(
            viewport={side: PAGE[side] for side in ("width", "height")}, java_script_enabled=False,
            service_workers="block", accept_downloads=False, reduced_motion="reduce",
            locale="en-US", timezone_id="UTC")
        await context.route("**/*", self.serve)
        self.tab = await context.new_page()

    def ready(self):
        """Starts it if it does not run. GraderError: two starts fail, which is no page's fault."""
        for _ in range(2):
            try:
                return self.tab or self.run(self.start(), 30)
            except Exception as e:  # TimeoutError, too: a browser that dies or hangs may not say so
                self.stop()
                error = e
        why = textwrap.shorten(str(error) or "it hangs", 300)
        raise GraderError(f"{self.path} does not start: {why}")

    def stop(self):
        """Ends browser and driver; a dead or hanging one holds nobody up."""
        driver, self.driver, self.tab = self.driver, None, None
        if driver:
            with contextlib.suppress(Exception):
                self.run(driver.stop(), 5)

    def draw(self, page, sheet):
        """What Renderer.render gives. If the browser dies a new one tries again, once."""
        for _ in range(2):  # again in a new browser: the first may have died of something else
            self.ready()
            try:
                return self.run(self.shoot(page, sheet), PAGE["seconds"])
            except TimeoutError:
                self.stop()
                raise RenderError(f"the page took more than {PAGE['seconds']} s") from None
            except Exception as e:  # a page is data: whatever it does is no error of ours
                self.stop()
                error = e
        raise RenderError(textwrap.shorten(str(error), 100))

    async def shoot(self, page, sheet):
        """{"png", "height"} of a page, and what else the script gives; any error: it has none."""
        self.page, self.sheet = page, sheet
        await self.tab.goto("https://page.invalid/")
        drawn = await self.tab.evaluate(self.script)
        height = min(max(drawn["height"], 1), PAGE["tallest"])
        box = {"x": 0, "y": 0, "width": PAGE["width"], "height": height}
        png = await self.tab.screenshot(full_page=True, clip=box, animations="disabled")
        return {**drawn, "png": png}

    async def serve(self, route):
        """Answers a request of the tab: with the page, its sheet or a grey picture, or not."""
        request = route.request
        url = urllib.parse.urlsplit(request.url)
        ours = url.hostname == "page.invalid"
        loads = ours and request.is_navigation_request() and not request.frame.parent_frame
        if loads and self.page is not None:
            page, self.page = self.page, None  # given once: a page can't reload for ever
            await route.fulfill(body=page, content_type="text/html; charset=utf-8")
        elif request.resource_type == "stylesheet" and "tailwind" in request.url:
            await route.fulfill(body=self.sheet, content_type="text/css; charset=utf-8")
        elif request.resource_type == "image" and PICTURE_HOSTS.search(url.hostname or ""):
            await route.fulfill(body=grey_picture(url.path), content_type="image/svg+xml")
        else:
            await route.abort("aborted")


def grey_picture(path):
    """An SVG file of the size that a picture's URL asks for, such as /id/48/100/50."""
    path = re.sub(r"/(id|seed)/[^/]*", "", path)
    size = re.search(r"(?<![\w-])(\d{1,5})(?:[x/](\d{1,5}))?(?![\w-])", path)
    sides = (size[1], size[2] or size[1]) if size else (300, 200)  # one number: a square
    width, height = (min(max(int(side), 1), 4096) for side in sides)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">'
            '<rect width="100%" height="100%" fill="#9ca3af"/></svg>')


class Renderer(Pool):
    """with Renderer() as renderer: renderer.render(page), from any thread.

    The same page gives the same bytes. Scripts are off. Every request is answered here or refused.
    workers: browsers. script: what is asked of a page, HEIGHT and maybe more.
    """

    def __init__(self, workers=2, script=HEIGHT):
        try:
            from playwright import async_api
        except ImportError:
            fail("pages need Playwright: pip install playwright (MANUAL.md, \"Frontend Design\")")
        path = next(filter(None, map(shutil.which, BROWSERS)), None)
        if not path:
            fail(f"no browser in PATH: {', '.join(BROWSERS)}")
        tailwind = pathlib.Path(CACHE, "tailwind.min.css")
        css = tailwind.read_bytes() if tailwind.exists() else b""
        if sha256(css).hexdigest() != TAILWIND:
            fail(f"no Tailwind 2.2.19 style sheet at {tailwind} (MANUAL.md, \"Frontend Design\")")
        self.sheet = Sheet(css.decode())
        super().__init__([Browser(async_api, path, script) for _ in range(workers)])
        self.render = functools.lru_cache(256)(self.render)

    def render(self, page):
        """{"png", "height"} of a page, and what else `script` gives. RenderError: why not."""
        if not (page or "").strip():
            raise RenderError("no page")
        if len(page.encode(errors="replace")) > PAGE["bytes"]:
            raise RenderError(f"the page has more than {PAGE['bytes']} bytes")
        with self.lend() as browser:
            return browser.draw(page, self.sheet(page))

    def pair(self, task, text):
        """(the last page in a text, the task's reference) as drawn; RenderError: one can't be."""
        try:
            reference = self.render(extract_page(task["ground_truth"]) or task["ground_truth"])
        except RenderError as e:
            raise RenderError(f"the reference: {e}") from None
        return self.render(extract_page(text)), reference


# --- frontend: how alike two pages look -----------------------------------------------------------

class Clip:
    """Cosine similarity of CLIP image embeddings, clipped to [0, 1].

    With CLIP ViT-B/32 it is ColBench's reward. path: a directory or a hub name.
    """

    def __init__(self, path):
        import torch
        from PIL import Image
        from transformers import CLIPImageProcessorPil, CLIPVisionModelWithProjection
        self.torch, self.image = torch, Image
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            model = CLIPVisionModelWithProjection.from_pretrained(path, use_safetensors=True)
            self.prepare = CLIPImageProcessorPil.from_pretrained(path)
        except (OSError, ValueError) as e:
            fail(f"--clip {path}: {str(e).splitlines()[0]}")
        self.model = model.eval().to(self.device)
        self.lock = threading.Lock()

    def embedding(self, page):
        """The unit vector (d,) of a drawn page; it is kept in the page."""
        if "clip" not in page:
            picture = self.image.open(io.BytesIO(page["png"])).convert("RGB")
            pixels = self.prepare(picture, return_tensors="pt")["pixel_values"].to(self.device)
            with self.lock, self.torch.no_grad():
                vector = self.model(pixels).image_embeds[0].float().cpu()
            page["clip"] = self.torch.nn.functional.normalize(vector, dim=0)
        return page["clip"]

    def __call__(self, page, other):
        x, y = self.embedding(page), self.embedding(other)
        return min(1.0, max(0.0, (x @ y).item()))


# --- the kinds of tasks ---------------------------------------------------------------------------

sys.modules["colbench"] = sys.modules[__name__]  # imports of it load no second copy of __main__
ENVIRONMENTS = {"backend": Functions, "frontend": Pages}
# your own environments are imported here: MANUAL.md, "Your own environment"


# --- command line ---------------------------------------------------------------------------------

def cpus(quota="/sys/fs/cgroup/cpu.max"):
    """How many CPUs this process may use: its affinity's, or fewer by its container's quota."""
    count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # it may be "max"
        most, period = pathlib.Path(quota).read_text().split()
        count = min(count, math.ceil(int(most) / int(period)))
    return count


def get_args(argv=None):
    p = parser(__doc__, usage=None)
    p.add_argument("command", choices=["grade", "check"], help="grade: add the reward to records "
                   "that have task and answer; check: drop tasks whose reference lacks it")
    flag(p, "rules", "honest", "official: as the released scorer", choices=["honest", "official"])
    flag(p, "workers", cpus(), "answers, or pages, at once", least=1)
    flag(p, "clip", "openai/clip-vit-base-patch32", "pages: their likeness is CLIP's; a directory "
         "or a hub name", metavar="MODEL")
    return p.parse_args(argv)


def grade(args, emit):
    """Adds the reward to records that have task and answer."""
    rewards, failed, names = [], 0, set()
    try:
        for record in grade_records(read_jsonl(sys.stdin, needs("answer", to_grade=True)), args):
            emit(record)
            rewards.append(record["reward"])
            failed += "failure" in record
            name = environment(record["task"]).reward_name
            names.add(f"{name} by {record.get('reward_by', 'own rules')}")
    finally:  # also if other records could not be graded
        if rewards:
            mean = f"{100 * sum(rewards) / len(rewards):.1f} % {', '.join(sorted(names))}"
            say(f"{len(rewards)} answers: {mean}; {failed} failed")


def check(args, emit):
    """Drops tasks that do not give their own reference the full reward."""
    references = ({"task": r["task"], "answer": r["task"]["ground_truth"], "of": r}
                  for r in read_jsonl(sys.stdin, needs(to_grade=True)))
    for record in grade_records(references, args):
        if record["reward"] > 0.9999:  # likenesses are rounded
            emit(record["of"])
            continue
        failed = {name: why for name, why in record.get("tests", {}).items() if why != "pass"}
        why = failed or record.get("failure", "unlike itself")
        say(f"task {task_id(record['task'])} dropped: {why}")


def main(args):
    try:
        {"grade": grade, "check": check}[args.command](args, open_stdout())
    except GraderError as e:
        fail(e)


if __name__ == "__main__":
    run(main, get_args())
