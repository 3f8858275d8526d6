// Which view is shown: by what stands behind the # of the address.

import { element } from "./drawing.js";

const view = document.getElementById("view");

/** A name as it was before it was made a part of an address; one that never was stays as it is. */
function decoded(name) {
  try {
    return decodeURIComponent(name);
  } catch {
    return name;
  }
}

/**
 * Shows the view that the address names, of `views` by the first word, else `otherwise`. A view fills an element, and gives a function that ends its
 * work.
 */
export function showViews(views, otherwise) {
  let end = () => {};
  const show = () => {
    const [kind, name = ""] = location.hash.replace(/^#\/?/, "").split("/");
    // The link to the content is no view.
    if (location.hash === "#view") return;
    end();
    const page = element("div");
    const make = Object.hasOwn(views, kind) ? views[kind] : otherwise;
    end = make(page, decoded(name));
    view.replaceChildren(page);
  };
  window.addEventListener("hashchange", () => {
    show();
    window.scrollTo(0, 0);
    // Who does not see the page goes on where it is new.
    if (location.hash !== "#view") view.focus({ preventScroll: true });
  });
  show();
}
