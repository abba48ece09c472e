"""Measures systems by their graded episodes, with 95 % intervals, and compares each with the first one.

    python evaluate.py base.jsonl rft.jsonl sweet.jsonl >> results.jsonl        # the table goes to stderr
    python evaluate.py base=base0.jsonl,base1.jsonl sweet=sweet0.jsonl,sweet1.jsonl       # several seeds as one system
    python collect.py --model runs/base < test.jsonl | tee base.jsonl | python evaluate.py
    python evaluate.py base.jsonl sweet.jsonl --html report.html        # and every episode, to look at
    python evaluate.py --results 1 results*.jsonl --plot figure.png     # earlier results: one table, one figure

tests_passed  the mean reward: share of the hidden tests passed; of frontend tasks how alike the
              pages look. The table's head is the first word of the kind's reward_name.
success       share of the episodes of reward 1 (not of frontend tasks)
turns         messages of the agent; tokens: what it sampled in all of them
unanswered    share of the episodes whose rounds ran out: the last message was graded, but it is no answer
letterbox     frontend tasks graded by CLIP with --resize both: how alike the whole pages look, not their middle
not_drawn     frontend tasks: share of the episodes without a picture
copied        built-in tasks: of the final function's slots that the human told, the share with the value told

missing       tasks, of each seed, that another system has and this one lacks: its human or server failed, say

Intervals come from a bootstrap over tasks: a resampled task brings all its episodes, for they are not independent.
A difference to the first system is taken on the tasks that both have, resampled in pairs; so are wins, the share of
these tasks with a higher mean reward than the first system's, a tie counting half.
"""
from utils import (fail, open_stdout, parser, read_jsonl, run, say, skip_bad_flag,
                   version, writing)

import base64
import io
import json
import os
import re
import sys
import tempfile

import numpy as np

from colbench import (ANSWER, ENVIRONMENTS, agent_messages, browser_flags, draw_pages, environment,
                      hidden_information, kind_of, needs, slots_of, task_id)

METRICS = ("tests_passed", "success", "turns", "tokens", "unanswered", "letterbox", "not_drawn", "copied")
COMPARED = ("success", "tests_passed")


def get_args(argv=None):
    p = parser(__doc__)
    p.add_argument("files", nargs="*", default=["-"], metavar="FILE | NAME=FILE,FILE,...",
                   help="a system's graded records; with NAME=, its runs of several seeds; -: stdin")
    skip_bad_flag(p)
    p.add_argument("--bootstrap", type=int, default=2000, help="resamples of the tasks; 0: no intervals")
    p.add_argument("--results", type=int, choices=[0, 1], default=0,
                   help="1: the files hold what this program wrote; nothing is measured anew")
    p.add_argument("--plot", metavar="FILE", help="draw the systems: NAME@X is the point at X of the curve NAME (best "
                   "of X, X trajectories), others are level lines; wants matplotlib")
    p.add_argument("--html", metavar="FILE", help="write a page that shows every episode, all systems side by side")
    browser_flags(p)
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
    agent, measured = agent_messages(record), environment(record["task"]).measured
    sampled = [len(m["token_ids"]) for m in agent if "token_ids" in m]
    unanswered = not agent or ANSWER not in agent[-1]["content"]
    of_kind = {"success": (record["reward"] >= 1, 1), "unanswered": (unanswered, 1),
               "not_drawn": ("failure" in record, 1), "copied": copied(record)}
    found = {"tests_passed": (record["reward"], 1), "turns": (len(agent), 1),
             "tokens": (sum(sampled), bool(sampled)),
             "letterbox": (record.get("reward_letterbox", 0), "reward_letterbox" in record)}
    found |= {name: of_kind[name] for name in measured}
    return np.array([found.get(name, (0, 0)) for name in METRICS], float)


# --- systems ----------------------------------------------------------------------------------------------------------

def opened(path):
    try:
        return sys.stdin if path == "-" else open(path, encoding="utf-8")
    except OSError as e:
        fail(f"{path}: {e.strerror}")


def read_system(name, files, skip_bad, keep):
    """The records of a system, summed by task: {"clusters": {(file index, task id): measures}, "rules", ...}.

    keep(system's name, record) is called with each. Of a file's episodes with the same task and
    sample the first counts.
    """
    clusters, episodes, rules, rewards, seen, repeated = {}, 0, set(), set(), {}, 0
    for i, path in enumerate(files):
        for record in read_jsonl(opened(path), needs("dialogue_history", "reward"), "stdin" if path == "-" else path, skip_bad):
            key = i, task_id(record["task"])  # a task in two seeds' files is two clusters: two models played it
            if "sample" in record:  # published episodes have none
                samples = seen.setdefault(key, set())
                if record["sample"] in samples:
                    repeated += 1
                    continue
                samples.add(record["sample"])
            clusters[key] = clusters.get(key, 0) + measure(record)
            episodes += 1
            rules.add(record.get("meta", {}).get("rules", "unknown"))
            rewards.add(environment(record["task"]).reward_name)
            keep(name, record)
    if repeated:
        say(f"{name}: {repeated} episodes, by task and sample, were there before and are not "
            "counted (several seeds? NAME=FILE,FILE)")
    return {"name": name, "files": files, "clusters": clusters, "episodes": episodes,
            "rules": sorted(rules), "rewards": sorted(rewards)}


def read_systems(args, skip_bad, keep=lambda *_: None):
    """The systems of the command line. A single file is named by its stem, or its path where two stems are the same."""
    stem = lambda path: "stdin" if path == "-" else os.path.splitext(os.path.basename(path))[0]
    stems, systems = [stem(a) for a in args], []
    for a in args:
        name, named, files = a.partition("=")
        if named and not os.path.exists(a):  # runs/lr=1/test.jsonl is a file
            systems.append(read_system(name, files.split(","), skip_bad, keep))
        else:
            systems.append(read_system(stem(a) if stems.count(stem(a)) == 1 else a, [a], skip_bad, keep))
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


def result(system, systems, resamples):
    """The JSON record of a system; `minus_first` compares it with the first one, on common (file index, task)s."""
    clusters, first = system["clusters"], systems[0]
    out = {"system": system["name"], "files": system["files"], "rules": system["rules"],
           "rewards": system["rewards"], "episodes": system["episodes"],
           "tasks": len({task for _, task in clusters}), "version": version(),
           "missing": len({key for s in systems for key in s["clusters"]} - clusters.keys())}
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


def reward_name(results):
    """What the rewards are: "tests passed", "likeness"; of several kinds "reward"."""
    older = lambda r: ["likeness" if r["success"] is None else "tests passed"]
    names = {name for r in results for name in r.get("rewards") or older(r)}
    return names.pop() if len(names) == 1 else "reward"


def table(results):
    """Lines of aligned text, one per system, and under them what the numbers rest on."""
    mean = reward_name(results).partition(" ")[0]
    pages, boxed = (any(r[k] is not None for r in results) for k in ("not_drawn", "letterbox"))
    seeds, missing = any(len(r["files"]) > 1 for r in results), any(r.get("missing") for r in results)
    rows = [["system", f"{mean} %", "success %", "turns", "tokens", "unanswered %",
             *["letterbox %"] * boxed, *["not drawn %"] * pages, "copied %",
             *["seeds"] * seeds, "episodes", "tasks", *["missing"] * missing,
             *["success - first", f"{mean} - first", *["wins %"] * pages, "common"]
             * (len(results) > 1)]]
    for r in results:
        d = r.get("minus_first")
        rows.append([r["system"], *(percent(r[k], r[k + "_95"]) for k in ("tests_passed", "success")),
                     *("-" if r[k] is None else f"{r[k]:.1f}" for k in ("turns", "tokens")),
                     percent(r["unanswered"]), *[percent(r["letterbox"], r["letterbox_95"])] * boxed,
                     *(percent(r[k]) for k in (*["not_drawn"] * pages, "copied")),
                     *[str(len(r["files"]))] * seeds, str(r["episodes"]), str(r["tasks"]),
                     *[str(r.get("missing", "-"))] * missing,
                     *([percent(d[k], d[k + "_95"], "+") for k in COMPARED] +
                       [percent(d["wins"], d["wins_95"])] * pages + [str(d["clusters"])] if d else [])])
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(rows[-1]))]
    lines = ["  ".join(f"{c:>{w}}" if i else f"{c:<{w}}" for i, (c, w) in enumerate(zip(row, widths))) for row in rows]
    rules = sorted({rule for r in results for rule in r["rules"]})
    return [*lines, "[95 % bootstrap intervals over tasks]; grader's rules: "
            + ", ".join(rules) + "; NOT COMPARABLE" * (len(rules) > 1)]


def plot(results, path):
    """Success, or else the mean reward: a curve over X of the systems NAME@X, others as levels."""
    try:
        import matplotlib
    except ImportError:
        fail("--plot wants matplotlib: pip install matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot
    metric = "success" if any(r["success"] is not None for r in results) else "tests_passed"
    curves, (figure, axes) = {}, pyplot.subplots(figsize=(6, 4), layout="constrained")
    for r in (r for r in results if r[metric] is not None):
        at = re.fullmatch(r"(.+)@(\d+\.?\d*)", r["system"])
        curves.setdefault(at[1] if at else r["system"], []).append((float(at[2]) if at else None, 100 * r[metric], [
            100 * y for y in r[metric + "_95"] or (r[metric],) * 2]))
    for i, (name, points) in enumerate(curves.items()):
        if points[0][0] is None:
            axes.axhline(points[0][1], label=name, color=f"C{i}", linestyle="--")
        else:
            x, y, interval = zip(*sorted(points))
            axes.plot(x, y, marker="o", label=name, color=f"C{i}")
            axes.fill_between(x, *zip(*interval), color=f"C{i}", alpha=0.15, linewidth=0)
    if xs := sorted({x for points in curves.values() for x, *_ in points if x is not None}):
        axes.set_xscale("log", base=2)
        axes.set_xticks(xs, [f"{x:g}" for x in xs])
    axes.set_ylabel("success %" if metric == "success" else f"{reward_name(results)} %")
    axes.legend()
    with writing(path, path + ".part"):
        figure.savefig(path + ".part", dpi=150, format=os.path.splitext(path)[1][1:] or "png")
        os.replace(path + ".part", path)
    pyplot.close(figure)


# --- the report: one file, which needs no server ----------------------------------------------------------------------

REPORT = """<!doctype html><meta charset="utf-8"><title>Episodes</title><style>
* {box-sizing: border-box} body {margin: 0; font: 14px system-ui, sans-serif; color: #111; display: flex; height: 100vh}
nav {width: 24em; flex: none; border-right: 1px solid #ccc; display: flex; flex-direction: column}
form {padding: 8px; display: grid; gap: 6px} input, select {font: inherit; padding: 3px; width: 100%}
ol {list-style: none; margin: 0; padding: 0; overflow-y: auto; flex: 1} li {padding: 4px 8px; cursor: pointer;
content-visibility: auto; contain-intrinsic-size: auto 2.4em} li:hover {background: #eee} li.open {background: #dbeafe}
li b {display: block; font-weight: 600} li span {display: inline-block; width: 3.5em}
#count, li span, summary, .n {color: #555}
main {flex: 1; overflow: auto; padding: 12px} .side {display: flex; gap: 12px; align-items: flex-start}
.side > * {flex: 1 1 0; min-width: 18em} h3 {margin: 0 0 6px} img {max-width: 100%; border: 1px solid #ccc}
pre {white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font: 12px ui-monospace, monospace}
.m {border-radius: 6px; padding: 6px 8px; margin: 6px 0; background: #f3f4f6} .pass {color: #15803d}
.assistant {margin-left: 1.5em; border-left: 6px solid #9ca3af} .fail {color: #b91c1c} button {font: inherit}
summary {cursor: pointer} .n {float: right}</style>
<nav><form><input id="search" placeholder="search in everything said"><select id="outcome">
<option value="">all outcomes</option><option value="1">solved by all systems</option>
<option value="some">solved by some, not by all</option><option value="0">solved by none</option>
<option value="differ">mean rewards differ</option></select><div id="count"></div></form><ol></ol></nav><main></main>
<script type="application/json" id="data">DATA</script><script>
const {systems, tasks, pictures} = JSON.parse(document.getElementById('data').textContent);
const $ = id => document.getElementById(id), list = document.querySelector('ol'), main = document.querySelector('main');
// every text goes in by textContent: what a model wrote is never markup
const el = (tag, style, text, ...kids) => {
  const e = document.createElement(tag);
  e.className = style || ''; if (text != null) e.textContent = text; e.append(...kids.filter(k => k)); return e;
};
const mean = (t, s) => { const r = t.episodes.filter(e => e.system == s).map(e => e.reward);
                         return r.length ? r.reduce((a, b) => a + b) / r.length : null; };
for (const t of tasks) {
  t.means = systems.map(s => mean(t, s)); t.row = el('li', '', null, el('b', '', t.description.slice(0, 90)),
    ...t.means.map(m => el('span', '', m == null ? '-' : (100 * m).toFixed(0))));
  t.row.onclick = () => show(t);
}
function keeps(t, words, outcome) {
  const means = t.means.filter(m => m != null), solved = means.filter(m => m >= 1).length;
  if (outcome == '1' && solved < means.length || outcome == '0' && solved ||
      outcome == 'some' && (!solved || solved == means.length) ||
      outcome == 'differ' && new Set(means).size < 2) return false;
  t.said ??= JSON.stringify([t.id, t.description, t.reference, t.episodes]).toLowerCase();
  return !words || t.said.includes(words);
}
function filter() {
  const words = JSON.stringify($('search').value.toLowerCase()).slice(1, -1), outcome = $('outcome').value;
  const kept = tasks.filter(t => keeps(t, words, outcome));
  list.replaceChildren(...kept.map(t => t.row));
  $('count').textContent = kept.length + ' of ' + tasks.length + ' tasks; rewards of ' + systems.join(', ') + ' in %';
  return kept;
}
function artifact(text, picture, title) {
  const img = picture != null && el('img'); if (img) img.src = pictures[picture];
  const code = el('pre', 'm', text); if (!img) return el('div', '', null, el('h3', '', title), code);
  return el('div', '', null, el('h3', '', title), img, el('details', '', null, el('summary', '', 'source'), code));
}
function message(m, largest) {
  const box = el('div', 'm ' + m.role, null, m.advantage == null ? '' : el('span', 'n', m.advantage.toFixed(3)),
                 el('pre', '', m.content));
  if (m.advantage != null) box.style.borderLeftColor = colour(m.advantage / largest);
  if (m.output) box.append(el('details', '', null, el('summary', '', 'as sampled'), el('pre', '', m.output)));
  if (m.candidates) box.append(el('details', '', null, el('summary', '', m.candidates.length + ' candidates'),
    ...[...m.candidates].sort((a, b) => (b.advantage ?? 0) - (a.advantage ?? 0)).map(c => message(c, largest))));
  return box;
}
const colour = x => `hsl(${x > 0 ? 142 : 0} 70% ${88 - 45 * Math.min(1, Math.abs(x))}%)`;
function episode(e) {
  const all = e.dialogue.flatMap(m => [m, ...(m.candidates || [])]).map(m => Math.abs(m.advantage ?? 0));
  const largest = Math.max(1e-9, ...all);
  const tests = Object.entries(e.tests || {}).map(([k, v]) => el('div', v == 'pass' ? 'pass' : 'fail', k + ': ' + v));
  return el('div', '', null, artifact(e.answer, e.picture, 'reward ' + e.reward.toFixed(3)),
            e.failure ? el('div', 'fail', e.failure) : '', ...tests, ...e.dialogue.map(m => message(m, largest)));
}
function column(s, episodes) {
  const place = el('div'), choose = e => place.replaceChildren(episode(e));
  const buttons = episodes.map((e, i) => { const b = el('button', '', i); b.onclick = () => choose(e); return b; });
  choose(episodes[0]);
  return el('section', '', null, el('h3', '', s), ...(episodes.length > 1 ? ['episode ', ...buttons] : []), place);
}
function show(t) {
  document.querySelector('li.open')?.classList.remove('open'); t.row.classList.add('open');
  const by = systems.map(s => [s, t.episodes.filter(e => e.system == s)]).filter(([, e]) => e.length);
  main.replaceChildren(el('h3', '', t.id), el('pre', '', t.description), el('div', 'side', null,
    artifact(t.reference, t.picture, 'hidden reference'), ...by.map(([s, e]) => column(s, e))));
  main.scrollTop = 0;
}
$('search').oninput = $('outcome').onchange = filter; document.querySelector('form').onsubmit = () => false;
const first = filter()[0]; if (first) show(first);
</script>"""


class Report:
    """The episodes of all systems by task, for REPORT."""

    def __init__(self):
        self.tasks, self.pictures = {}, []

    def add(self, system, record):
        task = record["task"]
        shown = self.tasks.setdefault(task_id(task), {
            "id": task_id(task), "kind": kind_of(task), "description": task["problem_description"],
            "reference": hidden_information(task), "episodes": []})
        text = lambda m: {k: m[k] for k in ("role", "content", "advantage") if k in m} | (
            {"output": m["output"]} if m.get("output", m["content"]) != m["content"] else {})
        candidates = lambda m: [{"role": "assistant", "content": c.get("output", ""), "advantage": c.get("advantage")}
                                for c in m["candidates"]]
        dialogue = [text(m) | ({"candidates": candidates(m)} if m.get("candidates") else {})
                    for m in record["dialogue_history"]]
        shown["episodes"].append({"system": system, "answer": record.get("answer") or "", "dialogue": dialogue,
                                  **{k: record[k] for k in ("reward", "tests", "failure") if k in record}})

    def draw(self, args):
        """Adds small pictures of the references' and the answers' pages, each once."""
        at = {}
        for t in self.tasks.values():
            page_of = ENVIRONMENTS[t["kind"]].page
            for shown, text in ((t, t["reference"]), *((e, e["answer"]) for e in t["episodes"])):
                at.setdefault(page_of(text), []).append(shown)
        at.pop("", None)
        if not at:
            return
        from PIL import Image

        with tempfile.TemporaryDirectory() as folder:
            for page, file in draw_pages(args, at, folder).items():
                picture, jpeg = Image.open(file).convert("RGB"), io.BytesIO()
                picture.thumbnail((480, 1600))
                picture.save(jpeg, "jpeg", quality=80)
                for shown in at[page]:
                    shown["picture"] = len(self.pictures)
                encoded = base64.b64encode(jpeg.getvalue()).decode()
                self.pictures.append("data:image/jpeg;base64," + encoded)

    def write(self, path, systems, args):
        self.draw(args)
        data = {"systems": systems, "tasks": list(self.tasks.values()), "pictures": self.pictures}
        data = json.dumps(data).replace("<", "\\u003c")
        with writing(path, path + ".part"):
            with open(path + ".part", "w", encoding="utf-8") as f:
                f.write(REPORT.replace("DATA", data, 1))
            os.replace(path + ".part", path)


def main(args):
    emit, report = open_stdout(), Report()
    if args.html and args.results:
        fail("--html shows episodes, and --results 1 has none")
    for path in filter(None, (args.html, args.plot)):  # before the work
        with writing(path):
            open(path + ".part", "w").close()
            os.remove(path + ".part")
    if args.results:
        results = [r for path in args.files for r in read_jsonl(
            opened(path), ("system", "rules", *METRICS[:1]), "stdin" if path == "-" else path, args.skip_bad)]
    else:
        systems = read_systems(args.files, args.skip_bad, *[report.add] * bool(args.html))
        results = [result(system, systems, args.bootstrap) for system in systems]
        for r in results:
            emit(r)
    for line in table(results):
        say(line)
    if args.plot:
        plot(results, args.plot)
    if args.html:
        report.write(args.html, [r["system"] for r in results], args)


if __name__ == "__main__":
    run(main, get_args())
