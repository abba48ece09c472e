"""ColBench: its tasks, prompts and episode rules, and how answers are graded.

The reward of a function is the share of hidden tests on which it returns the reference's value,
and that of a web page its CLIP similarity to the reference page. Records are lines of JSON, to
which every stage adds fields (RECORD).

The sections, in order. A reader of the method needs only those with a star:
  * tasks, prompts, rules     what the agent reads, and the rules of an episode (Episode)
  * environments              a class per kind of task: its prompts and how answers are graded
  * records                   their fields (RECORD), and how they are read and checked
    grading                   many records at once
    backend                   functions: the grader, and the sandbox in which answers run
    frontend                  pages: a browser that renders them, and their likeness by CLIP
    command line              grade and check

Left out on purpose: a fresh interpreter or container per answer, because sandboxed forks grade
several times as many answers a second as interpreters (RESULTS.md); answers that need files,
threads or packages beyond numpy and sympy; and comparing by ==, which an answer's own class could
forge.

    python colbench.py grade < episodes.jsonl > graded.jsonl   # adds the reward
    python colbench.py check < tasks.jsonl > good.jsonl        # drops broken tasks
"""
import __future__
import ast
import asyncio
import builtins
import concurrent.futures
import contextlib
import ctypes
import datetime
import decimal
import functools
import gc
import html
import importlib
import io
import json
import math
import numbers
import os
import pathlib
import pkgutil
import queue
import re
import resource
import runpy
import shutil
import signal
import socket
import struct
import subprocess
import symtable
import sys
import textwrap
import threading
import time
import types
import urllib.parse
from collections import abc, defaultdict, deque
from hashlib import sha256

from utils import (HERE, cpus, digest, fail, fail_on_error, open_stdout, parser, positive,
                   read_jsonl, run, say)


ANSWER = "I WANT TO ANSWER:"   # marks the final answer, which follows it
OUTPUT = "OUTPUT:"             # marks the end of the agent's private thought
HIDDEN = "Hidden reference:\n{hidden}\n\n"  # prefix of the dialogues that the critic reads


# --- tasks, prompts and the rules of an episode ---------------------------------------------------
#
# A task of the kind "backend", for example (RECORD lists all fields):
#     {"problem_description": "write pay(x): what to pay for x hours",  which the agent reads
#      "ground_truth": "def pay(x, rate=4): return x * rate",           the hidden reference
#      "test_cases": {"test1": "pay(3)"}}                               calls that test an answer

def task_kind(task):
    """Returns the task's kind, a key of environments(); raises ValueError if it is unknown."""
    kind = task.get("kind")
    if kind is None:  # ColBench's published tasks have none
        is_page = re.search("<(html|body)", str(task.get("ground_truth")), re.I)
        kind = "frontend" if is_page and "test_cases" not in task else "backend"
    if kind not in environments():
        known = ", ".join(environments())
        raise ValueError(f"unknown task.kind {repr(kind)[:40]}; known kinds: {known}")
    return kind


def environment(task):
    """Returns the Environment of a task; raises ValueError if its kind is unknown."""
    return environments()[task_kind(task)]


def hidden_information(task):
    """Returns what the agent must not see: `hidden_information`, by default the reference."""
    hidden = task.get("hidden_information")
    return task["ground_truth"] if hidden is None else hidden


def with_hidden(history, hidden):
    """Returns a copy of the dialogue that starts with the hidden information."""
    first = {**history[0], "content": HIDDEN.format(hidden=hidden) + history[0]["content"]}
    return [first, *history[1:]]


def first_message(task, max_turns):
    """Returns the agent's instructions, from the `agent_prompt` of the task or else its kind."""
    prompt = task.get("agent_prompt") or environment(task).agent_prompt
    content = fill(prompt, max_turns=max_turns, problem_description=task["problem_description"],
                   ANSWER=ANSWER, OUTPUT=OUTPUT)
    return {"role": "user", "content": content}


def human_prompt(task, history):
    """Returns the prompt of an LLM human: the dialogue without the agent's instructions."""
    prompt = environment(task).human_prompt
    names = {"assistant": "Assistant", "user": "You", "system": "You"}
    dialogue = "\n".join(f"{names[m['role']]}: {m['content']}" for m in history[1:])
    return fill(prompt, problem_description=task["problem_description"], dialogue=dialogue,
                hidden_information=hidden_information(task))


def fill(prompt, **values):
    """Replaces each {name} in the prompt by its value; keeps other braces, and those in values."""
    return re.sub("{(%s)}" % "|".join(values), lambda match: str(values[match[1]]), prompt)


# ANSWER counts anywhere. At the start of a line, after tags and signs, its words count in any case.
# At the end of a line they need no colon. Marks may stand around them, such as in
# **I want to answer**: or <b>I WANT TO ANSWER</b>
WORDS = r"\s+".join(map(re.escape, ANSWER.rstrip(": ").split()))
MARKS = r"(?:[*_\"']|`(?!`)|</?\w+>)*"
MARKER_END = MARKS + (r"[ \t]*(?:[:：]|$)" if ANSWER.endswith(":") else "") + MARKS
MARKER = re.compile(WORDS + MARKER_END, re.M)
LINE_MARKER = re.compile(rf"^(?><[^<>\n]*>|[^\w\n]|_)*{WORDS}{MARKER_END}", re.I | re.M)
CODE_MARKER = re.compile(MARKER.pattern + r"\s*(?:```|def |class |import |from |@)", re.M)
# The thought of a reasoning model is between tags, or in Mistral's, Gemma's or gpt-oss's marks
TAG = r"(?:think|thinking|thought|reasoning|seed:think)"
THOUGHT_START = re.compile(rf"<{TAG}>|\[THINK\]|<\|channel\|?>")
THOUGHT_END = re.compile(rf"</{TAG}>|\[/THINK\]|<channel\|>|<\|channel\|>final<\|message\|>")


def read_action(output, last):
    """Parses the agent's output into (text shown to the human, final answer or None).

    In the last turn (`last`) the whole text is the answer if it has no ANSWER, as in ColBench. Pass
    "<think>" + output if the prompt has opened a thought (see model.Chat.opening).
    """
    output = without_thinking(output, may_lack_start=False)
    thought, has_output, message = output.partition(OUTPUT)
    # The OUTPUT in 'ANSWER def f(): print("OUTPUT:")' is part of the answer. But in
    # 'ANSWER now? OUTPUT: ANSWER def f(): ...' the first ANSWER is part of the thought.
    starts_answer = LINE_MARKER.search(thought) or CODE_MARKER.search(thought)
    if has_output and (find_marker(message) or not starts_answer):
        output = message
    content = output.strip()
    marker = find_marker(content)
    if not marker:
        return content, content if last else None
    before, answer = content[:marker.end()], content[marker.end():]
    if before.count("```") % 2:  # ANSWER is inside a code block
        answer = "```\n" + answer
    indented = re.match(r"\s*\n[ \t]", answer)  # strip() alone would dedent only the first line
    return content, (textwrap.dedent(answer) if indented else answer).strip()


def find_marker(text):
    """Returns the match of the last ANSWER that starts a line, else of the first one, or None."""
    starting_lines = [*LINE_MARKER.finditer(text)]
    return starting_lines[-1] if starting_lines else MARKER.search(text)


def without_thinking(text, may_lack_start=True):
    """Removes the thought that opens a reasoning model's text; "" if the thought never ends.

    may_lack_start: also if only its end is there, because a server's prompt has started it.
    """
    text = text.strip()
    end = THOUGHT_END.search(text)
    after = text[end.end():].strip() if end else ""
    if THOUGHT_START.match(text):
        return after
    if end and may_lack_start and not THOUGHT_START.search(text, 0, end.start()):
        return after
    return text


class Episode:
    """A dialogue in progress and its rules: who speaks next, when it ends, what the answer is.

        episode = Episode(task, max_turns=10)
        while not episode.ended:
            episode.act(agent(episode.history))
            if not episode.ended:
                episode.reply(human(task, episode.history))
        record = {"task": task, **episode.fields()}

    history: the messages so far. turn: how many of them are the agent's. opening: "<think>" if the
    agent's prompt ends in it, so that its outputs lack it.
    """

    def __init__(self, task, max_turns, opening=""):
        self.task, self.max_turns, self.opening = task, max_turns, opening
        self.history = [first_message(task, max_turns)]
        self.turn, self.submitted, self.ended = 0, None, False

    def act(self, message):
        """Adds the agent's message: what it wrote, or {"output": that, further fields}."""
        fields = {"output": message} if isinstance(message, str) else message
        output = fields["output"].encode(errors="replace").decode()  # without lone surrogates
        self.turn += 1
        content, self.submitted = read_action(self.opening + output, self.turn == self.max_turns)
        self.ended = self.submitted is not None
        ours = {"role": "assistant", "content": content, "output": output}
        self.history.append({**ours, **fields, **ours})  # ours come first, and can't be replaced

    def reply(self, text):
        """Adds the human's reply, truncated to the limit of the task's kind, which may end it."""
        env = environment(self.task)
        text = text.encode(errors="replace").decode()  # tokenizers reject lone surrogates
        self.history.append({"role": "user", "content": text[:env.reply_chars]})
        self.ended = env.ends(self.history)

    def abandon(self):
        """Ends the episode without an answer, and drops the reply that the agent can't answer."""
        self.history.pop()
        self.ended = True

    def fields(self):
        """Returns the fields that the episode adds to the record of its task."""
        answer = environment(self.task).final_answer(self.history, self.submitted)
        return {"dialogue_history": self.history, "answer": answer or "",
                "answered": answered({"dialogue_history": self.history})}


# --- environments: one class per kind of task -----------------------------------------------------

class Environment:
    """A kind of task: its prompts, what counts as the answer, and how answers are graded.

    Grading calls `open`, `grade` from several threads, and `close`. The methods must not change
    what they get. A task without a reference has "" as `ground_truth`.
    """
    agent_prompt = "{problem_description}"  # {max_turns}, {ANSWER} and {OUTPUT} are filled in, too
    human_prompt = None             # for an LLM human; see human_prompt()
    reply_chars = 400               # the human's replies are truncated to this length
    shows_pages = False             # True: answers are web pages, shown to an LLM human as images

    def ends(self, history):
        """Whether the human's last message ends the episode, as that of a game that is won may."""
        return False

    def final_answer(self, history, submitted):
        """Returns the answer to grade. submitted: the last message's; None: it has none."""
        return submitted

    def metrics(self, record):
        """Returns {name: number} of a graded record, which evaluate.py shows as percentages."""
        return {"success": record["reward"] >= 1, "unanswered": not answered(record)}

    def open(self, args):
        """Starts what `grade` needs, such as a browser. args: the flags of colbench.py grade."""

    def close(self):
        """Ends what `open` has started."""

    def grade_reference(self, task):
        """Returns what grade returns for the task's own reference, whose reward must be 1."""
        return self.grade({"task": task, "answer": task["ground_truth"]})

    def grade(self, record):
        """Returns {"reward": -1 to 1} and further fields for the record, such as "failure".

        record: "task", "answer" and, of an episode, "dialogue_history". "reward_by" names the
        grader, because rewards of different graders are not comparable.
        """
        fail(f"{type(self).__name__} can't grade answers: define its method grade")


class Functions(Environment):
    """Backend Programming: answers are functions, the reward is the share of tests passed."""
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

    def open(self, args):
        # some answers pass by a later Python only
        self.reward_by = f"{args.rules} rules, Python %d.%d" % sys.version_info[:2]
        self.grader = Grader(args.rules, args.workers)

    def close(self):
        self.grader.close()

    def grade_reference(self, task):
        return self.grader.grade_reference(task)

    def grade(self, record):
        fields = self.grader.grade(record["task"], record["answer"])
        return {**fields, "reward_by": self.reward_by}


class Pages(Environment):
    """Frontend Design: answers are web pages, the reward is the likeness to the reference page."""
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
    shows_pages = True

    def open(self, args):
        self.reward_by = "clip"
        self.likeness = clip_likeness(args.clip)
        self.renderer = Renderer(args.workers)

    def close(self):
        self.renderer.close()

    def final_answer(self, history, submitted):
        """Returns the last page that the agent sent."""
        pages = [extract_page(m["content"]) for m in history if m["role"] == "assistant"]
        return next(filter(None, reversed(pages)), "")

    def metrics(self, record):
        return {"not_drawn": "failure" in record}

    def grade(self, record):
        try:
            pages = self.renderer.render_pair(record["task"], record["answer"])
        except RenderError as e:
            return {"reward": 0.0, "reward_by": self.reward_by, "failure": str(e)}
        return {"reward": self.likeness(*pages), "reward_by": self.reward_by}


@functools.cache
def environments():
    """Returns {kind: Environment}: ColBench's two kinds, and your own.

    Those are in ENVIRONMENTS, a dict of the file that the environment variable ENVIRONMENTS_FILE
    names (MANUAL.md, "Your own environment"). The sandbox never reads it.
    """
    kinds = {"backend": Functions(), "frontend": Pages()}
    if file := os.environ.get("ENVIRONMENTS_FILE"):
        with fail_on_error(f"ENVIRONMENTS_FILE={file}"):
            kinds |= runpy.run_path(file)["ENVIRONMENTS"]
    return kinds


# --- records --------------------------------------------------------------------------------------

# The fields that the scripts read, with their shapes. All are optional, null means that a field is
# missing, and other fields are kept. A shape is a type, [shape], {field: shape}, or {str: shape}
# for an object with any keys.
ACTION = {                 # a message of the agent, or a candidate for one
    "content": str,        # what the human saw
    "output": str,         # what the model wrote
    "token_ids": [int],    # the output's tokens, with the one that ended it
    "completion_tokens": int,  # their number, if a server samples them and returns only the text
    "logprobs": [float],   # of each token of a message, when it was sampled
    "logprob": float,      # of a candidate: their sum
    "cut": bool,           # whether it was truncated, so that it has no end token
    "advantage": float}    # by the critic
RECORD = {                 # an episode: its key is (task id, sample)
    "task": {              # its `id` may have any type; by default it is a hash of the others
        "kind": str,                 # a key of environments()
        "problem_description": str,  # what the agent reads at first
        "ground_truth": str,         # the reference
        "hidden_information": str,   # what human and critic read; by default the reference
        "agent_prompt": str,         # instead of the kind's
        "test_cases": {str: str}},   # {name: a call, such as f(3)}
    "sample": int,
    "dialogue_history": [{"role": str, **ACTION, "candidates": [ACTION]}],
    "answer": str,
    "answered": bool,      # whether the agent wrote ANSWER
    "reward": float,
    "tests": {str: str},   # {name: verdict}
    "failure": str,        # why a page could not be rendered
    "reward_by": str,      # the rules or the model of the grader
    "value": float,        # by which the critic ranks episodes: the sum of advantages (eq. 2)
    "failed": str,         # why there is no episode, nor any field but task, sample, usage and meta
    "usage": {str: int},   # what it cost, such as {"human_prompt_tokens": 812}
    "comparison": str,     # preferences: the comparison to which the record belongs
    "meta": {              # how it was sampled
        "model_weights": str,
        "seed": int,
        "candidates_meta": {}}}  # how they were sampled, if later
GRADE_FIELDS = "reward", "tests", "failure", "reward_by"  # fields written by the grader


def agent_messages(record):
    """Returns the agent's messages of a record's dialogue, in order."""
    return [m for m in record["dialogue_history"] if m["role"] == "assistant"]


def message_texts(history):
    """Returns the contents of a dialogue's messages."""
    return [message["content"] for message in history]


def answered(record):
    """Returns the record's `answered`, else whether the agent's last message has ANSWER."""
    if "answered" in record:
        return record["answered"]
    messages = agent_messages(record)
    return bool(messages and find_marker(messages[-1]["content"]))


def task_id(task):
    """Returns the task's own id as text, else a hash of its content."""
    own = task.get("id")
    if own in (None, ""):
        return content_hash(task)
    if isinstance(own, float) and own.is_integer():
        own = int(own)  # pandas makes 12.0 of 12
    return str(own)


def task_content(task):
    """Returns all fields of a task but its id, with its kind even if that is not written."""
    return {**task, "id": None, "kind": task_kind(task)}


def content_hash(task):
    """Returns a hash that tasks of the same content share, whatever their ids."""
    return digest(json.dumps(task_content(task), sort_keys=True))


# Flags of collect.py and fields of `meta` in which two files of one system may differ: counts,
# paths, speed, rounding and versions
MAY_DIFFER = """k candidates_meta resume concurrency engine dtype max_batch_tokens timeout retries
model_weights version""".split()


def settings(meta):
    """Returns those of collect.py's flags, or of a record's `meta`, that influence an episode.

    A model is known by its weights.
    """
    model = {"model": meta["model_weights"]} if meta.get("model_weights") else {}
    return {name: x for name, x in {**meta, **model}.items() if name not in MAY_DIFFER}


def read_records(stream, *fields, source="stdin", tasks=None, with_failed=False):
    """Yields the records of a stream's lines; an invalid line is an error that names it.

    A task's id has one content, and no episode is twice in a stream. fields: what a record must
    have, besides its task's description and reference. tasks: {id: (content, place)} of those read
    so far, if several streams share them. with_failed: yield failed episodes, too; else one line
    says how many there are.
    """
    tasks, episodes, n_failed = {} if tasks is None else tasks, {}, 0
    for place, record in read_jsonl(stream, source):
        try:
            if "task" not in record and "problem_description" in record:
                record = {"task": record}  # ColBench's published task files hold bare tasks
            clean_record(record, fields)
            check_task(record, place, tasks)
            check_episode(record, place, episodes)
        except ValueError as e:
            fail(f"{place}: {e}")
        if "failed" in record and not with_failed:
            n_failed += 1
        else:
            yield record
    if n_failed:
        say(f"{n_failed} records of failed episodes in {source} are left out")


def clean_record(record, fields):
    """Drops nulls from a record, and rounds its reward; ValueError if the record is invalid.

    A reward within 1e-9 of 1 or 0 becomes that, so that the sum of ten times 0.1 counts as solved.
    fields: see read_records.
    """
    clean_shape(record, RECORD)
    check_dialogue(record.get("dialogue_history", []), "dialogue_history")
    if "reward" in record:
        reward = record["reward"]
        if not -1 - 1e-9 < reward < 1 + 1e-9:
            raise ValueError(f"the reward {reward} is not between -1 and 1")
        if 0 < abs(reward - round(reward)) < 1e-9:
            record["reward"] = float(round(reward))
    task = record.get("task", {})
    task_kind(task)  # raises if it is unknown
    needed = [(task, "problem_description"), (task, "ground_truth")]
    if "failed" not in record:  # a failed episode has no more than its task
        needed += [(record, name) for name in fields]
    for holder, name in needed:
        if holder.get(name) in (None, []):
            raise ValueError(f"this record has no {name!r}")


TYPE_NAMES = {str: "text", bool: "true or false", int: "an integer", float: "a number",
              list: "a list", dict: "an object"}


def clean_shape(value, shape, path=""):
    """Drops known keys that are null; raises ValueError if a value does not have the shape."""
    wanted = shape if isinstance(shape, type) else type(shape)
    if not isinstance(value, (int, float) if wanted is float else wanted):
        raise ValueError(f"{path} is not {TYPE_NAMES[wanted]}")
    if isinstance(shape, list):
        for i, item in enumerate(value):
            clean_shape(item, shape[0], f"{path}[{i}]")
    if isinstance(shape, dict):
        for key in list(value):
            expected = shape.get(key, shape.get(str))
            if expected is not None and value[key] is None:
                del value[key]
            elif expected is not None:
                clean_shape(value[key], expected, f"{path}.{key}".lstrip("."))


def check_dialogue(history, name):
    """Raises ValueError if the messages are not a dialogue. name: for the error message."""
    for message in history:
        if message.get("role") not in ("system", "user", "assistant") or "content" not in message:
            raise ValueError(f"a message of {name} has no content, or its role is not system, "
                             "user or assistant")
    if history and history[0]["role"] == "assistant":
        raise ValueError(f"{name} starts with the assistant, not with a user or system message")


def check_task(record, place, tasks):
    """Raises ValueError if the record's task differs from that of the same id in tasks."""
    name, content = task_id(record["task"]), task_content(record["task"])
    first, line = tasks.setdefault(name, (content, place))
    if content != first:
        raise ValueError(f"the task {name} differs from the one in {line}: give one of them "
                         "another id")


def check_episode(record, place, episodes):
    """Raises ValueError if the record's episode is in episodes, {digest: place}; else adds it."""
    if "dialogue_history" not in record or "sample" not in record:
        return  # scripted demonstrations may be equal
    name = task_id(record["task"])
    episode = [name, record["sample"], settings(record.get("meta", {})),
               message_texts(record["dialogue_history"])]
    first = episodes.setdefault(digest(json.dumps(episode, sort_keys=True)), place)
    if first != place:
        raise ValueError(f"sample {record['sample']} of the task {name} is also in {first}: give "
                         "each line only once")


# --- grading many records -------------------------------------------------------------------------

def grade_records(records, args, references=False):
    """Yields (record, the fields that its environment's `grade` returns), in order.

    references: grade the tasks' references instead, by `grade_reference`. At most 4 x --workers
    records are read before the first of them is yielded. An error of the input, such as an invalid
    line, a task without tests or a missing browser, is raised when the records before it are
    graded.
    """
    opened, jobs, input_error = set(), deque(), None
    with contextlib.ExitStack() as stack, \
            concurrent.futures.ThreadPoolExecutor(2 * args.workers) as pool:
        try:
            for record in records:
                env = environment(record["task"])
                if env not in opened:
                    env.open(args)
                    opened.add(env)
                    stack.callback(env.close)
                jobs.append(pool.submit(grade_record, env, record, references))
                while jobs and (jobs[0].done() or len(jobs) >= 4 * args.workers):
                    yield jobs.popleft().result()
        except SystemExit as e:
            input_error = e
        for job in jobs:
            yield job.result()
    if input_error:
        raise input_error


def grade_record(env, record, references):
    """Returns the record, and the fields that its environment gives it."""
    if "failed" in record:
        return record, {}
    if references:
        return record, env.grade_reference(record["task"])
    return record, env.grade(record)


class GraderError(OSError):
    """The grader itself failed, which is never a verdict on an answer."""


# --- backend: the grader of functions -------------------------------------------------------------

# seconds per test and per answer; references get three times as many
LIMITS = {"test": 1, "answer": 6}
MAY_VARY = "its value may vary: it draws random numbers or reads a clock"
# A reference or test that may draw random numbers, depend on memory addresses or read a clock.
RANDOM_OR_CLOCK = re.compile(r"\b(random|randMatrix|urandom|secrets|uuid[14])\b|\b(id|hash)\("
                             r"|\.(now|utcnow|today)\b|\b(import|from) +time\b|datetime64\('[nt]")
BANNED_WORDS = ("import os", "from os", "import sys", "from sys", "sudo", "transformers", "exit(",
                "quit(", "argparse")  # the released scorer gives reward 0 to answers with one


class Grader:
    """Grades answers to tasks of the kind "backend", from any thread. `close` ends its processes.

    rules: "honest", or "official" for the verdicts of the released scorer. workers: number of
    answers graded at once. Raises GraderError if a child can't confine itself.

    A test passes if the values of answer and reference have the same text (as_text). Floats
    must be exactly equal. None, NaN, functions and iterators never pass, nor do instances of the
    answer's own classes, unless these are subclasses of plain data, or registered as numbers or
    sets by their abstract classes; the verdict names their class.

    The official rules differ from the released scorer in three points only. (1) Some values that
    pass there fail here: math.nan in a list, math.sqrt, an __eq__ that returns True. (2) An answer
    that raises SystemExit fails here; there it ends the scorer. (3) A reference gets 3 s per test.
    """

    def __init__(self, rules="honest", workers=2):
        self.official = rules == "official"
        self.expected = {}  # {digest of a reference and its tests: its results}
        self.locks = defaultdict(threading.Lock)  # one for each of these
        # a worker is {whether its answers may import PACKAGES: ForkServer}
        self.workers = [{} for _ in range(workers)]
        self.idle = queue.LifoQueue()  # last in, first out, so that a light load uses few workers
        for worker in self.workers:
            self.idle.put(worker)

    def close(self):
        for servers in self.workers:
            for server in servers.values():
                server.stop()

    def grade(self, task, answer):
        """Returns {"reward": share of tests passed, "tests": {name: verdict}}."""
        tests = tests_of(task)
        answer = (answer or "").encode(errors="replace").decode()  # no Python has lone surrogates
        if not answer.strip():
            return with_reward(task, ["no answer"] * len(tests))
        if self.official:
            banned = [word for word in BANNED_WORDS if word in answer]
            if banned:
                reason = f"not run: the official rules refuse {banned[0]!r}"
                return with_reward(task, [reason] * len(tests))
            answer = first_block(answer)
        key = digest([task["ground_truth"], tests])
        with self.locks[key]:  # the answers to a task come at the same time
            if key not in self.expected:
                self.expected[key] = self.results_of(task["ground_truth"], tests, time_factor=3)
        expected = self.expected[key]
        useful = [i for i, result in enumerate(expected) if has_value(result)]
        results = dict(zip(useful, self.results_of(answer, [tests[i] for i in useful])))
        verdicts = [verdict(result, results.get(i)) for i, result in enumerate(expected)]
        return with_reward(task, verdicts)

    def grade_reference(self, task):
        """Returns grade's fields for the reference as an answer, whose values must never vary."""
        tests = tests_of(task)
        if RANDOM_OR_CLOCK.search("\n".join([task["ground_truth"], *tests])):
            return with_reward(task, [MAY_VARY] * len(tests))
        return self.grade(task, task["ground_truth"])

    def results_of(self, text, tests, time_factor=1):
        """Returns a result per test (see ForkServer.run_child). time_factor: of the limits."""
        results, seconds_left = [], LIMITS["answer"] * time_factor
        with_packages = any(word in source for word in PACKAGES for source in (text, *tests))
        servers = self.idle.get()
        try:
            while len(results) < len(tests) and seconds_left > 0:  # rerun if a child ends early
                request = {"text": text, "tests": tests[len(results):], "official": self.official}
                new, seconds = self.ask_server(servers, with_packages, request,
                                               LIMITS["test"] * time_factor, seconds_left)
                seconds_left -= seconds
                results += new
        finally:
            self.idle.put(servers)
        return results + ["timeout"] * (len(tests) - len(results))

    def ask_server(self, servers, with_packages, *request):
        """Returns ForkServer.run_child(*request) of a worker's server, which it may start."""
        for last_try in (False, True):
            try:
                if with_packages not in servers:
                    servers[with_packages] = ForkServer(with_packages)
                return servers[with_packages].run_child(*request)
            except OSError as e:  # start another server, but only once
                if with_packages in servers:
                    servers.pop(with_packages).stop()
                if last_try:
                    raise GraderError(f"a fork server failed twice: {e!r}") from e


def tests_of(task):
    """Returns a task's tests; exits if it has none."""
    if not task.get("test_cases"):
        fail(f"the task {task['problem_description'][:60]!r} has no test_cases")
    return list(task["test_cases"].values())


def first_block(answer):
    """Returns an answer's first fenced block, else the answer, as the released scorer does.

    A tag other than "python" stays in the block, as there.
    """
    for fence in ("```python", "```"):
        if fence in answer:
            return answer.split(fence)[1].split("```")[0]
    return answer


def with_reward(task, verdicts):
    """Returns the fields that a record gets for its verdicts, one per test of the task."""
    return {"reward": verdicts.count("pass") / len(verdicts),
            "tests": dict(zip(task["test_cases"], verdicts))}


def has_value(result):
    """Whether a test has returned a value: not None, and one that can be compared."""
    return isinstance(result, bytes) and result.startswith(b"value ")


def verdict(expected, result):
    """Returns "pass", or why an answer's result does not pass. expected: the reference's result."""
    if expected == b"none":
        return "no expected value: None"
    if not has_value(expected):
        return f"no expected value: {describe(expected)}"
    return "pass" if result == expected else describe(result)


def describe(result):
    """Returns why a result does not pass. A child's own words are quoted and truncated."""
    if isinstance(result, str):
        return result
    word, _, text = result.partition(b" ")
    label = {b"raised": "raised", b"refused": "value refused"}.get(word)
    if label is None:
        return "wrong value"
    return f"{label} {json.dumps(text.decode('ascii', 'replace'))}"


# --- backend: the sandbox -------------------------------------------------------------------------
#
# Untrusted answers run in forked children that can compute, and nothing else. A child can make only
# ALLOWED_CALLS, even as root: no files, processes, network, signals or shared memory. Its memory is
# limited, and the grader (ForkServer) kills it when its time is up. It can write only to one
# socket, where it sends a result per test: the hash of the test's value, or an error. It may send
# anything, but only the hash of the reference's value passes.
#
#     grader -- a socket --> fork server -- fork --> child, which confines itself
#        ^----- the socket: a request to the child, and its result per test -----^
#
# The fork server never sees code, values or references, so a child inherits nothing worth reading.

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.prctl.argtypes = [ctypes.c_int] + 4 * [ctypes.c_ulong]
MEMORY = 1 << 30     # bytes of address space that a child may add to its server's
MESSAGE_BYTES = 100  # length of each message of a child
# Modules to load before the fork, because children can't open files: the standard library, numpy
# and sympy, and what these two import lazily. Servers without packages fork faster, so only answers
# whose text names a package get the others.
LIBRARY = [*(name for name in sorted(sys.stdlib_module_names) if name[0] != "_"),
           "_strptime", "_pylong"]
PACKAGES = {"numpy": "char fft ma polynomial random rec strings",
            "sympy": """assumptions categories codegen combinatorics concrete discrete integrals
                        logic matrices.expressions.applyfunc physics.units polys sets stats
                        tensor.array.array_derivatives vector"""}
# Tests, and modules that do something when they are imported.
NOT_LOADED = """__main__ antigravity benchmarks distutils ensurepip idlelib lib2to3 pydoc_data test
tests this tkinter turtle turtledemo""".split()


class ForkServer:
    """A running fork server, for one caller at a time. with_packages: it has loaded PACKAGES."""

    def __init__(self, with_packages):
        self.control, server_end = socket.socketpair()
        self.control.settimeout(600)  # importing all modules is slow on a busy machine
        modules = os.pathsep.join([HERE, *sys.path])  # it has the packages that the grader has
        env = {"PYTHONPATH": modules, "PYTHONHASHSEED": "0", "TZ": "UTC",
               "OPENBLAS_NUM_THREADS": "1"}
        flags = "-P", "-B", "-Wignore"
        command = f"import colbench; colbench.serve(with_packages={with_packages})"
        with server_end:
            self.process = subprocess.Popen(
                [sys.executable, *flags, "-c", command], stdin=server_end,
                stdout=subprocess.DEVNULL, env=env, cwd="/", start_new_session=True)

    def stop(self):
        self.process.kill()
        self.process.wait()
        self.control.close()

    def run_child(self, request, per_test, total):
        """Runs one child. Returns (results, seconds used); raises OSError if the server fails.

        Results are bytes. If the child ends early, the last one is a str with the reason. per_test,
        total: limits on the time used, see stopwatch.
        """
        ours, child_end = socket.socketpair()
        with ours:
            with child_end:
                socket.send_fds(self.control, [b"f"], [child_end.fileno()])
            ours.settimeout(600)
            status = ours.recv(MESSAGE_BYTES).decode("ascii", "replace").rstrip()
            if not status.startswith("confined "):  # sent before the child reads the request
                cause = status or "it ended"
                raise OSError(f"a child did not start, or could not confine itself: {cause}")
            ours.sendall(json.dumps(request).encode() + b"\n")
            results, seconds = [], 0
            time_used = stopwatch(int(status.split()[1]))
            while len(results) < len(request["tests"]):
                started = time_used()
                result = receive(ours, time_used, started + min(per_test, total - seconds))
                seconds += time_used() - started
                results.append(result)
                if isinstance(result, str):
                    break  # the child has ended
        self.end_child(results[-1])
        return results, seconds

    def end_child(self, last_result):
        """Ends the child of a run; raises OSError if something else has killed it or the server."""
        self.control.sendall(b"k")
        exit_code = self.control.recv(20)
        if not exit_code:
            raise OSError("the server ended before its child")
        # An answer can't kill its child by SIGKILL, nor close its socket. The kernel can kill it.
        if last_result == "process ended" and int(exit_code) == -signal.SIGKILL:
            raise OSError("a child was killed, perhaps because memory ran out")


def receive(result_socket, time_used, limit):
    """Returns a child's next message, or a str if it ends or its time_used() reaches `limit`."""
    while True:
        left = limit - time_used()  # it takes at least this long
        result_socket.settimeout(max(left, 1e-3))
        try:
            message = result_socket.recv(MESSAGE_BYTES)
            return message.rstrip(b" ") if message else "process ended"
        except TimeoutError:
            if time_used() >= limit:
                return "timeout"
        except ConnectionError:
            return "process ended"


def stopwatch(pid):
    """Returns time_used(), the seconds that a process is charged: of CPU, or a tenth of all time.

    So on a busy machine a right answer still has its time, and one that sleeps comes to an end.
    """
    started, clock = time.monotonic(), (~pid << 3) | 2  # Linux's id of another process's CPU clock
    return lambda: max(time.clock_gettime(clock), (time.monotonic() - started) / 10)


# --- backend: the fork server, which loads modules and forks children -----------------------------

def load_module(name):
    """Imports a module and its submodules, except those that are NOT_LOADED or that fail."""
    if name.rpartition(".")[2] not in NOT_LOADED:
        with contextlib.suppress(Exception):
            module = importlib.import_module(name)
            for submodule in pkgutil.iter_modules(getattr(module, "__path__", ())):
                load_module(f"{name}.{submodule.name}")


def load_modules(with_packages):
    """Loads what children may import."""
    for name in LIBRARY:
        load_module(name)
    # a child can't open the files of time zones, so cache all of them
    zoneinfo = sys.modules["zoneinfo"]
    zoneinfo.kept = [zoneinfo.ZoneInfo(name) for name in zoneinfo.available_timezones()]
    if with_packages:
        for package, submodules in PACKAGES.items():
            for name in submodules.split():
                load_module(f"{package}.{name}")


def serve(with_packages):
    """Runs a fork server until the grader exits, whose socket `control` is stdin.

    A message with the descriptor of a socket forks a child. The next message kills and reaps that
    child, and is answered by its exit code.
    """
    control = socket.socket(fileno=0)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, the kernel kills a child first
    LIBC.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no core dumps, and only root can read its memory
    load_modules(with_packages)
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))  # children inherit it
    bpf = seccomp_filter()
    with open(os.devnull, "w") as devnull:  # a first run fills caches, which children share
        run_tests({"text": "def f(): return 0.5", "tests": ["f()"], "official": False},
                  devnull.fileno())
    gc.freeze()  # else garbage collection in a child would copy all shared memory pages
    with contextlib.suppress(ConnectionError):  # the grader has exited
        while fds := socket.recv_fds(control, 1, 1)[1]:
            pid = os.fork()
            if pid == 0:
                child_main(fds[0], bpf)
            os.close(fds[0])
            control.recv(1)
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            control.sendall(b"%d" % os.waitstatus_to_exitcode(status))


# --- backend: a child confines itself -------------------------------------------------------------

# Allowed system calls: name, number on x86_64, number on aarch64. All others fail with EPERM, so a
# child can't open a file or socket, close its result socket, or start a process.
ALLOWED_CALLS = """
read 0 63   write 1 64   fstat 5 80   lseek 8 62   mmap 9 222   mprotect 10 226   munmap 11 215
brk 12 214   mremap 25 216   rt_sigaction 13 134   rt_sigprocmask 14 135   rt_sigreturn 15 139
getpid 39 172   getcwd 79 17   getrandom 318 278   clock_gettime 228 113   clock_nanosleep 230 115
restart_syscall 219 128   exit_group 231 94
"""
MACHINES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}  # column above, AUDIT_ARCH


def seccomp_filter():
    """Returns the BPF program that allows only ALLOWED_CALLS, as bytes."""
    machine = os.uname().machine
    if machine not in MACHINES:
        raise OSError(f"the sandbox supports {' and '.join(MACHINES)}, not {machine}")
    column, arch = MACHINES[machine]
    # An instruction is (operation, instructions to skip if true, or if false, value). Offsets to
    # `load` from: 0 the call's number, 4 the architecture.
    load, equal, ret = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO with EPERM, SECCOMP_RET_KILL_PROCESS
    allow, deny, kill = (ret, 0, 0, 0x7FFF0000), (ret, 0, 0, 0x00050001), (ret, 0, 0, 1 << 31)
    program = [(load, 0, 0, 4), (equal, 1, 0, arch), kill, (load, 0, 0, 0)]
    for number in ALLOWED_CALLS.split()[column::3]:
        program += [(equal, 0, 1, int(number)), allow]
    return b"".join(struct.pack("HBBI", *step) for step in [*program, deny])


def confine(bpf):
    """Confines this process's system calls and memory; raises OSError if it can't."""
    devnull = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(devnull, fd)
    os.close(devnull)  # now only the result socket leads out
    LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: die with the server
    LIBC.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    code = ctypes.create_string_buffer(bpf)
    fprog = struct.pack("H6xQ", len(bpf) // 8, ctypes.addressof(code))  # struct sock_fprog
    fprog = ctypes.create_string_buffer(fprog)
    if LIBC.prctl(22, 2, ctypes.addressof(fprog), 0, 0):  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        raise OSError(ctypes.get_errno(), "seccomp is not available")


# --- backend: a child runs an answer and its tests ------------------------------------------------

def child_main(result_fd, bpf):
    """Confines this child, reports that or why it can't, runs one request, and exits."""
    try:
        try:
            confine(bpf)
        except Exception as e:
            send(result_fd, f"{type(e).__name__}: {e}")
            os._exit(1)
        send(result_fd, f"confined {os.getpid()}")
        with open(result_fd, closefd=False) as f:
            request = json.loads(f.readline())
        seed_random()
        run_tests(request, result_fd)
    finally:
        os._exit(0)


def send(result_fd, text):
    """Sends a message to the grader, as MESSAGE_BYTES bytes."""
    message = text.encode("ascii", "backslashreplace")
    os.write(result_fd, message[:MESSAGE_BYTES].ljust(MESSAGE_BYTES))


def seed_random():
    """Seeds the random numbers of this child by chance, not as they are in the server."""
    for name in ("random", "numpy.random", "sympy.core.random"):
        if name in sys.modules:
            sys.modules[name].seed()


def run_tests(request, result_fd):
    """Runs the tests of a request {text, tests, official}; writes a result for each."""
    text, tests, official = request["text"], request["tests"], request["official"]
    try:
        programs = [Program(text)] if official else read_programs(text)
    except BaseException as e:
        for _ in tests:
            send(result_fd, raised(e))
        return
    for test in tests:
        try:
            result = result_of(value_of(programs, test, official), official)
        except BaseException as e:  # also SystemExit and KeyboardInterrupt
            result = raised(e)
        send(result_fd, result)


def raised(e):
    """Returns what a child reports of an exception."""
    missing = f": {e.name}" if type(e) is ModuleNotFoundError else ""
    return f"raised {type(e).__name__}{missing}"


def value_of(programs, test, official):
    """Runs an answer's programs and returns the value of a test, or raises its error.

    First run the programs up to the last one that defines the tested function. Those behind it may
    be examples that never end, so they run one by one, and only while the test raises a NameError.
    """
    module = sys.modules["answer"] = types.ModuleType("answer")  # a new one per test
    namespace = vars(module)
    # official: two namespaces, as in the released scorer, so that an answer's functions can't see
    # its top-level names, such as imports and helper functions
    local_names = {} if official else namespace
    programs, later = split_at_final_version(programs, test)
    errors = [e for program in programs for e in program.execute(namespace, local_names)]
    if official and errors:
        raise errors[0]
    while True:
        try:
            return eval(test, namespace, local_names)
        except NameError as e:
            if not later:
                raise errors[0] if errors else e
        errors += add_missing(later.pop(0), namespace)


def split_at_final_version(programs, test):
    """Returns (the programs up to the last one that binds the tested function, those behind it)."""
    tested = {node.func.id for node in ast.walk(ast.parse(test))
              if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    tested -= vars(builtins).keys()  # an example behind it may bind max
    ends = [end for end, program in enumerate(programs, 1) if tested & program.names]
    end = max(ends, default=len(programs))
    return programs[:end], programs[end:]


def add_missing(program, namespace):
    """Executes a program, but restores what was in the namespace before. Returns the errors."""
    before = dict(namespace)
    errors = program.execute(namespace, namespace)
    namespace.update(before)
    return errors


def result_of(value, official):
    """Returns what a child reports of a value: "value HASH", "none", or "refused REASON"."""
    try:
        if official and getattr(value, "ndim", 0) and value.size != 1:
            raise TypeError("an array, whose == is no verdict")
        text = as_text(value)
        return "none" if value is None else "value " + sha256(text.encode()).hexdigest()
    except Exception as e:
        return f"refused {type(e).__name__}: {e}"


# --- backend: which part of an answer is its program ----------------------------------------------

INVISIBLE = {**dict.fromkeys([0x0D, 0xAD, *range(0x200B, 0x2010), 0x2060, 0xFEFF]),  # deleted
             **dict.fromkeys([0xA0, *range(0x2000, 0x200B), 0x202F, 0x3000], " ")}  # spaces


class Program:
    """A text that is Python; raises an error if it is not.

    names: what its statements bind, except imports.
    """

    def __init__(self, text):
        flags = compile(text, "<answer>", "exec").co_flags & __future__.annotations.compiler_flag
        self.statements = [compile(ast.Module([statement], []), "<answer>", "exec", flags)
                           for statement in ast.parse(text).body]
        symbols = symtable.symtable(text, "<answer>", "exec").get_symbols()
        self.names = {symbol.get_name() for symbol in symbols if symbol.is_assigned()}

    def execute(self, namespace, local_names):
        """Executes the statements, also those after one that fails. Returns the errors."""
        errors = []
        for statement in self.statements:
            try:
                exec(statement, namespace, local_names)
            except Exception as e:  # such as that of an import which the function does not need
                errors.append(e)
            except BaseException as e:  # such as SystemExit, at the end of a script
                return [*errors, e]
        return errors


def read_programs(answer):
    """Returns the programs of an answer: the whole, else each fenced block that is Python."""
    try:
        return [read_program(answer)]
    except Exception as e:  # it is not Python
        programs = fenced_programs(answer)
        if not programs:
            raise e
        return programs


def read_program(text):
    """Returns the program of a text, which is cleaned if it is not Python as it stands."""
    try:
        return Program(text)
    except Exception:  # not only SyntaxError: also ValueError, MemoryError and RecursionError
        return Program(textwrap.dedent(text.translate(INVISIBLE)))


def fenced_programs(answer):
    """Returns the programs in the fenced blocks of an answer.

    A block ends at the first fence, as long as its own or longer, where its text is Python; so not
    at one in a string. A block that never is Python, such as Markdown, is searched for blocks, too.
    """
    programs, texts = [], [answer]
    while texts:
        text = texts.pop()
        opening = re.search("`{3,}|~{3,}", text)
        if not opening:
            continue
        text, fence = text[opening.end():], opening[0] + opening[0][0] + "*+"  # or a longer one
        # first fences on lines of their own and the text's end, then others unless tagged
        ends = [*re.finditer(rf"^[ \t]*{fence}\s*$|\Z", text, re.M),
                *re.finditer(rf"{fence}(?!\w+\s*$)", text, re.M)]
        for end in ends[:40]:
            first_line, newline, rest = text[:end.start()].partition("\n")
            with contextlib.suppress(Exception):  # it is not Python
                programs.append(read_program(rest if newline else first_line))
                texts.append(text[end.end():])
                break
        else:
            texts += [text[ends[0].end():], text[:ends[0].start()]]
    return programs


# --- backend: values are compared as text ---------------------------------------------------------

def as_text(value):
    """Returns a value's text: values count as equal if their texts are.

    This is == for plain data, except that subclasses compare as their base class (a namedtuple as a
    tuple, a Counter as a dict, including zero counts), numpy arrays compare as lists, and the same
    moment in two time zones differs. Raises TypeError for other classes, ValueError for NaN.
    """
    if value is None or isinstance(value, type) and value.__module__ == "builtins":
        return ascii(value)
    if type(value).__module__ == "numpy":
        if value.dtype.kind in "mM":
            raise TypeError(value.dtype)  # tolist() makes integers of nanoseconds, and None of NaT
        return as_text(value.tolist())
    for classes, formatter in FORMATTERS:
        if isinstance(value, classes):
            return formatter(value)
    raise TypeError(type(value).__name__)


def joined(values):
    return ", ".join(map(as_text, values))


def real_as_text(x):
    """Returns a text that is the same for equal numbers of any class; ValueError for NaN."""
    if isinstance(x, numbers.Rational):  # also sympy's
        return "%x/%x" % (int(x.numerator), int(x.denominator))
    if not hasattr(x, "as_integer_ratio"):  # sympy's Float
        x = float(x)
    if x in (math.inf, -math.inf):
        return str(float(x))
    return "%x/%x" % x.as_integer_ratio()


def complex_as_text(x):
    imaginary = f" + {real_as_text(x.imag)}j" if x.imag else ""
    return real_as_text(x.real) + imaginary


FORMATTERS = [  # (classes, text of their values); the first row that matches is used
    (str, lambda x: ascii(str.__str__(x))),
    ((int, float, decimal.Decimal, numbers.Real), real_as_text),  # also Fraction's, sympy's
    (numbers.Complex, complex_as_text),
    (list, lambda x: f"[{joined(x)}]"),
    (tuple, lambda x: f"({joined(x)})"),
    (dict, lambda x: "dict(%s)" % ", ".join(sorted(map(joined, x.items())))),
    (abc.Set, lambda x: "{%s}" % ", ".join(sorted(map(as_text, x)))),
    (deque, lambda x: f"deque({joined(x)})"),
    (range, lambda x: f"range({joined([len(x), *x[:2]])})"),
    (datetime.datetime, lambda x: f"datetime({datetime.datetime.isoformat(x)})"),
    (datetime.date, lambda x: f"date({datetime.date.isoformat(x)})")]


# --- frontend: pages are rendered by a browser without network access -----------------------------

PAGE_LIMITS = {"width": 1280, "height": 720, "tallest": 4096,  # pixels of a screenshot
               "seconds": 15}
BROWSERS = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"
BROWSER_FLAGS = [  # added to Playwright's; the last three make screenshots always equal
    "--disable-gpu", "--disable-quic", "--host-resolver-rules=MAP * ~NOTFOUND",
    "--font-render-hinting=none", "--disable-lcd-text",
    "--blink-settings=imageAnimationPolicy=2,mediaControlsEnabled=false"]  # also stops SVGs
HIDE_MOVING = "marquee, progress:indeterminate {opacity: 0 !important}"  # no flag stops these two
# dist/tailwind.min.css of tailwindcss@2.2.19
TAILWIND_SHA256 = "b6ad97402eddb903e7a5d7a73ee47a679204efbdda4521a391cbad9df509b932"
CACHE = os.path.expanduser("~/.cache/colbench")
PICTURE_HOSTS = re.compile(
    r"(^|\.)(picsum\.photos|placeholder\.com|placehold\.(co|it)|dummyimage\.com|unsplash\.com|"
    r"loremflickr\.com|placekitten\.com)$")
# JavaScript that measures a rendered page
MEASURE_SCRIPT = """() => document.fonts.ready.then(
    () => ({height: document.documentElement.scrollHeight}))"""


def style_sheet(css):
    """Returns rules_of(page), the CSS that a page uses; with all 3 MB it renders 3 times slower."""
    parts, by_class = [], defaultdict(list)  # {class: indices in parts}
    part_of = r"([^{}@]*)\{[^{}]*\}|@[^{}]*\{|\}"  # a rule, "@media ... {", or its "}"
    for part in re.finditer(part_of, re.sub(r"/\*.*?\*/", "", css, flags=re.S)):
        for name in re.findall(r"\.((?:\\.|[\w-])+)", part[1] or "") or [""]:  # "": on all pages
            name = name.replace("\\32", "2").replace("\\", "")  # unescapes \32xl\:w-1\/2
            by_class[name].append(len(parts))
        parts.append(part[0])

    def rules_of(page):
        text = re.sub(r"&#?\w{1,31};?", lambda match: html.unescape(match[0]), page)
        words = {"", *re.split(r"[\s\"'<>=`]+", text)}
        used = {i for word in words & by_class.keys() for i in by_class[word]}
        return "".join(parts[i] for i in sorted(used))
    return rules_of


class RenderError(Exception):
    """A page can't be rendered. The message becomes the record's `failure`."""


class Browser:
    """A Chromium with one tab, which renders one page at a time. api: playwright.async_api."""

    def __init__(self, api, path, script):
        self.api, self.path, self.script = api, path, script
        self.loop = asyncio.new_event_loop()
        self.driver = self.tab = None
        self.page = self.sheet = None  # HTML and CSS that the tab may load

    def wait_for(self, coroutine, seconds):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, seconds))

    async def start(self):
        # Chromium's own sandbox does not run as root
        flags = BROWSER_FLAGS + (["--no-sandbox"] if os.geteuid() == 0 else [])
        # the driver exits with this process, and the browser with the driver
        self.driver = await self.api.async_playwright().start()
        browser = await self.driver.chromium.launch(executable_path=self.path, args=flags)
        context = await browser.new_context(
            viewport={side: PAGE_LIMITS[side] for side in ("width", "height")},
            java_script_enabled=False, service_workers="block", accept_downloads=False,
            reduced_motion="reduce", locale="en-US", timezone_id="UTC")
        await context.route("**/*", self.handle_request)
        self.tab = await context.new_page()

    def stop(self):
        """Stops the browser and its driver, without waiting long for a hanging one."""
        driver, self.driver, self.tab = self.driver, None, None
        if driver:
            with contextlib.suppress(Exception):
                self.wait_for(driver.stop(), 5)

    def render(self, page, sheet):
        """See Renderer.render. page: bytes, sheet: CSS. Raises GraderError without a browser."""
        for last_try in (False, True):
            try:
                if not self.tab:
                    self.wait_for(self.start(), 30)
            except Exception as e:
                self.stop()
                raise GraderError(f"{self.path} does not start: {e!r}") from e
            try:
                return self.wait_for(self.screenshot(page, sheet), PAGE_LIMITS["seconds"])
            except TimeoutError as e:
                self.stop()
                raise RenderError(f"the page took more than {PAGE_LIMITS['seconds']} s") from e
            except Exception as e:  # an earlier page may have broken the browser
                self.stop()
                if last_try:  # any failure of an untrusted page counts as the page's
                    raise RenderError(textwrap.shorten(str(e), 100)) from e

    async def screenshot(self, page, sheet):
        self.page, self.sheet = page, sheet
        await self.tab.goto("https://page.invalid/")
        measured = await self.tab.evaluate(self.script)
        height = min(max(measured["height"], 1), PAGE_LIMITS["tallest"])
        box = {"x": 0, "y": 0, "width": PAGE_LIMITS["width"], "height": height}
        png = await self.tab.screenshot(full_page=True, clip=box, animations="disabled",
                                        style=HIDE_MOVING)
        return {**measured, "png": png}

    async def handle_request(self, route):
        """Answers a request of the tab with the page, its CSS or a grey image, or aborts it."""
        request = route.request
        url = urllib.parse.urlsplit(request.url)
        own_host = url.hostname == "page.invalid"
        is_page = own_host and request.is_navigation_request() and not request.frame.parent_frame
        if is_page and self.page is not None:
            page, self.page = self.page, None  # only once, else a page could reload itself forever
            await route.fulfill(body=page, content_type="text/html; charset=utf-8")
        elif request.resource_type == "stylesheet" and "tailwind" in request.url:
            await route.fulfill(body=self.sheet, content_type="text/css; charset=utf-8")
        elif request.resource_type == "image" and PICTURE_HOSTS.search(url.hostname or ""):
            await route.fulfill(body=grey_picture(url.path), content_type="image/svg+xml")
        else:
            await route.abort("aborted")


def grey_picture(path):
    """Returns a grey SVG of the size in an image's URL path, such as /id/48/100/50."""
    path = re.sub(r"/(id|seed)/[^/]*", "", path)
    size = re.search(r"(?<![\w-])(\d{1,5})(?:[x/](\d{1,5}))?(?![\w-])", path)
    sides = (size[1], size[2] or size[1]) if size else (300, 200)  # one number means a square
    width, height = (min(max(int(side), 1), 4096) for side in sides)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">'
            '<rect width="100%" height="100%" fill="#9ca3af"/></svg>')


class Renderer:
    """Renders pages by render(page), from any thread. `close` ends its browsers.

    The same page gives the same bytes. Its scripts do not run, and it can't reach the network.
    workers: number of browsers. script: JavaScript that measures a page, see MEASURE_SCRIPT.
    """

    def __init__(self, workers=2, script=MEASURE_SCRIPT):
        from playwright import async_api
        path = next(filter(None, map(shutil.which, BROWSERS)), None)
        if not path:
            fail(f"no browser in PATH; install one of: {', '.join(BROWSERS)}")
        tailwind = pathlib.Path(CACHE, "tailwind.min.css")
        css = tailwind.read_bytes() if tailwind.exists() else b""
        if sha256(css).hexdigest() != TAILWIND_SHA256:
            fail(f"no Tailwind 2.2.19 style sheet at {tailwind} (MANUAL.md, \"Frontend Design\")")
        self.sheet = style_sheet(css.decode())
        self.browsers = [Browser(async_api, path, script) for _ in range(workers)]
        self.idle = queue.LifoQueue()  # last in, first out, so that a light load starts few
        for browser in self.browsers:
            self.idle.put(browser)
        self.render = functools.lru_cache(256)(self.draw)

    def close(self):
        for browser in self.browsers:
            browser.stop()

    def draw(self, page):
        """Returns {"png", "height"} and what else `script` measures; may raise RenderError."""
        if not (page or "").strip():
            raise RenderError("no page")
        body = page.encode(errors="replace")  # it may contain lone surrogates
        browser = self.idle.get()
        try:
            return browser.render(body, self.sheet(page))
        finally:
            self.idle.put(browser)

    def render_pair(self, task, text):
        """Renders the last page in a text, and the task's reference; may raise RenderError."""
        try:
            reference = self.render(extract_page(task["ground_truth"]) or task["ground_truth"])
        except RenderError as e:
            raise RenderError(f"the reference: {e}") from None
        return self.render(extract_page(text)), reference


def extract_page(text):
    """Returns the last <html>...</html> in a text, else the last <body>...</body>, else ""."""
    for tag in ("html", "body"):
        for part in reversed(re.split(rf"(?i)(?=<{tag}\b)", text or "")[1:]):
            if end := re.search(rf"(?i)</{tag}\s*>", part):
                return part[:end.end()]
    return ""


# --- frontend: the likeness of two rendered pages -------------------------------------------------

def clip_likeness(path):
    """Returns likeness(page, other): the cosine similarity of two rendered pages' CLIP embeddings.

    With ViT-B/32 it is ColBench's reward. path: a directory or a hub name.
    """
    import torch
    from PIL import Image
    from transformers import CLIPImageProcessorPil, CLIPVisionModelWithProjection
    model = CLIPVisionModelWithProjection.from_pretrained(path, use_safetensors=True)
    processor = CLIPImageProcessorPil.from_pretrained(path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, lock = model.eval().to(device), threading.Lock()

    def likeness(*pages):
        for page in pages:
            if "clip" not in page:  # its embedding (d,)
                image = Image.open(io.BytesIO(page["png"])).convert("RGB")
                pixels = processor(image, return_tensors="pt")["pixel_values"].to(device)
                with lock, torch.no_grad():
                    page["clip"] = model(pixels).image_embeds[0].float().cpu()
        one, other = (page["clip"] for page in pages)
        return torch.cosine_similarity(one, other, dim=0).clamp(0, 1).item()
    return likeness


# --- command line ---------------------------------------------------------------------------------

def get_args(argv=None):
    p = parser(__doc__, usage=None)
    p.add_argument("command", choices=["grade", "check"], help="grade: add the reward to records; "
                   "check: drop tasks whose own reference does not get reward 1 in every run")
    p.add_argument("--rules", choices=["honest", "official"], default="honest",
                   help="official: verdicts of the released scorer")
    p.add_argument("--workers", type=positive, default=min(cpus(), 64),
                   help="number of answers or pages graded in parallel")
    p.add_argument("--clip", default="openai/clip-vit-base-patch32", metavar="MODEL",
                   help="CLIP model for the likeness of pages: a directory or a hub name")
    return p.parse_args(argv)


def grade_episodes(args, emit):
    """Adds the reward to records with a task and an answer; failed episodes stay as they are."""
    n_graded, broken = 0, set()
    records = read_records(sys.stdin, "answer", with_failed=True)
    for record, fields in grade_records(records, args):
        emit({name: x for name, x in record.items() if name not in GRADE_FIELDS} | fields)
        n_graded += "failed" not in record
        if reference_failed(fields):
            broken.add(task_id(record["task"]))
    say(f"graded {n_graded} answers")
    if broken:
        say(f"warning: the own reference of {len(broken)} tasks fails, so that no answer can "
            "have reward 1; drop them by colbench.py check")


def reference_failed(fields):
    """Whether the grader's fields say that the task's own reference fails."""
    texts = [fields.get("failure", ""), *fields.get("tests", {}).values()]
    return any(text.startswith(("the reference: ", "no expected value: ")) for text in texts)


def check_tasks(args, emit):
    """Drops tasks whose own reference does not get reward 1."""
    for record, fields in grade_records(read_records(sys.stdin), args, references=True):
        if fields["reward"] > 0.9999:  # allows for rounding in the likeness
            emit(record)
            continue
        failed = {name: text for name, text in fields.get("tests", {}).items() if text != "pass"}
        cause = failed or fields.get("failure", "its own reference does not get reward 1")
        say(f"task {task_id(record['task'])} dropped: {cause}")


COMMANDS = {"grade": grade_episodes, "check": check_tasks}


def main(args):
    COMMANDS[args.command](args, open_stdout())


if __name__ == "__main__":
    run(main, get_args())
