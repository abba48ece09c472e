"""Evaluate systems on their graded episodes, and compare each one with the first.

    python evaluate.py base.jsonl rft.jsonl sweet.jsonl >> results.jsonl    # table on stderr
    python evaluate.py base=base0.jsonl,base1.jsonl sweet=sweet0.jsonl,sweet1.jsonl  # two seeds
    ... | python collect.py ... | python colbench.py grade | tee base.jsonl | python evaluate.py

    reward        share of hidden tests passed, or likeness of the web pages
    success       share of episodes with reward 1 (not for frontend tasks)
    unanswered    share of episodes whose last message, which is graded anyway, has no ANSWER
    not_drawn     frontend: share of episodes whose page, or reference page, can't be rendered
    turns, tokens number of agent messages per episode, and of tokens sampled for them; there is no
                  number of tokens if that of a single message is unknown
    pass^k        probability that k episodes of a task all succeed: C(solved, k) / C(episodes, k);
                  for k = 2, 4 and 8, if every task has k episodes
    distinct      number of different dialogues: greedy agents and caches repeat themselves
    failed        number of failed episodes of which no other try (--resume) in their file was
                  successful; they count in no other number
    usage         in the JSON: tokens that the episodes have cost, failed ones included
    wins          frontend: share of tasks where a system's reward is above the first one's; ties
                  count half

A new share is one line in `metrics` of an Environment (colbench.py), another number one in COUNTS.
Both get their mean, interval and column.

Each mean is over a task's episodes of all seeds, then over tasks: a task with more episodes counts
no more. 95 % intervals are by bootstrap over tasks, but exact (Clopper-Pearson) for a share that is
0 in all tasks or 1 in all. The differences from the first system ("minus first") and wins use only
the tasks that both systems have ("common"). Below the table is a line for each setting that
differs. In the JSON a metric X has its interval as X_95, and its difference as X_minus_first.

Left out on purpose: intervals over episodes, which are too narrow because episodes of a task are
alike; intervals over training seeds, which are few; and p-values, because a difference's interval
shows its size as well as its significance.
"""
import math
import os
import sys
from collections import Counter, defaultdict
from statistics import fmean
from typing import NamedTuple

import numpy as np

from colbench import (agent_messages, environment, message_texts, read_records, settings,
                      task_id, task_kind)
from utils import digest, fail, fail_on_error, open_stdout, parser, run, say, version

WHICH_SYSTEM = "model", "agent", "agent_model"  # the settings that tell systems apart


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [FILE | NAME=FILE,FILE,... ...] >> results.jsonl")
    p.add_argument("files", nargs="*", default=["-"], metavar="FILE | NAME=FILE,FILE,...",
                   help="one FILE per system, or NAME=FILE,FILE to pool seeds; default stdin")
    return p.parse_args(argv)


# --- metrics of episodes and tasks ----------------------------------------------------------------

def n_tokens(message):
    """Returns the number of tokens of a message, NaN if it is unknown."""
    if "token_ids" in message:
        return len(message["token_ids"])
    return message.get("completion_tokens", math.nan)


COUNTS = {  # the metrics that are no shares: {name: function of a record}
    "turns": lambda record: len(agent_messages(record)),
    "tokens": lambda record: sum(map(n_tokens, agent_messages(record)))}


def episode_metrics(record):
    """Returns {metric: value} of one episode."""
    return {"reward": record["reward"], **environment(record["task"]).metrics(record),
            **{name: count(record) for name, count in COUNTS.items()}}


def task_means(episodes, most_k):
    """Returns {metric: mean} of a task, and its pass^k for k up to most_k.

    episodes: {metric: value} of each. A mean is over those that have the metric.
    """
    names = dict.fromkeys(name for e in episodes for name in e)
    means = {name: fmean(float(e[name]) for e in episodes if name in e) for name in names}
    if "success" in means:
        solved = sum(e.get("success") == 1 for e in episodes)
        for k in (2, 4, 8):
            if k <= most_k:
                means[f"pass^{k}"] = math.comb(solved, k) / math.comb(len(episodes), k)
    return means


# --- reading the files ----------------------------------------------------------------------------

class System(NamedTuple):
    """A system to compare."""
    tasks: dict  # {task id: {metric: mean over its episodes}}
    fields: dict  # those of its result that are no metrics


class Outcome(NamedTuple):
    """What is kept of an episode's record."""
    task: str        # its id
    key: tuple       # (file, seed, task, sample): a failed episode and a later try share it
    settings: dict   # {setting: value}: how it was made
    metrics: dict    # {metric: value}; None if the episode failed
    dialogue: str    # a hash of its texts
    usage: dict      # {what it has cost: number}, such as {"human_prompt_tokens": 812}


def name_and_files(arg):
    """Returns (name, files) of NAME=FILE,FILE, or of FILE, which is named by its path."""
    if "=" in arg and not os.path.exists(arg):
        name, files = arg.split("=", 1)
        return name, files.split(",")
    return "stdin" if arg == "-" else os.path.splitext(arg)[0], [arg]


def read_system(name, files, tasks):
    """Returns the System of these files. tasks: those of all systems, see read_records."""
    if len({*files}) < len(files):
        fail(f"{name}: give each file only once")
    read = [e for path in files for e in read_file(path, tasks)]
    episodes = [e for e in read if e.metrics]
    usage = Counter()
    for e in read:
        usage.update(e.usage)
    metrics = defaultdict(list)  # {task id: [{metric: value} of each episode]}
    for e in episodes:
        metrics[e.task].append(e.metrics)
    if not metrics:
        fail(f"{name} has only failed episodes")
    fewest = min(len(of_task) for of_task in metrics.values())
    means = {task: task_means(metrics[task], most_k=fewest) for task in sorted(metrics)}
    fields = {"system": name, "files": files, "version": version(),
              "settings": all_settings(episodes),
              "episodes": len(episodes),
              "distinct": len({(e.task, e.dialogue) for e in episodes}),
              "failed": len({e.key for e in read} - {e.key for e in episodes}),
              "tasks": len(means),
              "usage": usage}
    return System(means, fields)


def read_file(path, tasks):
    """Returns [Outcome] of a file; exits if they are of two systems. tasks: see read_system."""
    source = "stdin" if path == "-" else path
    with fail_on_error(source):
        stream = sys.stdin if path == "-" else open(path, encoding="utf-8")
    records = read_records(stream, "dialogue_history", "reward", source=source, tasks=tasks,
                           with_failed=True)
    episodes = [read_episode(source, record) for record in records]
    values = all_settings(episodes)
    for name in WHICH_SYSTEM:
        if len(values.get(name, [])) > 1:
            fail(f"{source} has episodes of two systems, with {name} {in_words(values[name])}: "
                 "split it (two seeds: NAME=FILE,FILE)")
    return episodes


def read_episode(file, record):
    """Returns the Outcome of a record. The kind of task and the grader are settings, too."""
    task = record["task"]
    of_episode = {"environment": task_kind(task), **settings(record.get("meta", {}))}
    key = file, of_episode.get("seed"), task_id(task), record.get("sample")
    if "reward_by" in record:
        of_episode["reward_by"] = record["reward_by"]
    metrics = dialogue = None
    if "failed" not in record:
        metrics = episode_metrics(record)
        dialogue = digest(message_texts(record["dialogue_history"]))
    return Outcome(task_id(task), key, of_episode, metrics, dialogue, record.get("usage", {}))


def all_settings(episodes):
    """Returns {setting: [its different values, sorted]}."""
    found = defaultdict(list)
    for e in episodes:
        for name, value in e.settings.items():
            if value not in found[name]:
                found[name].append(value)
    return {name: sorted(found[name], key=str) for name in sorted(found)}


def in_words(values):
    return " and ".join(map(str, values))


# --- means, differences and their intervals -------------------------------------------------------

def result(system, first, metrics):
    """Returns the JSON record of a system. metrics: the names of all systems' metrics."""
    out = dict(system.fields)
    for metric in metrics:
        values = [means[metric] for means in system.tasks.values() if metric in means]
        out |= mean_and_interval(metric, values, is_share=metric not in COUNTS)
    if system is not first:
        out |= minus_first(system, first, metrics)
    return out


def minus_first(system, first, metrics):
    """Returns the mean differences from the first system, on the tasks that both have."""
    pairs = [(means, first.tasks[task]) for task, means in system.tasks.items()
             if task in first.tasks]
    out = {"first": first.fields["system"], "common": len(pairs)}
    for metric in metrics:
        gaps = [ours[metric] - theirs[metric] for ours, theirs in pairs
                if metric in ours and metric in theirs]
        out |= mean_and_interval(f"{metric}_minus_first", gaps, is_share=False)
        if metric == "reward":  # 0.1 + 0.2 ties 0.3
            wins = [0.5 if abs(gap) < 1e-9 else float(gap > 0) for gap in gaps]
            out |= mean_and_interval("wins", wins, is_share=True)
    return out


def mean_and_interval(name, values, is_share):
    """Returns {name: mean, name_95: interval} of the tasks' values; None for what is unknown."""
    mean = fmean(values) if values else math.nan
    if math.isnan(mean):
        return {name: None, f"{name}_95": None}
    limits = interval(np.array(values), is_share)
    return {name: rounded(mean), f"{name}_95": limits and [rounded(limit) for limit in limits]}


def interval(values, is_share):
    """Returns the 95 % interval of the mean of (tasks,) values; None if there is none.

    It is by bootstrap, which needs two values. If all values of a share are 0, or all 1, that would
    have no width, so then it is the exact interval of a binomial share (Clopper-Pearson).
    """
    if is_share and set(values) in ({0}, {1}):
        width = 1 - 0.025 ** (1 / len(values))
        return (0, width) if values[0] == 0 else (1 - width, 1)
    if len(values) < 2:
        return None
    rng = np.random.default_rng(0)
    means = rng.choice(values, (2000, len(values))).mean(1)
    return tuple(np.percentile(means, (2.5, 97.5)))


def rounded(x):
    """Returns a number as it is written: with four digits, and never as -0.0."""
    return round(float(x), 4) + 0.0


# --- the table ------------------------------------------------------------------------------------

def table(results, metrics):
    """Returns aligned lines of text: headings, and a line per system.

    A column that is unknown for all systems is left out.
    """
    columns = [("system", "")]  # (field of the results, its format: see cell)
    columns += [(metric, ".1f" if metric in COUNTS else ".1%") for metric in metrics]
    columns += [(count, "") for count in ("episodes", "distinct", "failed", "tasks")]
    columns += [("success_minus_first", "+.1%"), ("reward_minus_first", "+.1%"), ("common", "")]
    if "success" not in metrics:  # frontend
        columns.append(("wins", ".1%"))
    lines = [""] * (1 + len(results))
    for field, form in columns:
        texts = [cell(r, field, form) for r in results]
        if {*texts} == {"-"}:
            continue
        texts.insert(0, field.replace("_", " ") + (" %" if "%" in form else ""))
        width = max(map(len, texts))
        for i, text in enumerate(texts):
            lines[i] += text.ljust(width) if field == "system" else "  " + text.rjust(width)
    return lines


def cell(r, field, form):
    """Returns the text of a result's field, "-" if it is unknown. A share has its interval, too.

    form: as of format(); with ".1%" 0.253 is "25.3 [21.0, 29.6]".
    """
    if r.get(field) is None:
        return "-"
    if "%" not in form:
        return format(r[field], form)
    limits = r[f"{field}_95"] or []
    mean, *limits = [format(x, form).removesuffix("%") for x in (r[field], *limits)]
    return f"{mean} [{', '.join(limits)}]" if limits else mean


def notes(results):
    """Returns the lines below the table, such as one for each setting that differs."""
    first, *others = results
    lines = ["[means and 95 % intervals over tasks]"]
    if "reward_by" in first["settings"]:
        lines[0] += f" graded by {in_words(first['settings']['reward_by'])}"
    if any({r["tasks"], r["common"]} != {first["tasks"]} for r in others):
        lines.append("NOT THE SAME TASKS: only the differences compare, which are of common ones")
    for name in sorted({name for r in results for name in r["settings"]} - {*WHICH_SYSTEM, "seed"}):
        known = [(r["system"], r["settings"][name]) for r in results if name in r["settings"]]
        values = [value for _, of_system in known for value in of_system]
        if any(value != values[0] for value in values):
            texts = [f"{system} {in_words(of_system)}" for system, of_system in known]
            lines.append(f"NOT THE SAME {name}: {', '.join(texts)}")
    return lines


# --- the program ----------------------------------------------------------------------------------

def main(args):
    emit, tasks = open_stdout(), {}
    systems = [read_system(*name_and_files(arg), tasks) for arg in args.files]
    metrics = list(dict.fromkeys(metric for system in systems for means in system.tasks.values()
                                 for metric in means))
    results = [result(system, systems[0], metrics) for system in systems]
    for r in results:
        emit(r)
    for line in table(results, metrics) + notes(results):
        say(line)


if __name__ == "__main__":
    run(main, get_args())
