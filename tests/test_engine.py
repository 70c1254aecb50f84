"""The engine against the plain way: one sequence at a time through Hugging Face's own generate."""

import asyncio
import random

import pytest
import torch

from prompt_r1.engine import Engine
from prompt_r1.types import Completion
from tests import tiny

STOP = frozenset({tiny.tokenizer().eos_token_id})


def make_engine(policy, *, slots: int = 4, capacity: int = 256) -> Engine:
    return Engine(policy, slots=slots, capacity=capacity, stop_ids=STOP)


def greedy_by_generate(model, tokens: list[int], max_new: int) -> list[int]:
    with torch.no_grad():
        out = model.generate(
            torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens)),
            max_new_tokens=max_new,
            do_sample=False,
        )
    return out[0, len(tokens) :].tolist()


def sdpa_twin(policy):
    """The same weights under transformers' own attention."""
    twin = tiny.model()
    twin.load_state_dict(policy.model.state_dict())
    twin.set_attn_implementation("sdpa")
    return twin


def logprobs_by_recompute(
    model, tokens: list[int], completion: Completion, temperature: float
) -> torch.Tensor:
    """The log-probability of each sampled token from one forward over everything."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens + completion.tokens])).logits[0, len(tokens) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(completion.tokens)[:, None])[
        :, 0
    ]


@pytest.mark.parametrize("slots", [1, 3, 16])
def test_greedy_tokens_equal_generate_one_by_one_for_ragged_prompts(slots):
    policy = tiny.policy()
    model = sdpa_twin(policy)
    prompts = [tiny.random_tokens(5 + 7 * number, seed=number) for number in range(8)]

    async def play():
        engine = make_engine(policy, slots=slots)
        return await asyncio.gather(
            *(engine.generate(p, max_new=20, seed="0", temperature=0.0) for p in prompts)
        )

    for prompt, completion in zip(prompts, asyncio.run(play()), strict=True):
        assert completion.tokens == greedy_by_generate(model, prompt, 20)


@pytest.mark.parametrize("seed", range(6))
def test_random_schedules_of_multi_turn_groups_equal_recomputation(seed):
    """Arrivals, lengths, turns, groups and slots at random: reuse, copy and eviction change no token."""
    rng = random.Random(seed)
    policy = tiny.policy(seed=seed, kv_heads=rng.choice([1, 2, 4]))
    model = tiny.model(seed=seed, kv_heads=policy.model.config.num_key_value_heads)
    model.set_attn_implementation("sdpa")
    engine = make_engine(policy, slots=rng.randint(1, 9))
    played: list[tuple[list[int], Completion]] = []

    async def game(opening: list[int], turns: int, number: int) -> None:
        tokens = list(opening)
        for turn in range(turns):
            await asyncio.sleep(rng.random() * 0.01)
            completion = await engine.generate(tokens, max_new=rng.randint(1, 12), seed=f"{number}/{turn}")
            played.append((list(tokens), completion))
            tokens += completion.tokens + tiny.random_tokens(rng.randint(1, 15), seed=number * 10 + turn)

    async def play():
        openings = [tiny.random_tokens(rng.randint(1, 40), seed=number) for number in range(3)]
        await asyncio.gather(*(game(openings[number % 3], rng.randint(1, 4), number) for number in range(12)))

    asyncio.run(play())
    for tokens, completion in played:
        recomputed = logprobs_by_recompute(model, tokens, completion, 1.0)
        assert torch.allclose(torch.tensor(completion.logprobs), recomputed, atol=1e-4)


def test_a_prompt_longer_than_one_prefill_is_computed_in_chunks(monkeypatch):
    monkeypatch.setattr("prompt_r1.engine.PREFILL_TOKENS", 16)
    policy = tiny.policy()
    prompts = [tiny.random_tokens(90, seed=1), tiny.random_tokens(3, seed=2), tiny.random_tokens(33, seed=3)]

    async def play():
        engine = make_engine(policy)
        return await asyncio.gather(
            *(engine.generate(p, max_new=9, seed="0", temperature=0.0) for p in prompts)
        )

    for prompt, completion in zip(prompts, asyncio.run(play()), strict=True):
        assert completion.tokens == greedy_by_generate(sdpa_twin(policy), prompt, 9)


def test_sampling_depends_on_the_seed_and_not_on_the_games_beside():
    policy = tiny.policy()
    prompts = [tiny.random_tokens(12, seed=number) for number in range(6)]

    async def play(chosen, engine):
        calls = (engine.generate(prompts[n], max_new=15, seed=f"game {n}") for n in chosen)
        return await asyncio.gather(*calls)

    together = asyncio.run(play(range(6), make_engine(policy, slots=6)))
    alone = [asyncio.run(play([n], make_engine(policy, slots=1)))[0] for n in range(6)]
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    other_seed = asyncio.run(make_engine(policy).generate(prompts[0], max_new=15, seed="another"))
    assert other_seed.tokens != alone[0].tokens


def test_sampled_frequencies_are_those_of_the_softmax_at_the_temperature():
    policy = tiny.policy()
    prompt = tiny.random_tokens(9, seed=4)
    with torch.no_grad():
        logits = policy.model(torch.tensor([prompt])).logits[0, -1].float()
    expected = torch.softmax(logits / 1.5, -1)
    draws = 2000

    async def play():
        engine = make_engine(policy, slots=100)
        calls = (engine.generate(prompt, max_new=1, seed=str(n), temperature=1.5) for n in range(draws))
        return await asyncio.gather(*calls)

    counts = torch.bincount(torch.tensor([c.tokens[0] for c in asyncio.run(play())]), minlength=len(expected))
    # The mean absolute deviation of a binomial frequency; summed, it is what chance alone gives.
    by_chance = (2 * expected * (1 - expected) / (torch.pi * draws)).sqrt().sum()
    assert (counts / draws - expected).abs().sum() < 1.2 * by_chance


def test_the_log_probabilities_are_those_at_the_temperature():
    policy = tiny.policy()
    prompt = tiny.random_tokens(9, seed=4)
    completion = asyncio.run(make_engine(policy).generate(prompt, max_new=12, seed="0", temperature=0.7))
    recomputed = logprobs_by_recompute(sdpa_twin(policy), prompt, completion, 0.7)
    assert torch.allclose(torch.tensor(completion.logprobs), recomputed, atol=1e-4)


def test_a_group_computes_its_question_once_and_later_turns_only_what_is_new():
    policy = tiny.policy()
    question, reply = tiny.random_tokens(60, seed=1), tiny.random_tokens(11, seed=2)
    group = 5

    async def game(engine: Engine, number: int) -> int:
        first = await engine.generate(question, max_new=8, seed=str(number))
        await engine.generate(question + first.tokens + reply, max_new=8, seed=f"{number}/2")
        return len(first.tokens)

    async def play(engine: Engine) -> None:
        await asyncio.gather(*(game(engine, number) for number in range(group)))

    engine = make_engine(policy, slots=8)
    asyncio.run(play(engine))
    # Followers compute the last token of the shared question for its logits; each second turn computes its
    # reply and the last token of the first turn, which was sampled but never fed.
    assert engine.prefilled == len(question) + (group - 1) + group * (len(reply) + 1)


def test_it_stops_at_a_stop_token_and_says_so():
    policy = tiny.policy()
    prompt = tiny.random_tokens(9, seed=4)
    free = asyncio.run(make_engine(policy).generate(prompt, max_new=12, seed="0"))
    engine = Engine(policy, slots=1, capacity=64, stop_ids=frozenset({free.tokens[5]}))
    stopped = asyncio.run(engine.generate(prompt, max_new=12, seed="0"))
    assert stopped.tokens == free.tokens[: free.tokens.index(free.tokens[5]) + 1]
    assert stopped.finished and not free.finished


def test_after_the_weights_change_forget_drops_what_was_cached():
    policy = tiny.policy()
    prompt = tiny.random_tokens(30, seed=1)
    engine = make_engine(policy)
    asyncio.run(engine.generate(prompt, max_new=5, seed="0", temperature=0.0))
    policy.model.load_state_dict(tiny.model(seed=9).state_dict())
    engine.forget()
    after = asyncio.run(engine.generate(prompt, max_new=10, seed="0", temperature=0.0))
    assert after.tokens == greedy_by_generate(sdpa_twin(policy), prompt, 10)


def test_too_long_a_request_is_refused_before_it_runs():
    engine = make_engine(tiny.policy(), capacity=32)
    with pytest.raises(ValueError, match="30 tokens and 3 new ones do not fit a cache of 32"):
        asyncio.run(engine.generate(tiny.random_tokens(30, seed=0), max_new=3, seed="0"))


def test_a_cancelled_game_gives_its_slot_back():
    async def play():
        engine = make_engine(tiny.policy(), slots=1)
        hopeless = asyncio.create_task(engine.generate(tiny.random_tokens(8, seed=0), max_new=200, seed="0"))
        await asyncio.sleep(0.01)
        hopeless.cancel()
        return await asyncio.wait_for(engine.generate(tiny.random_tokens(8, seed=1), max_new=3, seed="0"), 5)

    assert len(asyncio.run(play()).tokens) == 3


def test_an_error_in_the_model_reaches_every_waiting_game():
    policy = tiny.policy()

    async def play():
        engine = make_engine(policy, slots=1)
        bad = [10**6]  # no such token: the embedding raises
        calls = (
            engine.generate(tokens, max_new=3, seed="0") for tokens in (bad, tiny.random_tokens(4, seed=1))
        )
        return await asyncio.gather(*calls, return_exceptions=True)

    assert all(isinstance(result, IndexError) for result in asyncio.run(play()))
