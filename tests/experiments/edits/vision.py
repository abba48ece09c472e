"""vision.diff on regression.diff: test_readme.py runs this in a copy of the scripts with both.

Critics that see: Qwen2-VL's own forward against the tree's; the whole pipe with pictures.
"""
import itertools
import math
import os
import shutil

import pytest
import torch
from transformers import (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2VLConfig,
                          Qwen2VLForConditionalGeneration)

import colbench
import model as M
import toy
import toy_pages
import train_critic
from conftest import (actions, complaint, demos, dialogue, records, save, script, succeed,
                      train)
from plan import count_tokens
from test_model import by_tree, gradients

pytest.importorskip("PIL", reason="pillow is not installed (MANUAL.md, \"Frontend Design\")")
from PIL import Image, ImageDraw  # noqa: E402

TEXT = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.08,
            bos_token_id=1, eos_token_id=2, pad_token_id=0,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]})
EYES = {"qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration,
                     dict(depth=2, embed_dim=32, hidden_size=64, num_heads=2, mlp_ratio=2,
                          initializer_range=0.08)),
        "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration,
                       dict(depth=2, hidden_size=32, intermediate_size=64, out_hidden_size=64,
                            num_heads=2, window_size=56, fullatt_block_indexes=[1],
                            initializer_range=0.08))}


def tiny_that_sees(kind, out):
    """Saves a tiny random model of a real class, with demonstrations' words; returns the LM."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    _, tokenizer = toy.tiny_model(demos(100, of=toy_pages), 0, toy_pages.PIECES)
    new = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
    tokenizer.add_tokens(new, special_tokens=True)
    start, end, image = tokenizer.convert_tokens_to_ids(new)
    config, make, vision = EYES[kind]
    torch.manual_seed(0)
    config = config(text_config={**TEXT, "vocab_size": len(tokenizer)}, vision_config=vision,
                    image_token_id=image, video_token_id=image, vision_start_token_id=start,
                    vision_end_token_id=end)
    lm = make(config).eval()
    for part in (lm, tokenizer, Qwen2VLImageProcessorPil()):
        part.save_pretrained(out)
    return lm


@pytest.fixture(scope="module", params=EYES)
def seeing(request, tmp_path_factory):
    """(directory, the transformers model, Pictures of six pages of several sizes) of each class."""
    out = tmp_path_factory.mktemp(request.param)
    lm = tiny_that_sees(request.param, str(out))
    pictures = M.Pictures(str(out), lm.config, 12)
    for i, size in enumerate([(60, 60), (120, 60), (60, 120), (120, 60), (200, 90), (56, 56)]):
        picture = Image.new("RGB", size, (40 * i, 255 - 40 * i, 80))
        ImageDraw.Draw(picture).rectangle([5 * i, 10, 30, 40], fill="white")
        picture.save(out / f"{i}.png")
        pictures.add(f"<html>{i}</html>", str(out / f"{i}.png"))
    return str(out), lm, pictures


def episode(pages, hidden):
    said = [("it looks right", f"here <html>{page}</html>") for page in pages]
    task = {"problem_description": "x", "ground_truth": f"<html>{hidden}</html>"}
    return {"task": task, "dialogue_history": dialogue(*itertools.chain(*said))}


def critic_turns(tokenizer, record, hidden, pictures):
    """The turns by which a critic judges a record's messages."""
    both = [M.pi_and_ref_turns(tokenizer, record, history, actions, pi_reads_c=hidden,
                               ref_reads_c=hidden, pictures=pictures)
            for history, actions in M.turn_actions(record)]
    return [turn for [(turn, _)] in both]


def all_turns(tokenizer, pictures):
    """Turns of three episodes: two with the same reference, one without. Page 9 has no picture."""
    turns = []
    for pages, hidden in (((0, 1, 9), 4), ((0, 3), 4), ((2, 2), None)):
        turns += critic_turns(tokenizer, episode(pages, hidden), hidden is not None, pictures)
    return turns


def pictures_in(seq):
    """The numbers of a sequence's pictures, in order."""
    return [i - M.PICTURE for i, before in zip(seq, [None, *seq])
            if i >= M.PICTURE and i != before]


def own_forward(lm, pictures, seq):
    """The transformers model's hidden states of one sequence."""
    shown = torch.tensor([[i >= M.PICTURE for i in seq]]).int()
    ids = torch.tensor([[lm.config.image_token_id if i >= M.PICTURE else i for i in seq]])
    more = {}
    if pictures_in(seq):
        pixels, grids = pictures.pixels(pictures_in(seq))
        more = {"pixel_values": pixels, "image_grid_thw": grids}
    out = lm.model(input_ids=ids, mm_token_type_ids=shown, use_cache=False, **more)
    return out.last_hidden_state[0]


def test_a_tree_with_pictures_has_the_values_and_gradients_of_separate_forwards(seeing):
    """So has one in parts."""
    path, lm, pictures = seeing
    model, tokenizer = M.load(path, head=True)
    model.pictures = pictures
    turns = all_turns(tokenizer, pictures)
    assert len(turns) == 7 and all(any(ord(i) >= M.PICTURE for i in p) for p, _ in turns[:5])
    assert count_tokens(turns) < 0.6 * sum(len(p) + len(a) for p, a in turns)
    want = []
    for prompt, action in turns:
        hidden = own_forward(lm, pictures, [*map(ord, prompt + action)])
        want.append((hidden @ model.score.weight[0].detach()).mean()[None])
    assert len(M.partition(turns, 80)) > 2
    theirs = gradients(lm, want)
    for tree_tokens in (math.inf, 80):
        got = by_tree(model, turns, tree_tokens)
        for x, y in zip(got, want, strict=True):
            assert x.shape == y.shape and torch.allclose(x, y, atol=2e-5), (x, y)
        ours, some = gradients(model, got), 0
        for name, their in theirs.items():
            if their is None:  # lm_head has no part in it
                assert ours[name] is None or not ours[name].any(), name
                continue
            some += their.abs().max() > 1e-4
            limit = 1e-5 + 1e-4 * their.abs().max()
            assert torch.allclose(ours[name], their, atol=limit), name
        assert some > 40  # the vision tower's, too


# --- the whole pipe with pictures -----------------------------------------------------------------

@pytest.fixture(scope="module")
def pages_played(tmp_path_factory):
    """(tiny text agent, records): three toy pages, each once right and once not."""
    pytest.importorskip("playwright", reason="no playwright (MANUAL.md, \"Frontend Design\")")
    sheet = os.path.join(colbench.CACHE, "tailwind.min.css")
    if not any(map(shutil.which, colbench.BROWSERS)) or not os.path.exists(sheet):
        pytest.skip("no Chromium, or no Tailwind style sheet (MANUAL.md, \"Frontend Design\")")
    agent = str(tmp_path_factory.mktemp("agent") / "tiny")
    save(toy.tiny_model(demos(200, of=toy_pages), 0, toy_pages.PIECES), agent)
    made = demos(6, of=toy_pages, hidden=0, silent=0, noise=0, at_once=0, early=0, max_turns=3)
    for i, r in enumerate(made):
        r["task"], r["sample"], r["reward"] = made[i // 2 * 2]["task"], i % 2, float(i % 2)
        r["dialogue_history"][0]["content"] = r["task"]["problem_description"]
        for m in colbench.agent_messages(r):
            if i % 2:
                m["output"] = m["content"] = r["task"]["ground_truth"]
            outputs = m["output"], "<html><body>nothing</body></html>", "no page"
            m["candidates"] = [{"output": output, "token_ids": [7 + n], "logprob": -1.0}
                               for n, output in enumerate(outputs)]
    return agent, made


def test_a_critic_that_sees_trains_scores_and_chooses(pages_played, tmp_path):
    agent, played = pages_played
    tiny_that_sees("qwen2_vl", str(tmp_path / "vl"))
    out, flags = tmp_path / "c", [
        "train_critic.py", "--model", tmp_path / "vl", "--min_gap", 0.1, "--held_out", 0,
        "--lr", 3e-3, "--beta", 1, "--epochs", 12, "--batch_size", 4, "--picture_tokens", 60]
    got, (_, *rows, last) = train(played, *flags, "--out", out)
    assert rows[-1]["loss"] < 0.3 < rows[0]["loss"] and last["finished"] == len(rows)
    assert all(math.isfinite(x["advantage"]) for r in got for x in actions(r))
    pictures = sorted(os.listdir(out / "pictures"))
    assert len(pictures) > 5 and all(name.endswith(".png") for name in pictures)
    # all pages are drawn already, also those of a run that was killed before it began
    again = tmp_path / "again"
    assert train(played, *flags, "--out", out)[0] == got
    assert records(succeed("train_critic.py", "--score", out, stdin=played).stdout) == got
    shutil.copytree(out / "pictures", again / "pictures")
    flags += ["--tree_tokens", 300]
    _, (_, *others, _) = train(played, *flags, "--out", again, ranks=2)
    assert sorted(os.listdir(again / "pictures")) == pictures and len(others) == len(rows)
    for a, b in list(zip(rows, others))[:3]:  # later AdamW has made something of the rounding
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
    play = ["--model", agent, "--human", toy_pages.__file__, "--max_turns", 2, "--max_tokens", 30,
            "-k", 3, "--best_of", 2]
    done = succeed("collect.py", *play, "--critic", out, stdin=[played[0]["task"]])
    assert len(records(done.stdout)) == 3


def test_an_untrained_critic_is_refused(tmp_path):
    done = script("train_critic.py", "--model", tmp_path, "--untrained", 1, stdin=[])
    complaint(done, "a critic that reads pictures must be trained")
