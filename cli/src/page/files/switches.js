// The network as a list in a list: switches, and below leaf switches a square for each node.

import { element, Parts, setText } from "./drawing.js";
import * as words from "./words.js";

/** Shades of a square, from nothing held to all held. */
const SHADES = 4;

/** The share that is held of what is scarcest on a node, 0 to 1. */
function use(node) {
  const held = [[node.gpus_free, node.gpus], [node.cores_free, node.cores]].filter(([, all]) => all > 0).map(([free, all]) => 1 - free / all);
  return Math.max(0, ...held);
}

function described(node) {
  const gpus = node.gpus > 0 ? `, ${node.gpus_free} of ${words.number(node.gpus, "GPU")} free` : "";
  return `${node.name}: ${node.state}, ${words.number(node.vms, "VM")}${gpus}, ${node.cores_free} of ${words.number(node.cores, "core")} free`;
}

/** What a group of nodes has to say, for all and for those who see no squares. */
function summary(nodes) {
  const sum = (key) => nodes.reduce((total, node) => total + node[key], 0);
  const away = ["drained", "down"].map((state) => [state, nodes.filter((node) => node.state === state).length]).filter(([, count]) => count > 0);
  const gpus = sum("gpus") > 0 ? `, ${words.count(sum("gpus_free"))} of ${words.number(sum("gpus"), "GPU")} free` : "";
  const vms = words.number(sum("vms"), "VM");
  return `${words.number(nodes.length, "node")}, ${vms}${gpus}${away.map(([state, count]) => `, ${words.count(count)} ${state}`).join("")}`;
}

export class Switches {
  constructor() {
    this.list = element("ul", { class: "switches" });
    const shades = Array.from({ length: SHADES + 1 }, (_, shade) => element("i", { class: "square", "data-use": shade }));
    const legend = element("p", { class: "none legend", "aria-hidden": "true" }, "free ", ...shades, " in use; ",
      element("i", { class: "square", "data-use": 0, "data-state": "drained" }), " drained ", element("i", { class: "square", "data-use": 0, "data-state": "down" }),
      " down, or without an inventory. Each square is a node.");
    this.element = element("div", {}, legend, this.list);
    this.squares = new Map();
    this.parts = new Parts();
    this.shape = "";
  }

  /** Ends what is still being written. */
  stop() {
    this.parts.stop();
  }

  /** Switches of a topology, and the nodes as they are now. */
  update(switches, nodes) {
    const byName = new Map(nodes.map((node) => [node.name, node]));
    const placed = new Set(switches.flatMap((one) => one.nodes ?? []));
    const alone = nodes.filter((node) => !placed.has(node.name)).map((node) => node.name);
    const shape = JSON.stringify([switches, alone]);
    if (shape !== this.shape) {
      this.shape = shape;
      this.lay(switches, alone);
    }
    for (const { label, names } of this.groups) setText(label, summary(names.map((name) => byName.get(name)).filter(Boolean)));
    this.parts.write([...this.squares], ([name, one]) => {
      const node = byName.get(name);
      const said = node ? described(node) : `${name}: it has published no inventory`;
      if (one.said === said) return;
      one.said = said;
      one.square.title = said;
      one.square.dataset.use = node ? Math.ceil(use(node) * SHADES) : 0;
      one.square.dataset.state = node ? node.state : "unknown";
    });
  }

  lay(switches, alone) {
    const byName = new Map(switches.map((one) => [one.name, one]));
    const below = new Set(switches.flatMap((one) => one.switches ?? []));
    this.squares = new Map();
    this.groups = [];
    const items = switches.filter((one) => !below.has(one.name)).map((one) => this.branch(one, byName).item);
    if (alone.length > 0) items.push(this.group("below no switch", alone, []).item);
    this.list.replaceChildren(...items);
  }

  branch(one, byName) {
    const children = (one.switches ?? []).map((name) => byName.get(name)).filter(Boolean).map((child) => this.branch(child, byName));
    const title = one.link_speed ? `${one.name} (${one.link_speed})` : one.name;
    return this.group(title, one.nodes ?? [], children);
  }

  /** A switch with its nodes, and those below it. */
  group(title, nodes, children) {
    const label = element("span", { class: "none" });
    const names = [...nodes, ...children.flatMap((child) => child.names)];
    this.groups.push({ label, names });
    const item = element("li", {}, element("strong", {}, title), " ", label);
    if (nodes.length > 0) {
      const squares = nodes.map((name) => {
        // Nodes are reached by keys in their table.
        const square = element("a", { class: "square", href: `#/node/${encodeURIComponent(name)}`, tabindex: "-1", "aria-hidden": "true" });
        this.squares.set(name, { square, said: "" });
        return square;
      });
      item.append(element("div", { class: "squares" }, ...squares));
    }
    if (children.length > 0) item.append(element("ul", {}, ...children.map((child) => child.item)));
    return { item, names };
  }
}
