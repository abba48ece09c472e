"""Writes a self-contained HTML page that shows all episodes of systems, task by task, side by side.

    python tests/experiments/report.py base.jsonl sweet=a.jsonl,b.jsonl > report.html

Systems are named as for evaluate.py. Web pages of frontend tasks are shown as pictures.
"""
import base64
import html
import io
import os
import sys
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", ".."))
from colbench import (GraderError, Renderer, RenderError, cpus, environment, extract_page,
                      hidden_information, read_records, task_id)
from evaluate import named_systems
from utils import fail, parser

STYLE = """<!doctype html><meta charset="utf-8"><title>Episodes</title><style>
body {margin: 0; font: 14px system-ui, sans-serif}
nav {width: 24em; height: 100vh; overflow-y: auto}
main {position: fixed; inset: 0 0 0 25em; overflow: auto}
.side {display: flex; gap: 12px} .side > * {flex: 1 1 0; min-width: 18em}
.task > summary b {display: block} .task > summary span {display: inline-block; width: 3.5em}
.task[open] > summary {background: #dbeafe}
img {max-width: 100%; border: 1px solid #ccc}
pre {margin: 0; white-space: pre-wrap; overflow-wrap: anywhere}
.box {margin: 6px 0; padding: 6px; background: #f3f4f6}
.assistant {margin-left: 1.5em; border-left: 6px solid #9ca3af}
.pass {color: #15803d} .fail {color: #b91c1c}
</style>
<nav>"""


def tag(name, style, text):
    """Returns an HTML element. Escapes its text, which a model may have written."""
    return f'<{name} class="{style}">{html.escape(text)}</{name}>'


def folded(summary, content, attributes=""):
    return f"<details {attributes}><summary>{summary}</summary>{content}</details>"


def message(m):
    """Shows a message's raw output, advantage, and folded candidates, best first."""
    parts = []
    if "advantage" in m:
        parts.append(tag("b", "advantage", f"{m['advantage']:+.3f}"))
    parts.append(tag("pre", "", m.get("output") or m.get("content", "")))
    if candidates := m.get("candidates"):
        ranked = sorted(candidates, key=lambda c: c.get("advantage", 0), reverse=True)
        parts.append(folded(f"{len(candidates)} candidates", "".join(map(message, ranked))))
    return f'<div class="box {html.escape(m.get("role", "assistant"))}">{"".join(parts)}</div>'


def artifact(task, text, pictures):
    """Shows an answer or a reference; a web page as a picture, with its source folded."""
    source, page = tag("pre", "box", text), extract_page(text)
    if not (page and environment(task).shows_pages):
        return source
    return pictures.get(page, "") + folded("source", source)


def episode(number, record, pictures):
    """Shows an episode: answer, verdicts, dialogue."""
    parts = [artifact(record["task"], record.get("answer") or "", pictures)]
    if "failure" in record:
        parts.append(tag("div", "fail", record["failure"]))
    for name, verdict in record.get("tests", {}).items():
        style = "pass" if verdict == "pass" else "fail"
        parts.append(tag("div", style, f"{name}: {verdict}"))
    parts += map(message, record["dialogue_history"])
    summary = f"<b>episode {number}: reward {record['reward']:.3f}</b>"
    return folded(summary, "".join(parts), 'class="episode"' + " open" * (number == 0))


def report_task(number, episodes, systems, pictures):
    """Shows a task: mean rewards in the list, its episodes, {system: [records]}, if unfolded."""
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
    sections = [f"<section>{tag('h3', '', name)}{content}</section>" for name, content in columns]
    content = f'<main>{head}<div class="side">{"".join(sections)}</div></main>'
    return folded("".join(summary), content, 'class="task" name="task"' + " open" * (number == 0))


def render_pages(pages):
    """Returns {page: <img> element}, without the pages that can't be rendered."""
    if not pages:
        return {}
    from PIL import Image

    def thumbnail(page):
        try:
            rendered = renderer.render(page)
        except RenderError:
            return None
        picture, jpeg = Image.open(io.BytesIO(rendered["png"])).convert("RGB"), io.BytesIO()
        picture.thumbnail((480, 1600))
        picture.save(jpeg, "jpeg", quality=80)
        data = base64.b64encode(jpeg.getvalue()).decode()
        return f'<img src="data:image/jpeg;base64,{data}">'
    try:
        with Renderer(cpus()) as renderer, ThreadPoolExecutor(cpus()) as pool:
            return {page: image for page, image in zip(pages, pool.map(thumbnail, pages)) if image}
    except GraderError as e:  # the browser can't start
        fail(e)


def main(args):
    tasks, pages, systems = {}, set(), named_systems(args.files)
    for system in systems:
        for path in system.files:
            with open(path, encoding="utf-8") as f:
                for record in read_records(f, "dialogue_history", "reward", source=path):
                    task = record["task"]
                    episodes = tasks.setdefault(task_id(task), {})
                    episodes.setdefault(system.name, []).append(record)
                    if environment(task).shows_pages:
                        pages |= {*map(extract_page, (record.get("answer"),
                                                      hidden_information(task)))}
    pictures, names = render_pages(pages - {""}), [system.name for system in systems]
    print(STYLE + html.escape(f"{len(tasks)} tasks; mean rewards of {', '.join(names)} in %"))
    for i, episodes in enumerate(tasks.values()):
        print(report_task(i, episodes, names, pictures))


if __name__ == "__main__":
    p = parser(__doc__, "%(prog)s FILE | NAME=FILE,FILE,... ... > report.html")
    p.add_argument("files", nargs="+", metavar="FILE", help="graded records of one system")
    main(p.parse_args())
