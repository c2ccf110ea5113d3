import { count, facts, make, percent, put } from "./dom.js";
import { hint } from "./hints.js";
import { label, metadata, nameOf, portray, view } from "./viewer.js";

// The matches, and what the server saw.

const LONG = 320; // characters of a text on a card
const chance = (share) => (share > 0.995 ? "above 99%" : percent(share));
const likely = (share) => (share < 0.001 ? "below 0.1%" : share > 0.999 ? "above 99.9%" : `${(100 * share).toFixed(1)}%`);

// Return the answer in one sentence: a miss is no success.
export function explainStatus(data) {
  if (data.kind === "classified") return `Most probable class: ${data.label}. Free.`;
  const found = count(data.got.length, "match").replace("matchs", "matches");
  if (data.kind === "free") return `${found} found, free.`;
  const paid = `${data.repeated ? "Already paid for." : `Cost: ${data.cost}.`} ${data.balance.left_words} of ${data.balance.epsilon} is left.`;
  if (data.missed) return `A miss: the message named another set than the best one. ${paid}`;
  return `${found} found. ${paid}`;
}

function showFree(target, { way, saw }) {
  if (way !== "sealed") {
    const searched = way === "index" ? "The index" : "The local copy";
    return put(target, make("p", { class: "big" }, "Nothing"), make("p", {}, `${searched} of ${count(saw.total, "item")} was searched on this machine. Nothing was sent.`));
  }
  const size = saw.messages.reduce((sum, message) => sum + message.bytes, 0);
  put(
    target,
    make("p", { class: "big" }, "Noise"),
    make("p", {}, `${count(saw.messages.length, "sealed message")}, ${count(size, "byte")} in total. Their size is the same for every query, and telling them from random numbers means solving a hard lattice problem:`),
    ...saw.messages.map((message) => make("code", { class: "hex" }, message.hex)),
  );
}

// The candidates are ordered by id: the order says nothing about the query.
function showCandidates(saw) {
  const pictures = saw.candidates.some((item) => item.image);
  const tiles = saw.candidates.map((item) => {
    const name = item.name || `item ${item.id}`;
    return make("li", { title: name }, item.image ? make("img", { src: item.image, alt: name, draggable: "false" }) : make("span", { class: "chip" }, name));
  });
  return make("ul", { class: pictures ? "thumbs" : "thumbs chips", tabindex: "0", "aria-label": "Candidates" }, ...tiles);
}

function showMessage(target, data) {
  const { saw } = data, [message] = saw.messages, covers = saw.set !== null;
  const shown = saw.candidates.length < saw.total ? `The first ${saw.candidates.length} of ${count(saw.total, "item")}` : `All ${count(saw.total, "item")}`;
  put(
    target,
    make("p", { class: "big" }, covers ? `Set ${saw.set + 1} of ${saw.n_sets}` : "A noisy vector"),
    make("p", {}, covers
      ? `A message names the best set for its query with probability ${chance(data.right)}, and otherwise another set at random. The server may guess; the guarantee limits how sure it can be.`
      : `A message by ${saw.mechanism}. The server ranked its gallery by it and returned ${count(saw.total, "item")}.`),
    make("details", {}, make("summary", {}, `The message: ${count(message.bytes, "byte")}`), make("code", { class: "hex" }, message.hex)),
    make("h3", {}, "What it returned"),
    make("p", { class: "note" }, covers ? `${shown} of that set, ordered by id. Every client that names the set gets the same.` : `${shown}, ordered by id.`),
    showCandidates(saw),
  );
}

export function showSaw(target, data) {
  if (data.kind === "free") return showFree(target, data);
  if (data.kind === "nearest") return showMessage(target, data);
  put(
    target,
    make("p", { class: "big" }, "Nothing about your image"),
    make("p", {}, "The gallery’s model was downloaded before your image was read. Every client gets the same model, and checks for a newer one at most once an hour. The server does not learn whether or how often you classify an image."),
  );
}

function match(item, rank, items, metric, search) {
  const picture = portray(item), long = item.text.length > LONG;
  const open = () => view(items, rank, search);
  const text = item.text ? make("p", { class: "text" }, long ? `${item.text.slice(0, LONG)}…` : item.text) : null;
  const link = (words, onclick) => make("button", { type: "button", class: "link", "aria-label": `${words}: ${nameOf(item)}`, onclick }, words);
  const links = picture ? [] : [long ? link("Open", open) : null, search ? link("More like this", () => search(item)) : null];
  return make(
    "li", { "data-id": item.id },
    picture ? make("button", { type: "button", class: "tile", "aria-label": `Open ${nameOf(item)}`, onclick: open }, picture) : null,
    make("span", { class: "head" }, make("span", { class: "rank" }, String(rank + 1)), make("span", { class: "like" }, `${metric} ${item.value.toFixed(2)}`)),
    label(item), text, picture ? null : metadata(item), ...links,
  );
}

function showMatches(data, search) {
  const items = data.got.map((item) => ({ ...item, score: `${data.metric} ${item.value.toFixed(4)}` }));
  const pictures = items.some((item) => item.image);
  return make("ol", { class: pictures ? "matches" : "matches texts" }, ...items.map((item, rank) => match(item, rank, items, data.metric, search)));
}

function showClasses(target, data) {
  const rows = data.probabilities.map(([name, share]) => make("tr", {}, make("td", {}, name), make("td", {}, make("meter", { min: 0, max: 1, value: share, "aria-hidden": "true" })), make("td", { class: "n" }, likely(share))));
  const more = data.classes - data.probabilities.length;
  const head = make("tr", {}, make("th", { scope: "col" }, "class"), make("th", { scope: "col", colspan: 2, class: "n" }, "probability"));
  put(
    target,
    make("p", { class: "big" }, data.label),
    data.caution ? make("p", { class: "open" }, data.caution) : null,
    make("p", {}, "Classified on this machine by the gallery’s model. The gallery is protected: the model has noise, and no record is shown."),
    make("table", { class: "classes" }, make("thead", {}, head), make("tbody", {}, ...rows)),
    more ? make("p", { class: "note" }, `${count(more, "less probable class").replace("classs", "classes")} not shown.`) : null,
    make("p", { class: "note" }, "The server’s claim about its records, which cannot be checked here: ", make("q", {}, data.gallery_guarantee)),
  );
}

// `search` starts a query from a match; null if the gallery is not local.
export function showGot(target, data, search) {
  if (data.kind === "classified") return showClasses(target, data);
  const compared = data.kind === "free" ? "" : ` of the ${count(data.saw.total, "candidate")}`;
  const note = `The ${data.got.length}${compared} nearest by the ${data.metric}, ranked on this machine.`;
  put(
    target,
    make("p", { class: data.missed ? "worth miss" : "worth" }, data.missed ? make("strong", {}, "A miss. ") : null, data.worth),
    make("p", { class: "note" }, note),
    showMatches(data, search),
  );
}

export function showPaid(target, data) {
  if (data.kind !== "nearest") return put(target, facts([["Cost", "free"]]));
  put(target, facts([
    ["Cost", data.repeated ? "free: it was already paid for" : `epsilon ${data.cost}`],
    [["Odds change at most ", hint("odds")], data.odds === null ? null : `× ${data.odds} (this message)`],
    ["Total so far", data.balance.odds === null ? null : `× ${data.balance.odds} (if all queries were about the same image)`],
  ]));
}
