//! Which node gets how many children.

use std::collections::BTreeSet;

use crate::api::problem::{Code, Problem};

/// How children are dealt out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deal {
    /// On the parent's node.
    pub here: usize,
    /// On other nodes, none of them without a child.
    pub away: Vec<(String, usize)>,
}

/// Deals `count` children out to `nodes` in turn; `own` is this node's name among them. With `here`, so many stay, and the
/// others go to the other nodes.
pub fn deal(count: usize, here: Option<usize>, nodes: &[String], own: &str) -> Result<Deal, Problem> {
    let bad = |text: String| Problem::new(Code::BadOption, text);
    let mut seen = BTreeSet::new();
    if let Some(twice) = nodes.iter().find(|node| !seen.insert(node.as_str())) {
        return Err(bad(format!("Expected each node once, found {twice:?} twice")));
    }
    if nodes.is_empty() {
        return match here {
            Some(here) if here != count => {
                Err(bad(format!("{here} of {count} children are to be here: name the nodes of the others")))
            }
            _ => Ok(Deal { here: count, away: Vec::new() }),
        };
    }
    let others: Vec<&String> = nodes.iter().filter(|node| *node != own).collect();
    let (takers, mut deal) = match here {
        None => (nodes.iter().collect(), Deal { here: 0, away: Vec::new() }),
        Some(here) => (others, Deal { here, away: Vec::new() }),
    };
    let Some(rest) = count.checked_sub(deal.here) else {
        return Err(bad(format!("Expected at most {count} children here, found {}", deal.here)));
    };
    if takers.is_empty() && rest > 0 {
        return Err(bad(format!("{rest} children are to be elsewhere, and no other node is named")));
    }
    for (number, node) in takers.iter().enumerate() {
        let share = rest / takers.len() + usize::from(number < rest % takers.len());
        if *node == own {
            deal.here += share;
        } else if share > 0 {
            deal.away.push(((*node).clone(), share));
        }
    }
    Ok(deal)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dealt(
        count: usize,
        here: Option<usize>,
        nodes: &[&str],
    ) -> Result<(usize, Vec<(String, usize)>), String> {
        let nodes: Vec<String> = nodes.iter().map(|n| (*n).to_owned()).collect();
        deal(count, here, &nodes, "a").map(|deal| (deal.here, deal.away)).map_err(|problem| problem.message)
    }

    fn away(list: &[(&str, usize)]) -> Vec<(String, usize)> {
        list.iter().map(|(node, count)| ((*node).to_owned(), *count)).collect()
    }

    #[test]
    fn children_are_dealt_out_in_turn() {
        assert_eq!(dealt(3, None, &[]), Ok((3, away(&[]))));
        assert_eq!(dealt(5, None, &["b", "c"]), Ok((0, away(&[("b", 3), ("c", 2)]))));
        assert_eq!(dealt(5, None, &["b", "a"]), Ok((2, away(&[("b", 3)]))));
        assert_eq!(dealt(5, Some(2), &["b", "c", "a"]), Ok((2, away(&[("b", 2), ("c", 1)]))));
        assert_eq!(
            dealt(1, None, &["b", "c"]),
            Ok((0, away(&[("b", 1)]))),
            "a node without a child is not asked"
        );
        assert_eq!(dealt(2, Some(2), &["b"]), Ok((2, away(&[]))));
    }

    #[test]
    fn nonsense_is_refused() {
        for (count, here, nodes) in
            [(3, Some(1), &[][..]), (3, Some(4), &["b"]), (3, Some(1), &["a"]), (3, None, &["b", "b"])]
        {
            dealt(count, here, nodes).unwrap_err();
        }
    }
}
