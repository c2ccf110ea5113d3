// Requests to the page's own process, with timeouts. Every failure has a message.

const GONE = "The page's own process does not answer. Check the terminal that runs nearveil ui.";
const SLOW = "The request timed out. Reload the page in a minute: if the query was paid for, it is listed there, and repeating it is free.";
const SECRET = "nearveil-page"; // name of the secret in the storage of this origin, and of its header
const MOST_PICTURES = 200;

export class PageError extends Error {
  constructor(data) {
    super(data.words);
    Object.assign(this, data);
  }
}

async function request(path, options, seconds, read = (reply) => reply.json()) {
  const headers = { ...options.headers, [SECRET]: localStorage.getItem(SECRET) ?? "" };
  try {
    const signal = AbortSignal.timeout(seconds * 1000);
    const reply = await fetch(path, { ...options, headers, credentials: "same-origin", signal });
    if (reply.ok) return await read(reply);
    throw new PageError({ status: reply.status, words: GONE, ...await reply.json() });
  } catch (error) {
    if (error instanceof PageError) throw error;
    const slow = error.name === "TimeoutError";
    throw new PageError({ code: slow ? "slow" : "gone", words: slow ? SLOW : GONE });
  }
}

function address(path, data = {}) {
  const pairs = Object.entries(data).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return pairs.length ? `${path}?${new URLSearchParams(pairs)}` : path;
}

export const get = (path, data, seconds = 90) => request(address(path, data), {}, seconds);
export const post = (path, data, body, { type = "application/octet-stream", seconds = 180 } = {}) =>
  request(address(path, data), { method: "POST", body, headers: { "content-type": type } }, seconds);

const pictures = new Map(); // addresses of pictures by item and side

// Return the address of the original of an item, at most `side` pixels wide and high.
export function picture(item, side) {
  const key = `${item} ${side}`;
  if (!pictures.has(key)) {
    const load = request(address("/api/picture", { item, side }), {}, 30, (reply) => reply.blob());
    pictures.set(key, load.then((blob) => URL.createObjectURL(blob)));
    if (pictures.size > MOST_PICTURES) {
      const [oldest, stale] = pictures.entries().next().value;
      pictures.delete(oldest);
      stale.then((url) => URL.revokeObjectURL(url), () => {});
    }
  }
  return pictures.get(key);
}
