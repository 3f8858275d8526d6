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

/// Name, kind and content of each.
pub(super) const FILES: &[(&str, &str, &str)] = &[
    file!("index.html", HTML),
    file!("page.css", CSS),
    file!("icon.svg", SVG),
    file!("page.js", SCRIPT),
    file!("node.js", SCRIPT),
    file!("overview.js", SCRIPT),
    file!("migration.js", SCRIPT),
    file!("report.js", SCRIPT),
    file!("drawing.js", SCRIPT),
    file!("forks.js", SCRIPT),
    file!("words.js", SCRIPT),
];

/// Each by its name, and the page itself at the root.
pub(super) fn router<S: Clone + Send + Sync + 'static>() -> Router<S> {
    FILES.iter().fold(Router::new(), |router, &(name, kind, content)| {
        let path = if name == "index.html" { "/".to_owned() } else { format!("/{name}") };
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
        for (name, _, content) in FILES {
            // Names of XML, which nobody asks for.
            let content = content.replace("http://www.w3.org/2000/svg", "");
            for word in FORBIDDEN {
                assert!(!content.contains(word), "{name} contains {word}");
            }
        }
    }

    #[test]
    fn each_import_is_a_file_of_the_page() {
        for (name, _, content) in FILES.iter().filter(|(_, kind, _)| *kind == SCRIPT) {
            for line in content.lines().filter(|line| line.starts_with("import ")) {
                let imported = line.split('"').nth(1).and_then(|from| from.strip_prefix("./"));
                assert!(FILES.iter().any(|(other, ..)| Some(*other) == imported), "{name}: {line}");
            }
        }
    }
}
