"""The embedded engine: draws of many models in every company, against separate forwards."""
import asyncio
import random

import pytest
import torch

import collect
from test_model import SIZES, two_models

STOP = {3, 14, 15}
MOST = 40  # tokens of an action


def engine_of(lm, monkeypatch, *flags):
    monkeypatch.setattr(collect, "load_lm", lambda *_: (lm, None))
    args = collect.get_args(["--max_tokens", str(MOST), *map(str, flags)])
    return collect.TransformersEngine(args, STOP)


def ids(r, most):
    return [r.randrange(SIZES["vocab_size"]) for _ in range(r.randint(1, most))]


async def episode(engine, number, turns, played):
    """Turns whose prompts extend one another, but for the last; of one draw or of several."""
    r = random.Random(number)
    prompt = list(range(20, 31)) + ids(r, 12) if number % 3 else list(range(20, 40))
    for turn in range(turns):
        draws = [(0, "task", number, turn, j) for j in range(1 + number % 2 * 4)]
        drawn = await engine(prompt, draws, MOST)
        played[number, turn] = prompt, drawn
        prompt = prompt[:7 if turn == 1 else None] + drawn[0][0] + ids(r, 9)


def play(engine, numbers, turns=3):
    async def all_of():
        await asyncio.gather(*(episode(engine, number, turns, played) for number in numbers))
    played = {}
    asyncio.run(all_of())
    return played


# what differs is the cache: of all tokens, of windows, of both, of a low rank
@pytest.mark.parametrize("family", ["qwen2_windows", "gemma3", *(
    pytest.param(name, marks=pytest.mark.full) for name in ("llama", "qwen3_moe", "deepseek_v3"))])
def test_draws_are_those_of_separate_forwards_in_any_company(family, monkeypatch):
    """Prompts of one length and of many, and shared ones; the same tokens each time."""
    lm = two_models(family)[1]
    together = play(engine_of(lm, monkeypatch), range(6))
    for limit, parts in ((1, [range(6)]), (300, [range(2), range(2, 6)])):
        engine, again = engine_of(lm, monkeypatch, "--max_batch_tokens", limit), {}
        for part in parts:
            again |= play(engine, part)
        tokens = lambda played: {key: [a for a, _ in of] for key, (_, of) in played.items()}
        assert tokens(again) == tokens(together)
    assert not engine.rows and not engine.running and not engine.waiting
    lm.set_attn_implementation("sdpa")
    lengths = set()
    for prompt, drawn in together.values():
        for action, logps in drawn:
            with torch.no_grad():
                logits = lm(torch.tensor([prompt + action])).logits[0, len(prompt) - 1:-1]
            want = logits.log_softmax(-1)[range(len(action)), action]
            assert torch.allclose(torch.tensor(logps), want, rtol=0, atol=1e-4)
            assert not STOP & set(action[:-1])
            assert action[-1] in STOP or len(action) == MOST
            lengths.add(len(action))
    assert min(lengths) < 5 and max(lengths) > 32


def forwards(engine, monkeypatch):
    """The list to which (rows, new tokens, all tokens, last position) of each forward is added."""
    seen, forward = [], engine.lm.forward

    def recorded(input_ids, attention_mask, position_ids, **given):
        seen.append((*input_ids.shape, attention_mask.shape[1], position_ids.max().item()))
        return forward(input_ids=input_ids, attention_mask=attention_mask,
                       position_ids=position_ids, **given)
    monkeypatch.setattr(engine.lm, "forward", recorded)
    return seen


def test_a_prompt_is_read_once_for_all_its_draws(monkeypatch):
    """Also if two episodes have the same one."""
    engine = engine_of(two_models("llama")[1], monkeypatch)
    read = forwards(engine, monkeypatch)

    async def ask(episode):
        return await engine(list(range(20)), [(0, "task", episode, 0, j) for j in range(3)], MOST)

    async def both():
        await asyncio.gather(ask(0), ask(1))
    asyncio.run(both())
    assert read[0][:3] == (1, 20, 20) and read[1][:3] == (6, 1, 21)
    assert all(new == 1 for _, new, *_ in read[1:])


@pytest.mark.parametrize("limit", [800, 2000])
def test_a_batch_has_at_most_max_batch_tokens_and_an_eighth(limit, monkeypatch):
    """With padding and the rows that have ended, where rows of several turns and lengths join."""
    engine = engine_of(two_models("llama")[1], monkeypatch, "--max_batch_tokens", limit)
    seen = forwards(engine, monkeypatch)
    play(engine, range(24), turns=4)
    batches = [rows * (tokens - 1) for rows, new, tokens, _ in seen if new == 1]
    assert max(batches) <= 8 / 7 * limit and max(batches) > 0.6 * limit


def test_no_position_is_beyond_the_models_last(monkeypatch):
    """Though a message ends at the last, and its row stays while others go on."""
    engine = engine_of(two_models("llama")[1], monkeypatch)
    engine.stop, seen = set(), forwards(engine, monkeypatch)

    async def ask(prompt, n, most):
        return await engine(prompt, [(0, prompt[0], j) for j in range(n)], most)

    async def both():
        await asyncio.gather(ask([20] * 52, 1, 8), ask([21] * 50, 20, 10))
    asyncio.run(both())
    steps = [(rows, last) for rows, new, _, last in seen if new == 1]
    assert len(steps) == 9 and steps[-1][0] == 21
    assert max(last for _, last in steps) == 58  # of 60 tokens the last is not read


def test_requests_join_while_a_long_action_goes_on(monkeypatch):
    """Of two requests, the one that ends first is answered first, and the next one begins."""
    lm = two_models("llama")[1]
    ends = play(engine_of(lm, monkeypatch), range(6), turns=1)
    by_length = sorted(ends, key=lambda key: max(len(a) for a, _ in ends[key][1]))
    (short, _), (long, _) = by_length[0], by_length[-1]
    together = play(engine_of(lm, monkeypatch), [long, short], turns=1)
    assert [number for number, _ in together] == [short, long]  # in the order of their ends


def test_bf16_draws_in_fp32(monkeypatch):
    """Their log-probs are those of the bf16 model's logits."""
    lm = two_models("llama", torch.bfloat16)[1]
    logits = lm(torch.tensor([[20, 21, 22]])).logits[0, -1:]
    want = logits.float().log_softmax(-1)
    engine = engine_of(lm, monkeypatch)
    token, logp = collect.sample_tokens(engine.args, logits, [random.Random(0)])
    assert torch.allclose(logp, want[0, token], rtol=0, atol=1e-6)
    play(engine, range(2))


@pytest.mark.parametrize("family", ["qwen2_windows", pytest.param("llama", marks=pytest.mark.full)])
def test_an_error_costs_the_requests_under_way_and_no_others(family, monkeypatch):
    """Forwards fail at random. No one waits forever, and later draws are as if nothing was."""
    lm, r = two_models(family)[1], random.Random(0)
    engine = engine_of(lm, monkeypatch, "--max_batch_tokens", 1000)
    want, forward, left = play(engine, range(6)), lm.forward, [0]

    def failing(**given):
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError("no memory")
        return forward(**given)

    async def all_of(played):
        ends = [episode(engine, number, 3, played) for number in range(6)]
        return await asyncio.wait_for(asyncio.gather(*ends, return_exceptions=True), 60)

    def check(played):
        for key, (_, drawn) in played.items():
            assert [a for a, _ in drawn] == [a for a, _ in want[key][1]]
        assert not engine.rows and not engine.running and not engine.waiting
    monkeypatch.setattr(lm, "forward", failing)
    check(play(engine, range(6)))
    n_forwards, failed = -left[0], set()
    for share in (0.2, 0.6, 0.95):
        left[0], played = int(share * n_forwards) + r.randrange(1, 4), {}
        ends = asyncio.run(all_of(played))
        assert {*map(str, ends)} <= {"None", "no memory"}
        check(played)
        check(play(engine, range(6)))
        failed.add(6 - ends.count(None))
    assert len(failed) > 1 and 0 not in failed
