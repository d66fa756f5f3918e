"""Takes the picture of the built-in page: a real server, the embedded model, a real browser.

Needs Chromium (Debian: ``apt-get install chromium``) and the development extras. From the
repository's root::

    .venv/bin/python docs/make_screenshot.py

It starts ``hotshoe serve`` on a free port, asks questions on the page while others ask too, so that
the charts have something to show, and writes ``docs/images/page.png``.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from playwright.sync_api import expect, sync_playwright

TARGET = Path(__file__).parent / "images" / "page.png"
COMMAND = str(Path(sys.executable).with_name("hotshoe"))
QUESTIONS = (
    "What makes a good photograph?",
    "What is a flash good for?",
    "Why do cameras have a hot shoe?",
)
OTHERS = (
    "Tell me about the sea.",
    "Name three planets and describe each.",
    "How does a bicycle stay upright?",
    "Write a letter to a friend.",
)
NUM_OTHER_ROUNDS = 3


@contextmanager
def running_server() -> Iterator[str]:
    """The URL of a server with the embedded model."""
    limits = ["--max-num-seqs", "4", "--max-model-len", "2048", "--cache.num-blocks", "256"]
    command = [COMMAND, "serve", "--server.port", "0", *limits]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        try:
            first = process.stdout.readline()
            url = re.search(r"https?://\S+", first)
            if url is None:
                raise SystemExit(f"error: the server didn't start; it said {first!r}")
            yield url[0]
        finally:
            process.terminate()
            process.wait()


def others(url: str, question: str) -> None:
    """Somebody else, who asks over the API."""
    body = {
        "model": "embedded",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 60,
        "seed": 1,
    }
    for _ in range(NUM_OTHER_ROUNDS):
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).raise_for_status()


def take_picture(url: str) -> None:
    """Ask, wait for the answers, take the picture while the last one streams."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        raise SystemExit("error: no chromium found; install it, such as by apt-get")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=found, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1440, "height": 1280})
        page.goto(url)
        expect(page.locator("#model")).to_be_enabled()
        page.fill("#system", "You are a friendly photographer. Answer in a few sentences.")
        for name, value in {"temperature": "0.6", "top_p": "0.9", "seed": "7"}.items():
            page.fill(f"[name={name}]", value)
        crowd = [threading.Thread(target=others, args=(url, one)) for one in OTHERS]
        page.fill("[name=max_tokens]", "120")
        for index, question in enumerate(QUESTIONS):
            page.fill("#prompt", question)
            page.press("#prompt", "Enter")
            if index == 0:
                for thread in crowd:
                    thread.start()
            if question != QUESTIONS[-1]:
                expect(page.locator("#send")).to_be_visible(timeout=300_000)
        page.wait_for_function(
            "least => document.querySelector('.turn:last-child .assistant .text')"
            ".textContent.length > least",
            arg=160,
            timeout=300_000,
        )
        page.screenshot(path=TARGET)
        for thread in crowd:
            thread.join()
        browser.close()


def main() -> None:
    """Take it."""
    TARGET.parent.mkdir(exist_ok=True)
    with running_server() as url:
        take_picture(url)


if __name__ == "__main__":
    main()
