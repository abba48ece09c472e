"""Measures systems by their graded episodes, and compares each with the first one.

    python evaluate.py base.jsonl rft.jsonl sweet.jsonl >> results.jsonl    # the table: on stderr
    python evaluate.py base=base0.jsonl,base1.jsonl sweet=sweet0.jsonl,sweet1.jsonl  # two seeds
    python collect.py --model runs/base < test.jsonl | tee base.jsonl | python evaluate.py
    python evaluate.py base.jsonl sweet.jsonl --html report.html    # every episode, to look at
    python evaluate.py --results 1 results*.jsonl --plot figure.png    # earlier results

tests_passed  mean reward: share of the hidden tests passed, or likeness of pages
success       share of the episodes with reward 1; frontend tasks have none
turns         the agent's messages in an episode
tokens        what the agent sampled in an episode
cut           share of the agent's messages cut at --max_tokens
unanswered    share of the episodes whose last message is no answer; it is graded all the same
not_drawn     frontend: share of the episodes whose page has no picture
wins          share of the tasks where the mean reward beats the first system's; a tie is half
missing       tasks that another system has and this one lacks, for each seed

Intervals (95 %) come from a bootstrap over tasks: a task is drawn with all its episodes, those of
all seeds, since these are not independent. Differences and wins are taken on the tasks that both
systems have in a seed, drawn in pairs.
"""
from utils import (fail, fail_on_error, flag, open_stdout, parser, read_jsonl, run, say,
                   skip_bad_flag, version, writing)

import base64
import html
import io
import os
import re
import sys
import tempfile

import numpy as np

from colbench import (agent_messages, browser_flags, draw_pages, environment, hidden_information,
                      needs, task_id)

METRICS = ("tests_passed", "success", "turns", "tokens", "cut", "unanswered",
           "not_drawn")  # in every result; an environment may have others


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [flags] [FILE | NAME=FILE,FILE,... ...] >> results.jsonl")
    p.add_argument("files", nargs="*", default=["-"], metavar="FILE | NAME=FILE,FILE,...",
                   help="a system's graded records, -: stdin; NAME=: its runs of several seeds")
    skip_bad_flag(p)
    flag(p, "bootstrap", 2000, "resamples; 0: no intervals")
    flag(p, "results", 0, "1: the files hold results of this program; nothing is measured anew",
         choices=[0, 1])
    flag(p, "plot", None, "draw a figure: the systems NAME@X are points of a curve over X, others "
         "are level lines; needs matplotlib", metavar="FILE")
    flag(p, "html", None, "write a page with every episode, all systems side by side",
         metavar="FILE")
    browser_flags(p)
    return p.parse_args(argv)


# --- systems --------------------------------------------------------------------------------------

def measure(record):
    """{metric: (numerator, denominator)}. A system's value is the ratio of their sums.

    A mean over episodes has the denominator 1 in each. What an episode lacks is left out.
    """
    agent = agent_messages(record)
    measured = {"tests_passed": (record["reward"], 1), "turns": (len(agent), 1)}
    sampled = [len(m["token_ids"]) for m in agent if "token_ids" in m]
    if sampled:
        measured["tokens"] = (sum(sampled), 1)
        measured["cut"] = (sum("cut" in m for m in agent), len(sampled))
    return measured | environment(record["task"]).metrics(record)


def records_of(path, fields, skip_bad):
    """The records of a file, or of stdin ("-"), one by one."""
    if path == "-":
        return read_jsonl(sys.stdin, fields, skip_bad=skip_bad)
    with fail_on_error(path):
        return read_jsonl(open(path, encoding="utf-8"), fields, path, skip_bad)


class System:
    """What is compared: a name, the files of its seeds, and the sums of each metric by task.

    A task in the files of two seeds is two clusters, (file index, task id): two models played it,
    each to be compared with the first system's of its seed.
    """

    def __init__(self, name, files):
        self.name, self.files, self.n_episodes = name, files, 0
        self.clusters = {}  # (file index, task id): {metric: (numerator, denominator)}
        self.rules, self.rewards = set(), set()
        self.shown = []  # the episodes that the report shows

    def read(self, args):
        """Reads the files. Of episodes with the same task and sample in a file the first counts."""
        seen, repeated = set(), 0
        for i, path in enumerate(self.files):
            for record in records_of(path, needs("dialogue_history", "reward"), args.skip_bad):
                cluster = i, task_id(record["task"])
                key = cluster, record.get("sample")
                if key in seen:
                    repeated += 1
                    continue
                if "sample" in record:  # published episodes have none
                    seen.add(key)
                self.add(cluster, record)
                if args.html:
                    self.shown.append(record)
        if repeated:
            say(f"{self.name}: {repeated} episodes, by task and sample, were there before and are "
                "not counted (several seeds? NAME=FILE,FILE)")

    def add(self, cluster, record):
        sums = self.clusters.setdefault(cluster, {})
        for metric, (numerator, denominator) in measure(record).items():
            n, d = sums.get(metric, (0, 0))
            sums[metric] = n + numerator, d + denominator
        self.n_episodes += 1
        self.rules.add(record.get("meta", {}).get("rules", "unknown"))
        self.rewards.add(environment(record["task"]).reward_name)

    def sums(self, metric, clusters):
        """The sums of a metric in these clusters: an array (clusters, 2)."""
        sums = [self.clusters[cluster].get(metric, (0, 0)) for cluster in clusters]
        return np.array(sums, float).reshape(-1, 2)


def named_systems(args):
    """The systems of the command line: a file is named by its stem, or by its path if two are."""
    stems = [os.path.splitext(os.path.basename(arg))[0] for arg in args]
    systems = []
    for arg, stem in zip(args, stems):
        name, named, files = arg.partition("=")
        if named and not os.path.exists(arg):  # runs/lr=1/test.jsonl is a file
            systems.append(System(name, files.split(",")))
        elif arg == "-":
            systems.append(System("stdin", ["-"]))
        else:
            systems.append(System(stem if stems.count(stem) == 1 else arg, [arg]))
    return systems


# --- values and intervals -------------------------------------------------------------------------

def ratio(sums):
    """(clusters, 2) to the sum of numerators over that of denominators; nan of nothing."""
    numerator, denominator = sums.sum(0)
    return numerator / denominator if denominator else np.nan


def by_task(sums, clusters):
    """The sums of clusters, one a row, added up for each task: (tasks, columns)."""
    tasks = {task: row for row, task in enumerate(dict.fromkeys(task for _, task in clusters))}
    added = np.zeros((len(tasks), sums.shape[1]))
    np.add.at(added, [tasks[task] for _, task in clusters], sums)
    return added


def with_interval(statistic, tasks, resamples):
    """(value, [low, high]): statistic(tasks) and its bootstrap interval; None without either."""
    tasks, n = np.array(tasks), len(tasks)
    value, limits = statistic(tasks) if n else np.nan, []
    if np.isnan(value):
        return None, None
    if resamples and n > 1:  # one task tells nothing of others
        rng = np.random.default_rng(0)
        draws = [statistic(tasks[rng.integers(n, size=n)]) for _ in range(resamples)]
        limits = np.nanpercentile(draws, (2.5, 97.5))
    value, *interval = [round(float(x), 4) + 0.0 for x in (value, *limits)]  # no -0.0
    return value, interval or None


def result(system, systems, resamples):
    """The JSON record of a system."""
    clusters, everywhere = system.clusters, {key for s in systems for key in s.clusters}
    out = {"system": system.name, "files": system.files, "rules": sorted(system.rules),
           "rewards": sorted(system.rewards), "episodes": system.n_episodes,
           "tasks": len({task for _, task in clusters}), "version": version(),
           "missing": len(everywhere - clusters.keys())}
    others = {metric for s in systems for sums in s.clusters.values() for metric in sums}
    for metric in (*METRICS, *sorted(others - set(METRICS))):
        tasks = by_task(system.sums(metric, clusters), clusters)
        out[metric], out[f"{metric}_95"] = with_interval(ratio, tasks, resamples)
    out["success_by_file"] = []
    for i in range(len(system.files)):
        of_file = [cluster for cluster in clusters if cluster[0] == i]
        value, _ = with_interval(ratio, system.sums("success", of_file), 0)
        out["success_by_file"].append(value)
    if system is not systems[0]:
        out["minus_first"] = difference(systems[0], system, resamples)
    return out


def difference(first, system, resamples):
    """How a system differs from the first one, on the clusters of both."""
    common = [cluster for cluster in first.clusters if cluster in system.clusters]
    out = {"first": first.name, "clusters": len(common)}
    for metric in ("success", "tests_passed"):
        pairs = np.hstack([s.sums(metric, common) for s in (first, system)])  # (clusters, 4)
        out[metric], out[f"{metric}_95"] = with_interval(
            lambda tasks: ratio(tasks[:, 2:]) - ratio(tasks[:, :2]), by_task(pairs, common),
            resamples)
    a, n, b, m = pairs.T
    wins = np.stack([(1 + np.sign(b / m - a / n)) / 2, np.ones(len(common))], 1)
    out["wins"], out["wins_95"] = with_interval(ratio, by_task(wins, common), resamples)
    return out


# --- the table ------------------------------------------------------------------------------------

def percent(value, interval=None, sign=""):
    """0.253 and its interval as "25.3 [21.0, 29.6]"; None as "-"."""
    if value is None:
        return "-"
    text = f"{100 * value:{sign}.1f}"
    if interval:
        low, high = interval
        text += f" [{100 * low:{sign}.1f}, {100 * high:{sign}.1f}]"
    return text


def row(r, mean, metrics):
    """{head: text} of a result in the table."""
    cells = {"system": r["system"]}
    for metric in metrics:
        value, interval = r.get(metric), r.get(f"{metric}_95")
        head = mean if metric == "tests_passed" else metric.replace("_", " ")
        if metric in ("turns", "tokens"):
            cells[head] = "-" if value is None else f"{value:.1f}"
        elif metric in ("cut", "unanswered", "not_drawn"):
            cells[f"{head} %"] = percent(value)
        else:
            cells[f"{head} %"] = percent(value, interval)
    cells["seeds"] = str(len(r["files"]))
    for head in ("episodes", "tasks", "missing"):
        cells[head] = str(r[head])
    if d := r.get("minus_first"):
        cells["success - first"] = percent(d["success"], d["success_95"], "+")
        cells[f"{mean} - first"] = percent(d["tests_passed"], d["tests_passed_95"], "+")
        if r["not_drawn"] is not None:
            cells["wins %"] = percent(d["wins"], d["wins_95"])
        cells["common"] = str(d["clusters"])
    return cells


def reward_name(results):
    """What the rewards are: "tests passed", "likeness"; of several kinds "reward"."""
    names = {name for r in results for name in r.get("rewards", ())}
    return names.pop() if len(names) == 1 else "reward"


def table(results):
    """Lines of aligned text, one per system, and under them what the numbers rest on."""
    mean = reward_name(results).partition(" ")[0]
    measured = {name[:-3] for r in results for name in r if name.endswith("_95")}
    metrics = [*METRICS, *sorted(measured - set(METRICS))]
    rows = [row(r, mean, metrics) for r in results]
    usual = {"cut %": "0.0", "seeds": "1", "missing": "0"}  # a column of nothing else is left out
    heads = []
    for head in max(rows, key=len):  # the first system has no differences
        if {cells.get(head, "-") for cells in rows} - {"-", usual.get(head)}:
            heads.append(head)
    rows = [heads] + [[cells.get(head, "") for head in heads] for cells in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for name, *values in rows:
        padded = [f"{value:>{width}}" for value, width in zip(values, widths[1:])]
        lines.append("  ".join([f"{name:<{widths[0]}}", *padded]).rstrip())
    rules = sorted({rule for r in results for rule in r["rules"]})
    note = f"[95 % bootstrap intervals over tasks]; grader's rules: {', '.join(rules)}"
    return [*lines, note + "; NOT COMPARABLE" if len(rules) > 1 else note]


def plot(results, path):
    """Draws success, or else the mean reward: NAME@X is a point of a curve, others are lines."""
    with fail_on_error("--plot wants matplotlib"):
        from matplotlib.figure import Figure
    metric = "success" if any(r["success"] is not None for r in results) else "tests_passed"
    curves, ticks = {}, set()  # {(name, whether it is a line): [(x or None, value, low, high)]}
    for r in results:
        if r[metric] is not None:
            name, x = re.fullmatch(r"(?s)(.*?)(?:@(\d+\.?\d*))?", r["system"]).groups()
            low, high = r[f"{metric}_95"] or (r[metric], r[metric])
            point = x and float(x), 100 * r[metric], 100 * low, 100 * high
            if point[0] == 0:
                fail(f"--plot: {r['system']}: X must be above 0, for the axis is logarithmic")
            curves.setdefault((name, x is None), []).append(point)
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for i, ((name, is_line), points) in enumerate(curves.items()):
        if is_line:
            axes.axhline(points[0][1], label=name, color=f"C{i}", linestyle="--")
        else:
            x, value, low, high = zip(*sorted(points))
            axes.plot(x, value, marker="o", label=name, color=f"C{i}")
            axes.fill_between(x, low, high, color=f"C{i}", alpha=0.15, linewidth=0)
            ticks.update(x)
    if ticks:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(ticks), [f"{x:g}" for x in sorted(ticks)])
    axes.set_ylabel("success %" if metric == "success" else f"{reward_name(results)} %")
    axes.legend()
    kind = os.path.splitext(path)[1][1:] or "png"
    with writing(path) as part:
        figure.savefig(part, dpi=150, format=kind)


# --- the report: one HTML file, which needs no server ---------------------------------------------

STYLE = """<!doctype html><meta charset="utf-8"><title>Episodes</title><style>
* {box-sizing: border-box}
body {margin: 0; font: 14px system-ui, sans-serif; color: #111}
nav {width: 24em; height: 100vh; overflow-y: auto; border-right: 1px solid #ccc}
header {padding: 8px}
summary {cursor: pointer; color: #555} summary b {color: #111} h3 {margin: 0 0 6px}
.task > summary {padding: 4px 8px; list-style: none}
.task > summary:hover {background: #eee} .task[open] > summary {background: #dbeafe}
.task > summary b {display: block} summary span {display: inline-block; width: 3.5em}
main {position: fixed; inset: 0 0 0 24em; overflow: auto; padding: 12px}
.side {display: flex; gap: 12px; margin-top: 12px} .side > * {flex: 1 1 0; min-width: 18em}
img {max-width: 100%; border: 1px solid #ccc}
pre {margin: 0; font: 12px ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere}
.box {margin: 6px 0; padding: 6px 8px; border-radius: 6px; background: #f3f4f6}
.assistant {margin-left: 1.5em; border-left: 6px solid #9ca3af}
.advantage {float: right; color: #555} .pass {color: #15803d} .fail {color: #b91c1c}
</style>
<nav><header>"""


def tag(name, style, text):
    """An HTML element of a text, which is escaped: a model wrote it."""
    return f'<{name} class="{style}">{html.escape(text)}</{name}>'


def folded(summary, content, attributes=""):
    return f"<details {attributes}><summary>{summary}</summary>{content}</details>"


def message(m, largest):
    """A message and its candidates, best first; the bars' colours are their advantages."""
    text = m.get("content", m.get("output", ""))
    parts, bar, advantage = [], "", m.get("advantage")
    if advantage is not None:
        hue = 142 if advantage > 0 else 0
        strength = min(1, abs(advantage) / largest)
        bar = f"border-color: hsl({hue} 70% {88 - 45 * strength:.0f}%)"
        parts.append(tag("span", "advantage", f"{advantage:.3f}"))
    parts.append(tag("pre", "", text))
    if m.get("output", text) != text:
        parts.append(folded("as sampled", tag("pre", "", m["output"])))
    if candidates := m.get("candidates"):
        ranked = sorted(candidates, key=lambda c: c.get("advantage", 0), reverse=True)
        shown = "".join(message(candidate, largest) for candidate in ranked)
        parts.append(folded(f"{len(candidates)} candidates", shown))
    style = f'class="box {html.escape(m.get("role", "assistant"))}" style="{bar}"'
    return f'<div {style}>{"".join(parts)}</div>'


def artifact(task, text, pictures):
    """An answer or a reference: of a page its picture, and the source folded."""
    source, page = tag("pre", "box", text), environment(task).page(text)
    if not page:
        return source
    return pictures.get(page, "") + folded("source", source)


def episode(number, record, pictures):
    """An episode: its answer, the verdicts, the dialogue."""
    parts = [artifact(record["task"], record.get("answer") or "", pictures)]
    if "failure" in record:
        parts.append(tag("div", "fail", record["failure"]))
    for name, verdict in record.get("tests", {}).items():
        style = "pass" if verdict == "pass" else "fail"
        parts.append(tag("div", style, f"{name}: {verdict}"))
    history = record["dialogue_history"]
    actions = history + [c for m in history for c in m.get("candidates", ())]
    largest = max(abs(action.get("advantage", 0)) for action in actions) or 1
    parts += [message(m, largest) for m in history]
    summary = f"<b>episode {number}: reward {record['reward']:.3f}</b>"
    return folded(summary, "".join(parts), 'class="episode"' + " open" * (number == 0))


def report_task(number, episodes, systems, pictures):
    """A task in the list, with each system's mean reward; open, it shows {system: [records]}."""
    task, means = next(iter(episodes.values()))[0]["task"], {}
    columns = [("hidden reference", artifact(task, hidden_information(task), pictures))]
    for system, records in episodes.items():
        means[system] = sum(record["reward"] for record in records) / len(records)
        columns.append((system, "".join(episode(i, record, pictures)
                                        for i, record in enumerate(records))))
    summary = [tag("b", "", task["problem_description"][:90])]
    for system in systems:
        summary.append(tag("span", "", f"{100 * means[system]:.0f}" if system in means else "-"))
    head = tag("h3", "", task_id(task)) + tag("pre", "", task["problem_description"])
    sections = [f"<section>{tag('h3', '', name)}{shown}</section>" for name, shown in columns]
    shown = f'<main>{head}<div class="side">{"".join(sections)}</div></main>'
    return folded("".join(summary), shown, 'class="task" name="task"' + " open" * (number == 0))


def draw(pages, args):
    """{page: <img> of a small picture} of the pages that can be drawn."""
    if not pages:
        return {}
    from PIL import Image
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for page, file in draw_pages(args, pages, folder).items():
            picture, jpeg = Image.open(file).convert("RGB"), io.BytesIO()
            picture.thumbnail((480, 1600))
            picture.save(jpeg, "jpeg", quality=80)
            data = base64.b64encode(jpeg.getvalue()).decode()
            found[page] = f'<img src="data:image/jpeg;base64,{data}">'
    return found


def write_report(path, systems, args):
    """Writes all episodes of all systems as HTML, by task."""
    tasks, pages = {}, set()
    for system in systems:
        for record in system.shown:
            task = record["task"]
            episodes = tasks.setdefault(task_id(task), {})
            episodes.setdefault(system.name, []).append(record)
            for text in (record.get("answer") or "", hidden_information(task)):
                pages.add(environment(task).page(text))
    pictures, names = draw(pages - {""}, args), [system.name for system in systems]
    note = html.escape(f"mean rewards of {', '.join(names)} in %")
    with writing(path) as part, open(part, "w", encoding="utf-8") as f:
        f.write(f"{STYLE}{len(tasks)} tasks; {note}</header>\n")
        for i, episodes in enumerate(tasks.values()):
            f.write(report_task(i, episodes, names, pictures) + "\n")


def check_writable(path):
    """Ends the program if a file can't be written, before the work; a file there stays as it is."""
    part = path + ".part"
    with fail_on_error(f"{path} can't be written", part=part):
        open(part, "w").close()
        os.remove(part)


def main(args):
    emit = open_stdout()
    if args.html and args.results:
        fail("--html shows episodes, and --results 1 has none")
    for path in filter(None, (args.html, args.plot)):
        check_writable(path)
    if args.results:
        fields = "system", "files", "rules", "tests_passed", "episodes", "tasks"
        results = [r for path in args.files for r in records_of(path, fields, args.skip_bad)]
    else:
        systems = named_systems(args.files)
        for system in systems:
            system.read(args)
        results = [result(system, systems, args.bootstrap) for system in systems]
        for r in results:
            emit(r)
    for text in table(results):
        say(text)
    if args.plot:
        plot(results, args.plot)
    if args.html:
        write_report(args.html, systems, args)


if __name__ == "__main__":
    run(main, get_args())
