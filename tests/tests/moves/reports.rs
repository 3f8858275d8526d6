//! `vmove report` of real migrations: as text, picture and page.
#![cfg(test)]

use std::process::Output;

use vmove_skip::need;
use vmove_tests::daemon::Node;
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
