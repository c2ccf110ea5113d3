import * as ask from "./ask.js";
import * as audit from "./audit.js";
import * as budget from "./budget.js";
import { find } from "./dom.js";
import * as gallery from "./gallery.js";

// Which page is shown: the part of the address behind "#".

const PAGES = { ask: { title: "Ask", open: ask.refresh }, gallery: { title: "Gallery", open: gallery.show }, budget: { title: "Budget", open: budget.show }, audit: { title: "Audit", open: audit.open } };
let shown = null;

function route(event) {
  const wanted = location.hash.slice(1) || "ask";
  const name = Object.hasOwn(PAGES, wanted) ? wanted : (shown ?? "ask"); // "#main" is a place on every page
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

window.addEventListener("hashchange", route);
route();
audit.start();
ask.start().then(() => { if (shown !== "ask") PAGES[shown].open(); });
