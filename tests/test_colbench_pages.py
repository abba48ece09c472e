"""Pages in a real Chromium: the same bytes each time, nothing reached, bounded failures; CLIP."""
import argparse
import base64
import contextlib
import io
import os
import random
import re
import shutil
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch

import colbench
import model as M
import toy
import toy_pages
from colbench import CACHE, PAGE_LIMITS, Renderer, RenderError
from conftest import (DOUBLE, HONEST, PYTHON, SIGNALS, demos, descendants, end_grading,
                      plain_ids, records, save, succeed)
from test_collect_endpoints import Server, chat
from toy_pages import similarity

pytest.importorskip("playwright", reason="no playwright (MANUAL.md, \"Frontend Design\")")
Image = pytest.importorskip("PIL.Image", reason="no pillow (MANUAL.md, \"Frontend Design\")")
SHEET = os.path.join(CACHE, "tailwind.min.css")
if not any(map(shutil.which, colbench.BROWSERS)) or not os.path.exists(SHEET):
    pytest.skip("no Chromium, or no Tailwind sheet (MANUAL.md, \"Frontend Design\")",
                allow_module_level=True)
LINK = ('<link href="https://cdn.jsdelivr.net/npm/tailwindcss@2.2.19/dist/tailwind.min.css" '
        'rel="stylesheet">')
PLAIN = f"""<html>{LINK}<body class="bg-gray-100">
<header class="bg-green-500 text-white p-4"><h1 class="text-3xl">A Shop</h1></header>
<p class="p-4">We sell <b>shoes</b>.</p><img src="https://picsum.photos/id/48/100/50" alt="x">
</body></html>"""
BLUE = PLAIN.replace("green", "blue")


@pytest.fixture(scope="module")
def renderer():
    with closing(Renderer(script=toy_pages.BLOCKS)) as r:
        yield r


def picture(page):
    return Image.open(io.BytesIO(page["png"])).convert("RGB")


def texts(page):
    return [block["text"] for block in page["blocks"]]


def answered(page):
    return {"task": {"problem_description": "a shop", "ground_truth": PLAIN}, "answer": page}


# --- a page that is drawn -------------------------------------------------------------------------

def test_a_page_has_its_style_and_placeholders_and_always_the_same_bytes(renderer):
    with ThreadPoolExecutor(4) as pool:
        pages = list(pool.map(renderer.render, [PLAIN, "<p>another</p>", PLAIN, PLAIN]))
    page = pages[0]
    assert page == pages[2] == pages[3] and page["colour"] == [243, 244, 246]
    assert picture(page).size == (PAGE_LIMITS["width"], PAGE_LIMITS["height"])
    drawn = {(block["kind"], *block["colour"], *block["box"][2:]) for block in page["blocks"]}
    assert {("IMG", 0, 0, 0, 100, 50), ("area", 16, 185, 129, 1280, 68)} <= drawn
    with closing(Renderer(workers=1)) as other:  # the same picture, whatever else is asked
        assert other.render(PLAIN) == {key: page[key] for key in ("height", "png")}


def moving():
    """What would change with time in a page."""
    svg = ("<svg xmlns='http://www.w3.org/2000/svg' height='9'><rect width='9' height='9'>"
           "<animate attributeName='x' to='90' dur='1s' repeatCount='indefinite'/></rect></svg>")
    yield from (svg, f'<iframe srcdoc="{svg}"></iframe>',
                f'<img src="data:image/svg+xml,{svg}">'.replace("#", "%23"),
                "<video src='https://a.invalid/a.mp4' controls autoplay></video>",
                "<audio src='https://a.invalid/a.mp3' controls autoplay></audio>",
                "<video poster='https://picsum.photos/90' controls><source src=a></video>",
                "<marquee>news <b style='visibility: visible'>of today</b></marquee>",
                "<progress></progress><progress value='0.4'></progress>",
                "<iframe srcdoc='<marquee>news</marquee><progress></progress>'></iframe>",
                f"<p><template shadowrootmode='open'><marquee>a</marquee>{svg}</template>",
                "<style>p {animation: a 1s infinite} @keyframes a {to {width: 9px}}</style><p>a")
    frames = [Image.new("RGB", (60, 60), (8 * i, 0, 99)) for i in range(30)]
    for kind in "GIF", "WEBP", "PNG":
        frames[0].save(file := io.BytesIO(), kind, save_all=True, append_images=frames[1:],
                       duration=50, loop=0)
        data = base64.b64encode(file.getvalue()).decode()
        yield f"<img src='data:image/{kind.lower()};base64,{data}'>"


def test_a_page_that_moves_has_the_same_bytes_each_time(renderer):
    """Rendered anew each time, at another moment of all that moves in it."""
    draw, page = renderer.draw, "".join(moving())
    assert len({draw(page)["png"] for _ in range(4)}) == 1
    assert draw("<progress value='0.4'>")["png"] != draw("<progress value='0.5'>")["png"]


def test_a_lone_surrogate_is_drawn_as_a_question_mark(renderer):
    assert texts(renderer.render("<p>a\ud800b</p>")) == ["a?b"]


REQUESTS = """
<link rel="preconnect" href="URL"><link rel="dns-prefetch" href="URL">
<link rel="prefetch" href="URL"><link rel="preload" as="image" href="URL">
<link rel="stylesheet" href="URL"><link rel="icon" href="URL"><link rel="manifest" href="URL">
<link rel="stylesheet" href="URL/tailwindx.js">
<style>@import "URL"; @font-face {font-family: f; src: url(URL)}
p {font-family: f; background: url(URL)}</style>
<img src="URL"><img srcset="URL 2x"><iframe src="URL"></iframe><object data="URL"></object>
<embed src="URL"><video src="URL" poster="URL"></video><audio src="URL"></audio>
<svg><image href="URL"/></svg><script src="URL"></script>
<meta http-equiv="refresh" content="0;url=URL"><a ping="URL" href="#">z</a>"""


def test_no_script_runs_and_nothing_is_reached(renderer, tmp_path):
    """A listener on loopback sees no connection, files stay closed, the page goes nowhere."""
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret words")
    with socket.create_server(("127.0.0.1", 0), backlog=50) as listener:
        listener.settimeout(1)
        port = listener.getsockname()[1]
        asked = "".join(REQUESTS.replace("URL", f"http://{host}:{port}/x")
                        for host in ("127.0.0.1", "localhost"))
        page = renderer.render(f"<html><meta http-equiv='refresh' content='0'><body>{asked}"
                               "<script>document.body.innerHTML = 'JS RAN'</script>"
                               "<noscript><p>no script</p></noscript><p>still here é🙂</p>"
                               f"<iframe src='file://{secret}'></iframe>"
                               f"<embed src='file://{secret}'></body></html>")
        assert {"no script", "still here é🙂"} <= {*texts(page)}
        assert not any("secret" in text for text in texts(page))
        with pytest.raises(TimeoutError):
            listener.accept()


# --- hostile pages, dead browsers -----------------------------------------------------------------

HOSTILE = {
    "tall": "<div style='height: 99999999px'>tall</div>",
    "many words": "<p>" + "many words " * 90_000 + "</p>", "deep": "<div>" * 50_000 + "deep",
    "frames": "<iframe srcdoc='<iframe srcdoc=1></iframe>'></iframe>" * 300,
    "blur": "<style>* {filter: blur(50px) drop-shadow(0 0 50px red)}</style>"
            + "<div>a</div>" * 3000,
    "variables": "<style>p::before {content: var(--9)} :root {--0: x;" + "".join(
        f"--{i + 1}:" + f" var(--{i})" * 10 + ";" for i in range(9)) + "}</style><p>b",
    "drawing": "<svg><g id='a0'><rect width='9' height='9'/></g>" + "".join(
        f"<g id='a{i + 1}'>" + f"<use href='#a{i}'/>" * 10 + "</g>" for i in range(8)) + "</svg>",
    "moving": "<style>div {animation: a 1s infinite} @keyframes a {to {width: 9000px}}</style>"
              + "<div>a</div>" * 2000,
    "references": "&#" + "9" * 4301 + ";&#x" + "f" * 9999 + "&" * 999 + "&#;",
    "no number": "<p style='transform: scale(calc(0 / 0))'>a</p>", "null": "a\0b\ud800",
    "ends": "<html><body>" * 99_000, "spaces": "</html" + " " * 99_000}


@pytest.mark.full
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pages_are_bounded_and_the_next_one_is_drawn(name, renderer, monkeypatch):
    """Each has its picture or ends at a limit, that of time being short here."""
    monkeypatch.setitem(PAGE_LIMITS, "seconds", 2)
    answer = f"<html><body>{HOSTILE[name]}</body></html>"
    try:
        page, reference = renderer.render_pair({"ground_truth": PLAIN}, answer)
        assert picture(page).height <= PAGE_LIMITS["tallest"]
        assert 0 <= similarity(page, reference) < 1
    except RenderError as e:
        assert str(e)
    monkeypatch.undo()
    assert texts(renderer.render(f"<p>not {name}</p>")) == [f"not {name}"]


def browsers():
    """The processes of our own browsers."""
    return {pid for pid in descendants()
            if b"--headless" in open(f"/proc/{pid}/cmdline", "rb").read()}


@pytest.mark.full
def test_a_browser_that_dies_loses_no_page():
    """All are killed, twice."""
    before = browsers()  # those of the other tests
    with closing(Renderer(workers=2)) as r, ThreadPoolExecutor(3) as pool:
        want = r.render(PLAIN)["png"]
        for n in range(2):
            for pid in browsers() - before:
                with contextlib.suppress(ProcessLookupError):  # it went with another
                    os.kill(pid, signal.SIGKILL)
            pages = [f"{PLAIN}<!-- {n} {i} -->" for i in range(3)]  # no page is drawn twice
            assert [page["png"] for page in pool.map(r.render, pages)] == [want] * 3
    assert browsers() <= before


@pytest.mark.full
@pytest.mark.parametrize("number", SIGNALS)
def test_an_ended_grader_leaves_no_browser_behind(number):
    answers = [answered(PLAIN.replace("shoes", str(i))) for i in range(40)]
    end_grading(answers, number, "tests/toy_pages.py")


@pytest.mark.full
def test_a_part_of_the_sheet_draws_pages_as_the_whole_does(renderer, monkeypatch):
    """Pages of classes drawn from all of the sheet's, but for those that move."""
    part, whole = renderer.sheet, open(SHEET, encoding="utf-8").read()
    classes = re.findall(r"\.((?!animate)(?:[\w-]|\\[/.])+)\{", whole)
    r = random.Random(0)
    for _ in range(6):
        page = LINK
        for tag in ("p", "div", "b", "button", "input") * 12:
            drawn = " ".join(r.choice(["", "md:", "xl:"]) + r.choice(classes) for _ in range(3))
            drawn = drawn.replace("\\", "")
            written = r.choice([f"'{drawn}'", f'"{drawn}"', drawn.replace(" ", "&#32;")])
            page += f"<{tag} class={written}>a</{tag}>"
        want = renderer.render(page)
        assert len(part(page)) < len(whole) / 5
        monkeypatch.setattr(renderer, "sheet", lambda page: whole)
        assert renderer.draw(page) == want  # drawn anew, not remembered
        monkeypatch.undo()


# --- grading --------------------------------------------------------------------------------------

@pytest.fixture
def clip(tmp_path):
    """A small CLIP of transformers, and its image processor, saved in tmp_path."""
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel
    torch.manual_seed(0)
    small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                 projection_dim=16)
    model = CLIPModel(CLIPConfig(vision_config={**small, "image_size": 224, "patch_size": 32},
                                 text_config={**small, "vocab_size": 99}, projection_dim=16))
    made = model.eval(), CLIPImageProcessorPil()
    save(made, tmp_path)
    return made


@pytest.mark.full
def test_the_reward_is_clips_likeness_of_the_last_page_and_check_drops_what_has_none(
        clip, renderer, tmp_path, grading):
    """The oracle is transformers' CLIPModel. Answers of the other kind may stand between pages."""
    model, prepare = clip
    pages = [PLAIN, BLUE, PLAIN.replace("</body>", "<p class='bg-red-500 h-64'>a</p>" * 9),
             "<body><p>A Shop</p></body>"]
    seen = prepare([picture(renderer.render(page)) for page in pages], return_tensors="pt")
    with torch.no_grad():
        features = model.get_image_features(seen["pixel_values"])
    features = getattr(features, "pooler_output", features)
    wanted = torch.cosine_similarity(features[:1], features).clip(0).tolist()
    assert max(wanted[1:]) < 0.9999

    bad = {"kind": "frontend", "problem_description": "a", "ground_truth": " "}
    answers = [*pages, f"first {BLUE} then\n```html\n{PLAIN}\n```", "I have no page", "<html>cut"]
    given = [*map(answered, answers), {"task": bad, "answer": PLAIN},
             {"task": DOUBLE, "answer": HONEST}] * 2
    got, told, _ = grading(given, "--clip", tmp_path)
    assert [r["reward"] for r in got] == pytest.approx([*wanted, 1, 0, 0, 0, 1] * 2, abs=1e-5)
    assert [r["reward_by"] for r in got] == [*["clip"] * 8, f"honest rules, {PYTHON}"] * 2
    assert [r.get("failure") for r in got[4:7]] == [None, "no page", "no page"]
    assert got[7]["failure"] == "the reference: no page"
    assert "the own reference of 1 tasks fails" in told
    assert [{"task": r["task"], "answer": r["answer"]} for r in got] == given
    good = [{"problem_description": "a", "ground_truth": page} for page in pages]
    kept, told, _ = grading([*good, bad], "--clip", tmp_path, command="check")
    assert [r["task"] for r in kept] == good
    assert " dropped: the reference: no page" in told


@pytest.mark.full
def test_a_missing_browser_is_said_in_one_line(monkeypatch):
    monkeypatch.setattr(colbench, "BROWSERS", ["/nowhere/chromium"])
    with pytest.raises(SystemExit, match="no browser in PATH; install one of: /nowhere/chromium"):
        Renderer()
    monkeypatch.setattr(colbench, "BROWSERS", ["/bin/false"])
    with closing(Renderer(1)) as r, pytest.raises(colbench.GraderError,
                                                  match="/bin/false does not start"):
        r.render(PLAIN)


# --- episodes -------------------------------------------------------------------------------------

@pytest.mark.full
def test_episodes_are_pages_shown_to_a_human_who_sees_both(tmp_path, renderer):
    """The agent sends pages; the human says what it was shown; the last page shown is graded."""
    base = str(tmp_path / "base")
    save(toy.tiny_model(demos(100, of=toy_pages), 0, toy_pages.PIECES), base)
    task = next(toy_pages.tasks("test", argparse.Namespace(seed=0, usual=0.0)))
    right, told = task["ground_truth"], "Welcome to our store"
    task["ground_truth"] += f"\n{told}"  # a line of the reference, and no secret: it is seen
    other = re.sub(r'(<header class="bg-)\w+-', r"\1orange-", right)
    tokenizer, outputs = M.find_model(base)[1].tokenizer, [
        "I have no page yet", f"Let me see. OUTPUT: {other}", f"OUTPUT: the same: {right}",
        "Good luck"]

    def say(path, body):  # as vLLM's server
        turn = tokenizer.decode(body["prompt"]).count("<|assistant|>") - 1
        ids = plain_ids(tokenizer, outputs[turn]) + body["stop_token_ids"][:1]
        choice = {"text": "", "finish_reason": "stop", "token_ids": ids,
                  "logprobs": {"token_logprobs": [-1.0] * len(ids)}}
        return {"choices": [choice | {"index": i} for i in range(body["n"])]}

    names = {renderer.render(other)["png"]: "other ", renderer.render(right)["png"]: "right "}

    def reply(path, body):
        text, *pictures = body["messages"][0]["content"]
        assert task["problem_description"] in text["text"] and "<html" not in text["text"]
        urls = [picture["image_url"]["url"] for picture in pictures]
        shown, wanted = (names[base64.b64decode(url.removeprefix("data:image/png;base64,"))]
                         for url in urls)
        assert wanted == "right "
        return chat(shown + told + "x" * 2000)

    engine, human = Server(say), Server(reply, trouble=0.3)
    replies = [(name + told + "x" * 2000)[:1000] for name in names.values()]
    for turns, answer, replies in ((4, right, replies), (2, other, []), (1, "", [])):
        flags = ["--engine", engine.url, "--human", human.url, "--max_turns", turns,
                 "--candidates", 2, "--timeout", 3]
        done = succeed("collect.py", "--model", base, *flags, stdin=[{"task": task}])
        (r,) = records(succeed("tests/toy_pages.py", "grade", stdin=done.stdout).stdout)
        failed = ["i can't see your page: no page"] * (turns > 1)
        assert colbench.message_texts(r["dialogue_history"])[2::2] == failed + replies
        assert r["answer"] == answer and (r["reward"] == 1) == (answer == right)
        assert r["reward_by"] == "blocks" and ("failure" in r) == (answer == "")
