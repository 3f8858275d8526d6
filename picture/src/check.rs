//! What holds for every picture: tests of those who draw ask for it.

use roxmltree::{Document, Node};

use crate::width_of;

/// What is wrong with a picture: no paper of its size, not for light and dark, no title, words that leave it.
#[must_use]
pub fn faults(svg: &str) -> Vec<String> {
    let xml = match Document::parse(svg) {
        Ok(xml) => xml,
        Err(error) => return vec![format!("no XML: {error}")],
    };
    let root = xml.root_element();
    let size: Vec<f64> = root
        .attribute("viewBox")
        .unwrap_or_default()
        .split_whitespace()
        .filter_map(|part| part.parse().ok())
        .collect();
    let [_, _, width, height] = size[..] else { return vec!["no viewBox of four numbers".to_owned()] };
    let mut faults = Vec::new();
    let same = |node: &Node<'_, '_>, name, wanted: f64| {
        number(node, name).is_some_and(|value| (value - wanted).abs() < 0.5)
    };
    let fills = |node: &Node<'_, '_>| same(node, "width", width) && same(node, "height", height);
    if !fills(&root) {
        faults.push("its width and height are not those of the viewBox".to_owned());
    }
    let paper = |node: &Node<'_, '_>| node.attribute("class") == Some("v-paper") && fills(node);
    if !xml.descendants().any(|node| paper(&node)) {
        faults.push("no paper as large as the viewBox".to_owned());
    }
    if !svg.contains("prefers-color-scheme") {
        faults.push("no colours for dark screens".to_owned());
    }
    let title = root.children().find(|node| node.tag_name().name() == "title").and_then(|node| node.text());
    if title.is_none_or(|title| title.trim().is_empty()) {
        faults.push("no title".to_owned());
    }
    if ["NaN", "inf\"", "inf,"].iter().any(|wrong| svg.contains(wrong)) {
        faults.push("a place that is no number".to_owned());
    }
    let texts = xml.descendants().filter(|node| node.tag_name().name() == "text");
    faults.extend(texts.filter_map(|node| leaves(&node, width, height)));
    faults
}

fn number(node: &Node<'_, '_>, name: &str) -> Option<f64> {
    node.attribute(name)?.parse().ok()
}

/// How a text leaves the picture, if it does.
fn leaves(node: &Node<'_, '_>, width: f64, height: f64) -> Option<String> {
    let parts = || node.descendants().filter(|part| part.is_text());
    let words: String = parts().filter_map(|part| part.text()).map(str::trim).collect();
    let (Some(x), Some(y), Some(size)) = (number(node, "x"), number(node, "y"), number(node, "font-size"))
    else {
        return Some(format!("{words:?} has no place or no size"));
    };
    // Parts of it may have a size and a distance of their own.
    let part = |part: Node<'_, '_>| {
        let own = |name| part.parent().and_then(|span| number(&span, name));
        let words = part.text().unwrap_or_default().trim();
        own("dx").unwrap_or(0.0) + width_of(words, 1) * own("font-size").unwrap_or(size)
    };
    let long: f64 = parts().map(part).sum();
    let from = match node.attribute("text-anchor") {
        Some("end") => x - long,
        Some("middle") => x - long / 2.0,
        _ => x,
    };
    let inside = from >= 0.0 && from + long <= width && y - size >= 0.0 && y <= height;
    (!inside).then(|| {
        format!("{words:?} is from {from:.0} to {:.0} at {y:.0}, the picture {width} x {height}", from + long)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Sheet, text, text_around, text_to};

    #[test]
    fn a_sheet_has_no_faults() {
        let mut sheet = Sheet::default();
        sheet.add(text(10.0, 20.0, "v-ink", 12, "inside <it>"));
        sheet.add(text_around(50.0, 40.0, "v-ink", 12, "around"));
        assert_eq!(faults(&sheet.finish("a & b", (100.0, 50.0), "")), Vec::<String>::new());
    }

    #[test]
    fn faults_are_found() {
        let mut sheet = Sheet::default();
        sheet.add(text(80.0, 20.0, "v-ink", 12, "leaves it"));
        sheet.add(text_to(20.0, 20.0, "v-ink", 12, "leaves it"));
        sheet.add(text(10.0, 70.0, "v-ink", 12, "below"));
        assert_eq!(faults(&sheet.finish("", (100.0, 50.0), "")).len(), 4);
        let bare = "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 10 10'/>";
        assert_eq!(faults(bare).len(), 4);
        assert_eq!(faults("<svg").len(), 1);
    }
}
