import { get, post } from "./api.js";
import { showGot, showPaid, showSaw } from "./answer.js";
import { curve } from "./curve.js";
import { count, find, make, percent, put, say } from "./dom.js";
import { gauge } from "./gauge.js";
import { chosen, state } from "./state.js";

const STOPS = [0, 0.25, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 10, 12];
const LEAST = 1e-6, MOST = 40;
const EXAMPLE = 4; // the epsilon of the curve while none is given
const LARGEST = 64 * 2 ** 20;

let file = null, map = null, asked = null, busy = false, previewed = 0, looked = 0;

const epsilon = () => Number(find("epsilon-number").value);
const nearestStop = (value) => STOPS.reduce((best, stop, target) => (Math.abs(stop - value) < Math.abs(STOPS[best] - value) ? target : best), 0);
const isProtected = () => chosen()?.kind === "protected";
const isFree = () => !find("epsilon-number").validity.badInput && epsilon() === 0; // also an empty field
const valid = () => isFree() || (Number.isFinite(epsilon()) && epsilon() >= LEAST && epsilon() <= MOST);

function showCurve() {
  if (map !== null && valid()) put(find("curve"), curve(map, epsilon() || EXAMPLE, asked, chosen().metric));
}

const LEAD = find("ask-lead").textContent;

// The model of a protected gallery runs here: there is nothing to pay and nothing to choose.
function showKind() {
  const hidden = isProtected();
  for (const name of ["epsilon-field", "candidates-field", "curve-card"]) find(name).hidden = hidden;
  find("ask-button").textContent = hidden ? "Classify" : "Search";
  find("ask-lead").textContent = hidden
    ? "Your image stays on this machine. The gallery’s model is downloaded, and nothing about your image is sent."
    : LEAD;
  if (!hidden) return;
  find("cost-note").textContent = "This is free.";
  if (asked === null) find("promise").textContent = "Nothing about your image is revealed.";
}

// Without an epsilon: a local index or copy, or a sealed query. A query never downloads a copy.
function freeWay() {
  const gallery = chosen(), offers = gallery?.offers ?? [];
  if (gallery?.is_local) return `Nothing is sent: all ${count(gallery.copy, "item")} of the index on this machine are searched.`;
  if (gallery?.copy) return `Nothing is sent: the local copy of ${count(gallery.copy, "item")} is searched.`;
  if (offers.includes("sealed")) return "The server computes on an encrypted query that it cannot read.";
  if (offers.includes("codes")) return "There is no local copy yet. Download one in the tab Gallery, at a time unrelated to any image.";
  return "This gallery offers neither codes nor sealed search; choose an epsilon above 0.";
}

async function preview() {
  const turn = ++previewed;
  if (isProtected()) return showKind();
  if (!valid()) {
    find("epsilon-note").textContent = "Epsilon must be 0, or a number from 0.000001 to 40.";
    find("cost-note").textContent = "";
    return;
  }
  try {
    const data = await get("/api/preview", { epsilon: epsilon(), n_sets: map?.n_sets ?? 2 }, 20);
    if (turn !== previewed) return;
    find("epsilon").setAttribute("aria-valuetext", `epsilon ${epsilon()}. ${data.promise}`);
    find("epsilon-note").textContent = isFree() ? `${data.promise} ${freeWay()}` : data.promise;
    find("candidates-field").hidden = isFree();
    if (isFree()) {
      find("cost-note").textContent = "This is free.";
      if (asked === null) find("promise").textContent = data.promise;
      return;
    }
    if (asked === null) find("promise").textContent = data.promise;
    find("cost-note").textContent = data.allowed
      ? `This will cost ${data.cost} of the ${data.before} left.`
      : `This would cost ${data.cost}, but only ${data.before} is left.`;
  } catch (failure) {
    if (turn === previewed) find("cost-note").textContent = failure.message;
  }
}

function changed() {
  preview();
  showCurve();
}

function showCandidates() {
  const gallery = chosen(), slider = find("candidates");
  const fractions = gallery?.candidates ?? [];
  slider.max = Math.max(fractions.length - 1, 0);
  slider.value = Math.max(fractions.indexOf(state.candidates), 0);
  slider.disabled = fractions.length < 2;
  find("candidates-value").textContent = state.candidates === null ? "" : percent(state.candidates);
  slider.setAttribute("aria-valuetext", state.candidates === null ? "" : `${percent(state.candidates)} of the gallery`);
  if (map === null) return;
  const offered = fractions.length < 2 ? "The gallery has only this map." : `The gallery has maps for ${fractions.map(percent).join(", ")}.`;
  find("candidates-note").textContent = `${map.set_size.toLocaleString("en")} of ${count(map.items, "image")} are returned; the message names one of ${count(map.n_sets, "set")}. ${map.reach < 1 ? `About ${Math.floor(100 * map.reach)}% of the images are in a set; the others are never returned.` : "Every image is in a set."} ${offered} This map was optimized for epsilon ${map.learned_for}; every epsilon keeps its guarantee.`;
}

async function loadMap() {
  const gallery = chosen();
  showKind();
  if (gallery === null || !gallery.published) {
    say(find("ask-error"), gallery ? "The operator has not published this gallery yet." : "");
    return;
  }
  if (isProtected()) {
    looked += 1;
    map = null;
    say(find("ask-error"), "");
    return;
  }
  const turn = ++looked; // of two requests in flight, the later one counts
  map = null;
  showCandidates();
  try {
    const data = await get("/api/map", { gallery: gallery.name, candidates: state.candidates }, 90);
    if (turn !== looked) return;
    map = data;
    say(find("ask-error"), "");
  } catch (failure) {
    if (turn !== looked) return;
    say(find("ask-error"), failure.message);
  }
  showCandidates();
  changed();
}

// Works without the server.
async function loadAbout() {
  const data = await get("/api/about", {}, 20);
  find("location").textContent = data.location;
  put(find("gauge"), gauge(data.balance));
  find("waiting").hidden = data.waiting.length === 0;
  put(find("waiting-list"), ...data.waiting.map(waits));
}

// Only this button retries a query: the same image chosen again is a new query.
function waits(one) {
  const time = new Date(1000 * one.sent_at).toLocaleTimeString("en", { hour: "2-digit", minute: "2-digit", hour12: false });
  const again = () => busy || answered("/api/again", { key: one.key }, "", `Your query of ${time}: `);
  return make("li", {}, `Sent at ${time}, epsilon ${one.epsilon}, gallery ${one.gallery}. `, make("button", { type: "button", onclick: again }, "Repeat for free"));
}

export async function loadGalleries() {
  try {
    await loadAbout();
    const data = await get("/api/galleries", {}, 90);
    state.galleries = data.galleries;
    const choice = find("gallery-choice");
    put(choice, ...data.galleries.map((one) => make("option", { value: one.name }, one.kind === "protected" ? `${one.name} (protected: classifies)` : one.name)));
    find("gallery-field").hidden = data.galleries.length < 2;
    if (!chosen()) state.gallery = data.galleries[0].name;
    choice.value = state.gallery;
    if (!chosen().candidates.includes(state.candidates)) state.candidates = chosen().newest;
    say(find("ask-error"), "");
    await loadMap();
  } catch (failure) {
    const again = make("button", { type: "button", class: "link", onclick: loadGalleries }, "Try again");
    say(find("ask-error"), `${failure.message} `);
    find("ask-error").append(again);
    showCandidates();
    put(find("curve"), make("p", { class: "note" }, "The curve needs the gallery’s map, which is not loaded yet."));
    preview();
  }
}

function take(chosenFile) {
  if (!chosenFile) return;
  const image = find("preview");
  URL.revokeObjectURL(image.src);
  file = chosenFile;
  asked = null;
  image.src = URL.createObjectURL(chosenFile);
  image.alt = `Your image, ${chosenFile.name}`;
  image.hidden = false;
  image.onerror = () => { image.hidden = true; };
  find("drop-label").classList.add("filled");
  put(find("drop-words"), make("span", {}, `${chosenFile.name} · choose another`));
  find("answer").hidden = true;
  put(find("paid"));
  say(find("ask-error"), "");
  find("ask-status").textContent = `${chosenFile.name} is ready. Nothing has been sent.`;
  changed();
}

function show(data, which) {
  asked = data;
  showSaw(find("saw"), data);
  showGot(find("got"), data);
  showPaid(find("paid"), data);
  find("promise").textContent = data.promise;
  put(find("gauge"), gauge(data.balance));
  find("answer").hidden = false;
  if (data.kind === "free") {
    find("ask-status").textContent = `${data.got.length} matches found, free.`;
    return;
  }
  if (data.kind === "classified") {
    find("ask-status").textContent = `Most probable class: ${data.label}. Free.`;
    return;
  }
  find("ask-status").textContent = `${which}${data.got.length} matches found. ${data.repeated ? "Already paid for." : `Cost: ${data.cost}.`} ${data.balance.left_words} of ${data.balance.epsilon} is left.`;
}

// Send a query, and show its answer or its error.
async function answered(path, data, body, which = "") {
  const error = find("ask-error"), button = find("ask-button");
  busy = true;
  button.disabled = true;
  say(error, "");
  find("ask-status").textContent = "Searching…";
  try {
    show(await post(path, data, body), which);
  } catch (failure) {
    find("ask-status").textContent = "";
    say(error, failure.message);
    if (failure.code === "listing") await loadGalleries().then(() => say(error, failure.message));
    if (failure.code === "map_changed") await loadMap().then(() => say(error, failure.message));
  } finally {
    await loadAbout().catch(() => {});
    busy = false;
    button.disabled = false;
    changed();
  }
}

async function ask(event) {
  event.preventDefault();
  if (busy) return;
  const error = find("ask-error");
  if (file === null) return say(error, "Choose an image first: drop one, or click the field to select a file.");
  if (!isProtected() && !valid()) return say(error, "Epsilon must be 0, or a number from 0.000001 to 40.");
  if (file.size > LARGEST) return say(error, "This image is too large: the limits are 64 megapixels and 64 MiB. Save a smaller copy. No message was sent, and nothing was paid.");
  if (chosen() === null) return loadGalleries();
  if (isProtected()) return answered("/api/classify", { gallery: state.gallery }, file);
  await answered("/api/ask", { gallery: state.gallery, epsilon: epsilon(), candidates: state.candidates }, file);
}

function listen() {
  const slider = find("epsilon"), number = find("epsilon-number"), drop = find("drop");
  slider.addEventListener("input", () => { number.value = STOPS[slider.value]; changed(); });
  number.addEventListener("input", () => { if (valid()) slider.value = nearestStop(epsilon()); changed(); });
  find("candidates").addEventListener("input", () => { state.candidates = chosen().candidates[find("candidates").value]; find("candidates-value").textContent = percent(state.candidates); });
  find("candidates").addEventListener("change", loadMap);
  find("gallery-choice").addEventListener("change", () => { state.gallery = find("gallery-choice").value; state.candidates = chosen().newest; asked = null; find("answer").hidden = true; put(find("paid")); loadMap(); });
  find("file").addEventListener("change", () => { take(find("file").files[0]); find("file").value = ""; });
  for (const name of ["dragenter", "dragover"]) drop.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
  for (const name of ["dragleave", "drop"]) drop.addEventListener(name, () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => { event.preventDefault(); take(event.dataTransfer.files[0]); });
  // A file dropped outside the field would replace the page.
  for (const name of ["dragover", "drop"]) window.addEventListener(name, (event) => event.preventDefault());
  window.addEventListener("paste", (event) => { if (event.clipboardData?.files.length) take(event.clipboardData.files[0]); });
  find("ask-form").addEventListener("submit", ask);
}

export function start() {
  find("epsilon-number").value = 0; // nothing is paid without a choice
  find("epsilon").value = 0;
  listen();
  return loadGalleries();
}

export const refresh = () => (state.galleries.length ? preview() : loadGalleries());
