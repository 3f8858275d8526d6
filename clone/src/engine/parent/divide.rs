//! How many children each node gets.

use std::collections::BTreeSet;

use vmove_types::fork::ForkRequest;

use crate::engine::error::DivisionError;

/// How many children each node gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Division {
    /// On the parent's node.
    pub here: usize,
    /// On other nodes, none of them without a child.
    pub away: Vec<(String, usize)>,
}

impl Division {
    /// As a request has it.
    pub fn of(request: &ForkRequest, own: &str) -> Result<Self, DivisionError> {
        let ForkRequest { count, here, nodes, shares, .. } = request;
        let division = divide(*count, *here, nodes, own)?;
        if shares.is_empty() {
            return Ok(division);
        }
        let mut given = Self { here: here.unwrap_or(0), away: Vec::new() };
        let all = given.here + shares.iter().sum::<usize>();
        if shares.len() != nodes.len() || all != *count {
            let (nodes, count) = (nodes.len(), *count);
            return Err(DivisionError::Shares { shares: shares.len(), nodes, all, count });
        }
        for (node, share) in nodes.iter().zip(shares) {
            if *node == own {
                given.here += share;
            } else if *share > 0 {
                given.away.push((node.clone(), *share));
            }
        }
        Ok(given)
    }
}

/// Divides `count` children among `nodes` in turn; `own` is this node's name among them. With `here`, so many stay, and the
/// others go to the other nodes.
fn divide(count: usize, here: Option<usize>, nodes: &[String], own: &str) -> Result<Division, DivisionError> {
    let mut seen = BTreeSet::new();
    if let Some(twice) = nodes.iter().find(|node| !seen.insert(node.as_str())) {
        return Err(DivisionError::Twice(twice.clone()));
    }
    if nodes.is_empty() {
        return match here {
            Some(here) if here != count => Err(DivisionError::NoNodes { here, count }),
            _ => Ok(Division { here: count, away: Vec::new() }),
        };
    }
    let others: Vec<&String> = nodes.iter().filter(|node| *node != own).collect();
    let (takers, mut division) = match here {
        None => (nodes.iter().collect(), Division { here: 0, away: Vec::new() }),
        Some(here) => (others, Division { here, away: Vec::new() }),
    };
    let Some(rest) = count.checked_sub(division.here) else {
        return Err(DivisionError::TooManyHere { here: division.here, count });
    };
    if takers.is_empty() && rest > 0 {
        return Err(DivisionError::NoOthers(rest));
    }
    for (number, node) in takers.iter().enumerate() {
        let share = rest / takers.len() + usize::from(number < rest % takers.len());
        if *node == own {
            division.here += share;
        } else if share > 0 {
            division.away.push(((*node).clone(), share));
        }
    }
    Ok(division)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn divided(
        count: usize,
        here: Option<usize>,
        nodes: &[&str],
    ) -> Result<(usize, Vec<(String, usize)>), DivisionError> {
        let nodes: Vec<String> = nodes.iter().map(|n| (*n).to_owned()).collect();
        divide(count, here, &nodes, "a").map(|found| (found.here, found.away))
    }

    fn away(list: &[(&str, usize)]) -> Vec<(String, usize)> {
        list.iter().map(|(node, count)| ((*node).to_owned(), *count)).collect()
    }

    #[test]
    fn children_are_divided_in_turn() {
        assert_eq!(divided(3, None, &[]), Ok((3, away(&[]))));
        assert_eq!(divided(5, None, &["b", "c"]), Ok((0, away(&[("b", 3), ("c", 2)]))));
        assert_eq!(divided(5, None, &["b", "a"]), Ok((2, away(&[("b", 3)]))));
        assert_eq!(divided(5, Some(2), &["b", "c", "a"]), Ok((2, away(&[("b", 2), ("c", 1)]))));
        assert_eq!(
            divided(1, None, &["b", "c"]),
            Ok((0, away(&[("b", 1)]))),
            "a node without a child is not asked"
        );
        assert_eq!(divided(2, Some(2), &["b"]), Ok((2, away(&[]))));
    }

    #[test]
    fn each_node_gets_its_share() {
        let request = |count, shares: &[usize]| ForkRequest {
            count,
            nodes: ["b", "a", "c"].map(str::to_owned).to_vec(),
            shares: shares.to_vec(),
            ..ForkRequest::default()
        };
        let given = Division::of(&request(4, &[3, 1, 0]), "a").unwrap();
        assert_eq!(given, Division { here: 1, away: away(&[("b", 3)]) });
        for (count, shares) in [(4, &[3, 1][..]), (5, &[3, 1, 0])] {
            let wrong = Division::of(&request(count, shares), "a").unwrap_err();
            assert!(matches!(wrong, DivisionError::Shares { .. }), "{wrong}");
        }
        let more = Division::of(&ForkRequest { here: Some(1), ..request(4, &[2, 0, 1]) }, "a").unwrap();
        assert_eq!(more, Division { here: 1, away: away(&[("b", 2), ("c", 1)]) });
        Division::of(&ForkRequest { here: Some(1), ..request(4, &[3, 1, 0]) }, "a").unwrap_err();
    }

    #[test]
    fn nonsense_is_refused() {
        for (count, here, nodes) in
            [(3, Some(1), &[][..]), (3, Some(4), &["b"]), (3, Some(1), &["a"]), (3, None, &["b", "b"])]
        {
            divided(count, here, nodes).unwrap_err();
        }
    }
}
