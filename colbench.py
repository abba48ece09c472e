"""ColBench: the record, the prompts, the rules of an episode, and the grader.

One record is one line of JSON, and every stage adds fields to it: README, "One record".

    python colbench.py grade < episodes.jsonl > graded.jsonl   # adds the reward
    python colbench.py check < tasks.jsonl > good.jsonl        # drops broken tasks
"""
from utils import digest, fail, flag, open_stdout, parser, read_jsonl, refuse_unread, run, say

import asyncio
import collections
import concurrent.futures
import contextlib
import functools
import html
import inspect
import io
import json
import math
import os
import pathlib
import platform
import queue
import re
import shutil
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
import urllib.parse
from hashlib import sha256


ANSWER = "I WANT TO ANSWER:"   # what follows is the final answer
OUTPUT = "OUTPUT:"             # what stands before is the agent's private thought
HIDDEN = "Hidden reference:\n{hidden}\n\n"  # before a conversation that critic or pi_ref reads
NOT_SEEN = "i can't see your page: {}"


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
    """A copy of the conversation whose first message starts with the hidden information c."""
    first = {**history[0], "content": HIDDEN.format(hidden=hidden) + history[0]["content"]}
    return [first, *history[1:]]


def agent_messages(record):
    """The agent's messages of a dialogue, in order."""
    return [m for m in record["dialogue_history"] if m["role"] == "assistant"]


def kind_of(task):
    """The task's kind, a key of ENVIRONMENTS; ValueError if it is unknown.

    Published tasks have no `kind`. Without tests and with a page as reference it is "frontend".
    """
    kind = task.get("kind")
    if kind is None:
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

    These are the task's description and reference, and `fields`. The task's kind must be known, and
    two tasks may not share an id. to_grade: also what the kind's `grade` reads. to_train: the agent
    must say something.
    """
    text_of = {}  # of a task id

    def need(record):
        task = record.get("task", {})
        kind = environment(task)
        if "problem_description" in task and "ground_truth" in task:
            text = hash((task["problem_description"], task["ground_truth"]))
            if text_of.setdefault(task_id(task), text) != text:
                raise ValueError(f"another task above has the id {task_id(task)}, too")
        if to_train and "dialogue_history" in record and not agent_messages(record):
            raise ValueError("the agent says nothing in dialogue_history")
        if to_train:
            refuse_unread(record, record.get("dialogue_history", ()))
        graded = kind.fields if to_grade else ()
        return ["task.problem_description", "task.ground_truth", *graded, *fields]
    return need


def first_message(task, max_turns):
    """The agent's instructions: the task's own `agent_prompt`, else its kind's."""
    prompt = task.get("agent_prompt") or environment(task).agent_prompt
    content = fill(prompt, max_turns=max_turns, problem_description=task["problem_description"],
                   ANSWER=ANSWER, OUTPUT=OUTPUT)
    return {"role": "user", "content": content}


def human_prompt(task, history):
    """What an LLM that plays the human reads: its kind's prompt, filled in.

    The dialogue in it lacks the first message, the agent's instructions.
    """
    prompt = environment(task).human_prompt
    if not prompt:
        fail(f"tasks of kind {kind_of(task)} have no prompt for an LLM human")
    names = {"assistant": "Assistant", "user": "You", "system": "You"}
    dialogue = "\n".join(f"{names[m['role']]}: {m['content']}" for m in history[1:])
    return fill(prompt, problem_description=task["problem_description"], dialogue=dialogue,
                hidden_information=hidden_information(task))


def fill(prompt, **values):
    """The prompt with each {name} replaced by its value.

    In one pass, and not by str.format: prompts and tasks may hold braces.
    """
    return re.sub("{(%s)}" % "|".join(values), lambda match: str(values[match[1]]), prompt)


def redact(reply, hidden):
    """The reply with "[...]" for each line of hidden code that it quotes, however spaced.

    Lines of fewer than 12 characters do not count.
    """
    lines = {"".join(line.split()) for line in hidden.splitlines()}
    for line in sorted(lines, key=len, reverse=True):
        if len(line) >= 12:
            reply = re.sub(r"\s*".join(map(re.escape, line)), "[...]", reply)
    return reply


def without_thinking(output):
    """An output without a reasoning model's thought; "" if the thought does not end."""
    thought = r"\A\s*<think>(?!.*</think>).*|\A.*?</think>"
    return re.sub(thought, "", output, flags=re.S).strip()


def read_action(output, last):
    """(content, answer) of a raw action: what the human is shown, and the final answer or None.

    In the last round (`last`) a message that is no answer counts as one, as in the benchmark.
    """
    output = without_thinking(output)
    thought, has_output, sent = output.partition(OUTPUT)
    # "OUTPUT:" is a part of the answer's code, unless the thought only mentions the marker
    answer_began = re.search(rf"^[^\w\n]*{re.escape(ANSWER)}", thought, re.M)
    is_code = answer_began and ANSWER not in sent
    content = (sent if has_output and not is_code else output).strip()
    _, has_answer, answer = content.partition(ANSWER)
    if has_answer:
        return content, answer.strip()
    return content, content if last else None


def answers(action):
    """Whether a message or candidate of the agent hands in an answer, and so ends the episode."""
    text = action.get("output") or action.get("content") or ""
    return read_action(text, last=False)[1] is not None


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

    The class knows the task. An instance grades; it is shared by threads, and `with` ends what it
    has opened. args: the flags of `colbench.py grade`.
    """
    agent_prompt = "{problem_description}"  # may hold {max_turns}, {ANSWER} and {OUTPUT}, too
    human_prompt = None             # for an LLM that plays the human; see human_prompt()
    reply_chars = 400               # the human's reply is cut here
    pages = False                   # True: answers are web pages, at which an LLM human looks
    fields = ()                     # what grade reads of a task beyond description and reference
    reward_name = "reward"          # in messages; its first word heads a column of evaluate.py

    def __init__(self, args):
        super().__init__()

    @classmethod
    def answer(cls, history, final):
        """The answer of a dialogue; final: what the agent's last message hands in, or None."""
        return final

    @classmethod
    def metrics(cls, record):
        """{name: (numerator, denominator)} of a graded record, for evaluate.py.

        A system's value is the sum of the numerators over that of the denominators. Reward, turns
        and tokens are measured anyway.
        """
        agent = agent_messages(record)
        answered = record.get("answered", bool(agent) and answers(agent[-1]))
        return {"success": (record["reward"] >= 1, 1), "unanswered": (not answered, 1)}

    def grade(self, task, answer):
        """{"reward": 0 to 1} and what else the record should keep.

        "failure" says what failed, "reward_by" who graded. Rewards of two graders don't compare.
        """
        fail(f"{type(self).__name__} grades nothing: it needs a method grade")


# --- Backend Programming: functions ---------------------------------------------------------------

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
    fields = ("task.test_cases",)
    reward_name = "tests passed"

    def __init__(self, args):
        super().__init__(args)
        self.reward_by = f"{args.rules} rules"
        self.grader = self.enter_context(Grader(args.rules, args.workers))

    def grade(self, task, answer):
        return {**self.grader.grade(task, answer), "reward_by": self.reward_by}


# --- Frontend Design: pages -----------------------------------------------------------------------

class Pages(Environment):
    """Frontend Design: the answer is a web page, the reward how alike it and the reference look.

    The likeness is CLIP's. A page that can't be drawn is worth 0, and "failure" says why.
    """
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
    pages = True

    def __init__(self, args):
        super().__init__(args)
        self.reward_by, self.likeness = "clip", Clip(args.clip)  # likeness(page, reference)
        self.renderer = self.enter_context(Renderer(args.workers, args.browser))

    @classmethod
    def answer(cls, history, final):
        """The last page that the agent has shown."""
        shown = [extract_page(m["content"]) for m in history if m["role"] == "assistant"]
        return next(filter(None, reversed(shown)), "")

    @classmethod
    def metrics(cls, record):
        return {"not_drawn": ("failure" in record, 1)}

    def grade(self, task, answer):
        try:
            pages = self.renderer.pair(task, answer)
        except (RenderError, NoReference) as e:
            return {"reward": 0.0, "reward_by": self.reward_by, "failure": str(e)}
        return {"reward": self.likeness(*pages), "reward_by": self.reward_by}


# --- the grader: a sandbox ------------------------------------------------------------------------
#
# grader --"f", a wire, a file with the request--> fork server --fork--> child: confines itself,
#    \______________________a claim for each test_________________________/  runs the answer
#
# The fork server never sees code, values or references, so a child inherits nothing worth reading.
# From the first line of an answer's code on, the child belongs to the answer: what it sends is a
# claim. The next section makes verdicts of claims. Seccomp stops files, processes, network, signals
# and shared memory, also for root; limits and the kill of the child stop memory and time.

LIMITS = {
    "test": 1, "answer": 6,  # seconds of a CPU; a reference gets three times as much
    "wall": 10,              # times as many seconds on the wall: for an answer that sleeps
    "memory": 1 << 30,       # bytes of a child
    "code": 1 << 18,         # characters of an answer
    "claim": 200}            # bytes

# The system calls that a child may make: name, number on x86_64, on aarch64. All others fail with
# EPERM: it opens no file, no socket and no process.
CALLS = """
read 0 63   write 1 64   close 3 57   fstat 5 80   lseek 8 62   mmap 9 222   mprotect 10 226
munmap 11 215   brk 12 214   mremap 25 216   rt_sigaction 13 134   rt_sigprocmask 14 135
rt_sigreturn 15 139   sigaltstack 131 132   sched_yield 24 124   getpid 39 172   gettid 186 178
futex 202 98   getrandom 318 278   rseq 334 293   restart_syscall 219 128   gettimeofday 96 169
clock_gettime 228 113   clock_getres 229 114   clock_nanosleep 230 115   exit 60 93
exit_group 231 94   getcwd 79 17
"""
# What an answer can import is loaded before the fork: the standard library, numpy and sympy, with
# the modules that these import late. Modules of these names run something, or are tests.
NOT_LOADED = """__main__ antigravity benchmarks distutils ensurepip idlelib lib2to3 pydoc_data test
tests this tkinter turtle turtledemo""".split()
LIBRARY = [*(name for name in sorted(sys.stdlib_module_names) if name[0] != "_"),
           "_strptime", "_pylong"]
MORE = """numpy.fft numpy.ma numpy.polynomial numpy.random sympy.assumptions sympy.codegen.ast
sympy.combinatorics sympy.concrete.delta sympy.integrals sympy.sets sympy.stats""".split()
# A fork of fewer modules is up to ten times as fast: (words in an answer or its tests, modules of
# its fork server).
SERVERS = [("|".join(name.partition(".")[0] for name in MORE), LIBRARY + MORE),
           (r"import|code\(|bytes\(|bytearray\(|str\([^)]*,", LIBRARY), ("", ["_pylong"])]


def seccomp_filter():
    """The BPF program that allows CALLS."""
    machines = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}
    if platform.machine() not in machines:
        raise GraderError(f"no sandbox on {platform.machine()}: its system calls are not listed")
    column, arch = machines[platform.machine()]
    load, keep, equal, above, leave = 0x20, 0x54, 0x15, 0x35, 0x06  # of equal, above: jump if
    allow, deny, kill = (leave, 0, 0, 0x7FFF0000), (leave, 0, 0, 0x00050001), (leave, 0, 0, 1 << 31)
    # no other process's clock; a futex waits or wakes, within the process
    clock = [(load, 0, 0, 16), (above, 0, 1, 16), deny, allow]
    futex = [(load, 0, 0, 24), (keep, 0, 0, 0xFFFFFEFF)]
    for operation in 128, 129, 137, 138:
        futex += [(equal, 0, 1, operation), allow]
    futex += [deny]
    checks = {"futex": futex, **dict.fromkeys(["clock_gettime", "clock_getres", "clock_nanosleep"],
                                              clock)}
    program = [(load, 0, 0, 4), (equal, 1, 0, arch), kill, (load, 0, 0, 0)]
    for name, number in zip(CALLS.split()[::3], map(int, CALLS.split()[column::3])):
        check = checks.get(name, [allow])
        program += [(equal, 0, len(check), number), *check]
    return b"".join(struct.pack("HBBI", *step) for step in [*program, deny])


# The lines between the next mark and "fork server: end" are the whole program of a fork server.
# `python -c` gets their text alone: nothing else of this file is in a child.
# fork server: begin
import builtins, collections.abc, contextlib, ctypes, datetime, gc, importlib, json, math
import numbers, os, pathlib, pkgutil, re, resource, signal, socket, struct, symtable, sys
import textwrap, types, uuid
import unicodedata  # for "\N{...}", which a child can't import
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


FIRST_LINE = re.compile(  # of code, and seldom of prose
    r"([ \t]*)((async )?def \w|class \w|import \w|from [\w.]+ import|@\w|try:"
    r"|\w+(, *\w+)*( *:[^=]+| *)=[^=])")


def possible_code(answer):
    """Texts that may be an answer's code: the whole, what stands in fences, runs of lines.

    A run begins with a line of code and ends before the one at which it is no more Python.
    """
    yield answer
    text = re.sub("[\u200b\u2060\ufeff]", "", answer)  # invisible, and no Python
    text = text.replace("\xa0", " ").replace("\r\n", "\n")
    for block in re.split("`{3,}|~{3,}", text)[1::2]:
        yield textwrap.dedent(block.partition("\n")[2])
    lines, start, budget = text.split("\n"), 0, 1 << 20  # characters to compile in all
    while start < len(lines) and budget > 0:
        run = []
        if code := FIRST_LINE.match(lines[start]):
            run = [line.removeprefix(code[1]) for line in lines[start:]]
        while run and budget > 0:
            budget -= sum(map(len, run)) + len(run)
            try:
                compile("\n".join(run), "<answer>", "exec")
                break
            except SyntaxError as e:
                run = run[:min(e.lineno or 1, len(run)) - 1]
            except Exception:  # a null byte, or too deep for the compiler
                run = []
        yield "\n".join(run)
        start += max(1, len(run))


def global_names(code):
    """Yields the names in a code object of globals, of builtins and of attributes."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from global_names(const)


def answer_code(answer, used):
    """Code objects of an answer, which are run one after another.

    All texts that are Python, in order, up to the first that defines a name in `used`. What is code
    is settled before any of it runs. SyntaxError where nothing is Python.
    """
    found = []
    for text in possible_code(answer):
        with contextlib.suppress(Exception):  # it is no Python
            if text.strip():
                found.append(compile(text, "<answer>", "exec"))
                top = symtable.symtable(text, "<answer>", "exec")
                if any(top.lookup(name).is_assigned()
                       for name in top.get_identifiers() if name in used):
                    break
    return found or [compile(answer, "<answer>", "exec")]


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
    """A value as text: two give the same text if they are equal by ==, and only then.

    That is the == of plain data: a value of a subclass goes as its base (a namedtuple as a tuple,
    a Counter as a dict, zeros and all), an array of numpy as lists, a time of day with a zone as
    its text. TypeError: a value of another class. ValueError: NaN.
    """
    if value is None or isinstance(value, type) and value.__module__ == "builtins":
        return ascii(value)
    if type(value).__module__ == "numpy":
        return as_text(value.tolist())
    for classes, text in TEXTS:
        if isinstance(value, classes):
            return text(value)
    raise TypeError(type(value).__name__)


def moment(x):
    """A datetime as text, without its `fold`, which == does not see either."""
    aware = x.utcoffset() is not None
    x = x.astimezone(datetime.timezone.utc) if aware else x
    return f"datetime({datetime.datetime.isoformat(x)})"


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
    (datetime.datetime, moment),
    (datetime.date, lambda x: f"date({datetime.date.isoformat(x)})"),
    (datetime.time, lambda x: f"time({datetime.time.isoformat(x)})"),
    (datetime.timedelta, lambda x: f"timedelta({x.days}, {x.seconds}, {x.microseconds})"),
    (uuid.UUID, lambda x: f"UUID({x.int})"),
    (pathlib.PurePosixPath, lambda x: f"path({ascii(str(x))})")]


def claim(codes, test, official):
    """What a child says of one test, which runs in a fresh module: "value " and a hash of it,
    "refused " and why the value has no text, or "none".
    """
    module = sys.modules["answer"] = types.ModuleType("answer")
    space = vars(module)
    # the released scorer's exec inside a function has two namespaces: what the code defines
    # at its top level is invisible from inside its functions
    local, error = {} if official else space, None
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


def run_tests(request, wire, room):
    """Runs {text, tests, official}; sends a claim of at most `room` bytes for each test."""
    text, official = request["text"], request["official"]
    tests, used, error = [], set(), None
    for test in request["tests"]:
        with contextlib.suppress(Exception):  # eval(test) will say why not
            test = compile(test, "<test>", "eval")
            used.update(name for name in global_names(test) if not hasattr(builtins, name))
        tests.append(test)
    try:
        codes = [compile(text, "<answer>", "exec")] if official else answer_code(text, used)
    except BaseException as e:
        error = e
    for test in tests:
        try:
            if error:
                raise error
            said = claim(codes, test, official)
        except BaseException as e:  # SystemExit, KeyboardInterrupt: one more wrong answer
            missing = f": {e.name}" if type(e) is ModuleNotFoundError else ""
            said = f"raised {type(e).__name__}{missing}"
        os.write(wire, said.encode("ascii", "backslashreplace")[:room])


def be_child(wire, request, null, confinement, room):
    """The life of a child: it confines itself, says so, and answers one request."""
    try:
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.close(null)  # `wire` is the only way out now
        for name in ("numpy.random", "sympy.core.random"):  # Python's random does so by itself
            if name in sys.modules:
                sys.modules[name].seed()
        confine(*confinement)
        os.write(wire, b"confined %d" % os.getpid())
        with open(request, closefd=False) as f:
            run_tests(json.load(f), wire, room)
    finally:
        os._exit(0)


def load_modules(name, but):
    """Imports a module and its submodules, where there are such; none with a name in `but`."""
    if name.rpartition(".")[2] not in but:
        with contextlib.suppress(Exception):
            module = importlib.import_module(name)
            for part in pkgutil.iter_modules(getattr(module, "__path__", ())):
                load_modules(f"{name}.{part.name}", but)


def serve(bpf, modules, but, memory, room):
    """A fork server on stdin, a Unix socket: a byte with a wire and a file forks a child, the next
    one kills and reaps it. It ends with the grader, and the child with it.

    A child opens no file, and so can import only what is loaded here: `modules` without `but`.
    """
    libc = ctypes.CDLL(None)
    libc.prctl.argtypes = [ctypes.c_int] + 4 * [ctypes.c_ulong]
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no core for a handler, and nobody reads its memory
    for name in modules:
        load_modules(name, but)
    if "zoneinfo" in modules:  # a zone that is kept is found without opening its file
        of = sys.modules["zoneinfo"]
        zones = [of.ZoneInfo(name) for name in of.available_timezones()]  # noqa: F841
    server, null = os.getpid(), os.open(os.devnull, os.O_RDWR)
    control = socket.socket(fileno=0)
    text = "def f(x): return [x, 0.5, 'a', {'b': (x, None)}]"  # fills caches that a child needs
    run_tests({"text": text, "tests": ["f(1)", "g(2)"], "official": False}, null, room)
    gc.freeze()  # a child's collector leaves frozen pages alone, and so shares them
    with contextlib.suppress(ConnectionError):  # the grader has died
        while fds := socket.recv_fds(control, 1, 2)[1]:
            pid = os.fork()
            if pid == 0:
                be_child(*fds, null, (libc, bpf, memory, server), room)
            for fd in fds:
                os.close(fd)
            control.recv(1)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            control.sendall(b"k")

# fork server: end


def server_program(modules):
    """The source of a fork server, which is a part of this file."""
    source = inspect.getsource(sys.modules[__name__])
    begin, end = source.index("\n# fork server: begin"), source.index("\n# fork server: end")
    limits = f"{LIMITS['memory']}, {LIMITS['claim']}"
    call = f"serve({seccomp_filter()!r}, {modules}, {NOT_LOADED}, {limits})"
    return f"{source[begin:end]}\n{call}\n"


class GraderError(Exception):
    """The grader itself failed: never a verdict on an answer."""


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
        """Runs one child: ([its claims, as bytes], the seconds that it is charged).

        Charged are seconds of a CPU, so that a busy machine costs an answer nothing; or a tenth of
        those on the wall, if that is more: it sleeps. per_test, total: what one test, and all, may
        be charged. If the child ends before its last test, the last of the claims is text: why.
        OSError: the server failed.
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


def receive(wire, charged, limit):
    """A child's next claim, as bytes, or why there is none, as text.

    charged() is the seconds that it is charged so far, limit those that it may be.
    """
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

def verdict(wanted, given):
    """"pass", or why not; from the claims of the reference and of the answer."""
    if isinstance(wanted, str) or not wanted.startswith(b"value "):
        return "no expected value: " + ("None" if wanted == b"none" else why_not(wanted))
    return "pass" if given == wanted else why_not(given)


def why_not(given):
    """The verdict on a claim that does not pass."""
    if isinstance(given, str):
        return given
    kind, _, said = given.partition(b" ")
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


class Grader(contextlib.AbstractContextManager):
    """with Grader() as grader: grader.grade(task, answer). Safe to call from several threads.

    rules: "honest", or "official" for the verdicts of the released scorer. workers: answers graded
    at once. GraderError where a child can't confine itself.

    A test passes if the answer's value and the reference's have the same text (`as_text`), which
    means that the two are equal by ==. None never passes, NaN equals nothing, floats are exact.
    Functions, iterators and instances of the answer's own classes have no text: the verdict names
    their class.

    The official rules differ from the released scorer where a refused value passes there (math.nan
    in a list, math.sqrt, an == that says True), where an answer ends it there (SystemExit), and in
    a reference's time, 3 s a test here.
    """

    def __init__(self, rules="honest", workers=2):
        self.official = rules == "official"
        self.expected = {}  # {digest of a reference and its tests: its claims}
        self.teams = [{} for _ in range(workers)]  # each has {a row of SERVERS: its Server}
        self.idle = queue.LifoQueue()  # last in, first out: few answers start few servers
        for team in self.teams:
            self.idle.put(team)
        self.claims("", ["0"])

    def __exit__(self, *_):
        """Ends the servers, after the answers in work."""
        for team in [self.idle.get() for _ in self.teams]:
            for server in team.values():
                server.stop()
            team.clear()
            self.idle.put(team)

    def run(self, team, request, seconds, left):
        """Server.run by the team's server that has the modules. It starts when first used, and once
        more if it fails. GraderError: it fails twice.
        """
        source = "\n".join([request["text"], *request["tests"]])
        kind = next(i for i, (words, _) in enumerate(SERVERS) if re.search(words, source))
        for _ in range(2):
            try:
                if kind not in team:
                    team[kind] = Server(SERVERS[kind][1])
                return team[kind].run(request, seconds, left)
            except OSError as e:
                error = e
                if kind in team:
                    team.pop(kind).stop()
        raise GraderError(f"a fork server failed twice: {error!r}") from error

    def claims(self, text, tests, patience=1):
        """For each test a child's claim, as bytes, or why there is none, as text.

        patience stretches the time limits.
        """
        team = self.idle.get()
        try:
            claims, left = [], LIMITS["answer"] * patience
            while len(claims) < len(tests) and left > 0:
                request = {"text": text, "tests": tests[len(claims):], "official": self.official}
                found, took = self.run(team, request, LIMITS["test"] * patience, left)
                claims, left = claims + found, left - took
            return claims + ["timeout"] * (len(tests) - len(claims))
        finally:
            self.idle.put(team)

    def grade(self, task, answer):
        """{"reward": share of tests passed, "tests": {name: "pass" or the reason why not}}."""
        names, tests = list(task["test_cases"]), list(task["test_cases"].values())
        reason = self.not_run(answer or "")
        if reason:
            verdicts = [reason] * len(tests)
        else:
            code = official_code(answer) if self.official else answer
            key = digest([task["ground_truth"], tests])
            if key not in self.expected:
                self.expected[key] = self.claims(task["ground_truth"], tests, patience=3)
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
        return None


def grade_records(records, args):
    """Yields each record with what its kind's `grade` says of task and answer, in order.

    A record whose grade raises is said and left out, and ends the program after the others. So does
    a bad line, after those before it. A GraderError ends it at once.
    """
    window, error, lost = collections.deque(), None, []
    before = "reward", "tests", "failure", "reward_by"  # what a grader has said of another answer

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
        return [{name: record[name] for name in record if name not in before} | said]

    with contextlib.ExitStack() as stack, \
            concurrent.futures.ThreadPoolExecutor(2 * args.workers) as pool:
        opened = functools.cache(lambda kind: stack.enter_context(kind(args)))
        try:
            for record in records:
                window.append(pool.submit(graded, opened(environment(record["task"])), record))
                if len(window) >= 4 * args.workers:
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


class RenderError(Exception):
    """Why a page has no picture."""


class NoReference(Exception):
    """A task's reference page can't be drawn, which is an error of the task."""


class Sheet:
    """Tailwind's style sheet. sheet(page): only the rules that can apply, since 3 MB load slowly.

    A rule applies if one of its classes stands in the page; some rules have no class.
    """
    PART = re.compile(r"([^{}@]*)\{[^{}]*\}|@[^{}]*\{|\}")  # a rule, "@media ... {", its end
    CLASS = re.compile(r"\.((?:\\.|[\w-])+)")

    def __init__(self, css):
        self.parts, self.by_class = [], collections.defaultdict(list)  # {class: parts' numbers}
        for part in self.PART.finditer(re.sub(r"/\*.*?\*/", "", css, flags=re.S)):
            for name in self.CLASS.findall(part[1] or "") or [""]:
                name = name.replace("\\32", "2").replace("\\", "")  # \32xl\:w-1\/2: 2xl:w-1/2
                self.by_class[name].append(len(self.parts))
            self.parts.append(part[0])

    def __call__(self, page):
        text = re.sub(r"&#?\w{1,31};?", lambda match: html.unescape(match[0]), page)
        words = {"", *re.split(r"[\s\"'<>=`]+", text)}
        used = {n for word in words & self.by_class.keys() for n in self.by_class[word]}
        return "".join(self.parts[n] for n in sorted(used))


class Browser:
    """A Chromium with one tab, for one page at a time; started when needed.

    Its methods run in its loop. api: playwright.async_api.
    """

    def __init__(self, api, path, script):
        self.api, self.path, self.script = api, path, script
        self.loop = asyncio.new_event_loop()
        self.driver = self.tab = None
        self.page = self.sheet = None  # what the tab may load

    async def start(self):
        flags = [*BROWSER_FLAGS, *["--no-sandbox"] * (os.geteuid() == 0)]
        # a driver ends with us, and the browser with it
        self.driver = await self.api.async_playwright().start()
        browser = await self.driver.chromium.launch(executable_path=self.path, args=flags)
        context = await browser.new_context(
            viewport={side: PAGE[side] for side in ("width", "height")}, java_script_enabled=False,
            service_workers="block", accept_downloads=False, reduced_motion="reduce",
            locale="en-US", timezone_id="UTC")
        await context.route("**/*", self.answer)
        self.tab = await context.new_page()

    async def ready(self):
        """Starts it if it does not run. GraderError: two starts fail, which is no page's fault."""
        for _ in range(2):
            try:
                return self.tab or await asyncio.wait_for(self.start(), 30)
            except Exception as e:  # TimeoutError, too: a browser that dies or hangs may not say so
                await self.stop()
                error = e
        why = textwrap.shorten(str(error) or "it hangs", 300)
        raise GraderError(f"{self.path} does not start: {why}")

    async def stop(self):
        """Ends browser and driver; a dead or hanging one holds nobody up."""
        driver, self.driver, self.tab = self.driver, None, None
        if driver:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(driver.stop(), 5)

    async def draw(self, page, sheet):
        """See Renderer.render."""
        for _ in range(2):  # again in a new browser: the first may have died of something else
            await self.ready()
            try:
                return await asyncio.wait_for(self.shoot(page, sheet), PAGE["seconds"])
            except TimeoutError:
                await self.stop()
                raise RenderError(f"the page took more than {PAGE['seconds']} s") from None
            except RenderError:
                raise
            except Exception as e:  # a page is data: whatever it does is no error of ours
                await self.stop()
                error = e
        raise RenderError(textwrap.shorten(str(error), 100))

    async def shoot(self, page, sheet):
        """What `draw` gives; an error if the page fails."""
        self.page, self.sheet = page, sheet
        await self.tab.goto("https://page.invalid/")
        drawn = check_numbers(await self.tab.evaluate(self.script))
        height = min(max(drawn["height"], 1), PAGE["tallest"])
        box = {"x": 0, "y": 0, "width": PAGE["width"], "height": height}
        png = await self.tab.screenshot(full_page=True, clip=box, animations="disabled")
        return {**drawn, "png": png}

    async def answer(self, route):
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


def check_numbers(said):
    """What a browser says of a page, if its numbers are those of a page; else RenderError."""
    if isinstance(said, (dict, list)):
        for part in said.values() if isinstance(said, dict) else said:
            check_numbers(part)
    elif isinstance(said, (int, float)) and not abs(said) < 1e8:  # a browser's layout ends before
        raise RenderError(f"a length or a colour of the page is {said}")
    return said


def grey_picture(path):
    """An SVG file of the size that a picture's URL asks for, such as /id/48/100/50."""
    path = re.sub(r"/(id|seed)/[^/]*", "", path)
    sizes = [min(max(int(n), 1), 4096) for n in re.findall(r"\d{1,5}", path)]
    width, height = (2 * sizes)[-2:] or (300, 200)  # one number: a square
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">'
            '<rect width="100%" height="100%" fill="#9ca3af"/></svg>')


class Renderer(contextlib.AbstractContextManager):
    """with Renderer() as renderer: renderer.render(page), from any thread.

    Scripts are off. Every request is answered here or refused.
    workers: browsers, each with one page at a time. script: what is asked of a page, HEIGHT and
    maybe more. The same page gives the same bytes.
    """

    def __init__(self, workers=2, browser=None, script=HEIGHT):
        try:
            from playwright import async_api
        except ImportError:
            fail("pages need Playwright: pip install playwright (MANUAL.md, \"Frontend Design\")")
        path = next(filter(None, map(shutil.which, [browser] if browser else BROWSERS)), None)
        if not path:
            fail(f"no {browser or 'Chromium'} found: --browser PATH names one")
        tailwind = pathlib.Path(CACHE, "tailwind.min.css")
        css = tailwind.read_bytes() if tailwind.exists() else b""
        if sha256(css).hexdigest() != TAILWIND:
            fail(f"no Tailwind 2.2.19 style sheet at {tailwind} (MANUAL.md, \"Frontend Design\")")
        self.sheet = Sheet(css.decode())
        self.browsers = [Browser(async_api, path, script) for _ in range(workers)]
        self.idle = queue.LifoQueue()  # last in, first out: few pages start few browsers
        for one in self.browsers:
            self.idle.put(one)
        self.render = functools.lru_cache(256)(self.render)

    def __exit__(self, *_):
        """Ends the browsers, after the pages in work."""
        for browser in [self.idle.get() for _ in self.browsers]:
            browser.loop.run_until_complete(browser.stop())
            self.idle.put(browser)

    def render(self, page):
        """{"png", "height"} of a page, and what else `script` gives; RenderError says why not.

        GraderError if the browser does not start.
        """
        if not (page or "").strip():
            raise RenderError("no page")
        if len(page.encode(errors="replace")) > PAGE["bytes"]:
            raise RenderError(f"the page has more than {PAGE['bytes']} bytes")
        browser = self.idle.get()
        try:
            return browser.loop.run_until_complete(browser.draw(page, self.sheet(page)))
        finally:
            self.idle.put(browser)

    def pair(self, task, text):
        """(the last page in a text, the task's reference) as drawn."""
        page, reference = self.render(extract_page(text)), task["ground_truth"]
        try:
            return page, self.render(extract_page(reference) or reference)
        except RenderError as e:
            why = f"task {task_id(task)}: its reference can't be drawn: {e}"
            raise NoReference(why) from None


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


# --- command line ---------------------------------------------------------------------------------

sys.modules["colbench"] = sys.modules[__name__]  # for imports of it, also where it is __main__
ENVIRONMENTS = {"backend": Functions, "frontend": Pages}
# your own environments are imported here: MANUAL.md, "Your own environment"


def cpus(quota="/sys/fs/cgroup/cpu.max"):
    """How many CPUs this process may use: its affinity's, or fewer by its container's quota."""
    count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # it may be "max"
        most, period = pathlib.Path(quota).read_text().split()
        count = min(count, math.ceil(int(most) / int(period)))
    return count


def browser_flag(p):
    flag(p, "browser", None, "Chromium, to draw pages; not given: found by itself", metavar="PATH")


def get_args(argv=None):
    p = parser(__doc__, usage=None)
    p.add_argument("command", choices=["grade", "check"], help="grade: add the reward to records "
                   "that have task and answer; check: drop tasks whose reference lacks it")
    flag(p, "rules", "honest", "official: as the released scorer", choices=["honest", "official"])
    flag(p, "workers", cpus(), "answers, or pages, at once", least=1)
    g = p.add_argument_group("pages (frontend)")
    browser_flag(g)
    flag(g, "clip", "openai/clip-vit-base-patch32", "their likeness is CLIP's; a directory or "
         "a hub name", metavar="MODEL")
    return p.parse_args(argv)


def grade(args, emit):
    """Adds the reward to records that have task and answer."""
    rewards, failed, names = [], 0, set()
    for record in grade_records(read_jsonl(sys.stdin, needs("answer", to_grade=True)), args):
        emit(record)
        rewards.append(record["reward"])
        failed += "failure" in record
        name = environment(record["task"]).reward_name
        names.add(f"{name} by {record.get('reward_by', 'own rules')}")
    mean = 100 * sum(rewards) / max(1, len(rewards))
    say(f"{len(rewards)} answers: {mean:.1f} % {', '.join(sorted(names))}; {failed} failed")


def check(args, emit):
    """Drops tasks that do not give their own reference the full reward."""
    answered = ({"task": r["task"], "answer": r["task"]["ground_truth"], "of": r}
                for r in read_jsonl(sys.stdin, needs(to_grade=True)))
    for record in grade_records(answered, args):
        if record["reward"] > 0.9999:  # likenesses are rounded
            emit(record["of"])
            continue
        failed = {name: why for name, why in record.get("tests", {}).items() if why != "pass"}
        why = failed or record.get("failure", "unlike itself")
        say(f"task {task_id(record['task'])} dropped: {why}")


def main(args):
    command = grade if args.command == "grade" else check
    try:
        command(args, open_stdout())
    except GraderError as e:
        fail(e)


if __name__ == "__main__":
    run(main, get_args())
