//! `vmove report` of real migrations: as text, picture and page.
#![cfg(test)]

use std::process::Output;

use vmove_picture::check::faults;
use vmove_skip::need;
use vmove_tests::daemon::Node;
use vmove_tests::forks::done;
use vmove_tests::scene::{SLOW, Scene, ready, vmove};

fn said(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn report(node: &Node, arguments: &[&str]) -> String {
    let arguments: Vec<&str> = [&["report"], arguments].concat();
    said(&node.vmove(&arguments).expect("vmove runs"))
}

/// Lengths of the bars of a picture, in the order of the page.
fn bars(svg: &str) -> Vec<f64> {
    let xml = roxmltree::Document::parse(svg).expect("XML");
    let is_bar = |node: &roxmltree::Node<'_, '_>| {
        node.attribute("class").is_some_and(|class| class.starts_with("v-bar"))
    };
    let width =
        |node: roxmltree::Node<'_, '_>| node.attribute("width").expect("a width").parse().expect("a number");
    xml.descendants().filter(is_bar).map(width).collect()
}

#[test]
fn a_report_shows_where_the_time_and_the_pause_went() {
    need!(ready());
    let scene = Scene::new().expect("a guest");
    let id = scene.start(&["--mode", "hybrid", "--bandwidth", SLOW]).expect("it begins");
    scene.reach(&id, "rounds").expect("it sends memory");
    let now = report(&scene.a, &[&id]);
    assert!(now.contains("still at work") && now.contains("prepare") && now.contains("until now"), "{now}");
    let now = report(&scene.a, &[&id, "--svg", "-"]);
    assert!(bars(&now).len() >= 3 && now.contains("still at work"), "{now}");

    let end = scene.end(&id).expect("it ends");
    assert_eq!(end.code, 0, "{} {}", end.answer, end.said);
    let text = report(&scene.a, &[&id[..8]]);
    for part in [
        "Phases",
        "Pause",
        "Bytes",
        "Rounds",
        "Page faults at the destination",
        "The slowest page faults",
        "Over ",
    ] {
        assert!(text.contains(part), "{part} is missing: {text}");
    }
    let progress = scene.a.ask(&["status", &id]).expect("its report");
    let points = progress["outcome"]["report"]["over_time"].as_array().expect("points over time");
    assert!((10..=100).contains(&points.len()), "{}", points.len());
    let sent: Vec<_> = points.iter().map(|point| point["sent_bytes"].as_u64()).collect();
    assert!(sent.is_sorted() && sent[0] < sent[sent.len() - 1], "{sent:?}");
    if let Some(file) = std::env::var_os("VMOVE_RECORD") {
        std::fs::write(file, progress.to_string()).expect("recorded");
    }

    let folder = scene.a.folder();
    let (picture, page) = (folder.join("move.svg"), folder.join("move.html"));
    report(&scene.a, &[&id, "--svg", &picture.to_string_lossy()]);
    let svg = std::fs::read_to_string(&picture).expect("a picture");
    let times = |name: &str| -> Vec<f64> {
        let steps = progress["outcome"]["report"][name].as_array().expect("steps");
        steps.iter().map(|step| step["duration_ms"].as_f64().expect("a time")).collect()
    };
    let (phases, pause, drawn) = (times("phases"), times("pause"), bars(&svg));
    assert!(phases.len() >= 6 && pause.len() >= 3, "{progress}");
    assert_eq!(drawn.len(), phases.len() + pause.len(), "{svg}");
    let (all, across): (f64, f64) = (phases.iter().sum(), drawn[..phases.len()].iter().sum());
    for (time, width) in phases.iter().zip(&drawn) {
        assert!((width / across - time / all).abs() < 1e-3, "{time} of {all} ms is {width} of {across}");
    }

    // A file that is there is replaced.
    std::fs::write(&page, "an older page, ".repeat(100_000)).expect("a file");
    let answer = scene.a.ask(&["report", &id, "--html", &page.to_string_lossy()]).expect("a page");
    assert_eq!((answer["id"].as_str(), answer["html"].as_str()), (Some(&*id), page.to_str()));
    let html = std::fs::read_to_string(&page).expect("a page");
    assert!(html.starts_with("<!DOCTYPE html>") && html.contains("<svg") && !html.contains("older page"));
    assert!(html.contains("The slowest page faults") && !html.contains("<script"));
    // The destination remembers it, too.
    assert!(report(&scene.b, &[&id]).contains("The slowest page faults"));

    let missing = folder.join("nowhere/move.svg");
    for (arguments, code, word) in [
        (&["report", "ffffffff"][..], 1, "vfork list"),
        (&["report", &id, "--svg", &missing.to_string_lossy()], 1, "nowhere"),
        (&["report", &id, "--svg", "-"], 2, "standard output"),
        (&["report", &id, "--svg", "a", "--html", "b"], 2, "cannot be used with"),
    ] {
        let end = vmove(&scene.a, arguments).expect("an answer");
        assert!(end.error().contains(word), "{arguments:?}: {} {}", end.answer, end.said);
        assert_eq!(end.code, code, "{arguments:?}: {} {}", end.answer, end.said);
    }
    scene.sound_at(&scene.b).expect("the guest is as it was");
}

#[test]
fn a_migration_that_failed_before_it_began_has_a_report() {
    need!(ready());
    let scene = Scene::new().expect("a guest");
    let end = vmove(&scene.a, &["migrate", "guest", "--to", "127.0.0.1:1"]).expect("an answer");
    assert_eq!(end.code, 1, "{} {}", end.answer, end.said);
    let id = end.answer["id"].as_str().expect("an id").to_owned();
    let text = report(&scene.a, &[&id]);
    assert!(text.contains("failed") && text.contains("until it failed") && text.contains("check"), "{text}");
    assert!(bars(&report(&scene.a, &[&id, "--svg", "-"])).len() == 1);
    assert!(report(&scene.a, &[&id, "--html", "-"]).contains("class=\"bad\""));
}

#[test]
fn a_fork_is_reported_as_a_page_with_its_pause_and_its_children_over_time() {
    need!(ready());
    let scene = Scene::new().expect("a guest");
    let answer = done(&scene.a, &["create", "guest", "--count", "3"]).expect("three children");
    let id = answer["id"].as_str().expect("an id");
    let number = |value: &serde_json::Value| value.as_f64().expect("a number");
    let (stopped, pause) = (number(&answer["parent_stopped_ms"]), number(&answer["parent_pause_ms"]));
    let mut ran: Vec<(String, f64)> = answer["children"]
        .as_array()
        .expect("children")
        .iter()
        .map(|child| (child["name"].as_str().expect("a name").to_owned(), number(&child["running_ms"])))
        .collect();
    ran.sort_by(|a, b| a.1.total_cmp(&b.1));
    assert!(0.0 < stopped && pause > 0.0 && stopped + pause < ran[0].1, "{answer}");

    let file = scene.a.folder().join("fork.html");
    let said = scene.a.ask(&["report", id, "--html", &file.to_string_lossy()]).expect("a page");
    assert_eq!((said["id"].as_str(), said["html"].as_str()), (Some(id), file.to_str()));
    let html = std::fs::read_to_string(&file).expect("a page");
    assert!(html.starts_with("<!DOCTYPE html>") && !html.contains("<script"), "{html}");
    for (name, _) in &ran {
        assert!(html.contains(&format!("<td>{name}</td>")), "{name}: {html}");
        assert!(html.contains(&format!("<td>{name} ran</td>")), "{name}: {html}");
    }
    for part in ["the parent stood still", "Pause of the parent", "Over time", "children that ran"] {
        assert!(html.contains(part), "{part}: {html}");
    }

    // The picture in the page is the one that is written alone.
    let svg = report(&scene.a, &[id, "--svg", "-"]);
    let begin = html.find("<svg").expect("a picture");
    let end = html.find("</svg>").expect("its end") + "</svg>".len();
    assert_eq!(html[begin..end], *svg.trim_end());
    assert_eq!(faults(&svg), Vec::<String>::new());
    let xml = roxmltree::Document::parse(&svg).expect("XML");
    let class = |wanted: &str| {
        let is = |node: &roxmltree::Node<'_, '_>| node.attribute("class") == Some(wanted);
        xml.descendants().find(is).unwrap_or_else(|| panic!("{wanted}: {svg}"))
    };
    // One time axis: where the pause is, and where each child began to run.
    let points: Vec<(f64, f64)> = class("v-line v-rate")
        .attribute("points")
        .expect("points")
        .split(' ')
        .map(|point| {
            let (x, y) = point.split_once(',').expect("x,y");
            (x.parse().expect("x"), y.parse().expect("y"))
        })
        .collect();
    let begin = points[0].0;
    let rises: Vec<f64> =
        points.windows(2).filter(|pair| pair[1].1 < pair[0].1).map(|pair| pair[1].0 - begin).collect();
    assert_eq!(rises.len(), 3, "{points:?}");
    let per_ms = rises[2] / ran[2].1;
    for (x, (name, at)) in rises.iter().zip(&ran) {
        assert!((x - at * per_ms).abs() < 0.5, "{name} at {at}: {x}");
    }
    let band = class("v-band").attribute("x").expect("x").parse::<f64>().expect("x") - begin;
    assert!((band - stopped * per_ms).abs() < 0.5, "{band}, stopped at {stopped}");
    let text = report(&scene.a, &[id]);
    assert!(
        text.contains("children that ran, at most 3") && text.contains("the parent stood still"),
        "{text}"
    );
}
