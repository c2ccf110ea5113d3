import * as ask from "./ask.js";
import * as budget from "./budget.js";
import { find } from "./dom.js";
import * as gallery from "./gallery.js";
import { placeHints } from "./hints.js";
import * as query from "./query.js";
import * as viewer from "./viewer.js";

// Show the tab that the fragment of the URL names.

const PAGES = { ask: { title: "Search", open: ask.refresh }, gallery: { title: "Gallery", open: gallery.show }, budget: { title: "Budget", open: budget.show } };
let shown = null;

function route(event) {
  const fragment = location.hash.slice(1) || "ask";
  const name = Object.hasOwn(PAGES, fragment) ? fragment : (shown ?? "ask"); // "#main" exists in every tab
  if (name === shown) return;
  shown = name;
  for (const page of Object.keys(PAGES)) find(`page-${page}`).hidden = page !== name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.page === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${PAGES[name].title} · nearveil`;
  if (event) {
    window.scrollTo(0, 0);
    find("main").focus({ preventScroll: true });
    PAGES[name].open();
  }
}

placeHints();
query.listen();
viewer.listen();
window.addEventListener("hashchange", route);
route();
ask.start().then(() => { if (shown !== "ask") PAGES[shown].open(); });
