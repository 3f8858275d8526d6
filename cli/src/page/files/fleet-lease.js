// A lease: who holds it, and what each of its VMs has on which node.

import { keepAsking } from "./asking.js";
import { element, Facts, section, Table } from "./drawing.js";
import * as words from "./words.js";

function heldTable() {
  const columns = [["VM"], ["Node"], ["Cores", "number"], ["Memory", "number"], ["Devices"], ["Part", "wide"]];
  const cells = (held) => [held.vm, { text: held.node, href: `#/node/${encodeURIComponent(held.node)}` },
    String(words.cores(held)), words.bytes(words.memory(held)),
    (held.devices ?? []).map((device) => `${device.kind} ${device.address}`).join(", ") || "-", held.part === "incoming" ? "on its way" : "at home"];
  return new Table("What it holds", columns, (held) => `${held.vm}\n${held.part}`, cells, "Nothing.");
}

export function lease(page, id) {
  const [facts, held] = [new Facts(), heldTable()];
  page.append(element("p", {}, element("a", { href: "#/" }, "All of the fleet")), element("h1", {}, id), facts.element, section("What it holds", held.element));
  return keepAsking([`v1/leases/${encodeURIComponent(id)}`], (known) => {
    facts.update([
      ["Cluster", known.cluster],
      ["Holder", known.holder],
      ["Granted", words.date(known.granted_wall_ms)],
      ["Ends", typeof known.ends_in_ms === "number" ? `in ${words.time(known.ends_in_ms)} without a heartbeat` : "with the last of its VMs"],
    ]);
    held.update(known.held);
  }, {
    unknown: (trouble) => {
      facts.update([["State", trouble.message]]);
      held.update([]);
    },
  });
}
