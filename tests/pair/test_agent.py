"""The settings of an agent's games, and what a user's names mean."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
from transformers import GenerationConfig

from prompt_r1.data.questions import find_questions
from prompt_r1.errors import QuestionTooLong, UsageError
from prompt_r1.miniworld.questions import mini_questions
from prompt_r1.pair.agent import check_question_length, check_question_lengths, load_agent
from prompt_r1.protocol import Codec
from prompt_r1.settings.agent import INSTRUCTIONS
from prompt_r1.settings.train import PRESETS, TrainConfig
from prompt_r1.types import GameSettings, Question
from tests.support import tiny
from tests.support.games import CPU

QUESTION = Question("q7", "test", "Who made it?", ("Anna",))
CODEC = Codec(tiny.tokenizer(), INSTRUCTIONS["short"])


def test_a_turn_ends_at_every_end_token_of_the_model(tmp_path):
    """Qwen3 has two, and its tokenizer names one: a turn went on behind the other."""
    own, ordinary = CODEC.turn_end, CODEC.encoder.trusted("z")[0]
    other, not_special = CODEC.tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<think>"])
    configured = GenerationConfig(eos_token_id=[own, other, ordinary, not_special])
    configured.save_pretrained(tiny.save_agent(tmp_path))
    agent = load_agent(tmp_path, TrainConfig(**PRESETS["mini"]), CPU)
    assert agent.engine.stop_ids == {own, other}
    assert agent.codec.turn_text([*CODEC.encoder.trusted("abc"), other]) == "abc"


def test_an_agent_is_refused_for_games_that_are_longer_than_its_positions(tmp_path):
    tiny.save_model(tmp_path, "gpt2")
    tiny.tokenizer().save_pretrained(tmp_path)
    config = TrainConfig(**{**PRESETS["mini"], "agent": str(tmp_path), "max_tokens": 257})
    with pytest.raises(UsageError, match=r"257 tokens .*256 positions"):
        load_agent(tmp_path, config, CPU)


def test_a_question_must_leave_room_for_one_token():
    length = len(CODEC.opening(QUESTION.text))
    check_question_lengths([QUESTION], CODEC, GameSettings(max_tokens=length + 1))
    with pytest.raises(UsageError, match=rf"question 'q7' \(.*\) .* {length} tokens .* {length}"):
        check_question_lengths([QUESTION], CODEC, GameSettings(max_tokens=length))
    with pytest.raises(UsageError, match=r"^the question "):  # not its whole text
        check_question_length(QUESTION.text, CODEC, GameSettings(max_tokens=2))


def test_megabytes_are_refused_before_they_are_encoded():
    """A bug: 2 MB of control tokens were encoded for 13 seconds, and then refused."""
    codec = Mock()
    with pytest.raises(QuestionTooLong, match=r"2,000,000 characters.* 8192"):
        check_question_lengths([replace(QUESTION, text="x" * 2_000_000)], codec, GameSettings())
    assert not codec.mock_calls


def test_a_question_of_sixteen_characters_per_token_is_still_encoded():
    """Only its tokens then decide: a text of long words may well fit."""
    codec = Mock()
    codec.opening.return_value = [0] * 9
    longest = replace(QUESTION, text="x" * 160)
    check_question_lengths([longest], codec, GameSettings(max_tokens=10))
    with pytest.raises(QuestionTooLong, match=r"161 characters.* 10 tokens"):
        check_question_lengths([replace(QUESTION, text="x" * 161)], codec, GameSettings(max_tokens=10))
    codec.opening.assert_called_once_with(longest.text)


def test_a_split_or_a_kind_named_after_mini_is_chosen():
    pop = [question for question in mini_questions(0, "validation") if question.dataset == "pop"]
    assert find_questions(["mini:ood"], "validation", 0) == mini_questions(0, "ood")
    assert pop and find_questions(["mini:pop"], "validation", 0) == pop


def test_a_game_has_the_settings_of_its_run_and_by_default_the_papers():
    """Table 6: 5 turns of 1,024 tokens, 8,192 in all; the released script cuts a reply to 1,024."""
    assert GameSettings() == TrainConfig().game == GameSettings(5, 1024, 8192, 1024)
    other = {"max_turns": 1, "max_new": 2, "max_tokens": 3, "max_reply_tokens": 4}
    assert TrainConfig(**other).game == GameSettings(**other)


def test_every_question_of_a_run_is_checked_and_not_only_the_first():
    length = len(CODEC.opening(QUESTION.text))
    longer = replace(QUESTION, id="q8", text=f"{QUESTION.text} And where, and when?")
    with pytest.raises(QuestionTooLong, match="question 'q8'"):
        check_question_lengths([QUESTION, longer], CODEC, GameSettings(max_tokens=length + 1))
