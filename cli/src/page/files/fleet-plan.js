// A plan: which VM goes where, and what each node has of them before and after.

import { keepAsking } from "./asking.js";
import { element, Facts, section, Table } from "./drawing.js";
import * as words from "./words.js";

const nodeLink = (name) => ({ text: name, href: `#/node/${encodeURIComponent(name)}` });

function stepTable() {
  const columns = [["VM"], ["From"], ["To"], ["State"], ["Memory", "number wide"], ["Without devices", "number wide"], ["Together", "number wide"]];
  const cells = ([, step]) => {
    const outage = Math.max(0, ...(step.outages ?? []).map((one) => one.outage_ms));
    return [step.vm, nodeLink(step.from), nodeLink(step.to.node), (step.spare ? "to a spare place, " : "") + words.planState(step.state), words.bytes(step.memory_mib * 1024 * 1024),
      outage > 0 ? words.time(outage) : "-", String(step.group ?? "-")];
  };
  return new Table("Moves", columns, ([number]) => number, cells, "Nothing is to be moved.");
}

function changeTable() {
  const columns = [["Node"], ["Before"], ["After"]];
  const cells = (node) => [nodeLink(node.name), node.before.join(", ") || "-", node.after.join(", ") || "-"];
  return new Table("Before and after", columns, (node) => node.name, cells, "No node changes.");
}

/** Where the VMs that move are before the first step, and after the last. */
function changes(steps) {
  const nodes = new Map();
  const at = (name) => nodes.get(name) ?? nodes.set(name, { name, before: [], after: [] }).get(name);
  const first = new Map();
  const last = new Map();
  for (const step of steps) {
    if (!first.has(step.vm)) first.set(step.vm, step.from);
    last.set(step.vm, step.to.node);
  }
  for (const [vm, node] of first) at(node).before.push(vm);
  for (const [vm, node] of last) at(node).after.push(vm);
  return [...nodes.values()].sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
}

export function plan(page, id) {
  const [facts, steps, nodes] = [new Facts(), stepTable(), changeTable()];
  const notes = element("ul", { class: "troubles" });
  page.append(element("p", {}, element("a", { href: "#/" }, "All of the fleet")), element("h1", {}, id), facts.element, notes,
    section("Before and after, of the VMs that move", nodes.element), section("Moves", steps.element));
  let said = "";
  const none = (trouble) => {
    facts.update([["State", trouble.message]]);
    notes.replaceChildren();
    said = "";
    steps.update([]);
    nodes.update([]);
  };
  return keepAsking([`v1/plans/${encodeURIComponent(id)}`], (known) => {
    facts.update([
      ["Purpose", known.purpose],
      ["State", words.planState(known.state)],
      ["Hops between VMs", `${known.hops.before} before, ${known.hops.after} after`],
      ["Drains", known.drains],
      ["Made", words.date(known.made_wall_ms)],
    ]);
    // Notes that stay the same keep a selection.
    const told = known.notes ?? [];
    if (told.join("\n") !== said) notes.replaceChildren(...told.map((note) => element("li", {}, note)));
    said = told.join("\n");
    steps.update(known.steps.map((step, number) => [number, step]));
    nodes.update(changes(known.steps));
  }, { unknown: none, forbidden: none });
}
