import { count, make, percent, picture, put } from "./dom.js";

// The two panes: all that the other side knows, and what was chosen here.

const chance = (share) => (share > 0.995 ? "above 99%" : percent(share));
const likely = (share) => (share < 0.001 ? "below 0.1%" : share > 0.999 ? "above 99.9%" : `${(100 * share).toFixed(1)}%`);

function showFree(place, { way, saw }) {
  if (way === "home") {
    put(place, make("p", { class: "big" }, "Nothing"), make("p", {}, `All ${count(saw.total, "item")} lay on this machine already, and were searched here. Nothing was sent.`));
    return;
  }
  const size = saw.messages.reduce((sum, one) => sum + one.bytes, 0);
  put(
    place,
    make("p", { class: "big" }, "Noise"),
    make("p", {}, `${count(saw.messages.length, "sealed question")}, ${count(size, "byte")} in all. They are as long for every image, and nobody can tell them from random numbers who cannot solve a hard lattice problem:`),
    ...saw.messages.map((one) => make("code", { class: "hex" }, one.hex)),
  );
}

export function showSaw(place, told) {
  if (told.kind === "free") return showFree(place, told);
  if (told.kind === "classified") {
    put(
      place,
      make("p", { class: "big" }, "Nothing of your image"),
      make("p", {}, "The gallery’s model was fetched before your image was looked at. The server gives the same to everybody, and is asked at most once an hour whether there is a newer one. It is not told that, or how often, an image is classified."),
    );
    return;
  }
  const { saw } = told;
  const [message] = saw.messages;
  const parts = [
    make("p", { class: "big" }, `Set ${saw.set + 1} of ${saw.n_sets}`),
    make("p", {}, `One message of ${count(message.bytes, "byte")}. It names that set, and says nothing else about your image:`),
    make("code", { class: "hex" }, message.hex),
    make("p", { class: "note" }, `A message names the set that suits its image best with probability ${chance(told.right)}, and otherwise one of the others by chance. The server may guess; how far that carries is the guarantee below.`),
  ];
  const shown = saw.candidates.length < saw.total ? `The first ${saw.candidates.length} of ${count(saw.total, "image")}` : `All ${count(saw.total, "image")}`;
  put(
    place,
    ...parts,
    make("h3", {}, "What it sent back"),
    make("p", { class: "note" }, `${shown} of that set, in the order of their ids. Everyone who names the set gets the same.`),
    make("ul", { class: "thumbs", tabindex: "0", "aria-label": "Candidates" }, ...saw.candidates.map((one) => make("li", { title: one.name || null }, picture(one.image, one.name || `candidate ${one.id}`)))),
  );
}

function match(one, rank) {
  const like = make("span", { class: "like" }, `${one.similarity.toFixed(3)} similar`);
  return make("li", { "data-id": one.id }, picture(one.image, one.name || `match ${rank + 1}`), make("span", { class: "name" }, one.name || `item ${one.id}`), like);
}

export function showGot(place, told) {
  if (told.kind === "classified") {
    const rows = told.probabilities.map(([label, share]) => make("tr", {}, make("td", {}, label), make("td", {}, make("meter", { min: 0, max: 1, value: share, "aria-hidden": "true" })), make("td", { class: "n" }, likely(share))));
    const more = told.classes - told.probabilities.length;
    put(
      place,
      make("p", { class: "big" }, told.label),
      told.caution ? make("p", { class: "open" }, told.caution) : null,
      make("p", {}, "By the gallery’s model, on this machine. The gallery is protected: the model has noise, and no record is shown."),
      make("table", { class: "classes" }, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "class"), make("th", { scope: "col", colspan: 2, class: "n" }, "probability"))), make("tbody", {}, ...rows)),
      more ? make("p", { class: "note" }, `Less probable classes that are not shown: ${more}.`) : null,
      make("p", { class: "note" }, "The server says about its records, and nobody here can check it: ", make("q", {}, told.gallery_guarantee)),
    );
    return;
  }
  if (told.kind === "free") {
    put(place, make("p", {}, `The ${told.got.length} nearest, chosen on this machine.`), make("ol", { class: "matches" }, ...told.got.map(match)));
    return;
  }
  put(
    place,
    make("p", { class: told.missed ? "worth open" : "worth" }, told.worth),
    make("p", {}, `The ${told.got.length} nearest of the ${count(told.saw.total, "candidate")}, chosen on this machine by your image itself. Nothing was sent after the choice.`),
    make("ol", { class: "matches" }, ...told.got.map(match)),
  );
}

export function showPaid(place, told) {
  const facts = told.kind !== "nearest" ? [["Cost", "nothing"], ["Left", `${told.balance.left_words} of ${told.balance.epsilon}`]] : [
    ["Cost", told.repeated ? "nothing: it was paid for before" : `epsilon ${told.cost}`],
    ["Odds change at most", `× ${told.odds} by this message`],
    ...(told.balance.odds === null ? [] : [["By all paid so far", `× ${told.balance.odds}, were it all about one image`]]),
    ["Left", `${told.balance.left_words} of ${told.balance.epsilon}`],
  ];
  put(place, ...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}
