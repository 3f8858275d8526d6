// The page of the fleet.

import { keepAsking } from "./asking.js";
import { setText } from "./drawing.js";
import { lease } from "./fleet-lease.js";
import { node } from "./fleet-node.js";
import { overview } from "./fleet-overview.js";
import { plan } from "./fleet-plan.js";
import { showViews } from "./views.js";
import * as words from "./words.js";

const head = document.getElementById("bridge");

showViews({ node, lease, plan }, overview);

keepAsking(["v1/bridge"], (bridge) => {
  const parts = [words.number(bridge.nodes, "node"), words.number(bridge.switches, "switch", "switches"), words.number(bridge.leases, "lease"),
    `store ${bridge.store}`, `vbridged ${bridge.version}`];
  const problems = Object.values(bridge.problems);
  if (bridge.out_of_touch) parts.push(`out of touch with its store: ${bridge.out_of_touch}`);
  if (problems.length > 0) parts.push(`${words.number(problems.length, "problem")}: ${problems[0]}`);
  setText(head, parts.join(", "));
});
