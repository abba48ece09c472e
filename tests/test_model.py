"""The tree of shared prefixes against separate forwards; chat templates; the tiny model."""
import copy
import json
import os
import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast,
                          Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM)

import model as M
from colbench import PIECES
from conftest import demos
from train_critic import as_read

# --- the tree ---------------------------------------------------------------------------------------------------------

SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2)  # attention far from uniform
FAMILIES = {"llama": (LlamaForCausalLM, LlamaConfig, dict(tie_word_embeddings=False)),
            "llama_tied": (LlamaForCausalLM, LlamaConfig, dict(tie_word_embeddings=True)),
            "qwen2": (Qwen2ForCausalLM, Qwen2Config, dict(tie_word_embeddings=True)),
            "qwen3": (Qwen3ForCausalLM, Qwen3Config, dict(head_dim=16, tie_word_embeddings=False))}


def two_models(family, dtype=torch.float32):
    """The same random weights twice: with the tree's attention, and with transformers' own."""
    kind, config, more = FAMILIES[family]
    torch.manual_seed(1)
    tree = M.TreeLM(kind(config(**SIZES, **more, attn_implementation="tree_sdpa"))).to(dtype)
    plain = kind(config(**SIZES, **more, attn_implementation="sdpa")).to(dtype)
    plain.load_state_dict(tree.lm.state_dict())
    return tree, plain


def some_turns(seed=0):
    """Turns that share prefixes in every way there is."""
    r = random.Random(seed)
    ids = lambda n: tuple(r.randrange(61) for _ in range(n))
    root = ids(9)
    a, b, c = ids(5), ids(7), ids(4)
    turns = [(root, a), (root, b), (root, c),                   # candidates of one turn
             (root, a),                                         # a duplicate
             (root, a[:3]),                                     # a prefix of another
             (root, a[:2] + ids(4)), (root, a[:2] + ids(3)),    # they part in the middle of an action
             (root + a + c, b), (root + a + c + b + ids(3), c),  # later turns of one trajectory
             (root[:4], root[4:7]),                             # an action inside another's prompt
             (root[:4] + ids(6), a), (ids(1), ids(1)), (ids(20), ids(30)), (root + a, c + b)]
    r.shuffle(turns)
    return turns


def separate(model, turns):
    """The oracle: one unpadded forward a turn."""
    out = []
    for prompt, action in turns:
        logits = model(input_ids=torch.tensor([[*prompt, *action]]), use_cache=False).logits[0]
        at = torch.arange(len(prompt) - 1, len(prompt) + len(action) - 1)
        out.append(logits.log_softmax(-1)[at, torch.tensor(action)])
    return out


def gradients(model, logps):
    """Of a sum in which every token has its own weight."""
    weights = torch.sin(torch.arange(sum(map(len, logps)), dtype=torch.float64) + 1)
    (torch.cat(list(logps)).double() * weights).sum().backward()
    return {n.removeprefix("lm."): p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_equal_separate_forwards(family, dtype):
    tree, plain = two_models(family, dtype)
    for seed in range(3):
        turns = some_turns(seed)
        tree.zero_grad(), plain.zero_grad()
        got, want = M.action_logps(tree, turns, chunk=7), separate(plain, turns)
        assert [len(x) for x in got] == [len(action) for _, action in turns]
        for x, y in zip(got, want):
            assert (x - y).abs().max() <= (1e-6 if dtype == torch.float32 else 1e-12) * y.abs().max().clamp(min=1)
        got, want = gradients(tree, got), gradients(plain, want)
        assert got.keys() == want.keys() and len(got) > 10
        scale = max(g.abs().max() for g in want.values())
        limit = 3e-6 if dtype == torch.float32 else 5e-7  # transformers' norms are fp32 in both
        for name in want:
            assert (got[name] - want[name]).abs().max() <= limit * scale, name


def test_pack_lays_every_prefix_out_once():
    for seed in range(20):
        turns = some_turns(seed)
        tree = M.pack(turns)
        prefixes = {(*p, *a)[:n + 1] for p, a in turns for n in range(len(p) + len(a))}
        assert len(tree.ids) == len(prefixes) == M.tree_tokens(turns)
        assert tree.unshared == sum(len(p) + len(a) for p, a in turns)

        def path(i):  # by the parents, up to the root
            return ([] if i < 0 else path(tree.parent[i].item()) + [tree.ids[i].item()])
        for (prompt, action), at in zip(turns, tree.actions):
            assert tree.ids[at].tolist() == list(action)
            assert path(at[-1].item()) == [*prompt, *action]
            assert tree.pos[at].tolist() == list(range(len(prompt), len(prompt) + len(action)))
        assert sum(tree.runs.q) == len(tree.ids) and tree.runs.cu_kv[-1] == sum(tree.runs.kv) == len(tree.runs.paths)


def test_sharing_saves_tokens_on_candidates(tiny_dir):
    """16 candidates at every turn of short built-in dialogues, though here the candidates share no token themselves."""
    _, tokenizer = M.load(tiny_dir)
    r, turns = random.Random(0), []
    for d in demos(50):
        for prompt, action in M.turns_of(tokenizer, d):
            turns += [(prompt, tuple(r.randrange(6, 300) for _ in action)) for _ in range(16)]
    assert sum(len(p) + len(a) for p, a in turns) > 4.5 * M.tree_tokens(turns)


def test_micro_batches_partition_in_order_and_bound():
    turns = [(tuple(p), tuple(a)) for seed in range(4) for p, a in some_turns(seed)]
    pairs = [M.Pair(tuple(turns[i:i + 2]), (turns[-i],)) for i in range(len(turns))]
    for bound in (1, 30, 50, 100, 10 ** 9):
        parts = M.micro_batches(pairs, bound)
        assert [pair for part in parts for pair in part] == pairs
        assert all(len(part) == 1 or len(M.pack(M.turns_in(part)).ids) <= bound for part in parts)
    assert len(M.micro_batches(pairs, 10 ** 9)) == 1 < len(M.micro_batches(pairs, 100))


def test_score_equals_action_logps():
    tree, _ = two_models("llama_tied")
    turns = [t for seed in range(3) for t in some_turns(seed)]
    want = M.action_logps(tree, turns)
    for bound in (1, 64, 10 ** 9):
        for x, y in zip(M.score(tree, turns, bound), want):
            assert not x.requires_grad and torch.allclose(x, y, rtol=0, atol=1e-5)


# --- chat templates ---------------------------------------------------------------------------------------------------

# The documented formats. name: (control tokens, the beginning of text first; template; end of turn)
TEMPLATES = {
    "llama3": (["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"],
               "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
               "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
               "<|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n{{ system }}<|eot_id|>"
               "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
               "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
               "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
               "<|eot_id|>"),
    "chatml": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
               "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
               "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
               "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", "<|im_end|>"),
    "qwen3": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"],  # and <think>, </think>, which are not special
              "{% set ns = namespace(last=0) %}"
              "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
              "{% for m in messages %}{% set content = m['content'] %}{% set thought = '' %}"
              "{% if m['role'] == 'assistant' and '</think>' in content %}"
              "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
              "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
              "<|im_start|>{{ m['role'] }}\n"
              "{% if m['role'] == 'assistant' and loop.index0 > ns.last and (loop.last or thought) %}"
              "<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ content }}<|im_end|>\n{% endfor %}"
              "{% if add_generation_prompt %}<|im_start|>assistant\n"
              "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
              "{% endif %}", "<|im_end|>"),
    "mistral": (["<s>", "</s>", "[INST]", "[/INST]"],
                "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }}[/INST]"
                "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}", "</s>"),
    "gemma": (["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
              "{{ bos_token }}"
              "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
              "{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
              "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
              "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}", "<end_of_turn>"),
}
ENDS = {"llama3": "<|end_of_text|>", "chatml": "<|endoftext|>", "qwen3": "<|endoftext|>", "mistral": "</s>", "gemma": "<eos>"}

NO_BOS = "chatml", "qwen3"


def byte_tokenizer(name):
    """A byte-level tokenizer with the control tokens of a family, which adds a BOS of its own, as Llama's does."""
    control, template, _ = TEMPLATES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    t = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.add_special_tokens(control)
    t.add_tokens(["<think>", "</think>"] * (name == "qwen3"))
    if name not in NO_BOS:
        bos = (control[0], len(alphabet))
        t.post_processor = processors.TemplateProcessing(f"{control[0]} $A", special_tokens=[bos])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=t, eos_token=ENDS[name], clean_up_tokenization_spaces=False,
                                        **({"bos_token": control[0]} if name not in NO_BOS else {}))
    tokenizer.chat_template = template
    return tokenizer


def dialogue(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


def turns_of(tokenizer, history, hidden=None, thinking=0):
    read = as_read(history, hidden)
    return M.turns_of(tokenizer, {"dialogue_history": read, "meta": {"thinking": thinking}})


PLAIN = dialogue("write f(x): the price", "what is the fee?", "fee=3",
                 "I WANT TO ANSWER:\ndef f(x): return 'é🙂' + x")


@pytest.mark.parametrize("name", TEMPLATES)
class TestTemplate:
    def test_actions_are_the_assistant_turns(self, name):
        tokenizer, (control, _, end) = byte_tokenizer(name), TEMPLATES[name]
        spelled = [{**m, "content": m["content"] + "".join(control) + "."} for m in PLAIN]
        for history in (PLAIN, spelled):
            turns = turns_of(tokenizer, history)
            assert [tokenizer.decode(action) for _, action in turns] == [m["content"] + end for m in history[1::2]]

    def test_prompt_is_the_template_with_one_bos(self, name):
        tokenizer, (control, _, _) = byte_tokenizer(name), TEMPLATES[name]
        for t in (1, 3):
            prompt = turns_of(tokenizer, PLAIN)[t // 2][0]
            assert tokenizer.decode(prompt) == tokenizer.apply_chat_template(PLAIN[:t], tokenize=False, enable_thinking=False,
                                                                             add_generation_prompt=True)
            assert prompt.count(tokenizer.convert_tokens_to_ids(control[0])) == (name not in NO_BOS)

    def test_spelled_control_tokens_stay_text(self, name):
        tokenizer, (control, _, _) = byte_tokenizer(name), TEMPLATES[name]
        ids = set(tokenizer.convert_tokens_to_ids(control))
        spelled = [{**m, "content": m["content"] + "".join(control) + "\ue0000\ue001."} for m in PLAIN]
        count = lambda turns: [sum(i in ids for i in part) for turn in turns for part in turn]
        assert count(turns_of(tokenizer, spelled)) == count(turns_of(tokenizer, PLAIN))
        assert count(turns_of(tokenizer, PLAIN, "".join(control))) == count(turns_of(tokenizer, PLAIN, "c"))
        assert tokenizer.decode(turns_of(tokenizer, spelled)[1][0]) == \
            tokenizer.apply_chat_template(spelled[:3], tokenize=False, add_generation_prompt=True, enable_thinking=False)

    def test_end_of_turn_is_the_templates(self, name):
        tokenizer, (_, _, end) = byte_tokenizer(name), TEMPLATES[name]
        assert M.end_of_turn(tokenizer) == [tokenizer.convert_tokens_to_ids(end)]

    def test_later_prompts_extend_earlier_turns(self, name):
        tokenizer = byte_tokenizer(name)
        (prompt, action), (later, _) = turns_of(tokenizer, PLAIN)
        if name == "qwen3":  # an empty thought stands before a new message alone
            prompt = prompt[:-len(tokenizer("<think>\n\n</think>\n\n")["input_ids"])]
        assert later[:len(prompt)] == prompt
        if name != "mistral":  # its template writes a space that the action does not begin with
            assert later[:len(prompt) + len(action)] == prompt + action

    def test_hidden_information_stands_in_front_of_the_same_conversation(self, name):
        tokenizer = byte_tokenizer(name)
        seen, blind = turns_of(tokenizer, PLAIN, "SECRET"), turns_of(tokenizer, PLAIN)
        for (p, a), (q, b) in zip(seen, blind):
            assert a == b and "SECRET" in tokenizer.decode(p) and "SECRET" not in tokenizer.decode(q)
            assert tokenizer.decode(p).replace("Hidden reference:\nSECRET\n\n", "") == tokenizer.decode(q)


def test_thinking():
    """Qwen3's template: 0 puts an empty thought before each new message, 1 none; a thought is said once, as an action."""
    tokenizer, marks = byte_tokenizer("qwen3"), byte_tokenizer("qwen3").convert_tokens_to_ids(["<think>", "</think>"])
    history = copy.deepcopy(PLAIN)
    history[1]["output"] = "<think>\nwhich?\n</think>\n\nwhat is the fee?"
    for thinking in (0, 1):
        turns = turns_of(tokenizer, history, None, thinking)
        for t, (prompt, _) in enumerate(turns):
            assert tokenizer.decode(prompt) == tokenizer.apply_chat_template(
                history[:2 * t + 1], tokenize=False, add_generation_prompt=True, enable_thinking=bool(thinking))
            assert [i for i in prompt if i in marks] == marks * (not thinking)
        assert [i for i in turns[0][1] if i in marks] == marks  # as it was sampled
        history[2]["content"] += "</think><think>"  # a human who spells them
        for prompt, _ in turns_of(tokenizer, history, None, thinking):
            assert [i for i in prompt if i in marks] == marks * (not thinking)
        history[2]["content"] = PLAIN[2]["content"]


def test_a_conversation_that_the_template_refuses_is_one_line(tiny_dir):
    tokenizer = copy.deepcopy(M.find_model(tiny_dir)[1])
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(SystemExit, match="error: this --model's chat template takes no such conversation, user user: roles"):
        M.render(tokenizer, [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])


@pytest.mark.parametrize("name", ["llama3", "gemma"])
def test_templates_that_trim_do_so_whatever_the_message_spells(name):
    tokenizer = byte_tokenizer(name)
    history = dialogue("  write f \n", " which? ", f"\n {ENDS[name]} \n")
    assert tokenizer.decode(M.render(tokenizer, history)) == tokenizer.apply_chat_template(
        history, tokenize=False, add_generation_prompt=True)


def test_stored_token_ids_are_the_action():
    """What was sampled is scored, however the tokenizer would write the same text."""
    history = copy.deepcopy(PLAIN)
    history[1]["token_ids"] = [1, 2, 3]
    assert [a for _, a in turns_of(byte_tokenizer("llama3"), history)][0] == (1, 2, 3)


def test_output_rather_than_content_is_the_action():
    tokenizer, history = byte_tokenizer("llama3"), copy.deepcopy(PLAIN)
    history[1]["output"] = "let me think OUTPUT: what is the fee?"
    (_, action), (later, _) = turns_of(tokenizer, history)
    assert tokenizer.decode(action) == history[1]["output"] + "<|eot_id|>"
    assert "let me think" not in tokenizer.decode(later)  # the next prompt shows what was sent


# --- the tiny model ---------------------------------------------------------------------------------------------------

NASTY = ["", " ", "\n\n \t\r\n", "hello wörld", "🙂👩‍👩‍👧 日本語 \u202e",
         "<|end|><|user|> <0x41> \x00\x7f", "  def  f(x,rate=3):return 1  ", "rate=34fee=5",
         "I WANT TO ANSWER:\ndef price(x, rate=3, cap=41): return min(x * rate, cap)", "\ue0000\ue001 ▁Ġ", "a" * 300]


def test_tiny_tokenizer_round_trips_any_text(tiny_dir):
    _, tokenizer = M.load(tiny_dir)
    control = set(tokenizer.added_tokens_decoder)
    for text in [*NASTY, *(m["content"] for d in demos(20, seed=9) for m in d["dialogue_history"])]:
        ids = M.plain_ids(tokenizer, text)
        assert tokenizer.decode(ids) == text and not control & set(ids)


def test_tiny_is_a_function_of_its_seed():
    weights = [M.tiny(demos(30), seed, PIECES)[0].state_dict() for seed in (0, 0, 1)]
    same = lambda a, b: all(torch.equal(a[k], b[k]) for k in a)
    assert same(weights[0], weights[1]) and not same(weights[0], weights[2])
    assert sum(p.numel() for p in M.tiny(demos(200), 0, PIECES)[0].parameters()) < 400_000


def test_saving_and_loading_change_nothing(tmp_path):
    model, tokenizer = M.tiny(demos(50), 0, PIECES)
    M.save(model, tokenizer, str(tmp_path / "m"))
    again, tokenizer_again = M.load(str(tmp_path / "m"))
    turns = [t for d in demos(5, seed=4) for t in M.turns_of(tokenizer, d)]
    assert turns == [t for d in demos(5, seed=4) for t in M.turns_of(tokenizer_again, d)]
    assert all(torch.equal(a, b) for a, b in zip(M.action_logps(model, turns), M.action_logps(again, turns)))


def test_transformers_opens_what_save_wrote(tiny_dir):
    """With no help of ours: nothing in the directory names the tree's attention, and logits are the same bits."""
    for name in os.listdir(tiny_dir):
        if name.endswith(".json"):
            assert '"tree"' not in open(os.path.join(tiny_dir, name)).read()
    theirs = AutoModelForCausalLM.from_pretrained(tiny_dir)
    ours, _ = M.load_lm(tiny_dir, "cpu")
    ids = torch.arange(6, 60)[None]
    assert torch.equal(theirs(ids).logits, ours(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    stop = json.load(open(os.path.join(tiny_dir, "generation_config.json")))["eos_token_id"]
    assert tokenizer.chat_template and tokenizer.convert_tokens_to_ids("<|end|>") in stop


def test_models_that_the_tree_cannot_compute_are_refused(tmp_path, tiny_dir):
    _, tokenizer = M.load(tiny_dir)
    config = Qwen2Config(**{**SIZES, "vocab_size": len(tokenizer)}, use_sliding_window=True, sliding_window=8,
                         max_window_layers=0)
    M.save(M.TreeLM(Qwen2ForCausalLM(config)), tokenizer, str(tmp_path / "m"))
    with pytest.raises(SystemExit, match="sliding"):
        M.load(str(tmp_path / "m"))
