//! A picture of switches, nodes, their devices and who has them, as SVG.

mod cell;
mod known;
mod square;

use std::collections::BTreeMap;

use svg::node::element::{Circle, Rectangle, TSpan, Text};
use vmove_picture::{COLOURS, MARGIN, Sheet, WIDTH, fitting, tenth, width_of};

use crate::model::{Assignment, NodeName, NodeState};
use crate::topology::{SwitchId, Topology};
use known::Known;

/// How much farther in a switch is than the one above it, and how often at most.
const STEP: f64 = 18.0;
const STEPS: u32 = 6;
/// With more nodes, they are squares.
const CELLS: usize = 400;

const STYLE: &str = "
.v-cell{fill:none;stroke:#d1d9e0}.v-drained{fill:none;stroke:#d55e00;stroke-width:1.5;stroke-dasharray:4 3}
.v-down{fill:none;stroke:#b3261e;stroke-width:1.5}.v-unknown{fill:none;stroke:#59636e;stroke-dasharray:1 3}
.v-free{fill:none;stroke:#59636e}.v-others{fill:#8c959f}.v-warn{fill:#a04000}
.v-use0{fill:#ffffff}.v-use1{fill:#c6dbef}.v-use2{fill:#84b5dc}.v-use3{fill:#3b8bc4}.v-use4{fill:#0b5a94}
@media (prefers-color-scheme:dark){
.v-cell{stroke:#3a424b}.v-drained{stroke:#f0883e}.v-down{stroke:#ff8f87}.v-unknown{stroke:#9da7b1}
.v-free{stroke:#9da7b1}.v-others{fill:#6e7681}.v-warn{fill:#f0883e}
.v-use0{fill:#15191e}.v-use1{fill:#173a56}.v-use2{fill:#1f5f90}.v-use3{fill:#338fcd}.v-use4{fill:#8fd0ff}
}
";

/// What a bridge knows of a node.
#[derive(Debug, Clone)]
pub struct NodeSeen {
    /// Its name.
    pub name: NodeName,
    /// Whether VMs may be put there.
    pub state: NodeState,
    /// All GPUs.
    pub gpus: usize,
    /// GPUs that are not held.
    pub gpus_free: usize,
    /// All adapters and virtual functions.
    pub adapters: usize,
    /// Those that are not held.
    pub adapters_free: usize,
    /// All hardware threads.
    pub cores: u32,
    /// Hardware threads that are not held.
    pub cores_free: u32,
}

/// What a bridge knows of a fleet.
#[derive(Debug, Clone, Default)]
pub struct Fleet {
    /// Nodes with an inventory.
    pub nodes: Vec<NodeSeen>,
    /// What clusters hold.
    pub clusters: BTreeMap<String, Vec<Assignment>>,
}

/// Draws switches from the top down, and below each its nodes. Without a fleet, it says that nothing is known of what is taken.
#[must_use]
pub fn draw(topology: &Topology, fleet: Option<&Fleet>) -> String {
    let known = Known::new(topology, fleet);
    let mut picture = Picture { topology, known: &known, sheet: Sheet::default(), y: 32.0 };
    picture.heading();
    let how = if known.shown.len() > CELLS { How::Squares } else { How::Cells(picture.layout()) };
    for root in topology.roots() {
        picture.switch(root, &how);
    }
    if !known.alone.is_empty() {
        picture.line(0.0, "below no switch", &known.alone);
        picture.nodes(0.0, &known.alone, &how);
    }
    if known.fleet.is_some() {
        picture.legend(&how);
    }
    let height = picture.y + MARGIN;
    picture.sheet.finish("The fleet by its switches", (WIDTH, height), STYLE)
}

/// How nodes are drawn.
enum How {
    Cells(cell::Layout),
    Squares,
}

/// A picture that grows downwards.
struct Picture<'a> {
    topology: &'a Topology,
    known: &'a Known<'a>,
    sheet: Sheet,
    y: f64,
}

impl<'a> Picture<'a> {
    fn heading(&mut self) {
        self.sheet.words(MARGIN, self.y, "v-ink v-bold", 16, "The fleet by its switches");
        self.y += 20.0;
        let names: Vec<&NodeName> = self.known.shown.clone();
        let room = WIDTH - 2.0 * MARGIN;
        self.sheet.words(MARGIN, self.y, "v-soft", 12, &fitting(&self.known.summary(&names), 12, room));
        if !self.known.domain.is_empty() {
            self.y += 18.0;
            let said = format!("names of nodes without {}", self.known.domain);
            self.sheet.words(MARGIN, self.y, "v-soft", 12, &fitting(&said, 12, room));
        }
        if self.known.fleet.is_none() {
            self.y += 18.0;
            let said = "no bridge answered: what is taken is not known";
            self.sheet.words(MARGIN, self.y, "v-warn", 12, said);
        }
        self.y += 26.0;
    }

    /// Cells as wide as there is room for below the switch that is farthest in.
    fn layout(&self) -> cell::Layout {
        let deepest = self.topology.switches().iter().map(|switch| switch.depth).max().unwrap_or(0);
        let left = MARGIN + STEP * f64::from(deepest.min(STEPS)) + 4.0;
        cell::Layout::new(self.known, (WIDTH - MARGIN - left) / 3.0)
    }

    /// A switch, its nodes, and all switches below it.
    fn switch(&mut self, id: SwitchId, how: &How) {
        let switch = self.topology.switch(id);
        let indent = STEP * f64::from(switch.depth.min(STEPS));
        let name = match &switch.link_speed {
            Some(speed) => format!("{} ({speed})", switch.name),
            None => switch.name.to_string(),
        };
        self.line(indent, &name, &self.topology.nodes_below(id));
        let top = self.y;
        let nodes: Vec<&NodeName> = switch.nodes.iter().collect();
        self.nodes(indent, &nodes, how);
        for child in &switch.children {
            self.switch(*child, how);
        }
        let x = MARGIN + indent - 8.0;
        self.sheet.line("v-rule", (x, top - 22.0), (x, self.y - 24.0));
    }

    /// The line of a switch: what is below it.
    fn line(&mut self, indent: f64, name: &str, nodes: &[&NodeName]) {
        let x = MARGIN + indent;
        let summary = self.known.summary(nodes);
        let room = WIDTH - MARGIN - x - width_of(&summary, 12) - 16.0;
        let name = TSpan::new(fitting(name, 13, room)).set("font-weight", 600);
        let rest = TSpan::new(summary).set("class", "v-soft").set("font-size", 12).set("dx", 8);
        let line = Text::new("").set("class", "v-ink").set("x", tenth(x)).set("y", tenth(self.y));
        self.sheet.add(line.set("font-size", 13).add(name).add(rest));
        self.y += 20.0;
    }

    fn nodes(&mut self, indent: f64, nodes: &[&'a NodeName], how: &How) {
        let x = MARGIN + indent + 4.0;
        match how {
            _ if nodes.is_empty() => {}
            How::Cells(layout) => self.cells(layout, x, nodes),
            How::Squares => self.squares(x, nodes),
        }
    }

    fn legend(&mut self, how: &How) {
        match how {
            How::Cells(layout) => {
                self.clusters();
                self.signs(layout.says_numbers());
            }
            How::Squares => self.shades(),
        }
    }

    /// Letters, colours and names of clusters.
    fn clusters(&mut self) {
        if self.known.clusters.is_empty() {
            return;
        }
        self.sheet.words(MARGIN, self.y, "v-ink v-bold", 13, "Clusters");
        let across = (WIDTH - 2.0 * MARGIN) / 3.0;
        for (at, cluster) in self.known.clusters.iter().enumerate() {
            let column = u32::try_from(at % 3).map_or(0.0, f64::from);
            if at % 3 == 0 {
                self.y += 20.0;
            }
            let x = MARGIN + across * column;
            let square = Rectangle::new().set("x", tenth(x)).set("y", tenth(self.y - 10.0));
            let square = square.set("class", format!("v-c{}", at % COLOURS));
            self.sheet.add(square.set("width", 12).set("height", 12));
            let vms = known::number(cluster.vms, "VM");
            let room = across - 34.0 - width_of(&cluster.letters, 12) - width_of(&vms, 12) - 20.0;
            let words = format!("{}  {}, {vms}", cluster.letters, fitting(cluster.name, 12, room));
            self.sheet.words(x + 18.0, self.y, "v-ink", 12, &words);
        }
        self.y += 28.0;
    }

    /// What rectangles and circles are.
    fn signs(&mut self, numbers: bool) {
        let pip = Rectangle::new().set("class", "v-free").set("x", MARGIN).set("y", tenth(self.y - 9.0));
        self.sheet.add(pip.set("width", 7).set("height", 10));
        self.sheet.words(MARGIN + 12.0, self.y, "v-ink", 12, "GPU");
        let circle = Circle::new().set("class", "v-free").set("cx", MARGIN + 56.0).set("r", 4);
        self.sheet.add(circle.set("cy", tenth(self.y - 4.0)));
        let mut said =
            "adapter; hollow: free, in a colour: held by its cluster, grey: taken by others".to_owned();
        if numbers {
            said.push_str("; 6/8: 6 of 8 free");
        }
        self.sheet.words(MARGIN + 66.0, self.y, "v-ink", 12, &said);
    }
}
