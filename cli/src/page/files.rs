//! The files of the page, which are part of the program.

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

macro_rules! file {
    ($name:literal, $kind:expr) => {
        ($name, $kind, include_str!(concat!("files/", $name)))
    };
}

/// Name, kind and content of what both pages have.
const SHARED: &[(&str, &str, &str)] = &[
    file!("page.css", CSS),
    file!("icon.svg", SVG),
    file!("asking.js", SCRIPT),
    file!("drawing.js", SCRIPT),
    file!("views.js", SCRIPT),
    file!("words.js", SCRIPT),
];

/// The same of the page of a node; its HTML is at the root.
const NODE: &[(&str, &str, &str)] = &[
    file!("index.html", HTML),
    file!("page.js", SCRIPT),
    file!("overview.js", SCRIPT),
    file!("migration.js", SCRIPT),
    file!("report.js", SCRIPT),
    file!("forks.js", SCRIPT),
];

/// The same of the page of the fleet.
const FLEET: &[(&str, &str, &str)] = &[
    file!("fleet.html", HTML),
    file!("fleet.js", SCRIPT),
    file!("fleet-overview.js", SCRIPT),
    file!("fleet-node.js", SCRIPT),
    file!("fleet-lease.js", SCRIPT),
    file!("fleet-plan.js", SCRIPT),
    file!("switches.js", SCRIPT),
];

/// The page of a node.
pub(super) fn of_node() -> Router {
    router(NODE)
}

/// The page of the fleet.
pub(super) fn of_fleet() -> Router {
    router(FLEET)
}

/// Each by its name, and the page itself at the root.
fn router(own: &'static [(&str, &str, &str)]) -> Router {
    own.iter().chain(SHARED).fold(Router::new(), |router, &(name, kind, content)| {
        let path = if kind == HTML { "/".to_owned() } else { format!("/{name}") };
        router.route(&path, get(move || async move { ([(CONTENT_TYPE, kind)], content) }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What would make the page ask others, or take text for HTML. Chromium refuses it as well, by the policy of the page.
    const FORBIDDEN: [&str; 10] = [
        "http:",
        "https:",
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "style=",
        "@import",
    ];

    #[test]
    fn nothing_of_the_page_comes_from_elsewhere_or_is_made_of_text() {
        for (name, _, content) in NODE.iter().chain(FLEET).chain(SHARED) {
            // Names of XML, which nobody asks for.
            let content = content.replace("http://www.w3.org/2000/svg", "");
            for word in FORBIDDEN {
                assert!(!content.contains(word), "{name} contains {word}");
            }
        }
    }

    #[test]
    fn each_import_is_a_file_of_the_page() {
        for own in [NODE, FLEET] {
            let files = || own.iter().chain(SHARED);
            for (name, _, content) in files().filter(|(_, kind, _)| *kind == SCRIPT) {
                for line in content.lines().filter(|line| line.starts_with("import ")) {
                    let imported = line.split('"').nth(1).and_then(|from| from.strip_prefix("./"));
                    assert!(files().any(|(other, ..)| Some(*other) == imported), "{name}: {line}");
                }
            }
        }
    }
}
