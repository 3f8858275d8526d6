// Which view is shown: by what stands behind the # of the address.

import { element, setText } from "./drawing.js";
import { forks } from "./forks.js";
import { migration } from "./migration.js";
import { keepAsking } from "./node.js";
import { overview } from "./overview.js";
import * as words from "./words.js";

const view = document.getElementById("view");
const head = document.getElementById("node");

/** Each fills an element, and gives a function that ends its work. */
const VIEWS = { migration, vm: forks };
let end = () => {};

/** A name as it was before it was made a part of an address; one that never was stays as it is. */
function decoded(name) {
  try {
    return decodeURIComponent(name);
  } catch {
    return name;
  }
}

function show() {
  const [kind, name = ""] = location.hash.replace(/^#\/?/, "").split("/");
  // The link to the content is no view.
  if (location.hash === "#view") return;
  end();
  const page = element("div");
  const make = VIEWS[kind] ?? overview;
  end = make(page, decoded(name));
  view.replaceChildren(page);
}

window.addEventListener("hashchange", () => {
  show();
  window.scrollTo(0, 0);
  // Who does not see the page goes on where it is new.
  if (location.hash !== "#view") view.focus({ preventScroll: true });
});
show();

keepAsking(["v1/node"], (node) => {
  document.title = `vmove: ${node.node}`;
  const free = `${words.bytes(node.memory.available_bytes)} of ${words.bytes(node.memory.total_bytes)} free`;
  const vms = words.number(node.vms, "VM");
  const moves = words.number(node.migrations_running, "migration");
  setText(head, `${node.node}: ${vms}, ${moves} at work, ${free}, fabrics ${node.fabrics.join(", ") || "none"}, vmoved ${node.version}`);
});
