"""The engine against a naive computation: one sequence at a time, without a cache."""

import asyncio
import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import gpu_check
from benchmarks.workload import CountingScheduler, Lengths, count_work, greedy_game, plan, play_async, totals
from prompt_r1.engine import engine as engine_module
from prompt_r1.engine.engine import Engine
from prompt_r1.engine.kv_cache import TokenSequence
from prompt_r1.engine.paged_attention import PagedBatch
from prompt_r1.engine.scheduler import Scheduler
from prompt_r1.errors import AgentUnusable
from prompt_r1.model.policy import Policy
from prompt_r1.types import Completion
from tests.support import tiny
from tests.support.at_once import at_once
from tests.support.games import play_with

STOP = frozenset({tiny.tokenizer().eos_token_id})
LENGTHS = Lengths(100, (1, 2, 3, 4), (15, 50), (25, 75), 0.5, 1.0)  # a quarter of the benchmark's


def make_engine(
    policy, *, max_sequences: int = 4, capacity: int = 256, kv_tokens: int = 0, **options
) -> Engine:
    return tiny.engine(
        policy,
        stop_ids=STOP,
        max_tokens=capacity,
        max_sequences=max_sequences,
        kv_tokens=kv_tokens or max_sequences * capacity,
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


@dataclass(frozen=True)
class PlannedTurn:
    """A turn of a game, and the reply to it."""

    pause: int  # steps of the engine before the turn
    max_new: int
    reply: int  # tokens


TURNS = st.builds(PlannedTurn, st.integers(0, 6), st.integers(1, 12), st.integers(1, 15))
LIMITS = st.fixed_dictionaries(
    {
        "max_sequences": st.integers(1, 16),
        "kv_tokens": st.integers(160, 900),
        "prefill_tokens": st.sampled_from([5, 32, 512]),
        "block_size": st.sampled_from([0, 1, 4, 16, 64]),  # 0: a whole game
    }
)


class CheckedScheduler(Scheduler):
    """Checks the blocks before and after each admission: none is lost, and none is written by two games."""

    def admit(self) -> None:
        self.check()
        super().admit()
        self.check()

    def check(self) -> None:
        pool, games = self._pool, self._cached
        held = Counter(block for game in games for block in game.block_table)
        assert [held[block] for block in range(pool.count)] == pool.ref_counts
        assert sorted([*held, *pool.free]) == [*range(pool.count)]
        for game in games:
            assert len(game.tokens) <= len(game.block_table) * pool.block_size
            for number, block in enumerate(game.block_table):
                end = (number + 1) * pool.block_size
                sharers = [other for other in games if block in other.block_table]
                assert len(sharers) == 1 or all(other.tokens[:end] == game.tokens[:end] for other in sharers)
                assert len(sharers) == 1 or len(game.tokens) >= end, "a shared block is full"
        assert all(job.sequence in games for job in self.running)


def play_schedule(engine, openings, turns, temperature, cancelled=()) -> list[tuple[list[int], Completion]]:
    """Play games of random turns; those in `cancelled` end after their first turn. (tokens, completion)s."""
    played: list[tuple[list[int], Completion]] = []

    async def game(number: int) -> None:
        opening = number % len(openings)
        tokens = tiny.random_tokens(openings[opening], seed=opening)
        with engine.new_sequence() as handle:
            for index, turn in enumerate(turns[number]):
                for _ in range(turn.pause):
                    await asyncio.sleep(0)
                call = engine.generate(
                    tokens,
                    max_new=turn.max_new,
                    seed=f"{number}/{index}",
                    sequence=handle,
                    temperature=temperature,
                )
                if number in cancelled and index == 1:
                    with suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(call, timeout=0.001)
                    return
                completion = await call
                played.append((list(tokens), completion))
                tokens += completion.tokens + tiny.random_tokens(turn.reply, seed=100 + number * 10 + index)

    at_once(map(game, range(len(turns))))
    return played


def count_wrong(model, played: list[tuple[list[int], Completion]], temperature: float) -> int:
    """Tokens that are not greedy, or whose log-probability differs from one forward over the text."""
    wrong = 0
    for tokens, completion in played:
        logprobs = recompute(model, tokens, completion, temperature or 1.0)
        chosen = logprobs.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        wrong += int((torch.tensor(completion.logprobs) - chosen).abs().gt(1e-4).sum())
        if temperature == 0:
            # Of two tokens that only rounding tells apart, either one may be taken.
            wrong += int((logprobs.max(1).values - chosen).gt(1e-5).sum())
    return wrong


def check_schedule(openings, turns, temperature, limits, cancelled) -> None:
    """Play a schedule: no token may be wrong, and no block may stay held."""
    policy = tiny.policy()
    engine = make_engine(policy, capacity=160, **limits)
    played = play_schedule(engine, openings, turns, temperature, cancelled)
    assert not count_wrong(sdpa_twin(policy), played, temperature)
    assert len(played) == sum(
        1 if number in cancelled and len(game) > 1 else len(game) for number, game in enumerate(turns)
    )
    assert len(engine._pool.free) == engine._pool.count


WORKLOADS = {
    "openings": st.lists(st.integers(1, 40), min_size=1, max_size=3),  # tokens of the questions
    "turns": st.lists(st.lists(TURNS, min_size=1, max_size=4), min_size=1, max_size=14),  # turns of games
    "temperature": st.sampled_from([0.0, 0.7, 1.0]),
    "limits": LIMITS,
    "cancelled": st.sets(st.integers(0, 13), max_size=3),
}


@settings(max_examples=8)
@given(**WORKLOADS)
def test_no_workload_changes_a_token_or_deadlocks(**workload):
    """Whatever is reused, shared, preempted or cancelled: each token has the log-probability of one forward
    over the whole text, and greedy tokens are the most likely ones.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prompt_r1.engine.engine.Scheduler", CheckedScheduler)
        check_schedule(**workload)


@pytest.mark.slow
@settings(max_examples=150)
@given(**WORKLOADS | {"turns": st.lists(st.lists(TURNS, min_size=1, max_size=4), min_size=8, max_size=14)})
def test_large_workloads_have_no_wrong_token(**workload):
    check_schedule(**workload)


def play_plan(
    policy, questions: int, *, kv_tokens: int, **options: int
) -> tuple[CountingScheduler, list[list[int]]]:
    """Play 5 games of each question with a tiny model, greedy."""
    engine = tiny.engine(policy, max_tokens=512, kv_tokens=kv_tokens, **options)
    work = count_work(engine)
    games = plan(questions, 5, seed=1, lengths=LENGTHS, vocabulary=256)
    return work, asyncio.run(play_async(games, partial(greedy_game, engine), latency=False))


def test_nothing_is_computed_twice_and_eviction_changes_only_that():
    """The engine computes the prompt of each question once, each reply once, and for each later turn the
    last token of the turn before. A cache of 640 tokens has to evict sequences.
    """
    policy = tiny.policy(layers=1)
    wanted = totals(plan(1, 5, seed=1, lengths=LENGTHS))
    ample, tokens = play_plan(policy, 1, kv_tokens=12_500)
    assert ample.prefilled == wanted.prefill
    assert sum(map(len, tokens)) == wanted.new_tokens
    assert ample.preempted == 0
    scarce, same_tokens = play_plan(policy, 1, kv_tokens=640, block_size=16)
    assert same_tokens == tokens
    assert scarce.prefilled > wanted.prefill
    assert scarce.preempted > 0


@pytest.mark.parametrize(("block_size", "blocks"), [(16, 3 + 5 * 1), (59, 1 + 5 * 1), (64, 5 * 1)])
def test_the_full_blocks_of_an_opening_are_held_once(block_size, blocks):
    """Five games of 60 tokens that write 4. Each computes the last token of the opening, from whose hidden
    state it samples; its own last token is not cached.
    """
    engine = make_engine(tiny.policy(), max_sequences=5, block_size=block_size)
    work = count_work(engine)
    prompt, others, used = tiny.random_tokens(60, seed=1), asyncio.Barrier(5), []

    async def game(number: int) -> None:
        with engine.new_sequence() as handle:
            await engine.generate(prompt, max_new=4, seed=str(number), sequence=handle)
            await others.wait()
            used.append(engine._pool.count - len(engine._pool.free))
            await others.wait()

    at_once(map(game, range(5)))
    assert work.prefilled == 60
    assert used == [blocks] * 5


def test_the_oldest_call_is_never_preempted():
    """Games end in the order in which they came, if each of them needs most of the cache."""
    engine = tiny.engine(tiny.policy(), max_tokens=60, kv_tokens=70, block_size=10)
    work = count_work(engine)
    ended: list[int] = []

    async def game(number: int) -> None:
        await engine.generate(tiny.random_tokens(20, seed=number), max_new=40, seed=str(number))
        ended.append(number)

    at_once(map(game, range(5)))
    assert ended == [*range(5)]
    assert work.preempted > 0


def test_a_game_that_waits_does_not_lock_the_blocks():
    """The first game holds a cached sequence, and waits for games that need its blocks."""
    engine = make_engine(tiny.policy(), capacity=100, kv_tokens=100)

    async def play() -> Completion:
        with engine.new_sequence() as waiting:
            await engine.generate(tiny.random_tokens(60, seed=0), max_new=10, seed="0", sequence=waiting)
            calls = [engine.generate(tiny.random_tokens(70, seed=n), max_new=20, seed="0") for n in (1, 2)]
            return (await asyncio.gather(*calls))[0]

    assert len(asyncio.run(asyncio.wait_for(play(), timeout=20)).tokens) == 20


@pytest.mark.parametrize("block_size", [10, 100])
def test_the_oldest_game_keeps_its_blocks_while_it_waits_if_others_can_run(block_size):
    """The reply of the first game comes last, and nothing of its first turn is computed again."""
    engine = make_engine(tiny.policy(), capacity=100, kv_tokens=200, block_size=block_size)
    work = count_work(engine)

    async def game(number: int, waiting: asyncio.Event) -> int:
        tokens = tiny.random_tokens(60, seed=number)
        with engine.new_sequence() as handle:
            tokens += (await engine.generate(tokens, max_new=10, seed="0", sequence=handle)).tokens
            await waiting.wait()
            before = work.prefilled
            await engine.generate([*tokens, 7], max_new=10, seed="0", sequence=handle)
            return work.prefilled - before

    async def play() -> int:
        begun, over = asyncio.Event(), asyncio.Event()
        begun.set()
        oldest = asyncio.create_task(game(0, over))
        await asyncio.sleep(0)
        await asyncio.gather(*(asyncio.create_task(game(number, begun)) for number in (1, 2, 3)))
        over.set()
        return await oldest

    assert asyncio.run(asyncio.wait_for(play(), timeout=20)) == 2


def test_a_game_may_go_on_with_other_tokens_than_it_had():
    """The common prefix with the cached sequence is kept, except the last of equal tokens."""
    policy, tails = tiny.policy(), (1, 1, 2, 3, 3)
    engine, shared = make_engine(policy, block_size=8), tiny.random_tokens(12, seed=0)
    work = count_work(engine)

    async def play() -> list[Completion]:
        with engine.new_sequence() as handle, engine.new_sequence() as sibling:
            calls, games = [], (handle, sibling, handle, handle, handle)
            for game, tail in zip(games, tails, strict=True):
                tokens = [*shared, *tiny.random_tokens(12, seed=tail)]
                calls.append(
                    await engine.generate(tokens, max_new=5, seed="0", sequence=game, temperature=0.0)
                )
            return calls

    played = asyncio.run(play())
    for completion, tail in zip(played, tails, strict=True):
        tokens = [*shared, *tiny.random_tokens(12, seed=tail)]
        assert completion.tokens == greedy_by_generate(sdpa_twin(policy), tokens, 5)
    # Of the 12 shared tokens, the tokens in the block that the sibling also holds are computed again, once.
    assert work.prefilled == 24 + 16 + 12


def test_sampled_tokens_depend_on_the_seed_and_not_on_other_games():
    policy = tiny.policy()
    prompts = [tiny.random_tokens(12, seed=number) for number in range(6)]

    def play(chosen, engine):
        return at_once(engine.generate(prompts[n], max_new=15, seed=f"game {n}") for n in chosen)

    together = play(range(6), make_engine(policy, max_sequences=6))
    alone = [play([n], make_engine(policy, max_sequences=1))[0] for n in range(6)]
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    other_seed = asyncio.run(make_engine(policy).generate(prompts[0], max_new=15, seed="another"))
    assert other_seed.tokens != alone[0].tokens


def test_sampled_frequencies_follow_the_softmax_at_the_temperature():
    """Counted are the first tokens, and turns with both tokens in the lower half of the vocabulary."""
    policy = tiny.policy()
    prompt = tiny.random_tokens(9, seed=4)
    size = policy.model.config.vocab_size
    with torch.no_grad():
        logits = tiny.logits_of(policy.model, torch.tensor([[*prompt, first] for first in range(size)]))
    softmax = torch.softmax(logits[:, -2:] / 1.5, -1)  # (V first tokens, 2, V): before and after the first
    expected, low = softmax[0, 0], size // 2
    engine, draws = make_engine(policy, max_sequences=100), 2000
    engine.stop_ids = frozenset()
    calls = (engine.generate(prompt, max_new=2, seed=str(n), temperature=1.5) for n in range(draws))
    drawn = torch.tensor([completion.tokens for completion in at_once(calls)])
    counts = torch.bincount(drawn[:, 0], minlength=size)
    # The sum of the mean absolute deviations of binomial frequencies: the distance expected by chance.
    by_chance = (2 * expected * (1 - expected) / (torch.pi * draws)).sqrt().sum()
    assert (counts / draws - expected).abs().sum() < 1.2 * by_chance
    both_low = expected[:low] @ softmax[:low, 1, :low].sum(-1)
    assert abs((drawn < low).all(1).float().mean() - both_low) < 0.04


def test_generation_stops_at_a_stop_token():
    policy = tiny.policy()
    prompt = tiny.random_tokens(9, seed=4)
    free = asyncio.run(make_engine(policy).generate(prompt, max_new=12, seed="0"))
    engine = tiny.engine(policy, max_tokens=64, kv_tokens=64, stop_ids=frozenset({free.tokens[5]}))
    expected = free.tokens[: free.tokens.index(free.tokens[5]) + 1]
    for most in (12, len(expected)):  # The stop token may be the last token that there is room for.
        stopped = asyncio.run(engine.generate(prompt, max_new=most, seed="0"))
        assert stopped.tokens == expected and stopped.finished
    assert not free.finished


def order_of_first_tokens(engine: Engine, requests: dict[str, tuple[int, int]]) -> list[str]:
    """Make requests (prompt tokens, new tokens); their names in the order of their first tokens."""
    sampled: list[str] = []

    def note(name: str, token: int) -> None:
        sampled.append(name)

    calls = []
    for number, (name, (length, max_new)) in enumerate(requests.items()):
        prompt = tiny.random_tokens(length, seed=number)
        calls.append(engine.generate(prompt, max_new=max_new, seed="0", watch=partial(note, name)))
    at_once(calls)
    return list(dict.fromkeys(sampled))


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [
        ({"kv_tokens": 100}, {"running": (40, 20), "large": (70, 10), "small": (30, 10), "tiny": (3, 2)}),
        ({"kv_tokens": 800, "max_sequences": 2}, {"a": (9, 2), "b": (9, 9), "c": (9, 3), "d": (9, 3)}),
    ],
)
def test_waiting_requests_are_served_in_order_also_before_smaller_ones(limits, sizes):
    """If younger games overtook it, a long game could starve."""
    engine = tiny.engine(tiny.policy(), max_tokens=80, **limits)
    assert order_of_first_tokens(engine, sizes)[:2] == list(sizes)[:2]


def test_a_long_prompt_is_computed_in_chunks_while_other_games_decode():
    engine = make_engine(tiny.policy(), prefill_tokens=16)
    assert order_of_first_tokens(engine, {"long": (190, 10), "short": (3, 10)}) == ["short", "long"]


def test_after_out_of_memory_running_games_are_served_before_waiting_ones(monkeypatch):
    policy = tiny.policy()
    limit_memory(policy, tokens=15, rows=100, monkeypatch=monkeypatch)
    engine = tiny.engine(policy, max_tokens=80, kv_tokens=800, max_sequences=2)
    sizes = dict.fromkeys("abcd", (10, 3))
    with pytest.warns(UserWarning, match="at most 1 games decode"):
        assert order_of_first_tokens(engine, sizes) == list("abcd")


def test_a_bfloat16_policy_plays_with_the_weights_copied_from_a_float32_learner():
    """A game that continues gets the new weights, too: what the old weights computed is dropped."""
    learner = Policy(tiny.model(seed=9), compute_dtype=torch.bfloat16)
    player = Policy(tiny.model().to(torch.bfloat16), compute_dtype=torch.bfloat16)
    twin = Policy(tiny.model(seed=9).to(torch.bfloat16), compute_dtype=torch.bfloat16)
    prompt = tiny.random_tokens(30, seed=1)
    engine = make_engine(player)
    with engine.new_sequence() as game:
        asyncio.run(engine.generate(prompt, max_new=5, seed="0", sequence=game))
        player.copy_weights_from(learner)
        engine.drop_cache()
        after = asyncio.run(engine.generate(prompt, max_new=10, seed="0", sequence=game, temperature=0.0))
    expected = asyncio.run(make_engine(twin).generate(prompt, max_new=10, seed="0", temperature=0.0))
    assert after.tokens == expected.tokens
    assert player.model.dtype == torch.bfloat16


def test_a_request_that_is_too_long_is_refused():
    engine = make_engine(tiny.policy(), capacity=32)
    with pytest.raises(ValueError, match=r"30 tokens and 3 .* 32"):
        asyncio.run(engine.generate(tiny.random_tokens(30, seed=0), max_new=3, seed="0"))


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}])
def test_invalid_settings_of_sampling_are_refused(wrong):
    with pytest.raises(ValueError, match=r"temperature=.* must be at least 0, and top_p=.* in \(0, 1\]"):
        asyncio.run(make_engine(tiny.policy()).generate([1, 2, 3], max_new=3, seed="0", **wrong))


def test_the_engine_forgets_a_game_that_has_ended():
    """A bug would only cost memory and time: a server would remember, and look through, all its games."""
    engine, prompt = make_engine(tiny.policy()), tiny.random_tokens(20, seed=0)

    async def play() -> weakref.ref[TokenSequence]:
        with engine.new_sequence() as game:
            await engine.generate(prompt, max_new=3, seed="0", sequence=game)
        return weakref.ref(game)

    ended = asyncio.run(play())
    gc.collect()
    assert ended() is None


@pytest.mark.parametrize("cleared", [True, False])
def test_cancelled_games_leave_nothing_behind_and_free_their_places_in_the_batch(cleared):
    engine, sampled = make_engine(tiny.policy(), max_sequences=1), []

    async def play() -> Completion:
        prompts = (tiny.random_tokens(8, seed=number) for number in range(3))
        calls = [engine.generate(prompt, max_new=200, seed="0", watch=sampled.append) for prompt in prompts]
        games = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0.01)
        for game in games:
            game.cancel()
        await asyncio.gather(*games, return_exceptions=True)
        assert sampled
        if cleared:
            engine.drop_cache()
        return await asyncio.wait_for(engine.generate([1, 2], max_new=3, seed="0"), timeout=5)

    assert len(asyncio.run(play()).tokens) == 3


def limit_memory(policy, *, tokens: int, rows: int, monkeypatch) -> None:
    """Run out of memory in a forward of more tokens, or logits of more rows."""
    forward, logits = policy.hidden_states, policy.logits

    def within(method, count: int, limit: int, *args):
        if count > limit:
            raise torch.OutOfMemoryError(f"no room for {count}")
        return method(*args)

    monkeypatch.setattr(policy, "hidden_states", lambda row: within(forward, len(row.tokens), tokens, row))
    monkeypatch.setattr(policy, "logits", lambda hidden: within(logits, len(hidden), rows, hidden))


@pytest.mark.parametrize(("tokens", "rows"), [(9, 100), (1000, 2)])
def test_after_out_of_memory_smaller_batches_give_the_same_tokens(tokens, rows, monkeypatch):
    policy, openings = tiny.policy(), [tiny.random_tokens(20, seed=number // 3) for number in range(9)]
    expected = play_with(make_engine(policy, max_sequences=9), openings, turns=2, max_new=8)
    limit_memory(policy, tokens=tokens, rows=rows, monkeypatch=monkeypatch)
    engine = make_engine(policy, max_sequences=9)
    with pytest.warns(UserWarning, match="out of memory"):
        found = play_with(engine, openings, turns=2, max_new=8)
    assert [game.tokens for game in found] == [game.tokens for game in expected]
    for game, same in zip(found, expected, strict=True):
        assert game.logprobs == pytest.approx(same.logprobs, abs=1e-4)
    assert not engine._scheduler.has_jobs


def test_a_step_that_runs_out_of_memory_while_it_samples_draws_the_same_tokens_again(monkeypatch):
    """Otherwise the same seed would give other games on a machine with less memory."""
    prompt, seeds = tiny.random_tokens(20, seed=0), range(3)

    def play() -> list[list[int]]:
        engine = make_engine(tiny.policy())
        completions = at_once(engine.generate(prompt, max_new=9, seed=f"{seed}") for seed in seeds)
        return [completion.tokens for completion in completions]

    expected = play()
    draw, calls = engine_module.draw, itertools.count(1)

    def scarce(*arguments: object, **keywords: object) -> torch.Tensor:
        if next(calls) in (1, 4):
            raise torch.OutOfMemoryError("no room for the probabilities")
        return draw(*arguments, **keywords)

    monkeypatch.setattr(engine_module, "draw", scarce)
    with pytest.warns(UserWarning, match="out of memory"):
        assert play() == expected


@pytest.mark.parametrize("max_sequences", [9, 64])
def test_after_out_of_memory_half_of_the_nine_running_games_decode(max_sequences, monkeypatch):
    """If fewer games decoded at once, the tokens would be the same, but the rollout would take longer. If 32
    were allowed, the same nine would run out of memory again.
    """
    policy, openings = tiny.policy(), [tiny.random_tokens(20, seed=number) for number in range(9)]
    limit_memory(policy, tokens=1000, rows=4, monkeypatch=monkeypatch)
    engine = make_engine(policy, max_sequences=max_sequences)
    with pytest.warns(UserWarning, match="at most 4 games .* 256 prompt") as said:
        play_with(engine, openings, turns=3, max_new=12)
    assert len(said) == 1


@pytest.mark.filterwarnings("ignore:out of memory")
def test_when_all_games_have_ended_the_whole_batch_decodes_again_after_out_of_memory(monkeypatch):
    """A bug: only a training restored the limits, so a server served half as many games until its end."""
    policy = tiny.policy()
    engine = make_engine(policy, max_sequences=4)

    def play() -> int:
        """The most games that decoded at the same time."""
        most = 0

        def watch(_: int) -> None:
            nonlocal most
            most = max(most, len(engine._scheduler.running))

        games = [tiny.random_tokens(8, seed=seed) for seed in range(4)]
        at_once(engine.generate(game, max_new=9, seed="0", watch=watch) for game in games)
        return most

    assert play() == 4
    with monkeypatch.context() as scarce:
        limit_memory(policy, tokens=1000, rows=1, monkeypatch=scarce)
        assert play() == 1
    assert play() == 4
    assert engine._scheduler.limits == engine._limits


def test_while_a_game_goes_on_new_games_keep_to_the_smaller_batch_after_out_of_memory(monkeypatch):
    """Memory ran out with these games. A server would otherwise try the whole batch again and again."""
    policy = tiny.policy()
    limit_memory(policy, tokens=1000, rows=2, monkeypatch=monkeypatch)
    engine = tiny.engine(policy, max_tokens=100, kv_tokens=800, max_sequences=4)

    def call(seed: int, *, max_new: int) -> Coroutine[None, None, Completion]:
        return engine.generate(tiny.random_tokens(8, seed=seed), max_new=max_new, seed="0")

    async def play() -> None:
        long = asyncio.create_task(call(0, max_new=80))
        for _ in range(2):
            await asyncio.gather(*(call(seed, max_new=2) for seed in range(1, 5)))
        assert not long.done()
        await long

    with pytest.warns(UserWarning, match="at most 2 games decode") as said:
        asyncio.run(play())
    assert len(said) == 1


@pytest.mark.filterwarnings("ignore:out of memory")
def test_out_of_memory_for_a_single_token_is_raised(monkeypatch):
    policy = tiny.policy()
    limit_memory(policy, tokens=0, rows=1, monkeypatch=monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        asyncio.run(make_engine(policy).generate([1, 2, 3], max_new=3, seed="0"))


def test_an_error_in_the_model_is_raised_in_every_waiting_game():
    engine = make_engine(tiny.policy(), max_sequences=1)
    prompts = [10**6], tiny.random_tokens(4, seed=1)  # no such token: the embedding raises
    calls = (engine.generate(prompt, max_new=3, seed="0") for prompt in prompts)
    assert all(isinstance(result, IndexError) for result in at_once(calls, return_exceptions=True))


def test_the_cache_of_a_failed_forward_is_not_used(monkeypatch):
    policy, prompt = tiny.policy(), tiny.random_tokens(20, seed=0)
    engine = make_engine(policy)
    work = count_work(engine)

    def fail(*_, **__):
        raise RuntimeError("the device failed")

    with engine.new_sequence() as game:
        how = {"max_new": 6, "seed": "0", "temperature": 0.0, "sequence": game}
        with monkeypatch.context() as failing, pytest.raises(RuntimeError, match="the device failed"):
            failing.setattr(engine, "_forward", fail)
            asyncio.run(engine.generate(prompt, **how))
        again = asyncio.run(engine.generate(prompt, **how))
    assert again.tokens == greedy_by_generate(sdpa_twin(policy), prompt, 6)
    assert work.prefilled == 2 * len(prompt)


def test_the_turn_of_a_game_samples_with_its_own_top_p():
    engine, prompt = make_engine(tiny.policy()), tiny.random_tokens(9, seed=4)

    def turn(**how):
        with engine.new_sequence() as game:
            return asyncio.run(engine.generate(prompt, max_new=9, seed="0", sequence=game, **how)).tokens

    assert turn(temperature=2.0, top_p=1e-6) == turn(temperature=0.0)


@pytest.mark.parametrize("temperature", [1e-300, 1e-45])
def test_a_temperature_that_float32_rounds_to_zero_is_greedy(temperature):
    """A bug: a logit divided by 0 gave a token outside the vocabulary."""
    engine, prompt = make_engine(tiny.policy()), tiny.random_tokens(9, seed=4)

    def play(temperature: float) -> Completion:
        return asyncio.run(engine.generate(prompt, max_new=9, seed="0", temperature=temperature))

    assert play(temperature) == play(0.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_stop_the_run_in_one_sentence(temperature):
    """A bug: an index error, on CUDA a device assertion, or greedy games of the token 0."""
    policy = tiny.policy()
    policy.model.base_model.norm.weight.data.fill_(torch.nan)
    calls = [
        make_engine(policy).generate([1, 2, 3], max_new=4, seed=str(number), temperature=temperature)
        for number in range(3)
    ]
    for error in at_once(calls, return_exceptions=True):
        assert isinstance(error, AgentUnusable) and "logits are NaN or infinite" in str(error)


@pytest.mark.slow
def test_every_check_of_a_new_gpu_passes_on_a_cpu(capsys):
    with pytest.raises(SystemExit) as ended:
        gpu_check.main()
    lines = capsys.readouterr().out.splitlines()[1:]
    assert ended.value.code == 0, lines
    names = "machine_speed paged_attention model engine decode training_gap update"
    assert [line.split()[:2] for line in lines] == [["PASS", name] for name in names.split()]


def test_after_out_of_memory_nothing_holds_the_memory_of_the_failed_forward(monkeypatch):
    """A bug would end in a second out-of-memory: the exception keeps the forward's tensors alive while it is
    handled, so memory that is given back to the device must wait until then.
    """
    policy = tiny.policy()
    forward = policy.hidden_states
    failed: list[weakref.ref[torch.Tensor]] = []
    was_free: list[bool] = []  # at each time when unused memory was given back

    def fail_once(row: PagedBatch) -> torch.Tensor:
        if failed:
            return forward(row)
        activations = torch.zeros(9)
        failed.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("no room for the next layer")

    monkeypatch.setattr(policy, "hidden_states", fail_once)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: was_free.append(failed[0]() is None))
    with pytest.warns(UserWarning, match="out of memory"):
        asyncio.run(make_engine(policy).generate([1, 2, 3], max_new=3, seed="0"))
    assert was_free == [True]


def test_a_chunk_inside_a_prompt_computes_no_logits(monkeypatch):
    """Only the last of three chunks has a token from which the next one is sampled."""
    policy = tiny.policy()
    rows: list[int] = []
    logits = policy.logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(policy, "logits", counted)
    engine = make_engine(policy, prefill_tokens=16)
    asyncio.run(engine.generate(tiny.random_tokens(40, seed=0), max_new=1, seed="0"))
    assert rows == [1]
