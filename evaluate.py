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
episodes counts no more. 95 % intervals are by bootstrap over tasks. The differences from the first
system are paired: they use only the tasks that both systems have.

Left out on purpose: intervals over episodes, which are too narrow because episodes of a task are
alike; and p-values, because a difference's interval shows its size as well as its significance.
"""
from utils import fail, fail_on_error, open_stdout, parser, private_copy, run, say, version

import math
import os
import sys
from collections import defaultdict
from itertools import chain

import numpy as np

from colbench import agent_messages, environment, read_records, settings, task_id

COUNTS = "turns", "tokens"  # the metrics that are counts, not shares


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [flags] [FILE | NAME=FILE,FILE,... ...] >> results.jsonl")
    p.add_argument("files", nargs="*", default=["-"], metavar="FILE | NAME=FILE,FILE,...",
                   help="one FILE per system, or NAME=FILE,FILE to pool seeds; default stdin")
    return p.parse_args(argv)


# --- systems --------------------------------------------------------------------------------------

class System:
    """A system to compare: its name, its files (one per seed), and each task's mean metrics."""

    def __init__(self, name, files, tasks):
        """tasks: of all systems, see read_records."""
        self.name, self.files = name, files
        self.reward_labels, self.graders = set(), set()
        episodes = {}  # of all files, see read_records
        made_by = {}  # {(file, task id, sample, seed): settings}
        metrics = defaultdict(list)  # {task id: [{metric: value} of each episode]}
        for path in files:
            source = "stdin" if path == "-" else path
            with fail_on_error(source):
                stream = sys.stdin if path == "-" else open(path, encoding="utf-8")
            for record in read_records(stream, "dialogue_history", "reward", source=source,
                                       tasks=tasks, episodes=episodes):
                task, made = task_id(record["task"]), settings(record.get("meta", {}))
                episode = path, task, record.get("sample"), made.pop("seed", 0)
                if "sample" in record and made_by.setdefault(episode, made) != made:
                    fail(f"{source} has episodes of two systems, such as sample {record['sample']} "
                         f"of the task {task}: split it (two seeds: NAME=FILE,FILE)")
                metrics[task].append(episode_metrics(record))
                self.reward_labels.add(environment(record["task"]).reward_name)
                if "reward_by" in record:
                    self.graders.add(record["reward_by"])
        self.episodes = sum(map(len, metrics.values()))
        most_k = min(sum("success" in e for e in of_task) for of_task in metrics.values())
        self.tasks = {task: task_means(metrics[task], most_k) for task in sorted(metrics)}

    def means(self, metric, tasks):
        """Returns a (tasks,) array: the metric's mean of each task, NaN where it has none."""
        return np.array([self.tasks[task].get(metric, np.nan) for task in tasks])


def episode_metrics(record):
    """Returns {metric: value} of one episode."""
    agent = agent_messages(record)
    lengths = [len(m["token_ids"]) for m in agent if "token_ids" in m]
    own = environment(record["task"]).metrics(private_copy(record))
    return {"tests_passed": record["reward"], **own,
            "turns": len(agent), **({"tokens": sum(lengths)} if lengths else {})}


def task_means(episodes, most_k):
    """Returns {metric: mean} of a task's episodes, and their pass^k for k up to most_k."""
    means = {}
    for metric in dict.fromkeys(chain(*episodes)):
        values = [float(episode[metric]) for episode in episodes if metric in episode]
        means[metric] = math.fsum(values) / len(values)  # whatever the order of lines
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

def with_intervals(arrays):
    """Returns {metric: mean, metric_95: bootstrap interval} of {metric: (tasks,) array}.

    NaNs are skipped. Both are None without values, and the interval is None of a single one.
    """
    out = {}
    for metric, values in arrays.items():
        values = values[~np.isnan(values)]
        numbers = [values.mean()] if len(values) else []
        if len(values) > 1:  # one task has no spread
            rng = np.random.default_rng(0)
            draws = [rng.choice(values, (100, len(values))).mean(1) for _ in range(20)]
            numbers += [*np.percentile(draws, (2.5, 97.5))]
        mean, *interval = [round(float(x), 4) + 0.0 for x in numbers] or [None]  # avoids -0.0
        out[metric], out[f"{metric}_95"] = mean, interval or None
    return out


def result(system, systems):
    """Returns the JSON record of a system, with its paired differences from the first one."""
    metrics = (metric for s in systems for means in s.tasks.values() for metric in means)
    values = {metric: system.means(metric, system.tasks)
              for metric in dict.fromkeys(metrics)}  # unique, and the same for all systems
    out = {"system": system.name, "files": system.files, "rewards": sorted(system.reward_labels),
           "reward_by": sorted(system.graders), "episodes": system.episodes,
           "tasks": len(system.tasks), "version": version(), **with_intervals(values)}
    first = systems[0]
    if system is not first:
        common = [task for task in first.tasks if task in system.tasks]
        gaps = {metric: system.means(metric, common) - first.means(metric, common)
                for metric in ("success", "tests_passed")}
        gaps["wins"] = (1 + np.sign(gaps["tests_passed"].round(9))) / 2  # 0.1 + 0.2 ties 0.3
        out["minus_first"] = {"first": first.name, "tasks": len(common), **with_intervals(gaps)}
    return out


# --- the table ------------------------------------------------------------------------------------

def cell(r, metric, sign=""):
    """Formats a mean of 0.253 with its interval as "25.3 [21.0, 29.6]", and None as "-"."""
    if r[metric] is None:
        return "-"
    scale = 1 if metric in COUNTS else 100
    has_limits = metric in ("tests_passed", "success", "wins") or metric.startswith("pass^")
    interval = has_limits and r[f"{metric}_95"] or ()
    number, *limits = (f"{scale * x:{sign}.1f}" for x in (r[metric], *interval))
    return f"{number} [{', '.join(limits)}]" if limits else number


def table(results, systems):
    """Returns aligned lines of text: column names, a line per system, and notes."""
    rows = []  # {column name: text} of each system
    for r in results:
        cells = {"system": r["system"]}
        for metric in (name[:-3] for name in r if name.endswith("_95")):
            unit = "" if metric in COUNTS else " %"
            cells[metric.replace("_", " ") + unit] = cell(r, metric)
        cells |= {"episodes": str(r["episodes"]), "tasks": str(r["tasks"])}
        if d := r.get("minus_first"):
            cells["success - first"] = cell(d, "success", "+")
            cells["tests passed - first"] = cell(d, "tests_passed", "+")
            if "success" not in r:
                cells["wins %"] = cell(d, "wins")
        rows.append(cells)
    columns = [column for column in rows[-1]  # not rows[0], which has no differences
               if {cells.get(column, "-") for cells in rows} != {"-"}]
    labels = {label.partition(" ")[0] for r in results for label in r["rewards"]}
    reward_label = labels.pop() if len(labels) == 1 else "reward"  # e.g. "tests", "likeness"
    texts = [[column.replace("tests passed", reward_label) for column in columns],
             *([cells.get(column, "") for column in columns] for cells in rows)]
    widths = [max(map(len, column)) for column in zip(*texts)]
    lines = ["  ".join([name.ljust(widths[0]), *map(str.rjust, others, widths[1:])]).rstrip()
             for name, *others in texts]
    graders = sorted({name for r in results for name in r["reward_by"]})
    same_tasks = all(system.tasks.keys() == systems[0].tasks.keys() for system in systems)
    notes = ["[95 % bootstrap intervals over tasks]",
             f"graded by {', '.join(graders)}" if graders else "",
             "" if same_tasks else "NOT THE SAME TASKS: compare only the differences",
             "NOT COMPARABLE: different graders" if len(graders) > 1 else ""]
    return [*lines, "; ".join(filter(None, notes))]


def main(args):
    emit, systems = open_stdout(), named_systems(args.files)
    results = [result(system, systems) for system in systems]
    for r in results:
        emit(r)
    for text in table(results, systems):
        say(text)


if __name__ == "__main__":
    run(main, get_args())
