"""The page in a real browser, headless Chromium: what a visitor does with it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.photographs import CAT, PAVILION, bomb
from tests.serve.served import served

sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright here: pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served() as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator["sync_api.Browser"]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, headless=True, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser: "sync_api.Browser", url: str) -> Iterator["sync_api.Page"]:
    page = browser.new_page(viewport={"width": 1100, "height": 900})
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    elsewhere: list[str] = []
    page.on("request", lambda asked: None if asked.url.startswith((url, "data:")) else elsewhere.append(asked.url))
    page.goto(url)
    sync_api.expect(page.locator("#examples button")).to_have_count(6)
    yield page
    page.close()
    assert complaints == []
    assert elsewhere == []


def upload(page: "sync_api.Page", file: Path) -> None:
    page.set_input_files("#file", file)


def answered(page: "sync_api.Page", name: str) -> None:
    sync_api.expect(page.locator("#bars li").first).to_contain_text(name, timeout=30_000)
    sync_api.expect(page.locator("#told")).to_contain_text("retains most from", timeout=30_000)


def test_upload_click_a_patch_and_switch_layer_and_head(page: "sync_api.Page") -> None:
    upload(page, PAVILION)
    answered(page, "church")
    sync_api.expect(page.locator("#told")).to_contain_text("row 3, column 5 of 4 x 6 patches")
    sync_api.expect(page.locator("#heads button")).to_have_count(9)  # their mean, and eight
    box = page.locator("#map").bounding_box()
    assert box is not None
    page.locator("#map").click(position={"x": 0.6 * box["width"], "y": 0.6 * box["height"]})
    sync_api.expect(page.locator("#told")).to_contain_text("row 2, column 3 of 4 x 6 patches")
    page.keyboard.press("ArrowUp")
    sync_api.expect(page.locator("#told")).to_contain_text("row 1, column 3 of 4 x 6 patches")
    page.get_by_role("combobox", name="Layer", exact=True).select_option("0")
    sync_api.expect(page.locator("#told")).to_contain_text("row 3, column 7 of 8 x 12 patches (layer 0")
    sync_api.expect(page.locator("#heads button")).to_have_count(5)
    page.locator("#heads button").nth(4).click()
    assert page.get_by_role("combobox", name="Head", exact=True).input_value() == "3"
    page.locator("#size").select_option("256")
    sync_api.expect(page.locator("#told")).to_contain_text("of 16 x 24 patches (layer 0", timeout=30_000)


def test_other_forms_give_the_same_answer(page: "sync_api.Page") -> None:
    page.get_by_role("button", name="a pavilion").click()
    answered(page, "church")
    for number, form in enumerate(("parallel", "recurrent", "chunkwise")):
        page.get_by_role("combobox", name="Form", exact=True).select_option(form)
        page.get_by_role("button", name="Compute").click()
        sync_api.expect(page.locator("#costs tr")).to_have_count(number + 1, timeout=30_000)
    rows = [row.locator("td").all_inner_texts() for row in page.locator("#costs tr").all()]
    assert [row[0] for row in rows] == ["parallel", "recurrent", "chunkwise"]
    assert len({row[5] for row in rows}) == 1
    assert all(float(row[4]) < 1e-4 for row in rows)


def test_what_is_no_photograph(page: "sync_api.Page", tmp_path: Path) -> None:
    text, large = tmp_path / "holiday.jpg", tmp_path / "bomb.png"
    text.write_text("no photograph")
    large.write_bytes(bomb())
    upload(page, text)
    sync_api.expect(page.get_by_role("alert")).to_contain_text("holiday.jpg: The image of 13 bytes is not an image")
    upload(page, large)
    sync_api.expect(page.get_by_role("alert")).to_contain_text("expected at most 64,000,000 pixels")
    upload(page, CAT)  # and it goes on
    sync_api.expect(page.locator("#bars li")).to_have_count(10, timeout=30_000)
    sync_api.expect(page.get_by_role("alert")).to_be_hidden()


def test_it_fits_a_narrow_screen(page: "sync_api.Page") -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    page.get_by_role("button", name="a pavilion").click()
    answered(page, "church")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
