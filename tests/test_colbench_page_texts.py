"""What of pages needs no browser: placeholders, and the page in an answer."""
import random
import re

import pytest

import colbench


@pytest.mark.parametrize("path, size", [
    ("/id/48/100/50.jpg", "100 50"), ("/seed/9/100", "100 100"), ("/", "300 200"),
    ("/600x400/0000FF/808080", "600 400"), ("/photo-1234/99999x0", "4096 1")])
def test_a_placeholder_has_the_size_that_its_url_asks_for(path, size):
    sides = re.findall(r'(?:width|height)="(\d+)"', colbench.grey_picture(path))
    assert " ".join(sides) == size


def test_the_last_page_of_a_text_is_what_one_pattern_finds():
    """The oracle's pattern takes too long for long texts."""
    r, parts = random.Random(0), ["<html>", "<HTML a>", "</html>", "</html >", "<body>", "</body>",
                                  "<htmlx>", "a", "\n"]
    for _ in range(20_000):
        text = "".join(r.choices(parts, k=r.randrange(9)))
        pages = [re.findall(rf"<{tag}\b(?:(?!<{tag}\b).)*?</{tag}\s*>", text, re.S | re.I)
                 for tag in ("html", "body")]
        assert colbench.extract_page(text) == (pages[0] or pages[1] or [""])[-1], text
    assert colbench.extract_page("<html></html" * 2_000_000 + "><p>") == "<html></html>"
