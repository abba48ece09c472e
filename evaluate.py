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
letterbox     frontend, --resize both: likeness of the whole pages, not of their middle
not_drawn     frontend: share of the episodes whose page has no picture
copied        built-in tasks: share of the slots told by the human that the answer has right
wins          share of the tasks where the mean reward beats the first system's; a tie is half
missing       tasks that another system has and this one lacks, for each seed

Intervals (95 %) come from a bootstrap over tasks: a task is drawn with all its episodes, since
these are not independent. Differences and wins are taken on the tasks that both systems have,
drawn in pairs.
"""
from utils import (digest, fail, fail_on_error, open_stdout, parser, read_jsonl, run, say,
                   skip_bad_flag, version, writing)

import base64
import html
import io
import json
import os
import re
import sys
import tempfile

import numpy as np

from colbench import (agent_messages, browser_flags, draw_pages, environment, hidden_information,
                      needs, task_id)

METRICS = ("tests_passed", "success", "turns", "tokens", "cut", "unanswered", "letterbox",
           "not_drawn", "copied")  # in every result; an environment may have others
COMPARED = "success", "tests_passed"
OPTIONAL = {"cut %": "-", "letterbox %": "-", "not drawn %": "-", "copied %": "-", "seeds": "1",
            "missing": "0"}
NOTHING = 0, 0  # numerator and denominator


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [flags] [FILE | NAME=FILE,FILE,... ...] >> results.jsonl")
    p.add_argument("files", nargs="*", default=["-"], metavar="FILE | NAME=FILE,FILE,...",
                   help="a system's graded records, -: stdin; NAME=: its runs of several seeds")
    skip_bad_flag(p)
    p.add_argument("--bootstrap", type=int, default=2000, help="resamples; 0: no intervals")
    p.add_argument("--results", type=int, choices=[0, 1], default=0,
                   help="1: the files hold results of this program; nothing is measured anew")
    p.add_argument("--plot", metavar="FILE", help="draw a figure: the systems NAME@X are points "
                   "of a curve over X, others are level lines; needs matplotlib")
    p.add_argument("--html", metavar="FILE", help="write a page with every episode, all systems "
                   "side by side")
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
    """Yields the records of a file, or of stdin ("-")."""
    try:
        stream = sys.stdin if path == "-" else open(path, encoding="utf-8")
    except OSError as e:
        fail(f"{path}: {e.strerror}")
    yield from read_jsonl(stream, fields, "stdin" if path == "-" else path, skip_bad)


class System:
    """What is compared: a name, the files of its seeds, and its measures summed up by task.

    A task in the files of two seeds is two clusters, (file index, task id): two models played it.
    """

    def __init__(self, name, files):
        self.name, self.files, self.clusters, self.episodes = name, files, {}, 0
        self.rules, self.rewards = set(), set()

    def read(self, skip_bad, report):
        """Reads the files. Of episodes with the same task and sample in a file the first counts."""
        seen, repeated = set(), 0
        for i, path in enumerate(self.files):
            for record in records_of(path, needs("dialogue_history", "reward"), skip_bad):
                cluster = i, task_id(record["task"])
                key = cluster, record.get("sample")
                if key in seen:
                    repeated += 1
                    continue
                if "sample" in record:  # published episodes have none
                    seen.add(key)
                self.add(cluster, record)
                if report:
                    report.add(self.name, record)
        if repeated:
            say(f"{self.name}: {repeated} episodes, by task and sample, were there before and are "
                "not counted (several seeds? NAME=FILE,FILE)")

    def add(self, cluster, record):
        sums = self.clusters.setdefault(cluster, {})
        for metric, (numerator, denominator) in measure(record).items():
            before = sums.get(metric, NOTHING)
            sums[metric] = before[0] + numerator, before[1] + denominator
        self.episodes += 1
        self.rules.add(record.get("meta", {}).get("rules", "unknown"))
        self.rewards.add(environment(record["task"]).reward_name)


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


def minus_first(sums):
    """(clusters, 2 systems, 2) to the second system's ratio less the first one's."""
    return ratio(sums[:, 1]) - ratio(sums[:, 0])


def with_interval(statistic, clusters, resamples):
    """(value, [low, high]): statistic(clusters) and its bootstrap interval; None without either."""
    clusters, n = np.array(clusters, float), len(clusters)
    value = statistic(clusters) if n else np.nan
    if np.isnan(value):
        return None, None
    interval = None
    if resamples and n > 1:  # one task tells nothing of others
        rng = np.random.default_rng(0)
        draws = [statistic(clusters[rng.integers(n, size=n)]) for _ in range(resamples)]
        interval = [rounded(x) for x in np.nanpercentile(draws, (2.5, 97.5))]
    return rounded(value), interval


def rounded(x):
    return round(float(x), 4) + 0.0  # no -0.0


def measured_in(clusters, metric):
    """[(numerator, denominator)] of a metric in clusters."""
    return [sums.get(metric, NOTHING) for sums in clusters]


def result(system, systems, resamples):
    """The JSON record of a system."""
    clusters, everywhere = system.clusters, {key for s in systems for key in s.clusters}
    out = {"system": system.name, "files": system.files, "rules": sorted(system.rules),
           "rewards": sorted(system.rewards), "episodes": system.episodes,
           "tasks": len({task for _, task in clusters}), "version": version(),
           "missing": len(everywhere - clusters.keys())}
    others = {metric for s in systems for sums in s.clusters.values() for metric in sums}
    for metric in (*METRICS, *sorted(others - set(METRICS))):
        sums = measured_in(clusters.values(), metric)
        out[metric], out[f"{metric}_95"] = with_interval(ratio, sums, resamples)
    out["success_by_file"] = []
    for i in range(len(system.files)):
        of_file = [sums for (file, _), sums in clusters.items() if file == i]
        out["success_by_file"].append(with_interval(ratio, measured_in(of_file, "success"), 0)[0])
    if system is not systems[0]:
        out["minus_first"] = difference(systems[0], system, resamples)
    return out


def difference(first, system, resamples):
    """How a system differs from the first one, on the clusters of both."""
    common = [key for key in first.clusters if key in system.clusters]
    base, ours = ([s.clusters[key] for key in common] for s in (first, system))
    out = {"first": first.name, "clusters": len(common)}
    for metric in COMPARED:
        pairs = list(zip(measured_in(base, metric), measured_in(ours, metric)))
        out[metric], out[f"{metric}_95"] = with_interval(minus_first, pairs, resamples)
    pairs = zip(measured_in(base, "tests_passed"), measured_in(ours, "tests_passed"))
    wins = [(1 + np.sign(b[0] / b[1] - a[0] / a[1])) / 2 for a, b in pairs]
    out["wins"], out["wins_95"] = with_interval(np.mean, wins, resamples)
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


def row(r, mean, others):
    """{head: text} of a result in the table; others: metrics beyond METRICS."""
    cells = {"system": r["system"],
             f"{mean} %": percent(r["tests_passed"], r["tests_passed_95"]),
             "success %": percent(r["success"], r["success_95"])}
    for metric in ("turns", "tokens"):
        cells[metric] = "-" if r[metric] is None else f"{r[metric]:.1f}"
    cells["cut %"] = percent(r.get("cut") or None)  # no column if there are none
    cells["unanswered %"] = percent(r["unanswered"])
    cells["letterbox %"] = percent(r["letterbox"], r["letterbox_95"])
    cells["not drawn %"] = percent(r["not_drawn"])
    cells["copied %"] = percent(r["copied"])
    for metric in others:
        cells[f"{metric.replace('_', ' ')} %"] = percent(r.get(metric), r.get(f"{metric}_95"))
    cells |= {"seeds": str(len(r["files"])), "episodes": str(r["episodes"]),
              "tasks": str(r["tasks"]), "missing": str(r["missing"])}
    if d := r.get("minus_first"):
        cells["success - first"] = percent(d["success"], d["success_95"], "+")
        cells[f"{mean} - first"] = percent(d["tests_passed"], d["tests_passed_95"], "+")
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
    rows = [row(r, mean, sorted(measured - set(METRICS))) for r in results]
    heads = list(max(rows, key=len))  # the first system has no differences
    for head, nothing in OPTIONAL.items():
        if all(cells[head] == nothing for cells in rows):
            heads.remove(head)
    if "not drawn %" not in heads and "wins %" in heads:
        heads.remove("wins %")
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
    """A figure of success, or else of the mean reward.

    Systems NAME@X are the points of a curve NAME over X, others are level lines.
    """
    try:
        import matplotlib
    except ImportError:
        fail("--plot wants matplotlib: pip install matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot
    metric = "success" if any(r["success"] is not None for r in results) else "tests_passed"
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    curves = {}  # {name: [(x or None, value, low, high)]}, in the order of the results
    for r in results:
        if r[metric] is not None:
            name, x = r["system"], None
            if at := re.fullmatch(r"(.+)@(\d+\.?\d*)", name):
                name, x = at[1], float(at[2])
            low, high = r[f"{metric}_95"] or (r[metric], r[metric])
            curves.setdefault(name, []).append((x, 100 * r[metric], 100 * low, 100 * high))
    ticks = set()
    for i, (name, points) in enumerate(curves.items()):
        if points[0][0] is None:
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
    with writing(path) as part:
        figure.savefig(part, dpi=150, format=os.path.splitext(path)[1][1:] or "png")
    pyplot.close(figure)


# --- the report: one HTML file, which needs no server ---------------------------------------------

STYLE = """<!doctype html><meta charset="utf-8"><title>Episodes</title><style>
* {box-sizing: border-box}
body {margin: 0; display: flex; height: 100vh; font: 14px system-ui, sans-serif; color: #111}
nav {width: 24em; flex: none; display: flex; flex-direction: column; border-right: 1px solid #ccc}
header {padding: 8px; display: grid; gap: 6px}
ol {list-style: none; margin: 0; padding: 0; overflow-y: auto}
li {padding: 4px 8px; cursor: pointer; content-visibility: auto}
li:hover {background: #eee} li.open {background: #dbeafe}
li b {display: block} li span {display: inline-block; width: 3.5em}
li span, summary, .advantage, #count {color: #555}
main {flex: 1; overflow: auto; padding: 12px} h3 {margin: 0 0 6px} summary {cursor: pointer}
.side {display: flex; gap: 12px; margin-top: 12px} .side > * {flex: 1 1 0; min-width: 18em}
img {max-width: 100%; border: 1px solid #ccc} img:not([src]) {display: none}
pre {margin: 0; font: 12px ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere}
.box {margin: 6px 0; padding: 6px 8px; border-radius: 6px; background: #f3f4f6}
.assistant {margin-left: 1.5em; border-left: 6px solid #9ca3af} .advantage {float: right}
.episode > summary {font-weight: 600; margin: 6px 0} .pass {color: #15803d} .fail {color: #b91c1c}
</style>
<nav><header><input id="search" placeholder="search in everything said"><select id="outcome">
<option value="">all outcomes<option value="all">solved by all systems
<option value="some">solved by some, not by all<option value="none">solved by none
<option value="differ">mean rewards differ</select><div id="count"></div></header>
"""
SCRIPT = """<script>
const list = document.querySelector('ol'), main = document.querySelector('main');
const [search, outcome, count, pictures] =
  ['search', 'outcome', 'count', 'pictures'].map(id => document.getElementById(id));
const rows = [...list.children], drawn = JSON.parse(pictures.textContent);
function show(row) {
  list.querySelector('.open')?.classList.remove('open');
  row.classList.add('open');
  main.replaceChildren(row.querySelector('template').content.cloneNode(true));
  for (const img of main.querySelectorAll('img'))
    if (drawn[img.dataset.page]) img.src = drawn[img.dataset.page];
  main.scrollTop = 0;
}
function filter() {
  const kept = rows.filter(row => {
    row.said ??= row.querySelector('template').content.textContent.toLowerCase();
    return row.said.includes(search.value.toLowerCase()) &&
      (!outcome.value || row.dataset.outcomes.split(' ').includes(outcome.value));
  });
  list.replaceChildren(...kept);
  count.textContent = `${kept.length} of ${rows.length} tasks; ${list.dataset.note}`;
}
for (const row of rows) row.onclick = () => show(row);
search.oninput = outcome.onchange = filter;
filter();
if (rows.length) show(rows[0]);
</script>
"""


def pre(text, style=""):
    return f'<pre class="{style}">{html.escape(text)}</pre>'


def line(style, text):
    return f'<div class="{style}">{html.escape(text)}</div>'


def folded(summary, content, attributes=""):
    return f"<details {attributes}><summary>{summary}</summary>{content}</details>"


def message(m, largest):
    """A message and its candidates, best first; the bars' colours are their advantages."""
    parts, bar, advantage = [], "", m.get("advantage")
    if advantage is not None:
        hue, strength = (142 if advantage > 0 else 0), min(1, abs(advantage) / largest)
        bar = f"border-color: hsl({hue} 70% {88 - 45 * strength:.0f}%)"
        parts.append(f'<span class="advantage">{advantage:.3f}</span>')
    parts.append(pre(m["content"]))
    if m.get("output", m["content"]) != m["content"]:
        parts.append(folded("as sampled", pre(m["output"])))
    if candidates := m.get("candidates"):
        ranked = sorted(candidates, key=lambda c: c.get("advantage", 0), reverse=True)
        ranked = [{"role": "assistant", "content": c.get("output", ""), **c} for c in ranked]
        shown = "".join(message(c, largest) for c in ranked)
        parts.append(folded(f"{len(candidates)} candidates", shown))
    return f'<div class="box {m["role"]}" style="{bar}">{"".join(parts)}</div>'


class Report:
    """The episodes of all systems as HTML, by task. All texts are escaped: a model wrote them."""

    def __init__(self):
        self.tasks, self.pages = {}, set()

    def add(self, system, record):
        task = record["task"]
        if task_id(task) not in self.tasks:
            reference = self.artifact(task, hidden_information(task))
            self.tasks[task_id(task)] = {
                "name": task["problem_description"][:90], "episodes": {},
                "head": f"<h3>{html.escape(task_id(task))}</h3>{pre(task['problem_description'])}",
                "reference": f"<section><h3>hidden reference</h3>{reference}</section>"}
        episodes = self.tasks[task_id(task)]["episodes"]
        episodes.setdefault(system, []).append((record["reward"], self.episode(record)))

    def artifact(self, task, text):
        """An answer or a reference: of a page its picture, and the source folded."""
        page = environment(task).page(text)
        if not page:
            return pre(text, "box")
        self.pages.add(page)
        return f'<img data-page="{digest(page)}">' + folded("source", pre(text, "box"))

    def episode(self, record):
        parts = [self.artifact(record["task"], record.get("answer") or "")]
        if "failure" in record:
            parts.append(line("fail", record["failure"]))
        for name, verdict in record.get("tests", {}).items():
            parts.append(line("pass" if verdict == "pass" else "fail", f"{name}: {verdict}"))
        history = record["dialogue_history"]
        actions = [action for m in history for action in (m, *m.get("candidates", ()))]
        largest = max([1e-9, *(abs(action.get("advantage", 0)) for action in actions)])
        return "".join(parts + [message(m, largest) for m in history])

    def row(self, task, systems):
        """A task in the list: its name, each system's mean reward, and what a click shows."""
        means, shown = {}, [task["reference"]]
        for system, episodes in task["episodes"].items():
            means[system] = sum(reward for reward, _ in episodes) / len(episodes)
            shown.append(f"<section><h3>{html.escape(system)}</h3>")
            for i, (reward, episode) in enumerate(episodes):
                attributes = 'class="episode"' + (" open" if i == 0 else "")
                shown.append(folded(f"episode {i}: reward {reward:.3f}", episode, attributes))
            shown.append("</section>")
        solved = sum(mean >= 1 for mean in means.values())
        outcomes = "none" if not solved else "all" if solved == len(means) else "some"
        if len(set(means.values())) > 1:
            outcomes += " differ"
        cells = [f"{100 * means[s]:.0f}" if s in means else "-" for s in systems]
        spans = "".join(f"<span>{cell}</span>" for cell in cells)
        return (f'<li data-outcomes="{outcomes}"><b>{html.escape(task["name"])}</b>{spans}'
                f'<template>{task["head"]}<div class="side">{"".join(shown)}</div></template></li>')

    def pictures(self, args):
        """{digest of a page: small picture, as data URL} of the pages that can be drawn."""
        found = {}
        if self.pages:
            from PIL import Image
            with tempfile.TemporaryDirectory() as folder:
                for page, file in draw_pages(args, self.pages, folder).items():
                    picture, jpeg = Image.open(file).convert("RGB"), io.BytesIO()
                    picture.thumbnail((480, 1600))
                    picture.save(jpeg, "jpeg", quality=80)
                    data = base64.b64encode(jpeg.getvalue()).decode()
                    found[digest(page)] = "data:image/jpeg;base64," + data
        return found

    def write(self, path, systems, args):
        pictures = json.dumps(self.pictures(args))
        note = html.escape(f"mean rewards of {', '.join(systems)} in %")
        with writing(path) as part, open(part, "w", encoding="utf-8") as f:
            f.write(f'{STYLE}<ol data-note="{note}">\n')
            for task in self.tasks.values():
                f.write(self.row(task, systems) + "\n")
            f.write("</ol></nav><main></main>\n")
            f.write(f'<script type="application/json" id="pictures">{pictures}</script>{SCRIPT}')


def check_writable(path):
    """Ends the program if a file can't be written, before the work; a file there stays as it is."""
    part = path + ".part"
    with fail_on_error(f"{path} can't be written", part=part):
        open(part, "w").close()
        os.remove(part)


def main(args):
    emit, report = open_stdout(), None
    if args.html and args.results:
        fail("--html shows episodes, and --results 1 has none")
    for path in filter(None, (args.html, args.plot)):
        check_writable(path)
    if args.html:
        report = Report()
    if args.results:
        fields = "system", "rules", "tests_passed"
        results = [r for path in args.files for r in records_of(path, fields, args.skip_bad)]
    else:
        systems = named_systems(args.files)
        for system in systems:
            system.read(args.skip_bad, report)
        results = [result(system, systems, args.bootstrap) for system in systems]
        for r in results:
            emit(r)
    for text in table(results):
        say(text)
    if args.plot:
        plot(results, args.plot)
    if report:
        report.write(args.html, [r["system"] for r in results], args)


if __name__ == "__main__":
    run(main, get_args())
