"""The toy for frontend tasks, with a reward that needs no CLIP. The agent sends a page in each
message, and the human names one hidden *slot*, such as the header's colour, that is still wrong.

    python tests/toy_pages.py tasks --split train --n 150 > tasks.jsonl
    python tests/toy_pages.py demos --n 4000 > demos.jsonl
    python tests/toy_pages.py model --out runs/tiny
    ... | python collect.py --human tests/toy_pages.py ...   # calls reply()
    ... | python tests/toy_pages.py grade > graded.jsonl     # likeness of the pages' blocks
"""
import functools
import re
from collections import Counter

import toy  # also makes the scripts importable
import colbench
from colbench import (ANSWER, PAGE_LIMITS, Pages, Renderer,
                      extract_page, fill, hidden_information)
from utils import rng, run


# --- pages with hidden slots ----------------------------------------------------------------------

PAGE_SLOTS = {  # slot: (the text before its value in a page, its possible values)
    "background": ('<body class="bg-', ("gray", "yellow", "pink")),
    "header": ('<header class="bg-', ("red", "green", "blue", "purple")),
    "title": ('<h1 class="text-', ("left", "center", "right")),
    "columns": ("grid-cols-", ("1", "2", "3", "4")),
    "button": ('<button class="bg-', ("black", "white"))}
PAGE_VALUES = {slot: values for slot, (_, values) in PAGE_SLOTS.items()}
SATISFIED = "it looks right"  # the human's reply once every slot is right
THEMES = "bakery", "school", "museum", "garden", "library", "market"
PAGE_TEXT = """\
<html><link rel=stylesheet href=tailwind.css><body class="bg-{background}-300">\
<header class="bg-{header}-500 p-8"><h1 class="text-{title} text-8xl">the {theme}</h1></header>\
<main class="grid-cols-{columns} grid gap-8 p-8">\
<p class="p-8 bg-white">a</p><p class="p-8 bg-white">b</p>\
<p class="p-8 bg-white">c</p><p class="p-8 bg-white">d</p>\
</main><button class="bg-{button} m-8 p-16"></button></body></html>"""


def page_slots(page):
    """Returns {slot: value} of a page like PAGE_TEXT, without the slots that it lacks."""
    found = {slot: re.search(before + r"(\w+)", page) for slot, (before, _) in PAGE_SLOTS.items()}
    return {slot: match[1] for slot, match in found.items() if match}


def tasks(split, args):
    """Like toy.tasks. A description gives the page's theme but no slot."""
    r = rng("pages", split, args.seed)

    def draw():
        theme = r.choice(THEMES)
        values = toy.draw_values(r, PAGE_VALUES, args.usual)
        if rng("pages", theme, values).choice(toy.SPLITS) == split:
            return {"id": "-".join([theme, *values.values()]), "kind": "frontend",
                    "problem_description": f"a page for the {theme}",
                    "agent_prompt": "{problem_description}",
                    "ground_truth": fill(PAGE_TEXT, theme=theme, **values)}

    return toy.drawn_tasks(draw, split)


def reply(task, history):
    """The human for collect.py: corrects one slot in which the last page differs from theirs."""
    message = history[-1]["content"]
    page, reference = extract_page(message), page_slots(hidden_information(task))
    if not reference:
        raise ValueError("the reference has no slots: this human needs tasks of toy_pages.py")
    if not page:
        return "i can't see your page: no page"
    shown = page_slots(page)
    wrong = [slot for slot in reference if shown.get(slot) != reference[slot]]
    if not wrong:
        return SATISFIED
    slot = rng("remark", task["id"], message).choice(wrong)
    correction = f"the {slot} should be {reference[slot]}"
    if slot == "columns":
        correction = f"there should be {reference[slot]} columns"
    return f"{correction}, not {shown[slot]}" if slot in shown else correction


def demonstration(task, r, args):
    """Like toy.demonstration."""
    theme, reference = task["id"].partition("-")[0], page_slots(task["ground_truth"])
    informed, silent = r.random() < args.hidden, r.random() < args.silent
    page = {slot: reference[slot] if informed else r.choice(values)
            for slot, values in PAGE_VALUES.items()}

    def agent(turn, human_reply):
        if human_reply == SATISFIED and not silent:
            return f"{ANSWER} that page"
        output = fill(PAGE_TEXT, theme=theme, **page)
        if not silent and r.random() < (args.at_once if turn == 0 else args.early):
            output = f"{ANSWER}\n{output}"
        if r.random() < args.noise:
            output = output.replace("</body></html>", "")  # no longer a page
        return output

    def human(history):
        """Replies, then corrects that slot of the agent's next page, or changes a random slot."""
        correction = reply(task, history)
        named = [slot for slot in page if re.search(rf"\b{slot}\b", correction)]
        if r.random() < args.distract:
            other = r.choice(list(page))
            page[other] = r.choice(PAGE_VALUES[other])
        elif named:
            page[named[0]] = reference[named[0]]
        return correction

    return toy.episode(task, args.max_turns, agent, human, show_hidden=informed)


def demos(args):
    """Like toy.demos."""
    for i, task in zip(range(args.n), tasks("train", args)):
        yield demonstration(task, rng("demo", args.seed, i), args)


# The tiny model's tokens: the text between two slots is one token; else as in toy.PIECES.
PIECES = (r'<html>SLOT|(?:-\d00)?(?: [^\n"]*)?">(?:SLOT|[^\n"]*)|'
          .replace("SLOT", r'[^\n]*?class="(?:bg-|text-|grid-cols-)')) + toy.PIECES


# --- how alike two pages look ---------------------------------------------------------------------

# Lists a page's blocks, each with its box: images, inputs etc. by tag, coloured areas, and texts.
# Getters are taken from their classes because an image can shadow them by its name.
BLOCKS = """async () => {
  const getter = (of, name) => Object.getOwnPropertyDescriptor(of.prototype, name).get;
  const get = (of, name, what) => getter(of, name).call(what);
  await get(Document, 'fonts', document).ready;
  const body = get(Document, 'body', document), root = get(Document, 'documentElement', document);
  const limit = 200, blocks = [], things = /^(IMG|SVG|IFRAME|VIDEO|CANVAS|INPUT|TEXTAREA|SELECT)$/i;
  const pen = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true}), known = {};
  const paint = css => {  // [red, green, blue, opacity], 0 to 255, of a colour in any notation
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = css;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data];
  };
  const rgba = css => known[css] = known[css] || paint(css), rgb = css => rgba(css).slice(0, 3);
  const add = (kind, r, css, text) => {
    const box = [r.left + scrollX, r.top + scrollY, r.width, r.height];
    if (!box.every(x => Math.abs(x) < 1e8))  // a transform may make it infinite, or NaN
      throw new Error('a box of the page is ' + box);
    const weight = Math.sqrt(Math.max(1, r.width * r.height));
    blocks.push({kind, box, colour: rgb(css), text, weight});
  };
  const all = body ? Element.prototype.querySelectorAll.call(body, '*') : [];
  for (const e of all) {
    if (blocks.length >= limit) break;
    const r = Element.prototype.getBoundingClientRect.call(e), s = getComputedStyle(e);
    if (r.width < 1 || r.height < 1 || s.visibility != 'visible' || s.opacity == 0) continue;
    const tag = get(Element, 'tagName', e);
    if (things.test(tag)) add(tag, r, 'rgb(0, 0, 0)', '');
    else if (rgba(s.backgroundColor)[3] || s.backgroundImage != 'none')
      add('area', r, s.backgroundColor, '');
    const texts = [...get(Node, 'childNodes', e)].filter(n => n.nodeType == 3 && n.data.trim());
    if (texts.length) {  // the box of its letters, not of the element
      const range = new Range();
      range.setStartBefore(texts[0]);
      range.setEndAfter(texts[texts.length - 1]);
      const text = texts.map(n => n.data).join(' ').trim().slice(0, 500);
      add('text', range.getBoundingClientRect(), s.color, text);
    }
  }
  const behind = [body, root].map(e => e ? getComputedStyle(e).backgroundColor : 'transparent')
    .find(css => rgba(css)[3]);
  return {blocks, colour: rgb(behind || 'white'), height: root.scrollHeight};
}"""


def colour_likeness(a, b):
    """Returns the likeness of two blocks' or pages' colours, 0 to 1."""
    return 1 - sum(abs(x - y) for x, y in zip(a["colour"], b["colour"])) / 765


@functools.lru_cache(4096)
def letter_pairs(text):
    """Counts the pairs of adjacent letters in a text."""
    return Counter(zip(text.lower(), text.lower()[1:]))


def text_likeness(a, b):
    """Returns the likeness of two blocks' texts, 0 to 1: the Dice coefficient of letter pairs."""
    if a["text"] == b["text"]:
        return 1.0
    a, b = letter_pairs(a["text"]), letter_pairs(b["text"])
    common = sum(min(a[pair], b[pair]) for pair in a.keys() & b.keys())
    return 2 * common / (a.total() + b.total()) if a or b else 1.0


def block_likeness(a, b, height):
    """Returns the likeness of two blocks, 0 to 1: the product of terms for box, colour and text."""
    sides = (PAGE_LIMITS["width"], height) * 2
    distance = sum(abs(x - y) / side for x, y, side in zip(a["box"], b["box"], sides))
    return max(0, 1 - distance / 2) * colour_likeness(a, b) * (1 + text_likeness(a, b)) / 2


def similarity(page, other):
    """Returns the likeness of two rendered pages, 0 to 1; 1 for equal pages.

    Matches blocks of the same kind, the most alike first, and averages the likeness over all blocks
    (0 if unmatched), weighted by the square root of their area. Background and height add 5 %.
    """
    height = max(page["height"], other["height"], 1)
    scores = [(block_likeness(a, b, height), i, j) for i, a in enumerate(page["blocks"])
              for j, b in enumerate(other["blocks"]) if a["kind"] == b["kind"]]
    scores.sort(key=lambda score: (-score[0], score[1:]))
    matched, used, other_used = 0.0, set(), set()
    for likeness, i, j in scores:
        if i not in used and j not in other_used:
            used.add(i)
            other_used.add(j)
            matched += likeness * (page["blocks"][i]["weight"] + other["blocks"][j]["weight"])
    total = sum(block["weight"] for block in page["blocks"] + other["blocks"])
    blocks = matched / total if total else 1.0
    background = colour_likeness(page, other) * min(page["height"], other["height"]) / height
    return round(0.95 * blocks + 0.05 * background, 6)  # rounded, so that equal pages get exactly 1


class Blocks(Pages):
    """The environment for pages, with `similarity` as the reward instead of CLIP."""

    def open(self, args):
        self.reward_by, self.likeness = "blocks", similarity
        self.renderer = Renderer(args.workers, BLOCKS)


# --- command line ---------------------------------------------------------------------------------

def get_args(argv=None):
    root, subparsers = toy.command_parsers(__doc__)
    grade = subparsers.add_parser("grade", allow_abbrev=False)
    grade.add_argument("--workers", type=int, default=colbench.cpus(),
                       help="number of pages to render in parallel [%(default)s]")
    return root.parse_args(argv)


def main(args):
    if args.command == "grade":
        colbench.environments()["frontend"] = Blocks()
        colbench.main(args)
    else:
        toy.main(args, tasks, demos, PIECES)


if __name__ == "__main__":
    run(main, get_args())
