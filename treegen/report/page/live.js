// Reloads a page of `treegen watch` when its run has progressed, and restores the scroll position.

const KEPT = "treegen-watch";

const fields = () => [...document.querySelectorAll(".controls :is(input, select)")].map((field) => ({
  field, place: `${field.closest("article")?.id ?? ""} ${field.name || field.getAttribute("aria-label") || field.type}`,
}));

const keepFresh = () => {
  const { live, every } = document.body.dataset;
  if (!live) return;
  const saved = JSON.parse(sessionStorage.getItem(KEPT) ?? "null");
  sessionStorage.removeItem(KEPT);
  for (const { field, place } of saved ? fields() : []) {
    const value = saved.fields[place];
    if (value === undefined || value === (field.type === "checkbox" ? field.checked : field.value)) continue;
    if (field.type === "checkbox") field.checked = value;
    else field.value = value;
    field.dispatchEvent(new Event(field.tagName === "INPUT" && field.type !== "checkbox" ? "input" : "change"));
  }
  if (saved) window.scrollTo(0, saved.scroll);
  const pause = make("input", "", [], { type: "checkbox", checked: saved?.paused ?? false });
  const status = make("span", "faint");
  document.querySelector(".live").append(make("label", "check", [pause, "stay as it is"]), status);
  let typed = 0;
  document.addEventListener("input", () => (typed = performance.now()));
  const look = async () => {
    try {
      const { version, ended } = await (await fetch("version")).json();
      status.textContent = ended ? " The run has ended." : "";
      const busy = performance.now() - typed < 5000 || !getSelection().isCollapsed;
      if (version !== live && !pause.checked && !busy) {
        const values = fields().map(({ field, place }) => [place, field.type === "checkbox" ? field.checked : field.value]);
        sessionStorage.setItem(KEPT, JSON.stringify({ scroll: scrollY, paused: pause.checked, fields: Object.fromEntries(values) }));
        location.reload();
        return;
      }
    } catch {
      status.textContent = " The program that serves this page has ended.";
    }
    setTimeout(look, 1000 * Number(every));
  };
  setTimeout(look, 1000 * Number(every));
};
