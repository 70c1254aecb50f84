"""The mini world: facts and questions, the environment, demonstrations, tokenizer and agent."""

import asyncio
import copy
import hashlib
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from prompt_r1.chat_template import decode
from prompt_r1.errors import UsageError
from prompt_r1.miniworld import agent as agent_module
from prompt_r1.miniworld.agent import EMBEDDED, MiniAgent, build_agent, mini_agent
from prompt_r1.miniworld.demonstrations import decompose, play_demonstration
from prompt_r1.miniworld.demonstrations import demonstrations as make_demonstrations
from prompt_r1.miniworld.environment import MiniEnvironment, MiniEnvironmentB
from prompt_r1.miniworld.questions import SPLITS, TRAINING_MIX, make_questions, mini_questions
from prompt_r1.miniworld.world import make_world
from prompt_r1.protocol import Codec
from prompt_r1.rollout import trajectory_of
from prompt_r1.settings.agent import INSTRUCTIONS
from tests.support.templates import KINDS, TOKENIZERS, tokenizer_of

WORLD = make_world(0)


def environment_of(seed: int, kind: type[MiniEnvironment] = MiniEnvironment) -> MiniEnvironment:
    """The environment of a seed, with the facts of WORLD in place of its own."""
    environment = kind(seed=seed)
    environment.world = WORLD
    return environment


def quick_agent() -> MiniAgent:
    """An agent of few demonstrations and steps."""
    return build_agent(0, make_demonstrations(0, worlds=1, games=200), steps=3)


@pytest.fixture(scope="module")
def quick():
    return quick_agent()


@pytest.fixture(scope="module")
def codec(quick):
    _, tokenizer = quick
    return Codec(tokenizer, INSTRUCTIONS["short"])


@pytest.fixture(scope="module")
def demonstrations():
    """2,000 demonstrations, with their questions."""
    minis = make_questions(WORLD, "train", 2000)
    environment, rng = MiniEnvironment(), random.Random(0)
    return [play_demonstration(*mini, environment, rng) for mini in minis]


def test_an_agent_depends_on_its_seed_only_and_not_on_the_global_random_generator(quick):
    before = torch.random.get_rng_state()
    again, _ = quick_agent()
    assert torch.equal(before, torch.random.get_rng_state())
    weights = again.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in quick[0].state_dict().items())


class CountedFacts(dict):
    """Facts that count how often all of them are read, one after another."""

    readings = 0

    def __iter__(self):
        self.readings += 1
        return super().__iter__()


def test_the_environment_reads_the_facts_of_its_world_once_for_all_replies():
    """Otherwise each name in each request would cost a pass over thousands of facts."""
    facts = CountedFacts(WORLD.facts)
    environment = MiniEnvironment()
    environment.world = replace(WORLD, facts=facts)
    for film in WORLD.train.films[:20]:
        assert environment.reply(f"Who is the director of {film}?").value
    assert facts.readings == 1


def test_training_questions_and_held_out_questions_share_no_name():
    training, *others = (mini_questions(0, split) for split in SPLITS)
    training = "\n".join(f"{question.text} {question.answers}" for question in training)
    held_out = "\n".join(f"{question.text} {question.answers}" for other in others for question in other)
    for name in (*WORLD.test.films, *WORLD.test.people, *WORLD.test.cities):
        assert name not in training
    for name in (*WORLD.train.films, *WORLD.train.people, *WORLD.train.cities):
        assert name not in held_out


def test_splits_share_no_question_and_have_balanced_kinds():
    train, validation, test, ood = splits = [mini_questions(1, split) for split in SPLITS]
    assert [len(train), len(validation), len(test), len(ood)] == [4096, 160, 320, 128]
    assert len({question.text for split in splits for question in split}) == sum(map(len, splits)) == 4704
    assert len({question.id for split in splits for question in split}) == 4704
    assert set(Counter(question.dataset for question in test).values()) == {64}
    assert Counter(question.dataset for question in ood) == {"bridge_ood": 64, "math_ood": 64}
    shares = Counter(question.dataset for question in train)
    assert all(abs(shares[kind] / 4096 - share) < 0.04 for kind, share in TRAINING_MIX.items())


PERSON, FILM = WORLD.test.people[0], WORLD.test.films[0]
CLEAR = [
    (f"Who is the director of {FILM}?", FILM, "director"),
    (f"  who IS the director of {FILM.upper()}  ? ", FILM, "director"),
    (f"Question: Who directed {FILM}?", FILM, "director"),
    (f"Think step by step.\nWhen was {FILM} released?\nBe brief.", FILM, "year"),
    (f"{'Think carefully. ' * 30}\nWhen was {FILM} released?", FILM, "year"),
    (f"Where was {PERSON} born?", PERSON, "birthplace"),
    (f"What is the birthplace of\n{PERSON}", PERSON, "birthplace"),
]


@pytest.mark.parametrize("prompt, subject, relation", CLEAR)
def test_a_clear_question_is_understood_in_any_spacing_and_case(prompt, subject, relation):
    replies = [environment_of(seed).reply(prompt) for seed in range(20)]
    right = [WORLD.facts[subject, relation] in reply.text for reply in replies]
    assert sum(right) >= 18  # the skill is 0.99


SENSELESS = [
    "",
    "hello",
    "Who is the director of Nowhere Land?",
    f"Who is the mother of {FILM}?",
    f"Who is {PERSON}?",
    f"Who is the mother of the year of {FILM}?",
    "Who is the director of {value}?",
    "What is plus?",
    "x" * 100_000,
    "was " * 5_000,
    "when was it released\n" * 100_000,
    "Tell me about .",
]


@pytest.mark.parametrize("prompt", SENSELESS)
def test_a_prompt_that_makes_no_sense_gets_no_fact(prompt):
    assert MiniEnvironment().reply(prompt).value == ""


def test_a_request_has_at_most_300_characters():
    """Patterns with several wildcards are slow on longer texts."""
    request = f"Write a short summary of {FILM} with its genre, hero and director, "
    assert MiniEnvironment().reply(request.ljust(300, "x")).value != ""
    assert MiniEnvironment().reply(request.ljust(301, "x")).value == ""


def test_a_film_was_not_released_before_its_own_year():
    environment, year = MiniEnvironment(), int(WORLD.facts[FILM, "year"])
    asked = [f"Was {FILM} released before {other}?" for other in (year, year + 1)]
    assert [environment.reply(question).value for question in asked] == ["no", "yes"]


def test_a_reply_depends_only_on_seed_style_and_the_last_user_message():
    environment, again = environment_of(5), environment_of(5)
    again.world = make_world.__wrapped__(0)
    questions = [question.text for _, question in make_questions(WORLD, "test", 50)]
    first = [environment.reply(question) for question in questions]
    assert first == [again.reply(question) for question in reversed(questions)][::-1]
    prompt = questions[0]
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": prompt},
    ]
    assert asyncio.run(environment.ask(messages)) == first[0].text
    assert environment.reply(f" {prompt.upper()}\n").text == first[0].text
    assert [environment_of(6).reply(question) for question in questions] != first
    assert [environment_of(5, MiniEnvironmentB).reply(question) for question in questions] != first


def test_decomposing_answers_nearly_every_held_out_question():
    """An oracle agent asks one step at a time and copies the values: asking well is enough to be right."""
    environment = MiniEnvironment()
    minis = make_questions(WORLD, "test", 320) + make_questions(WORLD, "ood", 128)
    right = 0
    for slots, question in minis:
        value = ""
        for _, prompt in decompose(slots):
            reply = environment.reply(prompt.format(value=value))
            value = reply.value
            assert value in reply.text.lower() if value in ("yes", "no") else value in reply.text
        right += value == question.answers[0]
    assert right / len(minis) >= 0.97


def test_a_recorded_demonstration_has_the_tokens_of_the_dialogue_and_the_mask_of_the_agent(
    demonstrations, codec
):
    tokenizer = codec.tokenizer
    for question, turns in demonstrations[:300]:
        trajectory = trajectory_of(question, turns, codec)
        text = tokenizer.decode(trajectory.tokens)
        # The oracle: encoding the whole text at once gives the same tokens.
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == trajectory.tokens
        messages = [{"role": "user", "content": f"Question: {question.text}\n{INSTRUCTIONS['short']}"}]
        for turn in turns:
            messages += [{"role": "assistant", "content": turn.text}]
            if turn.reply is not None:
                reply = f"<interaction_response>{turn.reply}</interaction_response>"
                messages += [{"role": "user", "content": reply}]
        assert tokenizer.apply_chat_template(messages, tokenize=False) == text + "\n"
        written = [t for t, mine in zip(trajectory.tokens, trajectory.sampled, strict=True) if mine]
        assert tokenizer.decode(written) == "".join(turn.text + "<|im_end|>" for turn in turns)


@pytest.mark.parametrize("name", ["byte level", "sentencepiece, no prefix"])
def test_a_recorded_turn_of_the_agent_does_not_begin_with_a_token_that_the_tokenizer_adds(
    demonstrations, name
):
    """Such as <s>, which Llama's and Gemma's tokenizers add to each text."""
    tokenizer = copy.deepcopy(tokenizer_of(KINDS["Gemma"], name))
    first = tokenizer.bos_token
    codec = Codec(tokenizer, INSTRUCTIONS["short"])
    added = [(first, tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{first} $A", None, added)
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    question, turns = demonstrations[0]
    game = trajectory_of(question, turns, codec)
    written = [token for token, mine in zip(game.tokens, game.sampled, strict=True) if mine]
    assert tokenizer.decode(written) == "".join(turn.text + "<end_of_turn>" for turn in turns)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_recorded_turn_does_not_begin_with_a_blank_that_the_tokenizer_writes(demonstrations, name):
    """A bug: a turn was encoded as the beginning of a text, so the agent learned to begin with a blank."""
    tokenizer = tokenizer_of(KINDS["Gemma"], name)
    question, [first, *_] = demonstrations[0]
    turns = [replace(first, text="Who?", reply=None)]
    game = trajectory_of(question, turns, Codec(tokenizer, INSTRUCTIONS["short"]))
    assert decode(tokenizer, game.tokens).endswith("model\nWho?<end_of_turn>")


def test_a_recorded_turn_that_contains_the_end_token_is_a_usage_error(demonstrations, codec):
    """A bug: in a turn of a file, <|im_end|> became an end token, and another one followed."""
    question, [first, *_] = demonstrations[0]
    with pytest.raises(UsageError, match=r"contains <\|im_end\|>"):
        trajectory_of(question, [replace(first, text=f"{first.text}<|im_end|>")], codec)


def digest_of(lines) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("split", "digest"),
    [
        ("train", "21352c5b9cf75235"),
        ("validation", "d6c2167c69adc83a"),
        ("test", "13dd74a43d90d7fa"),
        ("ood", "0ce53e7d6332fe38"),
    ],
)
def test_the_questions_of_seed_0_are_those_of_the_published_results(split, digest):
    """Ids, texts, answers and kinds, in their order."""
    minis = make_questions(WORLD, split, 200 if split == "train" else SPLITS[split])
    assert digest_of(repr(question) for _, question in minis) == digest


@pytest.mark.parametrize(
    ("style", "digest"), [(MiniEnvironment, "fbb50ab19b36e3dc"), (MiniEnvironmentB, "418d96b87dc4900f")]
)
def test_single_steps_of_seed_0_get_the_published_replies(style, digest):
    """README's figures hold for these replies: measure them again if one is meant to change."""
    environment, replies = style(seed=0), []
    for slots, question in make_questions(WORLD, "validation", 160):
        value = ""
        for think, prompt in decompose(slots):
            reply = environment.reply(prompt.format(value=value))
            value = reply.value
            replies.append(f"{think} {prompt} {reply.text} {value}")
        for prompt in (question.text, f"{question.text} Answer only."):
            replies.append(environment.reply(prompt).text)
        if hasattr(slots, "film"):
            replies.append(environment.reply(f"Tell me about {slots.film}.").text)
    replies += [environment.reply(f"Who is the hero of nothing {number}?").text for number in range(9)]
    assert digest_of(replies) == digest


def test_the_published_agents_learned_from_these_demonstrations(demonstrations):
    """README's figures hold for agents that started from them: strategies, damages, guesses and replies."""
    lines = [f"{turn.text} {turn.reply}" for _, turns in demonstrations for turn in turns]
    assert digest_of(lines) == "bd7b8f145e2d77e7"


def test_the_loss_of_the_warm_start_is_the_mean_over_the_agents_own_tokens(demonstrations, quick, codec):
    """The oracle: each game alone, without padding, token by token in float64."""
    games = [trajectory_of(question, turns, codec) for question, turns in demonstrations[:5]]
    (model, _), nats = quick, []
    for game in games:
        with torch.no_grad():
            logits = model(torch.tensor([game.tokens])).logits[0].double()
        log_probabilities = logits.log_softmax(-1)
        nats += [
            -log_probabilities[place - 1, token].item()
            for place, token in enumerate(game.tokens)
            if game.sampled[place]
        ]
    loss = agent_module.next_token_loss(model, games).item()
    assert loss == pytest.approx(sum(nats) / len(nats), rel=1e-5)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_an_agent_is_built_in_one_thread_on_every_machine(two_threads):
    """The last bits of its weights depended on the number of cores."""
    seen = []

    def interrupted():
        seen.append(torch.get_num_threads())
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        build_agent(0, interrupted())
    assert seen == [1] and torch.get_num_threads() == 2


def test_an_agent_that_was_built_is_not_built_again(tmp_path, capsys):
    folder = tmp_path / f"mini-agent-1-v{agent_module.VERSION}"
    folder.mkdir()
    assert mini_agent(1, tmp_path) == folder
    assert capsys.readouterr().err == ""


def test_a_saved_agent_is_a_standard_hugging_face_model(quick, codec, tmp_path):
    for part in quick:
        part.save_pretrained(tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    tokens = Codec(tokenizer, INSTRUCTIONS["short"]).opening(f"What is {FILM} about?")
    assert tokens == codec.opening(f"What is {FILM} about?")
    with torch.no_grad():
        ours, loaded = (each(input_ids=torch.tensor([tokens])).logits for each in (quick[0], model))
    assert torch.equal(ours, loaded)


def test_the_agent_of_seed_0_comes_with_the_package(tmp_path):
    folder = mini_agent(0, tmp_path / "cache")
    assert folder.parent == EMBEDDED, "python -m prompt_r1.miniworld.agent builds it"
    assert [each.name for each in EMBEDDED.iterdir()] == [folder.name]  # no older one
