import { get, post } from "./api.js";
import { count, find, make, percent, put, say } from "./dom.js";
import { chosen, state } from "./state.js";

// Facts about the public map, and the local copy for free search.

function mapCard(map, metric) {
  const facts = [
    ["Nearest by", `the ${metric}`],
    ["Images", map.items.toLocaleString("en")],
    ["Share of the gallery returned", percent(map.candidates)],
    ["Sets", `${map.n_sets.toLocaleString("en")}, of ${count(map.set_size, "image")} each`],
    ["Images in a set", map.reach < 1 ? `about ${Math.floor(100 * map.reach)}%; the others are never returned` : "all"],
    ["Optimized for", `epsilon ${map.learned_for}`],
  ];
  return make("section", { class: "card" }, make("h2", {}, "Public map"), make("dl", { class: "facts" }, ...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])));
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
  } }, "Download changes");
  return make("section", { class: "card" }, make("h2", {}, "Free local search"), make("p", {}, "This gallery shares all its codes. With a local copy, queries at epsilon 0 send nothing and are free. The server sees when you download: use a schedule of your own, never because of an image."), button, note);
}

export async function show() {
  const body = find("gallery-body"), error = find("gallery-error");
  const gallery = chosen();
  say(error, gallery ? "" : "No gallery is selected. See the tab Search.");
  if (gallery === null) return;
  body.setAttribute("aria-busy", "true");
  try {
    if (gallery.kind === "protected") put(body, make("p", { class: "note" }, "This gallery is protected: it has no map, and shares only its model."));
    else put(body, make("div", { class: "stack" }, mapCard(await get("/api/map", { gallery: gallery.name, candidates: state.candidates }), gallery.metric), copyCard(gallery)));
  } catch (failure) {
    say(error, failure.message);
    put(body);
  }
  body.setAttribute("aria-busy", "false");
}
