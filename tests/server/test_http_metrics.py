"""What a real server tells a Prometheus that scrapes it."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hotshoe.server.http_metrics import REPORT_DELAY_S
from server.command import start_server

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(http: httpx.Client) -> Samples:
    response = http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    """The sum over samples that have these labels."""
    return sum(
        number
        for (key, found), number in samples.items()
        if key == name and labels.items() <= dict(found).items()
    )


def requests(samples: Samples, handler: str, status: str) -> float:
    return value(samples, "hotshoe:http_requests_total", handler=handler, status=status)


def eventually(check: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = monotonic() + timeout_s
    while not check():
        assert monotonic() < deadline
        sleep(0.05)


def settled(http: httpx.Client) -> Samples:
    """What is counted when all that earlier tests did has been reported."""
    before: Samples = {}
    while True:
        now = scrape(http)
        http_counts = {key: number for key, number in now.items() if "http_requests" in key[0]}
        if http_counts == before:
            return now
        before = http_counts
        sleep(REPORT_DELAY_S + 0.5)


def complete(http: httpx.Client, **fields: object) -> httpx.Response:
    body = {"prompt": "hello", "max_tokens": 3, "temperature": 0, "ignore_eos": True} | fields
    return http.post("/v1/completions", json=body)


def test_exchanges_are_counted_by_endpoint_and_status(http: httpx.Client) -> None:
    before = settled(http)

    def gained(handler: str, status: str) -> float:
        return requests(scrape(http), handler, status) - requests(before, handler, status)

    assert complete(http).status_code == 200
    assert complete(http, stream=True).status_code == 200
    assert complete(http, temperature=-1).status_code == 400
    assert http.get("/v1/nothing/of/that/kind").status_code == 404
    assert http.get("/health").status_code == 200
    eventually(lambda: gained("/v1/completions", "400") == 1 and gained("none", "404") == 1)
    assert gained("/v1/completions", "200") == 2
    after = scrape(http)
    assert not [key for key in after if "of/that/kind" in str(key)]
    assert requests(after, "/health", "200") == requests(after, "/metrics", "200") == 0
    name = "hotshoe:http_request_duration_seconds_count"
    assert value(after, name, handler="/v1/completions") >= 3


def test_the_engines_numbers_come_over_http(http: httpx.Client) -> None:
    before = scrape(http)
    assert complete(http, n=2).status_code == 200
    after = scrape(http)
    for name, gain in (
        ("generation_tokens_total", 6),
        ("request_success_total", 2),
        ("request_params_n_sum", 2),
        ("request_max_num_generation_tokens_sum", 3),
    ):
        assert value(after, f"hotshoe:{name}") - value(before, f"hotshoe:{name}") == gain
    assert value(after, "hotshoe:generation_tokens_total", model_name="tiny") > 0


def test_a_profile_is_taken_over_http(http: httpx.Client) -> None:
    assert http.post("/stop_profile").json()["error"]["message"] == (
        "no profile is being taken; start one first"
    )
    path = http.post("/start_profile").json()["result"]
    complete(http)
    assert http.post("/stop_profile").json()["result"] == path


@pytest.mark.slow
def test_counts_hold_over_all_workers(tiny_path: object) -> None:
    flags = ("--max-model-len", "64", "--server.workers", "2", "--server.vllm-metric-names")
    with start_server(str(tiny_path), *flags) as server:
        for _ in range(12):
            # a connection each, so that both workers get some
            with httpx.Client(base_url=server.url, timeout=60) as http:
                assert complete(http).status_code == 200
        with httpx.Client(base_url=server.url, timeout=60) as http:
            eventually(lambda: requests(scrape(http), "/v1/completions", "200") == 12)
            samples = scrape(http)
            assert value(samples, "hotshoe:generation_tokens_total") == 36
            assert value(samples, "vllm:generation_tokens_total") == 36
