import { get, post } from "./api.js";
import { count, facts, find, make, percent, put, say } from "./dom.js";
import { hint } from "./hints.js";
import { chosen, state } from "./state.js";
import { label, nameOf, portray, view } from "./viewer.js";

// Facts about the gallery and its public map, and the local copy for free search.

const withHint = (words, term) => [`${words} `, hint(term)];

function mapCard(gallery, map) {
  const covers = map.mechanism === "covers";
  return make("section", { class: "card" }, make("h2", {}, ...withHint("Public map", "map")), facts([
    ["Items", map.items.toLocaleString("en")],
    [withHint("Nearest by", "metric"), `the ${gallery.metric}`],
    [withHint("Recall of codes", "codes"), map.code_recall === null ? null : `${Math.floor(1000 * map.code_recall + 1e-9) / 10}% of the 10 nearest`],
    [withHint("Share of the gallery returned", "candidates"), percent(map.candidates)],
    ["Messages by", covers ? null : `${map.mechanism}, at epsilon ${map.epsilon}`],
    [withHint("Sets", "sets"), covers ? `${map.n_sets.toLocaleString("en")}, of ${count(map.set_size, "item")} each` : null],
    ["Items in a set", !covers ? null : map.reach < 1 ? `about ${Math.floor(100 * map.reach)}%; the others are never returned` : "all"],
    ["Optimized for", covers ? `epsilon ${map.epsilon}` : null],
  ]), map.refused ? make("p", { class: "open" }, map.refused) : null);
}

// Only this button downloads a copy, because the server sees when.
function copyCard(gallery) {
  if (gallery.is_local || !gallery.offers.includes("codes")) return null;
  const note = make("p", { class: "note", "aria-live": "polite" }, gallery.copy ? `The local copy has ${count(gallery.copy, "item")}.` : "There is no local copy yet.");
  const button = make("button", { type: "button", id: "sync", onclick: async () => {
    button.disabled = true;
    note.textContent = "Downloading…";
    try {
      const copy = await post("/api/sync", { gallery: gallery.name }, "");
      gallery.copy = copy.items;
      note.textContent = `The local copy has ${count(copy.items, "item")}; downloaded ${(copy.fetched / 1e6).toFixed(2)} MB.`;
    } catch (failure) {
      note.textContent = failure.message;
    }
    button.disabled = false;
  } }, gallery.copy ? "Download changes" : "Download a copy");
  return make("section", { class: "card" }, make("h2", {}, ...withHint("Free local search", "home")), make("p", {}, "This gallery shares all its codes. With a local copy, searches send nothing and are free. The server sees when you download: use a schedule of your own, never because of a query."), button, note);
}

function itemsCard(items) {
  if (!items.length) return null;
  const tiles = items.map((item, at) => {
    const picture = portray(item);
    return make("li", {}, make("button", { type: "button", class: picture ? "tile" : "chip", "aria-label": `Open ${nameOf(item)}`, onclick: () => view(items, at) }, picture ?? nameOf(item)), picture ? label(item) : null);
  });
  return make("section", { class: "card wide" }, make("h2", {}, "Some items"), make("ul", { class: items.some((item) => item.image) ? "matches small" : "examples" }, ...tiles));
}

function describe(gallery) {
  const [kind, words] = gallery.is_local ? ["On this machine", "Your own index needs no protection: searches here are exact and free."]
    : gallery.kind === "protected" ? ["Protected", "It has no map, and shares only its model."] : ["On a server", "Everybody downloads the same map before a query is read."];
  return make("section", { class: "card" }, make("h2", {}, gallery.name), facts([["Kind", kind], ["Features", gallery.extractor || `vectors of ${gallery.dimension} numbers`], ["Offers", gallery.is_local || !gallery.offers.length ? null : gallery.offers.join(", ")]]), make("p", { class: "note" }, words), gallery.promise ? make("p", { class: "note" }, "Its claim about its records: ", make("q", {}, gallery.promise)) : null);
}

export async function show() {
  const body = find("gallery-body"), error = find("gallery-error"), gallery = chosen();
  say(error, gallery ? "" : "No gallery is selected. See the tab Search.");
  if (gallery === null) return;
  body.setAttribute("aria-busy", "true");
  const cards = [make("div", { class: "stack" }, describe(gallery), copyCard(gallery))];
  try {
    if (gallery.published && gallery.kind !== "protected") cards.push(mapCard(gallery, await get("/api/map", { gallery: gallery.name, candidates: state.candidates })));
    if (gallery.is_local) cards.push(itemsCard((await get("/api/examples")).items));
  } catch (failure) {
    say(error, failure.message);
  }
  put(body, make("div", { class: "cards" }, ...cards.filter(Boolean)));
  body.setAttribute("aria-busy", "false");
}
