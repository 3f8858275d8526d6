//! Migrations, looked at on both sides.
#![cfg(test)]

use serde_json::Value;
use vmove_skip::need;
use vmove_tests::browser::{Browser, Look, Tab};
use vmove_tests::scene::{NAME, SLOW, Scene};

use crate::served::{Served, calm, pictures, ready};

fn number(browser: &mut Browser, tab: &Tab, expression: &str) -> f64 {
    browser.value(tab, expression).expect("a value").as_f64().unwrap_or_default()
}

/// Of all squares of the map: how full they are, and how many there are.
const MAP: &str =
    "[...document.querySelectorAll('.map rect')].map((r) => Number(r.getAttribute('fill-opacity')))";

fn map(browser: &mut Browser, tab: &Tab) -> (f64, usize) {
    let squares = browser.value(tab, MAP).expect("squares");
    let squares: Vec<f64> = squares.as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
    (squares.iter().sum(), squares.len())
}

/// Times of an axis in milliseconds, as they are written: "4.2 ms", "1.50 s".
fn milliseconds(text: &str) -> f64 {
    let (number, unit) = text.trim().split_once(' ').expect("a number and a unit");
    let number: f64 = number.parse().expect("a number");
    number * if unit == "s" { 1000.0 } else { 1.0 }
}

/// The first curve has an axis of time, on which the pause is marked: where it was, in a colour of its own, in light and dark.
fn axis(browser: &mut Browser, tab: &Tab, downtime: f64) {
    let curve = "document.querySelector('.curve:not([hidden])')";
    browser.wait_for_text(tab, ".curve strong.pause", "Orange: the guest stood still for").expect("a legend");
    let text = |browser: &mut Browser, of: &str| {
        let text = browser.value(tab, &format!("{curve}.querySelector('{of}').innerText")).expect("text");
        text.as_str().expect("text").to_owned()
    };
    let begin = milliseconds(&text(browser, ".axis span:first-child"));
    let end = milliseconds(&text(browser, ".axis span:last-child"));
    assert_eq!(text(browser, ".axis span:nth-child(2)"), "time since the request");
    let legend = text(browser, "strong.pause");
    let (length, from) = legend.split_once("still for ").expect("how long").1.split_once(", ").expect("when");
    assert!(
        (milliseconds(length) - downtime).abs() <= 0.06_f64.max(downtime / 100.0),
        "{legend}: {downtime}"
    );
    let of = |name: &str| format!("Number({curve}.querySelector('rect.pause').getAttribute('{name}'))");
    let (x, width) = (number(browser, tab, &of("x")), number(browser, tab, &of("width")));
    let from = milliseconds(from.split(" after").next().expect("when"));
    let wanted = (from - begin) / (end - begin) * 600.0;
    // The narrowest band is 3 wide.
    assert!(begin < end && (x - wanted).abs() < 6.0, "{x}, expected {wanted}: {begin} to {end}, {legend}");
    assert!(width >= 3.0 && x + width <= 600.1, "{x} + {width}");
    let colours = |browser: &mut Browser, dark: bool| {
        browser.look(tab, Look { width: 1000, height: 1000, dark }).expect("another look");
        [("rect.pause", "fill"), (".line", "stroke"), ("strong.pause", "color")].map(|(of, property)| {
            let style = format!("getComputedStyle({curve}.querySelector('{of}')).{property}");
            browser.value(tab, &style).expect("a colour").as_str().expect("a colour").to_owned()
        })
    };
    let (light, dark) = (colours(browser, false), colours(browser, true));
    for [band, line, legend] in [&light, &dark] {
        assert!(band == legend && band != line, "{light:?} {dark:?}");
    }
    assert_ne!(light[0], dark[0]);
    let said = format!(
        "{curve}.querySelector('svg').getAttribute('aria-label').includes('Orange: the guest stood still')"
    );
    assert_eq!(browser.value(tab, &said).expect("a label"), true, "it is not said to screen readers");
}

#[test]
fn a_migration_is_shown_as_it_happens_and_in_the_end() {
    need!(ready());
    let scene = Scene::new().expect("two nodes and a guest");
    let pages = [&scene.a, &scene.b].map(|node| Served::of(node).expect("a page"));
    let mut browser = Browser::start().expect("a browser");
    let overview = browser.open(&pages[0].url).expect("the page of a");
    browser.wait_for_text(&overview, "#node", "a: 1 VM, 0 migrations").expect("the node");
    browser.wait_for_text(&overview, "main", "running").expect("the guest");

    let id = scene.start(&["--mode", "hybrid", "--bandwidth", SLOW]).expect("it begins");
    browser.wait_for_text(&overview, "main section", "to b").expect("a migration at work");
    let link = format!("document.querySelector('a[href=\"#/migration/{id}\"]').click()");
    browser.value(&overview, &link).expect("a link to it");
    let source = overview;
    browser.wait_for_text(&source, "h1", &format!("{NAME} to b")).expect("the migration");
    let destination = browser.open(&pages[1].view(&format!("migration/{id}"))).expect("the page of b");
    browser.wait(&destination, &format!("{MAP}.some((full) => full > 0)")).expect("pages arrive");

    // It grows by itself.
    let (first, squares) = map(&mut browser, &destination);
    assert!(squares >= 256 && first < 0.99 * squares as f64, "{first} of {squares}");
    let done = "document.querySelector('progress').value";
    browser.wait(&source, &format!("{done} > 0.02 && {done} < 1")).expect("progress");
    let before = number(&mut browser, &source, done);
    browser
        .wait(&destination, &format!("{MAP}.reduce((a, b) => a + b, 0) > {first}"))
        .expect("more has arrived");
    browser.wait(&source, &format!("{done} > {before}")).expect("the source hears of it");
    browser.wait(&source, "document.querySelector('.curve:not([hidden])') !== null").expect("a curve");
    browser
        .wait(&source, "document.querySelector('[aria-live]').textContent.includes('guest: ')")
        .expect("it is told");
    browser.wait_for_text(&source, "main dl", "Guest writes").expect("the guest's pace");
    browser.wait(&source, &format!("{MAP}.some((full) => full > 0)")).expect("a map at the source, too");
    pictures(&mut browser, &source, "source", 1060).expect("pictures");

    let end = scene.end(&id).expect("its end");
    assert_eq!(end.code, 0, "{end:?}");
    let report = end.answer.get("report").filter(|report| report.is_object()).unwrap_or(&end.answer);
    let downtime = report["downtime_ms"].as_f64().expect("a downtime");
    assert!(downtime > 0.0, "{report}");
    browser.wait_for_text(&source, ".state", "done, downtime").expect("the end");
    if downtime < 1000.0 {
        let told = browser.text(&source, ".state").expect("text");
        assert_eq!(told, format!("done, downtime {downtime:.1} ms"));
    }
    assert_eq!(
        number(&mut browser, &source, "document.querySelectorAll('.spans').length"),
        2.0,
        "phases, and the pause"
    );
    let orange = "[...document.querySelectorAll('.spans')[0].querySelectorAll('rect.pause')].map((bar) => bar.closest('tr').querySelector('th').innerText).join()";
    assert_eq!(
        browser.value(&source, orange).expect("names"),
        "switchover,hand-over",
        "where the guest stands still"
    );
    for told in ["switchover", "Rounds ended since", "Slowest faults"] {
        browser.wait_for_text(&source, ".report", told).expect("the report");
    }
    browser.wait_for_text(&source, "#node", "a: 0 VMs, 0 migrations").expect("the head is new, too");
    axis(&mut browser, &source, downtime);
    browser.wait_for_text(&source, ".map", "100 % is there").expect("its memory is at the other node");
    pictures(&mut browser, &source, "report", 1060).expect("pictures");
    browser.wait_for_text(&destination, ".state", "done").expect("the end");
    browser.wait_for_text(&destination, ".report", "Rounds ended since").expect("it knows all of it");
    browser.wait_for_text(&destination, ".map", "100 % is here").expect("the whole map");

    // The guest is at the other node, and the past is told on both.
    browser.go(&destination, &pages[1].view("")).expect("the overview of b");
    browser.wait_for_text(&destination, "main", NAME).expect("the guest");
    browser.wait_for_text(&destination, "main", "from a").expect("where it came from");
    browser.go(&source, &pages[0].view("")).expect("the overview of a");
    browser.wait_for_text(&source, "main", "No VM.").expect("the guest has gone");
    browser.wait_for_text(&source, "main", "to b").expect("where it went");
    browser.wait_for_text(&destination, "#node", "b: 1 VM, 0 migrations").expect("the head is new, too");
    pictures(&mut browser, &destination, "overview", 470).expect("pictures");
    for (tab, page) in [(&source, &pages[0]), (&destination, &pages[1])] {
        calm(&mut browser, tab, &page.url).expect("nothing but its own server was asked");
    }
    scene.sound_at(&scene.b).expect("the guest is sound");
}

#[test]
fn faults_are_shown_as_they_come() {
    need!(ready());
    let scene = Scene::new().expect("two nodes and a guest");
    let page = Served::of(&scene.b).expect("a page");
    let mut browser = Browser::start().expect("a browser");
    let id = scene.start(&["--mode", "postcopy", "--bandwidth", SLOW]).expect("it begins");
    scene.handed_over(&id).expect("the guest runs at b");
    let tab = browser.open(&page.view(&format!("migration/{id}"))).expect("the page of b");
    browser.wait_for_text(&tab, "main dl", "fetched a page").expect("faults");
    browser.wait_for_text(&tab, "main dl", "99 % within").expect("their latency");
    browser.wait_for_text(&tab, ".curve figcaption", "Memory that arrives").expect("a curve");
    let faults = "[...document.querySelectorAll('.curve:not([hidden]) figcaption')].some((f) => f.innerText.includes('Page faults'))";
    browser.wait(&tab, faults).expect("a curve of faults");
    let (first, squares) = map(&mut browser, &tab);
    browser.wait(&tab, &format!("{MAP}.reduce((a, b) => a + b, 0) > {first}")).expect("more has arrived");
    assert!(squares >= 256 && first < 0.99 * squares as f64, "{first} of {squares}");
    browser
        .wait(&tab, &format!("{MAP}.reduce((a, b) => a + b, 0) > {}", 0.5 * squares as f64))
        .expect("half of it");
    pictures(&mut browser, &tab, "destination", 1060).expect("pictures");
    assert_eq!(scene.end(&id).expect("its end").code, 0);
    browser.wait_for_text(&tab, ".report", "Slowest faults").expect("the report");
    browser.wait_for_text(&tab, ".map", "100 % is here").expect("the whole map");
    calm(&mut browser, &tab, &page.url).expect("nothing but its own server was asked");
    scene.sound_at(&scene.b).expect("the guest is sound");
}
