//! Modules beside each other that know of each other, in a circle of any length.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;
use std::path::Path;

use crate::modules::ModulePath;
use crate::references::Edge;

/// Lines that are shown of what one module knows of another.
const SHOWN: usize = 4;

/// Children of a module by name, and which of them each leads to: the edges between them and what is inside of them.
type Graph<'a> = BTreeMap<&'a str, BTreeMap<&'a str, Vec<&'a Edge>>>;

/// Children of one module that all lead to each other.
#[derive(Debug)]
pub struct Cycle<'a> {
    parent: ModulePath,
    members: BTreeSet<&'a str>,
    graph: Graph<'a>,
}

/// All of a crate.
pub fn find(edges: &[Edge]) -> Vec<Cycle<'_>> {
    let mut graphs: BTreeMap<&[String], Graph<'_>> = BTreeMap::new();
    for edge in edges {
        let common = edge.from.iter().zip(&edge.to).take_while(|(from, to)| from == to).count();
        let (from, to) = (edge.from[common].as_str(), edge.to[common].as_str());
        let graph = graphs.entry(&edge.from[..common]).or_default();
        graph.entry(from).or_default().entry(to).or_default().push(edge);
    }
    let mut found = Vec::new();
    for (parent, graph) in graphs {
        let mut left: BTreeSet<&str> = graph.keys().copied().collect();
        while let Some(start) = left.pop_first() {
            let forth = reached(&graph, start);
            let members: BTreeSet<&str> =
                forth.iter().copied().filter(|other| reached(&graph, other).contains(start)).collect();
            left.retain(|name| !members.contains(name));
            if members.len() > 1 {
                found.push(Cycle { parent: parent.to_vec(), members, graph: graph.clone() });
            }
        }
    }
    found
}

/// Everything that leads from `start`, in one step or more.
fn reached<'a>(graph: &Graph<'a>, start: &str) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut next = VecDeque::from([start]);
    while let Some(name) = next.pop_front() {
        for to in graph.get(name).into_iter().flat_map(BTreeMap::keys) {
            if found.insert(*to) {
                next.push_back(*to);
            }
        }
    }
    found
}

impl<'a> Cycle<'a> {
    /// The shortest circle through its first member, without coming back to that at the end.
    fn shortest(&self) -> Vec<&'a str> {
        let Some(start) = self.members.first().copied() else { return Vec::new() };
        let mut ways = VecDeque::from([vec![start]]);
        let mut seen = BTreeSet::new();
        while let Some(way) = ways.pop_front() {
            let last = way.last().copied().unwrap_or(start);
            for to in self.graph.get(last).into_iter().flat_map(BTreeMap::keys) {
                if *to == start {
                    return way;
                }
                if self.members.contains(to) && seen.insert(*to) {
                    ways.push_back([way.clone(), vec![*to]].concat());
                }
            }
        }
        Vec::new()
    }

    /// For people: who leads to whom, and by which lines.
    pub fn tell(&self, name: &str, root: &Path) -> String {
        let shortest = self.shortest();
        let parent = [&[name.to_owned()], self.parent.as_slice()].concat().join("::");
        let mut text = format!(
            "cycle of {} modules in {parent}: {} -> {}",
            self.members.len(),
            shortest.join(" -> "),
            shortest[0]
        );
        if shortest.len() < self.members.len() {
            let all: Vec<&str> = self.members.iter().copied().collect();
            let _ = write!(text, "; all that lead to each other: {}", all.join(", "));
        }
        for from in &self.members {
            for (to, edges) in self.graph[from].iter().filter(|(to, _)| self.members.contains(*to)) {
                let _ = write!(text, "\n  {from} -> {to}");
                for edge in edges.iter().take(SHOWN) {
                    let file = edge.file.strip_prefix(root).unwrap_or(&edge.file).display();
                    let _ = write!(text, "\n      {file}:{}: {}", edge.line, edge.written);
                }
                if edges.len() > SHOWN {
                    let _ = write!(text, "\n      and {} more", edges.len() - SHOWN);
                }
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edge(from: &str, to: &str, line: usize) -> Edge {
        let path = |text: &str| text.split("::").map(str::to_owned).collect();
        Edge { from: path(from), to: path(to), file: "/r/f.rs".into(), line, written: format!("crate::{to}") }
    }

    #[test]
    fn circles_are_found_with_the_lines_that_make_them() {
        let edges = [
            edge("a", "b", 1),
            edge("b", "c", 2),
            edge("c", "a", 3),
            edge("b", "d", 4),
            edge("e", "a", 5),
            edge("x::y", "x::z", 6),
            edge("x::z", "a", 7),
        ];
        let found = find(&edges);
        assert_eq!(found.len(), 1, "{found:#?}");
        assert_eq!(
            found[0].tell("lib", Path::new("/r")),
            "cycle of 3 modules in lib: a -> b -> c -> a\n  \
               a -> b\n      f.rs:1: crate::b\n  b -> c\n      f.rs:2: crate::c\n  c -> a\n      f.rs:3: crate::a"
        );
    }

    #[test]
    fn a_module_includes_its_children() {
        let edges =
            [edge("a::x", "b", 1), edge("b::y", "a", 2), edge("p::q", "p::r", 3), edge("p::r::s", "p::q", 4)];
        let found = find(&edges);
        assert_eq!(found.len(), 2, "{found:#?}");
        assert!(found[0].tell("lib", Path::new("/")).starts_with("cycle of 2 modules in lib: a -> b -> a\n"));
        assert!(
            found[1].tell("lib", Path::new("/")).starts_with("cycle of 2 modules in lib::p: q -> r -> q\n")
        );
    }
}
