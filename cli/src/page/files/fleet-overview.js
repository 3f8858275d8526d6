// All of the fleet: switches with their nodes, clusters, leases, plans, accounts.

import { keepAsking, RARELY } from "./asking.js";
import { element, filter, section, setText, Table } from "./drawing.js";
import { Switches } from "./switches.js";
import * as words from "./words.js";

/** So many rows are listed at once: the switches show all nodes. */
const LISTED = 200;
/** So many nodes are named in a row. */
const NAMED = 4;
/** Unit: milliseconds. */
const TOPOLOGY_INTERVAL = 20_000;
/** Accounts are summed over so many days. */
const DAYS = 30;

const link = (kind, name) => ({ text: name, href: `#/${kind}/${encodeURIComponent(name)}` });
const ofAll = (free, all) => (all === 0 ? "-" : `${free} of ${all}`);

function nodeTable(leafOf) {
  const columns = [["Node"], ["Leaf switch", "wide"], ["State"], ["VMs", "number"], ["GPUs free", "number"], ["Adapters", "number wide"],
    ["Cores free", "number"], ["Memory free", "number wide"]];
  const cells = (node) => [link("node", node.name), leafOf.get(node.name) ?? "-", node.state,
    node.vms_without_lease ? `${node.vms} and ${node.vms_without_lease} without a lease` : String(node.vms),
    ofAll(node.gpus_free, node.gpus), String(node.adapters), ofAll(node.cores_free, node.cores), words.bytes(node.memory_free_mib * 1024 * 1024)];
  return new Table("Nodes", columns, (node) => node.name, cells, "No node.");
}

function clusterTable() {
  const columns = [["Cluster"], ["Holder"], ["VMs run", "number"], ["Nodes", "names wide"], ["Most hops", "number wide"]];
  const more = (nodes) => (nodes.length > NAMED ? `and ${nodes.length - NAMED} more` : "");
  const cells = (c) => [{ ...link("lease", c.id), text: c.cluster }, c.holder, `${c.running} of ${c.vms}`,
    { names: c.nodes.slice(0, NAMED), more: more(c.nodes) }, String(c.hops.most ?? "-")];
  return new Table("Clusters", columns, (c) => c.id, cells, "None.");
}

function leaseTable() {
  const columns = [["Lease"], ["Holder"], ["VMs", "number"], ["Devices", "number"], ["Granted", "wide"], ["Ends in", "number"]];
  const cells = (lease) => [link("lease", lease.id), lease.holder, String(new Set(lease.held.map((held) => held.vm)).size),
    String(lease.held.reduce((sum, held) => sum + (held.devices ?? []).length, 0)), words.date(lease.granted_wall_ms),
    typeof lease.ends_in_ms === "number" ? words.time(lease.ends_in_ms) : "its VMs run"];
  return new Table("Leases", columns, (lease) => lease.id, cells, "None.");
}

function planTable() {
  const columns = [["Plan"], ["Purpose"], ["State"], ["Moves done", "number"], ["Hops", "number wide"]];
  const cells = (plan) => [link("plan", plan.id), plan.purpose, words.planState(plan.state),
    `${plan.steps.filter((step) => step.state.is === "done").length} of ${plan.steps.length}`, `${plan.hops.before} to ${plan.hops.after}`];
  return new Table("Plans", columns, (plan) => plan.id, cells, "None.");
}

function accountTable() {
  const columns = [["Holder"], ["Leases ended", "number"], ["GPU hours", "number"], ["Adapter hours", "number"], ["Last ended", "wide"]];
  const cells = (sum) => [sum.holder, words.count(sum.leases), sum.gpus.toFixed(2), sum.adapters.toFixed(2), words.date(sum.last)];
  return new Table("Accounts", columns, (sum) => sum.holder, cells, "No lease has ended.");
}

/** What each holder has used, who used most first. */
function sums(records) {
  const holders = new Map();
  for (const record of records) {
    const sum = holders.get(record.holder) ?? { holder: record.holder, leases: 0, gpus: 0, adapters: 0, last: 0 };
    sum.leases += 1;
    sum.gpus += record.gpu_hours;
    sum.adapters += record.adapter_hours ?? 0;
    sum.last = Math.max(sum.last, record.ended_wall_ms);
    holders.set(record.holder, sum);
  }
  return [...holders.values()].sort((a, b) => b.gpus - a.gpus || b.leases - a.leases);
}

/** A table that lists some of its items, and says how many it does not. */
function listed(table, how) {
  const more = element("p", { class: "none" });
  const update = (items) => {
    table.update(items.slice(0, LISTED));
    const hidden = items.length - LISTED;
    setText(more, hidden > 0 ? `${words.count(hidden)} more are not listed: ${how}.` : "");
  };
  return { element: element("div", {}, table.element, more), update, said: (text) => setText(more, text) };
}

export function overview(page) {
  const leafOf = new Map();
  const switches = new Switches();
  const nodes = listed(nodeTable(leafOf), "say above which ones");
  const clusters = listed(clusterTable(), "see vmove cluster list");
  const leases = listed(leaseTable(), "see vmove lease list");
  const plans = listed(planTable(), "see vmove plan list");
  const accounts = listed(accountTable(), "see vmove account");
  let topology = null;
  let known = null;
  const list = () => nodes.update(known.filter(only.wants));
  const texts = (node) => [node.name, leafOf.get(node.name) ?? "", node.state];
  const only = filter("Only names, switches and states with", texts, () => known && list());
  const draw = () => {
    if (!topology || !known) return;
    switches.update(topology, known);
    list();
  };
  page.append(element("h1", { class: "unseen" }, "Overview"), section("Switches and nodes", switches.element), section("Clusters", clusters.element),
    section("Leases", leases.element), section("Plans", plans.element), section("Nodes", only.box, nodes.element),
    section(`Accounts of ${DAYS} days`, accounts.element));
  const since = () => `v1/account?since_ms=${Date.now() - DAYS * 86_400_000}`;
  const stops = [
    keepAsking(["v1/topology"], (answer) => {
      topology = answer.switches;
      leafOf.clear();
      for (const one of topology) for (const node of one.nodes ?? []) leafOf.set(node, one.name);
      draw();
    }, { interval: TOPOLOGY_INTERVAL }),
    keepAsking(["v1/nodes"], (answer) => {
      known = answer.nodes;
      draw();
    }),
    keepAsking(["v1/clusters"], (answer) => clusters.update(answer.clusters)),
    keepAsking(["v1/leases"], (answer) => leases.update(answer.leases)),
    keepAsking(["v1/plans"], (answer) => plans.update(answer.plans), { forbidden: () => plans.said("Your role sees no plans.") }),
    // The bridge reads all records for that.
    keepAsking([since], ({ records }) => accounts.update(sums(records)), { interval: RARELY }),
    () => switches.stop(),
  ];
  return () => stops.forEach((stop) => stop());
}
