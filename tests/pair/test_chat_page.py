"""The page to chat with, in a real browser: `python -m pytest -m slow`. It is skipped without Chromium."""

import asyncio
import threading

import httpx
import pytest

from tests.support.browser import CHROMIUM, browser
from tests.support.echo_agent import EchoAgent, paid_environment
from tests.support.pair_server import chat_server, echo_pair, serving_pair
from tests.support.providers import environment_of

needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium")
ENDED = "document.querySelector('.answer, .failed')"
BLOCKS = "[...document.querySelectorAll('.block')].map((block) => block.innerText)"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


class Waiting:
    """An environment that replies when it may."""

    name = "waiting"

    def __init__(self) -> None:
        self.may_reply = threading.Event()

    async def ask(self, messages):
        while not self.may_reply.is_set():
            await asyncio.sleep(0.01)
        return messages[-1]["content"].upper()


def test_the_page_needs_no_key_but_the_name_of_this_machine():
    with serving_pair(chat_server(key="secret")) as url:
        page = httpx.get(url.removesuffix("/v1"))
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert "Content-Security-Policy\" content=\"default-src 'none'; " in page.text
        assert httpx.get(url.removesuffix("/v1"), headers={"Host": "evil.example"}).status_code == 400


@needs_chromium
@pytest.mark.slow
def test_the_page_shows_the_dialogue_while_it_is_played_and_then_answer_and_cost(chromium):
    """By keyboard alone. Texts of models are shown as texts, whatever HTML they have."""
    environment = Waiting()
    question = "<img src=x onerror=\"document.title='run'\"> & who?"
    with serving_pair(chat_server(echo_pair(environment=environment_of(environment)))) as url:
        chromium.open(url.removesuffix("v1"))
        chromium.wait_for("document.title === 'prompt-r1'")
        chromium.type(question)
        chromium.press("Enter")
        # The request of the agent is shown piece by piece.
        chromium.wait_for(f"{BLOCKS}.length === 2 && {BLOCKS}[1].endsWith({question[-4:]!r})")
        assert chromium.value(BLOCKS) == ["Agent thinks\nI ask.", f"Agent asks\n{question}"]
        assert not chromium.value(f"Boolean({ENDED})")
        environment.may_reply.set()
        chromium.wait_for(ENDED)
    blocks = chromium.value(BLOCKS)
    assert blocks[2:] == [f"Environment\n{question.upper()}", "Agent thinks\nNow I know."]
    assert chromium.value("document.querySelector('.answer').textContent") == question.upper()
    assert chromium.value("document.querySelector('.cost').textContent").startswith("1 call of the env")
    assert chromium.value("document.querySelectorAll('main img').length") == 0
    assert chromium.value("document.title") == "prompt-r1", "no text of a model was run"
    assert chromium.value("document.activeElement.id + document.activeElement.value") == "question"


@needs_chromium
@pytest.mark.slow
def test_the_page_asks_for_the_key_of_the_server_and_shows_what_a_question_cost(chromium):
    pair = echo_pair(environment=paid_environment())
    with serving_pair(chat_server(pair, key="secret")) as url:
        chromium.open(url.removesuffix("v1"))
        chromium.wait_for("!document.getElementById('key-row').hidden")
        chromium.type("Who?")
        chromium.press("Enter")
        chromium.wait_for(ENDED)
        assert chromium.value(f"{ENDED}.textContent") == "the request needs the server's key"
        chromium.wait_for("document.activeElement.id === 'key'")
        chromium.type("secret")
        chromium.press("Enter")
        chromium.wait_for("document.querySelector('.answer')")
        cost = chromium.value("document.querySelector('.cost').textContent")
        assert cost.startswith("1 call of the environment, 20 tokens, $0.020, ")
        assert chromium.value("document.title") == "prompt-r1"


@needs_chromium
@pytest.mark.slow
def test_escape_stops_the_game_on_the_server(chromium):
    agent = EchoAgent(seconds=600)
    with serving_pair(chat_server(echo_pair(agent))) as url:
        chromium.open(url.removesuffix("v1"))
        chromium.type("Who?")
        chromium.press("Enter")
        chromium.wait_for("!document.getElementById('stop').hidden")
        while not agent.running:
            chromium.value("0")
        chromium.press("Escape")
        chromium.wait_for(ENDED)
        assert chromium.value(f"{ENDED}.textContent") == "Stopped."
        while agent.running:  # The timeout of the test is the limit.
            chromium.value("0")


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_its_window_in_light_and_dark(chromium, width, scheme, tmp_path):
    """A long word is broken; the contrast of texts is at least 4.5, as WCAG AA asks."""
    question = "2: Who directed " + "Silent" * 40 + " and many other films of this invented world?"
    with serving_pair(chat_server()) as url:
        chromium.show(width=width, scheme=scheme)
        chromium.open(url.removesuffix("v1"))
        chromium.type(question)
        chromium.press("Enter")
        chromium.wait_for(ENDED)
        chromium.screenshot(tmp_path / f"chat-{width}-{scheme}.png")
        assert chromium.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        end = "document.querySelector('.cost').getBoundingClientRect().bottom"
        assert chromium.value(f"{end} < document.getElementById('form').getBoundingClientRect().top")
        for element in ("body", ".block b", ".think .text", ".answer", "button", "#question"):
            ink, paper = colours(chromium, element)
            assert contrast(ink, paper) >= 4.5, element
        is_dark = luminance(colours(chromium, "body")[1]) < 0.2
        assert is_dark == (scheme == "dark")


def colours(chromium, element: str) -> tuple[list[float], list[float]]:
    """The colour of an element's text, and of the background around it, as numbers from 0 to 255."""
    return chromium.value(f"""(() => {{
        const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
        const element = document.querySelector({element!r});
        let around = element;
        const isClear = () => numbers(getComputedStyle(around).backgroundColor)[3] === 0;
        while (isClear()) around = around.parentElement;
        return [numbers(getComputedStyle(element).color), numbers(getComputedStyle(around).backgroundColor)];
    }})()""")


def luminance(colour: list[float]) -> float:
    """The relative luminance of WCAG 2."""
    parts = [c / 255 for c in colour[:3]]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: list[float], other: list[float]) -> float:
    darker, lighter = sorted([luminance(one), luminance(other)])
    return (lighter + 0.05) / (darker + 0.05)
