// Requests to this page's own process. None may hang, and every failure has words.

const GONE = "The page's own process does not answer. Look into the terminal where nearveil ui was started.";
const SLOW = "There was no answer in time. Load the page anew in a minute: if the question was paid for, it waits there, and asking it again costs nothing.";

export class Trouble extends Error {
  constructor(told) {
    super(told.words);
    Object.assign(this, told);
  }
}

async function request(path, options, seconds) {
  let reply;
  const headers = { ...options.headers, "nearveil-page": sessionStorage.getItem("nearveil-page") ?? "" };
  try {
    reply = await fetch(path, { ...options, headers, credentials: "same-origin", signal: AbortSignal.timeout(seconds * 1000) });
    const told = await reply.json();
    if (reply.ok) return told;
    throw new Trouble({ status: reply.status, words: GONE, ...told });
  } catch (error) {
    if (error instanceof Trouble) throw error;
    const slow = error.name === "TimeoutError";
    throw new Trouble({ code: slow ? "slow" : "gone", words: slow ? SLOW : GONE });
  }
}

function address(path, told = {}) {
  const given = Object.entries(told).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

export const get = (path, told, seconds = 90) => request(address(path, told), {}, seconds);
export const post = (path, told, body, seconds = 180) =>
  request(address(path, told), { method: "POST", body, headers: { "content-type": "application/octet-stream" } }, seconds);
