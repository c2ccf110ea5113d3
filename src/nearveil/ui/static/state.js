// What the pages share: which gallery is asked, and with which map.

export const state = { galleries: [], gallery: null, candidates: null, answers: 0 };

export const chosen = () => state.galleries.find((one) => one.name === state.gallery) ?? null;
