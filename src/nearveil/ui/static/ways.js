import { count, make, percent, put } from "./dom.js";
import { hint } from "./hints.js";

// The ways to search a gallery: price, recall, and what the server sees.

const SEALED_WHOLE = 61_000; // items: a sealed query compares all of a gallery up to this size

const codes = (map) => (map?.code_recall ? `${Math.floor(1000 * map.code_recall + 1e-9) / 10}%` : "nearly all");

function expected(map, epsilon) {
  if (!map?.curve) return null;
  const { curve } = map, distance = (at) => Math.abs(curve.epsilon[at] - epsilon);
  return curve.expected[curve.epsilon.reduce((best, _, at) => (distance(at) < distance(best) ? at : best), 0)];
}

function homeWay(gallery, map) {
  const way = { id: "home", title: "Local copy", price: "free", recall: codes(map), sees: "nothing" };
  if (gallery.is_local) return { ...way, title: "On this machine", recall: "100%, exact", note: "Your own index needs no protection." };
  if (gallery.copy) return { ...way, note: `${count(gallery.copy, "item")}, downloaded before.` };
  const offered = gallery.offers.includes("codes");
  return { ...way, off: true, note: offered ? "Not downloaded yet: see the tab Gallery." : "This gallery offers no copy." };
}

function sealedWay(gallery, map) {
  const large = (map?.items ?? 0) > SEALED_WHOLE, offered = gallery.offers.includes("sealed");
  const note = gallery.is_local ? "A rehearsal: the first one builds the encrypted index." : "The server computes on an encrypted query.";
  return { id: "sealed", title: "Sealed query", price: "free", recall: large ? "95 to 99%" : codes(map), sees: "encrypted noise", off: !offered, note: offered ? note : "This gallery offers no sealed queries." };
}

function messageWay(gallery, map, epsilon) {
  const share = expected(map, epsilon), covers = !map || map.mechanism === "covers";
  const note = gallery.is_local ? "A rehearsal: it shows what a server would see." : covers ? "Names one set of the gallery, with noise." : `A noisy vector, by ${map.mechanism}.`;
  return {
    id: "message", title: "Message", price: Number.isFinite(epsilon) ? `epsilon ${epsilon}` : "", recall: share === null ? "not estimated" : `about ${percent(share)}`,
    sees: covers ? (map ? `1 of ${count(map.n_sets, "set")}` : "one set") : "a noisy vector", off: Boolean(map?.refused) || !gallery.candidates.length, note: map?.refused || note,
  };
}

export const listWays = (gallery, map, epsilon) => [homeWay(gallery, map), sealedWay(gallery, map), messageWay(gallery, map, epsilon)];

function row(way, selected, choose) {
  const fact = (name, value) => make("span", { class: "fact" }, make("span", { class: "key" }, `${name} `), value);
  const radio = make("input", { type: "radio", name: "way", value: way.id, disabled: way.off, onchange: () => choose(way.id) });
  radio.checked = way.id === selected;
  const title = make("span", { class: "title" }, make("strong", {}, way.title), make("small", {}, way.note));
  return make("div", { class: way.off ? "way off" : "way" }, make("label", {}, radio, title, fact("Price", way.price), fact("Recall", way.recall), fact("The server sees", way.sees)), hint(way.id));
}

// Show the switch; keep the focus if it is on the selected way.
export function showWays(target, ways, selected, choose) {
  const focused = target.contains(document.activeElement) && document.activeElement.name === "way";
  put(target, ...ways.map((way) => row(way, selected, choose)));
  if (focused) target.querySelector(`input[value=${selected}]`)?.focus();
}
