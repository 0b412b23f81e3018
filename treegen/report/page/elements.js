// Building the page. Text of models and data only ever becomes textContent.

const make = (tag, className = "", content = "", more = {}) => {
  const element = Object.assign(document.createElement(tag), { className, ...more });
  element.append(...(Array.isArray(content) ? content : [content]));
  return element;
};

const count = (number) => number.toLocaleString("en-US");
const short = (number) => (number === null ? "n/a" : number.toFixed(2).replace("-", "\u2212"));
const button = (label, onclick, className = "") =>
  make("button", className, label, { type: "button", onclick });

// A text, cut where it is long; more of it comes on demand, so that a line of a megabyte does not
// stop the browser. end: show its end at first, where a prompt says what is asked.
const textBlock = (text, shown = 4000, end = false) => {
  const body = make("div", "text");
  const block = make("div", "block", body);
  const show = (length, end) => {
    body.textContent = end && text.length > length ? `\u2026${text.slice(-length)}` : text.slice(0, length);
    block.querySelector(".more")?.remove();
    if (text.length > length) {
      const next = Math.min(text.length, length + Math.min(Math.max(length, 20000), 200000));
      const what = next < text.length ? `${count(next)} of` : "all";
      block.append(button(`show ${what} ${count(text.length)} characters`, () => show(next), "more"));
    }
  };
  show(shown, end);
  if (text === "") block.classList.add("empty");
  return block;
};

// A list of which only the rows in sight exist, so that 50,000 are as quick as 50.
class LongList {
  constructor(box, { row, choose }) {
    Object.assign(this, { box, row, choose, items: [], chosen: -1 });
    this.inner = make("div", "rows");
    box.append(this.inner);
    box.tabIndex = 0;
    box.setAttribute("role", "listbox");
    box.addEventListener("scroll", () => requestAnimationFrame(() => this.draw()), { passive: true });
    box.addEventListener("keydown", (event) => this.onkey(event));
    box.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row) this.pick(Number(row.dataset.at));
    });
    new ResizeObserver(() => this.draw()).observe(box);
  }

  show(items) {
    this.items = items;
    this.chosen = -1;
    this.box.scrollTop = 0;
    this.draw();
  }

  // Draws what is in sight; also after items were added at the end.
  draw() {
    const height = parseFloat(getComputedStyle(this.box).getPropertyValue("--row")) || 40;
    this.height = height;
    this.inner.style.height = `${this.items.length * height}px`;
    this.box.style.maxHeight = `${Math.max(1, this.items.length) * height + 2}px`;
    const first = Math.max(0, Math.floor(this.box.scrollTop / height) - 5);
    const last = Math.min(this.items.length, first + Math.ceil(this.box.clientHeight / height) + 10);
    this.inner.replaceChildren();
    for (let at = first; at < last; at++) {
      const row = this.row(this.items[at]);
      row.classList.add("row");
      row.dataset.at = at;
      row.id = `${this.box.id}-${at}`;
      row.setAttribute("role", "option");
      row.setAttribute("aria-selected", String(at === this.chosen));
      row.style.top = `${at * height}px`;
      this.inner.append(row);
    }
  }

  pick(at) {
    if (at < 0 || at >= this.items.length) return;
    this.chosen = at;
    const top = at * this.height;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    const bottom = top + this.height - this.box.clientHeight;
    if (bottom > this.box.scrollTop) this.box.scrollTop = bottom;
    this.draw();
    this.box.setAttribute("aria-activedescendant", `${this.box.id}-${at}`);
    this.choose(this.items[at]);
  }

  onkey(event) {
    const page = Math.floor(this.box.clientHeight / this.height);
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    this.pick(Math.max(0, Math.min(this.items.length - 1, this.chosen + step)));
  }
}
