import { count, make, percent, picture, put } from "./dom.js";

// The two panes: the server's view, and the matches.

const chance = (share) => (share > 0.995 ? "above 99%" : percent(share));
const likely = (share) => (share < 0.001 ? "below 0.1%" : share > 0.999 ? "above 99.9%" : `${(100 * share).toFixed(1)}%`);

function showFree(target, { way, saw }) {
  if (way !== "sealed") {
    const searched = way === "index" ? "The index" : "The local copy";
    put(target, make("p", { class: "big" }, "Nothing"), make("p", {}, `${searched} of ${count(saw.total, "item")} was searched on this machine. Nothing was sent.`));
    return;
  }
  const size = saw.messages.reduce((sum, one) => sum + one.bytes, 0);
  put(
    target,
    make("p", { class: "big" }, "Noise"),
    make("p", {}, `${count(saw.messages.length, "sealed message")}, ${count(size, "byte")} in total. Their size is the same for every image, and telling them from random numbers means solving a hard lattice problem:`),
    ...saw.messages.map((one) => make("code", { class: "hex" }, one.hex)),
  );
}

export function showSaw(target, data) {
  if (data.kind === "free") return showFree(target, data);
  if (data.kind === "classified") {
    put(
      target,
      make("p", { class: "big" }, "Nothing about your image"),
      make("p", {}, "The gallery’s model was downloaded before your image was read. Every client gets the same model, and checks for a newer one at most once an hour. The server does not learn whether or how often you classify an image."),
    );
    return;
  }
  const { saw } = data;
  const [message] = saw.messages;
  const parts = [
    make("p", { class: "big" }, `Set ${saw.set + 1} of ${saw.n_sets}`),
    make("p", {}, `One message of ${count(message.bytes, "byte")}. It names that set and reveals nothing else about your image:`),
    make("code", { class: "hex" }, message.hex),
    make("p", { class: "note" }, `A message names the best set for its image with probability ${chance(data.right)}, and otherwise another set at random. The server may guess; the guarantee below limits how sure it can be.`),
  ];
  const shown = saw.candidates.length < saw.total ? `The first ${saw.candidates.length} of ${count(saw.total, "image")}` : `All ${count(saw.total, "image")}`;
  put(
    target,
    ...parts,
    make("h3", {}, "What it returned"),
    make("p", { class: "note" }, `${shown} of that set, ordered by id. Every client that names the set gets the same.`),
    make("ul", { class: "thumbs", tabindex: "0", "aria-label": "Candidates" }, ...saw.candidates.map((one) => make("li", { title: one.name || null }, picture(one.image, one.name || `candidate ${one.id}`)))),
  );
}

function match(one, rank) {
  const like = make("span", { class: "like" }, one.distance === null ? `similarity ${one.similarity.toFixed(2)}` : `distance ${one.distance.toFixed(2)}`);
  return make("li", { "data-id": one.id }, picture(one.image, one.name || `match ${rank + 1}`), make("span", { class: "name" }, one.name || `item ${one.id}`), like);
}

export function showGot(target, data) {
  if (data.kind === "classified") {
    const rows = data.probabilities.map(([label, share]) => make("tr", {}, make("td", {}, label), make("td", {}, make("meter", { min: 0, max: 1, value: share, "aria-hidden": "true" })), make("td", { class: "n" }, likely(share))));
    const more = data.classes - data.probabilities.length;
    put(
      target,
      make("p", { class: "big" }, data.label),
      data.caution ? make("p", { class: "open" }, data.caution) : null,
      make("p", {}, "Classified on this machine by the gallery’s model. The gallery is protected: the model has noise, and no record is shown."),
      make("table", { class: "classes" }, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "class"), make("th", { scope: "col", colspan: 2, class: "n" }, "probability"))), make("tbody", {}, ...rows)),
      more ? make("p", { class: "note" }, `${count(more, "less probable class").replace("classs", "classes")} not shown.`) : null,
      make("p", { class: "note" }, "The server’s claim about its records, which cannot be checked here: ", make("q", {}, data.gallery_guarantee)),
    );
    return;
  }
  if (data.kind === "free") {
    put(target, make("p", {}, `The ${data.got.length} nearest, ranked on this machine.`), make("ol", { class: "matches" }, ...data.got.map(match)));
    return;
  }
  put(
    target,
    make("p", { class: data.missed ? "worth open" : "worth" }, data.worth),
    make("p", {}, `The ${data.got.length} nearest of the ${count(data.saw.total, "candidate")}, ranked on this machine. Nothing was sent afterwards.`),
    make("ol", { class: "matches" }, ...data.got.map(match)),
  );
}

export function showPaid(target, data) {
  const facts = data.kind !== "nearest" ? [["Cost", "free"], ["Left", `${data.balance.left_words} of ${data.balance.epsilon}`]] : [
    ["Cost", data.repeated ? "free: it was already paid for" : `epsilon ${data.cost}`],
    ["Odds change at most", `× ${data.odds} (this message)`],
    ...(data.balance.odds === null ? [] : [["Total so far", `× ${data.balance.odds} (if every query was about the same image)`]]),
    ["Left", `${data.balance.left_words} of ${data.balance.epsilon}`],
  ];
  put(target, ...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}
