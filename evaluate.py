"""Measures systems by their graded episodes, with 95 % intervals, and compares each with the first one.

    python evaluate.py base.jsonl rft.jsonl sweet.jsonl >> results.jsonl        # the table goes to stderr
    python evaluate.py base=base0.jsonl,base1.jsonl sweet=sweet0.jsonl,sweet1.jsonl       # several seeds as one system
    python collect.py --model runs/base < test.jsonl | tee base.jsonl | python evaluate.py

tests_passed  share of the hidden tests passed: the mean reward; of frontend tasks how alike the pages look
success       share of the episodes that pass them all (not of frontend tasks)
turns         messages of the agent; tokens: what it sampled in all of them
unanswered    share of the episodes whose rounds ran out: the last message was graded, but it is no answer
not_drawn     frontend tasks: share of the episodes without a picture
copied        built-in tasks: of the final function's slots that the human told, the share with the value told

Intervals come from a bootstrap over tasks: a resampled task brings all its episodes, for they are not independent.
A difference to the first system is taken on the tasks that both have, resampled in pairs; so are wins, the share of
these tasks with a higher mean reward than the first system's, a tie counting half.
"""
import os
import sys

import numpy as np

from colbench import ANSWER, agent_messages, kind_of, slots_of, task_id
from utils import fail, open_stdout, parser, read_jsonl, run, skip_bad_flag

METRICS = ("tests_passed", "success", "turns", "tokens", "unanswered", "not_drawn", "copied")
COMPARED = ("success", "tests_passed")
NEED = ("task.problem_description", "task.ground_truth", "dialogue_history", "reward")


def get_args(argv=None):
    p = parser(__doc__)
    p.add_argument("files", nargs="*", default=["-"], metavar="FILE | NAME=FILE,FILE,...",
                   help="a system's graded records; with NAME=, its runs of several seeds; -: stdin")
    skip_bad_flag(p)
    p.add_argument("--bootstrap", type=int, default=2000, help="resamples of the tasks; 0: no intervals")
    return p.parse_args(argv)


# --- what an episode measures -----------------------------------------------------------------------------------------

def copied(record):
    """(right, told): of the function's slots whose value the human gave ("rate=3"), how many have that value.

    A slot that was told but left out is a wrong function, not a wrong copy.
    """
    answer = record.get("answer") or ""
    if not answer.startswith("def "):
        return 0, 0
    slots, told = slots_of(record["task"]["ground_truth"]), {}
    for m in record["dialogue_history"][1:]:
        if m["role"] == "user":
            told |= {k: v for k, v in slots_of(f"f({m['content']}):").items() if k in slots}
    written = slots_of(answer)
    return sum(written[k] == v for k, v in told.items() if k in written), len(told.keys() & written.keys())


def measure(record):
    """(metrics, 2): numerator and denominator of each metric; a system's value is the ratio of their sums.

    So a mean over episodes (each counts 1), a share of all slots told, and what an episode lacks (0, 0) are all one.
    """
    agent, page = agent_messages(record), kind_of(record["task"]) == "frontend"
    sampled = [len(m["token_ids"]) for m in agent if "token_ids" in m]
    unanswered = not agent or ANSWER not in agent[-1]["content"]
    return np.array([(record["reward"], 1), (0, 0) if page else (record["reward"] >= 1, 1), (len(agent), 1),
                     (sum(sampled), bool(sampled)), (0, 0) if page else (unanswered, 1),
                     ("failure" in record, 1) if page else (0, 0), copied(record)], float)


# --- systems ----------------------------------------------------------------------------------------------------------

def read_system(name, files, skip_bad):
    """The records of a system, summed by task: {"clusters": {(file index, task id): measures}, "rules", ...}."""
    clusters, episodes, rules = {}, 0, set()
    for i, path in enumerate(files):
        try:
            stream = sys.stdin if path == "-" else open(path, encoding="utf-8")
        except OSError as e:
            fail(f"{path}: {e.strerror}")
        for record in read_jsonl(stream, NEED, "stdin" if path == "-" else path, skip_bad):
            key = i, task_id(record["task"])  # a task in two seeds' files is two clusters: two models played it
            clusters[key] = clusters.get(key, 0) + measure(record)
            episodes += 1
            rules.add((record.get("meta") or {}).get("rules", "unknown"))
    return {"name": name, "files": files, "clusters": clusters, "episodes": episodes, "rules": sorted(rules)}


def read_systems(args, skip_bad):
    """The systems of the command line. A single file is named by its stem, or its path where two stems are the same."""
    stem = lambda path: "stdin" if path == "-" else os.path.splitext(os.path.basename(path))[0]
    stems, systems = [stem(a) for a in args], []
    for a in args:
        name, named, files = a.partition("=")
        if named and not os.path.exists(a):  # runs/lr=1/test.jsonl is a file
            systems.append(read_system(name, files.split(","), skip_bad))
        else:
            systems.append(read_system(stem(a) if stems.count(stem(a)) == 1 else a, [a], skip_bad))
    return systems


# --- values and intervals ---------------------------------------------------------------------------------------------

def ratio(sums):
    """Sum of the numerators over sum of the denominators, (clusters, 2) to a number; nan where nothing was measured."""
    numerator, denominator = sums.sum(0)
    return numerator / denominator if denominator else np.nan


def minus_first(sums):
    """(clusters, 2 systems, 2): the second system's ratio less the first one's."""
    return ratio(sums[:, 1]) - ratio(sums[:, 0])


def with_interval(statistic, clusters, resamples):
    """(value, [low, high]): statistic(clusters) with its percentile bootstrap interval; None where there is none."""
    clusters, n = np.array(clusters), len(clusters)
    value = statistic(clusters) if n else np.nan
    if np.isnan(value):
        return None, None
    interval, rng = None, np.random.default_rng(0)
    if resamples and n > 1:  # one task tells nothing of others
        draws = [statistic(clusters[rng.integers(n, size=n)]) for _ in range(resamples)]
        interval = [round(x, 4) + 0.0 for x in np.nanpercentile(draws, (2.5, 97.5)).tolist()]
    return round(float(value), 4) + 0.0, interval  # + 0.0: no -0.0


def result(system, first, resamples):
    """The JSON record of a system; `minus_first` compares it with the first one, on common (file index, task)s."""
    clusters = system["clusters"]
    out = {"system": system["name"], "files": system["files"], "rules": system["rules"], "episodes": system["episodes"],
           "tasks": len({task for _, task in clusters})}
    for m, metric in enumerate(METRICS):
        out[metric], out[metric + "_95"] = with_interval(ratio, [c[m] for c in clusters.values()], resamples)
    s = METRICS.index("success")
    out["success_by_file"] = [with_interval(ratio, [c[s] for (i, _), c in clusters.items() if i == f], 0)[0]
                              for f in range(len(system["files"]))]
    if system is not first:
        common = [(first["clusters"][key], clusters[key]) for key in first["clusters"] if key in clusters]
        d = out["minus_first"] = {"first": first["name"], "clusters": len(common)}
        for metric in COMPARED:
            pairs = [(a[METRICS.index(metric)], b[METRICS.index(metric)]) for a, b in common]
            d[metric], d[metric + "_95"] = with_interval(minus_first, pairs, resamples)
        wins = [np.sign(ratio(b[None, 0]) - ratio(a[None, 0])) / 2 + 0.5 for a, b in common]  # of the mean reward
        d["wins"], d["wins_95"] = with_interval(np.mean, wins, resamples)
    return out


# --- the table --------------------------------------------------------------------------------------------------------

def percent(value, interval=None, sign=""):
    """0.253 and its interval as "25.3 [21.0, 29.6]"; None as "-"."""
    text = lambda x: "-" if x is None else f"{100 * x:{sign}.1f}"
    return text(value) + (f" [{', '.join(map(text, interval))}]" if interval else "")


def table(results):
    """Aligned text, a row per system, and under it what the numbers rest on."""
    pages = any(r["not_drawn"] is not None for r in results)
    rows = [["system", "tests %", "success %", "turns", "tokens", "unanswered %", *["not drawn %"] * pages,
             "copied %", "episodes", "tasks",
             *["success - first", "tests - first", *["wins %"] * pages, "common"] * (len(results) > 1)]]
    for r in results:
        d = r.get("minus_first")
        rows.append([r["system"], *(percent(r[k], r[k + "_95"]) for k in ("tests_passed", "success")),
                     *("-" if r[k] is None else f"{r[k]:.1f}" for k in ("turns", "tokens")),
                     *(percent(r[k]) for k in ("unanswered", *["not_drawn"] * pages, "copied")),
                     str(r["episodes"]), str(r["tasks"]),
                     *([percent(d[k], d[k + "_95"], "+") for k in COMPARED] +
                       [percent(d["wins"], d["wins_95"])] * pages + [str(d["clusters"])] if d else [])])
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(rows[-1]))]
    lines = ["  ".join(f"{c:>{w}}" if i else f"{c:<{w}}" for i, (c, w) in enumerate(zip(row, widths))) for row in rows]
    rules = sorted({rule for r in results for rule in r["rules"]})
    return "\n".join([*lines, f"[95 % bootstrap intervals over tasks]; grader's rules: {', '.join(rules)}"
                      + "; NOT COMPARABLE" * (len(rules) > 1)])


def main(args):
    emit = open_stdout()
    systems = read_systems(args.files, args.skip_bad)
    results = [result(system, systems[0], args.bootstrap) for system in systems]
    print(table(results), file=sys.stderr)
    for r in results:
        emit(r)


if __name__ == "__main__":
    run(main, get_args())
