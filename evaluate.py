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

An episode that failed has no record. A run's first record lists what the run was asked for. If that
is there, the table says how many episodes are missing, and `success_bounds` what success would be
if none, and if all, of these were solved.

Left out on purpose: intervals over episodes, which are too narrow because episodes of a task are
alike; and p-values, because a difference's interval shows its size as well as its significance.
"""
# The sections: metrics of episodes and tasks; means and intervals; the table; the notes below it;
# reading the files, and which episodes are missing.
from utils import fail, fail_on_error, open_stdout, parser, private_copy, run, say, version

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
# settings in `meta` that systems should share: all of collect.py's but the agent's and the seed
CONDITIONS = ("human", "human_model", "human_params", "prompts", "max_turns", "max_tokens",
              "temperature", "top_p", "thinking", "best_of", "critic", "logprob_weight")


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [flags] [FILE | NAME=FILE,FILE,... ...] >> results.jsonl")
    p.add_argument("files", nargs="*", default=["-"], metavar="FILE | NAME=FILE,FILE,...",
                   help="one FILE per system, or NAME=FILE,FILE to pool seeds; default stdin")
    return p.parse_args(argv)


# --- systems and the metrics of their episodes ----------------------------------------------------

class System:
    """A system to compare, with what is kept of its records. read_system makes one."""

    def __init__(self, name, files):
        self.name, self.files = name, files  # files: one per seed
        self.tasks = {}                      # {task id: {metric: mean over its episodes}}
        self.n_episodes = 0
        self.missing = None                  # how many episodes are missing; None: not known
        self.success_bounds = None           # see there
        self.reward_labels = set()           # such as "tests passed"
        self.graders = set()                 # what the records' reward_by names
        self.conditions = defaultdict(set)   # {setting: its values as JSON}

    def add_conditions(self, record):
        """Adds what the record's reward depends on, besides the agent."""
        self.reward_labels.add(environment(record["task"]).reward_name)
        if "reward_by" in record:
            self.graders.add(record["reward_by"])
        of_record = {"environment": task_kind(record["task"])}
        made_with = settings(record.get("meta", {}))
        of_record |= {name: made_with[name] for name in CONDITIONS if name in made_with}
        for name, value in of_record.items():
            self.conditions[name].add(json.dumps(value, sort_keys=True))


def episode_metrics(record):
    """Returns {metric: value} of one episode."""
    agent = agent_messages(record)
    metrics = {"tests_passed": record["reward"]}
    metrics |= environment(record["task"]).metrics(private_copy(record))
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
    all_means = chain(*(system.tasks.values() for system in systems))
    return list(dict.fromkeys(chain(*all_means)))


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
    conditions = {name: [json.loads(text) for text in sorted(texts)]
                  for name, texts in system.conditions.items()}
    out = {"system": system.name, "files": system.files, "rewards": sorted(system.reward_labels),
           "reward_by": sorted(system.graders), "conditions": conditions,
           "episodes": system.n_episodes, "missing": system.missing,
           "success_bounds": system.success_bounds, "tasks": len(system.tasks),
           "version": version(),
           **with_intervals(values, shares=[x for x in metrics if x not in COUNTS])}
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
        if gaps["tasks"] == r["tasks"] == first["tasks"]:
            of_tasks = ""  # both have just these
        elif gaps["tasks"] == 1:
            of_tasks = ", 1 task"
        else:
            of_tasks = f", {gaps['tasks']} tasks"
        cells[f"success - first{of_tasks}"] = cell(gaps, "success", "+")
        cells[f"tests passed - first{of_tasks}"] = cell(gaps, "tests_passed", "+")
        if "success" not in metrics:
            cells[f"wins %{of_tasks}"] = cell(gaps, "wins")
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


# --- the notes: what the table shows, and what makes a comparison unfair --------------------------

def notes(systems, results, metrics):
    """Returns the lines below the table."""
    graders = set(chain(*(system.graders for system in systems)))
    parts = [interval_note(results, metrics)]
    if graders:
        parts.append(f"graded by {' and '.join(sorted(graders))}")
    parts += task_notes(systems)
    if len(graders) > 1:
        parts.append("NOT COMPARABLE: different graders")
    lines = ["; ".join(parts)]
    if differ := different_conditions(systems):
        lines.append(f"NOT THE SAME CONDITIONS: {', '.join(differ)}")
    return lines + [missing_note(system) for system in systems if system.missing]


def interval_note(results, metrics):
    shown = [metric for metric in metrics if shows_interval(metric)]
    if any(r[metric] in (0, 1) for r in results for metric in shown):
        return "[95 % bootstrap intervals over tasks, exact ones for 0 and 100 %]"
    return "[95 % bootstrap intervals over tasks]"


def task_notes(systems):
    """Returns notes about the systems that have other tasks than the first one."""
    first, *others = systems
    differing = [system for system in others if system.tasks.keys() != first.tasks.keys()]
    apart = [system.name for system in differing if system.tasks.keys().isdisjoint(first.tasks)]
    parts = []
    if len(differing) > len(apart):
        parts.append("NOT THE SAME TASKS: compare only the differences")
    if apart:
        parts.append(f"NO COMMON TASK with {first.name}: {', '.join(apart)}")
    return parts


def different_conditions(systems):
    """Returns texts such as "max_turns 6 or 10" of the settings in which systems differ.

    A system whose records do not have a setting is not known to differ.
    """
    texts = []
    for name in ("environment", *CONDITIONS):
        sets = [system.conditions[name] for system in systems if name in system.conditions]
        if any(values != sets[0] for values in sets):
            values = dict.fromkeys(text for values in sets for text in sorted(values))
            texts.append(f"{name} {' or '.join(str(json.loads(text)) for text in values)}")
    return texts


def missing_note(system):
    asked = system.n_episodes + system.missing
    note = f"{system.name} lacks {system.missing} of its {asked} episodes"
    if system.success_bounds:
        low, high = system.success_bounds
        note += f": with them, success would be between {100 * low:.1f} and {100 * high:.1f} %"
    return note


# --- reading the files, and which episodes are missing --------------------------------------------

class EpisodeKey(NamedTuple):
    """What identifies an episode of a system."""
    file: str
    seed: int
    task: str
    sample: int


def named_systems(args):
    """Returns the systems of the command line, named NAME or by file stem (path if ambiguous)."""
    stems = [os.path.splitext(os.path.basename(arg))[0] for arg in args]
    files_of = {}  # {name: files}
    for arg, stem in zip(args, stems):
        name, equals, files = arg.partition("=")
        files = files.split(",")
        if not equals or os.path.exists(arg):  # a file such as runs/lr=1/test.jsonl
            name, files = stem if stems.count(stem) == 1 else arg, [arg]
        if not name or not all(files):
            fail(f"{arg!r} has an empty name, of the system or a file; write NAME=FILE,FILE")
        if name in files_of:
            fail(f"two systems are named {name!r}; rename one with NAME=FILE")
        files_of[name] = files
    tasks = {}  # of all systems, see colbench.Seen
    return [read_system("stdin" if name == "-" else name, files, tasks)
            for name, files in files_of.items()]


def read_system(name, files, tasks):
    """Returns the System of these files. tasks: of all systems, see colbench.Seen."""
    system = System(name, files)
    episodes = []                # [EpisodeKey]
    settings_of = {}             # {EpisodeKey: settings}
    asked_of = {}                # {asked_hash: {task id: samples}}, see collect.asked_fields
    runs = set()                 # {(file, seed, asked_hash)}
    metrics = defaultdict(list)  # {task id: [{metric: value} of each episode]}
    for file, record in read_files(files, tasks):
        meta, task = record.get("meta", {}), task_id(record["task"])
        made_with = settings(meta)
        episode = EpisodeKey(file, made_with.pop("seed", 0), task, record.get("sample"))
        if "sample" in record and settings_of.setdefault(episode, made_with) != made_with:
            fail(f"{file} has episodes of two systems, such as sample {record['sample']} "
                 f"of the task {task}: split it (two seeds: NAME=FILE,FILE)")
        episodes.append(episode)
        runs.add((file, episode.seed, meta.get("asked_hash")))
        if "asked" in meta and "asked_hash" in meta:
            asked_of[meta["asked_hash"]] = meta["asked"]
        metrics[task].append(episode_metrics(record))
        system.add_conditions(record)
    system.n_episodes = len(episodes)
    most_k = min(sum("success" in e for e in of_task) for of_task in metrics.values())
    system.tasks = {task: task_means(metrics[task], most_k) for task in sorted(metrics)}
    asked = asked_episodes(episodes, runs, asked_of)
    if asked is not None:
        system.missing = len(asked) - len(episodes)
        system.success_bounds = success_bounds(metrics, asked)
    return system


def read_files(files, tasks):
    """Yields (file, record) of a system's records. tasks: of all systems, see colbench.Seen."""
    seen = Seen(tasks)
    for path in files:
        source = "stdin" if path == "-" else path
        with fail_on_error(source):
            stream = sys.stdin if path == "-" else open(path, encoding="utf-8")
        for record in read_records(stream, "dialogue_history", "reward", source=source, seen=seen):
            yield source, record


def asked_episodes(episodes, runs, asked_of):
    """Returns the set of Episodes that collect.py was asked for, or None if it is not known.

    It is not known if a record is of another program or an older version, if a run's first record,
    which has the list, is not there, or if records were changed or doubled.
    """
    asked = set()
    for file, seed, asked_hash in runs:
        if asked_hash not in asked_of:
            return None
        for task, samples in asked_of[asked_hash].items():
            asked |= {EpisodeKey(file, seed, task, sample) for sample in samples}
    if len(set(episodes)) < len(episodes) or not asked.issuperset(episodes):
        return None
    return asked


def success_bounds(metrics, asked):
    """Returns what success would be if none, and if all, of the missing episodes were solved.

    Like success, these are means over tasks. None if some episodes have no success.
    """
    if not all("success" in episode for episode in chain(*metrics.values())):
        return None
    least, most = [], []  # of each task
    for task, n_asked in Counter(episode.task for episode in asked).items():
        of_task = metrics.get(task, [])
        solved = sum(episode["success"] for episode in of_task)
        least.append(solved / n_asked)
        most.append((solved + n_asked - len(of_task)) / n_asked)
    return [rounded(fmean(least)), rounded(fmean(most))]


def main(args):
    emit, systems = open_stdout(), named_systems(args.files)
    metrics = metric_names(systems)
    results = [result(system, systems[0], metrics) for system in systems]
    for r in results:
        emit(r)
    for text in table(results, metrics) + notes(systems, results, metrics):
        say(text)


if __name__ == "__main__":
    run(main, get_args())
