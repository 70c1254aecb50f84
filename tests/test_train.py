"""What train.py makes of its settings, seen in what it writes: metrics, games, checkpoints, agents."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from prompt_r1.errors import FatalEnvError
from prompt_r1.storage.run_log import read_metrics
from tests import tiny

SMALL = [
    "--env",
    "mini",
    "--questions",
    "4",
    "--group-size",
    "4",
    "--mini-batch",
    "16",
    "--max-turns",
    "3",
    "--max-new",
    "80",
    "--max-tokens",
    "900",
    "--lr",
    "1e-3",
    "--steps",
    "1",
    "--device",
    "cpu",
]


@pytest.fixture(scope="module")
def babbler(tmp_path_factory) -> Path:
    """An agent of random weights: no game earns anything, and no two games are alike."""
    return tiny.save_agent(tmp_path_factory.mktemp("babbler"))


def train_run(folder: Path, agent: Path, *line: object) -> Path:
    """A run of train.py in this process: SMALL with other settings, without questions to validate or test on
    where none are given.
    """
    out = folder / "run"
    unasked = [part for name in ("--val-data", "--test-data") if name not in line for part in (name, "none")]
    train.main(["--agent", str(agent), "--out", str(out), *SMALL, *unasked, *map(str, line)])
    return out


def games_of(run: Path, step: int) -> list[dict]:
    rows = (run / f"trajectories/step-{step:06d}-rank0.jsonl").read_text().splitlines()
    return [json.loads(row) for row in rows]


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value for path in folder.glob("*.safetensors") for key, value in load_file(path).items()}


def rows_of(table: str) -> dict[str, list[str]]:
    """The numbers of a printed Markdown table, by method: n, errors, EM, F1, reward, format, turns."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("| ")
    ]
    return {cells[0]: cells[2:] for cells in lines}


def own_questions(folder: Path, *texts: str, copies: int = 1) -> Path:
    """A file of questions; copies of one have ids of their own."""
    rows = [
        {"id": f"{text} {copy}", "question": text, "answer": "Anna"}
        for copy in range(copies)
        for text in texts
    ]
    path = folder / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_games_are_played_with_the_weights_of_the_step_before(asking_agent, tmp_path):
    """What the engine has cached was computed with other weights once there was an update: kept, its
    log-probabilities would not be those of the policy. The KL is to the frozen start, so it grows; with one
    optimiser step a training step the advantages cancel, and it alone is left of the loss.
    """
    run = train_run(tmp_path, asking_agent, "--kl-coef", "0.25", "--steps", 3)
    first, second, third = read_metrics(run)[1:]
    for line in (first, second, third):
        assert line["grad_norm"] > 0.01 and line["engine/logprob_gap"] < 1e-4
        assert line["loss"] == pytest.approx(0.25 * line["kl"], rel=1e-3, abs=1e-6)
    assert first["kl"] < 1e-6 and 1e-4 < second["kl"] < third["kl"]


def test_every_game_has_a_random_seed_of_its_own(babbler, tmp_path):
    """Two steps, each with the same question twice, and a run with another seed: 24 different games."""
    data = own_questions(tmp_path, "Who?")
    line = ["--data", data, "--questions", 2, "--lr", "1e-9", "--max-new", 12]
    first = train_run(tmp_path / "0", babbler, *line, "--steps", 2)
    second = train_run(tmp_path / "1", babbler, *line, "--seed", 1)
    games = [*games_of(first, 1), *games_of(first, 2), *games_of(second, 1)]
    assert len({game["turns"][0]["text"] for game in games}) == len(games) == 24


def test_validation_and_the_table_at_the_end_are_greedy(asking_agent, tmp_path, capsys):
    """The same question under ten ids is the same game ten times; in training it is not."""
    data = own_questions(tmp_path, "Who is the director of Silver River?", copies=10)
    line = ["--data", data, "--val-data", data, "--test-data", data, "--val-every", 1]
    run = train_run(tmp_path, asking_agent, *line, "--temperature", "0.7")
    assert len({len(game["turns"]) for game in games_of(run, 1)}) > 1
    for line in read_metrics(run):
        assert line["val/n"] == 10 and line["val/turns"].is_integer() and line["val/format"] in (0, 1)
    rows = rows_of(capsys.readouterr().out)
    for name in ("untrained agent", "trained agent"):
        assert rows[name][-2] in ("0.000", "1.000") and rows[name][-1].endswith(".000")


def test_the_table_at_the_end_compares_the_untrained_with_the_best_agent(asking_agent, tmp_path, capsys):
    """Tested on the questions of the validation, each agent's row is a line of the run again."""
    data = own_questions(tmp_path, *"abcdefghijkl")
    run = train_run(
        tmp_path, asking_agent, "--val-data", data, "--test-data", data, "--val-every", 2, "--steps", 3
    )
    rows = rows_of(capsys.readouterr().out)
    validated = {line["step"]: line for line in read_metrics(run) if "val/em" in line}
    best = json.loads((run / "agent/training.json").read_text())["step"]
    assert best > 0 and validated[best]["val/reward"] > validated[0]["val/reward"] + 0.01
    for name, step in [("untrained agent", 0), ("trained agent", best)]:
        expected = [validated[step][f"val/{key}"] for key in ("em", "f1", "reward", "format", "turns")]
        assert list(map(float, rows[name][2:])) == pytest.approx(expected, abs=6e-4), name


def test_the_last_step_is_validated_whatever_the_interval(babbler, tmp_path):
    run = train_run(
        tmp_path,
        babbler,
        "--val-data",
        "mini",
        "--val-limit",
        2,
        "--val-every",
        2,
        "--max-new",
        4,
        "--steps",
        3,
    )
    assert [line["step"] for line in read_metrics(run) if "val/em" in line] == [0, 2, 3]


def test_tokens_are_averaged_as_the_loss_says(asking_agent, tmp_path):
    """In a first optimiser step every ratio is 1 and the KL is 0: the loss is minus the mean advantage, over
    games or over tokens. The advantages of a group cancel only over games.
    """
    for loss in ("sequence-mean", "token-mean"):
        run = train_run(tmp_path / loss, asking_agent, "--loss", loss)
        games = games_of(run, 1)
        weights = [game["sampled"].count("1") if loss == "token-mean" else 1 for game in games]
        pairs = zip(games, weights, strict=True)
        expected = -sum(game["advantage"] * weight for game, weight in pairs) / sum(weights)
        assert (abs(expected) > 1e-3) == (loss == "token-mean")
        assert read_metrics(run)[1]["loss"] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_first_step_is_adamws_with_the_settings_of_the_command_line(asking_agent, tmp_path):
    """w ← w (1 - lr · decay) - lr · m / (√v + ε), of the clipped gradient g: m = g and v = g² after the
    correction of their bias.
    """
    lr, beta1, beta2, decay, clip = 2e-3, 0.8, 0.95, 0.3, 0.01
    run = train_run(
        tmp_path,
        asking_agent,
        "--lr",
        lr,
        "--beta1",
        beta1,
        "--beta2",
        beta2,
        "--weight-decay",
        decay,
        "--grad-clip",
        clip,
    )
    assert read_metrics(run)[1]["grad_norm"] > 2 * clip
    before, after = weights_in(asking_agent), weights_in(run / "agent")
    saved = weights_in(run / "checkpoints/step-000001")
    first, second = (
        {name: saved[f"adam/model.{name}/{moment}"] for name in before}
        for moment in ("exp_avg", "exp_avg_sq")
    )
    norm = torch.cat([moment.flatten() for moment in first.values()]).norm().item()
    assert norm == pytest.approx((1 - beta1) * clip, rel=1e-3)
    for name, old in before.items():
        m, v = first[name] / (1 - beta1), second[name] / (1 - beta2)
        assert torch.allclose(m**2, v, rtol=1e-3, atol=1e-12), name
        expected = old * (1 - lr * decay) - lr * m / (v.sqrt() + 1e-8)
        assert torch.allclose(after[name], expected, atol=1e-5), name


class Refusing(BaseHTTPRequestHandler):
    """An endpoint that lists its model, and then refuses every call for good."""

    def do_GET(self) -> None:
        self.respond(200, {"data": [{"id": "mini"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.respond(401, {"error": {"message": "this key may not ask"}})

    def respond(self, status: int, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def refusing():
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"mini@http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def test_an_environment_that_refuses_the_first_step_leaves_no_checkpoint(asking_agent, refusing, tmp_path):
    """The user has a key to mend: nothing was trained that could go on."""
    with pytest.raises(FatalEnvError, match="may not ask"):
        train_run(tmp_path, asking_agent, "--env", refusing)
    assert not list((tmp_path / "run/checkpoints").glob("*"))
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [0]
