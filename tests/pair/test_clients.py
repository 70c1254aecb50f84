"""Clients of OpenAI's API ask our server, without a change; openai's own is in test_server.py."""

import os
import subprocess
import sys

import pytest

from tests.support.pair_server import chat_server, serving_pair

# Warnings of their dependencies are none of ours.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

QUESTION = "Who is it?"


@pytest.fixture(scope="module")
def url():
    with serving_pair(chat_server()) as url:
        yield url


@pytest.fixture(scope="module")
def answer(url):
    """What openai's client gets."""
    import openai

    with openai.OpenAI(base_url=url, api_key="none") as client:
        messages = [{"role": "user", "content": QUESTION}]
        reply = client.chat.completions.create(model="prompt-r1", messages=messages)
    assert reply.choices[0].message.content
    return reply.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_gets_the_answer(url, answer, stream):
    litellm = pytest.importorskip("litellm")
    reply = litellm.completion(
        model="openai/prompt-r1",
        api_base=url,
        api_key="none",
        messages=[{"role": "user", "content": QUESTION}],
        stream=stream,
    )
    if stream:
        assert "".join(piece.choices[0].delta.content or "" for piece in reply) == answer
    else:
        assert reply.choices[0].message.content == answer and reply.usage.total_tokens > 0


def test_langchain_gets_the_answer_at_once_in_batches_and_in_pieces(url, answer):
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(model="prompt-r1", base_url=url, api_key="none")
    assert chat.invoke(QUESTION).content == answer
    assert [reply.content for reply in chat.batch([QUESTION] * 3)] == [answer] * 3
    assert "".join(piece.content for piece in chat.stream(QUESTION)) == answer


@pytest.mark.parametrize("options", [["--no-stream"], []])
def test_the_program_llm_gets_the_answer(url, answer, tmp_path, options):
    pytest.importorskip("llm")
    model = f"- model_id: pair\n  model_name: prompt-r1\n  api_base: {url}\n  api_key_name: none\n"
    (tmp_path / "extra-openai-models.yaml").write_text(model)
    asked = subprocess.run(
        [sys.executable, "-m", "llm", "-m", "pair", "--key", "none", *options, QUESTION],
        # Without its plugins: another package's, SmolLM2's say, may lack what it imports.
        env={**os.environ, "LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": ""},
        capture_output=True,
        text=True,
    )
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.strip() == answer
