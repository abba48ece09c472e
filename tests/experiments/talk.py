"""Lets you play the human in a terminal.

    python tests/experiments/talk.py --model runs/sweet
    python tests/experiments/talk.py --model runs/sweet --critic runs/critic < tasks.jsonl
    python tests/experiments/talk.py --model runs/sweet --candidates 16 < tasks.jsonl > mine.jsonl

For each task you read what you want, which the agent does not see, and reply to the agent's
messages. Then you see its final answer with the grader's verdicts and, with --critic, the advantage
of each message. Without tasks on stdin they are those of runs/tasks.jsonl. First you see replies
from --episodes, because a small agent understands only replies like those that it was trained on.
If stdout is a file or a pipe, it gets the graded records. Other flags go to collect.py, for example
--temperature 0.

One collect.py runs all episodes sequentially, so that the model is loaded once. It asks this file's
reply(), which asks main() over a socket, because only main() has the terminal. The same socket is
collect.py's stdout, so that main() sees a finished record, and grades it, before the next dialogue
begins. Web pages are left out: main() can't show them.
"""
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap

with contextlib.suppress(ImportError):
    import readline  # lets input() edit lines

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
sys.path.insert(0, ROOT)
from colbench import agent_messages, environment, hidden_information, read_records
from utils import fail, fail_on_error, inline, open_stdout, parser

EPISODES = "runs/train.jsonl"  # where the quickstart writes them
SOCKET = "TALK_SOCKET"  # environment variable with the descriptor of collect.py's end
STAGES = contextlib.ExitStack()  # kills the scripts that still run


def reply(task, history):
    """Returns the user's reply, for collect.py. main(), in another process, reads it."""
    with open(int(os.environ[SOCKET]), "r+b", buffering=0, closefd=False) as main_end:
        question = {"task": task, "dialogue_history": history}
        main_end.write(json.dumps(question).encode() + b"\n")
        return json.loads(main_end.readline() or fail("talk.py has ended"))


def ask(task):
    """Returns the user's reply, which is not empty, as JSON. EOFError: Ctrl-D."""
    text, limit = "", environment(task).reply_chars
    while not text:
        text = input("you    ").strip()
    if len(text) > limit:
        show(f"(the agent reads the first {limit} characters)")
    return json.dumps(text).encode() + b"\n"


def show(text, label=""):
    """Prints a text behind a label, wrapped at words; control characters become "?"."""
    width = max(20, min(100, shutil.get_terminal_size().columns) - len(label))
    rows = []
    for line in text.expandtabs(4).splitlines():
        hang = " " * (len(line) - len(line.lstrip()) + 2)  # so that wrapped code stays readable
        rows += textwrap.wrap(inline(line), width, subsequent_indent=hang,
                              break_long_words=False, break_on_hyphens=False) or [""]
    print(label + ("\n" + " " * len(label)).join(rows))


def example_replies(path):
    """Returns up to three (question, reply) of the first episodes in a file, none repeated."""
    found = {}  # {reply: question}
    with fail_on_error(f"--episodes {path}"):
        stream = open(path, "rb")
    with stream:
        for record in itertools.islice(read_records(stream, "dialogue_history", source=path), 20):
            history = record["dialogue_history"]
            for question, reply in zip(history[1:], history[2:]):
                if question["role"] == "assistant" and reply["role"] == "user":
                    found.setdefault(reply["content"], question["content"])
    return [(question, reply) for reply, question in found.items()][:3]


def show_grade(record):
    tests = record.get("tests", {})
    n_passed = sum(verdict == "pass" for verdict in tests.values())
    passed = f": {n_passed} of {len(tests)} tests passed" if tests else ""  # another kind has none
    note = "" if record["answered"] else " (the agent submitted no answer)"
    show(f"\nreward {record['reward']:.2f}{passed}{note}")
    for name, verdict in tests.items():
        show(f"{record['task']['test_cases'][name]}  {verdict}", "    ")


def show_advantages(record):
    for message in agent_messages(record):
        first, *more = message["content"].splitlines() or [""]
        value = message.get("advantage", float("nan"))  # a turn may be too long for the critic
        show(first + " ..." * bool(more), f"{value:+10.3f}  ")


def start(name, *flags, **streams):
    """Starts a script with pipes for stdin and stdout, unless given, and a file for stderr."""
    log = tempfile.TemporaryFile()  # on the terminal a progress bar would disturb the dialogue
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, **streams}
    stage = subprocess.Popen([sys.executable, f"{ROOT}/{name}", *flags], **streams)
    stage.name, stage.log = name, log
    STAGES.callback(stage.kill)
    return stage


def finish(stage, record=None):
    """Returns the record with the fields that a script adds. If it fails, shows why and exits."""
    out, _ = stage.communicate(record and json.dumps(record).encode())
    if stage.returncode == -signal.SIGINT:  # Ctrl-C, which this process gets, too
        raise KeyboardInterrupt
    if stage.returncode:
        stage.log.seek(0)
        *lines, last = stage.log.read().decode(errors="replace").splitlines() or ["it was killed"]
        lines = [line for line in lines if " failed: " in line]  # single episodes
        sys.exit("\n".join([*lines, f"{stage.name}: {last.removeprefix(stage.name + ': ')}"]))
    return out and json.loads(out)


def main(args, flags):
    if args.critic:
        from train_critic import read_critic  # it imports torch, which takes seconds
        if not read_critic(args.critic):  # fails here rather than after the first dialogue
            fail(f"--critic {args.critic} is no critic that train_critic.py has trained")
    with fail_on_error("talk.py needs a terminal"):
        terminal = os.open("/dev/tty", os.O_RDWR)
    stream, name = sys.stdin, "stdin"
    if stream.isatty():
        name = "runs/tasks.jsonl"
        with fail_on_error(f"no tasks on stdin, and {name} can't be read"):
            stream = open(name, "rb")
    tasks = b""
    for record in read_records(stream, source=name):
        if environment(record["task"]).shows_pages:
            fail(f"{name} has tasks of web pages, which talk.py can't show")
        tasks += json.dumps({"task": record["task"]}).encode() + b"\n"
    examples = []
    if args.episodes or os.path.exists(EPISODES):
        args.episodes = args.episodes or EPISODES
        examples = example_replies(args.episodes)
    emit = open_stdout() if not sys.stdout.isatty() else lambda record: None
    for fd in (0, 1):  # input() edits lines only of these
        os.dup2(terminal, fd)
    sys.stdin, sys.stdout = (open(fd, mode, encoding="utf-8", errors="replace")
                             for fd, mode in enumerate("rw"))

    ours, theirs = socket.socketpair()
    collect = start("collect.py", *flags, "--model", args.model, "--human", __file__,
                    "--concurrency", "1", stdout=theirs, pass_fds=[theirs.fileno()],
                    env={**os.environ, SOCKET: str(theirs.fileno())})
    theirs.close()
    if examples:
        show(f"\nReplies in {args.episodes}, to imitate:")
    for question, reply in examples:
        show(question, "agent  ")
        show(reply, "human  ")
    show(f"\nloading {args.model} (Ctrl-C: leave)")
    with contextlib.suppress(ConnectionError):  # collect.py has failed
        with collect.stdin:
            collect.stdin.write(tasks)
        talk(ours, args.critic, emit)
    finish(collect)


def talk(collect, critic, emit):
    """Shows what collect.py sends: dialogues that need a reply, and finished episodes."""
    number, shown, scoring = 0, [], None  # shown: the part of a dialogue that is on the screen
    for line in collect.makefile("rb"):
        record = json.loads(line)
        task, history = record["task"], record["dialogue_history"]
        if not shown or history[:len(shown)] != shown:  # a new episode
            if number:
                input("\nEnter: the next task. Ctrl-D: leave. ")
            number, shown = number + 1, history[:1]
            show(f"\n--- task {number}: what you want ---\n{task['problem_description'].strip()}\n")
            show("\n--- the reference, which the agent does not see ---\n"
                 f"{hidden_information(task).strip()}\n\n")
            if critic and not scoring:  # it loads while you talk
                scoring = start("train_critic.py", "--score", critic)
        for message in agent_messages({"dialogue_history": history[len(shown):]}):
            show(message["content"], "agent  ")
        shown = history
        if "answer" not in record:  # reply() sent it
            collect.sendall(ask(task))
            continue
        record = finish(start("colbench.py", "grade"), record)
        show_grade(record)
        try:
            if critic:
                show("\nadvantage of each message:")
                record = finish(scoring, record)
                show_advantages(record)
        finally:
            emit(record)  # even if the critic fails: the dialogue was your work
        shown, scoring = [], None


if __name__ == "__main__":
    P = parser(__doc__, "%(prog)s --model MODEL [--critic RUN] [flags of collect.py] < tasks.jsonl")
    P.add_argument("--model", required=True, help="the agent")
    P.add_argument("--critic", help="a finished run of train_critic.py; it reads the reference")
    P.add_argument("--episodes", metavar="FILE", help="records of episodes that the agent was "
                   "trained on, to show the human's replies in them; default: "
                   f"{EPISODES}, if it exists")
    try:
        with STAGES:
            main(*P.parse_known_args())
    except EOFError:  # Ctrl-D
        print()
    except KeyboardInterrupt:
        print()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)  # ends an enclosing shell loop, too
