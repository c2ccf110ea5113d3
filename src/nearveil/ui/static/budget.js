import { get } from "./api.js";
import { find, make, put, say } from "./dom.js";
import { gauge } from "./gauge.js";
import { hint } from "./hints.js";

let selected = null;

function account(one, _, all) {
  const what = `${one.kind === "pure" ? "Costs add up." : `Accounting: ${one.kind}, delta ${one.delta}.`} Protects one ${one.unit}. Owner: ${one.owner}`;
  const heading = make("h2", {}, make("span", {}, `${one.account} `, hint("account")), one.pays ? make("span", { class: "tag" }, "pays for queries") : null);
  const choose = all.length < 2 ? null : make("button", { type: "button", class: "link", "aria-pressed": String(one.account === selected), onclick: () => pick(one.account) }, `History of ${one.account}`);
  return make("section", { class: "card" }, heading, gauge(one), make("p", { class: "note" }, what), choose);
}

function line(entry) {
  const time = new Date(entry.time);
  const shown = Number.isNaN(time.getTime()) ? entry.time : time.toLocaleString();
  return make("tr", {}, make("td", { class: "n" }, String(entry.sequence)), make("td", {}, entry.what), make("td", {}, entry.detail), make("td", {}, shown), make("td", { class: "hide-narrow" }, make("code", { class: "key" }, entry.key)));
}

async function history() {
  const data = await get("/api/history", { account: selected }, 30);
  const head = make("tr", {}, ...["entry", "type", "amount", "time"].map((words, target) => make("th", { scope: "col", class: target ? "" : "n" }, words)), make("th", { scope: "col", class: "hide-narrow" }, "key"));
  const shown = data.entries.length < data.total ? `The latest ${data.entries.length} of ${data.total.toLocaleString("en")} entries, newest first.` : "All entries, newest first.";
  put(
    find("history"),
    make("h2", {}, `History of ${data.account}`),
    make("p", { class: "note" }, shown),
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `History of ${data.account}` }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...data.entries.map(line)))),
  );
}

async function guarded(work) {
  try {
    await work();
    say(find("budget-error"), "");
  } catch (failure) {
    say(find("budget-error"), failure.message);
  }
}

function pick(name) {
  selected = name;
  return show();
}

async function plan(event) {
  event?.preventDefault();
  await guarded(async () => {
    const data = await get("/api/plan", { account: selected, count: Math.trunc(Number(find("plan-count").value)) || 0, epsilon: Number(find("plan-epsilon").value) || 0 }, 30);
    put(find("plan-words"), make("span", { class: data.allowed ? "good" : "bad" }, data.allowed ? "Fits. " : "Does not fit. "), data.words);
  });
}

async function verify() {
  await guarded(async () => {
    put(find("verify-words"), "Checking every entry…");
    const data = await get("/api/verify", {}, 120);
    put(find("verify-words"), make("span", { class: data.ok ? "good" : "bad" }, data.words));
  });
}

function planner() {
  const field = (id, words, value, more) => make("div", { class: "field" }, make("label", { for: id }, words), make("input", { type: "number", id, value, min: "0", ...more }));
  return make(
    "form", { class: "card", novalidate: true, onsubmit: plan },
    make("h2", {}, "Plan a workload ", hint("epsilon")),
    make("p", { class: "note" }, `Cost of more queries for the account ${selected}. Nothing is spent.`),
    make("div", { class: "row" }, field("plan-count", "Queries", "20", { step: "1", inputmode: "numeric" }), field("plan-epsilon", "Epsilon of each", "2", { step: "any", inputmode: "decimal" }), make("button", { type: "submit" }, "Preview")),
    make("p", { id: "plan-words", role: "status", "aria-live": "polite" }),
  );
}

function checker() {
  return make(
    "section", { class: "card" },
    make("h2", {}, "Check the ledger ", hint("ledger")),
    make("p", { class: "note" }, "Recompute every hash and total, and compare them with the witness."),
    make("button", { type: "button", onclick: verify }, "Verify"),
    make("p", { id: "verify-words", role: "status", "aria-live": "polite" }),
  );
}

export async function show() {
  const body = find("budget-body");
  body.setAttribute("aria-busy", "true");
  await guarded(async () => {
    const data = await get("/api/budget", {}, 30);
    selected = data.accounts.some((one) => one.account === selected) ? selected : data.paying;
    put(body, make("div", { class: "accounts" }, ...data.accounts.map(account)), make("div", { class: "panes" }, planner(), checker()), make("section", { class: "card", id: "history" }));
    await history();
  });
  body.setAttribute("aria-busy", "false");
}
