"""Writes a self-contained HTML page that shows systems' episodes, task by task, side by side.

    python tests/experiments/report.py base.jsonl sweet=a.jsonl,b.jsonl > report.html
    python tests/experiments/report.py --logprob_weight 0.1 runs/trained.jsonl > report.html

Systems are named as for evaluate.py. Messages that a critic has scored are coloured by their
advantage. A turn's candidates are ranked as train_policy.py ranks them, with a line between the
halves from which it draws the chosen and the rejected side. Web pages are shown as pictures.

The page is report_page.html with these data as JSON, of which a browser draws only what is opened:
{"systems": [{"name", "limit": the advantage from which colours are strongest, or null}],
"ranking": how candidates are ranked, "pictures": [JPEG in base64], "tasks": [see report_task]}.
"""
import base64
import io
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", ".."))
from colbench import (GraderError, Renderer, RenderError, agent_messages, cpus, environment,
                      extract_page, hidden_information, read_records, task_id)
from evaluate import name_and_files
from utils import fail, parser, run

TEMPLATE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "report_page.html")


def get_args(argv=None):
    p = parser(__doc__, "%(prog)s [flags] FILE | NAME=FILE,FILE,... ... > report.html")
    p.add_argument("files", nargs="+", metavar="FILE", help="graded records of one system")
    p.add_argument("--logprob_weight", type=float, default=0, metavar="N",
                   help="rank candidates by advantage + N x log-prob, as in train_policy.py")
    return p.parse_args(argv)


# --- what the page shows of a record --------------------------------------------------------------

def ranked(candidates, logprob_weight):
    """Returns (candidates, n): n scored ones as train_policy.py ranks them, then the others."""
    scored = [c for c in candidates if "advantage" in c]
    scored.sort(key=lambda c: c["advantage"] + logprob_weight * c.get("logprob", 0), reverse=True)
    return scored + [c for c in candidates if "advantage" not in c], len(scored)


def shown_action(action):
    """Returns {"text", "advantage", "logprob", "truncated"} of a message or candidate."""
    shown = {"text": action.get("output") or action.get("content", "")}
    for name in ("advantage", "logprob"):
        if name in action:
            shown[name] = round(action[name], 4)
    if action.get("cut"):
        shown["truncated"] = True
    return shown


def shown_message(message, logprob_weight):
    """Returns shown_action's fields and "role"; "candidates", of which the first "ranked" are."""
    shown = {"role": message["role"], **shown_action(message)}
    if message.get("candidates"):
        candidates, shown["ranked"] = ranked(message["candidates"], logprob_weight)
        shown["candidates"] = [shown_action(c) for c in candidates]
    return shown


def artifact(task, text, pictures):
    """Returns {"text"} of an answer or reference, and the number of a web page's "picture"."""
    shown, page = {"text": text}, extract_page(text)
    if environment(task).shows_pages and page in pictures:
        shown["picture"] = pictures[page]
    return shown


def shown_episode(record, logprob_weight, pictures):
    """Returns {"reward", "answer", "tests": their number, "failed", "messages"}, "failure"."""
    task, tests = record["task"], record.get("tests", {})
    calls = task.get("test_cases", {})
    shown = {"reward": record["reward"], "tests": len(tests),
             "answer": artifact(task, record.get("answer") or "", pictures),
             "failed": [{"call": calls.get(name, name), "verdict": verdict}
                        for name, verdict in tests.items() if verdict != "pass"],
             "messages": [shown_message(m, logprob_weight) for m in record["dialogue_history"]]}
    if "failure" in record:
        shown["failure"] = record["failure"]
    return shown


def report_task(records_of, names, logprob_weight, pictures):
    """Returns {"id", "description", "reference", "episodes": [[episode] of each system]}.

    records_of: the task's records, {system: [record]}. pictures: {page: its number}.
    """
    task = next(iter(records_of.values()))[0]["task"]
    return {"id": task_id(task), "description": task["problem_description"],
            "reference": artifact(task, hidden_information(task), pictures),
            "episodes": [[shown_episode(record, logprob_weight, pictures)
                          for record in records_of.get(name, [])] for name in names]}


def colour_limit(advantages):
    """Returns the 95 % quantile of the absolute values, which is below the largest of several."""
    sizes = sorted(abs(x) for x in advantages)
    return sizes[int(0.95 * (len(sizes) - 1))] if sizes else None


# --- pages ----------------------------------------------------------------------------------------

def render_pages(pages):
    """Returns {page: JPEG in base64}, without the pages that can't be rendered."""
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
        return base64.b64encode(jpeg.getvalue()).decode()
    try:
        with closing(Renderer(cpus())) as renderer, ThreadPoolExecutor(cpus()) as pool:
            return {page: image for page, image in zip(pages, pool.map(thumbnail, pages)) if image}
    except GraderError as e:  # the browser can't start
        fail(e)


def main(args):
    systems = [name_and_files(arg) for arg in args.files]
    tasks = {}                                           # {task id: {system: [record]}}
    advantages = {name: [] for name, _ in systems}
    pages = {}                                           # {page: None}, in their order
    for name, files in systems:
        for path in files:
            with open(path, encoding="utf-8") as f:
                for record in read_records(f, "dialogue_history", "reward", source=path):
                    task = record["task"]
                    of_task = tasks.setdefault(task_id(task), {})
                    of_task.setdefault(name, []).append(record)
                    advantages[name] += advantages_of(record)
                    if environment(task).shows_pages:
                        pages[extract_page(record.get("answer"))] = None
                        pages[extract_page(hidden_information(task))] = None
    images = render_pages([page for page in pages if page])
    pictures = {page: number for number, page in enumerate(images)}
    names = [name for name, _ in systems]
    ranking = "Candidates are ranked by advantage"
    if args.logprob_weight:
        ranking += f" + {args.logprob_weight:g} x log-prob"
    print_page({"systems": [{"name": name, "limit": colour_limit(advantages[name])}
                            for name in names],
                "ranking": f"{ranking}.", "pictures": list(images.values()),
                "tasks": [report_task(of_task, names, args.logprob_weight, pictures)
                          for of_task in tasks.values()]})


def advantages_of(record):
    """Returns those of a record's messages and candidates."""
    actions = [x for m in agent_messages(record) for x in (m, *m.get("candidates", ()))]
    return [x["advantage"] for x in actions if "advantage" in x]


def print_page(data):
    with open(TEMPLATE, encoding="utf-8") as f:
        before, after = f.read().split("{}</script>")
    # no text of the data can end the script element, because in JSON "<" may be written so
    print(before + json.dumps(data).replace("<", "\\u003c") + "</script>" + after, end="")


if __name__ == "__main__":
    run(main, get_args())
