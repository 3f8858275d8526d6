//! Many nodes: a square each.

use svg::node::element::{Rectangle, Title};
use vmove_picture::{MARGIN, count, tenth};

use super::known::{Known, number};
use super::{NodeSeen, Picture};
use crate::model::NodeName;

const SIDE: f64 = 14.0;
const ACROSS: f64 = SIDE + 2.0;
const COLUMNS: usize = 40;

/// The share that is held of what is scarcest, as one of four shades; 0: nothing is held.
fn shade(node: &NodeSeen) -> usize {
    let cores = |cores: u32| usize::try_from(cores).unwrap_or(usize::MAX);
    [(node.gpus, node.gpus_free), (cores(node.cores), cores(node.cores_free))]
        .into_iter()
        .filter(|(all, _)| *all > 0)
        .map(|(all, free)| (all.saturating_sub(free) * 4).div_ceil(all))
        .max()
        .unwrap_or(0)
}

fn class(known: &Known<'_>, name: &NodeName) -> String {
    let frame = known.away(name).map_or("v-cell", |(_, class)| class);
    format!("{frame} v-use{}", known.node(name).map_or(0, shade))
}

impl<'a> Picture<'a> {
    pub(super) fn squares(&mut self, left: f64, nodes: &[&'a NodeName]) {
        self.y -= 10.0;
        for row in nodes.chunks(COLUMNS) {
            for (at, name) in row.iter().enumerate() {
                let title = Title::new(self.known.described(name));
                self.square(left + ACROSS * count(at), &class(self.known, name), Some(title));
            }
            self.y += ACROSS;
        }
        self.y += 22.0;
    }

    fn square(&mut self, x: f64, class: &str, title: Option<Title>) {
        let square = Rectangle::new().set("class", class).set("x", tenth(x)).set("y", tenth(self.y));
        let square = square.set("width", SIDE).set("height", SIDE);
        self.sheet.add(match title {
            Some(title) => square.add(title),
            None => square,
        });
    }

    /// What the shades and borders of squares are.
    pub(super) fn shades(&mut self) {
        let vms: usize = self.known.clusters.iter().map(|cluster| cluster.vms).sum();
        let said = format!(
            "{} with {}. Each square is a node; its name and its VMs are in its tooltip.",
            number(self.known.clusters.len(), "cluster"),
            number(vms, "VM")
        );
        self.sheet.words(MARGIN, self.y, "v-ink", 12, &said);
        self.y += 14.0;
        let mut x = MARGIN;
        for (classes, words) in [
            (&["v-cell v-use0"][..], "nothing in use"),
            (&["v-cell v-use1", "v-cell v-use2", "v-cell v-use3", "v-cell v-use4"], "to all in use"),
            (&["v-drained v-use0"], "drained"),
            (&["v-down v-use0"], "down"),
            (&["v-unknown v-use0"], "no inventory"),
        ] {
            for class in classes {
                self.square(x, class, None);
                x += ACROSS;
            }
            self.sheet.words(x + 4.0, self.y + 11.0, "v-ink", 12, words);
            x += 4.0 + vmove_picture::width_of(words, 12) + 10.0;
        }
        self.y += ACROSS;
    }
}
