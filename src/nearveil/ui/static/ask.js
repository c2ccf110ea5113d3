import { get, post } from "./api.js";
import { explainStatus, showGot, showPaid, showSaw } from "./answer.js";
import { curve } from "./curve.js";
import { count, facts, find, make, percent, put, say } from "./dom.js";
import { gauge } from "./gauge.js";
import { clearQuery, showExamples, showQuery } from "./query.js";
import { chosen, state } from "./state.js";
import { listWays, showWays } from "./ways.js";

const STOPS = [0.25, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 10, 12];
const LEAST = 1e-6, MOST = 40;
const FIRST = 4; // the epsilon that the page begins with
const LARGEST = 64 * 2 ** 20;
const POLL = 600; // milliseconds
const OUT_OF_RANGE = "Epsilon must be a number from 0.000001 to 40.";

// `query` is a file or an item; `way` is home, sealed or message; `asked` is the last answer, to the query `answering`.
let query = null, way = "home", map = null, asked = null, answering = null, busy = false, previewed = 0, looked = 0, poll = 0;

const isProtected = () => chosen()?.kind === "protected";
const isMessage = () => !isProtected() && way === "message";
const isFixed = () => map !== null && map.mechanism !== "covers"; // the epsilon of other mechanisms is the gallery's
const epsilon = () => (isFixed() ? map.epsilon : Number(find("epsilon-number").value));
const valid = () => isFixed() || (find("epsilon-number").value !== "" && epsilon() >= LEAST && epsilon() <= MOST);
const nearestStop = (value) => STOPS.reduce((best, stop, at) => (Math.abs(stop - value) < Math.abs(STOPS[best] - value) ? at : best), 0);

function describeGallery() {
  const gallery = chosen();
  if (gallery?.is_local) return ["Search your gallery", "This gallery is on your machine. It needs no protection: a search is exact and free, and nothing is sent."];
  if (isProtected()) return ["Classify without revealing your image", "Your image stays on this machine. The gallery’s model is downloaded, and nothing about your image is sent."];
  const what = gallery && !gallery.takes_images ? "query" : "image";
  return [`Search without revealing your ${what}`, `Your ${what} stays on this machine. Choose how much the server may learn about it.`];
}

// Show what belongs to the gallery and the selected way.
function showOptions() {
  const gallery = chosen(), [title, lead] = describeGallery();
  find("ask-title").textContent = title;
  find("ask-lead").textContent = lead;
  find("ways-field").hidden = isProtected() || gallery === null;
  find("model").hidden = !isProtected();
  if (isProtected()) put(find("model"), facts([["Model", "downloaded, and used on this machine"], ["Price", "free"], ["The server sees", "nothing about your image"], ["Its claim about its records", gallery.promise]]));
  find("message-options").hidden = !isMessage();
  find("epsilon-slider").hidden = isFixed();
  find("epsilon-number").disabled = isFixed();
  if (isFixed()) find("epsilon-number").value = map.epsilon;
  find("curve-card").hidden = !isMessage() || isFixed();
  find("message-facts").hidden = !isMessage();
  find("ask-button").textContent = isProtected() ? "Classify" : "Search";
  if (gallery && !isProtected()) {
    const ways = listWays(gallery, map, valid() ? epsilon() : NaN);
    showWays(find("ways"), ways, way, choose);
    find("ask-button").disabled = busy || ways.every((one) => one.off);
  }
  showCandidates();
}

// The first way that works; a free one, if there is one.
function chooseFirst() {
  const ways = chosen() && !isProtected() ? listWays(chosen(), map, epsilon()) : [];
  if (ways.find((one) => one.id === way)?.off !== false) way = ways.find((one) => !one.off)?.id ?? "home";
}

function choose(id) {
  way = id;
  changed();
}

function changed() {
  showOptions();
  preview();
  if (isMessage() && map?.curve && valid()) put(find("curve"), curve(map, epsilon(), asked, chosen().metric));
}

function showPromise(words) {
  if (asked === null) find("promise").textContent = words;
}

async function preview() {
  const turn = ++previewed, cost = find("cost-note"), note = find("epsilon-note");
  if (!isMessage()) {
    cost.textContent = "Free.";
    return showPromise("Nothing about your query is revealed.");
  }
  if (!valid()) {
    note.textContent = OUT_OF_RANGE;
    cost.textContent = "";
    return;
  }
  try {
    const data = await get("/api/preview", { epsilon: epsilon(), gallery: state.gallery, candidates: state.candidates }, 20);
    if (turn !== previewed) return;
    find("epsilon").setAttribute("aria-valuetext", `epsilon ${epsilon()}. ${data.promise}`);
    note.textContent = isFixed() ? `The gallery fixes this price. ${data.promise}` : data.promise;
    showPromise(data.promise);
    cost.textContent = data.allowed
      ? `This will cost ${data.cost} of the ${data.before} left.`
      : data.cost === "infinity" ? "This account has delta 0, and the message needs a delta: use another account." : `This would cost ${data.cost}, but only ${data.before} is left.`;
  } catch (failure) {
    if (turn === previewed) cost.textContent = failure.message;
  }
}

// The slider is there if the gallery has several maps.
function showCandidates() {
  const slider = find("candidates"), fractions = chosen()?.candidates ?? [];
  slider.max = Math.max(fractions.length - 1, 0);
  slider.value = Math.max(fractions.indexOf(state.candidates), 0);
  slider.hidden = fractions.length < 2;
  find("candidates-value").textContent = state.candidates === null ? "" : percent(state.candidates);
  slider.setAttribute("aria-valuetext", state.candidates === null ? "" : `${percent(state.candidates)} of the gallery`);
  if (map === null) return;
  const returned = `${map.set_size.toLocaleString("en")} of ${count(map.items, "item")} are returned`;
  const reach = map.reach < 1 ? `About ${Math.floor(100 * map.reach)}% of the items are in a set; the others are never returned.` : "Every item is in a set.";
  find("candidates-note").textContent = isFixed() ? `${returned}.` : `${returned}; the message names one of ${count(map.n_sets, "set")}. ${reach}`;
}

async function loadMap() {
  const gallery = chosen(), turn = ++looked, error = find("ask-error"); // of two requests, the later one counts
  map = null;
  showQuery(gallery, { take, takeId });
  chooseFirst();
  say(error, gallery && !gallery.published && !gallery.is_local ? "The operator has not published this gallery yet." : "");
  if (gallery?.published && !isProtected()) {
    showOptions();
    try {
      const data = await get("/api/map", { gallery: gallery.name, candidates: state.candidates }, 90);
      if (turn !== looked) return;
      map = data;
    } catch (failure) {
      if (turn !== looked) return;
      say(error, failure.message);
    }
    chooseFirst();
  }
  changed();
}

// Works without the server.
async function loadAbout() {
  const data = await get("/api/about", {}, 20);
  find("location").textContent = data.location;
  put(find("gauge"), gauge(data.balance));
  find("waiting").hidden = data.waiting.length === 0;
  put(find("waiting-list"), ...data.waiting.map(waits));
  find("warming").hidden = data.preparing === null;
  if (data.preparing === null) return;
  find("warming-bar").max = data.preparing.total;
  find("warming-bar").value = data.preparing.done;
  const words = `${data.preparing.words}, so that the first search is fast (${data.preparing.done + 1} of ${data.preparing.total}).`;
  if (find("warming-words").textContent !== words) find("warming-words").textContent = words;
  clearTimeout(poll);
  poll = setTimeout(() => busy || loadAbout().catch(() => {}), POLL);
}

// Only this button retries a query: the same image chosen again is a new query.
function waits(entry) {
  const time = new Date(1000 * entry.sent_at).toLocaleTimeString("en", { hour: "2-digit", minute: "2-digit", hour12: false });
  const again = () => busy || answered("/api/again", { key: entry.key }, "", { which: `Your query of ${time}: ` });
  return make("li", {}, `Sent at ${time}, epsilon ${entry.epsilon}, gallery ${entry.gallery}. `, make("button", { type: "button", onclick: again }, "Repeat for free"));
}

export async function loadGalleries() {
  const error = find("ask-error");
  try {
    await loadAbout();
    const data = await get("/api/galleries", {}, 90);
    state.galleries = data.galleries;
    const select = find("gallery-choice");
    put(select, ...data.galleries.map((one) => make("option", { value: one.name }, one.kind === "protected" ? `${one.name} (protected: classifies)` : one.name)));
    find("gallery-field").hidden = data.galleries.length < 2;
    if (!chosen()) state.gallery = data.galleries[0].name;
    select.value = state.gallery;
    if (!chosen().candidates.includes(state.candidates)) state.candidates = chosen().newest;
    await loadMap();
    if (chosen().is_local) showExamples((await get("/api/examples", {}, 30)).items, search);
  } catch (failure) {
    say(error, `${failure.message} `);
    error.append(make("button", { type: "button", class: "link", onclick: loadGalleries }, "Try again"));
    changed();
  }
}

function forget() {
  asked = null;
  find("answer").hidden = true;
  put(find("paid"));
  say(find("ask-error"), "");
}

function take(file) {
  query = { file, name: file.name };
  forget();
  find("ask-status").textContent = `${file.name} is ready. Nothing has been sent.`;
  changed();
}

function takeId(text) {
  query = text ? { id: text, name: text } : null;
}

// Search from an item of the gallery: at once if that is free and stays here, else when the button is pressed.
function search(item) {
  query = { id: item.id, name: item.name || `item ${item.id}` };
  showQuery(chosen(), { take, takeId }, item);
  forget();
  find("ask-status").textContent = `Items like ${query.name}.`;
  changed();
  if (way === "home") submit();
  find("ask-form").scrollIntoView({ block: "start" });
}

function show(data, which) {
  asked = data;
  showSaw(find("saw"), data);
  showGot(find("got"), data, chosen()?.is_local ? search : null);
  showPaid(find("paid"), data);
  find("promise").textContent = data.promise;
  put(find("gauge"), gauge(data.balance));
  find("answer").hidden = false;
  find("ask-status").textContent = which + explainStatus(data);
  find("ask-status").scrollIntoView({ block: find("got").getBoundingClientRect().top > 0.6 * innerHeight ? "start" : "nearest" });
}

// Send a query, and show its answer or its error.
async function answered(path, data, body, { which = "", type } = {}) {
  const error = find("ask-error"), button = find("ask-button");
  busy = true;
  button.disabled = true;
  say(error, "");
  find("ask-status").textContent = "Searching…";
  try {
    show(await post(path, data, body, { type }), which);
    answering = query;
  } catch (failure) {
    if (answering !== query) find("answer").hidden = true; // it belongs to another query
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

async function submit(event) {
  event?.preventDefault();
  if (busy) return;
  const error = find("ask-error"), takesImages = chosen()?.takes_images ?? true;
  if (chosen() === null) return loadGalleries();
  if (query === null) return say(error, takesImages ? "Choose an image first: drop one, or click the field to select a file." : "Name an item first, or choose a file with a vector.");
  if (isMessage() && !valid()) return say(error, OUT_OF_RANGE);
  if (query.file?.size > LARGEST) return say(error, "This image is too large: the limits are 64 megapixels and 64 MiB. Save a smaller copy. No message was sent, and nothing was paid.");
  if (isProtected()) return answered("/api/classify", { gallery: state.gallery }, query.file);
  const price = isMessage() ? { epsilon: epsilon(), candidates: state.candidates } : { by: way };
  const [body, type] = query.file ? [query.file] : [JSON.stringify(query.id), "application/json"];
  await answered("/api/ask", { gallery: state.gallery, ...price }, body, { type });
}

// A query stays for other galleries of its kind: images, or vectors.
function chooseGallery() {
  const before = chosen();
  state.gallery = find("gallery-choice").value;
  state.candidates = chosen().newest;
  if (before.takes_images !== chosen().takes_images || before.dimension !== chosen().dimension) {
    query = null;
    clearQuery();
  }
  forget();
  loadMap();
}

function listen() {
  const slider = find("epsilon"), number = find("epsilon-number");
  slider.addEventListener("input", () => { number.value = STOPS[slider.value]; changed(); });
  number.addEventListener("input", () => { if (valid()) slider.value = nearestStop(epsilon()); changed(); });
  find("candidates").addEventListener("input", () => { state.candidates = chosen().candidates[find("candidates").value]; find("candidates-value").textContent = percent(state.candidates); });
  find("candidates").addEventListener("change", loadMap);
  find("gallery-choice").addEventListener("change", chooseGallery);
  find("ask-form").addEventListener("submit", submit);
}

export function start() {
  find("epsilon").max = STOPS.length - 1;
  find("epsilon").value = STOPS.indexOf(FIRST);
  find("epsilon-number").value = FIRST;
  listen();
  return loadGalleries();
}

export const refresh = () => (state.galleries.length ? changed() : loadGalleries());
