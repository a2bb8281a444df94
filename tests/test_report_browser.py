"""The page in a headless Chromium: what is there, how it is walked, on a desk and on a phone. make report-check

PICTURES=DIR keeps the screenshots.
"""

import os
from pathlib import Path

import pytest
from test_report import EXPOSURE, METRICS, run_folder, with_rounds

from browser import Browser, chromium
from eval.report import write_comparison, write_report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="no Chromium here: apt-get install chromium, or CHROMIUM=PATH"),
]
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
NOW = "[...document.querySelectorAll('.sample:not(.more) .now')].map((one) => one.textContent)"
LATER = "document.querySelectorAll('.sample:not(.more) .later').length"
TOLD = "document.querySelector('.sample:not(.more) output').textContent"
CHIPS = (
    "[...document.querySelectorAll('.sample:not(.more) .rows .chip')].map((one) => [one.textContent, one.className])"
)
HINT = "document.querySelector('.sample:not(.more) .hint').textContent"
HEIGHT = "document.documentElement.scrollHeight"


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    a = with_rounds(run_folder(folder / "a" / "a-run-with-quite-a-long-name", METRICS, exposure=EXPOSURE))
    b = with_rounds(run_folder(folder / "b" / "other", METRICS, exposure=EXPOSURE, tau=2.9))
    old = run_folder(folder / "old", METRICS)
    return {
        "run": write_report(a),
        "comparison": write_comparison([a, b], folder / "comparison.html"),
        "old": write_report(old),
        "bare": write_report(run_folder(folder / "bare", samples=[], times=None, predicted=None)),
    }


def test_what_is_amiss_is_seen(browser, tmp_path):
    page = "<!doctype html><meta name=viewport content='width=device-width'><div style='width:999px'>wide</div>"
    page += "<script>console.error('said'); fetch('http://127.0.0.1:9/'); setTimeout(() => { throw 1 })</script>"
    (tmp_path / "x.html").write_text(page)
    browser.open(tmp_path / "x.html", width=360)
    assert browser.run(OVERFLOW) > 500
    found = " ".join(browser.errors)
    assert "said" in found and "Uncaught" in found and "asked for http://127.0.0.1:9/" in found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [320, 360, 768, 1200])
@pytest.mark.parametrize("name", ["run", "comparison", "old", "bare"])
def test_a_page_is_quiet_and_fits(browser, pages, name, width, dark):
    browser.open(pages[name], width=width, dark=dark)
    assert browser.errors == []
    assert browser.run(OVERFLOW) <= 0
    assert browser.run("window.__shift") == 0
    light, ground = "rgb(246, 247, 249)", browser.run("getComputedStyle(document.body).backgroundColor")
    assert (ground == light) != dark
    plots = "[...document.querySelectorAll('figure svg')].map((one) => one.getBoundingClientRect())"
    assert (
        browser.run(f"{plots}.every((at) => at.width > 200 && at.height > 130)") and browser.run(f"{plots}.length") > 1
    )
    if pictures := os.environ.get("PICTURES"):
        Path(pictures).mkdir(parents=True, exist_ok=True)
        browser.picture(Path(pictures) / f"{name}-{width}-{'dark' if dark else 'light'}.png")


def test_the_slider_walks_the_rounds(browser, pages):
    browser.open(pages["run"])
    height = browser.run(HEIGHT)
    assert browser.run(LATER) == 0 and browser.run(TOLD).startswith("Round 2 of 2")
    browser.run("document.querySelector('.sample:not(.more) input').focus()")
    browser.press("ArrowLeft")
    assert browser.run(NOW) == [" a", " c", " d"] and browser.run(LATER) == 4
    assert browser.run(TOLD).startswith("Round 1 of 2") and "2 of 4 accepted, then a correction" in browser.run(TOLD)
    assert "draft 10 ms, verify 30 ms, all 50 ms" in browser.run(TOLD)
    assert browser.run(CHIPS) == [
        ["\u00b7a", "chip d1"], ["\u00b7b", "chip untried"], ["\u00b7c", "chip d2"], ["<i>", "chip no"],
        ["\u00b7d", "chip t correction"],
    ]  # fmt: skip
    browser.press("Home")
    assert browser.run(NOW) == ["Hello"] and browser.run(LATER) == 7
    browser.press("End")
    assert browser.run(LATER) == 0 and browser.run(CHIPS)[-1] == ["\\u202e\u23ce", "chip t bonus"]
    said = "document.querySelector('.sample:not(.more) input').getAttribute('aria-valuetext')"
    assert browser.run(said) == "round 2 of 2, 3 of 4 accepted, then a bonus"
    assert browser.run(HEIGHT) == height and browser.run("window.__shift") == 0 and browser.errors == []


def test_an_older_run_claims_no_more_than_it_knows(browser, pages):
    browser.open(pages["old"])
    assert browser.run(TOLD) == "Round 3 of 32 accepted, then the verifier's own token"
    assert "correction" not in browser.run("document.querySelector('#tokens').innerText")


def test_buttons_and_play(browser, pages):
    browser.open(pages["run"])
    browser.move('[data-go="-1"]', click=True)
    assert browser.run(TOLD).startswith("Round 1")
    for _ in range(3):
        browser.move('[data-go="-1"]', click=True)
    assert browser.run(TOLD).startswith("Round 0")  # and no further
    browser.move('[data-go="1"]', click=True)
    assert browser.run(TOLD).startswith("Round 1")
    browser.move("[data-play]", click=True)
    ended = f"new Promise((done) => setTimeout(() => done({TOLD}), 900))"
    assert browser.run(ended).startswith("Round 2")
    assert browser.run("document.querySelector('[data-play]').textContent") == "Play" and browser.errors == []


def test_tokens_by_mouse_and_keyboard(browser, pages):
    browser.open(pages["run"])
    browser.move(".text .d2", click=False)
    assert browser.run(HINT) == "Token 3 of 8, \u00b7c: draft of depth 2, accepted, round 1"
    assert browser.run(TOLD).startswith("Round 2")
    browser.move(".text .correction", click=True)
    assert browser.run(TOLD).startswith("Round 1") and "the verifier's correction" in browser.run(HINT)
    browser.run("document.activeElement.blur()")
    for _ in range(60):  # the text can be reached by Tab alone
        browser.press("Tab")
        if browser.run("document.activeElement.classList.contains('text')"):
            break
    assert browser.run(HINT).startswith("Token 1 of 8, Hello: the verifier's first token")
    for key in ("ArrowRight", "ArrowRight", "End", "ArrowRight"):
        browser.press(key)
    assert browser.run(HINT).startswith("Token 8 of 8")
    browser.press("Home")
    browser.press("Enter")
    assert browser.run(TOLD).startswith("Round 0") and browser.errors == []


def test_another_text_is_picked(browser, pages):
    browser.open(pages["comparison"])
    shown = "[...document.querySelectorAll('.sample')].map((one) => getComputedStyle(one).display !== 'none')"
    assert browser.run(shown) == [True, False]
    browser.move('[data-pick="1"]', click=True)
    assert browser.run(shown) == [False, True]
    pressed = "[...document.querySelectorAll('[data-pick]')].map((one) => one.getAttribute('aria-pressed'))"
    assert browser.run(pressed) == ["false", "true"]


def test_every_control_has_a_name_and_room_for_a_finger(browser, pages):
    browser.open(pages["run"], width=360)
    named = (
        "[...document.querySelectorAll('button, input, [tabindex]')].every((one) => one.ariaLabel || one.textContent)"
    )
    assert browser.run(named)
    sizes = "[...document.querySelectorAll('.sample:not(.more) button')].map((one) => one.getBoundingClientRect())"
    assert browser.run(f"{sizes}.every((at) => at.width >= 40 && at.height >= 40)")


def test_a_model_s_words_are_never_markup(browser, pages, tmp_path):
    evil = "</script><img src=x onerror=document.title='caught'>"
    row = {"drafts": [evil], "parents": [-1], "path": [0], "own": evil, "kind": "bonus", "kept": 2}
    folder = with_rounds(run_folder(tmp_path / "run", verifier=evil), [row, row])
    browser.open(write_report(folder))
    assert browser.errors == [] and browser.run("document.title") != "caught"
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run(CHIPS)[0][0] == evil.replace(" ", "\u00b7")
