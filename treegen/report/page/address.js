// The state of the page in the fragment of its URL, such as #problem=p3&sample=4, or
// #problems=accuracy<0.2 for a filter of the table of problems.

const readAddress = () => {
  const state = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  if (state.sample !== undefined) state.sample = Number(state.sample);
  return state;
};

const addressOf = (state) => {
  const entries = Object.entries(state).filter(([, value]) => value !== undefined && value !== null);
  return `#${new URLSearchParams(entries)}`;
};

// Writes the state to the URL, so that the user can copy it, without a new entry in the history.
// Browsers limit the rate of such writes, so only the last of several quick changes is written.
let noting = 0;
const noteAddress = (state) => {
  clearTimeout(noting);
  noting = setTimeout(() => {
    const address = addressOf(state);
    if (address !== location.hash) history.replaceState(null, "", address);
  }, 150);
};

// Cancels a write that is still pending.
const stopNoting = () => clearTimeout(noting);
window.addEventListener("hashchange", stopNoting);
