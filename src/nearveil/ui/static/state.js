// Shared by the tabs: the selected gallery and map.

export const state = { galleries: [], gallery: null, candidates: null };

export const chosen = () => state.galleries.find((gallery) => gallery.name === state.gallery) ?? null;
