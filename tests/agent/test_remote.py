"""An agent behind a completions endpoint plays the games that it plays in this process, token for token."""

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

import evaluate
import infer
from prompt_r1.agent import agent
from prompt_r1.agent.agent import open_agent
from prompt_r1.agent.names import AgentSpec, resolve_agent
from prompt_r1.agent.remote import KEY, RemoteEngine, parse_remote
from prompt_r1.baselines.games import spoken
from prompt_r1.cli.command_line import run
from prompt_r1.config.train import PRESETS, TrainConfig
from prompt_r1.config.yaml_files import GAME_FILE, write_yaml
from prompt_r1.errors import FatalEnvError, Resumable
from prompt_r1.protocol import ACTION_ENDS, INSTRUCTIONS, Codec
from prompt_r1.types import Completion, Question, Trajectory
from tests import tiny
from tests.providers import Provider
from tests.tiny import ScriptedEnvironment

VLLM_FIELDS = ("return_token_ids", "stop_token_ids", "skip_special_tokens")
GAME = TrainConfig(**{**PRESETS["mini"], "max_turns": 3, "max_new": 70, "max_tokens": 900})
QUESTIONS = ["cfddea", "b?a c afcadadcd", "Who?"]  # the agent asks about some of them, greedily


class Server:
    """Serves a model's greedy completions in the manner of vLLM, or of a server that knows less."""

    def __init__(self, folder: Path, *, vllm: bool) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.vllm = vllm
        self.requests: list[dict] = []
        self.keys: list[str | None] = []
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"server_of": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def reply(self, request: dict) -> tuple[int, dict]:
        unknown = [name for name in VLLM_FIELDS if name in request]
        if unknown and not self.vllm:
            return 400, {"error": {"message": f"Unrecognized request argument supplied: {unknown[0]}"}}
        tokenizer, prompt = tiny.tokenizer(), request["prompt"]
        tokens = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
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


class _Handler(BaseHTTPRequestHandler):
    server_of: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server_of.lock:
            self.server_of.requests.append(request)
            self.server_of.keys.append(self.headers.get("Authorization"))
            known = self.path == "/v1/completions" and request["model"] == "tiny"
            status, body = (
                self.server_of.reply(request) if known else (404, {"error": {"message": "no such model"}})
            )
        self.answer(status, body)

    def answer(self, status: int, body: dict) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def serve(folder: Path, *, vllm: bool) -> Iterator[Server]:
    made = Server(folder, vllm=vllm)
    yield made
    made.http.shutdown()
    made.http.server_close()


@pytest.fixture(scope="module")
def vllm(asking_agent) -> Iterator[Server]:
    yield from serve(asking_agent, vllm=True)


@pytest.fixture(scope="module")
def plain(asking_agent) -> Iterator[Server]:
    yield from serve(asking_agent, vllm=False)


def known(server: Server, folder: Path, game: TrainConfig = GAME, prompts: str = "tokens") -> AgentSpec:
    return AgentSpec(f"tiny@{server.url}", game, start="", tokenizer=folder, prompts=prompts)


def games(agent: AgentSpec, game: TrainConfig) -> list[Trajectory]:
    """Greedy games, side by side."""

    async def all_games() -> list[Trajectory]:
        player = open_agent(agent, torch.device("cpu"))
        play = partial(player.play, seed="seed", config=game, temperature=0.0)
        asked = [Question(text, "a", text, ("x",)) for text in QUESTIONS]
        try:
            return await asyncio.gather(
                *(play(question, environment=ScriptedEnvironment(["cab.", "dab."])) for question in asked)
            )
        finally:
            await player.close()

    return asyncio.run(all_games())


@pytest.mark.parametrize(
    ("manner", "prompts", "stop_tags"),
    [("vllm", "tokens", True), ("plain", "text", False)],
)
def test_a_served_agent_plays_the_games_of_the_local_one(manner, prompts, stop_tags, asking_agent, request):
    server, game = request.getfixturevalue(manner), replace(GAME, stop_tags=stop_tags)
    local = games(AgentSpec(asking_agent, game, start=""), game)
    served = games(known(server, asking_agent, game, prompts), game)
    assert [game.tokens for game in served] == [game.tokens for game in local]
    assert [spoken(game) for game in served] == [spoken(game) for game in local]
    assert [game.stop for game in served] == [game.stop for game in local]
    assert isinstance(server.requests[-1]["prompt"], str if prompts == "text" else list)
    assert {turn.reply for game in local for turn in game.turns} != {None}, "no game asked anything"


def test_the_environments_key_is_not_sent_to_the_agents_endpoint(vllm, asking_agent, monkeypatch):
    def generate() -> str | None:
        async def one_turn() -> None:
            player = open_agent(known(vllm, asking_agent), torch.device("cpu"))
            await player.engine.generate([1, 2, 3], max_new=2, seed="s", temperature=0.0)
            await player.close()

        asyncio.run(one_turn())
        return vllm.keys[-1]

    monkeypatch.setenv("OPENAI_API_KEY", "sk-environment-0123456789")
    assert generate() is None
    monkeypatch.setenv(KEY, "sk-agent-0123456789")
    assert generate() == "Bearer sk-agent-0123456789"


def test_an_endpoint_without_the_model_is_told_in_one_sentence(vllm, asking_agent):
    wrong = replace(known(vllm, asking_agent), path=f"other@{vllm.url}")
    with pytest.raises(FatalEnvError, match=r"other at http://127.0.0.1:.* refuses to work: .*no such model"):
        asyncio.run(agent.check_endpoint(wrong))
    with pytest.raises(FatalEnvError, match=r"the agent other@http.* refuses to work"):
        games(wrong, GAME)


CODEC = Codec(tiny.tokenizer(), INSTRUCTIONS["short"])


def generate(provider: Provider, tokens: list[int], **settings) -> Completion:
    """One turn of an agent at a scripted endpoint."""

    async def one_turn() -> Completion:
        agent = RemoteEngine("tiny", "https://llm.test/v1", CODEC, transport=httpx.MockTransport(provider))
        try:
            return await agent.generate(tokens, **settings)
        finally:
            await agent.close()

    return asyncio.run(one_turn())


def completed(text: str, *, finish: str, token_ids: list[int] | None = None) -> httpx.Response:
    ids = {} if token_ids is None else {"token_ids": token_ids}
    return httpx.Response(200, json={"choices": [{"text": text, "finish_reason": finish, **ids}]})


def test_the_endpoint_is_asked_for_the_turn_that_the_game_wants():
    provider = Provider(completed("x", finish="stop"))
    for seed in ("7/1", "7/1", "7/2"):
        generate(provider, [5, 6], max_new=11, seed=seed, temperature=0.75)
    first, second, third = provider.requests
    assert first == second and first["seed"] != third["seed"]
    assert (first["prompt"], first["max_tokens"], first["temperature"]) == ([5, 6], 11, 0.75)
    assert first["stop_token_ids"] == [CODEC.turn_end] and first["skip_special_tokens"] is False


@pytest.mark.parametrize("as_ids", [True, False])
@pytest.mark.parametrize(
    ("text", "finish", "stop", "expected", "finished"),
    [
        ("ab", "length", (), "ab", False),  # cut by the limit: nothing closes it
        ("ab", "stop", (), "ab<|im_end|>", True),  # the server left the end token out
        ("ab<|im_end|>", "stop", (), "ab<|im_end|>", True),  # it did not
        ("", "stop", (), "<|im_end|>", True),
        ("a</answer>b", "length", ACTION_ENDS, "a</answer>", True),
        ("a</answer>", "stop", ACTION_ENDS, "a</answer>", True),
        ("a</interaction_prompt></answer>", "length", ACTION_ENDS, "a</interaction_prompt>", True),
        ("a</answe", "length", ACTION_ENDS, "a</answe", False),
        ("a</answer>b", "length", (), "a</answer>b", False),
    ],
)
def test_a_turn_ends_where_a_local_one_would(as_ids, text, finish, stop, expected, finished):
    def tokens_of(written: str) -> list[int]:
        return tiny.tokenizer()(written, add_special_tokens=False)["input_ids"]

    ids = tokens_of(text) if as_ids else None
    response = completed("ids go before" if ids else text, finish=finish, token_ids=ids)
    turn = generate(Provider(response), [5, 6], max_new=50, seed="0", stop=stop)
    assert turn == Completion(tokens_of(expected), [0.0] * len(tokens_of(expected)), finished)


def test_an_endpoint_that_does_not_answer_stops_the_run_so_that_it_can_be_resumed():
    busy = httpx.Response(503, headers={"retry-after-ms": "1"}, json={"error": {"message": "overloaded"}})
    with pytest.raises(Resumable, match=r"tiny@https://llm.test/v1 did not answer: .*HTTP 503: overloaded"):
        generate(Provider(busy), [5, 6], max_new=5, seed="0")


def test_an_agent_behind_an_endpoint_has_the_game_of_the_run_that_its_tokenizer_names(tmp_path, asking_agent):
    run_folder = tmp_path / "run"
    tiny.save_agent(run_folder / "agent")
    write_yaml(replace(GAME, agent="the/start", max_turns=7), run_folder / "agent" / GAME_FILE)
    agent = resolve_agent("tiny@http://127.0.0.1:1/v1", kv_tokens=0, tokenizer=str(run_folder))
    assert (agent.game.max_turns, agent.start, agent.tokenizer) == (7, "the/start", run_folder / "agent")
    other = resolve_agent(f"{asking_agent}@http://127.0.0.1:1/v1", kv_tokens=0)
    assert (other.game.instruction, other.tokenizer) == ("paper", str(asking_agent))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("Qwen/Qwen3-4B@http://h:8000/v1", ("Qwen/Qwen3-4B", "http://h:8000/v1")),
        ("runs/mini-seed0", None),
        ("Qwen/Qwen3-4B", None),
        ("mini", None),
    ],
)
def test_a_served_agent_is_known_by_its_url(name, parts):
    assert parse_remote(name) == parts


def test_infer_and_evaluate_take_an_agent_behind_an_endpoint(
    plain, asking_agent, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    write_yaml(GAME, asking_agent / GAME_FILE)
    agent = ["--agent", f"tiny@{plain.url}", "--agent-tokenizer", str(asking_agent)]
    try:
        for program, line in [
            (infer.main, [*agent, "--question", "abc def?", "--json"]),
            (
                evaluate.main,
                [*agent, "--method", "prompt-r1", "--limit", "4", "--out", "scores", "--seed", "0"],
            ),
        ]:
            monkeypatch.setattr("sys.argv", ["program", *line])
            with pytest.raises(SystemExit) as left:
                run(program)
            assert left.value.code == 0, capfd.readouterr().err
    finally:
        (asking_agent / GAME_FILE).unlink()
    told = json.loads(capfd.readouterr().out.splitlines()[0])
    assert told["agent"] == f"tiny@{plain.url}" and told["turns"]
    assert len((tmp_path / "scores/predictions.jsonl").read_text().splitlines()) == 4
