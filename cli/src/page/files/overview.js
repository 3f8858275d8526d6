// All of the node: VMs, migrations at work and past, forks.

import { keepAsking } from "./asking.js";
import { element, Facts, filter, section, setText, Table } from "./drawing.js";
import * as words from "./words.js";

const vmLink = (name) => ({ text: name, href: `#/vm/${encodeURIComponent(name)}` });
const migrationLink = (migration) => ({ text: migration.vm, href: `#/migration/${encodeURIComponent(migration.id)}` });

/** What a VM has to say besides its state. */
function notes(vm) {
  const lacks = (vm.devices ?? []).filter((device) => !device.held).map((device) => `lacks ${device.role}`);
  return [vm.waiting, vm.why, vm.libvirt && "of libvirt", vm.proxmox && "of Proxmox VE", vm.adopted && "adopted", ...lacks].filter(Boolean).join("; ");
}

function share(migration) {
  if (!migration.bytes_total) return "-";
  return `${Math.floor((100 * migration.bytes_done) / migration.bytes_total)} %`;
}

function vmTable() {
  const columns = [["VM"], ["State"], ["Memory", "number"], ["Backing", "wide"], ["PID", "number wide"], ["Notes", "wide"]];
  const cells = (vm) => [vmLink(vm.name), vm.status, words.bytes(vm.memory_bytes), vm.memory, String(vm.pid), notes(vm)];
  return new Table("VMs of this node", columns, (vm) => vm.name, cells, "No VM.");
}

function atWork() {
  const columns = [["VM"], ["Where"], ["Stands"], ["Memory", "number"], ["Rate", "number"], ["Left", "number wide"]];
  const cells = (m) => [migrationLink(m), words.peer(m), words.outcome(m), share(m), words.rate(m.rate_bytes_per_s),
    m.eta_ms === null ? "-" : words.time(m.eta_ms)];
  return new Table("Migrations at work", columns, (m) => m.id, cells, "None.");
}

function past() {
  const columns = [["VM"], ["Where"], ["Ended"], ["Began", "wide"], ["Took", "number wide"], ["Mode", "wide"]];
  const cells = (m) => [migrationLink(m), words.peer(m), words.outcome(m), words.date(m.began_at),
    m.outcome.state === "done" ? words.time(m.outcome.report.total_ms) : "-", m.mode ?? "-"];
  return new Table("Past migrations", columns, (m) => m.id, cells, "None.");
}

function forkTable() {
  const columns = [["Parent"], ["Stands"], ["Children run", "number"], ["Parent's pause", "number wide"], ["Hosts", "wide"]];
  const cells = (fork) => [vmLink(fork.parent), fork.error ? `failed: ${fork.error.message}` : fork.phase,
    `${fork.running} of ${fork.children}`, fork.report ? words.time(fork.report.parent_pause_ms) : "-",
    (fork.hosts ?? []).map((host) => host.node).join(", ") || "this node"];
  return new Table("Forks", columns, (fork) => fork.id, cells, "None.");
}

export function overview(page) {
  const [vms, running, ended, forked, facts] = [vmTable(), atWork(), past(), forkTable(), new Facts()];
  let known = [];
  const showVms = () => vms.update(known.filter(only.wants));
  const only = filter("Only names with", (vm) => [vm.name], showVms);
  const advice = element("p", { class: "none" });
  const ways = section("Node", facts.element, advice);
  page.append(element("h1", { class: "unseen" }, "Overview"), section("Migrations at work", running.element),
    section("VMs", only.box, vms.element), section("Forks", forked.element), section("Past migrations", ended.element), ways);
  const stops = [
    keepAsking(["v1/vms"], (answer) => {
      known = answer.vms;
      showVms();
    }),
    keepAsking(["v1/migrations"], ({ migrations }) => {
      running.update(migrations.filter((migration) => !words.hasEnded(migration)));
      ended.update(migrations.filter(words.hasEnded));
    }),
    keepAsking(["v1/forks"], ({ forks }) => forked.update(forks)),
    keepAsking(["v1/node"], (node) => {
      facts.update([
        ["Peer port", `${node.listen}, ${node.security}`],
        ["Knows", Object.entries(node.nodes).map(([name, at]) => `${name} (${at})`).join(", ")],
        ["RDMA", node.no_rdma ?? node.rdma_network],
        ["Kernel", node.kernel],
        ["Dirty tracking", node.no_dirty_tracking],
        ["QEMUs run as", node.qemu_user],
        ["Up for", words.time(node.uptime_s * 1000)],
      ]);
      setText(advice, [node.shared_disk, node.qemu_user_note].filter(Boolean).map((text) => `${text}.`).join(" "));
    }),
  ];
  return () => stops.forEach((stop) => stop());
}
