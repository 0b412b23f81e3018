// Where one is on the page, as the part of its address after the #, such as
// #problem=p3&sample=4, or #problems=accuracy<0.2 for a filter of the table of problems.

const readAddress = () => {
  const state = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  if (state.sample !== undefined) state.sample = Number(state.sample);
  return state;
};

const addressOf = (state) => {
  const entries = Object.entries(state).filter(([, value]) => value !== undefined && value !== null);
  return `#${new URLSearchParams(entries)}`;
};

// Notes where one is, so that the address can be copied. It adds nothing to the history. Browsers
// take only so many notes in a while, so the last of several is noted.
let noting = 0;
const noteAddress = (state) => {
  clearTimeout(noting);
  noting = setTimeout(() => {
    const address = addressOf(state);
    if (address !== location.hash) history.replaceState(null, "", address);
  }, 150);
};

// Forgets the last place that is not noted yet.
const stopNoting = () => clearTimeout(noting);
window.addEventListener("hashchange", stopNoting);
