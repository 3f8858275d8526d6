//! A picture of switches, nodes and the VMs on them, as SVG.

use std::collections::BTreeMap;

use svg::Document;
use svg::node::element::{Group, Line, Rectangle, Text, Title};

use crate::model::{Assignment, NodeName};
use crate::topology::{SwitchId, Topology};

const CELL: f64 = 14.0;
const ROW: f64 = 60.0;
const PAD: f64 = 20.0;
/// Nodes of a leaf switch in one row of the picture.
const COLUMNS: usize = 8;

/// Colours of clusters, in the order of their names. Colour-blind readers can tell them apart, too (Okabe and Ito 2008).
const COLOURS: [&str; 7] = ["#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7"];

/// Draws switches above their nodes. A node with VMs has the colour of the first of their clusters, and lists all VMs in its tooltip.
#[must_use]
pub fn draw(topology: &Topology, clusters: &BTreeMap<String, Vec<Assignment>>) -> String {
    let mut picture =
        Picture { topology, vms: BTreeMap::new(), shapes: Group::new(), right: PAD, bottom: 0.0 };
    for (colour, (cluster, assignments)) in clusters.iter().enumerate() {
        for assignment in assignments {
            let here = picture.vms.entry(assignment.node.clone()).or_insert((colour, Vec::new()));
            here.1.push(format!("{cluster}: {}", assignment.vm));
        }
    }
    for root in topology.roots() {
        picture.switch(root, topology.switch(root).height);
    }
    picture.legend(clusters)
}

struct Picture<'a> {
    topology: &'a Topology,
    vms: BTreeMap<NodeName, (usize, Vec<String>)>,
    shapes: Group,
    right: f64,
    bottom: f64,
}

impl Picture<'_> {
    fn add(&mut self, shape: impl svg::Node) {
        self.shapes = std::mem::replace(&mut self.shapes, Group::new()).add(shape);
    }

    /// Draws a switch and all below it to the right of the picture so far. Returns the x coordinate of its centre.
    fn switch(&mut self, id: SwitchId, rows: u32) -> f64 {
        let switch = self.topology.switch(id);
        let y = PAD + f64::from(rows - switch.height) * ROW;
        let mut middles: Vec<(f64, u32)> = Vec::new();
        for child in &switch.children {
            middles.push((self.switch(*child, rows), self.topology.switch(*child).height));
        }
        let start = self.right;
        if !switch.nodes.is_empty() {
            self.nodes(&switch.nodes, PAD + f64::from(rows) * ROW);
            middles.push(((start + self.right - PAD) / 2.0, 0));
        }
        let sum: f64 = middles.iter().map(|(middle, _)| middle).sum();
        let count = u32::try_from(middles.len().max(1)).map_or(1.0, f64::from);
        let middle = if middles.is_empty() { start } else { sum / count };
        for (x, height) in middles {
            let to = PAD + f64::from(rows - height) * ROW;
            let line = Line::new().set("x1", middle).set("y1", y + 16.0).set("x2", x).set("y2", to);
            self.add(line.set("stroke", "#888"));
        }
        let title = Title::new(format!("{}, {} nodes", switch.name, self.topology.nodes_below(id).len()));
        let shape = Rectangle::new().set("x", middle - 30.0).set("y", y).set("width", 60).set("height", 16);
        self.add(shape.set("fill", "#eee").set("stroke", "#444").add(title));
        self.add(label(middle - 28.0, y + 12.0, switch.name.as_str()));
        middle
    }

    fn nodes(&mut self, nodes: &[NodeName], top: f64) {
        let start = self.right;
        let (mut x, mut y) = (start, top);
        for (at, node) in nodes.iter().enumerate() {
            if at > 0 && at % COLUMNS == 0 {
                (x, y) = (start, y + CELL);
            }
            let (colour, words) = match self.vms.get(node) {
                Some((colour, vms)) => {
                    (COLOURS[colour % COLOURS.len()], format!("{node}\n{}", vms.join("\n")))
                }
                None => ("#fff", node.to_string()),
            };
            let cell =
                Rectangle::new().set("x", x).set("y", y).set("width", CELL - 2.0).set("height", CELL - 2.0);
            self.add(cell.set("fill", colour).set("stroke", "#444").add(Title::new(words)));
            x += CELL;
            self.right = self.right.max(x);
            self.bottom = self.bottom.max(y + CELL);
        }
        self.right = self.right.max(start + 64.0) + PAD;
    }

    fn legend(mut self, clusters: &BTreeMap<String, Vec<Assignment>>) -> String {
        let mut y = self.bottom + PAD;
        for (at, (cluster, assignments)) in clusters.iter().enumerate() {
            let cell =
                Rectangle::new().set("x", PAD).set("y", y).set("width", CELL - 2.0).set("height", CELL - 2.0);
            self.add(cell.set("fill", COLOURS[at % COLOURS.len()]).set("stroke", "#444"));
            self.add(label(PAD + CELL + 4.0, y + 10.0, &format!("{cluster}: {} VMs", assignments.len())));
            y += CELL + 4.0;
        }
        let shapes = std::mem::replace(&mut self.shapes, Group::new());
        Document::new().set("viewBox", (0, 0, self.right.max(200.0), y + PAD)).add(shapes).to_string()
    }
}

fn label(x: f64, y: f64, words: &str) -> Text {
    let short: String = words.chars().take(40).collect();
    Text::new(short).set("x", x).set("y", y).set("font-size", 10).set("font-family", "sans-serif")
}
