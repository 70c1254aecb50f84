"""The chat page in Chromium: the answer, the live dialogue, cost, failures, phone and dark."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from prompt_r1.environments.specs import pool_of
from prompt_r1.errors import EnvError
from tests.serving.running import pair_of, serving
from tests.support.browser import PROGRAM, Browser
from tests.support.echo_agent import EchoAgent

HOSTILE = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>"
WAIT = """new Promise((resolve, reject) => {
  const begin = Date.now();
  const look = () => {
    if (%s) resolve(true);
    else if (Date.now() - begin > 15000) reject(new Error("late"));
    else setTimeout(look, 20);
  };
  look();
})"""


def test_the_page_loads_nothing_from_elsewhere() -> None:
    with serving(pair_of()) as url:
        page = httpx.get(url.removesuffix("/v1"))
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert not re.findall(r"https?://", page.text) and page.text.count("<script>") == 1


class Library:
    """Fails for questions with the word fail, and otherwise repeats the question."""

    async def ask(self, messages: Any) -> str:
        text = messages[-1]["content"]
        if "fail" in text:
            raise EnvError("HTTP 500 from the library")
        return text


@pytest.fixture(scope="module")
def pages() -> Iterator[tuple[Browser, str]]:
    if PROGRAM is None:
        pytest.skip("no Chromium")
    pair = pair_of(EchoAgent(seconds=0.05), pool_of(Library()), key="secret")
    with serving(pair) as url, Browser() as browser:
        yield browser, url.removesuffix("/v1")


def ask(browser: Browser, question: str) -> None:
    """Type a question, send it, and wait until it is answered."""
    browser.evaluate(f"document.querySelector('#question').value = {question!r}")
    browser.evaluate("document.querySelector('#form').requestSubmit()")
    browser.evaluate(WAIT % "document.querySelector('#stop').hidden")


def last(browser: Browser, selector: str) -> Any:
    """The text of an element of the newest question."""
    return browser.evaluate(f"document.querySelector('article:last-of-type {selector}').innerText")


@pytest.mark.slow
def test_a_visitor_asks_and_sees_answer_dialogue_and_cost(pages, tmp_path) -> None:
    browser, url = pages
    browser.visit(url)
    ask(browser, "Who is Anna?")
    assert "needs the server's key" in last(browser, ".answer")
    assert not browser.evaluate("document.querySelector('#key-line').hidden")
    browser.evaluate("document.querySelector('#key').value = 'secret'")

    ask(browser, "2: Who is Anna?")
    assert last(browser, ".answer") == "2: Who is Anna?"
    labels = browser.evaluate(
        "[...document.querySelectorAll('article:last-of-type .label')].map((node) => node.textContent)"
    )
    turn = ["agent thinks", "agent asks", "environment"]
    assert labels == [*turn, *turn, "agent thinks", "agent answers"]
    cost = last(browser, ".cost").replace("\xa0", " ")
    assert re.fullmatch(r"2 calls of the environment · \d+ agent tokens · \d\.\d s", cost)

    ask(browser, "Please fail")
    assert last(browser, ".answer") == "Failed: HTTP 500 from the library"
    ask(browser, HOSTILE)
    assert last(browser, ".answer") == HOSTILE and browser.evaluate("document.title") == "Prompt-R1"

    errors = [event for event in browser.events if event["method"] == "Runtime.exceptionThrown"]
    assert not errors

    for name, width, phone, dark in [("wide", 1200, False, False), ("phone", 390, True, True)]:
        browser.resize(width, 844, phone=phone, dark=dark)
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        ask(browser, f"3: Who is {name}?")
        assert browser.evaluate("document.querySelector('#pair').textContent") == pair_of().description
        box = "document.querySelector('article:last-of-type .answer').getBoundingClientRect()"
        form = "document.querySelector('form').getBoundingClientRect().top"
        assert browser.evaluate(f"0 <= {box}.top && {box}.bottom <= {form}"), "the answer is out of sight"
        top = browser.evaluate("document.querySelector('article:last-of-type').getBoundingClientRect().top")
        assert abs(top) < 2 or not phone, "the dialogue below the answer is out of sight"
        ask(browser, "3: " + "Who is it? " * 150)
        assert browser.evaluate(f"0 <= {box}.top && {box}.top < {form} - 100"), (
            "a long answer is out of sight"
        )
        typing = browser.evaluate("document.activeElement.id") == "question"
        assert typing != phone, "on a phone, the keyboard would cover the answer"
        browser.screenshot(tmp_path / f"{name}.png", full_page=True)


@pytest.mark.slow
def test_stop_cancels_the_game(pages) -> None:
    browser, url = pages
    browser.visit(url)
    browser.evaluate("document.querySelector('#key').value = 'secret'")
    browser.evaluate("document.querySelector('#question').value = '3: slow'")
    browser.evaluate("document.querySelector('#form').requestSubmit()")
    browser.evaluate(WAIT % "document.querySelector('.label')")
    browser.evaluate("document.querySelector('#stop').click()")
    browser.evaluate(WAIT % "document.querySelector('#stop').hidden")
    assert last(browser, ".answer") == "Stopped."
    browser.evaluate(WAIT % "fetch('/health')")
