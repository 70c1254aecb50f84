"""The engine against a naive computation: one sequence at a time, without a cache."""

import asyncio
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workload import plan, play_async, totals
from prompt_r1.agent.engine import Engine
from prompt_r1.agent.policy import Policy
from prompt_r1.agent.scheduler import Scheduler
from prompt_r1.errors import UsageError
from prompt_r1.types import Completion
from tests.support import tiny

STOP = frozenset({tiny.tokenizer().eos_token_id})


def make_engine(policy, *, max_games: int = 4, capacity: int = 256, kv_tokens: int = 0, **options) -> Engine:
    return Engine(
        policy,
        stop_ids=STOP,
        max_tokens=capacity,
        max_games=max_games,
        kv_tokens=kv_tokens or max_games * capacity,
        **options,
    )


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
    """A model with the same weights and transformers' own attention."""
    twin = tiny.model()
    twin.load_state_dict(policy.model.state_dict())
    twin.set_attn_implementation("sdpa")
    return twin


def recompute(model, tokens: list[int], completion: Completion, temperature: float) -> torch.Tensor:
    """The log-probabilities (new, V) at each sampled token, from one forward over the whole text."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens + completion.tokens])).logits[0, len(tokens) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1)


@pytest.mark.parametrize("max_games", [1, 3, 16])
def test_greedy_tokens_equal_those_of_generate_for_prompts_of_different_lengths(max_games):
    policy = tiny.policy()
    model = sdpa_twin(policy)
    prompts = [tiny.random_tokens(5 + 7 * number, seed=number) for number in range(8)]

    async def play():
        engine = make_engine(policy, max_games=max_games)
        return await asyncio.gather(
            *(engine.generate(p, max_new=20, seed="0", temperature=0.0) for p in prompts)
        )

    for prompt, completion in zip(prompts, asyncio.run(play()), strict=True):
        assert completion.tokens == greedy_by_generate(model, prompt, 20)


@dataclass(frozen=True)
class PlannedTurn:
    """A turn of a game, and the reply to it."""

    pause: int  # steps of the engine before the turn
    max_new: int
    reply: int  # tokens


TURNS = st.builds(PlannedTurn, st.integers(0, 6), st.integers(1, 12), st.integers(1, 15))
LIMITS = st.fixed_dictionaries(
    {
        "max_games": st.integers(1, 16),
        "kv_tokens": st.integers(160, 900),
        "prefill_tokens": st.sampled_from([5, 32, 512]),
        "share_prompts": st.booleans(),
    }
)


class CheckedScheduler(Scheduler):
    """Checks the arena before and after each admission: no row has two owners, and none is lost."""

    def admit(self) -> None:
        self.check()
        super().admit()
        self.check()

    def check(self) -> None:
        segments, end = self._arena.segments, 0
        for segment in segments:
            assert segment.start >= end and segment.size > 0 and len(segment.tokens) <= segment.capacity
            end = segment.end
            assert all(child in segments and child.parent is segment for child in segment.children)
            if segment.parent is not None:
                assert segment in segment.parent.children and segment.parent in segments
                assert segment.tokens[: segment.shared] == segment.parent.tokens
        assert end <= self._arena.rows
        assert self._arena.free == self._arena.rows - sum(segment.size for segment in segments)
        assert all(segment.busy and segment in segments for segment in self.running.values())


@settings(max_examples=30)
@given(
    openings=st.lists(st.integers(1, 40), min_size=1, max_size=3),  # tokens of the questions
    turns=st.lists(st.lists(TURNS, min_size=1, max_size=4), min_size=1, max_size=14),  # of each game
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    limits=LIMITS,
)
def test_no_workload_changes_a_token_or_deadlocks(openings, turns, temperature, limits):
    """Whatever is reused, moved, copied or evicted: each token has the log-probability of one forward over
    the whole text, and greedy tokens are the most likely ones.
    """
    policy = tiny.policy()
    model = sdpa_twin(policy)
    engine = make_engine(policy, capacity=160, **limits)
    played: list[tuple[list[int], Completion]] = []

    async def game(number: int) -> None:
        opening = number % len(openings)
        tokens = tiny.random_tokens(openings[opening], seed=opening)
        for index, turn in enumerate(turns[number]):
            for _ in range(turn.pause):
                await asyncio.sleep(0)
            completion = await engine.generate(
                tokens, max_new=turn.max_new, seed=f"{number}/{index}", temperature=temperature
            )
            played.append((list(tokens), completion))
            tokens += completion.tokens + tiny.random_tokens(turn.reply, seed=100 + number * 10 + index)

    async def play() -> None:
        games = asyncio.gather(*(game(number) for number in range(len(turns))))
        await asyncio.wait_for(games, timeout=20)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prompt_r1.agent.engine.Scheduler", CheckedScheduler)
        asyncio.run(play())
    assert len(played) == sum(map(len, turns))
    for tokens, completion in played:
        logprobs = recompute(model, tokens, completion, temperature or 1.0)
        chosen = logprobs.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(completion.logprobs), chosen, atol=1e-4)
        if temperature == 0:
            assert completion.tokens == logprobs.argmax(1).tolist()


def play_plan(policy, questions: int, *, kv_tokens: int, **options: bool) -> tuple[Engine, list[list[int]]]:
    """Play the benchmark's games with a tiny model: 5 of each question, greedy."""
    engine = Engine(policy, stop_ids=frozenset(), max_tokens=2048, kv_tokens=kv_tokens, **options)

    async def generate(tokens: list[int], max_new: int) -> list[int]:
        return (await engine.generate(tokens, max_new=max_new, seed="0", temperature=0.0)).tokens

    return engine, asyncio.run(
        play_async(plan(questions, 5, seed=1, vocabulary=256), generate, latency=False)
    )


def test_nothing_is_computed_twice_and_eviction_changes_only_that():
    """Prompt tokens computed: each question once for its group, each reply once, and for each later turn the
    last token of the turn before. An arena of 2,500 tokens has to evict sequences.
    """
    policy = tiny.policy(layers=1)
    wanted = totals(plan(4, 5, seed=1))
    ample, tokens = play_plan(policy, 4, kv_tokens=100_000)
    assert ample.prefilled == wanted.prefill
    assert ample.sampled == wanted.new_tokens
    assert ample._scheduler.preempted == 0
    scarce, same_tokens = play_plan(policy, 2, kv_tokens=2500)  # half of the questions, to save time
    assert same_tokens == tokens[:10]
    assert scarce.prefilled > totals(plan(2, 5, seed=1)).prefill
    assert scarce._scheduler.preempted > 0
    shared, same_tokens = play_plan(policy, 1, kv_tokens=2050, share_prompts=True)
    assert same_tokens == tokens[:5]
    assert shared._scheduler.preempted > 0


def test_games_that_share_their_prompt_need_its_rows_once():
    """Five games of 60 tokens that write 4: the last sampled token is not cached."""
    policy, prompt = tiny.policy(), tiny.random_tokens(60, seed=1)
    used, tokens = {}, {}
    for share in (False, True):
        engine = make_engine(policy, max_games=5, share_prompts=share)

        async def play(engine: Engine = engine) -> list[Completion]:
            return await asyncio.gather(
                *(engine.generate(prompt, max_new=4, seed=str(number)) for number in range(5))
            )

        tokens[share] = [completion.tokens for completion in asyncio.run(play())]
        arena = engine._scheduler._arena
        used[share] = arena.rows - arena.free
        assert engine.prefilled == 60
    assert tokens[True] == tokens[False]
    assert used == {False: 5 * (60 + 3), True: 60 + 5 * 3}


def test_the_oldest_call_is_never_preempted():
    """Games end in the order in which they came, if each of them needs most of the arena."""
    engine = Engine(tiny.policy(), stop_ids=frozenset(), max_tokens=100, kv_tokens=110)
    ended: list[int] = []

    async def game(number: int) -> None:
        await engine.generate(tiny.random_tokens(20, seed=number), max_new=70, seed=str(number))
        ended.append(number)

    async def play() -> None:
        await asyncio.wait_for(asyncio.gather(*map(game, range(5))), timeout=20)

    asyncio.run(play())
    assert ended == [*range(5)]
    assert engine._scheduler.preempted > 0


def test_a_game_that_waits_does_not_lock_the_arena():
    """The first task holds a cached sequence, and waits for games that need its rows."""
    engine = make_engine(tiny.policy(), capacity=100, kv_tokens=100)

    async def play() -> Completion:
        await engine.generate(tiny.random_tokens(60, seed=0), max_new=10, seed="0")
        games = [
            asyncio.create_task(engine.generate(tiny.random_tokens(70, seed=n), max_new=20, seed="0"))
            for n in (1, 2)
        ]
        return (await asyncio.gather(*games))[0]

    assert len(asyncio.run(asyncio.wait_for(play(), timeout=20)).tokens) == 20


def test_the_oldest_game_keeps_its_rows_while_it_waits_if_others_can_run():
    """Its reply came last so far, but it is the first to end, and its rows are those that are free again."""
    engine = make_engine(tiny.policy(), capacity=100, kv_tokens=200, prefill_tokens=64)

    async def game(number: int, waiting: asyncio.Event) -> int:
        tokens = tiny.random_tokens(60, seed=number)
        tokens += (await engine.generate(tokens, max_new=10, seed="0")).tokens
        await waiting.wait()
        before = engine.prefilled
        await engine.generate([*tokens, 7], max_new=10, seed="0")
        return engine.prefilled - before

    async def play() -> list[int]:
        begun, over = asyncio.Event(), asyncio.Event()
        begun.set()
        oldest = asyncio.create_task(game(0, over))
        await asyncio.sleep(0)
        others = [asyncio.create_task(game(number, begun)) for number in (1, 2, 3)]
        await asyncio.gather(*others)
        over.set()
        return [await oldest]

    assert asyncio.run(asyncio.wait_for(play(), timeout=20)) == [2]


def test_a_sequence_that_another_game_took_over_and_lost_is_not_looked_for():
    """A bug: its first game still pointed to it, and continued rows that were somebody else's."""
    engine = make_engine(tiny.policy(), capacity=100, kv_tokens=100)

    async def generate(tokens: list[int], max_new: int = 5) -> list[int]:
        return tokens + (await engine.generate(tokens, max_new=max_new, seed="0", temperature=0.0)).tokens

    async def play() -> tuple[list[int], list[int]]:
        text = await generate(tiny.random_tokens(20, seed=0))
        text = await asyncio.create_task(generate([*text, 7]))  # another game, with the same tokens
        await asyncio.create_task(generate(tiny.random_tokens(80, seed=1), 20))  # evicts it
        assert len(engine._scheduler._arena.segments) == 1
        return text, await generate([*text, 8])

    text, continued = asyncio.run(asyncio.wait_for(play(), timeout=20))
    alone = asyncio.run(make_engine(tiny.policy()).generate([*text, 8], max_new=5, seed="0", temperature=0.0))
    assert continued == [*text, 8, *alone.tokens]


def test_a_long_prompt_is_computed_in_chunks_while_other_games_decode():
    policy = tiny.policy()
    model = sdpa_twin(policy)
    short, long = tiny.random_tokens(3, seed=2), tiny.random_tokens(190, seed=1)
    ended: list[str] = []

    async def game(engine: Engine, name: str, tokens: list[int]) -> None:
        completion = await engine.generate(tokens, max_new=10, seed="0", temperature=0.0)
        ended.append(name)
        assert completion.tokens == greedy_by_generate(model, tokens, 10)

    async def play() -> None:
        engine = make_engine(policy, prefill_tokens=16)
        await asyncio.gather(game(engine, "long", long), game(engine, "short", short))

    asyncio.run(play())
    assert ended == ["short", "long"]


def test_sampled_tokens_depend_on_the_seed_and_not_on_other_games():
    policy = tiny.policy()
    prompts = [tiny.random_tokens(12, seed=number) for number in range(6)]

    async def play(chosen, engine):
        calls = (engine.generate(prompts[n], max_new=15, seed=f"game {n}") for n in chosen)
        return await asyncio.gather(*calls)

    together = asyncio.run(play(range(6), make_engine(policy, max_games=6)))
    alone = [asyncio.run(play([n], make_engine(policy, max_games=1)))[0] for n in range(6)]
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    other_seed = asyncio.run(make_engine(policy).generate(prompts[0], max_new=15, seed="another"))
    assert other_seed.tokens != alone[0].tokens


def test_sampled_frequencies_follow_the_softmax_at_the_temperature():
    policy = tiny.policy()
    prompt = tiny.random_tokens(9, seed=4)
    with torch.no_grad():
        logits = policy.model(torch.tensor([prompt])).logits[0, -1].float()
    expected = torch.softmax(logits / 1.5, -1)
    draws = 2000

    async def play():
        engine = make_engine(policy, max_games=100)
        calls = (engine.generate(prompt, max_new=1, seed=str(n), temperature=1.5) for n in range(draws))
        return await asyncio.gather(*calls)

    counts = torch.bincount(torch.tensor([c.tokens[0] for c in asyncio.run(play())]), minlength=len(expected))
    # The sum of the mean absolute deviations of binomial frequencies: the distance expected by chance.
    by_chance = (2 * expected * (1 - expected) / (torch.pi * draws)).sqrt().sum()
    assert (counts / draws - expected).abs().sum() < 1.2 * by_chance


def test_generation_stops_at_a_stop_token():
    policy = tiny.policy()
    prompt = tiny.random_tokens(9, seed=4)
    free = asyncio.run(make_engine(policy).generate(prompt, max_new=12, seed="0"))
    engine = Engine(policy, max_tokens=64, kv_tokens=64, stop_ids=frozenset({free.tokens[5]}))
    stopped = asyncio.run(engine.generate(prompt, max_new=12, seed="0"))
    assert stopped.tokens == free.tokens[: free.tokens.index(free.tokens[5]) + 1]
    assert stopped.finished and not free.finished


def test_a_copied_prefix_does_not_include_the_end_state_of_a_longer_prompt():
    """`fork` shares only its first 20 tokens with `known`. A prompt as long as `known`, but with the tokens
    of `fork`, must not sample from the hidden state of the end of `known`.
    """
    policy = tiny.policy()
    shared = tiny.random_tokens(20, seed=0)
    known = shared + tiny.random_tokens(5, seed=1)
    fork = shared + tiny.random_tokens(8, seed=2)
    engine = make_engine(policy)
    for prompt in (known, fork, fork[: len(known)]):
        played = asyncio.run(engine.generate(prompt, max_new=6, seed="0", temperature=0.0))
        assert played.tokens == greedy_by_generate(sdpa_twin(policy), prompt, 6)
    assert engine.prefilled == len(known) + 8 + 1


def order_of_first_tokens(engine: Engine, requests: dict[str, tuple[int, int]]) -> list[str]:
    """Make requests (prompt tokens, new tokens); their names in the order of their first tokens."""
    sampled: list[str] = []

    def note(name: str, token: int) -> None:
        sampled.append(name)

    async def play() -> None:
        calls = []
        for number, (name, (length, max_new)) in enumerate(requests.items()):
            prompt = tiny.random_tokens(length, seed=number)
            note_token = partial(note, name)
            calls.append(engine.generate(prompt, max_new=max_new, seed="0", watch=note_token))
        await asyncio.wait_for(asyncio.gather(*calls), timeout=20)

    asyncio.run(play())
    return list(dict.fromkeys(sampled))


def test_a_request_that_does_not_fit_yet_is_served_before_smaller_later_ones():
    """First come, first served: otherwise a long game could starve."""
    engine = Engine(tiny.policy(), stop_ids=frozenset(), max_tokens=80, kv_tokens=100)
    sizes = {"running": (40, 20), "large": (70, 10), "small": (30, 10), "tiny": (3, 2)}
    assert order_of_first_tokens(engine, sizes)[:2] == ["running", "large"]


def test_waiting_requests_are_served_in_order():
    engine = Engine(tiny.policy(), stop_ids=frozenset(), max_tokens=80, kv_tokens=800, max_games=2)
    sizes = {"a": (9, 2), "b": (9, 9), "c": (9, 3), "d": (9, 3), "e": (9, 3)}
    assert order_of_first_tokens(engine, sizes) == list(sizes)


def test_after_out_of_memory_running_games_are_served_before_waiting_ones(monkeypatch):
    policy = tiny.policy()
    limit_memory(policy, tokens=15, rows=100, monkeypatch=monkeypatch)
    engine = Engine(policy, stop_ids=frozenset(), max_tokens=80, kv_tokens=800, max_games=2)
    sizes = dict.fromkeys("abcd", (10, 3))
    with pytest.warns(UserWarning, match="in the rest of this rollout at most 1 games decode"):
        assert order_of_first_tokens(engine, sizes) == list("abcd")


def test_the_least_recently_used_sequence_is_evicted_first():
    """`long` began first, but was still decoding when `short` had ended: the third game evicts `short`."""
    engine = Engine(tiny.policy(), stop_ids=frozenset(), max_tokens=80, kv_tokens=100)

    async def generate(tokens: list[int], max_new: int) -> list[int]:
        return tokens + (await engine.generate(tokens, max_new=max_new, seed="0")).tokens

    async def play() -> None:
        long, short, third = (tiny.random_tokens(count, seed=count) for count in (20, 21, 30))
        long, _ = await asyncio.gather(generate(long, 20), generate(short, 2))
        await generate(third, 21)
        before = engine.prefilled
        await generate([*long, 7, 8, 9], 5)
        assert engine.prefilled == before + 4  # the last sampled token and the three new ones

    asyncio.run(play())


def test_the_sequence_of_an_older_game_that_has_ended_is_evicted_before_one_that_waits_for_a_reply():
    """Only the newer of two games will continue its sequence when a third one needs rows."""
    engine = make_engine(tiny.policy(), capacity=80, kv_tokens=110)
    texts = [tiny.random_tokens(30, seed=number) for number in range(3)]

    async def first_turn(number: int) -> None:
        texts[number] += (await engine.generate(texts[number], max_new=10, seed="0")).tokens

    async def play() -> int:
        await asyncio.create_task(first_turn(0))
        await first_turn(1)  # the game of this task
        await asyncio.create_task(first_turn(2))
        before = engine.prefilled
        await engine.generate([*texts[1], 7, 8, 9], max_new=5, seed="0")
        return engine.prefilled - before

    assert asyncio.run(asyncio.wait_for(play(), timeout=20)) == 4  # the last sampled token and the new ones


def test_clear_cache_drops_what_was_computed_with_old_weights():
    policy = tiny.policy()
    prompt = tiny.random_tokens(30, seed=1)
    engine = make_engine(policy)
    asyncio.run(engine.generate(prompt, max_new=5, seed="0", temperature=0.0))
    policy.model.load_state_dict(tiny.model(seed=9).state_dict())
    engine.clear_cache()
    after = asyncio.run(engine.generate(prompt, max_new=10, seed="0", temperature=0.0))
    assert after.tokens == greedy_by_generate(sdpa_twin(policy), prompt, 10)


def test_a_bfloat16_policy_plays_with_the_weights_copied_from_a_float32_learner():
    learner = Policy(tiny.model(seed=9), compute=torch.bfloat16)
    player = Policy(tiny.model().to(torch.bfloat16), compute=torch.bfloat16)
    twin = Policy(tiny.model(seed=9).to(torch.bfloat16), compute=torch.bfloat16)
    prompt = tiny.random_tokens(30, seed=1)
    engine = make_engine(player)
    asyncio.run(engine.generate(prompt, max_new=5, seed="0", temperature=0.0))
    player.copy_weights_from(learner)
    engine.clear_cache()
    after = asyncio.run(engine.generate(prompt, max_new=10, seed="0", temperature=0.0))
    expected = asyncio.run(make_engine(twin).generate(prompt, max_new=10, seed="0", temperature=0.0))
    assert after.tokens == expected.tokens
    assert player.model.dtype == torch.bfloat16


def test_by_default_the_cache_is_limited_by_the_games_and_by_free_memory(monkeypatch):
    policy = tiny.policy()
    prompt = tiny.random_tokens(8, seed=0)
    engine = Engine(policy, stop_ids=STOP, max_tokens=64, max_games=3)
    asyncio.run(engine.generate(prompt, max_new=3, seed="0"))
    assert engine._arena.rows == 3 * 64
    monkeypatch.setattr("prompt_r1.agent.kv_cache.affordable_rows", lambda *_: 63)
    with pytest.raises(UsageError, match="holds a KV cache of 63 tokens, but a game may have 64"):
        asyncio.run(Engine(policy, stop_ids=STOP, max_tokens=64).generate(prompt, max_new=3, seed="0"))
    with pytest.raises(UsageError, match="a KV cache of 63 tokens does not hold one game of 64"):
        Engine(policy, stop_ids=STOP, max_tokens=64, kv_tokens=63)


def test_a_request_that_is_too_long_is_refused():
    engine = make_engine(tiny.policy(), capacity=32)
    with pytest.raises(ValueError, match="30 tokens and 3 new ones do not fit a game of 32"):
        asyncio.run(engine.generate(tiny.random_tokens(30, seed=0), max_new=3, seed="0"))


@pytest.mark.parametrize("cleared", [True, False])
def test_cancelled_games_leave_nothing_behind_and_free_their_places_in_the_batch(cleared):
    engine = make_engine(tiny.policy(), max_games=1)

    async def play() -> Completion:
        calls = [engine.generate(tiny.random_tokens(8, seed=n), max_new=200, seed="0") for n in range(3)]
        games = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0.01)
        for game in games:
            game.cancel()
        await asyncio.gather(*games, return_exceptions=True)
        assert engine.sampled > 0
        if cleared:
            engine.clear_cache()
        return await asyncio.wait_for(engine.generate([1, 2], max_new=3, seed="0"), timeout=5)

    assert len(asyncio.run(play()).tokens) == 3


def limit_memory(policy, *, tokens: int, rows: int, monkeypatch) -> None:
    """Run out of memory in a forward of more tokens, or logits of more rows."""
    forward, logits = policy.hidden_states, policy.logits

    def within(method, count: int, limit: int, *args, **kwargs):
        if count > limit:
            raise torch.OutOfMemoryError(f"no room for {count}")
        return method(*args, **kwargs)

    monkeypatch.setattr(
        policy, "hidden_states", lambda ids, **more: within(forward, ids.numel(), tokens, ids, **more)
    )
    monkeypatch.setattr(policy, "logits", lambda hidden: within(logits, len(hidden), rows, hidden))


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (9, 100), (1000, 2), (30, 3)])
def test_after_out_of_memory_smaller_batches_give_the_same_tokens(tokens, rows, monkeypatch):
    policy = tiny.policy()

    async def game(engine: Engine, number: int) -> list[Completion]:
        text, turns = tiny.random_tokens(20, seed=number // 3), []
        for turn in range(3):
            turns.append(await engine.generate(text, max_new=12, seed=f"{number}/{turn}"))
            text = [*text, *turns[-1].tokens, *tiny.random_tokens(9, seed=50 + turn)]
        return turns

    async def play(engine: Engine) -> list[list[Completion]]:
        return await asyncio.gather(*(game(engine, number) for number in range(9)))

    expected = asyncio.run(play(make_engine(policy, max_games=9)))
    limit_memory(policy, tokens=tokens, rows=rows, monkeypatch=monkeypatch)
    engine = make_engine(policy, max_games=9)
    with pytest.warns(
        UserWarning, match="out of memory: in the rest of this rollout at most [124] games decode"
    ):
        found = asyncio.run(asyncio.wait_for(play(engine), timeout=20))
    for turns, others in zip(expected, found, strict=True):
        assert [turn.tokens for turn in turns] == [turn.tokens for turn in others]
        for turn, other in zip(turns, others, strict=True):
            assert turn.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert engine._scheduler.idle


@pytest.mark.filterwarnings("ignore:out of memory")
def test_the_next_rollout_has_its_whole_batch_again_after_out_of_memory(monkeypatch):
    policy = tiny.policy()
    engine = make_engine(policy, max_games=4)

    async def play() -> int:
        """The forwards of four games with other prompts than before."""
        engine.clear_cache()
        games = [tiny.random_tokens(8, seed=seed) for seed in range(4)]
        await asyncio.gather(*(engine.generate(game, max_new=9, seed="0") for game in games))
        return engine._scheduler._steps

    steps = [asyncio.run(play())]
    with monkeypatch.context() as scarce:
        limit_memory(policy, tokens=1000, rows=1, monkeypatch=scarce)
        steps.append(asyncio.run(play()))
    steps.append(asyncio.run(play()))
    assert steps[2] - steps[1] == steps[0] < steps[1] - steps[0]


@pytest.mark.filterwarnings("ignore:out of memory")
def test_out_of_memory_for_a_single_token_is_raised(monkeypatch):
    policy = tiny.policy()
    limit_memory(policy, tokens=0, rows=1, monkeypatch=monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        asyncio.run(make_engine(policy).generate([1, 2, 3], max_new=3, seed="0"))


def test_a_cache_larger_than_memory_is_refused_with_a_clear_message():
    engine = make_engine(tiny.policy(), kv_tokens=10**13)
    with pytest.raises(
        UsageError, match=r"not enough memory for a KV cache of 10,000,000,000,000 tokens: lower"
    ):
        asyncio.run(engine.generate([1, 2, 3], max_new=3, seed="0"))


def test_an_error_in_the_model_is_raised_in_every_waiting_game():
    policy = tiny.policy()

    async def play():
        engine = make_engine(policy, max_games=1)
        bad = [10**6]  # no such token: the embedding raises
        calls = (
            engine.generate(tokens, max_new=3, seed="0") for tokens in (bad, tiny.random_tokens(4, seed=1))
        )
        return await asyncio.gather(*calls, return_exceptions=True)

    assert all(isinstance(result, IndexError) for result in asyncio.run(play()))


def test_the_cache_of_a_failed_forward_is_not_used(monkeypatch):
    policy, prompt = tiny.policy(), tiny.random_tokens(20, seed=0)
    engine = make_engine(policy)

    def fail(*_, **__):
        raise RuntimeError("the device failed")

    with monkeypatch.context() as failing, pytest.raises(RuntimeError, match="the device failed"):
        failing.setattr(policy, "hidden_states", fail)
        asyncio.run(engine.generate(prompt, max_new=6, seed="0", temperature=0.0))
    again = asyncio.run(engine.generate(prompt, max_new=6, seed="0", temperature=0.0))
    assert again.tokens == greedy_by_generate(sdpa_twin(policy), prompt, 6)
    assert engine.prefilled == 2 * len(prompt)
