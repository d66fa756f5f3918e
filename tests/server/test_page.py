"""The built-in page in a real browser, against a real server."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from safetensors.torch import load_file, save_file

from hotshoe.testing.models import IM_END, tiny_llama_config, write_tiny_checkpoint
from server.command import RunningServer, start_server

pytestmark = pytest.mark.slow

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
KEY = "let-me-in"
STREAMING = ".turn:last-child .assistant[data-state=streaming]"
LAST_TEXT = ".turn:last-child .assistant .text"
WATCH_LOG = f"""
    window.lengths = [];
    new MutationObserver(() => {{
        lengths.push(document.querySelector("{LAST_TEXT}").textContent.length);
    }}).observe(document.querySelector("#log"), {{ subtree: true, characterData: true }});
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium; without one these tests are skipped."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser found; looked for {', '.join(BROWSERS)}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=BROWSER_FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with a tiny model that goes on for many seconds unless it is stopped."""
    config = tiny_llama_config(max_position_embeddings=16384)
    path = write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "long", config)
    weights = load_file(path / "model.safetensors")
    # some other logit is always above zero, so greedy text never ends
    weights["lm_head.weight"][IM_END] = 0
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with start_server(str(path), "--cache.num-blocks", "2048") as running:
        yield running


@pytest.fixture
def complaints() -> list[str]:
    """Console errors that a test expects, as patterns."""
    return []


@pytest.fixture
def page(browser: Browser, server: RunningServer, complaints: list[str]) -> Iterator[Page]:
    """The page, connected; afterwards, nothing but this server was asked, and nobody complained."""
    with _open(browser, server, complaints) as page:
        expect(page.locator("#status")).to_have_attribute("data-state", "ok")
        expect(page.locator("#model")).to_be_enabled()
        yield page


class _open:
    """Opens the page, and checks when it closes what it did behind its user's back."""

    def __init__(self, browser: Browser, server: RunningServer, expected: list[str]) -> None:
        self._expected = expected
        self._url = server.url
        self._complaints: list[str] = []
        self._urls: list[str] = []
        self.page = browser.new_page(viewport={"width": 1440, "height": 900})

    def __enter__(self) -> Page:
        page = self.page
        page.on("console", lambda message: self._complaints.append(message.text))
        page.on("pageerror", lambda error: self._complaints.append(str(error)))
        page.on("request", lambda request: self._urls.append(request.url))
        page.goto(self._url)
        return page

    def __exit__(self, *exception: object) -> None:
        self.page.close()
        if exception[0] is None:
            unexpected = [
                text
                for text in self._complaints
                if not any(re.search(pattern, text) for pattern in self._expected)
            ]
            assert unexpected == []
            assert [url for url in self._urls if not url.startswith(self._url + "/")] == []


# how much each unrequested move took, 0 to 1 of the window, and the part of the page it was in
LAYOUT_SHIFTS = """() => new Promise((resolve) => {
    const place = ({ node }) => node?.parentElement?.closest("[id]")?.id ?? "log";
    new PerformanceObserver((list) => resolve(list.getEntries().flatMap(
        (one) => one.sources.map((source) => [one.value / one.sources.length, place(source)])
    ))).observe({ type: "layout-shift", buffered: true });
    setTimeout(() => resolve([]), 1000);
})"""


def ask(page: Page, question: str, **parameters: object) -> dict[str, Any]:
    """Fill in the parameters, send a question with Enter; returns the request's body."""
    for name, value in parameters.items():
        page.fill(f"#settings [name={name}]", str(value))
    page.fill("#prompt", question)
    with page.expect_request("**/v1/chat/completions") as sent:
        page.press("#prompt", "Enter")
    body = sent.value.post_data_json
    assert isinstance(body, dict)
    return body


def wait_for_answer(page: Page) -> str:
    """The text of the last answer, when it is complete."""
    expect(page.locator("#send")).to_be_visible(timeout=60_000)
    return page.locator(LAST_TEXT).text_content() or ""


def stat(page: Page, name: str) -> str:
    """One of the figures below the last answer."""
    return page.locator(f".turn:last-child [data-stat={name}]").text_content() or ""


def num_points(page: Page, chart: str) -> int:
    """How many points a chart shows."""
    return int(page.locator(f"#chart-{chart}").get_attribute("data-points") or "")


# -- the conversation ---------------------------------------------------------------------------


def test_answer_streams_in_and_equals_the_text_of_the_api(
    page: Page, server: RunningServer
) -> None:
    page.evaluate(WATCH_LOG)
    body = ask(page, "Tell me a story.", temperature=0, max_tokens=1000)
    answer = wait_for_answer(page)

    lengths = page.evaluate("lengths")
    assert lengths == sorted(lengths)
    # a slow browser shows several pieces at once
    assert any(0 < length < len(answer) for length in lengths)
    body |= {"stream": False}
    del body["stream_options"]
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer == reply["choices"][0]["message"]["content"]
    assert stat(page, "tokens") == f"{reply['usage']['completion_tokens']} tokens"
    assert stat(page, "prompt").startswith(f"{reply['usage']['prompt_tokens']} prompt")
    assert stat(page, "finish") == reply["choices"][0]["finish_reason"]
    assert re.fullmatch(r"TTFT [\d.]+ ms", stat(page, "ttft"))
    assert re.fullmatch(r"[\d.]+ tok/s", stat(page, "rate"))


def test_every_parameter_is_sent_and_an_empty_field_is_not(page: Page) -> None:
    model = page.input_value("#model")
    common = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "n": 1,
    }
    assert ask(page, "One.", max_tokens=2) == common | {
        "messages": [{"role": "user", "content": "One."}],
        "max_tokens": 2,
    }
    first_answer = wait_for_answer(page)

    page.fill("#system", "Be brief.")
    numbers = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": 1234567890123,
        "max_tokens": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.25,
        "repetition_penalty": 1.1,
    }
    body = ask(page, "Two.", **numbers, stop="END\n\\n\\n")
    assert body == common | numbers | {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "One."},
            {"role": "assistant", "content": first_answer},
            {"role": "user", "content": "Two."},
        ],
        "stop": ["END", "\n\n"],
    }
    wait_for_answer(page)
    expect(page.locator(".error")).to_have_count(0)


def test_stop_button_ends_the_answer_here_and_in_the_engine(
    page: Page, server: RunningServer
) -> None:
    ask(page, "Go on for ever.", temperature=0)
    page.wait_for_selector(f"{STREAMING} .text:not(:empty)")
    page.click("#stop")
    expect(page.locator(".turn:last-child [data-stat=finish]")).to_have_text("stopped by you")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#prompt")).to_be_focused()
    expect(page.locator("#tile-running")).to_have_text("0")
    length = len(page.locator(LAST_TEXT).text_content() or "")

    ask(page, "Again.")
    page.wait_for_selector(f"{STREAMING} .text:not(:empty)")
    page.keyboard.press("Escape")
    expect(page.locator(".turn:last-child [data-stat=finish]")).to_have_text("stopped by you")
    assert len(page.locator(".turn:first-child .assistant .text").text_content() or "") == length
    expect(page.locator("#tile-running")).to_have_text("0")


def test_regenerate_replaces_the_last_answer_and_clear_empties_the_conversation(page: Page) -> None:
    first = ask(page, "Say something.", temperature=1, max_tokens=20, seed=1)
    answer = wait_for_answer(page)
    page.fill("[name=seed]", "2")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.click("#regenerate")
    assert sent.value.post_data_json == first | {"seed": 2}
    expect(page.locator(LAST_TEXT)).not_to_have_text(answer)
    assert wait_for_answer(page) != answer
    expect(page.locator(".turn")).to_have_count(1)

    page.click("#clear")
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.get_by_text("Ask the model something")).to_be_visible()


def test_shift_enter_makes_a_new_line(page: Page) -> None:
    page.fill("#prompt", "one")
    page.press("#prompt", "Shift+Enter")
    page.keyboard.type("two")
    assert page.input_value("#prompt") == "one\ntwo"
    expect(page.locator(".turn")).to_have_count(0)


def test_text_is_shown_as_text_never_as_markup(page: Page) -> None:
    markup = "<img src=x onerror=alert(1)><b>bold</b>"
    ask(page, markup, max_tokens=1)
    wait_for_answer(page)
    expect(page.locator(".turn .user")).to_have_text(markup)
    expect(page.locator(".turn img, .turn b")).to_have_count(0)


# -- errors -------------------------------------------------------------------------------------


def test_refusal_is_shown_in_the_words_of_the_api_and_the_chat_goes_on(
    page: Page, server: RunningServer, complaints: list[str]
) -> None:
    complaints.append("the server responded with a status of 400")
    body = ask(page, "Hello.", temperature=-1, max_tokens=2)
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert reply.status_code == 400
    error = page.get_by_role("alert")
    expect(error.locator(".error-message")).to_have_text(reply.json()["error"]["message"])
    expect(error.locator(".error-details")).to_contain_text("HTTP 400")
    expect(error.locator(".error-details")).to_contain_text("param temperature")

    body = ask(page, "Hello again.", temperature=0)
    assert body["messages"] == [{"role": "user", "content": "Hello again."}]
    wait_for_answer(page)
    expect(page.locator(".turn:last-child .error")).to_have_count(0)


def test_half_a_number_is_not_sent(page: Page) -> None:
    page.focus("[name=top_p]")
    page.keyboard.type("0.5e")
    page.fill("#prompt", "Hello.")
    page.press("#prompt", "Enter")
    field = "document.querySelector('[name=top_p]')"
    assert page.evaluate(f"{field}.validationMessage") == "Top p: not a number"
    expect(page.locator(".turn")).to_have_count(0)
    assert page.input_value("#prompt") == "Hello."


def test_lost_server_is_told_and_found_again(page: Page, complaints: list[str]) -> None:
    complaints.append("Failed to load resource")
    page.context.set_offline(True)
    expect(page.locator("#status-text")).to_have_text("The server can't be reached")
    ask(page, "Anybody there?")
    expect(page.get_by_role("alert")).to_contain_text("The server can't be reached")
    page.context.set_offline(False)
    expect(page.locator("#status")).to_have_attribute("data-state", "ok")


def test_page_asks_for_the_api_key_and_keeps_it_for_the_tab(
    browser: Browser, tiny_path: Path
) -> None:
    key_flags = ["--server.api-keys", KEY]
    with (
        start_server(str(tiny_path), *key_flags) as guarded,
        _open(browser, guarded, ["the server responded with a status of 401"]) as page,
    ):
        expect(page.locator("#key-form")).to_be_visible()
        expect(page.locator("#status-text")).to_have_text("Needs a key")
        page.fill("#key", "wrong")
        page.click("#key-form button")
        expect(page.locator("#key-error")).to_be_visible()
        page.fill("#key", KEY)
        page.press("#key", "Enter")
        expect(page.locator("#status")).to_have_attribute("data-state", "ok")
        expect(page.locator("#key-form")).to_be_hidden()
        expect(page.locator("#model")).to_be_enabled()
        ask(page, "Hello.", max_tokens=3)
        wait_for_answer(page)
        expect(page.locator(".error")).to_have_count(0)

        page.reload()
        expect(page.locator("#status")).to_have_attribute("data-state", "ok")
        page.click("#forget-key")
        expect(page.locator("#key-form")).to_be_visible()
        assert page.evaluate("sessionStorage.length + localStorage.length") == 0


# -- the engine ---------------------------------------------------------------------------------


def test_charts_move_with_the_engine(page: Page) -> None:
    charts = ("requests", "steps", "kv", "ttft", "gaps")
    before = {chart: num_points(page, chart) for chart in charts}
    drawn = page.locator("#chart-steps .mark").first.get_attribute("d")
    ask(page, "Count.", temperature=0)
    expect(page.locator("#tile-running")).to_have_text("1")
    expect(page.locator("#tile-kv")).not_to_have_text("0%")
    expect(page.locator("#tile-rate")).not_to_have_text("0")
    page.wait_for_function(
        "() => +document.querySelector('#chart-steps').dataset.points === 120"
        " && +document.querySelector('#chart-gaps').dataset.points === 240"
    )
    page.click("#stop")
    expect(page.locator("#tile-running")).to_have_text("0")

    after = {chart: num_points(page, chart) for chart in charts}
    assert after["ttft"] > before["ttft"]
    assert after["requests"] > before["requests"]
    assert after["kv"] > before["kv"]
    assert page.locator("#chart-steps .mark").first.get_attribute("d") != drawn
    label = page.locator("#chart-steps svg").get_attribute("aria-label")
    assert label == "Tokens per step: decode 1, prefill 0"


def test_pointer_reads_a_chart(page: Page) -> None:
    ask(page, "Count.", temperature=0, max_tokens=5)
    wait_for_answer(page)
    page.wait_for_function("() => +document.querySelector('#chart-steps').dataset.points > 4")
    caption = page.locator("#chart-steps .axis span").first
    expect(caption).to_have_text("last 120 steps")
    page.hover("#chart-steps svg")
    expect(caption).to_have_text(re.compile(r"^step \d+ · [\d.]+ m?s$"))
    page.hover("#prompt")
    expect(caption).to_have_text("last 120 steps")


def test_assembled_plugins_are_listed_with_their_distributions(
    page: Page, server: RunningServer
) -> None:
    components = httpx.get(f"{server.url}/live").json()["components"]
    rows = page.locator("#plugins tr")
    expect(rows).to_have_count(len(components))
    shown = {
        row.locator("th").text_content(): [cell.text_content() for cell in row.locator("td").all()]
        for row in rows.all()
    }
    listed = {place: f"{name} ({source})" for place, (name, source) in shown.items()}
    assert listed == components
    assert shown["scheduler"][0] == "fcfs"


# -- the page itself ----------------------------------------------------------------------------


@pytest.mark.parametrize("width", [360, 768, 1024, 1440, 1920])
def test_nothing_is_wider_than_the_window(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 740})
    if width == 1440:
        ask(page, "x" * 400, max_tokens=3)
        wait_for_answer(page)
    for tab in page.get_by_role("tab").all():
        tab.click()
        assert page.evaluate("document.documentElement.scrollWidth") == width
        for panel in page.locator(".panel:visible").all():
            assert panel.evaluate("one => one.scrollWidth <= one.clientWidth")


def test_views_of_a_small_screen_are_reached_by_keyboard(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    expect(page.locator("#chat")).to_be_visible()
    expect(page.locator("#engine")).to_be_hidden()
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#settings")).to_be_visible()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#engine")).to_be_visible()
    expect(page.locator("#chart-kv svg")).to_be_visible()
    expect(page.locator("#chat")).to_be_hidden()


def test_nothing_jumps_around_an_answer_that_streams(
    browser: Browser, server: RunningServer
) -> None:
    with _open(browser, server, []) as page:
        expect(page.locator("#plugins tr")).not_to_have_count(0)
        ask(page, "Go on.", temperature=0, max_tokens=400)
        wait_for_answer(page)
        shifts = page.evaluate(LAYOUT_SHIFTS)
    assert sum(value for value, where in shifts if where != "log") < 0.005, shifts


def test_page_can_be_turned_off(tiny_path: Path) -> None:
    with start_server(str(tiny_path), "--no-server.page") as running:
        assert httpx.get(running.url).status_code == 404
        assert httpx.get(f"{running.url}/v1/models").status_code == 200


def test_every_field_has_a_label(page: Page) -> None:
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, textarea, select')]"
        ".filter((field) => !field.labels.length).map((field) => field.outerHTML)"
    )
    assert unnamed == []


def test_page_may_load_nothing_from_elsewhere(server: RunningServer) -> None:
    reply = httpx.get(server.url)
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert "://" not in reply.text


def test_files_are_revalidated_and_nothing_else_is_served(server: RunningServer) -> None:
    reply = httpx.get(f"{server.url}/assets/app.js")
    assert reply.headers["content-type"].startswith("text/javascript")
    tag = reply.headers["etag"]
    again = httpx.get(f"{server.url}/assets/app.js", headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert httpx.head(f"{server.url}/").status_code == 200
    for path in ("/assets/__init__.py", "/assets/..%2f__init__.py", "/assets/none.js"):
        assert httpx.get(server.url + path).status_code == 404
