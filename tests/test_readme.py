"""The README's and the docstrings' commands use flags that exist; .ci/run runs the quickstart and the tests themselves."""
import re
import shlex
import subprocess
import sys
from importlib import import_module

import pytest

from conftest import CPU, ROOT

SCRIPTS = ("collect", "train_critic", "train_policy", "evaluate", "colbench")


def commands(text):
    """[(script, argv)] of every `[python] script.py ...` in a text, ended by a pipe, a redirection, or the line."""
    text = re.sub(r"\$\(\(.*?\)\)", "1", text)
    text = re.sub(r"\$\([^()]*\)", "X", re.sub(r"\\\n|(?<=\|)\n", " ", text))
    for line in text.splitlines():
        for part in re.split(r"\s[|]\s*|\s(?:[<>]|>>)\s|;|&&|\s#|\)", line + " "):
            found = re.search(rf"\b({'|'.join(SCRIPTS)})\.py\s+(.*)", part + " ")
            if found and not part.lstrip().startswith(("|", "`")):
                argv = [a for a in shlex.split(found[2]) if a not in ('"$@"', "$@", "...", "…")]
                # a variable is some flag's value, or else several flags
                yield found[1], [re.sub(r"^\$\w+$", "1", a) for before, a in zip(["-", *argv], argv)
                                 if before.startswith("-") or not a.startswith("$")]


def all_commands():
    readme = open(f"{ROOT}/README.md", encoding="utf-8").read()
    for block in re.findall(r"```bash\n(.*?)```", readme, re.S):
        yield from commands(block.replace("play()", "# play()"))
    for name in SCRIPTS:
        yield from commands(import_module(name).__doc__)


@pytest.mark.parametrize("script, argv", list(all_commands()), ids=lambda x: x if isinstance(x, str) else " ".join(x)[:60])
def test_commands_parse(script, argv):
    if script in ("train_critic", "train_policy") and "--out" not in argv:
        argv = [*argv, "--out", "runs/x"]  # an excerpt of a command
    import_module(script).get_args(argv)


def benchmark(name, flags):
    """Runs a benchmark on something tiny."""
    command = [sys.executable, f"{ROOT}/tests/bench_{name}.py", *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=CPU)
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.parametrize("name, flags", [
    ("grade", "--rounds 1 --tasks 3"), ("grade", "--memory 1 --tasks 2"), ("memory", "--records 20 grade"),
    ("train", "--repeats 1 --shape tiny"),  # fails where losses or gradients are not the official procedure's
    ("collect", "--episodes 4 --batch 4 --delay 0.01 --max_tokens 8 --max_turns 2 --repeats 1")])
def test_the_benchmarks_run(name, flags):
    benchmark(name, flags)


def test_there_are_commands():
    found = [script for script, _ in all_commands()]
    assert all(found.count(script) >= 2 for script in SCRIPTS), found
