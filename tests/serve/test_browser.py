"""The page in a real browser, headless Chromium: what a visitor does with it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.serve.others import saved
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


@pytest.fixture(scope="module")
def url_with_others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("runs")
    with served("--also", saved("detector", folder), "--also", saved("segmentor", folder)) as url:
        yield url


@pytest.fixture
def page(browser: "sync_api.Browser", url: str) -> Iterator["sync_api.Page"]:
    with opened(browser, url) as page:
        yield page


@pytest.fixture
def page_with_tabs(browser: "sync_api.Browser", url_with_others: str) -> Iterator["sync_api.Page"]:
    with opened(browser, url_with_others) as page:
        yield page


@contextmanager
def opened(browser: "sync_api.Browser", url: str) -> Iterator["sync_api.Page"]:
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
    assert len({row[6] for row in rows}) == 1
    assert all(float(row[5]) < 1e-4 for row in rows)


def test_the_other_kind_of_retention(page: "sync_api.Page") -> None:
    page.get_by_role("button", name="a pavilion").click()
    answered(page, "church")
    told, note = page.locator("#told"), page.locator("#kind-note")
    sync_api.expect(page.get_by_role("radio", name="2D")).to_be_checked()
    sync_api.expect(note).to_contain_text("trained with 2D. Its weights serve 1D as well")
    sync_api.expect(told).to_contain_text("2D retention) retains most")
    sync_api.expect(told).to_contain_text("looks back: up and to the left")
    in_2d = page.locator("#bars").inner_text()
    page.get_by_role("radio", name="1D").check()
    sync_api.expect(told).to_contain_text("1D retention) retains most")
    sync_api.expect(told).to_contain_text("looks back: along this row and all rows above")
    sync_api.expect(note).to_contain_text("never learned to see with 1D")
    sync_api.expect(page.locator("#answer-note")).to_contain_text("at 128 px with 1D retention")
    assert page.locator("#bars").inner_text() != in_2d
    page.get_by_role("button", name="Compute").click()
    sync_api.expect(page.locator("#costs tr")).to_have_count(1, timeout=30_000)
    assert page.locator("#costs td").all_inner_texts()[:3] == ["parallel", "1D", "128"]
    page.get_by_role("radio", name="2D").check()
    sync_api.expect(told).to_contain_text("looks back: up and to the left")
    assert page.locator("#bars").inner_text() == in_2d


def test_without_further_models_there_are_no_tabs(page: "sync_api.Page") -> None:
    sync_api.expect(page.get_by_role("tab")).to_have_count(0)
    sync_api.expect(page.get_by_role("tablist", include_hidden=True)).to_be_hidden()


def test_tabs_of_further_models(page_with_tabs: "sync_api.Page") -> None:
    page = page_with_tabs
    sync_api.expect(page.get_by_role("tab")).to_have_count(3)
    page.get_by_role("button", name="a pavilion").click()
    answered(page, "church")
    page.get_by_role("tab", name="Detection").click()
    sync_api.expect(page.locator("#found-note")).to_contain_text("no objects of which the model is at least 50 % sure")
    sync_api.expect(page.locator("#answer")).to_be_hidden()
    plain = page.locator("#picture").get_attribute("src")
    page.get_by_role("slider").fill("0.3")
    sync_api.expect(page.locator("#least-told")).to_have_text("30 %")
    sync_api.expect(page.locator("#found li").first).to_contain_text("%")
    share = page.locator("#found i").first.evaluate("bar => bar.offsetWidth / bar.parentElement.offsetWidth")
    assert 0.3 < share < 0.4
    assert page.locator("#picture").get_attribute("src") != plain
    assert page.locator("#picture").evaluate("picture => picture.naturalWidth") == 640
    page.get_by_role("tab", name="Detection").press("ArrowRight")
    sync_api.expect(page.get_by_role("tab", name="Segmentation")).to_have_attribute("aria-selected", "true")
    sync_api.expect(page.locator("#found")).to_contain_text("grass")
    sync_api.expect(page.get_by_role("slider")).to_be_hidden()
    upload(page, CAT)  # another photograph is answered in the tab that is open
    sync_api.expect(page.locator("#found-note")).to_contain_text(CAT.name, timeout=30_000)
    page.get_by_role("tab", name="What is it?").click()
    sync_api.expect(page.locator("#answer-note")).to_contain_text(CAT.name)
    sync_api.expect(page.locator("#scene")).to_be_hidden()
    sync_api.expect(page.get_by_role("alert")).to_be_hidden()


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


def test_it_fits_a_narrow_screen(page_with_tabs: "sync_api.Page") -> None:
    page = page_with_tabs
    page.set_viewport_size({"width": 360, "height": 740})
    page.get_by_role("button", name="a pavilion").click()
    answered(page, "church")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.get_by_role("tab", name="Segmentation").click()
    sync_api.expect(page.locator("#found")).to_contain_text("grass")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
