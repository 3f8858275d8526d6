// A node of the fleet: what it has, and who sits where.

import { keepAsking } from "./asking.js";
import { element, Facts, section, Table } from "./drawing.js";
import * as words from "./words.js";

const leaseLink = (id) => ({ text: id, href: `#/lease/${encodeURIComponent(id)}` });

/** Which VM of which lease holds each device of a node. Remote GPUs are held by VMs of other nodes. */
function holders(leases, name) {
  const held = leases.flatMap((lease) => lease.held.flatMap((one) =>
    (one.devices ?? []).filter((device) => one.node === name || device.kind === "remote-gpu").map((device) => [device.address, { lease: lease.id, vm: one.vm }])));
  return new Map(held);
}

/** Who has a device, or why no VM can have it as it is. */
function holder(device, at) {
  if (at) return at.vm;
  if (device.shares > 0) return "leased by its shares";
  if (device.vfs_enabled > 0) return "leased by its functions";
  return "-";
}

function deviceTable() {
  const columns = [["Device"], ["Kind"], ["Model"], ["NUMA", "number wide"], ["VM"], ["Lease"]];
  const cells = ({ device, at }) => [device.address, device.kind, [device.arch, device.model].filter(Boolean).join(" ") || "-",
    String(device.numa ?? "-"), holder(device, at), at ? leaseLink(at.lease) : "-"];
  return new Table("Devices", columns, ({ device }) => device.address, cells, "No device that VMs can have.");
}

function vmTable() {
  const columns = [["VM"], ["Lease"], ["Cores", "number"], ["Memory", "number"], ["NUMA", "wide"], ["Part", "wide"]];
  const cells = ({ lease, one }) => [one.vm, leaseLink(lease.id), String(words.cores(one)),
    words.bytes(words.memory(one)), (one.shares ?? []).map((share) => share.numa).join(", ") || "-",
    one.part === "incoming" ? "on its way here" : "here"];
  return new Table("VMs with a lease", columns, ({ lease, one }) => `${lease.id}\n${one.vm}\n${one.part}`, cells, "None.");
}

export function node(page, name) {
  const [facts, vms, devices] = [new Facts(), vmTable(), deviceTable()];
  page.append(element("p", {}, element("a", { href: "#/" }, "All of the fleet")), element("h1", {}, name), facts.element,
    section("VMs with a lease", vms.element), section("Devices, and who has them of the leases that you see", devices.element));
  return keepAsking([`v1/nodes/${encodeURIComponent(name)}`, "v1/leases"], (detail, { leases }) => {
    const { node: has } = detail;
    const sum = (key) => has.numa.reduce((total, one) => total + one[key], 0);
    facts.update([
      ["State", has.state],
      ["Processors", [has.cpu?.model, has.cpu?.arch].filter(Boolean).join(", ")],
      ["Cores", `${sum("cores")} on ${words.number(has.numa.length, "NUMA node")}`],
      ["Memory", words.bytes(sum("memory") * 1024 * 1024)],
      ["VMs without a lease", (detail.vms_without_lease ?? []).join(", ")],
      ["Its VMs are not known", detail.not_listed],
    ]);
    vms.update(leases.flatMap((lease) => lease.held.filter((one) => one.node === name).map((one) => ({ lease, one }))));
    const at = holders(leases, name);
    devices.update((has.devices ?? []).map((device) => ({ device, at: at.get(device.address) })));
  }, {
    unknown: (trouble) => {
      facts.update([["State", trouble.message]]);
      vms.update([]);
      devices.update([]);
    },
  });
}
