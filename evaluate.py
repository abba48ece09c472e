"""Evaluate systems on their graded episodes, and compare each one with the first.

    python evaluate.py base.jsonl rft.jsonl sweet.jsonl >> results.jsonl    # table on stderr
    python evaluate.py base=base0.jsonl,base1.jsonl sweet=sweet0.jsonl,sweet1.jsonl  # two seeds
    ... | python collect.py ... | python colbench.py grade | tee base.jsonl | python evaluate.py

    tests_passed  mean reward: share of hidden tests passed, or likeness of the web pages
    success       share of episodes with reward 1 (not for frontend tasks)
    pass^k        probability that k episodes of a task all succeed: C(solved, k) / C(episodes, k);
                  for k = 2, 4 and 8, if every task has k episodes
    unanswered    share of episodes that end without an answer
    not_drawn     frontend: share of episodes whose page, or reference page, can't be rendered
    turns, tokens number of agent messages per episode, and of tokens sampled for them
    wins          frontend: share of tasks where a system beats the first one; ties count half

Each figure is averaged over a task's episodes of all seeds, then over tasks: a task with more
episodes counts no more. 95 % intervals are by bootstrap over tasks, but exact (Clopper-Pearson) for
a share that is 0 in all tasks or 1 in all. The differences from the first system are paired: they
use only the tasks that both systems have.

Failed episodes are in no figure. A note counts them, and says what success would be if none, and if
all, of them were solved.

Left out on purpose: intervals over episodes, which are too narrow because episodes of a task are
alike; and p-values, because a difference's interval shows its size as well as its significance.
"""
# The sections: metrics of episodes and tasks; means and intervals; the table; the notes below it;
# reading the files.
from utils import fail, fail_on_error, open_stdout, parser, run, say, version

import json
import math
import os
import sys
from collections import Counter, defaultdict
from itertools import chain
from statistics import fmean
from typing import NamedTuple

import numpy as np

from colbench import (Seen, agent_messages, environment, read_records, settings, task_id,
                      task_kind)

COUNTS = "turns", "tokens"  # the metrics that are counts, not shares
# settings in which systems may differ; all others are conditions, which they should share
OF_AGENT = "model", "agent", "agent_model", "agent_params", "n_candidates", "candidates_share"


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [FILE | NAME=FILE,FILE,... ...] >> results.jsonl")
    p.add_argument("files", nargs="*", default=["-"], metavar="FILE | NAME=FILE,FILE,...",
                   help="one FILE per system, or NAME=FILE,FILE to pool seeds; default stdin")
    return p.parse_args(argv)


# --- systems and the metrics of their episodes ----------------------------------------------------

class System(NamedTuple):
    """A system to compare, with what is kept of its records."""
    name: str
    files: list  # one per seed
    tasks: dict  # {task id: {metric: mean over its episodes}}
    facts: dict  # fields of its result, see read_system


def episode_metrics(record):
    """Returns {metric: value} of one episode."""
    agent = agent_messages(record)
    metrics = {"tests_passed": record["reward"]}
    metrics |= environment(record["task"]).metrics(record)
    metrics["turns"] = len(agent)
    lengths = [len(m["token_ids"]) for m in agent if "token_ids" in m]
    lengths += [m["completion_tokens"] for m in agent if "completion_tokens" in m]
    if lengths:
        metrics["tokens"] = sum(lengths)
    return metrics


def task_means(episodes, most_k):
    """Returns {metric: mean} of a task's episodes, and their pass^k for k up to most_k."""
    means = {}
    for metric in dict.fromkeys(chain(*episodes)):
        values = [float(episode[metric]) for episode in episodes if metric in episode]
        means[metric] = fmean(values)  # whatever the order of lines
    solved = sum(episode.get("success") == 1 for episode in episodes)
    for k in (2, 4, 8):
        if k <= most_k:
            means[f"pass^{k}"] = math.comb(solved, k) / math.comb(len(episodes), k)
    return means


def metric_names(systems):
    """Returns the names of all systems' metrics, in the order in which they first occur."""
    names = {}
    for system in systems:
        for means in system.tasks.values():
            names |= dict.fromkeys(means)
    return list(names)


# --- means and intervals --------------------------------------------------------------------------

def values_of(system, metric, tasks):
    """Returns a (tasks,) array: the metric's mean of each task, NaN where it has none."""
    return np.array([system.tasks[task].get(metric, np.nan) for task in tasks])


def minus_first(system, first):
    """Returns the mean differences from the first system, on the tasks that both have."""
    common = [task for task in first.tasks if task in system.tasks]
    gaps = {metric: values_of(system, metric, common) - values_of(first, metric, common)
            for metric in ("success", "tests_passed")}
    gaps["wins"] = (1 + np.sign(gaps["tests_passed"].round(9))) / 2  # 0.1 + 0.2 ties 0.3
    return {"first": first.name, "tasks": len(common), **with_intervals(gaps, shares=["wins"])}


def with_intervals(arrays, shares):
    """Returns {metric: mean, metric_95: interval} of {metric: (tasks,) array}, without NaNs.

    Both are None if there are no values. shares: names of the metrics that are shares.
    """
    out = {}
    for metric, values in arrays.items():
        values = values[~np.isnan(values)]
        limits = interval(values, metric in shares)
        out[metric] = rounded(fmean(values)) if len(values) else None
        out[f"{metric}_95"] = [rounded(x) for x in limits] if limits else None
    return out


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
    means = [rng.choice(values, (100, len(values))).mean(1) for _ in range(20)]
    return tuple(np.percentile(means, (2.5, 97.5)))


def rounded(x):
    """Returns a number as it is written: with four digits, and never as -0.0."""
    return round(float(x), 4) + 0.0


def result(system, first, metrics):
    """Returns the JSON record of a system, with its differences from the first one.

    metrics: the names of all systems' metrics, so that all records have the same fields.
    """
    values = {metric: values_of(system, metric, system.tasks) for metric in metrics}
    shares = [metric for metric in metrics if metric not in COUNTS]
    out = {"system": system.name, "files": system.files, **system.facts,
           "tasks": len(system.tasks), "version": version(), **with_intervals(values, shares)}
    if system is not first:
        out["minus_first"] = minus_first(system, first)
    return out


# --- the table ------------------------------------------------------------------------------------

def table(results, metrics):
    """Returns aligned lines of text: column names, and a line per system."""
    rows = [row(r, results[0], metrics) for r in results]
    columns = [column for column in dict.fromkeys(chain(*rows))
               if any(cells.get(column, "-") != "-" for cells in rows)]
    labels = {label.partition(" ")[0] for r in results for label in r["rewards"]}
    reward_label = labels.pop() if len(labels) == 1 else "reward"  # e.g. "tests", "likeness"
    lines = [""] * (1 + len(rows))
    for column in columns:
        texts = [column.replace("tests passed", reward_label)]
        texts += [cells.get(column, "") for cells in rows]
        width = max(len(text) for text in texts)
        for i, text in enumerate(texts):
            lines[i] += text.ljust(width) if column == "system" else "  " + text.rjust(width)
    return [line.rstrip() for line in lines]


def row(r, first, metrics):
    """Returns {column name: text} of a system's result r. first: the first system's result."""
    cells = {"system": r["system"]}
    for metric in metrics:
        unit = "" if metric in COUNTS else " %"
        cells[metric.replace("_", " ") + unit] = cell(r, metric)
    cells |= {"episodes": str(r["episodes"]), "tasks": str(r["tasks"])}
    if "minus_first" in r:
        gaps = r["minus_first"]
        common = "" if same_tasks(r, first) else f" (common: {gaps['tasks']})"
        cells[f"success - first{common}"] = cell(gaps, "success", "+")
        cells[f"tests passed - first{common}"] = cell(gaps, "tests_passed", "+")
        if "success" not in metrics:
            cells[f"wins %{common}"] = cell(gaps, "wins")
    return cells


def cell(r, metric, sign=""):
    """Formats a mean of 0.253 with its interval as "25.3 [21.0, 29.6]", and None as "-"."""
    mean, limits = r[metric], r[f"{metric}_95"]
    if mean is None:
        return "-"
    scale = 1 if metric in COUNTS else 100
    text = f"{scale * mean:{sign}.1f}"
    if limits and shows_interval(metric):
        low, high = limits
        text += f" [{scale * low:{sign}.1f}, {scale * high:{sign}.1f}]"
    return text


def shows_interval(metric):
    return metric in ("tests_passed", "success", "wins") or metric.startswith("pass^")


def same_tasks(r, first):
    """Returns whether a result is of the same tasks as the first system's."""
    return r["minus_first"]["tasks"] == r["tasks"] == first["tasks"]


# --- the notes: what the table shows, and what makes a comparison unfair --------------------------

def notes(results):
    """Returns the lines below the table."""
    graders = sorted({name for r in results for name in r["reward_by"]})
    parts = ["[95 % bootstrap intervals over tasks, exact ones for 0 and 100 %]"]
    if graders:
        parts.append(f"graded by {' and '.join(graders)}")
    parts += task_notes(results)
    if len(graders) > 1:
        parts.append("NOT COMPARABLE: different graders")
    lines = ["; ".join(parts)]
    if differ := different_conditions(results):
        lines.append(f"NOT THE SAME CONDITIONS: {', '.join(differ)}")
    return lines + [failure_note(r) for r in results if r["failed"]]


def failure_note(r):
    note = f"{r['system']} lacks {r['failed']} of its {r['episodes'] + r['failed']} episodes"
    if r["success_bounds"]:
        low, high = r["success_bounds"]
        note += f": with them, success would be between {100 * low:.1f} and {100 * high:.1f} %"
    return note


def task_notes(results):
    """Returns notes about the systems that have other tasks than the first one."""
    first, *others = results
    apart = [r["system"] for r in others if r["minus_first"]["tasks"] == 0]
    parts = []
    if any(r["minus_first"]["tasks"] > 0 and not same_tasks(r, first) for r in others):
        parts.append("NOT THE SAME TASKS: compare only the differences")
    if apart:
        parts.append(f"NO COMMON TASK with {first['system']}: {', '.join(apart)}")
    return parts


def different_conditions(results):
    """Returns texts such as "max_turns 6 or 10" of the settings in which systems differ.

    A system whose records do not have a setting is not known to differ.
    """
    texts = []
    for name in dict.fromkeys(chain(*(r["conditions"] for r in results))):
        values = [r["conditions"][name] for r in results if name in r["conditions"]]
        if any(of_system != values[0] for of_system in values):
            different = dict.fromkeys(str(value) for value in chain(*values))
            texts.append(f"{name} {' or '.join(different)}")
    return texts


# --- reading the files ----------------------------------------------------------------------------

def named_systems(args):
    """Returns the systems of the command line, FILE, whose stem is the name, or NAME=FILE,FILE."""
    systems, tasks = [], {}  # tasks: of all systems, see colbench.Seen
    for arg in args:
        name, equals, files = arg.partition("=")
        if not equals or "/" in name:  # a file such as runs/lr=1/test.jsonl
            name, files = os.path.splitext(os.path.basename(arg))[0], arg
        systems.append(read_system("stdin" if name == "-" else name, files.split(","), tasks))
    return systems


class Episode(NamedTuple):
    """What is kept of a record."""
    key: tuple         # (file, seed, task id, sample)
    settings: dict     # the others of its `meta`, and its task's kind
    metrics: dict      # {metric: value}; None if the episode failed
    reward_name: str   # such as "tests passed"
    reward_by: str     # the grader


def read_system(name, files, tasks):
    """Returns the System of these files. tasks: of all systems, see colbench.Seen."""
    found = [read_episode(file, record) for file, record in read_files(files, tasks)]
    episodes = [e for e in found if e.metrics]
    failed = {e.key for e in found} - {e.key for e in episodes}  # that no later run has repeated
    if not episodes:
        fail(f"all episodes of {name} failed")
    refuse_two_systems(episodes)
    metrics = defaultdict(list)  # {task id: [{metric: value} of each episode]}
    for episode in episodes:
        _, _, task, _ = episode.key
        metrics[task].append(episode.metrics)
    most_k = min(sum("success" in e for e in of_task) for of_task in metrics.values())
    means = {task: task_means(metrics[task], most_k) for task in sorted(metrics)}
    conditions = {name: distinct(e.settings[name] for e in episodes if name in e.settings)
                  for name in dict.fromkeys(chain(*(e.settings for e in episodes)))
                  if name not in OF_AGENT}
    facts = {"rewards": distinct(e.reward_name for e in episodes),
             "reward_by": distinct(e.reward_by for e in episodes if e.reward_by),
             "conditions": conditions, "episodes": len(episodes), "failed": len(failed),
             "success_bounds": success_bounds(metrics, failed)}
    return System(name, files, means, facts)


def success_bounds(metrics, failed):
    """Returns what success would be if none, and if all, of the failed episodes were solved.

    Like success, these are means over tasks. None if some episodes have no success.
    """
    if not all("success" in episode for episode in chain(*metrics.values())):
        return None
    n_failed = Counter(task for _, _, task, _ in failed)

    def success_if(value):
        return fmean(fmean([e["success"] for e in metrics[task]] + n_failed[task] * [value])
                     for task in {*metrics, *n_failed})

    return [rounded(success_if(0)), rounded(success_if(1))]


def read_episode(file, record):
    task = record["task"]
    made_with = {"environment": task_kind(task), **settings(record.get("meta", {}))}
    key = file, made_with.pop("seed", 0), task_id(task), record.get("sample")
    metrics = None if "failed" in record else episode_metrics(record)
    return Episode(key, made_with, metrics, environment(task).reward_name, record.get("reward_by"))


def refuse_two_systems(episodes):
    """Exits if a sample of a task is there with different settings."""
    settings_of = {}  # {key: settings}
    for e in episodes:
        file, _, task, sample = e.key
        if sample is not None and settings_of.setdefault(e.key, e.settings) != e.settings:
            fail(f"{file} has episodes of two systems, such as sample {sample} of the task "
                 f"{task}: split it (two seeds: NAME=FILE,FILE)")


def distinct(values):
    """Returns the different ones of values that JSON can hold, such as dicts, in a fixed order."""
    texts = {json.dumps(value, sort_keys=True) for value in values}
    return [json.loads(text) for text in sorted(texts)]


def read_files(files, tasks):
    """Yields (file, record) of a system's records. tasks: of all systems, see colbench.Seen."""
    seen = Seen(tasks)
    for path in files:
        source = "stdin" if path == "-" else path
        with fail_on_error(source):
            stream = sys.stdin if path == "-" else open(path, encoding="utf-8")
        for record in read_records(stream, "dialogue_history", "reward", source=source, seen=seen,
                                   with_failed=True):
            yield source, record


def main(args):
    emit, systems = open_stdout(), named_systems(args.files)
    metrics = metric_names(systems)
    results = [result(system, systems[0], metrics) for system in systems]
    for r in results:
        emit(r)
    for text in table(results, metrics) + notes(results):
        say(text)


if __name__ == "__main__":
    run(main, get_args())
