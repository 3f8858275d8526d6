// A VM and what came from it: its tree, its forks and their hosts, its migrations.

import { keepAsking } from "./asking.js";
import { element, section, Table } from "./drawing.js";
import * as words from "./words.js";

function described(node) {
  const where = node.node ? ` on ${node.node}` : "";
  const warm = (node.prepared ?? []).map((host) => `${host.prepared} prepared on ${host.node}`);
  const more = [node.why, node.private && "memory shared with its template", ...warm].filter(Boolean);
  return `${node.status}${where}${more.length > 0 ? ` (${more.join("; ")})` : ""}`;
}

/** A list in a list for each generation. */
function branch(node) {
  const name = element("strong", {}, node.name);
  const item = element("li", {}, name, ` ${described(node)}`);
  if (node.children.length > 0) item.append(element("ul", {}, ...node.children.map(branch)));
  return item;
}

function hostTable() {
  const columns = [["Host"], ["Stands"], ["Template here", "number"], ["Children run", "number"], ["Read from parent", "number wide"],
    ["From hosts", "number wide"], ["By multicast", "number wide"]];
  const cells = ([, host]) => [host.node, host.phase, host.chunks ? `${Math.floor((100 * (host.chunks - host.missing)) / host.chunks)} %` : "-",
    `${host.running} of ${host.children}`, words.bytes(host.from_root_bytes), words.bytes(host.from_hosts_bytes), words.bytes(host.multicast_bytes)];
  return new Table("Hosts of forks", columns, ([fork, host]) => `${fork}\n${host.node}`, cells, "No other host has children.");
}

function forkTable() {
  const columns = [["Fork"], ["Stands"], ["Children run", "number"], ["Parent's pause", "number"], ["All run after", "number wide"], ["Began", "wide"]];
  const cells = (fork) => [fork.id, fork.error ? `failed: ${fork.error.message}` : fork.phase, `${fork.running} of ${fork.children}`,
    fork.report ? words.time(fork.report.parent_pause_ms) : "-", fork.report ? words.time(fork.report.all_running_ms) : "-", words.date(fork.began_at)];
  return new Table("Forks of this VM", columns, (fork) => fork.id, cells, "It was not forked.");
}

function moves() {
  const columns = [["Migration"], ["Where"], ["Stands"], ["Began", "wide"]];
  const cells = (m) => [{ text: m.id, href: `#/migration/${encodeURIComponent(m.id)}` }, words.peer(m), words.outcome(m), words.date(m.began_at)];
  return new Table("Migrations of this VM", columns, (m) => m.id, cells, "It was not moved.");
}

/** Hosts of a fork while it is at work, and at its end by its report. */
function hostsOf(fork) {
  const ended = (fork.report?.hosts ?? []).map((host) => ({ ...host, phase: host.error ?? "done", chunks: 0, missing: 0 }));
  const hosts = fork.hosts?.length ? fork.hosts : ended;
  return hosts.map((host) => [fork.id, host]);
}

export function forks(page, name) {
  const [tree, made, hosts, moved] = [element("ul", { class: "tree" }), forkTable(), hostTable(), moves()];
  page.append(element("p", {}, element("a", { href: "#/" }, "All of the node")), element("h1", {}, name), section("Tree", tree),
    section("Forks", made.element), section("Hosts", hosts.element), section("Migrations", moved.element));
  let shown = "";
  const stops = [
    keepAsking(["v1/forks", "v1/migrations"], (known, { migrations }) => {
      const own = known.forks.filter((fork) => fork.parent === name);
      made.update(own);
      hosts.update(own.flatMap(hostsOf));
      moved.update(migrations.filter((migration) => migration.vm === name));
    }),
    keepAsking([`v1/vms/${encodeURIComponent(name)}/tree?ask=true`], (node) => {
      const text = JSON.stringify(node);
      if (text === shown) return;
      shown = text;
      tree.replaceChildren(branch(node));
    }, {
      unknown: (trouble) => {
        shown = "";
        tree.replaceChildren(element("li", {}, trouble.message));
      },
    }),
  ];
  return () => stops.forEach((stop) => stop());
}
