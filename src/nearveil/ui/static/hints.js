import { make } from "./dom.js";

// A button beside a term that explains it.

const TERMS = {
  ways: ["Ways to search", "All ways find items near your query. They differ in price, in how many of the nearest items they find, and in what the server sees. The page starts with a free way if the gallery has one."],
  price: ["Price", "A free way reveals nothing about your query. A message reveals a little: its price is its epsilon, taken from your budget before it is sent."],
  recall: ["Recall", "The share of the truly nearest items that an answer contains, on average."],
  sees: ["What the server sees", "Everything that leaves this machine for a query. The server always sees that you search, when, and from which address, unless nothing is sent."],
  home: ["Search on this machine", "The index, or the copy of its codes that you downloaded, is searched here. Nothing is sent."],
  sealed: ["Sealed query", "The server computes on an encrypted query that it cannot read. Its messages have the same length for every query. Breaking it means solving a hard lattice problem."],
  message: ["Message", "Your machine sends the number of one set of the gallery, chosen with noise. The server returns the whole set, and the ranking happens here. The noise hides which set suits your query."],
  epsilon: ["Epsilon", "The privacy loss of one message. Whoever sees it can change the odds between any two queries by at most a factor of e^epsilon: 2.8 at epsilon 1, 55 at epsilon 4. Losses of several messages add up."],
  candidates: ["Share of the gallery returned", "How many items an answer holds. More items raise the recall and the download; the guarantee stays the same."],
  guarantee: ["Guarantee", "A proven bound on what the message reveals, whatever else the server knows."],
  odds: ["Odds", "How often one explanation is as likely as another. A message can raise or lower the odds between two queries by at most this factor."],
  curve: ["Privacy and accuracy", "Recall by epsilon. No private message with answers of this size can be above the ceiling on average; the floor needs no message at all."],
  map: ["Public map", "The gallery's partition into overlapping sets, the same for every client. It is downloaded before your query is read."],
  sets: ["Set", "A group of items of the gallery. A message names one set, and the answer is all of it."],
  codes: ["Codes", "Compressed feature vectors of the items. Their recall is the share of the 10 nearest items that remains the nearest after compression."],
  metric: ["Nearest by", "How two items are compared: by the angle between their features (cosine), by the dot product, or by the Euclidean distance."],
  account: ["Account", "A privacy budget of one owner. Every message is paid for from it; it never grows again."],
  ledger: ["Ledger", "The file that records every payment. Each entry is chained to the one before, so that a change is detected."],
};
const MARGIN = 8; // pixels to the edges of the window
let number = 0;

function place(box, button) {
  const { left, top, bottom } = button.getBoundingClientRect();
  const { width, height } = box.getBoundingClientRect();
  const below = bottom + MARGIN + height < innerHeight;
  box.style.left = `${Math.max(MARGIN, Math.min(left, innerWidth - width - MARGIN))}px`;
  box.style.top = `${Math.max(MARGIN, below ? bottom + MARGIN / 2 : top - height - MARGIN / 2)}px`;
}

export function hint(term) {
  const [title, text] = TERMS[term], id = `hint-${++number}`;
  const button = make("button", { type: "button", class: "hint", popovertarget: id, "aria-label": `Help: ${title}` }, "?");
  const box = make("div", { id, popover: "auto", class: "hint-box", role: "note" }, make("strong", {}, title), make("p", {}, text));
  box.addEventListener("toggle", (event) => { if (event.newState === "open") place(box, button); });
  return make("span", { class: "hinted" }, button, box);
}

// Replace the placeholders of the page.
export function placeHints() {
  for (const target of document.querySelectorAll("[data-hint]")) target.replaceWith(hint(target.dataset.hint));
}
