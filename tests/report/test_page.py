"""The page of `fovea report` as people see it: in a browser, at the widths of a phone and of a desk, light and dark."""

import base64
import os
import time
from pathlib import Path

import fixtures
import pytest
import report

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
WIDTHS = (390, 1440)
# What is wrong with a page on a screen of a width, as a list of sentences. (innerWidth is no help: phones widen it.)
FAULTS = """
const faults = [], screenWidth = arguments[0];
const wide = document.documentElement.scrollWidth;
if (wide > screenWidth) faults.push(`the page is ${wide} wide, the screen ${screenWidth}`);
for (const node of document.querySelectorAll("body *")) {
  if (node.closest("svg, script, .wide, nav, details:not([open])")) continue;
  const box = node.getBoundingClientRect();
  if (box.width > 0 && (box.right > screenWidth + 0.5 || box.left < -0.5))
    faults.push(`${node.tagName} ${node.className} reaches from ${box.left} to ${box.right}`);
}
for (const place of document.querySelectorAll(".picture")) {
  const title = place.getAttribute("aria-label"), svg = place.querySelector("svg.main-svg");
  const box = svg ? svg.getBoundingClientRect() : { width: 0, height: 0 };
  if (box.width < 250 || box.height < 90) { faults.push(`${title}: no picture (${box.width} x ${box.height})`); continue; }
  const marks = [...place.querySelectorAll(".trace .point path, .trace path.point, .trace .js-line")];
  if (!marks.some(mark => mark.getBBox().width + mark.getBBox().height > 0)) faults.push(`${title}: nothing is drawn`);
  const room = place.getBoundingClientRect();
  for (const text of place.querySelectorAll("svg text")) {
    const at = text.getBoundingClientRect();
    if (at.width > 0 && (at.right > room.right + 1 || at.left < room.left - 1))
      faults.push(`${title}: '${text.textContent}' is cut off`);
  }
}
for (const entry of performance.getEntriesByType("resource"))
  if (!entry.name.startsWith("data:")) faults.push(`asks for ${entry.name}`);
return faults;
"""
# Light of the paper, of the text of the page, and of that of the pictures: from 0 to 1.
LIGHTS = """
const light = color => color.match(/[0-9.]+/g).slice(0, 3).reduce((sum, x) => sum + Number(x), 0) / 765;
const style = node => getComputedStyle(node);
return [light(style(document.body).backgroundColor), light(style(document.body).color),
        ...[...document.querySelectorAll(".picture text")].map(node => light(style(node).fill))];
"""


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """name -> page: of the files in bench/results, and of these with those of a GPU."""
    folder = tmp_path_factory.mktemp("pages")
    more = folder / "more"
    more.mkdir()
    fixtures.write_all(more)
    made = {"committed": [RESULTS], "gpu": [RESULTS, more]}
    for name, paths in made.items():
        assert report.main([*map(str, paths), "--output", str(folder / f"{name}.html")]) == 0
    return {name: folder / f"{name}.html" for name in made}


def look(browser, page, width, scheme="light"):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    console_errors(browser)  # what an earlier page said
    browser.get(page.as_uri())
    browser.execute_async_script("const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))")


def console_errors(browser):
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def faults(browser, width, patience=20):
    """What is wrong, after a while in which a slow machine may draw the last pictures."""
    end = time.monotonic() + patience
    while (found := browser.execute_script(FAULTS, width)) and time.monotonic() < end:
        time.sleep(0.25)
    return found + console_errors(browser)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["committed", "gpu"])
def test_nothing_is_wrong(browser, pages, name, width):
    look(browser, pages[name], width)
    assert faults(browser, width) == []
    drawn, folded = browser.execute_script(
        "return [document.querySelectorAll('.picture').length, document.querySelectorAll('details').length]"
    )
    assert drawn >= (40 if name == "gpu" else 15)
    assert folded > 0
    if folder := os.environ.get("FOVEA_SCREENSHOTS"):  # for people to look at
        height = browser.execute_script("return document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        (Path(folder) / f"{name}_{width}.png").write_bytes(base64.b64decode(shot["data"]))


def test_open_tables_scroll_by_themselves(browser, pages):
    look(browser, pages["gpu"], 390)
    browser.execute_script("for (const fold of document.querySelectorAll('details')) fold.open = true")
    assert faults(browser, 390) == []
    assert browser.execute_script("return [...document.querySelectorAll('.wide')].some(t => t.scrollWidth > t.clientWidth)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(browser, pages, scheme):
    look(browser, pages["committed"], 1440, scheme)
    paper, *texts = browser.execute_script(LIGHTS)
    assert (paper > 0.9) if scheme == "light" else (paper < 0.15)
    assert len(texts) > 100
    assert all(abs(text - paper) > 0.6 for text in texts)


def test_follows_the_screen(browser, pages):
    """Turned or resized, pictures take their new width."""
    look(browser, pages["committed"], 1440)
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 800, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    browser.set_script_timeout(20)
    fits = browser.execute_async_script("""
        const done = arguments[0], start = Date.now();
        const fits = () => [...document.querySelectorAll(".picture svg.main-svg")].every(
          svg => svg.getBoundingClientRect().right <= 800);
        const wait = () => fits() || Date.now() - start > 15000 ? done(fits()) : setTimeout(wait, 100);
        wait();""")
    assert fits


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("<main>", "<main><div style='width: 2000px'>.</div>"), "the page is 2"),
        (("newPlot(place, figure.data", "newPlot(place, []"), "nothing is drawn"),
        (("Plotly.newPlot(", "undefinedFunction("), "undefinedFunction"),
        (("<main>", "<main><img src='https://example.invalid/x.png'>"), "example.invalid"),
        (("overflow: hidden", "overflow: hidden; margin-left: 120px"), "reaches from"),
    ],
)
def test_faults_are_found(browser, pages, tmp_path, change, words):
    old, new = change
    text = pages["committed"].read_text(encoding="utf-8")
    assert old in text
    broken = tmp_path / "broken.html"
    broken.write_text(text.replace(old, new), encoding="utf-8")
    look(browser, broken, 390)
    assert any(words in fault for fault in faults(browser, 390, patience=0))
