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


# --- systems --------------------------------------------------------------------------------------

class Episode(NamedTuple):
    """What identifies an episode of a system."""
    file: str
    seed: int
    task: str
    sample: int


class System:
    """A system to compare: its name, its files (one per seed), and each task's mean metrics."""

    def __init__(self, name, files, tasks):
        """tasks: of all systems, see colbench.Seen."""
        self.name, self.files = name, files
        self.reward_labels, self.graders = set(), set()
        self.conditions = defaultdict(set)  # {setting: its values as JSON}
        made_by = {}  # {Episode: settings}
        found = []  # (Episode, asked_hash) of each record
        asked_lists = {}  # {asked_hash: {task id: samples}}, see collect.asked_fields
        metrics = defaultdict(list)  # {task id: [{metric: value} of each episode]}
        for file, record in read_files(files, tasks):
            meta, task = record.get("meta", {}), task_id(record["task"])
            made = settings(meta)
            episode = Episode(file, made.pop("seed", 0), task, record.get("sample"))
            if "sample" in record and made_by.setdefault(episode, made) != made:
                fail(f"{file} has episodes of two systems, such as sample {record['sample']} "
                     f"of the task {task}: split it (two seeds: NAME=FILE,FILE)")
            found.append((episode, meta.get("asked_hash")))
            if {"asked", "asked_hash"} <= meta.keys():
                asked_lists[meta["asked_hash"]] = meta["asked"]
            metrics[task].append(episode_metrics(record))
            self.add_conditions(record, made)
        self.episodes = len(found)
        most_k = min(sum("success" in e for e in of_task) for of_task in metrics.values())
        self.tasks = {task: task_means(metrics[task], most_k) for task in sorted(metrics)}
        asked = asked_episodes(found, asked_lists)
        self.missing = self.success_bounds = None  # if it is not known
        if asked is not None:
            self.missing = len(asked) - len(found)
            self.success_bounds = success_bounds(metrics, asked)

    def add_conditions(self, record, made):
        """Adds what the record's reward depends on, besides the agent. made: its settings."""
        self.reward_labels.add(environment(record["task"]).reward_name)
        if "reward_by" in record:
            self.graders.add(record["reward_by"])
        of_record = {"environment": task_kind(record["task"])}
        of_record |= {name: made[name] for name in CONDITIONS if name in made}
        for name, value in of_record.items():
            self.conditions[name].add(json.dumps(value, sort_keys=True))

    def means(self, metric, tasks):
        """Returns a (tasks,) array: the metric's mean of each task, NaN where it has none."""
        return np.array([self.tasks[task].get(metric, np.nan) for task in tasks])


def read_files(files, tasks):
    """Yields (file, record) of a system's records. tasks: of all systems, see colbench.Seen."""
    seen = Seen(tasks)
    for path in files:
        source = "stdin" if path == "-" else path
        with fail_on_error(source):
            stream = sys.stdin if path == "-" else open(path, encoding="utf-8")
        for record in read_records(stream, "dialogue_history", "reward", source=source, seen=seen):
            yield source, record


def asked_episodes(found, asked_lists):
    """Returns the set of Episodes that collect.py was asked for, or None if it is not known.

    found: (Episode, asked_hash) of each record. It is not known if a record is of another program
    or an older version, if a run's first record, which has the list, is not there, or if records
    were changed or doubled.
    """
    asked = set()
    for file, seed, asked_hash in {(e.file, e.seed, asked_hash) for e, asked_hash in found}:
        if asked_hash not in asked_lists:
            return None
        asked |= {Episode(file, seed, task, sample)
                  for task, samples in asked_lists[asked_hash].items() for sample in samples}
    episodes = {episode for episode, _ in found}
    return asked if len(episodes) == len(found) and episodes <= asked else None


def success_bounds(metrics, asked):
    """Returns what success would be if none, and if all, of the missing episodes were solved.

    Like success, these are means over tasks. None if some episodes have no success.
    """
    if not all("success" in episode for episode in chain(*metrics.values())):
        return None
    n_asked = Counter(episode.task for episode in asked)
    solved = {task: sum(e["success"] for e in metrics.get(task, ())) for task in n_asked}
    missing = {task: n_asked[task] - len(metrics.get(task, ())) for task in n_asked}
    least = fmean(solved[task] / n_asked[task] for task in n_asked)
    most = fmean((solved[task] + missing[task]) / n_asked[task] for task in n_asked)
    return [rounded(least), rounded(most)]


def episode_metrics(record):
    """Returns {metric: value} of one episode."""
    agent = agent_messages(record)
    lengths = [len(m["token_ids"]) for m in agent if "token_ids" in m]
    lengths += [m["completion_tokens"] for m in agent if "completion_tokens" in m]
    own = environment(record["task"]).metrics(private_copy(record))
    return {"tests_passed": record["reward"], **own,
            "turns": len(agent), **({"tokens": sum(lengths)} if lengths else {})}


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


def named_systems(args):
    """Returns the systems of the command line, named NAME or by file stem (path if ambiguous)."""
    stems = [os.path.splitext(os.path.basename(arg))[0] for arg in args]
    systems = {}  # {name: files}
    for arg, stem in zip(args, stems):
        name, named, files = arg.partition("=")
        files = files.split(",")
        if not named or os.path.exists(arg):  # a file such as runs/lr=1/test.jsonl
            name, files = stem if stems.count(stem) == 1 else arg, [arg]
        if not all([name, *files]):
            fail(f"{arg!r} has an empty name, of the system or a file; write NAME=FILE,FILE")
        if name in systems:
            fail(f"two systems are named {name!r}; rename one with NAME=FILE")
        systems[name] = files
    tasks = {}
    return [System("stdin" if name == "-" else name, files, tasks)
            for name, files in systems.items()]


# --- values and intervals -------------------------------------------------------------------------

def metric_names(systems):
    """Returns the names of all systems' metrics, in the order in which they first occur."""
    all_means = chain(*(system.tasks.values() for system in systems))
    return list(dict.fromkeys(chain(*all_means)))


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


def rounded(x):
    """Returns a number as it is written: with four digits, and never as -0.0."""
    return round(float(x), 4) + 0.0


def result(system, systems, metrics):
    """Returns the JSON record of a system, with its paired differences from the first one.

    metrics: the names of all systems' metrics, so that all records have the same fields.
    """
    values = {metric: system.means(metric, system.tasks) for metric in metrics}
    conditions = {name: [json.loads(text) for text in sorted(texts)]
                  for name, texts in system.conditions.items()}
    out = {"system": system.name, "files": system.files, "rewards": sorted(system.reward_labels),
           "reward_by": sorted(system.graders), "conditions": conditions,
           "episodes": system.episodes, "missing": system.missing,
           "success_bounds": system.success_bounds, "tasks": len(system.tasks),
           "version": version(),
           **with_intervals(values, shares=[x for x in metrics if x not in COUNTS])}
    if system is not systems[0]:
        out["minus_first"] = minus_first(system, systems[0])
    return out


def minus_first(system, first):
    """Returns the differences from the first system, on the tasks that both have."""
    common = [task for task in first.tasks if task in system.tasks]
    gaps = {metric: system.means(metric, common) - first.means(metric, common)
            for metric in ("success", "tests_passed")}
    gaps["wins"] = (1 + np.sign(gaps["tests_passed"].round(9))) / 2  # 0.1 + 0.2 ties 0.3
    return {"first": first.name, "tasks": len(common), **with_intervals(gaps, shares=["wins"])}


# --- the table ------------------------------------------------------------------------------------

def shows_interval(metric):
    return metric in ("tests_passed", "success", "wins") or metric.startswith("pass^")


def cell(r, metric, sign=""):
    """Formats a mean of 0.253 with its interval as "25.3 [21.0, 29.6]", and None as "-"."""
    mean, limits = r[metric], r[f"{metric}_95"]
    if mean is None:
        return "-"
    scale = 1 if metric in COUNTS else 100
    text = f"{scale * mean:{sign}.1f}"
    if limits and shows_interval(metric):
        low, high = (f"{scale * x:{sign}.1f}" for x in limits)
        text += f" [{low}, {high}]"
    return text


def row(r, first, metrics):
    """Returns {column name: text} of a system's result r. first: the first system's result."""
    cells = {"system": r["system"]}
    for metric in metrics:
        unit = "" if metric in COUNTS else " %"
        cells[metric.replace("_", " ") + unit] = cell(r, metric)
    cells |= {"episodes": str(r["episodes"]), "tasks": str(r["tasks"])}
    if "minus_first" in r:
        gaps = r["minus_first"]
        of_tasks = f", {gaps['tasks']} tasks"
        if gaps["tasks"] == 1:
            of_tasks = ", 1 task"
        if gaps["tasks"] == r["tasks"] == first["tasks"]:  # both have just these
            of_tasks = ""
        cells[f"success - first{of_tasks}"] = cell(gaps, "success", "+")
        cells[f"tests passed - first{of_tasks}"] = cell(gaps, "tests_passed", "+")
        if "success" not in metrics:
            cells[f"wins %{of_tasks}"] = cell(gaps, "wins")
    return cells


def table(results, metrics):
    """Returns aligned lines of text: column names, and a line per system."""
    rows = [row(r, results[0], metrics) for r in results]
    columns = [column for column in dict.fromkeys(chain(*rows))
               if any(cells.get(column, "-") != "-" for cells in rows)]
    labels = {label.partition(" ")[0] for r in results for label in r["rewards"]}
    reward_label = labels.pop() if len(labels) == 1 else "reward"  # e.g. "tests", "likeness"
    texts = [[column.replace("tests passed", reward_label) for column in columns]]
    texts += [[cells.get(column, "") for column in columns] for cells in rows]
    widths = [max(map(len, column)) for column in zip(*texts)]
    return ["  ".join([name.ljust(widths[0]), *map(str.rjust, others, widths[1:])]).rstrip()
            for name, *others in texts]


def notes(systems, results, metrics):
    """Returns lines of notes: what the table shows, and what makes a comparison unfair."""
    intervals = "[95 % bootstrap intervals over tasks"
    if any(r[metric] in (0, 1) for r in results for metric in metrics if shows_interval(metric)):
        intervals += ", exact ones for 0 and 100 %"
    parts = [intervals + "]"]
    graders = set(chain(*(system.graders for system in systems)))
    if graders:
        parts.append(f"graded by {' and '.join(sorted(graders))}")
    first, *others = systems
    different = [system for system in others if system.tasks.keys() != first.tasks.keys()]
    apart = [system for system in different if system.tasks.keys().isdisjoint(first.tasks)]
    if len(different) > len(apart):
        parts.append("NOT THE SAME TASKS: compare only the differences")
    if apart:
        names = ", ".join(system.name for system in apart)
        parts.append(f"NO COMMON TASK with {first.name}: {names}")
    if len(graders) > 1:
        parts.append("NOT COMPARABLE: different graders")
    lines = ["; ".join(parts)]
    if differ := different_conditions(systems):
        lines.append(f"NOT THE SAME CONDITIONS: {', '.join(differ)}")
    for system in systems:
        if system.missing:
            lines.append(missing_note(system))
    return lines


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
    asked = system.episodes + system.missing
    note = f"{system.name} lacks {system.missing} of its {asked} episodes"
    if system.success_bounds:
        low, high = (f"{100 * x:.1f}" for x in system.success_bounds)
        note += f": with them, success would be between {low} and {high} %"
    return note


def main(args):
    emit, systems = open_stdout(), named_systems(args.files)
    metrics = metric_names(systems)
    results = [result(system, systems, metrics) for system in systems]
    for r in results:
        emit(r)
    for text in (*table(results, metrics), *notes(systems, results, metrics)):
        say(text)


if __name__ == "__main__":
    run(main, get_args())
