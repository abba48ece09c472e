"""Measures systems by their graded episodes, and compares each with the first one.

    python evaluate.py base.jsonl rft.jsonl sweet.jsonl >> results.jsonl    # the table: on stderr
    python evaluate.py base=base0.jsonl,base1.jsonl sweet=sweet0.jsonl,sweet1.jsonl  # two seeds
    ... | python collect.py ... | python colbench.py grade | tee base.jsonl | python evaluate.py

    tests_passed  mean reward: share of the hidden tests passed, or likeness of pages
    success       share of the episodes with reward 1; frontend tasks have none
    unanswered    share of the episodes whose last message is no answer
    not_drawn     frontend: share of the episodes whose page, or reference, can't be drawn
    turns, tokens the agent's messages in an episode, and the tokens it sampled
    wins          frontend: share of the tasks where it beats the first system; a tie is half

Intervals (95 %) come from a bootstrap over tasks. A task is drawn with all its episodes of all
seeds. A difference is the mean over the tasks that both systems have, drawn in pairs.
"""
from utils import fail, fail_on_error, flag, open_stdout, parser, read_jsonl, run, say, version

import os
import sys
from collections import defaultdict

import numpy as np

from colbench import agent_messages, environment, needs, task_id


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [flags] [FILE | NAME=FILE,FILE,... ...] >> results.jsonl")
    p.add_argument("files", nargs="*", default=["-"], metavar="FILE | NAME=FILE,FILE,...",
                   help="a system's graded records, else stdin; NAME=: its runs of several seeds")
    flag(p, "bootstrap", 2000, "resamples; 0: no intervals")
    return p.parse_args(argv)


# --- systems --------------------------------------------------------------------------------------

def measure(record):
    """{metric: (numerator, denominator)}, as of Environment.metrics. A metric may be missing."""
    agent = agent_messages(record)
    measured = {"tests_passed": (record["reward"], 1),
                **environment(record["task"]).metrics(record), "turns": (len(agent), 1)}
    if sampled := [len(m["token_ids"]) for m in agent if "token_ids" in m]:
        measured["tokens"] = sum(sampled), 1
    return measured


class System:
    """What is compared: a name, the files of its seeds, and the sums of each metric by task."""

    def __init__(self, name, files, need):
        """need: as for read_jsonl; one for all systems, as two tasks may not share an id."""
        self.name, self.files, self.episodes = name, files, 0
        self.reward_names, self.graders = set(), set()
        fractions = defaultdict(lambda: defaultdict(list))  # [task id][metric]: of each episode
        for path in files:
            source = "stdin" if path == "-" else path
            with fail_on_error(source):
                stream = sys.stdin if path == "-" else open(path, encoding="utf-8")
            for record in read_jsonl(stream, need, source):
                for metric, fraction in measure(record).items():
                    fractions[task_id(record["task"])][metric].append(fraction)
                self.episodes += 1
                self.reward_names.add(environment(record["task"]).reward_name)
                if "reward_by" in record:
                    self.graders.add(record["reward_by"])
        self.tasks = {}  # sorted, and sums of the sorted: the order of lines changes nothing
        for task, found in sorted(fractions.items()):
            self.tasks[task] = {metric: np.sum(sorted(x), 0) for metric, x in found.items()}

    def sums(self, metric, tasks):
        """The sums of a metric in these tasks: an array (tasks, 2)."""
        sums = [self.tasks[task].get(metric, (0, 0)) for task in tasks]
        return np.array(sums, float).reshape(-1, 2)


def named_systems(args):
    """The systems of the command line; a file is named by its stem, or path if two share that."""
    stems = [os.path.splitext(os.path.basename(arg))[0] for arg in args]
    systems = {}  # {name: files}
    for arg, stem in zip(args, stems):
        name, named, files = arg.partition("=")
        files = files.split(",")
        if not named or os.path.exists(arg):  # runs/lr=1/test.jsonl is a file
            name, files = stem if stems.count(stem) == 1 else arg, [arg]
        if not all([name, *files]):
            fail(f"{arg!r} has an empty name")
        if name in systems:
            fail(f"two systems have the name {name!r}: NAME=FILE gives another")
        systems[name] = files
    need = needs("dialogue_history", "reward")
    return [System("stdin" if name == "-" else name, files, need)
            for name, files in systems.items()]


# --- values and intervals -------------------------------------------------------------------------

def ratio(sums):
    """(rows, 2) to the sum of numerators over that of denominators; NaN if that is 0."""
    numerator, denominator = sums.sum(0)
    return numerator / denominator if denominator else np.nan


def task_means(sums):
    """(tasks, 2) sums to (mean, 1) of each task, however many episodes it has; (0, 0) of none."""
    measured = sums[:, 1] > 0
    return np.stack([sums[:, 0] / np.where(measured, sums[:, 1], 1), measured], 1)


def with_interval(statistic, sums, resamples):
    """statistic(sums) and its bootstrap interval [low, high], or None; sums: (tasks, columns)."""
    n = len(sums)
    value = statistic(sums) if n else np.nan
    if np.isnan(value):
        return None, None
    limits = []
    if resamples and n > 1:  # one task tells nothing of others
        rng = np.random.default_rng(0)
        draws = [statistic(sums[rng.integers(n, size=n)]) for _ in range(resamples)]
        limits = np.nanpercentile(draws, (2.5, 97.5))
    value, *interval = [round(float(x), 4) + 0.0 for x in (value, *limits)]  # no -0.0
    return value, interval or None


def result(system, systems, resamples):
    """The JSON record of a system."""
    out = {"system": system.name, "files": system.files, "rewards": sorted(system.reward_names),
           "reward_by": sorted(system.graders), "episodes": system.episodes,
           "tasks": len(system.tasks), "version": version()}
    measured = (metric for s in systems for sums in s.tasks.values() for metric in sums)
    for metric in dict.fromkeys(measured):  # each once, also those that this system lacks
        sums = system.sums(metric, system.tasks)
        out[metric], out[f"{metric}_95"] = with_interval(ratio, sums, resamples)
    if system is not systems[0]:
        out["minus_first"] = difference(systems[0], system, resamples)
    return out


def difference(first, system, resamples):
    """How a system differs from the first one, on the tasks of both."""
    common = [task for task in first.tasks if task in system.tasks]
    out = {"first": first.name, "tasks": len(common)}
    for metric in ("success", "tests_passed"):
        means = [task_means(s.sums(metric, common)) for s in (first, system)]
        out[metric], out[f"{metric}_95"] = with_interval(
            lambda sums: ratio(sums[:, 2:]) - ratio(sums[:, :2]), np.hstack(means), resamples)
    gap = (means[1] - means[0])[:, 0].round(9)  # 0.1 + 0.2 and 0.3 tie
    wins = np.stack([(1 + np.sign(gap)) / 2, np.ones(len(common))], 1)
    out["wins"], out["wins_95"] = with_interval(ratio, wins, resamples)
    return out


# --- the table ------------------------------------------------------------------------------------

def shown(value, interval=None, scale=100, sign=""):
    """0.253 and its interval as "25.3 [21.0, 29.6]"; None as "-"."""
    if value is None:
        return "-"
    number, *limits = (f"{scale * x:{sign}.1f}" for x in (value, *(interval or ())))
    return f"{number} [{', '.join(limits)}]" if limits else number


def row(r):
    """{head: text} of a result in the table."""
    cells = {"system": r["system"]}
    for metric in (name[:-3] for name in r if name.endswith("_95")):
        if metric in ("turns", "tokens"):
            cells[metric] = shown(r[metric], scale=1)
        else:
            interval = r[f"{metric}_95"] if metric in ("tests_passed", "success") else None
            cells[metric.replace("_", " ") + " %"] = shown(r[metric], interval)
    cells |= {"episodes": str(r["episodes"]), "tasks": str(r["tasks"])}
    if d := r.get("minus_first"):
        cells["success - first"] = shown(d["success"], d["success_95"], sign="+")
        cells["tests passed - first"] = shown(d["tests_passed"], d["tests_passed_95"], sign="+")
        if "success" not in r:
            cells["wins %"] = shown(d["wins"], d["wins_95"])
    return cells


def table(results, systems):
    """Lines of aligned text, one per system, and under them what the numbers rest on."""
    names = {name.partition(" ")[0] for r in results for name in r["rewards"]}
    mean = names.pop() if len(names) == 1 else "reward"  # "tests", "likeness"
    rows = [row(r) for r in results]
    heads = [head for head in rows[-1]  # the first system has no differences
             if {cells.get(head, "-") for cells in rows} != {"-"}]
    rows = [[head.replace("tests passed", mean) for head in heads],
            *([cells.get(head, "") for head in heads] for cells in rows)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]).rstrip()
             for name, *cells in rows]
    graders = sorted({name for r in results for name in r["reward_by"]})
    same_tasks = all(system.tasks.keys() == systems[0].tasks.keys() for system in systems)
    notes = ["[95 % bootstrap intervals over tasks]",
             f"graded by {', '.join(graders)}" if graders else "",
             "" if same_tasks else "NOT THE SAME TASKS",
             "NOT COMPARABLE" if len(graders) > 1 else ""]
    return [*lines, "; ".join(filter(None, notes))]


def main(args):
    emit, systems = open_stdout(), named_systems(args.files)
    results = [result(system, systems, args.bootstrap) for system in systems]
    for r in results:
        emit(r)
    for text in table(results, systems):
        say(text)


if __name__ == "__main__":
    run(main, get_args())
