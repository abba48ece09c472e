"""toy_pages.py: tasks, human, demonstrations; and how alike pages look by blocks, in a browser."""
import argparse
import functools
import itertools
import os
import random
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

import colbench
import toy_pages
from colbench import Renderer
from conftest import SHARED, demos, records, script
from toy import SPLITS
from toy_pages import similarity

REAL = SHARED / "colbench" / "frontend_tasks.jsonl"
EMPTY = "<html><body></body></html>"
PLAIN = """<html><link href="tailwind.css" rel="stylesheet"><body class="bg-gray-100">
<header class="bg-green-500 text-white p-4"><h1 class="text-3xl">A Shop</h1></header>
<p class="p-4">We sell <b>shoes</b>.</p><img src="https://picsum.photos/id/48/100/50" alt="x">
</body></html>"""


# --- how alike ------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def blocks():
    """Pages drawn, each once."""
    pytest.importorskip("playwright", reason="no playwright (MANUAL.md, \"Frontend Design\")")
    sheet = os.path.join(colbench.CACHE, "tailwind.min.css")
    if not any(map(shutil.which, colbench.BROWSERS)) or not os.path.exists(sheet):
        pytest.skip("no Chromium, or no Tailwind sheet (MANUAL.md, \"Frontend Design\")")
    with Renderer(script=toy_pages.BLOCKS) as r:
        yield functools.cache(r.render)


@pytest.fixture(scope="module")
def tasks():
    if not REAL.exists():
        pytest.skip("no real ColBench tasks at ../shared/colbench/frontend_tasks.jsonl")
    return records(REAL.read_text(encoding="utf-8"))


def without_a_section(page):
    """The page less the last of its parts that is neither empty nor most of it, or None."""
    parts = re.finditer(r"<(section|footer|nav|header|li|p|button)\b.*?</\1>", page, re.S)
    for part in reversed(list(parts)):
        if re.sub("<.*?>", "", part[0]).strip() and len(part[0]) < 0.4 * len(page):
            return page[:part.start()] + page[part.end():]
    return None


@pytest.mark.full
def test_similarity_orders_the_real_pages(blocks, tasks):
    """Itself = 1 > less a section > another page of the theme > an empty one, in 95 % of them."""
    themes = [task["problem_description"].split(":")[0] for task in tasks]
    with ThreadPoolExecutor(2) as pool:
        pages = list(pool.map(lambda t: blocks(t["ground_truth"]), tasks))
    empty, verdicts = blocks(EMPTY), []
    for i, task in enumerate(tasks):
        alike = [j for j in range(len(tasks)) if j != i and themes[j] == themes[i]]
        if (less := without_a_section(task["ground_truth"])) and (alike or i % 3 == 0):
            others = pages[i], blocks(less), pages[[*alike, i - 1][0]], empty
            scores = [similarity(pages[i], other) for other in others]
            verdicts.append(scores[0] == 1 and scores == sorted(set(scores), reverse=True))
    assert len(verdicts) > 50 and sum(verdicts) >= 0.95 * len(verdicts)


def test_similarity_is_symmetric_bounded_and_falls_with_each_difference(blocks):
    changes = [("green", "blue"), ("A Shop", "My Garden"), ("A Shop", "A Shpo"),
               ("<p class", "<p style='margin: 90px' class"), ("</body>", "<p>more</p>" * 9)]
    same, *others = blocks(PLAIN), *(blocks(PLAIN.replace(*change)) for change in changes)
    both = blocks(PLAIN.replace(*changes[0]).replace(*changes[1]))
    assert similarity(same, same) == 1
    for other in (*others, both):
        assert similarity(same, other) == pytest.approx(similarity(other, same))
        assert 0 <= similarity(same, other) < 1
    assert similarity(same, both) < min(similarity(same, other) for other in others[:2])
    nothing = blocks("<html></html>")
    assert similarity(nothing, nothing) == 1 and similarity(same, nothing) < 0.12


# --- pages and their human ------------------------------------------------------------------------

def pages(split, seed=0, usual=0.0):
    """200 pages of a split, made as they are taken."""
    args = argparse.Namespace(seed=seed, usual=usual)
    return itertools.islice(toy_pages.tasks(split, args), 200)


@pytest.mark.full
def test_pages_share_nothing_between_splits_and_hide_their_slots():
    by = {split: list(pages(split)) for split in SPLITS}
    ids = [{t["id"] for t in made} for made in by.values()]
    assert min(map(len, ids)) > 150 and len(set.union(*ids)) == sum(map(len, ids))
    assert len({t["problem_description"] for t in by["train"]}) == len(toy_pages.THEMES)
    assert list(pages("train")) == by["train"] != list(pages("train", seed=1))
    done = script("tests/toy_pages.py", "tasks", "--usual", 0, "--n", 9)
    assert records(done.stdout)[0]["task"] == by["train"][0]
    done = script("tests/toy_pages.py", "tasks", "--n", 700)
    assert done.returncode == 1 and "has no 700 such tasks" in done.stderr
    done = script("tests/toy_pages.py", "tasks", "--usual", 1, "--split", "val")
    assert done.returncode == 1 and "the val split has no such tasks" in done.stderr


def test_the_scripted_human_names_a_true_difference_in_the_words_of_the_demonstrations():
    """Of 40 pairs of pages: what is said is so, in their words; equal pages look right."""
    words = {w for r in demos(300, of=toy_pages) for m in r["dialogue_history"]
             for w in m["content"].split()}
    r = random.Random(0)
    human = lambda task, page: toy_pages.reply(task, [{"content": page}])
    for _ in range(40):
        wanted, shown = ({k: r.choice(v) for k, v in toy_pages.PAGE_VALUES.items()}
                         for _ in range(2))
        page, reference = (colbench.fill(toy_pages.PAGE_TEXT, theme="school", **values)
                           for values in (shown, wanted))
        task = {"id": "x", "ground_truth": reference}
        said = human(task, page)
        slot = next(k for k in wanted if k in re.findall(r"\w+", said))
        assert said.endswith(f"not {shown[slot]}") and f" {wanted[slot]}" in said
        assert shown[slot] != wanted[slot] and set(said.split()) <= words, said
        assert human(task, reference) == toy_pages.RIGHT
        assert human(task, page.replace("</body></html>", "")).endswith("no page")


def test_demonstrations_of_pages_go_as_the_flags_say():
    perfect = dict(at_once=0, early=0, silent=0, noise=0, distract=0, hidden=0, max_turns=7)
    for r in demos(100, of=toy_pages, **perfect):  # five slots, and one message more
        assert r["answer"] == r["task"]["ground_truth"]
        assert r["dialogue_history"][-1]["content"] == f"{colbench.ANSWER} that page"
    mixed = [[m["content"] for m in r["dialogue_history"]] for r in demos(300, of=toy_pages)]
    said = {text for texts in mixed for text in texts[2::2]}
    assert toy_pages.RIGHT in said and any("columns" in text for text in said)
    assert any("can't see" in text for text in said)
    assert 70 <= sum(colbench.HIDDEN[:10] in texts[0] for texts in mixed) < 170
    at_once = demos(20, of=toy_pages, at_once=1, silent=0)
    assert all(r["dialogue_history"][1]["content"].startswith(colbench.ANSWER) for r in at_once)
