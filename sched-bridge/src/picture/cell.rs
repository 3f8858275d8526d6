//! A node as a cell: name, devices, letters of clusters.

use svg::node::element::{Circle, Rectangle, Title};
use vmove_picture::{COLOURS, count, fitting, tenth, text_to, width_of};

use super::known::Known;
use super::{NodeSeen, Picture};
use crate::model::NodeName;

const HEIGHT: f64 = 20.0;
/// More of a cell with a second line.
const SECOND: f64 = 15.0;
const GAP: f64 = 8.0;
const PAD: f64 = 6.0;
const SIZE: u32 = 11;
/// Most devices that are drawn one by one.
const ONE_BY_ONE: [usize; 3] = [8, 6, 4];

/// What all cells of a picture share.
pub(super) struct Layout {
    width: f64,
    /// Room for names.
    name: f64,
    /// With more devices of a kind, their number is written.
    most: usize,
    numbers: bool,
}

/// Devices of one kind on a node.
struct Devices {
    all: usize,
    free: usize,
    /// How many each cluster has.
    held: Vec<(usize, usize)>,
}

/// Who has a device.
#[derive(Clone, Copy)]
enum Holder {
    Nobody,
    Cluster(usize),
    Others,
}

impl Holder {
    fn class(self) -> String {
        match self {
            Self::Nobody => "v-free".to_owned(),
            Self::Cluster(at) => format!("v-c{}", at % COLOURS),
            Self::Others => "v-others".to_owned(),
        }
    }
}

impl Devices {
    fn holders(&self) -> Vec<Holder> {
        let taken = self.all.saturating_sub(self.free);
        let known = self.held.iter().flat_map(|(at, count)| vec![Holder::Cluster(*at); *count]);
        let mut holders: Vec<Holder> = known.take(self.all).collect();
        while holders.len() < taken {
            holders.push(Holder::Others);
        }
        holders.resize(self.all, Holder::Nobody);
        holders
    }

    fn numbers(&self) -> String {
        format!("{}/{}", self.free, self.all)
    }
}

/// Space of devices of a kind, each `step` wide.
fn space(all: usize, free: usize, most: usize, step: f64) -> f64 {
    match all {
        0 => 0.0,
        all if all <= most => count(all) * step + 4.0,
        _ => step + 3.0 + width_of(&format!("{free}/{all}"), SIZE) + 4.0,
    }
}

fn spaces(node: &NodeSeen, most: usize) -> f64 {
    // As wide as when all are free.
    space(node.gpus, node.gpus, most, 9.0) + space(node.adapters, node.adapters, most, 10.0)
}

impl Layout {
    pub fn new(known: &Known<'_>, across: f64) -> Self {
        let width = across - GAP;
        let longest = known.shown.iter().map(|name| width_of(known.short(name), SIZE)).fold(0.0, f64::max);
        let nodes: Vec<&NodeSeen> = known.shown.iter().filter_map(|name| known.node(name)).collect();
        let widest = |most: usize| nodes.iter().map(|node| spaces(node, most)).fold(0.0, f64::max);
        // Names have what devices and a letter leave.
        let room = |most: usize| (width - 3.0 * PAD - widest(most) - width_of("A", SIZE)).max(0.0);
        let most = ONE_BY_ONE.into_iter().find(|most| longest <= room(*most)).unwrap_or(ONE_BY_ONE[2]);
        let numbers = nodes.iter().any(|node| node.gpus > most || node.adapters > most);
        Self { width, name: longest.min(room(most)), most, numbers }
    }

    /// Whether numbers are written in place of devices.
    pub fn says_numbers(&self) -> bool {
        self.numbers
    }
}

/// What is written in a cell besides its name.
struct Notes {
    /// Where the devices begin.
    devices: f64,
    letters: String,
    /// The letters have their place behind the devices.
    beside: bool,
    away: Option<(&'static str, &'static str)>,
}

impl Notes {
    fn of(known: &Known<'_>, layout: &Layout, name: &NodeName) -> Self {
        let devices = PAD + layout.name + PAD;
        let letters: Vec<&str> =
            known.parts(name).map(|(at, _)| known.clusters[at].letters.as_str()).collect();
        let end = devices + known.node(name).map_or(0.0, |node| spaces(node, layout.most));
        let beside = width_of(&letters.join(" "), SIZE) <= layout.width - end - PAD;
        let away = known.away(name);
        let word = away.map_or(0.0, |(word, _)| width_of(word, SIZE) + PAD);
        Self { devices, letters: listed(&letters, layout.width - 2.0 * PAD - word), beside, away }
    }

    fn height(&self) -> f64 {
        if self.away.is_some() || !self.beside { HEIGHT + SECOND } else { HEIGHT }
    }
}

/// As many letters as there is room for, and how many more there are.
fn listed(letters: &[&str], room: f64) -> String {
    let said = |shown: usize| match letters.len() - shown {
        0 => letters.join(" "),
        more => format!("{} +{more}", letters[..shown].join(" ")),
    };
    (0..=letters.len()).rev().map(said).find(|said| width_of(said, SIZE) <= room).unwrap_or_default()
}

impl<'a> Picture<'a> {
    /// Nodes in rows of three cells, each row as high as its highest cell.
    pub(super) fn cells(&mut self, layout: &Layout, left: f64, nodes: &[&'a NodeName]) {
        self.y -= 10.0;
        for row in nodes.chunks(3) {
            let notes: Vec<Notes> = row.iter().map(|name| Notes::of(self.known, layout, name)).collect();
            let mut x = left;
            for (name, note) in row.iter().zip(&notes) {
                self.cell(layout, x, name, note);
                x += layout.width + GAP;
            }
            self.y += notes.iter().map(Notes::height).fold(HEIGHT, f64::max) + 4.0;
        }
        self.y += 20.0;
    }

    fn cell(&mut self, layout: &Layout, x: f64, name: &NodeName, notes: &Notes) {
        let class = notes.away.map_or("v-cell", |(_, class)| class);
        let frame = Rectangle::new().set("class", class).set("x", tenth(x)).set("y", tenth(self.y));
        let frame = frame.set("width", tenth(layout.width)).set("height", notes.height()).set("rx", 3);
        // The tooltip is that of all of the cell, not only of its frame.
        self.sheet.add(frame.set("pointer-events", "all").add(Title::new(self.known.described(name))));
        let baseline = self.y + 14.0;
        let short = fitting(self.known.short(name), SIZE, layout.name);
        self.sheet.words(x + PAD, baseline, "v-ink", SIZE, &short);
        if let Some(node) = self.known.node(name) {
            let held = |of: fn(&super::known::Part<'_>) -> usize| {
                self.known.parts(name).map(|(at, part)| (at, of(part))).collect()
            };
            let gpus = Devices { all: node.gpus, free: node.gpus_free, held: held(|part| part.gpus) };
            let adapters =
                Devices { all: node.adapters, free: node.adapters_free, held: held(|part| part.adapters) };
            let at = x + notes.devices;
            let used = space(node.gpus, node.gpus, layout.most, 9.0);
            self.devices(at, &gpus, layout.most, false);
            self.devices(at + used, &adapters, layout.most, true);
        }
        let second = baseline + SECOND;
        if let Some((word, _)) = notes.away {
            self.sheet.words(x + PAD, second, "v-warn", SIZE, word);
        }
        let at = if notes.beside { baseline } else { second };
        if !notes.letters.is_empty() {
            self.sheet.add(text_to(x + layout.width - PAD, at, "v-ink", SIZE, &notes.letters));
        }
    }

    /// Devices one by one, or one of them and how many are free.
    fn devices(&mut self, x: f64, devices: &Devices, most: usize, round: bool) {
        let step = if round { 10.0 } else { 9.0 };
        let holders = devices.holders();
        let drawn = if holders.len() <= most { holders.len() } else { 1 };
        let mut at = x;
        for holder in holders.iter().take(drawn) {
            if round {
                let circle = Circle::new().set("class", holder.class()).set("cx", tenth(at + 4.0));
                self.sheet.add(circle.set("cy", tenth(self.y + 10.0)).set("r", 4));
            } else {
                let pip = Rectangle::new().set("class", holder.class()).set("x", tenth(at));
                self.sheet.add(pip.set("y", tenth(self.y + 5.0)).set("width", 7).set("height", 10));
            }
            at += step;
        }
        if holders.len() > most {
            self.sheet.words(at + 3.0, self.y + 14.0, "v-ink", SIZE, &devices.numbers());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_that_do_not_fit_are_counted() {
        assert_eq!(listed(&["A", "B", "C"], 100.0), "A B C");
        assert_eq!(listed(&["A", "B", "C", "D", "E", "F"], 45.0), "A B +4");
        assert_eq!(listed(&[], 0.0), "");
    }

    #[test]
    fn devices_that_no_known_cluster_has_are_of_others() {
        let devices = Devices { all: 4, free: 1, held: vec![(2, 1), (7, 1)] };
        let classes: Vec<String> = devices.holders().into_iter().map(Holder::class).collect();
        assert_eq!(classes, ["v-c2", "v-c1", "v-others", "v-free"]);
        let gone = Devices { all: 1, free: 0, held: vec![(0, 3)] };
        assert_eq!(gone.holders().len(), 1);
    }
}
