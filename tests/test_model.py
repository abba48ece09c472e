"""The tree against separate forwards; its parts, and the ranks' shares; kernels; chat templates."""
import copy
import functools
import glob
import json
import os
import random
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.utils.checkpoint import checkpoint
from transformers import (AutoModelForCausalLM, AutoTokenizer, Cohere2Config, Cohere2ForCausalLM,
                          DeepseekV3Config, DeepseekV3ForCausalLM, Gemma2Config,
                          Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, GptOssConfig,
                          GptOssForCausalLM, GraniteConfig, GraniteForCausalLM, LlamaConfig,
                          LlamaForCausalLM, MistralConfig, MistralForCausalLM, MixtralConfig,
                          MixtralForCausalLM, NemotronConfig, NemotronForCausalLM, PhiConfig,
                          PhiForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM,
                          Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM)

import model as M
from colbench import PIECES, with_hidden
from conftest import CPU, ROOT, demos, lines

# --- the tree -------------------------------------------------------------------------------------

SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
             initializer_range=0.2)  # large, so that attention is far from uniform
FAMILIES = {"llama": (LlamaForCausalLM, LlamaConfig, dict(tie_word_embeddings=False)),
            "llama_tied": (LlamaForCausalLM, LlamaConfig, dict(tie_word_embeddings=True)),
            "qwen2": (Qwen2ForCausalLM, Qwen2Config, dict(tie_word_embeddings=True)),
            "qwen2_windows": (Qwen2ForCausalLM, Qwen2Config,
                              dict(use_sliding_window=True, sliding_window=6, max_window_layers=1)),
            "mistral": (MistralForCausalLM, MistralConfig, dict(sliding_window=11)),
            "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig,
                       dict(sliding_window=7, layer_types=["sliding_attention", "full_attention"],
                            head_dim=16, query_pre_attn_scalar=16)),
            "qwen3": (Qwen3ForCausalLM, Qwen3Config, dict(head_dim=16, tie_word_embeddings=False)),
            "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig,
                          dict(head_dim=16, num_experts=5, num_experts_per_tok=2,
                               moe_intermediate_size=24, norm_topk_prob=True)),
            "mixtral": (MixtralForCausalLM, MixtralConfig,
                        dict(num_local_experts=3, num_experts_per_tok=2)),
            "granite": (GraniteForCausalLM, GraniteConfig,
                        dict(logits_scaling=8.0, residual_multiplier=0.5)),
            "cohere2": (Cohere2ForCausalLM, Cohere2Config, dict(
                logit_scale=0.06, sliding_window=5, head_dim=16,
                layer_types=["sliding_attention", "full_attention"])),
            "phi": (PhiForCausalLM, PhiConfig, {}),
            "gemma2_caps": (Gemma2ForCausalLM, Gemma2Config,
                            dict(head_dim=16, sliding_window=5, final_logit_softcapping=3.0,
                                 attn_logit_softcapping=None)),
            "deepseek_v3": (DeepseekV3ForCausalLM, DeepseekV3Config, dict(
                num_key_value_heads=4, n_routed_experts=4, n_group=2, topk_group=1,
                num_experts_per_tok=2, moe_intermediate_size=24, first_k_dense_replace=1,
                q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
                v_head_dim=16))}


def two_models(family, dtype=torch.float32):
    """The same random weights twice: with the tree's attention, and with transformers' own."""
    kind, config, more = FAMILIES[family]
    torch.manual_seed(1)
    tree = M.TreeLM(kind(config(**{**SIZES, **more}, attn_implementation="tree"))).to(dtype)
    plain = kind(config(**{**SIZES, **more}, attn_implementation="sdpa")).to(dtype)
    plain.load_state_dict(tree.lm.state_dict())
    plain.config._experts_implementation = "eager"  # a loop over experts
    if dtype == torch.float64:
        tree.lm.config._experts_implementation = "eager"  # the usual kernel has no fp64
    return tree, plain


def some_turns(seed=0):
    """Turns that share prefixes in every way there is."""
    r = random.Random(seed)

    def ids(n):
        return tuple(r.randrange(61) for _ in range(n))

    root = ids(9)
    a, b, c = ids(5), ids(7), ids(4)
    turns = [(root, a), (root, b), (root, c),                   # candidates of one turn
             (root, a),                                         # a duplicate
             (root, a[:3]),                                     # a prefix of another
             (root, a[:2] + ids(4)), (root, a[:2] + ids(3)),    # actions that share their beginning
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


def same_gradients(got, want, limit=5e-7):  # transformers' norms are fp32 in any dtype
    scale = max(g.abs().max() for g in want.values())
    for name in want:
        assert (got[name] - want[name]).abs().max() <= limit * scale, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_equal_separate_forwards(family, dtype, monkeypatch):
    monkeypatch.setitem(M.LOGITS, "cpu", 7 * SIZES["vocab_size"])  # of 7 tokens at a time
    tree, plain = two_models(family, dtype)
    for seed in range(3):
        turns = some_turns(seed)
        tree.zero_grad(), plain.zero_grad()
        got, want = M.action_logps(tree, turns), separate(plain, turns)
        assert [len(x) for x in got] == [len(action) for _, action in turns]
        in_fp32 = dtype == torch.float32 or family == "deepseek_v3"  # as its router is
        limit = 1e-6 if in_fp32 else 1e-12
        for x, y in zip(got, want):
            assert (x - y).abs().max() <= limit * y.abs().max().clamp(min=1)
        got, want = gradients(tree, got), gradients(plain, want)
        assert got.keys() == want.keys() and len(got) > 10
        same_gradients(got, want, 3e-6 if in_fp32 else 5e-7)


def test_a_tree_lays_every_prefix_out_once():
    for seed in range(20):
        turns = some_turns(seed)
        tree = M.Tree(turns)
        prefixes = {(*p, *a)[:n + 1] for p, a in turns for n in range(len(p) + len(a))}
        assert len(tree.ids) == len(prefixes) == M.count_tokens(turns)

        def path(i):  # by the parents, up to the root
            return ([] if i < 0 else path(tree.parent[i].item()) + [tree.ids[i].item()])
        for (prompt, action), at in zip(turns, tree.actions):
            assert tree.ids[at].tolist() == list(action)
            assert path(at[-1].item()) == [*prompt, *action]
            assert tree.pos[at].tolist() == list(range(len(prompt), len(prompt) + len(action)))
        runs, = tree.groups
        assert sum(runs.q) == runs.cu_q[-1] == len(tree.ids)
        assert sum(runs.kv) == runs.cu_kv[-1] == len(runs.paths)


def test_sharing_saves_tokens_on_candidates(tiny_dir):
    """16 candidates at every turn of short dialogues. They share their history, but no token."""
    _, tokenizer = M.load(tiny_dir)
    r, turns = random.Random(0), []
    for d in demos(50):
        for prompt, action in M.turns_of(tokenizer, d):
            turns += [(prompt, tuple(r.randrange(6, 300) for _ in action)) for _ in range(16)]
    assert sum(len(p) + len(a) for p, a in turns) > 4.5 * M.count_tokens(turns)


def test_score_equals_action_logps():
    tree, _ = two_models("llama_tied")
    turns = [t for seed in range(3) for t in some_turns(seed)]
    want = M.action_logps(tree, turns)
    for bound in (1, 64, 10 ** 9):
        for x, y in zip(M.score(tree, turns, bound), want):
            assert not x.requires_grad and torch.allclose(x, y, rtol=0, atol=1e-5)


# --- a tree in parts ------------------------------------------------------------------------------

@pytest.mark.parametrize("bound", [1, 30, 64])
@pytest.mark.parametrize("family", ["llama_tied", "qwen3"])
def test_parts_of_a_tree_give_the_same_values_and_gradients(family, bound, monkeypatch):
    model, _ = two_models(family, torch.float64)
    turns = [turn for seed in range(3) for turn in some_turns(seed)]
    want = M.action_logps(model, turns)
    want_gradients = gradients(model, want)
    model.zero_grad()
    trees, tree_logps = [], M.tree_logps

    def noted(model, tree, *anchor):
        trees.append((len(tree.turns), len(tree.ids)))
        return tree_logps(model, tree, *anchor)

    monkeypatch.setattr(M, "tree_logps", noted)
    got = M.action_logps(model, turns, bound)
    assert sum(n for n, _ in trees) == len(set(turns)) and len(trees) > 3
    got_gradients = gradients(model, got)
    assert sum(n for n, _ in trees) == 2 * len(set(turns))  # again in the backward pass
    assert all(tokens <= bound or n == 1 for n, tokens in trees)
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(got, want, strict=True))
    same_gradients(got_gradients, want_gradients)
    with torch.no_grad():
        again = M.action_logps(model, turns, bound)
    assert all(torch.equal(a, b) for a, b in zip(again, got))


def test_no_two_parts_are_recomputed_at_once():
    """Each one's gradient comes after the next one's.

    Else autograd would take up whatever else is ready on a GPU, and hold several parts.
    """
    model, _ = two_models("llama_tied", torch.float64)

    def below(node):
        nodes = {node}
        for following, _ in node.next_functions:
            if following:
                nodes |= below(following)
        return nodes

    everything = below(torch.cat(M.action_logps(model, some_turns(), 30)).grad_fn)
    parts = [node for node in everything if node.name() == "CheckpointFunctionBackward"]
    above = sorted(sum(node in below(other) for other in parts) for node in parts)
    assert above == list(range(1, len(parts) + 1)) and len(parts) > 2


def random_pairs(r):
    """Pairs over a small tree of prompts, neighbours mostly with the same prompt."""
    pairs, prompt = [], (0,)
    for _ in range(r.randrange(1, 13)):
        if r.random() < 0.5:
            prompt = (*prompt[:r.randrange(1, len(prompt) + 1)], *some_ids(r))
        pairs.append(M.Pair(((prompt, some_ids(r)),), ((prompt, some_ids(r)),)))
    return pairs


def some_ids(r):
    return tuple(r.randrange(3) for _ in range(r.randrange(1, 12)))


def smallest_largest(turns, n):
    """The largest tree of the best cut of turns into at most n neighbouring parts: every cut."""
    if n == 1:
        return M.count_tokens(turns)
    cuts = [max(M.count_tokens(turns[:i]), smallest_largest(turns[i:], n - 1))
            for i in range(1, len(turns))]
    return min([M.count_tokens(turns), *cuts])


def test_parts_hold_each_turn_once_are_bounded_and_as_even_as_the_best_cut():
    r = random.Random(0)
    for _ in range(150):
        turns, world = M.turns_in(random_pairs(r)), r.randrange(1, 4)
        bound = r.choice([1, 20, 60, 10 ** 9])
        parts = M.deal(turns, bound, world)
        in_order = sorted(turns, key=lambda turn: turn[0] + turn[1])
        assert [turn for part in parts for turn in part] == in_order
        assert all(len(part) == 1 or M.count_tokens(part) <= bound for part in parts)
        rounds = -(-len(M.deal(turns, bound, 1)) // world)
        assert -(-len(parts) // world) == rounds  # no more than needed
        if rounds == 1 and len(turns) < 12:
            best = smallest_largest(in_order, world)
            assert max(map(M.count_tokens, parts)) <= best * 1.01 + 1


def test_ranks_compute_few_tokens_twice():
    """Six turns of a trajectory with four pairs each: what is computed against one process."""
    r, turns = random.Random(0), []
    for _ in range(8):
        prompt = tuple(r.randrange(9) for _ in range(40))
        for _ in range(6):
            turns += [(prompt, (r.randrange(9), r.randrange(9))) for _ in range(8)]
            prompt += tuple(r.randrange(9) for _ in range(12))
    alone = M.count_tokens(turns)
    parts = list(map(M.count_tokens, M.deal(turns, 10 ** 9, 4)))
    assert len(parts) == 4 and sum(parts) <= 1.1 * alone and max(parts) <= 0.3 * alone


# --- kernels --------------------------------------------------------------------------------------

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def loop_kernel(q, k, v, runs, scale, left):
    """The oracle of the kernels: of n queries and m keys, query i sees the first m - n + i + 1."""
    out, cu_q, cu_kv = [], runs.cu_q.tolist(), runs.cu_kv.tolist()
    for start, end, first, last in zip(cu_q, cu_q[1:], cu_kv, cu_kv[1:]):
        copies = q.shape[1] // k.shape[1]
        keys, values = (x[first:last].repeat_interleave(copies, 1) for x in (k, v))
        for i in range(start, end):
            seen = last - first - (end - 1 - i)
            weights = torch.einsum("hd,khd->hk", q[i], keys[:seen]).mul(scale).softmax(-1)
            out.append(torch.einsum("hk,khd->hd", weights, values[:seen]))
    return torch.stack(out)


@pytest.mark.parametrize("family", ["llama_tied", "qwen3"])
def test_sdpa_gives_what_a_loop_over_the_layout_of_flash_kernels_gives(family, monkeypatch):
    model, _ = two_models(family, torch.float64)
    turns = some_turns()
    want = M.action_logps(model, turns)
    want_gradients = {n: g.clone() for n, g in gradients(model, want).items()}
    model.zero_grad()
    monkeypatch.setattr(M, "sdpa_kernel", loop_kernel)
    runs, = M.Tree(turns).groups
    assert any(queries < keys for queries, keys in zip(runs.q, runs.kv, strict=True))
    got = M.action_logps(model, turns)
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(got, want, strict=True))
    same_gradients(gradients(model, got), want_gradients)


@pytest.mark.parametrize("recompute", [0, 1])
@pytest.mark.parametrize("family", ["llama_tied", "qwen3"])
def test_groups_of_runs_give_the_same_values_and_gradients(family, recompute, monkeypatch):
    model, plain = two_models(family)
    if recompute:
        for layer in model.layers():
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    turns = some_turns()
    want, want_gradients = M.action_logps(model, turns), gradients(plain, separate(plain, turns))
    for bound, number in ((1, len(M.Tree(turns).groups[0].q)), (70, 3)):
        monkeypatch.setattr(M, "GATHERED", bound)
        groups = M.Tree(turns).groups
        assert len(groups) == number > 1
        assert all(len(runs.paths) <= bound or len(runs.q) == 1 for runs in groups)
        model.zero_grad()
        got = M.action_logps(model, turns)
        with torch.no_grad():
            scored = M.action_logps(model, turns)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(scored, want, strict=True))
        same_gradients(gradients(model, got), want_gradients, 3e-6)


def test_what_is_kept_for_the_backward_pass_does_not_grow_with_the_paths(monkeypatch):
    """20 turns of 4 candidates: the paths have more than 15 times the tokens of the tree."""
    model, _ = two_models("llama_tied")
    r, turns, history = random.Random(0), [], ()
    for _ in range(20):
        history += tuple(r.randrange(61) for _ in range(20))
        turns += [(history, tuple(r.randrange(61) for _ in range(8))) for _ in range(4)]
    parameters = {p.data_ptr() for p in model.parameters()}

    def bytes_kept():
        kept = {}

        def note(x):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            M.action_logps(model, turns)
        return sum(n for place, n in kept.items() if place not in parameters)

    paths, tokens = sum(M.Tree(turns).groups[0].kv), M.count_tokens(turns)
    all_kept = bytes_kept()
    monkeypatch.setattr(M, "GATHERED", 2 * tokens)
    a_key = 2 * 2 * 2 * 8 * 4  # bytes: key and value, of 2 layers, 2 heads of size 8, in fp32
    assert paths > 15 * tokens and all_kept - bytes_kept() > 0.9 * paths * a_key


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("groups", [1, 4, 200])
def test_gradients_of_what_many_branches_share_are_summed_in_fp32(groups, device, monkeypatch):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 5, 8).to(device, torch.bfloat16).requires_grad_()
                         for _ in range(3))
    paths = torch.arange(5, device=device).repeat(200)
    up = torch.rand(1000, 2, 8).to(device, torch.bfloat16)

    def kernel(q, k, v, runs, *more):
        for taken, x in ((k, key), (v, value)):
            assert torch.equal(taken, x[0].transpose(0, 1)[runs.paths])
        return k * runs.up + v * runs.up

    tree = SimpleNamespace(groups=[SimpleNamespace(paths=part, tokens=slice(0, 5), up=up_part)
                                   for part, up_part in zip(paths.chunk(groups), up.chunk(groups))])
    monkeypatch.setattr(M, "sdpa_kernel", kernel)
    monkeypatch.setattr(M, "flash_kernel", kernel)
    M.tree_attention(None, query, key, value, None, tree=tree)[0].sum().backward()
    plain = key.detach()[0].transpose(0, 1).clone().requires_grad_()
    (plain[paths] * up).sum().backward()
    exact = up.double().view(200, 5, 2, 8).sum(0)

    def error(gradient):
        return ((gradient - exact).abs() / exact).max().item()

    for x in (key, value):
        assert error(x.grad[0].transpose(0, 1)) <= 2 ** -8 < error(plain.grad) / 2


def bf16_error(device, exact=None):
    """(rms of values' errors, largest relative error of a parameter's gradient).

    Without `exact`, the exact (values, gradients).
    """
    r = random.Random(0)

    def ids(n):
        return tuple(r.randrange(300) for _ in range(n))

    turns, history = [], ids(150)
    for _ in range(4):
        turns += [(history, ids(r.randrange(5, 70))) for _ in range(12)]
        history += turns[-1][1] + ids(30)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=300, hidden_size=256, intermediate_size=512,
                         num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                         initializer_range=0.06, attn_implementation="tree")
    lm = LlamaForCausalLM(config).bfloat16()
    model = M.TreeLM(lm.to(device, torch.bfloat16 if exact else torch.float32))
    logps = M.action_logps(model, turns)
    values = torch.cat(logps).detach()
    grads = {n: g.float() for n, g in gradients(model, logps).items()}
    if not exact:
        return values, grads
    off = [((g - exact[1][n]).norm() / exact[1][n].norm()).item() for n, g in grads.items()]
    return (values - exact[0]).square().mean().sqrt().item(), max(off)


@GPU
def test_flash_is_as_exact_as_sdpa_in_16_bits(monkeypatch):
    """Runs have fewer queries than keys: a mask not aligned at the end would be far off."""
    exact = bf16_error("cuda")
    got = bf16_error("cuda", exact)
    monkeypatch.setattr(M, "flash_kernel", M.sdpa_kernel)
    want = bf16_error("cuda", exact)
    assert want[0] < 0.1 and want[1] < 0.1
    assert got[0] < 2 * want[0] and got[1] < 2 * want[1]


# --- chat templates -------------------------------------------------------------------------------

# The documented formats. name: (control tokens, the beginning of text first; template; end of turn)
TEMPLATES = {
    "llama3": (["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
                "<|end_of_text|>"],
               "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
               "{% set system = messages[0]['content'] %}"
               "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
               "<|start_header_id|>system<|end_header_id|>\n\n"
               "Today Date: 26 Jul 2024\n\n{{ system }}<|eot_id|>"
               "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
               "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
               "{% if add_generation_prompt %}"
               "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
               "<|eot_id|>"),
    "chatml": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
               "{% if messages[0]['role'] != 'system' %}"
               "<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
               "{% for m in messages %}"
               "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
               "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", "<|im_end|>"),
    # Qwen3's <think> and </think> are no special tokens.
    "qwen3": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
              "{% set ns = namespace(last=0) %}"
              "{% for m in messages %}"
              "{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
              "{% for m in messages %}{% set content = m['content'] %}{% set thought = '' %}"
              "{% if m['role'] == 'assistant' and '</think>' in content %}"
              "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
              "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
              "<|im_start|>{{ m['role'] }}\n"
              "{% if m['role'] == 'assistant' and loop.index0 > ns.last"
              " and (loop.last or thought) %}"
              "<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ content }}<|im_end|>\n{% endfor %}"
              "{% if add_generation_prompt %}<|im_start|>assistant\n"
              "{% if enable_thinking is defined and enable_thinking is false %}"
              "<think>\n\n</think>\n\n{% endif %}"
              "{% endif %}", "<|im_end|>"),
    "mistral": (["<s>", "</s>", "[INST]", "[/INST]"],
                "{{ bos_token }}{% for m in messages %}"
                "{% if m['role'] == 'user' %}[INST] {{ m['content'] }}[/INST]"
                "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}", "</s>"),
    "gemma": (["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
              "{{ bos_token }}"
              "{% if messages[0]['role'] == 'system' %}"
              "{{ raise_exception('no system role') }}{% endif %}"
              "{% for m in messages %}<start_of_turn>"
              "{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
              "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
              "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}", "<end_of_turn>"),
}
ENDS = {"llama3": "<|end_of_text|>", "chatml": "<|endoftext|>", "qwen3": "<|endoftext|>",
        "mistral": "</s>", "gemma": "<eos>"}

NO_BOS = "chatml", "qwen3"


def byte_tokenizer(name):
    """A byte-level tokenizer with a family's control tokens. It adds a BOS, as Llama's does."""
    control, template, _ = TEMPLATES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    t = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens(control)
    t.add_tokens(["<think>", "</think>"] * (name == "qwen3"))
    if name not in NO_BOS:
        bos = (control[0], len(alphabet))
        t.post_processor = processors.TemplateProcessing(f"{control[0]} $A", special_tokens=[bos])
    bos = {} if name in NO_BOS else {"bos_token": control[0]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=t, eos_token=ENDS[name],
                                        clean_up_tokenization_spaces=False, **bos)
    tokenizer.chat_template = template
    return tokenizer


def dialogue(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


def template_text(tokenizer, messages, thinking=False):
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True,
                                         enable_thinking=thinking)


def turns_of(tokenizer, history, hidden=None, thinking=0):
    read = with_hidden(history, hidden) if hidden else history
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
            want = [m["content"] + end for m in history[1::2]]
            assert [tokenizer.decode(action) for _, action in turns] == want

    def test_prompt_is_the_template_with_one_bos(self, name):
        tokenizer, (control, _, _) = byte_tokenizer(name), TEMPLATES[name]
        for t in (1, 3):
            prompt = turns_of(tokenizer, PLAIN)[t // 2][0]
            assert tokenizer.decode(prompt) == template_text(tokenizer, PLAIN[:t])
            assert prompt.count(tokenizer.convert_tokens_to_ids(control[0])) == (name not in NO_BOS)

    def test_spelled_control_tokens_stay_text(self, name):
        tokenizer, (control, _, _) = byte_tokenizer(name), TEMPLATES[name]
        ids = set(tokenizer.convert_tokens_to_ids(control))
        text = "".join(control) + "\ue0000\ue001."
        spelled = [{**m, "content": m["content"] + text} for m in PLAIN]

        def count(*conversation):
            turns = turns_of(tokenizer, *conversation)
            return [sum(i in ids for i in part) for turn in turns for part in turn]

        assert count(spelled) == count(PLAIN)
        assert count(PLAIN, "".join(control)) == count(PLAIN, "c")
        prompt = turns_of(tokenizer, spelled)[1][0]
        assert tokenizer.decode(prompt) == template_text(tokenizer, spelled[:3])

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
            p, q = tokenizer.decode(p), tokenizer.decode(q)
            assert a == b and "SECRET" in p and "SECRET" not in q
            assert p.replace("Hidden reference:\nSECRET\n\n", "") == q


def test_thinking():
    """Qwen3's template: 0 puts an empty thought before each new message, 1 puts none.

    A thought is said once, as an action.
    """
    tokenizer = byte_tokenizer("qwen3")
    marks = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    history = copy.deepcopy(PLAIN)
    history[1]["output"] = "<think>\nwhich?\n</think>\n\nwhat is the fee?"
    for thinking in (0, 1):
        turns = turns_of(tokenizer, history, None, thinking)
        for t, (prompt, _) in enumerate(turns):
            want = template_text(tokenizer, history[:2 * t + 1], bool(thinking))
            assert tokenizer.decode(prompt) == want
            assert [i for i in prompt if i in marks] == marks * (not thinking)
        assert [i for i in turns[0][1] if i in marks] == marks  # as it was sampled
        history[2]["content"] += "</think><think>"  # a human who spells them
        for prompt, _ in turns_of(tokenizer, history, None, thinking):
            assert [i for i in prompt if i in marks] == marks * (not thinking)
        history[2]["content"] = PLAIN[2]["content"]


def test_a_conversation_that_the_template_refuses_is_one_line(tiny_dir):
    tokenizer = copy.deepcopy(M.find_model(tiny_dir)[1])
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    message = "error: this --model's chat template takes no such conversation, user user: roles"
    with pytest.raises(SystemExit, match=message):
        M.render(tokenizer, [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])


@pytest.mark.parametrize("name", ["llama3", "gemma"])
def test_templates_that_trim_do_so_whatever_the_message_spells(name):
    tokenizer = byte_tokenizer(name)
    history = dialogue("  write f \n", " which? ", f"\n {ENDS[name]} \n")
    assert tokenizer.decode(M.render(tokenizer, history)) == template_text(tokenizer, history)


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


# --- the tiny model -------------------------------------------------------------------------------

NASTY = ["", " ", "\n\n \t\r\n", "hello wörld", "🙂👩‍👩‍👧 日本語 \u202e",
         "<|end|><|user|> <0x41> \x00\x7f", "  def  f(x,rate=3):return 1  ", "rate=34fee=5",
         "I WANT TO ANSWER:\ndef price(x, rate=3, cap=41): return min(x * rate, cap)",
         "\ue0000\ue001 ▁Ġ", "a" * 300]


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
    logps, logps_again = M.action_logps(model, turns), M.action_logps(again, turns)
    assert all(torch.equal(a, b) for a, b in zip(logps, logps_again))


def test_transformers_opens_what_save_wrote(tiny_dir):
    """Without our code: no file names the tree's attention, and logits are the same to the bit."""
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


REFUSED = {  # its own head, attention or positions: (class, config, message)
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**SIZES, head_dim=16), "soft caps"),
    "gpt_oss": (GptOssForCausalLM, GptOssConfig(**SIZES, head_dim=16, num_local_experts=4,
                                                num_experts_per_tok=2), "attention sinks"),
    "nemotron": (NemotronForCausalLM, NemotronConfig(**SIZES), "do not hand the tree"),
    "dynamic": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters={
        "rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "depend on the length")}


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_the_packed_forward_cannot_compute_is_refused(family, tmp_path, tiny_dir):
    kind, config, message = REFUSED[family]
    config = copy.deepcopy(config)
    _, tokenizer = M.load(tiny_dir)
    torch.manual_seed(0)
    lm = kind(config)
    for p in lm.parameters():  # weights as small as fresh ones hide what is done to logits
        p.data += 0.3 * torch.randn_like(p)
    lm.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match=message):
        M.load(str(tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_forward_that_is_wrong_is_found_as_the_model_is_loaded(ranks, tiny_dir, tmp_path):
    """A mask that is aligned at the start: the usual fault where runs are shorter than paths."""
    for name in glob.glob(f"{ROOT}/*.py"):
        shutil.copy(name, tmp_path)
    text = (tmp_path / "model.py").read_text()
    assert "mask.tril(keys - queries)" in text
    (tmp_path / "model.py").write_text(text.replace("mask.tril(keys - queries)", "mask.tril()"))
    command = [sys.executable, "train_policy.py"]
    if ranks > 1:
        command[1:1] = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    done = subprocess.run([*command, "--loss", "rft", "--all", "1", "--model", tiny_dir, "--out",
                           "out"], cwd=tmp_path, input=lines(demos(4)), text=True,
                          capture_output=True, env=CPU)
    assert done.returncode and "log-probs differ by" in done.stderr, done.stderr


def test_a_prompt_is_the_same_on_every_day(tiny_dir):
    tokenizer = M.find_model(tiny_dir)[1]
    tokenizer.chat_template = "{{ strftime_now('%d %B %Y') }}" + tokenizer.chat_template
    text = tokenizer.decode(M.render(tokenizer, [{"role": "user", "content": "a"}]))
    assert "26 July 2024" in text


def test_a_model_that_samples_by_an_old_generation_config_is_saved(tiny_dir, tmp_path):
    shutil.copytree(tiny_dir, tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text('{"temperature": 0.9, "top_p": 0.6}')
    M.save(*M.load(str(tmp_path / "m")), str(tmp_path / "again"))
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text())["do_sample"]


def save_random(family, tokenizer, out):
    """A model of a family with random weights and the tokenizer's vocabulary, saved in `out`."""
    kind, config, more = FAMILIES[family]
    config = config(**{**SIZES, **more, "vocab_size": len(tokenizer), "rms_norm_eps": 1e-5})
    config._attn_implementation = "tree"
    torch.manual_seed(2)
    model = M.TreeLM(kind(config))
    M.save(model, tokenizer, str(out))
    return model


@pytest.mark.parametrize("family", ["gemma3", "qwen3_moe", "mixtral", "deepseek_v3"])
def test_what_is_not_in_files_as_it_is_in_memory_is_loaded(family, tmp_path, tiny_dir):
    """Gemma computes some of it, files hold experts one by one, DeepSeek has a persistent buffer.
    transformers agrees.
    """
    _, tokenizer = M.load(tiny_dir)
    model = save_random(family, tokenizer, tmp_path)
    again, _ = M.load(str(tmp_path))
    logps, logps_again = M.action_logps(model, some_turns()), M.action_logps(again, some_turns())
    assert all(torch.equal(a, b) for a, b in zip(logps, logps_again, strict=True))
    theirs = separate(AutoModelForCausalLM.from_pretrained(tmp_path), some_turns())
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(logps, theirs, strict=True))


@pytest.mark.parametrize("change", ["missing", "superfluous"])
def test_every_tensor_of_the_files_and_of_the_model_has_its_like(change, tmp_path, tiny_dir):
    shutil.copytree(tiny_dir, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    name = "model.norm.weight" if change == "missing" else "model.norm.bias"
    if change == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors["model.norm.weight"].clone()
    save_file(tensors, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    with pytest.raises(SystemExit, match=f"not those of its config.json: .*{name}"):
        M.load(str(tmp_path / "m"))


@pytest.mark.full
@pytest.mark.parametrize("name, verdict", [
    ("olmo2", "right"), ("glm4_moe", "right"), ("phimoe", "its log-probs differ"),
    ("qwen3_next", "layers other than attention"), ("gpt2", "it has no model.layers")])
def test_the_table_of_families(name, verdict, tiny_dir):
    sys.path.append(f"{ROOT}/tests/experiments")
    import families
    tokenizer = M.find_model(tiny_dir)[1]
    assert verdict in families.verdict(families.small(name, len(tokenizer)), tokenizer)
