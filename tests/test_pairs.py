"""tests/experiments/pairs.py: the pairs of train_policy.py, from which TRL computes its loss."""
import json
import random
from unittest.mock import patch

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import model as M
import train_policy
from conftest import change_weights, lines, plain_ids, read_by, records, stdin_of, succeed
from experiments import pairs, preferences
from test_model import separate

SENTENCES = ["which rate?", "what is the fee?", "which cap do you want?", "which op?", "what?",
             "def pay(x, rate=4): return x * rate", "which color?", "rate=4?", "and the unit?"]


@pytest.fixture
def scored(ranked, tiny_dir):
    """The episodes with candidates that are sentences, cut or not, with advantages and log-probs.

    Their tokens are those that the tokenizer gives their texts.
    """
    r, chat = random.Random(0), M.find_model(tiny_dir)[1]
    for record in ranked:
        for history, (message, *candidates) in M.turn_actions(record):
            for c in candidates:
                c.update(output=r.choice(SENTENCES), advantage=r.gauss(0, 1),
                         logprob=r.gauss(-9, 3))
                del c["token_ids"]
                c["token_ids"] = chat.action_ids(c, history)
                if r.random() < 0.2:
                    c["cut"] = True
            if r.random() < 0.1 and len(candidates) > 1:  # one that has no score
                del candidates[0]["advantage"]
    return ranked


def written(given, *flags):
    """The lines that pairs.py writes of records."""
    out, args = [], train_policy.get_args([*map(str, flags)])
    with stdin_of(given), patch.object(pairs, "open_stdout", lambda: out.append):
        pairs.main(args)
    return records(lines(out))


def turn_of(chat, line, side):
    """(prompt, action) of a side of a line, as the template writes it, packed."""
    return (M.packed(chat.prompt_ids(line["prompt"])),
            M.packed(chat.action_ids(line[side][0], line["prompt"])))


@pytest.mark.parametrize("flags", [[], ["--pairs_per_turn", 2, "--seed", 1],
                                   ["--logprob_weight", 0.2, "--pairs_per_turn", 1]])
def test_its_pairs_are_those_that_the_trainer_draws(flags, scored, tiny_dir):
    """As the records say: of one turn, the higher score chosen and not cut."""
    chat = M.find_model(tiny_dir)[1]
    made = written(scored, "--model", tiny_dir, *flags)
    groups, _ = read_by(scored, train_policy, "--model", tiny_dir, *flags)
    drawn = [(*pair.chosen, *pair.rejected) for of in groups for pair in of]
    assert len(drawn) > 20
    assert drawn == [(turn_of(chat, line, "chosen"), turn_of(chat, line, "rejected"))
                     for line in made]
    weight = dict(zip(flags[::2], flags[1::2])).get("--logprob_weight", 0)
    possible, lm = set(), AutoModelForCausalLM.from_pretrained(tiny_dir)
    for record in scored:
        for history, (_, *candidates) in M.turn_actions(record):
            prompt = M.packed(chat.prompt_ids(history))
            logps = separate(lm, [(prompt, "".join(map(chr, c["token_ids"]))) for c in candidates])
            values = [(c["output"], c["advantage"] + weight * logp.sum().item(), c.get("cut"))
                      for c, logp in zip(candidates, logps) if "advantage" in c]
            prompt = json.dumps([m["content"] for m in history])
            possible |= {(record["task"]["id"], prompt, a, b)
                         for a, high, cut in values for b, low, _ in values
                         if high > low and not cut}
    for line in made:
        texts = [m["content"] for m in line["prompt"]]
        assert line["prompt"][-1]["role"] == "user" and len(line["chosen"]) == 1
        assert (line["task"], json.dumps(texts), line["chosen"][0]["content"],
                line["rejected"][0]["content"]) in possible


def test_its_lines_are_preferences_which_the_trainer_reads_again(scored, tiny_dir):
    """Earlier messages of the agent are in the prompt: they are the same on both sides."""
    made, back = written(scored, "--model", tiny_dir), []
    with stdin_of(made), patch.object(preferences, "open_stdout", lambda: back.append):
        preferences.main(preferences.get_args([]))
    groups, _ = read_by(records(lines(back)), train_policy, "--model", tiny_dir, "--loss", "mtdpo")
    read = [pair for of in groups for pair in of]
    assert all(pair.chosen[:-1] == pair.rejected[:-1] for pair in read)
    assert {len(pair.chosen) for pair in read} > {1}
    drawn, _ = read_by(scored, train_policy, "--model", tiny_dir)
    assert {(pair.chosen[-1], pair.rejected[-1]) for pair in read} == {
        (*pair.chosen, *pair.rejected) for of in drawn for pair in of}


def test_a_thought_that_the_prompt_opens_is_in_the_texts(scored, tiny_dir, tmp_path):
    """So that a template which writes the whole dialogue has it, too."""
    base, tokenizer = str(tmp_path / "base"), M.find_model(tiny_dir)[1].tokenizer
    tokenizer.chat_template = tokenizer.get_chat_template().replace(
        "<|assistant|>{% endif %}",
        "<|assistant|>{% if enable_thinking %}<think>{% endif %}{% endif %}")
    tokenizer.save_pretrained(base)
    AutoConfig.from_pretrained(tiny_dir).save_pretrained(base)
    for record in scored:
        record["meta"] |= {"thinking": 1}
    made = written(scored, "--model", base)
    assert all(line["meta"] == {"thinking": 1} for line in made)
    assert {line[side][0]["content"] for line in made for side in ("chosen", "rejected")} <= {
        "<think>" + text for text in SENTENCES}


@pytest.mark.parametrize("flags", [["--loss", "mtdpo"], ["--mix", 0.5], ["--held_out", 0.2]])
def test_other_pairs_are_refused(flags):
    with pytest.raises(SystemExit, match="only pairs of candidates can be written"):
        written([], *flags)


def test_two_equal_texts_are_no_pair_and_a_file_without_pairs_is_an_error(scored, tiny_dir, capsys):
    r, tokenizer = random.Random(0), M.find_model(tiny_dir)[1].tokenizer
    for record in scored:
        for _, (_, *candidates) in M.turn_actions(record):
            for c in candidates:
                c["output"], at = "which rate?", r.randrange(11)
                c["token_ids"] = [i for part in (c["output"][:at], c["output"][at:])
                                  for i in plain_ids(tokenizer, part)]  # some of other tokens
    with pytest.raises(SystemExit, match=f"error: no pairs in {len(scored)} records: no turn has"):
        written(scored, "--model", tiny_dir)
    assert "pairs have two equal texts and are left out (the first: the task" in (
        capsys.readouterr().err)


@pytest.mark.full
def test_trl_computes_our_loss_of_the_file(scored, tiny_dir, tmp_path):
    """DPO's loss and the NLL, of a policy that has moved away from its reference."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    file, moved = tmp_path / "pairs.jsonl", tmp_path / "moved"
    file.write_text(succeed("tests/experiments/pairs.py", "--model", tiny_dir, stdin=scored).stdout)
    M.save(*M.load(tiny_dir), str(moved))
    torch.manual_seed(0)
    change_weights(moved, lambda all_of: {name: w + 0.1 * w.std() * torch.randn_like(w)
                                          for name, w in all_of.items()})
    flags = ["--model", tiny_dir, "--beta", 0.3, "--nll_coef", 0.05]
    args = train_policy.get_args([*map(str, flags)])
    groups, _ = read_by(scored, train_policy, *flags)
    drawn = [pair for of in groups for pair in of]
    (pi, _), (pi_ref, _) = M.load(str(moved)), M.load(tiny_dir)
    turns = M.turns_in(drawn)
    logps, ref_logps = M.turn_logps(pi, turns, 4096), M.turn_logps(pi_ref, turns, 4096)

    trainer = trl.DPOTrainer(
        AutoModelForCausalLM.from_pretrained(moved), AutoModelForCausalLM.from_pretrained(tiny_dir),
        trl.DPOConfig(str(tmp_path / "trl"), beta=0.3, loss_type=["sigmoid", "sft"],
                      loss_weights=[1, 0.05], per_device_train_batch_size=1, report_to=[],
                      max_length=None, bf16=False, use_cpu=True, disable_dropout=True),
        train_dataset=datasets.load_dataset("json", data_files=str(file), split="train",
                                            cache_dir=str(tmp_path / "cache")),
        processing_class=AutoTokenizer.from_pretrained(tiny_dir))
    rows, losses = list(trainer.train_dataset), []
    assert len(rows) == len(drawn)
    for pair, row in zip(drawn, rows):
        prompt, chosen = pair.chosen[0]
        assert row["prompt_ids"] == [*map(ord, prompt)]
        assert row["chosen_ids"] == [*map(ord, chosen)]
        with torch.no_grad():
            losses.append(trainer.compute_loss(trainer.model, trainer.data_collator([row])).item())
        ours = train_policy.LOSSES["dpo"](args, [pair], logps, ref_logps)[0].item()
        assert losses[-1] == pytest.approx(ours, abs=1e-4)
    assert max(losses) - min(losses) > 0.1
