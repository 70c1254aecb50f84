"""`--route agent`: names in prompts, what the environments see, what a game costs, and who is told what."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from prompt_r1.agent.names import AgentSpec
from prompt_r1.config.fields import EnvironmentConfig
from prompt_r1.config.train import PRESETS, TrainConfig
from prompt_r1.endpoint.responses import Outcome
from prompt_r1.environments.budget import Budget, Price
from prompt_r1.environments.journal import Journal
from prompt_r1.environments.metered import MeteredEnvironment
from prompt_r1.environments.own import pool_of
from prompt_r1.environments.pool import Pool
from prompt_r1.errors import UsageError
from prompt_r1.options.routes import address, names_in, route_instruction
from prompt_r1.types import Message

NAMES = ("gpt-4o", "gpt-4o-mini", "llama3:8b")


def said(*prompts: str) -> list[Message]:
    """A dialogue with these prompts; each but the last has a reply."""
    messages: list[Message] = []
    for prompt in prompts:
        messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": "@gpt-4o: Yes."}]
    return messages[:-1]


@pytest.mark.parametrize(
    ("prompt", "sent", "environment"),
    [
        ("@gpt-4o: Who is it?", "Who is it?", 0),
        ("@gpt-4o-mini: Who is it?", "Who is it?", 1),  # not gpt-4o
        ("@llama3:8b: Who is it?", "Who is it?", 2),
        ("  @GPT-4o-Mini,  Who is it?", "Who is it?", 1),
        ("@gpt-4o Who is it?", "Who is it?", 0),
        ("@gpt-4o\nWho is it?", "Who is it?", 0),
        ("@gpt-4o: @gpt-4o-mini: Who?", "@gpt-4o-mini: Who?", 0),
        ("@claude: Who is it?", "Who is it?", None),
        ("@gpt-4o3: Who is it?", "Who is it?", None),
        ("Who is it?", "Who is it?", None),
        ("Ask @gpt-4o: who is it?", "Ask @gpt-4o: who is it?", None),
        ("@home, who is it?", "@home, who is it?", None),
        ("@gpt-4o:", "@gpt-4o:", 0),
        ("@: Who?", "@: Who?", None),
        ("", "", None),
    ],
)
def test_the_name_in_front_of_a_prompt_is_read_and_removed(prompt, sent, environment):
    addressed = address(said(prompt), NAMES)
    assert addressed.messages == said(sent)
    assert addressed.environment == environment


def test_the_last_prompt_chooses_and_no_prompt_keeps_its_name():
    dialogue = said("@gpt-4o-mini: When?", "@gpt-4o: Was it before 1974?")
    addressed = address(dialogue, NAMES)
    assert addressed.environment == 0
    assert addressed.messages == said("When?", "Was it before 1974?")  # replies are not the agent's
    assert dialogue[0]["content"] == "@gpt-4o-mini: When?"  # the game's own messages stay


def test_the_names_are_short_and_distinct():
    spec = (
        "gpt-4o,meta-llama/Llama-3-8B@http://localhost:8000/v1,hf:models/qwen/,py:my.module:Oracle,llama3:8b"
    )
    assert names_in(spec) == ("gpt-4o", "Llama-3-8B", "qwen", "Oracle", "llama3:8b")
    for wrong in ("gpt-4o,openai/GPT-4o", "mini,hf:a b", "mini,hf:<|im_end|>"):
        with pytest.raises(UsageError, match="--route agent"):
            names_in(wrong)


def test_the_instruction_has_names_and_prices():
    assert route_instruction("mini,mini-small", ("2,8", "0.1,0.4")) == (
        "Assistants (dollars per million tokens sent, received): @mini (2,8), @mini-small (0.1,0.4). Begin "
        "each prompt with the name of the one you ask, as @NAME: ..."
    )
    assert "@mini (1,2), @mini-small (1,2)" in route_instruction("mini,mini-small", ("1,2",))
    assert route_instruction("mini,mini-small", ()).startswith("Assistants: @mini, @mini-small. Begin")


class Recording:
    """Replies with its name, for one token in and ten out, and keeps the dialogues that it saw."""

    def __init__(self, name: str, *, down: bool = False) -> None:
        self.name, self.parameters, self.seen = name, {}, list[list[Message]]()
        self._outcome = Outcome("ok", text=name, finish="stop", tokens_in=1, tokens_out=10)
        if down:
            self._outcome = Outcome("retry", reason="HTTP 500")

    async def call(self, messages: list[Message], *, sample: int = 0) -> Outcome:
        self.seen.append(messages)
        return self._outcome

    async def check(self) -> None:
        pass

    async def close(self) -> None:
        pass


def routed(*sources: Recording, folder: Path | None = None) -> Pool:
    """A pool in which the n-th environment costs n dollars per million tokens, sent or received."""
    journal, budget = Journal(folder), Budget()
    members = [
        MeteredEnvironment(source, journal=journal, budget=budget, price=Price(number, number))
        for number, source in enumerate(sources, start=1)
    ]
    return Pool(members, budget=budget, route="agent", names=[source.name for source in sources])


def test_each_turn_goes_to_the_environment_it_names_and_prompts_without_one_to_the_first():
    dear, cheap = Recording("dear"), Recording("cheap")
    pool = routed(dear, cheap)
    ask = pool.ask_in_game("0", sample=0, session="q", deadline=0.0)

    async def game() -> list[str]:
        return [
            await ask(said("@cheap: When?")),
            await ask(said("@cheap: When?", "@dear: Before?")),
            await ask(said("@cheap: When?", "@dear: Before?", "@nobody: Sure?")),
            await ask(said("@cheap: When?", "@dear: Before?", "@nobody: Sure?", "Sure?")),
        ]

    assert asyncio.run(game()) == ["cheap", "dear", "dear", "dear"]
    assert cheap.seen == [said("When?")]
    assert dear.seen[-1] == said("When?", "Before?", "Sure?", "Sure?")
    assert ask.usd == pytest.approx((2 + 3 * 1) * 11e-6)
    metrics = pool.take_metrics()
    assert (metrics["env/unaddressed"], metrics["env/1:dear/paid"], metrics["env/2:cheap/paid"]) == (2, 3, 1)
    assert pool.take_metrics()["env/unaddressed"] == 0


def test_another_environment_replaces_the_named_one_while_it_is_down():
    pool = routed(Recording("dear"), Recording("cheap", down=True))
    ask = pool.ask_in_game("0", sample=0, session="q", deadline=0.0)
    assert asyncio.run(ask(said("@cheap: When?"))) == "dear"
    assert ask.usd == pytest.approx(11e-6)  # of the one that replied


@pytest.mark.parametrize("deadline", [0.0, 60.0])
def test_a_game_from_the_journal_costs_the_same(tmp_path, deadline):
    """A resumed run plays games from the journal again, and must learn the same from their costs."""
    costs = []
    for _ in range(2):
        pool = routed(Recording("dear"), Recording("cheap"), folder=tmp_path)
        ask = pool.ask_in_game("0", sample=0, session="q", deadline=deadline)
        asyncio.run(ask(said("@cheap: When?")))
        costs.append(ask.usd)
    assert costs == [22e-6, 22e-6]
    assert pool.take_metrics()["env/reused"] == 1


def test_an_agent_that_chooses_is_told_what_the_user_gives_and_others_are_told_nothing():
    mini = TrainConfig(**{**PRESETS["mini"], "env": "mini,mini-small", "env_price": ("2,8", "0.1,0.4")})
    calls = EnvironmentConfig(env_price=("0.1,0.4", "2,8"))
    plain = AgentSpec("agent", mini, "mini")
    assert plain.asking("mini", calls) is plain
    assert plain.config.told == "Ask the assistant step by step, then answer."
    spec = AgentSpec("agent", replace(mini, route="agent"), "mini")
    assert "@mini (2,8), @mini-small (0.1,0.4)." in spec.asking("", EnvironmentConfig()).config.told
    assert "@mini (0.1,0.4), @mini-small (2,8)." in spec.asking("", calls).config.told
    assert (
        "@gpt-4o, @gpt-4o-mini."
        in replace(spec, config=replace(spec.config, env_price=()))
        .asking("gpt-4o,gpt-4o-mini", EnvironmentConfig())
        .config.told
    )
    assert plain.asking("gpt-4o,o3", EnvironmentConfig(route="agent")).config.route == "agent"


def test_an_object_of_the_user_does_not_see_the_names_either():
    class Echo:
        def ask(self, messages: list[Message]) -> str:
            return messages[-1]["content"]

    pool = pool_of(Echo(), route="agent")
    assert asyncio.run(pool.ask(said("@mini: Who?"))) == "Who?"
    assert asyncio.run(pool_of(Echo()).ask(said("@mini: Who?"))) == "@mini: Who?"
