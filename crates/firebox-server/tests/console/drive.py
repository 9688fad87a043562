"""Drives the console in a headless browser as a new user would.

    drive.py ADDRESS [--axe axe.min.js] [--chromium PATH] [--pictures FOLDER]

The server at ADDRESS serves the pocket model as `pocket`, can save sessions, and needs the key `open-sesame`.
Checks what the page shows, and that axe finds no serious violation, light and dark, wide and narrow.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

KEY = "open-sesame"
SERIOUS = {"serious", "critical"}
STATEMENTS = [
    "My sister is called Eva.",
    "The key is under the stone.",
    "Who is my sister?",
    "Eva lives in Oslo.",
    "Where does Eva live?",
    "My favourite colour is green.",
    "The meeting is on Friday.",
]


def say(page: Page, text: str) -> str:
    before = page.locator(".said.model").count()
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    answer = page.locator(".said.model").nth(before)
    expect(answer.locator(".about")).to_be_visible(timeout=60_000)
    return answer.locator(".words").inner_text()


def accessible(page: Page, axe: str | None, where: str) -> None:
    if axe is None:
        return
    # The page's policy forbids injected scripts, but not the browser's own tools.
    page.evaluate(Path(axe).read_text())
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    faults = [fault for fault in found["violations"] if fault["impact"] in SERIOUS]
    for fault in faults:
        nodes = [(node["target"], node.get("failureSummary")) for node in fault["nodes"][:4]]
        print(f"{where}: {fault['id']} ({fault['impact']}): {fault['help']}\n  {nodes}", file=sys.stderr)
    minor = [fault["id"] for fault in found["violations"] if fault["impact"] not in SERIOUS]
    print(f"axe, {where}: {len(faults)} serious, {len(minor)} minor {minor}, {len(found['passes'])} passed")
    assert not faults, f"axe finds {[fault['id'] for fault in faults]} {where}"


def no_overflow(page: Page) -> None:
    wide, seen = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert wide <= seen, f"the page is {wide} wide where {seen} can be seen"


def drive(page: Page, address: str, axe: str | None, pictures: Path | None) -> None:
    requests, errors = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))

    def picture(name: str) -> None:
        if pictures is not None:
            page.screenshot(path=pictures / f"{name}.png")

    page.goto(f"{address}/")
    page.get_by_label("Key", exact=True).fill(KEY)
    page.get_by_role("button", name="Use key").click()
    expect(page.locator("#link")).to_have_text("live")
    refused = [error for error in errors if "401" in error]
    assert refused and len(refused) == len(errors), errors
    errors.clear()

    # A session with little capacity, so that turns are evicted soon.
    page.get_by_role("button", name="New…").click()
    page.get_by_label("System prompt").fill("You are a helpful assistant. The user's name is Ada.")
    page.get_by_label("Facts, one per line").fill("The user's dog is called Rex.")
    page.get_by_label("Capacity for turns, in tokens").fill("150")
    page.get_by_role("button", name="Create").click()
    facts, turns = page.locator("#facts"), page.locator("#turns")
    expect(facts).to_contain_text("The user's dog is called Rex.")
    expect(turns.locator(".row")).to_have_count(1)

    dog = say(page, "What is my dog called?")
    assert "Rex" in dog, dog
    own = say(page, "My brother is called Tom.")

    # Another head answers.
    page.get_by_label("Head", exact=True).select_option("code")
    expect(page.locator(".chip", has_text="code")).to_contain_text("active")
    swapped = say(page, "My brother is called Tom.")
    assert swapped != own, swapped
    expect(page.locator(".said.model").last).to_contain_text("head code")
    page.get_by_label("Head", exact=True).select_option("chat")
    expect(page.locator(".chip", has_text="chat")).to_contain_text("active")

    # A superseded fact stays visible and is hidden from the model.
    page.get_by_role("button", name="Replace: The user's dog is called Rex.").click()
    page.get_by_label("New fact").fill("The user's dog is called Bruno.")
    page.keyboard.press("Enter")
    expect(facts.locator(".tombstone")).to_contain_text("Rex")
    expect(page.locator("#stream .block.fact.masked")).to_have_count(1)
    dog = say(page, "What is my dog called?")
    assert "Bruno" in dog, dog

    # A pinned turn stays while others are evicted.
    page.get_by_role("button", name="Pin: My brother is called Tom.").first.click()
    expect(turns.locator(".row", has_text="pinned").nth(1)).to_be_visible()
    for statement in STATEMENTS:
        say(page, statement)
    expect(turns.locator(".row.gone").first).to_be_visible()
    expect(turns.locator(".row.gone", has_text="What is my dog called?").first).to_be_visible()
    expect(turns.locator(".row", has_text="My brother is called Tom.").first).not_to_have_class(re.compile("gone"))
    expect(page.locator("#memory-sum")).to_contain_text("evicted")

    # Fork, switch and promote.
    page.get_by_role("button", name="Fork here").click()
    expect(page.locator(".twig")).to_have_count(2)
    expect(page.locator(".twig.active")).to_contain_text("branch 1")
    say(page, "Who is my brother?")
    page.get_by_role("button", name="Switch to main branch").click()
    expect(page.locator(".twig.active")).to_contain_text("main branch")
    expect(page.locator("#log")).not_to_contain_text("Who is my brother?")
    picture("console")
    page.get_by_role("button", name="Promote branch 1").click()
    expect(page.locator(".twig")).to_have_count(1)
    expect(page.locator("#log")).to_contain_text("Who is my brother?")

    # The state of the engine.
    expect(page.locator("#segments .cell").first).to_be_visible()
    expect(page.locator("#timeline svg rect.decode").first).to_be_attached()
    expect(page.locator("#accounts")).to_contain_text("weights")
    expect(page.locator("#plots svg polyline")).to_be_attached()
    expect(page.locator("#pace-sum")).to_contain_text("first token")

    # Save, and restore as another session.
    page.get_by_role("button", name="Save…").click()
    page.get_by_label("Name", exact=True).fill("trip")
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    session = page.get_by_label("Session", exact=True)
    expect(session.locator("option", has_text="saved: trip")).to_be_attached()
    before = session.input_value()
    session.select_option("saved:trip")
    expect(page.locator("#log")).to_contain_text("Who is my brother?")
    page.wait_for_function("before => document.getElementById('session').value !== before", arg=before)

    # A reload restores the page. The first tab stop skips to the message.
    page.reload()
    expect(page.locator("#log")).to_contain_text("Who is my brother?")
    expect(page.locator("#link")).to_have_text("live")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"

    accessible(page, axe, "light")
    no_overflow(page)
    theme = page.locator("#theme")
    theme.click()
    theme.click()
    expect(theme).to_have_text("Dark")
    accessible(page, axe, "dark")
    picture("console-dark")
    page.set_viewport_size({"width": 390, "height": 844})
    no_overflow(page)
    accessible(page, axe, "on a phone, dark")
    theme.click()
    theme.click()
    expect(theme).to_have_text("Light")
    accessible(page, axe, "on a phone, light")
    picture("console-phone")

    assert errors == [], errors
    external = [url for url in requests if not url.startswith(f"{address}/")]
    assert external == [], external


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--axe")
    parser.add_argument("--chromium")
    parser.add_argument("--pictures", type=Path)
    arguments = parser.parse_args()
    with sync_playwright() as playwright:
        # Chromium has no sandbox when run as root, as in containers.
        browser = playwright.chromium.launch(executable_path=arguments.chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1360, "height": 1060}, color_scheme="light", reduced_motion="reduce")
        try:
            drive(page, arguments.address, arguments.axe, arguments.pictures)
        except BaseException:
            if arguments.pictures is not None:
                page.screenshot(path=arguments.pictures / "failed.png", full_page=True)
            raise
        finally:
            browser.close()
    print(json.dumps({"ok": True}))


main()
