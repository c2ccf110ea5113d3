import { get, post } from "./api.js";
import { count, draw, find, make, picture, put, say } from "./dom.js";
import { chosen, state } from "./state.js";

// The map as a picture. Images are those of answers that were given; hovering asks for nothing.

const SIDE = 1000, EDGE = 40;
const at = ([x, y]) => [EDGE + x * (SIDE - 2 * EDGE), EDGE + (1 - y) * (SIDE - 2 * EDGE)];

const star = (x, y, size) => Array.from({ length: 10 }, (_, place) => {
  const angle = (Math.PI * place) / 5 - Math.PI / 2, far = place % 2 ? size * 0.45 : size;
  return `${place ? "L" : "M"}${(x + far * Math.cos(angle)).toFixed(1)} ${(y + far * Math.sin(angle)).toFixed(1)}`;
}).join("") + "Z";

function peek(place, one) {
  put(place, picture(one.image, one.name || `image ${one.id}`), make("p", {}, make("strong", {}, one.name || `item ${one.id}`)), make("p", { class: "note" }, one.named ? "in the set that the last message named" : "from an earlier answer"));
}

function seenPoints(told, place) {
  const points = told.seen.map((one) => {
    const [cx, cy] = at(one.place);
    const show = () => peek(place, one);
    return draw("circle", { class: one.named ? "seen named" : "seen", cx, cy, r: 11, tabindex: "-1", role: "img", "aria-label": one.name || `image ${one.id}`, onmouseenter: show, onfocus: show });
  });
  if (points.length) points[0].setAttribute("tabindex", "0");
  points.forEach((point, number) => point.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const next = points[(number + step + points.length) % points.length];
    point.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  }));
  return points;
}

function legend(told) {
  const rows = [
    [draw("circle", { class: "proto", cx: 16, cy: 6, r: 4 }), `${count(told.points.length, "point")} of the public map. It does not tell which image is which.`],
  ];
  if (told.seen.length) rows.push([draw("circle", { class: "seen named", cx: 16, cy: 6, r: 5 }), "Images that answers have shown; those of the last one in colour. Hover, or use the arrow keys."]);
  if (told.reported) rows.push([draw("circle", { class: "reported", cx: 16, cy: 6, r: 5 }), "What was told: the middle of the set that the last message named. Filled points are in it."]);
  if (told.you) rows.push([draw("path", { class: "you", d: star(16, 6, 6) }), "Where your image truly lies. This never leaves the machine."]);
  return make("ul", { class: "legend map" }, ...rows.map(([part, words]) => make("li", {}, draw("svg", { viewBox: "0 0 32 12", "aria-hidden": "true" }, part), make("span", {}, words))));
}

function drawn(told) {
  const side = make("aside", { class: "card peek", "aria-live": "polite" }, make("p", { class: "note" }, told.seen.length ? "Hover a point, or reach it with Tab and the arrow keys, to see its image." : "No image to show yet: ask a question first. The map by itself holds none."));
  const parts = told.points.map(([x, y, within]) => {
    const [cx, cy] = at([x, y]);
    return draw("circle", { class: within ? "proto in" : "proto", cx, cy, r: 6 });
  });
  parts.push(...seenPoints(told, side));
  if (told.reported) { const [cx, cy] = at(told.reported); parts.push(draw("circle", { class: "reported", cx, cy, r: 46 })); }
  if (told.you) parts.push(draw("path", { class: "you", d: star(...at(told.you), 24) }));
  const words = told.you ? `Your image and the set that was named (${told.set + 1} of ${told.n_sets}) are marked.` : "Nothing was asked yet.";
  const picture = draw("svg", { viewBox: `0 0 ${SIDE} ${SIDE}`, role: "group", "aria-label": `The map of ${count(told.items, "image")} in two dimensions. ${words}` }, ...parts);
  return make("div", { class: "split" }, make("figure", { class: "card map" }, picture, legend(told)), side);
}

// A copy for search at home. It is fetched by this button alone: the server sees when.
function copyCard(gallery) {
  if (!gallery.offers.includes("codes")) return null;
  const said = make("p", { class: "note", "aria-live": "polite" }, gallery.copy ? `A copy of ${count(gallery.copy, "item")} is on this machine.` : "There is no copy on this machine yet.");
  const button = make("button", { type: "button", id: "sync", onclick: async () => {
    button.disabled = true;
    said.textContent = "Fetching…";
    try {
      const told = await post("/api/sync", { gallery: gallery.name }, "");
      gallery.copy = told.items;
      said.textContent = `A copy of ${count(told.items, "item")} is on this machine; ${(told.fetched / 1e6).toFixed(2)} MB were fetched.`;
    } catch (trouble) {
      said.textContent = trouble.message;
    }
    button.disabled = false;
  } }, "Fetch what is new");
  return make("section", { class: "card" }, make("h2", {}, "Search at home"), make("p", {}, "This gallery hands out all its codes. With a copy here, questions at epsilon 0 send nothing and cost nothing. The server sees when you fetch: do so on a schedule of your own, never because of an image."), button, said);
}

export async function show() {
  const body = find("gallery-body"), error = find("gallery-error");
  const gallery = chosen();
  if (gallery === null) return say(error, "There is no gallery to draw: see the page Ask.");
  if (gallery.kind === "protected") {
    say(error, "");
    body.setAttribute("aria-busy", "false");
    return put(body, make("p", { class: "note" }, "This gallery is protected: it has no map, and shows nothing of its records but its model."));
  }
  body.setAttribute("aria-busy", "true");
  try {
    const told = await get("/api/picture", { gallery: gallery.name, candidates: state.candidates }, 120);
    put(body, drawn(told), ...[copyCard(gallery)].filter(Boolean));
    say(error, "");
  } catch (trouble) {
    say(error, trouble.message);
    put(body);
  }
  body.setAttribute("aria-busy", "false");
}
