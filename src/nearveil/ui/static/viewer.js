import { picture } from "./api.js";
import { facts, find, make, put } from "./dom.js";
import { chosen } from "./state.js";

// Pictures of items, and a large view of one of them. Originals come from this machine alone, never from a server.

const LARGE = 1600, TILE = 400; // pixels

export const nameOf = (item) => item.name || item.external_id || `item ${item.id}`;

// Return the picture of an item, or null. The thumbnail is replaced by the original of a local gallery.
export function portray(item, side = TILE) {
  if (!item.image) return null;
  const image = make("img", { src: item.image, alt: "", draggable: "false" });
  if (chosen()?.is_local) picture(item.id, side).then((url) => { image.src = url; }, () => {}); // the thumbnail remains
  return image;
}

// Allow a line break after each part of a name.
const breakable = (text) => text.split(/(?<=[_./-])/).flatMap((part) => [part, make("wbr")]);

// Return the parts of a name: a folder, if there is one, and the rest.
export function label(item) {
  const name = nameOf(item), cut = name.lastIndexOf("/") + 1;
  return make("span", { class: "name" }, cut ? make("span", { class: "folder" }, ...breakable(name.slice(0, cut))) : null, make("span", {}, ...breakable(name.slice(cut))));
}

export const metadata = (item) => (Object.keys(item.metadata).length ? facts(Object.entries(item.metadata), { class: "facts metadata" }) : null);

let shown = [], position = 0, similar = null;

function show() {
  const item = shown[position], image = portray(item, LARGE);
  if (image) image.alt = nameOf(item);
  put(
    find("viewer-body"),
    image ? make("div", { class: "stage" }, image) : null,
    make("h2", {}, ...breakable(nameOf(item))),
    item.text ? make("p", { class: "text" }, item.text) : null,
    metadata(item),
    item.score ? make("p", { class: "note" }, item.score) : null,
  );
  find("viewer-count").textContent = `${position + 1} of ${shown.length}`;
  find("viewer-similar").hidden = similar === null;
}

// Open the large view of an item among others; `search` starts a query from an item, if it is not null.
export function view(items, at, search = null) {
  [shown, position, similar] = [items, at, search];
  show();
  find("viewer").showModal();
}

function step(by) {
  position = (position + by + shown.length) % shown.length;
  show();
}

export function listen() {
  const dialog = find("viewer");
  find("viewer-previous").addEventListener("click", () => step(-1));
  find("viewer-next").addEventListener("click", () => step(1));
  find("viewer-close").addEventListener("click", () => dialog.close());
  find("viewer-similar").addEventListener("click", () => { dialog.close(); similar(shown[position]); });
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  dialog.addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft") step(-1);
    if (event.key === "ArrowRight") step(1);
  });
}
