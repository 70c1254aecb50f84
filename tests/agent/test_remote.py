"""An agent behind a completions endpoint plays the same games as in this process, token by token."""

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

import evaluate
import infer
from prompt_r1.agent.agent import Agent, check_endpoint, open_agent
from prompt_r1.agent.names import AgentSpec, resolve_agent
from prompt_r1.agent.remote import KEY, RemoteEngine, parse_remote
from prompt_r1.baselines.games import dialogue_text
from prompt_r1.chat_template import special_ids
from prompt_r1.cli.command_line import run_program
from prompt_r1.config.train import PRESETS, TrainConfig
from prompt_r1.config.yaml_files import GAME_FILE, write_yaml
from prompt_r1.errors import FatalEnvError, Resumable, UsageError
from prompt_r1.protocol import INSTRUCTIONS, Codec
from prompt_r1.rollout import play
from prompt_r1.types import Completion, Question, Trajectory
from tests import tiny
from tests.json_server import JsonHandler, serving
from tests.providers import Provider
from tests.tiny import ScriptedEnvironment

OPENAI_FIELDS = ("model", "prompt", "max_tokens", "temperature", "top_p", "seed")
CONFIG = TrainConfig(**{**PRESETS["mini"], "max_turns": 3, "max_new": 70, "max_tokens": 900})
QUESTIONS = ["cfddea", "b?a c afcadadcd", "Who?"]  # sampled greedily, the agent asks about some


class Server:
    """Serves greedy completions of a model, like vLLM or like a server that knows only OpenAI's fields."""

    def __init__(self, folder: Path, *, vllm: bool) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.vllm = vllm
        self.requests: list[dict] = []
        self.keys: list[str | None] = []
        self.lock = threading.Lock()
        self.url = ""  # set by `serve`

    def reply(self, request: dict) -> tuple[int, dict]:
        unknown = [name for name in request if name not in OPENAI_FIELDS]
        if unknown and not self.vllm:
            return 400, {"error": {"message": f"Unrecognized request argument supplied: {unknown[0]}"}}
        tokenizer, tokens = tiny.tokenizer(), request["prompt"]
        new: list[int] = []
        text, finish, fresh, cache = "", "length", tokens, None
        while len(new) < request["max_tokens"] and finish == "length":
            with torch.inference_mode():
                seen = self.model(torch.tensor([fresh]), past_key_values=cache, use_cache=True)
            new.append(int(seen.logits[0, -1].argmax()))
            fresh, cache = new[-1:], seen.past_key_values
            text = tokenizer.decode(new, skip_special_tokens=request.get("skip_special_tokens", True))
            finish = "stop" if new[-1] == tokenizer.eos_token_id else "length"
        choice = {"index": 0, "text": text, "finish_reason": finish}
        if request.get("return_token_ids"):
            choice["token_ids"] = new
        return 200, {
            "choices": [choice],
            "usage": {"prompt_tokens": len(tokens), "completion_tokens": len(new)},
        }


def serve(folder: Path, *, vllm: bool) -> Iterator[Server]:
    server = Server(folder, vllm=vllm)

    class Handler(JsonHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(200, {"data": [{"id": "tiny"}]})

        def do_POST(self) -> None:
            request = self.body()
            with server.lock:
                server.requests.append(request)
                server.keys.append(self.headers.get("Authorization"))
                status, body = 404, {"error": {"message": "no such model"}}
                if self.path == "/v1/completions" and request["model"] == "tiny":
                    status, body = server.reply(request)
            self.answer(status, body)

    with serving(Handler) as server.url:
        yield server


@pytest.fixture(scope="module")
def vllm(asking_agent) -> Iterator[Server]:
    yield from serve(asking_agent, vllm=True)


@pytest.fixture(scope="module")
def plain(asking_agent) -> Iterator[Server]:
    yield from serve(asking_agent, vllm=False)


def spec_of(server: Server, folder: Path, config: TrainConfig = CONFIG) -> AgentSpec:
    """The agent that the server serves, with the tokenizer in a folder."""
    return AgentSpec(f"tiny@{server.url}", config, start="", tokenizer=folder)


def play_games(spec: AgentSpec) -> list[Trajectory]:
    """Play one greedy game of each question, all concurrently."""

    async def one_game(agent: Agent, text: str) -> Trajectory:
        question, environment = Question(text, "a", text, ("x",)), ScriptedEnvironment(["cab.", "dab."])
        generate = partial(agent.engine.generate, temperature=0.0)
        return await play(question, generate, environment.ask, agent.codec, agent.game, seed="seed")

    async def all_games() -> list[Trajectory]:
        agent = open_agent(spec, torch.device("cpu"))
        return await asyncio.gather(*(one_game(agent, text) for text in QUESTIONS))

    return asyncio.run(all_games())


@pytest.mark.parametrize("kind", ["vllm", "plain"])
def test_an_agent_behind_an_endpoint_plays_the_games_of_the_local_agent(kind, asking_agent, request):
    server = request.getfixturevalue(kind)
    local = play_games(AgentSpec(asking_agent, CONFIG, start=""))
    remote = play_games(spec_of(server, asking_agent))
    assert [game.tokens for game in remote] == [game.tokens for game in local]
    assert [dialogue_text(game) for game in remote] == [dialogue_text(game) for game in local]
    assert [game.stop for game in remote] == [game.stop for game in local]
    assert {turn.reply for game in local for turn in game.turns} != {None}, "no game asked anything"


def test_the_environments_key_is_not_sent_to_the_agents_endpoint(vllm, asking_agent, monkeypatch):
    async def one_turn() -> None:
        agent = open_agent(spec_of(vllm, asking_agent), torch.device("cpu"))
        await agent.engine.generate([1, 2, 3], max_new=2, seed="s", temperature=0.0)

    monkeypatch.setenv("OPENAI_API_KEY", "sk-environment-0123456789")
    asyncio.run(one_turn())
    assert vllm.keys[-1] is None
    monkeypatch.setenv(KEY, "sk-agent-0123456789")
    asyncio.run(one_turn())
    assert vllm.keys[-1] == "Bearer sk-agent-0123456789"


def test_an_endpoint_without_the_model_is_a_fatal_error(vllm, asking_agent):
    wrong = replace(spec_of(vllm, asking_agent), path=f"other@{vllm.url}")
    with pytest.raises(FatalEnvError, match=r"other at http://127.0.0.1:.* cannot be used: .*no such model"):
        asyncio.run(check_endpoint(wrong))
    with pytest.raises(FatalEnvError, match=r"the agent other@http.* cannot be used"):
        play_games(wrong)


CODEC = Codec(tiny.tokenizer(), INSTRUCTIONS["short"])


def generate(provider: Provider, tokens: list[int], **settings) -> Completion:
    """One turn of an agent behind a scripted endpoint."""

    async def one_turn() -> Completion:
        agent = RemoteEngine("tiny", "https://llm.test/v1", CODEC, transport=httpx.MockTransport(provider))
        return await agent.generate(tokens, **settings)

    return asyncio.run(one_turn())


def completed(text: str, *, finish: str, token_ids: list[int] | None = None) -> httpx.Response:
    ids = {} if token_ids is None else {"token_ids": token_ids}
    return httpx.Response(200, json={"choices": [{"text": text, "finish_reason": finish, **ids}]})


def test_another_end_token_of_the_model_is_not_part_of_the_turn():
    """A server stops at all of the generation config: behind Qwen3's second one came the first."""
    other = next(iter(special_ids(CODEC.tokenizer) - CODEC.stop_ids))
    ended = generate(Provider(completed("x", finish="stop", token_ids=[5, other])), [5], max_new=9, seed="0")
    assert ended.tokens == [5, CODEC.turn_end] and ended.finished
    cut = generate(Provider(completed("x", finish="length", token_ids=[5, other])), [5], max_new=2, seed="0")
    assert cut.tokens == [5, other] and not cut.finished


def test_a_request_has_prompt_limit_temperature_seed_and_stop_tokens():
    provider = Provider(completed("x", finish="stop"))
    for seed in ("7/1", "7/1", "7/2"):
        generate(provider, [5, 6], max_new=11, seed=seed, temperature=0.75)
    first, second, third = provider.requests
    assert first == second and first["seed"] != third["seed"]
    assert first["seed"] == 3_553_817_977  # in every process
    assert (first["prompt"], first["max_tokens"], first["temperature"]) == ([5, 6], 11, 0.75)
    # Not those of the server, which come from the model's generation_config.json.
    assert (first["top_p"], first["top_k"]) == (1.0, -1)
    assert (first["min_p"], first["repetition_penalty"]) == (0.0, 1.0)
    generate(provider, [5, 6], max_new=11, seed="7/1", temperature=0.75, top_p=0.8)
    assert provider.requests[-1]["top_p"] == 0.8
    assert first["stop_token_ids"] == [CODEC.turn_end] and first["skip_special_tokens"] is False


@pytest.mark.parametrize("as_ids", [True, False])
@pytest.mark.parametrize(
    ("text", "finish", "expected", "finished"),
    [
        ("ab", "length", "ab", False),  # cut by the limit: no end token is added
        ("ab", "stop", "ab<|im_end|>", True),  # the server left the end token out
        ("ab<|im_end|>", "stop", "ab<|im_end|>", True),  # the server returned it
        ("", "stop", "<|im_end|>", True),
    ],
)
def test_a_turn_ends_where_a_local_one_ends(as_ids, text, finish, expected, finished):
    def tokens_of(written: str) -> list[int]:
        return tiny.tokenizer()(written, add_special_tokens=False)["input_ids"]

    ids = tokens_of(text) if as_ids else None
    response = completed("token ids take precedence" if ids else text, finish=finish, token_ids=ids)
    turn = generate(Provider(response), [5, 6], max_new=50, seed="0")
    assert turn == Completion(tokens_of(expected), [0.0] * len(tokens_of(expected)), finished)


def test_an_endpoint_that_does_not_answer_stops_the_run_resumably():
    busy = httpx.Response(503, headers={"retry-after-ms": "1"}, json={"error": {"message": "overloaded"}})
    with pytest.raises(Resumable, match=r"tiny@https://llm.test/v1 did not answer: .*HTTP 503: overloaded"):
        generate(Provider(busy), [5, 6], max_new=5, seed="0")


def test_errors_about_the_key_name_the_variable_of_the_agents_key(monkeypatch):
    """A bug: they named OPENAI_API_KEY, which is not sent to an agent."""
    refused = httpx.Response(401, json={"error": {"message": "wrong key"}})
    with pytest.raises(FatalEnvError, match=rf"HTTP 401: wrong key \(check {KEY}\)$"):
        generate(Provider(refused), [5, 6], max_new=5, seed="0")
    monkeypatch.setenv(KEY, "sk-agent 0123")
    with pytest.raises(UsageError, match=rf"^{KEY} contains a line break, a blank"):
        generate(Provider(refused), [5, 6], max_new=5, seed="0")


def test_an_agent_behind_an_endpoint_plays_the_game_of_the_run_of_its_tokenizer(tmp_path, asking_agent):
    run_folder = tmp_path / "run"
    tiny.save_agent(run_folder / "agent")
    write_yaml(replace(CONFIG, agent="the/start", max_turns=7), run_folder / "agent" / GAME_FILE)
    agent = resolve_agent("tiny@http://127.0.0.1:1/v1", kv_tokens=0, tokenizer=str(run_folder))
    assert (agent.config.max_turns, agent.start) == (7, "the/start")
    assert agent.tokenizer == run_folder / "agent"
    other = resolve_agent(f"{asking_agent}@http://127.0.0.1:1/v1", kv_tokens=0)
    assert (other.config.instruction, other.tokenizer) == ("paper", str(asking_agent))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("Qwen/Qwen3-4B@http://h:8000/v1", ("Qwen/Qwen3-4B", "http://h:8000/v1")),
        ("runs/mini-seed0", None),
        ("Qwen/Qwen3-4B", None),
        ("mini", None),
    ],
)
def test_a_remote_agent_is_recognised_by_its_url(name, parts):
    assert parse_remote(name) == parts


def test_infer_and_evaluate_accept_an_agent_behind_an_endpoint(
    plain, asking_agent, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    write_yaml(CONFIG, asking_agent / GAME_FILE)
    agent = ["--agent", f"tiny@{plain.url}", "--agent-tokenizer", str(asking_agent)]
    questions = ["--limit", "4", "--seed", "0"]
    lines = {
        infer.main: [*agent, "--question", "abc def?", "--json"],
        evaluate.main: [*agent, "--method", "prompt-r1", "--out", "scores", *questions],
    }
    try:
        for program, line in lines.items():
            monkeypatch.setattr("sys.argv", ["program", *line])
            with pytest.raises(SystemExit) as left:
                run_program(program)
            assert left.value.code == 0, capfd.readouterr().err
    finally:
        (asking_agent / GAME_FILE).unlink()
    printed = json.loads(capfd.readouterr().out.splitlines()[0])
    assert printed["agent"] == f"tiny@{plain.url}" and printed["turns"]
    assert len((tmp_path / "scores/predictions.jsonl").read_text().splitlines()) == 4
