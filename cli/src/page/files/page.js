// The page of a node.

import { keepAsking } from "./asking.js";
import { setText } from "./drawing.js";
import { forks } from "./forks.js";
import { migration } from "./migration.js";
import { overview } from "./overview.js";
import { showViews } from "./views.js";
import * as words from "./words.js";

const head = document.getElementById("node");

showViews({ migration, vm: forks }, overview);

keepAsking(["v1/node"], (node) => {
  document.title = `vmove: ${node.node}`;
  const free = `${words.bytes(node.memory.available_bytes)} of ${words.bytes(node.memory.total_bytes)} free`;
  const vms = words.number(node.vms, "VM");
  const moves = words.number(node.migrations_running, "migration");
  setText(head, `${node.node}: ${vms}, ${moves} at work, ${free}, fabrics ${node.fabrics.join(", ") || "none"}, vmoved ${node.version}`);
});
