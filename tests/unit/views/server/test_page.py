"""The page in a real browser: its numbers are those of the views, on a desk and on a phone."""

from __future__ import annotations

import json
from contextlib import closing
from decimal import Decimal
from functools import partial

import pytest
from edited_app import EditedApp, events
from partial_match_app import GREATEST, MARKUP, SOURCE, click

from millstream.cli.ui import _replay
from millstream.cli.version_runs import VersionRuns
from millstream.errors import ConfigError
from millstream.views.commit.open_committer import open_committer
from millstream.views.reader import state_store_path
from millstream.views.runs.control_files import hold_run_lock
from millstream.views.runs.failure import record_failure
from millstream.views.server.server import serve
from millstream.views.state_store.sqlite_store import SqliteStateStore

pytestmark = pytest.mark.thorough
WAIT_MS = 60_000
DESK = {"width": 1280, "height": 900}
PHONE = {"width": 360, "height": 740}


@pytest.fixture
def show(ads, chromium):
    """Return a function that opens the page; nothing may fail in it, and nothing come from afar."""
    replay = partial(_replay, ads.log)
    with serve(ads.log, listen="127.0.0.1:0", replay=replay) as serving:
        faults, contexts = [], []

        def opened(viewport=DESK, scheme="light", path=""):
            context = chromium.new_context(viewport=viewport, color_scheme=scheme)
            context.set_default_timeout(WAIT_MS)
            contexts.append(context)
            page = context.new_page()
            page.on("pageerror", lambda error: faults.append(str(error)))
            page.on(
                "console",
                lambda said: faults.append(said.text) if said.type == "error" else None,
            )
            page.on(
                "request",
                lambda request: (
                    faults.append(request.url) if not request.url.startswith(serving.url) else None
                ),
            )
            page.goto(serving.url.rstrip("/") + path)
            return page

        opened.faults = faults
        yield opened
        for context in contexts:
            context.close()
    assert faults == []


def given(ads):
    ads.commit(
        *(
            (minute, ad, 10 * ad + minute, ad % 3, f"0.{ad}5")
            for minute in range(9)
            for ad in (7, 8)
        ),
        spent={"acme": "80.00", "duff": "120.50"},
        stopped=8,
    )
    ads.commit((9, 7, 40, 2, "1.25"), late=3, unread=11)


def text_of(page, selector):
    page.wait_for_selector(f"{selector}:not(:empty)")
    return page.locator(selector).first.inner_text()


def table_of(page, selector):
    """Return the texts of a table's cells, row by row."""
    page.wait_for_selector(f"{selector} tbody td")
    rows = page.locator(f"{selector} tbody tr").all()
    return [row.locator("td").all_inner_texts() for row in rows]


def expect_text(page, selector, text):
    page.wait_for_function(
        "([selector, text]) => document.querySelector(selector)?.textContent === text",
        arg=[selector, text],
    )


def test_the_numbers_on_the_page_are_those_of_the_views(ads, show):
    given(ads)
    page = show()
    rates = ads.state_store.scan("ad_ctr")
    status = ads.state_store.status("ads")
    expect_text(page, "[data-count=read]", f"{ads.read:,}")
    assert text_of(page, "[data-count=late]") == "3"
    assert text_of(page, "[data-count=unread]") == "11"
    assert text_of(page, "[data-count=watermark]") == "31 Jan 12:09"
    assert text_of(page, "[data-counter=Impressions]") == f"{rates['shown'].sum():,}"
    assert text_of(page, "[data-counter=Spend]") == f"{rates['cost'].sum():.2f} €"
    newest = rates.row(-1, named=True)
    rate = text_of(page, "[data-panel='Click rate per minute'] [data-newest]")
    assert rate == f"{newest['clicked'] / newest['shown'] * 100:.2f} %"
    assert text_of(page, "[data-limit=duff]") == "120.50 € of 100.00 €"
    top = table_of(page, "[data-panel='Top ads']")
    spent = {ad: Decimal(0) for ad in rates["ad_id"]}
    for row in rates.iter_rows(named=True):
        spent[row["ad_id"]] += row["cost"]
    ranked = sorted(spent.items(), key=lambda item: -item[1])
    assert [row[:2] for row in top] == [[str(ad), f"{cost:.2f} €"] for ad, cost in ranked]
    assert table_of(page, "[data-panel='Stopped ads']") == [["2026-01-31 12:08:00", "8", "acme"]]
    assert status["batch_id"] == 1
    page.wait_for_function(
        "() => document.querySelector('#state-text').textContent.startsWith('Stopped')"
    )


def test_a_crashed_app_is_red_with_reason_time_and_the_way_on(ads, show):
    given(ads)
    page = show()
    expect_text(page, "[data-count=unread]", "11")
    assert page.locator("#failure").is_hidden()
    with pytest.raises(ConfigError), record_failure(ads.log / "apps" / "ads", lambda: 0.0):
        raise ConfigError("the field 'cost' is gone.")
    page.wait_for_selector("#failure:not([hidden])")
    shown = page.locator("#failure").inner_text()
    for words in ("ConfigError, 1970-01-01 00:00:00", "'cost' is gone", "run the app again"):
        assert words in shown
    assert text_of(page, "#state-text").startswith("Failed")
    red = page.evaluate("getComputedStyle(document.querySelector('#state .dot')).backgroundColor")
    assert red == "rgb(179, 38, 30)"
    with hold_run_lock(ads.log / "apps" / "ads", 3):
        page.wait_for_selector("#failure", state="hidden")


def test_a_chart_has_its_numbers_as_a_table(ads, show):
    given(ads)
    page = show()
    panel = "[data-panel='Spend per minute']"
    page.wait_for_selector(f"{panel} path.line")
    page.locator(f"{panel} summary").click()
    shown = table_of(page, panel)
    by_minute = ads.state_store.scan("ad_ctr").group_by("window_start").sum().sort("window_start")
    wanted = [
        [f"{at:%Y-%m-%d %H:%M:%S}", f"{cost:.2f} €"]
        for at, cost in by_minute.select("window_start", "cost").rows()
    ]
    assert shown == wanted[::-1]


def test_what_is_below_zero_stays_within_its_picture(ads, show):
    """A refund may be all that a minute has, or a client's day."""
    ads.commit((0, 7, 10, 1, "0.40"), (1, 7, 0, 0, "-0.90"), spent={"acme": "-4.50"})
    page = show()
    panel = "[data-panel='Spend per minute'] svg"
    page.wait_for_selector(f"{panel} path.line")
    svg, line = (page.locator(each).bounding_box() for each in (panel, f"{panel} path.line"))
    assert svg["y"] <= line["y"] <= line["y"] + line["height"] <= svg["y"] + svg["height"]
    axis = page.locator(f"{panel} .axis text").all_text_contents()
    assert {"-1", "0"} <= set(axis)
    assert text_of(page, "[data-limit=acme]") == "-4.50 € of 100.00 €"
    assert page.eval_on_selector("[data-panel=Budgets] .fill", "(fill) => fill.clientWidth") == 0


def test_the_ledger_the_partitions_and_the_pipeline_are_drawn(ads, show):
    given(ads)
    page = show()
    ledger = {row[0]: row[1:] for row in table_of(page, "#ledger")}
    windows = "tumbling(1 minute) by ad_id"
    held = f"{ads.read - 3:,}"
    assert ledger[windows] == [f"{ads.read:,}", "0", held, "3", "0", "0", "0", "19"]
    page.locator("#ledger-last").click()
    page.wait_for_function(
        "() => document.querySelector('#ledger tbody').textContent.includes('45')"
    )
    assert {row[0]: row[1] for row in table_of(page, "#ledger")}[windows] == "45"
    first = table_of(page, "#partitions")[0]
    assert first[:3] == ["ad-events/0", f"{ads.read:,}", "11"]
    names = page.locator("#graph g > title").all_text_contents()
    assert set(names) == {
        node["name"] for node in ads.state_store.description("ads", "graph")["nodes"]
    }
    counts = page.locator(f"#graph [data-step='{windows}']")
    assert counts.text_content() == f"{ads.read:,} in · 19 out"
    assert page.locator("#graph .edge").count() == 8


def test_what_is_committed_shows_without_loading_the_page_again(ads, show):
    given(ads)
    page = show()
    text_of(page, "[data-counter=Impressions]")
    page.wait_for_selector("#rows tbody td")
    page.evaluate("window.loadedOnce = true")
    ads.commit((10, 9, 1000, 10, "7.50"))
    shown = int(ads.state_store.scan("ad_ctr")["shown"].sum())
    expect_text(page, "[data-counter=Impressions]", f"{shown:,}")
    expect_text(page, "[data-count=read]", f"{ads.read:,}")
    expect_text(page, "[data-count=unread]", "11")
    expect_text(page, "#rows tbody td:nth-child(4)", "1,000")  # the newest row comes first
    assert page.evaluate("window.loadedOnce")


def test_rows_are_found_and_sorted(ads, show):
    given(ads)
    page = show()
    page.wait_for_selector("#rows tbody td")
    assert page.locator("#view").input_value() == "ad_ctr"
    page.locator("#find-value").fill("8")
    page.locator("#find button[type=submit]").click()
    page.wait_for_function("() => document.querySelectorAll('#rows tbody tr').length === 9")
    page.locator("#rows th button", has_text="shown").click()
    page.wait_for_selector("#rows th[aria-sort=ascending]")
    numbers = [int(row[3]) for row in table_of(page, "#rows")]
    assert numbers == sorted(numbers)
    page.locator("#find-value").fill("eight")
    page.locator("#find button[type=submit]").click()
    page.wait_for_selector("#view-notice:not([hidden])")
    assert "'eight' is not a whole number" in page.locator("#view-notice").inner_text()
    assert "400 (Bad Request)" in show.faults.pop()  # the browser's own word for it
    page.select_option("#view", "budgets")
    page.wait_for_function("() => document.querySelectorAll('#rows tbody tr').length === 2")
    assert table_of(page, "#rows")[0] == ["acme", "80.00", "100.00"]


def test_on_a_phone_the_page_is_as_wide_as_the_screen(ads, show):
    given(ads)
    page = show(PHONE)
    text_of(page, "[data-counter=Impressions]")
    page.wait_for_selector("#rows tbody td")
    page.wait_for_selector("#graph svg")
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    wide = page.evaluate(
        """() => [...document.querySelectorAll('.card, .tile, header')]
            .filter((each) => each.getBoundingClientRect().right > innerWidth)
            .map((each) => each.outerHTML.slice(0, 80))"""
    )
    assert wide == []


def brightness(page, selector, name):
    """Return the mean of the three colours of an element, 0 to 255."""
    colour = page.eval_on_selector(selector, f"(each) => getComputedStyle(each).{name}")
    numbers = [float(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    return sum(numbers) / 3


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_the_page_is_as_dark_as_the_system(ads, show, scheme, dark):
    given(ads)
    page = show(scheme=scheme)
    page.wait_for_selector(".tile")
    for selector in ("body", ".tile"):
        ground = brightness(page, selector, "backgroundColor")
        ink = brightness(page, selector, "color")
        assert (ground < 60) == dark
        assert abs(ground - ink) > 150


def test_a_log_without_apps_says_what_to_do_and_shows_the_first_that_comes(tmp_path, chromium):
    with serve(tmp_path, listen="127.0.0.1:0") as serving:
        page = chromium.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(serving.url)
        page.wait_for_selector("#empty:not([hidden])")
        folder = tmp_path / "apps" / "first"
        SqliteStateStore(folder / "views.db").close()
        with hold_run_lock(folder, 1):
            expect_text(page, "#app-name", "first")
            expect_text(page, "#state-text", "Running · no batch yet")
            assert text_of(page, "[data-count=throughput]") == "\u2013"
            assert text_of(page, "[data-count=read]") == "0"
        page.close()


def test_the_page_comes_back_after_a_server_that_did_not_know_its_app(ads, tmp_path, chromium):
    given(ads)
    page = chromium.new_page()
    page.set_default_timeout(WAIT_MS)
    with serve(ads.log, listen="127.0.0.1:0") as first:
        listen = first.url.removeprefix("http://").rstrip("/")
        page.goto(first.url)
        expect_text(page, "[data-count=read]", f"{ads.read:,}")
    with serve(
        tmp_path / "empty", listen=listen
    ):  # its answer is an error, after which browsers do not try again
        with page.expect_response(lambda response: response.status == 404):
            pass
        expect_text(page, "#state-text", "No connection, trying again")
    ads.commit((10, 8, 5, 1, "0.10"))
    with serve(ads.log, listen=listen):
        expect_text(page, "[data-count=read]", f"{ads.read:,}")
    page.close()


def test_a_view_that_was_left_out_for_a_run_says_so_above_its_rows(ads, show):
    given(ads)
    ads.app.outputs = [one for one in ads.app.outputs if one.name != "budgets"]
    with open_committer(ads.app.plan(), state_store_path(ads.log, "ads"), ads.log) as without:
        without.begin_run("main", "one")
    page = show()
    page.wait_for_selector("#rows tbody td")
    assert page.locator("#view-note").is_hidden()
    page.select_option("#view", "budgets")
    page.wait_for_selector("#view-note:not([hidden])")
    assert "it is no longer written since" in page.locator("#view-note").inner_text()
    page.select_option("#view", "ad_ctr")
    page.wait_for_selector("#view-note", state="hidden")


OPERATED = ("#phases", "#work", "#batches", "#partitions", "#versions")


@pytest.mark.parametrize(
    ("viewport", "scheme"), [(DESK, "light"), (PHONE, "dark")], ids=["desk", "phone"]
)
def test_the_page_for_operators_shows_what_is_slow_and_sends_dead_letters_again(
    ads, show, viewport, scheme
):
    given(ads)
    ads.commit((10, 7, 5, 1, "0.25"), dead={0: "field 'cost' is missing", 1: "no JSON"})
    page = show(viewport, scheme, "/operate")
    page.evaluate(
        """() => { window.shifted = 0; new PerformanceObserver((list) => {
            for (const one of list.getEntries()) if (!one.hadRecentInput) window.shifted += one.value;
        }).observe({ type: "layout-shift", buffered: true }); }"""
    )
    page.wait_for_selector("#work tbody td")
    page.wait_for_selector("#batch-chart path.line", state="attached")
    phases = {row[0]: row[1:] for row in table_of(page, "#phases")}
    assert phases["stages"][0] == "145 ms"
    work = table_of(page, "#work")
    assert work[0][:2] == ["tumbling(1 minute) by ad_id", "70 %"]
    assert work[0][3] == "4.0 KiB"
    findings = page.locator("#findings").inner_text()
    assert "The step that works longest is 'tumbling(1 minute) by ad_id': 70%" in findings
    assert "is the operators behind shuffles" in findings
    with page.expect_response("**/operate"):  # of the next refresh
        pass
    assert page.evaluate("window.shifted") < 0.05
    page.locator("summary", has_text="As a table").click()
    assert [row[0] for row in table_of(page, "#batches")] == ["2", "1", "0"]
    assert table_of(page, "#versions")[0][0] == "live: runs"
    # The keyboard alone: to the first dead letter, open it, and to its button.
    letter = "#dead details[data-record='ad-events/0/0']"
    page.locator(f"{letter} summary").focus()
    page.keyboard.press("Enter")
    assert "field 'cost' is missing" in page.locator(f"{letter} dl").inner_text()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("#dead-notice:not([hidden])", state="attached")
    assert "may come too late" in page.locator("#dead-notice").inner_text()
    assert "400 (Bad Request)" in show.faults.pop()
    page.locator("#late-ok").check()
    page.locator(f"{letter} button").click()
    page.wait_for_function(
        "() => document.querySelector('#dead-notice').textContent.includes('was appended')"
    )
    page.wait_for_function(
        "(letter) => document.querySelector(letter + ' summary').textContent.includes('sent again')",
        arg=letter,
    )
    assert page.locator(f"{letter}[open]").count() == 1  # what was open stays open
    assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
    assert (brightness(page, "body", "backgroundColor") < 60) == (scheme == "dark")


@pytest.mark.parametrize(
    ("viewport", "scheme"), [(DESK, "light"), (PHONE, "dark")], ids=["desk", "phone"]
)
def test_versions_have_buttons_which_run_the_commands(tmp_path, chromium, viewport, scheme):
    edited = EditedApp(tmp_path, 2)
    edited.create()
    edited.append(events(60, 3))
    edited.run(edited.write())
    edited.write(("FACTOR = 2", "FACTOR = 3"))
    programs = {"ads": str(edited.file)}
    with (
        closing(VersionRuns(edited.log, programs)) as commands,
        serve(edited.log, listen="127.0.0.1:0", commands=commands) as serving,
        closing(chromium.new_context(viewport=viewport, color_scheme=scheme)) as context,
    ):
        context.set_default_timeout(10 * WAIT_MS)
        page = context.new_page()
        page.goto(serving.url.rstrip("/") + "/operate")
        plan = page.locator("#commands button", has_text="Plan")
        plan.wait_for()  # until then it is hidden, and takes no focus
        plan.focus()
        page.keyboard.press("Enter")
        page.wait_for_function(
            "() => document.querySelector('#command-notice').textContent.includes('rebuilt or dropped')"
        )
        assert "rebuilds  step 'per_kind'" in page.locator("#command-output").inner_text()
        # Whoever says no has begun nothing.
        page.once("dialog", lambda dialog: dialog.dismiss())
        page.locator("#commands button", has_text="Switch to it").click()
        assert commands.read("ads")["action"] == "plan"
        page.once("dialog", lambda dialog: dialog.accept())
        page.keyboard.press("Enter")
        page.wait_for_function(
            "() => document.querySelector('#command-notice').textContent.includes('is in place')"
        )
        page.wait_for_function(
            "() => document.querySelector('#versions').textContent.includes('previous')"
        )
        assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
        assert (brightness(page, "#command-output", "backgroundColor") < 60) == (scheme == "dark")


@pytest.mark.parametrize(
    ("viewport", "scheme"), [(DESK, "light"), (PHONE, "dark")], ids=["desk", "phone"]
)
def test_partial_matches_are_listed_when_asked_for(tmp_path, chromium, viewport, scheme):
    edited = EditedApp(tmp_path, 1, source=SOURCE)
    edited.create()
    rows = [click(1), click(2, MARKUP, GREATEST)]
    edited.append([*rows, click(60, "last", kind="show")])
    edited.run(edited.write())
    with (
        closing(VersionRuns(edited.log, {"carts": str(edited.file)})) as commands,
        serve(edited.log, listen="127.0.0.1:0", commands=commands) as serving,
        closing(chromium.new_context(viewport=viewport, color_scheme=scheme)) as context,
    ):
        context.set_default_timeout(10 * WAIT_MS)
        page = context.new_page()
        page.goto(serving.url.rstrip("/") + "/operate")
        look = page.locator("#look button")
        look.wait_for()
        assert page.locator("#matches").is_hidden(), "it is not looked for unasked"
        look.click()
        found = table_of(page, "#matches")
        keys = {row[1] for row in found}
        assert keys == {'ad="a0"', f"ad={json.dumps(MARKUP)}"}
        assert any(str(GREATEST) in row[5] for row in found)
        page.fill("#match-key", "ad=a0")
        page.keyboard.press("Enter")
        page.wait_for_function("() => document.querySelectorAll('#matches tbody tr').length === 1")
        page.fill("#match-key", "user=anna")
        page.keyboard.press("Enter")
        page.wait_for_function(
            "() => document.querySelector('#matches-notice').textContent.includes('no column of the key')"
        )
        assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
