"""The packed forward against separate ones; parts and ranks' shares; loading."""
import itertools
import json
import math
import os
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

import model as M
import utils
from conftest import change_json, change_weights, demos, turns_of, weights
from plan import count_tokens

# --- the tree -------------------------------------------------------------------------------------

SIZES = {  # of all of these a family takes those that its config has
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "sliding_window": 6, "max_position_embeddings": 256,
    "initializer_range": 0.2,  # large, so that attention is far from uniform
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "is_decoder": True, "causal": True,
    "rotary_dim": 16, "default_language": "en_XX", "attention_multiplier": 0.25, "rescale_every": 2,
    "attn_layer_period": 2, "attn_layer_offset": 1, "attn_layer_indices": [1, 3]}
WINDOW_FIRST = ["sliding_attention", "full_attention"]
FAMILIES = {  # name: (model_type, what its config has beside SIZES)
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2_windows": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    "gemma3": ("gemma3_text", {"layer_types": WINDOW_FIRST, "query_pre_attn_scalar": 16}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 5, "norm_topk_prob": True}),
    "granite": ("granite", {"logits_scaling": 8.0, "residual_multiplier": 0.5}),
    "cohere2": ("cohere2", {"logit_scale": 0.06, "layer_types": WINDOW_FIRST}),
    "phi": ("phi", {}),
    "gemma2_caps": ("gemma2", {"final_logit_softcapping": 3.0, "attn_logit_softcapping": None}),
    "deepseek_v3": ("deepseek_v3", {"num_key_value_heads": 4, "n_group": 2, "head_dim": 8,
                                    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                                    "first_k_dense_replace": 1})}


def small(kind, attention="eager", sizes=SIZES, **own):
    """A transformers model of a model_type with random weights; own: beside or instead of sizes."""
    known = AutoConfig.for_model(kind)
    sizes = {name: size for name, size in sizes.items() if hasattr(known, name)}
    config = AutoConfig.for_model(kind, **{**sizes, **own})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32,
                                            attn_implementation=attention)


def two_models(family, dtype=torch.float32):
    """The same random weights twice: with the tree's attention, and with transformers' own."""
    torch.manual_seed(1)
    kind, own = FAMILIES[family]
    tree, plain = M.TreeLM(small(kind, "tree", **own)).to(dtype), small(kind, "eager", **own)
    tree.supports_trees = True
    plain.to(dtype).load_state_dict(tree.lm.state_dict())
    plain.config._attn_implementation = "sdpa"  # exact in fp64; some families refuse to name it
    plain.config._experts_implementation = "eager"  # a loop over experts
    if dtype == torch.float64:
        tree.lm.config._experts_implementation = "eager"  # the usual kernel has no fp64
    return tree, plain


def some_turns(ids=range(61), seed=0):
    """Turns that share prefixes in every way there is, of some ids."""
    r = random.Random(seed)

    def some(n):
        return M.packed(r.choices(ids, k=n))

    root, a, b, c = some(9), some(5), some(7), some(4)
    turns = [(root, a), (root, b), (root, c),                   # candidates of one turn
             (root, a),                                         # a duplicate
             (root, a[:3]),                                     # a prefix of another
             (root, a[:2] + some(4)), (root, a[:2] + some(3)),  # actions that begin alike
             (root + a + c, b), (root + a + c + b + some(3), c),  # later turns of one trajectory
             (root[:4], root[4:7]),                             # an action inside another's prompt
             (root[:4] + some(6), a), (some(1), some(1)), (some(20), some(30)), (root + a, c + b)]
    r.shuffle(turns)
    return [M.Turn(*turn) for turn in turns]


def ids_of(text):
    return torch.tensor([[*map(ord, text)]])


def separate(model, turns):
    """The oracle: one unpadded forward a turn."""
    out = []
    for prompt, action in turns:
        logits = model(input_ids=ids_of(prompt + action), use_cache=False).logits[0]
        at = torch.arange(len(prompt) - 1, len(prompt) + len(action) - 1)
        out.append(logits.log_softmax(-1)[at, ids_of(action)[0]])
    return out


COMPUTED = {}  # {id of a model: what its last forward computed}


def by_tree(model, turns, tree_tokens=math.inf):
    """The log-probs of M.forward, in the order of the turns."""
    logps, computed = M.forward(model, turns, tree_tokens)
    if torch.is_grad_enabled():
        COMPUTED[id(model)] = computed
    return [logps[turn] for turn in turns]


def backward(model, loss):
    """The gradient of a loss of by_tree()."""
    loss.backward()
    if isinstance(model, M.TreeLM):
        M.backward(model, COMPUTED.pop(id(model)))


def gradients(model, logps):
    """Of a sum in which every token has its own weight."""
    model.zero_grad()
    weights = torch.sin(torch.arange(sum(map(len, logps)), dtype=torch.float64) + 1)
    loss = (torch.cat(list(logps)).double() * weights).sum()
    backward(model, loss)
    return {n.removeprefix("lm."): p.grad for n, p in model.named_parameters()}


def check_equal_separate(tree, plain, turns, tree_tokens=math.inf, limit=1e-12):
    """Values and gradients; without gradient the values are the same to the bit."""
    got, want = by_tree(tree, turns, tree_tokens), separate(plain, turns)
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape and (x - y).abs().max() <= limit * y.abs().max().clamp(min=1)
    with torch.no_grad():
        again = by_tree(tree, turns, tree_tokens)
    assert all(torch.equal(x, y) for x, y in zip(again, got))
    got, want = gradients(tree, got), gradients(plain, want)
    assert got.keys() == want.keys() and len(got) > 10
    scale = max(g.abs().max() for g in want.values())
    for name in want:  # transformers' norms are fp32 in any dtype
        assert (got[name] - want[name]).abs().max() <= max(3 * limit, 5e-7) * scale, name


@pytest.mark.parametrize("family, dtype", [
    ("llama", torch.float32), *((family, torch.float64) for family in FAMILIES)])
def test_values_and_gradients_equal_separate_forwards(family, dtype, monkeypatch):
    """Of one tree, and of one in parts."""
    monkeypatch.setitem(M.MAX_LOGITS, "cpu", 7 * SIZES["vocab_size"])  # of 7 tokens at a time
    tree, plain = two_models(family, dtype)
    in_fp32 = dtype == torch.float32 or family == "deepseek_v3"  # as its router is
    for seed, tree_tokens in ((0, math.inf), (1, 30)):
        turns = some_turns(seed=seed)
        assert (len(M.partition(turns, tree_tokens)) > 2) == (tree_tokens < math.inf)
        check_equal_separate(tree, plain, turns, tree_tokens, 1e-6 if in_fp32 else 1e-12)
        prefixes = {(p + a)[:n + 1] for p, a in turns for n in range(len(p) + len(a))}
        assert len(M.Tree(turns).ids) == len(prefixes) == count_tokens(turns)


def test_the_backward_pass_holds_one_part():
    """A part's gradient is made before the next part is computed. A single part is computed once."""
    model, _ = two_models("llama_tied")
    order = []

    def note(embedding, args, out):
        order.append("forward")
        if out.requires_grad:
            out.register_hook(lambda gradient: order.append("backward"))

    model.lm.get_input_embeddings().register_forward_hook(note)
    for tree_tokens in 30, math.inf:
        order.clear()
        logps = torch.cat(by_tree(model, some_turns(), tree_tokens))
        n = len(M.partition(some_turns(), tree_tokens))
        assert order == n * ["forward"] and (n > 2) == (tree_tokens == 30)
        backward(model, logps.sum())
        assert order[n:] == (n * ["forward", "backward"] if n > 1 else ["backward"])


def test_parts_hold_each_turn_once_are_bounded_and_as_even_as_the_best_cut():
    r = random.Random(0)
    for _ in range(150):
        prompt, turns, world = "a", set(), r.randrange(1, 4)
        for _ in range(r.randrange(1, 13)):
            some_ids = lambda: "".join(r.choice("abc") for _ in range(r.randrange(1, 12)))
            if r.random() < 0.5:
                prompt = prompt[:r.randrange(1, len(prompt) + 1)] + some_ids()
            turns.add(M.Turn(prompt, some_ids()))
        bound = r.choice([1, 20, 60, 10 ** 9])
        parts = M.partition(turns, bound, world)
        in_order = sorted(turns, key=lambda turn: turn.prompt + turn.action)
        once = parts[:parts.index(parts[-1]) + 1]  # the last one comes again where they are few
        assert [turn for part in once for turn in part] == in_order
        assert all(part == parts[-1] for part in parts[len(once):])
        assert all(len(part) == 1 or count_tokens(part) <= bound for part in parts)
        rounds = -(-len(M.partition(turns, bound, 1)) // world)
        assert len(parts) == rounds * world  # no more than needed
        if rounds == 1:  # every cut
            cuts = itertools.combinations_with_replacement(range(len(turns) + 1), world - 1)
            best = min(max(count_tokens(in_order[i:j])
                           for i, j in itertools.pairwise([0, *cut, len(turns)])) for cut in cuts)
            assert max(map(count_tokens, parts)) <= best * 1.01 + 1


def test_batches_are_a_permutation_and_a_function_of_the_seed():
    groups = [(g, [(g, i) for i in range(1 + g % 4)]) for g in range(30)]
    one, other = (M.all_batches(groups, 8, epochs=1, seed=seed) for seed in (0, 1))
    order = [x for batch in one for x in batch]
    assert sorted(order) == sorted(x for _, group in groups for x in group)
    assert {len(batch) for batch in one[:-1]} == {8}
    assert one != other and one != M.all_batches(groups, 8, epochs=2, seed=0)[len(one):]
    assert one == M.all_batches(groups, 8, epochs=2, seed=0)[:len(one)]
    assert all(order.index((g, i)) == order.index((g, 0)) + i
               for _, group in groups for g, i in group)


# --- kernels --------------------------------------------------------------------------------------

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


def test_the_layout_that_flash_kernels_take_gives_the_same(monkeypatch):
    monkeypatch.setattr(M, "sdpa_kernel", loop_kernel)
    check_equal_separate(*two_models("llama_tied", torch.float64), some_turns())


@pytest.mark.parametrize("size, width, taken", [(64, 64, True), (192, 128, True), (256, 256, True),
                                                (512, 512, False), (100, 100, False),
                                                (64, 128, False)])
def test_flash_attention_gets_only_head_sizes_that_it_takes(size, width, taken, monkeypatch):
    def limited(q, k, v, cu_q, cu_kv, longest_q, longest_kv, softmax_scale, **more):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256 and size % 8 == 0
        return loop_kernel(q, k, v, tree, softmax_scale, -1)

    tree = M.Tree(some_turns())
    q, k, v = (torch.randn(n, heads, d) for n, heads, d in (
        (sum(tree.q), 4, size), (sum(tree.kv), 2, size), (sum(tree.kv), 2, width)))
    on_gpu = SimpleNamespace(shape=q.shape, is_cuda=True, dtype=torch.bfloat16)
    assert M.flash_supports(on_gpu, v) == taken and not M.flash_supports(q, v)
    if taken:
        monkeypatch.setattr(M, "flash_attn_varlen_func", limited)
        got, want = M.flash_kernel(q, k, v, tree, 0.1, -1), loop_kernel(q, k, v, tree, 0.1, -1)
        assert got.shape == want.shape and torch.allclose(got, want, atol=1e-5)


# --- loading and saving ---------------------------------------------------------------------------

LENGTH = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24,
          "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0]}
SLOW = {  # model_type: what its config has beside SIZES
    "gpt_oss": {},  # attention sinks
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "llama4_text": {"attention_chunk_size": 6, "intermediate_size_mlp": 48},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"],
                   "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
                   "linear_value_head_dim": 8, "shared_expert_intermediate_size": 24},
    "mamba": {},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
                  "mamba_d_ssm": 64},  # attention and Mamba in a layer
    "recurrent_gemma": {"head_dim": 8, "block_types": ["recurrent", "attention"],
                        "attention_window_size": 8},  # only its gradients tell
    "phi3": {"rope_parameters": LENGTH, "original_max_position_embeddings": 24},
    "nemotron": {},  # gives its attention no tree
    "gpt2": {}}  # no model.layers


def save_strong(kind, own, tokenizer, out):
    """Saves a model with weights so large that whatever is done to logits is seen."""
    torch.manual_seed(0)
    lm = small(kind, **{"vocab_size": len(tokenizer), **own})
    for p in lm.parameters():
        p.data += 0.1 * torch.randn_like(p)
    lm.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return str(out)


@pytest.mark.parametrize("name", SLOW)
def test_what_is_no_tree_is_computed_turn_by_turn(name, tmp_path, tiny_dir, capsys):
    """Values and gradients; in 16 bits the same is chosen. One line tells it."""
    tokenizer, turns = M.find_model(tiny_dir)[1].tokenizer, some_turns()
    path = save_strong(name, SLOW[name], tokenizer, tmp_path)
    model, _ = M.load(path)
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    check_equal_separate(model, plain, turns, 30, 1e-6)
    assert not model.supports_trees and capsys.readouterr().err.count("turn by turn") == 1
    assert not M.load(path, dtype="bf16")[0].supports_trees
    with pytest.raises(SystemExit, match="give a vLLM server"):
        M.load_lm(path, "cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_loaded_also_by_transformers(family, tmp_path, tiny_dir):
    """Without our code. Gemma computes some of its weights, files hold experts one by one, and
    DeepSeek has a persistent buffer. All are computed as trees, also in 16 bits.
    """
    tokenizer, turns = M.find_model(tiny_dir)[1].tokenizer, some_turns()
    path = save_strong(*FAMILIES[family], tokenizer, tmp_path)
    model, chat = M.load(path)
    out = str(tmp_path / "saved")
    M.save(model, chat, out)
    again, chat_again = M.load(out)
    assert all(lm.supports_trees for lm in (model, again, M.load(path, dtype="bf16")[0]))
    logps = by_tree(model, turns)
    assert all(map(torch.equal, logps, by_tree(again, turns)))
    theirs = separate(AutoModelForCausalLM.from_pretrained(out), turns)
    assert all((a - b).abs().max() < 1e-4 for a, b in zip(logps, theirs, strict=True))
    M.save(M.load(path, dtype="bf16")[0].float(), chat, out)  # in training it is in fp32
    saved = weights(out)["model.embed_tokens.weight"]
    assert saved.dtype == AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    trained = M.load(out, dtype="bf16", train=True)[0]
    assert {p.dtype for p in trained.parameters()} == {torch.float32}
    ids = [turns_of(c, record) for c in (chat, chat_again) for record in demos(2)]
    assert ids[:2] == ids[2:]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_saved_folder_has_its_base_s_config_but_for_the_dtype(dtype, tmp_path, tiny_dir):
    """What the base says of sampling is not passed on."""
    base, out = shutil.copytree(tiny_dir, tmp_path / "base"), tmp_path / "out"
    change_json(base / "config.json", mine=1)
    change_json(base / "generation_config.json", length_penalty=2.0, top_p=0.8)
    M.save(*M.load(str(base), dtype=dtype), str(out))
    configs = [json.loads((folder / "config.json").read_text()) for folder in (base, out)]
    assert configs[1] == {**configs[0], "dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype]}
    assert "top_p" not in json.loads((out / "generation_config.json").read_text())


def test_a_message_ends_at_every_eos_of_the_base_and_at_the_templates_end(tmp_path, tiny_dir):
    """A policy that is saved without its base's generation_config.json still has one."""
    shutil.copytree(tiny_dir, tmp_path / "base")
    base, out = tmp_path / "base", str(tmp_path / "out")
    change_json(base / "config.json", eos_token_id=-1)
    change_json(base / "generation_config.json", eos_token_id=[7, 2, 9])
    model, chat = M.load(str(base))
    chat.tokenizer.eos_token = None
    chat = M.Chat(chat.tokenizer, base)
    assert chat.end_ids == {2, 7, 9}
    M.save(model, chat, out)
    assert GenerationConfig.from_pretrained(out).eos_token_id == [2, 7, 9]
    os.remove(base / "generation_config.json")
    os.remove(f"{out}/generation_config.json")
    M.save(model, M.Chat(chat.tokenizer, base), out)
    assert GenerationConfig.from_pretrained(out).eos_token_id == [2]


def test_each_place_of_an_end_counts_alone_and_a_saved_model_has_them_all(tmp_path, tiny_dir):
    """config.json, generation_config.json, the tokenizer and the template name different tokens."""
    base, out = shutil.copytree(tiny_dir, tmp_path / "base"), str(tmp_path / "out")
    change_json(base / "config.json", eos_token_id=[11, 12])
    change_json(base / "generation_config.json", eos_token_id=7)
    model, chat = M.load(str(base))
    tokenizer = chat.tokenizer
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(9)
    template_end = tokenizer.convert_tokens_to_ids("<|end|>")
    everywhere = {11, 12, 7, 9, template_end}
    chat = M.Chat(tokenizer, base)
    assert chat.end_ids == everywhere and len(everywhere) == 5
    M.save(model, chat, out)
    assert {*GenerationConfig.from_pretrained(out).eos_token_id} == everywhere
    again = M.Chat(tokenizer, out)
    assert again.end_ids == everywhere and again.decode(everywhere) == ""
    assert again.stop == everywhere | {*tokenizer.all_special_ids}


@pytest.mark.parametrize("size", [40, 9 << 20])
def test_the_digest_of_weights_covers_every_byte(size, tmp_path):
    content, random_ = bytearray(size), random.Random(0)
    at = range(size) if size < 100 else [random_.randrange(size) for _ in range(3)]
    seen = set()
    for i in (None, *at):
        folder = tmp_path / str(i)
        folder.mkdir()
        if i is not None:
            content[i] += 1
        (folder / "model.safetensors").write_bytes(content)
        seen.add(M.weights_digest(folder))
    assert len(seen) == 1 + len(at) and M.weights_digest(tmp_path) is None


def test_wrong_attention_is_found_and_wrong_log_probs_are_refused(tiny_dir, monkeypatch, capsys):
    """What can be computed right, turn by turn, is. A mask that is aligned at the start is the
    usual fault where runs are shorter than paths.
    """
    tril = torch.Tensor.tril
    monkeypatch.setattr(torch.Tensor, "tril", lambda mask, shift: tril(mask))
    assert not M.load(tiny_dir)[0].supports_trees and "turn by turn" in capsys.readouterr().err
    monkeypatch.setattr(M, "choose_attention",
                        lambda model, *_: setattr(model, "supports_trees", True)
                        or model.lm.set_attn_implementation("tree"))
    with pytest.raises(SystemExit, match="the log-probs of .* differ"):
        M.load(tiny_dir)


@pytest.mark.parametrize("change", ["missing", "superfluous"])
def test_every_tensor_of_the_files_and_of_the_model_has_its_like(change, tmp_path, tiny_dir):
    shutil.copytree(tiny_dir, tmp_path / "m")
    name = "model.norm.weight"
    change_weights(tmp_path / "m", lambda state: (
        {**state, "model.norm.bias": state[name].clone()} if change == "superfluous" else
        {other: x for other, x in state.items() if other != name}))
    with pytest.raises(SystemExit, match="do not match its config.json: .*model.norm"):
        M.load(str(tmp_path / "m"))


@pytest.mark.parametrize("recompute", [0, 1])
def test_no_layer_stays_gathered_after_its_forward(tiny_dir, recompute):
    """Nor where a tree is computed again in the backward pass, in which FSDP would keep it.

    And what is computed in 16 bits has their rounding, though its weights have 32.
    """
    turns, gathered = [M.Turn(chr(9) + chr(8), chr(i) + chr(7)) for i in range(6)], []
    utils.init_distributed()
    try:
        flags = SimpleNamespace(offload=0, compile=0, recompute=recompute)
        model, _ = M.load(tiny_dir, "cpu", "bf16", flags, train=True)
        for layer in model.layers():  # its weights are DTensors, but while they are gathered
            layer.mlp.register_forward_hook(lambda mlp, *_: gathered.append(
                sum(not hasattr(x.mlp.up_proj.weight, "full_tensor") for x in model.layers())))
        logps = torch.cat(by_tree(model, turns, 6))
        backward(model, logps.sum())
    finally:
        torch.distributed.destroy_process_group()
    assert len(gathered) >= 2 * 2 * 3 and set(gathered) == {1}
    in_32 = torch.cat(by_tree(M.load(tiny_dir)[0], turns))
    assert 1e-3 < (logps - in_32).abs().mean() < 0.05
    to_score, _ = M.load(tiny_dir, "cpu", "bf16", flags)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.dtype for p in to_score.parameters()} == {torch.bfloat16}
